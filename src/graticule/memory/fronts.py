"""All plans of one lead that can be best for some budget: its front.

A lead's plan is known to the rest of a step by three numbers: the bytes it keeps (r), its peak
above what came before the lead (p), and its price in seconds (c). One that another does not exceed
in any of the three can be forgotten: whatever comes before or after, the other fits where it fits.
What stays is found from left to right. With E(i, h) the set of (r, p, c) of plans that end before
unit i with h bytes of an offloaded boundary still on the device,

    (r, p, c) in E(j, h) and a segment of units j .. i - 1 give in E(i, h')
    (r + resident, max(p, r + h + its higher peak), c + its price)

where h' is the boundary of the segment, if that is offloaded. The loss comes last.

Where sizes have nothing in common the sets can explode. Then, and only then, r and p are rounded up
at every segment to so many significant bits that they do not, and h to `_PENDING` bits. What fits
by such numbers fits in truth, and they depend on the costs alone, never on a budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from graticule.memory.plan import (
    SHARED,
    Costs,
    Kind,
    LeadPlan,
    Rates,
    Segment,
    SegmentCost,
    waits,
    windows,
)

EXACT = 53
"""Significant bits with which nothing is rounded: bytes are below 2^53."""
_BITS = (EXACT, 8, 6, 5)
_PENDING = 3
_WORK = 30_000_000
"""Comparisons that the front of one lead may take: about 0.3 s."""


@dataclass(frozen=True, eq=False)
class Front:
    """resident, peak (int64, bytes) and seconds of each plan, by resident, the smallest first."""

    resident: np.ndarray
    peak: np.ndarray
    seconds: np.ndarray
    _groups: "list[_Group]" = field(repr=False)

    def plan(self, number: int) -> LeadPlan:
        """The plan of a place in the front."""
        segments: list[Segment] = []
        at = self._groups[-1]
        while at.steps:
            step, number = at.steps[at.step[number]], at.parent[number]
            if step.segment is not None:
                segments.append(step.segment)
            at = self._groups[step.group]
        return tuple(reversed(segments))


@dataclass(frozen=True)
class _Step:
    """From a group by one segment; None: the loss."""

    group: int
    segment: Segment | None


@dataclass(frozen=True, eq=False)
class _Group:
    """Plans that end before one unit with the same bytes of a boundary on the device."""

    pending: int
    values: tuple[np.ndarray, np.ndarray, np.ndarray]
    steps: list[_Step] = field(default_factory=list)
    step: np.ndarray = field(default_factory=lambda: np.zeros(1, int))
    parent: np.ndarray = field(default_factory=lambda: np.zeros(1, int))


@dataclass(frozen=True)
class _Option:
    """A segment as the search sees it. back: seconds of its backward."""

    segment: Segment | None
    cost: SegmentCost
    seconds: float
    back: float


class _Exploded(Exception):
    pass


def fronts_of(
    costs: Costs, kinds: Sequence[Kind], device: Rates, *, offload: bool
) -> tuple[dict[Kind, Front], bool]:
    """The front of each kind of lead, and whether they are exact."""
    options = {kind: _options(costs, kind, device, offload) for kind in kinds}
    losses = {kind: _Option(None, costs.loss(kind), 0.0, 0.0) for kind in kinds}
    for bits in _BITS:
        try:
            fronts = {
                kind: _front(options[kind], losses[kind], device, bits, bits != _BITS[-1])
                for kind in kinds
            }
        except _Exploded:
            continue
        return fronts, bits == EXACT
    raise AssertionError("the last number of bits has no limit")


def rounded_up(values: np.ndarray, bits: int) -> np.ndarray:
    """To so many significant bits. values: int64, not negative, below 2^53."""
    if bits == EXACT:
        return values
    exponents = np.frexp(values.astype(float))[1]
    quantum = np.int64(1) << np.maximum(exponents - bits, 0).astype(np.int64)
    return (values + quantum - 1) // quantum * quantum


def _options(costs: Costs, kind: Kind, device: Rates, offload: bool) -> list[list[_Option]]:
    """All segments by the unit before which they end."""
    num_units = len(costs.units)
    found: list[list[_Option]] = [[] for _ in range(num_units + 1)]
    for first in range(num_units):
        for last in range(first + 1, num_units + 1):
            segments = [Segment(first, last, "keep")]
            for tiles in costs.tiles(first, last):
                segments.append(Segment(first, last, "recompute", tiles))
                if offload:
                    segments.append(Segment(first, last, "offload", tiles))
            for segment in segments:
                cost = costs.segment(kind, segment)
                forward, backward = windows(costs, kind, segment, device)
                seconds = cost.recompute_flops / device.flops_per_second
                if cost.host_bytes:
                    seconds += waits(cost.host_bytes, forward, device.to_host)
                    seconds += SHARED * cost.host_bytes / device.to_host
                    seconds += SHARED * cost.host_bytes / device.to_device
                found[last].append(_Option(segment, cost, seconds, backward))
    return found


def _front(
    options: list[list[_Option]], loss: _Option, device: Rates, bits: int, limited: bool
) -> Front:
    zero = np.zeros(1, np.int64)
    groups = [_Group(0, (zero, zero, np.zeros(1)))]
    ending: list[list[int]] = [[0], *([] for _ in options[1:]), []]
    work = 0
    for last, segments in enumerate([*options, [loss]]):
        chunks: dict[int, list[tuple[_Step, tuple[np.ndarray, ...]]]] = {}
        for option in segments:
            start = option.segment.first if option.segment else last - 1
            for number in ending[start]:
                group = groups[number]
                moved = _moved(group, option, device, bits)
                pending = option.cost.host_bytes
                if bits != EXACT:
                    pending = int(rounded_up(np.array(pending), _PENDING))
                chunks.setdefault(pending, []).append((_Step(number, option.segment), moved))
        for pending, parts in chunks.items():
            step = np.repeat(np.arange(len(parts)), [len(values[0]) for _, values in parts])
            parent = np.concatenate([np.arange(len(values[0])) for _, values in parts])
            resident, peak, seconds = (np.concatenate(column) for column in zip(
                *(values for _, values in parts), strict=True))  # fmt: skip
            kept, spent = _undominated(resident, peak, seconds, _WORK - work if limited else None)
            work += spent
            groups.append(
                _Group(
                    pending,
                    (resident[kept], peak[kept], seconds[kept]),
                    [step for step, _ in parts],
                    step[kept],
                    parent[kept],
                )
            )
            ending[last].append(len(groups) - 1)
    return Front(*groups[-1].values, groups)


def _moved(
    group: _Group, option: _Option, device: Rates, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plans of a group with one segment more."""
    resident, peak, seconds = group.values
    cost = option.cost
    level = resident + group.pending + max(cost.forward_peak, cost.backward_peak)
    # A boundary is fetched in the backward of the segment after.
    waiting = waits(group.pending, option.back, device.to_device) if group.pending else 0.0
    return (
        rounded_up(resident + cost.resident, bits),
        np.maximum(peak, rounded_up(level, bits)),
        seconds + option.seconds + waiting,
    )


def _undominated(
    resident: np.ndarray, peak: np.ndarray, seconds: np.ndarray, limit: int | None
) -> tuple[np.ndarray, int]:
    """Places of the triples that no other one is at or below of in all three; the work it took."""
    order = np.lexsort((seconds, peak, resident))
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(resident[order]) != 0) | (np.diff(peak[order]) != 0)
    order = order[new]
    resident, peak, seconds = resident[order], peak[order], seconds[order]
    rows, row = np.unique(resident, return_inverse=True)
    columns, column = np.unique(peak, return_inverse=True)
    table, pairs = len(rows) * len(columns), len(order) ** 2
    work = min(table, pairs)
    if limit is not None and work > limit:
        raise _Exploded
    if pairs <= table:
        below = (resident[:, None] <= resident) & (peak[:, None] <= peak)
        best = (below & (seconds[:, None] <= seconds)).sum(0) == 1
    else:
        # The cheapest at or below in both, by rank; one row and column of nothing in front.
        cheapest = np.full((len(rows) + 1, len(columns) + 1), np.inf)
        cheapest[row + 1, column + 1] = seconds
        np.minimum.accumulate(cheapest, axis=0, out=cheapest)
        np.minimum.accumulate(cheapest, axis=1, out=cheapest)
        best = seconds < np.minimum(cheapest[row, column + 1], cheapest[row + 1, column])
    return order[best], work
