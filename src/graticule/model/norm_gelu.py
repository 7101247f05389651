"""Norms over the field, each followed by a GELU whose results are limited.

With x^ = (x - mean) rstd over a set of values, d the gradient of w x^ + b and N the values of the
set, all of them, whoever holds them,

    dL/dx = rstd (w d - sum(w d) / N - x^ sum(w d x^) / N)

A set is a feature's values in all samples (batch norm), a feature's in one sample (instance norm),
or those of a group of features in one sample (group norm). Of activations the gradient needs the
input alone, in its own type; what the GELU took is made again.

Batch norm's running statistics take in a set once, in the backward pass: a forward pass may run
again (a unit that is recomputed, a lead of a lead-wise plan), or without a gradient, as often as
it likes, and a pass that is never differentiated is no training. Of a rollout the last lead comes
first, so the first lead's weigh most.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graticule.model.layers import Norm, few, kind_of
from graticule.model.norms import merge

_BLOCK = {"cpu": 2**18, "cuda": 2**24}
"""Values that are taken through several passes before the next ones: they stay in the cache of a
CPU; on a GPU a step's temporaries stay small."""
_aten = torch.ops.aten


class NormGelu(nn.Module):
    """(batch, feature, lat, lon) -> the same. most: what results are limited to; 0: nothing.

    What follows makes the three norms: which values are a set, and who else holds some of it.
    """

    num_features: int
    most: float
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return _NormGelu.apply(x, *self.affine(x), self)

    def affine(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """w and b, if there are any."""
        return None, None

    def merged(self, moments: Tensor) -> Tensor:
        """(3, batch, feature) counts, means and squared deviations of what is here -> (3, set)."""
        raise AssertionError("every norm has its sets")

    def summed(self, values: Tensor) -> Tensor:
        """(n, batch, feature) -> (n, set)."""
        raise AssertionError("every norm has its sets")

    def spread(self, values: Tensor, batch: int) -> Tensor:
        """(n, set) -> (n, batch, feature)."""
        raise AssertionError("every norm has its sets")

    def given(self) -> Tensor | None:
        """(2, set) mean and variance that do not come from x, if so."""
        return None

    def learn(self, moments: Tensor) -> None:
        """Take in (3, set) of the whole field, once."""

    def gather(self, moments: Tensor) -> Tensor:
        """(part, ...) of all that hold a part of the sets, from what is here."""
        return moments.unsqueeze(0)

    def sum(self, values: Tensor) -> Tensor:
        """Over all that hold a part of the sets. In place."""
        return values


class InstanceNormGelu(NormGelu):
    """A set is a feature of a sample. No weights."""

    def __init__(self, num_features: int, most: float, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features, self.most, self.eps = num_features, most, eps

    def merged(self, moments: Tensor) -> Tensor:
        return merge(self.gather(moments.flatten(1)))

    def summed(self, values: Tensor) -> Tensor:
        return values.flatten(1)

    def spread(self, values: Tensor, batch: int) -> Tensor:
        return values.unflatten(1, (batch, self.num_features))


class GroupNormGelu(NormGelu, Norm):
    """A set is a group of features of a sample."""

    def __init__(self, groups: int, num_features: int, most: float) -> None:
        super().__init__(num_features)
        if num_features % groups:
            raise ValueError(
                f"{num_features} features do not make {groups} groups: model.norm_groups must"
                " divide model.factor times each of model.widths and the model's input channels"
            )
        self.num_features, self.most, self.groups = num_features, most, groups

    def affine(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.weights(torch.promote_types(x.dtype, torch.float32))

    def merged(self, moments: Tensor) -> Tensor:
        features = moments.unflatten(2, (self.groups, -1)).movedim(3, 0)
        return merge(self.gather(merge(features).flatten(1)))

    def summed(self, values: Tensor) -> Tensor:
        return values.unflatten(2, (self.groups, -1)).sum(3).flatten(1)

    def spread(self, values: Tensor, batch: int) -> Tensor:
        groups = values.unflatten(1, (batch, self.groups))
        return groups.repeat_interleave(self.num_features // self.groups, dim=2)


class BatchNormGelu(NormGelu, Norm):
    """A set is a feature, in all samples of a micro-batch, those of other ranks too.

    In evaluation the running statistics stand in its place, which training takes sets in to with
    `momentum`, in the backward pass. Numbers that are not finite are not taken in.
    """

    running_mean: Tensor
    running_var: Tensor
    momentum = 0.1

    def __init__(self, num_features: int, most: float) -> None:
        super().__init__(num_features)
        self.num_features, self.most = num_features, most
        # With values, also where a model is built on `meta`.
        self.register_buffer("running_mean", torch.zeros(num_features, device="cpu"))
        self.register_buffer("running_var", torch.ones(num_features, device="cpu"))

    def affine(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.weights(torch.promote_types(x.dtype, torch.float32))

    def merged(self, moments: Tensor) -> Tensor:
        return merge(self.gather(merge(moments.transpose(0, 1))))

    def summed(self, values: Tensor) -> Tensor:
        return values.sum(1)

    def spread(self, values: Tensor, batch: int) -> Tensor:
        return values.unsqueeze(1).expand(-1, batch, -1)

    def given(self) -> Tensor | None:
        if self.training:
            return None
        return torch.stack([self.running_mean, self.running_var]).double()

    def learn(self, moments: Tensor) -> None:
        count, mean, squares = moments
        # As everywhere: the variance that is kept is the unbiased one.
        variance = squares / (count - 1).clamp(min=1)
        for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
            new = new.to(kept)
            kept.lerp_(torch.where(new.isfinite(), new, kept), self.momentum)


class _NormGelu(torch.autograd.Function):
    """Rows are the (batch x feature) fields of points."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: NormGelu
    ) -> Tensor:
        x = x.contiguous()
        batch = x.shape[0]
        out = torch.empty_like(x)
        moments = None
        if (found := norm.given()) is None:
            moments = norm.merged(_moments(x))
            found = torch.stack([moments[1], moments[2] / moments[0].clamp(min=1)])
        mean, variance = norm.spread(found, batch).unbind(0)
        rstd = (variance + norm.eps).rsqrt()
        scale = rstd if weight is None else rstd * weight.double()
        shift = -mean * scale if bias is None else bias.double() - mean * scale
        lines = torch.stack([scale, shift, mean, rstd]).flatten(1)
        ctx.norm, ctx.affine = norm, weight is not None
        ctx.save_for_backward(x, weight, lines, moments)
        for here, target, a, b in _blocks([x, out], _wide(lines[:2], x)):
            target.copy_(_gelu(torch.addcmul(b, here.to(a.dtype), a), norm.most))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lines, moments = ctx.saved_tensors
        norm, (batch, features) = ctx.norm, x.shape[:2]
        wide = _wide(lines, x)
        # Per row the sums of d x^ and of d. The gradient of x replaces d.
        sums = lines.new_zeros(2, batch * features)
        d = torch.empty_like(x)
        rows = sums.unsqueeze(2)
        for here, upper, lower, a, b, middle, inverse, with_x, alone in _blocks(
            [x, grad.contiguous(), d], [*wide, *rows]
        ):
            taken = torch.addcmul(b, here.to(a.dtype), a)
            inner = upper.to(a.dtype)
            if norm.most:
                inner = inner.masked_fill(_aten.gelu(taken) > norm.most, 0.0)
            inner = _aten.gelu_backward(inner, taken)
            alone.copy_(inner.sum(1, keepdim=True))
            deviation = (here.to(a.dtype) - middle).mul_(inverse)
            with_x.copy_(deviation.mul_(inner).sum(1, keepdim=True))
            lower.copy_(inner)
        sums = sums.view(2, batch, features)
        grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if weight is not None:
            grads = sums[0].sum(0).to(weight), sums[1].sum(0).to(weight)
        scale, _, mean, rstd = lines
        slope, number = torch.zeros_like(scale), torch.zeros_like(scale)
        if moments is not None:
            norm.learn(moments)
            weighted = sums if weight is None else sums * weight.double()
            means = norm.sum(norm.summed(weighted)) / moments[0].clamp(min=1)
            by_x, by_one = norm.spread(means, batch).flatten(1)
            # dL/dx as so much of d, so much of x and a number.
            slope = -(rstd**2) * by_x
            number = -rstd * by_one - slope * mean
        terms = _wide(torch.stack([scale, slope, number]), x)
        for here, lower, of_d, of_x, rest in _blocks([x, d], terms):
            moved = torch.addcmul(rest, lower.to(rest.dtype), of_d)
            lower.copy_(moved.addcmul_(here.to(rest.dtype), of_x))
        return d, *grads, None


def _gelu(x: Tensor, most: float) -> Tensor:
    out = _aten.gelu(x)
    return out.clamp_(max=most) if most else out


def _wide(lines: Tensor, x: Tensor) -> list[Tensor]:
    """(n, row) -> n columns (row, 1), of the type in which `x` is computed."""
    return list(lines.to(torch.promote_types(x.dtype, torch.float32)).unsqueeze(2))


def _blocks(fields: list[Tensor], columns: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Some rows at a time of all: of fields, taken as (row, point), and of columns (row, 1)."""
    rows = fields[0].shape[0] * fields[0].shape[1]
    flat = [field.view(rows, field.numel() // rows) for field in fields]
    points = flat[0].shape[1]
    if not points:
        return iter(())
    step = max(_BLOCK.get(kind_of(fields[0]), 2**24) // points, 1)
    return few(zip(*(each.split(step) for each in (*flat, *columns)), strict=True))


def _moments(x: Tensor) -> Tensor:
    """(3, batch, feature) float64: count, mean and sum of squared deviations of what is here."""
    batch, features = x.shape[:2]
    out = torch.zeros(3, batch * features, 1, dtype=torch.float64, device=x.device)
    count, means, squares = out
    count.fill_(x.shape[2] * x.shape[3])
    kind = torch.promote_types(x.dtype, torch.float32)
    for here, mean, square in _blocks([x], [means, squares]):
        # Deviations from a mean, since the difference of two large sums would lose them.
        middle = here.mean(1, keepdim=True, dtype=kind)
        mean.copy_(middle)
        square.copy_((here - middle).square_().sum(1, keepdim=True))
    return out.view(3, batch, features)
