"""Normal numbers by logical key, and which member of an ensemble is being computed.

A number depends on a key and a counter of four words alone (Philox4x32-10; Salmon et al., 2011):
what it is for, which step, which member, and its flat index in the whole tensor. So any part of a
tensor can be drawn without the rest, on any rank, as often as it is needed, and none is stored.

Which member a unit computes is bound to the unit (`bound`) and not looked up when it runs: what
is computed again in the backward pass comes to the same bits, whoever ran in between.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from graticule.model import elementary
from graticule.model.units import State, Tiled, Unit

_WORD = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_CHUNK = {"cpu": 2**15, "cuda": 2**20}
"""Counters at a time: what passes stays in a CPU's cache, and is small beside the rest on a GPU."""
_SMALL, _POOLED = 2**16, 2**23
"""Numbers of a small tensor at most, and of those that are kept (32 MiB)."""
_LEADS, _VALUES = 2**24, 2**10
"""Of an item's noise: leads that have their own, values at most."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Which draw of its weights and noise a model computes with.

    step: optimizer step, or whatever else asks for fresh draws. member: of the whole ensemble.
    items: of each sample of the batch its number, by which its noise is drawn. lead: of a rollout,
    whose weights are one draw and whose noise is a new one each lead.
    """

    step: int
    member: int
    items: tuple[int, ...] = ()
    lead: int = 1

    def __post_init__(self) -> None:
        for name, most in (("step", 2**32), ("member", 2**32), ("lead", _LEADS)):
            value = getattr(self, name)
            if not 0 <= value < most:
                raise ValueError(f"{name}={value} of a draw must be at least 0 and below {most}")
        if not all(0 <= item < 2**31 for item in self.items):
            raise ValueError(f"items={self.items} of a draw must be at least 0 and below {2**31}")

    @property
    def words(self) -> tuple[int, int]:
        """Of the counter, those that are not the index."""
        return self.step, self.member


_now: ContextVar[Draw | None] = ContextVar("draw", default=None)


@contextmanager
def drawing(draw: Draw) -> Iterator[None]:
    """Layers compute with this draw, in this thread."""
    token = _now.set(draw)
    try:
        yield
    finally:
        _now.reset(token)


def current() -> Draw:
    """The draw that is computed. ValueError outside of `drawing`."""
    draw = _now.get()
    if draw is None:
        raise ValueError(
            "this model's weights or norms are drawn, and nobody said which draw: call it with"
            " draw=Draw(step=..., member=..., items=...)"
        )
    return draw


def bound(units: Sequence[Unit], draw: Draw) -> list[Unit]:
    """The units, each of which computes this draw whenever and wherever it runs."""

    def of(run: Callable[..., State]) -> Callable[..., State]:
        return partial(_run, run, draw)

    return [
        Unit(u.name, of(u.run), u.tiled and Tiled(u.tiled.num_units, of(u.tiled.run)))
        for u in units
    ]


def _run(run: Callable[..., State], draw: Draw, *state: Tensor) -> State:
    with drawing(draw):
        return run(*state)


def has_no_values(tensor: Tensor) -> bool:
    """Of a tensor that is built or traced without any: to draw is many operations, and it takes
    little memory beside what is drawn."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def noise(key: int, draw: Draw, num_values: int, device: torch.device | str) -> Tensor:
    """(item, value) float32 of each item of a draw, the same wherever else the item is computed."""
    assert num_values <= _VALUES, num_values
    # All items at once: of so few numbers the calls cost more than the numbers. An item's counters
    # begin at a whole block of four.
    blocks = [((item << 34) + draw.lead * _VALUES) // 4 for item in draw.items]
    first = torch.tensor(blocks, dtype=torch.int64, device=device)
    within = torch.arange(-(-num_values // 4), device=device)
    return _normals(key, draw.words, first[:, None] + within).flatten(1)[:, :num_values]


def normal(
    key: int,
    words: tuple[int, int],
    shape: Sequence[int],
    box: Sequence[slice] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Independent standard normal numbers of a tensor of `shape`, or of a box of it, float32.

    key: 64 bits. words: 32 bits each. The bits are the same on every device and in every box.
    """
    ranges = [
        range(*(box[dim] if box else slice(None)).indices(size)) for dim, size in enumerate(shape)
    ]
    assert all(part.step == 1 for part in ranges), box
    sizes = [len(part) for part in ranges]
    # Numbers that follow each other: all dims behind the last one that is cut, and that one.
    dim, run, stride = len(shape), 1, 1
    while dim and run == stride:
        dim -= 1
        run *= sizes[dim]
        stride *= shape[dim]
    found = np.zeros(1, dtype=np.int64)
    if dim < len(shape):
        found += ranges[dim].start * (stride // shape[dim] if stride else 0)
    for outer in range(dim - 1, -1, -1):
        rows = np.array(ranges[outer], dtype=np.int64) * math.prod(shape[outer + 1 :])
        found = (rows[:, None] + found).ravel()
    if not math.prod(sizes):
        return torch.empty(sizes, device=device)
    if len(found) == 1:
        return _run_of(key, words, int(found[0]), run, device).view(sizes)
    # Runs begin anywhere in a block of four numbers.
    blocks = (run + 2) // 4 + 1
    starts = torch.from_numpy(found).to(device)
    out = torch.empty(len(starts), run, device=device)
    step = max(1, _chunk(device) // blocks)
    within = torch.arange(blocks, device=device)
    for some in range(0, len(starts), step):
        first = starts[some : some + step]
        four = _normals(key, words, (first // 4)[:, None] + within)
        place = (first % 4)[:, None] + torch.arange(run, device=device)
        out[some : some + step] = four.flatten(1).gather(1, place)
    return out.view(sizes)


class Pool:
    """Draws of many small tensors at once, kept for a few draws: of a small one its numbers cost
    less than asking for them. The bits are those of `normal`."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, tuple[int, ...]], int] = {}
        self._kept: dict[Any, dict[Any, Tensor]] = {}

    def takes(self, key: int, shape: tuple[int, ...]) -> bool:
        """Whether it takes a tensor in, which then has its draws here."""
        size = math.prod(shape)
        if not 0 < size <= _SMALL:
            return False
        self._sizes[key, shape] = size
        return True

    def nbytes(self, draws: int) -> int:
        """Of so many draws, of which it keeps as many as there is room for."""
        numbers = sum(-(-size // 4) * 4 for size in self._sizes.values())
        return 4 * numbers * min(draws, max(1, _POOLED // max(1, self._count)))

    @property
    def _count(self) -> int:
        return sum(self._sizes.values())

    def normal(
        self, key: int, words: tuple[int, int], shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """Of one of its tensors, whole: not to be written to."""
        if draw := self._kept.get((words, device)):
            return draw[key, shape]
        while self._kept and (len(self._kept) + 1) * self._count > _POOLED:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[words, device] = draw = self._all(words, device)
        return draw[key, shape]

    def _all(self, words: tuple[int, int], device: torch.device) -> dict[Any, Tensor]:
        blocks = [-(-size // 4) for size in self._sizes.values()]
        counters = torch.cat([torch.arange(count, device=device) for count in blocks])
        keys = torch.tensor(
            [[key & _WORD, key >> 32 & _WORD] for key, _ in self._sizes], device=device
        )
        each = keys.repeat_interleave(torch.tensor(blocks, device=device), 0).t()
        out = torch.empty(len(counters), 4, device=device)
        for first in range(0, len(counters), _chunk(device)):
            some = slice(first, first + _chunk(device))
            out[some] = _normals(each[:, some], words, counters[some])
        return {
            name: numbers.flatten()[:size].view(name[1])
            for (name, size), numbers in zip(self._sizes.items(), out.split(blocks), strict=True)
        }


def _run_of(
    key: int, words: tuple[int, int], first: int, count: int, device: torch.device | str
) -> Tensor:
    """(count,) numbers from index `first` on."""
    start, stop = first // 4, -(-(first + count) // 4)
    out = torch.empty(stop - start, 4, device=device)
    for block in range(start, stop, _chunk(device)):
        last = min(block + _chunk(device), stop)
        counters = torch.arange(block, last, device=device)
        out[block - start : last - start] = _normals(key, words, counters)
    return out.flatten()[first - 4 * start :][:count]


def _chunk(device: torch.device | str) -> int:
    return _CHUNK["cpu" if torch.device(device).type == "cpu" else "cuda"]


def _normals(key: int | Tensor, words: tuple[int, int], blocks: Tensor) -> Tensor:
    """(...) block numbers -> (..., 4) normal numbers (Box and Muller, 1958)."""
    radius, angle = philox(key, words, blocks)
    # r (cos a, sin a). a is 45 degrees and up to 45 more or less, mirrored at both axes by two of
    # its bits; with c, s of that part, r cos a = sqrt(-log u) (c - s).
    u = radius.to(torch.float32).add_(0.5).mul_(2.0**-32)
    root = elementary.log(u).neg_().clamp_(min=0).sqrt_()
    turn = (angle & 0x3FFFFFFF).to(torch.float32).mul_(2.0**-30).sub_(0.5)
    cosine, sine = elementary.rotation(turn)
    pair = torch.stack([cosine - sine, cosine + sine], -1).mul_(root.unsqueeze(-1))
    pair.mul_(torch.stack([angle >> 29 & 2, angle >> 30 & 2], -1).neg_().add_(1))
    return torch.cat([pair[0], pair[1]], -1)


def philox(key: int | Tensor, words: tuple[int, int], blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Words (0, 2) and (1, 3) of 32 bits, each (2, ...) int64, for counters (low and high word of
    the block, words). key: of 64 bits, or (2, ...) the low and the high word of each block's."""
    even = torch.stack([blocks & _WORD, torch.full_like(blocks, words[0])])
    odd = torch.stack([blocks >> 32 & _WORD, torch.full_like(blocks, words[1])])
    shape = 2, *[1] * blocks.dim()
    multipliers, weyl = (
        torch.tensor(pair, device=blocks.device).view(shape) for pair in (_MULTIPLIERS, _WEYL)
    )
    if isinstance(key, int):
        key = torch.tensor([key & _WORD, key >> 32 & _WORD], device=blocks.device).view(shape)
    keys = key
    for _ in range(10):
        # Of 64 bits with a sign: the product wraps round, and its bits are right.
        product = even.mul_(multipliers)
        low = (product & _WORD).flip(0)
        even = (product >> 32).bitwise_and_(_WORD).flip(0).bitwise_xor_(odd).bitwise_xor_(keys)
        odd, keys = low, (keys + weyl) & _WORD
    return even, odd
