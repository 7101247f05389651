"""Checkpoint boundaries that leave the device between the forward and the backward pass.

A unit that is recomputed keeps what enters it, its boundary. In a long rollout the boundaries of
all leads wait together, each for its turn in the backward pass: they can wait in host memory or
on a local disk (TERRA, section VI.C). What comes back has the bits, strides and alignment of what
was sent: kernels choose by them in which order they add, so gradients are bitwise the same.

On a GPU copies run beside the computation. A tensor that was sent is let go when its copy is done,
or, of more than `buffers` boundaries on their way, once the computing stream has to wait for it;
one boundary is fetched ahead of its use. On a CPU, and with fake tensors, tensors are held and let
go at the same points, so that a trace shows a GPU's levels: the highest, where no copy is early.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graticule.memory.boundaries import Boundary, Copy, Leaving, Part, Share, bytes_of
from graticule.memory.carrier import Carrier, Fetch

_ALIGNMENT = 64
"""Bytes to which a copy keeps a tensor's alignment: no vector of a CPU or GPU is longer."""

BUFFERS = 2
"""Boundaries that may be on their way out at one time."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What a `Host` did since it was made.

    num_packed, num_unpacked: tensors. Those that share bytes are sent once.
    in_vain_bytes: brought back while the original was on the device all along, because someone
        else referred to it: sending these freed nothing.
    peak_bytes: most bytes of boundaries that were away at one time, in memory or on disk.
    num_buffers, buffer_bytes: host memory asked for, kept and used again. disk_bytes: of the file.
    waited_seconds: that the computing stream (on a GPU) and the step's own thread (for the disk)
        stood still for copies.
    """

    num_packed: int = 0
    num_unpacked: int = 0
    sent_bytes: int = 0
    back_bytes: int = 0
    in_vain_bytes: int = 0
    peak_bytes: int = 0
    num_buffers: int = 0
    buffer_bytes: int = 0
    disk_bytes: int = 0
    waited_seconds: float = 0.0


class Host:
    """Where boundaries lie meanwhile. One per run and process; use it in a `with` block.

    device: of the boundaries. For `cuda` host memory is pinned.
    folder: on a local disk, for boundaries that host memory has no room for; one thread writes and
        reads. They lie there in one file without a name, so that nothing stays behind however the
        process ends, and `ls` shows nothing meanwhile. None: host memory.
    buffers: boundaries that may be on their way out at one time, their memory still held. The next
        one needed is fetched while the one before it is recomputed. 0: every copy is waited for
        and none is fetched ahead.
    """

    def __init__(
        self, device: torch.device | str, *, folder: Path | None = None, buffers: int = BUFFERS
    ) -> None:
        if buffers < 0:
            raise ValueError(f"buffers={buffers} must be at least 0 (0: wait for every copy)")
        self.device, self.folder, self.buffers = torch.device(device), folder, buffers
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._fake = mode is not None or self.device.type == "meta"
        self._carrier = Carrier(self.device, folder, fake=self._fake)
        self._open, self._counts, self._bytes = True, HostReport(), 0
        self._lock = threading.Lock()
        self._away: dict[int, Boundary] = {}
        self._copies: dict[int, list[Copy]] = {}
        self._num_boundaries = self._num_parts = 0
        self._leaving: deque[Leaving] = deque()
        self._writing: deque[tuple[int, Future]] = deque()
        self._ahead: Boundary | None = None
        self._strays: list[Fetch] = []
        # Of parts that nobody refers to any more. These go in any thread, also where the garbage is
        # collected in the middle of a method of this class: so they are noted without the lock.
        self._gone: deque[Share] = deque()

    @contextmanager
    def boundary(self, *inputs: Tensor, lead: int = 0) -> Iterator[None]:
        """Have what checkpointing keeps of `inputs` wait on the host. Around
        `checkpoint(unit, *inputs, use_reentrant=False)`.

        Whatever else is saved in this block stays where it is: parameters, masks, random state.
        lead: boundaries of one lead are fetched ahead of their use, last one first.
        ValueError for inputs that lie elsewhere or are no plain tensors.
        """
        for tensor in inputs:
            if not _is_plain(tensor):
                raise ValueError(
                    f"a boundary of type {type(tensor).__name__} ({tensor.layout}) cannot leave the"
                    " device; give the unit plain dense tensors (`to_local()` of a DTensor), or"
                    " recompute it without offloading"
                )
            if tensor.device.type != self.device.type:
                raise ValueError(
                    f"a boundary of shape {tuple(tensor.shape)} is on {tensor.device}, this Host is"
                    f" for {self.device}; move it there, or make the Host for its device"
                )
        # Numbers and no tensors: the graph keeps the hooks. `inputs` lives as long as this block.
        keys = {tensor.untyped_storage()._cdata for tensor in inputs}
        boundary = Boundary(lead)

        def pack(tensor: Tensor) -> Any:
            tensor = tensor.detach()
            if not _is_plain(tensor) or tensor.numel() == 0:
                return tensor
            if tensor.untyped_storage()._cdata not in keys:
                return tensor
            return self._pack(tensor.resolve_conj().resolve_neg(), boundary)

        with saved_tensors_hooks(pack, self._unpack):
            yield

    def prefetch(self, lead: int = 0) -> None:
        """Begin to bring back the lead's boundary that is needed first in its backward pass.

        The others come by themselves; this is for the first, while the loss or units that keep
        their tensors are differentiated.
        """
        with self._held():
            self._fetch_ahead(lead, self._num_boundaries)

    def flush(self) -> None:
        """Let go of everything on its way out, and wait until it is on the disk.

        After a lead whose last units do not offload: what was sent last would be held until the
        next boundary is sent or fetched. ValueError where a write failed.
        """
        with self._held():
            self._let_go_before(self._num_boundaries)
            self._settle_writes(self._num_boundaries)

    def owned(self) -> list[Tensor]:
        """All buffers in host memory, for `trace_memory`: on a CPU they are not the device's."""
        return list(self._carrier.buffers)

    def report(self) -> HostReport:
        """Waits for a GPU's computing stream, whose waiting it tells."""
        with self._held():
            return self._told() if self._open else self._counts

    def _told(self) -> HostReport:
        carrier = self._carrier
        waited = carrier.waited_seconds
        if carrier.lanes:
            waited += carrier.lanes.waited_seconds(to_the_end=True)
        return replace(
            self._counts,
            waited_seconds=waited,
            num_buffers=len(carrier.buffers),
            buffer_bytes=sum(buffer.nbytes for buffer in carrier.buffers),
            disk_bytes=carrier.disk.size if carrier.disk else 0,
        )

    def close(self) -> None:
        """Give back memory, disk and thread. What is still away then is lost."""
        with self._held():
            if self._open:
                self._open, self._counts = False, self._told()
                self._carrier.close()
                for boundary in self._away.values():
                    boundary.fetched.clear()
                    boundary.untaken.clear()
                for waiting in (self._away, self._leaving, self._writing, self._strays):
                    waiting.clear()
                self._ahead = None

    def __enter__(self) -> "Host":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    # Out.

    @torch.no_grad()
    def _pack(self, tensor: Tensor, boundary: Boundary) -> Part:
        if (isinstance(tensor, FakeTensor) or tensor.is_meta) != self._fake:
            raise ValueError(
                "a Host is for real tensors or for fake ones: for these make one in the"
                " FakeTensorMode that it serves, or with device='meta'"
            )
        with self._held():
            self._require_open()
            if boundary.number < 0:
                boundary.number = self._num_boundaries
                self._num_boundaries += 1
            waited_for = boundary.number - self.buffers + 1
            self._settle_writes(min(waited_for, boundary.number))
            copy = self._copy_of(tensor, boundary.number)
            share = Share(self._num_parts, boundary, copy)
            # From here on an error lets go of the part, and with it of the copy.
            part = Part(share, tensor, self._part_is_gone)
            copy.users += 1
            self._num_parts += 1
            boundary.parts[share.number] = copy
            self._away[boundary.number] = boundary
            self._count(num_packed=1)
            self._let_go_before(waited_for)
            self._settle_writes(waited_for)
            return part

    def _copy_of(self, tensor: Tensor, number: int) -> Copy:
        """A copy that has the tensor's bytes: one that is away already, if it holds them and nobody
        has written to the storage since."""
        storage, version = tensor.untyped_storage(), tensor._version
        key, (begin, end) = storage._cdata, bytes_of(tensor)
        for copy in self._copies.get(key, ()):
            same = copy.source() is storage and copy.version == version
            if same and copy.begin <= begin and end <= copy.end:
                return copy
        begin = begin // _ALIGNMENT * _ALIGNMENT
        # as_strided counts in elements; the size of any divides the alignment.
        count, start = (end - begin) // tensor.itemsize, begin // tensor.itemsize
        source = tensor.as_strided((count,), (1,), start).view(torch.uint8)
        sent = self._carrier.send(source)
        copy = Copy(key, weakref.ref(storage), version, begin, end, sent)
        self._leaving.append(Leaving(number, source, version, sent))
        if sent.written is not None:
            self._writing.append((number, sent.written))
        self._copies.setdefault(key, []).append(copy)
        self._bytes += sent.size
        self._count(sent_bytes=sent.size)
        peak = max(self._bytes, self._counts.peak_bytes)
        self._counts = replace(self._counts, peak_bytes=peak)
        return copy

    def _let_go_before(self, number: int) -> None:
        """Of boundaries on their way out: of older ones than `number`, and of those that are out.

        ValueError where one was changed meanwhile: its copy may have old values or new ones.
        """
        while self._leaving:
            leaving = self._leaving[0]
            left = leaving.sent.left
            if leaving.number >= number and not (left is not None and left.query()):
                return
            self._leaving.popleft()
            self._carrier.let_go(leaving.sent)
            changes = leaving.source._version - leaving.version
            if changes:
                raise ValueError(
                    f"a boundary of {leaving.sent.size:,} bytes was changed in place {changes}"
                    " times on its way to the host; compute into a new tensor, or do not offload"
                    " that unit"
                )

    def _settle_writes(self, number: int) -> None:
        """Wait for writes of older boundaries than `number`; raise what any that is done raised."""
        while self._writing and (self._writing[0][0] < number or self._writing[0][1].done()):
            self._carrier.wait_for(self._writing.popleft()[1])

    # Back.

    @torch.no_grad()
    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Part):
            return packed
        with self._held():
            self._require_open()
            share, boundary = packed.share, packed.share.boundary
            # Before memory is asked for: the forward pass is over.
            self._let_go_before(self._num_boundaries)
            if share.number not in boundary.untaken:  # not fetched yet, or taken already
                self._fetch(boundary)
            try:
                memory = boundary.fetched[share.copy].arrive()
            except BaseException:
                self._drop(boundary)
                raise
            boundary.untaken.discard(share.number)
            if not boundary.untaken:
                self._drop(boundary)
            if self._ahead is boundary:
                self._ahead = None
            self._count(num_unpacked=1)
            if self._ahead is None:
                self._fetch_ahead(boundary.lead, boundary.number)
            return packed.of(memory)

    def _fetch_ahead(self, lead: int, before: int) -> None:
        """Fetch the lead's newest boundary that is older than `before`. Only one waits ahead."""
        if self.buffers == 0:
            return
        for boundary in reversed(self._away.values()):
            if boundary.lead == lead and boundary.number < before:
                if not boundary.fetched:
                    if self._ahead:
                        self._drop(self._ahead)
                    self._let_go_before(self._num_boundaries)
                    self._fetch(boundary)
                    self._ahead = boundary
                return

    @torch.no_grad()
    def _fetch(self, boundary: Boundary) -> None:
        self._strays = [fetch for fetch in self._strays if not fetch.settled()]
        self._drop(boundary)
        boundary.untaken = set(boundary.parts)
        for copy in dict.fromkeys(boundary.parts.values()):
            boundary.fetched[copy] = self._carrier.fetch(copy.sent)
            self._count(back_bytes=copy.sent.size)
            if copy.source() is not None:
                self._count(in_vain_bytes=copy.sent.size)

    def _drop(self, boundary: Boundary) -> None:
        """Forget what was fetched of a boundary; memory that is being filled, only after that."""
        self._strays += [fetch for fetch in boundary.fetched.values() if not fetch.settled()]
        boundary.fetched.clear()
        boundary.untaken.clear()
        if self._ahead is boundary:
            self._ahead = None

    # Both.

    @contextmanager
    def _held(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._settle()

    def _part_is_gone(self, share: Share) -> None:
        self._gone.append(share)
        self._settle()

    def _settle(self) -> None:
        """Let go of the parts that are gone, unless another method is at work: it does then."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    self._let_go_of(self._gone.popleft())
            finally:
                self._lock.release()

    def _let_go_of(self, share: Share) -> None:
        boundary, copy = share.boundary, share.copy
        boundary.parts.pop(share.number, None)
        boundary.untaken.discard(share.number)
        if not boundary.untaken:
            self._drop(boundary)
        if not boundary.parts:
            self._away.pop(boundary.number, None)
        copy.users -= 1
        if copy.users == 0:
            self._bytes -= copy.sent.size
            self._copies[copy.key].remove(copy)
            if not self._copies[copy.key]:
                del self._copies[copy.key]
            for leaving in [other for other in self._leaving if other.sent is copy.sent]:
                self._carrier.let_go(copy.sent)
                self._leaving.remove(leaving)
            if self._open:
                self._carrier.release(copy.sent)

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError(
                "this Host is closed: its boundaries are gone and it takes no others; close it"
                " after the last backward pass"
            )

    def _count(self, **more: int) -> None:
        summed = {name: getattr(self._counts, name) + value for name, value in more.items()}
        self._counts = replace(self._counts, **summed)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
