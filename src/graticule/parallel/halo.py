"""Pads over stripes: what a rank's outputs read and others hold is borrowed from its holders.

Who lends what to whom follows from the cut and the consumer's kernel alone, so each rank plans it
for itself, once, and no sizes travel. Output i of a convolution belongs to whoever holds input
stride x i. Just what is read is borrowed, each point once, from whoever holds it, near or far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.mesh import Cut
from graticule.model.pad import ConvPad, EdgePad, Ends, Pad, Rows, Run, Runs, TransposedPad
from graticule.parallel.exchange import Link


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What one rank's outputs read along a dim: points first, first + 1, ... of the field where
    `mask` is true. The padded stripe holds them all; points beyond the field are negative or
    large."""

    first: int
    mask: np.ndarray

    @classmethod
    def of_conv(cls, held: slice, kernel: int, stride: int, dilation: int) -> "Reads":
        """Of a convolution, by the rank that holds these of its inputs."""
        outputs = stride * np.arange(-(-held.start // stride), -(-held.stop // stride))
        if not outputs.size:
            return cls(first=held.start, mask=np.zeros(0, dtype=bool))
        first = int(outputs[0]) - dilation * (kernel - 1) // 2
        taps = outputs[:, None] - outputs[0] + dilation * np.arange(kernel)
        mask = np.zeros(taps.max() + 1, dtype=bool)
        mask[taps] = True
        return cls(first=first, mask=mask)

    @classmethod
    def of_transposed(cls, held: slice, before: int, after: int) -> "Reads":
        """Of what makes points finer: outputs stay with the inputs that they are centred on."""
        count = held.stop - held.start
        mask = np.ones(count + before + after if count else 0, dtype=bool)
        return cls(first=held.start - before, mask=mask)


@dataclass(frozen=True, kw_only=True)
class Halo:
    """How one rank's stripe becomes the padded stripe, along one dim."""

    held: int
    """Points of the stripe."""
    size: int
    """Points of the padded stripe."""
    own: tuple[Run, ...]
    """From the stripe; the first run is the stripe itself, others came round the circle."""
    borrowed: tuple[Run, ...]
    """From what is received."""
    blank: tuple[Run, ...]
    """Zero: beyond the walls, or not read."""
    lent: tuple[Run, ...]
    """From the stripe to what is sent."""
    send: tuple[int, ...]
    """Points by rank; so is `receive`."""
    receive: tuple[int, ...]
    silent: bool
    """Whether no rank borrows anything."""

    @classmethod
    def of(cls, cut: Cut, index: int, reads: Sequence[Reads], ends: Ends) -> "Halo":
        """reads: by rank. index: ours. ends: of the field."""
        needs = [_Needs(cut, rank, reads[rank], ends) for rank in range(cut.ranks)]
        ours, start = needs[index], cut.bounds[index]
        wanted = [need.foreign[need.holder == index] - start for need in needs]
        lent = np.concatenate(wanted)
        place, near = ours.place, ours.near
        own = _runs(place[near], ours.source[near] - start)
        # The stripe itself first.
        own.sort(key=lambda run: run[0] + ours.first != run[1] + start)
        far = ours.far
        return cls(
            held=cut.length(index),
            size=place.size,
            own=tuple(own),
            borrowed=tuple(_runs(place[far], np.searchsorted(ours.foreign, ours.source[far]))),
            blank=tuple(_runs(place[~near & ~far], place[~near & ~far])),
            lent=tuple(_runs(np.arange(lent.size), lent)),
            send=tuple(points.size for points in wanted),
            receive=tuple(np.bincount(ours.holder, minlength=cut.ranks).tolist()),
            silent=not any(need.foreign.size for need in needs),
        )


class _Needs:
    """Where the points that a rank reads are.

    place: 0, 1, ... in the padded stripe. source: the field's point that belongs there. near, far:
    whether it is read and held by the rank itself, by another. foreign: the points that it must
    borrow, ascending, and so by holder.
    """

    def __init__(self, cut: Cut, rank: int, reads: Reads, ends: Ends) -> None:
        self.first, self.place = reads.first, np.arange(reads.mask.size)
        points = self.source = reads.first + self.place
        if ends == "circle" and cut.size:
            self.source = points % cut.size
        elif ends == "repeat" and cut.size:
            self.source = points.clip(0, cut.size - 1)
        inside = (self.source >= 0) & (self.source < cut.size)
        mine = (self.source >= cut.bounds[rank]) & (self.source < cut.bounds[rank + 1])
        self.near, self.far = mine, inside & ~mine & reads.mask
        self.foreign = np.unique(self.source[self.far])
        self.holder = cut.owner(self.foreign)


def _runs(places: np.ndarray, sources: np.ndarray) -> list[Run]:
    """As few runs as there can be, in which both go up by one."""
    if not places.size:
        return []
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(sources) != 1)) + 1
    firsts, ends = np.r_[0, breaks], np.r_[breaks, places.size]
    return [
        (int(places[a]), int(sources[a]), int(b - a)) for a, b in zip(firsts, ends, strict=True)
    ]


class _Borrow(torch.autograd.Function):
    """(..., lat, lon) of the stripe -> of the padded stripe, in one copy.

    halos: along lat and along lon. dim: -2 or -1, the one that is cut. The gradient of what was
    borrowed goes home and is added there; that of zeros is dropped.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, halos: tuple[Halo, Halo], dim: int, link: Link) -> Tensor:
        ctx.halos, ctx.dim, ctx.link = halos, dim, link
        along, across = halos[dim], halos[-3 - dim]
        sent = _parcel(x, sum(along.send), dim, across.held)
        for to, source, count in along.lent:
            sent.narrow(dim, to, count).copy_(x.narrow(dim, source, count))
        received = _travel(sent, along.send, along.receive, dim, along.silent, link)
        out = x.new_empty(*x.shape[:-2], halos[0].size, halos[1].size)
        for runs, origin in ((along.own, x), (along.borrowed, received)):
            for to, source, count in runs:
                target, part = out.narrow(dim, to, count), origin.narrow(dim, source, count)
                for at, start, length in across.own:
                    target.narrow(-3 - dim, at, length).copy_(part.narrow(-3 - dim, start, length))
                for at, _, length in across.blank:
                    target.narrow(-3 - dim, at, length).zero_()
        for to, _, count in along.blank:
            out.narrow(dim, to, count).zero_()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        halos, dim, link = ctx.halos, ctx.dim, ctx.link
        other = -3 - dim
        along, across = halos[dim], halos[other]
        home = _parcel(grad, sum(along.receive), dim, across.held).zero_()
        for to, source, count in along.borrowed:
            target, part = home.narrow(dim, source, count), grad.narrow(dim, to, count)
            for at, start, length in across.own:
                target.narrow(other, start, length).add_(part.narrow(other, at, length))
        back = _travel(home, along.receive, along.send, dim, along.silent, link)
        inside = grad.new_empty(*grad.shape[:-2], halos[0].held, halos[1].held)
        # The stripe itself is copied, all else is added to it.
        if any(not halo.own or halo.own[0][2] < halo.held for halo in halos):
            inside.zero_()
        for number, (to, source, count) in enumerate(along.own):
            target, part = inside.narrow(dim, source, count), grad.narrow(dim, to, count)
            for turn, (at, start, length) in enumerate(across.own):
                here, there = target.narrow(other, start, length), part.narrow(other, at, length)
                here.add_(there) if number or turn else here.copy_(there)
        for to, source, count in along.lent:
            inside.narrow(dim, source, count).add_(back.narrow(dim, to, count))
        return inside, None, None, None


def _parcel(like: Tensor, count: int, dim: int, across: int) -> Tensor:
    """Room for `count` points along `dim`, which is outermost in memory, as a link wants it."""
    return like.new_empty(count, *like.shape[:-2], across).movedim(0, dim)


def _travel(
    parcel: Tensor, send: Sequence[int], receive: Sequence[int], dim: int, silent: bool, link: Link
) -> Tensor:
    if silent:
        return parcel
    return link.exchange(parcel.movedim(dim, 0), send, receive, "halo").movedim(0, dim)


class _Striped(Pad):
    """halos: along lat and lon. dim: -2 or -1, the one that is cut."""

    halos: tuple[Halo, Halo]
    dim: int
    link: Link

    def forward(self, x: Tensor) -> Tensor:
        held = tuple(halo.held for halo in self.halos)
        assert x.shape[-2:] == held, f"{tuple(x.shape)} is not the stripe of {held} points"
        return _Borrow.apply(x, self.halos, self.dim, self.link)

    def runs(self) -> tuple[Runs, Runs]:
        return self.halos

    def borrow(self, rows: Rows, like: Tensor, tiles: Sequence[tuple[int, int]]) -> Tensor:
        dim = self.dim
        along, across = self.halos[dim], self.halos[-3 - dim]
        sent = _parcel(like, sum(along.send), dim, across.held)
        for to, source, count in along.lent:
            if dim == -2:
                sent.narrow(dim, to, count).copy_(rows(source, source + count))
        for first, last in tiles if dim == -1 and along.lent else ():
            here, target = rows(first, last), sent[..., first:last, :]
            for to, source, count in along.lent:
                target.narrow(dim, to, count).copy_(here.narrow(dim, source, count))
        return _travel(sent, along.send, along.receive, dim, along.silent, self.link)

    def give_back(self, borrowed: Tensor, grad: Tensor) -> None:
        dim, along = self.dim, self.halos[self.dim]
        back = _travel(borrowed, along.receive, along.send, dim, along.silent, self.link)
        for to, source, count in along.lent:
            grad.narrow(dim, source, count).add_(back.narrow(dim, to, count))


class StripedConvPad(_Striped, ConvPad):
    """The same from stripes, the halo included."""


class StripedTransposedPad(_Striped, TransposedPad):
    """The same from stripes, the halo included."""


class StripedEdgePad(_Striped, EdgePad):
    """The same from stripes, the halo included."""


STRIPED_PADS: dict[type[Pad], type[Pad]] = {
    ConvPad: StripedConvPad, TransposedPad: StripedTransposedPad, EdgePad: StripedEdgePad,
}  # fmt: skip
"""What takes the place of each."""


def halos_of(pad: Pad, cuts: tuple[Cut, Cut], indices: tuple[int, int]) -> tuple[Halo, Halo]:
    """Along lat and lon. cuts: of the points that go into `pad`; a dim that is whole is one rank's.
    indices: which range of each is ours."""
    return tuple(  # type: ignore[return-value]
        Halo.of(
            cut,
            index,
            [_reads(pad, cut.of(rank)) for rank in range(cut.ranks)],
            pad.ends[dim],
        )
        for dim, (cut, index) in enumerate(zip(cuts, indices, strict=True))
    )


def _reads(pad: Pad, held: slice) -> Reads:
    if isinstance(pad, ConvPad):
        return Reads.of_conv(held, pad.kernel, pad.stride, pad.dilation)
    return Reads.of_transposed(held, pad.north, pad.south)
