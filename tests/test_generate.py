"""Generated worlds are written in one pass, with their statistics, or leave nothing behind."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.data.basin import Ocean
from graticule.data.check import check
from graticule.data.demo import write_demo_store, write_ocean_store
from graticule.data.generate import Blocks, write_blocks
from graticule.data.planet import Planet
from graticule.data.shards import Shards
from graticule.data.statistics import FILE_NAME, Statistics, compute
from graticule.data.store import Store
from graticule.data.times import TimeAxis
from graticule.variables import Channel, Channels
from small_store import DAY, FIRST_DAY, field, small_grid

# Five runs, the first three of them to train: 42 times with gaps after each 14.
PLANET = Planet(num_lat=24, num_lon=48, num_runs=5, samples_per_run=14, dt_seconds=720)
OCEAN = Ocean(num_lat=24, num_lon=48, num_years=3, spin_up_years=0, dt_seconds=86400)

WORLDS: dict[str, Callable[[Path], Store]] = {
    "planet": lambda out: write_demo_store(out, PLANET, workers=1),
    "planet with a coast": lambda out: write_demo_store(out, PLANET, coast=True, workers=1),
    "ocean": lambda out: write_ocean_store(out, OCEAN, workers=1),
}


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many inner chunks of each time are read from shards."""
    times: Counter = Counter()
    original = Shards._chunk

    def counted(self: Shards, file: int, place: Any, *rest: Any) -> None:
        times[place[0]] += 1
        original(self, file, place, *rest)

    monkeypatch.setattr(Shards, "_chunk", counted)
    return times


@pytest.mark.parametrize("world", WORLDS)
def test_statistics_gathered_while_writing_are_those_computed_from_the_store(
    world: str, tmp_path: Path, read_back: Counter
) -> None:
    store = WORLDS[world](tmp_path / "world.zarr")
    training = np.flatnonzero(store.times.within(store.splits["train"]))
    # One pass: of two training times without a gap between, the first is read back for the change
    # to the second, and no time otherwise.
    gaps = np.flatnonzero(np.diff(store.times.segments[training])).tolist()
    ends = training[[*gaps, -1]].tolist()
    assert len(ends) == (1 if world == "ocean" else 3)
    once = dict.fromkeys(set(training.tolist()) - set(ends), store.shards.layout.counts[1])
    assert read_back == once
    # Bit for bit.
    saved = json.loads((store.path / FILE_NAME).read_text())
    alone = compute(store, training)
    assert saved == {**alone.to_dict(), "names": list(alone.names)}
    assert min(saved["std"]) > 0
    assert min(saved["tendency_std"][: len(store.channels)]) > 0
    Statistics.load(store).check_times(store, training)
    assert not (store.path / "records").exists()
    assert check(store).ok


# Whatever goes wrong


def blocks(values: np.ndarray, broken_at: int = -1) -> Blocks:
    """Blocks of five states."""
    for first in range(0, len(values), 5):
        if first == broken_at:
            raise RuntimeError("the model blew up")
        yield values[first : first + 5]


@pytest.fixture
def values() -> np.ndarray:
    """(time, channel, lat, lon) of ten days."""
    grid = small_grid()
    return np.stack([[field(c, day, grid) for c in range(2)] for day in range(10)])


def write(out: Path, states: Blocks, wet: Any = True) -> Store:
    return write_blocks(
        out, states, np.asarray(wet),
        channels=Channels([Channel(variable=n, units="1", role="prognostic") for n in "ab"]),
        grid=small_grid(),
        times=TimeAxis(FIRST_DAY + DAY * np.arange(10), "standard", DAY),
        splits={"train": ["2003-02-21/2003-02-24"], "test": ["2003-02-26/2003-03-02"]},
    )  # fmt: skip


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_a_world_that_fails_leaves_what_was_there_and_another_try_succeeds(
    there: str, tmp_path: Path, values: np.ndarray
) -> None:
    out = tmp_path / "world.zarr"
    if there == "an empty folder":
        out.mkdir()
    before = sorted(tmp_path.rglob("*"))
    nowhere = np.ones((2, 8, 16), bool)
    nowhere[1] = False
    unseen = values.copy()
    unseen[:4, 1] = np.nan  # of the whole store's times some have values, the training times none
    failures: list[tuple[type[Exception], str, Any, Any]] = [
        (RuntimeError, "the model blew up", blocks(values, broken_at=5), True),
        (ValueError, "fields have shape", blocks(values[:, :, 1:]), True),
        (ValueError, "a holds an infinite value", blocks(np.full_like(values, np.inf)), True),
        (ValueError, "5 of 10 times were not written", blocks(values[:5]), True),
        (ValueError, "b holds no value at any time", blocks(values), nowhere),
        (ValueError, "b: no value at any of the 4 times", blocks(unseen), True),
    ]
    for kind, message, states, wet in failures:
        with pytest.raises(kind, match=message):
            write(out, states, wet)
        assert sorted(tmp_path.rglob("*")) == before, message
    store = write(out, blocks(values))
    np.testing.assert_array_equal(store.read(9), values[9].astype(np.float32))
    assert Statistics.load(store).num_times == 4


def test_a_channel_without_spread_is_told_once(
    tmp_path: Path, values: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    values[:, 1] = 3.5
    with caplog.at_level(logging.WARNING, "graticule"):
        write(tmp_path / "world.zarr", blocks(values))
    assert caplog.text.count("b is 3.5 everywhere: it has no spread") == 1
