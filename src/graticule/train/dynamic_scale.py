"""Factors of the predicted channels that follow the inverse of their errors (Samudra).

    loss that is minimised = sum over leads k and channels c of  w_c S_kc / W      (`loss.py`)
    E_c   = C S_1c / W, the first lead's error of channel c: their mean is that lead's loss
    w_c  <- (24 w_c + 1 / E_c) / 25,   w_c = 1 before the first step

A channel, that is a variable at a level, has one factor for all output times. The errors are those
that the step has computed anyway, summed over micro-batches and ranks before they are used: the
factors are a function of the steps alone, the same on all ranks and in all layouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 24
"""Steps: of 25 parts of a new factor, those that the former one makes."""


@dataclass
class DynamicScale:
    """factors: by predicted channel. limit: the largest inverse error relative to the least of that
    step; 0: none."""

    factors: list[float]
    limit: float = 0.0

    @classmethod
    def of(cls, channels: int, limit: float = 0.0) -> "DynamicScale":
        return cls([1.0] * channels, limit)

    def update(self, errors: Sequence[float]) -> None:
        """Take in a step's E. A channel without any error, one that is all land for instance, keeps
        its factor: its inverse says nothing."""
        assert len(errors) == len(self.factors), (len(errors), len(self.factors))
        inverses = [1 / error if error > 0 else math.inf for error in errors]
        most = self.limit * min(inverses) if self.limit else math.inf
        for channel, inverse in enumerate(inverses):
            if math.isfinite(inverse):
                former = self.factors[channel]
                self.factors[channel] = (MEMORY * former + min(inverse, most)) / (MEMORY + 1)
