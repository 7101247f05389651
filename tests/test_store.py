"""The store: what is written is read back, and what is lost, torn or half written is an error."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from graticule.data.shardfile import NEVER_WRITTEN
from graticule.data.store import LAND, LARGEST, Packing, Store, write_json
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels
from small_store import write_store

DAY = 86400
FIRST = 12104 * DAY  # 2003-02-21
NAMES = ("thetao", "so", "zos")


def channels_of(num: int) -> Channels:
    names = (NAMES + tuple(f"v{i}" for i in range(num)))[:num]
    return Channels([Channel(variable=name, units="K", role="prognostic") for name in names])


def grid_of(rows: int, columns: int = 6) -> Grid:
    lat = np.array([10.0]) if rows == 1 else np.linspace(60, -60, rows)
    return Grid(lat, np.arange(columns) * 360 / columns)


def axis_of(num: int) -> TimeAxis:
    return TimeAxis(FIRST + DAY * np.arange(num), "standard", DAY)


def values_of(times: int = 2, channels: int = 3, rows: int = 7, columns: int = 6) -> np.ndarray:
    """(time, channel, lat, lon) with land in the corner of the first channel."""
    values = np.random.default_rng(0).uniform(-8, 8, (times, channels, rows, columns))
    values[:, 0, 0, :2] = np.nan
    return values


def writer_for(
    path: Path, values: np.ndarray, *, packed: bool = False,
    inner: tuple[int, ...] | None = (2, 3), **more: object,
) -> StoreWriter:  # fmt: skip
    times, channels, rows, columns = values.shape
    packing = Packing.over_range(np.full(channels, -9.0), np.full(channels, 9.0))
    return StoreWriter(
        path, channels=channels_of(channels), grid=grid_of(rows, columns), times=axis_of(times),
        packing=packing if packed else None, inner_chunk=inner, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def written(path: Path, values: np.ndarray, **more: object) -> Store:
    writer = writer_for(path, values, **more)  # type: ignore[arg-type]
    for time, fields in enumerate(values):
        writer.write(time, fields)
    return writer.finish()


@pytest.fixture(params=[False, True], ids=["float32", "int16"])
def packed(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def store(tmp_path: Path, packed: bool) -> Store:
    return written(tmp_path / "store", values_of(), packed=packed)


# What is written is read back


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("inner", [None, (1, 5), (2, 3), (99, 99)])
def test_what_is_written_is_read_back_whatever_the_sizes(
    tmp_path: Path, packed: bool, channels: int, rows: int, inner: tuple[int, int] | None
) -> None:
    values = values_of(2, channels, rows, 5)
    store = written(tmp_path / "s", values, packed=packed, inner=inner)
    allowed = float(np.spacing(np.float32(8)))  # float32 rounds what is asked for
    if packed:
        assert store.packing.scale is not None
        allowed += store.packing.scale.max() / 2
    for time in range(2):
        back = store.read(time)
        assert back.dtype == np.float32
        assert back.shape == values[time].shape
        np.testing.assert_array_equal(np.isnan(back), np.isnan(values[time]))
        np.testing.assert_allclose(back, values[time], rtol=0, atol=allowed)


def test_any_channels_and_rows_are_the_same_numbers(store: Store) -> None:
    whole, stored = store.read(1), store.read_stored(1)
    for channels in ([0], [2], [0, 1, 2], [2, 0], [1, 1], [2, 1, 0], [0, 2], np.array([1, 2])):
        for rows in (slice(None), slice(0, 1), slice(2, 5), slice(3, 7), slice(-2, None),
                     slice(6, 99), slice(4, 4)):  # fmt: skip
            np.testing.assert_array_equal(
                store.read(1, channels, rows),  # type: ignore[arg-type]
                whole[list(channels)][:, rows],
            )
            np.testing.assert_array_equal(
                store.read_stored(1, channels, rows),  # type: ignore[arg-type]
                stored[list(channels)][:, rows],
            )


def test_no_channels_give_no_planes_of_the_rows_asked_for(store: Store) -> None:
    assert store.read_stored(0, []).shape == (0, 7, 6)
    assert store.read(0, [], slice(2, 5)).shape == (0, 3, 6)


def test_numbers_can_be_read_into_place(store: Store) -> None:
    out = np.zeros((2, 3, 6), store.packing.dtype)
    assert store.read_stored(1, [2, 0], slice(1, 4), out) is out
    np.testing.assert_array_equal(out, store.read_stored(1, [2, 0], slice(1, 4)))


@pytest.mark.parametrize("time", [-1, 2, 99])
def test_a_time_outside_the_store_is_refused_and_never_counted_from_the_end(
    store: Store, time: int
) -> None:
    with pytest.raises(IndexError, match=rf"no time {time} in .*: it has 0 to 1"):
        store.read(time)


def test_a_store_of_one_channel_one_row_and_one_time(tmp_path: Path, packed: bool) -> None:
    store = written(tmp_path / "s", np.full((1, 1, 1, 4), 2.0), packed=packed, inner=None)
    np.testing.assert_allclose(store.read(0), 2.0, atol=2e-4)
    assert store.wet.all()


def test_description_statics_and_coordinates_come_back(tmp_path: Path) -> None:
    statics = Channels([Channel(variable=name, units="m", role="static") for name in ("h", "f")])
    fields = np.random.default_rng(1).normal(size=(2, 7, 6))
    fields[0, 3, 3] = np.nan
    store = written(
        tmp_path / "s", values_of(), statics=statics, static_fields=fields,
        splits={"train": ["2003-02-21"], "test": ["2003-02-22"]}, provenance={"source": "none"},
    )  # fmt: skip
    np.testing.assert_array_equal(store.read_statics(["h", "f"]), fields.astype(np.float32))
    np.testing.assert_array_equal(store.read_statics(["f"])[0], fields[1].astype(np.float32))
    with pytest.raises(ValueError, match="no channel g; there are h, f"):
        store.read_statics(["g"])
    assert store.statics == statics
    assert store.channels == channels_of(3)
    assert store.splits == {"train": ["2003-02-21"], "test": ["2003-02-22"]}
    assert store.attributes["provenance"] == {"source": "none"}
    np.testing.assert_array_equal(store.grid.lat, grid_of(7).lat)
    np.testing.assert_array_equal(store.grid.lon, grid_of(7).lon)
    np.testing.assert_array_equal(store.times.seconds, axis_of(2).seconds)
    assert (store.times.calendar, store.times.step_seconds) == ("standard", DAY)


def test_a_stripe_of_rows_reads_its_own_bytes_only(tmp_path: Path) -> None:
    store = written(tmp_path / "s", values_of(1, 3, 12), inner=(3, 3))
    shard = store.shard_path(0)
    raw = bytearray(shard.read_bytes())
    raw[4] ^= 0xFF  # in the first inner chunk: rows 0 to 2
    shard.write_bytes(raw)
    np.testing.assert_array_equal(
        store.read(0, rows=slice(3, 12)), values_of(1, 3, 12)[0, :, 3:].astype(np.float32)
    )
    with pytest.raises(ValueError, match="cannot be read, its file is damaged"):
        store.read(0, rows=slice(2, 12))


# Mask and holes


def test_wet_is_where_there_ever_was_a_value_and_missing_counts_the_holes(
    tmp_path: Path, packed: bool
) -> None:
    values = values_of(3)
    values[1, 1, 4, 4] = values[1, 1, 4, 5] = np.nan  # two holes on the second day
    values[2, 2] = np.nan  # a whole field on the third
    store = written(tmp_path / "s", values, packed=packed)
    np.testing.assert_array_equal(store.wet, ~np.isnan(values).all(0))
    assert store.wet.dtype == bool
    assert store.missing.tolist() == [[0, 0, 0], [0, 2, 0], [0, 0, 42]]
    assert np.isnan(store.read(2, [2])).all()


def test_land_is_never_taken_for_lost(tmp_path: Path, packed: bool) -> None:
    values = values_of()
    values[:, 1, :, :] = np.nan
    values[1, 1, 6, 5] = 1.0  # else the channel holds no value at all
    values[0, 0] = np.nan  # whole chunks of land
    store = written(tmp_path / "s", values, packed=packed)
    assert np.isnan(store.read(0, [0, 1])).all()
    assert np.isfinite(store.read(1, [1])[0, 6, 5])


def test_a_channel_that_never_holds_a_value_is_refused(tmp_path: Path, packed: bool) -> None:
    values = values_of()
    values[:, 1] = np.nan
    with pytest.raises(ValueError, match="so holds no value at any time"):
        written(tmp_path / "s", values, packed=packed)


# Packing


def test_packing_reaches_both_ends_and_rounds_to_half_a_step() -> None:
    packing = Packing.over_range(np.array([-2.0, 250.0]), np.array([35.0, 320.0]))
    assert packing.scale is not None
    values = np.stack([np.linspace(-2, 35, 1000), np.linspace(250, 320, 1000)])[:, None]
    stored = packing.pack(values, channels_of(2))
    assert stored.dtype == np.int16
    assert stored.min() == -LARGEST
    assert stored.max() == LARGEST
    back = stored * packing.scale[:, None, None] + packing.offset[:, None, None]  # type: ignore
    assert (np.abs(back - values) <= packing.scale[:, None, None] * 0.5001).all()


@pytest.mark.parametrize("excess", [1.0, 2.0, 3.0, 100.0, 65534.0, 65536.0, 1e12])
@pytest.mark.parametrize("sign", [-1, 1])
def test_packing_never_wraps(excess: float, sign: int) -> None:
    packing = Packing(np.array([0.5, 0.001]), np.array([10.0, 20.0]))
    fields = np.full((2, 3, 4), 20.0)
    fields[0] = 10
    inside = 20 + sign * LARGEST * 0.001
    fields[1, 2, 3] = inside
    assert packing.pack(fields, channels_of(2))[1, 2, 3] == sign * LARGEST
    fields[1, 2, 3] = inside + sign * excess * 0.001
    message = (
        f"so = {fields[1, 2, 3]:g} at row 2, column 3 does not fit int16 packing, which reaches"
        " from -12.766 to 52.766 K; widen the packing range or store float32"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        packing.pack(fields, channels_of(2))


@pytest.mark.parametrize("constant", [0.0, 5.0, -273.15, 1e-30, 1e30, 101325.0, 1 / 3])
def test_a_constant_comes_back_exactly(tmp_path: Path, constant: float) -> None:
    values = np.full((1, 1, 3, 4), constant)
    values[0, 0, 0, 0] = np.nan
    packing = Packing.over_range(np.array([constant]), np.array([constant]))
    writer = StoreWriter(
        tmp_path / "s", channels=channels_of(1), grid=grid_of(3, 4), times=axis_of(1),
        packing=packing,
    )  # fmt: skip
    writer.write(0, values[0])
    back = writer.finish().read(0)
    np.testing.assert_array_equal(back, values[0].astype(np.float32))
    # Another value is not folded into the constant.
    with pytest.raises(ValueError, match="does not fit int16 packing"):
        packing.pack(values[0] + 1e-3 * max(1, abs(constant)), channels_of(1))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_value_is_refused_by_name(tmp_path: Path, packed: bool, value: float) -> None:
    values = values_of()
    values[0, 1, 2, 3] = value
    with pytest.raises(ValueError, match="so holds an infinite value"):
        written(tmp_path / "s", values, packed=packed)


def test_a_value_beyond_float32_is_refused_by_name(tmp_path: Path) -> None:
    values = values_of()
    values[0, 2, 2, 3] = 1e39
    with pytest.raises(ValueError, match="zos holds a value beyond float32"):
        written(tmp_path / "s", values)


def test_masked_arrays_are_refused_because_their_fill_would_be_data(tmp_path: Path) -> None:
    writer = writer_for(tmp_path / "s", values_of())
    with pytest.raises(ValueError, match=r"masked array; give fields\.filled\(numpy\.nan\)"):
        writer.write(0, np.ma.masked_greater(values_of()[0], 3))


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ([0, np.nan], [1, np.nan], "packing range of channel 1 is nan to nan"),
        ([2, 0], [1, 1], "packing range of channel 0 is 2 to 1; low must not be above high"),
        ([0, 0], [1, np.inf], "packing of channel 1 has scale inf and offset inf: both must be"),
    ],
)
def test_a_range_that_is_none_is_refused(low: list, high: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packing.over_range(np.array(low), np.array(high))


@pytest.mark.parametrize(
    ("scale", "offset"), [(np.nan, 0.0), (0.0, 0.0), (-1.0, 0.0), (1.0, np.nan)]
)
def test_packing_that_would_turn_values_into_land_is_refused(scale: float, offset: float) -> None:
    with pytest.raises(ValueError, match=r"of channel 1 .* finite and the scale positive; give"):
        Packing(np.array([1.0, scale]), np.array([0.0, offset]))


def test_packing_is_of_every_channel_with_scale_and_offset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a scale and an offset for each channel, or neither"):
        Packing(np.array([1.0]))
    with pytest.raises(ValueError, match="a scale and an offset for each channel, or neither"):
        Packing(np.array([1.0]), np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="packing has 1 scales for 3 channels"):
        StoreWriter(tmp_path / "s", channels=channels_of(3), grid=grid_of(7), times=axis_of(2),
                    packing=Packing(np.array([1.0]), np.array([0.0])))  # fmt: skip
    assert not (tmp_path / "s").exists()


def test_the_codes_are_apart_from_all_values() -> None:
    assert len({LAND, NEVER_WRITTEN, *range(-LARGEST, LARGEST + 1)}) == 2 * LARGEST + 3
    assert min(LAND, NEVER_WRITTEN) >= np.iinfo(np.int16).min


# Lost and damaged

WHERE = r"at 2003-02-22 00:00:00 .*fields/c/1/0/0/0"


def test_a_missing_shard_is_an_error_with_file_variable_and_date(store: Store) -> None:
    store.shard_path(1).unlink()
    with pytest.raises(
        ValueError, match=rf"thetao {WHERE}, from row 0, column 0\); write the store again"
    ):
        store.read(1)
    with pytest.raises(ValueError, match=rf"zos {WHERE}, from row 2, column 0\)"):
        store.read(1, [2], slice(2, 4))
    with pytest.raises(ValueError, match=rf"so {WHERE}, from row 5, column 0\)"):
        store.read(1, [2, 1], slice(-2, None))
    store.read(0)


def test_one_lost_inner_chunk_is_an_error_where_it_is_read(store: Store) -> None:
    # Write the date again, all but rows 3 to 5 of zos: a whole inner chunk is left out.
    fields = zarr.open_array(str(store.path / "fields"), mode="r+")
    whole = np.asarray(fields[1])
    store.shard_path(1).unlink()
    fields[1, :2] = whole[:2]
    fields[1, 2, :3] = whole[2, :3]
    fields[1, 2, 6:] = whole[2, 6:]
    with pytest.raises(
        ValueError, match=rf"zos {WHERE}, from row 3, column 0\); write the store again"
    ):
        store.read(1)
    np.testing.assert_array_equal(store.read_stored(1, [0, 1]), whole[:2])
    np.testing.assert_array_equal(store.read_stored(1, [2], slice(0, 3)), whole[2:, :3])
    np.testing.assert_array_equal(store.read_stored(1, [2], slice(6, 7)), whole[2:, 6:])


def test_no_flipped_byte_and_no_truncation_of_a_shard_goes_unnoticed(store: Store) -> None:
    shard = store.shard_path(1)
    good = shard.read_bytes()
    # Every 31st byte of the chunks, every 5th of the index at the end.
    index = 16 * 6 + 4
    for place in (*range(0, len(good) - index, 31), *range(len(good) - index, len(good), 5)):
        for bad in (
            good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :],
            good[:place],
            good[:place] + good[place + 1 :],
        ):
            shard.write_bytes(bad)
            with pytest.raises(ValueError, match=rf"(thetao|so|zos) {WHERE}"):
                store.read(1)
    for bad in (good + b"\0", bytes(len(good)), good[::-1]):
        shard.write_bytes(bad)
        with pytest.raises(ValueError, match=WHERE):
            store.read(1)
    shard.write_bytes(good)
    store.read(1)


def test_a_flipped_byte_names_the_variable_it_lies_in(tmp_path: Path, packed: bool) -> None:
    store = written(tmp_path / "s", values_of(), packed=packed, inner=(1, 7))
    shard = store.shard_path(1)
    good = shard.read_bytes()
    # Three inner chunks one after the other, then an index of 3 x 16 bytes and its checksum.
    start = np.frombuffer(good[-52:-4], "<u8")[::2]
    for channel, name in enumerate(NAMES):
        place = int(start[channel]) + 20
        shard.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=rf"{name} {WHERE}.*; write the store again"):
            store.read(1)
        others = [c for c in range(3) if c != channel]
        for other in others:
            store.read(1, [other])


def test_an_unreadable_shard_is_an_error_with_its_file(store: Store) -> None:
    store.shard_path(1).unlink()
    store.shard_path(1).mkdir()
    with pytest.raises(ValueError, match=WHERE):
        store.read(1)


SMALL = ["lat", "lon", "time", "wet", "missing", "static"]


def with_small_arrays(path: Path) -> Store:
    values = values_of()
    values[1, 1, 4, 4] = np.nan  # so that `missing` is not all zeros
    static = Channels([Channel(variable="h", units="m", role="static")])
    return written(path, values, statics=static, static_fields=np.ones((1, 7, 6)))


def read_everything(path: Path) -> None:
    store = Store(path)
    assert store.wet.any()
    assert store.missing.sum() == 1
    store.read_statics(["h"])
    store.read(0)


def lose(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    file.write_bytes(raw)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", SMALL)
def test_a_lost_coordinate_mask_or_static_is_an_error_and_never_zeros(
    tmp_path: Path, name: str
) -> None:
    with_small_arrays(tmp_path / "whole")
    read_everything(tmp_path / "whole")
    for number, harm in enumerate((lose, empty, flip, halve)):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", path)
        chunks = sorted(p for p in (path / name / "c").rglob("*") if p.is_file())
        assert chunks
        harm(chunks[0])
        message = rf"{path}: the array {name} is .*write the store again"
        with pytest.raises(ValueError, match=message):
            read_everything(path)


@pytest.mark.parametrize("name", [*SMALL, "fields"])
def test_a_lost_array_description_is_an_error_with_the_array(tmp_path: Path, name: str) -> None:
    path = with_small_arrays(tmp_path / "s").path
    (path / name / "zarr.json").unlink()
    with pytest.raises(ValueError, match=rf"{path}: the array {name} is lost or damaged"):
        read_everything(path)


def test_a_torn_description_is_an_error_with_its_file(store: Store) -> None:
    file = store.path / "zarr.json"
    good = file.read_bytes()
    for length in (0, 1, 10, len(good) // 2, len(good) - 2):
        file.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"zarr\.json cannot be read .*write the store again"):
            Store(store.path)


# Not a store, not complete, not overwritten


def test_what_is_no_store_is_refused_with_the_way_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        message = rf"{path} is no store .*`graticule data ingest` or `graticule data demo`"
        with pytest.raises(ValueError, match=message):
            Store(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    zarr.open_group(str(tmp_path / "s"), mode="w").attrs["format"] = "graticule store 0"
    message = "has format 'graticule store 0', not 'graticule store 1'"
    with pytest.raises(ValueError, match=message):
        Store(tmp_path / "s")


def test_a_store_without_digests_is_refused(store: Store) -> None:
    file = store.path / "zarr.json"
    description = json.loads(file.read_text())
    del description["attributes"]["digests"]
    file.write_text(json.dumps(description))
    message = r"has no digests of its coordinates and masks: .*; write it again"
    with pytest.raises(ValueError, match=message):
        Store(store.path)


def test_an_unfinished_store_is_refused_at_every_stage(tmp_path: Path) -> None:
    values = values_of()
    writer = writer_for(tmp_path / "s", values)
    for time in range(2):
        with pytest.raises(ValueError, match="incomplete: the command that wrote it did not finish;"
                                             " delete it and run that command again"):  # fmt: skip
            Store(tmp_path / "s")
        writer.write(time, values[time])
    with pytest.raises(ValueError, match="incomplete"):
        Store(tmp_path / "s")
    writer.finish()
    Store(tmp_path / "s")


def test_finishing_early_names_the_first_time_that_is_not_written(tmp_path: Path) -> None:
    writer = writer_for(tmp_path / "s", values_of(4))
    writer.write(0, values_of()[0])
    writer.write(3, values_of()[0])
    with pytest.raises(ValueError, match="2 of 4 times were not written, the first is 2003-02-22"):
        writer.finish()
    with pytest.raises(ValueError, match="incomplete"):
        Store(tmp_path / "s")


def test_going_on_with_what_was_begun_as_another_store_tells_what_differs(tmp_path: Path) -> None:
    values = values_of(2, 3, 7, 6)
    writer_for(tmp_path / "s", values).write(0, values[0])
    writer_for(tmp_path / "s", values, resume=True).write(1, values[1])
    shown = r"begun with other {} \({} then, {} now\); delete it"
    for change, told in (
        ({"inner": (3, 3)}, shown.format("inner_chunk", r"\[2, 3, 6\]", r"\[3, 3, 6\]")),
        ({"splits": {"train": ["2003-02"]}}, r'other splits \(\{\} then, \{"train": \['),
        ({"packed": True}, r"other packing \(null then, \{\"scale\": "),
    ):
        with pytest.raises(ValueError, match=told):
            writer_for(tmp_path / "s", values, resume=True, **change)  # type: ignore[arg-type]
    # What no reader takes in at a glance is named alone.
    with pytest.raises(ValueError, match="was begun with other channels, lat; delete it"):
        writer_for(tmp_path / "s", values_of(2, 4, 6, 6), resume=True)


def test_a_writer_killed_in_the_middle_leaves_a_store_that_is_refused(tmp_path: Path) -> None:
    code = f"""
        import os, signal, numpy as np
        from graticule.data.writer import StoreWriter
        from graticule.data.times import TimeAxis
        from graticule.grid import Grid
        from graticule.variables import Channel, Channels
        writer = StoreWriter(
            {str(tmp_path / "s")!r},
            channels=Channels([Channel(variable="so", units="1", role="prognostic")]),
            grid=Grid(np.linspace(60, -60, 7), np.arange(6) * 60.0),
            times=TimeAxis({FIRST} + {DAY} * np.arange(3), "standard", {DAY}),
        )
        writer.write(0, np.zeros((1, 7, 6)))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "s" / "zarr.json").exists()
    with pytest.raises(ValueError, match="incomplete"):
        Store(tmp_path / "s")
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        writer_for(tmp_path / "s", values_of())


def test_nothing_that_exists_is_overwritten(store: Store, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in store.path.rglob("*") if p.is_file()}
    (tmp_path / "file").write_text("x")
    for path in (store.path, tmp_path, tmp_path / "file"):
        message = f"{path} exists already and is not overwritten; name another"
        with pytest.raises(ValueError, match=message):
            writer_for(path, values_of())
    assert {p: p.read_bytes() for p in store.path.rglob("*") if p.is_file()} == before
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty", values_of())


# What a writer refuses


@pytest.mark.parametrize("shape", [(3, 7, 5), (2, 7, 6), (3, 6, 7), (1, 3, 7, 6), (7, 6)])
def test_fields_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    writer = writer_for(tmp_path / "s", values_of())
    with pytest.raises(ValueError, match=r"fields have shape \(.*, the store wants \(3, 7, 6\)"):
        writer.write(0, np.zeros(shape))


@pytest.mark.parametrize("time", [-1, 2])
def test_a_time_that_the_store_does_not_have_is_refused(tmp_path: Path, time: int) -> None:
    writer = writer_for(tmp_path / "s", values_of())
    with pytest.raises(ValueError, match=f"time {time}: the store has times 0 to 1"):
        writer.write(time, values_of()[0])


def test_a_time_is_written_once(tmp_path: Path) -> None:
    # The first version's mask would stay in `wet`.
    writer = writer_for(tmp_path / "s", values_of())
    writer.write(1, values_of()[1])
    with pytest.raises(ValueError, match="2003-02-22 00:00:00 is written already"):
        writer.write(1, values_of()[0])


def test_a_refused_time_can_be_mended_and_written(tmp_path: Path, packed: bool) -> None:
    values = values_of()
    writer = writer_for(tmp_path / "s", values, packed=packed)
    bad = values[0].copy()
    bad[0, 0, 0] = np.inf  # land in the mended field
    with pytest.raises(ValueError, match="infinite"):
        writer.write(0, bad)
    for time in (1, 0):  # any order
        writer.write(time, values[time])
    assert not writer.finish().wet[0, 0, 0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"splits": {"train": ["1999"]}}, "range 1999 holds no time of the store"),
        ({"splits": {"train": ["soon"]}}, "'soon' is no date"),
        ({"inner": (0, 3)}, r"inner_chunk=\(0, 3\) must be at least 1 channel and 1 row"),
        ({"inner": (2, 0)}, r"inner_chunk=\(2, 0\) must be at least 1 channel and 1 row"),
        ({"inner": (2, 3, 0)}, r"inner_chunk=\(2, 3, 0\) must .* cut too 1 column"),
        ({"inner": (2,)}, r"inner_chunk=\(2,\) must be at least"),
        ({"static_fields": np.ones((1, 7, 6))},
         r"statics \(none\) need fields of shape \(0, 7, 6\), got \(1, 7, 6\)"),
    ],
)  # fmt: skip
def test_a_description_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, more: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        writer_for(tmp_path / "s", values_of(), **more)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (None, r"statics \(h\) need fields of shape \(1, 7, 6\), got None"),
        (np.ones((7, 6)), r"statics \(h\) need fields of shape \(1, 7, 6\), got \(7, 6\)"),
        (np.full((1, 7, 6), np.inf), "h holds an infinite value"),
        (np.full((1, 7, 6), 1e39), "h holds a value beyond float32"),
    ],
)
def test_statics_that_do_not_fit_are_refused(
    tmp_path: Path, fields: np.ndarray | None, message: str
) -> None:
    statics = Channels([Channel(variable="h", units="m", role="static")])
    with pytest.raises(ValueError, match=message):
        writer_for(tmp_path / "s", values_of(), statics=statics, static_fields=fields)


@pytest.mark.parametrize(("channels", "times"), [(0, 2), (3, 0)])
def test_a_store_of_nothing_is_refused(tmp_path: Path, channels: int, times: int) -> None:
    message = f"at least one channel and one time, not {channels} and {times}"
    with pytest.raises(ValueError, match=message):
        StoreWriter(tmp_path / "s", channels=channels_of(channels), grid=grid_of(7),
                    times=axis_of(times))  # fmt: skip


# The fingerprint


def test_the_fingerprint_changes_with_any_value(tmp_path: Path) -> None:
    static = Channels([Channel(variable="h", units="m", role="static")])
    number = iter(range(99))

    def made(change: Callable[[dict], None]) -> str:
        spec = {
            "values": values_of(), "channels": channels_of(3), "grid": grid_of(7),
            "times": axis_of(2), "packing": None, "statics": static,
            "static_fields": np.ones((1, 7, 6)), "splits": {"train": ["2003"]},
            "provenance": {"a": 1},
        }  # fmt: skip
        change(spec)
        values = spec.pop("values")
        writer = StoreWriter(tmp_path / str(next(number)), **spec)
        for time, fields in enumerate(values):
            writer.write(time, fields)
        return writer.finish().fingerprint

    def bump(key: str, *place: int) -> Callable[[dict], None]:
        def change(spec: dict) -> None:
            spec[key][place] = np.nextafter(np.float32(spec[key][place]), np.float32(99))

        return change

    def put(**more: object) -> Callable[[dict], None]:
        return lambda spec: spec.update(more)

    def hole(spec: dict) -> None:
        spec["values"][1, 2, 6, 5] = np.nan

    def swap(spec: dict) -> None:
        spec["values"] = spec["values"][::-1]

    channels = channels_of(3).to_list()
    units = Channels.from_list([{**channels[0], "units": "degC"}, *channels[1:]])
    changes = [
        lambda spec: None, bump("values", 0, 0, 6, 5), bump("values", 1, 2, 0, 0), hole, swap,
        bump("static_fields", 0, 3, 3), put(channels=units),
        put(grid=Grid(grid_of(7).lat + 1e-9, grid_of(7).lon)),
        put(grid=Grid(grid_of(7).lat, grid_of(7).lon + 1e-9)),
        put(times=TimeAxis(axis_of(2).seconds + 1, "standard", DAY)),
        put(times=TimeAxis(axis_of(2).seconds, "proleptic_gregorian", DAY)),
        put(times=TimeAxis(axis_of(2).seconds, "standard", None)),
        put(packing=Packing.over_range(np.full(3, -9.0), np.full(3, 9.0))),
        put(packing=Packing.over_range(np.full(3, -9.0), np.full(3, 9.1))),
        put(splits={"train": ["2003-02"]}), put(provenance={"a": 2}),
    ]  # fmt: skip
    digests = [made(change) for change in changes]
    assert len(set(digests)) == len(changes)
    assert made(lambda spec: None) == digests[0]


def test_the_fingerprint_does_not_depend_on_the_order_of_writing(tmp_path: Path) -> None:
    values = values_of()
    writer = writer_for(tmp_path / "backward", values)
    for time in (1, 0):
        writer.write(time, values[time])
    assert writer.finish().fingerprint == written(tmp_path / "s", values).fingerprint


# JSON files beside a store


def test_a_json_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "statistics.json"
    write_json(file, {"a": [1, 2]})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": [1, 2]}
    write_json(file, {"a": 3})
    assert json.loads(file.read_text()) == {"a": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.json"]


def test_a_part_of_the_mask_is_the_masks_and_a_lost_chunk_of_it_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.zarr"
    write_store(path, land=True)
    wet = Store(path).wet
    assert not wet.all()
    rows, columns = slice(1, 4), slice(2, 5)
    store = Store(path)
    for _ in range(2):  # the second time without looking at all of it
        part = store.wet_part([2, 0], rows, columns)
        np.testing.assert_array_equal(part, wet[[2, 0], rows, columns])
    assert "wet" not in vars(store), "all of it is kept"
    np.testing.assert_array_equal(store.wet_part([0]), wet[:1])
    (path / "wet" / "c" / "1" / "0" / "0").unlink()
    with pytest.raises(ValueError, match="the array wet is not what was written"):
        Store(path).wet_part([0], rows)
