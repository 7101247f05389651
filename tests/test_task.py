"""What a rank makes of a store: its part of the grid and of the samples, over global weights."""

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graticule.config import Config, DataConfig, MeshConfig, SwinConfig, TrainConfig
from graticule.data.loader import Loader, Order
from graticule.data.normalise import Normaliser, normalised_statics
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.mesh import Mesh
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks
from graticule.train import task
from graticule.train.loss import LossWeights, weighted_errors
from graticule.train.task import Task
from graticule.variables import Channel, Channels
from small_store import DAY, FIRST_DAY, small_grid, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Land in one corner, a static; 8 x 16 points."""
    path = tmp_path_factory.mktemp("data") / "store"
    store = write_store(path, packed=True, land=True, static=("depth",))
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def config_of(path: str, *, mesh: dict[str, Any] | None = None, **settings: Any) -> Config:
    given = {"steps": 1, "batch": 2, "leads": 2, **settings}
    return Config(
        data=DataConfig(store=path),
        model=SwinConfig(patch=2, window=(2, 4), width=16, depth=1, heads=2, norm_groups=4),
        mesh=MeshConfig(**(mesh or {})),
        train=TrainConfig(**given),
    )


# Parts of the grid


def _fields(found: Task) -> list[Tensor]:
    """All that the first batch, in order of time, delivers, normalised."""
    loader = found.loader(Order(found.train_starts, seed=None), range(2))
    with closing(iter(loader)) as batches:
        batch = next(batches)
        fields = [found.objective.inputs(batch.inputs)]
        for _ in range(found.objective.leads):
            forcing, labels = batch.lead()
            fields += [found.objective.forcing(forcing), found.objective.labels(labels)]
    return fields


def _parts(path: str, dim: str) -> dict[str, Any]:
    config = config_of(path, mesh={"window": 3, "stripe_dim": dim})
    found = Task.of(config, torch.device("cpu"), Mesh({"window": 3}))
    fields, weights = _fields(found), found.objective.weights
    assert "wet" not in found.source.store.__dict__, "the whole mask is in memory"
    return {
        "extent": (found.source.rows, found.source.columns),
        "fields": [field.numpy() for field in fields],
        "cell": weights.cell.numpy(), "wet": weights.wet.numpy(), "total": weights.total,
        "statics": found.objective.statics.numpy(),
        "read": found.source.store.shards.bytes_read,
    }  # fmt: skip


@pytest.mark.parametrize("dim", ["lat", "lon"])
def test_the_ranks_parts_are_slices_of_the_whole(three: LocalRanks, store: Store, dim: str) -> None:
    whole = Task.of(config_of(str(store.path)), torch.device("cpu"))
    fields = _fields(whole)
    parts = three.run(_parts, str(store.path), dim)
    for part in parts:
        rows, columns = (slice(r.start, r.stop) for r in part["extent"])
        weights = whole.objective.weights
        np.testing.assert_array_equal(part["cell"], weights.cell[:, rows, columns])
        np.testing.assert_array_equal(part["wet"], weights.wet[:, rows, columns])
        np.testing.assert_array_equal(part["statics"], whole.objective.statics[:, rows, columns])
        assert part["total"] == pytest.approx(weights.total, rel=1e-14)
        assert part["total"] == parts[0]["total"], "one weight for all, to the last bit"
        for found, field in zip(part["fields"], fields, strict=True):
            np.testing.assert_array_equal(found, field[..., rows, columns])
    axis = 0 if dim == "lat" else 1
    sizes = [len(part["extent"][axis]) for part in parts]
    assert sum(sizes) == (8, 16)[axis]
    if dim == "lat":
        # 2 rows of coarse tokens for 3 ranks: one has none, reads nothing, and is there.
        assert 0 in sizes
        empty = parts[sizes.index(0)]
        assert empty["read"] == 0
        assert all(field.size == 0 for field in empty["fields"])
        assert min(part["read"] for part in parts if part is not empty) > 0


def test_a_source_without_rows_opens_no_file_and_keeps_the_calendar(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    for time in range(len(store.times)):
        store.shard_path(time).unlink()
    config = DataConfig()
    for rows, columns in ((slice(8, 8), slice(None)), (slice(None), slice(3, 3))):
        source = SampleSource(store, config).part(rows, columns)
        starts = source.starts("train", 3)
        loader = Loader(source, Order(starts, seed=1), range(5), batch=2, leads=3)
        seen = []
        with closing(iter(loader)) as batches:
            for batch in batches:
                assert batch.inputs.shape == (len(batch.keys), 1, 2, *source.shape)
                leads = [batch.lead() for _ in range(3)]
                assert all(x.numel() == 0 for pair in leads for x in pair)
                seen += batch.starts
        assert seen == [Order(starts, seed=1).start(number) for number in range(5)]
        assert store.shards.bytes_read == 0


def test_normaliser_and_statics_of_no_rows_are_empty(store: Store) -> None:
    statistics = Statistics.load(store)
    rows = slice(4, 4)
    normaliser = Normaliser(store, [0, 1], statistics, rows=rows)
    stored = torch.zeros(3, 1, 2, 0, 16, dtype=torch.int16)
    assert normaliser(stored).shape == stored.shape
    assert normalised_statics(store, ["depth"], statistics, rows=rows).shape == (1, 0, 16)
    assert normalised_statics(store, [], statistics, rows=rows).shape == (0, 0, 16)


# Weights


def _weighted(wet: list[list[bool]], errors: list[float]) -> tuple[float, float, float]:
    """(loss, gradient of a shared weight, the global weight) as two ranks find them."""
    link = Link(torch.distributed.group.WORLD)
    here = np.array(wet[link.rank], bool)[None, None]
    weights = LossWeights.of(here, np.ones((1, 8)), mean_area=1.0, link=link)
    shared = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    error = torch.full((1, 1, 1, 1, 8), errors[link.rank], dtype=torch.float64)
    loss = weighted_errors(shared * error, torch.zeros_like(error), weights, "mse").sum()
    loss = loss / weights.total
    loss.backward()
    assert shared.grad is not None
    total, gradient = loss.detach().clone(), shared.grad.clone()
    return float(link.sum(total, "t")), float(link.sum(gradient, "t")), weights.total


def test_one_cell_here_and_seven_there_weigh_as_eight(two: LocalRanks) -> None:
    wet = [[True] + [False] * 7, [True] * 7 + [False]]
    for loss, gradient, total in two.run(_weighted, wet, [3.0, 1.0]):
        assert loss == 2.0  # (9 + 7) / 8; the mean of the ranks' means is 5
        assert gradient == 4.0  # of (9 + 7) w^2 / 8
        assert total == 8.0
    for loss, _, total in two.run(_weighted, [[False] * 8, wet[1]], [3.0, 1.0]):
        assert (loss, total) == (1.0, 7.0)


def _no_sea() -> str:
    link = Link(torch.distributed.group.WORLD)
    with pytest.raises(ValueError, match="no predicted channel has a wet cell") as caught:
        LossWeights.of(np.zeros((1, 1, 8), bool), link=link)
    return str(caught.value)


def test_that_nothing_is_wet_is_judged_of_all_parts(two: LocalRanks) -> None:
    assert len(set(two.run(_no_sea))) == 1


def test_areas_of_a_part_are_relative_to_the_whole_grid() -> None:
    area = small_grid().cell_area
    whole = LossWeights.of(np.ones((1, 8, 16), bool), area)
    part = LossWeights.of(np.ones((1, 2, 16), bool), area[:2], mean_area=float(area.mean()))
    assert torch.equal(part.cell, whole.cell[:, :2])
    assert part.total < 2 * 16


# Validation


class _Zero(nn.Module):
    """Predicts 0 everywhere."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] > 0
        self.calls += 1
        return x.new_zeros(x.shape[0], 1, *x.shape[2:])


def _validation(path: str, batch: int) -> tuple[float, int]:
    """The loss, and how often the model was called."""
    config = config_of(path, batch=batch, leads=1, area_weighted=False)
    mesh = Mesh({"data": torch.distributed.get_world_size()})
    found, model = Task.of(config, torch.device("cpu"), mesh), _Zero()
    running = dataclasses.replace(found.running, model=model)
    return dataclasses.replace(found, running=running).validation_loss(), model.calls


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Trained on -1 and 1 (mean 0, spread 1), validated on 0, 1, ..., 7: seven samples."""
    values = [-1.0, 1.0] * 4 + [float(n) for n in range(8)]
    times = TimeAxis(FIRST_DAY + DAY * np.arange(len(values)), "standard", DAY)
    dates = [f"{times.date(i):%Y-%m-%d}" for i in (0, 7, 8, 15)]
    writer = StoreWriter(
        tmp_path_factory.mktemp("count") / "store",
        channels=Channels([Channel(variable="n", units="1", role="prognostic")]),
        grid=small_grid(),
        times=times,
        splits={"train": [f"{dates[0]}/{dates[1]}"], "validation": [f"{dates[2]}/{dates[3]}"]},
    )
    for time, value in enumerate(values):
        writer.write(time, np.full((1, 8, 16), value))
    store = writer.finish()
    compute(store, np.arange(8)).save(store)
    return store


@pytest.mark.parametrize(("batch", "calls"), [(2, 4), (3, 2), (4, 2), (6, 2), (8, 1)])
def test_seven_samples_with_errors_1_to_7_are_4_on_two_ranks(
    two: LocalRanks, counting: Store, batch: int, calls: int
) -> None:
    # Shares of 4 and 3: in batches of 1 and 3 the second rank runs out of samples first, and
    # calls the model as often all the same.
    assert two.run(_validation, str(counting.path), batch) == [(4.0, calls)] * 2


def _validation_of_two(path: str) -> tuple[float, int]:
    usual, task.VALIDATION_SAMPLES = task.VALIDATION_SAMPLES, 2
    try:
        return _validation(path, 3)
    finally:
        task.VALIDATION_SAMPLES = usual


def test_a_rank_that_never_had_a_sample_ends_with_the_others(
    three: LocalRanks, counting: Store
) -> None:
    # The first and the last sample: errors 1 and 7.
    assert three.run(_validation_of_two, str(counting.path)) == [(4.0, 1)] * 3


# Turning


@pytest.fixture(scope="module")
def sphere(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = write_store(tmp_path_factory.mktemp("sphere") / "store")
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def _turned(path: str, dim: str) -> tuple[range, list[np.ndarray]] | str:
    config = config_of(path, roll_longitude=True, mesh={"window": 2, "stripe_dim": dim})
    try:
        found = Task.of(config, torch.device("cpu"), Mesh({"window": 2}))
    except ValueError as error:
        return str(error)
    return found.source.rows, [field.numpy() for field in _fields(found)]


def test_stripes_of_rows_turn_together(two: LocalRanks, sphere: Store) -> None:
    whole = Task.of(config_of(str(sphere.path), roll_longitude=True), torch.device("cpu"))
    expected = _fields(whole)
    for rows, fields in two.run(_turned, str(sphere.path), "lat"):
        for found, field in zip(fields, expected, strict=True):
            np.testing.assert_array_equal(found, field[..., rows.start : rows.stop, :])


def test_stripes_of_columns_do_not_turn_and_land_anywhere_is_seen_by_all(
    two: LocalRanks, sphere: Store, tmp_path: Path
) -> None:
    message = r"mesh.stripe_dim=lon cuts each circle of latitude among 2 ranks (mesh.stripe_dim=lat"
    for told in two.run(_turned, str(sphere.path), "lon"):
        assert message in told
    land = write_store(tmp_path / "store", land=True)  # in the north only
    compute(land, SampleSource(land, DataConfig()).times("train")).save(land)
    for told in two.run(_turned, str(land.path), "lat"):
        assert "temperature has land, which stays where it is" in told
