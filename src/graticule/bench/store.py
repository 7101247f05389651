"""`graticule bench store`: the size of packed fields, and the error that packing makes.

The fields are generated here: at each of 23 levels temperature, salinity and two currents, and the
surface height (93 channels), on 512 x 1080 points of the whole globe. Each is a mean by latitude
and depth with red noise on it, land taken out by Earth's coast (a third of the points). The
source's own packing is that of the GLORYS12 files: 16 bits over 48 degC, 100 g kg-1, 40 m s-1 and
20 m.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from graticule.bench.rows import Row, Setting
from graticule.data.planet import coast_mask, load_topography
from graticule.data.store import LAND, Packing, Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.keyed import keyed
from graticule.variables import Channel, Channels

TITLE = (
    "int16 store of red-noise fields (93 x 512 x 1080, a third land) against float32: bytes, and"
    " the packing error against the source's own step"
)
GRID, LEVELS, STEPS = (512, 1080), 23, 3
SIZE_GOAL, ERROR_GOAL = 4.2, 0.5
SOURCE = {
    "thetao": (48 / 65534, 21.0, "degC"),
    "so": (100 / 65534, -100 / 65534, "1e-3"),
    "uo": (40 / 65534, 0.0, "m s-1"),
    "vo": (40 / 65534, 0.0, "m s-1"),
    "zos": (20 / 65534, 0.0, "m"),
}
"""By variable: scale and offset of a source's own 16-bit numbers, units."""
NOISE = {"thetao": 2.0, "so": 0.5, "uo": 0.2, "vo": 0.2, "zos": 0.3}
"""Standard deviation of the noise at the surface; it fades by a factor e over 8 levels."""
CORNER = 8.0
"""Waves round the globe at which the noise's amplitude has fallen to a half; beyond, it falls as
the square of the wavenumber: the variance spectrum of geostrophic turbulence, k^-3."""


def rows(setting: Setting) -> list[Row]:
    """Size, and per variable the largest error of any of its channels."""
    if setting.out is not None:
        return _rows(setting, setting.out / "red-noise.zarr")
    with tempfile.TemporaryDirectory(prefix="graticule-bench-") as folder:
        return _rows(setting, Path(folder) / "red-noise.zarr")


def _rows(setting: Setting, path: Path) -> list[Row]:
    channels, grid, sea = bench_channels(), bench_grid(), bench_sea()
    packing = Packing(
        np.array([SOURCE[channel.variable][0] for channel in channels]),
        np.array([SOURCE[channel.variable][1] for channel in channels]),
    )
    writer = StoreWriter(
        path, channels=channels, grid=grid, packing=packing,
        times=TimeAxis(np.arange(STEPS) * 86400, "standard", 86400),
        provenance={"title": "red-noise fields of the store bench"},
    )  # fmt: skip
    encoding, generated = 0.0, 0.0
    for step in range(STEPS):
        setting.say(f"step {step + 1} of {STEPS}: generating and writing")
        began = time.process_time()
        fields = np.stack(list(red_noise(channels, step, sea)))
        generated += time.process_time() - began
        began = time.process_time()
        writer.write(step, fields)
        encoding += time.process_time() - began
    store = writer.finish()
    decoding = 0.0
    packed, read = np.zeros(len(channels)), np.zeros(len(channels))
    for step in range(STEPS):
        setting.say(f"step {step + 1} of {STEPS}: reading back")
        began = time.process_time()
        values = store.read(step)
        decoding += time.process_time() - began
        stored = store.read_stored(step)
        for position, field in enumerate(red_noise(channels, step, sea)):
            error = packing_error(field, stored[position], store.packing.take([position]))
            packed[position] = max(packed[position], error)
            apart = np.abs(values[position].astype(np.float64) - field)
            read[position] = max(read[position], np.nanmax(apart))
    raw = STEPS * len(channels) * grid.lat.size * grid.lon.size * 4
    size = _bytes_of(store)
    note = (
        f"{len(channels)} x {grid.lat.size} x {grid.lon.size}, {STEPS} steps, {1 - sea.mean():.1%}"
        f" land, chunks of {len(channels)} channels x {min(32, grid.lat.size)} rows; CPU-seconds a"
        f" step: encode, write and verify {encoding / STEPS:.2f}, read and decode to float32"
        f" {decoding / STEPS:.2f} (generating {generated / STEPS:.1f}, not counted)"
    )
    found = [
        Row(what="size", ours=raw / size, against=1.0, goal=SIZE_GOAL, unit="x float32", note=note)
    ]
    for variable, (scale, _, units) in SOURCE.items():
        here = [i for i, channel in enumerate(channels) if channel.variable == variable]
        found.append(
            Row(
                what=f"error {variable}", ours=float(packed[here].max()), against=scale,
                goal=ERROR_GOAL, unit=units, at_most=True,
                note=f"channels: {len(here)}; the largest error against the source's own step; as"
                f" read, with float32's rounding, {read[here].max():.4g}",
            )
        )  # fmt: skip
    return found


def packing_error(field: np.ndarray, stored: np.ndarray, packing: Packing) -> float:
    """The largest difference in (lat, lon) between values and what was stored of them, float64.

    ValueError where a value became land, or land a value.
    """
    value = np.where(stored == LAND, np.nan, stored * packing.scale + packing.offset)
    if (np.isnan(value) != np.isnan(field)).any():
        raise ValueError("the store's land is not where the fields have none: packing is wrong")
    return float(np.nanmax(np.abs(value - field)))


def bench_channels() -> Channels:
    """thetao, so, uo and vo on all levels, then zos."""
    deep = [variable for variable in SOURCE if variable != "zos"]
    return Channels(
        [
            Channel(variable=v, units=SOURCE[v][2], role="prognostic", level=float(level),
                    level_units="1")
            for v in deep
            for level in range(LEVELS)
        ]
        + [Channel(variable="zos", units="m", role="prognostic")]
    )  # fmt: skip


def bench_grid() -> Grid:
    """Evenly spaced rows from pole to pole."""
    height, width = GRID
    return Grid(90 - (np.arange(height) + 0.5) * (180 / height), np.arange(width) * (360 / width))


def bench_sea() -> np.ndarray:
    """(lat, lon) bool."""
    grid = bench_grid()
    return coast_mask(grid.lat, grid.lon, *load_topography())


def red_noise(channels: Channels, step: int, sea: np.ndarray) -> Iterator[np.ndarray]:
    """(lat, lon) float32 of channel after channel, NaN on land, the same whenever asked.

    Mean plus s n, where n has unit variance and amplitudes that fall with the wavenumber k as
    1 / (1 + (k / CORNER)^2), and s is `NOISE` at the channel's level.
    """
    height, width = sea.shape
    north = np.fft.fftfreq(height, d=1 / width)[:, None]  # waves on as many points as a circle
    east = np.fft.rfftfreq(width, d=1 / width)
    amplitude = 1 / (1 + (north**2 + east**2) / CORNER**2)
    amplitude[0, 0] = 0
    # Parseval, with the half of the spectrum that rfft leaves out.
    twice = np.where((east > 0) & (east < width / 2), 2.0, 1.0)
    amplitude *= height * width / np.sqrt(2 * (amplitude**2 * twice).sum())
    warm = np.cos(np.deg2rad(bench_grid().lat))[:, None] ** 2
    for position, channel in enumerate(channels):
        draw = keyed(0, "red-noise", step, position)
        spectrum = draw.standard_normal((2, *amplitude.shape)) * amplitude
        noise = np.fft.irfft2(spectrum[0] + 1j * spectrum[1], s=sea.shape)
        fading = np.exp(-(channel.level or 0.0) / 8)
        mean = {"thetao": 8 + 18 * warm * fading, "so": 34.5 + 1.5 * warm * fading}
        field = mean.get(channel.variable, 0.0) + NOISE[channel.variable] * fading * noise
        yield np.where(sea, field, np.nan).astype(np.float32)


def _bytes_of(store: Store) -> int:
    """Of the shards: all that is read of the fields."""
    return sum(store.shard_path(step).stat().st_size for step in range(len(store.times)))
