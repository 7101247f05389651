"""Memory that is used again: lent as tensors, back when the last of them is gone.

Nobody has to say that a tensor is no longer needed, and nobody can forget to: the memory belongs
to whoever holds a tensor of it, a view of it or a graph that saved it, and is lent again only when
Python has let go of all of these. New pages cost 6 times as much as writing to old ones (40 MB
filled on one thread: 35 against 6 ms).
"""

import math
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graticule.data.processes import lock_across_forks

_lock = lock_across_forks()
_ALIGNMENT = 64


class Pool:
    """Lends tensors of reused memory.

    pin_memory: page-locked, which a GPU copies while it computes. Whoever starts such a copy must
    keep the tensor until the copy is done. `allocated_bytes` counts what the pool ever asked the
    system for and still keeps; it grows only while more is held than ever before.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self.allocated_bytes = 0
        self._pin_memory = pin_memory
        # A block comes back in whichever thread drops the last tensor, also in the middle of
        # `take` when the garbage is collected there: so without a lock.
        self._back: deque[np.ndarray] = deque()
        self._loans: dict[int, weakref.ref] = {}

    def take(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, at_least: int = 0
    ) -> list[Tensor]:
        """Tensors of these shapes side by side in one block, with whatever it last held.

        at_least: bytes of the block, so that loans of several sizes use the same blocks.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        total = sum(places)
        if total == 0:
            return [torch.empty(*shape, dtype=dtype) for shape in shapes]
        with _lock:
            block = self._free_block(max(total, at_least))
        # The loan's own array: tensors and their views keep it, the pool keeps `block`.
        loan = block[:total]
        key = id(loan)

        def give_back(_: weakref.ref) -> None:
            self._loans.pop(key, None)
            self._back.append(block)

        self._loans[key] = weakref.ref(loan, give_back)
        whole, tensors, start = torch.from_numpy(loan), [], 0
        for shape, size, place in zip(shapes, sizes, places, strict=True):
            tensors.append(whole[start : start + size].view(dtype).view(*shape))
            start += place
        return tensors

    def _free_block(self, size: int) -> np.ndarray:
        """A block that came back and fits, at most twice as large as needed; else a new one."""
        for _ in range(len(self._back)):
            block = self._back.popleft()
            if size <= block.size <= 2 * size:
                return block
            self._back.append(block)
        self.allocated_bytes += size
        if self._pin_memory:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return np.empty(size, np.uint8)
