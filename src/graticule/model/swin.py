"""The Wenhai model: a hierarchical Swin Transformer between sampling modules.

TERRA (arXiv 2608.15211), section II.A, Fig. 1 and Table V; layer by layer:

    field -> pad to whole patches -> patch embedding -> down module
          -> enter windows -> depth x Swin block -> leave windows
          -> up module -> patch recovery -> crop -> + the last known state
"""

from functools import partial

import torch
from torch import Tensor, nn

from graticule.model.family import Model
from graticule.model.layers import Layer, LayerNorm, Linear, Mlp, PatchEmbedding, PatchRecovery
from graticule.model.norms import FieldGroupNorm
from graticule.model.pad import Boundary, FieldPad
from graticule.model.resample import Down, Up, body_units
from graticule.model.tiles import tiled_body
from graticule.model.units import State, Tiled, Unit
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
        return self.value("bias_table", dtype)[self.index].permute(2, 0, 1)


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


class Swin(Model):
    """See `Model`. in_channels: states (oldest first), then whatever else is given.
    out_channels: per output time, the state's channels first, then diagnostic ones.
    compute_dtype: of activations and of the weights that meet them.
    stream_dtype: of the residual stream, from the first norm over the field to the recovery; None:
        compute_dtype.
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
        stream_dtype: torch.dtype | None = None,
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
        self.stream_dtype = stream_dtype or compute_dtype
        if self.stream_dtype != compute_dtype:
            self._widen(self.stream_dtype)

    def _widen(self, stream_dtype: torch.dtype) -> None:
        """Norms and softmax work in the stream's dtype; matrix products are fed in the other."""
        for layer in self.modules():
            if isinstance(layer, FieldGroupNorm):
                layer.input_dtype = stream_dtype
            elif isinstance(layer, Attend):
                layer.softmax_dtype = stream_dtype
            elif isinstance(layer, Layer) and not isinstance(layer, LayerNorm):
                layer.input_dtype = self.compute_dtype

    @property
    def num_tokens(self) -> int:
        """Token slots of one sample in the Swin blocks, those beyond the field included."""
        return self.windows.padded[0] * self.windows.padded[1]

    def units(self) -> list[Unit]:
        """From the padded field to what the network says, in the steps that memory plans name."""
        down = body_units("down", self.down) if isinstance(self.down, Down) else []
        up: list[Unit] = []
        if isinstance(module := self.up, Up):
            body = body_units("up", module)
            up = [Unit("up", lambda y: (module.resample(y),), self._tiled(module)), *body]
        blocks = [
            Unit(f"blocks.{number}", partial(self._block, number))
            for number in range(len(self.blocks))
        ]
        return [
            Unit("embed", self._embed), *down, *blocks, *up, Unit("recover", self._recover)
        ]  # fmt: skip

    def _tiled(self, module: Up) -> Tiled | None:
        if self.stream_dtype != self.compute_dtype:
            return None  # its norms keep wide copies, as published
        return Tiled(3, lambda tiles, y: (tiled_body(module, y, tiles),))

    def _embed(self, x: Tensor) -> State:
        y = self.embed(self.pad(x).to(self.compute_dtype))
        return (self.down.resample(y) if isinstance(self.down, Down) else y,)

    def _block(self, number: int, y: Tensor) -> State:
        y = self.enter(y) if number == 0 else y
        y = self.blocks[number](y, self.shifted_mask if number % 2 else self.mask)
        return (self.leave(y) if number == len(self.blocks) - 1 else y,)

    def _recover(self, y: Tensor) -> State:
        return (self.pad.crop(self.recover(y)),)

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """The newest state plus the network's change, which is of `compute_dtype`: with 16 bits,
        half of what a state takes, and the state can be had from it again, bit for bit."""
        return self.changed(x, change)


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
