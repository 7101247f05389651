"""Plans on several ranks: exchanges that run again meet each other, and gradients stay what they
were, with uneven stripes, with ranks that hold nothing, with sharded weights."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graticule.assemble import Shapes, assemble
from graticule.config import Config
from graticule.memory.apply import Memory
from graticule.memory.offload import Host
from graticule.memory.plan import Action, Plan, Segment
from graticule.mesh import Mesh
from graticule.parallel.data import local
from graticule.parallel.launch import laid_out, mesh_of
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.step import training_step
from pools import Pools
from test_memory_profile import SHAPES, UNET, config_of, plans_of, whole, with_tiles

LEADS = 3


class Fields:
    """A sample's stripe of fields that are drawn whole."""

    keys, init_times = (0,), ("drawn",)

    def __init__(self, shapes: Shapes, here: tuple) -> None:
        draw = torch.Generator().manual_seed(5)

        def field(channels: int) -> Tensor:
            whole = torch.randn(1, 1, channels, *shapes.grid, generator=draw, dtype=torch.float64)
            return whole[here].contiguous()

        self.inputs = field(shapes.num_prognostic)
        self._leads = [(field(1), field(shapes.num_predicted)) for _ in range(LEADS)]

    def lead(self) -> tuple[Tensor, Tensor]:
        return self._leads.pop(0)


def steps(
    config: Config, shapes: Shapes, ranks: int, plans: Sequence[Plan | None]
) -> list[dict[str, Tensor]]:
    """On a rank: gradients and buffers after a step under each plan, from the same start."""
    mesh, found = Mesh(mesh_of(config.mesh, ranks)), []
    wet = torch.rand(shapes.num_predicted, *shapes.grid, generator=torch.manual_seed(3)) > 0.2
    weights = LossWeights.of(wet.numpy())
    for plan in plans:
        running = assemble(config, shapes, mesh, dtype=torch.float64)
        here = (..., running.stripes.rows, running.stripes.columns)
        objective = Objective(
            inputs=as_stored, forcing=as_stored, labels=as_stored,
            statics=torch.ones(1, *shapes.grid, dtype=torch.float64)[here],
            weights=LossWeights(weights.cell[here], weights.wet[here], weights.total), kind="mae",
            leads=LEADS, num_prognostic=shapes.num_prognostic,
        )  # fmt: skip
        with Host("cpu") as host:
            training_step(
                running.model, objective, [Fields(shapes, here)], step=1, samples=1,
                optimizer=torch.optim.SGD(running.model.parameters(), lr=0.0), learning_rate=0.0,
                shared=running.shared, memory=Memory(plan, host),
            )  # fmt: skip
        grads = {name: local(p.grad).clone() for name, p in running.model.named_parameters()}
        buffers = {name: b.clone() for name, b in running.model.named_buffers() if b.numel()}
        found.append({**grads, **buffers})
    return found


def check(results: list[list[dict[str, Tensor]]], num_exact: int) -> None:
    """results: by rank, the first of each with everything kept; the others under plans, of which
    so many change no bit."""
    largest = max(float(g.abs().max()) for kept, *_ in results for g in kept.values() if g.numel())
    for rank, (kept, *others) in enumerate(results):
        for number, other in enumerate(others):
            for name, value in kept.items():
                where = f"rank {rank}, plan {number}: {name}"
                if number < num_exact:
                    assert torch.equal(other[name], value), where
                elif value.is_floating_point():
                    scale = max(float(value.abs().max()) if value.numel() else 0, 1e-3 * largest)
                    torch.testing.assert_close(
                        other[name], value, rtol=0, atol=1e-11 * scale, msg=where
                    )


LAYOUTS = [
    ("window=4", 4, 9),  # the first rank has no patches
    ("window=3,weights=sharded", 3, 9),
    pytest.param("window=3", 3, 37, marks=pytest.mark.slow),
    pytest.param("window=4,weights=sharded", 4, 9, marks=pytest.mark.slow),
    pytest.param("window=2,sequence=2", 4, 9, marks=pytest.mark.slow),
    pytest.param("window=2,tensor=2", 4, 37, marks=pytest.mark.slow),
    pytest.param("window=3,stripe_dim=lon", 3, 37, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "ranks", "rows"), LAYOUTS)
def test_plans_change_nothing_on_stripes(pools: Pools, layout: str, ranks: int, rows: int) -> None:
    actions: tuple[Action, ...] = ("keep", "recompute", "offload")
    exact = [
        whole("offload", LEADS), whole("simple", LEADS),
        whole("recompute", LEADS, lead_wise=True), *plans_of(LEADS, 11, 2, actions),
    ]  # fmt: skip
    tiled = [
        Plan(tuple(with_tiles(lead, action, 3) for lead in plan.leads), lead_wise=plan.lead_wise)
        for plan, action in zip(exact[-2:], ("offload", "recompute"), strict=True)
        if "sharded" not in layout
    ]  # fmt: skip
    shapes = replace(SHAPES, grid=(rows, 32))
    config = config_of(LEADS, layout)
    check(pools[ranks].run(steps, config, shapes, ranks, [None, *exact, *tiled]), len(exact))


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("window=3", 3), pytest.param("window=4,weights=sharded", 4, marks=pytest.mark.slow)],
)
def test_plans_change_nothing_of_a_unet_on_stripes(pools: Pools, layout: str, ranks: int) -> None:
    """Its running statistics neither, whatever is computed again."""
    config = laid_out(replace(config_of(LEADS), model=UNET), layout)
    shapes = replace(SHAPES, grid=(13, 32))  # 3 rows on the coarsest grid

    def unit_by_unit(action: Action, lead_wise: bool = False) -> Plan:
        return whole(action, LEADS, lead_wise=lead_wise, num_units=6)

    exact = [
        unit_by_unit("simple"),
        unit_by_unit("recompute", lead_wise=True),
        Plan(((Segment(0, 2, "offload"), Segment(2, 6, "recompute")),) * LEADS),
    ]  # fmt: skip
    check(pools[ranks].run(steps, config, shapes, ranks, [None, *exact]), len(exact))
