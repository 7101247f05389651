"""Norms whose statistics are taken over the field."""

import torch.nn.functional as F
from torch import Tensor

from graticule.model.layers import Norm


class FieldGroupNorm(Norm):
    """Group norm over all tokens of (batch, feature, lat, lon), then SiLU.

    The statistics are each sample's own, over the features of a group and every token of the
    field: with the `globe` boundary no padding token exists here, with `paper` they count.
    """

    def __init__(self, groups: int, num_features: int) -> None:
        super().__init__(num_features)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weights(x.dtype)
        return F.silu(F.group_norm(x, self.groups, weight, bias, self.eps))
