"""Mean and spread of every channel over the training times, kept in the store with their dates.

Sums run in float64 on differences from each channel's first value, and are merged step by step
by Chan, Golub and LeVeque (1983): no cancellation for large means, exactly zero spread for
constants, and the same result however the data are chunked.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from graticule.config import fingerprint
from graticule.data.store import Store, write_json
from graticule.data.times import TimeAxis, date_of

logger = logging.getLogger(__name__)

FILE_NAME = "statistics.json"


@dataclass(frozen=True, eq=False)
class Statistics:
    """Unweighted mean and standard deviation over all wet cells and times that have a value.

    names: the store's channels, then its statics. mean, std, tendency_std, count: (name,)
    float64 (count int64), in each channel's units; std is 0 where there is no spread.
    tendency_std: of x[t + 1] - x[t] within unbroken runs of the times used; 0 for statics and
    where no two times follow one another. first, last, num_times: the dates used.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    tendency_std: np.ndarray
    count: np.ndarray
    first: str
    last: str
    num_times: int
    store_fingerprint: str
    times_fingerprint: str

    @property
    def scale(self) -> np.ndarray:
        """(name,) float64: std, or 1 where there is no spread, so that it divides."""
        return np.where(self.std > 0, self.std, 1.0)

    def aligned(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(mean, scale), (len(names),) float64 each, matched by name.

        ValueError prints both lists where a name is not there.
        """
        picked = self._positions(names)
        return self.mean[picked], self.scale[picked]

    def constant(self, names: Sequence[str]) -> np.ndarray:
        """(len(names),) bool: channels without spread, whose normalised value is 0."""
        return self.std[self._positions(names)] == 0

    def _positions(self, names: Sequence[str]) -> list[int]:
        missing = [name for name in names if name not in self.names]
        if missing:
            raise ValueError(
                f"no statistics for {', '.join(missing)}: asked for {', '.join(names)}; there are"
                f" {', '.join(self.names)}"
            )
        return [self.names.index(name) for name in names]

    def check_times(self, store: Store, times: np.ndarray) -> None:
        """ValueError unless these statistics come from exactly these times of the store."""
        if self.times_fingerprint != _fingerprint(store.times, times):
            first, last, count = _span(store.times, times)
            raise ValueError(
                f"the statistics of {store.path} come from {self.num_times} times, {self.first} to"
                f" {self.last}, and the training times are {count}, {first} to {last}; run"
                f" `graticule data stats {store.path} --train FIRST/LAST` for those"
            )

    def save(self, store: Store) -> None:
        """Write `statistics.json` into the store; ValueError if they are another store's."""
        self._refuse_other(store)
        write_json(store.path / FILE_NAME, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        values = asdict(self)
        for key, value in values.items():
            if isinstance(value, np.ndarray):
                values[key] = value.tolist()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Statistics":
        """The inverse of `to_dict`; KeyError or TypeError where a value is missing or too much."""
        rest = dict(values)
        arrays: dict[str, Any] = {
            key: np.array(rest.pop(key), dtype=dtype)
            for key, dtype in (
                ("mean", np.float64), ("std", np.float64), ("tendency_std", np.float64),
                ("count", np.int64),
            )
        }  # fmt: skip
        return cls(names=tuple(rest.pop("names")), **arrays, **rest)

    @classmethod
    def load(cls, store: Store) -> "Statistics":
        """The statistics saved in a store; ValueError if there are none or they do not fit."""
        path = store.path / FILE_NAME
        if not path.is_file():
            raise ValueError(
                f"{store.path} has no statistics; compute them for the training times with"
                f" `graticule data stats {store.path} --train FIRST/LAST`"
            )
        try:
            statistics = cls.from_dict(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            known = ", ".join(f.name for f in fields(cls))
            raise ValueError(
                f"{path} is no statistics file (it needs {known}): {error}; compute them again"
            ) from error
        statistics._refuse_other(store)
        return statistics

    def _refuse_other(self, store: Store) -> None:
        if self.store_fingerprint != store.fingerprint:
            raise ValueError(
                f"the statistics belong to a store with fingerprint {self.store_fingerprint};"
                f" {store.path} has {store.fingerprint}; run `graticule data stats {store.path}`"
            )
        expected = (*store.channels.names, *store.statics.names)
        if sorted(self.names) != sorted(expected):
            raise ValueError(
                f"the statistics are of {', '.join(self.names)}; {store.path} has"
                f" {', '.join(expected)}; run `graticule data stats {store.path}`"
            )


class _Moments:
    """Count, mean and sum of squared differences per channel, merged block by block."""

    def __init__(self, num: int) -> None:
        self.count = np.zeros(num, np.int64)
        self.mean = np.zeros(num)
        self.squares = np.zeros(num)
        self._shift = np.zeros(num)

    def add(self, channel: int, values: np.ndarray) -> None:
        """Merge values (any,) float64 without NaN."""
        number = values.size
        if number == 0:
            return
        before = self.count[channel]
        if before == 0:
            self._shift[channel] = values[0]
        shifted = values - self._shift[channel]
        mean = shifted.mean()
        squares = np.square(shifted - mean).sum()
        # n = a + b, d = mean_b - mean_a: mean = mean_a + d b / n, M = M_a + M_b + d^2 a b / n.
        total = before + number
        difference = mean - self.mean[channel]
        self.mean[channel] += difference * (number / total)
        self.squares[channel] += squares + difference**2 * (before * (number / total))
        self.count[channel] = total

    @property
    def means(self) -> np.ndarray:
        return self._shift + self.mean

    @property
    def stds(self) -> np.ndarray:
        return np.sqrt(self.squares / np.maximum(self.count, 1))


def compute(
    store: Store, times: np.ndarray, progress: Callable[[int, int], None] | None = None
) -> Statistics:
    """Statistics of all channels over the times with these indices (the training times), and of
    all statics. Every cell that has a value counts once, whatever its area.

    progress: called with (times done, times in all). A channel without spread is logged.
    """
    indices = _indices(times)
    if indices.size == 0:
        raise ValueError("no times to compute statistics from")
    num = len(store.channels)
    moments, tendencies = _Moments(num), _Moments(num)
    previous: np.ndarray | None = None
    for done, index in enumerate(indices, 1):
        fields = store.read(int(index))
        follows = done > 1 and index - indices[done - 2] == 1
        follows = follows and store.times.segments[index] == store.times.segments[index - 1]
        for channel in range(num):
            plane = fields[channel].astype(np.float64)
            present = np.isfinite(plane)
            moments.add(channel, plane[present])
            if follows and previous is not None:
                change = plane - previous[channel]
                tendencies.add(channel, change[np.isfinite(change)])
        previous = fields
        if progress is not None:
            progress(done, indices.size)
    fixed = _Moments(len(store.statics))
    for position, plane in enumerate(store.read_statics(store.statics.names).astype(np.float64)
                                     if len(store.statics) else []):  # fmt: skip
        fixed.add(position, plane[np.isfinite(plane)])
    first, last, number = _span(store.times, indices)
    statistics = Statistics(
        names=(*store.channels.names, *store.statics.names),
        mean=np.concatenate([moments.means, fixed.means]),
        std=np.concatenate([moments.stds, fixed.stds]),
        tendency_std=np.concatenate([tendencies.stds, np.zeros(len(store.statics))]),
        count=np.concatenate([moments.count, fixed.count]),
        first=first, last=last, num_times=number,
        store_fingerprint=store.fingerprint, times_fingerprint=_fingerprint(store.times, indices),
    )  # fmt: skip
    _report(statistics)
    return statistics


def _report(statistics: Statistics) -> None:
    empty = [n for n, count in zip(statistics.names, statistics.count, strict=True) if count == 0]
    if empty:
        raise ValueError(
            f"{', '.join(empty)}: no value at any of the {statistics.num_times} times from"
            f" {statistics.first} to {statistics.last}"
        )
    for name, mean, std in zip(statistics.names, statistics.mean, statistics.std, strict=True):
        if std == 0:
            logger.warning(
                "%s is %g everywhere: it has no spread and is normalised to 0", name, mean
            )


def _indices(times: np.ndarray) -> np.ndarray:
    """Sorted indices without repeats."""
    assert np.asarray(times).dtype != bool, "indices are asked for, not a mask: np.flatnonzero"
    return np.unique(np.asarray(times, dtype=np.int64))


def _span(axis: TimeAxis, times: np.ndarray) -> tuple[str, str, int]:
    """First and last date and the number of times, for a file and for messages."""
    seconds = axis.seconds[_indices(times)]
    if seconds.size == 0:
        return "none", "none", 0
    first, last = (str(date_of(int(s), axis.calendar)) for s in (seconds[0], seconds[-1]))
    return first, last, int(seconds.size)


def _fingerprint(axis: TimeAxis, times: np.ndarray) -> str:
    seconds = axis.seconds[_indices(times)]
    return fingerprint({"calendar": axis.calendar, "seconds": seconds.tolist()})
