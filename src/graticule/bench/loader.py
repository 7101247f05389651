"""`graticule bench loader`: samples from disk to normalised tensors, and stripes of a large grid.

All ways of reading run in turn on one processor (where the system can confine them to it) from
files that the system has in memory, and give the same tensors, which is asserted.
"""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graticule.bench.om4 import (
    STATES,
    After,
    Before,
    Floor,
    Ocean,
    Sample,
    in_place,
    plainly,
    red_noise,
    source_of,
)
from graticule.bench.rows import Row, Setting
from graticule.data.loader import Loader, Order
from graticule.data.normalise import Normaliser
from graticule.data.statistics import compute
from graticule.data.store import Packing, Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels

TITLE = (
    "samples of 4 steps (77 + 3 planes of 180 x 360, two states in, two out) from disk to"
    " normalised tensors, against xarray with Dask; stripes of 93 x 2041 x 4320 against all of it"
)
GRID, LEVELS, TIMES, STEPS = (180, 360), 19, 24, 4
REPEATS, SAMPLES, SLOW_SAMPLES = 5, 4, 1
"""Rounds, and samples of each round: of the fast ways and of the two slow ones."""
THREADS = 4
"""Of `after`, on the one processor."""
STRIPED = (93, 2041, 4320)
STRIPE_REPEATS = 5
GOALS = {
    "after": 1.0, "floor": 1.0, "ours": 20.0, "ours-packed": 20.0,
    "ours / floor": 0.9, "ours-packed / floor": 0.9, "ours / floor in place": 0.0,
    "ours-packed / floor in place": 0.0,
}  # fmt: skip


def rows(setting: Setting) -> list[Row]:
    """Rows of samples/s, then of stripes: their share of the time and of the bytes of the whole.
    What is generated is deleted."""
    try:
        import dask  # noqa: F401
    except ImportError:
        raise ValueError(
            "bench loader compares with xarray on Dask, which is not installed;"
            " pip install 'graticule[bench]'"
        ) from None
    if setting.out:
        setting.out.mkdir(parents=True, exist_ok=True)
    with _one_processor() as confined, tempfile.TemporaryDirectory(dir=setting.out) as folder:
        measured = _samples(Path(folder), setting.say, confined)
        return [*measured, *_stripes(Path(folder), setting.say)]


@dataclass
class _Way:
    """A way of reading. work: reads samples that start at these times and hands each one over."""

    name: str
    work: Callable[[list[int], Callable[[Sample], None]], None]
    samples: int
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, starts: list[int]) -> None:
        gc.collect()
        began, cpu = time.perf_counter(), time.process_time()
        self.work(starts[: self.samples], lambda sample: None)
        self.rates.append(self.samples / (time.perf_counter() - began))
        self.cpu.append((time.process_time() - cpu) / self.samples)


def _samples(folder: Path, say: Callable[[str], None], confined: bool) -> list[Row]:
    ocean = Ocean(folder, TIMES, GRID, LEVELS)
    say(f"writing {TIMES} times of {len(ocean.names)} planes")
    whole, packed = ocean.write()
    means = compute(whole, np.arange(TIMES))
    mean, std = means.aligned(ocean.names)
    after = After(ocean, mean, std, THREADS)
    ways = {
        way.name: way
        for way in (
            _Way("before", _each(Before(ocean, mean, std), synchronous=True), SLOW_SAMPLES),
            _Way("after", _each(after), SLOW_SAMPLES),
            _Way("floor", _each(Floor(ocean, plainly(mean, std))), SAMPLES),
            _Way("floor in place", _each(Floor(ocean, in_place(mean, std))), SAMPLES),
            _Way("ours", _ours(whole, means), SAMPLES),
            _Way("ours-packed", _ours(packed, means), SAMPLES),
        )
    }
    assert packed.packing.scale is not None
    half_step = float((packed.packing.scale / 2 / std).max())
    last = TIMES - STATES * (STEPS + 1)
    _assert_equal(ways, last // 2, {"ours-packed": half_step})
    for repeat in range(REPEATS):
        starts = [(7 * repeat + 5 * i) % (last + 1) for i in range(SAMPLES)]
        for way in ways.values():
            way.measure(starts)
        say(f"samples: {repeat + 1} of {REPEATS}")
    after.close()
    note = f"medians of {REPEATS}" + ("" if confined else "; not confined to one processor")
    return [_row(ways, what, note) for what in GOALS]


def _row(ways: dict[str, _Way], what: str, note: str) -> Row:
    name, _, other = what.partition(" / ")
    one, two = ways[name], ways[other or "before"]
    cpu = [statistics.median(way.cpu) for way in (one, two)]
    return Row(
        what=what,
        ours=statistics.median(one.rates),
        against=statistics.median(two.rates),
        goal=GOALS[what],
        unit="samples/s",
        note=f"against {two.name}; CPU-seconds a sample {cpu[0]:.3g} and {cpu[1]:.3g}; {note}",
    )


def _each(loader: Any, synchronous: bool = False) -> Callable:
    def work(starts: list[int], hand_over: Callable[[Sample], None]) -> None:
        import dask

        with dask.config.set(scheduler="synchronous") if synchronous else nullcontext():
            for start in starts:
                hand_over(loader.sample(start, STEPS))

    return work


def _ours(store: Store, means: Any) -> Callable:
    source = source_of(store)
    inputs, forcing, labels = (
        Normaliser(store, channels, means)
        for channels in (source.prognostic, source.forcing, source.predicted)
    )

    # One loader for all rounds, as in training: its memory is there from the second one on.
    loader = Loader(source, Order(np.arange(TIMES), None), range(0), batch=1, leads=STEPS)

    def work(starts: list[int], hand_over: Callable[[Sample], None]) -> None:
        # An initial time is the last of the states that go in.
        loader.order = Order(np.array(starts) + STATES - 1, seed=None)
        loader.numbers = range(len(starts))
        with closing(iter(loader)) as batches:
            for batch in batches:
                first = inputs(batch.inputs)[0].flatten(0, 1)
                sample: Sample = []
                for _ in range(STEPS):
                    given, truth = batch.lead()
                    sample.append((first, forcing(given)[0].flatten(0, 1),
                                   labels(truth)[0].flatten(0, 1)))  # fmt: skip
                hand_over(sample)

    return work


def _assert_equal(ways: dict[str, _Way], start: int, allowed: dict[str, float]) -> None:
    """Every way gives the tensors of `before`, to the rounding of float32 or of packing."""
    kept: list[Sample] = []
    ways["before"].work([start], kept.append)
    for name, way in ways.items():

        def compare(sample: Sample, name: str = name) -> None:
            for step, (ours, theirs) in enumerate(zip(sample, kept[0], strict=True)):
                for part, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                    if part == 0 and step:
                        continue  # these inputs are the labels of the step before
                    assert one.shape == other.shape, (name, one.shape, other.shape)
                    most = float((one - other).abs().max())
                    assert most <= allowed.get(name, 0.0) + 2e-6, (name, step, part, most)

        way.work([start], compare)


def _stripes(folder: Path, say: Callable[[str], None]) -> list[Row]:
    say(f"writing one time of {' x '.join(str(n) for n in STRIPED)} int16")
    store = _large_store(folder / "large")
    height = STRIPED[1]
    parts = {1: slice(None)}
    for share in (4, 16):
        first = (height // 2) // 32 * 32 + 5  # in the middle of an inner chunk
        parts[share] = slice(first, first + -(-height // share))
    out = np.empty(STRIPED, np.int16)
    seconds: dict[int, list[float]] = {share: [] for share in parts}
    read: dict[int, int] = {}
    for repeat in range(STRIPE_REPEATS + 1):
        for share, rows in parts.items():
            num = len(range(height)[rows])
            place = out.reshape(-1)[: STRIPED[0] * num * STRIPED[2]]
            before, began = store.shards.bytes_read, time.perf_counter()
            store.read_stored(0, None, rows, place.reshape(STRIPED[0], num, STRIPED[2]))
            if repeat:  # the first touches new memory and files
                seconds[share].append(time.perf_counter() - began)
            read[share] = store.shards.bytes_read - before
        say(f"stripes: {repeat + 1} of {STRIPE_REPEATS + 1}")
    rows_of = {share: len(range(height)[rows]) for share, rows in parts.items()}
    result = []
    for share, most in ((4, 1 / 3), (16, 1 / 8)):
        whole, part = (statistics.median(seconds[s]) for s in (1, share))
        note = f"{rows_of[share]} rows from row {parts[share].start} against all {height}"
        result += [
            Row(what=f"stripe-1/{share}", ours=part, against=whole, goal=most, at_most=True,
                unit="s", note=f"{note}; medians of {STRIPE_REPEATS}"),
            Row(what=f"stripe-1/{share} bytes", ours=read[share] / 1e6, against=read[1] / 1e6,
                goal=(rows_of[share] + 64) / height, at_most=True, unit="MB", note=note),
        ]  # fmt: skip
    return result


def _large_store(path: Path) -> Store:
    """One time; every channel is the same noise, turned, a third of it land."""
    num, height, width = STRIPED
    noise = red_noise((height, width), np.random.default_rng(1))
    plane = np.rint(4000 * noise).clip(-32766, 32766).astype(np.int16)
    plane[noise < np.quantile(noise, 1 / 3)] = -32768
    writer = StoreWriter(
        path,
        channels=Channels([Channel(variable=f"v{c}", units="1", role="prognostic")
                           for c in range(num)]),
        grid=Grid(np.linspace(90, -80, height), np.arange(width) * 360 / width),
        times=TimeAxis(np.zeros(1, np.int64), "standard", 86400),
        packing=Packing(np.full(num, 1 / 4000), np.zeros(num)),
    )  # fmt: skip
    turned = np.stack([np.roll(plane, 41 * c, axis=1) for c in range(num)])
    writer.write_stored(0, (turned[group] for group in writer.layout.groups))
    return writer.finish()


@contextmanager
def _one_processor() -> Iterator[bool]:
    """Confine this thread, and those it starts, to one processor. False: this system cannot."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if allowed:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield bool(allowed)
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
