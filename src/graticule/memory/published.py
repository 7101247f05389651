"""The memory orchestration of TERRA as published (arXiv 2608.15211, section VI).

Its space: D0, patch embedding and down-sampling as one checkpoint unit, or D1, each alone; the
Transformer's blocks in segments of t_seg of 1, 2, 3, 4, 5 or all; U0 or U1 likewise for
up-sampling and recovery.

Eq. 5. With A_i what is resident before the backward of unit i and P_i its peak, a plan without
offload is chosen for the least M = M_base + max(A_i + P_i), lead by lead. The dynamic programme
goes over leads; its state is (resident, M so far), and states that another does not exceed in
either are kept.

Algorithm 2, when that does not meet the budget. A configuration is feasible if
M_base + E_i + P_i <= M_b for each unit i with boundary E_i. The coarsest sampling unit, D0 with U0
before D1 with U1, and then the largest t_seg that are feasible serve all leads. Leads are added one
by one; while the peak of the newest lead exceeds the budget, the earliest boundary that is still
on the device is offloaded.

Table VI (what each budget sends to the host) against this. Its 16 volumes fix the boundaries: f for
D0; f, a and 2 a for D1; 2 a for a Transformer segment and for U0; 2, 4, 8 and 8 a for U1, with f
a field of 93 channels and a a tensor on the Transformer's grid, 16 bit. With one set of peaks for
all rows (nine numbers, linear in t_seg; `tests/test_memory_published.py`) the algorithm makes the
choices of six rows of eight, and no set makes all:

- patch 4 on one stripe at 80 GB is patch 4 on two stripes at 40 GB with everything doubled but the
  replicated parameters. It has more room, and the paper offloads more of it (the D0 of lead 10).
- Patch 4 on two stripes at 30 GB ran with t_seg = 2 and reached 30.5 GB. Peaks for which two blocks
  fit there contradict the other rows; with ours they take 30.8 GB and t_seg is 1.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from graticule.memory.plan import (
    Action,
    Costs,
    Kind,
    LeadPlan,
    Plan,
    Segment,
    kind_of,
    lead_peaks,
    peak_of,
)

T_SEG = (1, 2, 3, 4, 5)
"""Besides all blocks as one."""
Template = tuple[int, int, int]
"""(D, t_seg, U), as D1, t_seg 2, U1 is (1, 2, 1)."""


def paper_plan(
    costs: Costs, budget: int, *, offload: bool = True, as_published: bool = False
) -> Plan:
    """The plan of Eq. 5 if its peak meets the budget (bytes, base included), else Algorithm 2's.

    as_published: see `offload_plan`.
    """
    plan = checkpoint_plan(costs)
    peak = peak_of(costs, plan).bytes
    if peak <= budget:
        return plan
    if not offload:
        raise ValueError(
            f"a budget of {budget} bytes cannot be met by Eq. 5 without offload: its least peak is "
            f"{peak} bytes. Give that much, allow offload, or use mode=best."
        )
    return offload_plan(costs, budget, as_published=as_published)


def checkpoint_plan(costs: Costs) -> Plan:
    """Eq. 5: the least peak without offload, and of such plans the one that recomputes least."""
    options = [lead_of(costs.units, template) for template in templates(costs.units)]
    # (M so far, resident, recomputed FLOPs, plan so far)
    states: list[tuple[int, int, float, tuple[LeadPlan, ...]]] = [(0, 0, 0.0, ())]
    for number in range(1, costs.leads + 1):
        kind = kind_of(number, costs.leads)
        offers = []
        for lead in options:
            peaks, kept = lead_peaks(costs, kind, lead)
            flops = sum(costs.segment(kind, segment).recompute_flops for segment in lead)
            offers.append((max(map(max, peaks)), kept, flops, lead))
        grown = [
            (max(highest, resident + peak), resident + kept, done + flops, (*plan, lead))
            for highest, resident, done, plan in states
            for peak, kept, flops, lead in offers
        ]
        grown.sort(key=lambda state: state[:3])
        states = []
        for state in grown:
            if not states or state[1] < states[-1][1]:
                states.append(state)
    return Plan(states[0][3])


def offload_plan(costs: Costs, budget: int, *, as_published: bool = False) -> Plan:
    """Algorithm 2. ValueError if no configuration meets the budget.

    as_published: the peak of a lead is that of its backward pass, a boundary is fetched when its
    own turn comes, and the first feasible configuration is final even if it misses the budget in
    the end, as the paper's fourth one does (30.5 GB of 30). Otherwise the peak is what a lead's
    forward and backward reach here, where a boundary is fetched one segment ahead, and the next
    configuration has its turn where one misses: the plan meets the budget when it runs.
    """
    found = _feasible(costs, budget)
    for template in found[:1] if as_published else found:
        plan = _offloaded(costs, budget, template, as_published)
        if plan is not None:
            return plan
    least = min(min(ladder(costs, template)) for template in found)
    raise ValueError(
        f"a budget of {budget} bytes cannot be met by Algorithm 2: its feasible configurations "
        f"reach {least} bytes with all they offload. Give more, use more ranks for a sample, or "
        "mode=best."
    )


def _offloaded(costs: Costs, budget: int, template: Template, as_published: bool) -> Plan | None:
    """The loop of Algorithm 2; None if it ends and the budget is not met."""
    boundaries: list[tuple[int, int]] = []
    leads: list[list[Segment]] = []
    away = 0
    for number in range(1, costs.leads + 1):
        leads.append(list(lead_of(costs.units, template)))
        boundaries += [(number - 1, place) for place in range(len(leads[-1]))]
        while _peak_of_newest(costs, leads, as_published) > budget:
            if away == len(boundaries):
                if as_published:
                    break
                return None
            lead, place = boundaries[away]
            old = leads[lead][place]
            leads[lead][place] = Segment(old.first, old.last, "offload")
            away += 1
    plan = Plan(tuple(tuple(lead) for lead in leads))
    # Earlier leads were looked at with fewer boundaries away, and the update not at all.
    return plan if as_published or peak_of(costs, plan).bytes <= budget else None


def templates(units: Sequence[str]) -> list[Template]:
    """All configurations, in the order in which Algorithm 2 tries them, then the mixed ones."""
    down, blocks, up = _parts(units)
    depth = len(blocks)
    sizes = sorted({*(t for t in T_SEG if t <= depth), depth}, reverse=True)
    pairs = [(0, 0), (1, 1), (0, 1), (1, 0)]
    # A model without sampling units has but one way for either end.
    pairs = [(d, u) for d, u in pairs if d < max(len(down), 1) and u < max(len(up), 1)]
    return [(d, t, u) for d, u in pairs for t in sizes]


def lead_of(units: Sequence[str], template: Template, action: Action = "recompute") -> LeadPlan:
    """A configuration as a lead's plan."""
    fine_down, size, fine_up = template
    down, blocks, up = _parts(units)
    starts = [
        *(down if fine_down else down[:1]),
        *blocks[::size],
        *(up if fine_up else up[:1]),
        len(units),
    ]
    return tuple(Segment(first, last, action) for first, last in pairwise(starts))


def offloading(costs: Costs, template: Template, count: int) -> Plan:
    """The plan that Algorithm 2 has after so many boundaries went to the host."""
    here, away = (lead_of(costs.units, template, action) for action in ("recompute", "offload"))
    size = len(here)
    parts = (min(max(count - lead * size, 0), size) for lead in range(costs.leads))
    return Plan(tuple(away[:part] + here[part:] for part in parts))


def ladder(costs: Costs, template: Template) -> list[int]:
    """The peak of `offloading` with 0, 1, ... boundaries on the host, the last with all of them."""
    here, away = (lead_of(costs.units, template, action) for action in ("recompute", "offload"))
    kinds = [kind_of(number, costs.leads) for number in range(1, costs.leads + 1)]

    @cache
    def lead(kind: Kind, part: int) -> tuple[int, int]:
        peaks, kept = lead_peaks(costs, kind, away[:part] + here[part:])
        return max(map(max, peaks)), kept

    # rest[k]: the peak of all leads after the first k, nothing of them on the host, above those.
    rest = [0]
    for kind in reversed(kinds):
        peak, kept = lead(kind, 0)
        rest.append(max(peak, kept + rest[-1]))
    rest.reverse()
    found, resident, highest = [], costs.base, costs.base + costs.update_peak
    for number, kind in enumerate(kinds, 1):
        last = number == costs.leads
        for part in range(len(here) + last):
            peak, kept = lead(kind, part)
            found.append(max(highest, resident + max(peak, kept + rest[number])))
        peak, kept = lead(kind, len(here))
        highest, resident = max(highest, resident + peak), resident + kept
    return found


def _feasible(costs: Costs, budget: int) -> list[Template]:
    """D0 with U0 first, then D1 with U1, the largest t_seg of each first."""
    kinds = {kind_of(number, costs.leads) for number in range(1, costs.leads + 1)}
    # A segment's backward peak contains its boundary: E_i + P_i.
    peaks = {
        template: costs.base
        + max(
            costs.segment(kind, segment).backward_peak
            for kind in kinds
            for segment in lead_of(costs.units, template)
        )
        for template in templates(costs.units)
        if template[0] == template[2]
    }
    found = [template for template, peak in peaks.items() if peak <= budget]
    if not found:
        raise ValueError(
            f"a budget of {budget} bytes cannot be met by Algorithm 2: the base and the peak of "
            f"one unit with its boundary take {min(peaks.values())} bytes at least. Give more, use "
            "more ranks for a sample, or mode=best."
        )
    return found


def _peak_of_newest(costs: Costs, leads: list[list[Segment]], as_published: bool) -> int:
    """M_k of the last lead so far."""
    resident = costs.base
    for number, lead in enumerate(leads, 1):
        kind = kind_of(number, costs.leads)
        if number < len(leads):
            resident += sum(costs.segment(kind, segment).resident for segment in lead)
            resident += costs.loss(kind).resident
    if not as_published:
        return resident + max(map(max, lead_peaks(costs, kind, tuple(leads[-1]))[0]))
    peaks = []
    for segment in leads[-1]:
        cost = costs.segment(kind, segment)
        peaks.append(resident + cost.backward_peak)
        resident += cost.resident
    return max(*peaks, resident + costs.loss(kind).backward_peak)


def has_blocks(units: Sequence[str]) -> bool:
    """Whether the paper's plans exist for a model with such units."""
    blocks = [place for place, unit in enumerate(units) if unit.startswith("blocks.")]
    return bool(blocks) and blocks[-1] - blocks[0] + 1 == len(blocks)


def _parts(units: Sequence[str]) -> tuple[range, range, range]:
    """Units before the blocks, the blocks, and those after."""
    if not has_blocks(units):
        raise ValueError(
            f"the paper's plans need units named blocks.0, blocks.1, ... that follow each other, "
            f"and this model has {', '.join(units)}; use mode=best"
        )
    blocks = [place for place, unit in enumerate(units) if unit.startswith("blocks.")]
    start, end = blocks[0], blocks[-1] + 1
    return range(start), range(start, end), range(end, len(units))
