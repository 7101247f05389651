"""Statistics gathered while steps are written, in any order, are those computed alone."""

import json
import logging

import numpy as np
import pytest

from graticule.data.gather import Gatherer
from graticule.data.ingest import ingest
from graticule.data.statistics import FILE_NAME, Statistics, compute
from graticule.data.steps import Steps
from graticule.data.store import Store
from tiny import tiny_dataset, write_netcdf

TRAIN = {"train": ["2003-02-23/2003-03-02", "2003-03-04/2003-03-07"], "test": ["2003-03-08"]}


def sources(tmp_path, packed):
    """Two files, apart by a missing day; missing values that come and go; a mask."""
    dataset = tiny_dataset()[["thetao", "u10", "mask"]]
    dataset["thetao"][7, 1, 5, 6:9] = np.nan
    encoding = {}
    if packed:
        for name, scale in (("thetao", 0.001), ("u10", 0.0007)):
            encoding[name] = {"dtype": "int16", "scale_factor": scale, "add_offset": 3.5,
                              "_FillValue": np.int16(-32767)}  # fmt: skip
    return [
        write_netcdf(dataset.isel(time=slice(0, 5)), tmp_path / "a.nc", **encoding),
        write_netcdf(dataset.isel(time=slice(6, 20)), tmp_path / "b.nc", **encoding),
    ]


def assert_as_computed_alone(store):
    """The saved statistics are, bit for bit, those of `compute`, and of the training times."""
    training = store.times.within(TRAIN["train"]).nonzero()[0]
    assert (store.path / "records").exists() is False
    saved = json.loads((store.path / FILE_NAME).read_text())
    alone = compute(store, training)
    assert saved == {**alone.to_dict(), "names": list(alone.names)}
    assert (saved["first"], saved["last"]) == ("2003-02-23 00:00:00", "2003-03-07 00:00:00")
    assert saved["num_times"] == len(training) == 11
    Statistics.load(store).check_times(store, training)
    # And those are the plain ones.
    fields = np.stack([store.read(t) for t in training]).astype(np.float64)
    gaps = np.diff(store.times.seconds[training]) == 86400
    assert gaps.sum() == 8
    changes = np.diff(fields, axis=0)[gaps]
    for channel in range(len(store.channels)):
        for key, values in (("mean", np.nanmean(fields[:, channel])),
                            ("std", np.nanstd(fields[:, channel])),
                            ("tendency_std", np.nanstd(changes[:, channel]))):  # fmt: skip
            assert saved[key][channel] == pytest.approx(values, rel=1e-12), key


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [None, (2, 4)])
def test_one_pass_gathers_what_is_computed_alone(tmp_path, packed, chunk, caplog, monkeypatch):
    files = sources(tmp_path, packed)
    planes = []
    read = Steps._read

    def counted(self, index, *rest):
        planes.append(index)
        return read(self, index, *rest)

    monkeypatch.setattr(Steps, "_read", counted)
    with caplog.at_level(logging.INFO, "graticule"):
        store = ingest(files, tmp_path / "s", splits=TRAIN, inner_chunk=chunk)
    assert store.packing.dtype == (np.int16 if packed else np.float32)
    assert sorted(planes) == sorted(list(range(19)) * 3), "each source plane is read once"
    assert "statistics of the 11 training times, 2003-02-23 00:00:00 to 2003-03-07" in caplog.text
    assert "read back from the store once" in caplog.text
    assert "read again" not in caplog.text, "alone, nothing is left for a second look"
    assert_as_computed_alone(store)


@pytest.mark.parametrize("packed", [False, True])
def test_three_processes_gather_the_same_statistics(tmp_path, packed):
    store = ingest(sources(tmp_path, packed), tmp_path / "s", splits=TRAIN, workers=3)
    assert_as_computed_alone(store)


def test_parts_in_any_order_gather_the_same_statistics(tmp_path, caplog):
    files = sources(tmp_path, True)
    with caplog.at_level(logging.INFO, "graticule"):
        for part in ((4, 5), (1, 5), (5, 5), (3, 5)):
            assert ingest(files, tmp_path / "s", splits=TRAIN, part=part) is None
            assert not (tmp_path / "s" / FILE_NAME).exists()
        store = ingest(files, tmp_path / "s", splits=TRAIN, part=(2, 5))
    assert_as_computed_alone(store)
    assert "read again" not in caplog.text, "who comes second reads the neighbour back"


@pytest.mark.parametrize("stop", [1, 4, 8, 12, 19])
def test_a_stopped_ingest_gathers_the_same_statistics(tmp_path, stop):
    files = sources(tmp_path, True)

    def progress(done, total):
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(files, tmp_path / "s", splits=TRAIN, progress=progress)
    assert_as_computed_alone(ingest(files, tmp_path / "s", splits=TRAIN))


def test_what_a_kill_or_a_race_left_out_is_read_again_and_said(tmp_path, caplog, monkeypatch):
    files = sources(tmp_path, True)
    keep = Gatherer.keep_changes

    def killed(self, time, *rest):
        if time == 4:
            raise KeyboardInterrupt
        keep(self, time, *rest)

    monkeypatch.setattr(Gatherer, "keep_changes", killed)
    with pytest.raises(KeyboardInterrupt):
        ingest(files, tmp_path / "s", splits=TRAIN)
    # From here on two neighbours never see each other, as if they were written at once.
    monkeypatch.setattr(Gatherer, "keep_changes", lambda self, time, *rest: time == 13 or keep(
        self, time, *rest))  # fmt: skip
    calls = []
    with caplog.at_level(logging.INFO, "graticule"):
        store = ingest(files, tmp_path / "s", splits=TRAIN,
                       progress=lambda *done: calls.append(done))  # fmt: skip
    left = int(caplog.text.split("both steps are read again for ")[1].split()[0])
    assert left >= 1
    assert calls[-1] == (19 + left, 19 + left)
    assert_as_computed_alone(store)


def test_a_step_written_again_with_other_numbers_voids_its_changes(tmp_path):
    files = sources(tmp_path, True)

    def progress(done, total):
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(files, tmp_path / "s", splits=TRAIN, progress=progress)
    before = {p.name: p.read_text() for p in (tmp_path / "s" / "records").glob("*.json")}
    assert {"3.json", "3-4.json", "7.json"} <= before.keys()
    assert "4-5.json" not in before, "a gap"
    dataset = tiny_dataset()[["thetao", "u10", "mask"]]
    dataset["thetao"][8] += 1
    packing = {"dtype": "int16", "scale_factor": 0.001, "add_offset": 3.5,
               "_FillValue": np.int16(-32767)}  # fmt: skip
    write_netcdf(dataset.isel(time=slice(6, 20)), files[1], thetao=packing,
                 u10={**packing, "scale_factor": 0.0007})  # fmt: skip
    store = ingest(files, tmp_path / "s", splits=TRAIN)
    assert_as_computed_alone(store)


def test_a_channel_without_value_in_training_leaves_a_store_without_statistics(tmp_path, caplog):
    dataset = tiny_dataset(days=6)[["zos", "u10"]]
    dataset["zos"][0:3] = np.nan
    path = write_netcdf(dataset, tmp_path / "a.nc")
    splits = {"train": ["2003-02-20/2003-02-22"]}
    for _ in range(2):
        out = tmp_path / "s"
        if not out.exists():
            with pytest.raises(ValueError, match="zos: no value at any of the 3 times"):
                ingest([path], out, splits=splits)
        else:
            ingest([path], out, splits=splits)
    assert "has no statistics; compute them with `graticule data stats" in caplog.text
    assert "mend what is wrong" not in caplog.text
    assert not (tmp_path / "s" / FILE_NAME).exists()
    assert Store(tmp_path / "s").splits == splits
