"""Convolutions some rows at a time: padding for a tile's rows, and gradients added up over tiles.

The input gradient at some rows of a convolution of stride 1 that reaches as far to one side as to
the other is itself a convolution of the padded output gradient: halos are borrowed in both
directions alike, and no row is computed twice or added to.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.model.layers import dense
from graticule.model.pad import ConvPad, Rows, Run

_aten = torch.ops.aten
Tiles = Sequence[tuple[int, int]]
"""(first, last + 1) rows."""


def split(shape: Sequence[int], tiles: int) -> Tiles:
    """Tiles of a field of this shape, even, and none without a point."""
    rows = shape[2] if shape[3] else 0
    tiles = min(tiles, rows)
    return [(i * rows // tiles, (i + 1) * rows // tiles) for i in range(tiles)]


def outputs(pad: ConvPad, padded: int) -> int:
    """How many outputs the consumer of `pad` has along a dim of so many padded points."""
    taps = pad.dilation * (pad.kernel - 1) + 1
    return (padded - taps) // pad.stride + 1 if padded else 0


class Reader:
    """What the outputs of a convolution read, from the first to the last, no row asked for twice.

    So a tile of outputs may be written over the rows that it was made of. A collective where a
    field has stripes: it borrows what others hold, at once.
    """

    def __init__(self, pad: ConvPad, rows: Rows, like: Tensor, tiles: Tiles) -> None:
        """rows: of the field that is padded. tiles: of its rows."""
        self.pad, self._rows, self.like = pad, rows, like
        self.borrowed = pad.borrow(rows, like, tiles)
        self._lat, self._lon = pad.runs()
        self._kept = like.new_empty(*like.shape[:2], 0, self._lon.size)
        self._end = 0

    def read(self, first: int, last: int) -> Tensor:
        """The padded rows that outputs `first` to `last` - 1 read."""
        stride, pad = self.pad.stride, self.pad
        start = stride * first
        stop = stride * (last - 1) + pad.dilation * (pad.kernel - 1) + 1
        shape = *self.like.shape[:2], stop - start, self._lon.size
        out = self.like.new_empty(shape)
        known = max(self._end - start, 0)
        out[:, :, :known] = self._kept
        self._fill(out[:, :, known:], start + known)
        # As much as the next tile begins with.
        self._kept = out[:, :, stride * last - start :].clone()
        self._end = stop
        return out

    def _fill(self, out: Tensor, start: int) -> None:
        """Padded rows start, start + 1, ..."""
        lat, lon = self._lat, self._lon
        for to, source, count in _within(lat.own, start, out.shape[2]):
            target, part = out.narrow(2, to, count), self._rows(source, source + count)
            for at, begin, length in lon.own:
                target.narrow(3, at, length).copy_(part.narrow(3, begin, length))
            for at, begin, length in lon.borrowed:
                here = self.borrowed.narrow(2, source, count)
                target.narrow(3, at, length).copy_(here.narrow(3, begin, length))
            for at, _, length in lon.blank:
                target.narrow(3, at, length).zero_()
        for to, source, count in _within(lat.borrowed, start, out.shape[2]):
            target, part = out.narrow(2, to, count), self.borrowed.narrow(2, source, count)
            for at, begin, length in lon.own:
                target.narrow(3, at, length).copy_(part.narrow(3, begin, length))
            for at, _, length in lon.blank:
                target.narrow(3, at, length).zero_()
        for to, _, count in _within(lat.blank, start, out.shape[2]):
            out.narrow(2, to, count).zero_()

    def fold(self, grad: Tensor, start: int, field: Tensor, home: Tensor) -> None:
        """The adjoint: add the gradient of padded rows start, start + 1, ... to that of the field
        and of what was borrowed."""
        lat, lon = self._lat, self._lon
        for to, source, count in _within(lat.own, start, grad.shape[2]):
            part, target = grad.narrow(2, to, count), field.narrow(2, source, count)
            for at, begin, length in lon.own:
                target.narrow(3, begin, length).add_(part.narrow(3, at, length))
            for at, begin, length in lon.borrowed:
                there = home.narrow(2, source, count)
                there.narrow(3, begin, length).add_(part.narrow(3, at, length))
        for to, source, count in _within(lat.borrowed, start, grad.shape[2]):
            part, target = grad.narrow(2, to, count), home.narrow(2, source, count)
            for at, begin, length in lon.own:
                target.narrow(3, begin, length).add_(part.narrow(3, at, length))


def _within(runs: Sequence[Run], start: int, size: int) -> Iterator[Run]:
    """Of runs what lies in places start to start + size - 1, counted from there."""
    for to, source, count in runs:
        first, last = max(to, start), min(to + count, start + size)
        if first < last:
            yield first - start, source + first - to, last - first


def convolve(
    reader: Reader,
    weights: Sequence[Tensor],
    tiles: Tiles,
    out: Tensor,
    seen: Callable[[Tensor], None] | None = None,
) -> None:
    """Write a convolution into `out`, which may be where `reader` reads. seen: told each tile."""
    operation = partial(F.conv2d, stride=reader.pad.stride)
    for first, last in tiles:
        here = dense(operation, reader.read(first, last), *weights)
        out[:, :, first:last] = here
        if seen:
            seen(here)


def convolve_back(
    reader: Reader,
    grad: Rows,
    weight: Tensor,
    tiles: Tiles,
    take: Callable[[int, int, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias of a convolution of stride 1; its input's go to `take`.

    reader: of its input. grad: rows of its output's gradient. take: is given (first, last + 1)
    and the gradient of these rows, and may write it over what `grad` is made of.
    """
    pad = reader.pad
    assert (pad.stride, pad.north, pad.west) == (1, pad.south, pad.east), pad
    around = Reader(pad, grad, reader.like, tiles)
    back = partial(F.conv_transpose2d, padding=pad.kernel - 1)
    grads = Sums(weight)
    for first, last in tiles:
        d = around.read(first, last)
        inside = d[:, :, pad.north : -pad.south, pad.west : -pad.east]
        grads.add(inside, reader.read(first, last), False)
        here = [dense(back, d, weight)]
        # Neither it nor the gradient itself is held here while more is made of it.
        del d, inside
        take(first, last, here.pop())
    return grads.weight, grads.bias


class Sums:
    """Gradients of a weight and a bias, added up over tiles, in float32 at least."""

    def __init__(self, weight: Tensor, *, transposed: bool = False) -> None:
        self._like, self._transposed = weight, transposed
        kind = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.zeros_like(weight, dtype=kind)
        self.bias = self.weight.new_zeros(weight.shape[1 if transposed else 0])

    def add(self, grad: Tensor, x: Tensor, wanted: bool, stride: int = 1) -> Tensor:
        """Those of a tile. grad: of its outputs. x: what they read. The gradient of x, if wanted,
        else nothing."""
        kept: list[Tensor] = []

        def backward(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            numbers = [stride] * 2, [0, 0], [1, 1], self._transposed, [0, 0], 1
            mask = [wanted, True, True]
            dx, *sums = _aten.convolution_backward(
                grad, x, weight, [self.bias.numel()], *numbers, mask
            )
            kept.extend(sums)
            return dx if wanted else grad.new_empty(0)

        dx = dense(backward, grad, x, self._like)
        self.weight += kept[0]
        self.bias += kept[1]
        return dx
