"""Scores of the forecasts of `graticule bench ensembles`, by initial time, and their intervals.

They are those of `graticule evaluate`, without what it tells besides, each channel's over its
training standard deviation, so that channels can be averaged. What is not an ensemble is one of one
member, and several runs' forecasts are one of all their members.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.data.times import seconds_of
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

    store: the truth. sizes: of so many members each, for every initial time others, since weights
    are one draw over all of them and the luck of a few would never average out; none: of all.
    """
    truth = Store(store)
    scale = Statistics.load(truth).aligned(truth.channels.names)[1][:, None, None]
    with ExitStack() as stack:
        opened = [stack.enter_context(open_forecast(path)) for path in paths]
        first = opened[0]
        shape = len(first.init_times), first.num_leads
        area = np.broadcast_to(truth.grid.cell_area, truth.grid.shape)
        position = {int(second): i for i, second in enumerate(truth.times.seconds)}
        nums = sizes or [sum(each.num_members or 1 for each in opened)]
        totals: list[np.ndarray] = []
        for init, lead in np.ndindex(shape):
            y = truth.read(position[seconds_of(first.valid_times[init, lead])]) / scale
            x = np.stack(
                [each.read(init, lead, member) for each in opened
                 for member in ([None] if each.num_members is None else range(each.num_members))]
            ) / scale  # fmt: skip
            if sizes:
                x = x[keyed(0, "members", init).permutation(len(x))]
            totals += [field_scores(x[:num], y, area) for num in nums]
    # (size, init, lead)
    arrays = np.array(totals).reshape(*shape, len(nums), len(_ARRAYS)).transpose(2, 3, 0, 1)
    return [Members(num, *each) for num, each in zip(nums, arrays, strict=True)]


def field_scores(x: np.ndarray, y: np.ndarray, area: np.ndarray) -> np.ndarray:
    """Of one field, which has no land, the arrays of `Members`: means over area and channels.

    x: (member, channel, lat, lon), y: (channel, lat, lon), in standard deviations.
    area: (lat, lon).
    """
    m = len(x)
    spread = difference = np.zeros_like(y)
    if m > 1:
        spread = x.var(0, ddof=1)
        # sum_ij |x_i - x_j| = 2 sum_i (members below x_i - members above it) x_i
        ranks = 2 * np.arange(m) + 1 - m
        difference = np.tensordot(ranks, np.sort(x, 0), 1) * 2 / (m * (m - 1))
    fields = (x.mean(0) - y) ** 2, spread, np.abs(x - y).mean(0), difference
    weight = area / area.sum()
    return np.array([(field * weight).sum((-2, -1)).mean() for field in fields])


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
