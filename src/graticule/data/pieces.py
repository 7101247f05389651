"""One variable in one source: read plane by plane, decoded or kept as stored, and put in place."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xarray as xr

from graticule.data import cf
from graticule.data.shardfile import LAND, NEVER_WRITTEN
from graticule.data.times import date_of
from graticule.grid import Grid

BLOCK_BYTES = 2**28
"""Most bytes that are read at once where a source keeps many levels or times in one chunk."""


@dataclass(eq=False)
class Piece:
    """One variable in one source.

    name: in the store. key: in the file. seconds: (time,) int64, None where the variable has no
    time. levels: as in the source, (None,) where there are none. repeats: (n, 2) pairs of source
    columns that are the same meridian. sea: (level or 1, lat, lon) bool in the source's order,
    what the file's own mask says; None: there is none.
    """

    path: Path
    name: str
    key: str
    variable: xr.Variable
    dims: dict[str, str]
    """Axis (`time`, `level`, `lat`, `lon`, `expver`) to this file's name of it."""
    seconds: np.ndarray | None
    calendar: str
    levels: tuple[float | None, ...]
    level_units: str
    grid: Grid
    lat_order: np.ndarray
    lon_order: np.ndarray
    repeats: np.ndarray
    units: str
    sea: np.ndarray | None = None

    def where(self, time: int) -> str:
        """`file: variable at date`, for messages."""
        place = f"{self.path.name}: {self.key}"
        if self.seconds is None:
            return place
        return f"{place} at {date_of(int(self.seconds[time]), self.calendar)}"

    def text(self, attribute: str) -> str:
        return str(self.variable.attrs.get(attribute, ""))

    def _chunk(self, axis: str) -> int:
        if axis not in self.dims:
            return 1
        dim = self.dims[axis]
        chunk = self.variable.encoding.get("preferred_chunks", {}).get(dim, 1)
        return int(max(1, min(chunk, self.variable.sizes[dim])))

    def block_shape(self, most_bytes: int) -> tuple[int, int]:
        """(times, levels) worth reading together: the source's chunks, as far as memory allows."""
        rest = [self.dims[axis] for axis in ("time", "level") if axis in self.dims]
        plane = self.variable.dtype.itemsize * int(
            np.prod([size for dim, size in self.variable.sizes.items() if dim not in rest])
        )
        num_levels = len(self.levels)
        times = min(self._chunk("time"), most_bytes // max(plane * num_levels, 1))
        if times > 1:
            return times, num_levels
        return 1, int(max(1, min(self._chunk("level"), BLOCK_BYTES // max(plane, 1))))

    def read_raw(self, times: slice, levels: slice) -> np.ndarray:
        """(time, expver, level, lat, lon) stored numbers, source order."""
        chosen = self.variable
        for axis, part in (("time", times), ("level", levels)):
            if axis in self.dims:
                chosen = chosen.isel({self.dims[axis]: part})
        try:
            values = np.asarray(chosen.values)
        except Exception as error:  # each library has errors of its own for damaged files
            raise ValueError(
                f"{self.where(min(times.start, self.num_times - 1))} cannot be read:"
                f" {type(error).__name__}: {error}; the file is damaged, fetch it again"
            ) from error
        axes = ["time", "expver", "level", "lat", "lon"]
        order = [chosen.dims.index(self.dims[axis]) for axis in axes if axis in self.dims]
        rest = [i for i in range(chosen.ndim) if i not in order]  # all of size one
        values = values.transpose(*rest, *order)
        sizes = [chosen.sizes[self.dims[axis]] if axis in self.dims else 1
                 for axis in axes[1:]]  # fmt: skip
        return values.reshape(-1, *sizes)

    @property
    def num_times(self) -> int:
        return 1 if self.seconds is None else int(self.seconds.size)

    @property
    def own_packing(self) -> tuple[float, float] | None:
        """(scale, offset) of numbers that int16 holds as they are; None: they are others."""
        kind, size = self.variable.dtype.kind, self.variable.dtype.itemsize
        unsigned = kind == "u" or self.text("_Unsigned").lower() == "true"
        if kind not in "iu" or size > 2 or (unsigned and size > 1):
            return None
        return cf.packing_of(self.variable.attrs)

    def codes(self, raw: np.ndarray, time: int, level: int) -> np.ndarray:
        """(lat, lon) int16 of a plane's raw numbers (expver, lat, lon): the source's own, land and
        missing values as the store's code. To be asked of a piece with `own_packing` only."""
        if self.text("_Unsigned").lower() == "true" and raw.dtype.kind == "i":
            raw = raw.view(raw.dtype.str.replace("i", "u"))
        missing = np.zeros(raw.shape, bool)
        for fill in cf.fill_values(self.variable.attrs, raw.dtype):
            missing |= raw == fill
        codes = raw.astype(np.int16)
        taken = (codes <= NEVER_WRITTEN) & ~missing
        if taken.any():
            raise ValueError(
                f"{self.where(time)} holds the stored number {codes[taken][0]} as a value, which"
                " marks missing values in a store: its packing cannot be kept. Pass --packing"
                " int16 (rounded anew over its range) or float32 (exact to 6e-8 of a value)"
            )
        codes[missing] = LAND
        return self._at_sea(self._merge_expver(codes, codes == LAND, time), level, LAND)

    def values(
        self, raw: np.ndarray, time: int, level: int, factor: float, offset: float
    ) -> np.ndarray:
        """(lat, lon) values of a plane's raw numbers (expver, lat, lon), NaN where there is none,
        in this piece's units times factor plus offset and in the source's order."""
        decoded = cf.decode(raw, self.variable.attrs, factor, offset)
        return self._at_sea(self._merge_expver(decoded, np.isnan(decoded), time), level, np.nan)

    def _at_sea(self, plane: np.ndarray, level: int, absent: float) -> np.ndarray:
        if self.sea is not None:
            plane[~self.sea[min(level, len(self.sea) - 1)]] = absent
        return plane

    def _merge_expver(self, slices: np.ndarray, absent: np.ndarray, time: int) -> np.ndarray:
        """One field of the slices of `expver`, each of which lacks what another has."""
        merged, lacks = slices[0].copy(), absent[0]
        for other, other_lacks in zip(slices[1:], absent[1:], strict=True):
            clash = ~lacks & ~other_lacks & (merged != other)
            if clash.any():
                raise ValueError(
                    f"{self.where(time)} has different values in two slices of expver"
                    f" ({int(clash.sum())} points); select one expver and ingest again"
                )
            merged = np.where(lacks, other, merged)
            lacks = lacks & other_lacks
        return merged

    def place(self, plane: np.ndarray, into: np.ndarray) -> None:
        """Copy (lat, lon) in the source's order to the store's, repeated meridians dropped."""
        rows = plane[_as_slice(self.lat_order)]
        cuts = np.flatnonzero(np.diff(self.lon_order) != 1) + 1
        if cuts.size > 4:
            into[...] = rows[:, self.lon_order]
            return
        # A globe that begins elsewhere is two runs of columns.
        for run in np.split(np.arange(self.lon_order.size), cuts):
            source = self.lon_order[run]
            into[:, run[0] : run[-1] + 1] = rows[:, source[0] : source[-1] + 1]

    def without_south_pole(self) -> "Piece":
        """The same without its southernmost row. ValueError if that is not at the pole."""
        if self.grid.lat[-1] > -90 + 1e-3:
            raise ValueError(
                f"{self.path.name}: the last row of {self.key} is at {self.grid.lat[-1]:g}, not at"
                " the south pole: there is none to drop"
            )
        grid = Grid(self.grid.lat[:-1], self.grid.lon)
        return replace(self, grid=grid, lat_order=self.lat_order[:-1])


def _as_slice(order: np.ndarray) -> slice | np.ndarray:
    """A run of indices up or down as a slice, which copies nothing."""
    steps = np.diff(order)
    if order.size > 1 and abs(steps[0]) == 1 and (steps == steps[0]).all():
        stop = int(order[-1] + steps[0])
        return slice(int(order[0]), None if stop < 0 else stop, int(steps[0]))
    return order


class BlockReader:
    """Reads a variable's pieces plane by plane and keeps the block that was read last.

    most_bytes: of a block of several times; one of a single time is dropped after its last level.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._held: tuple[Piece, int, int] | None = None
        self._block = np.empty(0)

    def raw(self, piece: Piece, time: int, level: int) -> np.ndarray:
        """(expver, lat, lon) stored numbers of one plane, source order."""
        times, levels = piece.block_shape(self.most_bytes)
        # Blocks begin where the source's chunks do, so that none is decompressed twice.
        first, low = time - time % times, level - level % levels
        if self._held != (piece, first, low):
            self.drop()
            self._block = piece.read_raw(slice(first, first + times), slice(low, low + levels))
            self._held = (piece, first, low)
        return self._block[time - first, :, level - low]

    def drop(self) -> None:
        self._held, self._block = None, np.empty(0)

    def drop_single(self) -> None:
        """Drop a block of one time, which is read to its end."""
        if len(self._block) == 1:
            self.drop()
