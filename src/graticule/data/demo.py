"""Write the demo planet's runs as a store, split by run, with its statistics."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import cftime
import numpy as np

from graticule.data import planet as planets
from graticule.data.planet import Planet
from graticule.data.statistics import compute
from graticule.data.store import Store, StoreWriter
from graticule.data.times import TimeAxis, seconds_of
from graticule.grid import Grid
from graticule.variables import Channel, Channels

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
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Simulate the planet and write it, one time step a shard, with statistics over `train`.

    coast: keep only cells over the sea of Earth's coastline; the others are land, without
    values, and a static channel `sea` tells which is which. progress: (samples, samples in all).
    """
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
    writer = StoreWriter(
        out,
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
    for index, fields in enumerate(_samples(planet, progress)):
        writer.write(index, np.where(sea, fields, np.nan))
    store = writer.finish()
    training = np.flatnonzero(store.times.within(store.splits["train"]))
    compute(store, training).save(store)
    return store


def _samples(planet: Planet, progress: Callable[[int, int], None] | None) -> Iterator[np.ndarray]:
    for run in range(planet.num_runs):
        yield from planets.simulate(planet, run)
        if progress:
            progress((run + 1) * planet.samples_per_run, planet.num_runs * planet.samples_per_run)
