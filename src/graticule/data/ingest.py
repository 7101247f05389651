"""Ingest: files on a latitude-longitude grid, of known sources or any CF ones, into a store.

Metadata of all sources are read first and made to agree: grid, levels, units, calendar and
dates. Then time steps are read, turned north to south and east from [0, 360), and written, by as
many processes as are given. Nothing is guessed silently: what cannot be joined is an error, what
is dropped, merged, converted or not understood is logged.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr

from graticule import __version__
from graticule.config import fingerprint
from graticule.data import known
from graticule.data.packings import PackingChoice, chosen_packing
from graticule.data.pieces import Piece
from graticule.data.plan import ChosenLevels, Levels, arrange, plan_variables
from graticule.data.shares import Everyone, Progress
from graticule.data.sources import open_sources, pieces_of
from graticule.data.statistics import FILE_NAME, span
from graticule.data.steps import Steps, read_statics
from graticule.data.store import Store, read_attributes
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.variables import Channels, Role

logger = logging.getLogger(__name__)

_HASHED_BYTES = 2**28


def ingest(
    sources: Sequence[Path],
    out: Path,
    *,
    source: str = "auto",
    variables: Sequence[str] | None = None,
    levels: Sequence[float] | Literal["all"] | None = None,
    roles: Mapping[str, Role] | None = None,
    units: Mapping[str, str] | None = None,
    packing: PackingChoice = "source",
    inner_chunk: tuple[int, ...] | None = None,
    splits: dict[str, list[str]] | None = None,
    time: str | None = None,
    drop_south_pole: bool = False,
    allow_missing_chunks: bool = False,
    workers: int = 1,
    part: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> Store | None:
    """Write the store `out` from NetCDF files and Zarr groups, or go on with it.

    source: `glorys12`, `era5`, `om4` or `cf`; `auto` recognises it and logs why.
    variables: which, in this order, `name` or `name@level`; none: those of the source.
    levels: which, to 1 %, of the variables that have any; none: those of the source; `all`.
    roles: by variable; those left out are the source's, else prognostic, or static without time.
    units: by variable, converted to; other variables keep theirs, in one spelling.
    packing: `source` keeps the sources' own int16 numbers, scale and offset exactly where all
    variables have them, and is float32 otherwise. `int16` keeps those that have them and rounds
    the others over their range, for which everything is read twice.
    inner_chunk: (channels, rows) or (channels, rows, columns) stored together. splits: `train`,
        ... to `first/last` ranges.
    time: the date to give to fields none of which has one (a climatological mean).
    drop_south_pole: leave the row at 90 S out (721 rows become 720).
    allow_missing_chunks: take absent chunks of a Zarr source for fill values.
    workers: processes. part: (i, n) writes the i-th of n parts of the times, i from 1; whoever
    ends last finishes the store. progress: called with (steps done, steps in all).

    With a `train` split the statistics over it are gathered while the steps are written and saved
    in the store: no source is read again for them. For the change from step to step, each step's
    neighbour is read back from the store once, an inner chunk at a time; changes that are missing
    at the end, of steps written at the same moment or before a kill, are computed then, from both
    steps read again, and their number is logged.

    Returns None where a part is done and others are not. A call that is stopped, killed too, is
    gone on with by the same call; a store that another call began is refused. ValueError tells
    what does not fit; steps that are finished stay.
    """
    sources, out = [Path(source) for source in sources], Path(out)
    if not sources:
        raise ValueError("no source files are given")
    if part is not None and not 1 <= part[0] <= part[1]:
        raise ValueError(f"part {part[0]}/{part[1]}: parts of {part[1]} are 1 to {part[1]}")
    _refuse_places(sources, out)
    with open_sources(sources) as opened:
        kind, pieces, wanted = _gridded(opened, source, variables, allow_missing_chunks)
        if drop_south_pole:
            pieces = [piece.without_south_pole() for piece in pieces]
        there = {piece.name for piece in pieces}
        roles = {**{n: r for n, r in kind.roles.items() if n in there}, **(roles or {})}
        chosen = _levels(levels, kind)
        plan = plan_variables(pieces, wanted, roles, dict(units or {}), chosen)
        static, dynamic, times = arrange(plan, roles, time)
        grid = plan[0].pieces[0].grid
        times.check_splits(splits or {})  # before hours of reading
        identities = _identities(sources)
        steps = Steps(
            dynamic, times, grid,
            {path: fingerprint(identity) for path, identity in identities.items()},
        )  # fmt: skip
        logger.info(
            "%d times from %s to %s, %d x %d points, %d channels: %s",
            len(times), times.date(0), times.date(len(times) - 1), *grid.shape,
            len(steps.channels), ", ".join(steps.channels.names),
        )  # fmt: skip
        provenance = {
            "made_by": "graticule data ingest",
            "sources": list(identities.values()),
            "source": kind.name,
            "variables": None if variables is None else list(variables),
            "levels": None if levels is None else levels if levels == "all" else list(levels),
            "roles": dict(roles),
            "units": dict(units or {}),
            "packing": packing,
            "inner_chunk": None if inner_chunk is None else list(inner_chunk),
            "time": time,
            "drop_south_pole": drop_south_pole,
            "allow_missing_chunks": allow_missing_chunks,
            "versions": {
                "graticule": __version__,
                **{n: version(n) for n in ("numpy", "xarray", "zarr", "cftime", "netCDF4")},
            },
        }
        begun = _begun(out, provenance, splits or {})
        if begun.get("complete"):
            logger.info("%s is complete already", out)
            if (splits or {}).get("train") and not (out / FILE_NAME).is_file():
                logger.warning(
                    "%s has no statistics; compute them with `graticule data stats %s`", out, out
                )
            return Store(out)
        everyone = Everyone(steps, workers, progress)
        stored_as, kept = chosen_packing(packing, everyone, begun)
        steps = everyone.steps = steps.with_packing(stored_as, kept)
        existed = out.exists()
        writer = StoreWriter(
            out, channels=steps.channels, grid=grid, times=times, packing=stored_as,
            statics=Channels([channel for variable in static for channel in variable.channels]),
            static_fields=read_statics(static, grid), splits=splits, inner_chunk=inner_chunk,
            provenance=provenance, training=_training(times, splits), resume=True,
        )  # fmt: skip
        try:
            everyone.write(_times_of(part, len(times)), writer)
            left = writer.unfinished()
            if left:
                logger.info(
                    "%s: %d of %d steps are not written yet; the last part finishes the store",
                    out, len(left), len(times),
                )  # fmt: skip
                return None
            everyone.write_changes(writer)
            store = writer.finish()
        except BaseException:
            if not read_attributes(out).get("complete"):
                _leave(writer, existed, alone=not begun and part is None)
            raise
    _report_holes(store)
    return store


def _training(times: TimeAxis, splits: Mapping[str, Sequence[str]] | None) -> np.ndarray | None:
    """Indices of the times of the train split."""
    ranges = (splits or {}).get("train")
    if not ranges:
        return None
    training = np.flatnonzero(times.within(ranges))
    first, last, number = span(times, training)
    logger.info(
        "statistics of the %d training times, %s to %s, are gathered in this pass; for the change"
        " from step to step each one's neighbour is read back from the store once",
        number, first, last,
    )  # fmt: skip
    return training


def _gridded(
    opened: Sequence[tuple[Path, xr.Dataset]],
    source: str,
    variables: Sequence[str] | None,
    allow_missing_chunks: bool,
) -> tuple[known.Source, list[Piece], list[str] | None]:
    """The kind of source, the pieces that are wanted of it, and the variables by name."""
    dims: dict[str, tuple[str, ...]] = {}
    packed: list[str] = []
    for _, dataset in opened:
        for name, variable in dataset.variables.items():
            dims[str(name)] = tuple(map(str, variable.dims))
            if variable.dtype.kind in "iu" and "scale_factor" in variable.attrs:
                packed.append(str(name))
    if source == "auto":
        about = " ".join(str(value) for value in opened[0][1].attrs.values())
        source, why = known.recognise(dims, packed, about)
        logger.info("source: %s, recognised by %s (--source overrides)", source, why)
    elif source not in known.SOURCES:
        raise ValueError(f"source {source!r} is none of auto, {', '.join(known.SOURCES)}")
    kind = known.SOURCES[source]
    there = list(dict.fromkeys(
        found[0] if kind.numbered and (found := known.numbered(name)) else name for name in dims
    ))  # fmt: skip
    coordinates = {name for names in dims.values() for name in names}
    offered = [name for name in there if name not in coordinates]
    wanted = list(variables) if variables is not None else known.default_variables(kind, there)
    names = None if wanted is None else [name.partition("@")[0] for name in wanted]
    unknown = [name for name in names or () if name not in offered]
    if unknown:
        raise ValueError(
            f"variables: no variable {', '.join(unknown)} in the sources, which hold"
            f" {', '.join(offered)}"
        )
    if variables is None and wanted is not None:
        rest = [name for name in offered if name not in wanted]
        logger.info(
            "taken: %s; left out: %s (--variables names others)",
            ", ".join(wanted), ", ".join(rest) or "nothing",
        )  # fmt: skip
    pieces = [
        piece
        for path, dataset in opened
        for piece in pieces_of(path, dataset, names, allow_missing_chunks, kind)
    ]
    return kind, pieces, wanted


def _levels(asked: Sequence[float] | Literal["all"] | None, kind: known.Source) -> Levels:
    if asked == "all":
        return None
    if asked is not None:
        return ChosenLevels(tuple(float(level) for level in asked))
    return ChosenLevels(kind.levels, must_exist=False) if kind.levels else None


def _times_of(part: tuple[int, int] | None, number: int) -> list[int]:
    """The i-th of n runs of neighbouring times, as equal as can be."""
    if part is None:
        return list(range(number))
    return [int(i) for i in np.array_split(np.arange(number), part[1])[part[0] - 1]]


def _refuse_places(sources: Sequence[Path], out: Path) -> None:
    target = out.resolve()
    for source in sources:
        inside = source.resolve()
        if target == inside or inside in target.parents or target in inside.parents:
            raise ValueError(
                f"the output {out} is or lies in or around the source {source}; name another place"
            )


def _begun(out: Path, provenance: dict[str, Any], splits: dict[str, list[str]]) -> dict[str, Any]:
    """Attributes of the store that the same call began at `out`; {}: there is nothing.

    ValueError where anything else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return {}
    attributes = read_attributes(out)
    theirs = attributes.get("provenance", {})
    if theirs.get("made_by") != provenance["made_by"]:
        raise ValueError(f"{out} exists already and is not overwritten; name another")

    def command(values: Mapping[str, Any]) -> dict[str, Any]:
        names = [source["name"] for source in values["sources"]]
        return {**{k: v for k, v in values.items() if k != "versions"}, "sources": names}

    before = {**command(theirs), "splits": attributes["splits"]}
    now = {**command(provenance), "splits": splits}
    different = [key for key in now if now[key] != before.get(key)]
    if attributes.get("complete") and not different and theirs["sources"] != provenance["sources"]:
        different = ["sources, which have changed since"]
    if different:
        key = different[0]
        shown = f" ({before.get(key)} then, {now[key]} now)" if key in now else ""
        state = "exists already" if attributes.get("complete") else "was begun"
        raise ValueError(
            f"{out} {state} with other {', '.join(different)}{shown} and is not overwritten; name"
            " another, or delete it"
        )
    return attributes


def _leave(writer: StoreWriter, existed: bool, alone: bool) -> None:
    """After a failure: steps that are finished stay; a store without any, if it is ours alone,
    does not."""
    number = len(writer.times)
    finished = number - len(writer.unfinished())
    out = writer.path
    if finished:
        logger.warning(
            "%s: %d of %d steps are finished; mend what is wrong and run the same command again to"
            " go on, or delete it", out, finished, number,
        )  # fmt: skip
    elif alone and not existed:
        shutil.rmtree(out, ignore_errors=True)
    elif alone:  # the folder was there, and empty
        for child in list(out.iterdir()):
            shutil.rmtree(child) if child.is_dir() else child.unlink()


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


def _identities(sources: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Name, size and, of up to 256 MiB in all, a SHA-256 of each file; of more, and of folders,
    the time of the last change."""
    found: dict[Path, tuple[int, int]] = {}
    for source in sources:
        files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
        stats = [path.stat() for path in files]
        found[source] = sum(s.st_size for s in stats), round(max(s.st_mtime for s in stats))
    hashed = sum(size for size, _ in found.values()) <= _HASHED_BYTES
    identities: dict[Path, dict[str, Any]] = {}
    for source, (size, modified) in found.items():
        identity: dict[str, Any] = {"name": source.name, "bytes": size}
        if hashed and source.is_file():
            identity["sha256"] = hashlib.sha256(source.read_bytes()).hexdigest()
        else:
            identity["modified"] = modified
        identities[source] = identity
    return identities
