"""Group norm over a field that several ranks hold, a stripe each.

Forward: each rank's (count, mean, sum of squared deviations) per sample and group is gathered
once and merged by all ranks in the same order. Backward: two numbers per sample and group are
summed over the ranks. With x^ = (x - mean) rstd, d the gradient of the norm's output, w the scale
and N the number of values in a group of the whole field,

    dL/dx = rstd (w d - sum(w d) / N - x^ sum(w d x^) / N)
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.model.layers import few, kind_of
from graticule.model.norms import FieldGroupNorm, merge
from graticule.parallel.exchange import Link

_BLOCK = {"cpu": 2**18, "cuda": 2**24}
"""Values that are taken through several passes before the next ones: they stay in the cache of a
CPU; on a GPU a step's temporaries stay small."""
_aten = torch.ops.aten


class StripedGroupNorm(FieldGroupNorm):
    """The same numbers from stripes."""

    link: Link

    def forward(self, x: Tensor) -> Tensor:
        if self.input_dtype is not None:
            return super().forward(x)
        return _NormAct.apply(*self.operands(x), self)

    def published(self, x: Tensor) -> Tensor:
        """The norm alone, keeping x^ in `input_dtype`."""
        assert self.input_dtype is not None
        weight, bias = (each[:, None, None] for each in self.weights(self.input_dtype))
        return _Whitened.apply(x, self.input_dtype, self) * weight + bias

    def gather(self, moments: Tensor) -> Tensor:
        return self.link.gather(moments, "norm")

    def sum(self, values: Tensor) -> Tensor:
        return self.link.sum(values, "norm")


class _NormAct(torch.autograd.Function):
    """Group norm, then SiLU, of (batch, feature, lat, lon)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: StripedGroupNorm
    ) -> Tensor:
        x = x.contiguous()
        batch, features = x.shape[:2]
        out = torch.empty_like(x)
        count, mean, squares = merge(norm.gather(_moments(x, norm.groups, out)))
        kind = torch.promote_types(x.dtype, torch.float32)
        # Mean, variance, weight and bias of each sample and feature.
        statistics = _per_feature(torch.stack([mean, squares / count]).to(kind), features)
        affine = torch.stack([weight, bias]).to(kind).repeat(1, batch)
        lines = torch.cat([statistics, affine])
        ctx.norm, ctx.count = norm, count
        ctx.save_for_backward(x, lines)
        for here, target, *line in _blocks(batch * features, [x, out], *lines):
            _affine(target, here, norm.eps, *line)
            _aten.silu_(target)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, lines = ctx.saved_tensors
        norm, (batch, features) = ctx.norm, x.shape[:2]
        mean, variance, weight, _ = lines
        rstd = (variance + norm.eps).rsqrt()
        # Per sample and feature the sums of d x^ and of d. The gradient of x replaces d.
        sums = lines.new_zeros(2, batch * features)
        d = torch.empty_like(x)
        fields = x, grad.contiguous(), d
        for here, upper, lower, with_x, alone, inverse, *line in _blocks(
            batch * features, fields, *sums, rstd, *lines
        ):
            _affine(lower, here, norm.eps, *line)
            _aten.silu_backward.grad_input(upper, lower, grad_input=lower)
            _sums(lower, here, line[0], inverse, with_x, alone)
        grads = sums.view(2, batch, features).sum(1).to(x.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grads[0], grads[1], None
        totals = (sums * weight).view(2, batch, norm.groups, -1).sum(3).double()
        means = (norm.sum(totals) / ctx.count).to(lines.dtype)
        by_x, by_one = _per_feature(means, features)
        # dL/dx as so much of d, so much of x and a number.
        slope = -(rstd**2) * by_x
        offset = -rstd * by_one - slope * mean
        terms = ((rstd * weight).unsqueeze(1), slope.unsqueeze(1), offset.unsqueeze(1))
        for here, lower, of_d, of_x, number in _blocks(batch * features, [x, d], *terms):
            wide = lower.to(lines.dtype)  # itself, but for 16 bits
            wide.mul_(of_d).addcmul_(here.to(lines.dtype), of_x).add_(number)
            if wide is not lower:
                lower.copy_(wide)
        return d, grads[0], grads[1], None


class _Whitened(torch.autograd.Function):
    """x^ of (batch, feature, lat, lon), written as the published program has it: temporaries too
    are those of whole fields."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, norm: StripedGroupNorm) -> Tensor:
        x = x.contiguous()
        count, mean, squares = merge(norm.gather(_moments(x, norm.groups, torch.empty_like(x))))
        rstd = (squares / count + norm.eps).rsqrt()
        mean, rstd = (each.to(dtype)[:, :, None, None, None] for each in (mean, rstd))
        whitened = (x.unflatten(1, (norm.groups, -1)) - mean) * rstd
        ctx.norm, ctx.count, ctx.dtype = norm, count, x.dtype
        ctx.save_for_backward(whitened, rstd)
        return whitened.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whitened, rstd = ctx.saved_tensors
        d = grad.unflatten(1, (ctx.norm.groups, -1))
        sums = [each.sum((2, 3, 4), dtype=torch.float64) for each in (d * whitened, d)]
        means = ctx.norm.sum(torch.stack(sums)) / ctx.count
        by_x, by_one = means.to(grad.dtype)[..., None, None, None]
        d = (d - by_one - whitened * by_x) * rstd
        return d.flatten(1, 2).to(ctx.dtype), None, None


def _blocks(num_rows: int, fields: Sequence[Tensor], *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of some rows at a time of all: of fields (batch, feature, lat, lon), taken as
    (row, point), and of what there is one of per row."""
    flat = [field.view(num_rows, field.numel() // num_rows) for field in fields]
    points = flat[0].shape[1]
    step = _BLOCK.get(kind_of(fields[0]), 2**24) // max(points, 1)
    if not points:
        return iter(())
    if step >= num_rows:
        return iter([(*flat, *rows)])
    return few(zip(*(x.split(max(step, 1)) for x in (*flat, *rows)), strict=True))


def _per_feature(per_group: Tensor, features: int) -> Tensor:
    """(2, batch, group) -> (2, batch x feature)."""
    width = features // per_group.shape[2]
    return per_group.unsqueeze(3).expand(-1, -1, -1, width).reshape(2, -1)


def _moments(x: Tensor, groups: int, scratch: Tensor) -> Tensor:
    """(3, batch, group) float64: count, mean and sum of squared deviations of what is here.

    scratch: like x; it is written over.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    num_rows = x.shape[0] * groups
    out = torch.zeros(3, num_rows, dtype=torch.float64, device=x.device)
    count, means, squares = out
    count.fill_(x.numel() // num_rows)
    for here, target, mean, square in _blocks(num_rows, [x, scratch], means, squares):
        # Deviations from a mean, since the difference of two large sums would lose them. Plain
        # passes over a block take a tenth of the time of torch.var_mean on a CPU.
        middle = here.mean(1, keepdim=True, dtype=kind)
        deviation = torch.sub(here, middle, out=target if target.dtype == kind else None)
        mean.copy_(middle[:, 0])
        square.copy_(deviation.square_().sum(1))
    return out.view(3, x.shape[0], groups)


def _affine(
    out: Tensor, x: Tensor, eps: float, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor
) -> None:
    """(row, point): (x - mean) / sqrt(variance + eps) * weight + bias of each row, in one pass."""
    none = mean.new_empty(0), mean.new_empty(0)
    torch.native_batch_norm(
        x.unsqueeze(0), weight, bias, mean, variance, False, 0.0, eps, out=(out.unsqueeze(0), *none)
    )


def _sums(d: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, with_x: Tensor, alone: Tensor) -> None:
    """Per row the sums of d (x - mean) rstd and of d, in one pass over both."""
    # It is what a group norm's weight and bias get where each row is a group of its own.
    rows, points = x.shape
    wanted = [False, True, True]
    _, first, second = _aten.native_group_norm_backward(
        d, x, mean.view(1, rows), rstd.view(1, rows), rstd, 1, rows, points, rows, wanted
    )
    with_x.copy_(first)
    alone.copy_(second)
