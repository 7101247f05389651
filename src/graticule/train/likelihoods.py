"""How the members of an ensemble are scored together: weighted sums by channel, as in `loss.py`.

With members x_1..x_m of one target y, all deviations are taken from the target: d_i = x_i - y. It
is the same on all ranks, and sums of d and d^2 keep the digits of a spread that is small beside
the field (raw squares of 54,000 +- 30 in float32 do not).

    S = sum_i d_i,  Q = sum_i d_i^2,  e = S / m,  v = (Q - S e) / (m - 1) + floor^2

    moments    1/2 (log v + e^2 / v)
               d/dx_i = e / (m v) + (d_i - e) / (m - 1) x (1/v - e^2 / v^2)
    gaussian   1/m sum_i 1/2 (log floor^2 + d_i^2 / floor^2)
    crps       1/m sum_i |d_i| - c sum_ij |x_i - x_j|,  c = (m - 1 + alpha) / (2 m^2 (m - 1))
               = sum_i (|d_i| / m - 2 c r_i d_i),  r_i = (members below x_i) - (members above it)
               d/dx_i = sign(d_i) / m - 2 c r_i

Members come one at a time, wherever they are computed. A `Score` hears their deviations, then
settles, which is where the ranks that share members meet, and after that it knows each member's
gradient: of `moments` from S and Q, one sum of two fields over the ranks; of `crps` from the ranks
r_i, for which each rank orders all members at a share of the points. (r_i sum up to 0, so
deviations do in the place of members; members that are equal have one r and do not push each
other.) The gradient is of the whole score, so gradients of weights are summed over the ranks that
share members, and 1/m is in them already.

Where a channel has no value nothing counts: all d are 0 there, and so are variance, score and
gradient, whatever target and members hold.
"""

import math
from abc import abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.parallel.exchange import Link
from graticule.train.loss import LossWeights, error_of

Likelihood = Literal["moments", "gaussian", "crps"]
PART = 2**20
"""Points that are ordered at a time."""


class Score:
    """Of one lead of a micro-batch: what its members' deviations come to.

    num_members: of all ranks, of which `own` are heard here, numbered from 0 in `of`. link: the
    ranks that share the members, each with as many, in order.
    """

    together = True
    """Whether a member's gradient depends on the others: then all are heard, and the score is
    settled, before any of them is differentiated."""

    def __init__(self, weights: LossWeights, *, num_members: int, own: int, link: Link) -> None:
        self.weights, self.num_members, self.own, self.link = weights, num_members, own, link
        self._heard: set[int] = set()
        self.settled = False

    def of(self, predicted: Tensor, target: Tensor, number: int) -> Tensor:
        """(channel,) float64: of one member, whose gradient it has and whose value is 0: `settle`
        tells what all are worth.

        predicted, target: (batch, output offset, channel, lat, lon), normalised. number: of the
        member among our own; it may come again, with the same numbers.
        """
        return _Score.apply(predicted, target, self, number)

    def heard(self, d: Tensor, number: int) -> None:
        """d: (batch, output offset, channel, lat, lon) deviations of a member, 0 on land."""
        if number not in self._heard:
            assert not self.settled, f"member {number} came after the score was settled"
            self._heard.add(number)
            self._hear(d, number)

    def settle(self) -> Tensor:
        """(channel,) float64: our share of the weighted score; those of the ranks that share the
        members add up. All of them call it together, once, when each has heard its own."""
        assert not self.settled, "a score is settled once"
        assert len(self._heard) == self.own, (self._heard, self.own)
        self.settled = True
        return self._settle()

    @abstractmethod
    def _hear(self, d: Tensor, number: int) -> None: ...

    @abstractmethod
    def _settle(self) -> Tensor: ...

    def kept(self, d: Tensor) -> Tensor:
        """What the gradient needs of a member's deviations."""
        return d

    @abstractmethod
    def slope(self, kept: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        """The score's derivative by each of a member's values, of `dtype`: a new tensor."""

    def _weighed(self, score: Tensor) -> Tensor:
        """(channel,) float64 sums of a score of each value, by what the value counts. In place."""
        cell, wet = self.weights.cell, self.weights.wet
        score.mul_(cell) if cell.dtype is not torch.bool else score.masked_fill_(~wet, 0.0)
        return score.sum((0, 1, -2, -1), dtype=torch.float64)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, predicted: Tensor, target: Tensor, score: Score, number: int) -> Tensor:
        d = error_of(predicted, target, score.weights.wet)
        score.heard(d, number)
        ctx.score, ctx.number, ctx.dtypes = score, number, (predicted.dtype, d.dtype)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(score.kept(d))
        return torch.zeros(d.shape[2], dtype=torch.float64, device=d.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        score, (narrow, wide) = ctx.score, ctx.dtypes
        assert score.settled or not score.together, "all members come before a gradient"
        cell, wet = score.weights.cell, score.weights.wet
        weight = grad.to(wide)[:, None, None] * (wet if cell.dtype is torch.bool else cell)
        slope = score.slope(kept, ctx.number, wide)
        return slope.mul_(weight).to(narrow), None, None, None


def score_of(
    likelihood: Likelihood,
    weights: LossWeights,
    *,
    num_members: int,
    floor: float,
    alpha: float,
    own: int | None = None,
    link: Link | None = None,
) -> Score:
    """own, link: of several ranks; none: all members are here.

    ValueError where so few members have no such score.
    """
    shares: Any = {
        "num_members": num_members,
        "own": num_members if own is None else own,
        "link": link or Link(),
    }
    if likelihood == "moments":
        return Moments(weights, floor=floor, **shares)
    if likelihood == "gaussian":
        return Gaussian(weights, floor=floor, **shares)
    return Crps(weights, alpha=alpha, **shares)


class Moments(Score):
    """Of a Gaussian with the members' mean and variance."""

    def __init__(self, weights: LossWeights, *, floor: float, **shares: Any) -> None:
        super().__init__(weights, **shares)
        if self.num_members < 2:
            raise ValueError(
                f"{self.num_members} member has no variance: take bayes.members=2 or more, or"
                " bayes.likelihood=gaussian"
            )
        self.floor = floor
        self.sums: Tensor | None = None
        """(2, batch, output offset, channel, lat, lon): S and Q of who was heard, settled of all.
        float32, of float64 in float64."""

    def _hear(self, d: Tensor, number: int) -> None:
        if self.sums is None:
            self.sums = d.new_zeros(2, *d.shape)
        self.sums[0] += d
        self.sums[1].addcmul_(d, d)

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """(e, v without the floor), the variance with m - 1 below."""
        assert self.sums is not None
        error = self.sums[0] / self.num_members
        away = self.sums[1] - self.sums[0] * error
        return error, away.div_(self.num_members - 1).clamp_(min=0)

    def _settle(self) -> Tensor:
        assert self.sums is not None
        self.link.sum(self.sums, "members")
        error, v = self.mean_and_variance()
        v.add_(self.floor**2)
        score = error.square_().div_(v).add_(v.log_()).mul_(0.5)
        return self._weighed(score) / self.link.size

    def slope(self, kept: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        error, v = self.mean_and_variance()
        v.add_(self.floor**2)
        of_mean = error / v
        of_spread = (1 / v).sub_(of_mean.square()).div_(self.num_members - 1)
        return (kept - error).mul_(of_spread).add_(of_mean, alpha=1 / self.num_members)


class Gaussian(Score):
    """The mean over members of that of a Gaussian around each, of deviation `floor`."""

    together = False

    def __init__(self, weights: LossWeights, *, floor: float, **shares: Any) -> None:
        super().__init__(weights, **shares)
        self.floor = floor
        self._total = torch.zeros(len(weights.wet), dtype=torch.float64, device=weights.wet.device)

    def _hear(self, d: Tensor, number: int) -> None:
        score = d.square().div_(2 * self.floor**2).add_(math.log(self.floor))
        self._total += self._weighed(score)

    def _settle(self) -> Tensor:
        return self._total / self.num_members

    def slope(self, kept: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        return kept / (self.floor**2 * self.num_members)


class Crps(Score):
    """The continuous ranked probability score. alpha: 1: fair; 0: of the members as they are."""

    def __init__(self, weights: LossWeights, *, alpha: float, **shares: Any) -> None:
        super().__init__(weights, **shares)
        m = self.num_members
        if m < 2 and alpha > 0:
            raise ValueError(
                f"the CRPS with alpha={alpha:g} corrects for the number of members, which takes"
                f" two: there is {m}; take bayes.members=2 or more, or bayes.alpha=0"
            )
        self._spread = (m - 1 + alpha) / (m**2 * (m - 1)) if m > 1 else 0.0
        self._members: list[Tensor | None] = [None] * self.own
        self._ranks = torch.empty(0)

    def _hear(self, d: Tensor, number: int) -> None:
        self._members[number] = d

    def _settle(self) -> Tensor:
        ours = torch.stack([d for d in self._members if d is not None])
        self._members.clear()
        self._ranks = _ranks(ours.flatten(1), self.link).view(ours.shape)
        total = torch.zeros(ours.shape[3], dtype=torch.float64, device=ours.device)
        for d, ranks in zip(ours, self._ranks, strict=True):
            total += self._weighed((ranks * d).mul_(-self._spread).add_(d.abs() / self.num_members))
        return total

    def kept(self, d: Tensor) -> Tensor:
        return torch.sign(d).to(torch.int8)

    def slope(self, kept: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        out = kept.to(dtype).div_(self.num_members)
        return out.sub_(self._ranks[number], alpha=self._spread)


def _ranks(ours: Tensor, link: Link) -> Tensor:
    """Of each of our members' values how many members are below less how many are above it.

    ours: (our member, point). Each rank orders all members at a share of the points. One byte a
    value, of 128 members or more two.
    """
    own, points = ours.shape
    share = -(-points // link.size)
    if link.size > 1:
        ours = torch.nn.functional.pad(ours, (0, share * link.size - points))
    # (rank whose points they are, our member, point) -> (rank whose members they are, ...).
    everyone = _traded(ours.view(own, link.size, share).transpose(0, 1), link).flatten(0, 1)
    ranks = torch.empty_like(everyone, dtype=torch.int8 if len(everyone) < 128 else torch.int16)
    for first in range(0, share, PART):
        some = everyone[:, first : first + PART].t().contiguous()
        ordered = some.sort(-1).values
        below = torch.searchsorted(ordered, some)
        below += torch.searchsorted(ordered, some, right=True)
        ranks[:, first : first + PART] = below.sub_(len(everyone)).t()
    back = _traded(ranks.view(link.size, own, share), link)
    return back.transpose(0, 1).reshape(own, -1)[:, :points]


def _traded(x: Tensor, link: Link) -> Tensor:
    """(rank, ...): what each rank is given -> what each rank gave us."""
    if link.size == 1:
        return x
    sizes = [int(rank != link.rank) for rank in range(link.size)]
    others = torch.cat([x[: link.rank], x[link.rank + 1 :]])
    received = link.exchange(others, sizes, sizes, "members")
    return torch.cat([received[: link.rank], x[link.rank][None], received[link.rank :]])
