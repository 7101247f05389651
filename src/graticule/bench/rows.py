"""The one form of a result, and what a bench is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from graticule.tasks import Bar, no_bar


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the command line says to a bench.

    say: told what goes on. bar: (title, unit) -> progress bar.
    out: folder for what a bench makes; none: a temporary one, or for a bench that goes on where
    it was stopped a default of its own. seeds: of benches that train.
    """

    say: Callable[[str], None] = _silent
    bar: Bar = no_bar
    out: Path | None = None
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Row:
    """what: the row's name. ours, against: medians in `unit`; None: not measured, and the note
    says why. goal: the ratio that is wanted;
    None: no ratio is, and nothing holds or fails.

    at_most: the goal is the largest ratio that holds (errors), not the least (rates).
    within: how far from the goal the ratio may be, either way; None: as far as it likes.
    note: what a reader must know to trust the figures.
    """

    what: str
    ours: float | None
    against: float | None
    goal: float | None
    unit: str = ""
    note: str = ""
    at_most: bool = False
    within: float | None = None
    ratio: float | None = field(init=False)
    holds: bool | None = field(init=False)

    def __post_init__(self) -> None:
        ratio, holds = None, None
        if self.ours is not None and self.against is not None:
            ratio = self.ours / self.against
        object.__setattr__(self, "ratio", ratio)
        if ratio is None:
            pass
        elif self.goal is not None and self.within is not None:
            holds = abs(ratio - self.goal) <= self.within
        elif self.goal is not None:
            holds = ratio <= self.goal if self.at_most else ratio >= self.goal
        object.__setattr__(self, "holds", holds)
