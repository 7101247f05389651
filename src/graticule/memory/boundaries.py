"""What an offloaded boundary consists of: copies, and who still needs them.

Tensors that share bytes are one copy. The graph keeps a part in a tensor's place, which has a share
of its copy; a copy that nobody has a share of is not needed any more (`offload`).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graticule.memory.carrier import Fetch, Sent


@dataclass(eq=False)
class Copy:
    """Bytes `begin` to `end` of a storage as they were at `version`, for so many `users`.

    key: of the storage while `source`, the storage itself, is alive.
    """

    key: int
    source: weakref.ref[torch.UntypedStorage]
    version: int
    begin: int
    end: int
    sent: Sent
    users: int = 0


@dataclass(eq=False)
class Leaving:
    """Bytes of boundary `number` on their way out, held."""

    number: int
    source: Tensor
    version: int
    sent: Sent


@dataclass(eq=False)
class Boundary:
    """What one call of a unit keeps. number: in the order of packing, given with the first part.

    parts: the copies of those that a graph still refers to. fetched: on the device, or coming;
    untaken: parts that are to take it.
    """

    lead: int
    number: int = -1
    parts: dict[int, Copy] = field(default_factory=dict)
    untaken: set[int] = field(default_factory=set)
    fetched: dict[Copy, Fetch] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Share:
    """A part's claim to a copy."""

    number: int
    boundary: Boundary
    copy: Copy


class Part:
    """What the graph keeps instead of a tensor. When it goes, so does its share of the copy."""

    def __init__(self, share: Share, tensor: Tensor, gone: Callable[[Share], None]) -> None:
        """gone: called with the share when it goes."""
        self.share, self._gone = share, gone
        begin, end = bytes_of(tensor)
        self._place = slice(begin - share.copy.begin, end - share.copy.begin)
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()

    def of(self, memory: Tensor) -> Tensor:
        """The tensor, in memory that holds the copy."""
        flat = memory[self._place].view(self._dtype)
        return flat.as_strided(self._shape, self._stride).detach()

    def __del__(self) -> None:
        self._gone(self.share)


def bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte in its storage, and the one after the last, of a tensor that has elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + span * tensor.itemsize
