"""Processes forked after, and while, their parent reads: they read the right numbers, and at once.

A forked child has its parent's memory and one thread: locks that other threads held stay held in
it, and whoever waits for those threads waits for ever. Children here are killed after `PATIENCE`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from children import in_a_child
from graticule.config import DataConfig
from graticule.data import buffers, shards
from graticule.data.loader import Loader, Order
from graticule.data.samples import SampleSource
from graticule.data.store import Store
from graticule.parallel.local import LocalRanks
from small_store import field, small_grid, write_store

PATIENCE = 20
"""Seconds; a child here needs a tenth of one."""
DAYS = 24


def fields_of(day: int) -> np.ndarray:
    """(channel, lat, lon) that the store was written from, without reading it."""
    return np.stack([field(c, day, small_grid()) for c in range(3)]).astype(np.float32)


class Reader:
    """A store in all the ways of reading it."""

    def __init__(self, path: Path) -> None:
        self.store = Store(path)
        source = SampleSource(self.store, DataConfig())
        self.loader = Loader(source, Order(np.arange(DAYS - 1), None), range(DAYS - 1), batch=1,
                             leads=1, threads=3)  # fmt: skip
        self.array: Any = zarr.open_group(str(path), mode="r")["fields"]

    def assert_right(self, day: int) -> None:
        """Through the store, the loader and Zarr."""
        np.testing.assert_array_equal(self.store.read_stored(day), fields_of(day))
        np.testing.assert_array_equal(np.asarray(self.array[day]), fields_of(day))
        self.loader.numbers = range(day, day + 1)
        (batch,) = self.batches()
        np.testing.assert_array_equal(batch[0][0, 0], fields_of(day)[:2])
        np.testing.assert_array_equal(batch[1][0, 0], fields_of(day)[2:])
        np.testing.assert_array_equal(batch[2][0, 0], fields_of(day + 1)[:2])

    def batches(self) -> Iterator[list[np.ndarray]]:
        with closing(iter(self.loader)) as batches:
            for batch in batches:
                yield [part.numpy() for part in (batch.inputs, *batch.lead())]

    def assert_small_arrays_right(self) -> None:
        """Those that nobody has read yet: Zarr reads them, with threads of its own."""
        assert {"wet", "missing"}.isdisjoint(vars(self.store))
        assert self.store.wet_part([1], slice(2, 5)).all()
        assert self.store.wet.all()
        assert not self.store.missing.any()
        np.testing.assert_array_equal(
            self.store.read_statics(["depth"])[0], field(7, 0, small_grid()).astype(np.float32)
        )


READERS: list[Reader] = []
"""What ranks find in the memory that they have from their parent."""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """It has read one time in every way, in this process."""
    write_store(tmp_path / "store", static=("depth",))
    reader = Reader(tmp_path / "store")
    reader.assert_right(3)
    READERS.append(reader)
    yield reader
    READERS.remove(reader)


def forked(work: Callable[[], None]) -> None:
    def impatient() -> None:
        signal.alarm(PATIENCE)
        work()

    assert in_a_child(impatient) == 0


def read_on_a_rank() -> int:
    (reader,) = READERS
    reader.assert_small_arrays_right()
    for day in (3, 4, 19):
        reader.assert_right(day)
    anew = Reader(reader.store.path)
    anew.assert_small_arrays_right()
    anew.assert_right(7)
    return os.getpid()


def test_ranks_forked_after_reading_read_other_chunks_and_the_parent_goes_on(
    reader: Reader,
) -> None:
    with LocalRanks(3, timeout_seconds=PATIENCE) as ranks:
        processes = ranks.run(read_on_a_rank)
        assert len({*processes, os.getpid()}) == 4
        reader.assert_right(11)
        assert ranks.run(os.getpid) == processes, "none was lost"
    reader.assert_small_arrays_right()


def test_a_child_forked_after_reading_reads_other_chunks(reader: Reader) -> None:
    def child() -> None:
        reader.assert_small_arrays_right()
        reader.assert_right(12)
        # And a child of the child.
        forked(lambda: reader.assert_right(13))

    forked(child)
    reader.assert_right(14)


def test_children_forked_while_threads_read_read_the_right_numbers_and_so_does_the_parent(
    reader: Reader,
) -> None:
    reader.loader.numbers = range(8)

    def child() -> None:
        day = reader.store.read_stored(5)
        np.testing.assert_array_equal(day, fields_of(5))
        reader.assert_right(6)

    for day, parts in enumerate(reader.batches()):
        # The reading threads are at work on what comes next.
        forked(child)
        np.testing.assert_array_equal(parts[0][0, 0], fields_of(day)[:2])
        np.testing.assert_array_equal(parts[2][0, 0], fields_of(day + 1)[:2])


@pytest.mark.parametrize("module", [shards, buffers])
def test_a_child_does_not_inherit_a_lock_that_a_reading_thread_holds(
    module: Any, reader: Reader
) -> None:
    held = threading.Event()

    def hold() -> None:
        with module._lock:
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    forked(lambda: reader.assert_right(8))
    thread.join()
    reader.assert_right(9)


def test_a_child_cannot_wait_for_batches_that_its_parent_reads(reader: Reader) -> None:
    reader.loader.numbers = range(4)
    batches = iter(reader.loader)
    first = next(batches)

    def child() -> None:
        with pytest.raises(ValueError, match=rf"forked from process {os.getppid()}, which reads"):
            first.lead()
        batches.close()  # nor for the end of threads that it does not have
        reader.assert_right(10)

    forked(child)
    forcing, _ = first.lead()
    np.testing.assert_array_equal(forcing[0, 0], fields_of(0)[2:])
    batches.close()
