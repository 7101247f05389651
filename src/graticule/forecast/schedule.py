"""Who computes which leads of which initial times, in what order: of a new forecast or the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from graticule.mesh import Cut

Batch = tuple[tuple[int, ...], int]
"""Positions of the initial times that run side by side, and how many leads all of them have."""


@dataclass(frozen=True)
class Turn:
    """What all processes do before any does more. batches: of each data rank; none: ((), 0)."""

    batches: tuple[Batch, ...]
    leads: int

    @property
    def steps(self) -> int:
        """Leads that the processes take together; who has fewer left is idle at the end."""
        return max(self.leads - there for places, there in self.batches if places)

    def at(self, step: int) -> dict[int, int]:
        """The lead that each initial time is at in a step (1, 2, ...), by position."""
        return {
            place: there + step
            for places, there in self.batches
            for place in places
            if there + step <= self.leads
        }


def turns(share: Cut, there: Mapping[int, int], leads: int, size: int) -> list[Turn]:
    """share: of the initial times over the data ranks. there: leads that some have already, by
    position. leads: of each in the end. size: most initial times of a batch."""
    by_rank = [
        batches(range(share.bounds[-1])[share.of(rank)], there, leads, size)
        for rank in range(share.ranks)
    ]
    return [Turn(each, leads) for each in zip_longest(*by_rank, fillvalue=((), 0))]


def batches(own: Sequence[int], there: Mapping[int, int], leads: int, size: int) -> list[Batch]:
    """Those that are left of `own`, in order; the initial times of one have the same leads.

    Where nothing is there, or what the same layout left, they are the same as ever: how many are
    computed side by side may change the last bit.
    """
    found: list[Batch] = []
    for place in own:
        lead = there.get(place, 0)
        if lead == leads:
            continue
        last = found[-1] if found else ((), lead)
        if last[1] == lead and 0 < len(last[0]) < size:
            found[-1] = ((*last[0], place), lead)
        else:
            found.append(((place,), lead))
    return found
