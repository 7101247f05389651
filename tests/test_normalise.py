"""The normaliser is the float64 formula, to the rounding of its result, and never yields a NaN."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from graticule.data import normalise
from graticule.data.normalise import Normaliser, normalised_statics
from graticule.data.statistics import compute
from graticule.data.store import LAND, Packing, Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.variables import Channel, Channels
from small_store import DAY, FIRST_DAY, field, small_grid, write_store

SPREADS = [(0.0, 1.0), (35.0, 0.5), (288.0, 10.0), (54000.0, 30.0), (101325.0, 1.0), (1e7, 5.0)]


def store_of(path: Path, *, packed: bool) -> Store:
    """A channel for each (mean, spread), with land in the second one, and a constant."""
    grid, days = small_grid(), 6
    channels = [Channel(variable=f"c{i}", units="1", role="prognostic") for i in range(7)]
    rng = np.random.default_rng(0)
    values = np.stack(
        [mean + spread * rng.normal(size=(days, *grid.shape)) for mean, spread in SPREADS]
        + [np.full((days, *grid.shape), 273.16)],
        axis=1,
    )
    values[:, 1, :3, :5] = np.nan
    ranges = np.nanmin(values, (0, 2, 3)), np.nanmax(values, (0, 2, 3))
    writer = StoreWriter(
        path,
        channels=Channels(channels),
        grid=grid,
        times=TimeAxis(FIRST_DAY + DAY * np.arange(days), "standard", DAY),
        packing=Packing.over_range(*ranges) if packed else None,
    )
    for time, fields in enumerate(values):
        writer.write(time, fields)
    return writer.finish()


@pytest.mark.parametrize("packed", [False, True])
def test_normalised_values_are_float64_ones_whatever_the_offset(
    tmp_path: Path, packed: bool
) -> None:
    store = store_of(tmp_path / "store", packed=packed)
    statistics = compute(store, np.arange(4))
    picked = [5, 4, 3, 2, 1, 0]
    normaliser = Normaliser(store, picked, statistics)
    for time in range(6):
        stored = store.read_stored(time, picked)
        got = normaliser(torch.from_numpy(stored))
        assert got.dtype == torch.float32
        exact = stored.astype(np.float64)
        if packed:
            packing = store.packing.take(picked)
            exact = exact * packing.scale[:, None, None] + packing.offset[:, None, None]
        mean, scale = statistics.aligned([store.channels.names[c] for c in picked])
        want = (exact - mean[:, None, None]) / scale[:, None, None]
        want[~store.wet[picked]] = 0
        # A few roundings of a number of size 4, and none of the size of the offset.
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_denormalising_gives_the_values_back_and_land_is_nan(tmp_path: Path, packed: bool) -> None:
    store = store_of(tmp_path / "store", packed=packed)
    normaliser = Normaliser(store, range(7), compute(store, np.arange(4)))
    back = normaliser.denormalise(normaliser(torch.from_numpy(store.read_stored(5)))).numpy()
    np.testing.assert_allclose(back, store.read(5), rtol=2e-7, atol=2e-6)
    np.testing.assert_array_equal(np.isnan(back), ~store.wet)
    assert (back[6] == np.float32(273.16)).all()
    # Of a constant a network may say anything.
    said = normaliser.denormalise(torch.full((7, *store.grid.shape), 0.5)).numpy()
    assert (said[6] == np.float32(273.16)).all()
    np.testing.assert_array_equal(np.isnan(said), ~store.wet)
    assert not np.array_equal(said[5], normaliser.denormalise(torch.zeros(said.shape))[5].numpy())


@pytest.mark.parametrize("packed", [False, True])
def test_land_holes_and_constants_are_exactly_zero(tmp_path: Path, packed: bool) -> None:
    store = store_of(tmp_path / "store", packed=packed)
    normaliser = Normaliser(store, range(7), compute(store, np.arange(6)))
    stored = store.read_stored(0)
    for hole in (LAND,) if packed else (np.nan, np.inf, -np.inf):
        stored[3, 6, 7] = hole
        got = normaliser(torch.from_numpy(stored))
        assert torch.isfinite(got).all()
        assert got[3, 6, 7] == 0
        assert (got[1, :3, :5] == 0).all()
        assert (got[6] == 0).all()


def test_no_channels_are_no_planes(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", static=("relief",))
    statistics = compute(store, np.arange(4))
    assert Normaliser(store, [], statistics)(torch.empty(2, 1, 0, 8, 16)).shape == (2, 1, 0, 8, 16)
    assert normalised_statics(store, [], statistics).shape == (0, 8, 16)
    relief = field(7, 0, store.grid).astype(np.float32).astype(np.float64)
    want = (relief - relief.mean()) / relief.std()
    np.testing.assert_allclose(
        normalised_statics(store, ["relief"], statistics)[0], want, rtol=1e-6
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block", [1, 7, 16, 128, 300, 2000, 65536])
def test_blocks_are_the_plain_expression_bit_for_bit(
    tmp_path: Path, packed: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path / "store", packed=packed)
    normaliser = Normaliser(store, range(7), compute(store, np.arange(4)))
    stored = np.stack([store.read_stored(time) for time in range(6)]).reshape(2, 3, 7, 8, 16)
    stored[1, 2, 3, 4:, 5] = LAND if packed else np.nan
    stored[0, 1, 1, 0, :] = 7  # what lies on land does not matter
    numbers = torch.from_numpy(stored)
    monkeypatch.setattr(normalise, "_BLOCK", block)
    plain = torch.addcmul(normaliser._rest, numbers.float() - normaliser._centre, normaliser._gain)
    present = numbers != LAND if packed else torch.isfinite(numbers)
    want = torch.where(present & normaliser.wet & ~normaliser._constant, plain, 0.0)
    assert torch.equal(normaliser(numbers), want)
    turned = numbers.transpose(0, 1)  # not contiguous
    assert torch.equal(normaliser(turned), want.transpose(0, 1))


@pytest.mark.parametrize("packed", [False, True])
def test_a_channel_at_a_time_gives_the_same_bits(tmp_path: Path, packed: bool) -> None:
    store = store_of(tmp_path / "store", packed=packed)
    normaliser = Normaliser(store, [6, 1, 3], compute(store, np.arange(4)))
    stored = torch.from_numpy(np.stack([store.read_stored(time, [6, 1, 3]) for time in (0, 5)]))
    stored[1, 2, 4, 4] = LAND if packed else torch.nan
    assert torch.equal(normaliser._by_channel(stored, range(stored.shape[-3])), normaliser(stored))
    assert not normaliser._by_channel(stored, range(stored.shape[-3]))[1, 2, 4, 4]


def test_land_is_zero_even_where_the_mean_is_far_outside_the_packing(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", packed=True)
    statistics = compute(store, np.arange(4))
    far = replace(statistics, mean=statistics.mean + 1e9 * statistics.std)
    normaliser = Normaliser(store, range(7), far)
    stored = store.read_stored(0)
    stored[0, 2, 3] = LAND
    got = normaliser(torch.from_numpy(stored))
    assert got[0, 2, 3] == 0
    assert (got[1][torch.from_numpy(~store.wet[1])] == 0).all()
    assert (got[0].flatten()[:30] < -1e8).all()


def test_a_result_that_is_kept_is_not_written_over(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", packed=False)
    normaliser = Normaliser(store, range(7), compute(store, np.arange(4)))
    results = [normaliser(torch.from_numpy(store.read_stored(time))) for time in range(6)]
    for time, kept in enumerate(results):
        assert torch.equal(kept, normaliser(torch.from_numpy(store.read_stored(time))))
    # Six are kept, one more was needed for all that came after.
    assert normaliser._pool.allocated_bytes <= 8 * 7 * 8 * 16 * 4


def test_a_part_of_the_grid_is_that_part_of_the_whole(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", packed=True)
    statistics = compute(store, np.arange(4))
    rows, columns = slice(2, 5), slice(3, 9)
    part = Normaliser(store, [1, 0], statistics, rows=rows, columns=columns)
    whole = Normaliser(store, [1, 0], statistics)
    stored = torch.from_numpy(store.read_stored(3, [1, 0]))
    ours, theirs = part(stored[:, rows, columns]), whole(stored)
    assert torch.equal(ours, theirs[:, rows, columns])
    torch.testing.assert_close(
        part.denormalise(ours), whole.denormalise(theirs)[:, rows, columns], equal_nan=True
    )
