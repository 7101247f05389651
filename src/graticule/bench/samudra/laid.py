"""The generated ocean's store laid out as OM4 is."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import xarray as xr

from graticule.bench.om4 import Ocean
from graticule.data.statistics import Statistics
from graticule.data.store import Store


@dataclass(frozen=True, eq=False)
class Laid(Ocean):
    """The ocean's store laid out as OM4 is: an array for each variable and level, in time order.

    A worker is handed it, so it holds plain values. roles: of each variable, by name. scales:
    (channel,) mean and standard deviation, in the order of `names`.
    """

    roles: dict[str, str] = field(default_factory=dict)
    scales: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.ones(0))

    @classmethod
    def out(cls, folder: Path, store: Store, long: int) -> "Laid":
        """Written in `folder`. long: times a chunk of the second file."""
        laid = cls(
            folder, len(store.times), store.grid.shape,
            roles={f"{channel.variable}_{number}": channel.role
                   for number, channel in enumerate(store.channels)},
            scales=Statistics.load(store).aligned(store.channels.names),
        )  # fmt: skip
        fields = np.stack([store.read(time) for time in range(len(store.times))])
        for path, times in ((laid.om4, 1), (laid.in_long_chunks.om4, long)):
            data = xr.Dataset(
                {name: (("time", "y", "x"), fields[:, c]) for c, name in enumerate(laid.names)},
                coords={"time": np.arange(laid.num_times), "y": store.grid.lat,
                        "x": store.grid.lon},
            )  # fmt: skip
            encoding = {
                name: {"chunks": (times, *laid.shape), "compressors": None} for name in laid.names
            }
            data.to_zarr(path, zarr_format=2, encoding=encoding, consolidated=False)
        return laid

    @property
    def prognostic(self) -> list[str]:
        return [name for name, role in self.roles.items() if role == "prognostic"]

    @property
    def forcing(self) -> list[str]:
        return [name for name, role in self.roles.items() if role == "forcing"]

    @property
    def in_long_chunks(self) -> "Laid":
        return replace(self, folder=self.folder / "long")
