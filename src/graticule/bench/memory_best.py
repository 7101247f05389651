"""`graticule bench memory-best`: the least memory of TERRA's four configurations, and its price.

The small model over ten leads, one rank of those that share a sample, traced on fake tensors: no
accelerator and no other rank. Padded 2304 x 4352 as the paper's runs, given to the model as the
grid itself; the model's own padded shape of 2041 x 4320 points beside it. Precision fp16 (the
recipe's), each field packed on its way to the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graticule.assemble import Shapes, shapes_of_config
from graticule.bench.rows import Row, Setting
from graticule.cluster.devices import device
from graticule.config import Config, MemoryConfig
from graticule.memory.choose import Chooser, Chosen
from graticule.recipes import recipe
from graticule.train.budget import chooser_of

TITLE = "memory of TERRA's small model over ten leads: least budgets, and budget against compute"
GIB = 2**30
PADDED = (2304, 4352)
LEADS = 10
DEVICE = "h100-80"
CONFIGURATIONS = ((2, 4), (2, 8), (4, 1), (4, 2))
"""(patch, ranks that share a sample), as in Table VI and Figs. 13 and 14."""
FACTORS = (1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Budgets of the table, over the least one."""


@dataclass(frozen=True)
class Goal:
    """At most `budget_gib` at most `extra` of compute, without offload."""

    patch: int
    ranks: int
    budget_gib: float
    extra: float


GOALS = (Goal(2, 4, 20.0, 0.25), Goal(2, 1, 69.0, 0.25), Goal(4, 1, 35.0, 0.25))


def case(patch: int, ranks: int, *, padded: bool = True) -> tuple[Config, Shapes]:
    """The recipe of a patch on so many ranks. padded: with the paper's padded field as its grid."""
    base = recipe({2: "wenhai-small-p2", 4: "wenhai-small"}[patch])
    config = replace(
        base,
        data=replace(base.data, grid=PADDED if padded else base.data.grid),
        mesh=replace(base.mesh, window=ranks),
        train=replace(base.train, leads=LEADS, accumulation=1),
        memory=MemoryConfig(offload=False),
    )
    return config, shapes_of_config(config)


def rows(setting: Setting) -> list[Row]:
    """Goals first, each with the model's own padded shape after it; then the tables."""
    known: dict[tuple[int, int, bool], Chooser] = {}

    def without_offload(patch: int, ranks: int, padded: bool) -> Chooser:
        key = patch, ranks, padded
        if key not in known:
            setting.say(
                f"tracing patch {patch} on {ranks} ranks{'' if padded else ', own padding'}"
            )
            config, shapes = case(patch, ranks, padded=padded)
            known[key] = chooser_of(config, shapes, device(DEVICE), ranks=ranks)
        return known[key]

    found: list[Row] = []
    for goal in GOALS:
        for padded in (True, False):
            chooser = without_offload(goal.patch, goal.ranks, padded)
            found.append(_goal_row(goal, chooser, padded))
    for patch, ranks in CONFIGURATIONS:
        here = without_offload(patch, ranks, True)
        away = Chooser(here.profile, here.rates, offload=True)
        for name, chooser in (("", here), (" with offload", away)):
            found += _table(f"p{patch} DMP{ranks}{name}", chooser)
    return found


def _goal_row(goal: Goal, chooser: Chooser, padded: bool) -> Row:
    """Ours: the least peak at no more than the goal's extra compute."""
    within = _cheap_enough(chooser, goal.extra)
    what = f"p{goal.patch} DMP{goal.ranks}{'' if padded else ' own padding'}"
    least = chooser.least
    if within is None:
        return Row(
            what, least.peak / GIB, goal.budget_gib, None, "GiB",
            f"no plan within {100 * goal.extra:.0f} % of extra compute; the least takes"
            f" {100 * least.price.extra_compute:+.1f} %",
        )  # fmt: skip
    owners = ", ".join(f"{name} {n / GIB:.2f}" for name, n in list(within.owners.items())[:4])
    return Row(
        what, within.peak / GIB, goal.budget_gib, 1.0, "GiB",
        f"extra compute {100 * within.price.extra_compute:+.1f} %; {owners}; in the"
        f" {within.at_peak}; no offload",
        at_most=True,
    )  # fmt: skip


def _cheap_enough(chooser: Chooser, extra: float) -> Chosen | None:
    """The smallest of a few budgets whose plan has no more than so much extra compute."""
    for factor in (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0):
        chosen = chooser.at(int(factor * chooser.least.peak))
        if chosen.price.extra_compute <= extra:
            return chosen
    return None


def _table(name: str, chooser: Chooser) -> Iterator[Row]:
    """Of each budget what is used of it; the price stands in the note."""
    for factor in FACTORS:
        budget = int(factor * chooser.least.peak)
        chosen = chooser.at(budget)
        price = chosen.price
        moved = (price.offload_sampling + price.offload_transformer) / GIB
        yield Row(
            f"{name} at {budget / GIB:.2f} GiB", chosen.peak / GIB, budget / GIB, None, "GiB",
            f"extra compute {100 * price.extra_compute:+.1f} %, to the host {moved:.1f} GiB,"
            f" waiting {price.waiting_seconds:.2f} s a step on {DEVICE}"
            + ("; lead-wise" if chosen.plan.lead_wise else ""),
        )  # fmt: skip
