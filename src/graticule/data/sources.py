"""Files as they come: open NetCDF or Zarr, find the variables on a latitude-longitude grid, and
read one time of one of them as (level, lat, lon) north to south and east from [0, 360)."""

import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from graticule.data import cf
from graticule.data.times import date_of
from graticule.data.units import canonical
from graticule.grid import Grid

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**26
"""Most bytes that are read at once where a source keeps many times in one chunk."""


@dataclass(eq=False)
class Piece:
    """One variable in one source.

    seconds: (time,) int64, None where the variable has no time. levels: as in the source, (None,)
    where there are none. repeats: (n, 2) pairs of source columns that are the same meridian.
    """

    path: Path
    name: str
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

    def where(self, time: int) -> str:
        """`file: variable at date`, for messages."""
        place = f"{self.path.name}: {self.name}"
        if self.seconds is None:
            return place
        return f"{place} at {date_of(int(self.seconds[time]), self.calendar)}"

    def text(self, attribute: str) -> str:
        return str(self.variable.attrs.get(attribute, ""))

    @property
    def block_length(self) -> int:
        """Times worth reading together: the source's chunk, as far as memory allows."""
        if "time" not in self.dims:
            return 1
        chunk = self.variable.encoding.get("preferred_chunks", {}).get(self.dims["time"], 1)
        step_bytes = self.variable.dtype.itemsize * self.variable.size
        step_bytes //= max(self.variable.sizes[self.dims["time"]], 1)
        return int(max(1, min(chunk, BLOCK_BYTES // max(step_bytes, 1))))

    def read_raw(self, first: int, count: int) -> np.ndarray:
        """(time, expver, level, lat, lon) stored numbers of `count` times, source order."""
        chosen = self.variable
        if "time" in self.dims:
            chosen = chosen.isel({self.dims["time"]: slice(first, first + count)})
        try:
            values = np.asarray(chosen.values)
        except Exception as error:  # each library has errors of its own for damaged files
            raise ValueError(
                f"{self.where(min(first, self.num_times - 1))} cannot be read:"
                f" {type(error).__name__}: {error}; the file is damaged, fetch it again"
            ) from error
        axes = ["time", "expver", "level", "lat", "lon"]
        order = [self.variable.dims.index(self.dims[axis]) for axis in axes if axis in self.dims]
        rest = [i for i in range(self.variable.ndim) if i not in order]  # all of size one
        values = values.transpose(*rest, *order)
        sizes = [self.variable.sizes[self.dims[axis]] if axis in self.dims else 1
                 for axis in axes[1:]]  # fmt: skip
        return values.reshape(-1, *sizes)

    @property
    def num_times(self) -> int:
        return 1 if self.seconds is None else int(self.seconds.size)

    def decoded(self, raw: np.ndarray, time: int, factor: float, offset: float) -> np.ndarray:
        """(expver, level, lat, lon) stored numbers to (level, lat, lon) values, NaN where there
        is none, in this piece's units times factor plus offset and in the source's order."""
        return self._merge_expver(cf.decode(raw, self.variable.attrs, factor, offset), time)

    def oriented(self, field: np.ndarray) -> np.ndarray:
        """(level, lat, lon) in the source's order to the store's, repeated meridians dropped."""
        return field[:, self.lat_order][:, :, self.lon_order]

    def _merge_expver(self, decoded: np.ndarray, time: int) -> np.ndarray:
        merged = decoded[0].copy()
        for other in decoded[1:]:
            have, new = np.isfinite(merged), np.isfinite(other)
            clash = have & new & (merged != other)
            if clash.any():
                raise ValueError(
                    f"{self.where(time)} has different values in two slices of expver"
                    f" ({int(clash.sum())} points); select one expver and ingest again"
                )
            merged = np.where(have, merged, other)
        return merged


class BlockReader:
    """Reads a variable's pieces time by time and keeps the block that was read last."""

    def __init__(self) -> None:
        self._piece: Piece | None = None
        self._first = 0
        self._block = np.empty(0)
        self._warned = False

    def read(self, piece: Piece, time: int, factor: float, offset: float) -> np.ndarray:
        """(level, lat, lon) values of one time, times factor plus offset, in store order."""
        if piece is not self._piece or not 0 <= time - self._first < len(self._block):
            length = piece.block_length
            # Blocks begin where the source's chunks do, so that none is decompressed twice.
            first = time - time % length
            self._block = piece.read_raw(first, length)
            self._piece, self._first = piece, first
        field = piece.decoded(self._block[time - self._first], time, factor, offset)
        for repeated, kept in piece.repeats:
            same = np.array_equal(field[..., repeated], field[..., kept], equal_nan=True)
            if not same and not self._warned:
                self._warned = True
                logger.warning(
                    "%s: the repeated meridian (column %d, again at %d) holds other values the"
                    " second time; the first is kept here and at all times",
                    piece.where(time), kept, repeated,
                )  # fmt: skip
        return piece.oriented(field)


@contextmanager
def open_sources(paths: Sequence[Path]) -> Iterator[list[tuple[Path, xr.Dataset]]]:
    """All sources opened without decoding anything; closed at the end."""
    with ExitStack() as stack:
        opened = []
        for path in paths:
            if not path.exists():
                raise ValueError(f"{path} does not exist")
            is_zarr = any((path / name).is_file() for name in ("zarr.json", ".zgroup"))
            if path.is_dir() and not is_zarr:
                raise ValueError(
                    f"{path} is a folder but no Zarr group; name the files in it instead"
                )
            how: dict[str, Any] = {"engine": "zarr", "consolidated": False} if is_zarr else {
                "engine": "netcdf4"
            }  # fmt: skip
            if not os.access(path, os.R_OK):
                raise ValueError(f"{path} may not be read: its permissions forbid it")
            try:
                dataset = xr.open_dataset(path, decode_cf=False, cache=False, chunks=None, **how)
            except (OSError, ValueError, KeyError) as error:
                raise ValueError(
                    f"{path.name} is neither NetCDF nor Zarr that can be opened: {error}; convert"
                    " it first (GRIB: `cdo -f nc copy`)"
                ) from error
            opened.append((path, stack.enter_context(dataset)))
        yield opened


def pieces_of(
    path: Path, dataset: xr.Dataset, wanted: Sequence[str] | None, allow_missing_chunks: bool
) -> list[Piece]:
    """The gridded variables of one source; those in `wanted` only, if given.

    In the file's order; the variables of a Zarr group have none and come by name.

    ValueError for a grid that is not latitude by longitude, a dimension without a meaning, and
    lost chunks of a Zarr source.
    """
    variables = dataset.variables
    helpers = {str(dim) for dim in dataset.dims}
    for variable in variables.values():
        for attribute in ("bounds", "climatology", "coordinates", "grid_mapping", "edges"):
            helpers |= set(str(variable.attrs.get(attribute, "")).split())
    pieces = []
    for name in sorted(map(str, variables)) if path.is_dir() else map(str, variables):
        variable = variables[name]
        if wanted is not None and name not in wanted:
            continue
        if wanted is None and (name in helpers or variable.dtype.kind not in "iuf"):
            continue
        axes = {
            dim: cf.axis_of(dim, variables[dim].attrs if dim in variables else None)
            for dim in map(str, variable.dims)
        }
        dims = {str(axis): label for label, axis in axes.items() if axis is not None}
        if not {"lat", "lon"} <= set(dims):
            kind = cf.foreign_grid(variable, variables)
            if kind is not None:
                raise ValueError(
                    f"{path.name}: {name} is on a {kind}, not on a regular latitude-longitude one;"
                    " regrid it first, for instance with xESMF or `cdo remapbil`"
                )
            if wanted is not None:
                raise ValueError(
                    f"{path.name}: {name} ({', '.join(map(str, variable.dims))}) has no latitude"
                    " and longitude dimensions"
                )
            logger.info("%s: %s has no latitude and longitude; left out", path.name, name)
            continue
        try:
            piece = _piece(path, name, variable, variables, axes, dims)
        except ValueError as error:
            raise ValueError(f"{path.name}: {name}: {error}") from error
        if path.is_dir():
            _refuse_lost_chunks(piece, allow_missing_chunks)
        pieces.append(piece)
    return pieces


def _piece(
    path: Path,
    name: str,
    variable: xr.Variable,
    variables: Any,
    axes: dict[str, cf.Axis | None],
    dims: dict[str, str],
) -> Piece:
    known = [axis for axis in axes.values() if axis is not None]
    for axis in known:
        if known.count(axis) > 1:
            both = [dim for dim, kind in axes.items() if kind == axis]
            raise ValueError(f"dimensions {' and '.join(both)} both look like {axis}")
    for dim, kind in axes.items():
        if kind is None and variable.sizes[dim] > 1:
            raise ValueError(
                f"dimension {dim} (size {variable.sizes[dim]}) is neither time, level, latitude"
                " nor longitude; select one of its items first"
            )
    for axis in ("lat", "lon"):
        if dims[axis] not in variables:
            raise ValueError(f"dimension {dims[axis]} has no coordinate values")
    lat, lon, lat_order, lon_order, repeats = cf.horizontal_order(
        _coordinate(variables[dims["lat"]]), _coordinate(variables[dims["lon"]])
    )
    seconds, calendar = _times(variable, variables, dims)
    if seconds is None and "time" in dims:  # one item and no date: a static with a time dimension
        dims = {axis: dim for axis, dim in dims.items() if axis != "time"}
    levels: tuple[float | None, ...] = (None,)
    level_units = ""
    if "level" in dims:
        if dims["level"] in variables:
            coordinate = variables[dims["level"]]
            levels = tuple(float(level) for level in _coordinate(coordinate))
            level_units = canonical(str(coordinate.attrs.get("units", "")))
        elif variable.sizes[dims["level"]] > 1:
            raise ValueError(f"dimension {dims['level']} has no coordinate values")
    return Piece(
        path, name, variable, dims, seconds, calendar, levels, level_units, Grid(lat, lon),
        lat_order, lon_order, repeats, canonical(str(variable.attrs.get("units", ""))),
    )  # fmt: skip


def _coordinate(variable: xr.Variable) -> np.ndarray:
    return cf.decode(np.asarray(variable.values), variable.attrs).astype(np.float64)


def _times(
    variable: xr.Variable, variables: Any, dims: dict[str, str]
) -> tuple[np.ndarray | None, str]:
    """(time,) seconds and calendar, from the coordinate or else an auxiliary one."""
    if "time" not in dims:
        return None, ""
    dim = dims["time"]
    auxiliary = [name for name in str(variable.attrs.get("coordinates", "")).split()
                 if name in variables and variables[name].dims == (dim,)
                 and variables[name].attrs.get("standard_name") == "time"]  # fmt: skip
    for name in (dim, *auxiliary):
        if name in variables and " since " in str(variables[name].attrs.get("units", "")):
            coordinate = variables[name]
            raw = np.asarray(coordinate.values)
            fills = cf.fill_values(coordinate.attrs, raw.dtype)
            if np.isin(raw, fills).any():
                raise ValueError(f"{int(np.isin(raw, fills).sum())} of {raw.size} times are fills")
            scaled = {"scale_factor", "add_offset"} & set(coordinate.attrs)
            numbers = cf.decode(raw, coordinate.attrs) if scaled else raw
            return cf.decode_time(
                numbers, str(coordinate.attrs["units"]), str(coordinate.attrs.get("calendar", ""))
            )
    if variable.sizes[dim] == 1:
        return None, ""
    raise ValueError(f"dimension {dim} has no times in units such as `days since 2000-01-01`")


def _refuse_lost_chunks(piece: Piece, allowed: bool) -> None:
    """A chunk of a Zarr array that is not there reads as fill: find it by its key."""
    array = zarr.open_array(str(piece.path), path=piece.name, mode="r")
    chunk = array.shards or array.chunks
    counts = [-(-size // part) for size, part in zip(array.shape, chunk, strict=True)]
    folder = piece.path / piece.name
    lost = [
        index
        for index in itertools.product(*map(range, counts))
        if not (folder / array.metadata.encode_chunk_key(index)).is_file()
    ]
    if not lost:
        return
    span = ""
    if piece.seconds is not None:
        axis = piece.variable.dims.index(piece.dims["time"])
        parts = [
            piece.seconds[index[axis] * chunk[axis] : (index[axis] + 1) * chunk[axis]]
            for index in lost
        ]
        first, last = min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
        span = f", from {date_of(first, piece.calendar)} to {date_of(last, piece.calendar)}"
    key = array.metadata.encode_chunk_key(lost[0])
    text = (
        f"{piece.path.name}: {piece.name} lacks {len(lost)} of {int(np.prod(counts))} chunks"
        f"{span} (first {piece.name}/{key})"
    )
    if not allowed:
        raise ValueError(
            f"{text}; they would read as fill values. Fetch them again, or, if this source leaves"
            " chunks of nothing but fill values away, pass allow_missing_chunks"
        )
    logger.warning("%s; taken as fill values", text)
