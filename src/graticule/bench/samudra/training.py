"""The act on waiting: the same training steps, fed by each loader."""

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from graticule.bench.om4 import STATES, After, Before, Sample
from graticule.bench.rows import Row
from graticule.bench.samudra.laid import Laid
from graticule.bench.samudra.size import PUBLISHED, Size
from graticule.config import Config
from graticule.data.loader import Loader, Order
from graticule.train.objective import as_stored
from graticule.train.optimizer import make_optimizer
from graticule.train.step import training_step
from graticule.train.task import Task


class _Windows(Dataset):
    """Samples of `before` or `after`, opened where they are read: in a worker."""

    def __init__(self, laid: Laid, way: str, starts: Sequence[int], size: Size) -> None:
        self._laid, self._way, self._starts, self._size = laid, way, starts, size
        self._reader: Before | After | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Sample:
        import dask

        if self._reader is None:
            dask.config.set(scheduler="synchronous")
            more = {"threads": self._size.threads} if self._way == "after" else {}
            kind: Any = After if self._way == "after" else Before
            self._reader = kind(self._laid, *self._laid.scales, **more)
        return self._reader.sample(self._starts[index], self._size.steps)


class _Prepared:
    """A batch of samples that were normalised where they were read."""

    def __init__(self, samples: list[Sample], task: Task) -> None:
        self.keys = list(range(len(samples)))
        self.init_times = ("of a worker",) * len(samples)
        self.inputs = _stacked(samples, 0, 0, len(task.source.prognostic))
        self._leads = [
            (_stacked(samples, step, 1, len(task.source.forcing)),
             _stacked(samples, step, 2, len(task.source.predicted)))
            for step in range(len(samples[0]))
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
    laid: Laid, way: str, starts: list[int], task: Task, size: Size
) -> Generator[_Prepared, None, None]:
    loader = DataLoader(
        _Windows(laid, way, starts, size), batch_size=size.batch, collate_fn=_as_they_are,
        num_workers=size.workers, multiprocessing_context="spawn" if size.workers else None,
    )  # fmt: skip
    for samples in loader:
        yield _Prepared(samples, task)


def training_rows(laid: Laid, config: Config, size: Size, say: Callable[[str], None]) -> list[Row]:
    """The same training steps with each loader: seconds, and the share of them that waited."""
    seconds: dict[str, float] = {}
    shares: dict[str, float] = {}
    losses: dict[str, float] = {}
    draw = np.random.default_rng(0)
    starts = draw.permutation(laid.num_times - STATES * (size.steps + 1) + 1)
    starts = starts[: (size.training_steps + 1) * size.batch]
    for way in ("before", "after", "ours"):
        task = Task.of(config, torch.device("cpu"))
        objective, optimizer = task.objective, make_optimizer(task.model, config.train)
        batches: Generator[Any, None, None]
        if way == "ours":
            order = Order(starts + STATES - 1, None)
            batches = iter(
                Loader(task.source, order, range(len(starts)), batch=size.batch, leads=size.steps)
            )
        else:
            objective = replace(objective, inputs=as_stored, forcing=as_stored, labels=as_stored)
            batches = _theirs(laid, way, starts.tolist(), task, size)
        took, waited = [], []
        for step in range(1, size.training_steps + 2):
            began = time.perf_counter()
            batch = _Timed(batches)
            result = training_step(
                task.model, objective, [batch], optimizer=optimizer, step=step, samples=size.batch,
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
        f"{size.training_steps} steps of {size.batch} samples; {size.workers} process(es) read for"
        " `before` and `after`, a thread for ours"
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
