"""Excerpts of real files through the commands, from NetCDF to scores (tests/data/README.md)."""

import json
from pathlib import Path

import netCDF4
import numpy as np
import pytest

from graticule.cli import main
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.train.progress import read_metrics

DATA = Path(__file__).parent / "data"


def test_six_months_of_winds_go_from_netcdf_to_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = DATA / "navy_winds_6_months.nc", tmp_path / "winds.zarr"
    before = source.read_bytes()
    arguments = ["data", "ingest", str(source), "--out", str(out), "--variables", "UWND,VWND"]
    splits = ["--train", "1982-01/1982-02", "--validation", "1982-03/1982-04",
              "--test", "1982-05/1982-06"]  # fmt: skip
    assert main([*arguments, *splits, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["channels"] == ["UWND", "VWND"]
    assert told["times"] == 6
    assert told["grid"] == [73, 144]

    # Turned north to south, and east from 0: the file begins at 90 S and 20 E.
    store = Store(out)
    with netCDF4.Dataset(source) as file:
        theirs = file["UWND"][2].filled(np.nan)
    np.testing.assert_array_equal(
        store.read(2, [0])[0], np.roll(theirs[::-1], 8, axis=1).astype(np.float32)
    )
    assert store.grid.lat[[0, -1]].tolist() == [90, -90]
    assert store.grid.lon[[0, -1]].tolist() == [0, 357.5]
    assert store.times.step_seconds is None, "the step is a month"

    ingested = Statistics.load(store)
    assert main(["data", "stats", str(out)]) == 0
    assert "UWND" in capsys.readouterr().out
    np.testing.assert_array_equal(Statistics.load(store).std, ingested.std)
    assert ingested.num_times == 2
    assert main(["data", "check", str(out)]) == 0
    capsys.readouterr()

    # `winds` as it is but for its size and its splits, which need 132 months.
    settings = [
        f"data.store={out}", "data.train=1982-01/1982-02", "data.validation=1982-03/1982-04",
        "data.test=1982-05/1982-06", "model.width=16", "model.depth=2", "model.heads=2",
        "train.steps=4", "train.batch=1", "train.warmup_steps=1", "forecast.leads=1",
        "evaluate.climatology=all",
    ]  # fmt: skip
    run = tmp_path / "run"
    sets = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", "winds", "--out", str(run), *sets]) == 0
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert np.isfinite(lines[-1]["validation_loss"])

    assert main(["forecast", str(run)]) == 0
    # Two months to train on, and a forecast that goes on for a year beyond the file.
    longer = ["--start", "1982-06", "--set", "forecast.leads=12", "--out", str(tmp_path / "y.nc")]
    assert main(["forecast", str(run), *longer]) == 0
    with open_forecast(tmp_path / "y.nc") as year:
        valid = [(date.year, date.month) for date in year.valid_times[0]]
        assert valid == [(1982, month) for month in range(7, 13)] + [
            (1983, month) for month in range(1, 7)
        ]
        assert np.isfinite(year.read(0, 11)).all()

    capsys.readouterr()
    assert main(["evaluate", str(run / "forecast.zarr")]) == 0
    table = capsys.readouterr().out
    assert "UWND" in table
    assert "/persistence" in table
    scores = json.loads((run / "forecast.scores.json").read_text())
    months = 30.436875 * 24
    rmse = {(row["source"], row["channel"]): row["rmse"] for row in scores["rows"]}
    assert all(row["lead_hours"] == months for row in scores["rows"])
    # Persistence by hand, weighted by exact cell area.
    change = store.read(5).astype(float) - store.read(4)
    area = np.broadcast_to(store.grid.cell_area, change.shape[1:])
    expected = np.sqrt((change**2 * area).sum((1, 2)) / area.sum())
    for channel, value in zip(("UWND", "VWND"), expected, strict=True):
        assert rmse["persistence", channel] == pytest.approx(value, rel=1e-6)
        assert rmse["model", channel] == pytest.approx(value, rel=0.2)
    assert source.read_bytes() == before


def test_a_climatology_without_time_is_given_its_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = DATA / "levitus_3_levels.nc", tmp_path / "levitus.zarr"
    assert main(["data", "ingest", str(source), "--out", str(out)]) == 2
    assert "--time 2000-01-01" in capsys.readouterr().err
    assert not out.exists()
    arguments = ["data", "ingest", str(source), "--out", str(out), "--time", "1994-01-01"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["times"] == 1
    assert told["first"].startswith("1994-01-01")
    assert told["channels"] == [f"{n}@{z}" for n in ("TEMP", "SALT") for z in (0, 200, 2000)]
    store = Store(out)
    sea = store.wet.mean((1, 2))
    assert ((sea > 0.4) & (sea < 0.8)).all()
    assert sea[0] > sea[1] > sea[2], "the sea narrows with depth"
    with netCDF4.Dataset(source) as file:
        theirs = file["SALT"][1].filled(np.nan)
    np.testing.assert_array_equal(
        store.read(0, [4])[0], np.roll(theirs[::-1], 20, axis=1).astype(np.float32)
    )
    assert main(["data", "check", str(out)]) == 0
    assert not store.missing.any()
