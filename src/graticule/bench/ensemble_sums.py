"""Scores of the forecasts of `graticule bench ensembles`, by initial time, and their intervals.

All of them come from the sums that `graticule evaluate` makes of a field's members, each channel's
over its training standard deviation, so that channels can be averaged. What is not an ensemble is
one of one member, and several runs' forecasts are one of as many.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.data.times import seconds_of
from graticule.evaluate.ensemble_sums import QUANTITIES, FieldSums
from graticule.forecast.reader import open_forecast
from graticule.keyed import keyed

RESAMPLES = 2000
BLOCK_HOURS = 72
"""Initial times that are drawn together: those of three days, in which a jet's waves pass on."""


@dataclass(frozen=True, eq=False)
class Members:
    """Scores of m members, mean over area and channels, in training standard deviations.

    All (init, lead): mean square error of the mean, variance between members (with m - 1 below),
    mean absolute error of a member, mean absolute difference of two. Of one member the second and
    the last are 0.
    """

    num: int
    square: np.ndarray
    variance: np.ndarray
    absolute: np.ndarray
    difference: np.ndarray

    def crps(self, *, fair: bool = True) -> np.ndarray:
        """(init, lead); of one member, which has no fair one, the absolute error."""
        share = 1.0 if fair else 1 - 1 / self.num
        return self.absolute - share * self.difference / 2

    def rmse(self) -> np.ndarray:
        """(lead,) of the mean over members."""
        return np.sqrt(self.square.mean(0))

    def spread_skill(self) -> np.ndarray:
        """(lead,) with the factor for m members; 1 where spread and error are alike."""
        factor = (self.num + 1) / self.num
        return np.sqrt(factor * self.variance.mean(0) / self.square.mean(0))

    def to_dict(self) -> dict[str, object]:
        return {"num": self.num, **{name: getattr(self, name).tolist() for name in _ARRAYS}}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> "Members":
        return cls(int(str(values["num"])), *(np.array(values[name]) for name in _ARRAYS))


_ARRAYS = ("square", "variance", "absolute", "difference")


def mean_over(several: Sequence[Members]) -> Members:
    """Of several seeds, which have the same initial times."""
    arrays = (np.mean([getattr(each, name) for each in several], 0) for name in _ARRAYS)
    return Members(several[0].num, *arrays)


def scored(paths: Sequence[Path], store: Path, sizes: Sequence[int] = ()) -> list[Members]:
    """Scores of the forecasts at `paths`, whose members, or who, are those of one ensemble.

    store: the truth. sizes: of the first so many members each; none: of all.
    """
    truth = Store(store)
    std = Statistics.load(truth).aligned(truth.channels.names)[1]
    with ExitStack() as stack:
        opened = [stack.enter_context(open_forecast(path)) for path in paths]
        first = opened[0]
        shape = len(first.init_times), first.num_leads
        area = np.broadcast_to(truth.grid.cell_area, truth.grid.shape)
        position = {int(second): i for i, second in enumerate(truth.times.seconds)}
        totals: list[np.ndarray] = []
        for init, lead in np.ndindex(shape):
            y = truth.read(position[seconds_of(first.valid_times[init, lead])])
            x = np.stack(
                [each.read(init, lead, member) for each in opened
                 for member in ([None] if each.num_members is None else range(each.num_members))]
            )  # fmt: skip
            sizes = sizes or [len(x)]
            for num in sizes:
                totals.append(_sums(x[:num], y, area))
    # (size, quantity, init, lead, channel)
    sums = np.array(totals).reshape(*shape, len(sizes), len(QUANTITIES), -1)
    sums = sums.transpose(2, 3, 0, 1, 4)
    found = []
    for num, values in zip(sizes, sums, strict=True):
        weight, absolute, difference, square, variance = values
        found.append(
            Members(
                num,
                *(
                    (some / weight / scale).mean(-1)
                    for some, scale in (
                        (square, std**2),
                        (variance, std**2),
                        (absolute, std),
                        (difference, std),
                    )
                ),
            )
        )
    return found


def _sums(x: np.ndarray, y: np.ndarray, area: np.ndarray) -> np.ndarray:
    """(quantity, channel) of one field's members. x: (member, channel, lat, lon)."""
    sums = FieldSums.zero(len(y), len(x))
    for channel, field in enumerate(y):
        sums.add(channel, x[:, channel], field, np.isfinite(field), area, key=(0, 0))
    return sums.values


def interval(
    statistic: Callable[[np.ndarray], float], num_inits: int, hours: float, *, level: float = 0.95
) -> tuple[float, float]:
    """Of a statistic of some initial times, over moving blocks of them (Kuensch, 1989).

    statistic: of the positions of the times that are drawn. hours: between two initial times.
    """
    # At least two blocks: of one there is nothing to draw.
    length = max(1, min(num_inits // 2, round(BLOCK_HOURS / hours)))
    draw = keyed(0, "bootstrap", num_inits, length)
    blocks = -(-num_inits // length)
    found = []
    for _ in range(RESAMPLES):
        first = draw.integers(num_inits - length + 1, size=blocks)
        positions = (first[:, None] + np.arange(length)).ravel()[:num_inits]
        found.append(statistic(positions))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
