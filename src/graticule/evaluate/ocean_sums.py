"""Sums that the scores of an ocean are made from, one for each field of each channel.

Beside `sums.Sums`, which pools over initial times, these keep every (init, lead) pair apart: a
series needs each time, and an RMSE that is a mean over times needs the root of each. They add up
over processes (a pair that is not there is 0) and over stripes of rows or columns of a field.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graticule.parallel.together import Together

QUANTITIES = (
    "weight",
    "model",
    "truth",
    "climatology",
    "model_square",
    "truth_square",
    "model_error",
    "persistence_error",
    "climatology_error",
)
"""Of cells of area w, with f, o and c the forecast, the truth and the climatology less the
channel's origin: w, w f, w o, w c, w f^2, w o^2, and w (x - o)^2 of x = f, persistence and c."""
EXTREMES_OF = ("model", "truth")
MAPPED = ("fields", "model", "truth", "square_error")
"""Per cell of a map, over all pairs: how many, and the sums of f - c, o - c and (f - o)^2."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OceanSums:
    """Area-weighted sums by initial time, lead and channel, float64; `add_pair` adds to them.

    names: the channels. origin: (channel,) in their units: a value of each, taken off before
    squares are summed, so that small variance around a large mean keeps its digits.
    mapped: positions of the channels with maps.
    values: (quantity, init, lead, channel), see `QUANTITIES`; m2 x units or units squared.
    low, high: (`EXTREMES_OF`, init, lead, channel) least and largest value, +inf and -inf of none.
    maps: (mapped channel, `MAPPED`, lat, lon).
    trained: (2, channel) the least and the largest value of the training times that the
    climatology was made from.
    """

    names: tuple[str, ...]
    origin: np.ndarray
    mapped: tuple[int, ...]
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    maps: np.ndarray
    trained: np.ndarray

    @classmethod
    def zero(
        cls,
        names: Sequence[str],
        shape: tuple[int, int],
        grid: tuple[int, int],
        *,
        origin: np.ndarray,
        mapped: Sequence[int],
    ) -> "OceanSums":
        """The sums over nothing. shape: (init, lead). grid: (lat, lon) of whole fields."""
        number = len(names)
        trained = np.empty((2, number))
        trained[0], trained[1] = np.inf, -np.inf
        extremes = (len(EXTREMES_OF), *shape, number)
        return cls(
            names=tuple(names),
            origin=np.asarray(origin, np.float64),
            mapped=tuple(mapped),
            values=np.zeros((len(QUANTITIES), *shape, number)),
            low=np.full(extremes, np.inf),
            high=np.full(extremes, -np.inf),
            maps=np.zeros((len(mapped), len(MAPPED), *grid)),
            trained=trained,
        )

    def add_pair(
        self,
        init: int,
        lead: int,
        forecast: np.ndarray,
        truth: np.ndarray,
        persistence: np.ndarray,
        climatology: np.ndarray,
        *,
        counted: np.ndarray,
        cell_area: np.ndarray,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> None:
        """Add one initial time and one lead (positions from 0), of the whole field or a stripe.

        Fields and `counted` as in `sums.pair_sums`, whose cells these are: what is land on a level
        is in no sum of that level, whatever number stands there. cell_area: (lat, lon) m2 of the
        same rows and columns as the fields. rows, columns: where the stripe lies in the grid.
        """
        for channel in range(len(self.names)):
            planes = (forecast, truth, climatology, persistence)
            present = counted[channel].copy()
            for plane in planes:
                present &= np.isfinite(plane[channel])
            if not present.any():
                continue
            area = cell_area[present]
            f, o, c, p = (
                plane[channel][present].astype(np.float64) - self.origin[channel]
                for plane in planes
            )
            self.values[:, init, lead, channel] += (
                area.sum(), area @ f, area @ o, area @ c, area @ f**2, area @ o**2,
                area @ (f - o) ** 2, area @ (p - o) ** 2, area @ (c - o) ** 2,
            )  # fmt: skip
            for source, value in enumerate((f, o)):
                at = (source, init, lead, channel)
                self.low[at] = min(self.low[at], value.min() + self.origin[channel])
                self.high[at] = max(self.high[at], value.max() + self.origin[channel])
            if channel in self.mapped:
                here = self.maps[self.mapped.index(channel)][:, rows, columns]
                for plane, values in zip(here, (1.0, f - c, o - c, (f - o) ** 2), strict=True):
                    plane[present] += values

    def of(self, quantity: str) -> np.ndarray:
        """(init, lead, channel)."""
        return self.values[QUANTITIES.index(quantity)]

    def see(self, low: np.ndarray, high: np.ndarray) -> None:
        """Widen the range of training values, (channel,) each."""
        np.minimum(self.trained[0], low, out=self.trained[0])
        np.maximum(self.trained[1], high, out=self.trained[1])

    def __add__(self, other: "OceanSums") -> "OceanSums":
        """Of other pairs, or of another stripe of the same."""
        same = (
            (self.names, self.mapped) == (other.names, other.mapped)
            and (self.values.shape, self.maps.shape) == (other.values.shape, other.maps.shape)
            and np.array_equal(self.origin, other.origin)
        )
        if not same:
            raise ValueError(
                f"sums of {_described(self)} and of {_described(other)} do not add up: channels,"
                " pairs, grid and origins must be the same"
            )
        return OceanSums(
            names=self.names,
            origin=self.origin,
            mapped=self.mapped,
            values=self.values + other.values,
            low=np.minimum(self.low, other.low),
            high=np.maximum(self.high, other.high),
            maps=self.maps + other.maps,
            trained=np.stack(
                [
                    np.minimum(self.trained[0], other.trained[0]),
                    np.maximum(self.trained[1], other.trained[1]),
                ]
            ),
        )

    def added(self, together: Together) -> "OceanSums":
        """The sums over all processes; a collective."""
        total = OceanSums.zero(
            self.names, self.values.shape[1:3], self.maps.shape[2:],
            origin=self.origin, mapped=self.mapped,
        )  # fmt: skip
        summed = ("values", "maps")
        sums = together.add([getattr(self, name) for name in summed])
        for name, values in zip(summed, sums, strict=True):
            getattr(total, name)[...] = values
        # Least and largest values have no sum: a slot for each process, all others 0.
        for name, least in (("low", True), ("high", False)):
            own = getattr(self, name)
            trained = self.trained[0 if least else 1]
            slots = np.zeros((together.size, own.size + trained.size))
            slots[together.rank] = np.concatenate([own.ravel(), trained])
            (found,) = together.add([slots])
            found = found.min(0) if least else found.max(0)
            getattr(total, name)[...] = found[: own.size].reshape(own.shape)
            total.trained[0 if least else 1] = found[own.size :]
        return total


def origin_of(truth: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """(channel,) the first counted value of each channel, 0 where it has none.

    One of the values themselves, not their mean: around it a constant has sums that are exactly 0.
    """
    origin = np.zeros(len(truth))
    for channel, plane in enumerate(truth):
        present = np.flatnonzero((counted[channel] & np.isfinite(plane)).ravel())
        if present.size:
            origin[channel] = plane.ravel()[present[0]]
    return origin


def _described(sums: OceanSums) -> str:
    _, inits, leads, _ = sums.values.shape
    height, width = sums.maps.shape[2:]
    return f"{', '.join(sums.names)} at {inits} x {leads} times on {height} x {width} points"
