"""Which split of ranks is tried, which is kept, and that a run says so."""

import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graticule.config import Config, DataConfig, MeshConfig, SwinConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.parallel.local import LocalRanks
from graticule.train import topology, train
from graticule.train.progress import read_metrics
from graticule.train.task import Task
from small_store import write_store


def splits(heads: int, **mesh: int) -> list[tuple[int, int]]:
    config = Config(model=SwinConfig(width=heads * 8, heads=heads, norm_groups=1),
                    mesh=MeshConfig(**mesh))  # fmt: skip
    return [(c.mesh.window, c.mesh.sequence) for c in topology.candidates(config)]


def test_every_split_that_the_heads_allow_is_tried():
    assert splits(8, window=12, sequence=0) == [(12, 1), (6, 2), (3, 4)]
    assert splits(8, window=12, sequence=0, tensor=4) == [(12, 1), (6, 2)]
    assert splits(3, window=4, sequence=0) == [(4, 1)]


def test_a_split_that_was_named_is_the_only_one():
    assert splits(8, window=2, sequence=2) == [(2, 2)]


def test_heads_that_allow_no_split_are_refused():
    with pytest.raises(ValueError, match=r"model\.heads=3 does not divide by mesh\.tensor=2"):
        splits(3, window=4, sequence=0, tensor=2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = write_store(tmp_path_factory.mktemp("data") / "store")
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def config_of(store: Store, **mesh: Any) -> Config:
    return Config(
        name="small",
        data=DataConfig(store=str(store.path)),
        model=SwinConfig(patch=2, window=(2, 4), width=16, depth=2, heads=2, norm_groups=4),
        mesh=MeshConfig(**mesh),
        train=TrainConfig(steps=2, batch=2),
    )


def _trained(config: Config, out: str) -> None:
    train(config, out)


def test_the_fastest_split_is_kept_and_what_was_measured_is_recorded(store, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    with LocalRanks(2) as ranks:
        ranks.run(_trained, config_of(store, window=2, sequence=0), str(run))
        ranks.run(_trained, config_of(store, window=2), str(other))
    session = json.loads((run / "run.json").read_text())["sessions"][0]
    tried = session["tried"]
    assert [(t["window"], t["sequence"]) for t in tried] == [(2, 1), (1, 2)]
    best = min(tried, key=lambda t: t["seconds_a_step"])
    assert best["seconds_a_step"] > 0
    used = {"window": best["window"], "sequence": best["sequence"]}
    assert used.items() <= session["mesh"].items()
    # A run that goes on, and a forecast, find the choice in the run's own configuration.
    assert used.items() <= json.loads((run / "config.json").read_text())["mesh"].items()
    # The steps of the trial leave no trace in the numbers.
    for line, expected in zip(read_metrics(run), read_metrics(other), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert "tried" not in json.loads((other / "run.json").read_text())["sessions"][0]


def _models_left(config: Config) -> list[int]:
    """How many earlier models are still in memory when the next split's is made."""
    models: list[weakref.ref[Any]] = []
    left = []

    def made(*arguments: Any) -> Task:
        left.append(sum(model() is not None for model in models))
        task = Task.of(*arguments)
        models.append(weakref.ref(task.model))
        return task

    topology.Task = SimpleNamespace(of=made)
    gc.disable()
    try:
        topology.fastest(config, 2, torch.device("cpu"))
    finally:
        topology.Task = Task
        gc.enable()
    return left


def test_one_split_at_a_time_is_in_memory(store):
    with LocalRanks(2) as ranks:
        config = config_of(store, window=2, sequence=0, weights="sharded")
        assert ranks.run(_models_left, config) == [[0, 0]] * 2


def test_one_process_takes_the_only_split(store, tmp_path):
    train(config_of(store, sequence=0), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["mesh"]["sequence"] == 1
