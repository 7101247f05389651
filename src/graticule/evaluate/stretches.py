"""Where a row of the grid can be transformed: full circles, or stretches of sea of one length.

A Fourier transform wants a row without gaps, and land has no values: filling it would put the
steps of the coast into every wavenumber. So the rows that are read are chosen from the mask, once,
for all times, leads and sources. All channels get the same kind, for then they share their
wavenumbers and can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graticule.grid import Grid

ENOUGH = 0.75
"""Share of a channel's area that must lie in circles, or in stretches that are long enough."""
FEWEST_COLUMNS = 8
BLOCK_VALUES = 2**20
"""Values transformed at a time: 8 MiB, whatever the grid."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The stretches of one channel: `columns` cells of `row` from `start` on, (piece,) each.

    weight: (piece,) m2. The pieces of one run of sea share the area that they cover, so that a
    run cut into many overlapping pieces counts for no more than its area.
    """

    row: np.ndarray
    start: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Power:
    """Zonal power of one set of fields, summed over pieces; see `Stretches.power`.

    used: per channel (piece,) bool. count: (channel,) pieces. area: (channel,) m2.
    sums: (channel, wavenumber) in m2 x units squared.
    """

    used: tuple[np.ndarray, ...]
    count: np.ndarray
    area: np.ndarray
    sums: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretches:
    """The pieces of rows that spectra are made from.

    names, kind, pieces, share: per channel. `kind` is "circles", "segments of N columns", or
    "none: " and the reason. share: of the channel's area, what the pieces cover.
    columns: length of a piece, 0 where no channel has any. width: columns of the grid.
    resolution: wavenumber of one wave along a piece, in cycles per circle of latitude: 1 for
    circles, 360 degrees / length for segments.
    """

    names: tuple[str, ...]
    kind: tuple[str, ...]
    pieces: tuple[Pieces, ...]
    share: np.ndarray
    columns: int
    width: int
    resolution: float
    circles: bool

    @classmethod
    def choose(
        cls, names: Sequence[str], counted: np.ndarray, grid: Grid, cell_area: np.ndarray
    ) -> "Stretches":
        """
        counted: (channel, lat, lon) bool, wet and in the region. cell_area: (lat, lon) in m2.

        Circles, if in each channel full circles hold `ENOUGH` of the area. Else segments: of the
        lengths 2^n and 3 x 2^n, the longest of which the channels' mean share is `ENOUGH`. A
        channel that has not `ENOUGH` in runs of `FEWEST_COLUMNS` has no say in it and no spectrum.
        """
        area = cell_area.mean(1)  # of one cell; columns are evenly spaced, or there is no piece
        width = grid.lon.size
        runs = [_Runs.of(mask, grid.periodic) for mask in counted]
        wet = [float(counted[i].sum(1) @ area) for i in range(len(runs))]

        def share(channel: int, columns: int) -> float:
            covered = float(runs[channel].covered(columns) @ area[runs[channel].row])
            return covered / wet[channel] if wet[channel] > 0 else 0.0

        def in_circles(channel: int) -> float:
            found = runs[channel]
            return float(area[found.row[found.circle]].sum() * width / max(wet[channel], 1e-300))

        reasons = [""] * len(runs)
        if not _evenly_spaced(grid.lon):
            reasons = ["the columns are not evenly spaced"] * len(runs)
        else:
            for i, found in enumerate(runs):
                parts = share(i, FEWEST_COLUMNS)
                if parts < ENOUGH and in_circles(i) < ENOUGH:
                    longest = int(found.length.max(initial=0))
                    reasons[i] = (
                        f"segments of {FEWEST_COLUMNS} columns cover {parts:.0%} of its area,"
                        f" {ENOUGH:.0%} are needed (its longest run has {longest} columns)"
                    )
        voters = [i for i, reason in enumerate(reasons) if not reason]
        circles = bool(voters) and all(in_circles(i) >= ENOUGH for i in voters)
        columns = width if circles and voters else 0
        if voters and not circles:
            columns = next(
                n for n in _lengths(width)
                if np.mean([share(i, n) for i in voters]) >= ENOUGH
            )  # fmt: skip
        kinds, pieces = [], []
        for found, reason in zip(runs, reasons, strict=True):
            cut = found.cut(columns, circles, area) if not reason else _NO_PIECES
            if not reason and not cut.row.size:
                reason = (
                    f"its longest run has {int(found.length.max(initial=0))} columns, segments of"
                    f" {columns} are used"
                )
            whole = "circles" if circles else f"segments of {columns} columns"
            kinds.append(f"none: {reason}" if reason else whole)
            pieces.append(cut)
        spacing = 360 / width if grid.periodic else _spacing(grid.lon)
        return cls(
            names=tuple(names),
            kind=tuple(kinds),
            pieces=tuple(pieces),
            share=np.array([float(cut.weight.sum()) / total if total > 0 else 0.0
                            for cut, total in zip(pieces, wet, strict=True)]),
            columns=columns,
            width=width,
            resolution=360 / (spacing * columns) if columns else 1.0,
            circles=circles,
        )  # fmt: skip

    @cached_property
    def wavenumber(self) -> np.ndarray:
        """(n,) cycles per circle of latitude, from one wave along a piece to the shortest."""
        return self.resolution * np.arange(1, self.columns // 2 + 1)

    @cached_property
    def _taper(self) -> np.ndarray:
        return np.sin(np.pi * (np.arange(self.columns) + 0.5) / self.columns) ** 2

    @cached_property
    def _scale(self) -> np.ndarray:
        """(n,) from |X_j|^2 of the transform to power per unit wavenumber.

        One-sided: 2 |X_j|^2 / N^2, and the shortest wave of an even N, which is its own mirror
        image, once. A segment's taper w takes mean(w^2) of the power away, and its waves stand
        `resolution` apart.
        """
        if not self.columns:
            return np.zeros(0)
        both = np.full(self.columns // 2, 2.0)
        if self.columns % 2 == 0:
            both[-1] = 1.0
        lost = 1.0 if self.circles else float((self._taper**2).mean())
        return both / (self.columns**2 * lost * self.resolution)

    def power(self, fields: np.ndarray, used: Sequence[np.ndarray] | None = None) -> Power:
        """Zonal power per unit wavenumber, summed over the pieces by area.

        fields: (channel, lat, lon) in any unit. used: the pieces to take, those of the truth; by
        default those whose values are all finite. Circles as they are; segments without their
        linear trend and under a Hann taper. Along a circle, the sum of power over wavenumbers is
        the variance of the row; along segments it is so in the mean.
        ValueError where a piece of `used` has a value that is not finite.
        """
        shape = (len(self.names), self.columns // 2)
        count, area, sums = np.zeros(shape[0], np.int64), np.zeros(shape[0]), np.zeros(shape)
        taken = []
        for channel, cut in enumerate(self.pieces):
            take = np.ones(cut.row.size, bool) if used is None else used[channel].copy()
            places = np.flatnonzero(take)
            block = max(1, BLOCK_VALUES // max(1, self.columns))
            for at in range(0, places.size, block):
                some = places[at : at + block]
                values = self._values(fields[channel], cut, some)
                whole = np.isfinite(values).all(1)
                if used is not None and not whole.all():
                    raise ValueError(
                        f"{self.names[channel]} is not finite in row"
                        f" {int(cut.row[some[~whole][0]])}, where the truth is: no spectrum"
                    )
                take[some] = whole
                weight = cut.weight[some[whole]]
                waves = np.fft.rfft(self._prepared(values[whole]), axis=1)[:, 1:]
                sums[channel] += weight @ (waves.real**2 + waves.imag**2)
                area[channel] += weight.sum()
            count[channel] = take.sum()
            taken.append(take)
        return Power(used=tuple(taken), count=count, area=area, sums=sums * self._scale)

    def _values(self, field: np.ndarray, cut: Pieces, some: np.ndarray) -> np.ndarray:
        """(piece, column) float64."""
        if self.circles:
            return field[cut.row[some]].astype(np.float64)
        # Modulo the width for runs across the origin of longitude; other grids have none.
        column = (cut.start[some, None] + np.arange(self.columns)) % self.width
        return field[cut.row[some, None], column].astype(np.float64)

    def _prepared(self, values: np.ndarray) -> np.ndarray:
        if self.circles:
            return values
        along = np.arange(self.columns) - (self.columns - 1) / 2
        slope = values @ along / (along @ along)
        return (values - values.mean(1, keepdims=True) - slope[:, None] * along) * self._taper


_NO_PIECES = Pieces(row=np.zeros(0, np.int64), start=np.zeros(0, np.int64), weight=np.zeros(0))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Runs:
    """Unbroken runs of counted cells, (run,) each. circle: the run closes round the globe."""

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    circle: np.ndarray
    width: int

    @classmethod
    def of(cls, mask: np.ndarray, periodic: bool) -> "_Runs":
        """mask: (lat, lon) bool. On a periodic grid a run may cross the origin of longitude."""
        height, width = mask.shape
        # Each row from a cell that does not count: then no run is cut by the edge of the array.
        shift = mask.argmin(1) if periodic else np.zeros(height, np.int64)
        turned = np.take_along_axis(mask, (np.arange(width) + shift[:, None]) % width, axis=1)
        edges = np.diff(np.pad(turned.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        row, start = np.nonzero(edges == 1)
        length = np.nonzero(edges == -1)[1] - start
        return cls(
            row=row,
            start=(start + shift[row]) % width,
            length=length,
            circle=(length == width) & periodic,
            width=width,
        )

    def number(self, columns: int) -> np.ndarray:
        """(run,) pieces of a run: as many as overlap by no more than half."""
        hop = max(1, columns // 2)
        number = np.where(self.circle, self.width // hop, 1 + (self.length - columns) // hop)
        return np.where(self.length >= columns, np.maximum(number, 1), 0)

    def covered(self, columns: int) -> np.ndarray:
        """(run,) cells in pieces: all of a run that has two, for these reach to its ends."""
        number = self.number(columns)
        return np.where(number > 1, self.length, np.where(number == 1, columns, 0))

    def cut(self, columns: int, circles: bool, area: np.ndarray) -> Pieces:
        """area: (lat,) m2 of one cell."""
        number = self.circle.astype(np.int64) if circles else self.number(columns)
        covered = np.where(number > 0, self.length, 0) if circles else self.covered(columns)
        run = np.repeat(np.arange(number.size), number)
        place = np.arange(run.size) - np.repeat(np.cumsum(number) - number, number)
        rest, last = self.length[run] - columns, np.maximum(number[run] - 1, 1)
        # Spread over the whole run; a single piece in its middle.
        offset = np.where(number[run] > 1, place * rest // last, rest // 2)
        round_globe = place * self.width // np.maximum(number[run], 1)
        offset = np.where(self.circle[run], round_globe, offset)
        return Pieces(
            row=self.row[run],
            start=(self.start[run] + offset) % self.width,
            weight=area[self.row[run]] * covered[run] / np.maximum(number[run], 1),
        )


def _lengths(width: int) -> list[int]:
    """2^n and 3 x 2^n from the longest to `FEWEST_COLUMNS`: quick to transform, and half way."""
    powers = [2**n for n in range(width.bit_length())]
    return sorted((n for n in {*powers, *(3 * n for n in powers)} if FEWEST_COLUMNS <= n <= width),
                  reverse=True)  # fmt: skip


def _spacing(lon: np.ndarray) -> float:
    return float((lon[-1] - lon[0]) / max(1, lon.size - 1))


def _evenly_spaced(lon: np.ndarray) -> bool:
    """To a hundredth of a column: coordinates kept in float32 decide nothing."""
    step = _spacing(lon)
    return bool((np.abs(np.diff(lon) - step) <= 1e-2 * step).all())
