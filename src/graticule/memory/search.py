"""The cheapest plan that fits: an exact dynamic programme over the leads of a step.

Each lead offers its front: (r kept, p peak, c seconds), see `fronts`. In the graph, with B the
budget less the base, and R what the leads before keep,

    lead k may take a plan with   R + p <= B,   after which   R + r   and   C + c

so that a state is the pair (R, C); of two states one that exceeds the other in neither is enough.
States that cannot lead to a price within a limit are left out: for every number
x >= 0 (seconds a byte)

    C + sum over the leads to come of min(c + x r), p instead of r in the last  -  x (B - R)

is below the price of whatever follows, since the resident bytes and the last peak must fit into B.
The price is not known beforehand: limits on it are tried, the first a little above that bound, and
what is found within a limit is the best there is.

Lead-wise each lead stands for itself: the cheapest with lead-wise base + k x field + p within the
budget.

The least peak needs no prices: for a given B the smallest R is the best, lead by lead.

Where the fronts had to be rounded (`fronts`), R is rounded up too, to `_ROUGH` significant bits.
All of that depends on the costs alone, and the same holds for plans that are tried besides, those
of the paper among them: a larger budget never has a dearer plan.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from graticule.memory.fronts import EXACT, Front, fronts_of, rounded_up
from graticule.memory.plan import Costs, Kind, LeadPlan, Plan, Rates, kind_of, peak_of, price_of
from graticule.memory.published import (
    Template,
    checkpoint_plan,
    has_blocks,
    ladder,
    offloading,
    templates,
)

_SHARES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1)
"""Limits that are tried, between the bound and the price of a plan that fits. Bounds are close."""
_ROUGH = 10


def best_plan(
    costs: Costs, budget: int, device: Rates, *, offload: bool = True, lead_wise: bool = True
) -> Plan:
    """The cheapest plan in predicted time whose peak meets the budget (bytes, base included).

    offload, lead_wise: whether such plans are allowed. ValueError if no plan meets the budget.
    """
    return Search(costs, device, offload=offload, lead_wise=lead_wise).best(budget)


def least_budget(
    costs: Costs, device: Rates, *, offload: bool = True, lead_wise: bool = True
) -> tuple[int, Plan]:
    """The least peak that any plan reaches, and the cheapest plan found for it."""
    return Search(costs, device, offload=offload, lead_wise=lead_wise).least


@dataclass(frozen=True, eq=False)
class _Lead:
    """A front by what the search over leads asks of it.

    until: the least peak of a plan that keeps no more and costs no more: where that fits, this one
    need not be tried. peaks: in rising order; thrifty: place of the plan that keeps the least of
    those up to there, the cheapest of several; cheap: of the one that costs the least.
    """

    front: Front
    until: np.ndarray
    peaks: np.ndarray
    thrifty: np.ndarray
    cheap: np.ndarray

    @staticmethod
    def of(front: Front) -> "_Lead":
        r, p, c = front.resident, front.peak, front.seconds
        never = np.iinfo(np.int64).max
        until = np.full(len(r), never)
        for part in np.array_split(np.arange(len(r)), 1 + len(r) ** 2 // 4_000_000):
            better = (r[None] <= r[part, None]) & (c[None] <= c[part, None])
            better[np.arange(len(part)), part] = False
            until[part] = np.where(better, p[None], never).min(1)
        order = np.argsort(p, kind="stable")
        return _Lead(front, until, p[order], _running(order, (c, r)), _running(order, (r, c)))

    def within(self, room: int) -> int:
        """How many plans have a peak of at most `room`."""
        return int(np.searchsorted(self.peaks, room, "right"))


def _running(order: np.ndarray, keys: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The smallest of all up to each place of the order, by the last key, then the first."""
    rank = np.empty(len(order), int)
    rank[np.lexsort(keys)] = np.arange(len(order))
    place = np.argsort(rank)
    return place[np.minimum.accumulate(rank[order])]


@dataclass(eq=False)
class Search:
    """One model and device; ask for as many budgets as you like.

    exact: no sizes had to be rounded, so that what it finds is the best of all plans.
    """

    costs: Costs
    device: Rates
    offload: bool = field(default=True, kw_only=True)
    lead_wise: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        number = self.costs.leads
        self._kinds: list[Kind] = [kind_of(lead, number) for lead in range(1, number + 1)]
        self._leads, self.exact = self._leads_of(self.costs)
        # Lead-wise, each by itself; otherwise not looked at.
        self._leads_apart = self._leads
        if self.lead_wise and number > 1 and self.costs.lead_wise is not self.costs:
            self._leads_apart, exact = self._leads_of(self.costs.lead_wise)
            self.exact &= exact
        # Of a lead-wise step, above its base: the last lead has no first pass.
        without = self.costs.recompute_lead_peak()
        self._first_pass = (number - 1) * self.costs.field + without if number > 1 else 0

    def in_graph(self) -> "Search":
        """The same without lead-wise plans."""
        other = copy(self)
        other.lead_wise = False
        other.__dict__.pop("least", None)
        return other

    def _leads_of(self, costs: Costs) -> tuple[list[_Lead], bool]:
        """Of all leads, and whether they are exact."""
        kinds = list(dict.fromkeys(self._kinds))
        fronts, exact = fronts_of(costs, kinds, self.device, offload=self.offload)
        of_kind = {kind: _Lead.of(front) for kind, front in fronts.items()}
        return [of_kind[kind] for kind in self._kinds], exact

    def best(self, budget: int) -> Plan:
        """See `best_plan`."""
        found = self._cheapest(budget)
        if found is None:
            raise ValueError(self._refusal(budget))
        return found

    @cached_property
    def least(self) -> tuple[int, Plan]:
        """See `least_budget`."""
        least = min([self._least_in_graph(), *self._least_lead_wise()])
        least = max(least, self.costs.base + self.costs.update_peak)
        if not self.exact:
            least = min(least, *(peak for peak, _ in self._fixed))
            least = min(least, *(min(peaks) for _, peaks in self._ladders), least)
        found = self._cheapest(least)
        assert found is not None
        return least, found

    def _cheapest(self, budget: int) -> Plan | None:
        def rank(plan: Plan) -> tuple[float, int]:
            price = price_of(self.costs, plan, self.device)
            return price.seconds, peak_of(self.costs, plan).bytes

        return min(self._candidates(budget), key=rank, default=None)

    def _candidates(self, budget: int) -> Iterator[Plan]:
        if budget < self.costs.base + self.costs.update_peak:
            return
        room = budget - self.costs.base
        chosen = self._in_graph(room)
        if chosen is not None:
            yield self._plan(chosen)
        if self.lead_wise:
            chosen = self._apart(budget - self.costs.lead_wise_base)
            if chosen is not None:
                yield self._plan(chosen, lead_wise=True)
        if not self.exact:
            yield from self._besides(budget)

    def _plan(self, chosen: Sequence[int], lead_wise: bool = False) -> Plan:
        fronts = self._leads_apart if lead_wise else self._leads
        leads: list[LeadPlan] = [
            lead.front.plan(number) for lead, number in zip(fronts, chosen, strict=True)
        ]
        return Plan(tuple(leads), lead_wise)

    def _besides(self, budget: int) -> Iterator[Plan]:
        """Plans that rounded sizes can miss: the thriftiest, and what the paper's methods give."""
        for peak, plan in self._fixed:
            if peak <= budget:
                yield plan
        for template, peaks in self._ladders:
            fits = (count for count, peak in enumerate(peaks) if peak <= budget)
            count = next(fits, None)
            if count is not None:
                yield offloading(self.costs, template, count)

    @cached_property
    def _fixed(self) -> list[tuple[int, Plan]]:
        chosen = self._thriftiest(self._least_in_graph() - self.costs.base)
        assert chosen is not None
        plans = [self._plan(chosen)]
        if has_blocks(self.costs.units):
            plans.append(checkpoint_plan(self.costs))
        return [(peak_of(self.costs, plan).bytes, plan) for plan in plans]

    @cached_property
    def _ladders(self) -> list[tuple[Template, list[int]]]:
        if not self.offload or not has_blocks(self.costs.units):
            return []
        return [(each, ladder(self.costs, each)) for each in templates(self.costs.units)]

    # Least peaks

    def _thriftiest(self, room: int) -> list[int] | None:
        """Of each lead the plan that keeps the least and fits; None if there is none."""
        chosen, resident = [], 0
        for lead in self._leads:
            fitting = lead.within(room - resident)
            if not fitting:
                return None
            chosen.append(int(lead.thrifty[fitting - 1]))
            resident += int(lead.front.resident[chosen[-1]])
        return chosen

    def _least_in_graph(self) -> int:
        low, high = (
            -1,
            sum(int(lead.front.peak.max()) for lead in self._leads)
            + sum(int(lead.front.resident.max()) for lead in self._leads),
        )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._thriftiest(middle) else (middle, high)
        return self.costs.base + high

    def _least_lead_wise(self) -> Iterator[int]:
        if self.lead_wise:
            peaks = [self._first_pass]
            peaks += [
                number * self.costs.field + int(lead.front.peak.min())
                for number, lead in enumerate(self._leads_apart, 1)
            ]
            yield self.costs.lead_wise_base + max(peaks)

    # Prices

    def _apart(self, room: int) -> list[int] | None:
        """Lead-wise: places in the fronts, or None."""
        if room < self._first_pass:
            return None
        chosen = []
        for number, lead in enumerate(self._leads_apart, 1):
            fitting = lead.within(room - number * self.costs.field)
            if not fitting:
                return None
            chosen.append(int(lead.cheap[fitting - 1]))
        return chosen

    def _in_graph(self, room: int) -> list[int] | None:
        """Places in the fronts of the cheapest plan, or None."""
        most = self._most(room)
        if most[0] < 0:
            return None
        bounds = _Bounds(self._leads, room)
        first = self._thriftiest(room)
        assert first is not None
        highest = self._seconds(first)
        # Sums of seconds in another order differ in their last digits.
        lowest, highest = bounds.lowest + 1e-12 * highest, highest * (1 + 1e-12)
        for share in _SHARES:
            found = self._run(room, most, bounds, lowest + share * (highest - lowest))
            if found is not None:
                return found
        return None

    def _seconds(self, chosen: Sequence[int]) -> float:
        fronts = (lead.front.seconds for lead in self._leads)
        return float(sum(seconds[place] for seconds, place in zip(fronts, chosen, strict=True)))

    def _most(self, room: int) -> list[int]:
        """What may be resident before each lead, so that a plan remains for the rest."""
        most = [np.iinfo(np.int64).max // 2]
        for lead in reversed(self._leads):
            fits = np.minimum(room - lead.front.peak, most[-1] - lead.front.resident)
            most.append(int(fits.max()))
        return most[::-1]

    def _run(self, room: int, most: list[int], bounds: "_Bounds", limit: float) -> list[int] | None:
        """The cheapest, if its price is within the limit.

        most[k]: bytes that may be resident after k leads.
        """
        bits = EXACT if self.exact else _ROUGH
        resident, seconds = np.zeros(1, np.int64), np.zeros(1)
        trail: list[tuple[np.ndarray, np.ndarray]] = []
        for number, lead in enumerate(self._leads, 1):
            front = lead.front
            tried = bounds.worth_trying(number, limit)
            # Each plan from the first state in which no better one fits, to the last it fits in.
            low = np.searchsorted(resident, room - lead.until[tried], "right")
            high = np.searchsorted(resident, room - front.peak[tried], "right")
            count = np.maximum(high - low, 0)
            plan = np.repeat(tried, count)
            state = np.arange(len(plan)) + np.repeat(low - np.cumsum(count) + count, count)
            after = rounded_up(resident[state] + front.resident[plan], bits)
            price = seconds[state] + front.seconds[plan]
            good = after <= most[number]
            good[good] = bounds.below(number, after[good], price[good], limit)
            plan, state, after, price = plan[good], state[good], after[good], price[good]
            if not len(plan):
                return None
            order = np.lexsort((price, after))
            lowest = np.minimum.accumulate(price[order])
            better = np.ones(len(order), bool)
            better[1:] = price[order][1:] < lowest[:-1]
            kept = order[better]
            resident, seconds = after[kept], price[kept]
            trail.append((state[kept], plan[kept]))
        at, chosen = len(seconds) - 1, []
        for state, plan in reversed(trail):
            chosen.append(int(plan[at]))
            at = int(state[at])
        return chosen[::-1]

    def _refusal(self, budget: int) -> str:
        least, plan = self.least
        price = price_of(self.costs, plan, self.device)
        helps = ["more ranks for a sample (each then holds less of it)"]
        if self.costs.leads > 1:
            helps.append(f"fewer leads than {self.costs.leads}")
        if not self.offload:
            helps.append("offloading boundaries to the host")
        if not self.lead_wise:
            helps.append("a lead-wise plan")
        words = plan.in_words(self.costs.units).replace("\n", "; ")
        return (
            f"a budget of {size(budget)} cannot be met: the least that any plan reaches is "
            f"{size(least)}, with {100 * price.extra_compute:+.1f} % of compute "
            f"and {price.waiting_seconds:.3g} s a step waiting for copies ({words}). Give "
            f"{size(least)} or more; what else helps: {', '.join(helps)}."
        )


class _Bounds:
    """Prices that no plan of the leads to come can be below, see the module."""

    def __init__(self, leads: Sequence[_Lead], room: int) -> None:
        last = leads[-1].front
        kinds = list({id(lead): lead for lead in leads[:-1]}.values())
        slopes = [np.zeros(1), _slopes(last.peak, last.seconds)]
        slopes += [_slopes(lead.front.resident, lead.front.seconds) for lead in kinds]
        self._slopes = np.unique(np.concatenate(slopes))
        # (slope, plan): what a plan of a kind of lead contributes.
        parts = {
            id(lead): lead.front.seconds + self._slopes[:, None] * lead.front.resident
            for lead in kinds
        }
        end = last.seconds + self._slopes[:, None] * last.peak
        self._to_come = [np.zeros_like(self._slopes), end.min(1) - self._slopes * room]
        for lead in reversed(leads[:-1]):
            self._to_come.append(self._to_come[-1] + parts[id(lead)].min(1))
        self._to_come.reverse()
        whole = self._to_come[0]
        self.lowest = float(whole.max())
        self._sharpest = np.argsort(-whole)
        # Of a whole step in which one lead has this plan.
        with_plan = {
            key: (whole[:, None] + part - part.min(1, keepdims=True)).max(0)
            for key, part in parts.items()
        }
        self._with_plan = [with_plan[id(lead)] for lead in leads[:-1]]
        self._with_plan.append((whole[:, None] + end - end.min(1, keepdims=True)).max(0))

    def worth_trying(self, number: int, limit: float) -> np.ndarray:
        """Plans of lead 1, 2, ... with which a step may be within a limit."""
        return np.flatnonzero(self._with_plan[number - 1] <= limit)

    def below(
        self, done: int, resident: np.ndarray, seconds: np.ndarray, limit: float
    ) -> np.ndarray:
        """Which states after so many leads may still end within a limit."""
        if done == len(self._with_plan):
            return seconds <= limit
        left = np.arange(len(seconds))
        for place in self._sharpest:
            slope, rest = self._slopes[place], self._to_come[done][place]
            left = left[seconds[left] + slope * resident[left] + rest <= limit]
        good = np.zeros(len(seconds), bool)
        good[left] = True
        return good


def _slopes(grows: np.ndarray, falls: np.ndarray) -> np.ndarray:
    """Seconds saved per byte along the lower convex hull of a front."""
    hull: list[tuple[int, float]] = []
    for place in np.lexsort((falls, grows)):
        x, y = int(grows[place]), float(falls[place])
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and (y - hull[-2][1]) * (hull[-1][0] - hull[-2][0]) <= (
            hull[-1][1] - hull[-2][1]
        ) * (x - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    edges = pairwise(hull)
    return np.array([(a[1] - b[1]) / (b[0] - a[0]) for a, b in edges if b[0] > a[0]])


def size(num_bytes: int) -> str:
    """In GiB, MiB or bytes, rounded up so that what is asked for is enough."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= one:
            return f"{math.ceil(num_bytes * 100 / one) / 100:.2f} {unit}"
    return f"{num_bytes} bytes"
