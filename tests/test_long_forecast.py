"""Long forecasts: the order of their leads, bounded memory, and what they tell."""

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from graticule.config import DataConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.forecast.clock import told
from graticule.forecast.log import read_log
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.forecast.schedule import batches, turns
from graticule.forecast.writer import ForecastWriter
from graticule.memory.trace import trace_memory
from graticule.parallel.local import LocalRanks
from small_store import write_store
from swirl_case import LEADS, STARTS, on_ranks, run, swirl_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return swirl_store(tmp_path_factory.mktemp("data") / "store")


# Order


def test_batches_that_are_left_are_those_of_a_forecast_that_never_stopped() -> None:
    own = [range(7)]
    every = batches(own, {}, 9, 3)
    assert every == [((0, 1, 2), 0), ((3, 4, 5), 0), ((6,), 0)]
    done = {0: 9, 1: 9, 2: 9}
    assert batches(own, done, 9, 3) == every[1:]
    assert batches(own, {**done, 3: 4, 4: 4, 5: 4}, 9, 3) == [((3, 4, 5), 4), ((6,), 0)]
    # What another layout left has its own.
    assert batches(own, {0: 9, 1: 3, 2: 3, 3: 9, 4: 3}, 9, 3) == [((1, 2, 4), 3), ((5, 6), 0)]


def test_a_turn_lasts_until_the_last_of_its_ranks_is_done() -> None:
    first, second = turns([[range(2)], [range(2, 5)]], {0: 6, 2: 1, 3: 1}, 8, 2)
    assert first.batches == (((0,), 6), ((2, 3), 1))
    assert second.batches == (((1,), 0), ((4,), 0))
    assert (first.steps, second.steps) == (7, 8)
    assert first.at(2) == {0: 8, 2: 3, 3: 3}
    assert first.at(3) == {2: 4, 3: 4}


# Memory


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Without forcing: a forecast may go on for ever."""
    store = write_store(tmp_path_factory.mktemp("data") / "bare", forcing=(), land=True)
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.99 * x.roll(1, -1) + 0.01


def test_a_rollout_holds_no_more_after_sixty_leads_than_after_four(
    bare: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SampleSource(bare, DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2)))
    model, alive, most = Turns(), list[Any](), [0]
    write = ForecastWriter.write

    def counted(self: ForecastWriter, init: int, lead: int, fields: np.ndarray) -> None:
        alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(fields)]
        most[0] = max(most[0], len(alive))
        write(self, init, lead, fields)

    monkeypatch.setattr(ForecastWriter, "write", counted)

    def peak(leads: int) -> int:
        out = tmp_path / f"{leads}.zarr"
        _, trace = trace_memory(
            lambda: forecast(
                model, source, Statistics.load(bare), out, starts=[4, 5], leads=leads,
                attributes={}, restart_every=10,
            ),
            lambda: {"parameters": model.parameters()},
        )  # fmt: skip
        with open_forecast(out) as opened:
            assert opened.num_leads == 2 * leads
            assert np.isfinite(opened.read(1, 2 * leads - 1)).any()
        return trace.peak_bytes

    few = peak(4)
    assert peak(60) == few
    # States, a prediction and what is on its way to the file: not more than six leads' fields.
    assert few < 6 * (2 * 2 * 2 * 8 * 16 * 4) + 20_000
    assert most[0] <= 2  # one being written, one that the next takes the place of


# What is told


def test_where_time_went_is_told_and_kept_beside_the_forecast(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "f.zarr"
    timing = run(str(store.path), out, log_every=3)
    (line,) = [json.loads(text) for text in (tmp_path / "f.timing.jsonl").read_text().splitlines()]
    assert line["seconds"] == timing.seconds
    assert line["simulated_years_per_day"] == timing.simulated_years_per_day
    assert (line["log_every"], line["leads_before"]) == (3, 0)
    first, rates, second = told(line).splitlines()
    assert f"{line['forecasts_per_second']:,.4g} forecast/s (a forecast is" in rates
    assert line["forecasts_per_second"] == len(STARTS) * LEADS / line["seconds"]
    assert f"{line['simulated_years']:.4g} years in {line['seconds']:.4g} s" in first
    assert f"compute {line['parts']['compute']['seconds'] / line['seconds']:.1%}" in second
    parts = line["parts"]
    assert list(parts) == ["read", "compute", "copy", "write", "restart", "log", "other"]
    assert all(part["seconds"] > 0 for part in parts.values())
    assert sum(part["seconds"] for part in parts.values()) == pytest.approx(timing.seconds)
    run(str(store.path), tmp_path / "bare.zarr", restart_every=0)
    (line,) = [json.loads(t) for t in (tmp_path / "bare.timing.jsonl").read_text().splitlines()]
    assert line["parts"]["restart"]["seconds"] < 0.1 * parts["restart"]["seconds"]


@pytest.mark.parametrize("data", [1, 2])
def test_every_nth_lead_and_the_last_are_logged_with_what_the_file_says(
    store: Store, tmp_path: Path, two: LocalRanks, data: int
) -> None:
    out = tmp_path / "f.zarr"
    if data == 1:
        run(str(store.path), out, log_every=3)
    else:
        given = {"log_every": 3}
        assert two.run(on_ranks, {"data": 2}, (), "lat", str(store.path), out, None, given) == [
            "", ""
        ]  # fmt: skip
    lines = read_log(tmp_path / "f.log.jsonl")
    assert len(lines) == len(STARTS) * 2
    area = np.broadcast_to(store.grid.cell_area, store.grid.shape)
    with open_forecast(out) as opened:
        dates = [str(date) for date in opened.init_times]
        for line in lines:
            init, lead = dates.index(line["init_time"]), line["lead"]
            assert lead in (6, 8)
            assert line["valid_time"] == str(opened.valid_times[init, lead - 1])
            field = opened.read(init, lead - 1)[0].astype(np.float64)
            wet = np.isfinite(field)
            assert not wet.all()
            mean = (field * area)[wet].sum() / area[wet].sum()
            assert line["mean"]["temperature"] == pytest.approx(mean, rel=1e-9)
            assert line["least"]["temperature"] == field[wet].min()
            assert line["greatest"]["temperature"] == field[wet].max()
