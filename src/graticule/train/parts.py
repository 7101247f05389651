"""Who holds which part of a tensor, and who writes it: a layout, for a checkpoint.

Names and shapes are the serial model's. A tensor is the same on all ranks, or torch's DTensor:
sharded by FSDP, by tensor parallelism or by both, over all ranks or some.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graticule.parallel.box import Box, box_of
from graticule.parallel.data import local
from graticule.parallel.talk import Talk

Key = tuple[str, str]
"""Group (`model`, ...) and name of a tensor."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""What safetensors holds, by its names."""


@dataclass(frozen=True)
class Entry:
    """A tensor to be written. owner: the rank that does. parts: who sends what of it."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: int
    parts: tuple[tuple[int, Box], ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan(tensors: Mapping[str, Mapping[str, Tensor]], talk: Talk) -> list[Entry]:
    """Who writes what. All ranks together; the same on all.

    ValueError where the ranks' tensors do not make whole ones.
    """
    described: dict[Key, tuple[tuple[int, ...], torch.dtype, Box | None]] = {}
    error: Exception | None = None
    try:
        for group, named in tensors.items():
            for name, value in named.items():
                if value.dtype not in DTYPES.values():
                    raise ValueError(f"{group} {name}: {value.dtype} has no form in a checkpoint")
                try:
                    described[group, name] = tuple(value.shape), value.dtype, box_of(value)
                except ValueError as wrong:
                    raise ValueError(f"{group} {name}: {wrong}") from wrong
    except Exception as caught:
        error = caught
    if told := talk.failures(error):
        raise ValueError(f"cannot save these tensors: {told}") from error
    ranks = talk.gather(described)
    for rank, other in enumerate(ranks):
        differ = [k for k in sorted({*other, *ranks[0]}) if _kind(other, k) != _kind(ranks[0], k)]
        if differ:
            key = differ[0]
            raise ValueError(
                f"cannot save these tensors: {len(differ)} differ between ranks, {' '.join(key)}:"
                f" rank 0 {_told(ranks[0], key)}, rank {rank} {_told(other, key)}; all ranks save"
                " the same names"
            )
    entries = []
    written: Counter[int] = Counter()
    sent: Counter[int] = Counter()

    def least(candidates: Sequence[int], load: Counter[int]) -> int:
        return min(candidates, key=lambda rank: (load[rank], rank))

    def size_of(key: Key) -> int:
        shape, dtype, _ = ranks[0][key]
        return math.prod(shape) * dtype.itemsize

    # Large ones first, each to the rank with least to write: shares of nearly equal size.
    for key in sorted(ranks[0], key=lambda key: (-size_of(key), key)):
        shape, dtype, _ = ranks[0][key]
        holders: dict[Box, list[int]] = {}
        for rank, other in enumerate(ranks):
            box = other[key][2]
            if box is not None and box.count:
                holders.setdefault(box, []).append(rank)
        there = sum(box.count for box in holders)
        if there != math.prod(shape):
            raise ValueError(
                f"cannot save these tensors: the ranks hold {there} of {math.prod(shape)} elements"
                f" of {' '.join(key)}; save them with all ranks of their mesh"
            )
        whole = next(iter(holders.values())) if len(holders) == 1 else range(talk.size)
        owner = least(whole, written)
        written[owner] += size_of(key)
        parts = []
        for box, ranks_of_box in holders.items():
            sender = owner if owner in ranks_of_box else least(ranks_of_box, sent)
            sent[sender] += box.count * dtype.itemsize
            parts.append((sender, box))
        entries.append(Entry(key, dtype, shape, owner, tuple(parts)))
    # Within a file wide numbers first: each begins at a multiple of its size.
    return sorted(entries, key=lambda e: (e.key[0], -e.dtype.itemsize, e.key[1]))


def held(
    tensors: Mapping[str, Mapping[str, Tensor]], entries: Sequence[Entry], rank: int
) -> dict[Key, Tensor]:
    """What this rank has to send or write, by key, where it lies now."""
    return {
        entry.key: local(tensors[entry.key[0]][entry.key[1]]).detach()
        for entry in entries
        if any(sender == rank for sender, _ in entry.parts)
    }


def in_host_memory(parts: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies that training no longer changes."""
    copies: dict[Key, Tensor] = {}
    for key, value in parts.items():
        away = value.is_cuda
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=away)
        copies[key] = copy.copy_(value, non_blocking=away)
    if any(value.is_cuda for value in parts.values()):
        torch.cuda.synchronize()
    return copies


def _kind(described: Mapping[Key, Any], key: Key) -> Any:
    return described[key][:2] if key in described else None


def _told(described: Mapping[Key, Any], key: Key) -> str:
    kind = _kind(described, key)
    return "has none" if kind is None else f"has {kind[0]} {str(kind[1]).removeprefix('torch.')}"
