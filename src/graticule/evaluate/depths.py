"""The water column that channels make: what they are, on which levels, in layers how thick.

Levels in metres are depths, as in the forecast file. A store keeps the depths of its levels and
not the edges of their layers, which follow from them (`layer_edges`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from graticule.data.units import conversion
from graticule.variables import Channel, Channels

KINDS = {
    "temperature": (
        "sea_water_potential_temperature", "sea_water_conservative_temperature",
        "sea_water_temperature", "thetao", "bigthetao", "votemper", "temp", "temperature",
        "water_temp",
    ),
    "salinity": (
        "sea_water_salinity", "sea_water_practical_salinity", "sea_water_absolute_salinity", "so",
        "vosaline", "salt", "salinity",
    ),
    "eastward": (
        "eastward_sea_water_velocity", "sea_water_x_velocity", "uo", "vozocrtx", "water_u",
    ),
    "northward": (
        "northward_sea_water_velocity", "sea_water_y_velocity", "vo", "vomecrty", "water_v",
    ),
}  # fmt: skip
"""Standard names, then names of variables that are known without one."""
RANGES = ((0.0, 300.0), (0.0, 700.0), (700.0, 2000.0), (2000.0, np.inf))
"""Depths in m between which contents are summed; the last one ends with the deepest layer."""
EVEN = 3.0
"""Layers beside each other differ by no more than this factor, or their edges were not found."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Range:
    """A range of depths. metres: (level,) of it that lie in each level's layer."""

    top: float
    bottom: float
    metres: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.top:g}-{self.bottom:g} m"


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """channels: of a forecast. top, bottom: (channel,) m, of each level's layer, NaN without."""

    channels: Channels
    top: np.ndarray
    bottom: np.ndarray

    @classmethod
    def of(cls, channels: Channels, truth: Channels) -> "Column | None":
        """None where no variable of an ocean has levels in metres: then there is no column.

        truth: the store's channels. Layers are those between all levels that it has of a
        variable, so that a level which the forecast lacks is a gap and no thicker neighbour.
        """
        if not any(_depth(channel) is not None and kind_of(channel) for channel in channels):
            return None
        top, bottom = np.full((2, len(channels)), np.nan)
        for variable in dict.fromkeys(channel.variable for channel in channels):
            depths = sorted(
                {
                    depth
                    for channel in (*truth, *channels)
                    if channel.variable == variable and (depth := _depth(channel)) is not None
                }
            )
            edges = layer_edges(depths)
            for i, channel in enumerate(channels):
                depth = _depth(channel)
                if channel.variable == variable and depth is not None:
                    place = depths.index(depth)
                    top[i], bottom[i] = edges[place], edges[place + 1]
        return cls(channels=channels, top=top, bottom=bottom)

    @cached_property
    def depth(self) -> np.ndarray:
        """(channel,) m, NaN without a level."""
        depths = [_depth(channel) for channel in self.channels]
        return np.array([np.nan if depth is None else depth for depth in depths])

    @cached_property
    def profiles(self) -> dict[str, list[int]]:
        """By variable with levels, positions of its channels from the surface down."""
        found: dict[str, list[int]] = {}
        for i in np.argsort(self.depth, kind="stable"):
            if np.isfinite(self.depth[i]):
                found.setdefault(self.channels[int(i)].variable, []).append(int(i))
        order = dict.fromkeys(channel.variable for channel in self.channels)
        return {variable: found[variable] for variable in order if variable in found}

    def levels_of(self, kind: str) -> list[int]:
        """Positions from the surface down of the first variable of one of `KINDS`; [] for none."""
        for positions in self.profiles.values():
            if kind_of(self.channels[positions[0]]) == kind:
                return positions
        return []

    @cached_property
    def currents(self) -> list[tuple[int, int]]:
        """(eastward, northward) from the surface down, where both have the level and the units."""
        north = {self.depth[i]: i for i in self.levels_of("northward")}
        return [
            (i, north[self.depth[i]])
            for i in self.levels_of("eastward")
            if self.depth[i] in north
            and self.channels[i].units == self.channels[north[self.depth[i]]].units
        ]

    @cached_property
    def surface(self) -> list[int]:
        """Positions of the uppermost temperature and salinity and of channels without a level."""
        upper = (*self.levels_of("temperature")[:1], *self.levels_of("salinity")[:1])
        return sorted({*upper, *map(int, np.flatnonzero(np.isnan(self.depth)))})

    def ranges(self, positions: Sequence[int]) -> list[Range]:
        """Those of `RANGES` that the layers of these levels fill, and all layers together.

        A range with a gap, or one that reaches below the deepest layer, would say less than its
        name; it is left out. All layers together are always there.
        """
        if not positions:
            return []
        top, bottom = self.top[list(positions)], self.bottom[list(positions)]
        deepest = float(bottom.max())
        found = []
        for first, last in RANGES:
            end = deepest if np.isinf(last) else last
            metres = np.clip(np.minimum(bottom, end) - np.maximum(top, first), 0, None)
            if end > first and metres.sum() >= (1 - 1e-6) * (end - first):
                found.append(Range(top=first, bottom=end, metres=metres))
        every = Range(top=float(top.min()), bottom=deepest, metres=bottom - top)
        if not any(np.allclose(r.metres, every.metres, rtol=1e-6) for r in found):
            found.append(every)
        return found


def kind_of(channel: Channel) -> str:
    """One of `KINDS`, or empty. A standard name says it; else the variable's name."""
    name = channel.standard_name or channel.variable.lower()
    return next((kind for kind, names in KINDS.items() if name in names), "")


def in_celsius(units: str) -> tuple[float, float]:
    """(factor, offset) to degrees Celsius; ValueError for units of another quantity."""
    found = conversion(units, "degC")
    if found is None:
        raise ValueError(f"a temperature in {units!r} is in no unit that is known: degC or K")
    return found


def layer_edges(depths: Sequence[float]) -> np.ndarray:
    """(level + 1,) m: the edges of the layers around ascending depths, from 0 at the surface.

    Depths are mostly the middles of layers: then the next edge lies as far below a level as the
    last one above it (OM4's 2.5, 10, 22.5, ... m give its own 5, 10, 15, ... m). Where this gives
    no layers that grow or shrink by at most a factor `EVEN`, edges lie half way between levels,
    and the last one as far below the last level as the one above.
    """
    middles = [0.0]
    for depth in depths:
        middles.append(2 * depth - middles[-1])
    thick = np.diff(middles)
    if (thick > 0).all():
        growth = thick[1:] / thick[:-1]
        if ((growth <= EVEN) & (growth >= 1 / EVEN)).all():
            return np.array(middles)
    half = [(upper + lower) / 2 for upper, lower in pairwise(depths)]
    last = 2 * depths[-1] - (half[-1] if half else 0.0)
    return np.array([0.0, *half, last])


def _depth(channel: Channel) -> float | None:
    """m, also where a file counts heights below the surface as negative."""
    if channel.level is None or channel.level_units != "m":
        return None
    return abs(channel.level)
