"""Factors of the channels: the formula, and that they are a function of the steps alone."""

import dataclasses
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graticule.config import MeshConfig
from graticule.data.store import Store
from graticule.parallel.local import LocalRanks
from graticule.train import Stopped, checkpoint, train
from graticule.train.dynamic_scale import DynamicScale
from graticule.train.loss import LossWeights
from graticule.train.progress import read_metrics
from small_store import write_store
from test_step import Batch, objective, take_step
from test_trainer import all_tensors, config_of, numbers, with_statistics

SCALED = {"dynamic_scale": "inverse", "dynamic_scale_limit": 20.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return with_statistics(write_store(tmp_path_factory.mktemp("data") / "store", land=True))


# The formula


def test_a_factor_takes_a_25th_of_the_inverse_error() -> None:
    scale = DynamicScale.of(2)
    scale.update([0.5, 0.01])
    assert scale.factors == [(24 + 2) / 25, (24 + 100) / 25]
    scale.update([0.5, 0.01])
    assert scale.factors == pytest.approx([(24 * 1.04 + 2) / 25, (24 * 4.96 + 100) / 25])
    for _ in range(2000):
        scale.update([0.5, 0.01])
    assert scale.factors == pytest.approx([2.0, 100.0])  # each factor times its error is 1


def test_the_limit_is_relative_to_the_least_of_the_step() -> None:
    scale = DynamicScale.of(3, limit=20.0)
    scale.update([0.5, 0.01, 0.2])  # inverses 2, 100 and 5: at most 40
    assert scale.factors == [(24 + 2) / 25, (24 + 40) / 25, (24 + 5) / 25]


def test_a_channel_without_error_keeps_its_factor() -> None:
    scale = DynamicScale.of(3, limit=4.0)
    scale.update([0.0, 0.5, 0.01])
    assert scale.factors == [1.0, (24 + 2) / 25, (24 + 8) / 25]
    scale = DynamicScale.of(1)
    scale.update([0.0])
    assert scale.factors == [1.0]


# In a step


class Offsets(nn.Module):
    """What it predicts of channel c at both output times is b_c, whatever it is given."""

    def __init__(self, channels: int, times: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.arange(1.0, channels + 1, dtype=torch.float64))
        self.times, self.calls = times, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b.repeat(self.times)[:, None, None].expand(len(x), -1, *x.shape[2:])


def two_times(samples: int, channels: int = 3, leads: int = 1) -> Batch:
    fields = torch.zeros(samples, 2, channels, 1, 2, dtype=torch.float64)
    return Batch(fields, [fields] * leads)


def scaled_objective(wet: Any = None, leads: int = 1) -> Any:
    wet = np.ones((3, 1, 2), bool) if wet is None else wet
    return objective(
        weights=LossWeights.of(wet), statics=torch.zeros(0, 1, 2), kind="mae", num_prognostic=3,
        num_outputs=2, leads=leads,
    )  # fmt: skip


def test_a_factor_is_shared_by_the_output_times_and_multiplies_its_channel() -> None:
    # Channels are (time, variable): variable 2 is at places 2 and 5 of six.
    model, scale = Offsets(3, 2), DynamicScale([1.0, 2.0, 0.5])
    result = take_step(model, scaled_objective(), [two_times(1)], dynamic_scale=scale)
    assert result.loss == 2.0  # the mean of 1, 2 and 3, whatever the factors
    assert result.scaled_loss == pytest.approx((1 * 1 + 2 * 2 + 3 * 0.5) / 3, rel=1e-15)
    assert model.b.grad is not None
    assert model.b.grad.tolist() == pytest.approx([1 / 3, 2 / 3, 0.5 / 3])
    # The errors of the channels are 1, 2 and 3, those of both times together.
    assert scale.factors == pytest.approx([(24 + 1) / 25, (48 + 1 / 2) / 25, (12 + 1 / 3) / 25])


def test_a_step_updates_once_from_its_first_lead_and_calls_the_model_no_more_often() -> None:
    model, scale = Offsets(3, 2), DynamicScale.of(3)
    batches = [two_times(2, leads=3), two_times(1, leads=3)]
    result = take_step(model, scaled_objective(leads=3), batches, dynamic_scale=scale)
    assert model.calls == 6
    assert result.lead_losses == pytest.approx((2.0, 2.0, 2.0))
    assert scale.factors == pytest.approx([1.0, (24 + 1 / 2) / 25, (24 + 1 / 3) / 25])


def test_channels_of_land_divide_nothing() -> None:
    wet = np.ones((3, 1, 2), bool)
    wet[1] = False
    scale = DynamicScale.of(3, limit=20.0)
    result = take_step(Offsets(3, 2), scaled_objective(wet), [two_times(1)], dynamic_scale=scale)
    # Errors are 3 x (sum 2, 0, 6) / 4: their mean is the loss.
    assert result.loss == 2.0
    assert scale.factors == pytest.approx([(24 + 2 / 3) / 25, 1.0, (24 + 2 / 9) / 25])
    assert all(math.isfinite(factor) for factor in scale.factors)


def test_without_factors_nothing_is_scaled() -> None:
    plain, scaled = Offsets(3, 2), Offsets(3, 2)
    first = take_step(plain, scaled_objective(), [two_times(1)])
    second = take_step(scaled, scaled_objective(), [two_times(1)], dynamic_scale=DynamicScale.of(3))
    assert first.scaled_loss is None
    assert second.scaled_loss == second.loss == first.loss
    assert torch.equal(plain.b.grad, scaled.b.grad)  # type: ignore[arg-type]


# In a run


def factors_of(run: Path) -> list[float]:
    state = checkpoint.read_state(checkpoint.find(run))
    return state["dynamic_scale"]["factors"]


def test_a_run_that_is_resumed_goes_on_bit_for_bit(store: Store, tmp_path: Path) -> None:
    config = config_of(store, steps=6, leads=2, checkpoint_every=3, **SCALED)
    whole = train(config, tmp_path / "whole")

    def stop(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(config, tmp_path / "parts", progress=stop)
    assert factors_of(tmp_path / "parts") != [1.0, 1.0]
    parts = train(config, tmp_path / "parts", resume=True)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert factors_of(tmp_path / "parts") == factors_of(tmp_path / "whole")
    one, other = all_tensors(whole), all_tensors(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)
    for line in read_metrics(tmp_path / "whole"):
        assert line["loss"] == pytest.approx(sum(line["lead_losses"]))
        alike = line["scaled_loss"] == pytest.approx(line["loss"], rel=1e-9)
        assert alike == (line["step"] == 1)


def test_without_it_nothing_is_said_of_it(store: Store, tmp_path: Path) -> None:
    run = train(config_of(store, steps=1), tmp_path / "run").parents[1]
    assert "scaled_loss" not in read_metrics(run)[0]
    assert checkpoint.read_state(checkpoint.find(run))["dynamic_scale"] is None


def _train(config: Any, run: Path) -> list[float]:
    train(config, run)
    return factors_of(run)


@pytest.mark.parametrize(
    "mesh", [{}, {"window": 2}, {"window": 2, "weights": "sharded"}], ids=["data", "rows", "fsdp"]
)
def test_factors_are_the_same_on_all_ranks_layouts_and_accumulations(
    two: LocalRanks, store: Store, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    given = {"steps": 4, "leads": 2, "batch": 4, "gradient_loss": 0.1, "area_weighted": True}
    alone = config_of(store, **given, **SCALED)
    expected = _train(alone, tmp_path / "alone")
    cut = config_of(store, **{**given, "batch": 2, "accumulation": 2}, **SCALED)
    config = dataclasses.replace(cut, mesh=MeshConfig(**mesh))
    found = two.run(_train, config, tmp_path / "two")
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert expected != [1.0, 1.0]
    for line, other in zip(
        read_metrics(tmp_path / "two"), read_metrics(tmp_path / "alone"), strict=True
    ):
        for key in ("loss", "scaled_loss", "gradient_norm"):
            assert line[key] == pytest.approx(other[key], rel=1e-4), line["step"]
