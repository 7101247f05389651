"""The Wenhai model: a hierarchical Swin Transformer between sampling modules.

TERRA (arXiv 2608.15211), section II.A, Fig. 1 and Table V; layer by layer:

    field -> pad to whole patches -> patch embedding -> down module
          -> enter windows -> depth x Swin block -> leave windows
          -> up module -> patch recovery -> crop -> + the last known state
"""

import torch
from torch import Tensor, nn

from graticule.model.layers import Layer, LayerNorm, Linear, Mlp, PatchEmbedding, PatchRecovery
from graticule.model.pad import Boundary, FieldPad
from graticule.model.resample import Down, Up
from graticule.model.windows import Attend, Enter, Leave, Shift, Unshift, WindowGrid, WindowMask


class WindowAttention(nn.Module):
    """Multi-head attention inside windows, with a learned bias by relative position."""

    def __init__(self, width: int, heads: int, grid: WindowGrid, bias_table: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (Linear(width, width) for _ in range(3))
        self.proj = Linear(width, width)
        self.attend = Attend()
        self.bias = RelativePositionBias(heads, grid) if bias_table else None

    def forward(self, x: Tensor, mask: WindowMask) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        bias = None if self.bias is None else self.bias(x.dtype)
        return self.proj(self.attend(q, k, v, bias, mask))


class RelativePositionBias(Layer):
    """(head, token, token), one number per head and displacement (row, column)."""

    index: Tensor

    def __init__(self, heads: int, grid: WindowGrid) -> None:
        super().__init__()
        high, wide = grid.window
        self.bias_table = nn.Parameter(torch.empty((2 * high - 1) * (2 * wide - 1), heads))
        index = torch.from_numpy(grid.bias_index)
        self.register_buffer("index", index, persistent=False)

    def reset(self, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(self.bias_table, std=0.02, a=-0.04, b=0.04, generator=generator)

    def forward(self, dtype: torch.dtype) -> Tensor:
        return self.bias_table.to(dtype)[self.index].permute(2, 0, 1)


class SwinBlock(nn.Module):
    """Pre-norm attention, then pre-norm MLP, each with its own skip."""

    def __init__(
        self, width: int, heads: int, mlp_ratio: int, grid: WindowGrid, bias_table: bool,
        shifted: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = LayerNorm(width)
        self.attention = WindowAttention(width, heads, grid, bias_table)
        self.norm2 = LayerNorm(width)
        self.mlp = Mlp(width, mlp_ratio)
        self.shift = Shift(grid) if shifted else nn.Identity()
        self.unshift = Unshift(grid) if shifted else nn.Identity()

    def forward(self, x: Tensor, mask: WindowMask) -> Tensor:
        x = x + self.unshift(self.attention(self.shift(self.norm1(x)), mask))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """(batch, in_channel, lat, lon) -> (batch, out_channel, lat, lon), both float32 normalised.

    grid: (lat, lon) points. in_channels: states (oldest first), then whatever else is given.
    states: (first, last + 1) input channels of the newest state, to which the output is added.
    out_channels: per output time, the state's channels first, then diagnostic ones.
    num_outputs: output times in one step.
    compute_dtype: of activations and of the weights that meet them.
    """

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        in_channels: int,
        out_channels: int,
        states: tuple[int, int],
        num_outputs: int = 1,
        patch: int,
        sampling: int,
        width: int,
        depth: int,
        heads: int,
        window: tuple[int, int],
        mlp_ratio: int = 4,
        norm_groups: int = 32,
        bias_table: bool = True,
        boundary: Boundary = "globe",
        padded_shape: tuple[int, int] | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        padded = padded_shape or smallest_padded_shape(grid, patch, sampling, window, boundary)
        check_padded_shape(padded, grid, patch, sampling, window, boundary)
        self.grid, self.padded_shape, self.boundary = grid, padded, boundary
        self.states, self.num_outputs, self.compute_dtype = states, num_outputs, compute_dtype
        # globe: the field knows only its own patches; slots beyond it exist inside windows only.
        field = padded if boundary == "paper" else (-(-grid[0] // patch) * patch, grid[1])
        patches = field[0] // patch, field[1] // patch
        self.windows = WindowGrid(
            tokens=(-(-patches[0] // sampling), -(-patches[1] // sampling)),
            padded=(padded[0] // (patch * sampling), padded[1] // (patch * sampling)),
            window=window,
            boundary=boundary,
        )
        self.scales = {1: field, patch: patches, patch * sampling: self.windows.tokens}
        """(lat, lon) points of what the modules hold, by how many field points one spans."""
        self.pad = FieldPad(boundary, grid, field)
        self.embed = PatchEmbedding(in_channels, width, patch)
        self.down = (
            Down(width, sampling, norm_groups, boundary, patches) if sampling > 1 else nn.Identity()
        )
        self.enter = Enter(self.windows)
        self.blocks = nn.ModuleList(
            SwinBlock(width, heads, mlp_ratio, self.windows, bias_table, shifted=bool(i % 2))
            for i in range(depth)
        )
        self.mask = WindowMask(self.windows, shifted=False)
        self.shifted_mask = WindowMask(self.windows, shifted=True)
        self.leave = Leave(self.windows)
        self.up = (
            Up(width, sampling, norm_groups, boundary, patches) if sampling > 1 else nn.Identity()
        )
        self.recover = PatchRecovery(width, out_channels, patch)

    @property
    def num_tokens(self) -> int:
        """Token slots of one sample in the Swin blocks, those beyond the field included."""
        return self.windows.padded[0] * self.windows.padded[1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(self.pad(x).to(self.compute_dtype))
        y = self.enter(self.down(y))
        for number, block in enumerate(self.blocks):
            y = block(y, self.shifted_mask if number % 2 else self.mask)
        y = self.up(self.leave(y))
        change = self.pad.crop(self.recover(y)).to(x.dtype)
        first, last = self.states
        if first == last:
            return change
        state = x[:, first:last]
        change = change.unflatten(1, (self.num_outputs, -1))
        known, diagnostic = change[:, :, : last - first], change[:, :, last - first :]
        return torch.cat([known + state.unsqueeze(1), diagnostic], dim=2).flatten(1, 2)


def smallest_padded_shape(
    grid: tuple[int, int], patch: int, sampling: int, window: tuple[int, int], boundary: Boundary
) -> tuple[int, int]:
    """The smallest (lat, lon) of whole windows that holds the grid; a circle is never padded."""
    units = tuple(patch * sampling * side for side in window)
    rows = -(-grid[0] // units[0]) * units[0]
    return rows, grid[1] if boundary == "globe" else -(-grid[1] // units[1]) * units[1]


def check_padded_shape(
    padded: tuple[int, int],
    grid: tuple[int, int],
    patch: int,
    sampling: int,
    window: tuple[int, int],
    boundary: Boundary,
) -> None:
    """ValueError, with the ways out, for a padded shape that the model cannot have."""
    fine = patch * sampling
    if boundary == "globe":
        if grid[1] % fine:
            raise ValueError(
                f"lon={grid[1]} is not a multiple of patch {patch} x stride {sampling}: on a globe"
                " the circle cannot be padded. Patches that fit:"
                f" {_list(p for p in range(1, 33) if grid[1] % (p * sampling) == 0)};"
                " or model.boundary=paper"
            )
        columns = grid[1] // fine
        if columns % window[1]:
            raise ValueError(
                f"lon={grid[1]} makes {columns} token columns (patch {patch} x stride {sampling}),"
                f" which windows {window[1]} wide do not divide: on a globe the circle cannot be"
                " padded. Window widths that do:"
                f" {_list(w for w in range(2, 129) if columns % w == 0)}"
                f" (model.window={window[0]},WIDTH); or model.boundary=paper"
            )
        if padded[1] != grid[1]:
            raise ValueError(
                f"model.padded_shape={padded}: a globe's width stays {grid[1]}; pad rows only"
            )
    for size, points, side, dim in zip(padded, grid, window, ("lat", "lon"), strict=True):
        if size < points or size % (fine * side):
            raise ValueError(
                f"model.padded_shape: {dim}={size} must be at least {points} and a multiple of"
                f" patch {patch} x stride {sampling} x window {side} = {fine * side}; the smallest"
                f" is {-(-points // (fine * side)) * fine * side}"
            )


def _list(numbers: object) -> str:
    return ", ".join(map(str, numbers)) or "none"  # type: ignore[call-overload]
