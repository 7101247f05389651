"""`graticule bench skill`: what sampling, patch and rollout length do to the demo's forecasts.

The questions of TERRA, Fig. 15, asked on the demo planet: (a) a hierarchical model against one
without sampling modules at an equal number of Transformer tokens, and patch 2 against patch 4;
(b) fine-tuning over 1, 2, 4 and 8 leads from the same weights, at equal compute (fewer steps for
more leads) and at equal steps (as the paper did).
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from graticule.bench.planet import planet_in
from graticule.bench.results import kept
from graticule.bench.rows import Row, Setting
from graticule.config import Config
from graticule.data.store import write_json
from graticule.recipes import recipe
from graticule.tasks import evaluate_forecast, forecast_of, trained_run

TITLE = (
    "RMSE on the test run, mean over ten leads: hierarchical against p = 8 without sampling at"
    " equal tokens, and p = 2 against p = 4; at the last lead: fine-tuning over 2, 4, 8 leads"
    " against half as many"
)
OUT = Path("runs/bench-skill")
ROLLOUTS = (1, 2, 4, 8)
PRETRAINING = 400
"""Optimizer steps of each pretraining."""
APPLICATIONS = 400
"""Applications of the model per sample of a batch that a fine-tuning has: steps x leads."""


def configs(store: Path, out: Path, seed: int) -> dict[str, Config]:
    """The runs of one seed by name, in the order in which they can be trained.

    `p8`, `p4`, `p2`: pretrained for `PRETRAINING` steps. The others fine-tune `p4` over K leads:
    `compute-K` for APPLICATIONS / K steps, `steps-K` for as many steps as `compute-4` has (so
    `steps-4` would be `compute-4`, and is not trained again).
    """
    base, tuning = recipe("demo"), recipe("demo-finetune")
    data = replace(base.data, store=str(store))

    def pretrained(name: str, patch: int, sampling: int) -> Config:
        return replace(
            base,
            name=name,
            data=data,
            model=replace(base.swin, patch=patch, sampling=sampling),
            train=replace(base.train, steps=PRETRAINING, seed=seed),
        )

    runs = {
        "p8": pretrained("p8", 8, 1),
        "p4": pretrained("p4", 4, 2),
        "p2": pretrained("p2", 2, 2),
    }

    def rollout(name: str, leads: int, steps: int) -> None:
        train = replace(
            tuning.train, leads=leads, steps=steps, seed=seed, start_from=str(out / "p4"),
            warmup_steps=max(1, steps // 20),
        )  # fmt: skip
        runs[name] = replace(tuning, name=name, data=data, model=runs["p4"].model, train=train)

    for leads in ROLLOUTS:
        rollout(f"compute-{leads}", leads, APPLICATIONS // leads)
    for leads in ROLLOUTS:
        if leads != 4:
            rollout(f"steps-{leads}", leads, APPLICATIONS // 4)
    return runs


def rows(setting: Setting) -> list[Row]:
    """Ratios of normalised RMSE, below 1 where ours is better: of means over leads (sampling,
    patch) or of the last lead, over several seeds of their means. The note has the ratio of every
    seed and lead: a row can hold where one of these does not.

    A stopped bench goes on where it was: each run resumes from its checkpoint, and what is
    scored is not computed again.
    """
    out = setting.out or OUT
    store = planet_in(out, setting)
    results = [_seed(setting, store, out / f"seed-{seed}", seed) for seed in setting.seeds]
    write_json(out / "skill.json", {str(s): r for s, r in zip(setting.seeds, results, strict=True)})

    def compare(what: str, ours: str, against: str, leads: Sequence[int], goal: float) -> Row:
        def means(name: str) -> list[float]:
            return [
                statistics.fmean(result[name]["rmse"][lead - 1] for lead in leads)
                for result in results
            ]

        a, b = means(ours), means(against)
        each = "; ".join(
            f"seed {seed}: " + " ".join(
                f"{result[ours]['rmse'][lead - 1] / result[against]['rmse'][lead - 1]:.3f}"
                for lead in leads
            )
            for seed, result in zip(setting.seeds, results, strict=True)
        )  # fmt: skip
        return Row(
            what=what,
            ours=statistics.fmean(a),
            against=statistics.fmean(b),
            goal=goal,
            unit="normalised RMSE",
            at_most=True,
            note=f"{ours} against {against}; ratios at {_span(leads)}: {each}",
        )

    every = tuple(range(1, len(results[0]["p4"]["rmse"]) + 1))
    last = every[-1:]
    pairs = list(itertools.pairwise(ROLLOUTS))

    def equal_steps(leads: int) -> str:
        return "compute-4" if leads == 4 else f"steps-{leads}"

    return [
        compare("sampling", "p4", "p8", every, 1.0),
        compare("patch", "p2", "p4", every, 1.0),
        *(
            compare(f"{long} leads, compute", f"compute-{long}", f"compute-{short}", last, 1.0)
            for short, long in pairs
        ),
        *(
            compare(f"{long} leads, steps", equal_steps(long), equal_steps(short), last, 1.0)
            for short, long in pairs
        ),
        compare("same compute", "compute-4", "compute-1", last, 0.7),
        compare("pretrained", "compute-4", "p4", last, 0.7),
    ]


def _span(leads: Sequence[int]) -> str:
    return f"leads {leads[0]} to {leads[-1]}" if len(leads) > 1 else f"lead {leads[0]}"


def _seed(setting: Setting, store: Path, out: Path, seed: int) -> dict[str, Any]:
    """By run: normalised RMSE of the model and of the references by lead, and what it cost."""

    def made(name: str, config: Config) -> dict[str, Any]:
        steps, leads = config.train.steps, config.train.leads
        setting.say(f"seed {seed}, {name}: {steps} steps of {leads} leads")
        run = out / name
        with setting.bar(name, "steps") as progress:
            seconds = trained_run(config, run, progress=progress)
        forecast, _ = forecast_of(run)
        scores = evaluate_forecast(forecast)
        rmse = scores.normalised().tolist()
        setting.say(f"  RMSE at the last lead {rmse[-1]:.4f}")
        return {
            "steps": steps,
            "leads": leads,
            "seconds": seconds,
            "rmse": rmse,
            "persistence": scores.normalised("persistence").tolist(),
            "climatology": scores.normalised("climatology").tolist(),
        }

    return {
        name: kept(out, name, config.fingerprint, partial(made, name, config))
        for name, config in configs(store, out, seed).items()
    }
