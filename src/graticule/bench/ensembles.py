"""`graticule bench ensembles`: whether a Bayesian ensemble is calibrated, and what it is worth.

The claims of BEAST (section IV and Table 3), asked on a coarse demo planet: an ensemble of drawn
weights and of norms that hear noise, against one deterministic model and against an ensemble of
several, all of the same compute; each part alone; fewer training runs; and, as sanity, scores
against the number of members of one posterior. Its members are turned in longitude, as they are in
training, so it is compared too with what turns alone make of the other two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graticule.bench.ensemble_runs import DEEP, EVERY, PLANET, SHARES, configs
from graticule.bench.ensemble_sums import Members, interval, mean_over, scored
from graticule.bench.results import kept
from graticule.bench.rows import Row, Setting
from graticule.bench.worlds import planet_in
from graticule.config import Config
from graticule.tasks import forecast_from_run, trained_run
from graticule.train.progress import read_metrics

TITLE = (
    "an ensemble of drawn weights and norms that hear noise: spread against error; RMSE of its mean"
    " and fair CRPS against a deterministic twin and a deep ensemble of the same compute; each part"
    " alone, with fewer training runs, and by the number of members"
)
OUT = Path("runs/bench-ensembles")
MEMBERS = 16
"""Of the forecasts that are compared."""
MANY, MANY_EVERY = 128, 3
"""Members of the forecast that is scored by their number, one model step long, and which initial
times it starts from."""
SIZES = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class Result:
    """Of one seed. scores: by run; `deep` is the deep ensemble, `turned-twin` and `turned-deep` are
    of as many turned members as ours. noise_to_signal: by run whose
    weights are drawn, root of sum s^2 / sum mu^2. sizes: of 4, 8, ... members."""

    scores: dict[str, Members]
    noise_to_signal: dict[str, float]
    sizes: list[Members]


def rows(setting: Setting) -> list[Row]:
    """The rows; over several seeds those of the mean of their scores, each seed's in the notes.

    A stopped bench goes on where it was: runs resume from their checkpoints, forecasts from their
    records, and what is scored is not computed again.
    """
    out = setting.out or OUT
    stores = {100: planet_in(out, setting, PLANET)}
    for percent, planet in SHARES.items():
        stores[percent] = planet_in(out, setting, planet, f"planet-{percent}")
    results = [_seed(setting, stores, out / f"seed-{seed}", seed) for seed in setting.seeds]
    found = [*_calibration(results)]
    for score in ("RMSE", "fair CRPS"):
        for name in ("twin", "deep"):
            found += _comparisons(results, score, name)
    found += [*_data(results), *_parts(results), *_turned(results), *_numbers(results)]
    return found


def _seed(setting: Setting, stores: dict[int, Path], out: Path, seed: int) -> Result:
    truth = stores[100]

    def trained(name: str, config: Config) -> None:
        setting.say(f"seed {seed}, {name}: {config.train.steps} steps")
        with setting.bar(name, "steps") as progress:
            trained_run(config, out / name, progress=progress)

    def forecast(name: str, file: str, members: int | None, *settings: str) -> Path:
        path = out / name / file
        forecast_from_run(
            out / name, path, settings=[f"data.store={truth}", *settings], resume=True,
            members=members,
        )  # fmt: skip
        return path

    def made(name: str, config: Config) -> dict[str, Any]:
        trained(name, config)
        if name.endswith("-first"):
            return {}  # others start from them
        path = forecast(name, "forecast.zarr", MEMBERS if config.bayes.draws else None)
        (scores,) = scored([path], truth)
        told = read_metrics(out / name)[-1]
        found: dict[str, Any] = {"scores": scores.to_dict()}
        if config.bayes.weights:
            found["noise_to_signal"] = 1 / told["signal_to_noise"]
        return found

    def together(names: Sequence[str], members: int | None) -> dict[str, Any]:
        file = "turned.zarr" if members else "forecast.zarr"
        paths = [forecast(name, file, members) for name in names]
        return {"scores": scored(paths, truth)[0].to_dict()}

    def by_number() -> dict[str, Any]:
        setting.say(f"seed {seed}: {MANY} members")
        settings = "forecast.leads=1", f"forecast.every={MANY_EVERY}"
        path = forecast("both", "many.zarr", MANY, *settings)
        return {"sizes": [each.to_dict() for each in scored([path], truth, SIZES)]}

    runs = configs(stores, out, seed)
    results = {
        name: kept(out, name, config.fingerprint, partial(made, name, config))
        for name, config in runs.items()
    }
    several = [f"deep-{number}" for number in range(DEEP)]
    for name, names, members in (
        ("deep", several, None),
        ("turned-twin", ["twin"], MEMBERS),
        ("turned-deep", several, MEMBERS // DEEP),
    ):
        whose = "/".join(runs[each].fingerprint for each in names)
        results[name] = kept(out, name, whose, partial(together, names, members))
    sizes = kept(out, "many", runs["both"].fingerprint, by_number)["sizes"]
    return Result(
        {name: Members.from_dict(result["scores"]) for name, result in results.items()
         if "scores" in result},
        {name: result["noise_to_signal"] for name, result in results.items()
         if "noise_to_signal" in result},
        [Members.from_dict(each) for each in sizes],
    )  # fmt: skip


def _calibration(results: list[Result]) -> list[Row]:
    """Spread over error at every lead."""
    both = mean_over([result.scores["both"] for result in results])
    low, high = _intervals(lambda some: _at(both, some).spread_skill(), both)
    each = [result.scores["both"].spread_skill() for result in results]
    return [
        Row(
            what=f"spread/error {_hours(lead)}",
            ours=float(ratio),
            against=1.0,
            goal=1.0,
            within=0.15,
            note=f"{both.num} members, spread with the factor for so many; 95 % interval"
            f" {low[lead]:.3f} to {high[lead]:.3f}; {_seeds([e[lead] for e in each])}",
        )
        for lead, ratio in enumerate(both.spread_skill())
    ]


def _comparisons(results: list[Result], score: str, name: str) -> list[Row]:
    """Of an ensemble against `name`, at every lead."""

    def value(members: Members) -> np.ndarray:
        return members.rmse() if score == "RMSE" else members.crps(fair=members.num > 1).mean(0)

    ours, theirs = (mean_over([r.scores[run] for r in results]) for run in ("both", name))
    low, high = _intervals(lambda some: value(_at(ours, some)) / value(_at(theirs, some)), ours)
    each = [value(r.scores["both"]) / value(r.scores[name]) for r in results]
    what = {"twin": "a deterministic twin", "deep": f"a deep ensemble of {DEEP}"}[name]
    told = score if score == "RMSE" or name == "deep" else "fair CRPS, theirs the absolute error"
    return [
        Row(
            what=f"{score} {_hours(lead)}, {name}",
            ours=float(value(ours)[lead]),
            against=float(value(theirs)[lead]),
            goal=1.0,
            unit="normalised",
            at_most=True,
            note=f"{told}, against {what} of the same compute; 95 % interval of the ratio"
            f" {low[lead]:.3f} to {high[lead]:.3f}; {_seeds([e[lead] for e in each])}",
        )
        for lead in range(len(low))
    ]


def _data(results: list[Result]) -> list[Row]:
    """The spread of weights, and of forecasts by weights alone, with more training runs: after
    steps of one member, whose error pulls weights together and whose prior pulls them apart."""
    percents = [*sorted(SHARES), 100]
    order = [f"data-{percent}" for percent in percents]

    def spread(result: Result, name: str) -> float:
        return float(np.sqrt(result.scores[name].variance.mean()))

    measures: dict[str, Callable[[Result, str], float]] = {
        "weight spread": lambda result, name: result.noise_to_signal[name],
        "forecast spread": spread,
    }
    told = {
        "weight spread": "root of sum s^2 / sum mu^2 of all drawn weights",
        "forecast spread": "deviation between members by weights alone, mean over leads",
    }
    found = []
    for what, measure in measures.items():
        values = {name: [measure(result, name) for result in results] for name in order}
        for i in range(len(SHARES)):
            fewer, more = values[order[i]], values[order[i + 1]]
            found.append(
                Row(
                    what=f"{what}, {percents[i + 1]} % of data",
                    ours=float(np.mean(more)),
                    against=float(np.mean(fewer)),
                    goal=1.0,
                    at_most=True,
                    note=f"{told[what]}; against {percents[i]} %;"
                    f" {_seeds(np.array(more) / np.array(fewer))}",
                )
            )
    return found


def _parts(results: list[Result]) -> list[Row]:
    """Weights alone, noise alone, and both: spread over error, and CRPS."""
    found = []
    words = {"weights": "drawn weights alone", "noise": "norms' noise alone"}
    both = mean_over([result.scores["both"] for result in results])
    for name, word in words.items():
        scores = mean_over([result.scores[name] for result in results])
        ratio = scores.spread_skill()
        found.append(
            Row(
                what=f"spread/error, {name}",
                ours=float(ratio.mean()),
                against=float(both.spread_skill().mean()),
                goal=None,
                note=f"{word}, against both, mean over leads; by lead"
                f" {_list(ratio)}, both {_list(both.spread_skill())}",
            )
        )
        each = [r.scores["both"].crps().mean() / r.scores[name].crps().mean() for r in results]
        found.append(
            Row(
                what=f"fair CRPS, {name}",
                ours=float(both.crps().mean()),
                against=float(scores.crps().mean()),
                goal=None,
                unit="normalised",
                at_most=True,
                note=f"both against {word}, mean over leads; {_seeds(each)}",
            )
        )
    return found


def _turned(results: list[Result]) -> list[Row]:
    """Against the twin and the deep ensemble with as many members as ours, which differ by their
    turns in longitude: what is left is the worth of drawn weights and noise."""
    found = []
    both = mean_over([result.scores["both"] for result in results])
    words = {"twin": "the twin", "deep": f"the deep ensemble of {DEEP}"}
    for name, word in words.items():
        theirs = [result.scores[f"turned-{name}"] for result in results]
        mean = mean_over(theirs)
        told = (
            f"both against {word}, {mean.num} members by turns in longitude, whose spread/error is"
            f" {_list(mean.spread_skill())}"
        )
        for what, value in (
            ("RMSE", lambda members: members.rmse()),
            ("fair CRPS", lambda members: members.crps().mean(0)),
        ):
            each = [
                value(result.scores["both"]).mean() / value(other).mean()
                for result, other in zip(results, theirs, strict=True)
            ]
            found.append(
                Row(
                    what=f"{what}, turned {name}",
                    ours=float(value(both).mean()),
                    against=float(value(mean).mean()),
                    goal=None,
                    unit="normalised",
                    at_most=True,
                    note=f"{told}; by lead {_list(value(both) / value(mean))}; {_seeds(each)}",
                )
            )
    return found


def _numbers(results: list[Result]) -> list[Row]:
    """Scores of m members of one posterior, by m."""
    sizes = [mean_over([result.sizes[i] for result in results]) for i in range(len(SIZES))]
    inverse = 1 / np.array([each.num for each in sizes])
    squares = np.array([each.square.mean() for each in sizes])
    slope, start = np.polyfit(inverse, squares, 1)
    away = squares - (start + slope * inverse)
    fit = 1 - (away**2).sum() / ((squares - squares.mean()) ** 2).sum()
    falls = int((np.diff(squares) < 0).sum())
    fair, standard = (
        np.array([each.crps(fair=kind).mean(1) for each in sizes]) for kind in (True, False)
    )

    def slope_of(some: np.ndarray) -> float:
        return float(np.polyfit(inverse, fair[:, some].mean(1), 1)[0])

    flat = slope_of(np.arange(fair.shape[1]))
    low, high = interval(slope_of, fair.shape[1], _spacing(MANY_EVERY))
    # From the slope to the end of its interval on the side of 0.
    reach = flat - low if flat > 0 else high - flat
    at = f"of {', '.join(map(str, SIZES))} members of one posterior, others for each initial time"
    return [
        Row("RMSE^2 = a + b/m", float(fit), 1.0, 0.99,
            note=f"R^2 {at}: a {start:.5g}, b {slope:.4g}, RMSE {_list(np.sqrt(squares), 4)}"),
        Row("RMSE falls with m", float(falls), float(len(SIZES) - 1), 1.0, "doublings"),
        Row("fair CRPS flat in m", abs(flat), reach, 1.0, at_most=True,
            note=f"slope over 1/m {flat:.3g}, against the reach of its 95 % interval towards 0"
            f" ({low:.3g} to {high:.3g}); {_list(fair.mean(1), 5)}"),
        Row("CRPS falls with m", float(standard[-1].mean()), float(standard[0].mean()), 1.0,
            "normalised", at_most=True,
            note=f"ordinary CRPS of {SIZES[-1]} members against {SIZES[0]};"
            f" {_list(standard.mean(1), 5)}"),
    ]  # fmt: skip


def _at(members: Members, some: np.ndarray) -> Members:
    """Of some initial times."""
    return Members(
        members.num, members.square[some], members.variance[some], members.absolute[some],
        members.difference[some],
    )  # fmt: skip


def _intervals(
    statistic: Callable[[np.ndarray], np.ndarray], members: Members
) -> tuple[list[float], list[float]]:
    """95 % intervals at each lead."""
    inits, leads = members.square.shape
    ends = [
        interval(lambda some, lead=lead: float(statistic(some)[lead]), inits, _spacing(EVERY))  # type: ignore[misc]
        for lead in range(leads)
    ]
    return [low for low, _ in ends], [high for _, high in ends]


def _spacing(every: int) -> float:
    """Hours between initial times."""
    return float(every * PLANET.step_hours)


def _hours(lead: int) -> str:
    return f"{12 * (lead + 1)} h"


def _seeds(values: Sequence[float] | np.ndarray) -> str:
    return "by seed " + _list(values)


def _list(values: Sequence[float] | np.ndarray, digits: int = 3) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)
