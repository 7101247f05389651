"""A small ocean U-Net along the whole path: two states in and two out, stores of numbers that tests
write, and a network that says 0, of which every loss and score is known by hand."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import torch
from torch import Tensor

from graticule.config import Config, DataConfig, MeshConfig, TrainConfig, UNetConfig
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.data.times import TimeAxis, seconds_of
from graticule.data.writer import StoreWriter
from graticule.grid import Grid
from graticule.train import checkpoint, task, train
from graticule.variables import Channel, Channels, Role
from small_store import small_grid
from test_trainer import all_tensors

INPUT_WINDOW, LABEL_WINDOW = (-1, 0), (1, 2)
"""`data.forcing_offsets`: of the states that are given, and of those that are predicted."""
MODEL = UNetConfig(widths=(4, 6), dilations=(1, 2, 1, 1, 1))


def days(*parts: int, number: int, calendar: str = "standard") -> list[int]:
    """Seconds since 1970 of so many days from the date `parts` on."""
    first = seconds_of(cftime.datetime(*parts, calendar=calendar, has_year_zero=True))
    return [first + 86400 * n for n in range(number)]


def written(
    path: Path,
    seconds: Sequence[int],
    fields: Callable[[int], Any],
    *,
    names: dict[str, Role],
    splits: dict[str, list[str]],
    grid: Grid | None = None,
    calendar: str = "standard",
    **more: Any,
) -> Store:
    """Daily. fields: of the n-th time, one number or plane of each channel. Its statistics are
    those of its training times."""
    grid = grid or small_grid()
    writer = StoreWriter(
        path,
        channels=Channels([Channel(variable=n, units="1", role=role) for n, role in names.items()]),
        grid=grid, times=TimeAxis(np.array(seconds), calendar, 86400), splits=splits, **more,
    )  # fmt: skip
    for n in range(len(seconds)):
        planes = [np.broadcast_to(np.float32(plane), grid.shape) for plane in fields(n)]
        writer.write(n, np.stack(planes))
    store = writer.finish()
    compute(store, np.flatnonzero(store.times.within(splits["train"]))).save(store)
    return store


def plainly(store: Store) -> Store:
    """The store with statistics that normalise nothing: mean 0, spread 1."""
    statistics = Statistics.load(store)
    one = np.ones(len(statistics.names))
    dataclasses.replace(statistics, mean=0 * one, std=one).save(store)
    return store


def config_of(
    store: Store,
    *,
    data: dict[str, Any] | None = None,
    mesh: dict[str, Any] | None = None,
    **settings: Any,
) -> Config:
    """With a rate of 0, so that what a network says at first it says in the end."""
    given: dict[str, Any] = {
        "steps": 1, "batch": 1, "learning_rate": 0.0, "weight_decay": 0.0, "clip_norm": 0.0,
        "warmup_steps": 0, "schedule": "constant", "loss": "mse", **settings,
    }  # fmt: skip
    offsets = {"input_offsets": (-1, 0), "output_offsets": (1, 2), "forcing_offsets": INPUT_WINDOW}
    return Config(
        name="case", model=MODEL, mesh=MeshConfig(**(mesh or {})), train=TrainConfig(**given),
        data=DataConfig(store=str(store.path), **{**offsets, **(data or {})}),
    )  # fmt: skip


def silent(config: Config, run: Path) -> Path:
    """A run whose network says 0 whatever it is given: in units, the mean of the training times."""
    last = train(config, run)
    model = task.Task.of(config, torch.device("cpu")).model
    with torch.no_grad():
        for parameter in model.last.parameters():  # type: ignore[union-attr]
            parameter.zero_()
    state = checkpoint.read_state(last)
    state = {key: state[key] for key in state if key not in ("format", "step")}
    optimizer = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in checkpoint.saved_names(last, "optimizer").items()
    }
    tensors = {"model": model.state_dict(), "optimizer": optimizer}
    checkpoint.save(run, checkpoint.step_of(last) + 1, tensors, state, keep=1)
    return run


def trained(config: Config, out: Path, resume: bool = False) -> Path:
    """For ranks, which are given names and not keywords."""
    return train(config, out, resume=resume)


def gradients(path: Path) -> dict[str, Tensor]:
    """Of a run's first step, by parameter, from what Adam keeps: a tenth of them."""
    first = "optimizer/exp_avg."
    found = all_tensors(path).items()
    return {name.removeprefix(first): 10 * v for name, v in found if name.startswith(first)}
