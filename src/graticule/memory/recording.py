"""A step's trace, cut where one unit ends and the next begins.

Units are told apart by marks: the runner leaves one before each unit, and a node of the graph that
does nothing else leaves one when the backward pass comes by.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from graticule.memory.apply import Memory, simple_checkpoint
from graticule.memory.plan import Action
from graticule.memory.trace import MemoryTrace, mark, own, trace_memory
from graticule.model.units import Runner, State, Unit

BOUNDARIES = "boundaries"
"""What goes from unit to unit."""


class _Seam(torch.autograd.Function):
    """Nothing to the numbers; the backward pass leaves a mark when it comes by."""

    @staticmethod
    def forward(ctx: Any, passing: Callable[[], None], *state: Tensor) -> tuple[Tensor, ...]:
        ctx.passing = passing
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.passing()
        return (None, *grads)


class FlopTally(TorchDispatchMode):
    """FLOPs so far, by PyTorch's own formulas (`torch.utils.flop_counter`, whose counter would keep
    tensors alive)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled: a wrapper less around each operation

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


class _BrokenOff(Exception):
    pass


@dataclass(eq=False)
class Marks(Memory):
    """Does the same with each unit by itself, and leaves marks between units.

    action: keep, recompute or simple.
    stop: the lead after whose forward pass the step is broken off; 0: it is not.
    tiles: in how many row tiles units run that can; with 1 as they are.
    states: by (lead, cut): bytes of the storages of the state there, by their number in the trace.
    Of the newest run of a lead. names: of the units. spans: of those that can run in row tiles, by
    the first, where the units after them begin. flops: so far, at a mark and at the last tensor
    that a unit saves.
    """

    action: Action = "keep"
    tiles: int = 1
    stop: int = 0
    states: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    spans: dict[int, int] = field(default_factory=dict)
    tally: FlopTally = field(default_factory=FlopTally)
    flops: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def runner(self, lead: int) -> tuple[Runner, ...]:
        return (lambda units, state: self._run(lead, units, state),)

    def _run(self, lead: int, units: Sequence[Unit], state: State) -> State:
        self.names = tuple(unit.name for unit in units)
        self.spans = {at: at + unit.tiled.num_units for at, unit in enumerate(units) if unit.tiled}
        graph = torch.is_grad_enabled()
        name = "unit" if graph else "ahead"
        graph = graph and self.action != "recompute"
        number = 0
        while number < len(units):
            self._note(lead, number, state)
            self._mark(name, lead, number)
            if graph and any(tensor.requires_grad for tensor in state):
                state = _Seam.apply(partial(self._mark, "seam", lead, number), *state)
            run, further = units[number].run, 1
            if self.tiles > 1 and (tiled := units[number].tiled):
                run, further = partial(tiled.run, self.tiles), tiled.num_units
            state = self._unit(lead, number, run, state)
            number += further
        if graph:
            state = _Seam.apply(partial(self._mark, "seam", lead, len(units)), *state)
        self._note(lead, len(units), state)
        self._mark(name, lead, len(units))
        if lead == self.stop:
            raise _BrokenOff
        return state

    def _mark(self, what: str, lead: int, number: int) -> None:
        mark((what, lead, number))
        self.flops[what, lead, number] = self.tally.total

    def forward_flops(self, unit: int) -> tuple[float, float]:
        """Of a unit of lead 1, up to the last tensor it saves and in all."""
        began, ended = (self.flops["unit", 1, cut] for cut in (unit, unit + 1))
        return self.flops.get(("saved", 1, unit), began) - began, ended - began

    def span_flops(self, first: int, last: int) -> float:
        """Of these units of lead 1, forward and backward."""
        forward = self.flops["unit", 1, last] - self.flops["unit", 1, first]
        return forward + self.flops["seam", 1, first] - self.flops["seam", 1, last]

    def _note(self, lead: int, cut: int, state: State) -> None:
        self.states[lead, cut] = own(BOUNDARIES, state)

    def _unit(self, lead: int, number: int, run: Callable[..., State], state: State) -> State:
        if not torch.is_grad_enabled():
            return run(*state)
        if self.action == "recompute":
            return checkpoint(run, *state, use_reentrant=False, preserve_rng_state=False)
        if self.action == "simple":
            return simple_checkpoint(run, *state)

        def pack(tensor: Tensor) -> Tensor:
            self._mark("saved", lead, number)
            return tensor.detach()

        def unpack(tensor: Tensor) -> Tensor:
            mark(("used", lead, number))
            return tensor

        with saved_tensors_hooks(pack, unpack):
            return run(*state)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a trace: bytes by owner after each event, less those before the first.

    levels: (event + 1, owner), the first row 0. freed: rows at which states went, by number.
    turn: forward, the row at which the last tensor is saved; backward, at which the first is used.
    began: bytes of all owners before it, where it was recorded.
    """

    levels: np.ndarray
    freed: dict[int, int]
    turn: int
    began: int

    @cached_property
    def highest(self) -> int:
        """Most bytes above those before it."""
        return int(self.levels.sum(1).max())

    @property
    def ended(self) -> int:
        return self.began + int(self.levels[-1].sum())


Key = tuple[str, int, int]
"""What a part is: (forward | ahead | backward, lead, unit), of units in tiles the first."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A trace cut at its marks. states: of `Marks`. gaps: by what comes before and after. order:
    keys of both, as the parts follow each other."""

    owners: tuple[str, ...]
    leads: int
    base: np.ndarray
    units: dict[Key, Part]
    gaps: dict[tuple[str, int, str, int], Part]
    states: dict[tuple[int, int], dict[int, int]]
    order: tuple[Any, ...]

    def gap(self, here: tuple[str, int], there: tuple[str, int]) -> Part:
        """What the step does between these parts; between two leads in the middle, which may not
        follow each other here, the same as between others that are not first or last."""
        if (*here, *there) in self.gaps:
            return self.gaps[*here, *there]

        def distance(key: tuple[str, int, str, int]) -> int:
            _, lead, _, next_lead = key
            # The first lead and the last are not like those between; and what goes in a gap is
            # rather the lead's before it than that of the one after.
            ends = sum(
                weight * ((known == end) != (asked == end))
                for weight, known, asked in ((2, lead, here[1]), (1, next_lead, there[1]))
                for end in (1, self.leads)
            )
            return abs(lead - here[1]) + abs(next_lead - there[1]) + 10 * ends

        alike = [key for key in self.gaps if (key[0], key[2]) == (here[0], there[0])]
        return self.gaps[min(alike, key=distance)]

    @classmethod
    def of(cls, trace: MemoryTrace, marks: Marks) -> "Recording":
        """Of the trace of a step that ran with `marks`."""
        num_units = len(marks.names)
        # A state is known by the cut where it comes up, the same in all leads.
        alias: dict[int, int] = {}
        for (_, cut), state in sorted(marks.states.items()):
            for place, number in enumerate(state):
                alias.setdefault(number, 8 * cut + place)
        freed = [
            (alias[name[1]], event)
            for name, event in trace.marks
            if name[0] == "freed" and name[1] in alias
        ]
        saved = {name[1:]: event for name, event in trace.marks if name[0] == "saved"}
        used = {name[1:]: event for name, event in reversed(trace.marks) if name[0] == "used"}
        units: dict[Key, Part] = {}
        gaps: dict[tuple[str, int, str, int], Part] = {}

        order: list[Any] = []

        def part(key: Any, begin: int, end: int, turn: int = 0) -> Part:
            order.append(key)
            return Part(
                trace.alive[begin : end + 1] - trace.alive[begin],
                {key: event - begin for key, event in freed if begin < event <= end},
                max(turn - begin, 0),
                int(trace.alive[begin].sum()),
            )

        begin, before, unit = 0, ("start", 0), 0
        inside: tuple[str, int, int] | None = None
        for name, event in trace.marks:
            kind = name[0]
            if kind in ("unit", "ahead"):
                what = "forward" if kind == "unit" else "ahead"
                _, lead, cut = name
                if cut == 0:
                    gaps[*before, what, lead] = part((*before, what, lead), begin, event)
                else:
                    last_save = saved.get((lead, unit), 0) if kind == "unit" else 0
                    key = what, lead, unit
                    units[key] = part(key, begin, event, last_save)
                begin, before, unit = event, (what, lead), cut
            elif kind == "seam":
                _, lead, cut = name
                if cut == num_units:
                    gap = *before, "backward", lead
                    gaps[gap] = part(gap, begin, event)
                else:
                    key = "backward", lead, cut
                    units[key] = part(key, begin, event, used.get((lead, cut), 0))
                begin, before, inside = event, ("backward", lead), ("backward", lead, cut)
            elif name == ("backward", False) and inside:
                # Nobody wants the gradient of the first lead's input: there is no last seam.
                if inside[2] == 1:
                    key = "backward", inside[1], 0
                    units[key] = part(key, begin, event, used.get((inside[1], 0), 0))
                    begin = event
                inside = None
        gaps[*before, "end", 0] = part((*before, "end", 0), begin, len(trace.alive) - 1)
        leads = max(lead for lead, _ in marks.states)
        states = {
            where: {alias[number]: size for number, size in state.items()}
            for where, state in marks.states.items()
        }
        return cls(trace.owners, leads, trace.alive[0], units, gaps, states, tuple(order))

    def lead(self, lead: int, leads: int) -> int:
        """The recorded one that stands for lead 1, 2, ... of a rollout of so many: the first and
        the last for themselves, and those between are alike."""
        return self.leads if lead == leads else min(lead, 2)

    def ordered(self, owners: tuple[str, ...]) -> "Recording":
        """With these owners, in this order; they are all of ours and more."""
        places = [owners.index(name) for name in self.owners]

        def wide(levels: np.ndarray) -> np.ndarray:
            out = np.zeros((*levels.shape[:-1], len(owners)), np.int64)
            out[..., places] = levels
            return out

        def part(known: Part) -> Part:
            return replace(known, levels=wide(known.levels))

        return replace(
            self,
            owners=owners,
            base=wide(self.base),
            units={key: part(known) for key, known in self.units.items()},
            gaps={key: part(known) for key, known in self.gaps.items()},
        )


class Job(Protocol):
    """Steps to trace."""

    def step(self, leads: int, memory: Memory) -> Callable[[], None]:
        """One of so many leads. What it makes ready comes before the call that is traced."""

    def owned(self) -> dict[str, list[Tensor]]:
        """What is held during the whole step, by owner."""


def record(job: Job, leads: int, marks: Marks) -> Recording:
    """The trace of a step of so many leads that runs with `marks`."""
    step = job.step(leads, marks)

    def counted() -> None:
        with marks.tally, suppress(_BrokenOff):
            step()

    _, trace = trace_memory(counted, job.owned)
    return Recording.of(trace, marks)
