"""Files as they come: open NetCDF or Zarr and find the variables on a latitude-longitude grid,
which `pieces` then reads plane by plane, north to south and east from [0, 360)."""

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from graticule.data import cf
from graticule.data.known import OM4_LEVELS_M, Source, numbered
from graticule.data.pieces import Piece
from graticule.data.times import date_of
from graticule.data.units import canonical
from graticule.grid import Grid

logger = logging.getLogger(__name__)


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
    path: Path,
    dataset: xr.Dataset,
    wanted: Sequence[str] | None,
    allow_missing_chunks: bool,
    source: Source,
) -> list[Piece]:
    """The gridded variables of one source; those in `wanted` only, if given.

    In the file's order; the variables of a Zarr group have none and come by name.

    ValueError for a grid that is not latitude by longitude, a dimension without a meaning, and
    lost chunks of a Zarr source.
    """
    variables: Any = dataset.variables
    if path.is_dir():
        variables = {name: _without_default_fill(path, str(name), variable)
                     for name, variable in variables.items()}  # fmt: skip
    helpers = {str(dim) for dim in dataset.dims}
    for variable in variables.values():
        for attribute in ("bounds", "climatology", "coordinates", "grid_mapping", "edges"):
            helpers |= set(str(variable.attrs.get(attribute, "")).split())
    pieces = []
    straight: dict[tuple[str, str], Any] = {}
    masks: dict[str, np.ndarray] = {}
    for key in sorted(map(str, variables)) if path.is_dir() else map(str, variables):
        variable = variables[key]
        found = numbered(key) if source.numbered else None
        name = key if found is None else found[0]
        if wanted is not None and name not in wanted:
            continue
        if wanted is None and (key in helpers or variable.dtype.kind not in "iuf"):
            continue
        axes = {
            dim: cf.axis_of(dim, variables[dim].attrs if dim in variables else None)
            for dim in map(str, variable.dims)
        }
        lat_lon = None
        if not {"lat", "lon"} <= set(axes.values()):
            lat_lon = _straight_positions(variable, variables, straight)
            if lat_lon is not None:
                axes |= {lat_lon[0]: "lat", lat_lon[1]: "lon"}
        dims = {str(axis): label for label, axis in axes.items() if axis is not None}
        if not {"lat", "lon"} <= set(dims):
            kind = cf.foreign_grid(variable, variables)
            if kind is not None:
                raise ValueError(
                    f"{path.name}: {key} is on a {kind}, not on a regular latitude-longitude one;"
                    " regrid it first, for instance with xESMF or `cdo remapbil`"
                )
            if wanted is not None:
                raise ValueError(
                    f"{path.name}: {key} ({', '.join(map(str, variable.dims))}) has no latitude"
                    " and longitude dimensions"
                )
            logger.info("%s: %s has no latitude and longitude; left out", path.name, key)
            continue
        try:
            piece = _piece(path, name, key, variable, variables, axes, dims, lat_lon, source)
            if found is not None:
                piece.levels, piece.level_units = _level_of(found, variables, source)
            if source.numbered:
                piece.sea = _own_mask(piece, found, variables, masks)
        except ValueError as error:
            raise ValueError(f"{path.name}: {key}: {error}") from error
        if path.is_dir():
            _refuse_lost_chunks(piece, allow_missing_chunks)
        pieces.append(piece)
    # By name thetao_10 comes before thetao_2.
    if source.numbered:
        pieces.sort(key=lambda piece: (numbered(piece.key) or ("", 0))[1])
    return pieces


def _straight_positions(
    variable: xr.Variable, variables: Mapping[Any, xr.Variable], known: dict[tuple[str, str], Any]
) -> tuple[str, str, np.ndarray, np.ndarray] | None:
    """(lat dim, lon dim, latitudes, longitudes) where two-dimensional positions are a regular
    grid's; None where they are not, or there are none."""
    names = cf.positions_over(variable, variables)
    if names is None or any(len(variables[name].dims) != 2 for name in names):
        return None
    if names not in known:
        dims = variables[names[0]].dims
        straight = None
        if variables[names[1]].dims == dims:
            straight = cf.straightened(*(_coordinate(variables[name]) for name in names))
        known[names] = straight and (
            str(dims[straight[0]]), str(dims[1 - straight[0]]), straight[1], straight[2],
        )  # fmt: skip
    return known[names]


def _piece(
    path: Path,
    name: str,
    key: str,
    variable: xr.Variable,
    variables: Any,
    axes: dict[str, cf.Axis | None],
    dims: dict[str, str],
    lat_lon: tuple[str, str, np.ndarray, np.ndarray] | None,
    source: Source,
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
    if lat_lon is None:
        for axis in ("lat", "lon"):
            if dims[axis] not in variables:
                raise ValueError(f"dimension {dims[axis]} has no coordinate values")
        latitudes, longitudes = (_coordinate(variables[dims[axis]]) for axis in ("lat", "lon"))
    else:
        latitudes, longitudes = lat_lon[2:]
    lat, lon, lat_order, lon_order, repeats = cf.horizontal_order(latitudes, longitudes)
    seconds, calendar = _times(variable, variables, dims)
    if seconds is None and "time" in dims:  # one item and no date: a static with a time dimension
        dims = {axis: dim for axis, dim in dims.items() if axis != "time"}
    levels: tuple[float | None, ...] = (None,)
    level_units = ""
    if "level" in dims:
        if dims["level"] in variables:
            coordinate = variables[dims["level"]]
            levels = tuple(_shortest(level) for level in _coordinate(coordinate))
            level_units = canonical(str(coordinate.attrs.get("units", "")))
            level_units = level_units or source.level_units
        elif variable.sizes[dims["level"]] > 1:
            raise ValueError(f"dimension {dims['level']} has no coordinate values")
    units = canonical(str(variable.attrs.get("units", "")))
    if not units and name in source.units:
        units = source.units[name]
        logger.info("%s: %s gives no units; those of %s are %s", path.name, key, source.name, units)
    return Piece(
        path, name, key, variable, dims, seconds, calendar, levels, level_units, Grid(lat, lon),
        lat_order, lon_order, repeats, units,
    )  # fmt: skip


def _level_of(
    found: tuple[str, int], variables: Mapping[Any, xr.Variable], source: Source
) -> tuple[tuple[float], str]:
    """The level of an array such as `thetao_3`: the fourth of `lev`, or of OM4's own."""
    there = _coordinate(variables["lev"]) if "lev" in variables else np.array(OM4_LEVELS_M)
    levels = [_shortest(level) for level in there]
    if found[1] >= len(levels):
        raise ValueError(f"there is no level {found[1]}: lev has {len(levels)}")
    return (levels[found[1]],), source.level_units


def _own_mask(
    piece: Piece,
    found: tuple[str, int] | None,
    variables: Mapping[Any, xr.Variable],
    known: dict[str, np.ndarray],
) -> np.ndarray | None:
    """(level or 1, lat, lon) bool of the file's own masks: `mask_3` for level 3, else `mask`;
    variables without levels have the surface's."""
    names = [f"mask_{found[1]}" if found is not None else "mask_0", "mask"]
    name = next((name for name in names if name in variables), None)
    if name is None:
        return None
    if name not in known:
        mask = variables[name]
        order = [piece.dims[axis] for axis in ("lat", "lon")]
        rest = [str(dim) for dim in mask.dims if dim not in order]
        if not set(order) <= set(mask.dims) or len(rest) > 1:
            raise ValueError(f"{name} ({', '.join(map(str, mask.dims))}) is no mask of its grid")
        values = np.asarray(mask.transpose(*rest, *order).values).astype(np.float64)
        known[name] = np.nan_to_num(values.reshape(-1, *values.shape[-2:])) != 0
    planes = known[name]
    if found is not None and len(planes) > found[1]:
        return planes[found[1] : found[1] + 1]
    # All levels only for a variable that has them all.
    return planes if len(planes) == len(piece.levels) else planes[:1]


def _shortest(level: float) -> float:
    """A number kept in float32 as it was meant: 77.85385 m, not 77.8538513 m, so that a channel
    has the same name whatever precision its files have."""
    single = np.float32(level)
    return float(str(single)) if single == level else float(level)


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


def _without_default_fill(path: Path, key: str, variable: xr.Variable) -> xr.Variable:
    """Without the 0 that Zarr v2 writes as a fill value where nobody chose one: rain is 0."""
    if variable.attrs.get("_FillValue") is None or np.ravel(variable.attrs["_FillValue"])[0] != 0:
        return variable
    array = zarr.open_array(str(path), path=key, mode="r")
    if array.metadata.zarr_format != 2 or "_FillValue" in dict(array.attrs):
        return variable
    changed = variable.copy(deep=False)
    changed.attrs = {name: v for name, v in variable.attrs.items() if name != "_FillValue"}
    return changed


def _refuse_lost_chunks(piece: Piece, allowed: bool) -> None:
    """A chunk of a Zarr array that is not there reads as fill: find it by its key."""
    array = zarr.open_array(str(piece.path), path=piece.key, mode="r")
    chunk = array.shards or array.chunks
    counts = [-(-size // part) for size, part in zip(array.shape, chunk, strict=True)]
    folder = piece.path / piece.key
    there = {
        os.path.relpath(os.path.join(place, file), folder)
        for place, _, files in os.walk(folder)
        for file in files
    }
    lost = [
        index
        for index in itertools.product(*map(range, counts))
        if array.metadata.encode_chunk_key(index) not in there
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
        f"{piece.path.name}: {piece.key} lacks {len(lost)} of {int(np.prod(counts))} chunks"
        f"{span} (first {piece.key}/{key})"
    )
    if not allowed:
        raise ValueError(
            f"{text}; they would read as fill values. Fetch them again, or, if this source leaves"
            " chunks of nothing but fill values away, pass allow_missing_chunks"
        )
    logger.warning("%s; taken as fill values", text)
