"""A matrix kept by its entries, and the one that carries a tracer between cells.

A tracer moves by volumes: rate m3 s-1 from a source cell to a target cell, whether water flows
there (first-order upwind) or two layers mix. What one cell gives another receives, so the total is
conserved; where as much comes as goes, a constant stays constant; and while no cell gives more
than it holds in one step, every entry is positive and no extremum grows (Godunov: no linear scheme
of higher order does that).
"""

from dataclasses import dataclass
from typing import overload

import numpy as np

from graticule.grid import EARTH_RADIUS_M, Grid


@dataclass(frozen=True, eq=False)
class Sparse:
    """A matrix by its entries, ordered by row, then column; no place occurs twice.

    shape: (rows, columns). row, column, value: (entry,) int64, int64, float64.
    """

    shape: tuple[int, int]
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray

    @classmethod
    def of(
        cls, shape: tuple[int, int], row: np.ndarray, column: np.ndarray, value: np.ndarray
    ) -> "Sparse":
        """Entries in any order; those of one place are summed."""
        places, which = np.unique(row.astype(np.int64) * shape[1] + column, return_inverse=True)
        value = np.bincount(which.ravel(), weights=value, minlength=places.size)
        return cls(shape, places // shape[1], places % shape[1], value)

    @classmethod
    def identity(cls, size: int) -> "Sparse":
        return cls((size, size), np.arange(size), np.arange(size), np.ones(size))

    @overload
    def __matmul__(self, other: np.ndarray) -> np.ndarray: ...
    @overload
    def __matmul__(self, other: "Sparse") -> "Sparse": ...
    def __matmul__(self, other: "np.ndarray | Sparse") -> "np.ndarray | Sparse":
        """The product with a vector (columns,) or with a matrix of entries."""
        if isinstance(other, np.ndarray):
            # In the order of the entries, whatever the threads: the same sum everywhere.
            return np.bincount(
                self.row, weights=self.value * other[self.column], minlength=self.shape[0]
            )
        # Entry (i, k) meets the entries of row k, which lie from first[k] on.
        first = np.searchsorted(other.row, np.arange(other.shape[0] + 1))
        count = np.diff(first)[self.column]
        mine = np.repeat(np.arange(self.value.size), count)
        nth = np.arange(mine.size) - np.repeat(np.cumsum(count) - count, count)
        theirs = first[self.column[mine]] + nth
        return Sparse.of(
            (self.shape[0], other.shape[1]),
            self.row[mine],
            other.column[theirs],
            self.value[mine] * other.value[theirs],
        )

    def __add__(self, other: "Sparse") -> "Sparse":
        return Sparse.of(
            self.shape,
            np.concatenate([self.row, other.row]),
            np.concatenate([self.column, other.column]),
            np.concatenate([self.value, other.value]),
        )

    def dense(self) -> np.ndarray:
        """(rows, columns) float64."""
        full = np.zeros(self.shape)
        full[self.row, self.column] = self.value
        return full


@dataclass(frozen=True, eq=False)
class Exchange:
    """Volumes that change places: source, target (exchange,) cells, rate (exchange,) m3 s-1."""

    source: np.ndarray
    target: np.ndarray
    rate: np.ndarray

    def __add__(self, other: "Exchange") -> "Exchange":
        return Exchange(
            np.concatenate([self.source, other.source]),
            np.concatenate([self.target, other.target]),
            np.concatenate([self.rate, other.rate]),
        )

    def step(self, volume: np.ndarray, damping: np.ndarray, seconds: float) -> Sparse:
        """The matrix of one forward step. volume: (cell,) m3. damping: (cell,) s-1 towards 0.

        ValueError where a cell would give more than it holds.
        """
        limit = self.longest_step(volume, damping)
        if seconds > limit:
            raise ValueError(
                f"a step of {seconds:g} s is too long: a cell would lose more water than it holds"
                f" (CFL number {seconds / limit:.3g}, at most 1); the largest stable step is"
                f" {limit:.0f} s"
            )
        size = volume.size
        cells = np.arange(size)
        share = seconds * self.rate
        return Sparse.of(
            (size, size),
            np.concatenate([cells, self.target, self.source]),
            np.concatenate([cells, self.source, self.source]),
            np.concatenate(
                [
                    1 - seconds * damping,
                    share / volume[self.target],
                    -share / volume[self.source],
                ]
            ),
        )

    def longest_step(self, volume: np.ndarray, damping: np.ndarray) -> float:
        """Seconds after which the first cell has given all that it holds."""
        gone = np.bincount(self.source, weights=self.rate, minlength=volume.size) / volume
        return float(1 / (gone + damping).max())


def face_flows(stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The flow that a streamfunction makes through the faces of the cells, m2 s-1.

    stream: (lat + 1, lon) at the cells' north-west corners, the last row at the southern edge;
    u = -d(stream)/dy, v = d(stream)/dx.
    Returns eastward flow through the east faces (lat, lon), northward flow through the north
    faces (lat + 1, lon). What leaves a cell enters it: exactly, where `stream` holds whole
    numbers.
    """
    east = np.roll(stream, -1, axis=1)
    return east[1:] - east[:-1], east - stream


def face_speeds(grid: Grid, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean speeds over the same faces as in `face_flows`, m s-1; 0 on a face at a pole."""
    edges = np.deg2rad(corner_lat(grid))
    eastward, northward = face_flows(stream)
    height = EARTH_RADIUS_M * (edges[:-1] - edges[1:])[:, None]
    width = EARTH_RADIUS_M * np.cos(edges)[:, None] * (2 * np.pi / grid.shape[1])
    still = width < 1
    return eastward / height, np.where(still, 0.0, northward / np.where(still, 1.0, width))


def corner_lat(grid: Grid) -> np.ndarray:
    """(lat + 1,) degrees: half way between the rows, and a pole at either end."""
    return np.concatenate([[90.0], (grid.lat[1:] + grid.lat[:-1]) / 2, [-90.0]])


def flow(stream: np.ndarray, cells: np.ndarray, thickness: float) -> Exchange:
    """Upwind exchange in one layer of `thickness` m, from the cell that the water leaves.

    cells: (lat, lon) int, the number of each wet cell, negative on land; the columns close round
    the globe. ValueError where the flow crosses a coast or a pole.
    """
    eastward, northward = face_flows(stream)
    if northward[0].any() or northward[-1].any():
        raise ValueError("the streamfunction varies along a pole: water would flow out of the grid")
    west, east = cells, np.roll(cells, -1, axis=1)
    south, north = cells[1:], cells[:-1]
    behind = np.concatenate([west.ravel(), south.ravel()])
    ahead = np.concatenate([east.ravel(), north.ravel()])
    rate = thickness * np.concatenate([eastward.ravel(), northward[1:-1].ravel()])
    moving = rate != 0
    behind, ahead, rate = behind[moving], ahead[moving], rate[moving]
    if (behind < 0).any() or (ahead < 0).any():
        raise ValueError("the streamfunction is not constant along a coast: water would cross it")
    onward = rate > 0
    return Exchange(np.where(onward, behind, ahead), np.where(onward, ahead, behind), np.abs(rate))


def mixing(upper: np.ndarray, lower: np.ndarray, rate: np.ndarray) -> Exchange:
    """Two layers that give each other as much. upper, lower: (lat, lon) cells, negative on land.

    rate: (lat, lon) m3 s-1 each way.
    """
    both = (upper >= 0) & (lower >= 0)
    upper, lower, rate = upper[both], lower[both], rate[both]
    return Exchange(
        np.concatenate([upper, lower]), np.concatenate([lower, upper]), np.concatenate([rate, rate])
    )
