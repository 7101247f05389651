"""Write the generated worlds as stores, with their statistics: the demo planet and the ocean."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import cftime
import numpy as np

from graticule.data import basin
from graticule.data import ocean as oceans
from graticule.data import planet as planets
from graticule.data.basin import Ocean
from graticule.data.generate import Blocks, write_blocks
from graticule.data.planet import Planet
from graticule.data.processes import as_completed, child_processes, num_cpus, result_of
from graticule.data.store import Store
from graticule.data.times import TimeAxis, seconds_of
from graticule.grid import Grid
from graticule.variables import Channel, Channels, Role

CALENDAR = "proleptic_gregorian"
FIRST_YEAR = 2001
GAP_DAYS = 10
"""Between two runs, so that no window joins them."""
_BOUNDS = {"m s-1": (-250.0, 250.0), "m": (0.0, 40000.0)}


def run_times(planet: Planet) -> np.ndarray:
    """(run, sample) int64 seconds since 1970: the runs one after the other, with gaps."""
    first = seconds_of(cftime.datetime(FIRST_YEAR, 1, 1, calendar=CALENDAR))
    step = planet.step_hours * 3600
    length = planet.samples_per_run * step + GAP_DAYS * 86400
    # Whole days, so that every run starts at midnight.
    length = -(-length // 86400) * 86400
    runs = first + np.arange(planet.num_runs)[:, None] * length
    return runs + np.arange(planet.samples_per_run)[None] * step


def splits_by_run(planet: Planet) -> dict[str, list[str]]:
    """All runs but two train; the last but one validates, the last one tests."""
    if planet.num_runs < 3:
        raise ValueError(
            f"{planet.num_runs} runs cannot be split: train, validation and test need one each"
        )
    axis = TimeAxis(run_times(planet).ravel(), CALENDAR, planet.step_hours * 3600)
    size = planet.samples_per_run

    def span(first: int, last: int) -> list[str]:
        ends = axis.date(first * size), axis.date((last + 1) * size - 1)
        return ["/".join(end.strftime("%Y-%m-%dT%H:%M:%S") for end in ends)]

    last = planet.num_runs - 1
    return {
        "train": span(0, last - 2),
        "validation": span(last - 1, last - 1),
        "test": span(last, last),
    }


def write_demo_store(
    out: str | Path,
    planet: Planet | None = None,
    *,
    coast: bool = False,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Simulate the planet and write it, one time step a shard, with statistics over `train`.

    coast: keep only cells over the sea of Earth's coastline; the others are land, without
    values, and a static channel `sea` tells which is which.
    workers: processes that simulate, at most one a run; none: one a core. The store is the same.
    progress: (samples simulated, samples in all).
    ValueError tells what does not fit; `out` is then as it was before.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    planet = planet or Planet()
    grid = Grid(*planets.grid(planet))
    splits = splits_by_run(planet)
    axis = TimeAxis(run_times(planet).ravel(), CALENDAR, planet.step_hours * 3600)
    sea = np.ones(grid.shape, dtype=bool)
    statics, static_fields = None, None
    if coast:
        sea = planets.coast_mask(grid.lat, grid.lon, *planets.load_topography())
        statics = Channels(
            [Channel(variable="sea", units="1", role="static", long_name="1 at sea, 0 on land")]
        )
        static_fields = sea[None].astype(np.float32)
    return write_blocks(
        out,
        simulated(planet, min(workers or num_cpus(), planet.num_runs), progress),
        sea,
        channels=Channels(
            [
                Channel(
                    variable=name, units=units, role="prognostic", long_name=long_name,
                    low=_BOUNDS[units][0], high=_BOUNDS[units][1],
                )
                for name, units, long_name in planets.VARIABLES
            ]
        ),
        grid=grid,
        times=axis,
        statics=statics,
        static_fields=static_fields,
        splits=splits,
        provenance={
            "title": "graticule's demo planet: spherical shallow water, unstable jets",
            "planet": asdict(planet),
            "coast": coast,
        },
    )  # fmt: skip


def simulated(
    planet: Planet, workers: int, progress: Callable[[int, int], None] | None = None
) -> Blocks:
    """The states of run after run, (time, channel, lat, lon), from so many processes.

    The numbers do not depend on `workers`; 1: in this process. progress: as in
    `write_demo_store`; with several processes it hears of whole runs.
    """
    total = planet.num_runs * planet.samples_per_run
    done = 0

    def count(samples: int) -> None:
        nonlocal done
        done += samples
        if progress:
            progress(done, total)

    if workers == 1:
        for run in range(planet.num_runs):
            yield planets.simulate(planet, run, count)
        return
    with child_processes(workers) as submit:
        futures = [submit(planets.simulate, planet, run) for run in range(planet.num_runs)]
        ended, counted = as_completed(futures), set()
        for future in futures:
            while future not in counted:
                counted.add(seen := next(ended))
                count(len(seen.result()))
            yield future.result()


def write_ocean_store(
    out: str | Path,
    ocean: Ocean | None = None,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Simulate the ocean and write it, one time step a shard, with statistics over `train`.

    Land has no values, on each level its own. Statics: the depth and the currents at the surface.
    workers: processes that simulate, at most one a tracer; none: one a core. The store is the same.
    progress: (dates simulated, dates in all, with the spin-up).
    ValueError tells what does not fit; `out` is then as it was before.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    ocean = ocean or Ocean()
    for name in oceans.TRACERS:
        oceans.tracer(ocean, name)  # raises where the scheme is unstable, before any process
    levels = basin.wet_levels(ocean)
    depth = np.tensordot(basin.THICKNESS, levels, axes=1)
    return write_blocks(
        out,
        circulated(ocean, min(workers or num_cpus(), len(oceans.TRACERS)), progress),
        np.concatenate([levels, levels, levels[:1], np.repeat(levels[:1], 2, axis=0)]),
        channels=ocean_channels(),
        grid=basin.grid_of(ocean),
        times=basin.time_axis(ocean),
        statics=OCEAN_STATICS,
        static_fields=np.concatenate([depth[None], basin.currents(ocean)]),
        splits=basin.splits(ocean),
        provenance={
            "title": "graticule's generated ocean: tracers in a fixed flow, damped and forced",
            "ocean": asdict(ocean),
        },
    )


def circulated(
    ocean: Ocean, workers: int, progress: Callable[[int, int], None] | None = None
) -> Blocks:
    """The years kept, one after the other, each (73, channel, lat, lon), from so many processes.

    Tracers do not feel each other: each year of each is one task. The numbers do not depend on
    `workers`; 1: in this process. progress: as in `write_ocean_store`.
    """
    states: dict[str, np.ndarray | None] = dict.fromkeys(oceans.TRACERS)
    years = range(-ocean.spin_up_years, ocean.num_years)

    def told(year: int) -> None:
        if progress:
            progress((year + 1 - years.start) * basin.STEPS_A_YEAR,
                     len(years) * basin.STEPS_A_YEAR)  # fmt: skip

    def block(year: int, results: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        fields = [fields for fields, _ in results]
        return np.concatenate([*fields, oceans.forcing_of_year(ocean, year)], axis=1)

    if workers == 1:
        for year in years:
            results = [oceans.simulate_year(ocean, n, year, states[n]) for n in oceans.TRACERS]
            states = {n: state for n, (_, state) in zip(oceans.TRACERS, results, strict=True)}
            told(year)
            if year >= 0:
                yield block(year, results)
        return
    with child_processes(workers) as submit:

        def start(year: int) -> list[Future]:
            return [submit(oceans.simulate_year, ocean, n, year, states[n]) for n in oceans.TRACERS]

        running = start(years.start)
        for year in years:
            results = [result_of(future) for future in running]
            states = {n: state for n, (_, state) in zip(oceans.TRACERS, results, strict=True)}
            # The next year is computed while this one is written.
            running = start(year + 1) if year + 1 in years else []
            told(year)
            if year >= 0:
                yield block(year, results)


OCEAN_STATICS = Channels(
    [
        Channel(variable="deptho", units="m", role="static", long_name="depth of the wet levels",
                standard_name="sea_floor_depth_below_geoid", low=0.0),
        Channel(variable="uo", units="m s-1", role="static", long_name="eastward current on top"),
        Channel(variable="vo", units="m s-1", role="static", long_name="northward current on top"),
    ]
)  # fmt: skip
_OCEAN_VARIABLES: tuple[tuple[str, str, Role, str, float, float], ...] = (
    ("thetao", "degC", "prognostic", "sea_water_potential_temperature", -20.0, 60.0),
    ("so", "1e-3", "prognostic", "sea_water_salinity", 20.0, 50.0),
    ("zos", "m", "prognostic", "sea_surface_height_above_geoid", -10.0, 10.0),
    ("hfds", "W m-2", "forcing", "surface_downward_heat_flux_in_sea_water", -2000.0, 2000.0),
    ("wfo", "kg m-2 s-1", "forcing", "water_flux_into_sea_water", -2e-3, 2e-3),
)


def ocean_channels() -> Channels:
    """thetao and so on their levels, zos, and the forcings hfds and wfo."""
    return Channels(
        [
            Channel(
                variable=name, units=units, role=role, level=level,
                level_units="" if level is None else "m", standard_name=standard_name,
                long_name=standard_name.replace("_", " "), low=low, high=high,
            )
            for name, units, role, standard_name, low, high in _OCEAN_VARIABLES
            for level in (basin.LEVELS if name in ("thetao", "so") else (None,))
        ]
    )  # fmt: skip
