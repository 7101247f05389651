"""Planes read directly are what Zarr reads, bit for bit, and each byte is read once."""

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr

from graticule.data import shards
from graticule.data.shards import Target, layout_of
from graticule.data.store import Store
from test_store import values_of, written


@pytest.fixture(params=[False, True], ids=["float32", "int16"])
def packed(request: pytest.FixtureRequest) -> bool:
    return request.param


def by_zarr(store: Store) -> np.ndarray:
    return np.asarray(zarr.open_array(str(store.path / "fields"), mode="r")[:])


@pytest.mark.parametrize("inner", [None, (1, 5), (2, 3), (3, 4), (99, 99), (2, 3, 4), (5, 7, 1)])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_every_subset_is_zarrs_bit_for_bit(
    tmp_path: Path, packed: bool, inner: tuple[int, ...] | None, rows: int
) -> None:
    store = written(tmp_path / "s", values_of(2, 5, rows, 6), packed=packed, inner=inner)
    whole = by_zarr(store)
    rng = np.random.default_rng(rows)
    for _ in range(30):
        time, channels = int(rng.integers(2)), rng.permutation(5)[: rng.integers(1, 6)]
        (top, bottom), (west, east) = (np.sort(rng.integers(0, n + 1, 2)) for n in (rows, 6))
        got = store.read_stored(
            time, channels.tolist(), slice(top, bottom), columns=slice(west, east)
        )
        want = whole[time, channels, top:bottom, west:east]
        assert got.dtype == want.dtype
        assert got.tobytes() == np.ascontiguousarray(want).tobytes()


@pytest.mark.parametrize("inner", [None, (2, 3, 4)])
def test_one_reading_fills_many_targets_each_turned_its_way(
    tmp_path: Path, packed: bool, inner: tuple[int, ...] | None
) -> None:
    store = written(tmp_path / "s", values_of(2, 5, 7, 6), packed=packed, inner=inner)
    whole = by_zarr(store)
    wishes = [(0, (3, 1), 0), (0, (0, 1, 2, 3, 4), 2), (1, (4,), 5), (0, (1, 1), 3)]
    targets = [
        Target(channels, np.empty((len(channels), 4, 6), whole.dtype), turn)
        for _, channels, turn in wishes
    ]
    wanted = [
        (t, [x for x, (at, _, _) in zip(targets, wishes, strict=True) if at == t]) for t in (0, 1)
    ]
    before = store.shards.bytes_read
    store.read_into(wanted, range(2, 6), range(6))
    for target, (time, channels, turn) in zip(targets, wishes, strict=True):
        np.testing.assert_array_equal(
            target.out, np.roll(whole[time, list(channels), 2:6], turn, axis=-1)
        )
    once = store.shards.bytes_read - before
    # Of the second time one channel alone, and of both no first row where chunks are cut there.
    sizes = [store.shard_path(t).stat().st_size for t in (0, 1)]
    assert once <= sum(sizes)
    assert inner is None or once < sum(sizes)


def test_a_stripe_reads_its_inner_chunks_and_one_index(tmp_path: Path) -> None:
    store = written(tmp_path / "s", values_of(1, 3, 24, 40), inner=(3, 4))
    size = store.shard_path(0).stat().st_size
    index = 6 * 16 + 4
    store.read_stored(0)
    assert store.shards.bytes_read == size  # every byte of the file, once
    # Rows 5 to 10 lie in two chunks of six; the index is known by now.
    before = store.shards.bytes_read
    store.read_stored(0, rows=slice(5, 11))
    part = store.shards.bytes_read - before
    assert part <= (6 + 2 * 4) / 24 * (size - index) * 1.1
    fresh = Store(store.path)
    fresh.read_stored(0, rows=slice(5, 11))
    assert fresh.shards.bytes_read == part + index


def test_a_part_of_channels_and_longitudes_reads_no_byte_of_another(tmp_path: Path) -> None:
    """Two ranks of a tensor group and two stripes of longitudes: a quarter of a sample each."""
    store = written(tmp_path / "s", values_of(1, 6, 24, 40), inner=(3, 24, 20))
    index = 4 * 16 + 4
    parts = 0
    for first, west in ((0, 0), (0, 20), (3, 0), (3, 20)):
        alone = Store(store.path)
        alone.read_stored(0, range(first, first + 3), columns=slice(west, west + 20))
        part = alone.shards.bytes_read - index
        assert part < 0.3 * store.shard_path(0).stat().st_size
        parts += part
    assert parts + index == store.shard_path(0).stat().st_size


def test_a_lost_chunk_is_told_where_it_is_read_and_no_matter_elsewhere(tmp_path: Path) -> None:
    """A store that Zarr has begun and not ended: chunks of the first columns alone."""
    store = written(tmp_path / "s", values_of(1, 3, 7, 6), inner=(3, 7, 3))
    before = store.read_stored(0, columns=slice(0, 3))
    array = zarr.open_array(str(store.path / "fields"), mode="r+")
    array[0, :, :, 3:] = np.inf
    again = Store(store.path)
    assert again.read_stored(0, columns=slice(0, 3)).tobytes() == before.tobytes()
    for columns, lost in ((slice(2, 4), 3), (slice(5, 6), 5)):
        where = rf"thetao at .* was never written .*, from row 0, column {lost}\)"
        with pytest.raises(ValueError, match=where):
            again.read_stored(0, columns=columns)


def test_a_chunk_that_begins_beyond_any_file_is_damage(tmp_path: Path) -> None:
    store = written(tmp_path / "s", values_of(1, 3, 7, 6), inner=(3, 4))
    file = store.shard_path(0)
    raw = bytearray(file.read_bytes())
    index = np.frombuffer(raw[-36:-4], "<u8").copy()  # of two chunks, each its start and size
    index[2] = 2**63
    told = index.tobytes()
    raw[-36:] = told + google_crc32c.value(told).to_bytes(4, "little")
    file.write_bytes(raw)
    again = Store(store.path)
    again.read_stored(0, rows=slice(0, 4))
    with pytest.raises(ValueError, match=r"is damaged .*begin at byte 9223372036854775808, beyond"):
        again.read_stored(0, rows=slice(4, 7))


@pytest.mark.parametrize("room", [0, 2])
def test_indices_of_small_chunks_are_kept_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    store = written(tmp_path / "s", values_of(7, 3, 7, 6), inner=(1, 1, 1))
    index = 3 * 7 * 6 * 16 + 4
    monkeypatch.setattr(shards, "_CACHED_INDEX_BYTES", room * index)
    whole = by_zarr(store)
    for time in (0, 1, 2, 3, 4, 5, 6, 6, 0):
        assert store.read_stored(time).tobytes() == whole[time].tobytes()
        # One that was just read is kept even where there is room for none.
        kept = sum(held.nbytes for _, held in store.shards._indices.values())
        assert kept <= max(1, room) * index


def test_a_shard_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    one = written(tmp_path / "a", values_of(2, 3, 7), inner=(2, 3))
    other = written(tmp_path / "b", values_of(2, 3, 7)[::-1] * 0.5, inner=(2, 3))
    one.read_stored(0)
    one.shard_path(0).write_bytes(other.shard_path(0).read_bytes())
    assert one.read_stored(0).tobytes() == other.read_stored(0).tobytes()


def test_steps_in_rows_are_refused(tmp_path: Path) -> None:
    store = written(tmp_path / "s", values_of())
    with pytest.raises(ValueError, match=r"rows slice\(0, 7, 2\) .* must be contiguous"):
        store.read_stored(0, rows=slice(0, 7, 2))


def test_another_layout_is_refused_with_what_it_is(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "x", shape=(2, 3, 4, 5), chunks=(1, 3, 4, 5), dtype="f4", compressors=None
    )
    with pytest.raises(ValueError, match=r"chunks of \(1, 3, 4, 5\).*\['bytes'\].*write it again"):
        layout_of(array)
    halves = zarr.create_array(
        tmp_path / "y", shape=(2, 3, 4, 6), shards=(1, 3, 4, 6), chunks=(1, 3, 4, 3), dtype="f4"
    )
    with pytest.raises(ValueError, match=r"inside them \(1, 3, 4, 3\), .*write it again"):
        layout_of(halves)
