"""The generated ocean's settings, and what does not change in it: coasts, flow and dates.

Coasts and depths are Earth's. The flow has no divergence and crosses no coast: it comes from a
streamfunction on the corners of the cells.
"""

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Literal

import cftime
import numpy as np

from graticule.data.planet import coast_mask, load_topography
from graticule.data.times import TimeAxis, seconds_of
from graticule.data.transport import corner_lat, face_speeds
from graticule.grid import EARTH_RADIUS_M, Grid
from graticule.keyed import keyed

LEVELS = (15.0, 50.0, 110.0, 250.0)
"""Depths of the levels, m."""
THICKNESS = (30.0, 40.0, 80.0, 200.0)
"""Of the levels' layers, m."""
FLOW_DEPTH = 300.0
"""Depth in m over which the flow fades by a factor e."""
STEPS_A_YEAR = 73
DAY = 86400
_COAST_CORNERS = 3
"""Corners over which the flow grows from nothing at a coast."""


@dataclass(frozen=True, kw_only=True)
class Ocean:
    """Settings of the generated ocean."""

    num_lat: int = 48
    """Rows of equal height, pole to pole."""
    num_lon: int = 96
    num_years: int = 10
    """Years kept. The last `test_years` test, the one before them validates, all others train."""
    test_years: int = 1
    """A forecast of 200 ten-day leads needs six."""
    first_year: int = 2001
    calendar: Literal["noleap", "julian"] = "noleap"
    """`julian`: as ocean model output has it, one six-day step a leap year."""
    spin_up_years: int = 3
    """Years before the first one kept: the slowest damping takes one."""
    dt_seconds: float = 43200.0
    """Seconds in one step of the scheme; must divide a day. See `longest_step`."""
    max_speed: float = 1.0
    """Of the flow through any face of a cell of the top level, m s-1; 0: no flow."""
    seed: int = 0
    """Key of the flow's eddies and of the forcing."""

    def __post_init__(self) -> None:
        if self.num_lat < 12 or self.num_lon < 24:
            raise ValueError(
                f"num_lat={self.num_lat}, num_lon={self.num_lon}: the generated ocean needs at"
                " least 12 latitudes and 24 longitudes; take the default 48 x 96, or 24 x 48"
            )
        if self.test_years < 1 or self.num_years < self.test_years + 2:
            raise ValueError(
                f"num_years={self.num_years} (--years) cannot be split: train, validation and test"
                f" need one year each, and test_years={self.test_years}; take num_years="
                f"{max(self.test_years, 1) + 2} or more"
            )
        for name in ("spin_up_years", "max_speed", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.first_year - self.spin_up_years < 1:
            raise ValueError(
                f"first_year={self.first_year} with {self.spin_up_years} years of spin-up begins"
                " before year 1"
            )
        if self.calendar not in ("noleap", "julian"):
            raise ValueError(f"calendar={self.calendar!r} is neither noleap nor julian")
        if not self.dt_seconds > 0 or DAY / self.dt_seconds % 1 != 0:
            raise ValueError(
                f"dt_seconds={self.dt_seconds:g} does not divide a day ({DAY} s); take"
                f" {DAY / np.ceil(DAY / self.dt_seconds) if self.dt_seconds > 0 else DAY:g}"
            )


@lru_cache(maxsize=2)
def grid_of(ocean: Ocean) -> Grid:
    """Rows of equal height from pole to pole; the first column lies half a cell from 0 degrees."""
    height, width = 180 / ocean.num_lat, 360 / ocean.num_lon
    return Grid(
        90 - (np.arange(ocean.num_lat) + 0.5) * height, (np.arange(ocean.num_lon) + 0.5) * width
    )


@lru_cache(maxsize=2)
def wet_levels(ocean: Ocean) -> np.ndarray:
    """(level, lat, lon) bool: Earth's sea, at each depth but the first's where it is that deep."""
    grid = grid_of(ocean)
    lat, lon, height = load_topography()
    depths = (0.0, *LEVELS[1:])
    wet = np.stack([coast_mask(grid.lat, grid.lon, lat, lon, height + d) for d in depths])
    return np.logical_and.accumulate(wet)


@lru_cache(maxsize=2)
def streams(ocean: Ocean) -> np.ndarray:
    """(level, lat + 1, lon) m2 s-1: the flow's streamfunctions, 0 along coasts and at the poles.

    Gyres, westward at the equator and eastward at 50 degrees, with eddies. Whole numbers, so that
    as much flows into each cell as out of it, to the last digit.
    """
    grid = grid_of(ocean)
    lat = np.deg2rad(corner_lat(grid))[:, None]
    lon = np.deg2rad(grid.lon - 180 / ocean.num_lon)[None]
    eddies = waves(ocean, "eddies", 12, 2.5e6, lat, lon).sum(0) / np.sqrt(6)
    pattern = (np.sin(3 * lat) + 0.5 * eddies) * np.cos(lat) ** 2
    shapes = np.stack([pattern * _from_coast(wet) for wet in wet_levels(ocean)])
    fastest = max(np.abs(speed).max() for speed in face_speeds(grid, shapes[0]))
    fading = np.exp(-(np.array(LEVELS) - LEVELS[0]) / FLOW_DEPTH)[:, None, None]
    return np.rint(shapes * fading * (ocean.max_speed / fastest if fastest else 0.0))


def currents(ocean: Ocean) -> np.ndarray:
    """(2, lat, lon) m s-1: eastward and northward speed of the top level, means of two faces."""
    eastward, northward = face_speeds(grid_of(ocean), streams(ocean)[0])
    return np.stack(
        [(eastward + np.roll(eastward, 1, axis=1)) / 2, (northward[1:] + northward[:-1]) / 2]
    )


def time_axis(ocean: Ocean) -> TimeAxis:
    """The dates kept: noon of 3 January and every fifth day of a year without 29 February."""
    return TimeAxis(_seconds(ocean, 0, ocean.num_years)[:-1], ocean.calendar, 5 * DAY)


def splits(ocean: Ocean) -> dict[str, list[str]]:
    first, last = ocean.first_year, ocean.first_year + ocean.num_years - 1
    test = last - ocean.test_years + 1
    return {
        "train": [f"{first:04}/{test - 2:04}"],
        "validation": [f"{test - 1:04}"],
        "test": [f"{test:04}/{last:04}" if test < last else f"{last:04}"],
    }


def steps_of_year(ocean: Ocean, year: int) -> np.ndarray:
    """(73,) steps of the scheme from each date of a year to the next one.

    year: 0 is the first one kept, negative ones are the spin-up.
    """
    lengths = np.diff(_seconds(ocean, year, year + 1))
    return np.rint(lengths / ocean.dt_seconds).astype(int)


def waves(
    ocean: Ocean, purpose: str, count: int, length: float, lat: np.ndarray, lon: np.ndarray
) -> np.ndarray:
    """(count, lat, lon) plane waves through the sphere, cos(k r + phase), the same on any grid.

    Drawn so that their sum's correlation falls as a Gaussian of `length` metres. lat, lon: radians.
    """
    draw = keyed(ocean.seed, f"ocean {purpose}")
    vectors = draw.normal(0, EARTH_RADIUS_M / length, (count, 3))
    phases = draw.uniform(0, 2 * np.pi, count)
    points = np.stack(
        np.broadcast_arrays(np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat))
    )
    return np.cos(np.einsum("kd,dyx->kyx", vectors, points) + phases[:, None, None])


def _from_coast(wet: np.ndarray) -> np.ndarray:
    """(lat + 1, lon) at the corners: 0 along coasts and at the poles, 1 in the open sea."""
    beside = wet & np.roll(wet, 1, axis=1)
    open_sea = np.zeros((len(wet) + 1, wet.shape[1]), dtype=bool)
    open_sea[1:-1] = beside[1:] & beside[:-1]
    distance = np.zeros(open_sea.shape)
    for _ in range(_COAST_CORNERS):
        distance += open_sea
        shrunk = open_sea & np.roll(open_sea, 1, axis=1) & np.roll(open_sea, -1, axis=1)
        shrunk[1:-1] &= shrunk[:-2] & shrunk[2:]
        open_sea = shrunk
    return np.sin(np.pi / 2 * distance / _COAST_CORNERS)


def _seconds(ocean: Ocean, first: int, last: int) -> np.ndarray:
    """Seconds since 1970 of the dates of years `first` to `last` - 1, and of the date after."""
    days = [cftime.datetime(1, 1, 3, 12, calendar="noleap")]
    while len(days) < STEPS_A_YEAR:
        days.append(days[-1] + timedelta(days=5))
    dates = [(year, d) for year in range(first, last) for d in days] + [(last, days[0])]
    return np.array(
        [
            seconds_of(
                cftime.datetime(
                    ocean.first_year + year, d.month, d.day, 12, calendar=ocean.calendar,
                    has_year_zero=True,
                )
            )
            for year, d in dates
        ],
        dtype=np.int64,
    )  # fmt: skip
