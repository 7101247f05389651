"""The sampling modules between the patch grid and the Transformer's coarser grid.

TERRA, section IV.B: a strided (or transposed) convolution, then two Conv-GroupNorm-SiLU under
one outer skip: out = b(y) + y.
"""

from torch import Tensor, nn

from graticule.model.layers import Conv, TransposedConv
from graticule.model.norms import FieldGroupNorm
from graticule.model.pad import Boundary, ConvPad, Crop
from graticule.model.units import Unit


class ConvNormAct(nn.Module):
    """Conv 3x3, group norm over the field, SiLU."""

    def __init__(
        self, width: int, groups: int, boundary: Boundary, points: tuple[int, int]
    ) -> None:
        super().__init__()
        self.pad = ConvPad(boundary, points, kernel=3)
        self.conv = Conv(width, width, kernel=3)
        self.norm = FieldGroupNorm(groups, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.pad(x)))


class Down(nn.Module):
    """(batch, width, lat, lon) -> (batch, width, ceil(lat / stride), ceil(lon / stride)).

    points: (lat, lon) of the field that comes in.
    """

    def __init__(
        self, width: int, stride: int, groups: int, boundary: Boundary, points: tuple[int, int]
    ) -> None:
        super().__init__()
        self.pad = ConvPad(boundary, points, kernel=3, stride=stride)
        self.conv = Conv(width, width, kernel=3, stride=stride)
        coarse = -(-points[0] // stride), -(-points[1] // stride)
        self.body = nn.Sequential(
            ConvNormAct(width, groups, boundary, coarse),
            ConvNormAct(width, groups, boundary, coarse),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.resample(x)
        return self.body(y) + y

    def resample(self, x: Tensor) -> Tensor:
        """The strided convolution alone."""
        return self.conv(self.pad(x))


class Up(nn.Module):
    """Back to `points` (lat, lon): a transposed convolution whose surplus row is cropped."""

    def __init__(
        self, width: int, stride: int, groups: int, boundary: Boundary, points: tuple[int, int]
    ) -> None:
        super().__init__()
        self.conv = TransposedConv(width, width, stride=stride)
        self.crop = Crop(points)
        self.body = nn.Sequential(
            ConvNormAct(width, groups, boundary, points),
            ConvNormAct(width, groups, boundary, points),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.resample(x)
        return self.body(y) + y

    def resample(self, x: Tensor) -> Tensor:
        """The transposed convolution alone."""
        return self.crop(self.conv(x))


def body_units(name: str, module: Down | Up) -> list[Unit]:
    """body(y) + y in two units; the state between them is (z, y)."""
    first, second = module.body
    return [
        Unit(f"{name}.0", lambda y: (first(y), y)),
        Unit(f"{name}.1", lambda z, y: (second(z) + y,)),
    ]
