"""What an ingest will do, settled before any field is read: which variables, levels, units and
dates the pieces of all sources make together, and which of them cannot be joined."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graticule.data import cf
from graticule.data import units as unit_table
from graticule.data.pieces import Piece
from graticule.data.times import TimeAxis, date_of
from graticule.variables import Channel, Channels, Role

logger = logging.getLogger(__name__)

LEVEL_TOLERANCE = 0.01
"""0.49 m is written for 0.494025 m; neighbouring levels of known sources are 5 % apart or more."""


@dataclass(frozen=True)
class ChosenLevels:
    """must_exist: a level that is not there is an error, else it is left out."""

    levels: tuple[float, ...]
    must_exist: bool = True


Levels = ChosenLevels | None
"""None: all that a variable has."""
GRID_TOLERANCE_DEGREES = 1e-4
"""Coordinates of two files that differ by less are the same: 3 x float32's spacing at 360."""


@dataclass(eq=False)
class Variable:
    """All pieces of one variable, and the channels they make."""

    name: str
    role: Role
    pieces: list[Piece]
    levels: tuple[float | None, ...]
    units: str
    convert: tuple[float, float]
    channels: list[Channel]
    dates: dict[int, list[tuple[Piece, int]]] = field(default_factory=dict)
    """Seconds to the pieces that hold this time, and where in them."""

    def planes(self, seconds: int, row: int) -> list[tuple[Piece, int, int]]:
        """(piece, time, level) of every copy of the plane of `levels[row]` at one time."""
        return self.copies(self.dates.get(seconds, []), row)

    def copies(
        self, sources: Sequence[tuple[Piece, int]], row: int
    ) -> list[tuple[Piece, int, int]]:
        """As `planes`, of the pieces and times given."""
        found = []
        for piece, time in sources:
            level = _position(self.levels[row], piece.levels)
            if level is not None:
                found.append((piece, time, level))
        return found


def plan_variables(
    pieces: Sequence[Piece],
    variables: Sequence[str] | None,
    roles: dict[str, Role],
    units: dict[str, str],
    levels: Levels = None,
) -> list[Variable]:
    """The variables asked for, with units, levels and grid that agree among their pieces.

    levels: which of each variable's, if it has any; see `Levels`.
    """
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    if not by_name and variables is None:
        raise ValueError("the sources hold no variable on a latitude-longitude grid")
    asked: dict[str, list[str]] = {}
    for text in variables if variables is not None else by_name:
        asked.setdefault(text.partition("@")[0], []).append(text)
    for what, names in (("variables", asked), ("roles", roles), ("units", units)):
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise ValueError(
                f"{what}: no variable {', '.join(unknown)} in the sources, which hold"
                f" {', '.join(by_name) or 'none of those asked for on a latitude-longitude grid'}"
            )
    first = pieces[0]
    for piece in pieces:
        _refuse_other_grid(piece, first)
    return [
        _variable(name, by_name[name], texts, roles.get(name), units.get(name), levels)
        for name, texts in asked.items()
    ]


def _variable(
    name: str,
    pieces: list[Piece],
    asked: Sequence[str],
    role: Role | None,
    unit: str | None,
    chosen: Levels,
) -> Variable:
    head = pieces[0]
    for piece in pieces:
        if piece.units != head.units:
            raise ValueError(
                f"{name} has units {head.units!r} in {head.path.name} and {piece.units!r} in"
                f" {piece.path.name}; ingest them apart or correct the wrong one"
            )
        if piece.level_units != head.level_units:
            raise ValueError(
                f"levels of {name} are in {head.level_units!r} in {head.path.name} and in"
                f" {piece.level_units!r} in {piece.path.name}"
            )
    units, convert = _units(name, head.units, unit)
    levels: list[float | None] = []
    for piece in pieces:
        levels += [level for level in piece.levels if _position(level, levels) is None]
    if None in levels and len(levels) > 1:
        raise ValueError(f"{name} has levels in one file and none in another")
    low, high = unit_table.bounds(units, name, head.text("standard_name"), head.text("long_name"))
    channels = [
        Channel(
            variable=name, units=units, role=role or "prognostic", level=level,
            level_units=head.level_units, long_name=head.text("long_name"),
            standard_name=head.text("standard_name"), low=low, high=high,
        )
        for level in levels
    ]  # fmt: skip
    if chosen is not None and None not in levels:
        kept_levels = _chosen(name, [level for level in levels if level is not None], chosen)
        # `name@level` is meant as it is written.
        asked = [f"{name}@{level:g}" for level in kept_levels] if asked == [name] else asked
    kept = [channels[i] for i in Channels(channels).pick(asked)]
    return Variable(
        name, role or "prognostic", pieces, tuple(channel.level for channel in kept), units,
        convert, kept,
    )  # fmt: skip


def _chosen(name: str, there: Sequence[float], chosen: "ChosenLevels") -> list[float]:
    """The levels of a variable that lie nearest to those asked for."""
    found: list[float] = []
    for level in chosen.levels:
        nearest = min(there, key=lambda other: abs(other - level))
        if abs(nearest - level) > LEVEL_TOLERANCE * max(abs(level), abs(nearest)):
            if chosen.must_exist:
                shown = ", ".join(f"{other:g}" for other in there)
                raise ValueError(
                    f"{name} has no level {level:g} (nor one within {LEVEL_TOLERANCE:.0%});"
                    f" there are {shown}"
                )
            continue
        if nearest not in found:
            found.append(nearest)
    if not found:
        return list(there)
    if len(found) < len(there) and not chosen.must_exist:
        logger.info(
            "%s: %d of %d levels are taken, the source's usual ones (--levels all takes all)",
            name, len(found), len(there),
        )  # fmt: skip
    return found


def _units(name: str, source: str, asked: str | None) -> tuple[str, tuple[float, float]]:
    """The variable's unit in the store and the (factor, offset) that leads to it."""
    if asked is None:
        if not source:
            logger.warning("%s has no units", name)
        elif not unit_table.is_known(source):
            logger.warning("%s: unit %r is not known and kept as it is", name, source)
        return source, (1.0, 0.0)
    target = unit_table.canonical(asked)
    if not source:
        logger.warning("%s has no units; taken as %s, as asked", name, target)
        return target, (1.0, 0.0)
    convert = unit_table.conversion(source, target)
    if convert is None:
        raise ValueError(f"{name} is in {source!r}, which does not convert to {asked!r}")
    if convert != (1.0, 0.0):
        logger.info("%s: converted from %s to %s", name, source, target)
    return target, convert


def _position(level: float | None, levels: Sequence[float | None]) -> int | None:
    """Where `level` is in `levels`, to float32 rounding."""
    for position, other in enumerate(levels):
        if level is other or (
            level is not None
            and other is not None
            and abs(level - other) <= 1e-6 * max(abs(level), abs(other), 1.0)
        ):
            return position
    return None


def _refuse_other_grid(piece: Piece, first: Piece) -> None:
    ours, theirs = piece.grid, first.grid
    if ours.same_as(theirs, GRID_TOLERANCE_DEGREES):
        return
    if ours.shape == theirs.shape:
        lat = np.abs(ours.lat - theirs.lat).max()
        lon = np.abs(ours.lon - theirs.lon).max()
        what = f"differ by up to {lat:g} degrees of latitude and {lon:g} of longitude"
    else:
        what = f"are {ours.shape[0]} x {ours.shape[1]} and {theirs.shape[0]} x {theirs.shape[1]}"
    raise ValueError(
        f"the grids of {piece.name} in {piece.path.name} and {first.name} in {first.path.name}"
        f" {what} (allowed: {GRID_TOLERANCE_DEGREES:g} degrees); bring them to one grid first, for"
        " instance with xESMF or `cdo remapbil`"
    )


def arrange(
    plan: Sequence[Variable], roles: dict[str, Role], time: str | None
) -> tuple[list[Variable], list[Variable], TimeAxis]:
    """Static variables, those with time, and the time axis that the latter share."""
    dated = [piece for variable in plan for piece in variable.pieces if piece.seconds is not None]
    if time is not None:
        if dated:
            raise ValueError(f"time={time} is for sources without time; {dated[0].name} has dates")
        seconds, calendar = cf.decode_time(np.array([0]), f"seconds since {time}")
        times = TimeAxis(seconds, calendar, 86400)
        static = [variable for variable in plan if variable.role == "static"]
        dynamic = [variable for variable in plan if variable.role != "static"]
        for variable in dynamic:
            variable.dates = {int(seconds[0]): [(piece, 0) for piece in variable.pieces]}
    else:
        calendar = (
            cf.common_calendar(
                [piece.calendar for piece in dated],
                min(int(piece.seconds.min()) for piece in dated if piece.seconds is not None),
            )
            if dated
            else ""
        )
        for variable in plan:
            _date(variable, calendar)
        many = any(len(v.dates) > 1 for v in plan if v.role != "static")
        static = [v for v in plan if _is_static(v, roles, many)]
        dynamic = [v for v in plan if v not in static]
        if dynamic:
            times = _joined_times(dynamic, calendar)
    if not dynamic:
        raise ValueError(
            f"none of {', '.join(v.name for v in plan)} has dates: a store needs a variable with"
            " time. For a climatological mean give the date that it shall have (--time 2000-01-01)"
        )
    for variable in static:
        variable.role = "static"
        variable.channels = [replace(channel, role="static") for channel in variable.channels]
    return static, dynamic, times


def _date(variable: Variable, calendar: str) -> None:
    """Fill `dates`; warn where a date occurs twice (its copies are compared when read)."""
    undated = [piece for piece in variable.pieces if piece.seconds is None]
    if undated and len(undated) < len(variable.pieces):
        raise ValueError(
            f"{variable.name} has dates in some files and none in {undated[0].path.name}"
        )
    twice = {}
    level_seen: set[tuple[int, float | None]] = set()
    for piece in variable.pieces:
        for index, value in enumerate([] if piece.seconds is None else piece.seconds.tolist()):
            variable.dates.setdefault(value, []).append((piece, index))
            for level in piece.levels:
                if (value, level) in level_seen:
                    twice[value] = True
                level_seen.add((value, level))
    if twice and variable.role != "static":
        logger.warning(
            "%s: %d dates occur more than once, the first is %s; identical copies are merged",
            variable.name, len(twice), date_of(min(twice), calendar),
        )  # fmt: skip


def _is_static(variable: Variable, roles: dict[str, Role], many_times: bool) -> bool:
    role = roles.get(variable.name)
    if role == "static":
        return True
    if not variable.dates:
        if role is not None:
            raise ValueError(f"{variable.name} has no time and cannot be {role}; it is static")
        return True
    if role is None and many_times and len(variable.dates) == 1:
        logger.warning(
            "%s has a single time where others have many: taken as static", variable.name
        )
        return True
    return False


def _joined_times(dynamic: Sequence[Variable], calendar: str) -> TimeAxis:
    head = dynamic[0]
    for variable in dynamic[1:]:
        if not head.dates.keys() & variable.dates.keys():
            raise ValueError(
                f"{head.name} (from {date_of(min(head.dates), calendar)}) and {variable.name} (from"
                f" {date_of(min(variable.dates), calendar)}) have no time in common; shift one of"
                " them, for instance with `cdo shifttime`"
            )
    seconds = np.array(sorted(set().union(*(v.dates for v in dynamic))), dtype=np.int64)
    if seconds.size == 1:
        logger.warning("the sources hold one time only: its step is taken to be one day")
        return TimeAxis(seconds, calendar, 86400)
    return TimeAxis.from_seconds(seconds, calendar)
