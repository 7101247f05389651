"""What goes wrong in an ocean U-Net without a word: land, seams, statistics, what is fed back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.assemble import Shapes, assemble
from graticule.config import Config, TrainConfig, UNetConfig
from graticule.forecast.rollout import rollout
from graticule.memory.apply import Memory
from graticule.memory.offload import Host
from graticule.memory.plan import Action, Plan, Segment
from graticule.mesh import Mesh
from graticule.model.norm_gelu import BatchNormGelu
from graticule.model.pad import ConvPad
from graticule.model.unet import UNet
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.step import training_step

# Two channels of two levels and a surface: each its own mask.
CHANNELS, GRID, LEADS = 3, (9, 16), 3
SHAPES = Shapes(
    grid=GRID, num_prognostic=CHANNELS, num_predicted=CHANNELS, num_forcing=1, num_static=0,
    num_inputs=2, num_outputs=2, num_forcings=2,
)  # fmt: skip
CONFIG = Config(
    model=UNetConfig(widths=(4, 6), dilations=(1, 2, 2, 1, 1)), train=TrainConfig(batch=2)
)


def drawn(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(key))


def wet() -> Tensor:
    """A third of the cells is land, and more of it in the deep."""
    height = torch.rand(GRID, generator=torch.Generator().manual_seed(9))
    return torch.stack([height > 0.3, height > 0.6, height > 0.3])


def unet() -> UNet:
    model = assemble(CONFIG, SHAPES, Mesh()).model
    assert isinstance(model, UNet)
    return model


def predictions(model: nn.Module, **other: Any) -> list[Tensor]:
    given: dict[str, Any] = {
        "inputs": torch.where(wet(), drawn(2, 2, CHANNELS, *GRID), 0.0),
        "forcing": lambda lead: drawn(2, 2, 1, *GRID, key=lead),
    }
    return list(
        rollout(
            model, statics=torch.zeros(0, *GRID), wet=wet(), leads=LEADS,
            num_prognostic=CHANNELS, **{**given, **other},
        )
    )  # fmt: skip


# 1: land; 10: what is fed back


class Heard(nn.Module):
    """Keeps what a model was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.inputs = model, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.model(x)


@torch.no_grad()
def test_each_levels_own_land_is_zero_in_what_every_step_is_given_and_gives() -> None:
    heard = Heard(unet())
    found = predictions(heard)
    land = ~wet()
    for lead, predicted in enumerate(found):
        assert not predicted[:, :, land].any()
        assert predicted[:, :, ~land].abs().min() > 0
        states = heard.inputs[lead][:, : 2 * CHANNELS].unflatten(1, (2, CHANNELS))
        assert not states[:, :, land].any()


@torch.no_grad()
def test_what_the_network_says_on_land_reaches_no_later_step() -> None:
    class Wild(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = unet()

        def forward(self, x: Tensor) -> Tensor:
            said = self.model(x).unflatten(1, (2, CHANNELS))
            return torch.where(wet(), said, float("nan")).flatten(1, 2)

    for calm, wild in zip(predictions(unet()), predictions(Wild()), strict=True):
        assert torch.equal(calm, wild)


@torch.no_grad()
def test_what_is_fed_back_is_the_output_itself_absolute_and_normalised() -> None:
    heard = Heard(unet())
    found = predictions(heard)
    for lead in range(1, LEADS):
        states = heard.inputs[lead][:, : 2 * CHANNELS].unflatten(1, (2, CHANNELS))
        assert torch.equal(states, found[lead - 1])
        # Both times of this lead's forcing, in their order, behind the states.
        forcing = heard.inputs[lead][:, 2 * CHANNELS :]
        assert torch.equal(forcing, drawn(2, 2, 1, *GRID, key=lead + 1).flatten(1, 2))
    model = heard.model
    x, change = heard.inputs[0], model(heard.inputs[0], added=False)  # type: ignore[operator]
    assert torch.equal(model.add(x, change), change)  # type: ignore[operator]


# 5: the seam


@pytest.mark.parametrize("dilation", [1, 2, 8])
def test_a_pad_goes_round_the_circle_first_and_has_zeros_at_the_poles_then(dilation: int) -> None:
    x = drawn(1, 1, 9, 16)
    out = ConvPad("globe", (9, 16), kernel=3, dilation=dilation)(x)
    d = dilation
    assert out.shape == (1, 1, 9 + 2 * d, 16 + 2 * d)
    assert torch.equal(out, F.pad(F.pad(x, (d, d, 0, 0), mode="circular"), (0, 0, d, d)))
    assert not out[..., :d, :].any()
    assert not out[..., -d:, :].any()
    assert torch.equal(out[..., d:-d, :d], x[..., -d:])


# 14: what a published model would load without a complaint


def test_defaults_are_those_of_samudra_where_a_slip_would_fit_all_shapes() -> None:
    model = UNetConfig()
    assert model.dilations[len(model.widths)] == 8  # at the bottom
    assert model.dilations[-1] == 2  # not 1
    assert model.dilations == (1, 2, 4, 8, 8, 8, 4, 2, 2)
    assert model.activation_max == 10


@torch.no_grad()
def test_a_skip_is_what_a_block_gives_before_pooling_and_is_added() -> None:
    model = unet()
    kept: dict[str, Tensor] = {}

    def keep(name: str, value: Callable[[Any, Any], Tensor]) -> Any:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            kept[name] = value(given, out)

        return hook

    model.down[0].block.register_forward_hook(keep("skip", lambda i, o: o))  # type: ignore[union-attr]
    model.up[1].fill.register_forward_hook(keep("up", lambda i, o: o))  # type: ignore[union-attr]
    model.up[1].block.register_forward_hook(keep("sum", lambda i, o: i[0]))  # type: ignore[union-attr]
    model(drawn(2, SHAPES.in_channels, *GRID))
    assert torch.equal(kept["sum"], kept["up"] + kept["skip"])
    hidden = [block.conv1.weight.shape[:2] for _, block in model.blocks]
    assert all(inside == 2 * given for inside, given in hidden)  # of what comes in, not goes out


# 11: running statistics


class Batch:
    init_times = ("drawn", "drawn too")

    def __init__(self) -> None:
        self.keys = [0, 1]
        self.inputs = torch.where(wet(), drawn(2, 2, CHANNELS, *GRID), 0.0)
        self._leads = [
            (drawn(2, 2, 1, *GRID, key=lead), drawn(2, 2, CHANNELS, *GRID, key=10 + lead))
            for lead in range(1, LEADS + 1)
        ]

    def lead(self) -> tuple[Tensor, Tensor]:
        return self._leads.pop(0)


def objective(**settings: Any) -> Objective:
    return Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.zeros(0, *GRID), weights=LossWeights.of(wet().numpy()), kind="mse",
        leads=LEADS, num_prognostic=CHANNELS, num_outputs=2, **settings,
    )  # fmt: skip


def after_step(plan: Plan | None = None, **settings: Any) -> tuple[dict[str, Tensor], Any]:
    """Gradients and buffers after one step whose learning rate is 0; the losses."""
    model = unet()
    with Host("cpu", buffers=2) as host:
        result = training_step(
            model, objective(**settings), [Batch()], step=1, samples=2, learning_rate=0.0,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0), memory=Memory(plan, host),
        )  # fmt: skip
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, **dict(model.named_buffers())}, result.lead_losses


def statistics_by_hand() -> list[tuple[Tensor, Tensor]]:
    """(mean, unbiased variance) of what the first norm is given, at each lead."""
    model, given = unet(), []
    norm = model.down[0].block.norm1  # type: ignore[union-attr]
    norm.register_forward_hook(lambda m, i, o: given.append(i[0].detach().double()))
    with torch.no_grad():
        predictions(model)
    return [(x.mean((0, 2, 3)), x.transpose(0, 1).flatten(1).var(1)) for x in given]


@pytest.mark.parametrize("every", [0, 1])
def test_running_statistics_take_in_each_lead_once_the_last_one_first(every: int) -> None:
    leads = statistics_by_hand()
    assert len(leads) == LEADS
    mean, variance = torch.zeros(2), torch.ones(2)
    # Through the whole rollout the backward pass begins at its end.
    for its_mean, its_variance in leads if every else reversed(leads):
        mean, variance = 0.9 * mean[0] + 0.1 * its_mean, 0.9 * variance[0] + 0.1 * its_variance
        mean, variance = mean.unsqueeze(0), variance.unsqueeze(0)
    found, _ = after_step(detach_every=every)
    at = "down.0.block.norm1.running_"
    assert (found[f"{at}mean"] - mean[0]).abs().max() < 1e-6
    assert (found[f"{at}var"] - variance[0]).abs().max() < 1e-6


def plan_of(action: Action, lead_wise: bool, size: int = 1) -> Plan:
    segments = [Segment(unit, min(unit + size, 6), action) for unit in range(0, 6, size)]
    return Plan((tuple(segments),) * LEADS, lead_wise=lead_wise)


@pytest.mark.parametrize("lead_wise", [False, True])
@pytest.mark.parametrize(
    ("action", "size"), [("keep", 6), ("recompute", 1), ("recompute", 4), ("offload", 2)]
)
def test_no_pass_that_runs_again_changes_statistics_or_gradients(
    action: Action, size: int, lead_wise: bool
) -> None:
    kept, losses = after_step()
    again, same = after_step(plan_of(action, lead_wise, size))
    assert same == losses
    assert kept.keys() == again.keys()
    for name, value in kept.items():
        assert torch.equal(again[name], value), name


def test_a_pass_without_gradient_or_in_evaluation_leaves_statistics_alone() -> None:
    model = unet()
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert any(name.endswith("running_mean") for name in before)
    with torch.no_grad():
        predictions(model)
    model.eval()
    predictions(model)[-1].sum().backward()
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_evaluation_uses_the_running_statistics_and_training_those_of_the_batch() -> None:
    norm = BatchNormGelu(2, 10.0).double()
    norm.reset(torch.Generator())
    norm.running_mean.copy_(torch.tensor([1.0, -2.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    x = drawn(3, 2, 5, 4).double().requires_grad_()
    here = F.gelu(F.batch_norm(x, None, None, training=True))
    assert torch.allclose(norm(x), here, rtol=1e-12, atol=1e-14)
    kept = F.gelu(F.batch_norm(x, norm.running_mean, norm.running_var))
    norm.eval()
    assert torch.allclose(norm(x), kept, rtol=1e-12, atol=1e-14)
    grad = drawn(3, 2, 5, 4, key=1).double()
    ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (norm(x), kept))
    assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-14)


def test_numbers_that_are_not_finite_stay_out_of_the_running_statistics() -> None:
    norm = BatchNormGelu(2, 10.0)
    norm.reset(torch.Generator())
    x = drawn(1, 2, 4, 4)
    x[0, 0, 0, 0] = float("nan")
    norm(x.requires_grad_()).sum().backward()
    assert norm.running_mean[0] == 0
    assert norm.running_var[0] == 1
    assert norm.running_mean[1] != 0
