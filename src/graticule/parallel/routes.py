"""Tokens on their way between stripes and windows, and from windows to shifted windows.

`Route` runs a plan of `layouts` as one differentiable exchange; the other classes stand in the
place of a model's window operations (TERRA, section IV.D).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from graticule.mesh import Stripes
from graticule.model.beast import BeastBlock
from graticule.model.swin import SwinBlock, WindowAttention
from graticule.model.windows import Attend, Enter, Leave, Shift, Unshift, WindowGrid, WindowMask
from graticule.parallel.exchange import Link
from graticule.parallel.layouts import RoutePlan, StripeLayout, Topology, WindowLayout, plan_route
from graticule.parallel.sequence import SharedAttend
from graticule.parallel.space import specialise


class Route(nn.Module):
    """(batch, source slot, feature) -> (batch, target slot, feature), zero where no token is.

    All ranks of `link` call it together, in the backward pass too. `back` goes the other way; each
    is the other's gradient. what: the name under which the link counts the bytes.
    """

    take: Tensor
    place: Tensor
    sources: Tensor
    empty: Tensor
    back_sources: Tensor
    back_empty: Tensor

    def __init__(self, plan: RoutePlan, link: Link, what: str) -> None:
        super().__init__()
        self.plan, self.back_plan, self.link, self.what = plan, plan.inverse(), link, what
        for name, index in (
            ("take", plan.take),
            ("place", plan.place),
            ("sources", plan.sources),
            ("empty", plan.empty),
            ("back_sources", self.back_plan.sources),
            ("back_empty", self.back_plan.empty),
        ):
            self.register_buffer(name, torch.from_numpy(index), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.plan.identity else _Move.apply(x, self, False)

    def back(self, x: Tensor) -> Tensor:
        """(batch, target slot, feature) -> (batch, source slot, feature)."""
        return x if self.plan.identity else _Move.apply(x, self, True)

    def move(self, x: Tensor, back: bool) -> Tensor:
        """`forward` or `back`, without a gradient: a new tensor."""
        if back:
            plan, take, place = self.back_plan, self.place, self.take
            sources, empty = self.back_sources, self.back_empty
        else:
            plan, take, place = self.plan, self.take, self.place
            sources, empty = self.sources, self.empty
        batch, slots, features = x.shape
        assert slots == plan.slots[0], (x.shape, plan.slots)
        # Contiguous: gathering rows from strided memory copies element by element.
        rows = x.reshape(batch * slots, features).contiguous()
        received = None
        if not plan.quiet:
            # A token's samples side by side, so that what is for one rank lies together.
            packed = rows.index_select(0, _rows(take, batch, slots).t().flatten())
            packed = packed.view(-1, batch, features)
            received = self.link.exchange(packed, plan.send, plan.receive, self.what)
        if plan.kept[0].size:
            # One gather of all slots, also of those that are written next: what stays here is
            # most of a shift, and is read and written once.
            out = rows.index_select(0, _rows(sources, batch, slots).flatten())
            if empty.numel():
                out.index_fill_(0, _rows(empty, batch, plan.slots[1]).flatten(), 0)
        else:
            out = rows.new_zeros(batch * plan.slots[1], features)
        if received is not None and received.numel():
            place = _rows(place, batch, plan.slots[1]).t().flatten()
            out.index_copy_(0, place, received.view(-1, features))
        return out.view(batch, plan.slots[1], features)


def _rows(index: Tensor, batch: int, slots: int) -> Tensor:
    """(batch, n) row numbers, in (batch x slots) rows, of n slots of each sample."""
    if batch == 1:
        return index[None]
    return index + slots * torch.arange(batch, device=index.device)[:, None]


class _Move(torch.autograd.Function):
    """A route or its inverse, which is its gradient: no scatter that adds, either way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, back: bool) -> Tensor:
        ctx.route, ctx.back = route, back
        return route.move(x, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Move.apply(grads[0], ctx.route, not ctx.back), None, None


class RoutedEnter(Enter):
    """This rank's stripe (batch, feature, rows, columns) -> (batch * windows here, slot, feature).

    A rank without windows gets (batch, 0, feature): no tokens, but it still knows how many samples
    it has to do with when it leaves.
    """

    route: Route
    chunk: int

    def forward(self, x: Tensor) -> Tensor:
        slots = self.route(x.permute(0, 2, 3, 1).flatten(1, 2))
        return slots.unflatten(1, (-1, self.chunk)).flatten(0, 1) if slots.shape[1] else slots

    def num_samples(self, y: Tensor) -> int:
        return y.shape[0] // max(1, self.route.plan.slots[1] // self.chunk)


class RoutedLeave(Leave):
    """(batch * windows here, slot, feature) -> this rank's stripe (batch, feature, rows, columns).

    stripe: (rows, columns).
    """

    route: Route
    stripe: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.route.back(_by_sample(x, self.route.plan.slots[1]))
        return tokens.unflatten(1, self.stripe).permute(0, 3, 1, 2).contiguous()


class RoutedShift(Shift):
    """The windows that are here -> the shifted windows that will be here."""

    route: Route

    def forward(self, x: Tensor) -> Tensor:
        return self.route(_by_sample(x, self.route.plan.slots[0])).view(x.shape)


class RoutedUnshift(Unshift):
    """The inverse of `RoutedShift`."""

    route: Route

    def forward(self, x: Tensor) -> Tensor:
        return self.route.back(_by_sample(x, self.route.plan.slots[1])).view(x.shape)


def _by_sample(x: Tensor, slots: int) -> Tensor:
    """(batch * window, slot, feature) -> (batch, slots of a sample, feature)."""
    return x.reshape(-1, slots, x.shape[-1]) if slots else x


def route_windows(
    model: nn.Module, topology: Topology, stripes: Stripes, link: Link, sequence: Link
) -> None:
    """Let each rank compute its own part of the attention windows of `model`, in place.

    stripes: what each rank holds of the field before and after. link: the ranks of a sample, by
    number of their stripe. sequence: the ranks that share our windows' tokens.
    ValueError where the heads cannot be shared among sequence x tensor ranks.
    """
    assert link.size == stripes.ranks == topology.ranks, (link.size, stripes.ranks, topology)
    assert (link.rank, sequence.size) == (stripes.index, topology.sequence), topology
    rank = link.rank

    def stripe(grid: WindowGrid) -> StripeLayout:
        return StripeLayout(grid.tokens, stripes.at(grid.tokens), stripes.dim)

    @cache
    def enter(grid: WindowGrid) -> Route:
        return Route(plan_route(stripe(grid), WindowLayout(grid, topology), rank), link, "route")

    @cache
    def shift(grid: WindowGrid) -> Route:
        regular, shifted = WindowLayout(grid, topology), WindowLayout(grid, topology, shifted=True)
        return Route(plan_route(regular, shifted, rank), link, "shift")

    # Before anything is changed.
    for name, module in model.named_modules():
        if isinstance(module, WindowAttention):
            _check_heads(name, module.heads, topology)
    reordered: set[nn.Module] = set()
    for name, module in list(model.named_modules()):
        if isinstance(module, SwinBlock | BeastBlock):
            bias = module.attention.bias
            reordered |= {module.shift, module.unshift}
            if isinstance(module.shift, Shift) and bias is not None:
                # Shifted windows have their slots in another order here.
                order = WindowLayout(module.shift.grid, topology, shifted=True).order
                bias.index = bias.index[order][:, order]
        elif isinstance(module, Attend):
            specialise(module, SharedAttend, link=sequence)
        elif isinstance(module, WindowMask):
            layout = WindowLayout(module.grid, topology, module.shifted)
            mask = WindowMask(module.grid, module.shifted, layout.regions(rank))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, mask)
        elif isinstance(module, Enter):
            layout = WindowLayout(module.grid, topology)
            specialise(module, RoutedEnter, route=enter(module.grid), chunk=layout.chunk)
        elif isinstance(module, Leave):
            shape = stripe(module.grid).shape(rank)
            specialise(module, RoutedLeave, route=enter(module.grid), stripe=shape)
        elif isinstance(module, Shift):
            assert module in reordered, f"{name}: whose bias is in the order of shifted windows?"
            # The order of a whole sample's slots, which is no longer asked for.
            del module.source, module.inverse
            routed = RoutedUnshift if isinstance(module, Unshift) else RoutedShift
            specialise(module, routed, route=shift(module.grid))


def _check_heads(name: str, heads: int, topology: Topology) -> None:
    if heads % topology.chunks:
        fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{name}: {heads} heads cannot be shared by sequence {topology.sequence} x tensor"
            f" {topology.tensor} = {topology.chunks} ranks, each of which takes whole heads;"
            f" mesh.sequence x mesh.tensor that would do: {fit}; or set model.heads to a multiple"
            f" of {topology.chunks}"
        )
