"""The acts on reading: loaders by themselves, chunks, normalisation."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from graticule.bench.om4 import STATES, After, Before, plainly
from graticule.bench.rows import Row
from graticule.bench.samudra.laid import Laid
from graticule.bench.samudra.size import PUBLISHED, Size
from graticule.config import Config
from graticule.data.loader import Loader, Order
from graticule.data.normalise import Normaliser
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.train.task import Task


@dataclass
class _Way:
    """A way of reading, or of normalising: `work` does so many samples."""

    work: Callable[[Sequence[int]], None]
    samples: int
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, starts: Sequence[int]) -> None:
        gc.collect()
        began, cpu = time.perf_counter(), time.process_time()
        self.work(starts[: self.samples])
        self.rates.append(self.samples / (time.perf_counter() - began))
        self.cpu.append((time.process_time() - cpu) / self.samples)


def _in_turn(
    ways: dict[str, _Way], last: int, repeats: int, say: Callable[[str], None], what: str
) -> None:
    """All ways on the same samples; the first round, which touches new memory, does not count."""
    most = max(way.samples for way in ways.values())
    for repeat in range(repeats + 1):
        starts = [(17 * repeat + 29 * i) % (last + 1) for i in range(most)]
        for way in ways.values():
            way.measure(starts)
            if not repeat:
                way.rates.clear()
                way.cpu.clear()
        say(f"{what}: {repeat} of {repeats}")


def _row(what: str, ours: _Way, against: _Way, note: str) -> Row:
    cpu = [statistics.median(way.cpu) for way in (ours, against)]
    return Row(
        what, statistics.median(ours.rates), statistics.median(against.rates), None, "samples/s",
        f"{note}; CPU-seconds a sample {cpu[0]:.3g} and {cpu[1]:.3g}, {cpu[1] / cpu[0]:.1f}x;"
        f" medians of {len(ours.rates)}",
    )  # fmt: skip


def loader_rows(laid: Laid, config: Config, size: Size, say: Callable[[str], None]) -> list[Row]:
    reads = _before(laid, size.steps)
    after = After(laid, *laid.scales, size.threads)
    ways = {
        "before": _Way(reads, size.slow_samples),
        "after": _Way(partial(_read, after, size.steps), size.samples),
        "ours": _Way(_ours(config, size.steps), size.samples),
    }
    _in_turn(ways, laid.num_times - STATES * (size.steps + 1), size.repeats, say, "loaders")
    after.close()
    note = (
        f"{PUBLISHED['loader']}; planes of {laid.shape[0]} x {laid.shape[1]}, where what a plane"
        " costs besides its bytes weighs more than at 180 x 360 (bench loader)"
    )
    return [
        _row("loader: after / before", ways["after"], ways["before"], note),
        _row("loader: ours / before", ways["ours"], ways["before"], note),
        _row("loader: ours / after", ways["ours"], ways["after"], "published: none"),
    ]


def _before(laid: Laid, steps: int) -> Callable[[Sequence[int]], None]:
    before = Before(laid, *laid.scales)

    def work(starts: Sequence[int]) -> None:
        import dask

        with dask.config.set(scheduler="synchronous"):
            for start in starts:
                before.sample(start, steps)

    return work


def _ours(config: Config, steps: int) -> Callable[[Sequence[int]], None]:
    """From the store to normalised tensors, as `Objective` has it done."""
    task = Task.of(config, torch.device("cpu"))
    loader = Loader(task.source, Order(np.arange(1), None), range(0), batch=1, leads=steps)

    def work(starts: Sequence[int]) -> None:
        loader.order = Order(np.array(starts) + STATES - 1, seed=None)
        loader.numbers = range(len(starts))
        with closing(iter(loader)) as batches:
            for batch in batches:
                task.objective.inputs(batch.inputs)
                for _ in range(steps):
                    given, labels = batch.lead()
                    task.objective.forcing(given)
                    task.objective.labels(labels)

    return work


def chunk_rows(laid: Laid, size: Size, say: Callable[[str], None]) -> list[Row]:
    """Random samples from files with ten times a chunk, by `after`."""
    readers = {
        name: After(of, *laid.scales, size.threads)
        for name, of in (("one", laid), ("ten", laid.in_long_chunks))
    }
    ways = {
        name: _Way(partial(_read, reader, size.steps), size.samples)
        for name, reader in readers.items()
    }
    last = laid.num_times - STATES * (size.steps + 1)
    _in_turn(ways, last, size.repeats, say, "chunks")
    for reader in readers.values():
        reader.close()
    # Of a step's four times: each selection reads the chunks it touches once.
    touched = statistics.fmean(
        len({(start + STATES * step + i) // size.times_a_chunk for i in range(2 * STATES)})
        for start in range(last + 1) for step in range(size.steps)
    ) * size.times_a_chunk  # fmt: skip
    row = _row(
        f"{size.times_a_chunk} times a chunk / 1", ways["ten"], ways["one"],
        f"{PUBLISHED['chunks']}; {touched:.1f} planes are read for the {2 * STATES} of a step",
    )  # fmt: skip
    return [row]


def _read(reader: After, steps: int, starts: Sequence[int]) -> None:
    for start in starts:
        reader.sample(start, steps)


def normalisation_row(laid: Laid, config: Config, size: Size) -> Row:
    """A sample's fields as they were read to what the model sees: three operations of PyTorch into
    new tensors, as a worker does, and the pass that decodes, normalises and masks."""
    store = Store(config.data.store)
    source = SampleSource(store, config.data)
    sample = source.sample(STATES)
    planes = [sample.inputs(), *(sample.forcing(k + 1) for k in range(size.steps)),
              *(sample.labels(k + 1) for k in range(size.steps))]  # fmt: skip
    means = Statistics.load(store)
    roles = [source.prognostic, *[source.forcing] * size.steps, *[source.predicted] * size.steps]
    passes = [Normaliser(store, channels, means) for channels in roles]
    worker = plainly(*laid.scales)

    def ours(starts: Sequence[int]) -> None:
        for _ in starts:
            for stored, normalise in zip(planes, passes, strict=True):
                normalise(torch.from_numpy(stored)[None])

    def theirs(starts: Sequence[int]) -> None:
        for _ in starts:
            for stored, channels in zip(planes, roles, strict=True):
                worker(stored, channels)

    ways = {"ours": _Way(ours, 20 * size.samples), "theirs": _Way(theirs, 20 * size.samples)}
    _in_turn(ways, 0, size.repeats, lambda text: None, "normalisation")
    note = f"{PUBLISHED['normalise']}; planes of {laid.shape[0]} x {laid.shape[1]}"
    return _row("normalise: fused pass / in a worker", ways["ours"], ways["theirs"], note)
