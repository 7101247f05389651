"""The one form of a result."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """what: the row's name. ours, against: medians in `unit`. goal: the ratio that is wanted.

    note: what a reader must know to trust the figures.
    """

    what: str
    ours: float
    against: float
    goal: float
    unit: str = ""
    note: str = ""
    ratio: float = field(init=False)
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.ours / self.against)
        object.__setattr__(self, "holds", self.ratio >= self.goal)
