"""Every live storage of a step, its bytes and what it is for.

A dispatch mode sees each operation's arguments and results. A storage counts once, however many
tensors view it, from the operation that made it until the last tensor on it is gone: a weak
reference says when. What a storage was for is known in the end only, so that owners are settled
after the step:

parameters, ...  what the caller names (`owned`), before or after the step
gradients        what was accumulated for a parameter
gathered weights what is resized: sharded parameters while they are whole
weights underway buffers in which they arrive
inputs           what came from outside: an operation met it and none had made it. Fields and
                 labels as the loader reads them, and their copies on the device
activations      made outside the backward pass and alive in it: what it has to keep
temporaries      everything else

Not seen: scratch that a kernel takes and returns inside one operation, what an allocator rounds
up or caches, and batches that lie ready and no operation has met. While the mode is on, PyTorch
adds up two gradients of one tensor into a third instead of in place. Hence exact for the storages
of tensors on any device, and on a GPU less than the allocator's peak.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRADIENTS, INPUTS, ACTIVATIONS, TEMPORARIES = "gradients", "inputs", "activations", "temporaries"
GATHERED, UNDERWAY, ELSEWHERE = "gathered weights", "weights underway", "elsewhere"
T = TypeVar("T")
Mark = tuple[Any, ...]

_tracker: "_Tracker | None" = None
"""The one that looks on."""


def mark(name: Mark) -> None:
    """Note this moment in the trace that is being taken; without one, nothing."""
    if _tracker is not None:
        _tracker.marks.append((name, _tracker.events))


def own(name: str, tensors: Iterable[Tensor]) -> dict[int, int]:
    """Name the owner of storages in the trace that is being taken: bytes of each by a number of
    its own. It leaves a mark ("freed", number) when it goes. Without a trace, nothing."""
    return {} if _tracker is None else _tracker.watch(name, tensors)


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range that a profiler shows, and whose ends a trace has as marks (name, begins)."""
    mark((name, True))
    with record_function(name):
        yield
    mark((name, False))


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryTrace:
    """Bytes alive after each event of a step, an event being a storage made, resized or freed.

    owners: names, in the order of the last dim of `alive`.
    seconds: (event,) since the step began; event 0 is what was there before. The tracker's own
        time is in them: they order events and do not time them.
    alive: (event, owner) int64 bytes.
    marks: (name, the event that was the last one before it), in order.
    """

    owners: tuple[str, ...]
    seconds: np.ndarray
    alive: np.ndarray
    marks: tuple[tuple[Mark, int], ...] = ()

    @property
    def peak(self) -> int:
        """The event (its number) with the most bytes alive, the first of several."""
        return int(self.alive.sum(1).argmax())

    @property
    def peak_bytes(self) -> int:
        return int(self.alive[self.peak].sum())

    def at(self, event: int) -> dict[str, int]:
        """Bytes by owner after an event."""
        return dict(zip(self.owners, self.alive[event].tolist(), strict=True))

    def timeline(self, points: int) -> list[tuple[float, dict[str, int]]]:
        """(seconds, bytes by owner) at no more than `points` events, evenly spaced in number.

        Each stands for the events since the one before it and is the fullest of them: the peak is
        always there.
        """
        total = self.alive.sum(1)
        edges = np.unique(np.linspace(0, len(total), min(points, len(total)) + 1).astype(int))
        fullest = [int(a + total[a:b].argmax()) for a, b in pairwise(edges)]
        return [(float(self.seconds[event]), self.at(event)) for event in fullest]


def trace_memory(
    step: Callable[[], T],
    owned: Callable[[], Mapping[str, Iterable[Tensor]]],
    *,
    device: torch.device | str = "cpu",
    elsewhere: Callable[[], Iterable[Tensor]] = tuple,
) -> tuple[T, MemoryTrace]:
    """Call `step` once; its result, and what it held on `device`.

    elsewhere: tensors that stand for another memory than that of `device` (where boundaries are
        offloaded to on a CPU), asked before and after the step; they are left out.

    owned: tensors by owner, asked before and after the step; of two owners of one storage the
        first counts. The gradients of those named `parameters` are found by themselves.
    The step computes the same numbers, more slowly: each operation costs Python's time besides.
    A dispatch mode of its own that keeps tensors alive, such as a FLOP counter, would be traced
    with it.
    """
    tracker = _Tracker(torch.device(device))
    tracker.own(ELSEWHERE, elsewhere())
    parameters, names = tracker.own_all(owned())
    with _gradients_of(parameters, tracker), _resizes(tracker), _looks_on(tracker), tracker:
        result = step()
    tracker.own(ELSEWHERE, elsewhere())
    names += tracker.own_all(owned())[1]
    return result, tracker.trace(names)


@contextmanager
def _looks_on(tracker: "_Tracker") -> Iterator[None]:
    global _tracker
    assert _tracker is None, "one trace at a time"
    _tracker = tracker
    try:
        yield
    finally:
        _tracker = None


@contextmanager
def _gradients_of(parameters: list[Tensor], tracker: "_Tracker") -> Iterator[None]:
    """Tell the tracker of every gradient when it is accumulated."""

    def accumulated(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.own(GRADIENTS, [parameter.grad])

    handles = [
        parameter.register_post_accumulate_grad_hook(accumulated)
        for parameter in parameters
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _resizes(tracker: "_Tracker") -> Iterator[None]:
    """Tell the tracker of `storage.resize_`, which no dispatch mode sees."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        plain(storage, size)
        tracker.resized(storage)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


class _Storage:
    """One storage. backward_ops: how many operations of backward passes had run at its birth."""

    __slots__ = ("backward_ops", "born_in_backward", "number", "owner", "size", "weak")

    def __init__(self, owner: str | None, born_in_backward: bool, backward_ops: int) -> None:
        self.owner, self.size, self.number = owner, 0, 0
        self.born_in_backward, self.backward_ops = born_in_backward, backward_ops
        self.weak: weakref.ref[torch.UntypedStorage] | None = None


class _Tracker(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled: a wrapper less around each operation

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # By the identity of its Python object, which a storage keeps as long as it lives.
        self._alive: dict[int, _Storage] = {}
        self._changes: list[tuple[float, _Storage, int]] = []
        self._backward_ops = 0
        self._began: float | None = None
        self.marks: list[tuple[Mark, int]] = []
        self._numbers = itertools.count(1)

    @property
    def events(self) -> int:
        """How many there were."""
        return len(self._changes)

    def __enter__(self) -> "_Tracker":
        self._began = time.perf_counter()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # a fake tensor is asked where it is
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # `torch.tensor` hands in what it has just made: nothing from outside.
        if func is not torch.ops.aten.lift_fresh.default:
            for tensor in given:
                self._meet(tensor, INPUTS)
        made = func(*args, **kwargs)
        in_backward = torch._C._current_graph_task_id() != -1
        self._backward_ops += in_backward
        to_device = func is torch.ops.aten._to_copy.default and _device_of(given[0]) != self._device
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._meet(tensor, INPUTS if to_device else None, in_backward)
        if func.namespace == "fsdp" and "all_gather_copy_in" in func.name():
            self.own(UNDERWAY, made)
        return made

    def own_all(self, owned: Mapping[str, Iterable[Tensor]]) -> tuple[list[Tensor], list[str]]:
        """Name all owners, gradients too; the parameters and the owners' names."""
        named = {name: list(tensors) for name, tensors in owned.items()}
        parameters = named.get("parameters", [])
        for name, tensors in named.items():
            self.own(name, tensors)
        self.own(GRADIENTS, [p.grad for p in parameters if p.grad is not None])
        return parameters, [*named, GRADIENTS]

    def own(self, name: str, tensors: Iterable[Tensor]) -> list[_Storage]:
        """Name the owner of storages that have none yet."""
        met = [storage for tensor in tensors if (storage := self._meet(tensor, name))]
        for storage in met:
            if storage.owner is None or name == ELSEWHERE:
                storage.owner = name
        return met

    def watch(self, name: str, tensors: Iterable[Tensor]) -> dict[int, int]:
        """The same; bytes of each by its number, which is marked when it goes."""
        watched = {}
        for storage in self.own(name, tensors):
            storage.number = storage.number or next(self._numbers)
            watched[storage.number] = storage.size
        return watched

    def resized(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(id(storage))
        if known is not None and known.size != storage.nbytes():
            if known.owner in (None, INPUTS):
                known.owner = GATHERED
            self._change(known, storage.nbytes() - known.size)

    def trace(self, names: Iterable[str]) -> MemoryTrace:
        """What was seen. The tracker forgets the storages that still live."""
        for storage in self._alive.values():
            self._settle(storage)
            storage.weak = None
        self._alive.clear()
        # The last three are always there, others that nobody named only where there is any.
        last = (INPUTS, ACTIVATIONS, TEMPORARIES)
        more = {storage.owner or TEMPORARIES for _, storage, _ in self._changes}
        owners = tuple(dict.fromkeys([*names, *sorted(more - {*last, ELSEWHERE}), *last]))
        column = {name: index for index, name in enumerate(owners)}
        steps = np.zeros((len(self._changes) + 1, len(owners)), np.int64)
        for event, (_, storage, size) in enumerate(self._changes, start=1):
            if storage.owner != ELSEWHERE:
                steps[event, column[storage.owner or TEMPORARIES]] = size
        seconds = np.array([0.0, *(at for at, _, _ in self._changes)])
        # What was there before is one event, the last of those at 0.
        first = int((seconds <= 0).sum()) - 1
        return MemoryTrace(
            owners=owners,
            seconds=seconds[first:],
            alive=np.cumsum(steps, axis=0)[first:],
            marks=tuple((name, event - first) for name, event in self.marks),
        )

    def _meet(
        self, tensor: Tensor, owner: str | None, in_backward: bool = False
    ) -> _Storage | None:
        """The storage of a tensor, new or known; None if it is not on the device."""
        # A sharded tensor is a shell, whose storage has the whole shape and no memory.
        tensor = getattr(tensor, "_local_tensor", tensor)
        if _device_of(tensor).type != self._device.type or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            self.resized(storage)
            return self._alive[key]
        new = _Storage(owner, in_backward, self._backward_ops)
        new.weak = weakref.ref(storage, lambda _: self._free(key))
        self._alive[key] = new
        self._change(new, storage.nbytes())
        return new

    def _free(self, key: int) -> None:
        storage = self._alive.pop(key)
        self._settle(storage)
        self._change(storage, -storage.size)
        if storage.number:
            self.marks.append((("freed", storage.number), self.events))

    def _settle(self, storage: _Storage) -> None:
        lived_on = self._backward_ops > storage.backward_ops
        if storage.owner is None and lived_on and not storage.born_in_backward:
            storage.owner = ACTIVATIONS

    def _change(self, storage: _Storage, size: int) -> None:
        at = 0.0 if self._began is None else time.perf_counter() - self._began
        storage.size += size
        self._changes.append((at, storage, size))


def _device_of(tensor: Tensor) -> torch.device:
    # A fake tensor's own `device` is an operation, a millisecond each.
    return getattr(tensor, "fake_device", None) or tensor.device
