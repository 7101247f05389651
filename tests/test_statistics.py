"""Statistics must be those of the training times, to float64, and found by name."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from graticule.data.ingest import ingest
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Packing, Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels
from tiny import tiny_dataset, write_netcdf

DAYS = np.arange(0, 8) * 86400


def store_of(tmp_path, values, name="store", seconds=DAYS, packing=None, order=None) -> Store:
    """A store of (time, channel, lat, lon) values; channels a, b, ... (or as in `order`)."""
    values = np.asarray(values, np.float32)
    names = order or ["a", "b", "c"][: values.shape[1]]
    writer = StoreWriter(
        tmp_path / name,
        channels=Channels([Channel(variable=n, units="m", role="prognostic") for n in names]),
        grid=Grid(np.arange(values.shape[2], 0, -1), np.arange(values.shape[3])),
        times=TimeAxis.from_seconds(seconds[: len(values)], "standard"),
        packing=packing,
    )
    for time, fields in enumerate(values):
        writer.write(time, fields)
    return writer.finish()


def test_statistics_are_the_plain_mean_and_std_of_wet_cells(tmp_path):
    store = ingest(
        [write_netcdf(tiny_dataset(), tmp_path / "a.nc")], tmp_path / "s", roles={"u10": "forcing"}
    )
    times = np.arange(3, 15)
    calls = []
    statistics = compute(store, times, progress=lambda *done: calls.append(done))
    assert calls == [(i, 12) for i in range(1, 13)]
    fields = np.stack([store.read(t) for t in times]).astype(np.float64)
    names = store.channels.names
    assert statistics.names == (*names, "mask")
    for channel in range(len(names)):
        values = fields[:, channel][:, store.wet[channel]]
        assert statistics.count[channel] == values.size
        assert statistics.mean[channel] == pytest.approx(values.mean(), rel=1e-13)
        assert statistics.std[channel] == pytest.approx(values.std(), rel=1e-12)
        changes = np.diff(values, axis=0)
        assert statistics.tendency_std[channel] == pytest.approx(changes.std(), rel=1e-12)
    assert (statistics.first, statistics.last) == ("2003-02-23 00:00:00", "2003-03-06 00:00:00")


def test_large_means_do_not_cancel_whatever_the_chunking(tmp_path):
    pressure = np.float32(101325) + np.arange(6 * 12) % 3
    apart = store_of(tmp_path, pressure.reshape(6, 1, 3, 4), "apart")
    cycle = np.broadcast_to(
        np.float32(101325) + np.arange(6)[:, None, None, None] % 3, (6, 1, 3, 4)
    )
    along = store_of(tmp_path, cycle, "along")
    for store in (apart, along):
        statistics = compute(store, np.arange(6))
        assert statistics.mean[0] == pytest.approx(101326, abs=1e-9)
        assert statistics.std[0] == pytest.approx(np.sqrt(2 / 3), abs=1e-9)


def test_channel_without_spread_is_exactly_zero_and_named(tmp_path, caplog):
    values = np.random.default_rng(0).normal(size=(4, 2, 3, 4))
    values[:, 1] = 5.0
    for name, packing in (
        ("float", None),
        ("int", Packing.over_range(np.array([-9.0, 5.0]), np.array([9.0, 5.0]))),
    ):
        caplog.clear()
        store = store_of(tmp_path, values, name, packing=packing)
        with caplog.at_level(logging.WARNING):
            statistics = compute(store, np.arange(4))
        assert "b is 5 everywhere" in caplog.text
        assert "a is" not in caplog.text
        assert statistics.std[1] == 0
        assert statistics.scale[1] == 1
        assert statistics.constant(["b", "a"]).tolist() == [True, False]
        mean, scale = statistics.aligned(["b"])
        normalised = (store.read(2, [1])[0] - mean[0]) / scale[0]
        assert (normalised == 0.0).all()
        assert (normalised * scale[0] + mean[0] == 5.0).all()


@pytest.mark.parametrize("constant", [0.1, 1 / 3, 1e-30, -273.15, 98765.43])
def test_no_constant_gets_a_spread_by_rounding(tmp_path, constant):
    store = store_of(tmp_path, np.full((7, 1, 5, 7), constant))
    statistics = compute(store, np.arange(7))
    assert statistics.std[0] == 0
    assert statistics.mean[0] == np.float32(constant)
    assert statistics.tendency_std[0] == 0


def test_statistics_of_training_days_do_not_see_the_others(tmp_path):
    values = np.full((8, 1, 2, 3), 100.0)
    values[:6] = np.array([-1, 1] * 3).reshape(6, 1, 1, 1)
    store = store_of(tmp_path, values)
    statistics = compute(store, np.arange(6))
    assert statistics.mean[0] == 0.0
    assert statistics.std[0] == 1.0
    statistics.save(store)
    saved = json.loads((store.path / "statistics.json").read_text())
    assert (saved["first"], saved["last"]) == ("1970-01-01 00:00:00", "1970-01-06 00:00:00")
    assert saved["num_times"] == 6
    loaded = Statistics.load(store)
    loaded.check_times(store, np.arange(6))
    for times in (np.arange(7), np.arange(1, 6), np.array([0, 1, 2, 3, 5])):
        with pytest.raises(ValueError, match=r"come from 6 times, 1970-01-01 .* data stats .*"):
            loaded.check_times(store, times)


def test_halves_merge_to_the_whole(tmp_path):
    values = np.random.default_rng(1).normal(3, 2, (8, 1, 4, 5))
    store = store_of(tmp_path, values)
    whole, first, last = (compute(store, t) for t in (np.arange(8), np.arange(3), np.arange(3, 8)))
    count = first.count + last.count
    mean = (first.count * first.mean + last.count * last.mean) / count
    square = first.count * (first.std**2 + first.mean**2) + last.count * (
        last.std**2 + last.mean**2
    )
    np.testing.assert_allclose(whole.mean, mean, rtol=1e-13)
    np.testing.assert_allclose(whole.std, np.sqrt(square / count - mean**2), rtol=1e-12)
    assert whole.count[0] == count[0] == 160


def test_holes_and_land_do_not_count(tmp_path):
    values = np.arange(4 * 6, dtype=float).reshape(4, 1, 2, 3)
    values[:, 0, 0, 0] = np.nan
    values[2] = np.nan
    store = store_of(tmp_path, values)
    statistics = compute(store, np.arange(4))
    assert statistics.count[0] == 15
    assert statistics.mean[0] == pytest.approx(np.nanmean(values))
    # The pair (0, 1) is the only one whose both days have values.
    assert statistics.tendency_std[0] == 0
    with pytest.raises(ValueError, match="a: no value at any of the 1 times"):
        compute(store, np.array([2]))


def test_tendencies_do_not_cross_gaps(tmp_path):
    values = np.zeros((4, 1, 2, 2))
    values[:] = np.array([0.0, 1.0, 50.0, 53.0]).reshape(4, 1, 1, 1)
    seconds = np.array([0, 1, 5, 6]) * 86400
    store = store_of(tmp_path, values, seconds=seconds)
    assert compute(store, np.arange(4)).tendency_std[0] == 1.0  # changes 1 and 3
    # Times 1 and 3 are not neighbours, times 2 and 3 are.
    assert compute(store, np.array([0, 2, 3])).tendency_std[0] == 0.0


def test_statistics_are_matched_by_name_or_refused_with_both_lists(tmp_path):
    values = np.random.default_rng(2).normal(size=(3, 2, 2, 2)) + np.array([35, 10])[:, None, None]
    store = store_of(tmp_path, values, "one", order=["so", "thetao"])
    statistics = compute(store, np.arange(3))
    mean, scale = statistics.aligned(["thetao", "so"])
    np.testing.assert_array_equal(mean, statistics.mean[::-1])
    np.testing.assert_array_equal(scale, statistics.std[::-1])
    with pytest.raises(ValueError, match=r"for zos: asked for thetao, zos; there are so, thetao"):
        statistics.aligned(["thetao", "zos"])
    turned = store_of(tmp_path, values[:, ::-1], "two", order=["thetao", "so"])
    again = compute(turned, np.arange(3))
    for ours, theirs in zip(again.aligned(["so", "thetao"]), statistics.aligned(["so", "thetao"]),
                            strict=True):  # fmt: skip
        np.testing.assert_array_equal(ours, theirs)


def test_saved_statistics_come_back_bit_for_bit(tmp_path):
    store = store_of(tmp_path, np.random.default_rng(3).normal(size=(3, 2, 2, 2)))
    statistics = compute(store, np.arange(3))
    statistics.save(store)
    loaded = Statistics.load(Store(store.path))
    for field in dataclasses.fields(Statistics):
        ours, theirs = getattr(statistics, field.name), getattr(loaded, field.name)
        np.testing.assert_array_equal(ours, theirs)
        assert type(ours) is type(theirs)


def test_statistics_of_another_store_and_broken_files_are_refused(tmp_path):
    store = store_of(tmp_path, np.zeros((3, 1, 2, 2)), "one")
    other = store_of(tmp_path, np.ones((3, 1, 2, 2)), "two")
    statistics = compute(store, np.arange(3))
    with pytest.raises(ValueError, match="no statistics; compute them"):
        Statistics.load(store)
    with pytest.raises(ValueError, match=f"fingerprint {store.fingerprint}"):
        statistics.save(other)
    statistics.save(store)
    (other.path / "statistics.json").write_bytes((store.path / "statistics.json").read_bytes())
    with pytest.raises(ValueError, match=f"has {other.fingerprint}"):
        Statistics.load(other)
    (store.path / "statistics.json").write_text('{"names": ["a"]}')
    with pytest.raises(ValueError, match="no statistics file"):
        Statistics.load(store)
    with pytest.raises(ValueError, match="no times"):
        compute(store, np.array([], int))


def test_statistics_of_a_store_in_bands_and_groups_are_those_of_the_whole(tmp_path):
    values = np.random.default_rng(5).normal(280, 3, (6, 3, 7, 4)).astype(np.float32)
    values[2, 1, 3] = np.nan
    found = []
    for name, chunk in (("one", None), ("cut", (2, 3))):
        writer = StoreWriter(
            tmp_path / name,
            channels=Channels([Channel(variable=n, units="K", role="prognostic") for n in "abc"]),
            grid=Grid(np.arange(7, 0, -1), np.arange(4)),
            times=TimeAxis.from_seconds(DAYS[:6], "standard"), inner_chunk=chunk,
            training=np.arange(1, 6),
        )  # fmt: skip
        for time in (5, 3, 4, 0, 1, 2):
            writer.write(time, values[time])
        store = writer.finish()
        assert Statistics.load(store).to_dict() == compute(store, np.arange(1, 6)).to_dict()
        found.append(Statistics.load(store))
    for key in ("mean", "std", "tendency_std"):
        np.testing.assert_allclose(getattr(found[0], key), getattr(found[1], key), rtol=1e-13)
    changes = np.diff(values[1:].astype(np.float64), axis=0)
    np.testing.assert_allclose(found[1].tendency_std, np.nanstd(changes, axis=(0, 2, 3)),
                               rtol=1e-12)  # fmt: skip
