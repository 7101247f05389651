"""Made-up costs of small models, and every plan there is for them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from graticule.memory.plan import (
    Action,
    Kind,
    LeadPlan,
    Plan,
    Segment,
    SegmentCost,
)

SEARCHED: tuple[Action, ...] = ("keep", "recompute", "offload")
"""What plans are searched among; `simple` is asked for by name."""


@dataclass(frozen=True)
class Slow:
    """One FLOP a second, so that seconds are FLOPs, and links of their own speed."""

    flops_per_second: float = 1.0
    to_host: float = 4.0
    to_device: float = 3.0


@dataclass(frozen=True, eq=False)
class TableCosts:
    """Any numbers whatever for each segment of each kind of lead."""

    units: tuple[str, ...]
    leads: int
    table: dict[tuple[Kind, Segment], SegmentCost]
    losses: dict[Kind, SegmentCost]
    base: int = 7
    update_peak: int = 5
    field: int = 2
    forward_flops: float = 10.0
    backward_flops: float = 20.0
    lead_peak: int = 6
    lead_wise_base: int = 7
    tiled: tuple[int, ...] = (1,)

    @property
    def lead_wise(self) -> "TableCosts":
        return self

    def segment(self, kind: Kind, segment: Segment) -> SegmentCost:
        return self.table[kind, segment]

    def loss(self, kind: Kind) -> SegmentCost:
        return self.losses[kind]

    def recompute_lead_peak(self) -> int:
        return self.lead_peak

    def tiles(self, first: int, last: int) -> tuple[int, ...]:
        return self.tiled


def random_costs(
    seed: int, *, units: int, leads: int, scale: int = 20, tiled: tuple[int, ...] = (1,)
) -> TableCosts:
    """Sizes up to about `scale` that obey no more than the signs."""
    rng = random.Random(seed)

    def size(most: float = 1.0) -> int:
        return rng.randint(0, int(scale * most))

    table: dict[tuple[Kind, Segment], SegmentCost] = {}
    kinds: tuple[Kind, ...] = ("only", "first", "middle", "last")
    for kind, first in product(kinds, range(units)):
        for last in range(first + 1, units + 1):
            length = last - first
            for segment in segments(first, last, tiled):
                again = 0.0 if segment.action == "keep" else length * rng.uniform(1, 3)
                table[kind, segment] = SegmentCost(
                    resident=size(length) if segment.action == "keep" else size(0.4),
                    forward_peak=size(2),
                    backward_peak=size(2) + length * scale // 4,
                    recompute_flops=again,
                    host_bytes=size(0.5) if segment.action == "offload" else 0,
                )
    losses = {kind: SegmentCost(size(0.2), size(), size()) for kind in kinds}
    names = tuple(f"unit.{number}" for number in range(units))
    return TableCosts(
        names, leads, table, losses, base=size(), update_peak=size(), field=size(0.3),
        forward_flops=units * 2.0, backward_flops=units * 4.0, lead_peak=size(2), tiled=tiled,
        lead_wise_base=size(),
    )  # fmt: skip


def segments(first: int, last: int, tiled: tuple[int, ...] = (1,)) -> Iterator[Segment]:
    for action in SEARCHED:
        for tiles in (1,) if action == "keep" else tiled:
            yield Segment(first, last, action, tiles)


def lead_plans(units: int, *, offload: bool, tiled: tuple[int, ...] = (1,)) -> list[LeadPlan]:
    """All of them: every partition, every action."""

    def after(first: int) -> Iterator[LeadPlan]:
        if first == units:
            yield ()
        for last in range(first + 1, units + 1):
            for segment in segments(first, last, tiled):
                if offload or segment.action != "offload":
                    for rest in after(last):
                        yield (segment, *rest)

    return list(after(0))


def all_plans(costs: TableCosts, *, offload: bool, lead_wise: bool) -> Iterator[Plan]:
    each = lead_plans(len(costs.units), offload=offload, tiled=costs.tiled)
    for leads in product(each, repeat=costs.leads):
        yield Plan(leads)
        if lead_wise:
            yield Plan(leads, lead_wise=True)


@dataclass(frozen=True, eq=False)
class ChainCosts:
    """A model as it might be: units with an input, what they save, an output and FLOPs.

    sizes: of each unit (input, saved, output, FLOPs). noise: 0, or how far each unit's numbers are
    from a round one, which nothing has in common with another's.
    """

    units: tuple[str, ...]
    sizes: tuple[tuple[int, int, int, float], ...]
    leads: int
    base: int = 2**30
    update_peak: int = 2**28

    @property
    def field(self) -> int:
        return self.sizes[0][0]

    @property
    def lead_wise(self) -> "ChainCosts":
        return self

    @property
    def lead_wise_base(self) -> int:
        return self.base

    @property
    def forward_flops(self) -> float:
        return sum(flops for *_, flops in self.sizes)

    @property
    def backward_flops(self) -> float:
        return 2 * self.forward_flops

    def segment(self, kind: Kind, segment: Segment) -> SegmentCost:
        inside = self.sizes[segment.first : segment.last]
        boundary, out = inside[0][0], inside[-1][2]
        saved = sum(saved for _, saved, _, _ in inside)
        most = max(saved for _, saved, _, _ in inside)
        gradients = 2**27 * (kind not in ("only", "last"))
        # Recomputing stops before the last fifth of the last unit.
        flops = sum(flops for *_, flops in inside) - inside[-1][3] / 5
        forward, backward = boundary + most + out, boundary + saved + most // 2 + out + gradients
        if segment.action == "keep":
            return SegmentCost(saved, saved + out, backward)
        kept = boundary if segment.action == "recompute" else 0
        return SegmentCost(kept, forward, backward, flops, boundary - kept)

    def loss(self, kind: Kind) -> SegmentCost:
        return SegmentCost(self.field // 2, 2 * self.field, 2 * self.field)

    def recompute_lead_peak(self) -> int:
        return max(size + saved for size, saved, _, _ in self.sizes)

    def tiles(self, first: int, last: int) -> tuple[int, ...]:
        return (1,)


def swin_costs(*, depth: int, leads: int, ragged: int | None = None) -> ChainCosts:
    """About the small model of TERRA with patches of 2 x 2 on one of four ranks.

    ragged: the seed of sizes that have nothing in common, 10 % to either side.
    """
    field, token = 466_245_543, 320_863_584
    patch = 4 * token
    flops = 1.3e12
    rows = [
        ("embed", field, patch, token, flops),
        ("down.0", token, 3 * token, token, 1.9 * flops),
        ("down.1", 2 * token, 3 * token, token, 1.9 * flops),
        *((f"blocks.{i}", token, 16 * token, token, 2.6 * flops) for i in range(depth)),
        ("up", token, patch, patch, 0.8 * flops),
        ("up.0", patch, 3 * patch, patch, 7.5 * flops),
        ("up.1", 2 * patch, 3 * patch, patch, 7.5 * flops),
        ("recover", patch, patch, field, flops),
    ]
    rng = random.Random(ragged)
    near = (lambda: 1.0) if ragged is None else (lambda: rng.uniform(0.9, 1.1))
    sizes = tuple(
        (int(a * near()), int(b * near()), int(c * near()), d * near()) for _, a, b, c, d in rows
    )
    return ChainCosts(tuple(name for name, *_ in rows), sizes, leads)
