"""The step: which gradient it takes, how micro-batches add up, what it refuses."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graticule.model.norm_gelu import BatchNormGelu
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.optimizer import Average
from graticule.train.step import LossScale, training_step


class Batch:
    """Samples in memory. inputs: (sample, time, channel, lat, lon); labels: one such a lead."""

    def __init__(self, inputs: Tensor, labels: list[Tensor], forcing: list[Tensor] | None = None):
        self.inputs, self.keys = inputs, list(range(len(inputs)))
        self.init_times = [f"2003-01-{day + 1:02d}" for day in self.keys]
        nothing = inputs[:, :, :0]
        self._leads = list(zip(forcing or [nothing] * len(labels), labels, strict=True))

    def lead(self) -> tuple[Tensor, Tensor]:
        return self._leads.pop(0)


class Times(nn.Module):
    """x -> a x."""

    def __init__(self, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x


class Mixer(nn.Module):
    """A pointwise layer with a shift along longitude, so that leads mix cells."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Conv2d(channels, channels, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(self.layer(torch.roll(x, 1, dims=-1)))


def objective(**settings: Any) -> Objective:
    given = {
        "inputs": as_stored, "forcing": as_stored, "labels": as_stored,
        "statics": torch.zeros(0, 1, 1), "weights": LossWeights.of(np.ones((1, 1, 1), bool)),
        "kind": "mse", "leads": 1, "num_prognostic": 1, **settings,
    }  # fmt: skip
    return Objective(**given)


def fields(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def take_step(model: nn.Module, task: Objective, batches: list[Batch], **settings: Any) -> Any:
    samples = sum(len(batch.keys) for batch in batches)
    given = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0), "step": 1,
        "learning_rate": 0.0, "samples": samples, **settings,
    }  # fmt: skip
    return training_step(model, task, batches, **given)


MIXER = {
    "weights": LossWeights.of(np.ones((2, 4, 8), bool), np.linspace(1, 2, 32).reshape(4, 8)),
    "statics": torch.zeros(0, 4, 8, dtype=torch.float64),
    "num_prognostic": 2,
}


def mixer_batch(samples: range, leads: int) -> Batch:
    inputs = torch.cat([fields(1, 1, 2, 4, 8, seed=n) for n in samples])
    labels = [
        torch.cat([fields(1, 1, 2, 4, 8, seed=100 * k + n) for n in samples])
        for k in range(1, leads + 1)
    ]
    return Batch(inputs, labels)


@pytest.mark.parametrize(
    ("every", "gradient"), [(0, 228.0), (1, 84.0), (2, 100.0), (3, 228.0), (7, 228.0)]
)
def test_the_rollouts_gradient_is_not_handed_on_after_every_so_many_leads(
    every: int, gradient: float
) -> None:
    # x0 = 1, a = 2: the leads are 2, 4, 8; sum of squares 84.
    # Through all: d/da (a^2 + a^4 + a^6) = 4 + 32 + 192. After each: 2 a (1 + 4 + 16).
    # After the second: 4 + 32, and 2 a x 16 with 4 a constant.
    model = Times(2.0)
    zero = torch.zeros(1, 1, 1, 1, 1)
    task = objective(leads=3, detach_every=every)
    result = take_step(model, task, [Batch(torch.ones(1, 1, 1, 1, 1), [zero] * 3)])
    assert result.loss == 84.0
    assert result.lead_losses == (4.0, 16.0, 64.0)
    assert model.a.grad is not None
    assert model.a.grad.item() == gradient
    assert result.gradient_norm == gradient


@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_leads_are_differentiated_as_soon_as_nothing_is_handed_on(every: int) -> None:
    # When a lead is asked for, the graph of the groups before is gone: their gradient is there.
    model, seen = Times(2.0), []

    class Watched(Batch):
        def lead(self) -> tuple[Tensor, Tensor]:
            seen.append(model.a.grad is not None)
            return super().lead()

    zero = torch.zeros(1, 1, 1, 1, 1)
    batch = Watched(torch.ones(1, 1, 1, 1, 1), [zero] * 5)
    take_step(model, objective(leads=5, detach_every=every), [batch])
    first = every or 5
    assert seen == [lead > first for lead in range(1, 6)]


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("kind", ["mae", "mse"])
def test_micro_batches_add_up_to_the_whole_batch(kind: str, every: int) -> None:
    task = objective(**MIXER, leads=3, kind=kind, detach_every=every)
    results, gradients = [], []
    for parts in ([range(6)], [range(2), range(2, 4), range(4, 6)], [range(1), range(1, 6)]):
        model = Mixer()
        batches = [mixer_batch(part, 3) for part in parts]
        results.append(take_step(model, task, batches))
        gradients.append([p.grad for p in model.parameters()])
    for result, gradient in zip(results[1:], gradients[1:], strict=True):
        assert result.loss == pytest.approx(results[0].loss, rel=1e-13)
        assert result.gradient_norm == pytest.approx(results[0].gradient_norm, rel=1e-12)
        for a, b in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_the_gradient_is_that_of_the_plain_formula() -> None:
    model, leads = Mixer(), 2
    batch = mixer_batch(range(3), leads)
    task = objective(**MIXER, leads=leads, kind="mse")
    cell = task.weights.cell.double()
    state, loss = batch.inputs[:, 0], torch.zeros((), dtype=torch.float64)
    for _, label in batch._leads:
        state = model(state)
        loss = loss + ((state - label[:, 0]) ** 2 * cell).sum() / (3 * cell.sum())
    expected = torch.autograd.grad(loss, list(model.parameters()))
    result = take_step(model, task, [batch])
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=0)


def test_forcing_of_each_lead_reaches_its_step() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * x.sum(1, keepdim=True)

    def one(value: float) -> Tensor:
        return torch.full((1, 1, 1, 1, 1), value, dtype=torch.float32)

    batch = Batch(one(1), [one(0)] * 3, forcing=[one(10), one(100), one(1000)])
    task = objective(leads=3, kind="mae", statics=torch.full((1, 1, 1), 0.5))
    result = take_step(Adds(), task, [batch])
    assert result.lead_losses == (11.5, 112.0, 1112.5)


class Shared(nn.Module):
    """Gradient of the loss: 3 for `alone`; 4 for `twice`, which is one parameter used by two."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Parameter(torch.zeros(1))
        self.twice = nn.Parameter(torch.zeros(2))
        self.again = self.twice

    def forward(self, x: Tensor) -> Tensor:
        return x * (10 + 3 * self.alone[0] + 2 * self.twice[0] + 2 * self.again[0])


def test_each_parameter_counts_once_in_the_one_norm() -> None:
    model = Shared()
    batch = Batch(torch.ones(1, 1, 1, 1, 1), [torch.zeros(1, 1, 1, 1, 1)])
    result = take_step(model, objective(kind="mae"), [batch])
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[3.0], [4.0, 0]]
    assert result.gradient_norm == 5.0


def test_clipping_scales_all_gradients_and_the_logged_norm_is_that_before() -> None:
    model = Shared()
    batch = Batch(torch.ones(1, 1, 1, 1, 1), [torch.zeros(1, 1, 1, 1, 1)])
    result = take_step(model, objective(kind="mae"), [batch], clip_norm=1.0)
    assert result.gradient_norm == 5.0
    gradient = torch.cat([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8, 0.0]), rtol=1e-6, atol=0)


def test_a_norm_below_the_limit_is_left_alone() -> None:
    model = Shared()
    batch = Batch(torch.ones(1, 1, 1, 1, 1), [torch.zeros(1, 1, 1, 1, 1)])
    take_step(model, objective(kind="mae"), [batch], clip_norm=5.5)
    assert model.alone.grad is not None
    assert model.alone.grad.item() == 3.0


def test_the_learning_rate_given_is_the_one_used() -> None:
    model = Times(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=77.0)
    batch = Batch(torch.ones(1, 1, 1, 1, 1), [torch.zeros(1, 1, 1, 1, 1)])
    take_step(model, objective(), [batch], optimizer=optimizer, learning_rate=0.125)
    assert model.a.item() == 2.0 - 0.125 * 4.0
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_gradients_of_the_step_before_do_not_linger() -> None:
    model, zero = Times(2.0), torch.zeros(1, 1, 1, 1, 1)
    for _ in range(2):
        take_step(model, objective(), [Batch(torch.ones(1, 1, 1, 1, 1), [zero])])
    assert model.a.grad is not None
    assert model.a.grad.item() == 4.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_step_and_dates_and_changes_nothing(value: float) -> None:
    model = Times(2.0)
    average = Average(model, 0.9)
    inputs = torch.ones(2, 1, 1, 1, 1)
    inputs[1] = value
    batch = Batch(inputs, [torch.zeros(2, 1, 1, 1, 1)])
    with pytest.raises(ValueError, match=r"step 41: loss (nan|inf).*2003-01-01, 2003-01-02"):
        take_step(
            model, objective(), [batch], step=41, learning_rate=1.0, clip_norm=1.0, average=average
        )
    assert model.a.item() == 2.0
    assert average.tensors["a"].item() == 2.0


def test_a_missing_label_on_land_does_not_stop_training() -> None:
    wet = np.array([[[True, False]]])
    task = objective(weights=LossWeights.of(wet), statics=torch.zeros(0, 1, 2))
    label = torch.tensor([0.0, math.nan]).reshape(1, 1, 1, 1, 2)
    result = take_step(Times(2.0), task, [Batch(torch.ones(1, 1, 1, 1, 2), [label])])
    assert result.loss == 4.0
    assert result.gradient_norm == 4.0


def test_fewer_samples_than_announced_are_an_error() -> None:
    batch = Batch(torch.ones(1, 1, 1, 1, 1), [torch.zeros(1, 1, 1, 1, 1)])
    with pytest.raises(AssertionError, match=r"1\.0 samples came, not 2"):
        take_step(Times(2.0), objective(), [batch], samples=2)


def test_a_power_of_two_loss_scale_changes_no_bit() -> None:
    results, gradients = [], []
    for scale in (None, LossScale(2.0**10)):
        model = Mixer().float()
        task = objective(**MIXER | {"statics": torch.zeros(0, 4, 8)}, leads=2)
        batch = mixer_batch(range(2), 2)
        batch.inputs = batch.inputs.float()
        batch._leads = [(given.float(), label.float()) for given, label in batch._leads]
        results.append(take_step(model, task, [batch], loss_scale=scale))
        gradients.append([p.grad for p in model.parameters()])
    assert results[0] == results[1]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


class Overflows(nn.Module):
    """Its gradient is infinite while the loss scale is above 8."""

    class _Limit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.where(gradient.abs() > 16, torch.inf, gradient)

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self._Limit.apply(self.a * x)


def test_a_float16_overflow_skips_the_step_and_halves_the_scale() -> None:
    model, scale = Overflows(), LossScale(64.0, growth_steps=2)
    average = Average(model, 0.9)
    applied, scales, values = [], [], []
    for step in range(1, 7):
        batch = Batch(torch.ones(1, 1, 1, 1, 1), [torch.zeros(1, 1, 1, 1, 1)])
        result = take_step(
            model, objective(kind="mae"), [batch], step=step, learning_rate=0.1,
            loss_scale=scale, average=average,
        )  # fmt: skip
        applied.append(result.applied)
        scales.append(scale.value)
        values.append(round(model.a.item(), 6))
    # 64 and 32 overflow; 16 is good twice, so 32 is tried again, overflows, and 16 is back.
    assert applied == [False, False, True, True, False, True]
    assert scales == [32.0, 16.0, 16.0, 32.0, 16.0, 16.0]
    assert values == [1.0, 1.0, 0.9, 0.8, 0.8, 0.7]


class Normed(nn.Module):
    """A batch norm, then what overflows: its running statistics move in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rest = BatchNormGelu(1, 0.0), Overflows()
        nn.init.ones_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.norm(x))


def statistics_of(model: Normed) -> list[float]:
    return [model.norm.running_mean.item(), model.norm.running_var.item()]


def normed_batch(label: float) -> Batch:
    inputs = torch.tensor([3.0, 5.0]).reshape(1, 1, 1, 1, 2)
    return Batch(inputs, [torch.full((1, 1, 1, 1, 2), label)])


def test_a_step_that_fails_leaves_running_statistics_and_their_average_as_they_were() -> None:
    model = Normed()
    average = Average(model, 0.9)
    statics = torch.zeros(0, 1, 2)
    task = objective(statics=statics, weights=LossWeights.of(np.ones((1, 1, 2), bool)))
    take_step(model, task, [normed_batch(0.0)], learning_rate=0.1, average=average)
    before = statistics_of(model)
    assert before == pytest.approx([0.4, 1.1]), "a tenth of 4 and of 2, the unbiased variance"
    saved = {name: value.clone() for name, value in average.tensors.items()}
    # A sound micro-batch has moved them before the one with the missing label comes.
    with pytest.raises(ValueError, match="the weights are as they were before this step"):
        take_step(
            model, task, [normed_batch(0.0), normed_batch(math.nan)], learning_rate=0.1,
            average=average,
        )  # fmt: skip
    assert statistics_of(model) == before
    for name, value in saved.items():
        assert torch.equal(average.tensors[name], value)


def test_a_float16_step_that_is_left_out_leaves_running_statistics_as_they_were() -> None:
    model, scale = Normed(), LossScale(2.0**20)
    statics = torch.zeros(0, 1, 2)
    task = objective(statics=statics, weights=LossWeights.of(np.ones((1, 1, 2), bool)))
    applied = []
    while not (applied and applied[-1]):
        before = statistics_of(model)
        result = take_step(model, task, [normed_batch(9.0)], loss_scale=scale)
        applied.append(result.applied)
        assert (statistics_of(model) == before) is not result.applied
    assert len(applied) > 1, "some are left out, then one is taken"


def test_an_overflow_at_the_least_scale_is_an_error() -> None:
    batch = Batch(torch.full((1, 1, 1, 1, 1), torch.inf), [torch.zeros(1, 1, 1, 1, 1)])
    with pytest.raises(ValueError, match="step 1: loss inf"):
        take_step(Times(1.0), objective(), [batch], loss_scale=LossScale(1.0))


def test_an_objective_counts_samples_times_and_cells_in_its_weight() -> None:
    weights = LossWeights.of(np.array([[[1, 1, 0]], [[1, 0, 0]]], dtype=bool))
    task = replace(objective(), weights=weights, num_outputs=2)
    assert task.weight(5) == 5 * 2 * 3
