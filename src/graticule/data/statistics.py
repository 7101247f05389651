"""Mean and spread of every channel over the training times, kept in the store with their dates.

Each time has sums of its own, in float64 and of differences from each channel's first value.
They are merged in the order of time by Chan, Golub and LeVeque (1983): no cancellation for large
means, exactly zero spread for constants, and bit for bit the same statistics whether the sums were
gathered while the steps were written (`StoreWriter`), by however many processes, or here.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from graticule.config import fingerprint
from graticule.data.shardfile import ShardLayout
from graticule.data.store import Packing, Store, write_json
from graticule.data.times import TimeAxis, date_of
from graticule.variables import Channels

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
            first, last, count = span(store.times, times)
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


class Moments:
    """Count, mean and sum of squared differences from the mean, (channel,) each.

    `mean` is the difference from `shift`, the channel's first value.
    """

    def __init__(self, num: int) -> None:
        self.count = np.zeros(num, np.int64)
        self.shift, self.mean, self.squares = np.zeros(num), np.zeros(num), np.zeros(num)

    def add(self, channel: int, values: np.ndarray) -> None:
        """Take in float64 values of any shape; NaN does not count."""
        present = values[np.isfinite(values)]
        if present.size == 0:
            return
        shift = present[0]
        present -= shift
        mean = present.mean()
        present -= mean
        self._join(channel, present.size, shift, mean, np.square(present, out=present).sum())

    def merge(self, other: "Moments") -> None:
        """Take in all that another one has taken in."""
        self._join(slice(None), other.count, other.shift, other.mean, other.squares)

    def _join(self, at: int | slice, count: Any, shift: Any, mean: Any, squares: Any) -> None:
        before = self.count[at]
        self.shift[at] = np.where(before == 0, shift, self.shift[at])
        # n = a + b, d = mean_b - mean_a: mean = mean_a + d b / n, M = M_a + M_b + d^2 a b / n.
        part = count / np.maximum(before + count, 1)
        difference = (shift - self.shift[at]) + (mean - self.mean[at])
        self.mean[at] += difference * part
        self.squares[at] += squares + difference**2 * (before * part)
        self.count[at] = before + count

    @property
    def means(self) -> np.ndarray:
        return self.shift + self.mean

    @property
    def stds(self) -> np.ndarray:
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def to_dict(self) -> dict[str, list]:
        """Plain values, which JSON holds to the last bit."""
        return {key: values.tolist() for key, values in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, list]) -> "Moments":
        moments = cls(len(values["count"]))
        for key, zeros in vars(moments).items():
            setattr(moments, key, np.array(values[key], zeros.dtype))
        return moments


class StepSums:
    """What one time adds to the statistics: moments of its values, and of the changes between it
    and the neighbours (-1: the step before, 1: the one after) that are at hand."""

    def __init__(self, packing: Packing, num: int, neighbours: Iterable[int]) -> None:
        self.values = Moments(num)
        self.changes = {neighbour: Moments(num) for neighbour in neighbours}
        self._packings = [packing.take([channel]) for channel in range(num)]

    def add(self, group: slice, stored: np.ndarray, others: Mapping[int, np.ndarray]) -> None:
        """Take in one piece, as `pieces` cuts them.

        stored: (channel, lat, lon) stored numbers of `group`. others: the same of each neighbour.
        """
        for place, channel in enumerate(range(group.start, group.stop)):
            values = self._decoded(channel, stored[place])
            self.values.add(channel, values)
            for neighbour, numbers in others.items():
                theirs = self._decoded(channel, numbers[place])
                change = values - theirs if neighbour < 0 else theirs - values
                self.changes[neighbour].add(channel, change)

    def _decoded(self, channel: int, plane: np.ndarray) -> np.ndarray:
        """float64 of the float32 value that a reader of the store sees."""
        return self._packings[channel].unpack(plane[None])[0].astype(np.float64)


def pieces(layout: ShardLayout) -> Iterator[tuple[slice, slice]]:
    """(channels, rows) of each inner chunk: sums hold no more than that in float64, and the order
    is part of the result's last bits."""
    height, step = layout.shape[1], layout.chunk[1]
    for group in layout.groups:
        for first in range(0, height, step):
            yield group, slice(first, min(first + step, height))


def compute(
    store: Store, times: np.ndarray, progress: Callable[[int, int], None] | None = None
) -> Statistics:
    """Statistics of all channels over the times with these indices (the training times), and of
    all statics. Every cell that has a value counts once, whatever its area.

    progress: called with (times done, times in all). A channel without spread is logged. Each
    step is read once, and one step of stored numbers is held.
    """
    indices = _indices(times)
    if indices.size == 0:
        raise ValueError("no times to compute statistics from")
    layout = store.shards.layout
    following = set(steps_after(store.times, indices))
    held = np.empty(layout.shape, layout.dtype)

    def sums() -> Iterator[tuple[Moments, Moments | None]]:
        for done, time in enumerate(indices.tolist(), 1):
            step = StepSums(store.packing, layout.shape[0], [-1] if time in following else [])
            for group, rows in pieces(layout):
                piece = store.read_stored(time, range(group.start, group.stop), rows)
                before = held[group, rows]
                step.add(group, piece, {-1: before} if time in following else {})
                before[...] = piece
            yield step.values, step.changes.get(-1)
            if progress is not None:
                progress(done, indices.size)

    names = store.statics.names
    statistics = merged(
        store.channels, store.statics, store.times, indices, sums(),
        moments_of(store.read_statics(names) if names else None), store.fingerprint,
    )  # fmt: skip
    require_values(statistics)
    return statistics


def moments_of(fields: np.ndarray | None) -> Moments:
    """Of statics, (static, lat, lon); None: there are none."""
    planes = () if fields is None else fields
    moments = Moments(len(planes))
    for position, plane in enumerate(planes):
        moments.add(position, plane.astype(np.float64))
    return moments


def merged(
    channels: Channels,
    statics: Channels,
    times: TimeAxis,
    indices: np.ndarray,
    sums: Iterable[tuple[Moments, Moments | None]],
    fixed: Moments,
    store_fingerprint: str,
) -> Statistics:
    """Statistics from the sums of each time.

    indices: the times used, ascending. sums: for each of them the moments of its values, and of
    the change from the step before if that is one of them. fixed: of the statics.
    """
    moments, changes = Moments(len(channels)), Moments(len(channels))
    for values, change in sums:
        moments.merge(values)
        if change is not None:
            changes.merge(change)
    first, last, number = span(times, indices)
    return Statistics(
        names=(*channels.names, *statics.names),
        mean=np.concatenate([moments.means, fixed.means]),
        std=np.concatenate([moments.stds, fixed.stds]),
        tendency_std=np.concatenate([changes.stds, np.zeros(len(statics))]),
        count=np.concatenate([moments.count, fixed.count]),
        first=first, last=last, num_times=number,
        store_fingerprint=store_fingerprint, times_fingerprint=_fingerprint(times, indices),
    )  # fmt: skip


def steps_after(times: TimeAxis, indices: np.ndarray) -> list[int]:
    """Those of the ascending indices whose step before is one of them too, with no gap between."""
    return [
        time
        for before, time in pairwise(indices.tolist())
        if time - before == 1 and times.segments[time] == times.segments[before]
    ]


def require_values(statistics: Statistics) -> None:
    """ValueError where a channel has no value at all; a warning where one has no spread."""
    empty = names_without_values(statistics)
    if empty:
        raise ValueError(
            f"{', '.join(empty)}: no value at any of the {statistics.num_times} times from"
            f" {statistics.first} to {statistics.last}; name other training times (`graticule data"
            " stats STORE --train FIRST/LAST`)"
        )
    for name, mean, std in zip(statistics.names, statistics.mean, statistics.std, strict=True):
        if std == 0:
            logger.warning(
                "%s is %g everywhere: it has no spread and is normalised to 0", name, mean
            )


def names_without_values(statistics: Statistics) -> list[str]:
    return [n for n, count in zip(statistics.names, statistics.count, strict=True) if count == 0]


def _indices(times: np.ndarray) -> np.ndarray:
    """Sorted indices without repeats."""
    assert np.asarray(times).dtype != bool, "indices are asked for, not a mask: np.flatnonzero"
    return np.unique(np.asarray(times, dtype=np.int64))


def span(axis: TimeAxis, times: np.ndarray) -> tuple[str, str, int]:
    """First and last date and the number of times, for a file and for messages."""
    seconds = axis.seconds[_indices(times)]
    if seconds.size == 0:
        return "none", "none", 0
    first, last = (str(date_of(int(s), axis.calendar)) for s in (seconds[0], seconds[-1]))
    return first, last, int(seconds.size)


def _fingerprint(axis: TimeAxis, times: np.ndarray) -> str:
    seconds = axis.seconds[_indices(times)]
    return fingerprint({"calendar": axis.calendar, "seconds": seconds.tolist()})
