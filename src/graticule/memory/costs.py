"""What a profile says of each segment, for the search among plans: bytes and FLOPs.

All levels are above `base`. R(k, s) counts what the segments before s keep, and never the state
that is on its way to s. The state at cut c has S(c) bytes; what a unit keeps besides is what its
part of the keeping trace leaves, less the state that leaves it, more the one that entered.
A step under a plan reaches exactly the peak of `Profile.timeline`; a test holds that.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from graticule.memory.plan import Kind, Segment, SegmentCost
from graticule.memory.profile import Composition, Profile
from graticule.memory.recording import Recording


@dataclass(frozen=True, eq=False)
class ProfileCosts:
    """`Costs` of a profile. apart: of the leads of a lead-wise step, each by itself."""

    profile: Profile
    apart: bool = False
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
    def _recording(self) -> Recording:
        wise = self.profile.lead_wise
        return wise if self.apart and wise else self.profile.keep

    @cached_property
    def lead_wise(self) -> "ProfileCosts":
        return ProfileCosts(self.profile, apart=True)

    @cached_property
    def base(self) -> int:
        first = self.profile.keep.units["forward", 1, 0]
        return first.began - sum(self.profile.keep.states[1, 0].values())

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
        recording, lead, num = self._recording, self._lead(kind), len(self.units)
        after = next(p for key, p in recording.gaps.items() if key[:2] == ("forward", lead))
        before = next(p for key, p in recording.gaps.items() if key[2:] == ("backward", lead))
        # Above what the lead keeps: where it is, the state that left its last unit is not.
        level = self._start(lead) + sum(self._kept(lead, unit) for unit in range(num))
        resident = 0
        if lead < recording.leads and not self.apart:
            resident = self._start(lead + 1) - level
        level -= self._beside(lead)
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
        """What lead k starts with, lead-wise, less k fields: that of the lead with the least."""
        return self._ahead[0]

    def _beside(self, lead: int) -> int:
        """What a lead starts with besides the base and its fields, lead-wise."""
        if not self.apart or self.profile.lead_wise is None:
            return 0
        return self._start(lead) - lead * self.field - self.lead_wise_base

    @cached_property
    def _ahead(self) -> tuple[int, int, int]:
        """(base, field, peak without gradient) of a lead-wise step."""
        wise = self.profile.lead_wise
        if wise is None:
            return self.base, 0, 0
        num, leads = len(self.units), range(1, wise.leads + 1)
        # What the network said, and whatever else stays of a lead.
        field = sum(wise.states[1, num].values())
        if wise.leads > 2:
            first, second = (wise.units["ahead", lead, 0].began for lead in (1, 2))
            field = second - first
        starts = [self.lead_wise._start(lead) - lead * field for lead in leads]
        base = min(starts)
        peak = 0
        for lead in leads[:-1]:
            parts = [wise.units["ahead", lead, unit] for unit in range(num)]
            parts += [part for key, part in wise.gaps.items() if key[:2] == ("ahead", lead)]
            highest = max(part.began + part.highest for part in parts)
            peak = max(peak, highest - base - lead * field)
        return base, field, peak

    # Levels of the trace that keeps everything.

    def _lead(self, kind: Kind) -> int:
        """The recorded lead of a kind."""
        return {"only": 1, "first": 1, "middle": 2, "last": self._recording.leads}[kind]

    def _rollout_lead(self, lead: int) -> int:
        """Of the leads for which a recorded one stands, the first."""
        return {1: 1, self._recording.leads: self.profile.leads}.get(lead, 2)

    def _state(self, lead: int, cut: int) -> int:
        return sum(self._recording.states[lead, cut].values())

    def _start(self, lead: int) -> int:
        """Bytes before a lead, less the state that enters it."""
        return self._recording.units["forward", lead, 0].began - self._state(lead, 0)

    def _kept(self, lead: int, unit: int, simple: Recording | None = None) -> int:
        """What a unit keeps; of the model's input, what the rest of the step does not let go."""
        part = self._recording.units["forward", lead, unit]
        if simple:
            there = simple.lead(self._rollout_lead(lead), self.profile.leads)
            part = simple.units["forward", there, unit]
        kept = part.ended - self._state(lead, unit + 1) - part.began + self._state(lead, unit)
        return kept - (self._let_go(lead) if unit == 0 else 0)

    def _let_go(self, lead: int) -> int:
        """Of the model's input: bytes that go after the forward pass."""
        gaps = self._recording.gaps
        after = next(part for key, part in gaps.items() if key[:2] == ("forward", lead))
        state = self._recording.states[lead, 0]
        return sum(size for key, size in state.items() if key in after.freed)

    def _seam(self, lead: int, cut: int) -> int:
        """Bytes when the gradient of the state at a cut is there, less base, what leads before
        keep, and what units before the cut keep: gradients."""
        recording, num = self._recording, len(self.units)
        began = recording.units["backward", lead, cut - 1].began
        return began - self._start(lead) - sum(self._kept(lead, u) for u in range(min(cut, num)))

    def _segment(self, lead: int, segment: Segment) -> SegmentCost:
        keep = self._recording
        first, last, action = segment.first, segment.last, segment.action
        kind_lead, above = self._rollout_lead(lead), self._beside(lead)
        if action == "offload":  # the copies are the plan's
            segment = replace(segment, action="recompute")
        state, after = keep.states[lead, first], keep.states[lead, last]
        entered = self._state(lead, first)

        composition = Composition(self.profile, None, wise=self.apart)
        composition.forward(kind_lead, segment)
        # The model's input is alive in the whole forward pass.
        beside = self._let_go(lead) if first else 0
        forward_peak = above + entered + beside + composition.highest
        composition = Composition(self.profile, None, wise=self.apart)
        kept = action in ("keep", "simple")
        composition.hold(kind_lead, segment)
        composition.backward(kind_lead, segment)
        if kept:
            simple = self.profile.simple if action == "simple" else None
            resident = sum(self._kept(lead, unit, simple) for unit in range(first, last))
            # The unit before may keep for itself what both of them are given.
            before = keep.states[lead, first - 1] if first else {}
            resident += sum(size for key, size in state.items() if key in before)
            backward_peak = above + resident + self._seam(lead, last) + composition.highest
            return SegmentCost(resident, forward_peak, backward_peak)
        backward_peak = above + entered + self._seam(lead, last) + composition.highest
        boundary = sum(size for key, size in state.items() if key not in after)
        # What someone else holds does not go when it is offloaded.
        movable = self._let_go(lead) if first == 0 else boundary
        away = movable if action == "offload" else 0
        flops = sum(self.profile.flops[first:last]) - self.profile.tail_flops[last - 1]
        if segment.tiles > 1:
            flops = self.profile.tiled_flops
        return SegmentCost(boundary - away, forward_peak, backward_peak, flops, away)
