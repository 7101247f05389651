"""Norms whose statistics are taken over the field."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.model.layers import Layer


class FieldGroupNorm(Layer):
    """Group norm over all tokens of (batch, feature, lat, lon), then SiLU.

    The statistics are each sample's own, over the features of a group and every token of the
    field: with the `globe` boundary no padding token exists here, with `paper` they count.
    """

    def __init__(self, groups: int, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))

    def reset(self, generator: torch.Generator) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weights(x.dtype)
        return F.silu(F.group_norm(x, self.groups, weight, bias, self.eps))
