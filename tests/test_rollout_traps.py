"""What goes wrong in an ocean rollout without a word: forcing, dates, leftovers, feedback, land.

The store is laid out as OM4 is: the julian calendar, noon of 73 fixed dates a year, so that one
step of a leap year has six days; two states in and two out.
"""

import json
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graticule.config import DataConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.data.times import TimeAxis, seconds_of
from graticule.data.writer import StoreWriter
from graticule.evaluate import evaluate
from graticule.forecast.clock import Timing
from graticule.forecast.log import read_log
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.variables import Channel, Channels
from small_store import small_grid

WARM = 1.0e4
"""A mean that leaves a float32 three digits of a spread of 1."""


def dates(years: tuple[int, ...]) -> list[cftime.datetime]:
    """Noon of the 73 dates of every year, 3 January and every five days on without 29 February."""
    first = cftime.datetime(1959, 1, 3, 12, calendar="noleap")
    fixed = [cftime.num2date(5 * i, f"days since {first}", "noleap") for i in range(73)]
    return [
        cftime.datetime(year, date.month, date.day, 12, calendar="julian", has_year_zero=True)
        for year in years for date in fixed
    ]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """`thetao` on two levels with their own land; `hfds` is the number of its time everywhere."""
    times, grid = dates((1959, 1960)), small_grid()
    wave = np.random.default_rng(0).normal(size=(2, *grid.shape))
    writer = StoreWriter(
        tmp_path_factory.mktemp("data") / "om4",
        channels=Channels(
            [
                *(Channel(variable="thetao", units="degC", level=level, level_units="m",
                          role="prognostic") for level in (2.5, 6000.0)),
                Channel(variable="hfds", units="W m-2", role="forcing"),
            ]
        ),
        grid=grid,
        times=TimeAxis.from_seconds(np.array([seconds_of(date) for date in times]), "julian"),
        splits={"train": ["1959-01-03/1959-12-29"], "test": ["1960-01-03/1960-02-27"]},
    )  # fmt: skip
    for index in range(len(times)):
        fields = np.empty((3, *grid.shape), np.float32)
        fields[:2] = WARM + wave * np.cos(index)
        fields[0, :2, :3] = np.nan
        fields[1, :5] = np.nan
        fields[2] = index
        writer.write(index, fields)
    store = writer.finish()
    compute(store, np.arange(73)).save(store)
    return store


class Heard(nn.Module):
    """Keeps what it is given and what it says, which is 0.5 on land as at sea."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.said = list[Tensor](), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x.clone())
        said = 0.7 * x[:, :4].roll(1, -1) + 0.5
        self.said.append(said.clone())
        return said


def run(store: Store, out: Path, forcing: Any = (-1, 0), **given: Any) -> tuple[Heard, Timing]:
    config = DataConfig(
        store=str(store.path), input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=forcing
    )
    model = Heard()
    timing = forecast(
        model, SampleSource(store, config), Statistics.load(store), out,
        **{"starts": [1], "leads": 5, "attributes": {}, **given},
    )  # fmt: skip
    return model, timing


# 7: the forcing of a call


@pytest.mark.parametrize(("forcing", "ahead"), [((-1, 0), 0), ((1, 2), 2)])
def test_call_k_is_given_the_forcing_of_times_2k_and_2k_plus_1_or_of_its_labels_where_named(
    store: Store, tmp_path: Path, forcing: tuple[int, ...], ahead: int
) -> None:
    model, _ = run(store, tmp_path / "f.zarr", forcing)
    mean, std = Statistics.load(store).aligned(["hfds"])
    for call, x in enumerate(model.given):
        seen = (x[0, 4:, 0, 0].double().numpy() * std + mean).round(2)
        assert seen.tolist() == [2 * call + ahead, 2 * call + 1 + ahead]


# 8: the times of a rollout


def test_the_first_prediction_is_of_the_time_after_the_inputs_and_leftovers_are_dropped(
    store: Store, tmp_path: Path
) -> None:
    source = SampleSource(
        store, DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=(-1, 0))
    )
    times = source.times("test")
    assert len(times) == 12  # two go in; five calls of two come out
    assert source.starts("test", 5).tolist() == [times[1]]
    with pytest.raises(ValueError, match=r"no unbroken window of 14 steps \(6 leads\)"):
        source.starts("test", 6)
    store_times = store.times
    split = slice(int(times[0]), int(times[0]) + 13)  # an odd one more, which no call fills
    odd = DataConfig(
        input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=(-1, 0),
        test=(f"1960-01-03/{store_times.date(split.stop - 1):%Y-%m-%d}",),
    )  # fmt: skip
    assert SampleSource(store, odd).starts("test", 5).tolist() == [times[1], times[2]]
    run(store, tmp_path / "f.zarr", starts=[int(times[1])])
    with open_forecast(tmp_path / "f.zarr") as opened:
        assert opened.num_leads == 10
        assert opened.valid_times[0].tolist() == [store_times.date(int(t)) for t in times[2:]]


@pytest.mark.parametrize("leads", [1, 2, 3, 7])
def test_the_last_leads_are_written_whether_or_not_they_fill_a_group(
    store: Store, tmp_path: Path, leads: int
) -> None:
    model, _ = run(store, tmp_path / "f.zarr", leads=leads, restart_every=3, log_every=3)
    assert len(model.said) == leads
    with open_forecast(tmp_path / "f.zarr") as opened:
        assert opened.num_leads == 2 * leads
        assert np.isfinite(opened.read(0, 2 * leads - 1)).any()
    logged = [line["lead"] for line in read_log(tmp_path / "f.log.jsonl")]
    assert logged == sorted({*range(6, 2 * leads + 1, 6), 2 * leads})


# 9: the calendar


def test_dates_are_noon_of_the_julian_calendar_and_the_step_over_29_february_has_six_days(
    store: Store, tmp_path: Path
) -> None:
    # From 1959-12-29, the last date of its year, to the 72nd of 1960.
    _, timing = run(store, tmp_path / "f.zarr", starts=[72], leads=36)
    with open_forecast(tmp_path / "f.zarr") as opened:
        valid = opened.valid_times[0]
        assert opened.calendar == valid[0].calendar == "julian"
        assert str(opened.init_times[0]) == "1959-12-29 12:00:00"
        assert [str(date) for date in valid[[0, 10, 11, 12]]] == [
            "1960-01-03 12:00:00", "1960-02-22 12:00:00", "1960-02-27 12:00:00",
            "1960-03-04 12:00:00",
        ]  # fmt: skip
        assert (valid[12] - valid[11]).days == 6
        assert not opened.regular
        assert valid.tolist() == [store.times.date(t) for t in range(73, 145)]
    # Real days: 72 steps of which one has six. Nominal ones would be 360.
    assert timing.simulated_years == pytest.approx(361 / 365.25)
    line = json.loads((tmp_path / "f.timing.jsonl").read_text())
    assert line["simulated_years"] == timing.simulated_years


def test_a_forecast_is_not_scored_by_a_store_of_another_calendar(
    store: Store, tmp_path: Path
) -> None:
    run(store, tmp_path / "f.zarr")
    writer = StoreWriter(
        tmp_path / "noleap", channels=store.channels, grid=store.grid,
        times=TimeAxis(store.times.seconds[:20], "noleap", 5 * 86400),
        splits={"train": ["1959"]},
    )  # fmt: skip
    for index in range(20):
        writer.write(index, store.read(index))
    other = writer.finish()
    compute(other, np.arange(20)).save(other)
    with pytest.raises(ValueError, match="calendar"):
        evaluate(tmp_path / "f.zarr", other, train_ranges=["1959"], climatology="all")


# 10: what is fed back


def test_a_call_is_given_what_the_one_before_said_bit_for_bit_not_by_way_of_units(
    store: Store, tmp_path: Path
) -> None:
    model, _ = run(store, tmp_path / "f.zarr", restart_every=2)
    wet = torch.from_numpy(store.wet[:2]).repeat(2, 1, 1)
    for said, given in zip(model.said, model.given[1:], strict=False):
        assert torch.equal(given[0, :4], torch.where(wet, said[0], 0.0))
    # In units a float32 keeps three digits of this channel: a round trip would show.
    mean, std = (v[:, None, None] for v in Statistics.load(store).aligned(store.channels.names[:2]))
    with open_forecast(tmp_path / "f.zarr") as opened:
        for lead in range(8):
            back = torch.from_numpy((opened.read(0, lead) - mean) / std).nan_to_num(0.0)
            fed = model.given[lead // 2 + 1][0, 2 * (lead % 2) : 2 * (lead % 2) + 2]
            error = (back - fed).abs().max()
            assert 1e-5 < error < 2e-3


# 15: land


def test_land_of_every_level_is_nan_in_the_file_and_in_no_mean(
    store: Store, tmp_path: Path
) -> None:
    run(store, tmp_path / "f.zarr", log_every=1)
    area = np.broadcast_to(store.grid.cell_area, store.grid.shape)
    lines = read_log(tmp_path / "f.log.jsonl")
    assert len(lines) == 5
    with open_forecast(tmp_path / "f.zarr") as opened:
        for lead in range(10):
            fields = opened.read(0, lead)
            np.testing.assert_array_equal(np.isfinite(fields), store.wet[:2])
            assert np.nanmin(fields) > WARM - 100  # a zero on land would be far below
        for line in lines:
            fields = opened.read(0, line["lead"] - 1).astype(np.float64)
            for name, field, wet in zip(store.channels.names[:2], fields, store.wet, strict=False):
                mean = (field * area)[wet].sum() / area[wet].sum()
                assert line["mean"][name] == pytest.approx(mean, rel=1e-12)
                assert line["least"][name] > WARM - 100
