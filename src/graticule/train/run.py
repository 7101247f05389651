"""A run under way: the state that training changes, new or from a checkpoint, and its steps."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from graticule.cluster.energy import EnergyMeter
from graticule.config import Config
from graticule.data.loader import Batch, Loader, Order
from graticule.memory.apply import Memory
from graticule.mesh import Mesh
from graticule.model.bayes import keep_start
from graticule.parallel.launch import mesh_of, processes
from graticule.train import checkpoint
from graticule.train.dynamic_scale import DynamicScale
from graticule.train.folder import versions
from graticule.train.optimizer import (
    Average,
    Schedule,
    empty_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
)
from graticule.train.progress import memory_gib
from graticule.train.step import LossScale, StepResult, training_step
from graticule.train.task import Task, fields_of, in_steps

Step = Callable[[], StepResult]
_log = logging.getLogger(__name__)


def _take(step: Step) -> StepResult:
    return step()


class Run:
    """The state that training changes, new or from a checkpoint."""

    def __init__(self, task: Task, start: Path | None, memory: Memory | None = None) -> None:
        """memory: what its steps do with their memory; None: everything is kept."""
        self.task, self.settings, self.memory = task, task.config.train, memory
        self.step, self.meter = 0, EnergyMeter(task.device)
        model, channels = task.model, task.source.channel_names
        self.loss_scale = LossScale() if self.settings.precision in ("fp16", "paper") else None
        self.dynamic_scale: DynamicScale | None = None
        if self.settings.dynamic_scale == "inverse":
            self.dynamic_scale = DynamicScale.of(
                len(task.source.predicted), self.settings.dynamic_scale_limit
            )
        self.started_from = ""
        if start is None and self.settings.start_from:
            loaded = self._load_weights(model, channels)
            self.started_from = checkpoint.weights_of(loaded.checkpoint)
            kind = "averaged" if loaded.averaged else "last"
            _log.info("starting from the %s weights of %s", kind, loaded.checkpoint)
            if not loaded.deviations:
                _log.info(
                    "these weights are numbers: here they are means, and deviations start at"
                    " bayes.initial_sigma=%g",
                    task.config.bayes.initial_sigma,
                )
            theirs = loaded.state["fingerprints"]["statistics"]
            if theirs != task.fingerprints["statistics"]:
                _log.warning(
                    "%s was trained with other statistics: the same weights now see fields"
                    " normalised in another way",
                    loaded.checkpoint,
                )
        if task.config.bayes.weights and task.config.bayes.prior == "start":
            keep_start(model)
        self.optimizer = make_optimizer(model, self.settings)
        self.average = Average(model, self.settings.ema_decay) if self.settings.ema_decay else None
        if start is not None:
            self._restore(start)

    def _load_weights(self, model: nn.Module, channels: dict[str, list[str]]) -> checkpoint.Loaded:
        """Those of another run; what its model section says otherwise comes first in an error."""
        found = checkpoint.find(self.settings.start_from)
        theirs = checkpoint.read_state(found)["config"]["model"]
        ours = self.task.config.to_dict()["model"]
        other = ", ".join(
            f"model.{key} is {theirs.get(key)} there and {ours[key]} here"
            for key in ours
            if theirs.get(key) != ours[key]
        )
        try:
            loaded = checkpoint.load_weights(found, model, channels, initial_deviations=True)
        except ValueError as error:
            if not other:
                raise
            raise ValueError(f"{found} holds another model: {other}.\n{error}") from error
        if other:
            _log.warning("%s fits, but it was trained as another model: %s", found, other)
        return loaded

    def _restore(self, start: Path) -> None:
        state = checkpoint.read_state(start)
        checkpoint.check_channels(state["channels"], self.task.source.channel_names, str(start))
        for name in ("store", "statistics"):
            saved, here = state["fingerprints"][name], self.task.fingerprints[name]
            if saved != here:
                raise ValueError(
                    f"the {name} changed since {start} was written (fingerprint {saved}, now"
                    f" {here}); put the old one back, or start a new run with"
                    f" train.start_from={start}"
                )
        model = self.task.model
        self.step = int(state["step"])
        assert state["next_sample"] == self._first_sample(self.step + 1), state["next_sample"]
        checkpoint.load_tensors(start, "model", model.state_dict())
        if self.average:
            checkpoint.load_tensors(start, "average", self.average.tensors)
        saved_state = checkpoint.saved_names(start, "optimizer")
        tensors = empty_optimizer_tensors(model, saved_state)
        checkpoint.load_tensors(start, "optimizer", tensors)
        restore_optimizer(self.optimizer, model, tensors)
        if self.loss_scale:
            self.loss_scale = LossScale(**state["loss_scale"])
        if self.dynamic_scale:
            self.dynamic_scale = DynamicScale(**state["dynamic_scale"])

    def _first_sample(self, step: int) -> int:
        """Number of the first sample of a step (1, 2, ...)."""
        return (step - 1) * self.settings.batch * self.settings.accumulation

    def save(self, saver: checkpoint.Saver) -> Path:
        """The checkpoint of the steps taken so far."""
        tensors = {
            "model": self.task.model.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer, self.task.model),
        }
        if self.average:
            tensors["average"] = self.average.tensors
        state = {
            "next_sample": self._first_sample(self.step + 1),
            "seed": self.settings.seed,
            "learning_rate": Schedule(self.settings).rate(self.step),
            "loss_scale": asdict(self.loss_scale) if self.loss_scale else None,
            "dynamic_scale": asdict(self.dynamic_scale) if self.dynamic_scale else None,
            "channels": self.task.source.channel_names,
            "fingerprints": self.task.fingerprints,
            # A forecast from another store sees fields as this training did.
            "statistics": self.task.statistics.to_dict(),
            "fields": fields_of(self.task.source),
            "versions": versions(),
            "config": self.task.config.to_dict(),
        }
        return saver.save(self.step, tensors, state)

    def loader(self, steps: int) -> Loader:
        """Of the samples of the steps from here on, up to step `steps`."""
        numbers = range(self._first_sample(self.step + 1), self._first_sample(steps + 1))
        return self.task.loader(Order(self.task.train_starts, self.settings.seed), numbers)

    def rehearse(self, steps: int) -> list[dict[str, Any]]:
        """Take the next steps as training does, and write nothing; the metrics of each."""
        loader = self.loader(self.step + steps)
        self.task.model.train()
        with closing(iter(loader)) as batches:
            return [self.one_step(loader, batches)[0] for _ in range(steps)]

    def one_step(
        self,
        loader: Loader,
        batches: Iterator[Batch],
        *,
        tell: float = 0.0,
        take: Callable[[Step], StepResult] = _take,
    ) -> tuple[dict[str, Any], float]:
        """The step's metrics, and the sum of what all ranks tell each other.

        take: runs the step it is given; a profiler looks on.
        """
        settings, leads = self.settings, self.settings.leads_at(self.step + 1)
        objective = replace(self.task.objective, leads=leads)
        began, waited, spent = time.perf_counter(), loader.waited, self.meter.joules()
        samples = settings.batch * settings.accumulation
        rate = Schedule(settings).rate(self.step + 1)
        scale = self.loss_scale.value if self.loss_scale else None
        step = partial(
            training_step,
            self.task.model,
            objective,
            itertools.islice(batches, settings.accumulation),
            optimizer=self.optimizer,
            step=self.step + 1,
            samples=samples,
            learning_rate=rate,
            clip_norm=settings.clip_norm,
            loss_scale=self.loss_scale,
            dynamic_scale=self.dynamic_scale,
            average=self.average,
            shared=self.task.running.shared,
            memory=self.memory,
            ensemble=self.task.ensemble,
            tell=tell,
        )
        result = take(step)
        self.step += 1
        seconds = time.perf_counter() - began
        values = len(self.task.source.predicted) * math.prod(self.task.source.store.grid.shape)
        values *= objective.num_outputs * leads
        line: dict[str, Any] = {"step": self.step, "loss": result.loss}
        if result.scaled_loss is not None:
            line["scaled_loss"] = result.scaled_loss
        if result.posterior:
            line |= result.posterior
        if leads > 1:
            line["lead_losses"] = list(result.lead_losses)
        line |= {
            "gradient_norm": result.gradient_norm,
            "learning_rate": rate,
            "seconds": seconds,
            "samples_per_s": samples / seconds,
            "cells_per_s": samples * values / seconds,
            "data_wait_share": (loader.waited - waited) / seconds,
            "memory_gib": memory_gib(self.task.device),
        }
        joules = self.meter.joules()
        if spent is not None and joules is not None:
            line["joules"] = joules - spent
        if scale is not None:
            line |= {"loss_scale": scale, "skipped": not result.applied}
        return line, result.told


def rehearsed(config: Config, steps: int) -> list[dict[str, Any]]:
    """The metrics of a run's first steps on its mesh, taken in memory by all ranks together."""
    with processes("cpu") as here:
        config = in_steps(config)
        mesh = Mesh(mesh_of(config.mesh, here.size))
        return Run(Task.of(config, here.device, mesh), None).rehearse(steps)
