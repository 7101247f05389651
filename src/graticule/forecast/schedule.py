"""Who computes which leads of which initial times, in what order: of a new forecast or the rest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from graticule.mesh import Cut

Batch = tuple[tuple[int, ...], int]
"""Places that run side by side, of one member, and how many leads all of them have."""


@dataclass(frozen=True)
class Places:
    """What is rolled out, numbered: the initial times of member 0, then those of member 1, ...

    So a number stays what it is in a larger ensemble, and what runs side by side has numbers that
    follow one another. members: none: a forecast without them.
    """

    starts: int
    members: int | None = None

    def __len__(self) -> int:
        return self.starts * (1 if self.members is None else self.members)

    def start(self, place: int) -> int:
        """The position of its initial time."""
        return place % self.starts

    def member(self, place: int) -> int | None:
        return None if self.members is None else place // self.starts

    def of(self, starts: slice, members: slice) -> list[range]:
        """Those of some initial times and members, by member."""
        every = range(1 if self.members is None else self.members)
        return [range(n * self.starts, (n + 1) * self.starts)[starts] for n in every[members]]


def shared_out(ranks: int, starts: int, members: int) -> dict[str, int]:
    """The mesh's `data` and `member` axes of ranks that share no sample: those with which the rank
    that has most has least; of several, where a rank has the fewest members, whose weights it
    draws."""
    options = [(data, ranks // data) for data in range(1, ranks + 1) if ranks % data == 0]

    def cost(option: tuple[int, int]) -> tuple[int, int, int]:
        data, member = option
        most = -(-members // member)
        return -(-starts // data) * most, most, member

    data, member = min(options, key=cost)
    return {"data": data, "member": member}


def shares(places: Places, sizes: Mapping[str, int]) -> list[list[range]]:
    """The places of each (data, member) rank, row by row over these axes, by member."""
    starts = Cut.even(places.starts, sizes["data"])
    members = Cut.even(1 if places.members is None else places.members, sizes["member"])
    return [
        places.of(starts.of(data), members.of(member))
        for data in range(starts.ranks)
        for member in range(members.ranks)
    ]


@dataclass(frozen=True)
class Turn:
    """What all processes do before any does more. batches: of each rank that has places of its
    own; none: ((), 0)."""

    batches: tuple[Batch, ...]
    leads: int

    @property
    def steps(self) -> int:
        """Leads that the processes take together; who has fewer left is idle at the end."""
        return max(self.leads - there for places, there in self.batches if places)

    def at(self, step: int) -> dict[int, int]:
        """The lead that each place is at in a step (1, 2, ...)."""
        return {
            place: there + step
            for places, there in self.batches
            for place in places
            if there + step <= self.leads
        }


def turns(
    by_rank: Sequence[Iterable[Sequence[int]]], there: Mapping[int, int], leads: int, size: int
) -> list[Turn]:
    """by_rank: the places of each, by member. there: leads that some have already, by place.
    leads: of each in the end. size: most places of a batch."""
    found = [batches(own, there, leads, size) for own in by_rank]
    return [Turn(each, leads) for each in zip_longest(*found, fillvalue=((), 0))]


def batches(
    own: Iterable[Sequence[int]], there: Mapping[int, int], leads: int, size: int
) -> list[Batch]:
    """Those that are left of `own`, in order; the places of one are of one member, since its
    weights are one draw, and have the same leads.

    Where nothing is there, or what the same layout left, they are the same as ever: how many are
    computed side by side may change the last bit.
    """
    found: list[Batch] = []
    for places in own:
        last: Batch = (), 0
        for place in places:
            lead = there.get(place, 0)
            if lead == leads:
                continue
            if last[1] == lead and 0 < len(last[0]) < size:
                last = found[-1] = (*last[0], place), lead
            else:
                found.append(last := ((place,), lead))
    return found
