"""From a grid to one with half as many points each way, and back: without weights.

Of an odd number of rows or columns the last one makes no pair: pooling leaves it out, and where
the grid is fine again zeros stand in its place until the skip is added, as in Samudra. Rows end at
walls, where that is a matter of the last row. A circle of longitudes that is odd at some level has
a seam there (`seam`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Pool(nn.Module):
    """Means of 2 x 2 points: (..., lat, lon) -> (..., lat // 2, lon // 2). points: (lat, lon)."""

    def __init__(self, points: tuple[int, int]) -> None:
        super().__init__()
        self.points = points

    def forward(self, x: Tensor) -> Tensor:
        return _Pool.apply(x)

    def extra_repr(self) -> str:
        return str(self.points)


class _Pool(torch.autograd.Function):
    """Nothing is kept: torch's own pooling would hold all of what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
        if not rows * columns:  # an empty stripe
            return x.new_empty(*x.shape[:-2], rows, columns)
        return F.avg_pool2d(x, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rows, columns = grad.shape[-2:]
        out = grad.new_zeros(ctx.shape)
        pairs = out[..., : 2 * rows, : 2 * columns]
        pairs = pairs.unflatten(-1, (columns, 2)).unflatten(-3, (rows, 2))
        pairs.copy_((grad * 0.25)[..., :, None, :, None])
        return out


class Double(nn.Module):
    """Bilinear, of a field that an `EdgePad` made one point larger on all sides:
    (batch, feature, lat + 2, lon + 2) -> (batch, feature, 2 lat, 2 lon).

    Along each dim, with p what is padded, out[2 i] = (p[i] + 3 p[i + 1]) / 4 and
    out[2 i + 1] = (3 p[i + 1] + p[i + 2]) / 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        fine = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return fine[..., 2:-2, 2:-2]


class Fill(nn.Module):
    """Zeros in the south and east up to `points` (lat, lon)."""

    def __init__(self, points: tuple[int, int]) -> None:
        super().__init__()
        self.points = points

    def forward(self, x: Tensor) -> Tensor:
        south, east = (n - size for n, size in zip(self.points, x.shape[-2:], strict=True))
        return F.pad(x, (0, east, 0, south)) if south or east else x

    def extra_repr(self) -> str:
        return str(self.points)


def halved(grid: tuple[int, int], times: int) -> tuple[int, int]:
    """(lat, lon) points after so many poolings."""
    return grid[0] >> times, grid[1] >> times


def seam(columns: int, levels: int) -> str:
    """What a circle of so many columns does not do, in a sentence; empty where it is whole."""
    unit = 2**levels
    if columns % unit == 0:
        return ""
    level = next(n for n in range(levels) if (columns >> n) % 2)
    below = columns // unit * unit
    fits = [str(n) for n in (below, below + unit) if n]
    return (
        f"lon={columns} is not a multiple of {unit} (2^{levels} levels): level {level + 1} has"
        f" {columns >> level} columns, the last of which finds no pair and is left out on the way"
        " down, so that there is a seam before the first column of the grid, and turning the input"
        f" in longitude does not turn the output; lon={' or '.join(fits)} would have none"
    )
