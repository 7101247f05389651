"""Where a grid's cells lie on a map: edges without a seam, gaps left open, and fewer cells."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graticule.grid import Grid


@dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """An unbroken run of rows or columns. starts: the first cell of each block, counted in the
    whole grid. edges: (block + 1,) degrees."""

    starts: np.ndarray
    edges: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Mesh:
    """The cells of a grid as they are drawn, `blocks` (rows, columns) of them averaged to one.

    rows, columns: spans, one each unless the grid leaves out a stretch of latitudes or
    longitudes; no block reaches over such a gap. shape: (lat, lon) of the grid.
    """

    rows: list[Span]
    columns: list[Span]
    blocks: tuple[int, int]
    shape: tuple[int, int]

    @classmethod
    def of(cls, grid: Grid, pixels: int) -> "Mesh":
        """At most about `pixels` rows and columns.

        Cells meet half way between their centres. Round the globe the last column meets the
        first, whatever meridian the grid begins at and however many columns it has. As in
        `Grid.cell_area` a row less than one row from a pole reaches to it, and none goes beyond.
        A row or column alone is as wide as the other direction's steps.
        """
        steps = [np.median(np.abs(np.diff(c))) for c in (grid.lat, grid.lon) if c.size > 1]
        alone = float(min(steps, default=1.0))
        rows = spans(-grid.lat, alone)
        for _, edges in rows:
            edges *= -1
        if grid.lat.size > 1:
            north, south = rows[0][1], rows[-1][1]
            first, last = 2 * (north[0] - grid.lat[0]), 2 * (grid.lat[-1] - south[-1])
            north[0] = 90 if grid.lat[0] + first > 90 + 1e-3 * first else north[0]
            south[-1] = -90 if grid.lat[-1] - last < -90 - 1e-3 * last else south[-1]
        rows = [(cells, np.clip(edges, -90, 90)) for cells, edges in rows]
        blocks = -(-grid.lat.size // pixels), -(-grid.lon.size // pixels)
        return cls(
            rows=_thinned(rows, blocks[0]),
            columns=_thinned(spans(grid.lon, alone, circle=True), blocks[1]),
            blocks=blocks,
            shape=grid.shape,
        )

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """(west, east, south, north) outer edges in degrees."""
        return (
            float(self.columns[0].edges[0]), float(self.columns[-1].edges[-1]),
            float(self.rows[-1].edges[-1]), float(self.rows[0].edges[0]),
        )  # fmt: skip

    @cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.concatenate([span.starts for span in self.rows])
        return rows, np.concatenate([span.starts for span in self.columns])

    def mean(self, field: np.ndarray) -> np.ndarray:
        """(row, column) means of `field` (lat, lon) over the blocks, of their sea alone.

        A block with less sea than land is land, NaN. A span's last blocks hold what is left.
        """
        if self.blocks == (1, 1):
            return field
        rows, columns = self._starts

        def summed(values: np.ndarray, kind: type) -> np.ndarray:
            across = np.add.reduceat(values, columns, axis=1, dtype=kind)
            return np.add.reduceat(across, rows, axis=0, dtype=kind)

        present = np.isfinite(field)
        sea = summed(present, np.int64)
        height, width = self.shape
        cells = np.outer(np.diff(np.append(rows, height)), np.diff(np.append(columns, width)))
        total = summed(np.where(present, field, 0), np.float64)
        return np.where(2 * sea >= cells, total / np.maximum(sea, 1), np.nan)

    def parts(self, drawn: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(x edges, y edges, values) of each rectangle without a gap, from `mean`'s result."""
        row = 0
        for down in self.rows:
            column = 0
            for across in self.columns:
                high, wide = down.starts.size, across.starts.size
                yield across.edges, down.edges, drawn[row : row + high, column : column + wide]
                column += wide
            row += high


def spans(
    centres: np.ndarray, alone: float, *, circle: bool = False
) -> list[tuple[slice, np.ndarray]]:
    """[(cells, their edges)] of ascending centres in degrees, one per unbroken run.

    A step over 1.5 times its wider neighbour is a gap: no cell is stretched over what the grid
    leaves out. alone: width where no step tells. circle: longitudes, that may close.
    """
    steps = np.diff(centres)
    padded = np.concatenate([[0], steps, [0]])
    beside = np.maximum(padded[:-2], padded[2:])
    gaps = np.flatnonzero((steps > 1.5 * beside) & (beside > 0))
    joined = np.delete(steps, gaps)
    usual = float(np.median(joined)) if joined.size else alone
    found = []
    for first, last in zip([0, *(gaps + 1)], [*gaps, centres.size - 1], strict=True):
        own = centres[first : last + 1]
        inner = np.diff(own) if own.size > 1 else np.array([usual])
        edges = np.concatenate(
            [[own[0] - inner[0] / 2], (own[1:] + own[:-1]) / 2, [own[-1] + inner[-1] / 2]]
        )
        found.append((slice(int(first), int(last) + 1), edges))
    if circle and steps.size:
        between = centres[0] + 360 - centres[-1]
        if between <= 1.5 * max(steps[0], steps[-1]):
            found[0][1][0] = centres[0] - between / 2
            found[-1][1][-1] = centres[-1] + between / 2
    return found


def _thinned(parts: list[tuple[slice, np.ndarray]], block: int) -> list[Span]:
    return [
        Span(
            starts=np.arange(cells.start, cells.stop, block),
            edges=np.append(edges[:-1:block], edges[-1]),
        )
        for cells, edges in parts
    ]
