"""A run whose ranks share channels: what they read, train and forecast is one process's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from graticule.config import Config, DataConfig, ForecastConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.forecast.collect import Collector
from graticule.mesh import Cut, Planes, Stripes
from graticule.parallel.exchange import Link
from graticule.parallel.launch import laid_out
from graticule.recipes import recipe
from graticule.tasks.runs import forecast_from_run, validate_run
from graticule.train import train
from graticule.train.progress import read_metrics
from member_case import fields
from pools import Pools
from small_store import write_store

NUMBERS = ("loss", "gradient_norm", "kl", "validation_loss")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = write_store(
        tmp_path_factory.mktemp("data") / "store", land=True, packed=True, static=["depth"],
        prognostic=("temperature", "salinity", "speed"), diagnostic=("rain",),
    )  # fmt: skip
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def config_of(store: Store, layout: str = "", **train: Any) -> Config:
    mini: Any = recipe("beast-mini")
    config = Config(
        data=DataConfig(store=str(store.path), input_offsets=(-1, 0)),
        model=replace(mini.model, window=(4, 4), inner_window=(2, 4), nice_noise=4, depth=1,
                      inner_depth=1),
        train=TrainConfig(
            steps=3, batch=2, learning_rate=3e-3, warmup_steps=1, schedule="constant",
            clip_norm=0.5, validate_every=3, **train,
        ),
        bayes=replace(mini.bayes, members=2, initial_sigma=0.2, floor=0.1, likelihood="crps"),
        forecast=ForecastConfig(leads=2),
    )  # fmt: skip
    return laid_out(config, layout) if layout else config


def _train(config: Config, out: Path) -> None:
    train(config, out)


def _tell(run: Path, out: Path, mesh: list[str]) -> list[dict[str, Any]]:
    """Forecast, and validate."""
    forecast_from_run(run, out, settings=mesh, members=2)
    return list(validate_run(run, leads=[1, 2], starts=2, settings=mesh)["added"])


def test_a_rank_reads_its_channels_of_each_role(store: Store) -> None:
    whole = SampleSource(store, DataConfig())
    planes = [
        Planes.of(prognostic=3, diagnostic=1, forcing=1, static=1, inputs=1, outputs=1,
                  forcings=1, ranks=2, index=index)
        for index in (0, 1)
    ]  # fmt: skip
    parts = [whole.of(each) for each in planes]
    assert [part.channel_names for part in parts] == [
        {"prognostic": ["temperature"], "diagnostic": [], "forcing": ["wind"], "static": ["depth"]},
        {"prognostic": ["salinity", "speed"], "diagnostic": ["rain"], "forcing": [], "static": []},
    ]
    sample = whole.sample(3)
    for part, each in zip(parts, planes, strict=True):
        ours, index = part.sample(3), each.index
        np.testing.assert_array_equal(ours.inputs(), sample.inputs()[:, each.known(index)])
        np.testing.assert_array_equal(ours.labels(2), sample.labels(2)[:, each.predicted(index)])
        forced = each.forcing.of(index)
        np.testing.assert_array_equal(ours.forcing(1), sample.forcing(1)[:, forced])
    assert whole.of(replace(planes[0], prognostic=Cut((0, 3)))) is whole  # one rank has all


def test_ranks_that_share_channels_train_forecast_and_validate_as_one(
    store: Store, tmp_path: Path, pools: Pools
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(config_of(store), one)
    pools[2].run(_train, config_of(store, "tensor=2"), two)
    ours, theirs = read_metrics(two), read_metrics(one)
    assert len(ours) == len(theirs) == 3
    for line, other in zip(ours, theirs, strict=True):
        both = [key for key in NUMBERS if key in line]
        assert both == [key for key in NUMBERS if key in other]
        for key in both:
            assert line[key] == pytest.approx(other[key], rel=1e-4), key
    assert "validation_loss" in ours[-1]
    # The same weights.
    whole = _tell(one, tmp_path / "one.zarr", [])
    shared = pools[2].run(_tell, two, tmp_path / "two.zarr", ["mesh.tensor=2", "mesh.data=1"])
    a, b = fields(tmp_path / "two.zarr"), fields(tmp_path / "one.zarr")
    assert a.shape == b.shape
    assert a.shape[3] == 4
    np.testing.assert_allclose(a, b, atol=1e-4 * float(np.nanstd(b)), equal_nan=True)
    assert np.isnan(b).any()
    assert len(whole) == 2
    for line, other in zip(shared[0], whole, strict=True):
        # A diagnostic channel has no persistence to be compared with.
        assert line["ratio"].pop("rain") is other["ratio"].pop("rain") is None
        for key in ("loss", "mean_ratio", "rmse", "ratio"):
            assert line[key] == pytest.approx(other[key], rel=1e-4), key


def _collected(sizes: tuple[int, int]) -> list[tuple[np.ndarray | None, np.ndarray]]:
    """sizes: stripes, ranks of each. What is put together of predictions and of states, and what
    it should be."""
    link = Link(dist.group.WORLD)
    number, index = divmod(link.rank, sizes[1])
    stripes = Stripes(
        dim="lon", index=number, cuts={}, grid=Cut((0, 3, 8) if sizes[0] == 2 else (0, 8))
    )
    planes = Planes.of(
        prognostic=3, diagnostic=2, forcing=0, static=0, inputs=2, outputs=1, forcings=0,
        ranks=sizes[1], index=index,
    )  # fmt: skip
    collector = Collector(stripes, planes, link, "cpu")
    predicted = torch.arange(5 * 4 * 8.0).view(5, 4, 8)
    states = torch.arange(2 * 3 * 4 * 8.0).view(2, 3, 4, 8) + 1000
    return [
        (collector.predicted(predicted[planes.predicted(index)][..., stripes.columns]),
         predicted.numpy()),
        (collector.states(states[:, planes.known(index)][..., stripes.columns]), states.numpy()),
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (2, 1)], ids=str)
def test_the_first_rank_collects_fields_of_all_stripes_and_channels(
    pools: Pools, sizes: tuple[int, int]
) -> None:
    first, *others = pools[sizes[0] * sizes[1]].run(_collected, sizes)
    for found, wanted in first:
        np.testing.assert_array_equal(found, wanted)
    assert all(found is None for rank in others for found, _ in rank)
