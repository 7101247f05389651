"""Plans in words that a scientist reads: which leads do what with which parts of the model."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graticule.memory.plan import LeadPlan, Segment

_PARTS = {
    "embed": "embedding",
    "down": "down-sampling",
    "up": "up-sampling",
    "recover": "recovery",
}
_GROUPS = ("", "one by one", "in twos", "in threes", "in fours", "in fives", "in sixes",
           "in sevens", "in eights", "in nines", "in tens")  # fmt: skip
_DONE = {
    "keep": "kept",
    "recompute": "recomputed",
    "offload": "recomputed from boundaries on the host",
    "simple": "recomputed but for products, which are kept",
}


def leads_in_words(leads: "Sequence[LeadPlan]", units: Sequence[str]) -> list[str]:
    """One line for each run of equal leads."""
    lines, number = [], 1
    for lead, equal in groupby(leads):
        last = number + len(list(equal)) - 1
        which = f"lead {number}" if last == number else f"leads {number}-{last}"
        lines.append(f"{which}: {lead_in_words(lead, units)}")
        number = last + 1
    return lines


def lead_in_words(lead: "LeadPlan", units: Sequence[str]) -> str:
    """Segments of one part of the model (`blocks.0`, `blocks.1`, ...) with one fate together."""
    stems = [unit.partition(".")[0] for unit in units]

    def together(segment: "Segment") -> object:
        inside = set(stems[segment.first : segment.last])
        # A segment of several parts stands for itself; so does everything that is kept.
        part = inside.pop() if len(inside) == 1 else segment.first
        return segment.action if segment.action == "keep" else (segment.action, segment.tiles, part)

    found = []
    for _, run in groupby(lead, together):
        segments = list(run)
        what = _named(segments[0].first, segments[-1].last, units, stems)
        how = "" if segments[0].action == "keep" else _grouped(segments)
        tiles = segments[0].tiles
        tiled = f" in {tiles} row tiles" if tiles > 1 else ""
        found.append(f"{what} {_DONE[segments[0].action]}{how}{tiled}")
    return ", ".join(found)


def _grouped(segments: "list[Segment]") -> str:
    lengths = [segment.last - segment.first for segment in segments]
    if len(lengths) == 1:
        return "" if lengths[0] == 1 else " as one"
    size = lengths[0]
    if all(length == size for length in lengths[:-1]) and lengths[-1] <= size < len(_GROUPS):
        return f" {_GROUPS[size]}"
    runs = [(size, len(list(run))) for size, run in groupby(lengths)]
    return f" in groups of {_listed([f'{times} x {size}' for size, times in runs])}"


def _named(first: int, last: int, units: Sequence[str], stems: Sequence[str]) -> str:
    names = []
    for stem, run in groupby(range(first, last), key=lambda unit: stems[unit]):
        inside = list(run)
        if len(inside) == stems.count(stem):
            names.append(_PARTS.get(stem, stem))
        elif len(inside) > 1 and all(units[unit].startswith(f"{stem}.") for unit in inside):
            ends = [units[unit].removeprefix(f"{stem}.") for unit in (inside[0], inside[-1])]
            names.append(f"{_PARTS.get(stem, stem)} {ends[0]}-{ends[1]}")
        else:
            names += [units[unit] for unit in inside]
    return _listed(names)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
