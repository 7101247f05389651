"""What each unit of a model holds, forward and backward, and any plan's timeline made from that.

A step is traced a few times, with at most three leads: keeping everything, lead-wise, and (forward
alone) recomputing each unit by itself. In a trace with marks between units, each unit's part of the
timeline stands by itself: how many bytes come and go from its start on. A plan's step is the same
parts in another order. With n units,

    forward of a kept segment          its units' parts of the keeping trace
    forward of a recomputed segment    its units' parts of the recomputing trace; what enters a unit
                                       inside the segment is freed after it
    backward of a kept segment         its units' backward parts
    backward of a recomputed segment   its units' forward parts, keeping, the last one up to the
                                       last tensor that is saved (there recomputing stops), then
                                       their backward parts, then its boundary is freed
    both of one in row tiles           its parts of the tiled trace; it keeps what enters it

and in between whatever else the step does: decoding fields, the loss, the optimizer. A lead is the
first (nobody wants the gradient of its input), the last (its backward pass comes first, when there
are no gradients of parameters yet) or one of those between, which are all alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from graticule.memory.composition import RECOMPUTED, Composition, Timeline
from graticule.memory.plan import Plan, Segment
from graticule.memory.recording import (
    BOUNDARIES,
    Job,
    Marks,
    Recording,
    record,
)
from graticule.memory.trace import GATHERED, UNDERWAY


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """What a step holds, part by part, for any plan.

    units: their names. leads: of the rollout. keep: of no more than three leads at once.
    recompute: of two, forward alone. lead_wise: of three, lead by lead, keeping; None where
    leads = 1 or plans may not be so.
    flops, tail_flops: of each unit's forward; of what comes after its last saved tensor, which is
    not computed again.
    tiled: of three leads, in `tiles` row tiles where units can; simple: of three, with products
    kept; None where that was not asked for or nothing can. spans: from which unit to which, the
    last left out. tiled_flops: what tiles compute
    besides.
    """

    units: tuple[str, ...]
    leads: int
    owners: tuple[str, ...]
    keep: Recording
    recompute: Recording
    lead_wise: Recording | None
    flops: tuple[float, ...]
    tail_flops: tuple[float, ...]
    tiles: int = 1
    tiled: Recording | None = None
    simple: Recording | None = None
    spans: Mapping[int, int] = field(default_factory=dict)
    tiled_flops: float = 0.0

    def timeline(self, plan: Plan) -> Timeline:
        """Of a step under `plan`."""
        return Composition(self, plan).timeline()


def profile_step(
    job: Job, leads: int, *, tiles: int = 1, simple: bool = False, lead_wise: bool = True
) -> Profile:
    """Trace a few steps of a job that has so many leads. tiles: in how many row tiles plans may
    have the units that can; 1: none. simple: whether plans may have that. lead_wise: whether they
    may be so."""
    marks = Marks()
    keep = record(job, min(leads, 3), marks)
    wise = None
    if leads > 1 and lead_wise:
        whole = (Segment(0, len(marks.names), "keep"),)
        num = min(leads, 3)
        wise = record(job, num, Marks(plan=Plan((whole,) * num, lead_wise=True)))
    tiled, tiled_flops = None, 0.0
    if tiles > 1 and marks.spans:
        rows = Marks(tiles=tiles)
        tiled = record(job, min(leads, 3), rows)
        (span,) = marks.spans.items()
        tiled_flops = rows.span_flops(*span) - marks.span_flops(*span)
    plainly = record(job, min(leads, 3), Marks(action="simple")) if simple else None
    # Forward passes are all that is asked of it, of the first lead and of another; the last of
    # all, since a step that is broken off leaves modules in the middle of it.
    forward = min(leads, 2)
    recompute = record(job, forward, Marks(action="recompute", stop=forward))
    recordings = [keep, recompute, *(one for one in (wise, tiled, plainly) if one)]
    known = [name for recording in recordings for name in recording.owners]
    owners = tuple(dict.fromkeys([*known, GATHERED, UNDERWAY, BOUNDARIES, RECOMPUTED]))
    flops = [marks.forward_flops(unit) for unit in range(len(marks.names))]
    return Profile(
        units=marks.names, leads=leads, owners=owners, keep=keep.ordered(owners),
        recompute=recompute.ordered(owners), lead_wise=wise and wise.ordered(owners),
        flops=tuple(whole for _, whole in flops),
        tail_flops=tuple(whole - saved for saved, whole in flops), tiles=tiles if tiled else 1,
        tiled=tiled and tiled.ordered(owners), spans=marks.spans if tiled else {},
        simple=plainly and plainly.ordered(owners),
        tiled_flops=tiled_flops,
    )  # fmt: skip
