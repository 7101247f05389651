"""A generated ocean: tracers in a fixed flow, damped, and forced at the surface; all known.

Temperature and salinity on four levels and the height of the surface are carried by a known
flow without divergence that never crosses Earth's coast, mix with the levels beside them and
relax to a profile. Heat and fresh water enter at the surface: a seasonal cycle of heat and red
noise, smooth in space, which no state foretells. So the next state is a known linear function of
the state and the forcing,

    state(t + 1) = A state(t) + B forcing(t) + c,

and with both of them a forecast can be exact, while the error of the best one without the forcing
is a number (`rmse_without_forcing`). The level masks and the 73 dates of a year are those of an
ocean model's output; in the julian calendar the step over 29 February has six days.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from graticule.data.basin import (
    DAY,
    LEVELS,
    STEPS_A_YEAR,
    THICKNESS,
    Ocean,
    grid_of,
    steps_of_year,
    streams,
    waves,
    wet_levels,
)
from graticule.data.transport import Exchange, Sparse, flow, mixing
from graticule.keyed import keyed

DAMPING_DAYS: tuple[float, ...] = (60.0, 120.0, 240.0, 360.0)
"""Days in which a level relaxes to its profile, by a factor e."""
SURFACE_DAMPING_DAYS = 30.0
"""The same of the surface height."""
DIFFUSIVITY = 1.5e-3
"""Of the mixing between levels, m2 s-1."""

DENSITY, HEAT_CAPACITY, SALINITY = 1025.0, 3990.0, 35.0
"""Of sea water: kg m-3, J kg-1 K-1, g kg-1."""

FORCINGS = ("hfds", "wfo")
"""Heat into the sea, W m-2; fresh water into the sea, kg m-2 s-1."""
NOISE = {"hfds": 120.0, "wfo": 1e-4}
"""Standard deviation of each forcing's red noise, in its units."""
SEASON_HEAT = 150.0
"""Amplitude of the yearly cycle of heat at the poles, W m-2; it goes with the sine of latitude."""
NOISE_DAYS = 14.0
"""Days after which the red noise's correlation has fallen by a factor e."""
MEMORY = float(np.exp(-5 / NOISE_DAYS))
"""The part of the noise that is left one step later."""
NOISE_LENGTH = 1.5e6
"""Metres over which it falls in space."""
NUM_PATTERNS = 24
"""Waves whose random amplitudes make one forcing's noise."""

TRACERS = ("thetao", "so", "zos")
"""Each feels one forcing: heat, fresh water, fresh water."""
_FELT = {"thetao": "hfds", "so": "wfo", "zos": "wfo"}


@dataclass(frozen=True, eq=False)
class Tracer:
    """One tracer's linear system: what a step of the scheme does with its wet cells.

    wet: (level, lat, lon) bool. volume: (cell,) m3, the wet cells in the order of `wet`.
    profile: (cell,), which it relaxes to. step: (cell, cell). flux: (cell, surface cell), of the
    forcing `felt`. constant: (cell,).
    """

    name: str
    felt: str
    wet: np.ndarray
    volume: np.ndarray
    profile: np.ndarray
    step: Sparse
    flux: Sparse
    constant: np.ndarray

    def advance(self, state: np.ndarray, forcing: np.ndarray, num_steps: int) -> np.ndarray:
        """`num_steps` steps of the scheme. state: (cell,). forcing: (surface cell,), constant."""
        gain = self.flux @ forcing + self.constant
        for _ in range(num_steps):
            state = self.step @ state + gain
        return state

    def propagator(self, num_steps: int) -> tuple[Sparse, Sparse, np.ndarray]:
        """A, B and c of so many steps: `advance(x, f)` is A x + B f + c."""
        a, b, c = Sparse.identity(self.volume.size), self.flux, self.constant
        for n in range(num_steps):
            if n:
                b, c = self.step @ b + self.flux, self.step @ c + self.constant
            a = self.step @ a
        return a, b, c

    def field(self, state: np.ndarray) -> np.ndarray:
        """(cell,) to (level, lat, lon), NaN on land."""
        full = np.full(self.wet.shape, np.nan)
        full[self.wet] = state
        return full

    @cached_property
    def level(self) -> np.ndarray:
        """(cell,) the position of each cell's level."""
        return np.nonzero(self.wet)[0]


def longest_step(ocean: Ocean) -> float:
    """Seconds: the longest stable step of the scheme."""
    return min(
        exchange.longest_step(volume, damping)
        for exchange, volume, damping in (_exchange(ocean, name) for name in TRACERS)
    )


@lru_cache(maxsize=4)
def tracer(ocean: Ocean, name: str) -> Tracer:
    """The system of one of `TRACERS`. ValueError where `dt_seconds` is too long."""
    exchange, volume, damping = _exchange(ocean, name)
    limit = longest_step(ocean)
    if ocean.dt_seconds > limit:
        raise ValueError(
            f"dt_seconds={ocean.dt_seconds:g} is too long for num_lat={ocean.num_lat}, num_lon="
            f"{ocean.num_lon} and max_speed={ocean.max_speed:g}: CFL number"
            f" {ocean.dt_seconds / limit:.2f}, at most 1; the largest stable step is"
            f" {int(limit)} s. Take dt_seconds={DAY / np.ceil(DAY / limit):g} or less"
        )
    wet = _wet_of(ocean, name)
    profile = _profile(ocean, name)[wet]
    surface = np.arange(np.count_nonzero(wet[0]))  # the first cells
    # One unit of forcing changes the top level by this much a second.
    gain = {
        "thetao": 1 / (DENSITY * HEAT_CAPACITY * THICKNESS[0]),
        "so": -SALINITY / (DENSITY * THICKNESS[0]),
        "zos": 1 / DENSITY,
    }[name]
    return Tracer(
        name=name,
        felt=_FELT[name],
        wet=wet,
        volume=volume,
        profile=profile,
        step=exchange.step(volume, damping, ocean.dt_seconds),
        flux=Sparse(
            (volume.size, surface.size),
            surface,
            surface,
            np.full(surface.size, gain * ocean.dt_seconds),
        ),
        constant=ocean.dt_seconds * damping * profile,
    )


def forcing_of_year(ocean: Ocean, year: int) -> np.ndarray:
    """(73, forcing, lat, lon), each constant from its date to the next; also on land."""
    return np.stack(
        [season_of(ocean, name) + noise_of_year(ocean, name, year) for name in FORCINGS], axis=1
    )


def season_of(ocean: Ocean, name: str) -> np.ndarray:
    """(73, lat, lon): the part of a forcing that its date tells, the same every year."""
    season = np.zeros((STEPS_A_YEAR, ocean.num_lat, ocean.num_lon))
    if name == "hfds":
        # Days from 3 January; the northern sea gains most at the solstice, on day 171.
        phase = np.cos(2 * np.pi * (5 * np.arange(STEPS_A_YEAR) + 2 - 171) / 365)
        heat = SEASON_HEAT * np.sin(np.deg2rad(grid_of(ocean).lat))
        season += (phase[:, None] * heat)[:, :, None]
    return season


def noise_of_year(ocean: Ocean, name: str, year: int) -> np.ndarray:
    """(73, lat, lon): red noise of standard deviation `NOISE`.

    One amplitude per pattern: z(t) = m z(t - 1) + sqrt(1 - m^2) w(t), m = `MEMORY`.
    """
    first = (year + ocean.spin_up_years) * STEPS_A_YEAR
    amplitudes = _amplitudes(ocean, name)[first : first + STEPS_A_YEAR]
    # No matrix product of a library: its sums depend on the number of threads.
    return np.einsum("tk,kyx->tyx", amplitudes, noise_patterns(ocean, name))


@lru_cache(maxsize=4)
def noise_patterns(ocean: Ocean, name: str) -> np.ndarray:
    """(pattern, lat, lon) in the forcing's units: what an amplitude of 1 makes."""
    grid = grid_of(ocean)
    lat, lon = np.deg2rad(grid.lat)[:, None], np.deg2rad(grid.lon)[None]
    patterns = waves(ocean, name, NUM_PATTERNS, NOISE_LENGTH, lat, lon)
    return NOISE[name] * np.sqrt(2 / NUM_PATTERNS) * patterns


def simulate_year(
    ocean: Ocean, name: str, year: int, state: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One year of one tracer.

    state: (cell,) at the year's first date, none: the profile. Returns the states at the 73 dates,
    float32 (73, level, lat, lon), NaN on land, and the state at the next year's first date.
    """
    system = tracer(ocean, name)
    if state is None:
        state = system.profile
    noise = noise_of_year(ocean, system.felt, year)
    forcing = (season_of(ocean, system.felt) + noise)[:, system.wet[0]]
    states = np.empty((STEPS_A_YEAR, *system.wet.shape), np.float32)
    for index, num_steps in enumerate(steps_of_year(ocean, year)):
        states[index] = system.field(state)
        state = system.advance(state, forcing[index], int(num_steps))
    return states, state


def rmse_without_forcing(ocean: Ocean, num_leads: int) -> np.ndarray:
    """(lead, channel) RMSE of the best possible forecast that is not given the forcing.

    It knows the flow, the season, the state and all the past, and so the noise up to the last
    step; what it cannot know are the draws from its start on. With the forcing, the floor is 0.
    Area-weighted over wet cells, in expectation; channels thetao and so by level, then zos.

        state error after k steps = sum over i < k of H[k - 1 - i] w(i),
        H[0] = B P,  H[n] = A H[n - 1] + m^n B P,

    with w independent draws of variance 1 - m^2, P the noise's patterns and m its memory.
    """
    num_steps = round(5 * DAY / ocean.dt_seconds)
    floors = []
    for name in TRACERS:
        system = tracer(ocean, name)
        patterns = noise_patterns(ocean, system.felt)[:, system.wet[0]]
        variance = np.zeros((num_leads, system.volume.size))
        for pattern in patterns:
            response, reach = np.zeros(system.volume.size), pattern
            for lead in range(num_leads):
                gain = system.flux @ reach
                for _ in range(num_steps):
                    response = system.step @ response + gain
                variance[lead] += (1 - MEMORY**2) * response**2
                reach = MEMORY * reach
        variance = variance.cumsum(axis=0)
        for level in range(len(system.wet)):
            here = system.level == level
            weight = system.volume[here] / system.volume[here].sum()
            floors.append(np.sqrt((variance[:, here] * weight).sum(axis=1)))
    return np.stack(floors, axis=1)


def _wet_of(ocean: Ocean, name: str) -> np.ndarray:
    wet = wet_levels(ocean)
    return wet[:1] if name == "zos" else wet


def _exchange(ocean: Ocean, name: str) -> tuple[Exchange, np.ndarray, np.ndarray]:
    """How a tracer's cells exchange water; their volume (cell,) m3; their damping (cell,) s-1."""
    wet = _wet_of(ocean, name)
    cells = np.full(wet.shape, -1)
    cells[wet] = np.arange(np.count_nonzero(wet))
    area = grid_of(ocean).cell_area
    exchange = Exchange(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    for level, stream in enumerate(streams(ocean)[: len(wet)]):
        exchange += flow(stream, cells[level], THICKNESS[level])
    for upper in range(len(wet) - 1):
        distance = LEVELS[upper + 1] - LEVELS[upper]
        exchange += mixing(cells[upper], cells[upper + 1], area * (DIFFUSIVITY / distance))
    level_of, row, column = np.nonzero(wet)
    days = np.array((SURFACE_DAMPING_DAYS,) if name == "zos" else DAMPING_DAYS)
    return exchange, area[row, column] * np.array(THICKNESS)[level_of], 1 / (DAY * days[level_of])


def _profile(ocean: Ocean, name: str) -> np.ndarray:
    """(level, lat, lon): what a tracer relaxes to."""
    lat = np.deg2rad(grid_of(ocean).lat)[None, :, None]
    depth = np.array(LEVELS)[:, None, None]
    warm = np.cos(lat) ** 2
    if name == "thetao":
        profile = 5 + 18 * warm * np.exp(-depth / 200)
    elif name == "so":
        profile = 34.6 + (1.6 * np.sin(2 * lat) ** 2 - 0.8 * (1 - warm)) * np.exp(-depth / 200)
    else:
        profile = 0.8 * warm[:1] - 0.4
    return np.broadcast_to(profile, (profile.shape[0], ocean.num_lat, ocean.num_lon))


@lru_cache(maxsize=4)
def _amplitudes(ocean: Ocean, name: str) -> np.ndarray:
    """(time, pattern) of the whole record from the start of the spin-up on, variance 1."""
    years = ocean.spin_up_years + ocean.num_years
    draws = keyed(ocean.seed, f"ocean {name} amplitudes").standard_normal(
        (years * STEPS_A_YEAR, NUM_PATTERNS)
    )
    amplitudes = draws.copy()
    for time in range(1, len(draws)):
        fresh = np.sqrt(1 - MEMORY**2) * draws[time]
        amplitudes[time] = MEMORY * amplitudes[time - 1] + fresh
    return amplitudes
