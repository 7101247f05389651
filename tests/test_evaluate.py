"""Scores: sums that add up, references over the same cells, and what is refused."""

import csv
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest

from graticule.data.store import Store
from graticule.data.times import TimeAxis, seconds_of
from graticule.data.writer import StoreWriter
from graticule.evaluate import Scores, Spectra, Sums, evaluate, pair_sums
from graticule.forecast.writer import ForecastWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels

DAY = 86400
# Poles included, where cos(lat) is 0 and the cell is not.
GRID = Grid(np.linspace(90, -90, 7), np.arange(0, 360, 45.0))
CHANNELS = Channels([
    Channel(variable="thetao", units="degC", role="prognostic", level=5.0, level_units="m"),
    Channel(variable="zos", units="m", role="prognostic"),
])  # fmt: skip
Field = Callable[[int], np.ndarray | float]


def date(day: int) -> cftime.datetime:
    return cftime.num2date(day, "days since 2003-01-01", "noleap", has_year_zero=True)


def planes(values: np.ndarray | float, grid: Grid = GRID) -> np.ndarray:
    """(channel, lat, lon) float32; zos has land on its first two columns."""
    both = np.array(np.broadcast_to(np.asarray(values, np.float32), (2, *grid.shape)))
    both[1, :, :2] = np.nan
    return both


def make_store(path: Path, field: Field, days: int = 12, skip: tuple[int, ...] = ()) -> Store:
    kept = [day for day in range(days) if day not in skip]
    seconds = np.array([seconds_of(date(day)) for day in kept])
    times = TimeAxis(seconds, "noleap", DAY)
    writer = StoreWriter(path, channels=CHANNELS, grid=GRID, times=times)
    for i, day in enumerate(kept):
        writer.write(i, planes(field(day)))
    return writer.finish()


def make_forecast(
    path: Path,
    field: Callable[[int, int], np.ndarray | float],
    inits: tuple[int, ...] = (2, 5),
    leads: int = 3,
    **more: Any,
) -> Path:
    """field: called with the initial day and the lead from 1."""
    given = {"channels": CHANNELS, "grid": GRID, "attributes": {"run_fingerprint": "r1"}, **more}
    with ForecastWriter(
        path, init_times=[date(day) for day in inits],
        valid_times=np.array([[date(day + k + 1) for k in range(leads)] for day in inits]),
        nominal_step_seconds=DAY, regular=True, **given,
    ) as writer:  # fmt: skip
        for i, day in enumerate(inits):
            for k in range(leads):
                values = planes(field(day, k + 1), given["grid"])
                writer.write(i, k, values[: len(given["channels"])])
    return path


def score(path: Path, store: Store, **more: Any) -> Scores:
    given = {"train_ranges": ["2003-01-01/2003-01-02"], "climatology": "all", **more}
    return evaluate(path, store, **given)


def random_fields(shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    names = ("forecast", "truth", "persistence", "climatology")
    return {name: rng.normal(size=shape).astype(np.float32) for name in names}


def test_error_of_two_everywhere_is_an_rmse_of_two_poles_included(tmp_path: Path) -> None:
    assert (GRID.cell_area > 0).all()
    store = make_store(tmp_path / "s", lambda day: 10.0)
    sign = np.where(np.indices(GRID.shape).sum(0) % 2, 2.0, -2.0)
    scores = score(make_forecast(tmp_path / "f.nc", lambda day, lead: 10.0 + sign), store)
    np.testing.assert_allclose(scores.rmse(), 2.0, rtol=1e-14)
    np.testing.assert_allclose(scores.mae(), 2.0, rtol=1e-14)
    ones = score(make_forecast(tmp_path / "g.nc", lambda day, lead: 12.0), store)
    np.testing.assert_allclose(ones.bias(), 2.0, rtol=1e-14)


def test_mean_is_weighted_by_area_before_the_root(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", lambda day: 0.0)
    error = np.zeros(GRID.shape)
    error[0] = 6.0  # the cap north of 75 degrees
    scores = score(make_forecast(tmp_path / "f.zarr", lambda day, lead: error), store)
    share = (1 - np.sin(np.deg2rad(75))) / 2
    np.testing.assert_allclose(scores.mae(), 6 * share, rtol=1e-6)
    np.testing.assert_allclose(scores.rmse(), 6 * np.sqrt(share), rtol=1e-6)


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_persistence_of_the_day_number_errs_by_k_at_lead_k(tmp_path: Path, suffix: str) -> None:
    store = make_store(tmp_path / "s", float)
    scores = score(make_forecast(tmp_path / f"f.{suffix}", lambda day, lead: day + lead), store)
    assert scores.leads == [1, 2, 3]
    np.testing.assert_array_equal(scores.rmse(), np.zeros((3, 2)))
    expected = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    np.testing.assert_allclose(scores.rmse("persistence"), expected, rtol=1e-14)
    np.testing.assert_allclose(scores.bias("persistence"), -expected, rtol=1e-14)
    # Climatology of days 0 and 1 is 0.5; leads 1 to 3 from days 2 and 5.
    square = [((k + 1.5) ** 2 + (k + 4.5) ** 2) / 2 for k in (1, 2, 3)]
    np.testing.assert_allclose(scores.rmse("climatology")[:, 0], np.sqrt(square), rtol=1e-14)
    np.testing.assert_allclose(scores.acc(), 1.0, rtol=1e-14)
    assert np.isnan(scores.acc("climatology")).all()


def test_a_forecast_of_persistence_scores_as_persistence(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fields = rng.normal(size=(12, *GRID.shape)).astype(np.float32)
    store = make_store(tmp_path / "s", lambda day: fields[day])
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: fields[day])
    scores = score(path, store, region=(40, 200, -60, 60))
    for name in ("rmse", "bias", "mae", "acc"):
        ours, reference = getattr(scores, name)(), getattr(scores, name)("persistence")
        np.testing.assert_array_equal(ours, reference)
        assert np.isfinite(ours).all()
    np.testing.assert_array_equal(scores.skill("persistence"), np.ones((3, 2)))


def test_climatology_is_of_the_valid_date(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", lambda day: float(date(day).month), days=35)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: 0.0, inits=(29,))
    scores = score(path, store, climatology="month", train_ranges=["2003"])
    # 31 January, 1 and 2 February, from 30 January.
    np.testing.assert_array_equal(scores.rmse("climatology"), np.zeros((3, 2)))
    np.testing.assert_allclose(scores.rmse("persistence")[:, 0], [0, 1, 1], rtol=1e-14)


def test_acc_is_the_weighted_correlation_of_anomalies(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(12, *GRID.shape)).astype(np.float32)
    guess = rng.normal(size=GRID.shape).astype(np.float32)
    store = make_store(tmp_path / "s", lambda day: truth[day])
    path = make_forecast(tmp_path / "f.nc", lambda day, lead: guess, inits=(3,), leads=1)
    usual = truth[:2].astype(np.float64).mean(0)
    f, o = guess - usual, truth[4] - usual
    w = GRID.cell_area
    expected = (w * f * o).sum() / np.sqrt((w * f * f).sum() * (w * o * o).sum())
    assert score(path, store).acc()[0, 0] == pytest.approx(expected, rel=1e-6)


def test_activity_is_the_deviation_of_the_anomaly_from_its_area_mean(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    truth = rng.normal(size=(12, *GRID.shape)).astype(np.float32)
    guess = rng.normal(size=(2, *GRID.shape)).astype(np.float32)
    store = make_store(tmp_path / "s", lambda day: truth[day])
    # Far from each other and from the truth in the mean: no activity.
    shift = {3: 100, 6: -50}
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: guess[day // 6] + shift[day],
                         inits=(3, 6), leads=1)  # fmt: skip
    scores, usual, w = score(path, store), truth[:2].astype(np.float64).mean(0), GRID.cell_area

    def variance(field: np.ndarray) -> float:
        anomaly = field - usual
        mean = (w * anomaly).sum() / w.sum()
        return (w * (anomaly - mean) ** 2).sum() / w.sum()

    expected = {
        "model": np.sqrt((variance(guess[0]) + variance(guess[1])) / 2),
        "truth": np.sqrt((variance(truth[4]) + variance(truth[7])) / 2),
        "persistence": np.sqrt((variance(truth[3]) + variance(truth[6])) / 2),
        "climatology": 0.0,
    }
    for source, value in expected.items():
        assert scores.activity(source)[0, 0] == pytest.approx(value, rel=1e-5)
        ratio = scores.activity_ratio(source)[0, 0]
        assert ratio == pytest.approx(value / expected["truth"], rel=1e-5)
    rows = [row for row in scores.rows() if row["channel"] == "thetao@5"]
    assert [row["activity"] for row in rows] == [
        scores.activity(source)[0, 0] for source in ("model", "persistence", "climatology")
    ]
    assert rows[0]["activity_ratio"] == scores.activity_ratio()[0, 0]


def test_an_anomaly_that_is_the_same_everywhere_has_no_ratio_of_activities(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", lambda day: day / 3)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: GRID.lat[:, None] + 0 * GRID.lon)
    scores = score(path, store)
    assert scores.activity("truth").max() < 1e-6
    assert np.isnan(scores.activity_ratio()).all()
    assert {row["activity_ratio"] for row in scores.rows()} == {None}


def test_halves_add_up_to_the_whole() -> None:
    shape = (2, *GRID.shape)
    counted = np.ones(shape, bool)
    parts = [
        pair_sums("ab", 2, i % 2, **random_fields(shape, i), counted=counted,
                  cell_area=GRID.cell_area, where="")
        for i in range(6)
    ]  # fmt: skip
    whole = Sums.zero("ab", 2)
    for part in parts:
        whole = whole + part
    halves = [Sums.zero("ab", 2), Sums.zero("ab", 2)]
    for i, part in enumerate(parts):
        halves[i < 1] = halves[i < 1] + part
    merged = halves[1] + halves[0]
    np.testing.assert_array_equal(merged.samples, [3, 3])
    np.testing.assert_array_equal(merged.cells, whole.cells)
    np.testing.assert_allclose(merged.weight, whole.weight, rtol=1e-14)
    np.testing.assert_allclose(merged.values, whole.values, rtol=1e-12, atol=1e-3)
    np.testing.assert_allclose(merged.activity, whole.activity, rtol=1e-12)
    assert (whole.activity[[0, 1, 3]] > 0).all()
    # And by rows, as the stripes of one field do.
    fields, middle = random_fields(shape, 9), 3
    stripes = [
        pair_sums("ab", 1, 0, **{k: v[:, rows] for k, v in fields.items()},
                  counted=counted[:, rows], cell_area=GRID.cell_area[rows], where="")
        for rows in (slice(0, middle), slice(middle, None))
    ]  # fmt: skip
    one = pair_sums("ab", 1, 0, **fields, counted=counted, cell_area=GRID.cell_area, where="")
    np.testing.assert_allclose((stripes[0] + stripes[1]).values, one.values, rtol=1e-12, atol=1e-3)


def test_seven_samples_on_two_processes_have_mean_error_four() -> None:
    shape = (1, *GRID.shape)
    zero = np.zeros(shape, np.float32)

    def share(errors: list[int]) -> Sums:
        sums = Sums.zero(["a"], 1)
        for error in errors:
            sums = sums + pair_sums(
                ["a"], 1, 0, zero + np.float32(error), zero, zero, zero,
                counted=np.ones(shape, bool), cell_area=GRID.cell_area, where="",
            )  # fmt: skip
        return sums

    total = share([1, 2, 3, 4]) + share([5, 6, 7]) + share([])
    channels = Channels([Channel(variable="a", units="1", role="prognostic")])
    scores = Scores(sums=total, channels=channels, lead_seconds=np.array([DAY]), climatology="all")
    assert scores.mae()[0, 0] == pytest.approx(4.0, rel=1e-14)
    assert total.samples.tolist() == [7]


def test_sums_of_other_channels_or_leads_do_not_add() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        _ = Sums.zero(["a", "b"], 2) + Sums.zero(["b", "a"], 2)
    with pytest.raises(ValueError, match="do not add up"):
        _ = Sums.zero(["a"], 2) + Sums.zero(["a"], 3)


def test_cells_count_only_where_truth_and_references_are_finite() -> None:
    shape = (1, *GRID.shape)
    fields = random_fields(shape)
    counted = np.ones(shape, bool)
    counted[0, 6] = False
    fields["truth"][0, 0, 0] = np.nan
    fields["forecast"][0, 0, 0] = np.nan  # no truth there: no error
    fields["persistence"][0, 1, 1] = np.nan
    fields["climatology"][0, 2, 2] = np.nan
    sums = pair_sums(["a"], 1, 0, **fields, counted=counted, cell_area=GRID.cell_area, where="")
    expected = counted[0].copy()
    expected[[0, 1, 2], [0, 1, 2]] = False
    assert sums.cells[0, 0] == expected.sum()
    assert sums.weight[0, 0] == pytest.approx(GRID.cell_area[expected].sum())
    assert np.isfinite(sums.values).all()


def test_a_hole_in_the_forecast_is_an_error_that_says_where(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", float)

    def field(day: int, lead: int) -> np.ndarray:
        values = np.full((2, *GRID.shape), 1.0)
        if (day, lead) == (5, 2):
            values[1, 3, 4:6] = np.nan
        return values

    path = make_forecast(tmp_path / "f.zarr", field)
    with pytest.raises(
        ValueError,
        match=r"zos at init_time 2003-01-06 00:00:00, lead 2 has no finite value in 2 of 42 sea",
    ):
        score(path, store)
    assert np.isfinite(score(path, store, region=(0, 100, -90, 90)).rmse()).all()


def test_a_region_limits_the_cells(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", lambda day: 0.0)
    error = np.zeros(GRID.shape)
    error[:, [0, 7]] = 3.0  # longitudes 0 and 315
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: error)
    crossing = score(path, store, region=(-60, 10, -90, 90))
    np.testing.assert_allclose(crossing.rmse(), 3.0)
    assert crossing.sums.cells[0].tolist() == [2 * 14, 2 * 7]
    with pytest.raises(ValueError, match=r"region \(0, 50, -90, 90\) holds no sea cell of zos"):
        score(path, store, region=(0, 50, -90, 90))
    with pytest.raises(ValueError, match="holds no grid point"):
        score(path, store, region=(1, 2, -90, 90))


def test_a_truth_that_is_one_hole_is_an_error_and_no_nan(tmp_path: Path) -> None:
    def field(day: int) -> np.ndarray:
        values = np.full((2, *GRID.shape), float(day))
        if day == 5:
            values[1] = np.nan
        return values

    store = make_store(tmp_path / "s", field)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: 1.0, inits=(2,))
    with pytest.raises(ValueError, match="no cell of zos at lead 3 has a truth"):
        score(path, store)


def test_pairs_beyond_the_store_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path / "s", float, skip=(6,))
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: day + lead, inits=(5, 9), leads=4)
    with caplog.at_level(logging.WARNING):
        scores = score(path, store)
    # Day 6 is a gap; of the second forecast, days 12 and 13 lie beyond the end.
    assert scores.skipped == 3
    assert scores.first_skipped == "2003-01-07 00:00:00"
    assert scores.sums.samples.tolist() == [1, 2, 1, 1]
    assert "3 of 8 forecast fields have no truth" in caplog.text
    assert "3 fields had no truth in the store, the first at 2003-01-07" in scores.table()
    np.testing.assert_allclose(scores.rmse("persistence")[:, 0], [1, 2, 3, 4])


def test_leads_without_any_truth_are_not_scored(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", float)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: day + lead, inits=(9,), leads=5)
    scores = score(path, store)
    assert scores.leads == [1, 2]
    assert scores.rmse().shape == (2, 2)
    with pytest.raises(ValueError, match=r"no score at lead \[3\]; there are \[1, 2\]"):
        scores.table([3])


def test_nothing_to_score_names_the_first_missing_date(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", float)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: 0.0, inits=(11, 12))
    with pytest.raises(ValueError, match="nothing to score: the store has no 2003-01-13 00:00:00"):
        score(path, store)


def test_a_climatology_that_lacks_a_day_is_refused_before_reading(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", float)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: 0.0)
    calls: list[int] = []
    with pytest.raises(ValueError, match=r"no training time on 4 January.*climatology=month"):
        score(path, store, climatology="month-day", progress=lambda done, of: calls.append(done))
    assert calls == []
    score(path, store, climatology="month", progress=lambda done, of: calls.append(done))
    assert calls == [1, 2, 3, 4, 5, 6]


def test_other_units_names_or_grids_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", float)
    kelvin = Channels([
        Channel(variable="thetao", units="K", role="prognostic", level=5.0, level_units="m"),
    ])  # fmt: skip
    salt = Channels([Channel(variable="so", units="1e-3", role="prognostic")])
    coarse = Grid(np.linspace(80, -80, 7), GRID.lon)
    for name, more, text in (
        ("u", {"channels": kelvin}, r"thetao@5 is in 'K' on levels in 'm' in the forecast and in"
                                    r" 'degC' on levels in 'm' in the store"),
        ("n", {"channels": salt}, r"no so: the forecast holds so, the store thetao@5, zos"),
        ("g", {"grid": coarse}, r"grid \(lat 80 to -80, lon 0 to 315, 7 x 8\) is not the store's"
                                r" \(lat 90 to -90"),
    ):  # fmt: skip
        path = make_forecast(tmp_path / f"{name}.zarr", lambda day, lead: 0.0, **more)
        with pytest.raises(ValueError, match=text):
            score(path, store)


def test_channels_are_matched_by_name_and_not_by_position(tmp_path: Path) -> None:
    both = np.stack([np.full(GRID.shape, 20.0), np.full(GRID.shape, 1.0)])
    store = make_store(tmp_path / "s", lambda day: both)
    swapped = CHANNELS.subset([1, 0])
    truth = np.stack([np.full(GRID.shape, 1.0), np.full(GRID.shape, 20.0)])
    with ForecastWriter(
        tmp_path / "f.zarr", channels=swapped, grid=GRID, init_times=[date(2)],
        valid_times=np.array([[date(3)]]), nominal_step_seconds=DAY, regular=True, attributes={},
    ) as writer:  # fmt: skip
        writer.write(0, 0, truth.astype(np.float32))
    scores = score(tmp_path / "f.zarr", store)
    assert scores.channels.names == ("zos", "thetao@5")
    np.testing.assert_array_equal(scores.rmse(), [[0.0, 0.0]])


def test_the_normalised_mean_divides_by_the_training_deviation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path / "s", float)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: day + lead + 2.0)
    scores = score(path, store, statistics_std={"thetao@5": 4.0, "zos": 0.5, "other": 1.0})
    np.testing.assert_allclose(scores.normalised(), (2 / 4 + 2 / 0.5) / 2, rtol=1e-14)
    np.testing.assert_allclose(
        scores.normalised("persistence"), np.array([1, 2, 3]) * (1 / 4 + 1 / 0.5) / 2, rtol=1e-14
    )
    assert "normalised" in scores.table()
    with pytest.raises(ValueError, match="no training standard deviation of zos"):
        score(path, store, statistics_std={"thetao@5": 4.0})
    with pytest.raises(ValueError, match="needs the training standard deviations"):
        score(path, store).normalised()
    constant = score(path, store, statistics_std={"thetao@5": 4.0, "zos": 0.0})
    np.testing.assert_allclose(constant.normalised(), 2 / 4)
    assert "constant, not in the normalised mean: zos" in caplog.text
    # Where none varies the other scores are there all the same.
    none = score(path, store, statistics_std={"thetao@5": 0.0, "zos": 0.0})
    np.testing.assert_array_equal(none.rmse(), scores.rmse())
    assert "no channel varies in training: there is no normalised mean" in caplog.text
    assert "normalised" not in none.table()
    assert "normalised" not in {row["channel"] for row in none.rows()}


@pytest.fixture
def small(tmp_path: Path) -> Scores:
    store = make_store(tmp_path / "s", float)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: day + lead + 0.5 * lead)
    return score(path, store, statistics_std={"thetao@5": 4.0, "zos": 0.5})


def test_the_table_has_a_row_per_channel_and_ratios_at_the_last_lead(small: Scores) -> None:
    lines = small.table().splitlines()
    assert lines[0].split() == [
        "RMSE", "units", "1", "d", "2", "d", "3", "d",
        "/persistence", "/climatology", "bias", "ACC", "activity",
    ]  # fmt: skip
    assert lines[1].split()[:6] == ["thetao@5", "degC", "0.5", "1", "1.5", "0.500"]
    assert lines[1].split()[-3:] == ["+1.5", "0.999", "-"]
    assert lines[2].split()[:2] == ["zos", "m"]
    assert lines[3].split()[:2] == ["normalised", "1"]
    assert "at 3 d. 6 forecast fields" in lines[4]
    assert max(map(len, lines)) <= 100


# Wide enough for segments beside the land of zos.
WIDE = Grid(np.linspace(80, -80, 9), np.arange(0, 360, 5.0))


def wide_scores(tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], **more: Any) -> Scores:
    """Noise, and a forecast of the truth with the anomalies changed."""
    fields = np.random.default_rng(3).normal(size=(12, 2, *WIDE.shape)).astype(np.float32)
    fields[:2] = 0  # the climatology is smooth
    fields += 20 + 10 * np.cos(np.deg2rad(WIDE.lat))[:, None].astype(np.float32)
    fields[:, 1, :, :9] = np.nan
    times = TimeAxis(np.array([seconds_of(date(day)) for day in range(12)]), "noleap", DAY)
    writer = StoreWriter(tmp_path / "s", channels=CHANNELS, grid=WIDE, times=times)
    for day, field in enumerate(fields):
        writer.write(day, field)
    usual = fields[:2].astype(np.float64).mean(0)
    path = tmp_path / "f.zarr"
    with ForecastWriter(
        path, channels=CHANNELS, grid=WIDE, init_times=[date(2), date(5)],
        valid_times=np.array([[date(day + k + 1) for k in range(3)] for day in (2, 5)]),
        nominal_step_seconds=DAY, regular=True, attributes={"run_fingerprint": "r1"},
    ) as forecast:  # fmt: skip
        for i, day in enumerate((2, 5)):
            for k in range(3):
                values = usual + change(fields[day + k + 1] - usual)
                forecast.write(i, k, values.astype(np.float32))
    return score(path, writer.finish(), **more)


def smoothed(anomaly: np.ndarray) -> np.ndarray:
    """Weighted mean of three columns; land stays land."""
    filled = np.nan_to_num(anomaly)
    mean = (np.roll(filled, 1, -1) + 2 * filled + np.roll(filled, -1, -1)) / 4
    return np.where(np.isfinite(anomaly), mean, np.nan)


def test_a_smoothed_forecast_is_called_damped_and_smoother_with_numbers(tmp_path: Path) -> None:
    scores = wide_scores(tmp_path, smoothed)
    # Weights 1/4, 1/2, 1/4 of white noise leave 3/8 of its variance, and less beside land.
    np.testing.assert_allclose(scores.activity_ratio()[:, 0], np.sqrt(3 / 8), rtol=0.05)
    assert (scores.activity_ratio()[:, 1] < 0.65).all()
    assert (scores.short_power_ratio() < 0.02).all()
    assert scores.spectra is not None
    assert len(set(scores.spectra.kind)) == 1
    columns = int(scores.spectra.kind[0].split()[2])
    low, high = min(scores.activity_ratio()[-1]), max(scores.activity_ratio()[-1])
    assert max(map(len, scores.table().splitlines())) <= 100
    text = " ".join(scores.table().split())
    assert f"Activity at 3 d / truth's: {low:.3g} (" in text
    assert f"to {high:.3g} (" in text
    assert "), damped in thetao@5, zos." in text
    assert "Power at short waves at 3 d / truth's: 0.0" in text
    assert "), smoother in thetao@5, zos." in text
    assert f"segments of {columns} columns" in text
    told = json.loads(json.dumps(scores.to_dict()))
    assert told["format"] == "graticule scores 2"
    assert told["spectra"]["leads"] == [1, 2, 3]
    channel = told["spectra"]["channels"]["zos"]
    assert channel["kind"] == f"segments of {columns} columns"
    assert 0.75 <= channel["share"] <= 1
    assert channel["short_power_ratio"] == scores.short_power_ratio()[:, 1].tolist()
    assert channel["short_wavenumbers"][1] == 36


def test_a_forecast_of_the_truth_is_as_active_and_as_fine(tmp_path: Path) -> None:
    scores = wide_scores(tmp_path, lambda anomaly: anomaly)
    text = " ".join(scores.table().split())
    assert "Activity at 3 d / truth's: 1 (" in text
    assert ", as active." in text
    assert ", as fine." in text
    np.testing.assert_allclose(scores.short_power_ratio(), 1, rtol=1e-5)


def test_a_noisy_forecast_is_called_too_active_and_rougher(tmp_path: Path) -> None:
    text = " ".join(wide_scores(tmp_path, lambda anomaly: 2 * anomaly).table().split())
    assert "to 2 (" in text
    assert "too active in thetao@5, zos." in text
    assert "rougher in thetao@5, zos." in text


def test_spectra_are_of_the_region_alone(tmp_path: Path) -> None:
    def change(anomaly: np.ndarray) -> np.ndarray:
        return np.where(WIDE.lat[:, None] > 0, smoothed(anomaly), anomaly)

    south = wide_scores(tmp_path, change, region=(-100, 10, -90, -10))
    np.testing.assert_allclose(south.short_power_ratio()[:, 0], 1, rtol=1e-5)
    assert south.spectra is not None
    # 4 rows of 23 columns from 260 to 10, of which zos has the first 20.
    assert south.spectra.kind[0] == south.spectra.kind[1] != "circles"
    assert south.spectra.attributes["region"] == [-100, 10, -90, -10]


def test_a_wide_table_shows_fewer_leads(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", lambda day: 123.456 * day, days=16)
    path = make_forecast(tmp_path / "f.zarr", lambda day, lead: 123.456 * (day + 2), leads=9)
    lines = score(path, store).table().splitlines()
    assert max(map(len, lines)) <= 100
    # Five would be 1, 3, 5, 7 and 9 days; large numbers leave room for four.
    assert [day for day in range(1, 10) if f" {day} d" in lines[0]] == [1, 4, 6, 9]
    assert max(map(len, score(path, store).table([1, 3, 5, 7, 9]).splitlines())) > 100


def test_a_channel_without_a_spectrum_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = np.random.default_rng(4).normal(size=(12, *GRID.shape)).astype(np.float32)
    store = make_store(tmp_path / "s", lambda day: fields[day])
    scores = score(make_forecast(tmp_path / "f.zarr", lambda day, lead: fields[day]), store)
    assert "no spectrum of zos: segments of 8 columns cover 0% of its area" in caplog.text
    assert "No spectrum of zos; the file of spectra says why." in scores.table()
    told = scores.to_dict()["spectra"]["channels"]
    assert told["zos"]["short_power_ratio"] == [None] * 3
    assert told["zos"]["short_wavenumbers"] is None
    assert told["thetao@5"]["kind"] == "circles"


def test_csv_and_json_hold_every_score(small: Scores, tmp_path: Path) -> None:
    small.write_csv(tmp_path / "out" / "scores.csv")
    small.write_json(tmp_path / "out" / "scores.json")
    with (tmp_path / "out" / "scores.csv").open() as file:
        lines = list(csv.DictReader(file))
    found = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert len(lines) == len(found["rows"]) == 3 * (2 * 3 + 3)
    (row,) = [
        row
        for row in found["rows"]
        if (row["source"], row["channel"], row["lead"]) == ("model", "thetao@5", 3)
    ]
    assert (row["variable"], row["level"], row["level_units"]) == ("thetao", 5.0, "m")
    assert (row["units"], row["lead_hours"], row["samples"]) == ("degC", 72.0, 2)
    assert row["rmse"] == small.rmse()[2, 0] == pytest.approx(1.5)
    same = lines[found["rows"].index(row)]
    assert float(same["rmse"]) == row["rmse"]
    assert [row["acc"] for row in found["rows"] if row["source"] == "climatology"] == [None] * 9
    assert found["provenance"]["forecast"]["run_fingerprint"] == "r1"
    assert found["provenance"]["store_fingerprint"]
    assert len(found["fingerprint"]) == 16
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["scores.csv", "scores.json"]


def test_existing_files_are_refused_and_only_scores_are_replaced(
    small: Scores, tmp_path: Path
) -> None:
    for write, name in ((small.write_csv, "a.csv"), (small.write_json, "a.json")):
        path = tmp_path / name
        write(path)
        before = path.read_bytes()
        with pytest.raises(ValueError, match="exists already and is not overwritten"):
            write(path)
        write(path, force=True)
        assert path.read_bytes() == before
        path.write_text("thesis")
        with pytest.raises(ValueError, match="is no file of scores, so it is not replaced"):
            write(path, force=True)
        assert path.read_text() == "thesis"
    with pytest.raises(ValueError, match="is no file of scores"):
        small.write_json(tmp_path / "f.zarr", force=True)


def test_scores_of_an_earlier_format_are_replaced(small: Scores, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "format": "graticule scores 1",\n "rows": []\n}\n')
    (tmp_path / "a.csv").write_text(
        "source,channel,variable,level,level_units,units,lead,lead_hours,samples,cells,rmse\n"
    )
    small.write_json(tmp_path / "a.json", force=True)
    small.write_csv(tmp_path / "a.csv", force=True)
    assert json.loads((tmp_path / "a.json").read_text()) == small.to_dict()
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + len(small.rows())


def test_spectra_go_to_a_file_of_their_own(small: Scores, tmp_path: Path) -> None:
    small.write_spectra(tmp_path / "s.nc")
    found = Spectra.load(tmp_path / "s.nc")
    assert found.names == ("thetao@5", "zos")
    assert found.attributes["run_fingerprint"] == "r1"
    assert found.attributes["store_fingerprint"]
    with pytest.raises(ValueError, match="exists already"):
        small.write_spectra(tmp_path / "s.nc")
    with pytest.raises(ValueError, match="made without spectra"):
        replace(small, spectra=None).write_spectra(tmp_path / "t.nc")
