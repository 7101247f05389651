"""`graticule bench beast-comm`: what BEAST's layouts send, counted against closed forms.

A small BEAST whose windows span all latitudes, as the large published ones do, on four local
processes; every unit's forward and backward pass by itself, then a whole step's members and
gradients. Of each what all ranks send together and in how many exchanges a rank takes part, as
`Link` counts them, against the closed forms of `beast_forms`.

Last, against torch-blue, see `blue`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graticule.assemble import Running, Shapes, assemble, build_model, shapes_of_config
from graticule.bench import blue
from graticule.bench.beast_forms import (
    NOTHING,
    Layout,
    Passes,
    Scale,
    Sent,
    of_gradients,
    of_members,
    of_units,
    weights_of,
)
from graticule.bench.rows import Row, Setting
from graticule.config import BayesConfig, BeastConfig, Config, TrainConfig
from graticule.mesh import Cut, Mesh
from graticule.model.beast import Beast
from graticule.model.draws import Draw, bound
from graticule.parallel.launch import laid_out, mesh_of, ranks_of
from graticule.parallel.layouts import StripeLayout, Topology, WindowLayout, plan_route
from graticule.parallel.local import LocalRanks
from graticule.recipes import recipe
from graticule.train.loss import LossWeights
from graticule.train.members import ensemble_of
from graticule.train.objective import Objective
from graticule.train.step import training_step

TITLE = (
    "bytes and exchanges of each unit, of members and of gradients on BEAST's layouts against their"
    " closed forms; memory and CPU-seconds of a step with 2 and 8 members against torch-blue's"
)
GRID, CHANNELS, OUTPUTS = (24, 96), 3, 2
LAYOUTS = {
    "[s=4, c=1]": "window=4,stripe_dim=lon",
    "[s=2, c=2]": "window=2,tensor=2,stripe_dim=lon",
}
STEPS = {
    "moments, u=2, [s=2, c=1]": ("moments", "member=2,window=2,stripe_dim=lon"),
    "crps, u=4": ("crps", "member=4"),
    "crps, u=2, [s=1, c=2]": ("crps", "member=2,tensor=2,stripe_dim=lon"),
    "gaussian, data 2, u=2": ("gaussian", "data=2,member=2"),
}
MEMBERS = 4
PUBLISHED = (4, 2)
"""[s, c] that the published models were trained on."""


def config_of(layout: str, likelihood: Any = "gaussian") -> Config:
    """Two outer windows' worth of shifts, in float32."""
    config = Config(
        model=BeastConfig(
            width=16, depth=2, inner_depth=2, heads=2, inner_heads=4, window=(12, 12),
            inner_window=(6, 6), norm_groups=4, nice_noise=8,
        ),
        train=TrainConfig(batch=2, loss="mse"),
        bayes=BayesConfig(weights=True, members=MEMBERS, likelihood=likelihood),
    )  # fmt: skip
    return laid_out(config, layout)


SHAPES = Shapes(
    grid=GRID, num_prognostic=CHANNELS, num_predicted=CHANNELS, num_forcing=0, num_static=0,
    num_inputs=2, num_outputs=OUTPUTS, num_forcings=1,
)  # fmt: skip


# What it is


def units_on_a_rank(config: Config) -> dict[tuple[str, str], Sent]:
    """By (unit, direction): what this rank sends of one sample."""
    mesh = Mesh(mesh_of(config.mesh, ranks_of(config)))
    running = assemble(config, SHAPES, mesh)
    model = running.model
    assert isinstance(model, Beast)
    rows, columns, planes = running.stripes.rows, running.stripes.columns, running.planes
    whole = torch.randn(1, SHAPES.in_channels, *GRID, generator=torch.Generator().manual_seed(0))
    state = (whole[:, planes.given(planes.index)][..., rows, columns].contiguous(),)
    found = {}
    for unit in bound(model.units(), Draw(step=1, member=0, items=(0,))):
        given = tuple(x.detach().requires_grad_() for x in state)
        state, found[unit.name, "forward"] = _counted(running, lambda: unit.run(*given))  # noqa: B023
        weights = [p for p in model.parameters() if p.requires_grad]
        _, found[unit.name, "backward"] = _counted(
            running,
            lambda: torch.autograd.grad(
                state, [*given, *weights], [torch.ones_like(x) for x in state],  # noqa: B023
                allow_unused=True,
            ),
        )  # fmt: skip
    return found


def _counted(running: Running, work: Callable[[], Any]) -> tuple[Any, Sent]:
    def told() -> tuple[int, int]:
        links = running.links
        return (
            sum(sum(link.sent.values()) for link in links),
            sum(sum(link.calls.values()) for link in links),
        )

    before = told()
    result = work()
    after = told()
    return result, Sent(after[0] - before[0], after[1] - before[1])


@dataclass
class _Batch:
    keys: list[int]
    inputs: Tensor
    label: Tensor

    @property
    def init_times(self) -> list[int]:
        return self.keys

    def lead(self) -> tuple[Tensor, Tensor]:
        return self.label[:, :1, :0], self.label


def step_on_a_rank(config: Config) -> tuple[dict[str, Sent], dict[str, int]]:
    """(by what it is for, what this rank sends in a step of two samples; the mesh)."""
    mesh = Mesh(mesh_of(config.mesh, ranks_of(config)))
    running = assemble(config, SHAPES, mesh)
    planes, here = running.planes, (..., running.stripes.rows, running.stripes.columns)
    ours = planes.predicted(planes.index)
    samples = range(mesh.index("data"), 2, mesh.sizes["data"])
    whole = LossWeights.of(torch.ones(CHANNELS, *GRID, dtype=torch.bool).numpy())
    objective = Objective(
        inputs=torch.nn.Identity(), forcing=torch.nn.Identity(), labels=torch.nn.Identity(),
        statics=torch.zeros(0, *GRID)[here],
        weights=LossWeights(whole.cell[ours][here], whole.wet[ours][here], whole.total),
        kind="mse", leads=1, num_prognostic=len(ours), num_outputs=OUTPUTS, planes=planes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    inputs, label = (torch.randn(2, 2, CHANNELS, *GRID, generator=generator) for _ in range(2))
    batch = _Batch(
        list(samples),
        *(each[list(samples)][:, :, ours][here].contiguous() for each in (inputs, label)),
    )  # fmt: skip
    ensemble = ensemble_of(config, mesh, running.model, objective, samples=10)
    assert ensemble is not None
    training_step(
        running.model, objective, [batch],
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0), step=1, samples=2,
        learning_rate=0.0, shared=running.shared, ensemble=ensemble,
    )  # fmt: skip
    sent, calls = Counter[str](), Counter[str]()
    for link in (*running.links, ensemble.link):
        sent += link.sent
        calls += link.calls
    return {what: Sent(sent[what], calls[what]) for what in calls}, dict(mesh.sizes)


def together(parts: list[Sent]) -> Sent:
    """Of all ranks."""
    return Sent(sum(part.bytes for part in parts), max(part.calls for part in parts))


# Rows


def rows(setting: Setting) -> list[Row]:
    found: list[Row] = []
    with LocalRanks(4, timeout_seconds=600) as four:
        for name, layout in LAYOUTS.items():
            setting.say(f"units on {name}")
            config = config_of(layout)
            ranks = four.run(units_on_a_rank, config)
            found += _unit_rows(name, config, ranks)
        for name, (likelihood, layout) in STEPS.items():
            setting.say(f"a step: {name}")
            config = config_of(layout, likelihood)
            found += _step_rows(name, config, four.run(step_on_a_rank, config))
    for name in ("beast-2.4b", "beast-1.1b"):
        setting.say(f"{name}: planned")
        found += published(name)
    return found + blue.rows(setting)


def _unit_rows(
    name: str, config: Config, ranks: list[dict[tuple[str, str], Sent]]
) -> Iterator[Row]:
    model = _built(config, SHAPES)
    scales = {stage: Scale.of(module) for stage, module in model.stages.items()}
    meant = _meant(config, SHAPES, scales, config.mesh.window, config.mesh.tensor, 4)
    silent = []
    for key in ranks[0]:
        unit, direction = key
        found = together([rank[key] for rank in ranks])
        if not meant[key].calls:
            silent.append(found)
            continue
        yield from _pair(f"{name}: {unit}, {direction}", found, meant[key])
    if silent:
        yield Row(
            what=f"{name}: passes without a word", goal=1.0, within=0.0, unit="unit passes",
            ours=sum(not (one.bytes or one.calls) for one in silent), against=len(silent),
            note="patches, convolutions of stride 2, mixing, and blocks that move nothing",
        )  # fmt: skip


def _meant(
    config: Config, shapes: Shapes, scales: dict[str, Scale], s: int, c: int, itemsize: int
) -> Passes:
    layout = Layout.of(s, c, itemsize, _beast(config), shapes.planes(c, 0))
    return of_units(scales, layout)


def _built(config: Config, shapes: Shapes) -> Beast:
    model = build_model(config, shapes, device="meta")
    assert isinstance(model, Beast)
    return model


def _beast(config: Config) -> BeastConfig:
    assert isinstance(config.model, BeastConfig)
    return config.model


def _step_rows(
    name: str, config: Config, ranks: list[tuple[dict[str, Sent], dict[str, int]]]
) -> Iterator[Row]:
    sizes = ranks[0][1]
    values = 2 // sizes["data"] * OUTPUTS * CHANNELS * math.prod(GRID)
    counts = weights_of(_beast(config), SHAPES.in_channels, SHAPES.out_channels)
    meant = {
        "members": of_members(config.bayes.likelihood, sizes, MEMBERS, values),
        "gradients": of_gradients(*counts, sizes),
    }
    for what, closed in meant.items():
        found = together([sent.get(what, NOTHING) for sent, _ in ranks])
        if closed.calls:
            yield from _pair(f"{name}: {what}", found, closed)
        else:
            silent = sum(what not in sent for sent, _ in ranks)
            yield Row(
                what=f"{name}: {what}", ours=silent, against=len(ranks), goal=1.0, within=0.0,
                unit="ranks that send nothing",
            )  # fmt: skip


def _pair(what: str, found: Sent, meant: Sent) -> Iterator[Row]:
    yield Row(
        what=what, ours=found.bytes / 2**10, against=meant.bytes / 2**10, goal=1.0, within=1e-6,
        unit="KiB of all ranks",
    )  # fmt: skip
    yield Row(
        what=f"{what}: exchanges", ours=found.calls, against=meant.calls, goal=1.0, within=0.0,
        unit="of a rank",
    )  # fmt: skip


def published(name: str) -> Iterator[Row]:
    """The closed forms of a published size, one sample and member in 16 bits. What routes send is
    planned as a run would; all else is not run."""
    s, c = PUBLISHED
    config = recipe(name)
    model = _beast(config)
    grid = config.data.grid or (0, 0)
    rows, columns = grid[0] // model.patch, grid[1] // model.patch
    window, inner = model.window_shape, model.inner_window_shape
    outer = Scale(rows, columns, model.width, model.depth, window[1] // 2)
    scales = {
        "first": outer,
        "inner": Scale(rows // 2, columns // 2, 2 * model.width, model.inner_depth, inner[1] // 2),
        "second": outer,
    }
    shapes = shapes_of_config(config)
    meant = _meant(config, shapes, scales, s, c, 2)
    built, label = _built(config, shapes), f"{name} [s={s}, c={c}]"
    for stage in ("first", "inner"):
        grid_of, scale = built.stages[stage].grid, scales[stage]
        stripes = StripeLayout(grid_of.tokens, Cut.even(grid_of.tokens[1], s), "lon")
        regular, shifted = (
            WindowLayout(grid_of, Topology(window=s), shifted=on) for on in (False, True)
        )
        plans = [plan_route(stripes, regular, rank) for rank in range(s)]
        yield Row(
            what=f"{label}: {stage}, stripes that are whole windows", unit="stripes", goal=1.0,
            ours=sum(plan.identity or plan.quiet for plan in plans), against=s, within=0.0,
            note="planned, not run",
        )  # fmt: skip
        plans = [plan_route(regular, shifted, rank) for rank in range(s)]
        sent = sum(sum(plan.send) for plan in plans) * scale.width * 2
        yield Row(
            what=f"{label}: {stage}, a shift", ours=sent / s / c / 2**20,
            against=scale.rows * scale.shift * scale.width * 2 / c / 2**20, goal=1.0, within=1e-6,
            unit="MiB a rank", note="planned, not run",
        )  # fmt: skip
        for direction in ("forward", "backward"):
            what = f"{label}: {stage}, gathers and sums of a block, {direction}"
            yield _unrun(what, meant[f"{stage}.0", direction].bytes)
    for unit, direction in itertools.product(
        ("embed", "down", "up", "recover"), ("forward", "backward")
    ):
        yield _unrun(f"{label}: {unit}, {direction}", meant[unit, direction].bytes)
    for direction in ("forward", "backward"):
        size = sum(one.bytes for (_, way), one in meant.items() if way == direction)
        yield _unrun(f"{label}: a {direction} pass", size)
    sizes = {"window": s, "tensor": c}
    split, whole = weights_of(model, shapes.in_channels, shapes.out_channels)
    yield _unrun(f"{label}: gradients of one model", of_gradients(split, whole, sizes).bytes)


def _unrun(what: str, size: float) -> Row:
    ranks = math.prod(PUBLISHED)
    return Row(
        what=what, ours=None, against=size / ranks / 2**20, goal=None, unit="MiB a rank",
        note="the closed form; not run",
    )  # fmt: skip
