"""`graticule bench samudra`: the acts by which Samudra's authors made it fast, each as a ratio.

"4 days to 4 hours" (Merose 2026) came of a loader without Dask, normalisation on the device, less
logging in rollouts, validation apart from training, and activation checkpointing. Each act is
measured on the generated, forced ocean, in one run, beside the figure that was published; the
memory of checkpointing on the published model itself, at 32 x 128. `before` and `after` are the
two states of their loader in words of our own (`om4.py`), fed to the very training step that ours
feeds, read ahead by one worker process as ours is by one thread. What a CPU cannot show is named
in rows without a figure.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from graticule.bench.checkpointing import memory_rows
from graticule.bench.om4 import STATES, After, Before, Ocean, Sample, plainly
from graticule.bench.rows import Row, Setting
from graticule.config import Config
from graticule.data.basin import Ocean as Basin
from graticule.data.demo import write_ocean_store
from graticule.data.loader import Loader, Order
from graticule.data.normalise import Normaliser
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.forecast.run import forecast
from graticule.recipes import recipe
from graticule.train.objective import as_stored
from graticule.train.optimizer import make_optimizer
from graticule.train.step import training_step
from graticule.train.task import Task

TITLE = (
    "the acts of `4 days to 4 hours`, each against what it took the place of and beside the"
    " published figure: loader, waiting for data, normalisation, logging, validation, checkpointing"
)
BASIN = Basin(num_years=3, spin_up_years=1)
STEPS, BATCH = 4, 4
"""Leads of a sample, and samples of a training step."""
REPEATS, SAMPLES, SLOW_SAMPLES = 5, 8, 2
TRAINING_STEPS = 5
"""Timed, of each loader, after one that is not."""
WORKERS = 1
"""Processes that read for `before` and `after` in training; 0: the training process itself."""
THREADS = 4
"""Of `after`."""
LEADS = 36
"""Of a forecast: a year."""
LOG_EVERY = 10
TIMES_A_CHUNK = 10
PUBLISHED = {
    "loader": "published: 5x; elsewhere here 4 to 6x in CPU-seconds",
    "wait": "published: 75 % of a step before",
    "chunks": "published: no help for random access",
    "normalise": "published: moved to the device, no figure of its own",
    "logging": "published: 4x, 1,152 to 4,800 simulated years a day, with images besides",
    "apart": "published: no figure of its own",
}


def rows(setting: Setting) -> list[Row]:
    """The acts in the order they were published in. What is generated is deleted."""
    try:
        import dask  # noqa: F401
    except ImportError:
        raise ValueError(
            "bench samudra compares with xarray on Dask, which is not installed;"
            " pip install 'graticule[bench]'"
        ) from None
    if setting.out:
        setting.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=setting.out) as folder:
        setting.say("simulating the ocean")
        store = write_ocean_store(Path(folder) / "ocean.zarr", BASIN)
        laid = Laid.out(Path(folder), store)
        config = _config(store)
        found = [*_loaders(laid, config, setting.say), *_training(laid, config, setting.say)]
        found += [*_chunks(laid, setting.say), _normalisation(laid, config)]
        found += _rollouts(Path(folder), config, found, setting.say)
    return [*found, *memory_rows(setting.say), *not_here()]


def not_here() -> list[Row]:
    """What needs a GPU, or eight, and is not measured."""
    return [
        Row(what, None, None, None, "", note)
        for what, note in {
            "pinned memory": "published: 10 to 20 % in a benchmark, 2x in training; there is no"
            " copy to a device on a CPU",
            "copies beside kernels": "published: none; a CPU has no stream to copy on",
            "4 days to 4 hours": "published: 24x; a product of the acts above on eight GPUs, which"
            " is not measured as a whole",
            "4,800 years a day": "published, at 180 x 360 on one GPU; here only the ratio between"
            " logging and not",
        }.items()
    ]


def _config(store: Store) -> Config:
    base = recipe("samudra-ocean")
    return replace(
        base,
        data=replace(base.data, store=str(store.path), forcing_offsets=(-1, 0)),
        train=replace(base.train, batch=BATCH, leads=STEPS),
    )


@dataclass(frozen=True, eq=False)
class Laid(Ocean):
    """The ocean's store laid out as OM4 is: an array for each variable and level, in time order.

    A worker is handed it, so it holds plain values. roles: of each variable, by name. scales:
    (channel,) mean and standard deviation, in the order of `names`.
    """

    roles: dict[str, str] = field(default_factory=dict)
    scales: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.ones(0))

    @classmethod
    def out(cls, folder: Path, store: Store) -> "Laid":
        laid = cls(
            folder, len(store.times), store.grid.shape,
            roles={f"{channel.variable}_{number}": channel.role
                   for number, channel in enumerate(store.channels)},
            scales=Statistics.load(store).aligned(store.channels.names),
        )  # fmt: skip
        fields = np.stack([store.read(time) for time in range(len(store.times))])
        for path, times in ((laid.om4, 1), (laid.in_long_chunks.om4, TIMES_A_CHUNK)):
            data = xr.Dataset(
                {name: (("time", "y", "x"), fields[:, c]) for c, name in enumerate(laid.names)},
                coords={"time": np.arange(laid.num_times), "y": store.grid.lat,
                        "x": store.grid.lon},
            )  # fmt: skip
            encoding = {
                name: {"chunks": (times, *laid.shape), "compressors": None} for name in laid.names
            }
            data.to_zarr(path, zarr_format=2, encoding=encoding, consolidated=False)
        return laid

    @property
    def prognostic(self) -> list[str]:
        return [name for name, role in self.roles.items() if role == "prognostic"]

    @property
    def forcing(self) -> list[str]:
        return [name for name, role in self.roles.items() if role == "forcing"]

    @property
    def in_long_chunks(self) -> "Laid":
        return replace(self, folder=self.folder / "long")


# Loaders by themselves


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


def _in_turn(ways: dict[str, _Way], last: int, say: Callable[[str], None], what: str) -> None:
    """All ways on the same samples; the first round, which touches new memory, does not count."""
    most = max(way.samples for way in ways.values())
    for repeat in range(REPEATS + 1):
        starts = [(17 * repeat + 29 * i) % (last + 1) for i in range(most)]
        for way in ways.values():
            way.measure(starts)
            if not repeat:
                way.rates.clear()
                way.cpu.clear()
        say(f"{what}: {repeat} of {REPEATS}")


def _row(what: str, ours: _Way, against: _Way, note: str) -> Row:
    cpu = [statistics.median(way.cpu) for way in (ours, against)]
    return Row(
        what, statistics.median(ours.rates), statistics.median(against.rates), None, "samples/s",
        f"{note}; CPU-seconds a sample {cpu[0]:.3g} and {cpu[1]:.3g}, {cpu[1] / cpu[0]:.1f}x;"
        f" medians of {REPEATS}",
    )  # fmt: skip


def _loaders(laid: Laid, config: Config, say: Callable[[str], None]) -> list[Row]:
    reads = _reader(laid)
    after = After(laid, *laid.scales, THREADS)
    ways = {
        "before": _Way(reads, SLOW_SAMPLES),
        "after": _Way(partial(_read, after), SAMPLES),
        "ours": _Way(_ours(config), SAMPLES),
    }
    _in_turn(ways, laid.num_times - STATES * (STEPS + 1), say, "loaders")
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


def _reader(laid: Laid) -> Callable[[Sequence[int]], None]:
    before = Before(laid, *laid.scales)

    def work(starts: Sequence[int]) -> None:
        import dask

        with dask.config.set(scheduler="synchronous"):
            for start in starts:
                before.sample(start, STEPS)

    return work


def _ours(config: Config) -> Callable[[Sequence[int]], None]:
    """From the store to normalised tensors, as `Objective` has it done."""
    task = Task.of(config, torch.device("cpu"))
    loader = Loader(task.source, Order(np.arange(1), None), range(0), batch=1, leads=STEPS)

    def work(starts: Sequence[int]) -> None:
        loader.order = Order(np.array(starts) + STATES - 1, seed=None)
        loader.numbers = range(len(starts))
        with closing(iter(loader)) as batches:
            for batch in batches:
                task.objective.inputs(batch.inputs)
                for _ in range(STEPS):
                    given, labels = batch.lead()
                    task.objective.forcing(given)
                    task.objective.labels(labels)

    return work


# Loaders in training


class _Windows(Dataset):
    """Samples of `before` or `after`, opened where they are read: in a worker."""

    def __init__(self, laid: Laid, way: str, starts: Sequence[int]) -> None:
        self._laid, self._way, self._starts = laid, way, starts
        self._reader: Before | After | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Sample:
        import dask

        if self._reader is None:
            dask.config.set(scheduler="synchronous")
            more = {"threads": THREADS} if self._way == "after" else {}
            kind: Any = After if self._way == "after" else Before
            self._reader = kind(self._laid, *self._laid.scales, **more)
        return self._reader.sample(self._starts[index], STEPS)


class _Prepared:
    """A batch of samples that were normalised where they were read."""

    def __init__(self, samples: list[Sample], task: Task) -> None:
        self.keys = list(range(len(samples)))
        self.init_times = ("of a worker",) * len(samples)
        self.inputs = _stacked(samples, 0, 0, len(task.source.prognostic))
        self._leads = [
            (_stacked(samples, step, 1, len(task.source.forcing)),
             _stacked(samples, step, 2, len(task.source.predicted)))
            for step in range(STEPS)
        ]  # fmt: skip

    def lead(self) -> tuple[Tensor, Tensor]:
        return self._leads.pop(0)


def _stacked(samples: list[Sample], step: int, part: int, channels: int) -> Tensor:
    """(sample, time, channel, lat, lon)"""
    return torch.stack([sample[step][part] for sample in samples]).unflatten(1, (STATES, channels))


class _Timed:
    """A batch, and the seconds for which the step waited for it and its leads."""

    def __init__(self, batches: Iterator[Any]) -> None:
        began = time.perf_counter()
        self._batch = next(batches)
        self.waited = time.perf_counter() - began
        self.keys, self.inputs = self._batch.keys, self._batch.inputs
        self.init_times = self._batch.init_times

    def lead(self) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        both = self._batch.lead()
        self.waited += time.perf_counter() - began
        return both


def _as_they_are(samples: list[Sample]) -> list[Sample]:
    return samples


def _theirs(
    laid: Laid, way: str, starts: list[int], task: Task
) -> Generator[_Prepared, None, None]:
    loader = DataLoader(
        _Windows(laid, way, starts), batch_size=BATCH, collate_fn=_as_they_are,
        num_workers=WORKERS, multiprocessing_context="spawn" if WORKERS else None,
    )  # fmt: skip
    for samples in loader:
        yield _Prepared(samples, task)


def _training(laid: Laid, config: Config, say: Callable[[str], None]) -> list[Row]:
    """The same training steps with each loader: seconds, and the share of them that waited."""
    seconds: dict[str, float] = {}
    shares: dict[str, float] = {}
    losses: dict[str, float] = {}
    draw = np.random.default_rng(0)
    starts = draw.permutation(laid.num_times - STATES * (STEPS + 1) + 1)
    starts = starts[: (TRAINING_STEPS + 1) * BATCH]
    for way in ("before", "after", "ours"):
        task = Task.of(config, torch.device("cpu"))
        objective, optimizer = task.objective, make_optimizer(task.model, config.train)
        batches: Generator[Any, None, None]
        if way == "ours":
            batches = iter(Loader(task.source, Order(starts + STATES - 1, None),
                                  range(len(starts)), batch=BATCH, leads=STEPS))  # fmt: skip
        else:
            objective = replace(objective, inputs=as_stored, forcing=as_stored, labels=as_stored)
            batches = _theirs(laid, way, starts.tolist(), task)
        took, waited = [], []
        for step in range(1, TRAINING_STEPS + 2):
            began = time.perf_counter()
            batch = _Timed(batches)
            result = training_step(
                task.model, objective, [batch], optimizer=optimizer, step=step, samples=BATCH,
                learning_rate=1e-4, clip_norm=1.0,
            )  # fmt: skip
            took.append(time.perf_counter() - began)
            waited.append(batch.waited)
        batches.close()
        seconds[way] = statistics.median(took[1:])
        shares[way], losses[way] = sum(waited[1:]) / sum(took[1:]), result.loss
        say(f"training, {way}: {seconds[way]:.3g} s a step, {shares[way]:.1%} of it waiting")
    # The same samples in the same order, or the comparison is of nothing.
    for way, loss in losses.items():
        assert abs(loss - losses["ours"]) < 1e-4 * losses["ours"], (way, losses)
    note = (
        f"{TRAINING_STEPS} steps of {BATCH} samples; {WORKERS} process(es) read for `before` and"
        " `after`, a thread for ours"
    )
    found = []
    for way, against in (("after", "before"), ("ours", "before"), ("ours", "after")):
        found.append(Row(
            f"waiting: {way} / {against}", shares[way], shares[against], None, "of a step",
            f"{PUBLISHED['wait']}; {note}",
        ))  # fmt: skip
        found.append(Row(
            f"training: {way} / {against}", 1 / seconds[way], 1 / seconds[against], None,
            "steps/s", f"published: 24x of all acts together; {note}",
        ))  # fmt: skip
    return found


# Chunks, normalisation


def _chunks(laid: Laid, say: Callable[[str], None]) -> list[Row]:
    """Random samples from files with ten times a chunk, by `after`."""
    readers = {
        name: After(of, *laid.scales, THREADS)
        for name, of in (("one", laid), ("ten", laid.in_long_chunks))
    }
    ways = {name: _Way(partial(_read, reader), SAMPLES) for name, reader in readers.items()}
    last = laid.num_times - STATES * (STEPS + 1)
    _in_turn(ways, last, say, "chunks")
    for reader in readers.values():
        reader.close()
    # Of a step's four times: each selection reads the chunks it touches once.
    touched = statistics.fmean(
        len({(start + STATES * step + i) // TIMES_A_CHUNK for i in range(2 * STATES)})
        for start in range(last + 1) for step in range(STEPS)
    ) * TIMES_A_CHUNK  # fmt: skip
    row = _row(
        f"{TIMES_A_CHUNK} times a chunk / 1", ways["ten"], ways["one"],
        f"{PUBLISHED['chunks']}; {touched:.1f} planes are read for the {2 * STATES} of a step",
    )  # fmt: skip
    return [row]


def _read(reader: After, starts: Sequence[int]) -> None:
    for start in starts:
        reader.sample(start, STEPS)


def _normalisation(laid: Laid, config: Config) -> Row:
    """A sample's fields as they were read to what the model sees: three operations of PyTorch into
    new tensors, as a worker does, and the pass that decodes, normalises and masks."""
    store = Store(config.data.store)
    source = SampleSource(store, config.data)
    sample = source.sample(STATES)
    planes = [sample.inputs(), *(sample.forcing(k + 1) for k in range(STEPS)),
              *(sample.labels(k + 1) for k in range(STEPS))]  # fmt: skip
    means = Statistics.load(store)
    roles = [source.prognostic, *[source.forcing] * STEPS, *[source.predicted] * STEPS]
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

    ways = {"ours": _Way(ours, 20 * SAMPLES), "theirs": _Way(theirs, 20 * SAMPLES)}
    _in_turn(ways, 0, lambda text: None, "normalisation")
    note = f"{PUBLISHED['normalise']}; planes of {laid.shape[0]} x {laid.shape[1]}"
    return _row("normalise: fused pass / in a worker", ways["ours"], ways["theirs"], note)


# Rollouts


def _rollouts(
    folder: Path, config: Config, found: list[Row], say: Callable[[str], None]
) -> list[Row]:
    """A year's forecast that logs every lead, every tenth, and none; and what a rollout among the
    training steps would cost those."""
    task = Task.of(config, torch.device("cpu"))
    store = task.source.store
    start = int(task.source.times("test")[STATES - 1])
    leads = min(LEADS, (len(store.times) - start - 1) // STATES)
    timings: dict[int, list[Any]] = {1: [], LOG_EVERY: [], 0: []}
    for repeat in range(REPEATS + 1):
        for every, timed in timings.items():
            timing = forecast(
                task.model, task.source, task.statistics, folder / f"{repeat}-{every}.zarr",
                starts=[start], leads=leads, attributes={}, log_every=every,
            )  # fmt: skip
            if repeat:
                timed.append(timing)
        say(f"rollouts: {repeat} of {REPEATS}")
    task.model.train()

    def rate(every: int) -> float:
        return statistics.median(timing.simulated_years_per_day for timing in timings[every])

    def row(what: str, every: int) -> Row:
        log = [statistics.median(t.parts["log"] for t in timings[e]) for e in (every, 1)]
        cpu = [statistics.median(t.cpu_seconds for t in timings[e]) for e in (every, 1)]
        whole = statistics.median(t.seconds for t in timings[1])
        return Row(
            what, rate(every), rate(1), None, "simulated years a day",
            f"{PUBLISHED['logging']}; logging takes {log[0]:.3g} and {log[1]:.3g} s of"
            f" {whole:.3g}, CPU-seconds {cpu[0]:.3g} and {cpu[1]:.3g}; {leads} leads",
        )  # fmt: skip

    step = next(row for row in found if row.what == "training: ours / after").ours
    assert step is not None
    training = TRAINING_STEPS / step
    rollout = statistics.median(timing.seconds for timing in timings[LOG_EVERY])
    apart = Row(
        "validation: apart / among the steps", training, training + rollout, None, "s",
        f"{PUBLISHED['apart']}; {TRAINING_STEPS} steps with and without one rollout of {leads}"
        " leads after them: measured parts, added",
    )  # fmt: skip
    return [
        row("log: every tenth / every lead", LOG_EVERY),
        row("log: no / every lead", 0),
        apart,
    ]
