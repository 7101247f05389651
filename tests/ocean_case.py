"""Small oceans for tests of scores by depth: two grids, levels with land of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cftime
import numpy as np

from graticule.data.store import Store
from graticule.data.times import TimeAxis, seconds_of
from graticule.data.writer import StoreWriter
from graticule.evaluate import Column, OceanScores, OceanSums
from graticule.forecast.writer import ForecastWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels

DAY = 86400
REGULAR = Grid(np.linspace(75, -75, 6), np.arange(0, 360, 45.0))
GAUSSIAN = Grid(
    np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(6)[0][::-1])), np.arange(0, 360, 45.0)
)
CHANNELS = Channels(
    [
        *(Channel(variable="thetao", units="degC", role="prognostic", level=level, level_units="m")
          for level in (15.0, 50.0, 110.0)),
        Channel(variable="so", units="1e-3", role="prognostic", level=15.0, level_units="m"),
        *(Channel(variable=name, units="m s-1", role="prognostic", level=15.0, level_units="m")
          for name in ("uo", "vo")),
        Channel(variable="zos", units="m", role="prognostic"),
    ]
)  # fmt: skip
Fields = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Forecast, truth, persistence and climatology, (channel, lat, lon) each."""


def sea(shape: tuple[int, int] = (6, 8), deep: int = 3) -> np.ndarray:
    """(channel, lat, lon): land on two columns, more on each deeper level. deep: of the levels of
    thetao, how many have any sea."""
    wet = np.ones((len(CHANNELS), *shape), bool)
    wet[:, :, :2] = False
    wet[1, :3, 2] = False
    wet[2, :, 2:4] = False
    wet[2, 5] = False
    wet[deep:3] = False
    return wet


def noise(seed: int, shape: tuple[int, int] = (6, 8)) -> Fields:
    """Fields around 20, of the size of temperatures, with numbers on land too."""
    rng = np.random.default_rng(seed)
    made = 20 + rng.normal(0, 3, size=(4, len(CHANNELS), *shape)).astype(np.float32)
    return made[0], made[1], made[2], made[3]


def empty(counted: np.ndarray, grid: Grid, truth: np.ndarray, shape: tuple[int, int]) -> OceanSums:
    from graticule.evaluate.ocean_sums import origin_of

    column = Column.of(CHANNELS, CHANNELS)
    assert column is not None
    return OceanSums.zero(
        CHANNELS.names, shape, grid.shape, origin=origin_of(truth, counted), mapped=column.surface
    )


def scores_of(pairs: dict[tuple[int, int], Fields], counted: np.ndarray, grid: Grid) -> OceanScores:
    """Of pairs by (init, lead): steps of five days, an initial time every ten."""
    shape = max(i for i, _ in pairs) + 1, max(k for _, k in pairs) + 1
    sums = empty(counted, grid, next(iter(pairs.values()))[1], shape)
    for (init, lead), fields in pairs.items():
        sums.add_pair(init, lead, *fields, counted=counted, cell_area=grid.cell_area)
    return wrapped(sums, grid)


def wrapped(sums: OceanSums, grid: Grid) -> OceanScores:
    column = Column.of(CHANNELS, CHANNELS)
    assert column is not None
    inits = 10 * DAY * np.arange(sums.values.shape[1])
    valid = inits[:, None] + 5 * DAY * np.arange(1, sums.values.shape[2] + 1)
    return OceanScores(
        column=column, sums=sums, grid=grid, init_seconds=inits, valid_seconds=valid,
        calendar="julian", climatology="month-day", area="exact",
        attributes={"run_fingerprint": "0123456789abcdef/step 7"},
    )  # fmt: skip


def planes(value: float | Sequence[float] | np.ndarray, grid: Grid = REGULAR) -> np.ndarray:
    """(channel, lat, lon) float32 of one number, one a channel, or fields."""
    values = np.asarray(value, np.float32)
    if values.ndim == 1:
        values = values[:, None, None]
    return np.array(np.broadcast_to(values, (len(CHANNELS), *grid.shape)))


def pentads(first_year: int, years: int) -> TimeAxis:
    """Noon of the same 73 dates of every year, in the julian calendar."""
    dates = [
        cftime.datetime(1, 1, 3, 12, calendar="noleap") + k * (
            cftime.datetime(1, 1, 8, calendar="noleap")
            - cftime.datetime(1, 1, 3, calendar="noleap"))
        for k in range(73)
    ]  # fmt: skip
    seconds = [
        seconds_of(cftime.datetime(year, d.month, d.day, 12, calendar="julian", has_year_zero=True))
        for year in range(first_year, first_year + years)
        for d in dates
    ]
    return TimeAxis(np.array(seconds), "julian", 5 * DAY)


def write_truth(
    path: Path,
    times: TimeAxis,
    field: Callable[[int], np.ndarray],
    *,
    wet: np.ndarray,
    grid: Grid = REGULAR,
    channels: Channels = CHANNELS,
    splits: dict[str, list[str]] | None = None,
) -> Store:
    writer = StoreWriter(path, channels=channels, grid=grid, times=times, splits=splits)
    for i in range(len(times)):
        writer.write(i, np.where(wet, field(i), np.nan).astype(np.float32))
    return writer.finish()


def write_forecast(
    path: Path,
    store: Store,
    starts: Sequence[int],
    leads: int,
    field: Callable[[int, int], np.ndarray],
    *,
    channels: Channels | None = None,
    **attributes: Any,
) -> Path:
    """field: called with the index of the start in the store and the lead from 1."""
    times = store.times
    with ForecastWriter(
        path, channels=channels or store.channels, grid=store.grid,
        init_times=[times.date(start) for start in starts],
        valid_times=np.array([[times.advanced(s, k) for k in range(1, leads + 1)] for s in starts]),
        nominal_step_seconds=times.nominal_step_seconds, regular=times.regular,
        attributes={"run_fingerprint": "0123456789abcdef/step 7", **attributes},
    ) as writer:  # fmt: skip
        for i, start in enumerate(starts):
            for lead in range(1, leads + 1):
                writer.write(i, lead - 1, field(start, lead).astype(np.float32))
    return path
