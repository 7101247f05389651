"""Scores by depth: numbers worked out by hand, land that never counts, stripes, real dates."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

from graticule.config import DataConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.evaluate import OceanScores, OceanSums, Scores, Spectra, evaluate, load_ocean
from graticule.evaluate.ocean import DENSITY, HEAT_CAPACITY
from graticule.evaluate.ocean_file import save_ocean
from graticule.evaluate.ocean_sums import origin_of
from graticule.evaluate.stretches import Stretches
from graticule.forecast.run import forecast
from graticule.grid import EARTH_RADIUS_M, Grid
from graticule.parallel.local import LocalRanks
from graticule.parallel.together import Together
from graticule.variables import Channel, Channels
from ocean_case import (
    CHANNELS,
    DAY,
    GAUSSIAN,
    REGULAR,
    empty,
    noise,
    pentads,
    planes,
    scores_of,
    sea,
    wrapped,
    write_forecast,
    write_truth,
)

GRIDS = pytest.mark.parametrize("grid", [REGULAR, GAUSSIAN], ids=["regular", "gaussian"])
PAIRS = {(init, lead): noise(10 * init + lead) for init in range(2) for lead in range(3)}


def row_areas(grid: Grid) -> np.ndarray:
    """(lat,) m2 of one cell, from edges half way between rows; the outermost reach to the poles."""
    edges = np.concatenate([[90], (grid.lat[1:] + grid.lat[:-1]) / 2, [-90]])
    band = np.sin(np.deg2rad(edges[:-1])) - np.sin(np.deg2rad(edges[1:]))
    return EARTH_RADIUS_M**2 * band * 2 * np.pi / grid.lon.size


# Errors


@GRIDS
def test_an_rmse_is_weighted_by_the_sea_of_its_level_before_the_root(grid: Grid) -> None:
    error = np.zeros(grid.shape)
    error[:2] = 6.0
    truth = planes(10.0, grid)
    fields = (truth + error.astype(np.float32), truth, truth - 2, truth + 3)
    wet, rows = sea(), row_areas(grid)
    scores = scores_of({(0, 0): fields}, wet, grid)
    for channel in range(len(CHANNELS)):
        area = rows @ wet[channel].sum(1)
        share = rows[:2] @ wet[channel, :2].sum(1) / area
        assert scores.weight[0, 0, channel] == pytest.approx(area, rel=1e-12)
        assert scores.rmse()[0, channel] == pytest.approx(6 * np.sqrt(share), rel=1e-12)
    np.testing.assert_allclose(scores.rmse("persistence"), 2, rtol=1e-12)
    np.testing.assert_allclose(scores.rmse("climatology"), 3, rtol=1e-12)


def test_an_rmse_over_times_is_the_mean_of_roots_and_not_the_root_of_a_mean() -> None:
    truth = planes(10.0)
    pairs = {(i, 0): (truth + error, truth, truth, truth) for i, error in enumerate((1, 3))}
    scores = scores_of(pairs, sea(), REGULAR)
    np.testing.assert_allclose(scores.rmse_of_fields()[:, 0, 0], [1, 3], rtol=1e-12)
    np.testing.assert_allclose(scores.rmse(), 2, rtol=1e-12)
    np.testing.assert_allclose(scores.rmse(overall=True), 2, rtol=1e-12)


@GRIDS
def test_r2_is_one_less_the_squared_error_over_the_variance_of_the_truth(grid: Grid) -> None:
    pattern = np.where(np.arange(8) % 2, 1.0, -1.0) * np.ones((6, 1))
    wet = np.ones((len(CHANNELS), 6, 8), bool)
    truth = planes(20 + pattern, grid)
    usual = planes(20.0, grid)
    # A quarter of the anomaly is missing, then half of it.
    pairs = {
        (0, k): (planes(20 + part * pattern, grid), truth, truth, usual)
        for k, part in enumerate((0.75, 0.5))
    }
    scores = scores_of(pairs, wet, grid)
    np.testing.assert_allclose(scores.r2()[0], 1 - 0.25**2, rtol=1e-12)
    np.testing.assert_allclose(scores.r2()[1], 1 - 0.5**2, rtol=1e-12)
    np.testing.assert_allclose(scores.r2(overall=True), 1 - (0.0625 + 0.25) / 2, rtol=1e-12)
    np.testing.assert_allclose(scores.r2("climatology"), scores.r2(), rtol=1e-12)


def test_r2_counts_variance_in_time_and_that_of_the_climatology_does_not_count_the_season() -> None:
    # Uniform fields: 10 and 14 in the truth, whose climatology is 9 and 13.
    pairs = {
        (i, 0): (planes(value + 0.5), planes(value), planes(value), planes(value - 1))
        for i, value in enumerate((10.0, 14.0))
    }
    scores = scores_of(pairs, sea(), REGULAR)
    np.testing.assert_allclose(scores.r2()[0], 1 - 0.25 / 4, rtol=1e-12)
    np.testing.assert_allclose(scores.r2("climatology")[0], 1 - 0.25 / 1, rtol=1e-12)


def test_r2_of_a_truth_that_never_varies_is_undefined_and_no_number() -> None:
    constant = planes(20.1)
    scores = scores_of({(0, 0): (constant + 1, constant, constant, constant)}, sea(), REGULAR)
    for reference in ("mean", "climatology"):
        assert np.isnan(scores.r2(reference)).all()
        assert np.isnan(scores.r2(reference, overall=True)).all()
    np.testing.assert_allclose(scores.rmse(), 1, rtol=1e-6)
    told = scores.told()["channels"]["thetao@15"]
    assert told["r2"] is None
    assert told["r2_climatology"] is None
    assert "R2 - (- against climatology)" in " ".join(scores.lines(100))
    # One initial time and one lead is enough for the rest.
    assert scores.leads == [1]
    assert scores.rmse().shape == (1, len(CHANNELS))


def test_small_variance_around_a_large_mean_keeps_its_digits() -> None:
    rng = np.random.default_rng(0)
    truth = (3000 + 1e-2 * rng.normal(size=(len(CHANNELS), 6, 8))).astype(np.float32)
    scores = scores_of({(0, 0): (truth + np.float32(0.01), truth, truth, truth)}, sea(), REGULAR)
    area = np.where(sea()[0], REGULAR.cell_area, 0)
    values = truth[0].astype(np.float64)
    mean = (area * values).sum() / area.sum()
    variance = (area * (values - mean) ** 2).sum()
    error = ((truth[0] + np.float32(0.01)).astype(np.float64) - values) ** 2
    assert scores.r2()[0, 0] == pytest.approx(1 - (area * error).sum() / variance, rel=1e-9)


# Land


@pytest.mark.parametrize("land", [0.0, np.nan, 1e20], ids=["zero", "nan", "fill"])
def test_what_stands_on_land_is_in_no_score(land: float) -> None:
    wet = sea()
    expected = scores_of(PAIRS, wet, REGULAR)
    there = {
        key: tuple(np.where(wet, field, np.float32(land)) for field in fields)
        for key, fields in PAIRS.items()
    }
    scores = scores_of(there, wet, REGULAR)  # type: ignore[arg-type]
    for name in ("values", "low", "high", "maps"):
        np.testing.assert_array_equal(getattr(scores.sums, name), getattr(expected.sums, name))


def test_a_level_that_is_all_land_has_no_score_and_no_heat() -> None:
    scores = scores_of(PAIRS, sea(deep=2), REGULAR)
    assert np.isnan(scores.rmse()[:, 2]).all()
    assert np.isnan(scores.r2(overall=True)[2])
    assert np.isfinite(scores.rmse()[:, :2]).all()
    told = scores.told()
    assert told["channels"]["thetao@110"]["rmse"] is None
    assert told["channels"]["thetao@110"]["area_m2"] == 0
    # As much heat as without the level: there is no water on it.
    rows = row_areas(REGULAR)
    heat = scores.content("temperature")[-1]
    mean = scores.mean("truth")[0, 0]
    area = [rows @ sea()[k].sum(1) for k in (0, 1)]
    expected = DENSITY * HEAT_CAPACITY * (30 * area[0] * mean[0] + 40 * area[1] * mean[1])
    assert heat.truth[0, 0] == pytest.approx(expected, rel=1e-12)
    none = scores_of(PAIRS, sea(deep=0), REGULAR)
    assert all(np.isnan(content.truth).all() for content in none.content("temperature"))
    assert none.lines(100)


def test_cells_without_a_value_at_a_time_are_left_out_of_that_time() -> None:
    forecast, truth, persistence, usual = (field.copy() for field in PAIRS[0, 0])
    truth[0, 3, 4] = np.nan
    usual[1, 4, 5] = np.nan
    scores = scores_of({(0, 0): (forecast, truth, persistence, usual)}, sea(), REGULAR)
    rows = row_areas(REGULAR)
    assert scores.weight[0, 0, 0] == pytest.approx(rows @ sea()[0].sum(1) - rows[3], rel=1e-12)
    assert scores.weight[0, 0, 1] == pytest.approx(rows @ sea()[1].sum(1) - rows[4], rel=1e-12)
    assert np.isfinite(scores.sums.values).all()


# Heat, salt, energy


@GRIDS
def test_heat_is_density_times_capacity_times_the_volume_of_sea(grid: Grid) -> None:
    values = [10.0, 6.0, 4.0, 35.0, 0, 0, 0]
    truth, model = planes(values, grid), planes([v + 0.5 for v in values], grid)
    scores = scores_of({(0, 0): (model, truth, truth, truth)}, sea(), grid)
    rows = row_areas(grid)
    area = [float(rows @ sea()[k].sum(1)) for k in range(4)]
    (heat,) = scores.content("temperature")  # 0 to 150 m, and nothing fills 300 m
    assert heat.range.name == "0-150 m"
    expected = 1035 * 3992 * (10 * 30 * area[0] + 6 * 40 * area[1] + 4 * 80 * area[2])
    assert heat.truth[0, 0] == pytest.approx(expected, rel=1e-12)
    more = 1035 * 3992 * 0.5 * (30 * area[0] + 40 * area[1] + 80 * area[2])
    assert heat.error[0, 0] == pytest.approx(more, rel=1e-6)
    (salt,) = scores.content("salinity")
    assert salt.units == "kg"
    assert salt.truth[0, 0] == pytest.approx(1.035 * 35 * 30 * area[3], rel=1e-12)


def test_kelvin_and_celsius_hold_the_same_heat_and_unknown_units_none() -> None:
    scores = scores_of(PAIRS, sea(), REGULAR)
    kelvin = Channels(
        [replace(c, units="K") if c.variable == "thetao" else c for c in CHANNELS]
    )  # fmt: skip
    warm = replace(
        scores,
        column=replace(scores.column, channels=kelvin),
        sums=replace(scores.sums, origin=scores.sums.origin + 273.15 * (np.arange(7) < 3)),
    )
    np.testing.assert_allclose(
        warm.content("temperature")[0].truth, scores.content("temperature")[0].truth, rtol=1e-12
    )
    odd = Channels([replace(c, units="1") for c in CHANNELS])
    with pytest.raises(ValueError, match="temperature in '1' is in no unit that is known"):
        replace(scores, column=replace(scores.column, channels=odd)).content("temperature")
    with pytest.raises(ValueError, match="its mass is known of 1e-3 and g kg-1 alone"):
        replace(scores, column=replace(scores.column, channels=odd)).content("salinity")
    told = replace(scores, column=replace(scores.column, channels=odd)).told()
    assert told["heat_content"][0]["none"].startswith("a temperature in '1'")


def test_kinetic_energy_is_half_the_mean_of_squares() -> None:
    values = [1.0, 1, 1, 1, 3, 4, 0]
    truth, model = planes(values), planes([0.0, 0, 0, 0, 3, 0, 0])
    scores = scores_of({(0, 0): (model, truth, truth, truth)}, sea(), REGULAR)
    assert scores.kinetic_energy("truth")[0, 0].tolist() == pytest.approx([12.5])
    assert scores.kinetic_energy("model")[0, 0].tolist() == pytest.approx([4.5])
    assert scores.told()["kinetic_energy"] == [
        {"depth": 15.0, "model": pytest.approx(4.5), "truth": pytest.approx(12.5)}
    ]


def test_the_spectrum_of_the_kinetic_energy_is_half_the_sum_of_those_of_the_currents() -> None:
    grid = Grid(np.linspace(80, -80, 9), np.arange(0, 360, 5.0))
    currents = Channels([Channel(variable=v, units="m s-1", role="prognostic", level=15.0,
                                 level_units="m") for v in ("uo", "vo")])  # fmt: skip
    stretches = Stretches.choose(currents.names, np.ones((2, 9, 72), bool), grid, grid.cell_area)
    wave = np.deg2rad(grid.lon) * np.ones((9, 1))
    truth = np.stack([2 * np.cos(3 * wave), 4 * np.sin(5 * wave)])
    power = stretches.power(truth)
    half = stretches.power(truth / 2, power.used)
    spectra = Spectra.zero(currents, [DAY], stretches).with_pair(0, half, power)
    energy = spectra.kinetic_energy([(0, 1)])
    assert energy.names == ("ke@15",)
    # cos^2 has a mean of 1/2, and the energy is half the square.
    found = energy.truth[0, 0]
    assert found[2] == pytest.approx(2**2 / 4, rel=1e-12)
    assert found[4] == pytest.approx(4**2 / 4, rel=1e-12)
    assert np.delete(found, [2, 4]).max() < 1e-20
    np.testing.assert_allclose(energy.ratio[0, 0, [2, 4]], 0.25, rtol=1e-12)
    assert energy.rows.tolist() == [[9]]


# Profiles, maps, range


def test_a_profile_is_the_mean_over_the_sea_of_each_level_and_times() -> None:
    scores = scores_of(PAIRS, sea(), REGULAR)
    for place in scores.column.profiles["thetao"]:
        area = np.where(sea()[place], REGULAR.cell_area, 0)
        means = [(area * fields[1][place]).sum() / area.sum() for fields in PAIRS.values()]
        assert scores.profile("truth")[place] == pytest.approx(np.mean(means), rel=1e-6)
        assert scores.mean_by_lead("truth")[1, place] == pytest.approx(
            np.mean([means[1], means[4]]), rel=1e-6
        )


def test_maps_are_anomalies_from_the_climatology_of_each_date() -> None:
    scores, wet = scores_of(PAIRS, sea(), REGULAR), sea()
    assert [CHANNELS.names[i] for i in scores.sums.mapped] == ["thetao@15", "so@15", "zos"]
    made = scores.maps(6)
    stack = np.array([[field[6] for field in fields] for fields in PAIRS.values()], np.float64)
    model, truth = (stack[:, i] - stack[:, 3] for i in (0, 1))
    for name, values in (
        ("model", model.mean(0)), ("truth", truth.mean(0)), ("error", (model - truth).mean(0)),
        ("rmse", np.sqrt(((model - truth) ** 2).mean(0))),
    ):  # fmt: skip
        expected = np.where(wet[6], values, np.nan)
        np.testing.assert_allclose(made[name], expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="no map of thetao@50; there are thetao@15, so@15, zos"):
        scores.maps(1)


def test_how_far_values_leave_the_range_of_training_is_a_share_of_it() -> None:
    low, high = planes([0.0] * 7), planes([10.0] * 7)
    model = high.copy()
    model[0, 2, 5] = 12.5
    model[1, 2, 5] = -1
    model[2, 2, 2] = 99  # land
    scores = scores_of({(0, 0): (low, high, low, low), (0, 1): (model, high, low, low)}, sea(),
                       REGULAR)  # fmt: skip
    scores.sums.see(np.zeros(7), np.full(7, 10.0))
    assert scores.beyond()[:, :3].tolist() == [[0, 0, 0], [0.25, 0.1, 0]]
    assert not scores.beyond("truth").any()
    told = scores.told()["channels"]
    assert told["thetao@15"]["beyond_trained_range"] == 0.25
    least, largest = scores.extremes("model")
    assert (least[1, 1], largest[1, 0]) == (-1, 12.5)
    constant = scores_of({(0, 0): (low, low, low, low)}, sea(), REGULAR)
    constant.sums.see(np.zeros(7), np.zeros(7))
    assert np.isnan(constant.beyond()).all()
    assert constant.told()["channels"]["zos"]["beyond_trained_range"] is None


# Adding up


def assert_same(ours: OceanSums, theirs: OceanSums) -> None:
    for name in ("values", "maps"):
        a, b = getattr(ours, name), getattr(theirs, name)
        # A sum of either sign may be near zero: measured by the largest of its kind.
        scale = np.abs(b).max(tuple(range(1, b.ndim)), keepdims=True)
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-12, atol=1e-12)
    for name in ("low", "high", "trained"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    first, second = wrapped(ours, REGULAR), wrapped(theirs, REGULAR)
    for name in ("rmse", "r2", "beyond"):
        np.testing.assert_allclose(getattr(first, name)(), getattr(second, name)(), rtol=1e-12)


def add_stripe(total: OceanSums, rows: slice, columns: slice, grid: Grid) -> None:
    part = (slice(None), rows, columns)
    for (init, lead), fields in PAIRS.items():
        total.add_pair(
            init, lead, *(field[part] for field in fields), counted=sea()[part],
            cell_area=grid.cell_area[rows, columns], rows=rows, columns=columns,
        )  # fmt: skip


@GRIDS
@pytest.mark.parametrize("bounds", [(0, 2, 6), (0, 1, 4, 6), (0, 3, 3, 6)], ids=str)
def test_stripes_of_rows_or_columns_add_up_to_the_whole(grid: Grid, bounds: tuple) -> None:
    whole = scores_of(PAIRS, sea(), grid).sums
    for dim in (0, 1):
        total = empty(sea(), grid, PAIRS[0, 0][1], (2, 3))
        ends = bounds if dim == 0 else (*bounds[:-1], 8)
        for start, stop in pairwise(ends):
            parts = [slice(None), slice(None)]
            parts[dim] = slice(start, stop)
            part = empty(sea(), grid, PAIRS[0, 0][1], (2, 3))
            add_stripe(part, parts[0], parts[1], grid)
            total = total + part
        assert_same(total, whole)


def _on_stripes(grid: Grid) -> OceanSums:
    together = Together()
    bounds = {2: (0, 2, 6), 3: (0, 1, 4, 6)}[together.size]
    sums = empty(sea(), grid, PAIRS[0, 0][1], (2, 3))
    add_stripe(sums, slice(bounds[together.rank], bounds[together.rank + 1]), slice(None), grid)
    sums.see(np.full(7, -1.0 - together.rank), np.full(7, 3.0 - together.rank))
    return sums.added(together)


@GRIDS
def test_ranks_that_hold_stripes_have_the_sums_of_one_process(
    grid: Grid, two: LocalRanks, three: LocalRanks
) -> None:
    for ranks, size in ((two, 2), (three, 3)):
        whole = scores_of(PAIRS, sea(), grid).sums
        whole.see(np.full(7, -float(size)), np.full(7, 3.0))
        answers = ranks.run(_on_stripes, grid)
        for answer in answers:
            assert_same(answer, whole)
            np.testing.assert_array_equal(answer.values, answers[0].values)


def test_sums_of_other_channels_pairs_or_origins_do_not_add() -> None:
    sums = scores_of(PAIRS, sea(), REGULAR).sums
    for other in (
        replace(sums, names=tuple("abcdefg")),
        replace(sums, origin=sums.origin + 1),
        empty(sea(), REGULAR, PAIRS[0, 0][1], (2, 4)),
    ):
        with pytest.raises(ValueError, match="do not add up"):
            _ = sums + other


def test_an_origin_is_a_value_of_the_sea_and_0_where_there_is_none() -> None:
    truth = PAIRS[0, 0][1].copy()
    truth[0, 0, 2] = np.nan
    origin = origin_of(truth, sea(deep=2))
    assert origin[0] == truth[0, 0, 3]
    assert origin[2] == 0


# Through the store and the forecast, by real dates


def season(store_times: np.ndarray, time: int) -> float:
    """31 x month + day, the same every year."""
    date = store_times[time]
    return 31.0 * date.month + date.day


@pytest.fixture(scope="module")
def pentad_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Three julian years of 73 dates, the last one a leap year: the season, warmer eastward."""
    times = pentads(2002, 3)
    east = np.arange(8.0) * np.ones((6, 1))
    return write_truth(
        tmp_path_factory.mktemp("data") / "store", times,
        lambda i: planes(season(times.dates, i) + east), wet=sea(),
        splits={"train": ["2002/2003"], "test": ["2004"]},
    )  # fmt: skip


def scored(path: Path, store: Store, **more: object) -> Scores:
    given = {"train_ranges": ["2002/2003"], "climatology": "month-day", **more}
    return evaluate(path, store, **given)  # type: ignore[arg-type]


class Persist(nn.Module):
    """Two states in, two out: the last one, twice."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.num_channels = num_channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, self.num_channels : 2 * self.num_channels]] * 2, 1)


def test_two_output_times_a_step_are_scored_at_their_own_dates_over_29_february(
    pentad_store: Store, tmp_path: Path
) -> None:
    store = pentad_store
    source = SampleSource(store, DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2)))
    statistics = compute(store, source.times("train"))
    start = store.times.find("2004-02-17")
    forecast(
        Persist(len(CHANNELS)), source, statistics, tmp_path / "f.zarr", starts=[start], leads=3,
        attributes={"run_fingerprint": "r1"},
    )  # fmt: skip
    scores = scored(tmp_path / "f.zarr", store)
    ocean = scores.ocean
    assert ocean is not None
    assert scores.leads == ocean.leads == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(
        ocean.valid_seconds[0], store.times.seconds[start + 1 : start + 7]
    )
    # 22 and 27 February, 4, 9, 14 and 19 March: six days lie between the second and the third.
    assert ocean.elapsed_days.tolist() == [5, 10, 16, 21, 26, 31]
    values = np.array([season(store.times.dates, start + k) for k in range(7)])
    assert (values[1:] - values[0]).tolist() == [5, 10, 18, 23, 28, 33]
    expected = np.repeat((values[1:] - values[0])[:, None], len(CHANNELS), 1)
    np.testing.assert_allclose(ocean.rmse(), expected, rtol=1e-5)
    np.testing.assert_allclose(ocean.rmse("persistence"), expected, rtol=1e-12)
    # The climatology by month and day is the truth itself, on each side of the leap day.
    np.testing.assert_array_equal(ocean.rmse("climatology"), 0)
    assert np.isnan(ocean.r2("climatology")).all()
    assert np.isfinite(ocean.r2()).all()
    anomalies = ocean.maps(0)
    np.testing.assert_array_equal(anomalies["truth"], np.where(sea()[0], 0, np.nan))
    np.testing.assert_allclose(ocean.mean_by_lead("truth")[:, 6] - values[1:], 4.5, rtol=1e-12)


def test_the_range_of_training_is_that_of_the_dates_of_the_climatology(
    pentad_store: Store, tmp_path: Path
) -> None:
    start = pentad_store.times.find("2004-06-02")
    path = write_forecast(tmp_path / "f.zarr", pentad_store, [start], 3,
                          lambda s, k: pentad_store.read(s + k) + 1)  # fmt: skip
    ocean = scored(path, pentad_store).ocean
    assert ocean is not None
    first, last = (season(pentad_store.times.dates, start + k) for k in (1, 3))
    assert ocean.sums.trained[:, 0].tolist() == [first + 2, last + 7]  # columns 2 to 7 are sea
    assert ocean.beyond()[:, 0].tolist() == [0, 0, 1 / (last + 7 - first - 2)]
    assert not ocean.beyond("truth").any()


def test_land_of_a_forecast_that_is_stored_as_zero_counts_nowhere(
    pentad_store: Store, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    error = rng.normal(size=(len(CHANNELS), 6, 8))
    found = []
    for name, land in (("nan", np.nan), ("zero", 0.0)):

        def field(s: int, k: int, land: float = land) -> np.ndarray:
            return np.where(sea(), pentad_store.read(s + k) + error, land)

        path = write_forecast(tmp_path / f"{name}.zarr", pentad_store, [150, 160], 2, field)
        found.append(scored(path, pentad_store, climatology="month"))
    first, second = (scores.ocean for scores in found)
    assert first is not None and second is not None  # noqa: PT018
    np.testing.assert_array_equal(first.sums.values, second.sums.values)
    np.testing.assert_array_equal(first.sums.maps, second.sums.maps)
    # `Scores` pool over the same cells and weights.
    np.testing.assert_allclose(
        found[0].sums.of("model", "squared_error") / found[0].sums.weight,
        (first.sums.of("model_error").sum(0) / first.weight.sum(0)), rtol=1e-12,
    )  # fmt: skip
    # And the skill against climatology is that of their pooled squares.
    np.testing.assert_allclose(first.r2("climatology"), 1 - (
        found[0].rmse() / found[0].rmse("climatology")) ** 2, rtol=1e-9)  # fmt: skip


def test_a_forecast_without_a_level_has_no_range_with_a_hole(
    pentad_store: Store, tmp_path: Path
) -> None:
    kept = [0, 2, 3, 4, 5, 6]
    path = write_forecast(
        tmp_path / "f.zarr", pentad_store, [150], 2,
        lambda s, k: pentad_store.read(s + k, kept) + 1, channels=CHANNELS.subset(kept),
    )  # fmt: skip
    ocean = scored(path, pentad_store).ocean
    assert ocean is not None
    (heat,) = ocean.content("temperature")
    assert heat.range.metres.tolist() == [30, 80]
    rows = row_areas(REGULAR)
    volume = 30 * rows @ sea()[0].sum(1) + 80 * rows @ sea()[2].sum(1)
    np.testing.assert_allclose(heat.error[0], DENSITY * HEAT_CAPACITY * volume, rtol=1e-5)


def _evaluated(path: Path, store: Path) -> OceanScores:
    ocean = scored(path, Store(store), climatology="month").ocean
    assert ocean is not None
    return ocean


def test_processes_that_share_the_pairs_have_the_scores_of_one(
    pentad_store: Store, tmp_path: Path, two: LocalRanks, three: LocalRanks
) -> None:
    def field(s: int, k: int) -> np.ndarray:
        rng = np.random.default_rng([s, k])
        return pentad_store.read(min(s + k, 218)) + rng.normal(size=(len(CHANNELS), 6, 8))

    path = write_forecast(tmp_path / "f.zarr", pentad_store, [148, 155, 216], 3, field)
    expected = _evaluated(path, pentad_store.path)
    assert expected.weight.any(2).sum() == 8  # the last start has two truths in the store
    for ranks in (two, three):
        for answer in ranks.run(_evaluated, path, pentad_store.path):
            assert_same(answer.sums, expected.sums)
            assert answer.told() == expected.told()
            assert answer.lines(100) == expected.lines(100)


def test_currents_of_a_level_share_the_stretches_of_their_spectra(tmp_path: Path) -> None:
    grid = Grid(np.linspace(75, -75, 6), np.arange(0, 360, 10.0))
    times = pentads(2002, 1)
    currents = Channels([Channel(variable=v, units="m s-1", role="prognostic", level=15.0,
                                 level_units="m") for v in ("uo", "vo")])  # fmt: skip
    wet = np.ones((2, 6, 36), bool)
    wet[0, :, :3] = wet[1, :, 30:] = False
    rng = np.random.default_rng(0)
    values = rng.normal(size=(73, 2, 6, 36))
    store = write_truth(tmp_path / "s", times, lambda i: values[i], wet=wet, grid=grid,
                        channels=currents)  # fmt: skip
    path = write_forecast(tmp_path / "f.zarr", store, [20], 2, lambda s, k: store.read(s + k) / 2)
    scores = scored(path, store, train_ranges=["2002"])
    assert scores.spectra is not None
    assert scores.ocean is not None
    np.testing.assert_array_equal(scores.spectra.area[:, 0], scores.spectra.area[:, 1])
    energy = scores.spectra.kinetic_energy(scores.ocean.column.currents)
    np.testing.assert_allclose(energy.ratio, 0.25, rtol=1e-5)
    # Means still count each current's own sea.
    assert scores.sums.cells[0].tolist() == [6 * 33, 6 * 30]


# The file


def test_the_file_holds_all_and_is_read_back(tmp_path: Path) -> None:
    scores = scores_of(PAIRS, sea(deep=2), REGULAR)
    scores.sums.see(np.zeros(7), np.full(7, 50.0))
    path = tmp_path / "x.ocean.nc"
    save_ocean(scores, path)
    found = load_ocean(path)
    for name in ("values", "low", "high", "maps", "origin", "trained"):
        np.testing.assert_array_equal(getattr(found.sums, name), getattr(scores.sums, name))
    assert found.column.channels == scores.column.channels
    np.testing.assert_array_equal(found.column.bottom, scores.column.bottom)
    assert found.told() == scores.told()
    assert (found.calendar, found.climatology, found.area) == ("julian", "month-day", "exact")
    assert found.attributes["run_fingerprint"] == scores.attributes["run_fingerprint"]
    np.testing.assert_array_equal(found.valid_seconds, scores.valid_seconds)
    with xr.open_dataset(path, decode_times=False) as data:
        np.testing.assert_array_equal(data["rmse"][0], scores.rmse())
        np.testing.assert_array_equal(data["r2"], scores.r2())
        heat = scores.content("temperature")
        np.testing.assert_array_equal(data["heat_content"][0, -1], heat[-1].model)
        assert data["heat_content_range"].values.tolist() == [c.range.name for c in heat]
        assert data["heat_content"].attrs["density"] == 1035
        assert data["kinetic_energy"].shape == (2, 2, 3, 1)
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        save_ocean(scores, path)
    save_ocean(scores, path, force=True)
    xr.Dataset(attrs={"format": "else"}).to_netcdf(tmp_path / "other.nc")
    with pytest.raises(ValueError, match="is no file of ocean scores, so it is not replaced"):
        save_ocean(scores, tmp_path / "other.nc", force=True)
    with pytest.raises(ValueError, match="is no file of ocean scores"):
        load_ocean(tmp_path / "other.nc")
    with pytest.raises(ValueError, match="no ocean scores there"):
        load_ocean(tmp_path / "none.nc")
