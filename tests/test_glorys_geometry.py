"""GLORYS12 at its full size: three generated days ingested, checked and read within 4 GiB.

The files have the form in which Copernicus Marine delivers them: a file a day, int16 with the
product's own scales and offsets, deflated, latitudes from the south and longitudes from -180, on
2041 x 4320 points. Two things differ, for time and room: of the 50 depths the 23 of the Wenhai
family are there and one more, which ingest has to leave out; and land is where the package's own
1 degree topography, interpolated, is above a depth, so the coast is Earth's and smoother than
GLORYS's, and land grows with depth. The fields are a mean by latitude and depth and red noise.

Each step is a process of its own, whose peak of resident memory is held to 4 GiB.
"""

import contextlib
import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import torch

from graticule.cli import main
from graticule.config import DataConfig
from graticule.data.known import GLORYS12_DEPTHS_M, WENHAI_DEPTHS_M
from graticule.data.loader import Loader, Order
from graticule.data.normalise import Normaliser
from graticule.data.planet import load_topography
from graticule.data.samples import SampleSource
from graticule.data.shardfile import LAND
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.recipes import recipe
from source_files import GLORYS12_FILL, GLORYS12_PACKING

pytestmark = pytest.mark.slow

LIMIT_MIB, LIMIT_DISK_MIB = 4096, 6e9 / 2**20
HEIGHT, WIDTH, DAYS = 2041, 4320, 3
DEPTHS_M = (*WENHAI_DEPTHS_M, GLORYS12_DEPTHS_M[-1])
DEPTHS_A_CHUNK = 7
# At the surface: mean at the pole, how much more at the equator, deviation of the noise.
FORM = {
    "thetao": (6.0, 20.0, 1.5), "so": (33.8, 1.6, 0.3), "uo": (0.0, 0.1, 0.15),
    "vo": (0.0, 0.0, 0.15), "zos": (-0.3, 0.6, 0.2),
}  # fmt: skip
COMPARED = (0, 22, 27, 68, 92)
"""Channels compared number by number: of each variable one, the deepest and the surface."""
SAMPLES = DAYS - 1
ROWS_A_CHUNK = 32
"""Of an inner chunk, where nothing else is asked for."""


# What the processes do


def generate(folder: Path) -> dict[str, Any]:
    lat = np.linspace(-80, 90, HEIGHT)
    lon = -180 + np.arange(WIDTH) / 12
    height = _height(lat, lon)
    # Twice round the globe: a slice is the noise turned.
    noise = {name: np.tile(_red_noise(np.random.default_rng(i)), 2) for i, name in enumerate(FORM)}
    for day in range(DAYS):
        with netCDF4.Dataset(folder / f"glorys12_{day + 1}.nc", "w") as file:
            _write_day(file, day, lat, lon, height, noise)
    return {"netcdf_mib": _mib(folder.glob("*.nc"))}


def _red_noise(rng: np.random.Generator) -> np.ndarray:
    """(lat, lon) float32 of spread 1, as the bench of the store has it: amplitudes fall with the
    square of the wavenumber beyond 8 waves round the globe."""
    north = np.fft.fftfreq(HEIGHT, d=1 / WIDTH)[:, None]
    east = np.fft.rfftfreq(WIDTH, d=1 / WIDTH)
    spectrum = rng.standard_normal((2, HEIGHT, east.size)) / (1 + (north**2 + east**2) / 64)
    field = np.fft.irfft2(spectrum[0] + 1j * spectrum[1], s=(HEIGHT, WIDTH))
    return ((field - field.mean()) / field.std()).astype(np.float32)


def _height(lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """(lat, lon) metres, linear between the topography's points."""
    rows, columns, height = load_topography()
    values = height.astype(np.float64)[::-1]
    values = np.concatenate([values[:, -1:], values, values[:, :1]], axis=1)
    columns = np.concatenate([columns[-1:] - 360, columns, columns[:1] + 360])
    along = np.stack([np.interp(lon % 360, columns, row) for row in values])
    return np.stack([np.interp(lat, rows[::-1], column) for column in along.T], axis=1)


def _write_day(
    file: netCDF4.Dataset, day: int, lat: np.ndarray, lon: np.ndarray, height: np.ndarray,
    noise: dict[str, np.ndarray],
) -> None:  # fmt: skip
    file.title = "daily mean fields from Global Ocean Physics Analysis and Forecast"
    file.source = "MERCATOR GLORYS12V1"
    file.Conventions = "CF-1.4"
    file.createDimension("time", 1)
    for name, values, attributes in (
        ("depth", DEPTHS_M, {"units": "m", "positive": "down", "axis": "Z"}),
        ("latitude", lat, {"units": "degrees_north", "axis": "Y"}),
        ("longitude", lon, {"units": "degrees_east", "axis": "X"}),
    ):
        file.createDimension(name, len(values))
        file.createVariable(name, "f4", (name,))[:] = values
        file[name].setncatts({"standard_name": name, **attributes})
    file.createVariable("time", "f4", ("time",))[:] = 613608 + 12 + 24 * day  # noon, 2020-01-01 on
    file["time"].setncatts({"units": "hours since 1950-01-01", "calendar": "gregorian"})
    for name, (scale, offset, units, standard) in GLORYS12_PACKING.items():
        levels = (0.494025,) if name == "zos" else DEPTHS_M
        deep = ["depth"] if name != "zos" else []
        variable = file.createVariable(
            name, "i2", ("time", *deep, "latitude", "longitude"), fill_value=GLORYS12_FILL,
            zlib=True, complevel=1, chunksizes=(1, *[DEPTHS_A_CHUNK for _ in deep], 341, 720),
        )  # fmt: skip
        variable.set_auto_maskandscale(False)
        variable.setncatts({"units": units, "standard_name": standard,
                            "scale_factor": scale, "add_offset": offset})  # fmt: skip
        for first in range(0, len(levels), DEPTHS_A_CHUNK):
            block = np.stack([
                _raw(name, day, level, levels[level], lat, height, noise[name])
                for level in range(first, min(first + DEPTHS_A_CHUNK, len(levels)))
            ])  # fmt: skip
            if deep:
                variable[0, first : first + len(block)] = block
            else:
                variable[0] = block[0]
    mixed = file.createVariable("mlotst", "i2", ("time", "latitude", "longitude"), zlib=True)
    mixed.setncatts({"units": "m", "scale_factor": 0.152592554688454})
    mixed[:] = 70


def _raw(
    name: str, day: int, level: int, depth: float, lat: np.ndarray, height: np.ndarray,
    noise: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """(lat, lon) int16: the noise turned by day and level, and fading with depth."""
    scale, offset, _, _ = GLORYS12_PACKING[name]
    mean, warm, deviation = FORM[name]
    fading = np.exp(-depth / 500)
    row = mean - offset + warm * fading * np.cos(np.deg2rad(lat)) ** 2
    turn = 29 * day + 13 * level
    plane = noise[:, turn : turn + WIDTH] * np.float32(deviation * fading / scale)
    plane += (row / scale).astype(np.float32)[:, None]
    raw = np.rint(plane, out=plane).astype(np.int16)
    raw[height >= -depth] = GLORYS12_FILL
    return raw


def ingest(folder: Path) -> dict[str, Any]:
    files = [str(path) for path in sorted(folder.glob("*.nc"))]
    return _command(
        "data", "ingest", *files, "--out", str(folder / "store.zarr"), "--levels", "wenhai-small",
        "--train", "2020-01-01/2020-01-03", "--json",
    ) | {"store_mib": _mib((folder / "store.zarr").rglob("*"))}  # fmt: skip


def check(folder: Path) -> dict[str, Any]:
    return _command("data", "check", str(folder / "store.zarr"), "--json")


def _command(*words: str) -> dict[str, Any]:
    """A command of `graticule` with --json, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = main(list(words))
    assert status == 0, said.getvalue()
    return {"said": json.loads(said.getvalue())}


def whole(folder: Path) -> dict[str, Any]:
    """One stripe of all rows: a time in memory, a field of it normalised at a time; then single
    fields by the loader. What the stripes are to be equal to is left in the folder."""
    store = Store(folder / "store.zarr")
    source = SampleSource(store, _config())
    statistics = Statistics.load(store)
    assert source.shape == (HEIGHT, WIDTH)
    assert source.starts("train", DAYS - 1).tolist() == [0]
    sample = source.sample(0)
    stored = np.empty((DAYS, len(COMPARED), HEIGHT, WIDTH), np.int16)
    normalised = np.empty((len(COMPARED), HEIGHT, WIDTH), np.float32)
    sums = np.empty((DAYS, len(store.channels), HEIGHT), np.int64)
    reading = normalising = 0.0
    for day in range(DAYS):
        began = time.perf_counter()
        planes = (sample.labels(day) if day else sample.inputs())[0]
        reading += time.perf_counter() - began
        sums[day] = planes.sum(axis=2, dtype=np.int64)
        stored[day] = planes[list(COMPARED)]
        began = time.perf_counter()
        for channel in range(len(planes)) if day == 0 else ():
            field = _normalised(store, channel, statistics, planes[channel])
            assert np.isfinite(field).all()
            assert not field[planes[channel] == LAND].any()
            if day == 0 and channel in COMPARED:
                normalised[COMPARED.index(channel)] = field
        normalising += time.perf_counter() - began
        del planes  # before the next time is read
    full = store.shards.bytes_read
    _assert_the_files_numbers(folder, store, stored)
    _assert_statistics(store, statistics, stored)
    np.save(folder / "stored.npy", stored)
    np.save(folder / "normalised.npy", normalised)
    np.save(folder / "sums.npy", sums)
    began = time.perf_counter()
    one = SampleSource(store, replace(_config(), prognostic=("zos",)))
    loader = Loader(one, Order(one.starts("train", 2), None), range(1), batch=1, leads=2)
    for batch in loader:
        fields = [batch.inputs, *(batch.lead()[1] for _ in range(2))]
        for day, tensor in enumerate(fields):
            assert np.array_equal(tensor[0, 0, 0].numpy(), stored[day, -1])
    single = time.perf_counter() - began
    return {
        "read_mib": full / 2**20, "reading_s": reading, "normalising_s": normalising,
        "one_channel_of_three_days_s": single,
    }  # fmt: skip


def _normalised(
    store: Store, channel: int, statistics: Statistics, plane: np.ndarray
) -> np.ndarray:
    normaliser = Normaliser(store, [channel], statistics)
    return normaliser(torch.from_numpy(plane)[None])[0].numpy()


def _assert_the_files_numbers(folder: Path, store: Store, stored: np.ndarray) -> None:
    """The store has the files' own numbers, from the north and from longitude 0."""
    for day in range(DAYS):
        with netCDF4.Dataset(folder / f"glorys12_{day + 1}.nc") as file:
            file.set_auto_maskandscale(False)
            for position, number in enumerate(COMPARED):
                channel = store.channels[number]
                there = file[channel.variable][0]
                if channel.level is not None:
                    depth = np.abs(file["depth"][:] - channel.level).argmin()
                    there = file[channel.variable][0, depth]
                there = np.roll(there[::-1], WIDTH // 2, axis=1)
                wanted = np.where(there == GLORYS12_FILL, LAND, there)
                assert np.array_equal(stored[day, position], wanted)


def _assert_statistics(store: Store, statistics: Statistics, stored: np.ndarray) -> None:
    assert store.packing.scale is not None
    assert store.packing.offset is not None
    for position, channel in enumerate(COMPARED):
        numbers = stored[:, position][stored[:, position] != LAND].astype(np.float64)
        scale, offset = store.packing.scale[channel], store.packing.offset[channel]
        mean, std = numbers.mean() * scale + offset, numbers.std() * scale
        # 1e-4 of a deviation: values were rounded to float32 before they were added up.
        assert abs(statistics.mean[channel] - mean) < 1e-4 * std
        assert statistics.std[channel] == pytest.approx(std, rel=1e-4)


def stripes(folder: Path, number: int) -> dict[str, Any]:
    """Samples of one stripe after the other: the peak is an upper bound of each one's own."""
    store = Store(folder / "store.zarr")
    statistics = Statistics.load(store)
    sums = np.load(folder / "sums.npy")
    edges = [HEIGHT * i // number for i in range(number + 1)]
    read, there, seconds = [], [], []
    for first, last in itertools.pairwise(edges):
        rows, before, began = slice(first, last), store.shards.bytes_read, time.perf_counter()
        # Mapped anew: pages that were looked at count as this process's memory.
        stored = np.load(folder / "stored.npy", mmap_mode="r")
        normalised = np.load(folder / "normalised.npy", mmap_mode="r")
        source = SampleSource(store, _config(), rows=rows)
        normaliser = Normaliser(store, source.prognostic, statistics, rows=rows)
        order = Order(source.starts("train", 1), None)
        loader = Loader(source, order, range(SAMPLES), batch=1, leads=1, ahead=1)
        for batch in loader:
            (day,) = batch.starts
            shape = (1, len(store.channels), last - first, WIDTH)
            inputs = normaliser(batch.inputs[:, 0])
            assert inputs.shape == shape
            _assert_rows(batch.inputs[0, 0].numpy(), sums[day, :, rows], stored[day, :, rows])
            if day == 0:
                assert np.array_equal(inputs[0, list(COMPARED)].numpy(), normalised[:, rows])
            del batch.inputs, inputs  # what a step holds is the step's
            labels = batch.lead()[1]
            targets = normaliser(labels[:, 0])
            assert targets.shape == shape
            _assert_rows(labels[0, 0].numpy(), sums[day + 1, :, rows], stored[day + 1, :, rows])
            del labels, targets
        read.append(store.shards.bytes_read - before)
        there.append(sum(_bytes_of_rows(store, day, rows) for day in range(DAYS)))
        seconds.append(time.perf_counter() - began)
        del batch, loader, normaliser, stored, normalised
    assert edges[0] == 0
    assert edges[-1] == HEIGHT
    return {
        "rows": np.diff(edges).tolist(), "read_mib": [size / 2**20 for size in read],
        "there_mib": [size / 2**20 for size in there],
        "seconds_a_stripe": sum(seconds) / number,
    }  # fmt: skip


def _bytes_of_rows(store: Store, day: int, rows: slice) -> int:
    """On disk, of the inner chunks that hold a row, by the index at the end of the file: offset
    and size of each, and four bytes of checksum."""
    bands = -(-HEIGHT // ROWS_A_CHUNK)
    raw = store.shard_path(day).read_bytes()[-16 * bands - 4 : -4]
    sizes = np.frombuffer(raw, "<u8").reshape(bands, 2)[:, 1]
    return int(sizes[rows.start // ROWS_A_CHUNK : -(-rows.stop // ROWS_A_CHUNK)].sum())


def _assert_rows(planes: np.ndarray, sums: np.ndarray, stored: np.ndarray) -> None:
    """(channel, row, lon) of a stripe are the whole's: all by their sums, some one by one."""
    assert np.array_equal(planes.sum(axis=2, dtype=np.int64), sums)
    assert np.array_equal(planes[list(COMPARED)], stored)


def _config() -> DataConfig:
    """The recipe's, of the store's own training times."""
    return replace(recipe("wenhai-small").data, train=(), validation=(), test=())


def _mib(paths: Iterator[Path]) -> float:
    return sum(path.stat().st_size for path in paths if path.is_file()) / 2**20


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": generate, "ingest": ingest, "check": check, "whole": whole, "stripes": stripes,
}  # fmt: skip

if __name__ == "__main__":
    began_at = time.perf_counter()
    found = WORK[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
    found["seconds"] = time.perf_counter() - began_at
    found["cpu_s"] = time.process_time()
    unit = 1 if sys.platform == "darwin" else 1024
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    print(json.dumps(found))
    sys.exit()


# What is asserted of them


class Workshop:
    """A folder, and processes that work in it, each after those it needs and once only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[tuple[str, int | None], dict[str, Any]] = {}

    def found(self, what: str, number: int | None = None) -> dict[str, Any]:
        """What a process printed; its peak is checked, its figures are shown by `line`."""
        if (what, number) not in self._done:
            before = {"ingest": "generate", "check": "ingest", "whole": "ingest",
                      "stripes": "whole"}.get(what)  # fmt: skip
            if before is not None:
                self.found(before)
            words = [what, str(self.folder), *([] if number is None else [str(number)])]
            done = subprocess.run(
                [sys.executable, __file__, *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{words}: {done.stderr[-4000:]}"
            self._done[what, number] = json.loads(done.stdout.splitlines()[-1])
        return self._done[what, number]

    def line(self, what: str, number: int | None = None) -> str:
        """The figures of a process."""
        figures = {k: v for k, v in self.found(what, number).items() if k != "said"}
        shown = [
            f"{key} {[round(v) for v in value]}"
            if isinstance(value, list)
            else f"{key} {value:.1f}"
            for key, value in figures.items()
        ]
        return f"{what}{'' if number is None else f' {number}'}: {', '.join(shown)}"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("glorys")
    try:
        yield Workshop(folder)
    finally:
        shutil.rmtree(folder)


def test_three_full_days_are_ingested_within_4_gib(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    found = workshop.found("ingest")
    with capsys.disabled():
        print("", workshop.line("generate"), workshop.line("ingest"), sep="\n")
    assert found["peak_mib"] < LIMIT_MIB
    assert workshop.found("generate")["netcdf_mib"] + found["store_mib"] < LIMIT_DISK_MIB
    store = Store(workshop.folder / "store.zarr")
    assert store.channels.names == recipe("wenhai-small").data.prognostic
    assert store.grid.shape == (HEIGHT, WIDTH)
    assert store.packing.dtype == np.int16
    assert store.packing.scale is not None
    assert store.packing.scale[0] == GLORYS12_PACKING["thetao"][0]
    assert [str(store.times.date(day)) for day in range(len(store.times))] == [
        f"2020-01-0{day + 1} 12:00:00" for day in range(DAYS)
    ]


def test_the_store_is_checked_within_4_gib_and_found_whole(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    found = workshop.found("check")
    with capsys.disabled():
        print("", workshop.line("check"), sep="\n")
    assert found["peak_mib"] < LIMIT_MIB
    report = found["said"]
    assert report["ok"]
    assert report["num_times"] == DAYS
    assert report["findings"] == []
    wet = {row["name"]: row["wet_fraction"] for row in report["channels"]}
    assert 0.6 < wet["zos"] < 0.75  # of the points of a grid from 80 S
    levels = [wet[name] for name in recipe("wenhai-small").data.prognostic[: len(WENHAI_DEPTHS_M)]]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] < levels[0] - 0.03


def test_one_stripe_streams_single_fields_within_4_gib(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    found = workshop.found("whole")
    with capsys.disabled():
        print("", workshop.line("whole"), sep="\n")
    assert found["peak_mib"] < LIMIT_MIB
    shards = _mib((workshop.folder / "store.zarr" / "fields").rglob("0"))
    assert found["read_mib"] == pytest.approx(shards, rel=1e-6)


@pytest.mark.parametrize("number", [4, 16])
def test_stripes_are_samples_within_4_gib_and_read_their_own_bytes(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    found = workshop.found("stripes", number)
    with capsys.disabled():
        print("", workshop.line("stripes", number), sep="\n")
    assert found["peak_mib"] < LIMIT_MIB
    full = workshop.found("whole")["read_mib"]
    assert len(set(found["rows"])) == 2, "uneven"
    assert sum(found["rows"]) == HEIGHT
    # Land lies in the north and takes few bytes, so rows in the south are more than their share of
    # all: each stripe is held to the chunks of its own rows, and their sum to that of the rows.
    for read, there in zip(found["read_mib"], found["there_mib"], strict=True):
        assert there <= read <= there + 0.01  # and the indices
    assert sum(found["read_mib"]) <= (HEIGHT + 64 * number) / HEIGHT * full
