"""Sums that scores are made from: they add up over times and over processes.

Every process makes the `Sums` of its own (init, lead) pairs, `a + b` merges them, and a score is
made once, at the end, from the total. So unequal shares, a last batch or a fourth process change
nothing (a mean of means would).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SOURCES = ("model", "persistence", "climatology")
"""What is compared with the truth, always over the same cells and times."""
QUANTITIES = (
    "error",
    "squared_error",
    "absolute_error",
    "anomaly_product",
    "anomaly_squared",
)
"""Of f from the truth o and the climatology c: f - o, (f - o)^2, |f - o|, (f - c)(o - c) and
(f - c)^2. The truth's own (o - c)^2 is the climatology's squared error."""
ACTIVE = (*SOURCES, "truth")
"""Whose anomalies from the climatology have an activity."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """Area-weighted sums per lead and channel, float64. Position 0 of `lead` is one model step.

    names: the channels. samples: (lead,) number of (init, lead) pairs. cells: (lead, channel)
    counted cells. weight: (lead, channel) their area in m2.
    values: (source, quantity, lead, channel) in m2 x the channel's units, or units squared.
    activity: (`ACTIVE`, lead, channel) in m2 x units squared, sums of (a - mean of a)^2 of the
    anomaly a; the mean over the area is taken off each field. So these add up over whole fields
    only, all others also over stripes of rows.
    """

    names: tuple[str, ...]
    samples: np.ndarray
    cells: np.ndarray
    weight: np.ndarray
    values: np.ndarray
    activity: np.ndarray

    @classmethod
    def zero(cls, names: Sequence[str], num_leads: int) -> "Sums":
        """The sums over nothing: a process that owns no pair starts and ends with them."""
        shape = (num_leads, len(names))
        return cls(
            names=tuple(names),
            samples=np.zeros(num_leads, np.int64),
            cells=np.zeros(shape, np.int64),
            weight=np.zeros(shape),
            values=np.zeros((len(SOURCES), len(QUANTITIES), *shape)),
            activity=np.zeros((len(ACTIVE), *shape)),
        )

    def __add__(self, other: "Sums") -> "Sums":
        if self.names != other.names or self.samples.shape != other.samples.shape:
            raise ValueError(
                f"sums of {len(self.samples)} leads of {', '.join(self.names)} and of"
                f" {len(other.samples)} leads of {', '.join(other.names)} do not add up"
            )
        return Sums(
            names=self.names,
            samples=self.samples + other.samples,
            cells=self.cells + other.cells,
            weight=self.weight + other.weight,
            values=self.values + other.values,
            activity=self.activity + other.activity,
        )

    def of(self, source: str, quantity: str) -> np.ndarray:
        """(lead, channel)."""
        return self.values[SOURCES.index(source), QUANTITIES.index(quantity)]


def pair_sums(
    names: Sequence[str],
    num_leads: int,
    lead: int,
    forecast: np.ndarray,
    truth: np.ndarray,
    persistence: np.ndarray,
    climatology: np.ndarray,
    *,
    counted: np.ndarray,
    cell_area: np.ndarray,
    where: str,
) -> Sums:
    """The sums of one initial time and one lead.

    lead: position from 0. Fields: (channel, lat, lon) in the channels' units, NaN where there is
    no value; persistence is the store's field at the initial time.
    counted: (channel, lat, lon) bool, wet and in the region. cell_area: (lat, lon) in m2.
    A cell counts where it is `counted` and truth and both references are finite. A forecast
    without a finite value there is a ValueError that says `where`, not a smaller sample.
    """
    sums = Sums.zero(names, num_leads)
    sums.samples[lead] = 1
    for channel, name in enumerate(names):
        present = counted[channel] & np.isfinite(truth[channel])
        lost = present & ~np.isfinite(forecast[channel])
        if lost.any():
            row, column = (int(i) for i in np.argwhere(lost)[0])
            raise ValueError(
                f"the forecast of {name} at {where} has no finite value in {int(lost.sum())} of"
                f" {int(present.sum())} sea cells where the truth has one (the first at row {row},"
                f" column {column}); a forecast covers all of them: forecast again, or score a"
                " region that it covers"
            )
        present &= np.isfinite(persistence[channel]) & np.isfinite(climatology[channel])
        area, f, o, p, c = (
            field[present].astype(np.float64)
            for field in (
                cell_area,
                forecast[channel],
                truth[channel],
                persistence[channel],
                climatology[channel],
            )
        )
        sums.cells[lead, channel] = area.size
        sums.weight[lead, channel] = area.sum()
        weighted_anomaly = area * (o - c)
        for active, field in enumerate((f, p, c, o)):
            sums.activity[active, lead, channel] = activity_sum(area, field - c)
        for source, field in enumerate((f, p, c)):
            error, anomaly = field - o, field - c
            weighted = area * error
            sums.values[source, :, lead, channel] = (
                weighted.sum(),
                weighted @ error,
                area @ np.abs(error),
                weighted_anomaly @ anomaly,
                (area * anomaly) @ anomaly,
            )
    return sums


def activity_sum(area: np.ndarray, anomaly: np.ndarray) -> float:
    """The sum of area x (anomaly - its mean over the area)^2, of (cell,) arrays each."""
    centred = anomaly - area @ anomaly / max(area.sum(), 1e-300)
    return float((area * centred) @ centred)
