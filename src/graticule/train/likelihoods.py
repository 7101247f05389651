"""How the members of an ensemble are scored together: weighted sums by channel, as in `loss.py`.

With members x_1..x_m of one target y, all deviations are taken from the target: d_i = x_i - y. It
is the same on all ranks, and sums of d and d^2 keep the digits of a spread that is small beside
the field (raw squares of 54,000 +- 30 in float32 do not).

    S = sum_i d_i,  Q = sum_i d_i^2,  e = S / m,  v = (Q - S e) / (m - 1) + floor^2

    moments    1/2 (log v + e^2 / v)
               d/dx_i = e / (m v) + (d_i - e) / (m - 1) x (1/v - e^2 / v^2)
    gaussian   1/m sum_i 1/2 (log floor^2 + d_i^2 / floor^2)
    crps       1/m sum_i |d_i| - c sum_ij |x_i - x_j|,  c = (m - 1 + alpha) / (2 m^2 (m - 1))

`moments` needs all members, wherever they are, and that by one sum of two fields: S and Q
(`moment_sums`) add up over members and ranks. Each rank then holds the gradient of the whole for
its own members, so gradients of weights are summed over the ranks that share members, and 1/m is
in them already. `gaussian` adds up by itself. `crps` needs all members of a point, and points add
up: ranks that share members share points for it. alpha 1 is the fair score, 0 that of the members
as they are.

Where a channel has no value nothing counts: all d are 0 there, and so are variance, score and
gradient, whatever target and members hold.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.train.loss import LossWeights, error_of

Reduce = Callable[[Tensor], Tensor]
"""A tensor -> its sum over all ranks that share the members."""


def alone(sums: Tensor) -> Tensor:
    """`Reduce` of one rank that has them all."""
    return sums


def moment_sums(members: Tensor, target: Tensor, wet: Tensor) -> Tensor:
    """(2, batch, output offset, channel, lat, lon): S and Q of the members that are given.

    members: (member, batch, output offset, channel, lat, lon), normalised, some or all. float32,
    of float64 in float64. Not differentiable: `moments` is.
    """
    with torch.no_grad():
        sums: Tensor | None = None
        for member in members:
            d = error_of(member, target, wet)
            if sums is None:
                sums = d.new_zeros(2, *d.shape)
            sums[0] += d
            sums[1] += d.square_()
    assert sums is not None, "no members"
    return sums


def mean_and_variance(sums: Tensor, num_members: int) -> tuple[Tensor, Tensor]:
    """(e, v without the floor): the mean's error, and the variance with m - 1 below."""
    if num_members < 2:
        raise ValueError(
            f"{num_members} member has no variance: take bayes.members=2 or more, or"
            " bayes.likelihood=gaussian"
        )
    error = sums[0] / num_members
    return error, ((sums[1] - sums[0] * error) / (num_members - 1)).clamp_(min=0)


def moments(
    members: Tensor,
    target: Tensor,
    weights: LossWeights,
    *,
    num_members: int,
    floor: float,
    sums: Tensor | None = None,
    reduce: Reduce = alone,
) -> Tensor:
    """(channel,) float64 of all `num_members`, with the gradient of those that are given.

    members: those here, as of `moment_sums`. sums: of all members, where they were made before
    (then members can come one at a time); None: made and reduced now.
    """
    if sums is None:
        sums = reduce(moment_sums(members, target, weights.wet))
    return _Moments.apply(members, target, weights.cell, weights.wet, sums, num_members, floor)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, members: Tensor, target: Tensor, cell: Tensor, wet: Tensor, sums: Tensor,
        num_members: int, floor: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(members, target, cell, wet, sums)
        ctx.num_members, ctx.floor = num_members, floor
        error, v = mean_and_variance(sums, num_members)
        v.add_(floor**2)
        score = error.square_().div_(v).add_(v.log_()).mul_(0.5)
        return _weighed(score, cell, wet)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        members, target, cell, wet, sums = ctx.saved_tensors
        m = ctx.num_members
        error, v = mean_and_variance(sums, m)
        v.add_(ctx.floor**2)
        weight = _weight_of(grad, cell, wet, error.dtype)
        of_mean = error / v
        of_spread = (1 / v).sub_(of_mean.square()).mul_(weight).div_(m - 1)
        of_mean.mul_(weight).div_(m)
        out = torch.empty_like(members)
        for member, into in zip(members, out, strict=True):
            away = error_of(member, target, wet).sub_(error)
            into.copy_(away.mul_(of_spread).add_(of_mean))
        return out, None, None, None, None, None, None


def gaussian(
    members: Tensor, target: Tensor, weights: LossWeights, *, num_members: int, floor: float
) -> Tensor:
    """(channel,) float64, the share of the members that are given; those of all add up.

    members: as of `moments`, of `num_members` in all.
    """
    return _Gaussian.apply(members, target, weights.cell, weights.wet, num_members, floor)


class _Gaussian(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, members: Tensor, target: Tensor, cell: Tensor, wet: Tensor, num_members: int,
        floor: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(members, target, cell, wet)
        ctx.num_members, ctx.floor = num_members, floor
        total = torch.zeros(len(wet), dtype=torch.float64, device=members.device)
        for member in members:
            score = error_of(member, target, wet).square_().div_(2 * floor**2)
            total += _weighed(score.add_(math.log(floor)), cell, wet)
        return total / num_members

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        members, target, cell, wet = ctx.saved_tensors
        out = torch.empty_like(members)
        for member, into in zip(members, out, strict=True):
            d = error_of(member, target, wet).div_(ctx.floor**2 * ctx.num_members)
            into.copy_(d.mul_(_weight_of(grad, cell, wet, d.dtype)))
        return out, None, None, None, None, None


def crps(members: Tensor, target: Tensor, weights: LossWeights, *, alpha: float) -> Tensor:
    """(channel,) float64 of all members of these points; points add up.

    members: as of `moments`, all of them. alpha: 1: fair; 0: as they are; between: almost fair.
    """
    if len(members) < 2 and alpha > 0:
        raise ValueError(
            f"the CRPS with alpha={alpha:g} corrects for the number of members, which takes two:"
            f" there is {len(members)}; take bayes.members=2 or more, or bayes.alpha=0"
        )
    return _Crps.apply(members, target, weights.cell, weights.wet, alpha)


class _Crps(torch.autograd.Function):
    """With r_i = (members below x_i) - (members above it), sum_ij |x_i - x_j| = 2 sum_i r_i x_i
    and its gradient is 2 r_i: members that are equal have the same r, and do not push each other.

    Keeps the sum's gradient of each member, a byte each where all have room.
    """

    @staticmethod
    def forward(
        ctx: Any, members: Tensor, target: Tensor, cell: Tensor, wet: Tensor, alpha: float
    ) -> Tensor:
        m = len(members)
        d = torch.stack([error_of(member, target, wet) for member in members], -1)
        ranks = _ranks(d).to(torch.int8 if m < 128 else torch.int16)
        signs = torch.sign(d).to(torch.int8)
        spread = (m - 1 + alpha) / (m**2 * (m - 1)) if m > 1 else 0.0
        # The ranks add up to 0, so deviations do as well as the members themselves.
        score = d.abs().sum(-1).div_(m) - (ranks * d).sum(-1).mul_(spread)
        ctx.save_for_backward(ranks, signs, cell, wet)
        ctx.spread, ctx.dtypes = spread, (members.dtype, d.dtype)
        return _weighed(score, cell, wet)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks, signs, cell, wet = ctx.saved_tensors
        dtype, wide = ctx.dtypes
        weight = _weight_of(grad, cell, wet, wide)
        m = ranks.shape[-1]
        out = torch.empty(m, *ranks.shape[:-1], dtype=dtype, device=ranks.device)
        for i, into in enumerate(out):
            slope = signs[..., i].to(wide).div_(m).sub_(ranks[..., i], alpha=ctx.spread)
            into.copy_(slope.mul_(weight))
        return out, None, None, None, None


def _ranks(values: Tensor) -> Tensor:
    """(..., member) of each how many are below less how many are above, int64."""
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values)
    return below + torch.searchsorted(ordered, values, right=True) - values.shape[-1]


def _weighed(score: Tensor, cell: Tensor, wet: Tensor) -> Tensor:
    """(channel,) float64 sums of a score of each value, by what the value counts. In place."""
    score.mul_(cell) if cell.dtype is not torch.bool else score.masked_fill_(~wet, 0.0)
    return score.sum((0, 1, -2, -1), dtype=torch.float64)


def _weight_of(grad: Tensor, cell: Tensor, wet: Tensor, dtype: torch.dtype) -> Tensor:
    """(channel, lat, lon) what a value's gradient is multiplied by; 0 where not wet."""
    return grad.to(dtype)[:, None, None] * (wet if cell.dtype is torch.bool else cell)
