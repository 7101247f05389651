"""Sums that the scores of an ensemble are made from.

`FieldSums` are those of one (init, lead) pair: they add up over tiles and stripes of its fields.
`EnsembleSums` take whole pairs and add up over pairs and processes; a pair that is not there is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from graticule.config.data import threshold_parts
from graticule.keyed import keyed
from graticule.parallel.together import Together

QUANTITIES = ("weight", "absolute_error", "difference", "squared_error", "variance")
"""Of cells of area w, with members x_i, their mean x and the truth y: w, w mean_i |x_i - y|,
w mean_(i != j) |x_i - x_j|, w (x - y)^2, and w sum_i (x_i - x)^2 / (m - 1). The third and the last
are 0 of one member, which has neither."""
DISTANCES = ("error", "difference")
"""Root mean squares over the area: mean_i |x_i - y| and mean_(i != j) |x_i - x_j|."""
SEED = 0
"""Of the ranks of equal values, by initial time, lead, channel and row."""
_CELLS = 2**22
"""Values that are worked on at a time, 32 MiB in float64."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """An event: values of a channel above (or below) a value in its units."""

    channel: int
    name: str
    above: bool
    value: float

    @classmethod
    def read(cls, text: str, names: Sequence[str]) -> "Threshold":
        """From `u@850>20`; ValueError where there is no such channel."""
        name, above, value = threshold_parts(text)
        if name not in names:
            raise ValueError(
                f"evaluate.thresholds: {text!r} is of no channel of the forecast, which has"
                f" {', '.join(names)}"
            )
        return cls(channel=list(names).index(name), name=name, above=above, value=value)

    def __str__(self) -> str:
        return f"{self.name}{'>' if self.above else '<'}{self.value:.10g}"

    def of(self, values: np.ndarray) -> np.ndarray:
        """Whether the event is there."""
        return values > self.value if self.above else values < self.value


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldSums:
    """Of one pair, over a part of its fields; `add` adds to them.

    values: (`QUANTITIES`, channel) in m2 x units. errors: (channel, member) sums of w (x_i - y)^2,
    distances: (channel, member, member) of w (x_i - x_j)^2.
    ranks: (channel, member + 1) m2 where so many members lie below the truth.
    events: (threshold, member + 1, 2) m2 where so many members have the event, and where the
    truth has it too. plume: (channel, member + 1) the members at the point, then the truth.
    """

    thresholds: tuple[Threshold, ...]
    values: np.ndarray
    errors: np.ndarray
    distances: np.ndarray
    ranks: np.ndarray
    events: np.ndarray
    plume: np.ndarray

    @classmethod
    def zero(
        cls, num_channels: int, num_members: int, thresholds: Sequence[Threshold] = ()
    ) -> "FieldSums":
        c, m = num_channels, num_members
        return cls(
            thresholds=tuple(thresholds), values=np.zeros((len(QUANTITIES), c)),
            errors=np.zeros((c, m)), distances=np.zeros((c, m, m)), ranks=np.zeros((c, m + 1)),
            events=np.zeros((len(thresholds), m + 1, 2)), plume=np.zeros((c, m + 1)),
        )  # fmt: skip

    def __add__(self, other: "FieldSums") -> "FieldSums":
        """Of another stripe of the same pair."""
        if self.thresholds != other.thresholds or self.errors.shape != other.errors.shape:
            raise ValueError(
                f"sums of {self.errors.shape[1]} members of {len(self.values[0])} channels and of"
                f" {other.errors.shape[1]} of {len(other.values[0])} do not add up"
            )
        names = (f.name for f in fields(self) if f.name != "thresholds")
        return replace(self, **{name: getattr(self, name) + getattr(other, name)
                                for name in names})  # fmt: skip

    def add(
        self,
        channel: int,
        members: np.ndarray,
        truth: np.ndarray,
        present: np.ndarray,
        cell_area: np.ndarray,
        *,
        key: tuple[int, int],
        rows: slice = slice(None),
        columns: slice = slice(None),
        width: int | None = None,
        point: tuple[int, int] | None = None,
    ) -> None:
        """Add the members of one channel, on the whole grid or a part of it.

        members: (member, lat, lon), truth and cell_area (lat, lon), in units and m2; of the same
        `rows` and `columns` of the grid. present: (lat, lon) bool, the cells that count; elsewhere
        values may be anything. key: initial time in seconds and lead, of the ranks of equal
        values. width: columns of the grid; none: those given. point: (row, column) in the grid.
        """
        row, column = np.nonzero(present)
        step = max(1, _CELLS // len(members))
        for at in range(0, row.size, step):
            place = row[at : at + step], column[at : at + step]
            weight = cell_area[place]
            y = truth[place].astype(np.float64)
            x = members[:, *place].astype(np.float64)
            below, equal = (x < y).sum(0), (x == y).sum(0)
            if equal.any():
                first_row, first_column = rows.start or 0, columns.start or 0
                drawn = _drawn(
                    (*key, channel), place[0] + first_row, place[1] + first_column, equal > 0,
                    width or truth.shape[1],
                )  # fmt: skip
                below += np.floor(drawn * (equal + 1)).astype(below.dtype)
            self.ranks[channel] += np.bincount(below, weight, len(x) + 1)
            for i, threshold in enumerate(self.thresholds):
                if threshold.channel == channel:
                    number, seen = threshold.of(x).sum(0), threshold.of(y)
                    self.events[i, :, 0] += np.bincount(number, weight, len(x) + 1)
                    self.events[i, :, 1] += np.bincount(number, weight * seen, len(x) + 1)
            self._add_distances(channel, x - y, weight)
        if point is not None:
            at_row, at_column = point[0] - (rows.start or 0), point[1] - (columns.start or 0)
            if 0 <= at_row < truth.shape[0] and 0 <= at_column < truth.shape[1]:
                self.plume[channel, :-1] = members[:, at_row, at_column]
                self.plume[channel, -1] = truth[at_row, at_column]

    def _add_distances(self, channel: int, deviations: np.ndarray, weight: np.ndarray) -> None:
        """deviations: (member, cell), member - truth; its own to spoil."""
        num = len(deviations)
        mean = deviations.mean(0)
        centred = deviations - mean
        self.errors[channel] += deviations**2 @ weight
        absolute = weight @ np.abs(deviations).mean(0)
        variance, difference = 0.0, 0.0
        if num > 1:
            variance = weight @ (centred**2).sum(0) / (num - 1)
            # |x_i - x_j|^2 = |x_i|^2 + |x_j|^2 - 2 x_i x_j of members less their mean: one product
            # of matrices for all pairs. Equal members leave rounding, which is no distance.
            product = (centred * weight) @ centred.T
            both = product.diagonal()[:, None] + product.diagonal()
            distance = both - 2 * product
            self.distances[channel] += np.where(distance > 1e-13 * both, distance, 0.0)
            # Of sorted members the sum over all pairs is 2 sum_k (2 k - m - 1) x_k, k from 1.
            deviations.sort(axis=0)
            coefficients = 2.0 * np.arange(1, num + 1) - num - 1
            difference = 2 * coefficients @ (deviations @ weight) / (num * (num - 1))
        self.values[:, channel] += (
            weight.sum(), absolute, difference, weight @ mean**2, variance,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class EnsembleSums:
    """Sums by initial time and lead, float64; `add_pair` adds to them.

    values: (`QUANTITIES`, init, lead, channel) in m2 x units, or units squared.
    energy: (`DISTANCES`, init, lead, channel + 1): of each channel, in its units, and of all
    channels together over their training standard deviations, 0 without these.
    ranks: (lead, channel, member + 1), events: (threshold, lead, member + 1, 2), both in m2.
    plumes: (init, lead, channel, member + 1), the members and the truth at `point`, (row, column).
    """

    names: tuple[str, ...]
    thresholds: tuple[Threshold, ...]
    point: tuple[int, int]
    values: np.ndarray
    energy: np.ndarray
    ranks: np.ndarray
    events: np.ndarray
    plumes: np.ndarray

    @classmethod
    def zero(
        cls,
        names: Sequence[str],
        num_members: int,
        shape: tuple[int, int],
        *,
        thresholds: Sequence[Threshold] = (),
        point: tuple[int, int] = (0, 0),
    ) -> "EnsembleSums":
        """The sums over nothing. shape: (init, lead)."""
        c, m, (inits, leads) = len(names), num_members, shape
        return cls(
            names=tuple(names), thresholds=tuple(thresholds), point=point,
            values=np.zeros((len(QUANTITIES), inits, leads, c)),
            energy=np.zeros((len(DISTANCES), inits, leads, c + 1)),
            ranks=np.zeros((leads, c, m + 1)),
            events=np.zeros((len(thresholds), leads, m + 1, 2)),
            plumes=np.zeros((inits, leads, c, m + 1)),
        )  # fmt: skip

    @property
    def num_members(self) -> int:
        return self.ranks.shape[-1] - 1

    def of(self, quantity: str) -> np.ndarray:
        """(init, lead, channel)."""
        return self.values[QUANTITIES.index(quantity)]

    def add_pair(
        self, init: int, lead: int, field: FieldSums, std: np.ndarray | None = None
    ) -> None:
        """Add one initial time and lead (positions from 0) from the sums over its whole fields.

        std: (channel,) training standard deviations; channels where it is 0 are left out of the
        distance of all channels together.
        """
        self.values[:, init, lead] += field.values
        self.ranks[lead] += field.ranks
        self.events[:, lead] += field.events
        self.plumes[init, lead] += field.plume
        weight = field.values[0]
        for kind, squares in enumerate((field.errors, field.distances)):
            mean = np.divide(
                squares.T, weight, out=np.zeros(squares.T.shape), where=weight > 0
            )  # (member, [member], channel)
            self.energy[kind, init, lead, :-1] += _mean_of(np.sqrt(mean))
            if std is not None and (std > 0).any():
                whole = mean[..., std > 0] / std[std > 0] ** 2
                self.energy[kind, init, lead, -1] += _mean_of(np.sqrt(whole.mean(-1)[..., None]))[0]

    def __add__(self, other: "EnsembleSums") -> "EnsembleSums":
        """Of other pairs."""
        same = (
            (self.names, self.thresholds, self.point)
            == (other.names, other.thresholds, other.point)
            and self.plumes.shape == other.plumes.shape
        )  # fmt: skip
        if not same:
            raise ValueError(f"sums of {_told(self)} and of {_told(other)} do not add up")
        return replace(self, **{name: getattr(self, name) + getattr(other, name)
                                for name in _SUMMED})  # fmt: skip

    def added(self, together: Together) -> "EnsembleSums":
        """The sums over all processes; a collective."""
        sums = together.add([getattr(self, name) for name in _SUMMED])
        given: dict[str, Any] = dict(zip(_SUMMED, sums, strict=True))
        return replace(self, **given)


_SUMMED = ("values", "energy", "ranks", "events", "plumes")


def _mean_of(distances: np.ndarray) -> np.ndarray:
    """(member, channel), or (member, member, channel) without each with itself -> (channel,)."""
    num = len(distances)
    if distances.ndim == 2:
        return distances.mean(0)
    return distances.sum((0, 1)) / max(1, num * (num - 1))


def _drawn(
    key: tuple[int, ...], row: np.ndarray, column: np.ndarray, wanted: np.ndarray, width: int
) -> np.ndarray:
    """(cell,) from 0 to 1: the number of a cell of the grid, whoever draws it; 0 if not wanted."""
    drawn = np.zeros(row.size)
    for line in np.unique(row[wanted]):
        here = wanted & (row == line)
        drawn[here] = keyed(SEED, "rank", *key, int(line)).random(width)[column[here]]
    return drawn


def _told(sums: EnsembleSums) -> str:
    inits, leads, channels, _ = sums.plumes.shape
    told = ", ".join(str(threshold) for threshold in sums.thresholds)
    return (
        f"{sums.num_members} members of {channels} channels at {inits} x {leads} times"
        + (f" with {told}" if told else "")
        + f" at point {sums.point}"
    )
