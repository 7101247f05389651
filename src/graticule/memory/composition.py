"""A plan's step, put together from the parts of a few traces (`profile`)."""

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graticule.memory.gathers import (
    after_recomputing,
    asked_for,
    gathered_again,
    whole_already,
)
from graticule.memory.offload import BUFFERS
from graticule.memory.plan import Plan, Segment
from graticule.memory.recording import (
    BOUNDARIES,
    Part,
    Recording,
)
from graticule.memory.trace import ACTIVATIONS, GATHERED, UNDERWAY

if TYPE_CHECKING:
    from graticule.memory.profile import Profile

RECOMPUTED = "recomputed"


@dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes alive by owner through a step. marks: (what, lead, first row), as parts follow."""

    owners: tuple[str, ...]
    levels: np.ndarray
    marks: tuple[tuple[str, int, int], ...]

    @property
    def peak(self) -> int:
        """The row with the most bytes, the first of several."""
        return int(self.levels.sum(1).argmax())

    @property
    def peak_bytes(self) -> int:
        return int(self.levels[self.peak].sum())

    @property
    def at_peak(self) -> tuple[str, int]:
        """(what, lead) of the part that the peak is in."""
        what, lead, _ = max(
            (mark for mark in self.marks if mark[2] <= self.peak), key=lambda mark: mark[2]
        )
        return what, lead

    @property
    def owners_at_peak(self) -> dict[str, int]:
        """Bytes, most first."""
        held = dict(zip(self.owners, self.levels[self.peak].tolist(), strict=True))
        if held.get(RECOMPUTED, 0) < 0:  # what it freed last was kept by the loss, not by a unit
            held[ACTIVATIONS] += held.pop(RECOMPUTED)
        return {name: n for name, n in sorted(held.items(), key=lambda item: -item[1]) if n}


@dataclass
class _Held:
    """A state that `count` segments keep for themselves. let_go: by everyone else."""

    size: int
    count: int = 0
    let_go: bool = False


class Composition:
    """Builds a plan's timeline, part after part."""

    def __init__(self, profile: "Profile", plan: Plan | None, *, wise: bool = False) -> None:
        """plan: None: of single segments, from 0 on; wise: of a lead-wise step."""
        self.profile, self.plan = profile, plan
        wise = (wise if plan is None else plan.lead_wise) and profile.leads > 1
        recording = profile.lead_wise if wise else profile.keep
        assert recording is not None
        self.recording, self.wise = recording, wise
        self.columns = {name: number for number, name in enumerate(profile.owners)}
        self.level = recording.base.copy() if plan else np.zeros_like(recording.base)
        self.rows: list[np.ndarray] = [self.level[None]]
        self.num_rows = 1
        self.marks: list[tuple[str, int, int]] = []
        self.held: dict[tuple[int, int], _Held] = {}
        self.buffers = BUFFERS
        self.leaving: deque[tuple[int, int]] = deque()
        self.away: list[tuple[int, int]] = []
        self.ahead: tuple[int, int] | None = None
        self.copied: dict[tuple[int, int], int] = {}

    @property
    def highest(self) -> int:
        """Most bytes so far."""
        return int(max(rows.sum(1).max() for rows in self.rows))

    def timeline(self) -> Timeline:
        leads = range(1, self.profile.leads + 1)
        before = ("start", 0)
        if self.wise:
            for lead in leads[:-1]:
                before = self._gap(before, ("ahead", lead))
                for unit in range(len(self.profile.units)):
                    self._add(self._part("ahead", lead, unit), lead)
            for lead in reversed(leads):
                before = self._forward(before, lead)
                before = self._backward(before, lead)
        else:
            for lead in leads:
                before = self._forward(before, lead)
            for lead in reversed(leads):
                before = self._backward(before, lead)
        self._gap(before, ("end", 0))
        return Timeline(self.profile.owners, np.concatenate(self.rows), tuple(self.marks))

    # Leads.

    def _segments(self, lead: int) -> tuple[Segment, ...]:
        assert self.plan is not None
        return self.plan.leads[lead - 1]

    def _forward(self, before: tuple[str, int], lead: int) -> tuple[str, int]:
        before = self._gap(before, ("forward", lead))
        for segment in self._segments(lead):
            self.forward(lead, segment)
        self._let_input_go(lead)
        return before

    def forward(self, lead: int, segment: Segment) -> None:
        """Add a segment's forward pass."""
        units = range(segment.first, segment.last)
        if segment.action in ("keep", "simple"):
            for unit in units:
                if segment.action == "simple":
                    self._hold(lead, self._kept_simply(lead, unit))
                self._add(self._part("forward", lead, unit, segment=segment), lead)
                if segment.action == "simple":
                    self._let_go(lead, unit, unit)
            return
        if segment.action == "offload" or segment.tiles == 1:
            self._hold(lead, self._state(lead, segment.first))
        if segment.action == "offload":
            self._send(lead, segment.first)
        if segment.tiles > 1:
            self._add(self._part("forward", lead, segment.first, segment=segment), lead)
            self._let_go(lead, segment.first, segment.last - 1)
            return
        there, traced = self.profile.recompute, self._traced(lead, self.profile.recompute)
        for unit in units:
            self._add(there.units["forward", traced, unit], None)
            self._let_go(lead, segment.first, unit)
            if unit > segment.first:
                kept = there.states[traced, unit + 1] | there.states[traced, segment.first]
                entered = there.states[traced, unit]
                self._change(-sum(n for key, n in entered.items() if key not in kept))

    def _backward(self, before: tuple[str, int], lead: int) -> tuple[str, int]:
        before = self._gap(before, ("backward", lead))
        for segment in reversed(self._segments(lead)):
            self.backward(lead, segment)
        return before

    def backward(self, lead: int, segment: Segment) -> None:
        """Add a segment's backward pass."""
        units = range(segment.first, segment.last)
        if segment.action in ("keep", "simple"):
            for unit in reversed(units):
                self._add(self._part("backward", lead, unit, segment=segment), lead)
                if segment.action == "simple":
                    self._release(lead, self._kept_simply(lead, unit))
            return
        if segment.tiles > 1:
            if segment.action == "offload":
                self._bring_back(lead, segment.first)
            self._add(self._part("backward", lead, segment.first, segment=segment), lead)
            return
        # Recomputing begins where the first saved tensor is asked for.
        last = self._part("backward", lead, units[-1])
        self._add(last, lead, again=True, stop=last.turn + 1)
        copied = segment.action == "offload"
        if copied:
            self._bring_back(lead, segment.first)
            self.copied = {(lead, key): n for key, n in self._state(lead, segment.first).items()}
        self._recompute(lead, units)
        if copied:
            self.copied = {}
            self._used_up(lead, units)
        self._add(last, lead, again=True, start=last.turn)
        first = min(self._gathering(lead, units), default=segment.first)
        for unit in reversed(units[:-1]):
            part = self._part("backward", lead, unit)
            levels = part.levels.copy()
            after_recomputing(*self._weights(levels), first=unit == first)
            self._add(replace(part, levels=levels), lead, again=True)
        if not copied:
            self._release(lead, self._state(lead, segment.first))

    def _recompute(self, lead: int, units: range) -> None:
        newest = max(self._gathering(lead, units[:-1]), default=None)
        for unit in units:
            part = self._part("forward", lead, unit)
            levels = part.levels.copy()
            weights = self._weights(levels)
            if unit == units[-1]:
                whole_already(*weights)
            else:
                _, waiting = self._weights(self._part("backward", lead, unit).levels)
                gathered_again(*weights, asked=unit == newest and asked_for(waiting))
            last = replace(part, levels=levels)
            if unit < units[-1]:
                self._add(last, lead, again=True)
        began = self.level
        self._add(last, lead, again=True, stop=last.turn + 1)
        # Recomputing stops there; the state that would have left the segment did not come, or goes.
        entered = self._state(lead, units[0])
        end = began + self._levels(last, lead, again=True)[-1]
        for key, size in self._state(lead, units[-1] + 1).items():
            if key not in entered:
                end[self.columns[BOUNDARIES]] -= size
        self.level = end
        self._append(end[None])

    def _weights(self, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sharded ones: while they are whole, and underway."""
        return levels[:, self.columns[GATHERED]], levels[:, self.columns[UNDERWAY]]

    def _gathering(self, lead: int, units: range) -> list[int]:
        """Those with sharded weights: a unit asks for the next one's of these, not for those of
        its neighbour, which may have none."""
        return [
            unit for unit in units
            if self._weights(self._part("backward", lead, unit).levels)[0].any()
        ]  # fmt: skip

    # States that segments keep.

    def _state(self, lead: int, cut: int) -> dict[int, int]:
        return self.recording.states[self._traced(lead), cut]

    def _kept_simply(self, lead: int, unit: int) -> dict[int, int]:
        """What enters a simple unit, and what leaves it if that is a product, which it keeps."""
        assert self.profile.simple is not None
        there = self.profile.simple
        freed = there.units["backward", self._traced(lead, there), unit].freed
        after = self._state(lead, unit + 1)
        return self._state(lead, unit) | {key: n for key, n in after.items() if key in freed}

    def hold(self, lead: int, segment: Segment) -> None:
        """What its forward pass would have: for a backward pass alone."""
        if segment.action == "simple":
            for unit in range(segment.first, segment.last):
                self._hold(lead, self._kept_simply(lead, unit))
        elif segment.action != "keep" and segment.tiles == 1:
            self._hold(lead, self._state(lead, segment.first))

    def _hold(self, lead: int, state: dict[int, int]) -> None:
        for key, size in state.items():
            self.held.setdefault((lead, key), _Held(size)).count += 1

    def _release(self, lead: int, state: dict[int, int]) -> None:
        for key, size in state.items():
            held = self.held[lead, key]
            held.count -= 1
            if not held.count:
                del self.held[lead, key]
                if held.let_go:
                    self._change(-size)

    def _let_go(self, lead: int, cut: int, unit: int) -> None:
        """The runner has done so with what entered at a cut and does not leave a unit after it.
        (The model's input is the rollout's.)"""
        after = self._state(lead, unit + 1)
        for key in self._state(lead, cut) if cut else ():
            if key not in after and (lead, key) in self.held:
                self.held[lead, key].let_go = True

    def _let_input_go(self, lead: int) -> None:
        """The rollout has done so with the model's input. If the first unit keeps it for itself
        the traces do not show that."""
        if self._segments(lead)[0].action in ("keep", "simple"):
            return
        kept = self._part("backward", lead, 0).freed
        for key, size in self._state(lead, 0).items():
            if key in kept and (lead, key) in self.held:
                self.held[lead, key].let_go = True
            elif key in kept:
                self._change(-size)

    # Boundaries on the host, as `offload.Host` moves them.

    def _send(self, lead: int, cut: int) -> None:
        self.leaving.append((lead, cut))
        self.away.append((lead, cut))
        while len(self.leaving) > self.buffers:
            self._let_leave()

    def _let_leave(self) -> None:
        lead, cut = self.leaving.popleft()
        self._release(lead, self._state(lead, cut))

    def _bring_back(self, lead: int, cut: int) -> None:
        while self.leaving:
            self._let_leave()
        self.away.remove((lead, cut))
        if self.ahead != (lead, cut):
            self._fetch(lead, cut)
        self.ahead = self.away[-1] if self.away and self.away[-1][0] == lead else None
        if self.ahead and self.buffers:
            self._fetch(*self.ahead)

    def _fetch(self, lead: int, cut: int) -> None:
        self._change(sum(self._state(lead, cut).values()))

    def _used_up(self, lead: int, units: range) -> None:
        """After recomputing nobody refers to a copy from the host that no unit saved."""
        parts = [self._part("backward", lead, unit) for unit in units]
        for key, size in self._state(lead, units[0]).items():
            if not any(key in part.freed for part in parts):
                self._change(-size)

    # Parts.

    def _part(self, what: str, lead: int, unit: int, segment: Segment | None = None) -> Part:
        """segment: which unit runs as such a one; none: kept."""
        there: Recording | None = self.recording
        if segment and segment.tiles > 1:
            there = self.profile.tiled
            assert segment.tiles == self.profile.tiles, segment
        elif segment and segment.action == "simple":
            there = self.profile.simple
        assert there is not None, "the profile has no such segments"
        return there.units[what, self._traced(lead, there), unit]

    def _traced(self, lead: int, recording: Recording | None = None) -> int:
        """The recorded lead that stands for a lead of the rollout."""
        return (recording or self.recording).lead(lead, self.profile.leads)

    def _gap(self, before: tuple[str, int], after: tuple[str, int]) -> tuple[str, int]:
        """Add what the step does between two leads' units; the later of them."""
        (what, lead), (next_what, next_lead) = before, after
        here = what, self._traced(lead) if lead else 0
        there = next_what, self._traced(next_lead) if next_lead else 0
        part = self.recording.gap(here, there)
        self.marks.append((next_what, next_lead, self.num_rows - 1))
        self._add(part, lead or next_lead)
        return after

    def _add(
        self,
        part: Part,
        lead: int | None,
        *,
        again: bool = False,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        levels = self._levels(part, lead, again=again)[start:stop]
        levels = levels - levels[0]
        self._append(self.level + levels)
        self.level = self.level + levels[-1]

    def _levels(self, part: Part, lead: int | None, *, again: bool) -> np.ndarray:
        levels = part.levels.copy()
        for key, row in part.freed.items():
            place = lead or 0, key
            if place in self.copied:  # not yet: recomputing began with it
                levels[row:, self.columns[BOUNDARIES]] += self.copied[place]
            elif place in self.held:  # not yet: a segment keeps it
                self.held[place].let_go = True
                levels[row:, self.columns[BOUNDARIES]] += self.held[place].size
        if again:
            kept = self.columns[ACTIVATIONS]
            levels[:, self.columns[RECOMPUTED]] += levels[:, kept]
            levels[:, kept] = 0
        return levels

    def _change(self, size: int, owner: str = BOUNDARIES) -> None:
        if size:
            self.level = self.level.copy()
            self.level[self.columns[owner]] += size
            self._append(self.level[None])

    def _append(self, rows: np.ndarray) -> None:
        self.rows.append(rows)
        self.num_rows += len(rows)
