"""A plan for the memory of a step, its peak in bytes and its price in seconds.

A model is a chain of units. Per lead a plan cuts the chain into segments, and each is kept (what
autograd saves stays), recomputed from what enters it (its *boundary* stays), or recomputed from a
boundary that lies on the host meanwhile. Of one that is *simple* products of matrices, convolutions
and attention stay too, and its units are recomputed without these, one by one. The graph is cut at
leads: the backward pass of lead k is a call of its own, from the last lead down. After its segments
each lead has its loss, always kept.

Peak. R(k, s) is what all that comes before segment s of lead k keeps until its own backward pass.
Then

    forward of s     base + R(k, s) + H(s - 1) + forward peak of s
    backward of s    base + R(k, s) + H(s - 1) + backward peak of s

The peaks of s contain its own boundary, its output and the gradient of that. H(s - 1) is what an
offloaded boundary of the segment before takes on the device: it is there until the forward of s is
over, because the copy runs beside both, and it is fetched before the backward of s begins, so that
it is there when its own turn comes. *Lead-wise*, all leads but the last run without gradient first,
keeping one field each, and then from the last one down each runs (again) and is differentiated:

    first pass of lead k    lead-wise base + k x field + peak of a lead without gradient
    lead k itself           lead-wise base + k x field + the peaks above, R counting this lead alone

Price. A recomputed segment costs its FLOPs. A copy to the host has the time of its own segment's
forward; one back has the time of the backward of the segment after, or none when that is the loss.
What does not fit is waited for. Beside that every copy takes `SHARED` of its time from the kernels
it runs beside. A segment's forward is timed by the FLOPs of recomputing it, which are a little
less: recomputing stops at the last tensor that is saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal, Protocol

from graticule.memory.words import leads_in_words

Action = Literal["keep", "recompute", "offload", "simple"]
Kind = Literal["only", "first", "middle", "last"]
Phase = Literal["forward", "backward", "first pass", "update"]
ACTIONS: tuple[Action, ...] = ("keep", "recompute", "offload", "simple")
SHARED = 0.02
"""Of a copy's time, lost to the kernels beside it even where it hides: an assumption. It also
keeps a plan from moving bytes for nothing."""


@dataclass(frozen=True)
class Segment:
    """Units `first` to `last` - 1 of a lead. tiles: in how many row tiles it is recomputed."""

    first: int
    last: int
    action: Action
    tiles: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(
                f"a segment of units {self.first} to {self.last - 1} is empty; first must be at "
                "least 0 and less than last"
            )
        if self.action not in ACTIONS:
            raise ValueError(f"action={self.action!r} is none of {', '.join(ACTIONS)}")
        if self.tiles < 1 or (self.action in ("keep", "simple") and self.tiles > 1):
            raise ValueError(
                f"tiles={self.tiles} of a segment with action={self.action!r}: it must be at least "
                "1, and 1 where nothing is recomputed"
            )


LeadPlan = tuple[Segment, ...]


@dataclass(frozen=True)
class Plan:
    """leads: each covers the units 0 .. n without holes, the same n in all.

    lead_wise: leads run once without gradient and again when they are differentiated.
    """

    leads: tuple[LeadPlan, ...]
    lead_wise: bool = False

    def __post_init__(self) -> None:
        if not self.leads:
            raise ValueError("a plan needs at least one lead")
        for number, lead in enumerate(self.leads, 1):
            ends = [0, *(segment.last for segment in lead)]
            for end, segment in zip(ends, lead, strict=False):
                if segment.first != end:
                    raise ValueError(
                        f"lead {number}: a segment begins at unit {segment.first} and the one "
                        f"before ends at {end}; segments must follow each other from unit 0 on"
                    )
            if ends[-1] != self.num_units:
                raise ValueError(
                    f"lead {number} covers {ends[-1]} units and lead 1 covers {self.num_units}; "
                    "all leads must cover all units of the model"
                )
        if not self.num_units:
            raise ValueError("a plan needs at least one segment in each lead")

    @property
    def num_units(self) -> int:
        return self.leads[0][-1].last if self.leads[0] else 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Equal leads that follow each other are written once, with their number."""
        return {
            "lead_wise": self.lead_wise,
            "leads": [
                {
                    "times": len(list(equal)),
                    "segments": [[s.first, s.last, s.action, s.tiles] for s in lead],
                }
                for lead, equal in groupby(self.leads)
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Plan":
        """What `to_dict` wrote."""
        unknown = sorted(set(data) ^ {"lead_wise", "leads"})
        if unknown:
            raise ValueError(
                f"a plan has the keys lead_wise and leads; missing or unknown: {', '.join(unknown)}"
            )
        leads: list[LeadPlan] = []
        for entry in data["leads"]:
            leads += [tuple(Segment(*segment) for segment in entry["segments"])] * entry["times"]
        return Plan(tuple(leads), data["lead_wise"])

    def in_words(self, units: Sequence[str]) -> str:
        """One line for each run of equal leads. units: the names of the model's units."""
        if len(units) != self.num_units:
            raise ValueError(f"the plan is of {self.num_units} units, not of {len(units)}")
        lines = leads_in_words(self.leads, units)
        if self.lead_wise:
            again = "each lead once without gradient, but for the last; then again from the last"
            lines.insert(0, f"lead-wise: {again}")
        return "\n".join(lines)


@dataclass(frozen=True)
class SegmentCost:
    """resident: bytes kept until the backward pass (offloaded: what stays on the device).

    forward_peak, backward_peak: bytes above all that comes before, see above.
    recompute_flops: of one backward pass. host_bytes: what goes to the host, 0 if not offloaded.
    """

    resident: int
    forward_peak: int
    backward_peak: int
    recompute_flops: float = 0.0
    host_bytes: int = 0


class Costs(Protocol):
    """What plans are judged by: bytes of one rank, FLOPs of one sample on it."""

    @property
    def units(self) -> tuple[str, ...]: ...
    @property
    def leads(self) -> int: ...
    @property
    def base(self) -> int:
        """Held during the whole step."""

    @property
    def update_peak(self) -> int:
        """Of the optimizer's update, above base."""

    @property
    def field(self) -> int:
        """What each lead keeps between the two passes of a lead-wise step."""

    @property
    def lead_wise(self) -> "Costs":
        """Of the leads of a lead-wise step, above `lead_wise_base` and the fields."""

    @property
    def lead_wise_base(self) -> int:
        """What lead k of a lead-wise step starts with, less k fields."""

    @property
    def forward_flops(self) -> float:
        """Of one lead."""

    @property
    def backward_flops(self) -> float:
        """Of one lead, nothing recomputed."""

    def segment(self, kind: Kind, segment: Segment) -> SegmentCost: ...

    def loss(self, kind: Kind) -> SegmentCost:
        """The last pseudo-segment of each lead, always kept."""

    def recompute_lead_peak(self) -> int:
        """Of one lead without gradient, above base and the fields."""

    def tiles(self, first: int, last: int) -> tuple[int, ...]:
        """In how many row tiles units first .. last - 1 can be recomputed; (1,) mostly."""


class Rates(Protocol):
    """What a device achieves. A `cluster.Device` is one."""

    @property
    def flops_per_second(self) -> float: ...
    @property
    def to_host(self) -> float:
        """Bytes per second."""

    @property
    def to_device(self) -> float:
        """Bytes per second."""


@dataclass(frozen=True)
class Peak:
    """The most that is held in one phase of one segment.

    bytes: in all, base included. lead: 1, 2, ...; 0 in the update. segment: None where the phase is
    of the loss, of a whole lead without gradient ("first pass") or of the update.
    """

    bytes: int
    lead: int
    segment: Segment | None
    phase: Phase


@dataclass(frozen=True)
class Price:
    """What a plan costs beyond one forward and one backward pass of each lead.

    recomputed_flops: in one step. extra_compute: recomputed FLOPs less those of the plan that
    recomputes each unit by itself (t_seg = 1 with D1 and U1, the usual checkpointing), divided by
    all FLOPs of a step under that plan: 0 for that plan, negative for one that recomputes less.
    offload_sampling, offload_transformer: bytes that go to the host and come back, by the unit
    that they enter: one of the `blocks` or another. waiting_seconds: for copies that do not hide.
    seconds: all of it, which the search makes small.
    """

    recomputed_flops: float
    extra_compute: float
    offload_sampling: int
    offload_transformer: int
    waiting_seconds: float
    seconds: float


def kind_of(lead: int, leads: int) -> Kind:
    """Of lead 1, 2, ... of so many."""
    if leads == 1:
        return "only"
    return "first" if lead == 1 else "last" if lead == leads else "middle"


def lead_peaks(costs: Costs, kind: Kind, plan: LeadPlan) -> tuple[list[tuple[int, int]], int]:
    """(forward, backward) peak of each segment and the loss, above what comes before the lead;
    and what the lead keeps."""
    found = []
    resident = pending = 0
    segments = [costs.segment(kind, segment) for segment in plan]
    for cost in (*segments, costs.loss(kind)):
        level = resident + pending
        found.append((level + cost.forward_peak, level + cost.backward_peak))
        resident, pending = resident + cost.resident, cost.host_bytes
    return found, resident


def levels(costs: Costs, plan: Plan) -> Iterator[Peak]:
    """The peak of each phase of a step, in the order of time."""
    _check(costs, plan)
    of_lead = cache(partial(lead_peaks, costs.lead_wise if plan.lead_wise else costs))
    starts, resident = [], costs.base
    for number, lead in enumerate(plan.leads, 1):
        apart = costs.lead_wise_base + number * costs.field
        starts.append(apart if plan.lead_wise else resident)
        resident += of_lead(kind_of(number, costs.leads), lead)[1]

    def run(number: int, phase: Literal["forward", "backward"]) -> Iterator[Peak]:
        lead, start = plan.leads[number - 1], starts[number - 1]
        peaks = of_lead(kind_of(number, costs.leads), lead)[0]
        found = zip((*lead, None), peaks, strict=True)
        for segment, both in found if phase == "forward" else reversed(list(found)):
            yield Peak(start + both[phase == "backward"], number, segment, phase)

    for number, start in enumerate(starts, 1):
        if not plan.lead_wise:
            yield from run(number, "forward")
        elif number < costs.leads:
            yield Peak(start + costs.recompute_lead_peak(), number, None, "first pass")
    for number in range(costs.leads, 0, -1):
        if plan.lead_wise:
            yield from run(number, "forward")
        yield from run(number, "backward")
    yield Peak(costs.base + costs.update_peak, 0, None, "update")


def peak_of(costs: Costs, plan: Plan) -> Peak:
    """The fullest moment of a step, the first of several."""
    return max(levels(costs, plan), key=lambda peak: peak.bytes)


def plain_plan(costs: Costs, action: Action = "recompute") -> Plan:
    """Each unit recomputed by itself in all leads: what `extra_compute` is counted from."""
    lead = tuple(Segment(unit, unit + 1, action) for unit in range(len(costs.units)))
    return Plan((lead,) * costs.leads)


def price_of(costs: Costs, plan: Plan, device: Rates) -> Price:
    """What a plan costs on a device."""
    _check(costs, plan)
    usual = _recomputed(costs, plain_plan(costs))
    step = costs.leads * (costs.forward_flops + costs.backward_flops) + usual
    flops = _recomputed(costs, plan)
    sampling = transformer = 0
    waiting = copying = 0.0
    for number, lead in enumerate(plan.leads, 1):
        kind = kind_of(number, costs.leads)
        for segment, following in zip(lead, (*lead[1:], None), strict=True):
            moved = costs.segment(kind, segment).host_bytes
            if not moved:
                continue
            if costs.units[segment.first].partition(".")[0] == "blocks":
                transformer += moved
            else:
                sampling += moved
            out = windows(costs, kind, segment, device)[0]
            back = windows(costs, kind, following, device)[1] if following else 0.0
            waiting += waits(moved, out, device.to_host) + waits(moved, back, device.to_device)
            copying += moved / device.to_host + moved / device.to_device
    seconds = flops / device.flops_per_second + waiting + SHARED * copying
    extra = (flops - usual) / step
    return Price(flops, extra, sampling, transformer, waiting, seconds)


def windows(costs: Costs, kind: Kind, segment: Segment, device: Rates) -> tuple[float, float]:
    """Seconds of a segment's forward and of its backward, recomputing included."""
    plain = Segment(segment.first, segment.last, "recompute")
    forward = costs.segment(kind, plain).recompute_flops
    backward = forward * costs.backward_flops / costs.forward_flops
    again = costs.segment(kind, segment).recompute_flops
    return forward / device.flops_per_second, (backward + again) / device.flops_per_second


def waits(moved: int, window: float, rate: float) -> float:
    """Seconds of a copy of so many bytes that the window does not hide."""
    return max(0.0, moved / rate - window)


def _recomputed(costs: Costs, plan: Plan) -> float:
    again = (costs.leads - 1) * costs.forward_flops if plan.lead_wise else 0.0
    return again + sum(
        costs.segment(kind_of(number, costs.leads), segment).recompute_flops
        for number, lead in enumerate(plan.leads, 1)
        for segment in lead
    )


def _check(costs: Costs, plan: Plan) -> None:
    if len(plan.leads) != costs.leads or plan.num_units != len(costs.units):
        raise ValueError(
            f"the plan is of {len(plan.leads)} leads and {plan.num_units} units, the model's step "
            f"has {costs.leads} leads and {len(costs.units)} units; make a plan for this model"
        )
