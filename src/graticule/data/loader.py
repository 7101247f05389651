"""Batches in an order that is a function of (seed, index), read ahead by one thread.

Sample number n of a run is position n mod N of the permutation that belongs to epoch n div N.
There is no loader state: the step count tells where a run is, so that a resumed run goes on with
the very next sample whatever had been read ahead.

With several ranks the batches are those of one process: rank r of n takes samples r, r + n, ...
of each. What a batch delivers comes lead by lead, and every inner chunk of the store is read once
for two deliveries that follow one another: the labels of a lead are where the forcing of the next
one lies, and samples side by side may share times. Memory does not depend on the number of leads.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache

import cftime
import numpy as np
import torch
from torch import Tensor

from graticule.data.buffers import Pool
from graticule.data.samples import SampleSource
from graticule.data.shards import Job, Target
from graticule.data.turns import Turns
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
    store and as dates. All tensors are stored numbers, (sample, offset, channel, lat, lon), on
    the loader's device; whoever holds one owns its memory, which the loader uses again after.
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

    batch: samples of all ranks together. leads: how many each batch delivers, or a function that
    says it by the number of the batch's first sample; the caller takes them all before the next
    batch, and no more are read. roll_seed: turn each sample by a random number of columns,
    drawn by the sample's number. rank, ranks: this process takes its share of each batch, which
    may be empty at the end of `numbers` only. device: where tensors arrive. Ranks that share a
    sample have the same `rank` here, and a source of their own part of the grid.

    At most `ahead` deliveries (the inputs or one lead of one batch) lie ready, one more is being
    read and the next one may be begun; with the two that a training step holds, that is all the
    memory. threads: how many read and decompress. waves: in how many turns the ranks read, see
    `turns`; reader: this process among all that read, where several share a sample; none: rank.
    `waited` counts the seconds the caller waited.
    """

    def __init__(
        self,
        source: SampleSource,
        order: Order,
        numbers: range,
        *,
        batch: int,
        leads: int | Callable[[int], int],
        roll_seed: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        ahead: int = 2,
        threads: int = 1,
        waves: int = 1,
        reader: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch < ranks:
            raise ValueError(
                f"a batch of {batch} samples leaves {ranks - batch} of {ranks} ranks without any;"
                f" set train.batch to {ranks} or more"
            )
        if roll_seed is not None and len(source.columns) != source.store.grid.shape[1]:
            raise ValueError(
                f"samples cannot be turned in longitude where columns {source.columns.start} to"
                f" {source.columns.stop} of {source.store.grid.shape[1]} are read; set"
                " train.roll_longitude=false, or mesh.stripe_dim=lat"
            )
        self.source, self.order, self.numbers = source, order, numbers
        self.batch, self.roll_seed, self.ahead = batch, roll_seed, ahead
        self.leads = leads
        self.rank, self.ranks, self.threads = rank, ranks, threads
        self.wave = (rank if reader is None else reader) % waves
        self.device = torch.device(device)
        self.pool = Pool(pin_memory=self.device.type == "cuda")
        self.waited = 0.0

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.batch)

    @cached_property
    def block_bytes(self) -> int:
        """Memory of one delivery: inputs and leads use the same blocks."""
        samples = -(-self.batch // self.ranks)
        planes = [
            sum(
                len(offsets) * len(channels)
                for offsets, channels in _Delivery(self, (), lead).parts
            )
            for lead in (0, 1)
        ]
        cells = self.source.shape[0] * self.source.shape[1]
        return samples * max(planes) * cells * self.source.store.packing.dtype.itemsize

    def _groups(self) -> Iterator[tuple[list[int], int]]:
        """This rank's samples of each batch, and the leads it has."""
        for first in range(0, len(self.numbers), self.batch):
            numbers = self.numbers[first : first + self.batch]
            leads = self.leads if isinstance(self.leads, int) else self.leads(numbers[0])
            yield list(numbers[self.rank :: self.ranks]), leads

    def __iter__(self) -> Generator[Batch, None, None]:
        stream = _Stream(self)
        try:
            for keys, leads in self._groups():
                starts = [self.order.start(key) for key in keys]
                dates = [self.source.store.times.date(start) for start in starts]
                batch = Batch(keys, starts, dates, stream, leads)
                yield batch
                batch.assert_taken()
        finally:
            stream.close()


@dataclass(frozen=True)
class _Delivery:
    """The inputs (lead 0) or one lead of a batch: what belongs in it, and its memory once there.

    parts: (offsets from the initial time, channels) of each of its tensors.
    """

    loader: Loader
    keys: tuple[int, ...]
    lead: int

    @property
    def parts(self) -> list[tuple[tuple[int, ...], list[int]]]:
        source, lead = self.loader.source, self.lead
        if lead == 0:
            return [(source.spec.inputs, source.prognostic)]
        return [
            (source.spec.given_offsets(lead), source.forcing),
            (source.spec.label_offsets(lead), source.predicted),
        ]

    @property
    def times(self) -> set[int]:
        """Of the store, that anything is read of."""
        return {
            self.loader.order.start(key) + offset
            for key in self.keys
            for offsets, channels in self.parts
            for offset in offsets
            if channels
        }

    def open(self) -> "_Open":
        """Memory for it, and what goes there by time."""
        loader, source = self.loader, self.loader.source
        shapes = [
            (len(self.keys), len(offsets), len(channels), *source.shape)
            for offsets, channels in self.parts
        ]
        dtype = torch.float32 if source.store.packing.scale is None else torch.int16
        tensors = loader.pool.take(shapes, dtype, at_least=loader.block_bytes)
        wanted: dict[int, list[Target]] = {}
        for (offsets, channels), tensor in zip(self.parts, tensors, strict=True):
            picked = tuple(channels)
            for key, planes in zip(self.keys, tensor.numpy(), strict=True):
                start, turn = loader.order.start(key), self._turn(key)
                for offset, out in zip(offsets, planes, strict=True):
                    if picked:
                        wanted.setdefault(start + offset, []).append(Target(picked, out, turn))
        return _Open(tensors, wanted)

    def _turn(self, key: int) -> int:
        if self.loader.roll_seed is None:
            return 0
        columns = self.loader.source.store.grid.shape[1]
        return int(keyed(self.loader.roll_seed, "roll", key).integers(columns))


@dataclass
class _Open:
    """A delivery being filled. wanted: what is still missing, by time."""

    tensors: list[Tensor]
    wanted: dict[int, list[Target]]


class _Stopped(Exception):
    """The caller wants no more."""


class _Stream:
    """The reading thread and its bounded queue; an error there is raised where data is taken."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._process = loader, os.getpid()
        self._queue: queue.Queue[_Ready | BaseException] = queue.Queue(loader.ahead)
        self._stop = threading.Event()
        self._taken_any = False
        self._turns = Turns(loader.wave, loader.block_bytes)
        self._helpers = (
            ThreadPoolExecutor(loader.threads, "graticule-read") if loader.threads > 1 else None
        )
        self._copies = _Copies(loader.device) if loader.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="graticule-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(_Stopped):
            try:
                begun: _Open | None = None
                self._turns.begin()
                for now, following in _pairs(self._deliveries()):
                    tensors, begun = self._filled(begun or now.open(), following)
                    item = self._copies.start(tensors) if self._copies else _Ready(tensors)
                    waited = self._put(item)
                    del tensors, item  # the caller's from here on
                    if waited:
                        self._turns.begin()
            except _Stopped:
                raise
            except BaseException as error:
                self._put(error)

    def _filled(
        self, current: "_Open", following: "_Delivery | None"
    ) -> tuple[list[Tensor], "_Open | None"]:
        """Read what is missing, and what the next delivery wants of the same times."""
        begun = None
        if following is not None and not current.wanted.keys().isdisjoint(following.times):
            begun = following.open()
        wanted = [
            (at, targets + (begun.wanted.pop(at, []) if begun else []))
            for at, targets in current.wanted.items()
        ]
        source = self._loader.source
        source.store.read_into(wanted, source.rows, source.columns, self._run_jobs)
        return current.tensors, begun

    def _deliveries(self) -> Iterator[_Delivery]:
        for keys, leads in self._loader._groups():
            for lead in range(leads + 1):
                yield _Delivery(self._loader, tuple(keys), lead)

    def _run_jobs(self, jobs: Sequence[Job]) -> None:
        def one(job: Job) -> None:
            if self._stop.is_set():
                raise _Stopped
            job()

        # Of several errors that of the first job, however the threads ran.
        for _ in (self._helpers.map if self._helpers else map)(one, jobs):
            pass

    def _put(self, item: "_Ready | BaseException") -> bool:
        """Whether there was no room at first."""
        full = self._queue.full()
        if full:
            self._turns.end()
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return full
        raise _Stopped

    def take(self) -> list[Tensor]:
        if not self._is_here():
            raise ValueError(
                f"process {os.getpid()} was forked from process {self._process}, which reads these"
                " batches; iterate over the loader anew in the new process"
            )
        began = time.perf_counter()
        if self._taken_any and self._queue.empty():
            self._turns.ended.set()
        item = self._queue.get()
        self._taken_any = True
        self._loader.waited += time.perf_counter() - began
        if isinstance(item, BaseException):
            # The thread has ended: whoever asks again hears the same and does not wait for ever.
            self._queue.put(item)
            raise item
        return item.received()

    def close(self) -> None:
        """Ends the threads: at once but for the inner chunk that each is reading."""
        if not self._is_here():
            return
        self._stop.set()
        self._turns.ended.set()
        self._thread.join()
        if self._helpers:
            self._helpers.shutdown()

    def _is_here(self) -> bool:
        """Whether the reading thread is in this process: it is not in a forked child, where
        whatever locks it held at that moment stay held."""
        return os.getpid() == self._process


@dataclass(frozen=True)
class _Ready:
    """Tensors to be taken. copied: of a copy to a GPU that may still be under way."""

    tensors: list[Tensor]
    copied: "torch.cuda.Event | None" = None

    def received(self) -> list[Tensor]:
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.tensors[0].device)
            stream.wait_event(self.copied)
            for tensor in self.tensors:
                tensor.record_stream(stream)
        return self.tensors


class _Copies:
    """Copies to a GPU beside what it computes, from pinned memory held until they are done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._under_way: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def start(self, tensors: list[Tensor]) -> _Ready:
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        with torch.cuda.stream(self._stream):
            there = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            done = torch.cuda.Event()
            done.record(self._stream)
        self._under_way.append((done, tensors))
        return _Ready(there, done)


def _pairs(deliveries: Iterator[_Delivery]) -> Iterator[tuple[_Delivery, _Delivery | None]]:
    """Each with the one after it."""
    now = next(deliveries, None)
    while now is not None:
        following = next(deliveries, None)
        yield now, following
        now = following
