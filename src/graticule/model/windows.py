"""Attention windows: how tokens of the field go into them, are shifted, attend and come back.

Between `Enter` and `Leave` tokens are (window, token, feature); windows are numbered sample by
sample and row by row. `WindowGrid` holds the maps and masks as plain index arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.model.layers import attention, dense, plain_attention
from graticule.model.pad import Boundary


@dataclass(frozen=True)
class WindowGrid:
    """The tokens of one sample, cut into windows.

    tokens: (lat, lon) tokens of the field. padded: tokens of the whole windows that hold them;
    the surplus is in the south (and the east). window: tokens of one window.
    The shifted windows start `shift` rows further south and columns further east; None: half a
    window each.
    """

    tokens: tuple[int, int]
    padded: tuple[int, int]
    window: tuple[int, int]
    boundary: Boundary
    shift: tuple[int, int] | None = None

    @property
    def num_windows(self) -> int:
        return (self.padded[0] // self.window[0]) * (self.padded[1] // self.window[1])

    @property
    def window_tokens(self) -> int:
        return self.window[0] * self.window[1]

    @property
    def offset(self) -> tuple[int, int]:
        """Rows and columns that the shifted windows are displaced by."""
        return self.shift or (self.window[0] // 2, self.window[1] // 2)

    def slots(self, values: np.ndarray) -> np.ndarray:
        """(lat, lon) values of the padded grid -> (window, token)."""
        rows, columns = self.padded
        high, wide = self.window
        cut = values.reshape(rows // high, high, columns // wide, wide)
        return cut.transpose(0, 2, 1, 3).reshape(self.num_windows, self.window_tokens)

    @cached_property
    def shift_source(self) -> np.ndarray:
        """(slot,) for each slot of the shifted windows, the slot of the regular ones it is in."""
        place = np.empty(self.padded[0] * self.padded[1], dtype=np.int64)
        flat = np.arange(place.size).reshape(self.padded)
        place[self.slots(flat).ravel()] = np.arange(place.size)
        down, right = self.offset
        return place[self.slots(np.roll(flat, (-down, -right), axis=(0, 1))).ravel()]

    def regions(self, shifted: bool) -> np.ndarray:
        """(window, token) int: tokens attend to each other where the numbers are equal.

        globe: padding is apart from the field, and so are the two poles that meet in the last
        row of shifted windows; longitude is one. paper: the two sides of the seam are apart in
        both directions (the nine regions of Swin), padding belongs to the field.
        """
        row, column = np.indices(self.padded)
        if not shifted:
            seam = np.zeros(self.padded, dtype=np.int64)
        else:
            down, right = self.offset
            seam = (row >= self.padded[0] - down).astype(np.int64)
            if self.boundary == "paper":
                seam += 2 * (column >= self.padded[1] - right)
            row, column = (row + down) % self.padded[0], (column + right) % self.padded[1]
        if self.boundary == "globe":
            padding = (row >= self.tokens[0]) | (column >= self.tokens[1])
            seam = np.where(padding, -1, seam)
        return self.slots(seam)

    @cached_property
    def bias_index(self) -> np.ndarray:
        """(token, token) row of the relative position table, (2 high - 1)(2 wide - 1) rows."""
        high, wide = self.window
        row, column = (axis.ravel() for axis in np.indices(self.window))
        down = row[:, None] - row[None, :] + high - 1
        right = column[:, None] - column[None, :] + wide - 1
        return down * (2 * wide - 1) + right


class WindowMask(nn.Module):
    """Which tokens of a window attend to which, kept once for all windows that are alike.

    groups: pairs of (windows of a sample that share a mask, mask (token, token) or None), added
    to the scores: minus infinity (`globe`) or the published -100 (`paper`) where forbidden.
    """

    def __init__(self, grid: WindowGrid, shifted: bool, regions: np.ndarray | None = None) -> None:
        """regions: (window, token) of the windows in question; None: of all that there are."""
        super().__init__()
        self.grid, self.shifted = grid, shifted
        regions = grid.regions(shifted) if regions is None else regions
        forbidden = -np.inf if grid.boundary == "globe" else -100.0
        self.windows: list[slice | np.ndarray] = []
        order = np.empty(0, dtype=np.int64)
        for number, (pattern, members) in enumerate(window_kinds(regions)):
            contiguous = members[-1] - members[0] + 1 == members.size
            self.windows.append(
                slice(int(members[0]), int(members[-1]) + 1) if contiguous else members
            )
            mask = None
            if pattern.any():
                together = pattern[:, None] == pattern[None, :]
                mask = torch.from_numpy(np.where(together, 0.0, forbidden).astype(np.float32))
            self.register_buffer(f"mask_{number}", mask, persistent=False)
            order = np.concatenate([order, members])
        back = np.argsort(order)
        self.back = None if (back == np.arange(back.size)).all() else back

    def masks(self) -> list[Tensor | None]:
        """One per group of windows, float32 or none."""
        return [getattr(self, f"mask_{number}") for number in range(len(self.windows))]


def window_kinds(regions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Windows with the same regions, up to the numbering, share one mask: (regions, which)."""
    if (regions == regions[:, :1]).all():  # of windows with many tokens this is the quick way
        return [(np.zeros_like(regions[0]), np.arange(len(regions)))] if len(regions) else []
    patterns, which = np.unique(regions - regions[:, :1], axis=0, return_inverse=True)
    return [
        (pattern, np.flatnonzero(which.ravel() == number))
        for number, pattern in enumerate(patterns)
    ]


class Attend(nn.Module):
    """Scaled dot product attention inside each window."""

    softmax_dtype: torch.dtype | None = None
    """Of scores with all that is added to them, which are kept then; None: a fused kernel's own."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: WindowMask
    ) -> Tensor:
        """q, k, v: (batch * window, token, head, dim). bias: (head, token, token) or none.
        Returns (batch * window, token, head * dim)."""
        windows = sum(_size(group) for group in mask.windows)
        total, tokens, heads, dim = q.shape
        q, k, v = (x.view(-1, windows, tokens, heads, dim).transpose(2, 3) for x in (q, k, v))
        parts = []
        for group, allowed in zip(mask.windows, mask.masks(), strict=True):
            added = bias
            if allowed is not None:
                allowed = allowed.to(self.softmax_dtype or q.dtype)
                added = allowed if bias is None else bias + allowed
            here = [x[:, group].flatten(0, 1) for x in (q, k, v)]
            here += [] if added is None else [added]
            if self.softmax_dtype is None:
                out = dense(attention, *here)
            else:
                out = plain_attention(*here, dtype=self.softmax_dtype)
            parts.append(out.unflatten(0, (-1, _size(group))))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if mask.back is not None:
            out = out[:, mask.back]
        return out.transpose(2, 3).reshape(total, tokens, heads * dim)


def _size(group: slice | Sequence[int] | np.ndarray) -> int:
    return group.stop - group.start if isinstance(group, slice) else len(group)


class Enter(nn.Module):
    """Field tokens (batch, feature, lat, lon) -> (batch * window, token, feature).

    Slots beyond the field are zero.
    """

    def __init__(self, grid: WindowGrid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        rows, columns = self.grid.padded
        south, east = rows - x.shape[1], columns - x.shape[2]
        if south or east:
            x = F.pad(x, (0, 0, 0, east, 0, south))
        high, wide = self.grid.window
        x = x.reshape(x.shape[0], rows // high, high, columns // wide, wide, x.shape[3])
        return x.transpose(2, 3).reshape(-1, high * wide, x.shape[-1])

    def num_samples(self, y: Tensor) -> int:
        """The batch of what `forward` gave."""
        return y.shape[0] // self.grid.num_windows


class Leave(nn.Module):
    """(batch * window, token, feature) -> field tokens (batch, feature, lat, lon)."""

    def __init__(self, grid: WindowGrid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.grid.padded
        high, wide = self.grid.window
        x = x.view(-1, rows // high, columns // wide, high, wide, x.shape[-1])
        x = x.transpose(2, 3).reshape(x.shape[0], rows, columns, x.shape[-1])
        x = x[:, : self.grid.tokens[0], : self.grid.tokens[1]]
        return x.permute(0, 3, 1, 2).contiguous()


class _Permute(torch.autograd.Function):
    """Reorder the slots of each sample. The gradient goes back by the inverse order: a gather
    each way, where PyTorch's own gradient of a gather would scatter and add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(source, inverse)
        return x.index_select(1, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        source, inverse = ctx.saved_tensors
        return _Permute.apply(grads[0], inverse, source), None, None


class Shift(nn.Module):
    """Tokens of the regular windows -> the same tokens in the shifted windows."""

    source: Tensor
    inverse: Tensor

    def __init__(self, grid: WindowGrid) -> None:
        super().__init__()
        self.grid = grid
        source = grid.shift_source
        self.register_buffer("source", torch.from_numpy(source), persistent=False)
        self.register_buffer("inverse", torch.from_numpy(np.argsort(source)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.source.numel(), x.shape[-1])
        return _Permute.apply(flat, self.source, self.inverse).view(x.shape)


class Unshift(Shift):
    """The inverse of `Shift`."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.source.numel(), x.shape[-1])
        return _Permute.apply(flat, self.inverse, self.source).view(x.shape)
