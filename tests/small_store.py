"""Small stores for tests: a few channels of smooth, moving, known fields."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from graticule.data.store import Packing, Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels

DAY = 86400
FIRST_DAY = 12104 * DAY  # 2003-02-21


def small_grid(height: int = 8, width: int = 16) -> Grid:
    half = 90 / height
    return Grid(np.linspace(90 - half, half - 90, height), np.arange(width) * 360 / width)


def write_store(
    path: Path,
    *,
    days: Sequence[int] = tuple(range(24)),
    prognostic: Sequence[str] = ("temperature", "salinity"),
    forcing: Sequence[str] = ("wind",),
    diagnostic: Sequence[str] = (),
    static: Sequence[str] = (),
    land: bool = False,
    packed: bool = False,
    grid: Grid | None = None,
    splits: dict[str, list[str]] | None = None,
    hole: tuple[str, int] | None = None,
    units: Mapping[str, str] | None = None,
) -> Store:
    """Channel c at day d and cell (y, x) is a wave of its own that travels east.

    land: the first channel has no value in one corner. hole: (channel, day) without one value at
    sea. splits: default is the first 16 days to train, then 4 and 4.
    """
    grid = grid or small_grid()
    height, width = grid.shape
    roles = {"prognostic": prognostic, "diagnostic": diagnostic, "forcing": forcing}
    channels = Channels(
        [
            Channel(variable=name, units=(units or {}).get(name, "1"), role=role)  # type: ignore[arg-type]
            for role, names in roles.items()
            for name in names
        ]
    )
    times = TimeAxis(FIRST_DAY + DAY * np.array(days), "standard", DAY)
    if splits is None:
        dates = [f"{times.date(i):%Y-%m-%d}" for i in (0, 15, 16, 19, 20, 23)]
        splits = {
            "train": [f"{dates[0]}/{dates[1]}"],
            "validation": [f"{dates[2]}/{dates[3]}"],
            "test": [f"{dates[4]}/{dates[5]}"],
        }
    statics = Channels([Channel(variable=name, units="1", role="static") for name in static])
    writer = StoreWriter(
        path,
        channels=channels,
        grid=grid,
        times=times,
        packing=Packing.over_range(np.full(len(channels), -9.0), np.full(len(channels), 29.0))
        if packed
        else None,
        statics=statics,
        static_fields=np.stack([field(7 + i, 0, grid) for i in range(len(static))])
        if static
        else None,
        splits=splits,
    )
    for time, day in enumerate(days):
        fields = np.stack([field(c, day, grid) for c in range(len(channels))])
        if land:
            fields[0, : height // 4, : width // 4] = np.nan
        if hole == (channels.names[0], day):
            fields[0, height - 1, width - 1] = np.nan
        writer.write(time, fields)
    return writer.finish()


def field(channel: int, day: int, grid: Grid) -> np.ndarray:
    """(lat, lon): the value of a channel on a day, between -8 and 28."""
    lat, lon = np.deg2rad(grid.lat)[:, None], np.deg2rad(grid.lon)[None, :]
    phase = (1 + channel % 3) * lon - 0.3 * day + channel
    return 10 + 9 * np.cos(lat) * np.sin(phase) + 9 * np.sin(2 * lat + 0.1 * day)
