"""Scores of members against formulas written out, with their gradients, over cut ensembles."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graticule.mesh import Mesh
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks
from graticule.train import likelihoods
from graticule.train.likelihoods import Moments, Score, score_of
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


BY_HAND: dict[Any, Callable[..., Tensor]] = {
    "moments": moments_by_hand, "gaussian": gaussian_by_hand, "crps": crps_by_hand,
}  # fmt: skip


def new(name: Any, of: LossWeights, m: int, alpha: float = ALPHA, **shares: Any) -> Score:
    return score_of(name, of, num_members=m, floor=FLOOR, alpha=alpha, **shares)


def taken(score: Score, x: Tensor, y: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(value, gradient of each member) of members that come one at a time, first without."""
    if score.together:
        with torch.no_grad():
            for number, member in enumerate(x):
                score.of(member, y, number)
        value = score.settle()
    leaves = [member.detach().requires_grad_() for member in x]
    for number, leaf in enumerate(leaves):
        worth = score.of(leaf, y, number)
        worth.backward(torch.ones_like(worth) if grad is None else grad)
        assert not worth.any()
    if not score.together:
        value = score.settle()
    return value, torch.stack([leaf.grad for leaf in leaves])  # type: ignore[misc]


def scored(
    name: Any, x: Tensor, y: Tensor, of: LossWeights, grad: Tensor | None = None,
    alpha: float = ALPHA,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return taken(new(name, of, len(x), alpha), x, y, grad)


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("area", [True, False])
@pytest.mark.parametrize("m", [2, 3, 8])
def test_a_score_and_its_gradient_are_those_of_its_formula(name: str, area: bool, m: int) -> None:
    (x, y), of = fields(m), weights(area=area)
    grad = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    found, a = scored(name, x, y, of, grad)
    wanted = total(BY_HAND[name](x, y), of)
    assert found.shape == (3,)
    assert found.dtype == torch.float64
    assert (found - wanted).abs().max() < 1e-12 * wanted.abs().max()
    (b,) = torch.autograd.grad(wanted, x, grad)
    assert (a - b).abs().max() < 1e-11 * b.abs().max()
    assert a[..., 1, :2, :3].abs().max() == 0  # land


def test_the_gradient_of_moments_is_the_closed_form() -> None:
    x, y = fields()
    of = weights(land=False, area=False)
    _, ours = scored("moments", x, y, of)
    x, mean = x.detach(), x.detach().mean(0)
    v = x.var(0, correction=1) + FLOOR**2
    closed = -(y - mean) / (M * v) + (x - mean) / (M - 1) * (1 / v - (y - mean) ** 2 / v**2)
    assert (ours - closed).abs().max() < 1e-12 * closed.abs().max()


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("area", [True, False])
def test_land_counts_nothing_whatever_stands_there(name: str, area: bool) -> None:
    """Trap 18: members that agree on land have no variance there, and no say."""
    (x, y), of = fields(), weights(area=area)
    clean, wanted = scored(name, x, y, of)
    dirty, target = x.detach().clone(), y.clone()
    dirty[..., ~of.wet], target[..., ~of.wet] = 0.0, math.nan
    dirty[1][..., ~of.wet] = math.inf
    score = new(name, of, M)
    found, grad = taken(score, dirty, target)
    assert torch.equal(found, clean)
    assert torch.equal(grad, wanted)
    if isinstance(score, Moments):
        error, v = score.mean_and_variance()
        assert error[..., ~of.wet].abs().max() == v[..., ~of.wet].abs().max() == 0


def test_what_is_missing_at_sea_is_not_hidden() -> None:
    for name in BY_HAND:
        (x, y), of = fields(), weights()
        y[0, 0, 1, 3, 3] = math.nan
        assert scored(name, x, y, of)[0].isnan().tolist() == [False, True, False]


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
    score = Moments(
        LossWeights.of(np.ones((3, 20, 30), bool)), floor=FLOOR, num_members=96, own=96, link=Link()
    )
    for number, member in enumerate(x):
        score.of(member, y, number)
    assert score.sums is not None
    assert score.sums.dtype == torch.float32
    assert score.sums.shape == (2, *y.shape)
    error, v = score.mean_and_variance()
    exact = x.double().var(0, correction=1)
    assert ((v - exact).abs() / exact).median() < 1e-6
    assert ((v - exact).abs() / exact).max() < 1e-5
    bias = x.double().mean(0) - y.double()
    assert (error - bias).abs().max() < 1e-6 * spread * 4
    raw = (x.square().sum(0) - x.sum(0) ** 2 / 96) / 95
    assert ((raw - exact).abs() / exact).median() > 1e-5  # what is avoided
    if mean / spread == 5000:
        # Added as members come, half of the variances are negative.
        total, square = torch.zeros_like(y), torch.zeros_like(y)
        for member in x:
            total, square = total + member, square + member.square()
        assert ((square - total**2 / 96) < 0).double().mean() > 0.3


def test_constant_fields_have_no_variance_and_a_finite_score() -> None:
    of = weights(land=False)
    x, y = torch.full((M, *SHAPE), 7.0), torch.full(SHAPE, 7.0)
    score = new("moments", of, M)
    found, grad = taken(score, x, y)
    assert isinstance(score, Moments)
    assert score.mean_and_variance()[1].abs().max() == 0
    expected = math.log(FLOOR) * of.cell.sum((1, 2)) * SHAPE[0] * SHAPE[1]
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert grad.abs().max() == 0


@pytest.mark.parametrize("name", BY_HAND)
def test_half_precision_members_are_scored_in_float32(name: str) -> None:
    x, y = fields(dtype=torch.bfloat16)
    of = weights()
    found, grad = scored(name, x, y.float(), of)
    wide = x.detach().double().requires_grad_()
    wanted = total(BY_HAND[name](wide, y.double()), of)
    (exact,) = torch.autograd.grad(wanted.sum(), wide)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert grad.dtype == torch.bfloat16
    assert (grad.double() - exact).abs().max() < 2**-8 * exact.abs().max()


# Members elsewhere


def _some(m: int, rows: int | None) -> tuple[Tensor, Tensor, LossWeights]:
    """Members, target and weights of a stripe of so many rows; none: of all."""
    (x, y), of = fields(m), weights()
    here = LossWeights(of.cell[:, :rows].contiguous(), of.wet[:, :rows].contiguous(), of.total)
    return x.detach()[..., :rows, :], y[..., :rows, :], here


def _on_a_rank(name: str, m: int, points: int | None) -> tuple[np.ndarray, np.ndarray, Any]:
    mesh = Mesh({"member": 2})
    x, y, of = _some(m, points)
    own, link = m // 2, Link(mesh.group("member"))
    first = own * mesh.index("member")
    score = new(name, of, m, own=own, link=link)
    value, grad = taken(score, x[first : first + own], y)
    return value.numpy(), grad.numpy(), dict(link.sent)


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize(("m", "points"), [(2, None), (6, None), (4, 0), (4, 1)])
def test_members_on_two_ranks_are_scored_as_on_one(
    two: LocalRanks, name: str, m: int, points: int | None
) -> None:
    """Traps 3, 4 and 5: the variance is of all members, 1/m is in the score, and gradients of a
    rank's own members are of the whole: they add up over ranks without another factor."""
    parts = two.run(_on_a_rank, name, m, points)
    x, y, of = _some(m, points)
    value, grad = scored(name, x, y, of)
    both = sum(part[0] for part in parts)
    assert np.abs(both - value.numpy()).max() <= 1e-12 * np.abs(value.numpy()).max()
    ours = np.concatenate([part[1] for part in parts])
    assert np.abs(ours - grad.numpy()).max(initial=0) <= 1e-12 * np.abs(grad.numpy()).max(initial=0)
    if points is None:
        field = 8 * math.prod(SHAPE)
        # One sum of two fields; half of the members' points there, and a byte each back.
        wanted = {"moments": 2 * field, "gaussian": 0, "crps": m // 2 * field // 2 * 9 // 8}
        assert parts[0][2].get("members", 0) == wanted[name]


@pytest.mark.parametrize("name", BY_HAND)
def test_points_add_up(name: str) -> None:
    (x, y), of = fields(), weights()
    halves = [
        scored(
            name, x[..., rows, :], y[..., rows, :],
            LossWeights(of.cell[:, rows].contiguous(), of.wet[:, rows].contiguous(), of.total),
        )[0]
        for rows in (slice(0, 3), slice(3, None))
    ]  # fmt: skip
    whole, _ = scored(name, x, y, of)
    assert (sum(halves) - whole).abs().max() < 1e-12 * whole.abs().max()


@pytest.mark.parametrize("name", BY_HAND)
def test_stripes_of_rows_count_by_their_share_of_the_whole_area(name: str) -> None:
    """Trap 13: divided by what they weigh themselves, columns would do, and rows would not."""
    (x, y), of = fields(), weights(land=False)
    y = y + torch.linspace(0, 2, SHAPE[3], dtype=torch.float64)[:, None]  # worse in the south
    whole = float(scored(name, x, y, of)[0].sum()) / of.total
    for dim, right in ((-2, False), (-1, True)):
        parts, means = 0.0, []
        for ours in (slice(0, SHAPE[dim] // 2), slice(SHAPE[dim] // 2, None)):
            at = (..., ours, slice(None)) if dim == -2 else (..., ours)
            here = LossWeights(of.cell[at].contiguous(), of.wet[at].contiguous(), of.total)
            value = float(scored(name, x[at], y[at], here)[0].sum())
            parts += value / of.total
            means.append(value / float(here.cell.double().sum()))
        assert parts == pytest.approx(whole, rel=1e-12)
        assert (sum(means) / 2 == pytest.approx(whole, rel=1e-6)) == right


# CRPS


def test_the_crps_of_one_member_is_the_absolute_error_and_of_two_the_crossover() -> None:
    (x, y), of = fields(2), weights(land=False, area=False)
    one, _ = scored("crps", x[:1], y, of, alpha=0.0)
    assert (one - (x[0] - y).abs().sum((0, 1, 3, 4))).abs().max() < 1e-12
    two, _ = scored("crps", x, y, of, alpha=1.0)
    a, b = x
    crossover = ((a - y).abs() + (b - y).abs() - (a - b).abs()) / 2
    assert (two - crossover.sum((0, 1, 3, 4))).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("members", "observed", "plain", "fair", "almost"),
    [
        ([1, 3], 2, 0.5, 0.0, 0.025),
        ([0, 1, 2, 5], 1.5, 0.5, 1 / 6, 0.18333333333333333),
        ([5, 2, 0, 1], 1.5, 0.5, 1 / 6, 0.18333333333333333),
        ([7, 7, 7], 5, 2.0, 2.0, 2.0),
    ],
)
def test_the_crps_that_is_trained_is_the_one_that_forecasts_are_scored_by(
    members: list[float], observed: float, plain: float, fair: float, almost: float
) -> None:
    of = LossWeights.of(np.ones((1, 1, 1), bool))
    x = torch.tensor(members, dtype=torch.float64).reshape(-1, 1, 1, 1, 1, 1)
    y = torch.full((1, 1, 1, 1, 1), float(observed), dtype=torch.float64)
    for alpha, expected in ((0.0, plain), (1.0, fair), (0.95, almost)):
        found, grad = scored("crps", x, y, of, alpha=alpha)
        assert float(found) == pytest.approx(expected, abs=1e-14)
        assert grad.isfinite().all()


def test_members_that_are_all_the_target_have_a_finite_score_and_no_gradient() -> None:
    """Cells that are prescribed: no spread, no error, and 0 / 0 nowhere."""
    (x, y), of = fields(), weights(land=False, area=False)
    x = x.detach().clone()
    x[..., 0] = y[..., 0]  # one column
    for name, each in (("moments", math.log(FLOOR)), ("gaussian", math.log(FLOOR)), ("crps", 0.0)):
        whole, grad = scored(name, x, y, of)
        assert grad[..., 0].abs().max() == 0
        without = LossWeights.of(np.ones((3, SHAPE[3], SHAPE[4] - 1), bool))
        rest, _ = scored(name, x[..., 1:], y[..., 1:], without)
        cells = SHAPE[0] * SHAPE[1] * SHAPE[3]
        assert (whole - rest).tolist() == pytest.approx([each * cells] * 3, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.95, 1.0])
def test_more_members_than_a_byte_counts_are_scored_right(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihoods, "PART", 50)  # several parts of the points
    (x, y), of = fields(130), weights()
    found, a = scored("crps", x, y, of, alpha=alpha)
    wanted = total(crps_by_hand(x, y, alpha), of)
    assert (found - wanted).abs().max() < 1e-11 * wanted.abs().max()
    (b,) = torch.autograd.grad(wanted.sum(), x)
    assert (a - b).abs().max() < 1e-11 * b.abs().max()


def test_members_that_are_equal_do_not_push_each_other() -> None:
    of = weights(land=False, area=False)
    y = torch.zeros(SHAPE)
    _, grad = scored("crps", torch.ones(4, *SHAPE), y, of, alpha=1.0)
    assert torch.equal(grad, torch.full_like(grad, 0.25))
    # Two of them: the third pushes both alike.
    x = torch.stack([torch.full(SHAPE, value) for value in (2.0, 1.0, 2.0)])
    _, grad = scored("crps", x, y, of, alpha=1.0)
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
            found.append(float(scored("crps", x, y, of, alpha=alpha)[0]) / 100_000)
    exact = 1 / math.sqrt(math.pi)  # of a standard normal forecast of a standard normal truth
    assert scores[1.0] == pytest.approx([exact, exact], abs=0.005)
    assert scores[0.0] == pytest.approx([exact * 1.5, exact * 1.125], abs=0.005)


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: new("moments", w, 1),
         r"1 member has no variance: take bayes\.members=2 or more, or bayes\.likelihood=gaussian"),
        (lambda w: new("crps", w, 1),
         r"CRPS with alpha=0\.95 corrects .* there is 1; take bayes\.members=2 or more, or"),
    ],
)  # fmt: skip
def test_one_member_is_an_error_and_not_a_nan(call: Any, message: str) -> None:
    """Trap 5."""
    with pytest.raises(ValueError, match=message):
        call(weights())
