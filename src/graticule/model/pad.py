"""Pads: what lies beyond the edge of the field, for whoever is about to read it.

`globe`: west and east are neighbours (circular), the poles are walls (zeros).
`paper`: four walls (zeros), as in the published model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Boundary = Literal["globe", "paper"]
Ends = Literal["wall", "circle", "repeat"]
"""What lies beyond the ends of a dim: zeros, the other end, or the last points again."""
Run = tuple[int, int, int]
"""(first place in what is padded, first place in its source, length)"""
Rows = Callable[[int, int], Tensor]
"""Rows first to last - 1 of a field, (batch, feature, last - first, lon), made when asked for."""


class Runs(Protocol):
    """How a padded field is put together along one dim, in places 0, 1, ... of it."""

    @property
    def size(self) -> int:
        """Points of the padded field."""

    @property
    def own(self) -> tuple[Run, ...]:
        """From the field."""

    @property
    def borrowed(self) -> tuple[Run, ...]:
        """From what others hold, `Pad.borrow`."""

    @property
    def blank(self) -> tuple[Run, ...]:
        """Zero."""


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """Runs of a field that is all here."""

    size: int
    own: tuple[Run, ...]
    blank: tuple[Run, ...]
    borrowed: tuple[Run, ...] = ()

    @classmethod
    def of(cls, before: int, points: int, after: int, ends: Ends) -> "_Whole":
        end, size = before + points, before + points + after
        sides: tuple[Run, ...] = ()
        if ends == "circle":
            sides = (0, points - before, before), (end, 0, after)
        elif ends == "repeat":
            places = [(i, 0) for i in range(before)] + [(end + i, points - 1) for i in range(after)]
            sides = tuple((place, source, 1) for place, source in places)
        blank = ((0, 0, before), (end, end, after)) if ends == "wall" else ()
        return cls(size=size, own=((before, 0, points), *sides), blank=blank)


def reach(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """How many points before and after `size` points a centred convolution reads.

    It has ceil(size / stride) outputs; output i reads inputs stride * i - before + dilation * j
    for j < kernel. Only what is read is padded: (1, 0) for kernel 3, stride 2, an even size.
    """
    before = dilation * (kernel - 1) // 2
    last = stride * (-(-size // stride) - 1) - before + dilation * (kernel - 1)
    return before, max(0, last - (size - 1))


def spread(kernel: int, stride: int) -> tuple[int, int, int]:
    """(before, after, surplus) of a centred transposed convolution, stride <= kernel.

    Of n points it makes stride * n: output j is the sum over i, t with stride * i + t = j + start
    of input i times weight t, start = (kernel - stride + 1) // 2. It reads `before` and `after`
    points beyond the edges; over a field that has them, its first `surplus` outputs are too many.
    (0, 0, 0) for kernel 2, stride 2; (1, 1, 3) for kernel 4, stride 2.
    """
    start = (kernel - stride + 1) // 2
    before, after = (kernel - 1 - start) // stride, (start + stride - 1) // stride
    return before, after, before * stride + start


class _Wrap(torch.autograd.Function):
    """Zero rows and circular columns in one copy, a third of the time of padding twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, int, int, int]) -> Tensor:
        ctx.widths = north, south, west, east = widths
        *lead, height, width = x.shape
        out = x.new_empty(*lead, height + north + south, width + west + east)
        out[..., :north, :].zero_()
        out[..., north + height :, :].zero_()
        rows = out[..., north : north + height, :]
        rows[..., west : west + width] = x
        rows[..., :west] = x[..., width - west :]
        rows[..., west + width :] = x[..., :east]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        north, south, west, east = ctx.widths
        height, width = grad.shape[-2] - north - south, grad.shape[-1] - west - east
        rows = grad[..., north : north + height, :]
        # A copy, since the wrapped columns are added to it.
        inside = rows[..., west : west + width].clone(memory_format=torch.contiguous_format)
        inside[..., width - west :] += rows[..., :west]
        inside[..., :east] += rows[..., west + width :]
        return inside, None


class Pad(nn.Module):
    """Pad (batch, feature, lat, lon) for a consumer that then runs without padding."""

    north: int
    south: int
    west: int
    east: int

    def __init__(self, boundary: Boundary, points: tuple[int, int]) -> None:
        """points: (lat, lon) of the field that is padded, all of it."""
        super().__init__()
        self.boundary, self.points = boundary, points
        self.ends: tuple[Ends, Ends] = ("wall", "circle" if boundary == "globe" else "wall")
        """Along lat and along lon."""

    def forward(self, x: Tensor) -> Tensor:
        if self.boundary == "paper":
            return F.pad(x, (self.west, self.east, self.north, self.south))
        return _Wrap.apply(x, (self.north, self.south, self.west, self.east))

    # For whoever pads some rows at a time (`tiles`).

    def runs(self) -> tuple[Runs, Runs]:
        """Along lat and along lon."""
        (rows, columns), (lat, lon) = self.points, self.ends
        return (
            _Whole.of(self.north, rows, self.south, lat),
            _Whole.of(self.west, columns, self.east, lon),
        )

    def borrow(self, rows: Rows, like: Tensor, tiles: Sequence[tuple[int, int]]) -> Tensor:
        """What the padded field has from others, who are lent what they read: nothing here.

        rows: of the field. like: of its batch, features, dtype and device. tiles: (first, last + 1)
        rows, which are all of them. Not differentiable; `give_back` is its adjoint.
        """
        return like.new_empty(0)

    def give_back(self, borrowed: Tensor, grad: Tensor) -> None:
        """Send the gradients of what was borrowed home; add what comes to `grad`, the field's."""


class ConvPad(Pad):
    """For a convolution."""

    def __init__(
        self,
        boundary: Boundary,
        points: tuple[int, int],
        *,
        kernel: int,
        stride: int = 1,
        dilation: int = 1,
    ) -> None:
        super().__init__(boundary, points)
        self.kernel, self.stride, self.dilation = kernel, stride, dilation
        self.north, self.south = reach(points[0], kernel, stride, dilation)
        self.west, self.east = reach(points[1], kernel, stride, dilation)
        if boundary == "globe" and (max(self.west, self.east) > points[1] or points[1] % stride):
            raise ValueError(
                f"a circle of {points[1]} columns cannot be read by kernel {kernel}, stride"
                f" {stride}, dilation {dilation}: it needs a width that the stride divides and at"
                f" least {max(self.west, self.east)} columns"
            )

    def extra_repr(self) -> str:
        return f"{self.boundary}, {self.points}, {self.kernel=}, {self.stride=}, {self.dilation=}"


class TransposedPad(Pad):
    """For a transposed convolution; `Crop(points, surplus=pad.surplus)` follows it."""

    def __init__(
        self, boundary: Boundary, points: tuple[int, int], *, kernel: int, stride: int
    ) -> None:
        super().__init__(boundary, points)
        if kernel < stride:
            raise ValueError(
                f"a transposed convolution of kernel {kernel} and stride {stride} leaves holes:"
                " it needs a kernel of at least its stride"
            )
        self.kernel, self.stride = kernel, stride
        before, after, self.surplus = spread(kernel, stride)
        self.north = self.west = before
        self.south = self.east = after
        if boundary == "globe" and max(before, after) > points[1]:
            raise ValueError(
                f"a circle of {points[1]} columns cannot be read by a transposed convolution of"
                f" kernel {kernel}, stride {stride}: it needs at least {max(before, after)} columns"
            )

    def extra_repr(self) -> str:
        return f"{self.boundary}, {self.points}, {self.kernel=}, {self.stride=}"


class EdgePad(Pad):
    """One point on all sides for bilinear up-sampling, which has no zeros: beyond the poles the
    last row is repeated; beyond the ends of the circle lies, of a globe, the other end, else the
    last column again."""

    north = south = west = east = 1

    def __init__(self, boundary: Boundary, points: tuple[int, int]) -> None:
        super().__init__(boundary, points)
        self.ends = ("repeat", "circle" if boundary == "globe" else "repeat")

    def forward(self, x: Tensor) -> Tensor:
        if self.boundary == "globe":
            x = torch.cat([x[..., -1:], x, x[..., :1]], dim=-1)
            return F.pad(x, (0, 0, 1, 1), mode="replicate")
        return F.pad(x, (1, 1, 1, 1), mode="replicate")

    def extra_repr(self) -> str:
        return f"{self.boundary}, {self.points}"


class Crop(nn.Module):
    """Keep `points` (lat, lon): a transposed convolution yields surplus ones.

    surplus: how many of them come before, in each direction.
    """

    def __init__(self, points: tuple[int, int], surplus: int = 0) -> None:
        super().__init__()
        self.points, self.surplus = points, surplus

    def forward(self, x: Tensor) -> Tensor:
        first, (rows, columns) = self.surplus, self.points
        return x[..., first : first + rows, first : first + columns]


class FieldPad(nn.Module):
    """Grow the field (batch, channel, lat, lon) with zeros to whole patches; `crop` undoes it.

    globe: rows are added in the south, to whole patches only. paper: on all sides, half of the
    rows and columns (rounded down) before the field, up to the padded shape.
    """

    def __init__(self, boundary: Boundary, grid: tuple[int, int], shape: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        rows, columns = shape[0] - grid[0], shape[1] - grid[1]
        self.north = rows // 2 if boundary == "paper" else 0
        self.west = columns // 2
        self.south, self.east = rows - self.north, columns - self.west

    def forward(self, x: Tensor) -> Tensor:
        if not (self.north or self.south or self.west or self.east):
            return x
        return F.pad(x, (self.west, self.east, self.north, self.south))

    def crop(self, x: Tensor) -> Tensor:
        height, width = self.grid
        return x[..., self.north : self.north + height, self.west : self.west + width]
