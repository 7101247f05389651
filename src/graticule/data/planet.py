"""The demo planet: shallow water on a rotating sphere, with unstable mid-latitude jets.

A planet needs no download and makes about 1,000 six-hourly states in a minute or two of one
core. Each run starts from a jet in either hemisphere and random eddies, all drawn from
(seed, run), and is kept from the day the jets have broken. There is no forcing, so the state
(u, v, h) determines the future. The equations are those of Galewsky, Scott and Polvani (2004),
https://doi.org/10.3402/tellusa.v56i5.14436, in vorticity-divergence form, solved by the spectral
transform method of Hack and Jakob (1992), NCAR/TN-343+STR: Gaussian latitudes, a triangular
truncation free of quadratic aliasing, third-order Adams-Bashforth steps.

The transforms are our own hundred lines of numpy because a run is 6,000 steps of tiny arrays: at
48 x 96 a tendency takes 0.5 to 0.7 ms of one core, and one made of torch-harmonics' transforms
3.9 ms (0.9.3) to 8.7 ms (0.8.0). The two agree to 1e-5 of the largest tendency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import numpy as np

from graticule.data.sphere import COMPLEX, GRAVITY, MEAN_HEIGHT, RADIUS, REAL, Sphere, gauss

VARIABLES: tuple[tuple[str, str, str], ...] = (
    ("u", "m s-1", "eastward wind"),
    ("v", "m s-1", "northward wind"),
    ("h", "m", "height of the free surface"),
)
"""(name, units, long name) of each channel of `simulate`, in order."""

# Third-order Adams-Bashforth follows a pure oscillation up to 0.72 rad a step.
_STABLE_ANGLE = 0.72
# Wind that carries the shortest gravity waves, m s-1. At 48 x 96 the limit is then 376 s;
# measured there, 400 s ran six days and 432 s went to NaN after 90 hours.
_CARRYING_WIND = 80.0
# Hours in which the shortest wave decays by a factor e. Diffusion goes with the eighth power of
# the wavenumber: waves of twice that length keep their amplitude for three weeks.
_DAMPING_HOURS = 2.0

# What a run draws, uniformly, for each hemisphere: jet maximum, latitude and half width (to 1/e).
_JET_SPEED = (30.0, 55.0)
_JET_LAT = (28.0, 58.0)
_JET_WIDTH = (8.0, 12.0)
# Eddies of total wavenumbers 4 to 12. They rival the jets, so that no run settles into zonal
# bands: with 8 m s-1 only 4 % of the variance of h was not zonal.
_EDDY_SPEED = 29.0
_EDDY_DEGREES = (4, 12)


@dataclass(frozen=True, kw_only=True)
class Planet:
    """Settings of the demo planet."""

    num_lat: int = 48
    """Gaussian latitudes; there is no row at the poles."""
    num_lon: int = 96
    """Longitudes, from 0 degrees eastwards; twice `num_lat` gives square cells."""
    num_runs: int = 12
    """Independent runs. Split data by run: samples of one run are a single trajectory."""
    samples_per_run: int = 84
    """States kept of each run."""
    step_hours: int = 6
    """Hours between two states kept."""
    spin_up_days: float = 5.0
    """Days from the start of a run to its first state kept: the jets have broken by then."""
    dt_seconds: float = 360.0
    """Seconds in one step of the solver; must divide `step_hours`. See `largest_stable_dt`."""
    seed: int = 0
    """Key, with the run's number, of everything random in a run."""

    def __post_init__(self) -> None:
        for name in ("num_runs", "samples_per_run", "step_hours"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.num_lat < 16 or self.num_lon < 32:
            raise ValueError(
                f"num_lat={self.num_lat}, num_lon={self.num_lon}: the demo planet's jets need at "
                "least 16 latitudes and 32 longitudes. Take the default 48 x 96, or 24 x 48."
            )
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative.")
        if not self.dt_seconds > 0:
            raise ValueError(f"dt_seconds={self.dt_seconds} must be positive.")
        if not _is_whole(self.step_hours * 3600 / self.dt_seconds):
            raise ValueError(
                f"dt_seconds={self.dt_seconds:g} does not divide step_hours={self.step_hours} "
                f"({self.step_hours * 3600} s). {_suggest(self)}"
            )
        spin_up_steps = self.spin_up_days * 24 / self.step_hours
        if spin_up_steps < 0 or not _is_whole(spin_up_steps):
            raise ValueError(
                f"spin_up_days={self.spin_up_days:g} must be zero or a whole number of "
                f"step_hours={self.step_hours}; the nearest is "
                f"{max(round(spin_up_steps), 0) * self.step_hours / 24:g}."
            )


def grid(planet: Planet) -> tuple[np.ndarray, np.ndarray]:
    """The planet's coordinates, in degrees.

    Returns lat (num_lat,), Gaussian, north to south, and lon (num_lon,), from 0 eastwards and
    below 360; both float64.
    """
    sine, _ = gauss(planet.num_lat)
    return np.degrees(np.arcsin(sine)), np.arange(planet.num_lon) * (360.0 / planet.num_lon)


def largest_stable_dt(planet: Planet) -> float:
    """The longest step in seconds that the solver can be trusted with.

    0.72 a / ((c + U) T): the angle that third-order Adams-Bashforth follows, over the frequency
    of the shortest wave (total wavenumber T on radius a), which travels at gravity wave speed c
    on a wind U.
    """
    wave_speed = math.sqrt(GRAVITY * MEAN_HEIGHT) + _CARRYING_WIND
    return _STABLE_ANGLE * RADIUS / (wave_speed * (_truncation(planet) - 1))


def simulate(
    planet: Planet, run: int, progress: Callable[[int], object] | None = None
) -> np.ndarray:
    """One run of the planet: its states every `step_hours`, after the spin-up.

    run: 0 to num_runs - 1. The states depend on the settings and on (seed, run) alone, bit by bit
    on one machine, whatever other runs are made.
    progress: called with 1 after each state kept (the `update` of a progress bar).

    Returns float32 (time, channel, lat, lon), channels as in `VARIABLES`, lat north to south, lon
    from 0. Raises ValueError when dt is too long for the grid, or the solution is not finite.
    """
    if not 0 <= run < planet.num_runs:
        raise ValueError(
            f"run={run} is not one of this planet's {planet.num_runs} runs "
            f"(0 to {planet.num_runs - 1}). Raise num_runs."
        )
    _refuse_unstable(planet, run)
    sphere = Sphere(planet.num_lat, planet.num_lon, _truncation(planet))
    steps = round(planet.step_hours * 3600 / planet.dt_seconds)
    spin_up = round(planet.spin_up_days * 24 / planet.step_hours)
    damping = np.exp(
        -planet.dt_seconds
        / (3600 * _DAMPING_HOURS)
        * (sphere.laplacian / sphere.laplacian[-1]) ** 4
    ).astype(REAL)

    states = np.empty(
        (planet.samples_per_run, len(VARIABLES), planet.num_lat, planet.num_lon), np.float32
    )
    spectrum = _start(sphere, planet.seed, run)
    past: list[np.ndarray] = []  # tendencies of the last steps, newest first
    for index in range(spin_up + planet.samples_per_run):
        if index:
            # An unstable run overflows here; it is refused below, with what to do about it.
            with np.errstate(over="ignore", invalid="ignore"):
                for _ in range(steps):
                    past = [sphere.tendency(spectrum), *past[:2]]
                    spectrum = (spectrum + planet.dt_seconds * _extrapolate(past)) * damping
            if not np.isfinite(spectrum).all():
                raise ValueError(
                    f"Run {run} is not finite at hour {index * planet.step_hours} with "
                    f"dt_seconds={planet.dt_seconds:g}; {_limit(planet)}. {_suggest(planet)}"
                )
        if index >= spin_up:
            geopotential, _, u, v = sphere.to_grid(spectrum)
            states[index - spin_up] = u, v, MEAN_HEIGHT + geopotential / GRAVITY
            if progress is not None:
                progress(1)
    return states


def load_topography() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Height of the Earth's solid surface at 1 degree, for `coast_mask`.

    Returns lat (180,), north to south, and lon (360,), 0.5 to 359.5, float64 degrees; and the
    height (180, 360), int16 metres, negative below sea level. Each value is the median of nine
    points of etopo20, so its sign is their majority's. The file also says its `source`: etopo20
    of Ferret datasets 7.6.0, under the Ferret licence (public domain, as is).
    """
    path = resources.files("graticule.data").joinpath("topography.npz")
    with path.open("rb") as file, np.load(file) as stored:
        return stored["lat"], stored["lon"], stored["height"]


def coast_mask(
    lat: np.ndarray,
    lon: np.ndarray,
    topography_lat: np.ndarray,
    topography_lon: np.ndarray,
    topography: np.ndarray,
) -> np.ndarray:
    """Where a grid is sea: the topography below 0 on the larger part of the cell's area.

    lat (lat,), lon (lon,): the grid, in degrees, lat in either order.
    topography_lat (y,), topography_lon (x,), topography (y, x): evenly spaced points, degrees and
    metres; NaN counts as land. Longitudes may start anywhere on either side.

    A point belongs to the nearest row and column. A cell without any takes the nearest point.
    Returns bool (lat, lon), True where sea. Raises ValueError when the topography does not reach
    the grid.
    """
    if topography.shape != (len(topography_lat), len(topography_lon)):
        raise ValueError(
            f"topography has shape {topography.shape}, but its coordinates have "
            f"{len(topography_lat)} latitudes and {len(topography_lon)} longitudes. "
            "It must be (lat, lon)."
        )
    north_south = np.abs(lat[:, None] - topography_lat)  # (lat, y)
    east_west = np.abs((lon[:, None] - topography_lon + 180) % 360 - 180)  # (lon, x)
    for name, values, points, distance in (
        ("lat", lat, topography_lat, north_south),
        ("lon", lon, topography_lon, east_west),
    ):
        spacing = np.median(np.abs(np.diff(points)))
        far = distance.min(axis=1).argmax()
        if distance[far].min() > spacing:
            raise ValueError(
                f"The topography ends {distance[far].min():g} degrees from {name}="
                f"{values[far]:g}, more than its spacing of {spacing:g}. Give one that covers "
                "the grid, such as load_topography()."
            )
    sea = topography < 0
    # Which points lie in which row, weighted by area, and in which column: (lat, y), (lon, x).
    in_row = np.zeros_like(north_south)
    in_row[north_south.argmin(axis=0), np.arange(len(topography_lat))] = np.cos(
        np.radians(topography_lat)
    )
    in_column = np.zeros_like(east_west)
    in_column[east_west.argmin(axis=0), np.arange(len(topography_lon))] = 1.0
    sea_area = in_row @ sea @ in_column.T
    area = in_row.sum(axis=1)[:, None] * in_column.sum(axis=1)
    nearest = sea[np.ix_(north_south.argmin(axis=1), east_west.argmin(axis=1))]
    # A cell half sea is land, however its sums are rounded.
    return np.where(area > 0, sea_area > area * (0.5 + 1e-9), nearest)


def _start(sphere: Sphere, seed: int, run: int) -> np.ndarray:
    """The first spectrum of a run: a jet in each hemisphere and eddies, in balance."""
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, run))))
    sine, _ = gauss(len(sphere.area))
    lat = np.degrees(np.arcsin(sine))
    wind = np.zeros_like(lat)
    for hemisphere in (1, -1):
        centre = hemisphere * draw.uniform(*_JET_LAT)
        width = draw.uniform(*_JET_WIDTH)
        wind += draw.uniform(*_JET_SPEED) * np.exp(-(((lat - centre) / width) ** 2))
    # Drawn up to degree 12 on every grid, so that a run starts alike at any resolution.
    lowest, highest = _EDDY_DEGREES
    count = highest + 1
    parts = draw.standard_normal((2, count, count))
    order, degree = np.ogrid[:count, :count]
    wanted = (order >= 1) & (order <= degree) & (degree >= lowest)
    eddies = np.zeros((3, sphere.num_degrees, sphere.num_degrees), COMPLEX)
    fits = min(count, sphere.num_degrees)
    eddies[1, :fits, :fits] = ((parts[0] + 1j * parts[1]) * wanted)[:fits, :fits]
    _, _, u, v = sphere.to_grid(eddies)
    speed = math.sqrt((sphere.area[:, None] * (u * u + v * v)).sum())
    return sphere.balanced(sphere.vorticity_of_zonal_wind(wind) + eddies[1] * (_EDDY_SPEED / speed))


def _extrapolate(past: list[np.ndarray]) -> np.ndarray:
    """Adams-Bashforth mean tendency over the next step, of the order that the past allows."""
    if len(past) == 1:
        return past[0]
    if len(past) == 2:
        return (3 * past[0] - past[1]) / 2
    return (23 * past[0] - 16 * past[1] + 5 * past[2]) / 12


def _truncation(planet: Planet) -> int:
    """How many degrees the grid carries without aliasing in products of two fields."""
    return min((2 * planet.num_lat - 1) // 3, (planet.num_lon - 1) // 3) + 1


def _refuse_unstable(planet: Planet, run: int) -> None:
    if planet.dt_seconds > largest_stable_dt(planet):
        raise ValueError(
            f"Run {run} cannot start (hour 0): dt_seconds={planet.dt_seconds:g} is too long for "
            f"num_lat={planet.num_lat}, num_lon={planet.num_lon}; {_limit(planet)}. "
            f"{_suggest(planet)}"
        )


def _limit(planet: Planet) -> str:
    return f"the largest stable dt is {math.floor(largest_stable_dt(planet))} s"


def _suggest(planet: Planet) -> str:
    seconds = planet.step_hours * 3600
    return f"Take dt_seconds={seconds / math.ceil(seconds / largest_stable_dt(planet)):g} or less."


def _is_whole(number: float) -> bool:
    return math.isclose(number, round(number), abs_tol=1e-9)
