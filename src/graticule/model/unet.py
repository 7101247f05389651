"""The Samudra model: a U-Net of ConvNeXt-like blocks with dense dilated convolutions.

Samudra (Dheeshjith et al. 2025, GRL 52, e2024GL114318) and Samudra 2, block by block:

    field -> + learned positions
          -> L x (block, kept as a skip -> mean of 2 x 2) -> block
          -> L x (bilinear to twice the points -> + the skip -> block)
          -> 3 x 3 convolution: absolute states, not changes

Longitude is periodic and the poles are walls: before each 3 x 3 convolution a field grows by the
dilation, with its other end in longitude and zeros beyond the poles. Weights take numbers of
`compute_dtype`, except those of the last convolution, which computes in float32 at least.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from graticule.model.family import Model
from graticule.model.layers import Conv, Layer
from graticule.model.norm_gelu import BatchNormGelu, GroupNormGelu, InstanceNormGelu, NormGelu
from graticule.model.pad import Boundary, ConvPad, EdgePad, FieldPad
from graticule.model.pooling import Double, Fill, Pool, halved, seam
from graticule.model.units import State, Unit

NormKind = Literal["batch", "instance", "group"]
_BOUNDARY: Boundary = "globe"


class Block(nn.Module):
    """Two dilated 3 x 3 convolutions, each with norm and GELU, and a 1 x 1; plus a skip.

    (batch, num_in, lat, lon) -> (batch, num_out, lat, lon). points: (lat, lon). hidden: features
    inside. norm, groups, most: of the norms.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        hidden: int,
        points: tuple[int, int],
        dilation: int,
        norm: NormKind,
        groups: int,
        most: float,
    ) -> None:
        super().__init__()

        def normed() -> NormGelu:
            if norm == "group":
                return GroupNormGelu(groups, hidden, most)
            return (BatchNormGelu if norm == "batch" else InstanceNormGelu)(hidden, most)

        self.points, self.dilation = points, dilation
        self.pad1 = ConvPad(_BOUNDARY, points, kernel=3, dilation=dilation)
        self.conv1 = Conv(num_in, hidden, kernel=3, dilation=dilation)
        self.norm1 = normed()
        self.pad2 = ConvPad(_BOUNDARY, points, kernel=3, dilation=dilation)
        self.conv2 = Conv(hidden, hidden, kernel=3, dilation=dilation)
        self.norm2 = normed()
        self.mix = Conv(hidden, num_out, kernel=1)
        self.skip = nn.Identity() if num_in == num_out else Conv(num_in, num_out, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(self.pad1(x)))
        y = self.norm2(self.conv2(self.pad2(y)))
        return self.mix(y) + self.skip(x)

    def extra_repr(self) -> str:
        return f"{self.points}, dilation={self.dilation}"


class DownStage(nn.Module):
    """A block, and the means of what it gives: (what goes on, what is kept as a skip)."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        self.pool = Pool(block.points)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(x)
        return self.pool(y), y


class UpStage(nn.Module):
    """Twice the points, plus the skip, through a block. coarse: (lat, lon) points that come in.
    boundary: of the up-sampling."""

    def __init__(self, block: Block, coarse: tuple[int, int], boundary: Boundary) -> None:
        super().__init__()
        self.pad = EdgePad(boundary, coarse)
        self.twice = Double()
        self.fill = Fill(block.points)
        self.block = block

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.block(self.fill(self.twice(self.pad(x))) + skip)


class Positions(Layer):
    """Learned numbers of each point, behind the channels of a field."""

    def __init__(self, num_features: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, *grid))

    def reset(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.weight, std=1e-5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.here().to(x.dtype).expand(x.shape[0], -1, -1, -1)], dim=1)

    def here(self) -> Tensor:
        """(feature, lat, lon) of the points that are here."""
        return self.value("weight", self.weight.dtype)


class LastConv(nn.Module):
    """A 3 x 3 convolution that computes in float32 at least."""

    whole_weights = True
    """Whether weights that are shared out must travel in the type that they are kept in."""

    def __init__(self, num_in: int, num_out: int, points: tuple[int, int]) -> None:
        super().__init__()
        self.pad = ConvPad(_BOUNDARY, points, kernel=3)
        self.conv = Conv(num_in, num_out, kernel=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pad(x).to(torch.promote_types(x.dtype, torch.float32)))


class UNet(Model):
    """See `Model`. in_channels: states (oldest first), then whatever else is given.

    out_channels: per output time, the state's channels first, then diagnostic ones.
    widths: features behind each block on the way down; as many levels. factor: a block's hidden
    features, in those that it is given. dilations: of the blocks, in the order in which they run.
    most: what GELU's results are limited to; 0: nothing.
    """

    adds = False

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        in_channels: int,
        out_channels: int,
        states: tuple[int, int],
        num_outputs: int = 1,
        widths: tuple[int, ...],
        factor: int,
        dilations: tuple[int, ...],
        norm: NormKind = "batch",
        norm_groups: int = 1,
        most: float = 10.0,
        upsampling: Literal["circular", "plain"] = "circular",
        position_features: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        levels = len(widths)
        assert len(dilations) == 2 * levels + 1, (widths, dilations)
        _require_room(grid, dilations)
        self.grid, self.states, self.num_outputs = grid, states, num_outputs
        self.compute_dtype = compute_dtype
        self.scales = {2**level: halved(grid, level) for level in range(levels + 1)}
        self.seam = seam(grid[1], levels)
        """What a turned input does not do, in a sentence; empty where the output turns with it."""
        self.pad = FieldPad(_BOUNDARY, grid, grid)
        self.positions = Positions(position_features, grid) if position_features else nn.Identity()

        def block(number: int, level: int, num_in: int, num_out: int) -> Block:
            return Block(
                num_in, num_out, hidden=factor * num_in, points=halved(grid, level),
                dilation=dilations[number], norm=norm, groups=norm_groups, most=most,
            )  # fmt: skip

        given = in_channels + position_features, *widths
        self.down = nn.ModuleList(
            DownStage(block(level, level, given[level], widths[level])) for level in range(levels)
        )
        self.bottom = block(levels, levels, widths[-1], widths[-1])
        # On the way up each block gives what the skip of the next level has; the last keeps its.
        after = widths[0], *widths
        self.up = nn.ModuleList(
            UpStage(
                block(2 * levels - level, level, widths[level], after[level]),
                halved(grid, level + 1),
                "globe" if upsampling == "circular" else "paper",
            )
            for level in reversed(range(levels))
        )
        self.last = LastConv(widths[0], out_channels, grid)

    @property
    def blocks(self) -> list[tuple[str, Block]]:
        """By name, in the order in which they run."""
        down = [(f"down.{level}", stage.block) for level, stage in enumerate(self.down)]
        up = [(f"up.{number}", stage.block) for number, stage in enumerate(self.up)]
        return [*down, ("bottom", self.bottom), *up]  # type: ignore[list-item]

    def units(self) -> list[Unit]:
        """A block each, with what comes between it and the one before; then the last convolution.

        A state is the running tensor and the skips that wait, the finest first.
        """
        down = [Unit(f"down.{n}", partial(self._down, n)) for n in range(len(self.down))]
        up = [Unit(f"up.{n}", partial(self._up, n)) for n in range(len(self.up))]
        last = Unit("last", lambda x: (self.last(x),))
        return [*down, Unit("bottom", self._bottom), *up, last]

    def _down(self, number: int, x: Tensor, *skips: Tensor) -> State:
        if number == 0:
            x = self.positions(self.pad(x).to(self.compute_dtype))
        x, skip = self.down[number](x)
        return x, *skips, skip

    def _bottom(self, x: Tensor, *skips: Tensor) -> State:
        return self.bottom(x), *skips

    def _up(self, number: int, x: Tensor, *skips: Tensor) -> State:
        *waiting, skip = skips
        return self.up[number](x, skip), *waiting

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """The network says states, not changes."""
        return change.to(x.dtype)


def _require_room(grid: tuple[int, int], dilations: tuple[int, ...]) -> None:
    """ValueError for a grid that leaves nothing at some level, or a circle that a convolution
    would go round more than once."""
    levels = len(dilations) // 2
    rows, columns = grid
    if rows < 2**levels:
        raise ValueError(
            f"lat={rows} has no row left after {levels} levels that halve it: take at least"
            f" {2**levels} rows, or fewer levels (model.widths, model.dilations)"
        )
    for number, dilation in enumerate(dilations):
        level = min(number, 2 * levels - number)
        if columns >> level < dilation:
            raise ValueError(
                f"lon={columns} has {columns >> level} columns at level {level + 1}, and dilation"
                f" {dilation} of block {number + 1} reads {dilation} beyond the circle's end: take"
                f" at least {dilation << level} columns, or smaller model.dilations"
            )
