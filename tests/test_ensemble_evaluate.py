"""Scoring a forecast with members, from the file to the files of scores."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble_case import make_ensemble
from graticule.data.store import Store
from graticule.evaluate import EnsembleScores, Scores, crps, load_ensemble, members
from graticule.evaluate.ensemble_file import save_ensemble
from graticule.forecast.reader import open_forecast
from graticule.parallel.local import LocalRanks
from test_evaluate import GRID, make_forecast, make_store, planes, score

SUMMED = ("values", "energy", "ranks", "events", "plumes")
AREA = GRID.cell_area
SEA = np.isfinite(planes(0.0))


def truth(day: int) -> np.ndarray:
    return np.random.default_rng(day).normal(20, 3, size=(2, *GRID.shape))


def guess(day: int, lead: int, member: int) -> np.ndarray:
    return truth(day + lead) + np.random.default_rng([day, lead, member]).normal(
        size=(2, *GRID.shape)
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("data") / "store", truth)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ensemble(tmp_path_factory.mktemp("forecast") / "f.nc", guess, 4)


def ensemble_of(scores: Scores) -> EnsembleScores:
    assert scores.ensemble is not None
    return scores.ensemble


def fields(values: np.ndarray) -> np.ndarray:
    return planes(values).astype(np.float64)


def weighted(values: np.ndarray, channel: int) -> float:
    sea = SEA[channel]
    return float((AREA[sea] * values[sea]).sum() / AREA[sea].sum())


# The file


def test_members_are_read_one_at_a_time_and_otherwise_their_mean(path: Path) -> None:
    with open_forecast(path) as forecast:
        assert forecast.num_members == 4
        assert forecast.variables == [(0,), (1,)]
        each = [forecast.read(1, 2, k) for k in range(4)]
        for k in range(4):
            np.testing.assert_array_equal(each[k], planes(guess(5, 3, k)))
        mean = np.mean(each, axis=0, dtype=np.float64).astype(np.float32)
        np.testing.assert_array_equal(forecast.read(1, 2), mean)
        np.testing.assert_array_equal(forecast.read(1, 2, 3, channels=[1, 0]), each[3][::-1])
        np.testing.assert_array_equal(forecast.read(1, 2, channels=[1]), mean[1:])
        with pytest.raises(ValueError, match="member 4 lies outside 4 members"):
            forecast.read(0, 0, 4)


def test_the_place_of_the_member_dim_does_not_matter(
    path: Path, store: Store, tmp_path: Path
) -> None:
    other = make_ensemble(tmp_path / "late.nc", guess, 4, at=-3)
    ours, theirs = (ensemble_of(score(file, store)).sums for file in (other, path))
    for name in SUMMED:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_a_forecast_without_members_has_no_such_scores(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_forecast(tmp_path / "f.nc", lambda day, lead: guess(day, lead, 0))
    scores = score(plain, store)
    assert scores.ensemble is None
    assert "ensemble" not in scores.to_dict()
    assert "nsemble" not in scores.table()
    with pytest.raises(ValueError, match="without members"):
        scores.write_ensemble(tmp_path / "f.ensemble.nc")
    with open_forecast(plain) as forecast, pytest.raises(ValueError, match="outside 0 members"):
        forecast.read(0, 0, 0)
    with caplog.at_level(logging.WARNING):
        told = score(plain, store, thresholds=["zos>21"])
    assert "has no members, and they are left out" in caplog.text
    assert told.to_dict() == scores.to_dict()


# Scores


def test_scores_of_members_are_those_of_whole_arrays(path: Path, store: Store) -> None:
    scores = score(path, store, thresholds=["zos>21"], statistics_std={"thetao@5": 2, "zos": 3})
    ours = ensemble_of(scores)
    assert (ours.num_members, ours.leads) == (4, [1, 2, 3])
    for lead in (1, 3):
        pairs = [(np.stack([fields(guess(day, lead, k)) for k in range(4)]),
                  fields(truth(day + lead))) for day in (2, 5)]  # fmt: skip
        for c in range(2):
            for kind in ("standard", "fair", "almost_fair"):
                expected = np.mean([weighted(crps(x, y, kind=kind)[c], c) for x, y in pairs])
                assert ours.crps(kind)[lead - 1, c] == pytest.approx(expected, rel=1e-12)
            square = np.mean([weighted((x.mean(0) - y)[c] ** 2, c) for x, y in pairs])
            spread = np.mean([weighted(x.var(0, ddof=1)[c], c) for x, y in pairs])
            assert ours.rmse()[lead - 1, c] == pytest.approx(np.sqrt(square), rel=1e-12)
            assert ours.spread()[lead - 1, c] == pytest.approx(np.sqrt(1.25 * spread), rel=1e-12)
        brier = np.mean([weighted((np.mean(x[:, 1] > 21, axis=0) - (y[1] > 21)) ** 2, 1)
                         for x, y in pairs])  # fmt: skip
        assert ours.brier(0)[lead - 1] == pytest.approx(brier, rel=1e-12)

        def together(field: np.ndarray) -> float:
            return float(np.sqrt(np.mean([weighted(field[c] ** 2, c) / (2 + c) ** 2
                                          for c in range(2)])))  # fmt: skip

        energy = [
            np.mean([together(each - y) for each in x])
            - sum(together(a - b) for a in x for b in x) / (2 * 4 * 3)
            for x, y in pairs
        ]
        assert ours.energy("fair")[lead - 1, -1] == pytest.approx(np.mean(energy), rel=1e-12)


def test_the_other_errors_are_of_the_mean_and_activity_and_spectra_of_the_members(
    path: Path, store: Store, tmp_path: Path
) -> None:
    scores = score(path, store)
    np.testing.assert_allclose(scores.rmse(), ensemble_of(scores).rmse(), rtol=1e-12)
    single = []
    for k in range(4):
        plain = make_forecast(tmp_path / f"{k}.nc", lambda day, lead, k=k: guess(day, lead, k))
        single.append(score(plain, store))
    activity = np.mean([each.sums.activity[0] for each in single], axis=0)
    np.testing.assert_allclose(scores.sums.activity[0], activity, rtol=1e-12)
    assert scores.spectra is not None
    power = np.mean([each.spectra.sums[0] for each in single], axis=0)  # type: ignore[union-attr]
    np.testing.assert_allclose(scores.spectra.sums[0], power, rtol=1e-12)
    square = np.mean([each.rmse() ** 2 for each in single], axis=0)
    of_members = ensemble_of(scores).rmse_of_members()
    np.testing.assert_allclose(of_members, np.sqrt(square), rtol=1e-12)


def test_members_that_do_not_fit_together_are_read_in_tiles_and_score_the_same(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"thresholds": ["zos>21"], "statistics_std": {"thetao@5": 2, "zos": 3}}
    kept = score(path, store, **given)
    read = members.Members.__init__
    monkeypatch.setattr(
        members.Members, "__init__",
        lambda *args: read(*args, kept_bytes=4 * 4 * GRID.lon.size * 3),  # three rows
    )  # fmt: skip
    tiled = score(path, store, **given)
    for name in SUMMED:
        ours, theirs = (getattr(ensemble_of(s).sums, name) for s in (tiled, kept))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_array_equal(tiled.sums.values, kept.sums.values)


def test_plumes_are_the_members_and_the_truth_at_the_sea_cell_near_a_point(
    path: Path, store: Store
) -> None:
    # Columns 0 and 1 are land of zos; 359 E lies by them, and 315 E is the nearest with both.
    for given, cell in (((31, 60), (2, 2)), ((-50, 300), (5, 7)), ((0, 359), (3, 7))):
        ours = ensemble_of(score(path, store, point=given))
        assert ours.sums.point == cell
        assert ours.point == (GRID.lat[cell[0]], GRID.lon[cell[1]])
        for i, day in enumerate((2, 5)):
            for k in range(3):
                expected = [*(planes(guess(day, k + 1, n))[:, *cell] for n in range(4)),
                            planes(truth(day + k + 1))[:, *cell]]  # fmt: skip
                np.testing.assert_array_equal(ours.sums.plumes[i, k].T, expected)
    assert ensemble_of(score(path, store, region=(130, 190, -60, 0))).point == (-30, 180)


def test_pairs_without_a_truth_are_left_out_of_all_sums(store: Store, tmp_path: Path) -> None:
    # Of the second start only day 11 lies in the store.
    path = make_ensemble(tmp_path / "f.nc", guess, 3, inits=(2, 10))
    ours = ensemble_of(score(path, store))
    np.testing.assert_array_equal(ours.scored, [[True, True, True], [True, False, False]])
    once = ensemble_of(score(make_ensemble(tmp_path / "g.nc", guess, 3, inits=(2,)), store))
    np.testing.assert_allclose(ours.crps("fair")[1:], once.crps("fair")[1:], rtol=1e-13)
    np.testing.assert_allclose(ours.energy("fair")[1:], once.energy("fair")[1:], rtol=1e-13)


def test_one_member_is_scored_and_what_it_cannot_have_is_said(store: Store, tmp_path: Path) -> None:
    scores = score(make_ensemble(tmp_path / "f.nc", guess, 1), store)
    ours = ensemble_of(scores)
    np.testing.assert_allclose(ours.crps("standard"), scores.mae(), rtol=1e-12)
    assert "one member has no spread" in " ".join(scores.table().split())
    told = scores.to_dict()["ensemble"]
    assert "fair scores, spread" in told["left_out"]
    assert all("fair_crps" not in row for row in told["rows"])
    ours_again = load_ensemble(saved(ours, tmp_path))
    assert ours_again.told() == ours.told()


def test_a_hole_in_a_member_is_an_error_that_names_it(store: Store, tmp_path: Path) -> None:
    def holed(day: int, lead: int, member: int) -> np.ndarray:
        values = guess(day, lead, member)
        if (day, lead, member) == (5, 2, 1):
            values[0, 3, 4:6] = np.nan
        return values

    path = make_ensemble(tmp_path / "f.nc", holed, 3)
    with pytest.raises(
        ValueError, match=r"member 1 of the forecast of thetao@5 at .*, lead 2 has no finite value"
        r" in 2 of 56"
    ):  # fmt: skip
        score(path, store)


def test_an_event_of_no_channel_is_refused(path: Path, store: Store) -> None:
    with pytest.raises(ValueError, match="'u>3' is of no channel of the forecast, which has"):
        score(path, store, thresholds=["u>3"])


# Processes


def _on_ranks(path: Path, store: Path, given: dict[str, Any]) -> Any:
    try:
        return score(path, Store(store), **given)
    except ValueError as error:
        return str(error)


def test_scores_on_two_and_three_processes_are_those_of_one(
    path: Path, store: Store, two: LocalRanks, three: LocalRanks
) -> None:
    given = {"thresholds": ["zos>21", "thetao@5<19"], "statistics_std": {"thetao@5": 2, "zos": 3}}
    expected = score(path, store, **given)
    for ranks in (two, three):
        for scores in ranks.run(_on_ranks, path, store.path, given):
            for name in SUMMED:
                ours, theirs = (getattr(ensemble_of(s).sums, name) for s in (scores, expected))
                np.testing.assert_allclose(ours, theirs, rtol=1e-12)
            for key in ("crps", "energy", "spread_skill", "ranks"):
                ours, theirs = (getattr(ensemble_of(s), key)() for s in (scores, expected))
                np.testing.assert_allclose(ours, theirs, rtol=1e-12)


# Files


def saved(scores: EnsembleScores, folder: Path) -> Path:
    path = folder / "saved.ensemble.nc"
    save_ensemble(scores, path)
    return path


@pytest.mark.parametrize("events", [[], ["zos>21.123456789012", "thetao@5<19"]])
def test_the_file_of_scores_holds_all_of_them(
    path: Path, store: Store, tmp_path: Path, events: list[str]
) -> None:
    made = ensemble_of(score(path, store, thresholds=events))
    file = saved(made, tmp_path)
    read = load_ensemble(file)
    for name in SUMMED:
        np.testing.assert_array_equal(getattr(read.sums, name), getattr(made.sums, name))
    assert read.told() == made.told()
    assert read.sums.thresholds == made.sums.thresholds
    assert (read.attributes, read.point, read.calendar) == (
        made.attributes, made.point, made.calendar
    )  # fmt: skip
    with pytest.raises(ValueError, match="exists already"):
        save_ensemble(made, file)
    save_ensemble(replace(made, attributes={}), file, force=True)
    assert load_ensemble(file).attributes == {}
    with pytest.raises(ValueError, match="no ensemble scores there"):
        load_ensemble(tmp_path / "none.nc")
    with pytest.raises(ValueError, match="is no file of ensemble scores"):
        load_ensemble(path)


def test_json_and_table_tell_the_scores(path: Path, store: Store, tmp_path: Path) -> None:
    scores = score(path, store, thresholds=["zos>21"])
    scores.write_json(tmp_path / "f.scores.json")
    told = json.loads((tmp_path / "f.scores.json").read_text())["ensemble"]
    ours = ensemble_of(scores)
    assert told["members"] == 4
    row = next(r for r in told["rows"] if (r["channel"], r["lead"]) == ("zos", 2))
    assert row["fair_crps"] == ours.crps("fair")[1, 1]
    assert row["spread_skill"] == ours.spread_skill()[1, 1]
    assert told["thresholds"][2]["fair_brier"] == ours.brier(0, fair=True)[2]
    text = " ".join(scores.table().split())
    assert f"zos {ours.crps('fair')[2, 1]:.3g} m" in text
    ratio = ours.spread_skill()[:, 1]
    assert f"zos {ratio.min():.2f} to {ratio.max():.2f}" in text
    assert f"Brier score of zos>21 at 3 d: {ours.brier(0)[2]:.3g}" in text
    assert max(len(line) for line in scores.table().splitlines()) <= 100
