"""Write the demo planet's runs as a store, split by run, with its statistics."""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    out = Path(out)
    existed = out.exists()
    workers = min(workers or _num_cpus(), planet.num_runs)
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
    try:
        with closing(simulated(planet, workers, progress)) as runs:
            for index, fields in enumerate(state for states in runs for state in states):
                writer.write(index, np.where(sea, fields, np.nan))
        store = writer.finish()
        training = np.flatnonzero(store.times.within(store.splits["train"]))
        compute(store, training).save(store)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # it was empty: what is in it is ours, and half
        if existed:
            out.mkdir(exist_ok=True)
        raise
    return store


def simulated(
    planet: Planet, workers: int, progress: Callable[[int, int], None] | None = None
) -> Generator[np.ndarray, None, None]:
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
    # Forked children of a process with threads may hang: they are started afresh.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    try:
        with _quiet_children():
            futures = [pool.submit(planets.simulate, planet, run) for run in range(planet.num_runs)]
        unseen = set(futures)
        for future in futures:
            while future in unseen:
                finished, unseen = wait(unseen, return_when=FIRST_COMPLETED)
                for seen in finished:
                    count(len(seen.result()))
            yield future.result()
    except BaseException as error:  # of a child, Ctrl-C, a reader who has enough
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ValueError(
                f"a process that simulated the planet ended without a word ({error}): out of"
                " memory? In a script of your own, call this under `if __name__ == '__main__':` or"
                " with workers=1"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _quiet_children() -> Iterator[None]:
    """Processes started in this block compute with one thread and never see Ctrl-C, which a
    terminal sends to all: their parent ends them. A signal to the parent waits for the end of the
    block, lest a child is left half started."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    variables = {name: os.environ.get(name) for name in names}
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # the only one that signals reach
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda number, _: received.append(number))
    os.environ.update(dict.fromkeys(names, "1"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        for name, value in variables.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
        if received:
            signal.raise_signal(received[0])


def _end_with_parent() -> None:
    """In a child: a parent that is killed cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _num_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
