"""What goes wrong in training an ocean U-Net without a word: denominators, windows, forcing, the
order of samples, statistics of averaged weights and of layouts."""

import dataclasses
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graticule.config import Config, DataConfig, MeshConfig, TrainConfig, UNetConfig
from graticule.data.loader import Loader, Order
from graticule.data.normalise import Normaliser
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.parallel.local import LocalRanks
from graticule.train import checkpoint, train
from graticule.train.loss import LossWeights, weighted_errors
from graticule.train.objective import Objective
from graticule.train.step import training_step
from graticule.train.task import Task, evenly
from graticule.variables import Channel, Channels
from small_store import small_grid, write_store
from test_trainer import all_tensors, numbers, with_statistics

TWO_TWO = {"input_offsets": (-1, 0), "output_offsets": (1, 2)}
INPUT_WINDOW, LABEL_WINDOW = (-1, 0), (1, 2)
"""`data.forcing_offsets`: as Samudra was trained, and the states that are predicted."""


# Land and denominators


def loss_of(
    errors: Tensor, wet: np.ndarray, denominator: Any, area: np.ndarray | None = None
) -> float:
    weights = LossWeights.of(wet, area, denominator=denominator)
    sums = weighted_errors(errors, torch.zeros_like(errors), weights, "mae")
    return float(sums.sum()) / (weights.total * errors.shape[0] * errors.shape[1])


def levels(share: float = 0.13) -> np.ndarray:
    """(2, 10, 10): a surface without land, and a level of which 13 % are wet."""
    wet = np.ones((2, 10, 10), bool)
    wet[1] = np.arange(100).reshape(10, 10) < 100 * share
    return wet


def test_a_level_that_is_13_percent_wet_weighs_as_the_denominator_says() -> None:
    surface, deep = torch.zeros(1, 2, 2, 10, 10), torch.zeros(1, 2, 2, 10, 10)
    surface[:, :, 0], deep[:, :, 1] = 1.0, 1.0
    wet = levels()
    # All cells, as the original: 1/2 and 0.13/2, so that an error of 1 everywhere is no loss of 1.
    assert loss_of(surface, wet, "cells") == 0.5
    assert loss_of(deep, wet, "cells") == pytest.approx(0.065)
    assert loss_of(surface + deep, wet, "cells") == pytest.approx(0.565)
    # Wet cells: the same shares, of 1.
    assert loss_of(surface, wet, "wet") == pytest.approx(100 / 113)
    assert loss_of(deep, wet, "wet") == pytest.approx(13 / 113)
    assert loss_of(surface + deep, wet, "wet") == pytest.approx(1.0)
    # Each channel over its own wet cells.
    assert loss_of(surface, wet, "channel") == pytest.approx(0.5)
    assert loss_of(deep, wet, "channel") == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("denominator", ["wet", "channel", "cells"])
@pytest.mark.parametrize("kind", ["mae", "mse"])
def test_a_mask_that_is_all_land_gives_zero_and_no_nan(denominator: Any, kind: Any) -> None:
    wet = np.stack([np.ones((4, 8), bool), np.zeros((4, 8), bool)])
    weights = LossWeights.of(wet, small_grid(4, 8).cell_area, denominator=denominator)
    predicted = torch.full((2, 2, 2, 4, 8), 3.0, requires_grad=True)
    target = torch.where(weights.wet, 1.0, torch.nan).expand(2, 2, 2, 4, 8)
    sums = weighted_errors(predicted, target, weights, kind)
    (gradient,) = torch.autograd.grad(sums.sum(), predicted)
    assert sums[1] == 0
    assert not gradient[:, :, 1].any()
    share = 0.5 if denominator == "cells" else 1.0
    loss = float(sums.detach().sum()) / (weights.total * 4)
    assert loss == pytest.approx(share * (2.0 if kind == "mae" else 4.0), rel=1e-6)


def test_rows_of_a_gaussian_grid_weigh_by_their_area_and_sum_over_wet_cells() -> None:
    nodes, _ = np.polynomial.legendre.leggauss(16)
    grid = Grid(np.rad2deg(np.arcsin(nodes))[::-1], np.arange(8) * 45.0)
    wet = np.random.default_rng(0).random((2, *grid.shape)) > 0.3
    weights = LossWeights.of(wet, grid.cell_area)
    edges = np.deg2rad(np.r_[90, (grid.lat[1:] + grid.lat[:-1]) / 2, -90])
    band = np.sin(edges[:-1]) - np.sin(edges[1:])
    expected = wet * (band / band.mean())[:, None]
    np.testing.assert_allclose(weights.cell.numpy(), expected, rtol=1e-6)
    assert weights.total == pytest.approx(expected.sum(), rel=1e-6)
    error = torch.full((1, 1, 2, *grid.shape), 2.0)
    assert loss_of(error, wet, "wet", grid.cell_area) == pytest.approx(2.0, rel=1e-6)
    # An error in one row counts by that row's area.
    row = torch.zeros_like(error)
    row[..., 3, :] = 1.0
    share = (wet[:, 3] * band[3]).sum() / (wet * band[:, None]).sum()
    assert loss_of(row, wet, "wet", grid.cell_area) == pytest.approx(share, rel=1e-6)


# Windows and forcing

SPLITS = {"train": ["2003-02-21/2003-03-08"], "validation": ["2003-03-09/2003-03-16"]}


def numbered(path: Path, days: int, splits: dict[str, list[str]] | None = None) -> Store:
    """Whose state of time n is n everywhere, and the forcing 100 + n."""
    grid = small_grid(4, 8)
    channels = Channels(
        [Channel(variable="t", units="1", role="prognostic"),
         Channel(variable="tau", units="1", role="forcing")]
    )  # fmt: skip
    times = TimeAxis(5 * 86400 * np.arange(days), "julian", 5 * 86400)
    if splits is None:
        splits = {"train": [f"{times.date(0):%Y-%m-%d}/{times.date(days - 1):%Y-%m-%d}"]}
    writer = StoreWriter(path, channels=channels, grid=grid, times=times, splits=splits)
    for n in range(days):
        writer.write(n, np.stack([np.full(grid.shape, n), np.full(grid.shape, 100 + n)]))
    return writer.finish()


@pytest.mark.parametrize("forcing", [INPUT_WINDOW, LABEL_WINDOW])
def test_forty_times_hold_31_windows_of_four_leads_and_the_last_label_is_time_39(
    tmp_path: Path, forcing: tuple[int, ...]
) -> None:
    # T - N x outputs x stride - (inputs - 1) x stride = 40 - 4 x 2 - 1.
    store = numbered(tmp_path / "store", 40)
    source = SampleSource(store, DataConfig(**TWO_TWO, forcing_offsets=forcing))
    starts = source.starts("train", 4)
    assert len(starts) == 31
    assert starts[0] == 1
    assert starts[-1] + source.spec.label_offsets(4)[-1] == 39
    strided = SampleSource(store, DataConfig(**TWO_TWO, forcing_offsets=forcing, stride=2))
    assert len(strided.starts("train", 4)) == 40 - 4 * 2 * 2 - 2


def test_splits_do_not_share_a_label_and_their_ends_are_inclusive(tmp_path: Path) -> None:
    store = numbered(tmp_path / "store", 40)
    day = [f"{store.times.date(n):%Y-%m-%d}" for n in range(40)]
    split = {"train": (f"{day[0]}/{day[19]}",), "validation": (f"{day[20]}/{day[29]}",),
             "test": (f"{day[30]}/{day[39]}",)}  # fmt: skip
    source = SampleSource(store, DataConfig(**TWO_TWO, forcing_offsets=INPUT_WINDOW, **split))
    seen = {}
    for name in split:
        starts = source.starts(name, 2)
        labels = {int(s) + o for s in starts for k in (1, 2) for o in source.spec.label_offsets(k)}
        seen[name] = labels | {int(s) + o for s in starts for o in source.spec.inputs}
    assert [(min(times), max(times)) for times in seen.values()] == [(0, 19), (20, 29), (30, 39)]
    # The last day of one split as the first of the next, as the original has it: refused.
    shared = {**split, "validation": (f"{day[19]}/{day[29]}",)}
    source = SampleSource(store, DataConfig(**TWO_TWO, forcing_offsets=INPUT_WINDOW, **shared))
    with pytest.raises(ValueError, match="validation shares 1 times with another split"):
        source.starts("train", 2)


# (input offsets, output offsets, forcing offsets) -> times of states given, forcing and labels of
# three leads that start at the first possible time.
ROLLOUTS = {
    "2 in, 2 out, input window": (
        (-1, 0), (1, 2), (-1, 0), [(0, 1), (2, 3), (4, 5)], [(0, 1), (2, 3), (4, 5)],
        [(2, 3), (4, 5), (6, 7)],
    ),
    "2 in, 2 out, label window": (
        (-1, 0), (1, 2), (1, 2), [(0, 1), (2, 3), (4, 5)], [(2, 3), (4, 5), (6, 7)],
        [(2, 3), (4, 5), (6, 7)],
    ),
    "2 in, 1 out": (
        (-1, 0), (1,), (-1, 0), [(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)],
        [(2,), (3,), (4,)],
    ),
    "1 in, 1 out": (
        (0,), (1,), (0,), [(0,), (1,), (2,)], [(0,), (1,), (2,)], [(1,), (2,), (3,)],
    ),
    "1 in, 2 out, label window": (
        (0,), (1, 2), (1, 2), [(0,), (2,), (4,)], [(1, 2), (3, 4), (5, 6)],
        [(1, 2), (3, 4), (5, 6)],
    ),
}  # fmt: skip


class Clock(nn.Module):
    """Reads off what it is given, and predicts the times that the labels should have."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.zero = nn.Parameter(torch.zeros(()))
        self.states: list[tuple[int, ...]] = []
        self.forcing: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        values = [round(float(plane[0, 0])) for plane in x.detach()[0]]
        self.states.append(tuple(values[: self.inputs]))
        self.forcing.append(tuple(value - 100 for value in values[self.inputs :]))
        newest = x[:, self.inputs - 1 : self.inputs]
        later = torch.arange(1.0, self.outputs + 1)[:, None, None]
        return newest + later + self.zero


@pytest.mark.parametrize("name", ROLLOUTS)
def test_each_lead_is_given_the_states_and_forcing_of_its_own_times(
    name: str, tmp_path: Path
) -> None:
    inputs, outputs, forcings, states, forcing, labels = ROLLOUTS[name]
    store = numbered(tmp_path / "store", 12)
    config = DataConfig(input_offsets=inputs, output_offsets=outputs, forcing_offsets=forcings)
    source = SampleSource(store, config)
    identity = {"mean": np.zeros(2), "std": np.ones(2)}
    compute(store, source.times("train")).save(store)
    statistics = dataclasses.replace(Statistics.load(store), **identity)
    objective = Objective(
        inputs=Normaliser(store, source.prognostic, statistics),
        forcing=Normaliser(store, source.forcing, statistics),
        labels=Normaliser(store, source.predicted, statistics),
        statics=torch.zeros(0, 4, 8), weights=LossWeights.of(np.ones((1, 4, 8), bool)),
        kind="mae", leads=3, num_prognostic=1, num_outputs=len(outputs),
    )  # fmt: skip
    starts = source.starts("train", 3)
    assert starts[0] == states[0][-1]
    loader = Loader(source, Order(starts, seed=None), range(1), batch=1, leads=3)
    # In training, forward and backward, and in a forecast without gradient.
    trained, rolled = (Clock(len(inputs), len(outputs)) for _ in range(2))
    with closing(iter(loader)) as batches:
        result = training_step(
            trained, objective, batches, optimizer=torch.optim.SGD(trained.parameters(), lr=0.0),
            step=1, samples=1, learning_rate=0.0,
        )  # fmt: skip
    assert result.loss == 0.0  # what it predicts are the labels, whose value is their time
    found = _rolled(rolled, objective, loader)
    assert [tuple(label[0, :, 0, 0, 0].tolist()) for _, label, _ in found] == labels
    for clock in (trained, rolled):
        assert clock.states == states
        assert clock.forcing == forcing


def _rolled(model: nn.Module, objective: Objective, loader: Loader) -> list[Any]:
    with torch.no_grad(), closing(iter(loader)) as batches:
        batch = next(batches)
        return list(objective.forecast(model, objective.inputs(batch.inputs), batch))


def test_pentads_of_the_julian_calendar_are_found_by_date(tmp_path: Path) -> None:
    store = numbered(tmp_path / "store", 5)
    assert store.times.date(1) == cftime.datetime(1970, 1, 6, calendar="julian")


# The order of samples


def test_samples_are_shuffled_and_not_only_batches() -> None:
    order = Order(np.arange(400), seed=3)
    epochs = [
        [frozenset(order.start(400 * epoch + 4 * b + i) for i in range(4)) for b in range(100)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(start for batch in epoch for start in batch) == list(range(400))
        runs = [max(batch) - min(batch) == 3 for batch in epoch]
        assert sum(runs) <= 2  # no batches of windows that follow one another
    assert len(set(epochs[0]) & set(epochs[1])) <= 2  # composed anew in each epoch


@pytest.mark.parametrize("count", [1, 5, 7])
def test_no_sample_counts_twice_in_a_validation_of_several_ranks(
    two: LocalRanks, count: int, tmp_path: Path
) -> None:
    store = with_statistics(write_store(tmp_path / "store", splits=SPLITS))
    config = unet_config(store, data={}, batch=2, leads=1)
    found = two.run(_counted, config, count)
    counted = sorted(start for rank in found for start in rank["counted"])
    assert counted == sorted(set(counted))
    assert len(counted) == count
    assert len({rank["calls"] for rank in found}) == 1


def _counted(config: Config, count: int) -> dict[str, Any]:
    from graticule.mesh import Mesh

    task = Task.of(config, torch.device("cpu"), Mesh({"data": 2}))
    assert task.validation_starts is not None
    counted, calls = [], 0
    with closing(task.batches(evenly(task.validation_starts, count), 1)) as batches:
        for batch, counts in batches:
            batch.lead()
            calls += 1
            counted += batch.starts if counts else []
    return {"counted": counted, "calls": calls}


# Running statistics, in averages and in checkpoints of all layouts


def unet_config(store: Store, data: dict[str, Any] | None = None, **settings: Any) -> Config:
    """With a rate of 0, so that statistics can be compared to rounding: a bias that batch norm
    takes away has no gradient but rounding, of which Adam makes whole steps."""
    given = {
        "steps": 3, "batch": 2, "leads": 2, "learning_rate": 0.0, "weight_decay": 0.0,
        "warmup_steps": 0, "schedule": "constant", "ema_decay": 0.9, "loss": "mse", **settings,
    }  # fmt: skip
    offsets = {**TWO_TWO, "forcing_offsets": INPUT_WINDOW} if data is None else data
    return Config(
        name="small",
        data=DataConfig(store=str(store.path), **offsets),
        model=UNetConfig(widths=(6, 8), dilations=(1, 2, 1, 1, 1)),
        train=TrainConfig(**given),
    )


@pytest.fixture(scope="module")
def ocean(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("data") / "store"
    return with_statistics(write_store(path, land=True, packed=True, splits=SPLITS))


@pytest.fixture(scope="module")
def alone(ocean: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on one process, with all that this training has."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(unet_config(ocean, **EVERYTHING), run)
    return run


EVERYTHING = {
    "gradient_loss": 0.1, "dynamic_scale": "inverse", "dynamic_scale_limit": 20.0,
    "denominator": "cells", "leads_from": ((1, 1), (3, 2)),
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {}, "rows": {"window": 2}, "columns": {"window": 2, "stripe_dim": "lon"},
    "sharded": {"weights": "sharded"},
}  # fmt: skip


def _train(config: Config, out: Path, resume: bool = False) -> str:
    return str(train(config, out, resume=resume))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_and_keeps_the_running_statistics_of_one_process(
    name: str, two: LocalRanks, ocean: Store, alone: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(unet_config(ocean, **EVERYTHING), mesh=MeshConfig(**LAYOUTS[name]))
    run = tmp_path / "run"
    (path, _) = two.run(_train, config, run)
    for line, other in zip(numbers(run), numbers(alone), strict=True):
        assert line.keys() == other.keys()
        for key in {"loss", "gradient_norm", "validation_loss"} & line.keys():
            assert line[key] == pytest.approx(other[key], rel=2e-5), (key, line["step"])
    found, expected = all_tensors(Path(path)), all_tensors(checkpoint.find(alone))
    assert found.keys() == expected.keys()
    statistics = [key for key in found if "running_" in key]
    assert len(statistics) == 2 * 2 * 10  # means and variances of ten norms, and their averages
    for key in statistics:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-6)
    for key in statistics:
        if key.startswith("model/") and key.endswith("_var"):
            assert not torch.equal(found[key], torch.ones_like(found[key]))


def test_running_statistics_are_saved_in_one_layout_and_go_on_in_another(
    two: LocalRanks, ocean: Store, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(alone, run)
    before = all_tensors(checkpoint.find(run))
    sharded = dataclasses.replace(
        unet_config(ocean, **EVERYTHING, steps=4), mesh=MeshConfig(window=2, weights="sharded")
    )
    two.run(_train, sharded, run, True)
    train(unet_config(ocean, **EVERYTHING, steps=5), run, resume=True)
    train(unet_config(ocean, **EVERYTHING, steps=5), tmp_path / "whole")
    for line, other in zip(numbers(run), numbers(tmp_path / "whole"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), line["step"]
    found, expected = (all_tensors(checkpoint.find(of)) for of in (run, tmp_path / "whole"))
    for key in (key for key in found if "running_" in key):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-6)
        assert not torch.equal(before[key], found[key])


def test_a_resumed_run_has_its_running_statistics_bit_for_bit(ocean: Store, tmp_path: Path) -> None:
    config = unet_config(ocean, **EVERYTHING, learning_rate=3e-3)
    whole = train(config, tmp_path / "whole")
    first = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2))
    train(first, tmp_path / "parts")
    parts = train(config, tmp_path / "parts", resume=True)
    one, other = all_tensors(whole), all_tensors(parts)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert any("running_mean" in key for key in one)
