"""What a profile says of each segment, for the search among plans: bytes and FLOPs.

All levels are above `base`. R(k, s) counts what the segments before s keep, and never the state
that is on its way to s. The state at cut c has S(c) bytes; what a unit keeps besides is what its
part of the keeping trace leaves, less the state that leaves it, more the one that entered.
A step under a plan reaches exactly the peak of `Profile.timeline`; a test holds that.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from graticule.memory.plan import Kind, Segment, SegmentCost, kind_of
from graticule.memory.profile import Composition, Profile
from graticule.memory.recording import Recording


@dataclass(frozen=True, eq=False)
class ProfileCosts:
    """`Costs` of a profile."""

    profile: Profile
    _known: dict[tuple[int, Segment], SegmentCost] = field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        return self.profile.units

    @property
    def leads(self) -> int:
        return self.profile.leads

    @property
    def forward_flops(self) -> float:
        return float(sum(self.profile.flops))

    @property
    def backward_flops(self) -> float:
        return 2.0 * self.forward_flops

    @cached_property
    def base(self) -> int:
        first = self.profile.keep.units["forward", 1, 0]
        return first.began - self._state(1, 0)

    @cached_property
    def update_peak(self) -> int:
        recording = self.profile.keep
        last = next(part for key, part in recording.gaps.items() if key[2] == "end")
        return last.began + last.highest - self.base

    def tiles(self, first: int, last: int) -> tuple[int, ...]:
        return (1, self.profile.tiles) if self.profile.spans.get(first) == last else (1,)

    def segment(self, kind: Kind, segment: Segment) -> SegmentCost:
        asked = self._lead(kind), segment
        if asked not in self._known:
            self._known[asked] = self._segment(*asked)
        return self._known[asked]

    def loss(self, kind: Kind) -> SegmentCost:
        recording, lead, num = self.profile.keep, self._lead(kind), len(self.units)
        after = next(p for key, p in recording.gaps.items() if key[:2] == ("forward", lead))
        before = next(p for key, p in recording.gaps.items() if key[2:] == ("backward", lead))
        # Above what the lead keeps: where it is, the state that left its last unit is not.
        level = self._start(lead) + sum(self._kept(lead, unit) for unit in range(num))
        resident = 0
        if lead < recording.leads:
            resident = self._start(lead + 1) - level
        return SegmentCost(
            resident=resident,
            forward_peak=after.began + after.highest - level,
            backward_peak=before.began + before.highest - level,
        )

    # Lead-wise.

    @cached_property
    def field(self) -> int:
        return self._ahead[1]

    def recompute_lead_peak(self) -> int:
        return self._ahead[2]

    @property
    def lead_wise_base(self) -> int:
        """What lead k starts with, lead-wise, less k fields: base where there is no such step."""
        return self._ahead[0]

    @cached_property
    def _ahead(self) -> tuple[int, int, int]:
        """(base, field, peak without gradient) of a lead-wise step."""
        wise = self.profile.lead_wise
        if wise is None:
            return self.base, 0, 0
        num = len(self.units)
        begins = [wise.units["ahead", lead, 0].began for lead in range(1, wise.leads)]
        begins.append(wise.units["forward", wise.leads, 0].began)
        field = begins[-1] - begins[-2]
        # A lead's own graph as in a step of all leads at once; by then there are the gradients.
        starts = []
        for lead in range(1, wise.leads + 1):
            here = wise.units["backward", lead, num - 1].began
            alike = self._lead(kind_of(lead, wise.leads))
            kept = sum(self._kept(alike, unit) for unit in range(num))
            starts.append(here - self._seam(alike, num) - kept - lead * field)
        base = max(starts)
        peak = 0
        for lead in range(1, wise.leads):
            parts = [wise.units["ahead", lead, unit] for unit in range(num)]
            parts += [part for key, part in wise.gaps.items() if key[:2] == ("ahead", lead)]
            highest = max(part.began + part.highest for part in parts)
            peak = max(peak, highest - base - lead * field)
        return base, field, peak

    # Levels of the keeping trace.

    def _lead(self, kind: Kind) -> int:
        """The recorded lead of a kind."""
        return {"only": 1, "first": 1, "middle": 2, "last": self.profile.keep.leads}[kind]

    def _rollout_lead(self, lead: int) -> int:
        """Of the leads for which a recorded one stands, the first."""
        return {1: 1, self.profile.keep.leads: self.profile.leads}.get(lead, 2)

    def _state(self, lead: int, cut: int) -> int:
        return sum(self.profile.keep.states[lead, cut].values())

    def _start(self, lead: int) -> int:
        """Bytes before a lead, less the state that enters it."""
        return self.profile.keep.units["forward", lead, 0].began - self._state(lead, 0)

    def _kept(self, lead: int, unit: int, simple: Recording | None = None) -> int:
        """What a unit keeps; of the model's input, what the rest of the step does not let go."""
        part = self.profile.keep.units["forward", lead, unit]
        if simple:
            there = simple.lead(self._rollout_lead(lead), self.profile.leads)
            part = simple.units["forward", there, unit]
        kept = part.ended - self._state(lead, unit + 1) - part.began + self._state(lead, unit)
        return kept - (self._let_go(lead) if unit == 0 else 0)

    def _let_go(self, lead: int) -> int:
        """Of the model's input: bytes that go after the forward pass."""
        gaps = self.profile.keep.gaps
        after = next(part for key, part in gaps.items() if key[:2] == ("forward", lead))
        state = self.profile.keep.states[lead, 0]
        return sum(size for key, size in state.items() if key in after.freed)

    def _seam(self, lead: int, cut: int) -> int:
        """Bytes when the gradient of the state at a cut is there, less base, what leads before
        keep, and what units before the cut keep: gradients."""
        recording, num = self.profile.keep, len(self.units)
        began = recording.units["backward", lead, cut - 1].began
        return began - self._start(lead) - sum(self._kept(lead, u) for u in range(min(cut, num)))

    def _segment(self, lead: int, segment: Segment) -> SegmentCost:
        keep = self.profile.keep
        first, last, action = segment.first, segment.last, segment.action
        kind_lead = self._rollout_lead(lead)
        if action == "offload":  # the copies are the plan's
            segment = replace(segment, action="recompute")
        state, after = keep.states[lead, first], keep.states[lead, last]
        entered = self._state(lead, first)

        composition = Composition(self.profile, None)
        composition.forward(kind_lead, segment)
        # The model's input is alive in the whole forward pass.
        beside = self._let_go(lead) if first else 0
        forward_peak = entered + beside + composition.highest
        composition = Composition(self.profile, None)
        kept = action in ("keep", "simple")
        composition.hold(kind_lead, segment)
        composition.backward(kind_lead, segment)
        if kept:
            simple = self.profile.simple if action == "simple" else None
            resident = sum(self._kept(lead, unit, simple) for unit in range(first, last))
            # The unit before may keep for itself what both of them are given.
            before = keep.states[lead, first - 1] if first else {}
            resident += sum(size for key, size in state.items() if key in before)
            backward_peak = resident + self._seam(lead, last) + composition.highest
            return SegmentCost(resident, forward_peak, backward_peak)
        backward_peak = entered + self._seam(lead, last) + composition.highest
        boundary = sum(size for key, size in state.items() if key not in after)
        # What someone else holds does not go when it is offloaded.
        movable = self._let_go(lead) if first == 0 else boundary
        away = movable if action == "offload" else 0
        flops = sum(self.profile.flops[first:last]) - self.profile.tail_flops[last - 1]
        if segment.tiles > 1:
            flops = self.profile.tiled_flops
        return SegmentCost(boundary - away, forward_peak, backward_peak, flops, away)
