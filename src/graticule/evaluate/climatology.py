"""The climatology: what is usual at a date, from the training times alone."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, get_args

import cftime
import numpy as np

from graticule.data.store import Store

Grouping = Literal["all", "month", "month-day"]
_COARSER = {"month-day": "month", "month": "all"}
_MONTHS = "January February March April May June July August September October November December"


class Climatology:
    """Mean over the training times of a date's group, made when it is asked for.

    `all`: one group. `month`: 12. `month-day`: by month and day and not by day of the year, so
    that no day shifts after 29 February, which has its own group from leap years. Hours of a day
    share a group: the daily cycle is part of the anomaly.
    """

    def __init__(
        self,
        store: Store,
        times: Sequence[int] | np.ndarray,
        grouping: Grouping,
        *,
        channels: Sequence[int] | None = None,
        keep: int = 2,
        counted: np.ndarray | None = None,
    ) -> None:
        """times: store indices of the training times. channels: positions in the store (all).

        keep: groups held in memory; a group that was dropped is read again.
        counted: (channel, lat, lon) bool; with it, `low` and `high` are the least and the largest
        value, (channel,) each, that these cells had at the times read so far.
        """
        if grouping not in get_args(Grouping):
            raise ValueError(
                f"evaluate.climatology={grouping!r} is none of {', '.join(get_args(Grouping))}"
            )
        if len(times) == 0:
            raise ValueError("a climatology needs at least one training time: set data.train")
        self.grouping: Grouping = grouping
        self._store, self._keep = store, max(1, keep)
        self._channels = list(range(len(store.channels)) if channels is None else channels)
        self._counted = counted
        self.low = np.full(len(self._channels), np.inf)
        self.high = np.full(len(self._channels), -np.inf)
        self._members: dict[tuple[int, ...], list[int]] = {}
        for time in sorted({int(time) for time in times}):
            self._members.setdefault(self.group_of(store.times.date(time)), []).append(time)
        self._means: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def group_of(self, date: cftime.datetime) -> tuple[int, ...]:
        """(), (month,) or (month, day)."""
        parts = {"all": (), "month": (date.month,), "month-day": (date.month, date.day)}
        return parts[self.grouping]

    def times_of(self, date: cftime.datetime) -> list[int]:
        """Store indices of the training times in the date's group; ValueError if there is none."""
        group = self.group_of(date)
        if group not in self._members:
            month = _MONTHS.split()[group[0] - 1]
            name = month if len(group) == 1 else f"{group[1]} {month}"
            coarser = _COARSER[self.grouping]
            raise ValueError(
                f"no training time on {name}, so {date} has no climatology by"
                f" {self.grouping}; use a coarser one: evaluate.climatology={coarser}"
            )
        return self._members[group]

    def mean(self, date: cftime.datetime) -> np.ndarray:
        """(channel, lat, lon) float32, the group's mean of what there is; NaN where never a value.

        Summed in float64. The array is shared: do not write into it.
        """
        times, group = self.times_of(date), self.group_of(date)
        if group in self._means:
            self._means.move_to_end(group)
            return self._means[group]
        while len(self._means) >= self._keep:  # before the new one needs the memory
            self._means.popitem(last=False)
        shape = (len(self._channels), *self._store.grid.shape)
        total, count = np.zeros(shape), np.zeros(shape, np.int32)
        for time in times:
            fields = self._store.read(time, self._channels)
            present = np.isfinite(fields)
            np.add(total, fields, out=total, where=present)
            count += present
            if self._counted is not None:
                present &= self._counted
                low = fields.min((1, 2), where=present, initial=np.inf)
                high = fields.max((1, 2), where=present, initial=-np.inf)
                self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        empty = count == 0
        np.divide(total, count, out=total, where=~empty)
        total[empty] = np.nan
        self._means[group] = total.astype(np.float32)
        return self._means[group]
