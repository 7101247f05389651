"""The members of an ensemble at one initial time and lead, read one at a time."""

from collections.abc import Iterator, Sequence

import numpy as np

from graticule.evaluate.ensemble_sums import EnsembleSums, FieldSums
from graticule.evaluate.stretches import Power, Stretches
from graticule.evaluate.sums import activity_sum
from graticule.forecast.reader import Forecast

KEPT_BYTES = 2**30
"""Members that fit are read once and kept. Others are read again for each tile of their rows, as
what compares all members with each other needs all of them at a cell."""


class Members:
    """Of one pair. `streamed` first, then `add_to`."""

    def __init__(
        self, forecast: Forecast, init: int, lead: int, *, kept_bytes: int = KEPT_BYTES
    ) -> None:
        assert forecast.num_members is not None
        self._forecast, self._init, self._lead = forecast, init, lead
        self._num, self._bytes = forecast.num_members, kept_bytes
        shape = (self._num, len(forecast.channels), *forecast.grid.shape)
        fits = 4 * np.prod(shape, dtype=np.int64) <= kept_bytes
        self._kept = np.empty(shape, np.float32) if fits else None

    def streamed(
        self,
        present: np.ndarray,
        climatology: np.ndarray,
        cell_area: np.ndarray,
        stretches: Stretches,
        used: Sequence[np.ndarray],
    ) -> tuple[np.ndarray, Power, np.ndarray]:
        """The mean field (channel, lat, lon) in float64, and how strong the members are on average:
        their zonal power, and (channel,) the sums of their activity as `pair_sums` has them.

        A mean over members is smoother than any of them, so its own power says little.
        present: (channel, lat, lon) bool, the cells that count. used: as in `Stretches.power`.
        ValueError where a member has no finite value in one of these cells.
        """
        names = self._forecast.channels.names
        total = np.zeros((len(names), *self._forecast.grid.shape))
        activity = np.zeros(len(names))
        powers = []
        for member in range(self._num):
            fields = self._forecast.read(self._init, self._lead, member)
            if self._kept is not None:
                self._kept[member] = fields
            total += fields
            for channel, here in enumerate(present):
                values = fields[channel][here].astype(np.float64)
                lost = int((~np.isfinite(values)).sum())
                if lost:
                    raise ValueError(
                        f"member {member} of the forecast of {names[channel]} at init_time"
                        f" {self._forecast.init_times[self._init]}, lead {self._lead + 1} has no"
                        f" finite value in {lost} of {values.size} sea cells where the truth has"
                        " one; a forecast covers all of them: forecast again, or score a region"
                        " that it covers"
                    )
                anomaly = values - climatology[channel][here]
                activity[channel] += activity_sum(cell_area[here], anomaly) / self._num
            powers.append(stretches.power(fields, used))
        first = powers[0]
        power = Power(
            used=first.used,
            count=first.count,
            area=first.area,
            sums=sum((each.sums for each in powers[1:]), first.sums) / self._num,
        )
        return total / self._num, power, activity

    def add_to(
        self,
        sums: EnsembleSums,
        truth: np.ndarray,
        present: np.ndarray,
        cell_area: np.ndarray,
        *,
        init_seconds: int,
        std: np.ndarray | None,
    ) -> None:
        """Add this pair to the sums of an ensemble. truth, present: (channel, lat, lon)."""
        width = truth.shape[2]
        field = FieldSums.zero(len(sums.names), self._num, sums.thresholds)
        for channels, rows, members in self._tiles():
            for i, channel in enumerate(channels):
                field.add(
                    channel, members[:, i], truth[channel, rows], present[channel, rows],
                    cell_area[rows], key=(init_seconds, self._lead), rows=rows, width=width,
                    point=sums.point,
                )  # fmt: skip
        sums.add_pair(self._init, self._lead, field, std)

    def _tiles(self) -> Iterator[tuple[Sequence[int], slice, np.ndarray]]:
        """(channels, rows, (member, channel, row, lon)), as many rows as are kept at a time."""
        height, width = self._forecast.grid.shape
        if self._kept is not None:
            yield range(self._kept.shape[1]), slice(0, height), self._kept
            return
        for channels in self._forecast.variables:
            step = max(1, self._bytes // (4 * self._num * len(channels) * width))
            for start in range(0, height, step):
                rows = slice(start, min(start + step, height))
                tile = np.empty((self._num, len(channels), rows.stop - start, width), np.float32)
                for member in range(self._num):
                    whole = self._forecast.read(self._init, self._lead, member, channels=channels)
                    tile[member] = whole[:, rows]
                yield channels, rows, tile
