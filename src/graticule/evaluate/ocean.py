"""Scores of an ocean by depth: errors, R2, profiles, heat and salt, kinetic energy, range.

All of them are made of `OceanSums`, which keep each (init, lead) pair apart, and of real dates: a
step over 29 February counts the days that it has.
"""

import textwrap
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from graticule.evaluate.depths import Column, Range, in_celsius
from graticule.evaluate.ocean_sums import EXTREMES_OF, MAPPED, OceanSums
from graticule.grid import Grid

DENSITY = 1035.0
"""Reference density of sea water, kg m-3: the Boussinesq density of MOM6, which made OM4
(https://mom6.readthedocs.io, "Specifics of the ocean model equations")."""
HEAT_CAPACITY = 3992.0
"""Of sea water, J kg-1 K-1, as OM4 publishes it with its fields (`cpocean` of GFDL's CMIP6 data);
TEOS-10 defines 3991.868 (IOC, SCOR and IAPSO, 2010)."""
NO_VARIANCE = 1e-13
"""Of the mean square of the values: what float32 leaves of a variance of 0 lies below it."""
SOURCES = ("model", "persistence", "climatology")
MEANS_OF = ("model", "truth", "climatology")
DAY = 86400
_PERMIL = ("1e-3", "g kg-1")


@dataclass(frozen=True, kw_only=True, eq=False)
class Content:
    """Heat or salt in a range of depths. model, truth: (init, lead), NaN where nothing is scored.

    Between levels with land, a level counts its own area: there is as much water as is wet.
    """

    range: Range
    units: str
    model: np.ndarray
    truth: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """(init, lead) forecast - truth."""
        return self.model - self.truth


@dataclass(frozen=True, kw_only=True, eq=False)
class OceanScores:
    """Scores of a forecast's channels by level, lead and time.

    Arrays run over all initial times and leads of the forecast and are NaN where a pair has no
    truth, and for a level without sea. "By lead" is over initial times; overall is over all pairs.

    grid: of the maps. init_seconds: (init,), valid_seconds: (init, lead), since 1970 in `calendar`.
    climatology: its grouping. area: where the cells' areas come from, in words.
    std: (channel,) training standard deviations, or none.
    """

    column: Column
    sums: OceanSums
    grid: Grid
    init_seconds: np.ndarray
    valid_seconds: np.ndarray
    calendar: str
    climatology: str
    area: str
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return self.sums.names

    @cached_property
    def weight(self) -> np.ndarray:
        """(init, lead, channel) m2 of sea that was scored."""
        return self.sums.of("weight")

    @cached_property
    def leads(self) -> list[int]:
        """Labels of the leads with a truth, 1 for the first output time."""
        return [int(k) + 1 for k in np.flatnonzero(self.weight.any((0, 2)))]

    @cached_property
    def elapsed_days(self) -> np.ndarray:
        """(lead,) real days from the initial to the valid time, mean over the initial times."""
        return (self.valid_seconds - self.init_seconds[:, None]).mean(0) / DAY

    # Errors

    def rmse_of_fields(self, source: str = "model") -> np.ndarray:
        """(init, lead, channel) the root of each field's mean square error, weighted by area."""
        return np.sqrt(_quotient(self.sums.of(f"{source}_error"), self.weight))

    def rmse(self, source: str = "model", *, overall: bool = False) -> np.ndarray:
        """(lead, channel), or (channel,) overall: the mean over times of `rmse_of_fields`.

        So each time counts alike. `Scores.rmse` pools squares over times first, and is larger
        where errors differ from time to time.
        """
        return _mean(self.rmse_of_fields(source), (0, 1) if overall else 0)

    def r2(self, reference: str = "mean", *, overall: bool = False) -> np.ndarray:
        """(lead, channel), or (channel,) overall: 1 - sum w (f - o)^2 / sum w (o - r)^2.

        The sums run over cells and times, w is the cell's area. reference `mean`: r is the mean
        of the truth over the same cells and times, and this the coefficient of determination (the
        efficiency of Nash and Sutcliffe, 1970): most of a level's variance is its pattern, which
        never changes. `climatology`: r is that of the date, and this the skill score of Murphy
        (1988): 0 is as good as the climatology, and the pattern earns nothing.
        1 is perfect, and there is no lower bound. NaN where the truth does not vary around r.
        """
        axes = (0, 1) if overall else 0
        names = ("weight", "truth", "truth_square", "model_error", "climatology_error")
        weight, truth, square, error, usual = (self.sums.of(name).sum(axes) for name in names)
        around = usual if reference == "climatology" else square - _quotient(truth**2, weight)
        origin = self.sums.origin
        size = square + 2 * origin * truth + origin**2 * weight  # of the values themselves
        varies = around > NO_VARIANCE * size
        return 1 - np.divide(error, around, out=np.full_like(error, np.nan), where=varies)

    # Means

    def mean(self, source: str) -> np.ndarray:
        """(init, lead, channel) mean over the area of one of `MEANS_OF`, in the units."""
        return self.sums.origin + _quotient(self.sums.of(source), self.weight)

    def mean_by_lead(self, source: str) -> np.ndarray:
        """(lead, channel) mean over initial times of `mean`."""
        return _mean(self.mean(source), 0)

    def profile(self, source: str) -> np.ndarray:
        """(channel,) mean over all pairs of `mean`: read along `column.profiles`."""
        return _mean(self.mean(source), (0, 1))

    # Heat, salt, kinetic energy

    def content(self, kind: str) -> list[Content]:
        """Heat (J, above 0 degC) or salt (kg) of `temperature` or `salinity`, by range of depths.

            sum over levels k of  DENSITY x c x thickness_k x area_k x mean_k

        c is `HEAT_CAPACITY` or one part in a thousand; the thickness is that part of the level's
        layer that lies in the range; the area is that of the level's sea, so that land counts
        nowhere, and the mean that of the cells with a truth at that time. A cell is as thick as
        its layer also where the sea floor lies inside of it. ValueError where there is no such
        variable or its units are not known.
        """
        positions = self.column.levels_of(kind)
        if not positions:
            raise ValueError(f"no {kind} on levels in metres among {', '.join(self.names)}")
        units = self.column.channels[positions[0]].units
        if kind == "temperature":
            (factor, offset), unit, scale = in_celsius(units), "J", DENSITY * HEAT_CAPACITY
        elif units in _PERMIL:
            (factor, offset), unit, scale = (1.0, 0.0), "kg", DENSITY * 1e-3
        else:
            raise ValueError(
                f"salinity in {units!r}: its mass is known of {' and '.join(_PERMIL)} alone"
            )
        area = self.weight.max((0, 1))[positions]
        found = []
        for part in self.column.ranges(positions):
            used = (part.metres > 0) & (area > 0)
            volume = (part.metres * area)[used]
            model, truth = (
                scale * ((factor * self.mean(source)[..., positions][..., used] + offset) @ volume)
                for source in ("model", "truth")
            )
            if not used.any():
                model = truth = np.full(self.valid_seconds.shape, np.nan)
            found.append(Content(range=part, units=unit, model=model, truth=truth))
        return found

    def kinetic_energy(self, source: str) -> np.ndarray:
        """(init, lead, pair of `column.currents`) mean of (u2 + v2) / 2 in the units squared."""
        square = _quotient(self.sums.of(f"{source}_square"), self.weight)
        origin, mean = self.sums.origin, self.mean(source)
        square = square + 2 * origin * (mean - origin) + origin**2
        east, north = ([pair[i] for pair in self.column.currents] for i in (0, 1))
        return (square[..., east] + square[..., north]) / 2

    # Range

    def extremes(self, source: str) -> tuple[np.ndarray, np.ndarray]:
        """(lead, channel) least and largest value over sea and initial times; NaN of none."""
        place = EXTREMES_OF.index(source)
        low, high = self.sums.low[place].min(0), self.sums.high[place].max(0)
        some = low <= high
        return np.where(some, low, np.nan), np.where(some, high, np.nan)

    def beyond(self, source: str = "model") -> np.ndarray:
        """(lead, channel): how far values lie outside of the range of the training values, as a
        share of that range; 0 within, NaN where there is no range.

        The range is that of all training times which the climatology of the scored dates is made
        from: all of them, if the scored dates go round the year.
        """
        low, high = self.extremes(source)
        least, most = self.sums.trained
        span = np.where(most > least, most - least, np.nan)
        return np.maximum(0.0, np.maximum(least - low, high - most) / span)

    # Maps

    def maps(self, channel: int) -> dict[str, np.ndarray]:
        """(lat, lon) each, means over all pairs, NaN on land.

        model, truth: anomalies from the climatology of the date, so without the season. error:
        their difference, the mean error. rmse: of the cell, over times.
        ValueError for a channel without maps.
        """
        if channel not in self.sums.mapped:
            told = ", ".join(self.names[i] for i in self.sums.mapped) or "none"
            raise ValueError(f"no map of {self.names[channel]}; there are {told}")
        number, *sums = self.sums.maps[self.sums.mapped.index(channel)]
        model, truth, square = (_quotient(values, number) for values in sums)
        assert MAPPED == ("fields", "model", "truth", "square_error")
        return {"model": model, "truth": truth, "error": model - truth, "rmse": np.sqrt(square)}

    # In short

    def told(self) -> dict[str, Any]:
        """The scores in short, as JSON holds them; the file of the ocean's scores has all."""
        values = {
            "rmse": self.rmse(overall=True),
            "r2": self.r2(overall=True),
            "r2_climatology": self.r2("climatology", overall=True),
            "bias": self.profile("model") - self.profile("truth"),
            "beyond_trained_range": _largest(self.beyond()),
            "truth_beyond_trained_range": _largest(self.beyond("truth")),
        }
        return {
            "area": self.area,
            "density": DENSITY,
            "heat_capacity": HEAT_CAPACITY,
            "channels": {
                name: {
                    "depth": _plain(self.column.depth[i]),
                    "layer": [_plain(self.column.top[i]), _plain(self.column.bottom[i])],
                    "area_m2": float(self.weight[..., i].max()),
                    **{key: _plain(value[i]) for key, value in values.items()},
                }
                for i, name in enumerate(self.names)
            },
            "heat_content": self._contents_told("temperature"),
            "salt_content": self._contents_told("salinity"),
            "kinetic_energy": [
                {
                    "depth": float(self.column.depth[pair[0]]),
                    "model": _plain(_mean(self.kinetic_energy("model")[..., k], (0, 1))),
                    "truth": _plain(_mean(self.kinetic_energy("truth")[..., k], (0, 1))),
                }
                for k, pair in enumerate(self.column.currents)
            ],
        }

    def _contents_told(self, kind: str) -> list[dict[str, Any]]:
        if not self.column.levels_of(kind):
            return []
        try:
            contents = self.content(kind)
        except ValueError as error:
            return [{"none": str(error)}]
        last = self.leads[-1] - 1
        return [
            {
                "range": content.range.name,
                "metres": float(content.range.metres.sum()),
                "units": content.units,
                "truth": _plain(_mean(content.truth, (0, 1))),
                "rms_error": _plain(np.sqrt(_mean(content.error**2, (0, 1)))),
                "error_at_last_lead": _plain(_mean(content.error[:, last], 0)),
            }
            for content in contents
        ]

    def lines(self, width: int) -> list[str]:
        """What a terminal shows of it, at most `width` columns wide."""
        found = []
        r2, rmse = self.r2(overall=True), self.rmse(overall=True)
        skill = self.r2("climatology", overall=True)
        for variable, positions in self.column.profiles.items():
            units = self.column.channels[positions[0]].units
            shown = [positions[i] for i in sorted({0, len(positions) // 2, len(positions) - 1})]
            parts = [
                f"{self.column.depth[i]:g} m RMSE {_short(rmse[i])} {units}, R2 {_short(r2[i])}"
                f" ({_short(skill[i])} against climatology)"
                for i in shown
            ]
            found.append(f"{variable} by depth over all leads: {'; '.join(parts)}.")
        for row in self._contents_told("temperature"):
            if "none" in row:
                found.append(f"No heat content: {row['none']}.")
            elif row["truth"] is not None:
                found.append(
                    f"Heat content {row['range']}: forecast - truth at the last lead"
                    f" {row['error_at_last_lead'] / 1e21:+.3g} ZJ, RMS over all leads"
                    f" {row['rms_error'] / 1e21:.3g} ZJ."
                )
        return [line for text in found for line in textwrap.wrap(text, width)]


def _quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """NaN where there is nothing to divide by."""
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _mean(values: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    """Of what is finite; NaN where nothing is."""
    some = np.isfinite(values)
    return _quotient(np.where(some, values, 0.0).sum(axes), some.sum(axes))


def _largest(values: np.ndarray) -> np.ndarray:
    """(lead, channel) to (channel,), NaN where nothing is finite."""
    some = np.isfinite(values)
    return np.where(some.any(0), np.where(some, values, -np.inf).max(0, initial=-np.inf), np.nan)


def _plain(value: float | np.floating | np.ndarray) -> float | None:
    return float(value) if np.isfinite(value) else None


def _short(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "-"
