"""The runs of `graticule bench ensembles`: what is trained, on which planet, and for how much.

Compute is counted in forward passes of a batch, a backward pass as two. A step of one member takes
3; one of m members whose score needs all of them takes 4 m - 1, since all but the last are rolled
out once more (`train/members`). All that are compared have the same sum.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from graticule.config import BayesConfig, BeastConfig, Config
from graticule.data.planet import Planet
from graticule.recipes import recipe

PLANET = Planet(num_lat=24, num_lon=48, dt_seconds=720.0)
"""Coarse, so that a seed is trained in minutes; ten of its twelve runs train."""
SHARES = {10: replace(PLANET, num_runs=3), 30: replace(PLANET, num_runs=5)}
"""By percentage of the training runs: planets with one and three of them, the first ones."""
MODEL = BeastConfig(
    width=32, depth=1, inner_depth=2, heads=2, inner_heads=4, window=(6, 6), inner_window=(6, 12),
    norm_groups=4,
)  # fmt: skip
BATCH, MEMBERS = 8, 2
FIRST_STEPS, STEPS = 220, 180
"""Of an ensemble: steps of one member, then of `MEMBERS`."""
DEEP = 4
"""Runs of the deep ensemble, each with an equal share of the compute."""
LEADS, EVERY = 2, 4
"""Model steps of 24 hours, and which initial times of the test run forecasts start from."""

Kind = Literal["both", "weights", "noise"]


def step_passes(members: int) -> int:
    """Forward passes, or their equal, that a step costs."""
    return 3 if members == 1 else 4 * members - 1


def compute() -> int:
    """Forward passes, or their equal, that everything has which is compared."""
    return FIRST_STEPS * step_passes(1) + STEPS * step_passes(MEMBERS)


def configs(stores: dict[int, Path], out: Path, seed: int) -> dict[str, Config]:
    """The runs of one seed by name, in an order in which they can be trained.

    stores: by percentage of the training runs, 100 among them. `both`, `weights`, `noise`: weights
    that are drawn, norms that hear noise, or both; `NAME-first` is what NAME starts from, trained
    with the absolute error of one member. `weights-10-first`: of a tenth of the training runs, like
    `weights-first` otherwise. `twin`: nothing is drawn. `deep-K`: the same from other first
    weights, for a fraction of the steps.
    """
    runs: dict[str, Config] = {}
    kinds: tuple[Kind, ...] = ("both", "weights", "noise")
    for kind in kinds:
        runs |= _ensemble(kind, kind, stores[100], out, seed)
    for percent in sorted(SHARES):
        of_some = _ensemble(f"weights-{percent}", "weights", stores[percent], out, seed)
        runs[f"weights-{percent}-first"] = of_some[f"weights-{percent}-first"]
    steps = compute() // step_passes(1)
    runs["twin"] = _twin("twin", stores[100], seed, steps)
    for number in range(DEEP):
        name = f"deep-{number}"
        runs[name] = _twin(name, stores[100], seed * DEEP + number, steps // DEEP)
    return runs


def _base(name: str, store: Path, seed: int, steps: int) -> Config:
    base = recipe("beast-demo")
    return replace(
        base,
        name=name,
        data=replace(base.data, store=str(store), grid=(PLANET.num_lat, PLANET.num_lon)),
        model=MODEL,
        train=replace(
            base.train, steps=steps, batch=BATCH, learning_rate=2e-3, final_learning_rate=5e-4,
            warmup_steps=max(1, steps // 20), ema_decay=0.99, seed=seed,
        ),
        forecast=replace(base.forecast, leads=LEADS, every=EVERY),
    )  # fmt: skip


def _twin(name: str, store: Path, seed: int, steps: int) -> Config:
    base = _base(name, store, seed, steps)
    return replace(base, model=replace(MODEL, nice_noise=0), bayes=BayesConfig())


def _ensemble(name: str, kind: Kind, store: Path, out: Path, seed: int) -> dict[str, Config]:
    """The two runs of an ensemble: of one member, then of several."""
    model = MODEL if kind != "weights" else replace(MODEL, nice_noise=0)
    bayes = BayesConfig(weights=kind != "noise", likelihood="crps", alpha=0.0)
    base = _base(f"{name}-first", store, seed, FIRST_STEPS)
    first = replace(base, model=model, bayes=bayes)
    train = _base(name, store, seed, STEPS).train
    train = replace(train, start_from=str(out / f"{name}-first"))
    bayes = replace(bayes, members=MEMBERS, alpha=0.95)
    return {first.name: first, name: replace(first, name=name, train=train, bayes=bayes)}
