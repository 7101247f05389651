"""The domain-tensor layout: the ranks of the `tensor` axis share the features of every token.

BEAST, section III-A: on a mesh [c, s] a rank has 1/s of the points and 1/c of all else: of a
sample's channels (`Planes`), of the features of the residual stream, of all weights. What looks at
a feature alone stays where it is: skips, GELU, norms, whose groups are shared out whole, what
conditions them, attention with its heads, and routes, which move tokens with the features that are
here. A linear map of all features takes one of two forms, with n tokens here:

    column   x (n, in / c) -> gather (n, in) -> W (out / c, in) -> (n, out / c)
             back: what was gathered is gathered again, and the gradient of it is summed and
             scattered
    row      x (n, in / c) -> W (out, in / c) -> a part of the sum, (n, out) -> sum and scatter
             -> (n, out / c); back: one gather of the gradient, which both that of the input and
             that of the weight take

Whichever sends less is taken: `column` where in < out. Of the two alike it is `row`, which gathers
nothing twice. Of activations both keep what is here, x. So q, k and v are columns of one gather,
proj is a row, and convolutions over patches are linear maps of a patch's features: stride 2 a row,
transposed a column. The first and the last layer meet channels, which may not divide: their weights
are cut by the model's features, which do, embedding as a column, recovery as a row.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.mesh import Mesh, Planes
from graticule.model.beast import Beast, BeastBlock
from graticule.model.layers import Conv, Layer, Linear, Mlp, TransposedConv, dense
from graticule.model.nice import Heads, Nice, Offsets
from graticule.model.swin import WindowAttention
from graticule.model.windows import WindowMask
from graticule.parallel.exchange import Link
from graticule.parallel.space import StripedConv, StripedTransposedConv, specialise
from graticule.parallel.tensor import ColumnLinear, Held, split_parameter

Form = Literal["column", "row"]


def form_of(num_in: int, num_out: int) -> Form:
    """Of a linear map of so many features: the one that sends less."""
    return "column" if num_in < num_out else "row"


class Features:
    """Features that the ranks of `link` share, and their way to all of them and back.

    held: of each rank, which. Where they are uneven what travels is filled up to the longest.
    """

    def __init__(self, link: Link, held: Sequence[np.ndarray]) -> None:
        assert len(held) == link.size, (len(held), link.size)
        self.link, self.own, self.size = link, len(held[link.rank]), sum(map(len, held))
        self.slots = max(map(len, held))
        place = np.zeros(link.size * self.slots, dtype=np.int64)
        order = np.zeros(self.size, dtype=np.int64)
        for rank, numbers in enumerate(held):
            slots = rank * self.slots + np.arange(len(numbers))
            place[slots], order[numbers] = numbers, slots
        self._straight = np.array_equal(order, np.arange(len(place)))
        index = tuple(torch.from_numpy(each) for each in (place, order, held[link.rank]))
        self._indices = {index[0].device: index}

    @classmethod
    def even(cls, link: Link, size: int) -> "Features":
        """Of so many, as many each, in order."""
        return cls(link, np.split(np.arange(size), link.size))

    def gather(self, x: Tensor) -> Tensor:
        """(..., ours) -> (..., all). Not differentiable; its adjoint is `scatter_sum`."""
        x = F.pad(x, (0, self.slots - self.own)) if self.own < self.slots else x
        parts = self.link.gather(x.contiguous(), "tensor")  # (rank, ..., slot)
        every = parts.movedim(0, -2).flatten(-2)
        return every if self._straight else every.index_select(-1, self._on(x.device)[1])

    def scatter_sum(self, x: Tensor) -> Tensor:
        """(..., all) -> (..., ours) of the sum over the ranks. Not differentiable."""
        if not self._straight:
            # What stands where the parts are filled up is summed, and thrown away.
            x = x.index_select(-1, self._on(x.device)[0])
        parts = x.unflatten(-1, (self.link.size, self.slots)).movedim(-2, 0)
        ours = self.link.scatter_sum(parts, "tensor")
        return ours[..., : self.own] if self.own < self.slots else ours

    def ours(self, whole: Tensor) -> Tensor:
        """(..., all), which each rank has -> (..., ours). Differentiable."""
        return whole.index_select(-1, self._on(whole.device)[2])

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """(which feature a slot is for, which slot a feature is in, which features are ours)."""
        if device not in self._indices:
            known = next(iter(self._indices.values()))
            self._indices[device] = tuple(each.to(device) for each in known)
        return self._indices[device]


class _Columns(torch.autograd.Function):
    """x (..., our in) and weights (our out, in), biases (our out) -> products with all of x."""

    @staticmethod
    def forward(ctx: Any, features: Features, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        every = features.gather(x)
        ctx.features = features
        ctx.save_for_backward(x, *weights)
        return tuple(
            dense(F.linear, every, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        every = _flat(ctx.features.gather(x))
        found: list[Tensor | None] = []
        inner: Tensor | None = None
        for weight, grad in zip(weights, grads, strict=True):
            found += [dense(torch.mm, _flat(grad).T, every), _flat(grad).sum(0)]
            if ctx.needs_input_grad[1]:
                part = dense(torch.matmul, grad, weight)
                inner = part if inner is None else inner.add_(part)
        del every
        return None, None if inner is None else ctx.features.scatter_sum(inner), *found


class _Row(torch.autograd.Function):
    """x (..., our in) and a weight (out, our in) -> (..., our out), summed over the ranks. gelu:
    whether it is of GELU's values, which are not kept."""

    @staticmethod
    def forward(ctx: Any, features: Features, x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
        ctx.features, ctx.gelu = features, gelu
        ctx.save_for_backward(x, weight)
        return features.scatter_sum(dense(F.linear, F.gelu(x) if gelu else x, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        every = ctx.features.gather(grad)  # once, for both
        of_weight = dense(torch.mm, _flat(every).T, _flat(F.gelu(x) if ctx.gelu else x))
        of_x = dense(torch.matmul, every, weight)
        del every
        if ctx.gelu:
            of_x = torch.ops.aten.gelu_backward(of_x, x)
        return None, of_x, of_weight, None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _columns(features: Features, x: Tensor, *layers: Layer) -> tuple[Tensor, ...]:
    """What linear layers say of all features, with one gather."""
    return _Columns.apply(features, x, *(p for layer in layers for p in layer.weights(x.dtype)))


class ColumnForm(ColumnLinear):
    """(..., our in) -> (..., our out). features: of the input."""

    features: Features

    def forward(self, x: Tensor) -> Tensor:
        return _columns(self.features, x, self)[0]


class RowForm(ColumnLinear):
    """(..., our in) -> (..., our out). features: of the output. gelu: whether it is of GELU's
    values. whole_bias: whether each rank has all of the bias."""

    features: Features
    gelu: bool = False
    whole_bias: bool = False

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weights(x.dtype)
        bias = self.features.ours(bias) if self.whole_bias else bias
        return _Row.apply(self.features, x, weight, self.gelu) + bias


class DomainMlp(Mlp):
    """(..., our features) -> the same, with our share of the hidden ones. Of activations its
    gradient needs x and what fc1 gives."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


class DomainAttention(WindowAttention):
    """(window, token, our features) -> the same, with our share of the heads, `heads` in number."""

    features: Features

    def forward(self, x: Tensor, mask: WindowMask) -> Tensor:
        found = _columns(self.features, x, self.q, self.k, self.v)
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in found)
        return self.proj(self.attend(q, k, v, None, mask))


class RowPatches(Held, StripedConv):
    """Convolution whose kernel is its stride, as a row form of patches. features: of the output."""

    features: Features

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = self.operands(x)
        batch, features, rows, columns = x.shape
        k = self.kernel
        patches = x.reshape(batch, features, rows // k, k, columns // k, k)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (batch, lat, lon, feature k k)
        out = _Row.apply(self.features, patches, weight.flatten(1), False) + bias
        return out.permute(0, 3, 1, 2)


class ColumnPatches(Held, StripedTransposedConv):
    """Transposed convolution whose kernel is its stride, as a column form. features: of the
    input."""

    features: Features

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = self.operands(x)
        batch, _, rows, columns = x.shape
        k = self.kernel
        of_each = bias.repeat_interleave(k * k)
        (out,) = _Columns.apply(
            self.features, x.permute(0, 2, 3, 1), weight.flatten(1).t(), of_each
        )
        out = out.unflatten(-1, (bias.numel(), k, k))  # (batch, lat, lon, feature, k, k)
        return out.permute(0, 3, 1, 4, 2, 5).reshape(batch, bias.numel(), rows * k, columns * k)


class HeldHeads(Held, Heads):
    """(norm, sample, in) -> (norm, sample, part, our features)."""


class HeldOffsets(Held, Offsets):
    """(norm, part, our features)."""


def split_domain(model: Beast, mesh: Mesh, planes: Planes) -> Link:
    """Let the ranks of the tensor axis share all features of `model`, in place: it takes and gives
    our channels, `planes`, from here on.

    Returns the link over which they gather and scatter; of one rank, nothing changes. ValueError
    where heads, groups or features cannot be shared evenly.
    """
    link = Link(mesh.group("tensor"))
    if link.size == 1:
        return link
    assert (link.size, link.rank) == (planes.ranks, planes.index), planes
    _require_even(model, link.size, mesh.sizes["sequence"])
    axis = mesh.device_meshes[1]["tensor"]

    def column(layer: Linear, features: Features) -> None:
        split_parameter(layer, "weight", 0, axis)
        split_parameter(layer, "bias", 0, axis)
        specialise(layer, ColumnForm, features=features)

    def row(layer: Linear, *, gelu: bool = False) -> None:
        features = Features.even(link, layer.weight.shape[0])
        split_parameter(layer, "weight", 1, axis)
        split_parameter(layer, "bias", 0, axis)
        specialise(layer, RowForm, features=features, gelu=gelu)

    for module in list(model.modules()):
        if isinstance(module, BeastBlock):
            module.groups //= link.size
        elif isinstance(module, WindowAttention):
            features = Features.even(link, module.q.weight.shape[1])
            for layer in (module.q, module.k, module.v):
                column(layer, features)
            row(module.proj)
            specialise(module, DomainAttention, heads=module.heads // link.size, features=features)
        elif isinstance(module, Mlp):
            hidden, width = module.fc1.weight.shape
            if form_of(width, hidden) == "column":
                column(module.fc1, Features.even(link, width))
            else:
                row(module.fc1)
            row(module.fc2, gelu=True)
            specialise(module, DomainMlp)
        elif isinstance(module, Nice):
            for leaf, _ in list(module.second.named_parameters(recurse=False)):
                split_parameter(module.second, leaf, 2, axis)
            specialise(module.second, HeldHeads if module.num_noise else HeldOffsets)
        elif isinstance(module, Conv):
            assert module.kernel == module.stride, "a kernel that reaches no further than its patch"
            features = Features.even(link, module.weight.shape[0])
            split_parameter(module, "weight", 1, axis)
            split_parameter(module, "bias", 0, axis)
            specialise(module, RowPatches, features=features)
        elif isinstance(module, TransposedConv):
            assert module.kernel == module.stride, "outputs of one source"
            features = Features.even(link, module.weight.shape[0])
            split_parameter(module, "weight", 1, axis)
            split_parameter(module, "bias", 0, axis)
            specialise(module, ColumnPatches, features=features)
    # Channels of a patch: (row, column, channel).
    square = model.embed.patch**2
    given, said = (
        [_of_patches(of(rank), size, square) for rank in range(link.size)]
        for of, size in ((planes.given, model.embed.linear.weight.shape[1] // square),
                         (planes.said, model.recover.channels))
    )  # fmt: skip
    column(model.embed.linear, Features(link, given))
    split_parameter(model.recover.linear, "weight", 1, axis)
    specialise(model.recover.linear, RowForm, features=Features(link, said), whole_bias=True)
    model.recover.channels = len(planes.said(link.rank))
    known = len(planes.known(link.rank))
    model.states = (planes.inputs - 1) * known, planes.inputs * known
    return link


def _of_patches(channels: np.ndarray, size: int, square: int) -> np.ndarray:
    """Which features of patches of `square` points of `size` channels these channels are."""
    return (np.arange(square)[:, None] * size + channels).ravel()


def _require_even(model: Beast, ranks: int, sequence: int) -> None:
    """ValueError, with the way out, for what the ranks cannot share evenly."""
    numbers = [("model.width", "features", model.first.width, ranks)]
    for prefix, stage in (("", model.first), ("inner_", model.inner)):
        for block in stage.blocks:
            assert isinstance(block, BeastBlock)
            heads = block.attention.heads
            numbers.append((f"model.{prefix}heads", "heads", heads, ranks * sequence))
            numbers.append(("model.norm_groups", "groups of a norm", block.groups, ranks))
    for key, what, number, parts in numbers:
        if number % parts:
            also = f" x mesh.sequence={sequence}" if parts > ranks else ""
            fits = [n for n in range(1, number + 1) if number % (n * parts // ranks) == 0]
            raise ValueError(
                f"{key}: {number} {what} cannot be shared evenly by mesh.tensor={ranks}{also}"
                f" ranks, which share the features of every token: take mesh.tensor of"
                f" {', '.join(map(str, fits[:16])) or 'no number'}, or {key} of a multiple of"
                f" {parts} such as {-(-number // parts) * parts}"
            )
