"""The sampling modules between the patch grid and the Transformer's coarser grid.

TERRA, section IV.B: a strided (or transposed) convolution, then two Conv-GroupNorm-SiLU under
one outer skip: out = b(y) + y.
"""

from torch import Tensor, nn

from graticule.model.layers import Conv, TransposedConv
from graticule.model.norms import FieldGroupNorm
from graticule.model.pad import Boundary, ConvPad


class ConvNormAct(nn.Module):
    """Conv 3x3, group norm over the field, SiLU."""

    def __init__(self, width: int, groups: int, boundary: Boundary) -> None:
        super().__init__()
        self.pad = ConvPad(boundary, kernel=3)
        self.conv = Conv(width, width, kernel=3)
        self.norm = FieldGroupNorm(groups, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.pad(x)))


class Down(nn.Module):
    """(batch, width, lat, lon) -> (batch, width, ceil(lat / stride), ceil(lon / stride))."""

    def __init__(self, width: int, stride: int, groups: int, boundary: Boundary) -> None:
        super().__init__()
        self.pad = ConvPad(boundary, kernel=3, stride=stride)
        self.conv = Conv(width, width, kernel=3, stride=stride)
        self.body = nn.Sequential(
            ConvNormAct(width, groups, boundary), ConvNormAct(width, groups, boundary)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.pad(x))
        return self.body(y) + y


class Up(nn.Module):
    """Back to `shape` (lat, lon) tokens: a transposed convolution whose surplus row is cropped."""

    def __init__(
        self, width: int, stride: int, groups: int, boundary: Boundary, shape: tuple[int, int]
    ) -> None:
        super().__init__()
        self.shape = shape
        self.conv = TransposedConv(width, width, stride=stride)
        self.body = nn.Sequential(
            ConvNormAct(width, groups, boundary), ConvNormAct(width, groups, boundary)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)[..., : self.shape[0], : self.shape[1]]
        return self.body(y) + y
