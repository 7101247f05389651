"""Faults that public reports tell of, in the training and forecasts of an ocean U-Net: statistics,
land, and means over ranks. Beside `test_samudra_cases`, which is about times.

Where the network says 0 whatever it is given (`silent`), losses and scores are numbers worked out
by hand.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from graticule.data.ingest import ingest
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Packing, Store
from graticule.forecast.reader import open_forecast
from graticule.tasks import evaluate_forecast, forecast_from_run, validate_run
from graticule.train import checkpoint, train
from graticule.train.differences import Differences
from graticule.train.progress import read_metrics
from graticule.train.step import training_step
from graticule.train.task import Task
from graticule.variables import Role
from pools import Pools
from small_store import small_grid
from test_samudra_traps import GRID, Batch, objective, unet, wet
from tiny import write_netcdf
from unet_case import config_of, days, gradients, plainly, silent, trained, written

ONE: dict[str, Role] = {"t": "prognostic", "tau": "forcing"}
TWO: dict[str, Role] = {"t": "prognostic", "zos": "prognostic", "tau": "forcing"}
DAYS = days(2003, 2, 20, number=18)
SPLITS = {"train": ["2003-02-20/2003-03-03"], "validation": ["2003-03-04/2003-03-09"]}
"""Twelve days and six."""


def last(run: Path) -> dict[str, Any]:
    return read_metrics(run)[-1]


# Statistics


@pytest.mark.parametrize("packed", [False, True])
def test_a_constant_channel_trains_finite_and_is_forecast_as_its_constant(
    packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    land = np.zeros((8, 16), bool)
    land[:3, :5] = True
    wave = np.random.default_rng(0).normal(size=(8, 16))
    with caplog.at_level(logging.WARNING):
        store = written(
            tmp_path / "store", DAYS,
            lambda n: (np.cos(n) * wave, np.where(land, np.nan, 5.0), np.sin(n)), names=TWO,
            splits=SPLITS,
            packing=Packing.over_range(np.array([-5, 5, -1]), np.array([5, 5, 1])) if packed
            else None,
        )  # fmt: skip
    assert "zos is 5 everywhere: it has no spread" in caplog.text
    run = tmp_path / "run"
    train(
        config_of(
            store, steps=4, batch=2, leads=2, leads_from=((1, 1), (3, 2)), learning_rate=1e-2,
            dynamic_scale="inverse", dynamic_scale_limit=20.0, gradient_loss=0.1,
        ),
        run,
    )  # fmt: skip
    lines = read_metrics(run)
    told = [line[key] for line in lines for key in ("loss", "scaled_loss", "gradient_norm")]
    assert np.isfinite([*told, lines[-1]["validation_loss"]]).all()
    start, settings = ["2003-03-05"], ["forecast.leads=2"]
    forecast_from_run(run, starts=start, settings=settings, device="cpu")
    with open_forecast(run / "forecast.zarr") as opened:
        for lead in range(4):
            t, zos = opened.read(0, lead)
            assert np.isfinite(t).all()
            np.testing.assert_array_equal(zos, np.where(land, np.nan, np.float32(5)))
    scores = evaluate_forecast(run / "forecast.zarr", settings=["evaluate.climatology=all"])
    assert (scores.rmse()[:, 1] == 0).all()
    (line,) = validate_run(run, leads=(2,), device="cpu")["added"]
    # Normalised to 0 whatever it is then: what it misses is not known there.
    assert line["rmse"]["zos"] is None
    # Persistence misses nothing there: t alone has a ratio.
    assert line["ratio"]["zos"] is None
    assert line["mean_ratio"] == line["ratio"]["t"]


@pytest.mark.parametrize(("packed", "chunk"), [(False, None), (False, (1, 2)), (True, (1, 2))])
def test_a_pressure_of_101325_to_101327_has_its_spread_in_what_the_network_is_given_and_taught(
    packed: bool, chunk: Any, tmp_path: Path
) -> None:
    # Each field holds the three values equally often; float32 sums of squares say no spread.
    column = np.arange(12)[None, :]
    store = written(
        tmp_path / "store", DAYS, lambda n: (101325 + (column + n) % 3, n),
        names=ONE, splits=SPLITS, grid=small_grid(8, 12), inner_chunk=chunk,
        packing=Packing(np.full(2, 2.0**-6), np.array([101300.0, 0])) if packed else None,
    )  # fmt: skip
    assert Statistics.load(store).std[0] == pytest.approx(0.81650, abs=1e-5)
    says_0 = silent(config_of(store), tmp_path / "silent")
    given: Any = {"batch": 2, "leads": 2}
    run = tmp_path / "run"
    train(config_of(store, **given, start_from=str(says_0)), run)
    # Normalised they are 1.22474, 0 and -1.22474: a mean square of 1 at each lead.
    np.testing.assert_allclose(last(run)["lead_losses"], [1.0, 1.0], rtol=1e-4)
    heard: list[Tensor] = []
    found = Task.of(config_of(store, **given), torch.device("cpu"))
    found.model.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    found.validation_loss()
    assert found.validation_starts is not None
    first = int(found.validation_starts[0])
    for place, time in enumerate((first - 1, first)):
        expected = ((np.arange(12) + time) % 3 - 1) * 1.22474
        assert np.abs(heard[0][0, place].numpy() - expected).max() < 1e-4


def test_losses_and_forecasts_know_the_training_days_alone(tmp_path: Path) -> None:
    values = [(-1.0) ** n if n < 12 else 100.0 for n in range(18)]
    store = written(tmp_path / "store", DAYS, lambda n: (values[n], n), names=ONE, splits=SPLITS)
    says_0 = silent(config_of(store), tmp_path / "silent")
    run = tmp_path / "run"
    train(config_of(store, steps=3, batch=2, leads=2, start_from=str(says_0)), run)
    # In standard deviations of 1 from a mean of 0: 1 + 1 over two leads, then 100^2 + 100^2.
    assert [line["loss"] for line in read_metrics(run)] == [2.0] * 3
    assert last(run)["validation_loss"] == pytest.approx(20000.0, rel=1e-7)
    kept = checkpoint.read_state(checkpoint.find(run))["statistics"]
    assert (kept["mean"][0], kept["std"][0]) == (0.0, 1.0)
    assert (kept["first"], kept["last"], kept["num_times"]) == (
        "2003-02-20 00:00:00", "2003-03-03 00:00:00", 12
    )  # fmt: skip
    # Of another store with statistics of its own a forecast takes those of its training.
    other = written(tmp_path / "other", DAYS, lambda n: (100.0 + n, n), names=ONE, splits=SPLITS)
    forecast_from_run(
        says_0, tmp_path / "f.zarr", starts=["2003-03-05"], device="cpu",
        settings=[f"data.store={other.path}", "forecast.leads=1"],
    )  # fmt: skip
    with open_forecast(tmp_path / "f.zarr") as opened:
        assert not opened.read(0, 1).any()
    compute(store, np.arange(18)).save(store)
    with pytest.raises(ValueError, match=r"come from 18 times, .* training times are 12"):
        train(config_of(store), tmp_path / "refused")


# Land


def test_a_label_that_is_missing_on_land_gives_the_loss_and_gradient_of_the_sea(
    tmp_path: Path,
) -> None:
    sea = np.zeros((8, 16), bool)
    sea[3, 5] = True
    store = plainly(
        written(
            tmp_path / "store",
            DAYS,
            lambda n: (np.where(sea, 1.0, np.nan), n),
            names=ONE,
            splits={"train": SPLITS["train"]},
        )
    )
    assert np.isnan(store.read_stored(0)[0]).sum() == 8 * 16 - 1
    says_0 = silent(config_of(store), tmp_path / "silent")
    run = tmp_path / "run"
    path = train(config_of(store, leads=2, start_from=str(says_0)), run)
    assert last(run)["lead_losses"] == [1.0, 1.0]
    found = gradients(path)
    # d/db of the mean over two output times of (b - 1)^2 is -1 for each, at either lead.
    assert found["last.conv.bias"].tolist() == pytest.approx([-2.0, -2.0], rel=1e-6)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    assert last(run)["gradient_norm"] > 2.8  # that of both alone


class _LandOf(Batch):
    """Whose labels hold a number on land."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self._leads = [
            (forcing, torch.where(wet(), labels, fill)) for forcing, labels in self._leads
        ]


@pytest.mark.parametrize("kind", ["mse", "mae"])
def test_no_gradient_of_a_rollout_depends_on_what_labels_hold_on_land(kind: Any) -> None:
    found: list[dict[str, Tensor]] = []
    for fill in (0.0, float("nan"), float("inf")):
        model = unet()
        aim = objective()
        differences = Differences.of(aim.weights, 0.1, grid=GRID, periodic=True)
        training_step(
            model, replace(aim, kind=kind, differences=differences), [_LandOf(fill)], step=1,
            samples=2, learning_rate=0.0, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        )  # fmt: skip
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({**named, **dict(model.named_buffers())})
    assert found[0]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in found[0].items():
            assert torch.isfinite(value).all(), name
            assert torch.equal(other[name], value), name


# Ranks


def one_and_seven() -> np.ndarray:
    """One cell in the north west, seven in the south east."""
    sea = np.zeros((8, 16), bool)
    sea[1, 3] = True
    sea[6, 8:15] = True
    return sea


@pytest.mark.parametrize("dim", ["lat", "lon"])
def test_ranks_with_one_wet_cell_and_seven_have_the_loss_and_gradients_of_one_rank(
    dim: str, pools: Pools, tmp_path: Path
) -> None:
    sea = one_and_seven()
    # As far from 0: 3 in the one, 1 in the seven.
    size = np.where(sea, 1.0, np.nan)
    size[1, 3] = 3.0
    store = plainly(
        written(
            tmp_path / "store",
            DAYS,
            lambda n: ((-1) ** n * size, n),
            names=ONE,
            splits={"train": SPLITS["train"]},
        )
    )
    mesh = {"window": 2, "stripe_dim": dim}
    settings: Any = {"batch": 2, "leads": 2, "area_weighted": False}
    says_0 = silent(config_of(store), tmp_path / "silent")
    silenced = config_of(store, mesh=mesh, **settings, start_from=str(says_0))
    pools[2].run(trained, silenced, tmp_path / "silenced")
    # (9 + 7) / 8; the mean of the ranks' means is 5.
    assert last(tmp_path / "silenced")["lead_losses"] == [2.0, 2.0]
    one = train(config_of(store, **settings), tmp_path / "one")
    two, _ = pools[2].run(trained, config_of(store, mesh=mesh, **settings), tmp_path / "two")
    assert last(tmp_path / "two")["loss"] == pytest.approx(last(tmp_path / "one")["loss"], rel=1e-5)
    alone, shared = gradients(one), gradients(two)
    assert alone.keys() == shared.keys()
    largest = max(float(value.abs().max()) for value in alone.values())
    for name, value in alone.items():
        difference = float((shared[name] - value).abs().max())
        assert difference <= 2e-5 * max(float(value.abs().max()), 1e-2 * largest), name


@pytest.mark.parametrize(("ranks", "descending"), [(1, False), (1, True), (2, True), (3, False)])
def test_an_error_of_two_everywhere_is_two_with_poles_either_way_up_on_any_ranks(
    ranks: int, descending: bool, pools: Pools, tmp_path: Path
) -> None:
    store = plainly(_of_twos(tmp_path, descending))
    assert abs(store.grid.lat[[0, -1]]).tolist() == [90, 90]
    says_0, mesh = silent(config_of(store), tmp_path / "silent"), {"window": ranks}
    for kind, expected in (("mae", 2.0), ("mse", 4.0)):
        config = config_of(store, mesh=mesh, leads=2, loss=kind, start_from=str(says_0))
        pools[ranks].run(trained, config, tmp_path / kind)
        line = last(tmp_path / kind)
        assert line["lead_losses"] == pytest.approx([expected] * 2, rel=1e-7)
        assert line["validation_loss"] == pytest.approx(2 * expected, rel=1e-7)
    for found in pools[ranks].run(_scored, says_0, [f"mesh.window={ranks}"]):
        assert found["rmse"].shape == (4, 3)  # two leads of two times, three channels
        for name, error in (("rmse", 2.0), ("bias", -2.0), ("mae", 2.0), ("validated", 2.0)):
            np.testing.assert_allclose(found[name], error, rtol=5e-8, err_msg=name)
    weights = Task.of(config_of(store), torch.device("cpu")).objective.weights
    assert weights.cell.min() == 0
    everywhere = weights.cell[store.channels.index("zos")]
    assert (everywhere > 0).all()  # at the poles too, which cos(lat) would leave out


def _scored(run: Path, mesh: list[str]) -> dict[str, np.ndarray]:
    """Of a forecast that these ranks make and score, and of a validation."""
    settings = ["forecast.leads=2", "forecast.split=validation", *mesh]
    forecast_from_run(run, settings=settings, device="cpu")
    scores = evaluate_forecast(run / "forecast.zarr", settings=["evaluate.climatology=all"])
    (line,) = validate_run(run, leads=(2,), settings=mesh, device="cpu")["added"]
    return {
        "rmse": scores.rmse(), "bias": scores.bias(), "mae": scores.mae(),
        "validated": np.array(list(line["rmse"].values())),
    }  # fmt: skip


def _of_twos(folder: Path, descending: bool) -> Store:
    """`zos` everywhere and `thetao` on two levels with land of their own, 2 each, from files."""
    lat, lon = np.linspace(-90, 90, 9), np.arange(16) * 22.5
    thetao = np.full((18, 2, 9, 16), 2.0, np.float32)
    thetao[:, 0, 2:4, :5] = thetao[:, 1, :6, :9] = np.nan
    dataset = xr.Dataset(
        {
            "zos": (("time", "lat", "lon"), np.full((18, 9, 16), 2.0, np.float32), {"units": "m"}),
            "thetao": (("time", "depth", "lat", "lon"), thetao, {"units": "degC"}),
        },
        coords={
            "time": ("time", np.arange(18), {"units": "days since 2003-02-20"}),
            "depth": ("depth", [0.5, 9.5], {"units": "m", "positive": "down"}),
            "lat": ("lat", lat, {"units": "degrees_north"}),
            "lon": ("lon", lon, {"units": "degrees_east"}),
        },
    )
    if descending:
        dataset = dataset.isel(lat=slice(None, None, -1))
    store = ingest([write_netcdf(dataset, folder / "all.nc")], folder / "store", splits=SPLITS)
    compute(store, np.arange(12)).save(store)
    return store
