"""Scores of members against formulas written out, with their gradients, over cut ensembles."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graticule.train.likelihoods import (
    crps,
    gaussian,
    mean_and_variance,
    moment_sums,
    moments,
)
from graticule.train.loss import LossWeights

M, FLOOR, ALPHA = 5, 0.03, 0.95
SHAPE = (2, 2, 3, 4, 6)  # batch, output offset, channel, lat, lon


def fields(m: int = M, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Members, and a target that is none of them."""
    generator = torch.Generator().manual_seed(seed)
    members = torch.randn(m, *SHAPE, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)
    return members.requires_grad_(), target


def weights(land: bool = True, area: bool = True) -> LossWeights:
    wet = np.ones(SHAPE[2:], bool)
    if land:
        wet[1, :2, :3] = False
        wet[2, 3] = False
    cells = np.linspace(0.5, 2.0, SHAPE[3])[:, None] * np.ones(SHAPE[4])
    return LossWeights.of(wet, cells if area else None)


def total(score: Tensor, of: LossWeights) -> Tensor:
    """(channel,) of a score (batch, offset, channel, lat, lon), weighed."""
    cell = of.cell.to(torch.float64)
    return (torch.where(of.wet, score, 0.0) * cell).sum((0, 1, -2, -1))


def moments_by_hand(x: Tensor, y: Tensor) -> Tensor:
    v = x.var(0, correction=1) + FLOOR**2
    return (v.log() + (y - x.mean(0)) ** 2 / v) / 2


def gaussian_by_hand(x: Tensor, y: Tensor) -> Tensor:
    normal = torch.distributions.Normal(x, FLOOR)
    return -(normal.log_prob(y) + math.log(math.sqrt(2 * math.pi))).mean(0)


def crps_by_hand(x: Tensor, y: Tensor, alpha: float = ALPHA) -> Tensor:
    m = len(x)
    pairs = (x[:, None] - x[None]).abs().sum((0, 1))
    fair, plain = pairs / (2 * m * max(m - 1, 1)), pairs / (2 * m**2)
    return (x - y).abs().mean(0) - (alpha * fair + (1 - alpha) * plain)


Ours = Callable[[Tensor, Tensor, LossWeights], Tensor]
SCORES: dict[str, tuple[Ours, Callable[..., Tensor]]] = {
    "moments": (
        lambda x, y, w: moments(x, y, w, num_members=len(x), floor=FLOOR), moments_by_hand
    ),
    "gaussian": (
        lambda x, y, w: gaussian(x, y, w, num_members=len(x), floor=FLOOR), gaussian_by_hand
    ),
    "crps": (lambda x, y, w: crps(x, y, w, alpha=ALPHA), crps_by_hand),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("area", [True, False])
@pytest.mark.parametrize("m", [2, 3, 8])
def test_a_score_and_its_gradient_are_those_of_its_formula(name: str, area: bool, m: int) -> None:
    ours, by_hand = SCORES[name]
    (x, y), of = fields(m), weights(area=area)
    grad = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    found, wanted = ours(x, y, of), total(by_hand(x, y), of)
    assert found.shape == (3,)
    assert found.dtype == torch.float64
    assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()
    (a,), (b,) = (torch.autograd.grad(each, x, grad) for each in (found, wanted))
    assert (a - b).abs().max() < 1e-11 * b.abs().max()
    assert a[..., 1, :2, :3].abs().max() == 0  # land


def test_the_gradient_of_moments_is_the_closed_form() -> None:
    x, y = fields()
    of = weights(land=False, area=False)
    (ours,) = torch.autograd.grad(SCORES["moments"][0](x, y, of).sum(), x)
    x, mean = x.detach(), x.detach().mean(0)
    v = x.var(0, correction=1) + FLOOR**2
    closed = -(y - mean) / (M * v) + (x - mean) / (M - 1) * (1 / v - (y - mean) ** 2 / v**2)
    assert (ours - closed).abs().max() < 1e-12 * closed.abs().max()


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("area", [True, False])
def test_land_counts_nothing_whatever_stands_there(name: str, area: bool) -> None:
    """Trap 18: members that agree on land have no variance there, and no say."""
    ours, _ = SCORES[name]
    (x, y), of = fields(), weights(area=area)
    clean = ours(x, y, of)
    (wanted,) = torch.autograd.grad(clean.sum(), x)
    dirty, target = x.detach().clone(), y.clone()
    dirty[..., ~of.wet], target[..., ~of.wet] = 0.0, math.nan
    dirty[1][..., ~of.wet] = math.inf
    dirty.requires_grad_()
    found = ours(dirty, target, of)
    (grad,) = torch.autograd.grad(found.sum(), dirty)
    assert torch.equal(found, clean)
    assert torch.equal(grad, wanted)
    error, v = mean_and_variance(moment_sums(dirty, target, of.wet), M)
    assert error[..., ~of.wet].abs().max() == v[..., ~of.wet].abs().max() == 0


def test_what_is_missing_at_sea_is_not_hidden() -> None:
    for ours, _ in SCORES.values():
        (x, y), of = fields(), weights()
        y[0, 0, 1, 3, 3] = math.nan
        assert ours(x, y, of).isnan().tolist() == [False, True, False]


# Digits


@pytest.mark.parametrize(("mean", "spread"), [(5.0, 1e-3), (54_000.0, 30.0), (3.0, 0.05)])
def test_a_spread_that_is_small_beside_the_field_keeps_its_digits(
    mean: float, spread: float
) -> None:
    """Trap 6: sums of raw squares in float32 lose up to all of them."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(97, 1, 1, 3, 20, 30, generator=generator, dtype=torch.float64)
    x, y = (wide * spread + mean).float().split([96, 1])
    y = y[0]
    sums = moment_sums(x, y, torch.ones(3, 20, 30, dtype=torch.bool))
    assert sums.dtype == torch.float32
    assert sums.shape == (2, *y.shape)
    error, v = mean_and_variance(sums, 96)
    exact = x.double().var(0, correction=1)
    assert ((v - exact).abs() / exact).median() < 1e-6
    assert ((v - exact).abs() / exact).max() < 1e-5
    bias = x.double().mean(0) - y.double()
    assert (error - bias).abs().max() < 1e-6 * spread * 4
    raw = (x.square().sum(0) - x.sum(0) ** 2 / 96) / 95
    assert ((raw - exact).abs() / exact).median() > 1e-5  # what is avoided


def test_constant_fields_have_no_variance_and_a_finite_score() -> None:
    of = weights(land=False)
    x = torch.full((M, *SHAPE), 7.0, requires_grad=True)
    y = torch.full(SHAPE, 7.0)
    score = moments(x, y, of, num_members=M, floor=FLOOR)
    (grad,) = torch.autograd.grad(score.sum(), x)
    assert mean_and_variance(moment_sums(x, y, of.wet), M)[1].abs().max() == 0
    expected = math.log(FLOOR) * of.cell.sum((1, 2)) * SHAPE[0] * SHAPE[1]
    assert score.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert grad.abs().max() == 0


@pytest.mark.parametrize("name", SCORES)
def test_half_precision_members_are_scored_in_float32(name: str) -> None:
    ours, by_hand = SCORES[name]
    x, y = fields(dtype=torch.bfloat16)
    of = weights()
    found = ours(x, y.float(), of)
    (grad,) = torch.autograd.grad(found.sum(), x)
    wide = x.detach().double().requires_grad_()
    wanted = total(by_hand(wide, y.double()), of)
    (exact,) = torch.autograd.grad(wanted.sum(), wide)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert grad.dtype == torch.bfloat16
    assert (grad.double() - exact).abs().max() < 2**-8 * exact.abs().max()


# Members elsewhere, and one at a time


def cut(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [part.detach().requires_grad_() for part in x.split(sizes)]


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [2, 3], [4, 1]])
def test_moments_over_ranks_are_those_of_one(sizes: list[int]) -> None:
    """Traps 3 and 5: the variance is of all members, 1/m is in the score, and gradients of a
    rank's own members are of the whole: they add up over ranks without another factor."""
    (x, y), of = fields(), weights()
    whole = moments(x, y, of, num_members=M, floor=FLOOR)
    (wanted,) = torch.autograd.grad(whole.sum(), x)
    parts = cut(x, sizes)
    everywhere = sum(moment_sums(part, y, of.wet) for part in parts)
    grads, calls = [], []

    def reduce(sums: Tensor) -> Tensor:
        calls.append(sums.shape)
        assert isinstance(everywhere, Tensor)
        return everywhere

    for part in parts:
        score = moments(part, y, of, num_members=M, floor=FLOOR, reduce=reduce)
        assert (score - whole).abs().max() < 1e-12 * whole.abs().max()
        grads += torch.autograd.grad(score.sum(), part)
    assert calls == [(2, *SHAPE)] * len(parts)  # one sum of two fields
    assert (torch.cat(grads) - wanted).abs().max() < 1e-12 * wanted.abs().max()
    # The mean of the ranks' own variances is another number.
    if min(sizes) > 1:
        own = sum(part.var(0, correction=1) for part in parts) / len(parts)
        assert (own - x.var(0, correction=1)).abs().max() > 0.1


def test_members_can_come_one_at_a_time_once_the_sums_are_known() -> None:
    (x, y), of = fields(), weights()
    whole = moments(x, y, of, num_members=M, floor=FLOOR)
    (wanted,) = torch.autograd.grad(whole.sum(), x)
    sums = moment_sums(x, y, of.wet)
    for number, member in enumerate(cut(x, [1] * M)):
        score = moments(member, y, of, num_members=M, floor=FLOOR, sums=sums)
        (grad,) = torch.autograd.grad(score.sum(), member)
        assert torch.equal(score, whole)
        assert torch.equal(grad[0], wanted[number])


def test_gaussian_adds_up_over_members() -> None:
    """Trap 4: shares of m, not means over a rank's own members."""
    (x, y), of = fields(), weights()
    whole = gaussian(x, y, of, num_members=M, floor=FLOOR)
    (wanted,) = torch.autograd.grad(whole.sum(), x)
    parts = cut(x, [2, 3])
    scores = [gaussian(part, y, of, num_members=M, floor=FLOOR) for part in parts]
    assert (sum(scores) - whole).abs().max() < 1e-12 * whole.abs().max()
    grads = [torch.autograd.grad(s.sum(), p)[0] for s, p in zip(scores, parts, strict=True)]
    assert (torch.cat(grads) - wanted).abs().max() < 1e-14 * wanted.abs().max()


@pytest.mark.parametrize("name", SCORES)
def test_points_add_up(name: str) -> None:
    ours, _ = SCORES[name]
    (x, y), of = fields(), weights()
    halves = [
        ours(
            x[..., rows, :], y[..., rows, :],
            LossWeights(of.cell[:, rows].contiguous(), of.wet[:, rows].contiguous(), of.total),
        )
        for rows in (slice(0, 3), slice(3, None))
    ]  # fmt: skip
    whole = ours(x, y, of)
    assert (sum(halves) - whole).abs().max() < 1e-12 * whole.abs().max()


# CRPS


def test_the_crps_of_one_member_is_the_absolute_error_and_of_two_the_crossover() -> None:
    (x, y), of = fields(2), weights(land=False, area=False)
    one = crps(x[:1], y, of, alpha=0.0)
    assert (one - (x[0] - y).abs().sum((0, 1, 3, 4))).abs().max() < 1e-12
    two = crps(x, y, of, alpha=1.0)
    a, b = x
    crossover = ((a - y).abs() + (b - y).abs() - (a - b).abs()) / 2
    assert (two - crossover.sum((0, 1, 3, 4))).abs().max() < 1e-12


@pytest.mark.parametrize("alpha", [0.0, 0.95, 1.0])
def test_more_members_than_a_byte_counts_are_scored_right(alpha: float) -> None:
    (x, y), of = fields(130), weights()
    found, wanted = crps(x, y, of, alpha=alpha), total(crps_by_hand(x, y, alpha), of)
    assert (found - wanted).abs().max() < 1e-11 * wanted.abs().max()
    (a,), (b,) = (torch.autograd.grad(each.sum(), x) for each in (found, wanted))
    assert (a - b).abs().max() < 1e-11 * b.abs().max()


def test_members_that_are_equal_do_not_push_each_other() -> None:
    of = weights(land=False, area=False)
    y = torch.zeros(SHAPE)
    x = torch.ones(4, *SHAPE, requires_grad=True)
    (grad,) = torch.autograd.grad(crps(x, y, of, alpha=1.0).sum(), x)
    assert torch.equal(grad, torch.full_like(grad, 0.25))
    # Two of them: the third pushes both alike.
    x = torch.stack([torch.full(SHAPE, value) for value in (2.0, 1.0, 2.0)]).requires_grad_()
    (grad,) = torch.autograd.grad(crps(x, y, of, alpha=1.0).sum(), x)
    assert torch.equal(grad[0], grad[2])
    assert grad[0].unique().tolist() == pytest.approx([1 / 3 - 1 / 6])
    assert grad[1].unique().tolist() == pytest.approx([1 / 3 + 2 / 6])


def test_the_fair_crps_does_not_depend_on_the_number_of_members() -> None:
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(1, 1, 1, 200, 500, generator=generator)
    of = LossWeights.of(np.ones((1, 200, 500), bool))
    scores: dict[float, list[float]] = {0.0: [], 1.0: []}
    for m in (2, 8):
        x = torch.randn(m, *y.shape, generator=generator)
        for alpha, found in scores.items():
            found.append(float(crps(x, y, of, alpha=alpha)) / 100_000)
    exact = 1 / math.sqrt(math.pi)  # of a standard normal forecast of a standard normal truth
    assert scores[1.0] == pytest.approx([exact, exact], abs=0.005)
    assert scores[0.0] == pytest.approx([exact * 1.5, exact * 1.125], abs=0.005)


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y, w: moments(x, y, w, num_members=1, floor=FLOOR),
         r"1 member has no variance: take bayes\.members=2 or more, or bayes\.likelihood=gaussian"),
        (lambda x, y, w: crps(x, y, w, alpha=0.95),
         r"CRPS with alpha=0\.95 corrects .* there is 1; take bayes\.members=2 or more, or"),
    ],
)  # fmt: skip
def test_one_member_is_an_error_and_not_a_nan(call: Any, message: str) -> None:
    """Trap 5."""
    (x, y), of = fields(1), weights()
    with pytest.raises(ValueError, match=message):
        call(x, y, of)
