"""From stored numbers to what the model sees, and back, on the device that computes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from graticule.data.statistics import Statistics
from graticule.data.store import LAND, Store


class Normaliser(nn.Module):
    """Decode, normalise and mask some channels of a store.

    normalised = (value - mean) / std; land, and whatever has no value, is 0. A channel without
    spread is 0 everywhere and comes back as its constant.
    """

    mean: Tensor
    std: Tensor
    wet: Tensor
    _centre: Tensor
    _gain: Tensor
    _rest: Tensor
    _live: Tensor

    def __init__(self, store: Store, channels: Sequence[int], statistics: Statistics) -> None:
        super().__init__()
        names = [store.channels.names[i] for i in channels]
        mean, std = statistics.aligned(names)

        def column(values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.from_numpy(np.asarray(values, np.float64)).to(dtype)[:, None, None]

        self.packed = store.packing.scale is not None
        packing = store.packing.take(channels)
        scale = np.ones(len(names)) if packing.scale is None else packing.scale
        offset = np.zeros(len(names)) if packing.offset is None else packing.offset
        # Float64 until here. The mean as a stored number comes off before anything is multiplied:
        # that subtraction is exact near the mean, where 101325 x gain + shift would lose all but
        # two digits of a spread of 1. `rest` is what rounding the mean to float32 left.
        centre = ((mean - offset) / scale).astype(np.float32).astype(np.float64)
        self.register_buffer("_centre", column(centre), persistent=False)
        self.register_buffer("_gain", column(scale / std), persistent=False)
        rest = (centre * scale + offset - mean) / std
        self.register_buffer("_rest", column(rest), persistent=False)
        # A constant is exactly zero, whatever its packing rounds it to.
        constant = torch.from_numpy(statistics.constant(names))[:, None, None]
        wet = torch.from_numpy(store.wet[list(channels)])
        self.register_buffer("wet", wet, persistent=False)
        self.register_buffer("_live", wet & ~constant, persistent=False)
        self.register_buffer("mean", column(mean, torch.float64), persistent=False)
        self.register_buffer("std", column(std, torch.float64), persistent=False)

    def forward(self, stored: Tensor) -> Tensor:
        """(..., channel, lat, lon) stored numbers to float32 normalised ones, without NaN."""
        present = stored != LAND if self.packed else torch.isfinite(stored)
        values = torch.addcmul(self._rest, stored.float() - self._centre, self._gain)
        return torch.where(present & self._live, values, 0.0)

    def denormalise(self, normalised: Tensor) -> Tensor:
        """Back to units, float32 (..., channel, lat, lon); land is NaN."""
        values = normalised.double() * self.std + self.mean
        return torch.where(self.wet, values, torch.nan).float()


def normalised_statics(store: Store, names: Sequence[str], statistics: Statistics) -> Tensor:
    """(static, lat, lon) float32; cells without a value are 0."""
    if not names:
        return torch.empty(0, *store.grid.shape)
    fields = store.read_statics(names)
    mean, std = statistics.aligned(names)
    values = (fields.astype(np.float64) - mean[:, None, None]) / std[:, None, None]
    return torch.from_numpy(np.nan_to_num(values, nan=0.0).astype(np.float32))
