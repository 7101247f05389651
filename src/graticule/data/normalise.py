"""From stored numbers to what the model sees, and back, on the device that computes."""

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from graticule.data.buffers import Pool
from graticule.data.shardfile import LAND
from graticule.data.statistics import Statistics
from graticule.data.store import Store

_BLOCK = 65536
"""Values that one thread carries through all operations, 256 KiB, before it goes on: they stay
in its cache. 32768 and 131072 were slower."""


class Normaliser(nn.Module):
    """Decode, normalise and mask some channels of a store.

    normalised = (value - mean) / std; land, and whatever has no value, is 0. A channel without
    spread is 0 everywhere and comes back as its constant. rows, columns: the part of the grid.
    dtype: of normalised values, which are computed in float32.
    """

    mean: Tensor
    std: Tensor
    wet: Tensor
    _centre: Tensor
    _gain: Tensor
    _rest: Tensor
    _gains: Tensor
    _rests: Tensor
    _seas: Tensor
    _land: Tensor
    _constant: Tensor

    def __init__(
        self,
        store: Store,
        channels: Sequence[int],
        statistics: Statistics,
        *,
        rows: slice = slice(None),
        columns: slice = slice(None),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dtype = dtype
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
        # Land is the lowest code, so that what is not above this value is land: a ninth of the time
        # of a mask. Not so where the mean is so far outside the packing that codes round together.
        land = np.where(np.abs(centre) < 2.0**20, (LAND + 0.5 - centre) * scale / std, np.nan)
        self.register_buffer("_land", column(land), persistent=False)
        # A constant is exactly zero, whatever its packing rounds it to.
        constant = torch.from_numpy(statistics.constant(names))[:, None, None]
        self.register_buffer("_constant", constant, persistent=False)
        wet = torch.from_numpy(store.wet_part(channels, rows, columns))
        self.register_buffer("wet", wet, persistent=False)
        self.register_buffer("mean", column(mean, torch.float64), persistent=False)
        self.register_buffer("std", column(std, torch.float64), persistent=False)
        self._pool = Pool()

    def forward(self, stored: Tensor, channels: slice = slice(None)) -> Tensor:
        """(..., channel, lat, lon) stored numbers to normalised ones, without NaN.

        channels: which of this normaliser's are stored there.
        On a CPU one pass over the memory; the memory of a float32 result is used again once nobody
        holds the result. Elsewhere a channel at a time: besides the result nothing is whole.
        """
        numbers = range(len(self._centre))[channels]
        if stored.device.type == "cpu":
            return self._in_blocks(stored, numbers).to(self.dtype)
        return self._by_channel(stored, numbers)

    def _by_channel(self, stored: Tensor, numbers: Sequence[int]) -> Tensor:
        """The same numbers, a channel at a time."""
        out = torch.empty(stored.shape, dtype=self.dtype, device=stored.device)
        for place, channel in enumerate(numbers):
            here = stored[..., place, :, :]
            present = here != LAND if self.packed else torch.isfinite(here)
            present &= self.wet[channel] & ~self._constant[channel]
            values = here.float() - self._centre[channel]
            values = torch.addcmul(self._rest[channel], values, self._gain[channel])
            out[..., place, :, :] = torch.where(present, values, 0.0)
        return out

    def _in_blocks(self, stored: Tensor, numbers: range) -> Tensor:
        """The same numbers, a block at a time, each operation in the place of the one before."""
        (values,) = self._pool.take([stored.shape], torch.float32)
        samples, cells = math.prod(stored.shape[:-3]), math.prod(stored.shape[-2:])
        planes = stored.reshape(samples, len(numbers), cells)
        out = values.view(planes.shape)
        block = _BLOCK * torch.get_num_threads()
        if 2 * cells <= block:
            self._together(planes, out, numbers.start, block // max(cells, 1))
            return values
        for at, channel in enumerate(numbers):
            if self._constant[channel]:
                out[:, at] = 0.0
                continue
            # One number each, as a tensor: its broadcast is twice as fast as a Python number.
            centre, rest = self._centre[channel, 0], self._rest[channel, 0]
            gain, land = self._gain[channel].item(), self._land[channel].item()
            sea = self._sea[channel]
            for sample in range(samples):
                for first in range(0, cells, block):
                    part = slice(first, first + block)
                    codes, place = planes[sample, at, part], out[sample, at, part]
                    if self.packed:
                        codes = place.copy_(codes) if math.isfinite(land) else codes
                    torch.sub(codes, centre, out=place)
                    # rest + place x gain in one rounding, as addcmul.
                    torch.add(rest, place, alpha=gain, out=place)
                    if not self.packed:
                        place.nan_to_num_(0.0, 0.0, 0.0)
                    elif math.isfinite(land):
                        torch.threshold_(place, land, 0.0)
                    else:
                        place.masked_fill_(codes == LAND, 0.0)
                    if sea is not None:
                        place.view(torch.int32).bitwise_and_(sea[part])
        return values

    def _together(self, planes: Tensor, out: Tensor, start: int, num_planes: int) -> None:
        """The same numbers, so many planes a block: a small plane by itself costs more for calling
        an operation than for what it does.

        planes, out: (sample, channel, cell), of the channels from `start` on.
        """
        samples, channels, _ = planes.shape
        wide = min(num_planes, channels) or 1
        deep = max(num_planes // wide, 1)
        gains, rests, seas = self._by_cell
        for first in range(0, channels, wide):
            part = slice(first, min(first + wide, channels))
            of = slice(start + part.start, start + part.stop)
            for top in range(0, samples, deep):
                numbers, place = planes[top : top + deep, part], out[top : top + deep, part]
                torch.sub(numbers, self._centre[of, :, 0], out=place)
                torch.addcmul(rests[of], place, gains[of], out=place)
                bits = place.view(torch.int32)
                if self.packed:
                    bits.bitwise_and_((numbers != LAND).to(torch.int32).neg_())
                else:
                    place.nan_to_num_(0.0, 0.0, 0.0)
                bits.bitwise_and_(seas[of])

    @property
    def _by_cell(self) -> tuple[Tensor, Tensor, Tensor]:
        """(channel, cell) gain and rest, and int32 with all bits set at sea, none where a channel
        is constant. Of two columns to broadcast addcmul takes 2.5 times as long, and a mask of
        bools takes 15 times as long as bits."""
        if "_gains" not in self._buffers:
            there = self.wet.flatten(1) & ~self._constant[..., 0]
            gain, rest = (
                c[..., 0].expand(there.shape).contiguous() for c in (self._gain, self._rest)
            )
            self.register_buffer("_gains", gain, persistent=False)
            self.register_buffer("_rests", rest, persistent=False)
            self.register_buffer("_seas", -there.to(torch.int32), persistent=False)
        return self._gains, self._rests, self._seas

    @cached_property
    def _sea(self) -> list[Tensor | None]:
        """(cell,) int32 of each channel, all bits set where it is wet, or None where it is wet
        everywhere. Channels of one level share theirs: a tenth of the time of a mask of bools."""
        known: dict[bytes, Tensor] = {}
        masks: list[Tensor | None] = []
        for wet in self.wet.flatten(1):
            key = hashlib.sha256(wet.numpy().data).digest()
            if key not in known:
                known[key] = -wet.to(torch.int32)
            masks.append(None if bool(wet.all()) else known[key])
        return masks

    def denormalise(self, normalised: Tensor) -> Tensor:
        """Back to units, float32 (..., channel, lat, lon); land is NaN.

        A channel without spread is its constant, whatever a network says of it.
        """
        values = normalised.double() * self.std.masked_fill(self._constant, 0.0) + self.mean
        return torch.where(self.wet, values, torch.nan).float()


def normalised_statics(
    store: Store,
    names: Sequence[str],
    statistics: Statistics,
    *,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Tensor:
    """(static, lat, lon) float32 of a part of the grid; cells without a value are 0."""
    if not names:
        here, across = store.extent(rows, columns)
        return torch.empty(0, len(here), len(across))
    fields = store.read_statics(names)[:, rows, columns]
    mean, std = statistics.aligned(names)
    values = (fields.astype(np.float64) - mean[:, None, None]) / std[:, None, None]
    return torch.from_numpy(np.nan_to_num(values, nan=0.0).astype(np.float32))
