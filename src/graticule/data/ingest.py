"""Ingest: any CF, or nearly CF, files on a latitude-longitude grid into a store.

Metadata of all sources are read first and made to agree: grid, levels, units, calendar and
dates. Then one time step after the other is read, turned north to south and east from [0, 360),
and written. Nothing is guessed silently: what cannot be joined is an error, what is dropped,
merged, converted or not understood is logged.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from graticule import __version__
from graticule.data import cf
from graticule.data.plan import Variable, arrange, plan_variables
from graticule.data.sources import open_sources, pieces_of
from graticule.data.store import LARGEST, Packing, Store, StoreWriter
from graticule.data.times import TimeAxis
from graticule.grid import Grid
from graticule.variables import Channels, Role

logger = logging.getLogger(__name__)

_HASHED_BYTES = 2**28
Progress = Callable[[int, int], None]


def ingest(
    sources: Sequence[Path],
    out: Path,
    *,
    variables: Sequence[str] | None = None,
    roles: Mapping[str, Role] | None = None,
    units: Mapping[str, str] | None = None,
    packing: Literal["float32", "int16"] = "float32",
    inner_chunk: tuple[int, int] | None = None,
    splits: dict[str, list[str]] | None = None,
    time: str | None = None,
    allow_missing_chunks: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Write the store `out` from NetCDF files and Zarr groups.

    variables: which, in this order, `name` or `name@level`; none: all that are on the grid.
    roles: by variable; those left out are prognostic, or static where they have no time.
    units: by variable, converted to; other variables keep theirs, in one spelling.
    packing: float32 reads everything once. int16 reads twice, the first time for the range; it
    keeps the sources' own scale and offset where all files of a variable have the same int16 ones
    and no value meets the store's reserved codes.
    inner_chunk: (channels, rows) stored together. splits: `train`, ... to `first/last` ranges.
    time: the date to give to fields none of which has one (a climatological mean).
    allow_missing_chunks: take absent chunks of a Zarr source for fill values.
    progress: called with (steps done, steps in all).

    ValueError tells what does not fit; `out` is then as it was before.
    """
    sources, out = [Path(source) for source in sources], Path(out)
    if not sources:
        raise ValueError("no source files are given")
    _refuse_output(sources, out)
    wanted = None if variables is None else [name.partition("@")[0] for name in variables]
    with open_sources(sources) as opened:
        pieces = [
            piece
            for path, dataset in opened
            for piece in pieces_of(path, dataset, wanted, allow_missing_chunks)
        ]
        plan = plan_variables(pieces, variables, dict(roles or {}), dict(units or {}))
        static, dynamic, times = arrange(plan, dict(roles or {}), time)
        grid = plan[0].pieces[0].grid
        channels = Channels([channel for variable in dynamic for channel in variable.channels])
        statics = Channels([channel for variable in static for channel in variable.channels])
        times.check_splits(splits or {})  # before hours of reading
        logger.info(
            "%d times from %s to %s, %d x %d points, %d channels: %s",
            len(times), times.date(0), times.date(len(times) - 1), *grid.shape, len(channels),
            ", ".join(channels.names),
        )  # fmt: skip
        passes = 2 if packing == "int16" else 1
        steps = _Steps(dynamic, channels, times, grid, passes * len(times), progress)
        chosen = _choose_packing(steps, dynamic) if packing == "int16" else Packing()
        static_fields = _read_statics(static, grid)
        _refuse_output(sources, out)  # again: the first pass may have taken hours
        existed = out.exists()
        try:
            writer = StoreWriter(
                out, channels=channels, grid=grid, times=times, packing=chosen, statics=statics,
                static_fields=static_fields, splits=splits, inner_chunk=inner_chunk,
                provenance=_provenance(sources, variables, roles, units, packing, time),
            )  # fmt: skip
            for index in range(len(times)):
                try:
                    writer.write(index, steps.read(index, chosen.scale is not None))
                except ValueError as error:
                    raise ValueError(f"{times.date(index)}: {error}") from error
            store = writer.finish()
        except BaseException:
            _remove_half_written(out, existed)
            raise
    _report_holes(store)
    return store


class _Steps:
    """Reads time after time of all channels, watches their bounds and counts what is done."""

    def __init__(
        self,
        dynamic: Sequence[Variable],
        channels: Channels,
        times: TimeAxis,
        grid: Grid,
        total: int,
        progress: Progress | None,
    ) -> None:
        self.dynamic, self.channels, self.times, self.grid = dynamic, channels, times, grid
        self.total, self.done, self.progress = total, 0, progress
        self.beyond: set[str] = set()

    def read(self, index: int, precise: bool) -> np.ndarray:
        """(channel, lat, lon) of one time, NaN where there is no value; float64 if `precise`."""
        dtype = np.float64 if precise else np.float32
        fields = np.full((len(self.channels), *self.grid.shape), np.nan, dtype)
        first = 0
        seconds = int(self.times.seconds[index])
        for variable in self.dynamic:
            last = first + len(variable.levels)
            # What is beyond float32 becomes infinite here and is refused by the writer.
            with np.errstate(over="ignore"):
                variable.read(variable.dates.get(seconds, []), fields[first:last])
            first = last
        self._watch(fields, index)
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
        return fields

    def _watch(self, fields: np.ndarray, index: int) -> None:
        for channel, plane in zip(self.channels, fields, strict=True):
            if channel.name in self.beyond or (channel.low is None and channel.high is None):
                continue
            low = -np.inf if channel.low is None else channel.low
            high = np.inf if channel.high is None else channel.high
            wrong = (plane < low) | (plane > high)
            if wrong.any():
                self.beyond.add(channel.name)
                logger.warning(
                    "%s holds %g %s on %s, outside %g to %g: are its units right?",
                    channel.name, plane[wrong][0], channel.units, self.times.date(index), low, high,
                )  # fmt: skip


def _refuse_output(sources: Sequence[Path], out: Path) -> None:
    target = out.resolve()
    for source in sources:
        inside = source.resolve()
        if target == inside or inside in target.parents or target in inside.parents:
            raise ValueError(
                f"the output {out} is or lies in or around the source {source}; name another place"
            )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already and is not overwritten; name another")


def _remove_half_written(out: Path, existed: bool) -> None:
    """The folder was not there, or was empty: whatever is in it now is ours."""
    if not existed:
        shutil.rmtree(out, ignore_errors=True)
    else:
        for child in list(out.iterdir()):
            shutil.rmtree(child) if child.is_dir() else child.unlink()


def _read_statics(static: Sequence[Variable], grid: Grid) -> np.ndarray | None:
    """(static, lat, lon) float32; all copies of a static, over files and times, must agree."""
    if not static:
        return None
    fields = []
    for variable in static:
        planes = np.full((len(variable.levels), *grid.shape), np.nan, np.float32)
        every = [(piece, i) for piece in variable.pieces for i in range(piece.num_times)]
        try:
            variable.read(every, planes)
        except ValueError as error:
            raise ValueError(f"static {variable.name} is not one field: {error}") from error
        fields.append(planes)
    return np.concatenate(fields)


def _choose_packing(steps: _Steps, dynamic: Sequence[Variable]) -> Packing:
    """int16 scale and offset of each channel, after one pass over all times for the range."""
    low = np.full(len(steps.channels), np.inf)
    high = np.full(len(steps.channels), -np.inf)
    for index in range(len(steps.times)):
        fields = steps.read(index, precise=True)
        low = np.minimum(low, np.where(np.isnan(fields), np.inf, fields).min((1, 2)))
        high = np.maximum(high, np.where(np.isnan(fields), -np.inf, fields).max((1, 2)))
    bad = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))
    if bad.size:
        name = steps.channels.names[int(bad[0])]
        what = "no value at any time" if low[bad[0]] > high[bad[0]] else "infinite values"
        raise ValueError(f"{name} holds {what}")
    chosen = Packing.over_range(low, high)
    assert chosen.scale is not None
    assert chosen.offset is not None
    first = 0
    for variable in dynamic:
        last = first + len(variable.levels)
        own = _own_packing(variable)
        if own is not None:
            scale, offset = own
            codes = np.rint((np.stack([low[first:last], high[first:last]]) - offset) / scale)
            # -32767 and -32768 are the store's own codes, and 32767 is kept out with them.
            if np.abs(codes).max() <= LARGEST:
                chosen.scale[first:last], chosen.offset[first:last] = scale, offset
        first = last
    return chosen


def _own_packing(variable: Variable) -> tuple[float, float] | None:
    """(scale, offset) in the store's units if all pieces are int16 with one and the same."""
    found = {cf.packing_of(piece.variable.attrs) for piece in variable.pieces}
    plain = all(
        piece.variable.dtype == np.int16 and piece.text("_Unsigned").lower() != "true"
        for piece in variable.pieces
    )
    if not plain or len(found) > 1:
        return None
    (scale, offset), (factor, shift) = found.pop(), variable.convert
    return (scale * factor, offset * factor + shift) if scale * factor > 0 else None


def _report_holes(store: Store) -> None:
    for index, name in enumerate(store.channels.names):
        dates = np.flatnonzero(store.missing[:, index])
        if dates.size:
            wet = int(store.wet[index].sum())
            whole = int((store.missing[dates, index] == wet).sum())
            logger.warning(
                "%s: %d dates have missing values (%d of them no value at all), the first is %s",
                name, dates.size, whole, store.times.date(int(dates[0])),
            )  # fmt: skip


def _provenance(
    sources: Sequence[Path],
    variables: Sequence[str] | None,
    roles: Mapping[str, Role] | None,
    units: Mapping[str, str] | None,
    packing: str,
    time: str | None,
) -> dict[str, Any]:
    """What the store was made from and how, without any place of this machine."""
    return {
        "made_by": "graticule data ingest",
        "sources": [_identity(source) for source in sources],
        "variables": None if variables is None else list(variables),
        "roles": dict(roles or {}),
        "units": dict(units or {}),
        "packing": packing,
        "time": time,
        "versions": {
            "graticule": __version__,
            **{name: version(name) for name in ("numpy", "xarray", "zarr", "cftime", "netCDF4")},
        },
    }


def _identity(source: Path) -> dict[str, Any]:
    """Name, size, and a SHA-256 of a file up to 256 MiB or else the time of its last change."""
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    size = sum(path.stat().st_size for path in files)
    identity: dict[str, Any] = {"name": source.name, "bytes": size}
    if source.is_file() and size <= _HASHED_BYTES:
        return {**identity, "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
    return {**identity, "modified": round(max(path.stat().st_mtime for path in files))}
