"""How bytes get from a device to the host and back: a GPU's streams, and a thread for a disk."""

import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, cuda

from graticule.data.processes import result_of


class _Sized(Protocol):
    size: int


S = TypeVar("S", bound=_Sized)


@dataclass(eq=False)
class Buffer:
    """Host memory, uint8. busy: the last copy to or from it that was issued, maybe not over."""

    size: int
    memory: Tensor
    busy: cuda.Event | None = None


@dataclass(eq=False)
class Slot:
    """A stretch of the file."""

    size: int
    offset: int


@dataclass(eq=False)
class Sent:
    """Bytes on the host, or on their way there. left: when a GPU has sent them.

    In a buffer, or in a slot once they are `written`. Of fake tensors on a disk: in neither.
    """

    size: int
    device: torch.device
    buffer: Buffer | None = None
    slot: Slot | None = None
    written: Future | None = None
    left: cuda.Event | None = None


class Carrier:
    """Takes bytes from `device` to host memory or to a folder, and back.

    Memory of a GPU is asked for and let go in the order of the computing stream (the current one
    where `send`, `fetch` and `Fetch.arrive` are called), which waits for copies as the host need
    not. On a CPU copies to memory are done at once. fake: no streams, files, threads or contents.
    """

    def __init__(self, device: torch.device, folder: Path | None, *, fake: bool) -> None:
        self.buffers: list[Tensor] = []
        self.waited_seconds = 0.0
        self._folder, self._pinned = folder, device.type == "cuda" and not fake
        self._place = torch.device("meta" if device.type == "meta" else "cpu")
        self._free: Free[Buffer] = Free()
        self.disk = _Disk(folder) if folder and not fake else None
        self.lanes = _Lanes(device) if self._pinned else None

    def send(self, source: Tensor) -> Sent:
        """Begin to send uint8 bytes. On a GPU they must stay as they are until `left`."""
        sent = Sent(source.numel(), source.device)
        slot = self.disk.take(sent.size) if self.disk else None
        try:
            buffer = self._buffer(sent.size)
        except ValueError:
            sent.slot = slot
            self.release(sent)
            raise
        if self.lanes:
            sent.left = self.lanes.send(source, buffer)
        else:
            buffer.memory[: sent.size].copy_(source)
        if self._folder is None:
            sent.buffer = buffer
        elif slot is None:
            self._free.give(buffer)
        else:
            sent.slot = slot
            sent.written = self._disk.submit(self._write, slot, buffer, sent.size)
        return sent

    def let_go(self, sent: Sent) -> None:
        """What was sent is let go: the computing stream waits until it is out."""
        if self.lanes and sent.left is not None and not sent.left.query():
            self.lanes.wait(sent.left)

    def fetch(self, sent: Sent) -> "Fetch":
        """Begin to bring bytes back, into new memory of the device that they came from."""
        memory = torch.empty(sent.size, dtype=torch.uint8, device=sent.device)
        fetch = Fetch(memory, self)
        free = self.lanes.mark() if self.lanes else None
        if sent.slot is not None:
            buffer = self._buffer(sent.size) if self.lanes else None
            fetch.reading = self._disk.submit(self._read, sent, memory, buffer, free)
        elif sent.buffer is not None and self.lanes:
            fetch.came = self.lanes.fetch(sent.buffer, memory, free)
        elif sent.buffer is not None:
            memory.copy_(sent.buffer.memory[: sent.size])
        return fetch

    def release(self, sent: Sent) -> None:
        """Nobody needs these bytes any more."""
        if sent.buffer is not None:
            self._free.give(sent.buffer)
        if sent.slot is not None:
            self._disk.free.give(sent.slot)

    def wait_for(self, future: Future) -> Any:
        began = time.perf_counter()
        try:
            return result_of(future)
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        if self.disk:
            self.disk.close()
        if self.lanes:
            self.lanes.synchronize()
        self._free, self.buffers = Free(), []

    @property
    def _disk(self) -> "_Disk":
        assert self.disk is not None
        return self.disk

    def _buffer(self, size: int) -> Buffer:
        buffer = self._free.take(size)
        if buffer is None:
            try:
                memory = torch.empty(
                    size, dtype=torch.uint8, device=self._place, pin_memory=self._pinned
                )
            except RuntimeError as error:
                held = sum(memory.nbytes for memory in self.buffers)
                raise ValueError(
                    f"host memory has no {size:,} bytes for a boundary beside {held:,} bytes of"
                    f" others ({error}); let fewer boundaries leave the device, or send them to a"
                    " folder on a local disk"
                ) from error
            self.buffers.append(memory)
            buffer = Buffer(size, memory)
        return buffer

    # In the disk's thread.

    def _write(self, slot: Slot, buffer: Buffer, size: int) -> None:
        try:
            if buffer.busy is not None:
                buffer.busy.synchronize()
            self._disk.write(slot, buffer.memory[:size])
        finally:
            self._free.give(buffer)

    def _read(
        self, sent: Sent, memory: Tensor, buffer: Buffer | None, free: cuda.Event | None
    ) -> cuda.Event | None:
        assert sent.slot is not None
        assert sent.written is not None
        try:
            sent.written.result()  # over by now, one after the other; if it failed, this fails
            if buffer is None:
                self._disk.read(sent.slot, memory)
                return None
            assert self.lanes is not None
            if buffer.busy is not None:
                buffer.busy.synchronize()
            self._disk.read(sent.slot, buffer.memory[: sent.size])
            return self.lanes.fetch(buffer, memory, free)
        finally:
            if buffer is not None:
                self._free.give(buffer)


@dataclass(eq=False)
class Fetch:
    """Bytes on their way to the device's `memory`."""

    memory: Tensor
    carrier: Carrier
    came: cuda.Event | None = None
    reading: Future | None = None
    arrived: bool = False

    def arrive(self) -> Tensor:
        """The memory, for what is given to the computing stream from here on.

        ValueError where the bytes could not be written or read.
        """
        if not self.arrived:
            came = self.came if self.reading is None else self.carrier.wait_for(self.reading)
            if self.carrier.lanes and came is not None:
                self.carrier.lanes.wait(came)
            self.arrived = True
        return self.memory

    def settled(self) -> bool:
        """Whether the memory can be let go: nothing fills it behind the computing stream's back."""
        if self.arrived:
            return True
        came = self.came
        if self.reading is not None:
            if not self.reading.done():
                return False
            came = None if self.reading.exception() else self.reading.result()
        return came is None or came.query()


class Free(Generic[S]):
    """What can be used again. `give` from any thread, `take` from one at a time."""

    def __init__(self) -> None:
        self._back: deque[S] = deque()
        self._items: list[S] = []

    def give(self, item: S) -> None:
        self._back.append(item)

    def take(self, size: int) -> S | None:
        """The smallest that fits, none that is more than twice as large: the same in each step."""
        while self._back:
            self._items.append(self._back.popleft())
        fitting = [item for item in self._items if size <= item.size <= 2 * size]
        best = min(fitting, key=lambda item: item.size, default=None)
        if best is not None:
            self._items.remove(best)
        return best


class _Lanes:
    """A stream out and a stream back, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = cuda.Stream(device), cuda.Stream(device)
        self._waits: deque[tuple[cuda.Event, cuda.Event]] = deque()
        self._waited_ms = 0.0

    def mark(self) -> cuda.Event:
        """After all that was given to the computing stream so far."""
        return cuda.current_stream(self._device).record_event()

    def send(self, source: Tensor, buffer: Buffer) -> cuda.Event:
        """Copy out, after what computes `source` and after the buffer's last copy."""
        self._out.wait_event(self.mark())
        if buffer.busy is not None:
            self._out.wait_event(buffer.busy)
        with cuda.stream(self._out):
            buffer.memory[: source.numel()].copy_(source, non_blocking=True)
            buffer.busy = self._out.record_event()
        return buffer.busy

    def fetch(self, buffer: Buffer, memory: Tensor, free: cuda.Event | None) -> cuda.Event:
        """Copy back, after `free` (what used the memory before) and the buffer's last copy."""
        assert free is not None
        self._back.wait_event(free)
        if buffer.busy is not None:
            self._back.wait_event(buffer.busy)
        with cuda.stream(self._back):
            memory.copy_(buffer.memory[: memory.numel()], non_blocking=True)
            buffer.busy = self._back.record_event()
        return buffer.busy

    def wait(self, event: cuda.Event) -> None:
        """Have the computing stream wait; the host goes on."""
        computes = cuda.current_stream(self._device)
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record(computes)
        computes.wait_event(event)
        end.record(computes)
        self._waits.append((begin, end))
        self.waited_seconds()

    def waited_seconds(self, *, to_the_end: bool = False) -> float:
        """How long the computing stream waited, as far as that is over (or `to_the_end`)."""
        while self._waits and (to_the_end or self._waits[0][1].query()):
            begin, end = self._waits.popleft()
            end.synchronize()
            self._waited_ms += begin.elapsed_time(end)
        return self._waited_ms / 1000

    def synchronize(self) -> None:
        self._out.synchronize()
        self._back.synchronize()


class _Disk:
    """Slots of one file without a name, and one thread that writes and reads them in order.

    In order: a read comes after the write it needs, and a slot that is free again is written after
    whatever was still to be done with it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.size = folder, 0
        self.free: Free[Slot] = Free()
        try:
            # The system keeps the bytes until the last descriptor is closed, or the process ended.
            with tempfile.TemporaryFile(dir=folder) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise ValueError(
                f"no boundary can be written to the folder {folder}: {error}; name one on a local"
                " disk that exists and may be written to, or keep boundaries in host memory"
            ) from error
        self._close = weakref.finalize(self, os.close, self._file)
        self._thread = ThreadPoolExecutor(1, "boundaries")

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        return self._thread.submit(work, *arguments)

    def take(self, size: int) -> Slot:
        slot = self.free.take(size)
        if slot is None:
            slot = Slot(size, self.size)
            try:
                # Now, in the step's own thread, and before anything is lost.
                os.posix_fallocate(self._file, slot.offset, size)
            except OSError as error:
                raise self._full(size, error) from error
            self.size += size
        return slot

    def write(self, slot: Slot, memory: Tensor) -> None:
        """uint8 bytes on the CPU."""
        left, offset = memoryview(memory.numpy().data), slot.offset
        try:
            while left:
                written = os.pwrite(self._file, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            raise self._full(memory.numel(), error) from error

    def read(self, slot: Slot, memory: Tensor) -> None:
        left, offset = memoryview(memory.numpy().data), slot.offset
        try:
            while left:
                read = os.preadv(self._file, [left], offset)
                if read == 0:
                    raise OSError(f"the file ends at byte {offset:,}")
                left, offset = left[read:], offset + read
        except OSError as error:
            raise ValueError(
                f"{memory.numel():,} bytes of a boundary do not come back from the folder"
                f" {self.folder}: {error}. This step is lost; go on from the last checkpoint with"
                " a folder on another disk, or with boundaries in host memory"
            ) from error

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._close()

    def _full(self, size: int, error: OSError) -> ValueError:
        return ValueError(
            f"{size:,} bytes of a boundary do not fit into the folder {self.folder} beside"
            f" {self.size:,} bytes of others: {error}. Free space there, name a folder on a larger"
            " disk, or let fewer boundaries leave the device"
        )
