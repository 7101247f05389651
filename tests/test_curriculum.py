"""How many leads a step has, how many steps a run: what is read, and that nothing else changes."""

import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graticule.assemble import assemble
from graticule.config import Config, MemoryConfig, TrainConfig
from graticule.data.loader import Loader, Order
from graticule.data.samples import SampleSource
from graticule.data.store import Store
from graticule.memory.apply import Memory
from graticule.memory.offload import Host
from graticule.memory.plan import Plan
from graticule.mesh import Mesh
from graticule.parallel.local import LocalRanks
from graticule.tasks import is_trained
from graticule.train import Stopped, checkpoint, train
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.progress import read_metrics
from graticule.train.step import training_step
from graticule.train.task import Task, in_steps
from small_store import write_store
from test_memory_apply import Batch
from test_memory_profile import SHAPES, plans_of, whole
from test_memory_profile import config_of as planned_config
from test_trainer import all_tensors, config_of, numbers, said, with_statistics

CURRICULUM = {"leads": 3, "leads_from": ((1, 1), (3, 2), (6, 3))}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return with_statistics(write_store(tmp_path_factory.mktemp("data") / "store", packed=True))


# What it says


def test_a_step_has_the_leads_of_the_last_pair_that_has_begun() -> None:
    settings = TrainConfig(**CURRICULUM)
    assert [settings.leads_at(step) for step in range(1, 9)] == [1, 1, 2, 2, 2, 3, 3, 3]
    assert TrainConfig(leads=4).leads_at(1) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"leads_from": ((2, 1),)}, r"must begin with step 1: \(1, leads\)"),
        ({"leads": 2, "leads_from": ((1, 2), (1, 2))}, "steps must ascend"),
        ({"leads": 2, "leads_from": ((1, 0), (4, 2))}, "each pair has at least 1 lead"),
        ({"leads": 2, "leads_from": ((1, 1),)}, r"comes to 1 leads, .* and train\.leads is 2"),
        ({"leads": 2, "leads_from": ((1, 3), (5, 2))}, r"comes to 2 leads, 3 at most"),
        ({"epochs": 2}, r"train\.steps=1000 and train\.epochs=2 both say .*set train\.steps=0"),
        ({"steps": 0}, r"train\.steps=0 must be at least 1, or 0 with train\.epochs"),
        ({"epochs": -1}, r"train\.epochs=-1 must not be negative"),
        ({"detach_every": -1}, r"train\.detach_every=-1 must not be negative"),
        ({"dynamic_scale_limit": 20.0}, r"limits nothing while train\.dynamic_scale=none"),
        ({"dynamic_scale": "inverse", "dynamic_scale_limit": 0.5}, "must be at least 1, relative"),
        ({"gradient_loss": -0.1}, r"train\.gradient_loss=-0\.1 must not be negative"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)


# What is read


def test_a_batch_delivers_the_leads_of_its_step_and_reads_no_others(store: Store) -> None:
    source = SampleSource(store, config_of(store).data)
    starts = source.starts("train", 3)
    order, leads = Order(starts, seed=2), [1, 1, 2, 3, 1]
    reads = []
    for given in (lambda number: leads[number // 4], 3):
        store.shards.bytes_read = 0
        loader = Loader(source, order, range(20), batch=4, leads=given)
        seen = []
        with closing(iter(loader)) as batches:
            for number, batch in enumerate(batches):
                here = leads[number] if callable(given) else 3
                for lead in range(1, here + 1):
                    _, labels = batch.lead()
                    for start, one in zip(batch.starts, labels, strict=True):
                        wanted = source.sample(start).labels(lead)
                        assert np.array_equal(one.numpy(), wanted)
                with pytest.raises(AssertionError, match="all of its leads are taken"):
                    batch.lead()
                seen += batch.starts
        assert seen == [order.start(number) for number in range(20)]
        reads.append(store.shards.bytes_read)
    assert reads[0] < 0.8 * reads[1]


def test_ranks_agree_on_the_leads_of_a_batch(store: Store) -> None:
    source = SampleSource(store, config_of(store).data)
    order = Order(source.starts("train", 2), seed=2)
    for rank in range(3):
        loader = Loader(
            source, order, range(12), batch=3, leads=lambda n: 1 + n // 6, rank=rank, ranks=3
        )
        assert [leads for _, leads in loader._groups()] == [1, 1, 2, 2]


# A run


def test_a_curriculum_is_resumed_at_any_step_bit_for_bit(store: Store, tmp_path: Path) -> None:
    config = config_of(
        store, **CURRICULUM, steps=6, accumulation=2, checkpoint_every=6, keep_checkpoints=9
    )
    expected = all_tensors(train(config, tmp_path / "whole"))
    lines = read_metrics(tmp_path / "whole")
    assert [len(line.get("lead_losses", [0])) for line in lines] == [1, 1, 2, 2, 2, 3]
    for step in (2, 3):

        def stop(now: int, steps: int, metrics: dict[str, Any], step: int = step) -> None:
            if now == step:
                os.kill(os.getpid(), signal.SIGTERM)

        run = tmp_path / f"stopped-{step}"
        with pytest.raises(Stopped):
            train(config, run, progress=stop)
        found = all_tensors(train(config, run, resume=True))
        assert numbers(run) == numbers(tmp_path / "whole")
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_windows_are_those_of_the_most_leads_throughout(store: Store) -> None:
    with_curriculum = Task.of(config_of(store, **CURRICULUM), torch.device("cpu"))
    assert len(with_curriculum.train_starts) == 16 - 3
    three = Task.of(config_of(store, leads=3), torch.device("cpu"))
    assert np.array_equal(with_curriculum.train_starts, three.train_starts)


def test_the_curriculum_is_told_and_validation_has_the_most_leads(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(
        store, leads=2, leads_from=((1, 1), (9, 2)), steps=2, validate_every=1, learning_rate=0.0,
        weight_decay=0.0,
    )  # fmt: skip
    with caplog.at_level("INFO"):
        run = train(config, tmp_path / "run").parents[1]
    told = said(caplog)
    assert (
        "full over 2 leads at most: 1 lead from step 1, 2 leads from step 9; the run ends at step"
        in told
    )
    assert "at step 2, with 1 lead" in told
    task = Task.of(config_of(store, leads=2), torch.device("cpu"))
    for line in read_metrics(run):
        assert "lead_losses" not in line
        assert line["validation_loss"] == pytest.approx(task.validation_loss(), rel=1e-6)


def _train(config: Config, run: Path) -> None:
    train(config, run)


def test_two_ranks_take_the_same_curriculum(two: LocalRanks, store: Store, tmp_path: Path) -> None:
    settings = {**CURRICULUM, "steps": 6, "batch": 2, "detach_every": 2}
    train(config_of(store, **settings), tmp_path / "alone")
    two.run(_train, config_of(store, **settings), tmp_path / "two")
    for line, other in zip(numbers(tmp_path / "two"), numbers(tmp_path / "alone"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)


# With a memory plan, which is that of the most leads


def plans() -> list[Plan]:
    mixed = plans_of(3, 3, 8, ("keep", "recompute", "offload"))
    wise = [whole(action, 3, lead_wise=True) for action in ("keep", "recompute")]  # type: ignore[arg-type]
    return [mixed[0], mixed[2], *wise]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("every", [0, 2])
def test_steps_of_fewer_leads_are_the_same_bits_under_a_plan_of_the_most(
    number: int, every: int
) -> None:
    plan = plans()[number]
    for leads in (1, 2, 3):
        expected, found = gradients(None, leads, every), gradients(plan, leads, every)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, leads, every)


def gradients(plan: Plan | None, leads: int, every: int) -> dict[str, Any]:
    model = assemble(planned_config(3), SHAPES, Mesh()).model
    wet = np.ones((SHAPES.num_predicted, *SHAPES.grid), bool)
    objective = Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.ones(1, *SHAPES.grid), weights=LossWeights.of(wet), kind="mae",
        leads=leads, num_prognostic=SHAPES.num_prognostic, detach_every=every,
    )  # fmt: skip
    with Host("cpu") as host:
        result = training_step(
            model, objective, [Batch()], optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            step=1, samples=1, learning_rate=0.0, memory=Memory(plan, host),
        )  # fmt: skip
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "losses": torch.tensor(result.lead_losses, dtype=torch.float64)}


def test_a_run_with_a_plan_takes_its_curriculum(store: Store, tmp_path: Path) -> None:
    settings = {"leads": 2, "leads_from": ((1, 1), (3, 2)), "steps": 4}
    train(config_of(store, **settings), tmp_path / "without")
    config = replace(config_of(store, **settings), memory=MemoryConfig(mode="full"))
    train(config, tmp_path / "with")
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert (tmp_path / "with" / "plan.json").is_file()


# Epochs


def test_epochs_become_the_steps_that_see_every_window_so_often(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(store, steps=0, epochs=3, batch=2, accumulation=2, warmup_steps=0, leads=2)
    # 16 training days hold 14 windows of two leads: 42 samples are 10.5 steps of four.
    assert in_steps(config).train.steps == 11
    assert in_steps(config).train.epochs == 0
    with caplog.at_level("INFO"):
        last = train(config, tmp_path / "run")
    assert "3 epochs of 14 windows are 11 steps of 4 samples" in said(caplog)
    assert checkpoint.step_of(last) == 11
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "run")]
    assert rates[-1] == pytest.approx(config.train.final_learning_rate)  # cosine over all of them
    assert rates == sorted(rates, reverse=True)
    # What resumes it, and what asks whether it is trained, means the same run.
    assert is_trained(tmp_path / "run", config)
    assert not is_trained(tmp_path / "run", config_of(store, steps=0, epochs=4, batch=4, leads=2))
    assert train(config, tmp_path / "run", resume=True) == last


def test_epochs_are_the_same_steps_on_several_ranks(
    two: LocalRanks, store: Store, tmp_path: Path
) -> None:
    config = config_of(store, steps=0, epochs=1, batch=4)
    two.run(_train, config, tmp_path / "two")
    train(config, tmp_path / "alone")
    assert len(numbers(tmp_path / "two")) == len(numbers(tmp_path / "alone")) == 4
