"""Forecasts: what each lead is, what a start needs, what the file and the clock say."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

from graticule.assemble import build_model, shapes_of
from graticule.config import Config, DataConfig, ForecastConfig, SwinConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.evaluate import evaluate
from graticule.forecast import clock as clock_module
from graticule.forecast import predict as predict_module
from graticule.forecast.clock import Timing
from graticule.forecast.reader import open_forecast
from graticule.forecast.rollout import rollout
from graticule.forecast.run import check_starts, forecast
from graticule.grid import Grid
from graticule.tasks import evaluate_forecast, forecast_from_run
from graticule.train.trainer import train
from graticule.variables import Channel, Channels
from small_store import DAY, FIRST_DAY, small_grid, write_store

MODEL = SwinConfig(patch=2, window=(2, 4), width=16, depth=1, heads=2, norm_groups=4)


def with_statistics(store: Store) -> Store:
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def build(source: SampleSource, *, persistent: bool = False) -> nn.Module:
    """The small model; persistent: its last layer yields 0, so it repeats the newest state."""
    model = build_model(Config(data=source.config, model=MODEL), shapes_of(source))
    if persistent:
        for parameter in model.recover.parameters():
            torch.nn.init.zeros_(parameter)
    return model


def run(source: SampleSource, out: Path, model: nn.Module | None = None, **given: Any) -> Timing:
    return forecast(
        model or build(source, persistent=True),
        source,
        Statistics.load(source.store),
        out,
        **{"starts": [4], "leads": 3, "attributes": {}, **given},
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return with_statistics(write_store(tmp_path_factory.mktemp("data") / "store"))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """`day` is the number of the day everywhere, and `twice` a diagnostic; 40 days."""
    days, grid = 40, small_grid()
    times = TimeAxis(FIRST_DAY + DAY * np.arange(days), "standard", DAY)
    dates = [f"{times.date(i):%Y-%m-%d}" for i in (0, 19, 20, 39)]
    writer = StoreWriter(
        tmp_path_factory.mktemp("data") / "counting",
        channels=Channels(
            [
                Channel(variable="day", units="1", role="prognostic"),
                Channel(variable="twice", units="1", role="diagnostic"),
            ]
        ),
        grid=grid,
        times=times,
        splits={"train": [f"{dates[0]}/{dates[1]}"], "test": [f"{dates[2]}/{dates[3]}"]},
    )
    for day in range(days):
        writer.write(day, np.stack([np.full(grid.shape, value) for value in (day, 2 * day)]))
    return with_statistics(writer.finish())


# Leads


@pytest.mark.parametrize(
    ("inputs", "outputs", "stride"),
    [((0,), (1,), 1), ((0,), (1,), 3), ((-1, 0), (1,), 1), ((-1, 0), (1, 2), 1),
     ((-2, -1, 0), (1, 2), 2), ((0,), (1, 2, 3), 1)],
)  # fmt: skip
def test_persistence_misses_by_exactly_the_days_of_each_lead(
    counting: Store, tmp_path: Path, inputs: Any, outputs: Any, stride: int
) -> None:
    config = DataConfig(input_offsets=inputs, output_offsets=outputs, stride=stride)
    source = SampleSource(counting, config)
    run(source, tmp_path / "f.zarr", starts=[21, 25], leads=2)
    num_leads = 2 * len(outputs)
    with open_forecast(tmp_path / "f.zarr") as written:
        assert written.num_leads == num_leads
        assert written.channels.names == ("day", "twice")
        for init, start in enumerate((21, 25)):
            assert written.init_times[init] == counting.times.date(start)
            for lead in range(1, num_leads + 1):
                valid = counting.times.date(start + lead * stride)
                assert written.valid_times[init, lead - 1] == valid
                day, twice = written.read(init, lead - 1)
                np.testing.assert_allclose(day, start, atol=1e-4)
                # A diagnostic has no last state: an output of 0 is its mean over days 0 to 19.
                np.testing.assert_allclose(twice, 19, atol=1e-4)
    scores = evaluate(
        tmp_path / "f.zarr", counting, train_ranges=source.ranges["train"], climatology="all"
    )
    leads = np.arange(1, num_leads + 1)
    assert scores.leads == leads.tolist()
    np.testing.assert_allclose(scores.rmse()[:, 0], leads * stride, atol=1e-4)
    np.testing.assert_allclose(scores.rmse("persistence")[:, 0], leads * stride, atol=1e-4)
    np.testing.assert_allclose(scores.lead_seconds, leads * stride * DAY)


def test_a_rollout_feeds_back_the_newest_states_and_asks_for_each_leads_forcing() -> None:
    seen: list[Tensor] = []

    def step(fields: Tensor) -> Tensor:
        # Channels: states of t-1 and t, forcing, static. Two outputs of state and diagnostic.
        seen.append(fields[0, :, 0, 0].clone())
        newest, given = fields[:, 1], fields[:, 2]
        return torch.stack([newest + given, -newest, newest + 2 * given, -newest], dim=1)

    fields = rollout(
        step,
        torch.tensor([1.0, 2.0]).view(1, 2, 1, 1, 1).expand(1, 2, 1, 2, 2),
        lambda lead: torch.full((1, 1, 1, 2, 2), 10.0**lead),
        torch.full((1, 2, 2), 7.0),
        torch.ones(2, 2, 2, dtype=torch.bool),
        leads=3,
        num_prognostic=1,
    )
    corners = [field[0, :, :, 0, 0].tolist() for field in fields]
    assert [s.tolist() for s in seen] == [
        [1, 2, 10, 7], [12, 22, 100, 7], [122, 222, 1000, 7]
    ]  # fmt: skip
    assert corners == [
        [[12, -2], [22, -2]], [[122, -22], [222, -22]], [[1222, -222], [2222, -222]]
    ]  # fmt: skip


def test_land_stays_zero_in_a_rollout_whatever_the_model_says() -> None:
    wet = torch.tensor([[[True, False], [True, True]]])
    fields = list(
        rollout(
            lambda x: torch.where(x == 0, torch.nan, x + 1),
            torch.ones(1, 1, 1, 2, 2) * wet,
            lambda lead: torch.empty(1, 1, 0, 2, 2),
            torch.empty(0, 2, 2),
            wet,
            leads=3,
            num_prognostic=1,
        )
    )
    assert [f[0, 0, 0].tolist() for f in fields] == [
        [[n, 0.0], [n, n]] for n in (2.0, 3.0, 4.0)
    ]  # fmt: skip


def test_a_rollout_is_differentiable_through_all_leads() -> None:
    # x -> a x from 1 with a = 2: (a)^2 + (a^2)^2 + (a^3)^2 is 84 with derivative 228.
    a = torch.tensor(2.0, requires_grad=True)
    fields = rollout(
        lambda x: a * x,
        torch.ones(1, 1, 1, 1, 1),
        lambda lead: torch.empty(1, 1, 0, 1, 1),
        torch.empty(0, 1, 1),
        torch.ones(1, 1, 1, dtype=torch.bool),
        leads=3,
        num_prognostic=1,
    )
    loss = torch.stack([(field**2).sum() for field in fields]).sum()
    loss.backward()
    assert loss.item() == 84
    assert a.grad is not None
    assert a.grad.item() == 228


# What a start needs


def test_a_forecast_beyond_the_forcing_is_refused_before_its_first_step(
    store: Store, tmp_path: Path
) -> None:
    source = SampleSource(store, DataConfig())
    with pytest.raises(ValueError, match=r"needs the forcing of 2003-03-17 00:00:00, which"):
        run(source, tmp_path / "f.zarr", starts=[4, 21], leads=5)
    assert not (tmp_path / "f.zarr").exists()
    # The forcing of its own initial time is all that a step needs.
    run(source, tmp_path / "f.zarr", starts=[21], leads=3)


def test_without_forcing_a_forecast_goes_on_beyond_the_end_of_the_store(tmp_path: Path) -> None:
    bare = with_statistics(write_store(tmp_path / "bare", forcing=()))
    source = SampleSource(bare, DataConfig())
    run(source, tmp_path / "f.zarr", starts=[22, 23], leads=30)
    with open_forecast(tmp_path / "f.zarr") as written:
        assert str(written.valid_times[1, 29]) == "2003-04-15 00:00:00"
        assert np.isfinite(written.read(1, 29)).all()


def test_forcing_alone_is_enough_for_times_without_any_state(tmp_path: Path) -> None:
    days, grid = 24, small_grid()
    whole = write_store(tmp_path / "whole")
    writer = StoreWriter(
        tmp_path / "ahead", channels=whole.channels, grid=grid, times=whole.times,
        splits={"train": ["2003-02-21/2003-03-08"]},
    )  # fmt: skip
    for day in range(days):
        fields = whole.read(day)
        if day > 17:
            fields[:2] = np.nan
        writer.write(day, fields)
    ahead = with_statistics(writer.finish())
    for path in (whole, ahead):
        with_statistics(path)
    files = []
    for each in (whole, ahead):
        source = SampleSource(each, DataConfig())
        files.append(tmp_path / f"{each.path.name}.zarr")
        run(source, files[-1], build(source), starts=[17], leads=7)
    with open_forecast(files[0]) as with_labels, open_forecast(files[1]) as without:
        for lead in range(7):
            np.testing.assert_array_equal(with_labels.read(0, lead), without.read(0, lead))
    source = SampleSource(ahead, DataConfig())
    with pytest.raises(ValueError, match=r"needs the input of 2003-03-11 .* temperature lacks 128"):
        check_starts(source, [18], 1)


def test_a_start_needs_its_history_and_forcing_without_holes_or_gaps(tmp_path: Path) -> None:
    days = [*range(10), *range(12, 26)]
    splits = {"train": ["2003-02-21/2003-03-02"]}
    gap = with_statistics(write_store(tmp_path / "gap", days=days, splits=splits))
    source = SampleSource(gap, DataConfig(input_offsets=(-1, 0)))
    with pytest.raises(ValueError, match=r"the input of 2003-02-20 00:00:00"):
        check_starts(source, [0], 1)
    with pytest.raises(ValueError, match=r"from 2003-03-05 .* the input of 2003-03-04 00:00:00"):
        check_starts(source, [10], 1)
    check_starts(source, [8], 2)
    with pytest.raises(ValueError, match=r"over 3 leads needs the forcing of 2003-03-03 00:00:00"):
        check_starts(source, [8], 3)
    check_starts(source, [11], 10)

    holed = write_store(tmp_path / "holed", prognostic=("temperature",), hole=("temperature", 6))
    source = SampleSource(holed, DataConfig(prognostic=("temperature",), forcing=("wind",)))
    check_starts(source, [5, 7], 4)
    with pytest.raises(ValueError, match=r"input of 2003-02-27 .* temperature lacks 1 values"):
        check_starts(source, [6], 1)
    source = SampleSource(holed, DataConfig(prognostic=("wind",), forcing=("temperature",)))
    check_starts(source, [5], 1)
    with pytest.raises(ValueError, match=r"from 2003-02-26 .* the forcing of 2003-02-27"):
        check_starts(source, [5], 2)


# Numbers


def test_a_start_alone_gives_what_it_gives_among_others(store: Store, tmp_path: Path) -> None:
    source = SampleSource(store, DataConfig())
    model = build(source)
    starts = [3, 5, 6, 11, 14]
    run(source, tmp_path / "all.zarr", model, starts=starts, batch=3)
    with open_forecast(tmp_path / "all.zarr") as together:
        for number, start in enumerate(starts):
            run(source, tmp_path / f"{start}.zarr", model, starts=[start])
            with open_forecast(tmp_path / f"{start}.zarr") as alone:
                for lead in range(3):
                    ours, theirs = together.read(number, lead), alone.read(0, lead)
                    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
        # The model does something: this is no comparison of copies of the initial state.
        first = store.read(3, source.prognostic)
        assert np.abs(together.read(0, 2) - first).max() > 1e-3


def test_what_is_not_finite_is_named_by_start_and_lead_and_left_incomplete(
    store: Store, tmp_path: Path
) -> None:
    source = SampleSource(store, DataConfig())

    class Diverges(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            state = x[:, :2].clone()
            if self.calls == 2:
                state[1, 0, 3, 3] = torch.inf
            return state

    with pytest.raises(ValueError, match=r"from 2003-02-26 .* not finite at lead 2: the model"):
        run(source, tmp_path / "f.zarr", Diverges(), starts=[4, 5])
    with pytest.raises(ValueError, match="incomplete"):
        open_forecast(tmp_path / "f.zarr")


def test_land_is_nan_in_the_file(tmp_path: Path) -> None:
    coast = with_statistics(write_store(tmp_path / "coast", land=True))
    source = SampleSource(coast, DataConfig())
    run(source, tmp_path / "f.zarr", build(source))
    with open_forecast(tmp_path / "f.zarr") as written:
        for lead in range(3):
            wet = coast.wet[source.predicted]
            assert not wet.all()
            np.testing.assert_array_equal(np.isfinite(written.read(0, lead)), wet)


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_plain_xarray_reads_durations_and_valid_times(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    source = SampleSource(store, DataConfig(stride=2))
    path = tmp_path / f"f{suffix}"
    run(source, path, starts=[4, 6])
    engine = "zarr" if suffix == ".zarr" else "netcdf4"
    with xr.open_dataset(path, engine=engine) as data:
        assert data.lead_time.dtype.kind == "m"
        days = data.lead_time.values / np.timedelta64(1, "D")
        assert days.tolist() == [2, 4, 6]
        sums = data.init_time + data.lead_time
        assert sums.dims == data.valid_time.dims == ("init_time", "lead_time")
        np.testing.assert_array_equal(sums.values, data.valid_time.values)
        np.testing.assert_allclose(
            data.temperature.sel(init_time="2003-02-25").values,
            np.broadcast_to(store.read(4, [0]), (3, 8, 16)), atol=1e-4,
        )  # fmt: skip


def test_years_per_day_are_the_length_of_all_forecasts_over_the_time_they_took(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(clock_module, "_now", lambda: (0.5 * next(ticks), 0.0))
    calls: list[tuple[int, int]] = []
    source = SampleSource(store, DataConfig(stride=2, output_offsets=(1, 2)))
    timing = run(
        source, tmp_path / "f.zarr", starts=[4, 5, 6], leads=2, batch=2,
        progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    # Three starts of two leads with two outputs, two days apart: 24 days.
    assert timing.seconds == 0.5 * (next(ticks) - 1)
    assert timing.simulated_years == pytest.approx(24 / 365.25)
    assert timing.simulated_years_per_day == pytest.approx(24 / 365.25 / timing.seconds * 86400)
    assert calls == [(2, 6), (4, 6), (5, 6), (6, 6)]


# From a run's folder


@pytest.fixture(scope="module")
def trained(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(
        name="small",
        data=DataConfig(store=str(store.path)),
        model=MODEL,
        train=TrainConfig(
            steps=4, batch=2, learning_rate=1e-2, warmup_steps=0, ema_decay=0.9, checkpoint_every=2
        ),
        forecast=ForecastConfig(leads=2, every=2),
    )
    out = tmp_path_factory.mktemp("runs") / "small"
    train(config, out)
    return out


def last_field(path: Path) -> np.ndarray:
    with open_forecast(path) as written:
        return written.read(0, written.num_leads - 1)


def test_a_run_forecasts_every_nth_start_of_its_test_split(trained: Path, store: Store) -> None:
    result = forecast_from_run(trained, device="cpu")
    assert result["forecast"] == str(trained / "forecast.zarr")
    assert (result["num_starts"], result["leads"]) == (1, 2)
    with open_forecast(trained / "forecast.zarr") as written:
        assert [str(date) for date in written.init_times] == ["2003-03-13 00:00:00"]
        attributes = written.attributes
    state = json.loads((trained / "checkpoints/step-00000004/state.json").read_text())
    assert attributes["run_fingerprint"] == f"{state['fingerprints']['config']}/step 4"
    assert attributes["store_fingerprint"] == store.fingerprint
    assert attributes["weights"] == "moving average"
    assert json.loads(attributes["config"])["forecast"]["every"] == 2
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        forecast_from_run(trained, device="cpu")
    scores = evaluate_forecast(
        trained / "forecast.zarr", settings=["evaluate.climatology=all"]
    )  # fmt: skip
    assert scores.leads == [1, 2]
    assert np.isfinite(scores.rmse()).all()


def test_a_stopped_forecast_of_a_run_goes_on_also_where_other_leads_are_logged(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, settings = tmp_path / "f.zarr", ["forecast.split=validation", "forecast.restart_every=1"]
    with monkeypatch.context() as patch:
        seen = itertools.count(1)

        def once(*given: Any) -> None:
            if next(seen) == 2:
                raise ValueError("enough")

        patch.setattr(predict_module, "_refuse_not_finite", once)
        with pytest.raises(ValueError, match="enough"):
            forecast_from_run(trained, out, settings=settings, device="cpu")
    with pytest.raises(ValueError, match=r"exists already .* go on with it \(--resume\)"):
        forecast_from_run(trained, out, settings=settings, device="cpu")
    with pytest.raises(ValueError, match=r"weights moving average there, last here"):
        forecast_from_run(
            trained, out, settings=[*settings, "forecast.weights=last"], device="cpu", resume=True
        )
    made = forecast_from_run(
        trained, out, settings=[*settings, "forecast.log_every=1"], device="cpu", resume=True
    )
    assert made["simulated_years"] == pytest.approx(made["num_starts"] / 365.25)  # the second lead
    assert set(made["parts"]) == set(clock_module.PARTS)
    forecast_from_run(trained, tmp_path / "whole.zarr", settings=settings, device="cpu")
    np.testing.assert_array_equal(last_field(out), last_field(tmp_path / "whole.zarr"))


def test_starts_are_sorted_and_one_named_twice_counts_once(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.nc"
    dates = ["2003-03-14", "2003-02-23", "2003-03-14T00:00"]
    forecast_from_run(trained, out, starts=dates, device="cpu")
    with open_forecast(out) as written:
        assert [f"{date:%m-%d}" for date in written.init_times] == ["02-23", "03-14"]


def test_average_and_last_weights_and_earlier_checkpoints_differ(
    trained: Path, tmp_path: Path
) -> None:
    fields = []
    for name, where, settings in (
        ("average", trained, []),
        ("last", trained, ["forecast.weights=last"]),
        ("early", trained / "checkpoints/step-00000002", []),
    ):
        out = tmp_path / f"{name}.zarr"
        forecast_from_run(where, out, settings=settings, device="cpu")
        fields.append(last_field(out))
        with open_forecast(out) as written:
            kind = "last" if name == "last" else "moving average"
            expected = f"{kind}/{2 if name == 'early' else 4}"
            step = written.attributes["run_fingerprint"].split("/step ")[1]
            assert f"{written.attributes['weights']}/{step}" == expected
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(fields[i] - fields[j]).max() > 0


def test_a_checkpoint_forecasts_beside_the_checkpoints_of_its_run(trained: Path) -> None:
    result = forecast_from_run(trained / "checkpoints/step-00000002", device="cpu")
    assert result["forecast"] == str(trained / "forecast-step-00000002.zarr")
    assert np.isfinite(last_field(trained / "forecast-step-00000002.zarr")).all()


def test_another_store_is_seen_through_the_statistics_of_the_training(
    trained: Path, store: Store, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(store.path)
    # The same fields with five days more, and statistics of its own that would shift everything.
    longer = write_store(tmp_path / "longer", days=tuple(range(29)))
    compute(longer, np.arange(3)).save(longer)
    fields = []
    for name, where in (("moved", moved), ("longer", longer.path)):
        out = tmp_path / f"{name}.zarr"
        forecast_from_run(
            trained, out, starts=["2003-03-14"], settings=[f"data.store={where}"], device="cpu"
        )
        fields.append(last_field(out))
    np.testing.assert_array_equal(*fields)


@pytest.mark.parametrize(
    ("grid", "units", "message"),
    [
        (small_grid(10), {}, r"has a grid of \(10, 16\) points .* trained on \(8, 16\)"),
        (Grid(small_grid().lat, small_grid().lon + 5), {}, "lon 5 to .*trained.*lon 0 to .*regrid"),
        (None, {"salinity": "g kg-1"}, "salinity is in 'g kg-1' .* was in '1' at training"),
    ],
)
def test_a_store_of_another_grid_or_other_units_is_refused(
    trained: Path, tmp_path: Path, grid: Grid | None, units: dict[str, str], message: str
) -> None:
    other = write_store(tmp_path / "other", grid=grid, units=units)
    with pytest.raises(ValueError, match=message):
        forecast_from_run(
            trained, tmp_path / "g.zarr", settings=[f"data.store={other.path}"], device="cpu"
        )
    assert not (tmp_path / "g.zarr").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.width=32"], "a finished run keeps its configuration"),
        (["train.steps=9"], "a finished run keeps its configuration"),
        (["forecast.lead=9"], "did you mean .*forecast.leads"),
        (["forecast.leads=0"], "forecast.leads=0 must be at least 1"),
        (["forecast.log_every=-1"], r"forecast.log_every=-1 must be at least 0 \(0: never\)"),
    ],
)
def test_only_the_forecast_can_be_set_for_a_finished_run(
    trained: Path, tmp_path: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        forecast_from_run(trained, tmp_path / "f.zarr", settings=settings, device="cpu")


def test_scores_of_persistence_in_csv_are_its_lead(counting: Store, tmp_path: Path) -> None:
    source = SampleSource(counting, DataConfig())
    config = Config(data=DataConfig(store=str(counting.path)))
    run(
        source, tmp_path / "f.zarr", starts=[21, 22], leads=4,
        attributes={"config": json.dumps(config.to_dict())},
    )  # fmt: skip
    scores = evaluate_forecast(tmp_path / "f.zarr", settings=["evaluate.climatology=all"])
    scores.write_csv(tmp_path / "s.csv")
    with (tmp_path / "s.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if (r["source"], r["channel"]) == ("model", "day")]
    assert [int(row["lead"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["rmse"]) for row in rows] == pytest.approx([1, 2, 3, 4], abs=1e-4)
    with pytest.raises(ValueError, match=r"only evaluate, data\.train can be set here"):
        evaluate_forecast(tmp_path / "f.zarr", settings=["forecast.leads=2"])
    run(source, tmp_path / "bare.zarr")
    with pytest.raises(ValueError, match="does not tell its configuration"):
        evaluate_forecast(tmp_path / "bare.zarr")
