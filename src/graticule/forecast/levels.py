"""How channels become the variables of a forecast file, their levels stacked along a dim."""

import re
from dataclasses import dataclass

from graticule.variables import Channel, Channels

DIMS = ("init_time", "member", "lead_time", "lat", "lon", "valid_time")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One variable of the file and the channels in it.

    positions: the channels, by ascending level. dim: the level dim, or none.
    """

    variable: str
    positions: tuple[int, ...]
    levels: tuple[float, ...] = ()
    level_units: str = ""
    dim: str = ""


def layouts(channels: Channels) -> list[Layout]:
    """How channels become variables with level dims; ValueError where levels contradict."""
    found: list[Layout] = []
    dims: dict[tuple[tuple[float, ...], str], str] = {}
    taken = {*DIMS, *(channel.variable for channel in channels)}
    for variable in dict.fromkeys(channel.variable for channel in channels):
        if not re.fullmatch(r"[A-Za-z0-9_][^/\\]*", variable):
            raise ValueError(
                f"a variable cannot be called {variable!r} in a forecast file: a name begins with a"
                " letter, digit or underscore and has no slash; rename it in the store"
            )
        if variable in DIMS:
            raise ValueError(f"a variable cannot be called {variable}: the forecast has this dim")
        members = [i for i, channel in enumerate(channels) if channel.variable == variable]
        first: Channel = channels[members[0]]
        for i in members:
            if (channels[i].units, channels[i].level_units) != (first.units, first.level_units):
                raise ValueError(
                    f"{channels.names[i]} is in {channels[i].units!r} on"
                    f" {channels[i].level_units!r} levels, {first.name} in {first.units!r} on"
                    f" {first.level_units!r} levels: a variable of the forecast has one unit"
                )
        if first.level is None:
            if len(members) > 1:
                raise ValueError(f"{variable} occurs with levels and without; rename one of them")
            found.append(Layout(variable=variable, positions=(members[0],)))
            continue
        members.sort(key=lambda i: channels[i].level)
        levels = tuple(float(channels[i].level) for i in members)
        key = (levels, first.level_units)
        if key not in dims:
            stem = "depth" if first.level_units == "m" else "level"
            names = (stem if n == 1 else f"{stem}_{n}" for n in range(1, 2 * len(channels) + 9))
            dims[key] = next(name for name in names if name not in taken)
            taken.add(dims[key])
        found.append(
            Layout(variable=variable, positions=tuple(members), levels=levels,
                   level_units=first.level_units, dim=dims[key])
        )  # fmt: skip
    return found


def level_attributes(units: str) -> dict[str, str]:
    """CF attributes of a level dim whose levels are in `units`."""
    if units == "m":
        return {"standard_name": "depth", "long_name": "depth", "units": "m", "positive": "down",
                "axis": "Z"}  # fmt: skip
    if units in ("Pa", "hPa", "mbar", "millibar", "millibars"):
        return {"standard_name": "air_pressure", "long_name": "pressure level", "units": units,
                "positive": "down", "axis": "Z"}  # fmt: skip
    return {"long_name": "level", "units": units or "1"}
