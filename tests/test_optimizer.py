"""Learning rates as a function of the step, weight decay's reach, the moving average."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from graticule.config import TrainConfig
from graticule.train.optimizer import (
    Average,
    Schedule,
    empty_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
)


class Small(nn.Module):
    """A kernel, a matrix, biases, a norm and a bias table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)
        self.bias_table = nn.Parameter(torch.randn(4, 9))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3))).sum() + self.bias_table.sum()


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_warm_up_is_linear_and_cosine_ends_at_the_final_rate() -> None:
    rates = Schedule(
        TrainConfig(steps=10, warmup_steps=4, learning_rate=1.0, final_learning_rate=0.1)
    )
    assert [rates.rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert rates.rate(7) == pytest.approx(0.55)
    assert rates.rate(8) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 4 / 6)) / 2)
    assert rates.rate(10) == pytest.approx(0.1, abs=1e-15)
    falling = [rates.rate(step) for step in range(4, 11)]
    assert falling == sorted(falling, reverse=True)


def test_a_constant_schedule_stays_after_its_warm_up() -> None:
    rates = Schedule(TrainConfig(steps=6, warmup_steps=2, learning_rate=0.5, schedule="constant"))
    assert [rates.rate(step) for step in range(1, 7)] == [0.25, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_no_warm_up_starts_near_the_peak() -> None:
    rates = Schedule(TrainConfig(steps=100, warmup_steps=0, learning_rate=1.0))
    assert 0.999 < rates.rate(1) < 1.0


def test_weight_decay_leaves_biases_norms_and_bias_tables_alone() -> None:
    model = Small()
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed = {names[p] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {"conv.weight", "head.weight"}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.0, 0.3}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(names)
    assert {g["betas"] for g in optimizer.param_groups} == {(0.9, 0.95)}


def test_a_model_without_matrices_has_an_optimizer_too() -> None:
    model = nn.Module()
    model.gain = nn.Parameter(torch.ones(3))
    (group,) = make_optimizer(model, TrainConfig()).param_groups
    assert group["weight_decay"] == 0


def test_the_fused_optimizer_takes_the_steps_of_the_plain_one() -> None:
    fused, plain = Small(), Small()
    config = TrainConfig(learning_rate=1e-2)
    optimizer = make_optimizer(fused, config)
    assert all(group["fused"] for group in optimizer.param_groups)
    reference = torch.optim.AdamW(
        [
            {"params": [plain.conv.weight, plain.head.weight], "weight_decay": 0.1},
            {
                "params": [
                    p for n, p in plain.named_parameters()
                    if n not in ("conv.weight", "head.weight")
                ],
                "weight_decay": 0.0,
            },
        ],
        lr=1e-2, betas=(0.9, 0.95), fused=False, foreach=False,
    )  # fmt: skip
    for step in range(10):
        for model, one in ((fused, optimizer), (plain, reference)):
            give_gradients(model, step)
            one.step()
    # Measured: the largest difference is 3e-8 where steps are 1e-2.
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_optimizer_state_goes_out_by_name_and_comes_back_bit_for_bit() -> None:
    model = Small()
    optimizer = make_optimizer(model, TrainConfig())
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    tensors = {name: value.clone() for name, value in optimizer_tensors(optimizer, model).items()}
    assert "exp_avg.conv.weight" in tensors
    assert tensors["step.norm.bias"].item() == 3
    twin = copy.deepcopy(model)
    other = make_optimizer(twin, TrainConfig())
    empty = empty_optimizer_tensors(twin, tensors)
    assert {n: t.shape for n, t in empty.items()} == {n: t.shape for n, t in tensors.items()}
    restore_optimizer(other, twin, tensors)
    for one, with_optimizer in ((model, optimizer), (twin, other)):
        give_gradients(one, 9)
        with_optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_without_a_gradient_so_far_has_no_state_to_save() -> None:
    model = Small()
    optimizer = make_optimizer(model, TrainConfig())
    assert optimizer_tensors(optimizer, model) == {}
    model.head.bias.grad = torch.ones(3)
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    assert set(tensors) == {"exp_avg.head.bias", "exp_avg_sq.head.bias", "step.head.bias"}
    assert set(empty_optimizer_tensors(model, tensors)) == set(tensors)


def test_the_average_follows_its_formula_also_for_statistics_and_copies_counts() -> None:
    model = Small()
    average = Average(model, decay=0.5)
    expected = model.head.bias.detach().double()
    statistic = 1.0
    for step in range(1, 6):
        with torch.no_grad():
            model.head.bias.add_(float(step))
            model.scale.fill_(step)
            model.count.fill_(7 * step)
        average.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.head.bias.detach().double()
        statistic = decay * statistic + (1 - decay) * step
        assert average.decay_at(step) == decay
    torch.testing.assert_close(average.tensors["head.bias"].double(), expected)
    assert average.tensors["scale"].tolist() == pytest.approx([statistic] * 2, rel=1e-6)
    assert average.tensors["count"].item() == 35
    assert average.tensors["count"].dtype == torch.int64
    assert set(average.tensors) == set(model.state_dict())


def test_the_averages_statistics_are_those_of_the_averaged_weights() -> None:
    """A linear layer and the batch norm behind it, while the weights move."""

    def drifting(factor: float) -> tuple[float, float, float, float]:
        """Errors of mean and of variance, averaged and copied, beside those that the averaged
        weights have. factor: how much the weights move in a step, to the same place."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(2, momentum=1.0))
        x = 2 + torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        direction = torch.randn(model[0].weight.shape)
        with torch.no_grad():
            model[0].weight.sub_(200 * factor * direction)
        average = Average(model, decay=0.9)
        model.train()
        for step in range(1, 201):
            with torch.no_grad():
                model[0].weight.add_(factor * direction)
            model(x)
            average.update(model, step)
        copied = {name: model.state_dict()[name].clone() for name in average.tensors}
        model.load_state_dict(average.tensors)
        model(x)  # momentum 1: its statistics are those of this input
        errors = []
        for name in ("1.running_mean", "1.running_var"):
            own = model.state_dict()[name]
            errors += [(kept[name] - own).abs().max() for kept in (average.tensors, copied)]
        return tuple(float(error) for error in errors)  # type: ignore[return-value]

    mean, copied_mean, variance, copied_variance = drifting(1e-3)
    assert mean < 1e-5 < 1e-2 < copied_mean  # the mean exactly, to rounding
    assert variance < 0.1 * copied_variance
    # Halving the speed halves the error of copies, and quarters that of averages.
    *_, half, half_copied = drifting(5e-4)
    assert copied_variance / half_copied == pytest.approx(2, rel=0.1)
    assert variance / half == pytest.approx(4, rel=0.2)


def test_the_average_does_not_share_memory_with_the_model() -> None:
    model = Small()
    average = Average(model, decay=0.9)
    before = average.tensors["head.weight"].clone()
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(average.tensors["head.weight"], before)


def test_a_long_runs_average_decays_as_configured() -> None:
    average = Average(Small(), decay=0.999)
    assert average.decay_at(1) == pytest.approx(2 / 11)
    assert average.decay_at(100_000) == 0.999


def test_a_parameter_with_two_names_is_averaged_under_both() -> None:
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(2))
    model.second = model.first
    average = Average(model, decay=0.0)
    with torch.no_grad():
        model.first.fill_(1.0)
    average.decay = 0.5
    average.update(model, 100)
    assert average.tensors["first"].tolist() == [0.5, 0.5]
    assert average.tensors["second"].tolist() == [0.5, 0.5]
