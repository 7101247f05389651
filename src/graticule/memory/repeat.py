"""Blocks that are alike, traced once: a profile of a model of few blocks as one of many.

Every other block of a Transformer is the same. So a model of four blocks (five for an odd number)
is traced, and in its recordings the second and the third stand for all between the first and the
last two, which differ by what is beside them. Their parts of the timeline follow each other
as often as there are blocks; what they hold during the whole step is added to the base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graticule.memory.profile import Profile
from graticule.memory.recording import Part, Recording


def traced_depth(depth: int) -> int:
    """How many blocks stand for `depth`."""
    return min(depth, 4 + depth % 2)


def with_blocks(profile: Profile, depth: int, held: Sequence[Mapping[str, int]]) -> Profile:
    """`profile` as of a model with `depth` blocks. held: by each traced block during the whole
    step, bytes by owner."""
    if depth == len(held):
        return profile
    blocks = _Blocks(profile.units.index("blocks.0"), len(held), depth)
    flops = [profile.flops[blocks.traced(unit)] for unit in range(blocks.units(profile))]
    tails = [profile.tail_flops[blocks.traced(unit)] for unit in range(blocks.units(profile))]
    first, last = profile.units[: blocks.first], profile.units[blocks.first + len(held) :]
    # Of the third and the fourth: what blocks share counts with the first that has it.
    more = [
        sum(held[2 + block % 2].get(owner, 0) for block in blocks.added) for owner in profile.owners
    ]

    def wide(recording: Recording | None) -> Recording | None:
        return recording and _widened(recording, blocks, more)

    keep, recompute = wide(profile.keep), wide(profile.recompute)
    assert keep is not None
    assert recompute is not None
    return replace(
        profile,
        units=(*first, *(f"blocks.{number}" for number in range(depth)), *last),
        flops=tuple(flops),
        tail_flops=tuple(tails),
        keep=keep,
        recompute=recompute,
        lead_wise=wide(profile.lead_wise),
        tiled=wide(profile.tiled),
        simple=wide(profile.simple),
        spans={blocks.unit(a): blocks.unit(b) for a, b in profile.spans.items()},
    )


@dataclass(frozen=True)
class _Blocks:
    """first: unit of the first block. few: that were traced, of `depth`."""

    first: int
    few: int
    depth: int

    @property
    def more(self) -> int:
        return self.depth - self.few

    @property
    def added(self) -> range:
        """Blocks that none was traced for."""
        return range(2, 2 + self.more)

    def units(self, profile: Profile) -> int:
        return len(profile.units) + self.more

    def stands(self, block: int) -> int:
        """The traced one that stands for a block."""
        if block > self.more + 1:
            return block - self.more
        return block if block < 2 else 2 - block % 2

    def traced(self, unit: int) -> int:
        """The same of units; and of cuts, by the unit that they enter."""
        block = unit - self.first
        if block < 0:
            return unit
        return self.first + self.stands(block) if block < self.depth else unit - self.more

    def unit(self, traced: int) -> int:
        """The unit (cut) that a traced one is itself; of blocks the first two or from the end."""
        return traced + (self.more if traced > self.first + 1 else 0)

    def of(self, traced: int) -> range:
        """The units that a traced one, when its turn comes, is followed by: itself, in most cases;
        after the second block all that are added."""
        if traced == self.first + 1:
            return range(traced, traced + self.more + 1)
        return range(self.unit(traced), self.unit(traced) + 1)

    def key(self, key: int, unit: int | None = None) -> int:
        """Of a state, known by the cut where it comes up. unit: where it is met."""
        cut, place = divmod(key, 8)
        inside = self.first <= cut <= self.first + self.few
        if unit is not None and self.first <= unit < self.first + self.depth and inside:
            return 8 * (cut + unit - self.traced(unit)) + place
        return 8 * self.unit(cut) + place


def _widened(recording: Recording, blocks: _Blocks, more: Sequence[int]) -> Recording:
    base = recording.base + more
    level = int(base.sum())

    def part(known: Part, unit: int | None = None) -> Part:
        nonlocal level
        freed = {blocks.key(key, unit): row for key, row in known.freed.items()}
        found = replace(known, freed=freed, began=level)
        level = found.ended
        return found

    units, gaps = {}, {}
    for key in recording.order:
        if len(key) == 4:
            gaps[key] = part(recording.gaps[key])
            continue
        what, lead, traced = key
        places = blocks.of(traced)
        for unit in reversed(places) if what == "backward" else places:
            units[what, lead, unit] = part(recording.units[what, lead, blocks.traced(unit)], unit)
    states = {}
    for lead in {lead for lead, _ in recording.states}:
        cuts = max(cut for there, cut in recording.states if there == lead) + blocks.more
        for cut in range(cuts + 1):
            known = recording.states.get((lead, blocks.traced(cut)))
            if known is not None:  # in row tiles there is none between the units
                states[lead, cut] = {blocks.key(key, cut): size for key, size in known.items()}
    return replace(recording, base=base, units=units, gaps=gaps, states=states)
