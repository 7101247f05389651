"""A model as a chain of units, the smallest parts that a memory plan keeps or computes again.

A unit takes and gives a state, one or two tensors, and nothing else passes from one to the next.
A runner is what calls them: `straight`, one after another, or as a plan says (`memory/apply`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

State = tuple[Tensor, ...]


class Tiled(NamedTuple):
    """Several units as one, some rows at a time, that keeps what enters it and nothing else.

    num_units: from the one that offers it on. run: takes a number of row tiles and the state's
    tensors; the same numbers and gradients as the units', to rounding.
    """

    num_units: int
    run: Callable[..., State]


class Unit(NamedTuple):
    """name: as memory plans call it. run: takes the state's tensors, gives the next state."""

    name: str
    run: Callable[..., State]
    tiled: Tiled | None = None


Runner = Callable[[Sequence[Unit], State], State]


def straight(units: Sequence[Unit], state: State) -> State:
    """The state after all units."""
    for unit in units:
        state = unit.run(*state)
    return state
