"""Scores of ensembles: CRPS in three kinds, and spread against skill."""

from dataclasses import dataclass
from typing import Literal

import numpy as np


def crps(
    members: np.ndarray,
    observation: np.ndarray,
    *,
    kind: Literal["standard", "fair", "almost_fair"] = "standard",
    alpha: float = 0.95,
) -> np.ndarray:
    """Continuous ranked probability score of each point, in the field's units.

    members: (member, ...). observation: (...). Returns (...), float64. NaN propagates: mask land
    afterwards, by weight.

        mean_i |x_i - y|  -  S / (2 m^2),     S = sum_ij |x_i - x_j|

    `standard` is this, the score of the members as they are; of one member, the absolute error.
    `fair` divides S by 2 m (m - 1): what an infinite ensemble of such members would score (Ferro,
    2014), so it needs two members. `almost_fair` is alpha x fair + (1 - alpha) x standard (Lang
    et al., AIFS-CRPS, 2024).
    """
    if kind not in ("standard", "fair", "almost_fair"):
        raise ValueError(f"kind={kind!r} is none of standard, fair, almost_fair")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must lie in 0 to 1")
    observation = np.asarray(observation, np.float64)
    deviations = _deviations(members, observation)
    num = len(deviations)
    if num < 2 and kind != "standard":
        raise ValueError(
            f"the {kind} CRPS needs at least two members, there is {num}; use kind='standard'"
        )
    # Of sorted members, S = 2 sum_k (2 k - m - 1) x_k with k from 1: m log m, not m^2. The
    # observation cancels in S; taking it off first keeps digits where fields are far from zero.
    error = np.abs(deviations).mean(0)
    deviations.sort(axis=0)
    coefficients = 2.0 * np.arange(1, num + 1) - num - 1
    total = 2 * np.tensordot(coefficients, deviations, axes=1)
    share = {"standard": 0.0, "fair": 1.0, "almost_fair": alpha}[kind]
    per_pair = (1 - share) / num**2 + (share / (num * (num - 1)) if share else 0.0)
    return error - total * per_pair / 2


@dataclass(frozen=True, kw_only=True, eq=False)
class SpreadSkill:
    """Whether an ensemble's spread is as large as its error.

    spread: sqrt((m + 1) / m x mean variance between members). rmse: of the ensemble mean.
    ratio: spread / rmse, 1 for an ensemble whose members are like the truth, below 1 for one
    that is too sure. ratio_map: (...), the same at each cell over the samples, NaN in excluded
    cells. excluded: cells without weight, or without any spread and any error (0/0: prescribed
    cells, where every member is the truth); they touch no number.
    """

    spread: float
    rmse: float
    ratio: float
    ratio_map: np.ndarray
    excluded: int


def spread_skill(
    members: np.ndarray, observation: np.ndarray, weight: np.ndarray | None = None
) -> SpreadSkill:
    """Spread and error of an ensemble, pooled over samples and cells.

    members: (member, sample, ...) in the field's units. observation: (sample, ...).
    weight: (...), cell areas in any unit, 0 on land (where values may be NaN); none: all alike.

    The variance between m members divides by m - 1, and (m + 1) / m makes up for the error of a
    mean of only m members (Fortin et al., 2014). Where a cell has spread but no error at all, its
    ratio is infinite; the pooled numbers are not.
    """
    observation = np.asarray(observation, np.float64)
    deviations = _deviations(members, observation)
    num = len(deviations)
    if num < 2:
        raise ValueError(f"spread needs at least two members, there is {num}")
    cells = observation.shape[1:]
    weights = np.ones(cells) if weight is None else np.broadcast_to(weight, cells)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("weights must be finite and not negative")
    variance = (num + 1) / num * deviations.var(axis=0, ddof=1).mean(0)
    square = (deviations.mean(0) ** 2).mean(0)
    wet = weights > 0
    holes = wet & ~(np.isfinite(variance) & np.isfinite(square))
    if holes.any():
        raise ValueError(f"{int(holes.sum())} of {int(wet.sum())} cells with weight hold NaN")
    counted = wet & ((variance > 0) | (square > 0))
    if not counted.any():
        raise ValueError("no cell with weight has any spread or error: there is no ratio (0/0)")
    ratio_map = np.full(cells, np.nan)
    with np.errstate(divide="ignore"):
        ratio_map[counted] = np.sqrt(variance[counted] / square[counted])
    total = weights[counted].sum()
    spread = float(np.sqrt(weights[counted] @ variance[counted] / total))
    rmse = float(np.sqrt(weights[counted] @ square[counted] / total))
    if rmse == 0:
        raise ValueError(f"the ensemble mean has no error, spread {spread:g}: there is no ratio")
    return SpreadSkill(
        spread=spread,
        rmse=rmse,
        ratio=spread / rmse,
        ratio_map=ratio_map,
        excluded=int((~counted).sum()),
    )


def _deviations(members: np.ndarray, observation: np.ndarray) -> np.ndarray:
    """(member, ...) float64, members minus observation; ValueError where shapes differ."""
    members = np.asarray(members, np.float64)
    if members.ndim == 0 or members.shape[1:] != observation.shape or not len(members):
        raise ValueError(
            f"members {members.shape} must be (member, ...) over observation {observation.shape}"
        )
    return members - observation
