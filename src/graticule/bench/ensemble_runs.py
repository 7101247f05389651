"""The runs of `graticule bench ensembles`: what is trained, on which planet, and for how much.

Compute is counted in forward passes of a batch, a backward pass as two. A step of one member takes
3; one of m members whose score needs all of them takes 4 m - 1, since all but the last are rolled
out once more (`train/members`). All that are compared have the same sum.
"""

from dataclasses import replace
from pathlib import Path

from graticule.config import BayesConfig, BeastConfig, Config
from graticule.data.planet import Planet
from graticule.recipes import recipe

PLANET = Planet(num_lat=16, num_lon=32, dt_seconds=1080.0)
"""Coarse, so that a seed is trained in minutes; ten of its twelve runs train. Settings were found
on another; `initial_sigma` was lowered once (from 0.09) after scores on this one."""
SHARES = {10: replace(PLANET, num_runs=3), 30: replace(PLANET, num_runs=5)}
"""By percentage of the training runs: planets with one and three of them, the first ones."""
MODEL = BeastConfig(
    width=32, depth=1, inner_depth=2, heads=2, inner_heads=4, window=(4, 8), inner_window=(4, 8),
    norm_groups=4,
)  # fmt: skip
BATCH, MEMBERS = 8, 2
FIRST_STEPS, STEPS = 640, 36
"""Of an ensemble: steps of one member over one lead, then of `MEMBERS` over `TRAIN_LEADS`. What has
one member throughout has more of the second kind."""
TRAIN_LEADS = 2
DATA_STEPS = 220
"""Of the runs that differ by their data alone."""
DEEP = 4
"""Runs of the deep ensemble, each with an equal share of the steps."""
LEADS, EVERY = 2, 4
"""Model steps of 24 hours, and which initial times of the test run forecasts start from."""


def step_passes(members: int, leads: int) -> int:
    """Forward passes, or their equal, that a step costs."""
    return leads * (3 if members == 1 else 4 * members - 1)


def configs(stores: dict[int, Path], out: Path, seed: int) -> dict[str, Config]:
    """The runs of one seed by name, in an order in which they can be trained.

    stores: by percentage of the training runs, 100 among them. Each trains in two phases: `-first`
    of one member, by its square error, over one lead, with weights that are numbers; then over
    several leads. `both`, `weights`, `noise`: weights that are drawn, norms that hear noise, or
    both, `MEMBERS` scored by the CRPS. `twin`: one member and its square error again. `deep-K`: the
    same from other first weights, for a share of the steps. `data-10` and so on: one phase of one
    member with drawn weights, trained on so many percent of the runs.
    """
    plain, noisy = replace(MODEL, nice_noise=0), MODEL
    # The square error of what hears noise: floor^2 = 1/2.
    heard = BayesConfig(likelihood="gaussian", floor=0.5**0.5)
    many = BayesConfig(
        weights=True, likelihood="crps", members=MEMBERS, prior="start", prior_sigma=0.1,
        initial_sigma=0.085,
    )  # fmt: skip
    runs: dict[str, Config] = {}

    def first(name: str, model: BeastConfig, bayes: BayesConfig, steps: int, seed: int) -> None:
        runs[f"{name}-first"] = _run(f"{name}-first", stores[100], seed, steps, model, bayes)

    def then(name: str, start: str, bayes: BayesConfig, steps: int) -> None:
        begun = runs[f"{start}-first"]
        assert isinstance(begun.model, BeastConfig)
        config = _run(name, stores[100], begun.train.seed, steps, begun.model, bayes)
        train = replace(
            config.train, start_from=str(out / begun.name), leads=TRAIN_LEADS, learning_rate=5e-4
        )
        runs[name] = replace(config, train=train)

    first("noisy", noisy, heard, FIRST_STEPS, seed)
    first("plain", plain, BayesConfig(), FIRST_STEPS, seed)
    then("both", "noisy", many, STEPS)
    then("weights", "plain", many, STEPS)
    then("noise", "noisy", replace(many, weights=False), STEPS)
    steps = STEPS * step_passes(MEMBERS, TRAIN_LEADS) // step_passes(1, TRAIN_LEADS)
    then("twin", "plain", BayesConfig(), steps)
    for number in range(DEEP):
        name = f"deep-{number}"
        first(name, plain, BayesConfig(), FIRST_STEPS // DEEP, 1 + seed * DEEP + number)
        then(name, name, BayesConfig(), steps // DEEP)
    alone = BayesConfig(weights=True, likelihood="crps", alpha=0.0)
    for percent in (*sorted(SHARES), 100):
        name = f"data-{percent}"
        config = _run(name, stores[percent], seed, DATA_STEPS, plain, alone)
        # Not turned: members are to differ by their weights alone.
        runs[name] = replace(config, train=replace(config.train, roll_longitude=False))
    return runs


def _run(
    name: str, store: Path, seed: int, steps: int, model: BeastConfig, bayes: BayesConfig
) -> Config:
    base = recipe("beast-demo")
    return replace(
        base,
        name=name,
        data=replace(base.data, store=str(store), grid=(PLANET.num_lat, PLANET.num_lon)),
        model=model,
        bayes=bayes,
        train=replace(
            base.train, steps=steps, batch=BATCH, learning_rate=2e-3, final_learning_rate=1e-5,
            warmup_steps=max(1, steps // 20), ema_decay=0.99, seed=seed,
        ),
        forecast=replace(base.forecast, leads=LEADS, every=EVERY),
    )  # fmt: skip
