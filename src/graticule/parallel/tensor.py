"""Tensor parallelism: the ranks of the `tensor` axis share the weights of attention and MLP.

Each holds some of the heads and some of the MLP's hidden features; q, k, v and fc1 are cut by
what they give, proj and fc2 by what they take (Megatron-LM). Between the modules a rank has its
share of each window's tokens; inside it sees those of the whole tensor group:

    (windows, q, F) -> gather -> (windows, t * q, F) -> q, k, v, attend, proj: a part of the sum
                    -> sum and scatter -> (windows, q, F) -> + bias, once

The parameters are DTensors of their logical shape; the computation takes their local part. A
rank without windows takes part in everything and has zero gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.mesh import Mesh
from graticule.model.bayes import Posterior
from graticule.model.layers import Layer, Linear, Mlp, dense
from graticule.model.swin import RelativePositionBias, WindowAttention
from graticule.model.windows import WindowMask
from graticule.parallel.box import box_of
from graticule.parallel.data import local
from graticule.parallel.exchange import Link
from graticule.parallel.space import specialise


def split_tensors(model: nn.Module, mesh: Mesh) -> Link:
    """Cut the weights of every `WindowAttention` and `Mlp` in `model` over the tensor axis.

    Returns the link over which they gather and scatter; of one rank, nothing is cut.
    ValueError where heads or hidden features cannot be cut evenly.
    """
    link = Link(mesh.group("tensor"))
    if link.size == 1:
        return link
    axis = mesh.device_meshes[1]["tensor"]
    for path, module in list(model.named_modules()):
        if isinstance(module, WindowAttention):
            _require_even(path, "heads", module.heads, link.size)
            columns, row = [module.q, module.k, module.v], module.proj
            if module.bias is not None:
                split_parameter(module.bias, "bias_table", 1, axis)
                specialise(module.bias, SplitBias)
            specialise(module, SplitAttention, heads=module.heads // link.size, link=link)
        elif isinstance(module, Mlp):
            _require_even(path, "hidden features", module.fc1.weight.shape[0], link.size)
            columns, row = [module.fc1], module.fc2
            specialise(module, SplitMlp, link=link)
        else:
            continue
        for column in columns:
            split_parameter(column, "weight", 0, axis)
            split_parameter(column, "bias", 0, axis)
            specialise(column, ColumnLinear)
        split_parameter(row, "weight", 1, axis)
        specialise(row, RowLinear, link=link)
    return link


class Held(Layer):
    """Has our part of each parameter."""

    def held(self, leaf: str) -> Tensor:
        return local(getattr(self, leaf))


class ColumnLinear(Held, Linear):
    """(..., in) -> (..., our share of out)."""


class RowLinear(ColumnLinear):
    """(windows, t * q, our share of in) -> (windows, q, out), summed over the tensor group.

    The bias is whole and comes after the sum, on our tokens alone: its gradient is a part.
    """

    link: Link

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = self.operands(x)
        return _ScatterSum.apply(dense(F.linear, x, weight), self.link) + bias


class SplitMlp(Mlp):
    """(windows, q, F) -> (windows, q, F), with our share of the hidden features."""

    link: Link

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Gather.apply(x, self.link))

    def fused(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        part = super().fused(x, weight, None)
        return _ScatterSum.apply(part, self.link) + bias


class SplitAttention(WindowAttention):
    """(windows, q, F) -> (windows, q, F), with our share of the heads, `heads` in number."""

    link: Link

    def forward(self, x: Tensor, mask: WindowMask) -> Tensor:
        return super().forward(_Gather.apply(x, self.link), mask)


class SplitBias(Held, RelativePositionBias):
    """(our heads, token, token)."""


class _Gather(torch.autograd.Function):
    """(windows, q, F) -> (windows, t * q, F), the group's tokens in order of rank. Its adjoint is
    `_ScatterSum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return _gathered(x, link)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.link), None


class _ScatterSum(torch.autograd.Function):
    """(windows, t * q, F) -> (windows, q, F): our tokens of the sum over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return _scattered(x, link)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.link), None


def _gathered(x: Tensor, link: Link) -> Tensor:
    return link.gather(x, "tensor").transpose(0, 1).flatten(1, 2)


def _scattered(x: Tensor, link: Link) -> Tensor:
    return link.scatter_sum(x.unflatten(1, (link.size, -1)).transpose(0, 1), "tensor")


def split_parameter(layer: nn.Module, name: str, dim: int, axis: Any) -> None:
    """Keep our part, along `dim`, of a layer's parameter, and of what it is drawn by."""
    from torch.distributed.tensor import DTensor, Shard

    sample = getattr(layer, "sample", None)
    posterior = sample if isinstance(sample, Posterior) else None
    for leaf in (name, f"{name}_rho") if posterior else (name,):
        whole = getattr(layer, leaf)
        part = whole.detach().chunk(axis.size(), dim)[axis.get_local_rank()]
        # A copy: a view would keep the whole.
        part = part.clone(memory_format=torch.contiguous_format)
        tensor = DTensor.from_local(part, axis, [Shard(dim)], run_check=False)
        setattr(layer, leaf, nn.Parameter(tensor, requires_grad=whole.requires_grad))
        if posterior:
            box = box_of(tensor)
            assert box is not None, name
            posterior.boxes[name] = box.slices


def _require_even(path: str, what: str, number: int, ranks: int) -> None:
    if number % ranks:
        fitting = [str(size) for size in range(1, number + 1) if number % size == 0 and size <= 16]
        change = "model.heads" if what == "heads" else "model.width or model.mlp_ratio"
        above = -(-number // ranks) * ranks
        raise ValueError(
            f"{path}: {number} {what} cannot be cut into mesh.tensor={ranks} equal parts. Use"
            f" mesh.tensor={', '.join(fitting[:-1])} or {fitting[-1]}, or {change} for a multiple"
            f" of {ranks} such as {above}"
        )
