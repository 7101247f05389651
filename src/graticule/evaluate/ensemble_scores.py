"""Scores of an ensemble by lead: CRPS, spread and error, ranks, probabilities of events, energy."""

import textwrap
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from graticule.evaluate.ensemble_sums import DISTANCES, EnsembleSums
from graticule.grid import Grid
from graticule.variables import Channels

Kind = Literal["standard", "fair", "almost_fair"]
ALPHA = 0.95
"""Of the almost fair CRPS, as it is published (Lang et al., AIFS-CRPS, 2024)."""
ONE_MEMBER = (
    "one member has no spread: fair scores, spread, the ratio of spread to error and the fair"
    " Brier score need two, and are left out"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reliability:
    """A probability that is given, and how often the event then is, by the number of members.

    probability: (member + 1,), from 0 to 1. weight: (lead, member + 1) share of all cells and
    times. observed: (lead, member + 1) share of these with the event, NaN where there are none.
    """

    probability: np.ndarray
    weight: np.ndarray
    observed: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class EnsembleScores:
    """Scores of a forecast with members, pooled by area over cells and initial times.

    Arrays run over all leads of the forecast, NaN where none has a truth.

    lead_seconds: (lead,). init_seconds: (init,), valid_seconds: (init, lead), since 1970 in
    `calendar`. grid: of the point that the plumes are at. attributes: provenance.
    """

    sums: EnsembleSums
    channels: Channels
    grid: Grid
    lead_seconds: np.ndarray
    init_seconds: np.ndarray
    valid_seconds: np.ndarray
    calendar: str
    normalised: bool
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return self.sums.names

    @property
    def num_members(self) -> int:
        return self.sums.num_members

    @cached_property
    def weight(self) -> np.ndarray:
        """(init, lead, channel) m2 that were scored."""
        return self.sums.of("weight")

    @cached_property
    def scored(self) -> np.ndarray:
        """(init, lead) bool, the pairs that have a truth."""
        return self.weight.max(2) > 0

    @cached_property
    def leads(self) -> list[int]:
        """Labels of the leads with a truth, 1 for one model step."""
        return [int(k) + 1 for k in np.flatnonzero(self.scored.any(0))]

    @property
    def point(self) -> tuple[float, float]:
        """(lat, lon) degrees of the cell that the plumes are at."""
        row, column = self.sums.point
        return float(self.grid.lat[row]), float(self.grid.lon[column])

    # CRPS

    def crps(
        self, kind: Kind = "fair", *, alpha: float = ALPHA, by_start: bool = False
    ) -> np.ndarray:
        """(lead, channel), or (init, lead, channel), in the channels' units; see `ensemble.crps`.

        ValueError where a fair one is asked of one member.
        """
        error, difference = (self._mean(q, by_start) for q in ("absolute_error", "difference"))
        return error - difference * self._share(kind, alpha) / 2

    def energy(self, kind: Kind = "fair", *, alpha: float = ALPHA) -> np.ndarray:
        """(lead, channel + 1) energy score of whole fields (Gneiting and Raftery, 2007), the mean
        over initial times.

        The CRPS with the distance of two fields, their root mean square difference over the area,
        in place of |x - y|. Of each channel in its units; last, of all channels together, each
        over its training standard deviation, NaN without these.
        """
        number = self.scored.sum(0)[:, None]
        error, difference = (_quotient(self.sums.energy[DISTANCES.index(name)].sum(0), number)
                             for name in ("error", "difference"))  # fmt: skip
        score = error - difference * self._share(kind, alpha) / 2
        some = np.append(self.weight.sum((0, 1)) > 0, self.normalised)
        return np.where(some, score, np.nan)

    def _share(self, kind: Kind, alpha: float) -> float:
        """Of half the mean difference of two members: 1 fair, (m - 1) / m of the members alone."""
        if kind not in ("standard", "fair", "almost_fair"):
            raise ValueError(f"kind={kind!r} is none of standard, fair, almost_fair")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha} must lie in 0 to 1")
        if kind != "standard":
            self._need_two(f"the {kind} score")
        fair = {"standard": 0.0, "fair": 1.0, "almost_fair": alpha}[kind]
        return 1 - (1 - fair) / self.num_members

    def _need_two(self, what: str) -> None:
        if self.num_members < 2:
            raise ValueError(f"{what} needs at least two members, there is {self.num_members}")

    # Spread and error

    def rmse(self) -> np.ndarray:
        """(lead, channel) of the mean over members, in the channels' units."""
        return np.sqrt(self._mean("squared_error"))

    def rmse_of_members(self) -> np.ndarray:
        """(lead, channel) of one member, over all of them."""
        m = self.num_members
        return np.sqrt(self._mean("squared_error") + (m - 1) / m * self._mean("variance"))

    def spread(self) -> np.ndarray:
        """(lead, channel) sqrt((m + 1) / m x mean variance between members): the RMSE of the mean
        of m members that are like the truth (Fortin et al., 2014). Averaged before the root."""
        self._need_two("spread")
        m = self.num_members
        return np.sqrt((m + 1) / m * self._mean("variance"))

    def spread_skill(self) -> np.ndarray:
        """(lead, channel) spread / RMSE of the mean: 1 where they are alike, below 1 for an
        ensemble that is too sure. NaN where there is no error to compare with.

        Cells that are prescribed, where every member is the truth, add nothing to either side.
        """
        return _quotient(self.spread(), self.rmse())

    def spread_skill_unbiased(self) -> np.ndarray:
        """(lead, channel) the root of variance / (squared error of the mean - variance / m): equal
        to `spread_skill` where that is 1. NaN where the error is smaller than chance alone has it.
        """
        self._need_two("spread")
        variance = self._mean("variance")
        error = self._mean("squared_error") - variance / self.num_members
        return np.sqrt(_quotient(variance, error))

    def _mean(self, quantity: str, by_start: bool = False) -> np.ndarray:
        sums, weight = self.sums.of(quantity), self.weight
        return _quotient(sums, weight) if by_start else _quotient(sums.sum(0), weight.sum(0))

    # Ranks and events

    def ranks(self) -> np.ndarray:
        """(lead, channel, member + 1) share of the area and times where so many members lie below
        the truth; each 1 / (m + 1) for members like the truth. Among equal values the truth has a
        rank that is drawn by key."""
        total = self.sums.ranks.sum(-1, keepdims=True)
        return _quotient(self.sums.ranks, np.broadcast_to(total, self.sums.ranks.shape))

    def outliers(self) -> np.ndarray:
        """(lead, channel) share where the truth lies beyond all members; 2 / (m + 1) is usual."""
        return self.ranks()[..., [0, -1]].sum(-1)

    def reliability(self, threshold: int) -> Reliability:
        """Of an event, by position in `sums.thresholds`."""
        events = self.sums.events[threshold]  # (lead, member + 1, 2)
        total = events[..., 0].sum(-1, keepdims=True)
        return Reliability(
            probability=np.arange(self.num_members + 1) / self.num_members,
            weight=_quotient(events[..., 0], np.broadcast_to(total, events.shape[:2])),
            observed=_quotient(events[..., 1], events[..., 0]),
        )

    def brier(self, threshold: int, *, fair: bool = False) -> np.ndarray:
        """(lead,) mean of (p - o)^2 with p the share of members that have the event, o 0 or 1.

        fair: less the mean of p (1 - p) / (m - 1), what more members would take off (Ferro, 2014).
        """
        found = self.reliability(threshold)
        p, often = found.probability, np.nan_to_num(found.observed)
        score = (found.weight * (often * (1 - p) ** 2 + (1 - often) * p**2)).sum(-1)
        if fair:
            self._need_two("the fair Brier score")
            score = score - (found.weight * p * (1 - p)).sum(-1) / (self.num_members - 1)
        return score

    def brier_parts(self, threshold: int) -> dict[str, np.ndarray]:
        """(lead,) each: Brier score = reliability - resolution + uncertainty (Murphy, 1973), and
        how often the event is."""
        found = self.reliability(threshold)
        weight, often = found.weight, np.nan_to_num(found.observed)
        base = (weight * often).sum(-1)
        return {
            "reliability": (weight * (found.probability - often) ** 2).sum(-1),
            "resolution": (weight * (often - base[:, None]) ** 2).sum(-1),
            "uncertainty": base * (1 - base),
            "frequency": base,
        }

    # In short

    def told(self) -> dict[str, Any]:
        """The scores as JSON holds them; None where one is not defined."""
        several = self.num_members > 1
        columns: dict[str, np.ndarray] = {
            "rmse": self.rmse(), "rmse_of_members": self.rmse_of_members(),
            "crps": self.crps("standard"), "energy": self.energy("standard")[:, :-1],
            "outliers": self.outliers(),
        }  # fmt: skip
        if several:
            columns |= {
                "spread": self.spread(), "spread_skill": self.spread_skill(),
                "spread_skill_unbiased": self.spread_skill_unbiased(),
                "fair_crps": self.crps("fair"), "almost_fair_crps": self.crps("almost_fair"),
                "fair_energy": self.energy("fair")[:, :-1],
            }  # fmt: skip
        rows = [
            {"channel": channel.name, "units": channel.units, "lead": lead,
             "lead_hours": float(self.lead_seconds[lead - 1]) / 3600,
             **{key: _plain(values[lead - 1, i]) for key, values in columns.items()}}
            for i, channel in enumerate(self.channels)
            for lead in self.leads
        ]  # fmt: skip
        return {
            "members": self.num_members,
            "left_out": None if several else ONE_MEMBER,
            "alpha": ALPHA,
            "rows": rows,
            "energy_of_all": self._energy_of_all(several) if self.normalised else None,
            "thresholds": [row for i in range(len(self.sums.thresholds))
                           for row in self._event_told(i, several)],
        }  # fmt: skip

    def _energy_of_all(self, several: bool) -> list[dict[str, Any]]:
        kinds: tuple[Kind, ...] = ("standard", "fair") if several else ("standard",)
        scores = {"fair_energy" if kind == "fair" else "energy": self.energy(kind)[:, -1]
                  for kind in kinds}  # fmt: skip
        return [{"lead": lead, **{k: _plain(v[lead - 1]) for k, v in scores.items()}}
                for lead in self.leads]  # fmt: skip

    def _event_told(self, threshold: int, several: bool) -> list[dict[str, Any]]:
        parts = {"brier": self.brier(threshold), **self.brier_parts(threshold)}
        if several:
            parts["fair_brier"] = self.brier(threshold, fair=True)
        return [
            {"threshold": str(self.sums.thresholds[threshold]), "lead": lead,
             **{key: _plain(values[lead - 1]) for key, values in parts.items()}}
            for lead in self.leads
        ]  # fmt: skip

    def lines(self, width: int) -> list[str]:
        """What a terminal shows of it, at most `width` columns wide."""
        last = self.leads[-1]
        hours = float(self.lead_seconds[last - 1]) / 3600
        when = f"{hours / 24:.4g} d" if hours >= 24 else f"{hours:.4g} h"
        kind: Kind = "fair" if self.num_members > 1 else "standard"
        crps = self.crps(kind)[last - 1]
        number = f"{self.num_members} member{'s' if self.num_members > 1 else ''}"
        found = [
            f"Ensemble of {number}; the errors above are of its mean."
            f" {'Fair CRPS' if kind == 'fair' else 'CRPS'} at {when}: "
            + _listed(f"{name} {_short(crps[i])} {self.channels[i].units}"
                      for i, name in enumerate(self.names))
            + "."
        ]  # fmt: skip
        if self.num_members > 1:
            ratio = self.spread_skill()[[lead - 1 for lead in self.leads]]
            parts = [f"{name} {_span(ratio[:, i])}" for i, name in enumerate(self.names)]
            found.append(f"Spread / error of the mean over leads: {_listed(parts)}.")
        else:
            found.append(f"Not told: {ONE_MEMBER}.")
        for i, threshold in enumerate(self.sums.thresholds):
            parts_of = self.brier_parts(i)
            found.append(
                f"Brier score of {threshold} at {when}: {_short(self.brier(i)[last - 1])}, of"
                f" always giving its frequency {_short(parts_of['uncertainty'][last - 1])}."
            )
        return [line for text in found for line in textwrap.wrap(text, width)]


def _quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """NaN where there is nothing to divide by."""
    above, below = np.broadcast_arrays(above, below)
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _plain(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _short(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "-"


def _span(values: np.ndarray) -> str:
    some = values[np.isfinite(values)]
    return f"{some.min():.2f} to {some.max():.2f}" if some.size else "not defined"


def _listed(parts: Any, most: int = 6) -> str:
    told = list(parts)
    more = f" and {len(told) - most} channels more" if len(told) > most else ""
    return ", ".join(told[:most]) + more
