"""Norms whose statistics are taken over the field."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.model.layers import Norm

_aten = torch.ops.aten


class FieldGroupNorm(Norm):
    """Group norm over all tokens of (batch, feature, lat, lon), then SiLU.

    The statistics are each sample's own, over the features of a group and every token of the
    field: with the `globe` boundary no padding token exists here, with `paper` they count.
    Of activations the gradient needs the input alone, in its own dtype; with an `input_dtype`, all
    that the published program keeps, twice that in bytes of a wider type.
    """

    def __init__(self, groups: int, num_features: int) -> None:
        super().__init__(num_features)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if self.input_dtype is not None:
            return F.silu(self.published(x))
        return _NormAct.apply(*self.operands(x), self.groups, self.eps)

    def published(self, x: Tensor) -> Tensor:
        """The norm alone, keeping a copy of x in `input_dtype`."""
        x, weight, bias = self.operands(x)
        return F.group_norm(x, self.groups, weight, bias, self.eps)

    def gather(self, moments: Tensor) -> Tensor:
        """(part, ...) of all that hold a part of the field, from what is here."""
        return moments.unsqueeze(0)

    def sum(self, values: Tensor) -> Tensor:
        """Over all that hold a part of the field. In place."""
        return values


def merge(parts: Tensor) -> Tensor:
    """(part, 3, ...) counts, means and sums of squared deviations -> (3, ...) of all parts
    together (Chan et al. 1979). Parts may be empty."""
    count, mean, squares = parts.unbind(1)
    total = count.sum(0)
    middle = (count * mean).sum(0) / total.clamp(min=1)
    return torch.stack([total, middle, (squares + count * (mean - middle) ** 2).sum(0)])


class _NormAct(torch.autograd.Function):
    """silu(group_norm(x)) by PyTorch's kernels and to the bit as they give it, but what SiLU took
    is made again in the backward pass: a fifth more time on a CPU, half of what is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> Tensor:
        x = x.contiguous()
        normed, *statistics = _normed(x, weight, bias, groups, eps)
        ctx.groups, ctx.eps = groups, eps
        ctx.save_for_backward(x, weight, bias, *statistics)
        return _aten.silu_(normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        d = _normed(x, weight, bias, ctx.groups, ctx.eps)[0]
        _aten.silu_backward.grad_input(grad.contiguous(), d, grad_input=d)
        batch, features, *points = x.shape
        grads = _aten.native_group_norm_backward(
            d, x, mean, rstd, weight, batch, features, points[0] * points[1], ctx.groups,
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        return *grads, None, None


def _normed(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x, mean and 1 / standard deviation of each sample and group."""
    batch, features, rows, columns = x.shape
    return _aten.native_group_norm(x, weight, bias, batch, features, rows * columns, groups, eps)
