"""The plan for a budget: found with costs, judged by the timeline of the step it makes.

The searches (`search`, `published`) know a segment by a few numbers, and their peaks are a few
percent off those of the composed timeline (`profile`), which are those of a real step. So they are
asked with limits instead of the budget: the powers of 2^(1/64) from `_ABOVE` above it downwards,
until a plan's composed peak meets the budget. Of plans for the same limit the search's is never
dearer than the paper's; composed peaks may turn that round, and so mode `best` takes the cheapest
of what each kind of plan has to offer: its own, the paper's, and what it finds where nothing may go
to the host. The limits are the same for all budgets, so that a larger budget never has a dearer
plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from graticule.memory.costs import ProfileCosts
from graticule.memory.plan import Costs, Plan, Price, Rates, Segment, plain_plan, price_of
from graticule.memory.profile import Profile, Timeline
from graticule.memory.published import (
    checkpoint_plan,
    has_blocks,
    ladder,
    offloading,
    paper_plan,
    templates,
)
from graticule.memory.search import Search, size

Mode = Literal["best", "paper", "full", "simple", "none"]
"""As `config.MemoryConfig.mode`: the last three are one plan each, which a budget allows or not."""
_STEPS = 64
"""Limits per doubling: what is left of a budget is at most 1 %."""
_ABOVE = 1.08
"""Costs of lead-wise plans may exceed their composed peaks by this factor at most; what costs
more is not tried."""
_LOWEST = 8
"""Limits above the least by costs among whose plans the least by timelines is looked for."""


@dataclass(frozen=True, eq=False)
class Rated:
    """A plan and what it takes. peak: bytes of the composed step."""

    plan: Plan
    price: Price
    peak: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Chosen:
    """A plan and all that a reader asks of it.

    owners: bytes at the peak, most first. base: bytes held through the whole step.
    least: the plan with the least peak that was found in this mode.
    """

    plan: Plan
    price: Price
    timeline: Timeline
    units: tuple[str, ...]
    base: int
    budget: int | None
    mode: Mode
    least: Rated

    @property
    def peak(self) -> int:
        return self.timeline.peak_bytes

    @property
    def owners(self) -> dict[str, int]:
        return self.timeline.owners_at_peak

    @property
    def at_peak(self) -> str:
        """Which part of the step the peak is in."""
        what, lead = self.timeline.at_peak
        return _PHASES[what].format(lead=lead)

    def to_dict(self) -> dict[str, Any]:
        """For plan.json: bytes."""
        return {
            "mode": self.mode,
            "budget": self.budget,
            "peak": self.peak,
            "owners": self.owners,
            "base": self.base,
            "extra_compute": self.price.extra_compute,
            "offload": {
                "sampling": self.price.offload_sampling,
                "transformer": self.price.offload_transformer,
            },
            "units": list(self.units),
            "plan": self.plan.to_dict(),
        }


_PHASES = {
    "forward": "forward of lead {lead}",
    "ahead": "first pass of lead {lead}",
    "backward": "backward of lead {lead}",
    "end": "update of the weights",
}


def choose(
    profile: Profile,
    rates: Rates,
    budget: int | None,
    *,
    mode: Mode = "best",
    offload: bool = True,
) -> Chosen:
    """A plan of this mode whose step holds at most `budget` bytes; `best`: the cheapest.

    budget: base included; None: no limit (`best`: nothing is recomputed; `paper`: Eq. 5).
    offload: whether boundaries may go to the host.
    ValueError where no plan meets it: the least that one does, its price, and the ways out.
    """
    return Chooser(profile, rates, mode=mode, offload=offload).at(budget)


class Chooser:
    """One profile on one device, for as many budgets as you like."""

    def __init__(
        self,
        profile: Profile,
        rates: Rates,
        *,
        mode: Mode = "best",
        offload: bool = True,
        knows: "Chooser | None" = None,
    ) -> None:
        """knows: another one of the same profile and rates, whose costs and timelines serve."""
        self.profile, self.rates, self.mode, self.offload = profile, rates, mode, offload
        self.costs: ProfileCosts = knows.costs if knows else ProfileCosts(profile)
        self._rated: dict[Plan, Rated] = knows._rated if knows else {}
        self._tried: dict[int, Rated | None] = {}
        only: dict[Mode, Callable[[Costs], Plan]] = {
            "full": plain_plan,
            "simple": partial(plain_plan, action="simple"),
            "none": _all_kept,
        }
        self._only = only.get(mode)
        if mode == "paper" and not has_blocks(profile.units):
            checkpoint_plan(self.costs)  # raises: it says which units are wanted

    def at(self, budget: int | None) -> Chosen:
        """See `choose`."""
        found = self._unlimited() if budget is None else self._within(budget)
        if found is None:
            assert budget is not None
            raise ValueError(self._refusal(budget))
        return Chosen(
            plan=found.plan, price=found.price, timeline=self.profile.timeline(found.plan),
            units=self.profile.units, base=self.costs.base, budget=budget, mode=self.mode,
            least=self.least,
        )  # fmt: skip

    @cached_property
    def least(self) -> Rated:
        """The plan with the least composed peak that was found, the cheapest of several."""
        if self._only:
            return self._rate(self._only(self.costs))
        found = [self._rate(plan) for plan in self._thrifty()]
        if self.mode == "best":
            lowest = _index(self._search.least[0])
            tried = (self._try(lowest + above) for above in range(_LOWEST))
            found += [rated for rated in tried if rated]
        found += [other.least for other in self._within_ours]
        return min(found, key=lambda rated: (rated.peak, rated.price.seconds))

    @cached_property
    def _within_ours(self) -> "list[Chooser]":
        """Of kinds of plans that `best` has among its own. By costs the cheapest of a limit may be
        of another kind, and its composed peak too high where theirs is not."""
        if self.mode != "best":
            return []
        modes: list[tuple[Mode, bool]] = [("best", False)] if self.offload else []
        if has_blocks(self.profile.units):
            modes.append(("paper", self.offload))
        return [
            Chooser(self.profile, self.rates, mode=mode, offload=away, knows=self)
            for mode, away in modes
        ]

    @cached_property
    def _search(self) -> Search:
        profile = self.profile
        return Search(
            self.costs, self.rates, offload=self.offload,
            lead_wise=profile.leads == 1 or profile.lead_wise is not None,
        )  # fmt: skip

    def _thrifty(self) -> list[Plan]:
        """Plans with the least peaks by costs."""
        if self.mode == "best":
            return [self._search.least[1], self._search.in_graph().least[1]]
        plans = [checkpoint_plan(self.costs)]
        for template in templates(self.profile.units) if self.offload else ():
            peaks = ladder(self.costs, template)
            plans.append(offloading(self.costs, template, peaks.index(min(peaks))))
        return plans

    def _unlimited(self) -> Rated:
        if self._only:
            return self.least
        if self.mode == "paper":
            return self._rate(checkpoint_plan(self.costs))
        return self._rate(self._search.best(2**62))

    def _within(self, budget: int) -> Rated | None:
        """From the largest limit down to the first with a plan that fits."""
        if self.least.peak > budget:
            return None
        if self._only:
            return self.least
        if self.mode == "best" and (free := self._unlimited()).peak <= budget:
            return free
        index = _index(int(budget * _ABOVE))
        while (found := self._try(index)) and found.peak > budget:
            index -= 1
        if self.mode == "paper":
            return found or self.least
        fitting = [found, self.least, *(other._within(budget) for other in self._within_ours)]
        return min((one for one in fitting if one), key=lambda one: one.price.seconds)

    def _try(self, index: int) -> Rated | None:
        """The plan for a limit; None: nothing meets it by costs."""
        if index not in self._tried:
            limit = _limit(index)
            try:
                plan = (
                    self._search.best(limit)
                    if self.mode == "best"
                    else paper_plan(self.costs, limit, offload=self.offload)
                )
            except ValueError:
                self._tried[index] = None
            else:
                self._tried[index] = self._rate(plan)
        return self._tried[index]

    def _rate(self, plan: Plan) -> Rated:
        if plan not in self._rated:
            peak = self.profile.timeline(plan).peak_bytes
            self._rated[plan] = Rated(plan, price_of(self.costs, plan, self.rates), peak)
        return self._rated[plan]

    def _refusal(self, budget: int) -> str:
        least = self.least
        words = least.plan.in_words(self.profile.units).replace("\n", "; ")
        found = {
            "best": "the least that a plan was found for is",
            "paper": "the least that a plan of memory.mode=paper was found for is",
        }.get(self.mode, f"the plan of memory.mode={self.mode} takes")
        owners = self.profile.timeline(least.plan).owners_at_peak
        helps = ["more ranks for a sample, each of which then holds less of it (mesh.window)"]
        weights = sum(owners.get(name, 0) for name in _OF_WEIGHTS)
        if weights > least.peak / 4:
            helps.insert(
                0, f"ranks that share the weights (mesh.weights=sharded, mesh.tensor): of these"
                f" bytes {size(weights)} are weights, their gradients and the optimizer's"
            )  # fmt: skip
        helps.append("fewer samples a rank at a time, where it has several (train.batch, with"
                     " train.accumulation)")  # fmt: skip
        if self.profile.leads > 1:
            helps.append(f"fewer leads than {self.profile.leads} (train.leads)")
        if not self.offload and not self._only:
            helps.append("offloading boundaries to the host (memory.offload=true; on a CPU to a"
                         " disk, memory.folder)")  # fmt: skip
        if self.mode != "best":
            helps.append("memory.mode=best, which knows more plans")
        price = least.price
        return (
            f"a budget of {size(budget)} cannot be met: {found} {size(least.peak)}, with"
            f" {100 * price.extra_compute:+.1f} % of compute and {price.waiting_seconds:.3g} s a"
            f" step waiting for copies. Give {size(least.peak)} or more; what else helps:"
            f" {'; '.join(helps)}. Its plan: {words}."
        )


_OF_WEIGHTS = ("parameters", "gradients", "optimizer", "average", "gathered weights")


def _all_kept(costs: Costs) -> Plan:
    """The plan of `none`."""
    lead = (Segment(0, len(costs.units), "keep"),)
    return Plan((lead,) * costs.leads)


def _index(limit: int) -> int:
    return math.floor(_STEPS * math.log2(limit))


def _limit(index: int) -> int:
    return math.ceil(2 ** (index / _STEPS))
