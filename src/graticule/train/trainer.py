"""The training run: from a configuration to a folder of checkpoints and metrics.

A step's samples, learning rate and random draws are functions of the step number, so there is
nothing else to restore: a run stopped and resumed gives the numbers of a run that was not.
"""

import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graticule.config import Config
from graticule.data.loader import Batch, Loader, Order
from graticule.train import checkpoint
from graticule.train.folder import (
    held,
    open_folder,
    point_of_resume,
    versions,
    write_description,
)
from graticule.train.optimizer import (
    Average,
    Schedule,
    empty_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
)
from graticule.train.profile import Profiler, require_steps
from graticule.train.progress import Metrics, memory_gib
from graticule.train.step import LossScale, training_step
from graticule.train.task import Task, fields_of

_log = logging.getLogger(__name__)


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM ended the run after a whole step, with a checkpoint.

    signal_number, step, checkpoint: what came, and where `resume` goes on.
    """

    def __init__(self, signal_number: int, step: int, path: Path) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"{name}: stopped after step {step}, saved {path}; --resume goes on there")
        self.signal_number, self.step, self.checkpoint = signal_number, step, path


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    device: str | None = "cpu",
    progress: Callable[[int, int, dict[str, Any]], None] | None = None,
    profile: int | None = None,
) -> Path:
    """Train as `config.train` says and return the last checkpoint.

    out: folder of the run: new or empty, or with `resume` one that holds a run. A resumed run
        keeps its configuration, but for `folder.MAY_CHANGE`.
    device: of torch; None: a GPU if there is one.
    progress: called after each step with (step, steps, that step's metrics).
    profile: how many steps `profile.py` looks at, after its warm-up; None: none.
    The validation loss is that of the weights being trained, over at most 64 samples
    evenly spaced through the split, in order of time, each counted once.
    Raises Stopped on SIGINT and SIGTERM, ValueError for whatever the user can put right.
    """
    out = Path(out)
    open_folder(out, resume)
    with held(out):
        start = point_of_resume(config, out) if resume else None
        if start is None and config.train.start_from:
            checkpoint.find(config.train.start_from)
        if profile is not None:
            taken = checkpoint.step_of(start) if start else 0
            require_steps(profile, out, taken, config.train.steps)
        task = Task.of(config, torch.device(device or _best_device()))
        run = _Run(task, start)
        if start:
            _log.info("resuming %s after step %d", out, run.step)
        if run.step >= config.train.steps:
            _log.info("%s has its %d steps already", out, config.train.steps)
            return checkpoint.find(out)
        write_description(out, task, run.step, run.started_from)
        leads = config.train.leads
        across = (
            "full over" if config.train.rollout_gradient == "full" else "detached within each of"
        )
        _log.info("rollout gradient: %s %d lead%s", across, leads, "" if leads == 1 else "s")
        return run.train(out, progress, profile or 0)


class _Run:
    """The state that training changes, new or from a checkpoint."""

    def __init__(self, task: Task, start: Path | None) -> None:
        self.task, self.settings = task, task.config.train
        self.step = 0
        model, channels = task.model, task.source.channel_names
        self.loss_scale = LossScale() if self.settings.precision == "fp16" else None
        self.started_from = ""
        if start is None and self.settings.start_from:
            loaded = self._load_weights(model, channels)
            self.started_from = checkpoint.weights_of(loaded.checkpoint)
            kind = "averaged" if loaded.averaged else "last"
            _log.info("starting from the %s weights of %s", kind, loaded.checkpoint)
            theirs = loaded.state["fingerprints"]["statistics"]
            if theirs != task.fingerprints["statistics"]:
                _log.warning(
                    "%s was trained with other statistics: the same weights now see fields"
                    " normalised in another way",
                    loaded.checkpoint,
                )
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
            loaded = checkpoint.load_weights(found, model, channels)
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

    def _first_sample(self, step: int) -> int:
        """Number of the first sample of a step (1, 2, ...)."""
        return (step - 1) * self.settings.batch * self.settings.accumulation

    def save(self, out: Path) -> Path:
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
            "channels": self.task.source.channel_names,
            "fingerprints": self.task.fingerprints,
            # A forecast from another store sees fields as this training did.
            "statistics": self.task.statistics.to_dict(),
            "fields": fields_of(self.task.source),
            "versions": versions(),
            "config": self.task.config.to_dict(),
        }
        keep = self.settings.keep_checkpoints
        return checkpoint.save(out, self.step, tensors, state, keep=keep)

    def train(
        self,
        out: Path,
        progress: Callable[[int, int, dict[str, Any]], None] | None,
        profile: int,
    ) -> Path:
        settings, task = self.settings, self.task
        numbers = range(self._first_sample(self.step + 1), self._first_sample(settings.steps + 1))
        order = Order(task.train_starts, settings.seed)
        loader = task.loader(order, numbers, rolled=settings.roll_longitude)
        profiler = Profiler(profile, out, task, self.optimizer, self.average, after_step=self.step)
        last = out
        task.model.train()
        with (
            closing(
                Metrics(out, after_step=self.step, tensorboard=settings.tensorboard)
            ) as metrics,
            _signals() as received,
            closing(iter(loader)) as batches,
            closing(profiler),
        ):
            while self.step < settings.steps:
                line = self._one_step(loader, batches, profiler)
                profiler.took(line["seconds"])
                ends = self.step == settings.steps
                due = settings.validate_every and self.step % settings.validate_every == 0
                if task.validation_starts is not None and (due or ends):
                    line["validation_loss"] = task.validation_loss()
                metrics.write(line)
                if progress:
                    progress(self.step, settings.steps, line)
                stop = received[0] if received else None
                if ends or stop or self.step % settings.checkpoint_every == 0:
                    last = self.save(out)
                if stop and not ends:
                    raise Stopped(stop, self.step, last)
        return last

    def _one_step(
        self, loader: Loader, batches: Iterator[Batch], profiler: Profiler
    ) -> dict[str, Any]:
        settings, objective = self.settings, self.task.objective
        began, waited = time.perf_counter(), loader.waited
        samples = settings.batch * settings.accumulation
        rate = Schedule(settings).rate(self.step + 1)
        scale = self.loss_scale.value if self.loss_scale else None
        take = partial(
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
            average=self.average,
        )
        result = profiler.run(take)
        self.step += 1
        seconds = time.perf_counter() - began
        cells = objective.weights.wet.numel() * objective.num_outputs * objective.leads
        line: dict[str, Any] = {"step": self.step, "loss": result.loss}
        if objective.leads > 1:
            line["lead_losses"] = list(result.lead_losses)
        line |= {
            "gradient_norm": result.gradient_norm,
            "learning_rate": rate,
            "seconds": seconds,
            "samples_per_s": samples / seconds,
            "cells_per_s": samples * cells / seconds,
            "data_wait_share": (loader.waited - waited) / seconds,
            "memory_gib": memory_gib(self.task.device),
        }
        if scale is not None:
            line |= {"loss_scale": scale, "skipped": not result.applied}
        return line


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list; a second one acts as usual, at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        restore()
        _log.warning("%s: finishing this step", signal.Signals(number).name)

    for number in former:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()
