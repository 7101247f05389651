"""The bench of ensembles on a tiny planet: equal compute, scores by initial time, resuming."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graticule.bench import Setting, ensemble_runs, ensemble_sums, ensembles, run
from graticule.bench.ensemble_sums import Members, field_scores, interval, mean_over
from graticule.data.demo import write_demo_store
from graticule.data.planet import Planet
from graticule.evaluate.ensemble_sums import FieldSums
from graticule.tasks import evaluate_forecast

TINY = Planet(num_lat=16, num_lon=32, num_runs=3, samples_per_run=16, dt_seconds=1080)
STORES = {percent: Path(f"planet-{percent}") for percent in (10, 30, 100)}


def passes(*configs: Any) -> int:
    return sum(
        config.train.steps * ensemble_runs.step_passes(config.bayes.members, config.train.leads)
        for config in configs
    )


def test_all_that_is_compared_has_the_same_compute() -> None:
    runs = ensemble_runs.configs(STORES, Path("out"), seed=3)
    firsts = {"both": "noisy", "noise": "noisy", "weights": "plain", "twin": "plain"}
    ours = {passes(runs[f"{first}-first"], runs[name]) for name, first in firsts.items()}
    names = [f"deep-{number}" for number in range(ensemble_runs.DEEP)]
    assert ours == {sum(passes(runs[f"{name}-first"], runs[name]) for name in names)}
    # A member that is differentiated costs 3; all but the last are heard once more before.
    assert [ensemble_runs.step_passes(m, 1) for m in (1, 2, 4)] == [3, 7, 15]
    assert ensemble_runs.step_passes(2, 3) == 21


def test_runs_differ_in_what_they_are_named_after() -> None:
    runs = ensemble_runs.configs(STORES, Path("out"), seed=3)
    both, weights, noise, twin = (runs[name] for name in ("both", "weights", "noise", "twin"))
    assert both.train.start_from == noise.train.start_from == "out/noisy-first"
    assert weights.train.start_from == twin.train.start_from == "out/plain-first"
    assert noise.bayes == replace(both.bayes, weights=False)
    assert weights.bayes == both.bayes
    assert weights.model == replace(both.model, nice_noise=0) == twin.model
    assert runs["noisy-first"].model == noise.model == both.model
    assert runs["noisy-first"].train == runs["plain-first"].train
    schedules = {
        (run.train.leads, run.train.learning_rate, run.train.final_learning_rate)
        for run in (both, weights, noise, twin, runs["deep-0"])
    }
    assert len(schedules) == 1
    assert not twin.bayes.draws
    data = [runs[f"data-{percent}"] for percent in (10, 30, 100)]
    assert [run.data.store for run in data] == ["planet-10", "planet-30", "planet-100"]
    assert len({(run.bayes, run.model, run.train) for run in data}) == 1
    assert not data[0].train.roll_longitude
    seeds = [runs[f"deep-{number}"].train.seed for number in range(ensemble_runs.DEEP)]
    assert len(set(seeds)) == ensemble_runs.DEEP
    other = ensemble_runs.configs(STORES, Path("out"), seed=4)
    assert not set(seeds) & {other[f"deep-{n}"].train.seed for n in range(ensemble_runs.DEEP)}


def test_scores_of_a_field_are_those_of_evaluate() -> None:
    generator = np.random.default_rng(5)
    x, y = generator.standard_normal((6, 2, 8, 12)), generator.standard_normal((2, 8, 12))
    area = np.linspace(1.0, 3.0, 8)[:, None] * np.ones(12)
    for num in (1, 2, 6):
        sums = FieldSums.zero(2, num)
        for channel in range(2):
            sums.add(
                channel, x[:num, channel], y[channel], np.ones((8, 12), bool), area, key=(0, 0)
            )
        weight, absolute, difference, square, variance = sums.values
        wanted = [(each / weight).mean() for each in (square, variance, absolute, difference)]
        assert np.allclose(field_scores(x[:num], y, area), wanted, rtol=1e-12)


def drawn(num: int, inits: int = 40, spread: float = 1.0) -> Members:
    """Scores of members and a truth that are all standard normal, at 500 points each."""
    generator = np.random.default_rng(num)
    x = spread * generator.standard_normal((num, inits, 1, 500))
    y = generator.standard_normal((inits, 1, 500))
    pairs = np.abs(x[:, None] - x[None]).sum((0, 1)) / (num * (num - 1))
    return Members(
        num, ((x.mean(0) - y) ** 2).mean(-1), x.var(0, ddof=1).mean(-1),
        np.abs(x - y).mean((0, -1)), pairs.mean(-1),
    )  # fmt: skip


@pytest.mark.parametrize("num", [2, 4, 16])
def test_of_members_like_the_truth_spread_is_error_and_the_fair_crps_the_exact_one(
    num: int,
) -> None:
    found = drawn(num)
    assert found.spread_skill() == pytest.approx(1, abs=0.03)
    assert found.crps().mean() == pytest.approx(1 / np.sqrt(np.pi), rel=0.02)
    assert found.crps(fair=False).mean() > found.crps().mean()
    assert drawn(num, spread=0.5).spread_skill() < 0.85


def test_a_mean_over_seeds_is_of_the_scores() -> None:
    one, two = drawn(4), drawn(4, spread=2.0)
    assert np.allclose(mean_over([one, two]).square, (one.square + two.square) / 2)
    assert Members.from_dict(json.loads(json.dumps(one.to_dict()))).rmse() == one.rmse()


def test_scores_of_some_members_are_of_others_for_each_initial_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Member k says k and the truth is 0, so that the mean of a pair tells who they are."""
    inits, total = 40, 4

    class Forecast:
        init_times, num_leads, num_members = range(inits), 1, total
        valid_times = np.arange(inits)[:, None]

        def __enter__(self) -> "Forecast":
            return self

        def __exit__(self, *error: object) -> None: ...

        def read(self, init: int, lead: int, member: int) -> np.ndarray:
            return np.full((1, 2, 3), float(member))

    truth = SimpleNamespace(
        channels=SimpleNamespace(names=["h"]),
        grid=SimpleNamespace(cell_area=np.ones((2, 1)), shape=(2, 3)),
        times=SimpleNamespace(seconds=np.arange(inits)),
        read=lambda time: np.zeros((1, 2, 3)),
    )
    one = SimpleNamespace(aligned=lambda names: (np.zeros(1), np.ones(1)))
    monkeypatch.setattr(ensemble_sums, "open_forecast", lambda path: Forecast())
    monkeypatch.setattr(ensemble_sums, "Store", lambda path: truth)
    monkeypatch.setattr(ensemble_sums, "Statistics", SimpleNamespace(load=lambda store: one))
    monkeypatch.setattr(ensemble_sums, "seconds_of", int)
    two, four = ensemble_sums.scored([Path("f")], Path("t"), (2, 4))
    means = np.sqrt(two.square[:, 0]).round(9)
    assert set(means.tolist()) == {0.5, 1.0, 1.5, 2.0, 2.5}  # all sums of two of 0, 1, 2, 3
    (whole,) = ensemble_sums.scored([Path("f")], Path("t"))
    assert (two.num, four.num, whole.num) == (2, 4, 4)
    np.testing.assert_allclose(four.square, whole.square)
    np.testing.assert_allclose(four.difference, whole.difference)
    np.testing.assert_allclose(whole.square, 1.5**2)


def test_an_interval_covers_and_is_wider_where_times_follow_each_other() -> None:
    values = np.repeat(np.random.default_rng(0).standard_normal(10), 3)  # three alike in a row
    low, high = interval(lambda some: float(values[some].mean()), 30, hours=24)
    assert low < values.mean() < high
    alone = interval(lambda some: float(values[some].mean()), 30, hours=72)
    assert high - low > 1.2 * (alone[1] - alone[0])


@pytest.fixture(scope="module")
def planet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ensembles")
    write_demo_store(folder / "planet.zarr", TINY, workers=1)
    (folder / "planet-10.zarr").symlink_to(folder / "planet.zarr")
    return folder


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(ensemble_runs.MODEL, width=8, inner_depth=1, heads=1, inner_heads=1,
                    norm_groups=2, nice_noise=4)  # fmt: skip
    for name, value in {"MODEL": model, "BATCH": 4, "FIRST_STEPS": 2, "STEPS": 1,
                        "DATA_STEPS": 2, "DEEP": 2, "LEADS": 1, "EVERY": 8,
                        "SHARES": {10: TINY}}.items():  # fmt: skip
        monkeypatch.setattr(ensemble_runs, name, value)
    for name, value in {"DEEP": 2, "EVERY": 8, "MEMBERS": 2, "MANY": 4, "MANY_EVERY": 8,
                        "SIZES": (2, 4), "SHARES": {10: TINY}}.items():  # fmt: skip
        monkeypatch.setattr(ensembles, name, value)
    monkeypatch.setattr(ensemble_sums, "RESAMPLES", 50)


@pytest.mark.usefixtures("short")
def test_rows_are_of_the_scored_forecasts_and_a_second_run_computes_nothing_again(
    planet: Path,
) -> None:
    said: list[str] = []
    result = json.loads(json.dumps(run("ensembles", Setting(say=said.append, out=planet))))
    rows = {row["what"]: row for row in result["rows"]}
    assert list(rows) == [
        "spread/error 12 h", "spread/error 24 h", "RMSE 12 h, twin", "RMSE 24 h, twin",
        "RMSE 12 h, deep", "RMSE 24 h, deep", "fair CRPS 12 h, twin", "fair CRPS 24 h, twin",
        "fair CRPS 12 h, deep", "fair CRPS 24 h, deep", "weight spread, 100 % of data",
        "forecast spread, 100 % of data", "spread/error, weights", "fair CRPS, weights",
        "spread/error, noise", "fair CRPS, noise", "RMSE, turned twin", "fair CRPS, turned twin",
        "RMSE, turned deep", "fair CRPS, turned deep", "RMSE^2 = a + b/m", "RMSE falls with m",
        "fair CRPS flat in m", "CRPS falls with m",
    ]  # fmt: skip
    for row in rows.values():
        assert np.isfinite(row["ratio"]), row
    scores = evaluate_forecast(planet / "seed-0" / "both" / "forecast.zarr")
    assert scores.ensemble is not None
    std = np.array(json.loads((planet / "planet.zarr/statistics.json").read_text())["std"])
    crps = (scores.ensemble.crps("fair") / std).mean(1)
    assert rows["fair CRPS 24 h, twin"]["ours"] == pytest.approx(crps[1], rel=1e-5)
    rmse = np.sqrt((scores.ensemble.rmse() ** 2 / std**2).mean(1))
    assert rows["RMSE 12 h, deep"]["ours"] == pytest.approx(rmse[0], rel=1e-5)
    twin = evaluate_forecast(planet / "seed-0" / "twin" / "forecast.zarr").normalised()
    assert rows["RMSE 24 h, twin"]["against"] == pytest.approx(twin[1], rel=0.05)
    turned = json.loads((planet / "seed-0" / "turned-twin.json").read_text())["scores"]
    assert np.min(turned["variance"]) > 0
    assert sum("steps" in text for text in said) == 12
    again: list[str] = []
    repeated = run("ensembles", Setting(say=again.append, out=planet))
    assert not again
    assert [row["ours"] for row in repeated["rows"]] == [row["ours"] for row in result["rows"]]
    # What was stopped between a forecast and its scores is scored, and not trained again.
    (planet / "seed-0" / "both.json").unlink()
    weights = planet / "seed-0" / "both" / "run.json"
    before = weights.stat().st_mtime_ns
    third = run("ensembles", Setting(out=planet))
    assert [row["ours"] for row in third["rows"]] == [row["ours"] for row in result["rows"]]
    assert weights.stat().st_mtime_ns == before
