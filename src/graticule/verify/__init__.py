"""`graticule verify`: whether a recipe's model gives the same numbers on every layout.

Each layout runs in float64 on processes of this machine, which share made-up fields as they would
share real ones, and is compared with one process: predictions, the gradient of the inputs, the
gradients of the weights, their norm, and weights and running statistics after three steps of SGD.
The difference of a from b is max|a - b| / max(max|b|, floor); the floor is a thousandth of the
largest gradient, since some true gradients are zero (that of a key's bias), and only for gradients.
"""

from graticule.verify.compare import (
    LAYOUTS,
    Replay,
    Verdict,
    reduced,
    replay,
    tolerance_of,
    verify,
)
from graticule.verify.measure import QUANTITIES, Results, difference, measure

__all__ = [
    "LAYOUTS",
    "QUANTITIES",
    "Replay",
    "Results",
    "Verdict",
    "difference",
    "measure",
    "reduced",
    "replay",
    "tolerance_of",
    "verify",
]
