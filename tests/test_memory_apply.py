"""A plan changes what is held, and no bit of what is learnt."""

from typing import Any

import pytest
import torch
from torch import Tensor

from graticule.assemble import assemble
from graticule.memory.apply import Memory
from graticule.memory.offload import Host
from graticule.memory.plan import Plan, Segment
from graticule.mesh import Mesh
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.step import training_step
from test_memory_profile import NUM_UNITS, SHAPES, config_of, plans_of, whole

LEADS = 3


class Batch:
    init_times = ("drawn",)

    def __init__(self) -> None:
        self.keys = [0]
        generator = torch.Generator().manual_seed(5)

        def field(channels: int) -> Tensor:
            return torch.randn(1, 1, channels, *SHAPES.grid, generator=generator)

        self.inputs = field(SHAPES.num_prognostic)
        self._leads = [(field(1), field(SHAPES.num_predicted)) for _ in range(LEADS)]

    def lead(self) -> tuple[Tensor, Tensor]:
        return self._leads.pop(0)


def gradients(plan: Plan | None, buffers: int = 2) -> dict[str, Tensor]:
    """After one step from the same start; the losses too."""
    config = config_of(LEADS)
    model = assemble(config, SHAPES, Mesh()).model
    wet = torch.rand(SHAPES.num_predicted, *SHAPES.grid, generator=torch.manual_seed(3)) > 0.2
    objective = Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.ones(1, *SHAPES.grid), weights=LossWeights.of(wet.numpy()), kind="mae",
        leads=LEADS, num_prognostic=SHAPES.num_prognostic,
    )  # fmt: skip
    with Host("cpu", buffers=buffers) as host:
        result = training_step(
            model, objective, [Batch()], optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            step=1, samples=1, learning_rate=0.0, memory=Memory(plan, host),
        )  # fmt: skip
        if plan and any(s.action == "offload" for lead in plan.leads for s in lead):
            assert host.report().sent_bytes > 0
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {**found, "losses": torch.tensor(result.lead_losses, dtype=torch.float64)}


@pytest.fixture(scope="module")
def kept() -> dict[str, Tensor]:
    return gradients(None)


@pytest.mark.parametrize("buffers", [0, 2])
@pytest.mark.parametrize("number", range(4))
def test_gradients_are_the_same_bits_under_every_plan(
    kept: dict[str, Tensor], number: int, buffers: int
) -> None:
    plan = plans_of(LEADS, 3, 8, ("keep", "recompute", "offload"))[2 * number]
    assert not plan.lead_wise
    found = gradients(plan, buffers)
    for name, value in kept.items():
        assert torch.equal(found[name], value), (name, plan)


def test_gradients_are_the_same_bits_where_products_are_kept(kept: dict[str, Tensor]) -> None:
    found = gradients(whole("simple", LEADS))
    for name, value in kept.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("action", ["keep", "recompute", "offload"])
def test_a_lead_that_runs_again_comes_to_the_same_bits(
    kept: dict[str, Tensor], action: str
) -> None:
    found = gradients(whole(action, LEADS, lead_wise=True))  # type: ignore[arg-type]
    for name, value in kept.items():
        assert torch.equal(found[name], value), name


UP = NUM_UNITS - 4


@pytest.mark.parametrize("lead_wise", [False, True])
@pytest.mark.parametrize("action", ["recompute", "offload"])
@pytest.mark.parametrize("tiles", [2, 7])
def test_row_tiles_change_gradients_by_rounding_alone(
    kept: dict[str, Tensor], action: Any, tiles: int, lead_wise: bool
) -> None:
    lead = (
        Segment(0, UP, "recompute"), Segment(UP, UP + 3, action, tiles),
        Segment(UP + 3, NUM_UNITS, "keep"),
    )  # fmt: skip
    found = gradients(Plan((lead,) * LEADS, lead_wise=lead_wise))
    scale = max(float(g.abs().max()) for g in kept.values())
    for name, value in kept.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6 * scale, msg=name)


def test_tiles_that_a_model_does_not_have_are_refused() -> None:
    wrong = (Segment(0, 3, "recompute", 4), Segment(3, NUM_UNITS, "keep"))
    with pytest.raises(ValueError, match=r"embed to down\.1 in 4 row tiles; .* up with"):
        gradients(Plan((wrong,) * LEADS))


def test_a_plan_of_each_lead_holds_for_that_lead_alone(kept: dict[str, Tensor]) -> None:
    ran: list[tuple[int, bool]] = []
    one, each = (Segment(0, NUM_UNITS, "keep"),), whole("recompute", 1).leads[0]
    memory = Memory(Plan((one, each, one)))
    for lead in (1, 2, 3):
        (run,) = memory.runner(lead)
        model = assemble(config_of(1), SHAPES, Mesh()).model
        saved = []

        def pack(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        x = torch.randn(1, SHAPES.in_channels, *SHAPES.grid)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x, run)
        ran.append((lead, len(saved) > 3 * NUM_UNITS))
    assert ran == [(1, True), (2, False), (3, True)]
