"""The BEAST model: two scales of Swin blocks, all of whose norms hear a member's noise.

4D Parallelism Unlocks Exascale Bayesian Neural Networks (2026), section V and Table 2:

    field -> patch embedding -> depth x block -> stride-2 convolution to twice the width
          -> inner depth x block -> transposed convolution -> GELU, mixing of channels
          -> depth x block -> patch recovery -> + the last known state

Longitude is periodic and the poles are walls. A window that holds all rows (or all columns) is not
shifted along them: its tokens meet already, and what the shift would bring together is opposite
poles. With weights that are distributions (`bayes`) a forward pass computes one member.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.model.family import Model
from graticule.model.layers import Conv, Mlp, PatchEmbedding, PatchRecovery, TransposedConv
from graticule.model.nice import Nice, by_sample, conditioned
from graticule.model.pad import Boundary, ConvPad, Crop, FieldPad
from graticule.model.swin import WindowAttention
from graticule.model.units import State, Unit
from graticule.model.windows import Enter, Leave, Shift, Unshift, WindowGrid, WindowMask

_BOUNDARY: Boundary = "globe"
_MOST_MASKED = 2**13
"""Tokens of a window whose mask is kept: 256 MiB."""


class BeastBlock(nn.Module):
    """Attention, then MLP, each behind a conditioned norm and with its own skip, whose other side
    is (1 + gate) times what it would be.

    nice: keywords of `Nice`.
    """

    def __init__(
        self, width: int, heads: int, mlp_ratio: int, grid: WindowGrid, *, shifted: bool,
        groups: int, gated: bool, **nice: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.groups, self.eps, self.width = groups, 1e-5, width
        self.nice = Nice(2, width, parts=3 if gated else 2, **nice)
        self.attention = WindowAttention(width, heads, grid, bias_table=False)
        self.mlp = Mlp(width, mlp_ratio)
        shifted = shifted and any(grid.offset)
        self.shift = Shift(grid) if shifted else nn.Identity()
        self.unshift = Unshift(grid) if shifted else nn.Identity()

    def forward(self, x: Tensor, mask: WindowMask, num_samples: int) -> Tensor:
        first, second = (parts.unbind(1) for parts in self.nice(num_samples))
        y = conditioned(x, first[0], first[1], self.groups, self.eps)
        x = x + _gated(self.unshift(self.attention(self.shift(y), mask)), *first[2:])
        y = conditioned(x, second[0], second[1], self.groups, self.eps)
        return x + _gated(self.mlp(y), *second[2:])


def _gated(branch: Tensor, *gate: Tensor) -> Tensor:
    """branch: (sample * window, token, feature). gate: (sample, feature), or nothing."""
    if not gate:
        return branch
    (each,) = gate
    factor = (1 + each).to(branch.dtype)[:, None]
    return (branch.reshape(by_sample(branch, len(each))) * factor).view(branch.shape)


class Stage(nn.Module):
    """Blocks over the tokens of one scale. block: keywords of `BeastBlock`."""

    def __init__(self, depth: int, width: int, grid: WindowGrid, **block: Any) -> None:
        super().__init__()
        self.grid, self.width = grid, width
        self.enter = Enter(grid)
        self.blocks = nn.ModuleList(
            BeastBlock(width, grid=grid, shifted=bool(n % 2), **block) for n in range(depth)
        )
        self.mask = WindowMask(grid, shifted=False)
        # Where nothing is shifted the masks are one.
        self.shifted_mask = WindowMask(grid, shifted=any(grid.offset))
        self.leave = Leave(grid)

    def units(self, name: str) -> list[Unit]:
        return [Unit(f"{name}.{n}", partial(self._block, n)) for n in range(len(self.blocks))]

    def _block(self, number: int, y: Tensor) -> State:
        y = self.enter(y) if number == 0 else y
        mask = self.shifted_mask if number % 2 else self.mask
        y = self.blocks[number](y, mask, self.enter.num_samples(y))
        return (self.leave(y) if number == len(self.blocks) - 1 else y,)


class Beast(Model):
    """See `Model`; it is called with a draw. in_channels, out_channels: as of `Swin`.

    width: features of the outer stages; the inner one has twice as many. depth: blocks of each
    outer stage. window, inner_window: (lat, lon) tokens. noise_key: 64 bits. num_noise: values of
    noise; 0: norms with learned scales, and no draw is needed. nice_hidden: features of the norms'
    MLPs; 0: as many as the block has. gated: norms' MLPs give a factor of what is added, too.
    """

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        in_channels: int,
        out_channels: int,
        states: tuple[int, int],
        num_outputs: int = 1,
        patch: int = 2,
        width: int,
        depth: int,
        inner_depth: int,
        heads: int,
        inner_heads: int,
        window: tuple[int, int],
        inner_window: tuple[int, int],
        mlp_ratio: int = 1,
        norm_groups: int = 8,
        num_noise: int = 32,
        nice_hidden: int = 0,
        gated: bool = True,
        noise_key: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _require_columns(grid[1], patch, window, inner_window)
        self.grid, self.states, self.num_outputs = grid, states, num_outputs
        self.compute_dtype = compute_dtype
        patches = -(-grid[0] // patch), grid[1] // patch
        coarse = -(-patches[0] // 2), patches[1] // 2
        field = patches[0] * patch, grid[1]
        self.scales = {1: field, patch: patches, 2 * patch: coarse}
        self.pad = FieldPad(_BOUNDARY, grid, field)
        outer, inner = _windows(patches, window, ""), _windows(coarse, inner_window, "inner_")
        self.embed = PatchEmbedding(in_channels, width, patch)

        def stage(count: int, wide: int, heads: int, windows: WindowGrid) -> Stage:
            return Stage(
                count, wide, windows, heads=heads, mlp_ratio=mlp_ratio, groups=norm_groups,
                gated=gated, num_noise=num_noise, hidden=nice_hidden or wide, key=noise_key,
            )  # fmt: skip

        self.first = stage(depth, width, heads, outer)
        self.down_pad = ConvPad(_BOUNDARY, patches, kernel=2, stride=2)
        self.down = Conv(width, 2 * width, kernel=2, stride=2)
        self.inner = stage(inner_depth, 2 * width, inner_heads, inner)
        self.up = TransposedConv(2 * width, width, stride=2)
        self.crop = Crop(patches)
        self.mix = Conv(width, width, kernel=1)
        self.second = stage(depth, width, heads, outer)
        self.recover = PatchRecovery(width, out_channels, patch)

    @property
    def stages(self) -> dict[str, Stage]:
        """By name, in the order in which they run."""
        return {"first": self.first, "inner": self.inner, "second": self.second}

    @property
    def attention_flops(self) -> int:
        """Of one sample's forward pass: 4 x token slots x window tokens x width per block."""
        return sum(
            4 * s.grid.num_windows * s.grid.window_tokens**2 * s.width * len(s.blocks)
            for s in self.stages.values()
        )

    def units(self) -> list[Unit]:
        """From the field to what the network says, in the steps that memory plans name."""
        first, inner, second = (stage.units(name) for name, stage in self.stages.items())
        return [
            Unit("embed", self._embed), *first, Unit("down", self._down), *inner,
            Unit("up", self._up), *second, Unit("recover", self._recover),
        ]  # fmt: skip

    def _embed(self, x: Tensor) -> State:
        return (self.embed(self.pad(x).to(self.compute_dtype)),)

    def _down(self, y: Tensor) -> State:
        return (self.down(self.down_pad(y)),)

    def _up(self, y: Tensor) -> State:
        return (self.mix(F.gelu(self.crop(self.up(y)))),)

    def _recover(self, y: Tensor) -> State:
        return (self.pad.crop(self.recover(y)),)

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """Each output time is the newest state plus a change of its own."""
        return self.changed(x, change)


def _windows(tokens: tuple[int, int], window: tuple[int, int], prefix: str) -> WindowGrid:
    rows = -(-tokens[0] // window[0]) * window[0]
    whole = rows == window[0], tokens[1] == window[1]
    grid = WindowGrid(
        tokens=tokens,
        padded=(rows, tokens[1]),
        window=window,
        boundary=_BOUNDARY,
        shift=(0 if whole[0] else window[0] // 2, 0 if whole[1] else window[1] // 2),
    )
    masked = rows > tokens[0] or grid.offset[0] > 0
    if masked and grid.window_tokens > _MOST_MASKED:
        raise ValueError(
            f"model.{prefix}window={window}: {grid.window_tokens} tokens need a mask of"
            f" {4 * grid.window_tokens**2 / 2**30:.1f} GiB, since {tokens[0]} token rows are not"
            f" those of one window: take windows {tokens[0]} high, which span all latitudes and"
            f" need none, or at most {_MOST_MASKED} tokens"
        )
    return grid


def _require_columns(
    columns: int, patch: int, window: tuple[int, int], inner: tuple[int, int]
) -> None:
    """ValueError for a circle that patches and windows do not divide: it cannot be padded."""
    if columns % (2 * patch):
        raise ValueError(
            f"lon={columns} is not a multiple of {2 * patch}, the points of a token of the inner"
            f" stage (2 patches of {patch}): on a globe the circle cannot be padded. Take"
            f" {columns // (2 * patch) * 2 * patch} or {-(-columns // (2 * patch)) * 2 * patch}"
            " longitudes, or another model.patch"
        )
    for name, unit, wide in (("window", patch, window[1]), ("inner_window", 2 * patch, inner[1])):
        tokens = columns // unit
        if tokens % wide:
            fits = ", ".join(str(w) for w in range(1, tokens + 1) if tokens % w == 0)
            raise ValueError(
                f"lon={columns} makes {tokens} token columns of {unit} points, which windows"
                f" {wide} wide do not divide: on a globe the circle cannot be padded. Widths of"
                f" model.{name} that do: {fits}"
            )
