"""The sampling modules between the patch grid and the Transformer's coarser grid.

TERRA, section IV.B: a strided (or transposed) convolution, then two Conv-GroupNorm-SiLU under
one outer skip: out = b(y) + y.
"""

from torch import Tensor, nn

from graticule.model.layers import Conv, TransposedConv
from graticule.model.norms import FieldGroupNorm
from graticule.model.pad import Boundary, ConvPad, Crop


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
        y = self.conv(self.pad(x))
        return self.body(y) + y


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
        y = self.crop(self.conv(x))
        return self.body(y) + y
