"""A generated ocean in the layout of OM4, and the ways of reading samples from it.

One array a variable and level, (time, y, x) float32, one uncompressed chunk a plane: 76 fields on
19 levels and the surface height are prognostic, three fluxes force them. A sample has two states
in and two states out for each of its steps. `before` and `after` are what the Samudra authors
describe of their loader before and after they made it five times faster (Merose 2026), in words
of our own; `floor` reads each distinct plane once, straight into memory that is used again.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from graticule.config import DataConfig
from graticule.data.samples import SampleSource
from graticule.data.store import Packing, Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels

LEVELS = 19
LAND = 1 / 3
STATES = 2
"""States in and states out of a step."""
Sample = list[tuple[Tensor, Tensor, Tensor]]
"""(inputs, forcing, labels) of each step, normalised, (time x variable, lat, lon); inputs of the
first step only where a loader does not read the others' twice."""


@dataclass(frozen=True)
class Ocean:
    """The generated data. mean, std: (channel,) float32 over time and sea."""

    folder: Path
    num_times: int
    shape: tuple[int, int]
    levels: int = LEVELS

    @property
    def prognostic(self) -> list[str]:
        fields = [
            f"{name}_{k}" for name in ("uo", "vo", "thetao", "so") for k in range(self.levels)
        ]
        return [*fields, "zos"]

    @property
    def forcing(self) -> list[str]:
        return ["tauuo", "tauvo", "hfds"]

    @property
    def names(self) -> list[str]:
        return self.prognostic + self.forcing

    @property
    def om4(self) -> Path:
        """The layout of OM4."""
        return self.folder / "om4.zarr"

    def fields(self) -> Callable[[int], np.ndarray]:
        """time -> (channel, lat, lon) float32, NaN on land: waves and red noise that turn."""
        rng = np.random.default_rng(0)
        planes = [red_noise(self.shape, rng) for _ in range(2 * len(self.names))]
        first, second = np.array(planes[::2]), np.array(planes[1::2])
        height = red_noise(self.shape, rng)
        land = height < np.quantile(height, LAND)
        scale = 10.0 ** rng.uniform(-1, 2, (len(self.names), 1, 1))
        offset = rng.uniform(-3, 3, (len(self.names), 1, 1)) * scale

        def at(time: int) -> np.ndarray:
            turned = np.cos(0.3 * time) * first + np.sin(0.3 * time) * second
            return np.where(land, np.nan, offset + scale * turned).astype(np.float32)

        return at

    def write(self) -> tuple[Store, Store]:
        """The OM4 layout and our stores, float32 and int16."""
        at = self.fields()
        height, width = self.shape
        lat = np.linspace(90 - 90 / height, 90 / height - 90, height)
        fields = np.stack([at(time) for time in range(self.num_times)])
        dataset = xr.Dataset(
            {name: (("time", "y", "x"), fields[:, c]) for c, name in enumerate(self.names)},
            coords={"time": np.arange(self.num_times), "y": lat, "x": np.arange(width)},
        )
        encoding = {n: {"chunks": (1, height, width), "compressors": None} for n in self.names}
        dataset.to_zarr(self.om4, zarr_format=2, encoding=encoding, consolidated=False)
        stores = []
        for packed in (False, True):
            low, high = np.nanmin(fields, (0, 2, 3)), np.nanmax(fields, (0, 2, 3))
            writer = StoreWriter(
                self.folder / f"packed-{packed}",
                channels=Channels(
                    [
                        Channel(
                            variable=name, units="1",
                            role="forcing" if name in self.forcing else "prognostic",
                        )
                        for name in self.names
                    ]
                ),
                grid=Grid(lat, np.arange(width) * 360 / width),
                times=TimeAxis(5 * 86400 * np.arange(self.num_times), "julian", 5 * 86400),
                packing=Packing.over_range(low, high) if packed else None,
                splits={"train": ["1970/1980"]},
            )  # fmt: skip
            for time in range(self.num_times):
                writer.write(time, fields[time])
            stores.append(writer.finish())
        return stores[0], stores[1]


def red_noise(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """(lat, lon) float32 of spread 1 whose spectrum falls as wave number to the -3."""
    y = np.fft.fftfreq(shape[0])[:, None] * shape[0]
    x = np.fft.rfftfreq(shape[1])[None] * shape[1]
    noise = np.fft.rfft2(rng.normal(size=shape)) * (1 + x**2 + y**2) ** -0.75
    field = np.fft.irfft2(noise, s=shape)
    return (field / field.std()).astype(np.float32)


def source_of(store: Store) -> SampleSource:
    """Samples of two states in and two out, forcing at the times of the states that go in."""
    config = DataConfig(
        store=str(store.path), input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=(-1, 0)
    )
    return SampleSource(store, config)


class Before:
    """Dask, normalised lazily up front, inputs and outputs selected apart, NumPy to the end."""

    def __init__(self, ocean: Ocean, mean: np.ndarray, std: np.ndarray) -> None:
        self._ocean = ocean
        raw = xr.open_zarr(ocean.om4, chunks={}, consolidated=False)
        scales = [
            xr.Dataset(dict(zip(ocean.names, values.astype(np.float32), strict=True)))
            for values in (mean, std)
        ]
        self._data = ((raw[ocean.names] - scales[0]) / scales[1]).fillna(0.0)

    def sample(self, start: int, steps: int) -> Sample:
        """start: the first of the states that go in."""
        parts = []
        for step in range(steps):
            times = [start + STATES * step + i for i in range(2 * STATES)]
            halves = slice(None, STATES), slice(STATES, None)
            wanted = ((self._ocean.prognostic, halves[0]), (self._ocean.forcing, halves[0]),
                      (self._ocean.prognostic, halves[1]))  # fmt: skip
            parts.append([
                self._data[names].isel(time=times).isel(time=half).to_array().to_numpy()
                for names, half in wanted
            ])  # fmt: skip
        return [tuple(_joined(torch.from_numpy(p)) for p in step) for step in parts]  # type: ignore[misc]


class After:
    """No Dask, each variable of one selection on a thread, normalised late, in PyTorch."""

    def __init__(self, ocean: Ocean, mean: np.ndarray, std: np.ndarray, threads: int) -> None:
        self._ocean = ocean
        self._data = xr.open_zarr(ocean.om4, chunks=None, consolidated=False)
        self._threads = ThreadPoolExecutor(threads)
        index = {name: c for c, name in enumerate(ocean.names)}
        self._names = ocean.prognostic, ocean.forcing
        self._scales = {
            kind: [
                torch.from_numpy(v[[index[n] for n in names]].astype(np.float32))[:, None, None]
                for v in (mean, std)
            ]
            for kind, names in enumerate(self._names)
        }

    def close(self) -> None:
        self._threads.shutdown()

    def sample(self, start: int, steps: int) -> Sample:
        parts: Sample = []
        for step in range(steps):
            first = start + STATES * step
            states = self._fields(0, list(range(first, first + 2 * STATES)))
            given = self._fields(1, list(range(first, first + STATES)))
            parts.append((states[:STATES].flatten(0, 1), given.flatten(0, 1),
                          states[STATES:].flatten(0, 1)))  # fmt: skip
        return parts

    def _fields(self, kind: int, times: list[int]) -> Tensor:
        """(time, variable, lat, lon) normalised."""
        chosen = self._data[self._names[kind]].isel(time=times)
        list(self._threads.map(lambda name: chosen[name].load(), self._names[kind]))
        raw = torch.from_numpy(chosen.to_array().to_numpy()).transpose(0, 1)
        mean, std = self._scales[kind]
        return torch.nan_to_num((raw - mean) / std, nan=0.0)


class Floor:
    """Each distinct plane of a sample read once from its file into a buffer used again."""

    def __init__(
        self, ocean: Ocean, normalise: Callable[[np.ndarray, Sequence[int]], Tensor]
    ) -> None:
        """normalise: (time, channel, lat, lon) as read, and the channels' positions."""
        self._ocean, self._normalise = ocean, normalise
        self._buffers: dict[Any, np.ndarray] = {}

    def sample(self, start: int, steps: int) -> Sample:
        states, fluxes = self._ocean.prognostic, self._ocean.forcing
        inputs = self._fields("in", states, start)
        parts: Sample = []
        for step in range(steps):
            first = start + STATES * step
            given = self._fields(("forcing", step), fluxes, first)
            labels = self._fields(("out", step), states, first + STATES)
            parts.append((inputs if step == 0 else torch.empty(0), given, labels))
        return parts

    def _fields(self, key: Any, names: list[str], first: int) -> Tensor:
        shape = (STATES, len(names), *self._ocean.shape)
        if key not in self._buffers:
            self._buffers[key] = np.empty(shape, np.float32)
        out = self._buffers[key]
        for i in range(STATES):
            for c, name in enumerate(names):
                with open(self._ocean.om4 / name / f"{first + i}.0.0", "rb", buffering=0) as file:
                    assert file.readinto(out[i, c].data) == out[i, c].nbytes
        channels = [self._ocean.names.index(name) for name in names]
        return self._normalise(out, channels).flatten(0, 1)


def plainly(mean: np.ndarray, std: np.ndarray) -> Callable[[np.ndarray, Sequence[int]], Tensor]:
    """nan_to_num((x - mean) / std), to tensors of their own that a trainer may keep."""
    scales = [torch.from_numpy(v.astype(np.float32))[:, None, None] for v in (mean, std)]

    def normalise(raw: np.ndarray, channels: Sequence[int]) -> Tensor:
        part = slice(channels[0], channels[-1] + 1)
        values = (torch.from_numpy(raw) - scales[0][part]) / scales[1][part]
        return torch.nan_to_num(values, nan=0.0)

    return normalise


def in_place(mean: np.ndarray, std: np.ndarray) -> Callable[[np.ndarray, Sequence[int]], Tensor]:
    """Three operations in the buffer itself, which the next sample overwrites: the least that
    a sample can cost which nobody keeps."""
    scales = [torch.from_numpy(v.astype(np.float32))[:, None, None] for v in (mean, std)]

    def normalise(raw: np.ndarray, channels: Sequence[int]) -> Tensor:
        part = slice(channels[0], channels[-1] + 1)
        return torch.from_numpy(raw).sub_(scales[0][part]).div_(scales[1][part]).nan_to_num_(0.0)

    return normalise


def _joined(array: Tensor) -> Tensor:
    """(variable, time, ...) to (time x variable, ...)."""
    return array.transpose(0, 1).flatten(0, 1)
