"""Batches in an order that is a function of (seed, index), read ahead by one thread.

Sample number n of a run is position n mod N of the permutation that belongs to epoch n div N.
There is no loader state: the step count tells where a run is, so that a resumed run goes on with
the very next sample whatever had been read ahead.
"""

import queue
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache

import cftime
import numpy as np
import torch
from torch import Tensor

from graticule.data.samples import Sample, SampleSource
from graticule.keyed import keyed


@dataclass(frozen=True, eq=False)
class Order:
    """Which sample is number n of a run.

    starts: initial times. seed: of the shuffle; None keeps the order of time.
    """

    starts: np.ndarray
    seed: int | None

    def start(self, number: int) -> int:
        """Initial time (index into the store) of sample `number`, from 0 on without end."""
        epoch, position = divmod(number, len(self.starts))
        if self.seed is None:
            return int(self.starts[position])
        return int(self.starts[_permutation(self.seed, epoch, len(self.starts))[position]])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return keyed(seed, "order", epoch).permutation(size)


class Batch:
    """Samples side by side. Leads arrive one by one and are taken once each, in order.

    keys: numbers of the samples. starts, init_times: their initial times, as indices into the
    store and as dates. All tensors are stored numbers, (sample, offset, channel, lat, lon).
    """

    def __init__(
        self,
        keys: list[int],
        starts: list[int],
        init_times: list[cftime.datetime],
        stream: "_Stream",
        leads: int,
    ) -> None:
        self.keys, self.starts, self.init_times = keys, starts, init_times
        self._stream, self._leads_left = stream, leads
        (self.inputs,) = stream.take()

    def lead(self) -> tuple[Tensor, Tensor]:
        """(forcing, labels) of the next lead."""
        assert self._leads_left, f"batch {self.keys}: all of its leads are taken already"
        forcing, labels = self._stream.take()
        self._leads_left -= 1
        return forcing, labels

    def assert_taken(self) -> None:
        """The stream is in order: what this batch leaves would be taken for the next one's."""
        assert not self._leads_left, (
            f"batch {self.keys}: {self._leads_left} leads were not taken before the next batch"
        )


class Loader:
    """Iterate over batches for `numbers`, the samples' numbers in `order`.

    leads: how many each batch delivers; the caller takes them all before the next batch.
    roll_seed: turn each sample by a random number of columns, drawn by the sample's number.
    pin_memory: page-locked tensors, which a GPU copies while it computes. `waited` counts the
    seconds the caller waited. At most `ahead` reads (the inputs or one lead of one batch) lie
    ready.
    """

    def __init__(
        self,
        source: SampleSource,
        order: Order,
        numbers: range,
        *,
        batch: int,
        leads: int,
        roll_seed: int | None = None,
        ahead: int = 4,
        pin_memory: bool = False,
    ) -> None:
        self.source, self.order, self.numbers = source, order, numbers
        self.batch, self.leads, self.roll_seed, self.ahead = batch, leads, roll_seed, ahead
        self.pin_memory = pin_memory
        self.waited = 0.0

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.batch)

    def __iter__(self) -> Generator[Batch, None, None]:
        groups = [
            list(self.numbers[i : i + self.batch]) for i in range(0, len(self.numbers), self.batch)
        ]
        stream = _Stream(self, groups)
        try:
            for keys in groups:
                starts = [self.order.start(key) for key in keys]
                dates = [self.source.store.times.date(start) for start in starts]
                batch = Batch(keys, starts, dates, stream, self.leads)
                yield batch
                batch.assert_taken()
        finally:
            stream.close()

    def _read(self, samples: list[Sample], lead: int) -> list[Tensor]:
        """Stored numbers of the inputs (lead 0) or of one lead."""
        reads = ("inputs",) if lead == 0 else ("forcing", "labels")
        tensors = []
        for name in reads:
            planes = []
            for sample in samples:
                block = sample.inputs() if lead == 0 else getattr(sample, name)(lead)
                if self.roll_seed is not None:
                    columns = self.source.store.grid.shape[1]
                    turn = int(keyed(self.roll_seed, "roll", sample.key).integers(columns))
                    block = np.roll(block, turn, axis=-1)
                planes.append(block)
            tensor = torch.from_numpy(np.stack(planes))
            tensors.append(tensor.pin_memory() if self.pin_memory else tensor)
        return tensors


class _Stream:
    """The reading thread and its bounded queue; an error there is raised where data is taken."""

    def __init__(self, loader: Loader, groups: list[list[int]]) -> None:
        self._loader = loader
        self._queue: queue.Queue[list[Tensor] | BaseException] = queue.Queue(loader.ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(groups,), daemon=True)
        self._thread.start()

    def _run(self, groups: list[list[int]]) -> None:
        try:
            for keys in groups:
                samples = [
                    self._loader.source.sample(self._loader.order.start(key), key) for key in keys
                ]
                for lead in range(self._loader.leads + 1):
                    if not self._put(self._loader._read(samples, lead)):
                        return
        except BaseException as error:
            self._put(error)

    def _put(self, item: list[Tensor] | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def take(self) -> list[Tensor]:
        began = time.perf_counter()
        item = self._queue.get()
        self._loader.waited += time.perf_counter() - began
        if isinstance(item, BaseException):
            # The thread has ended: whoever asks again hears the same and does not wait for ever.
            self._queue.put(item)
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
