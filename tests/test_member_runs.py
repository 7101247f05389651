"""Whole runs with members: stopped and resumed, averaged, on other meshes, around other weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from graticule.assemble import shapes_of
from graticule.config import Config, DataConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.mesh import Mesh
from graticule.model.bayes import weights_of
from graticule.model.draws import Draw, drawing
from graticule.parallel.launch import laid_out, mesh_of, ranks_of
from graticule.parallel.local import LocalRanks
from graticule.recipes import recipe
from graticule.train import checkpoint, load_weights, train
from graticule.train.progress import read_metrics
from graticule.train.task import Task
from small_store import write_store

CPU = torch.device("cpu")
DRAW = Draw(step=0, member=1, items=(4,))
NUMBERS = ("loss", "gradient_norm", "kl", "validation_loss")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = write_store(tmp_path_factory.mktemp("data") / "store", land=True)
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def config_of(store: Store, layout: str = "", **settings: Any) -> Config:
    """settings: of `train` or, where it has such a key, of `bayes`."""
    mini = recipe("beast-mini")
    of_bayes = {key: settings.pop(key) for key in [*settings] if hasattr(mini.bayes, key)}
    given = {
        "steps": 4, "batch": 2, "learning_rate": 3e-3, "warmup_steps": 1, "ema_decay": 0.9,
        "schedule": "constant", "clip_norm": 0.5, **settings,
    }  # fmt: skip
    config = Config(
        data=DataConfig(store=str(store.path), input_offsets=(-1, 0)),
        model=replace(mini.model, window=(4, 4), inner_window=(2, 4), nice_noise=4, depth=1,
                      inner_depth=1),
        train=TrainConfig(**given),
        bayes=replace(
            mini.bayes, **{"members": 2, "initial_sigma": 0.2, "floor": 0.1, **of_bayes}
        ),
    )  # fmt: skip
    return laid_out(config, layout) if layout else config


@pytest.fixture(scope="module")
def whole(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(config_of(store), run)
    return run


def saved(run: Path, group: str = "model") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted((checkpoint.find(run) / group).glob("*.safetensors")):
        found |= load_file(path)
    return found


def numbers(run: Path) -> list[list[float]]:
    return [[line[key] for key in NUMBERS if key in line] for line in read_metrics(run)]


def _train(config: Config, out: Path, resume: bool = False) -> str:
    """The last checkpoint, or what `train` refused."""
    try:
        return str(train(config, out, resume=resume))
    except ValueError as error:
        return f"refused: {error}"


# Stopped, averaged


def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    store: Store, whole: Path, tmp_path: Path
) -> None:
    """Trap 16: the draws of a step are the step's, whenever it is taken."""
    run = tmp_path / "run"
    train(config_of(store, steps=2), run)
    train(config_of(store), run, resume=True)
    found = numbers(run)
    assert [line[:3] for line in found] == [line[:3] for line in numbers(whole)]
    assert found[-1] == numbers(whole)[-1]
    for group in ("model", "average", "optimizer"):
        ours, theirs = saved(run, group), saved(whole, group)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


def test_the_average_has_averaged_means_and_the_newest_deviations(whole: Path) -> None:
    """Trap 16: an average of rho is not that of deviations."""
    model, average = saved(whole), saved(whole, "average")
    assert model.keys() == average.keys()
    for name, value in model.items():
        assert torch.equal(average[name], value) == name.endswith("_rho"), name


def test_the_prior_weighs_by_training_windows_and_values(store: Store, whole: Path) -> None:
    """Trap 17: neither by batches, steps nor members."""
    task = Task.of(config_of(store), CPU)
    windows, values = len(task.train_starts), 2 * int(store.wet[:2].sum()) / 2
    line = read_metrics(whole)[0]
    area = task.objective.weights.total
    assert line["kl_scale"] == pytest.approx(1 / (windows * area), rel=1e-12)
    assert area == pytest.approx(values, rel=0.2)  # values at sea, each by its area
    assert line["kl_loss"] == pytest.approx(line["kl_scale"] * line["kl"])


# Meshes


def _member(config: Config, run: Path) -> tuple[Any, Tensor, dict[str, Any]]:
    """((output channels, rows), a member's field there, its weights and which part of them is
    here)."""
    mesh = Mesh(mesh_of(config.mesh, ranks_of(config)))
    task = Task.of(config, CPU, mesh)
    load_weights(run, task.model, task.source.channel_names)
    generator = torch.Generator().manual_seed(1)
    shapes = shapes_of(task.source)
    x = torch.randn(1, shapes.in_channels, *shapes.grid, generator=generator)
    rows, planes = task.running.stripes.rows, task.running.planes
    drawn = {}
    with torch.no_grad():
        ours = x[:, planes.given(planes.index)][..., rows, :]
        field = task.model(ours.contiguous(), draw=DRAW)
        if config.mesh.weights == "replicated":
            with drawing(DRAW):
                for weight in weights_of(task.model):
                    leaf = weight.name.rpartition(".")[2]
                    box = weight.posterior.boxes.get(leaf, (slice(None),) * weight.mean.dim())
                    drawn[weight.name] = box, weight.layer.value(leaf, torch.float32)
    return (planes.said(planes.index), rows), field, drawn


def test_a_checkpoint_of_one_mesh_gives_the_same_members_on_others(
    store: Store, whole: Path, tmp_path: Path, two: LocalRanks
) -> None:
    """Trap 16."""
    run = tmp_path / "run"
    told = two.run(_train, config_of(store, "member=2,weights=sharded"), run)
    assert told == [str(run / "checkpoints" / "step-00000004")] * 2
    for line, other in zip(numbers(run), numbers(whole), strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    _, wanted, weights = _member(config_of(store), run)
    assert len(weights) > 10
    for layout in ("tensor=2", "window=2", "data=2,weights=sharded"):
        for (said, rows), field, drawn in two.run(_member, config_of(store, layout), run):
            difference = (field - wanted[:, said][..., rows, :]).abs().max()
            assert difference < 1e-5 * wanted.abs().max(), layout
            assert drawn.keys() == (weights.keys() if "sharded" not in layout else set())
            for name, (box, value) in drawn.items():
                assert torch.equal(value, weights[name][1][box]), (layout, name)


# Around other weights


@pytest.fixture(scope="module")
def numbers_alone(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights are numbers, and whose members differ by their noise."""
    run = tmp_path_factory.mktemp("numbers") / "run"
    train(config_of(store, weights=False, steps=2), run)
    return run


def distance(run: Path) -> float:
    """The prior's part of the KL, in prior deviations: how far means are from where they began."""
    model = saved(run)
    return sum(
        float((model[name.removesuffix("_start")] - value).square().sum())
        for name, value in model.items()
        if name.endswith("_start")
    )


def test_numbers_become_means_and_the_prior_stays_around_them(
    store: Store, numbers_alone: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, theirs = tmp_path / "run", saved(numbers_alone, "average")
    config = config_of(
        store, steps=2, prior="start", prior_sigma=0.1, start_from=str(numbers_alone)
    )
    with caplog.at_level("INFO"):
        train(config, run)
    assert "these weights are numbers: here they are means" in caplog.text
    assert "deviations start at bayes.initial_sigma=0.2" in caplog.text
    model = saved(run)
    starts = {name for name in model if name.endswith("_start")}
    assert {name.removesuffix("_start") + "_rho" for name in starts} == {
        name for name in model if name.endswith("_rho")
    }
    for name in starts:
        assert torch.equal(model[name], theirs[name.removesuffix("_start")]), name
    assert distance(run) > 0
    # Goes on around the same weights, bit for bit, and can be forecast with and started from.
    whole = tmp_path / "whole"
    train(replace(config, train=replace(config.train, steps=4)), whole)
    train(replace(config, train=replace(config.train, steps=4)), run, resume=True)
    assert numbers(run)[-1] == numbers(whole)[-1]
    for group in ("model", "average"):
        ours = saved(run, group)
        for name, value in saved(whole, group).items():
            assert torch.equal(ours[name], value), name
            if name.endswith("_start"):
                assert torch.equal(value, theirs[name.removesuffix("_start")]), name
    # A model that a forecast makes has no such buffers.
    _, field, _ = _member(config, run)
    assert field.isfinite().all()
    assert numbers(whole)[0][2] == read_metrics(run)[0]["kl"]
    again = tmp_path / "again"
    train(config_of(store, steps=1, prior="start", start_from=str(whole)), again)
    for name, value in saved(again).items():
        if name.endswith("_start"):
            mean = saved(whole, "average")[name.removesuffix("_start")]
            assert torch.equal(value, mean), "around the newest start"


def test_a_strong_prior_holds_means_where_they_began(
    store: Store, numbers_alone: Path, tmp_path: Path
) -> None:
    found = []
    for sigma in (1e-3, 10.0):
        config = config_of(
            store, prior="start", prior_sigma=sigma, start_from=str(numbers_alone), steps=8,
            initial_sigma=0.001, learning_rate=1e-3,
        )  # fmt: skip
        train(config, tmp_path / f"{sigma}")
        found.append(distance(tmp_path / f"{sigma}"))
    assert found[0] < 0.5 * found[1], found


def test_sharded_weights_have_a_start_and_save_it(
    store: Store, numbers_alone: Path, tmp_path: Path, two: LocalRanks
) -> None:
    config = config_of(store, steps=2, prior="start", start_from=str(numbers_alone))
    train(config, tmp_path / "alone")
    there = laid_out(config, "member=2,weights=sharded")
    run = tmp_path / "run"
    assert two.run(_train, there, run)[0].startswith(str(run))
    for name, value in saved(run).items():
        if name.endswith("_start"):
            assert torch.equal(value, saved(tmp_path / "alone")[name]), name
    for line, other in zip(numbers(run), numbers(tmp_path / "alone"), strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    # And on another mesh it is there again.
    longer = replace(config, train=replace(config.train, steps=3))
    assert _train(longer, run, resume=True).endswith("step-00000003")


def test_another_model_is_refused_as_before(
    store: Store, numbers_alone: Path, tmp_path: Path
) -> None:
    config = config_of(store, prior="start", start_from=str(numbers_alone))
    wider = replace(config, model=replace(config.model, width=32))
    with pytest.raises(ValueError, match=r"another model: model\.width is 16 there and 32 here"):
        train(wider, tmp_path / "run")
    # Numbers are given numbers alone, and a forecast means what was trained.
    trained = tmp_path / "trained"
    train(config_of(store, steps=1), trained)
    fewer = config_of(store, weights=False, start_from=str(trained))
    with pytest.raises(ValueError, match=r"_rho: checkpoint .* model has none"):
        train(fewer, tmp_path / "other")
    with pytest.raises(ValueError, match=r"_rho: checkpoint has none, model"):
        _member(config_of(store), numbers_alone)
