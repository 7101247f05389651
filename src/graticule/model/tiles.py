"""The sampling modules some rows at a time: the same numbers and gradients in less memory.

`Down` and `Up` hold patch grids of the model's width; run as they are, or computed again as a
checkpoint, a dozen of them at once. Here, with y = stem(x), c = conv(pad(.)), n = silu(norm(.)),

    forward   c1 = conv1(y);  c2 = conv2(n(c1)) over c1;  out = n(c2) + y over c2
    backward  c1, c2 again;  sums of norm 2;  dc2 -> conv2 -> dn1 over c2, sums of norm 1;
              dc1 -> conv1, + d out = dy over c2;  dy -> stem -> dx

each arrow tile by tile. Norms, activations and padding are made for a tile's rows alone. The
statistics of all tiles are merged before the first is normed, and both backward sums of a norm are
those of all tiles before the first gradient of its input is made: with constant statistics that
gradient would be 25 % off. What is whole: x, d out, c1 and c2 (and dx, when c1 is gone); of `Down`
y too, a quarter of x; of `Up` y is made again where it is read, a ninth of a convolution's work.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.model.layers import dense
from graticule.model.pad import Rows
from graticule.model.resample import ConvNormAct, Down, Up
from graticule.model.row_norms import Moments, NormRows
from graticule.model.rows import Reader, Sums, Tiles, convolve, convolve_back, outputs, split


def tiled_body(module: Down | Up, x: Tensor, tiles: int) -> Tensor:
    """`module(x)`, from `tiles` tiles of rows; of activations x alone is kept for the gradient.

    More tiles than rows are tiles of one row. Gradients arrive at the weights as from the module.
    """
    assert tiles >= 1, tiles
    layers: list[Any] = [module.conv]
    for part in _parts(module):
        layers += [part.conv, part.norm]
    weights = [weight for layer in layers for weight in layer.weights(x.dtype)]
    return _Tiled.apply(x, module, tiles, *weights)


class _Tiled(torch.autograd.Function):
    """weights: weight and bias of the stem, then of convolution and norm, twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Down | Up, tiles: int, *weights: Tensor) -> Tensor:
        stem = _stem(module, x, weights[0], weights[1], tiles)
        field = x.new_empty(stem.shape)
        rows: Rows = stem.rows
        kept = []
        for number, part in enumerate(_parts(module)):
            conv, affine = weights[2 + 4 * number :][:2], weights[4 + 4 * number :][:2]
            moments = Moments(part.norm.groups, field)
            reader = Reader(part.pad, rows, x, stem.tiles)
            convolve(reader, conv, stem.tiles, field, moments.add)
            kept.append(moments.merged(part.norm))
            rows = NormRows(part.norm, kept[-1], *affine).of(field)
        for first, last in stem.tiles:
            field[:, :, first:last] = rows(first, last).add_(stem.rows(first, last))
        ctx.module, ctx.tiles = module, tiles
        ctx.save_for_backward(x, *weights, *kept)
        return field

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights, moments1, moments2 = ctx.saved_tensors
        stem = _stem(ctx.module, x, weights[0], weights[1], ctx.tiles)
        moments = moments1, moments2
        dy, grads = _body_back(_parts(ctx.module), stem, x, weights[2:], moments, grad)
        dx, *stem_grads = stem.backward(dy, ctx.needs_input_grad[0])
        return dx, None, None, *(g.to(x.dtype) for g in (*stem_grads, *grads))


def _parts(module: Down | Up) -> tuple[ConvNormAct, ConvNormAct]:
    first, second = module.body
    assert isinstance(first, ConvNormAct)
    assert isinstance(second, ConvNormAct)
    return first, second


def _body_back(
    parts: tuple[ConvNormAct, ConvNormAct],
    stem: "_Stem",
    x: Tensor,
    weights: Sequence[Tensor],
    moments: tuple[Tensor, Tensor],
    grad: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradients of y, all of it, and of the weights. moments: of c1 and of c2."""
    (first, second), tiles = parts, stem.tiles
    norm1 = NormRows(first.norm, moments[0], *weights[2:4])
    norm2 = NormRows(second.norm, moments[1], *weights[6:8])
    # field: c2, then d through SiLU and norm 1's gradient, then dy.
    c1, field = x.new_empty(stem.shape), x.new_empty(stem.shape)
    convolve(Reader(first.pad, stem.rows, x, tiles), weights[0:2], tiles, c1)
    convolve(Reader(second.pad, norm1.of(c1), x, tiles), weights[4:6], tiles, field)

    for a, b in tiles:
        here = field[:, :, a:b]
        norm2.add(norm2.through_silu(grad[:, :, a:b], here), here)
    norm2.close()

    def d_c2(a: int, b: int) -> Tensor:
        here = field[:, :, a:b]
        return norm2.input_grad(norm2.through_silu(grad[:, :, a:b], here), here)

    def into_norm1(a: int, b: int, d: Tensor) -> None:
        here = c1[:, :, a:b]
        d = norm1.through_silu(d, here)
        norm1.add(d, here)
        field[:, :, a:b] = d

    reader = Reader(second.pad, norm1.of(c1), x, tiles)
    grads2 = convolve_back(reader, d_c2, weights[4], tiles, into_norm1)
    norm1.close()

    def d_c1(a: int, b: int) -> Tensor:
        return norm1.input_grad(field[:, :, a:b], c1[:, :, a:b])

    def into_y(a: int, b: int, d: Tensor) -> None:
        field[:, :, a:b] = d.add_(grad[:, :, a:b])

    reader = Reader(first.pad, stem.rows, x, tiles)
    grads1 = convolve_back(reader, d_c1, weights[0], tiles, into_y)
    return field, (*grads1, *norm1.grads, *grads2, *norm2.grads)


# Stems: what comes before the body


def _stem(module: Down | Up, x: Tensor, weight: Tensor, bias: Tensor, tiles: int) -> "_Stem":
    return (_DownStem if isinstance(module, Down) else _UpStem)(module, x, weight, bias, tiles)


class _Stem:
    """y = stem(x). shape: of y. tiles: of its rows."""

    shape: tuple[int, int, int, int]
    tiles: Tiles

    def rows(self, first: int, last: int) -> Tensor:
        """Rows of y."""
        raise AssertionError("every stem has rows")

    def backward(self, grad: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        """Gradients of x (if wanted), weight and bias. Once; there are no rows after it."""
        raise AssertionError("every stem has a gradient")


class _DownStem(_Stem):
    """A strided convolution. y is kept: it is as dear as those of the body, and small."""

    def __init__(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor, tiles: int) -> None:
        self.pad, self.x, self.weight = module.pad, x, weight
        self.inner = split(x.shape, tiles)
        rows, columns = (outputs(self.pad, runs.size) for runs in self.pad.runs())
        self.shape = x.shape[0], bias.numel(), rows, columns
        self.tiles = split(self.shape, tiles)
        self.y: Tensor | None = x.new_empty(self.shape)
        convolve(self._reader(), (weight, bias), self.tiles, self.y)

    def _reader(self) -> Reader:
        return Reader(self.pad, lambda a, b: self.x[:, :, a:b], self.x, self.inner)

    def rows(self, first: int, last: int) -> Tensor:
        assert self.y is not None
        return self.y[:, :, first:last]

    def backward(self, grad: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        self.y = None
        reader = self._reader()
        grads = Sums(self.weight)
        # Rows that no output reads have none.
        dx = torch.zeros_like(self.x, memory_format=torch.contiguous_format) if wanted else None
        home = torch.zeros_like(reader.borrowed)
        for first, last in self.tiles:
            # Neighbouring tiles read some rows both: their gradients are added where they belong.
            d = grads.add(grad[:, :, first:last], reader.read(first, last), wanted, self.pad.stride)
            if dx is not None:
                reader.fold(d, first * self.pad.stride, dx, home)
            del d  # before the next is made
        if dx is not None:
            self.pad.give_back(home, dx)
        return dx, grads.weight, grads.bias


class _UpStem(_Stem):
    """A transposed convolution without overlap, and a crop: y is made again where it is read."""

    def __init__(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor, tiles: int) -> None:
        self.stride = module.conv.stride
        assert (module.conv.kernel, module.crop.surplus) == (self.stride, 0), module
        self.x, self.weight, self.bias = x, weight, bias
        self.shape = x.shape[0], bias.numel(), *module.crop.points
        self.inner = split(x.shape, tiles)
        self.tiles = split(self.shape, tiles)

    def rows(self, first: int, last: int) -> Tensor:
        start, stop = first // self.stride, -(-last // self.stride)
        operation = partial(F.conv_transpose2d, stride=self.stride)
        y = dense(operation, self.x[:, :, start:stop], self.weight, self.bias)
        surplus = start * self.stride
        return y[:, :, first - surplus : last - surplus, : self.shape[3]]

    def backward(self, grad: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        grads = Sums(self.weight, transposed=True)
        dx = torch.empty_like(self.x, memory_format=torch.contiguous_format) if wanted else None
        for first, last in self.inner:
            here = grad[:, :, first * self.stride : last * self.stride]
            missing = self.x.shape[3] * self.stride - here.shape[3]
            below = (last - first) * self.stride - here.shape[2]
            if missing or below:
                here = F.pad(here, (0, missing, 0, below))
            d = grads.add(here, self.x[:, :, first:last], wanted, self.stride)
            if dx is not None:
                dx[:, :, first:last] = d
        return dx, grads.weight, grads.bias
