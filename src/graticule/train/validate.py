"""Validation by rollout, apart from training: checkpoints are read as they appear.

A run's folder is all that this shares with the processes that train: it reads config.json and
checkpoints, and writes validation.jsonl there, a line for each checkpoint and horizon:

step, checkpoint    which weights; `weights` says whether their `moving average`
                    or the `last`
starts              initial times, evenly spaced through the validation split, the same for all
leads, lead_hours   the horizon: model steps, and hours to the last output time
loss                of leads 1 to the horizon, their mean (a training loss is their sum), without
                    the channels' factors; null where the rollout was not finite
rmse                by channel, in its units: over cells by area, and initial times, at the last
                    output time of the horizon's lead. A channel without spread in training has
                    none: it is normalised to 0 whatever it is in validation (`evaluate` scores it)
ratio               by channel, `rmse` over that of persistence, which forecasts the initial state;
                    diagnostic channels have none, nor has one of which persistence misses nothing.
                    `mean_ratio`: over all that have one

What is done is remembered there: a validation that was stopped goes on with the next checkpoint.
"""

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from graticule.config import Config
from graticule.mesh import SAMPLE, Mesh
from graticule.parallel.exchange import Link
from graticule.parallel.talk import everyone
from graticule.train import checkpoint
from graticule.train.loss import LossWeights, weighted_errors
from graticule.train.progress import plain, read_lines
from graticule.train.seal import COMPLETE
from graticule.train.task import Task, evenly

FILE = "validation.jsonl"
STARTS = 16
"""Initial times of a validation, where it does not say how many."""
LOOK_EVERY, LOOK_FOR = 5.0, 60.0
"""Seconds between looks for a new checkpoint, and after which rank 0 tells the others of none."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """leads: horizons, ascending. starts: initial times at most."""

    leads: tuple[int, ...]
    starts: int = STARTS

    def __post_init__(self) -> None:
        if not self.leads or min(self.leads) < 1 or self.starts < 1:
            raise ValueError(
                f"horizons {self.leads} of {self.starts} starts: name one horizon at least, each of"
                " at least 1 lead, and at least 1 start"
            )
        object.__setattr__(self, "leads", tuple(sorted(set(self.leads))))


def validate(
    run: Path,
    config: Config,
    wanted: Wanted,
    *,
    device: torch.device,
    mesh: Mesh | None = None,
    follow: bool = False,
    progress: Callable[[int, int], None] | None = None,
    told: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Roll out from every checkpoint of `run` that is there and not done; the new lines.

    config: the run's own, but for the mesh, of the processes that make this call together. follow:
    wait for checkpoints until that of the run's last step. progress: (done, total) leads of a
    checkpoint. told: each line as it is written, on rank 0.
    ValueError for a store that is not the one of the training, and for a validation split without
    room for the longest horizon.
    """
    talk = everyone()
    if not follow:
        checkpoint.find(run)  # says what is there if there is none
    task = Task.of(config, device, mesh)
    rollouts = _Rollouts(task, wanted)
    lines: list[dict[str, Any]] = []
    with _appended(run, talk.rank == 0) as (file, before):
        done = talk.first(lambda: _done(before, wanted, rollouts.alike))
        while (path := _next(run, done, follow)) is not None:
            done.add(path.name)
            try:
                loaded = checkpoint.load_weights(
                    path, task.model, task.source.channel_names,
                    prefer_average=config.forecast.weights == "average",
                )  # fmt: skip
                _require_same_data(loaded, task)
            except (ValueError, OSError):
                if talk.first((path / COMPLETE).is_file):
                    raise
                _log.warning(
                    "%s was removed before it was read; train.keep_checkpoints keeps more", path
                )
                continue
            for line in map(plain, rollouts.of(loaded, progress)):
                lines.append(line)
                if file is not None:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                if told and talk.rank == 0:
                    told(line)
    return lines


def weights_of(config: Config) -> str:
    """Which weights of a run's checkpoints are validated, in words."""
    averaged = config.forecast.weights == "average" and config.train.ema_decay > 0
    return "moving average" if averaged else "last"


def read_validation(run: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's validation.jsonl; none where it has none."""
    return read_lines(run / FILE)


def best(lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By horizon, the line of least loss, the earlier of two alike. lines: of one number of
    starts; those whose rollout was not finite win nothing."""
    found: dict[int, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: line["step"]):
        loss, so_far = line["loss"], found.get(line["leads"])
        if loss is None:
            continue
        if so_far is None or loss < so_far["loss"]:
            found[line["leads"]] = line
    return dict(sorted(found.items()))


class _Rollouts:
    """From the same initial times, with whatever weights the task's model has."""

    def __init__(self, task: Task, wanted: Wanted) -> None:
        self.task, self.leads = task, wanted.leads
        source, objective, mesh = task.source, task.objective, task.running.mesh
        whole = source.starts("validation", wanted.leads[-1])
        self.starts = evenly(whole, wanted.starts)
        self.alike = len(self.starts), weights_of(task.config)
        self.names = list(source.predicted_channels.names)
        self.objective = replace(objective, leads=wanted.leads[-1])
        rows, columns = task.running.stripes.rows, task.running.stripes.columns
        area = source.store.grid.cell_area
        planes = task.running.planes
        self.weights = LossWeights.of(
            source.store.wet_part(source.of(planes).predicted, rows, columns), area[rows, columns],
            mean_area=float(area.mean()), link=Link(mesh.group(*SAMPLE)), planes=planes,
            device=task.device,
        )  # fmt: skip
        known = slice(objective.num_prognostic)
        self.known = replace(
            self.weights, cell=self.weights.cell[known], wet=self.weights.wet[known]
        )
        by_channel = objective.of_all(self.weights.cell.sum((1, 2), dtype=torch.float64))
        self.by_channel = Link(mesh.group(*SAMPLE)).sum(by_channel, "weights").cpu().numpy()
        _, scale = task.statistics.aligned(self.names)
        # What is normalised to 0 says nothing of how far the truth is from the constant.
        self.std = np.where(task.statistics.constant(self.names), np.nan, scale)

    def of(
        self, loaded: checkpoint.Loaded, progress: Callable[[int, int], None] | None
    ) -> list[dict[str, Any]]:
        """A line for each horizon. All processes together; the same on all."""
        began = time.perf_counter()
        losses, squares, persistence = self._sums(progress)
        seconds = time.perf_counter() - began
        samples, lines = len(self.starts), []
        means = np.cumsum(losses) / self.objective.weight(samples)
        channels, spec = len(self.names), self.task.source.spec
        hours = self.task.source.store.times.nominal_step_seconds / 3600
        with np.errstate(divide="ignore", invalid="ignore"):
            rmse = np.sqrt(squares / (self.by_channel * samples)) * self.std
        ratio = np.full_like(rmse, np.nan)
        known = slice(persistence.shape[1])
        np.divide(squares[:, known], persistence, out=ratio[:, known], where=persistence > 0)
        ratio = np.sqrt(ratio)
        for place, lead in enumerate(self.leads):
            told = ratio[place][: persistence.shape[1]]
            told = told[~np.isnan(told)]
            lines.append(
                {
                    "step": loaded.step,
                    "checkpoint": loaded.checkpoint.name,
                    "weights": self.alike[1],
                    "starts": samples,
                    "leads": lead,
                    "lead_hours": spec.label_offsets(lead)[-1] * hours,
                    "loss": float(means[lead - 1] / lead),
                    "mean_ratio": float(told.mean()) if told.size else math.nan,
                    "rmse": {self.names[c]: float(rmse[place, c]) for c in range(channels)},
                    "ratio": {self.names[c]: float(ratio[place, c]) for c in range(channels)},
                    "seconds": round(seconds, 3),
                }
            )
        return lines

    def _sums(
        self, progress: Callable[[int, int], None] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Over all samples and ranks: the objective's error of each lead; by horizon and channel
        the squared errors of the last output time, of the forecast and of persistence."""
        task, most, all_known = self.task, self.leads[-1], len(self.task.source.prognostic)
        known, channels = self.objective.num_prognostic, len(self.names)
        losses = torch.zeros(most, dtype=torch.float64, device=task.device)
        squares = losses.new_zeros(len(self.leads), channels)
        persistence = losses.new_zeros(len(self.leads), all_known)
        mesh = task.running.mesh
        # The mean of all members is on each rank that shares them.
        ranks, tells = mesh.sizes["data"], mesh.index("member") == 0
        batches = math.ceil(
            math.ceil(len(self.starts) / ranks) / math.ceil(task.config.train.batch / ranks)
        )
        task.model.eval()
        with torch.no_grad(), closing(task.batches(self.starts, most)) as given:
            for number, (batch, counts) in enumerate(given):
                states = self.objective.inputs(self.objective.on_device(batch.inputs))
                newest = states[:, -1:]
                leads = task.forecast(batch, most)
                for lead, (predicted, labels, errors) in enumerate(leads, start=1):
                    if counts:
                        losses[lead - 1] += errors.sum()
                    if counts and lead in self.leads and tells:
                        place, last = self.leads.index(lead), labels[:, -1:]
                        errors = _squares(predicted[:, -1:], last, self.weights)
                        squares[place] += self.objective.of_all(errors)
                        errors = _squares(newest, last[:, :, :known], self.known)
                        persistence[place] += self.objective.of_all(errors, known=True)
                    if progress:
                        progress(number * most + lead, batches * most)
        packed = torch.cat([losses, squares.flatten(), persistence.flatten()])
        total = Link(task.running.mesh.group()).sum(packed, "validation").cpu().numpy()
        first, second = total[:most], total[most : most + squares.numel()]
        third = total[most + squares.numel() :]
        return first, second.reshape(squares.shape), third.reshape(persistence.shape)


def _squares(predicted: Tensor, labels: Tensor, weights: LossWeights) -> Tensor:
    return weighted_errors(predicted, labels, weights, "mse")


def _require_same_data(loaded: checkpoint.Loaded, task: Task) -> None:
    for name in ("store", "statistics"):
        saved, here = loaded.state["fingerprints"][name], task.fingerprints[name]
        if saved != here:
            raise ValueError(
                f"the {name} changed since {loaded.checkpoint} was written (fingerprint {saved},"
                f" now {here}): put the old one back to validate this run"
            )


def _done(before: Sequence[dict[str, Any]], wanted: Wanted, alike: tuple[int, str]) -> set[str]:
    """Checkpoints that have a line for each horizon, of as many starts and the same weights."""
    horizons: dict[str, set[int]] = {}
    for line in before:
        if (line["starts"], line["weights"]) == alike:
            horizons.setdefault(line["checkpoint"], set()).add(line["leads"])
    return {name for name, leads in horizons.items() if leads.issuperset(wanted.leads)}


def _next(run: Path, done: set[str], follow: bool) -> Path | None:
    """The oldest checkpoint that is not done, the same on all processes; None where no more come.

    A wait is told to the others now and then: none of them waits for longer than a group may.
    """

    def look() -> tuple[Path | None, bool]:
        until = time.monotonic() + LOOK_FOR
        while True:
            there = checkpoint.complete(run)
            new = [path for path in there if path.name not in done]
            if new:
                return new[0], False
            ended = bool(there) and checkpoint.step_of(there[-1]) >= _steps(run)
            if ended or not follow or time.monotonic() > until:
                return None, follow and not ended
            time.sleep(LOOK_EVERY)

    while True:
        path, waits = everyone().first(look)
        if not waits:
            return path


def _steps(run: Path) -> int:
    """Of the run as it is now: it may have been resumed with more of them."""
    return int(json.loads((run / "config.json").read_text())["train"]["steps"])


@contextmanager
def _appended(run: Path, writes: bool) -> Iterator[tuple[TextIO | None, list[dict[str, Any]]]]:
    """validation.jsonl to write to, and its lines so far; nothing where another process writes.

    A line that a kill cut short is dropped. ValueError where another validation writes there.
    """
    if not writes:
        yield None, []
        return
    path = run / FILE
    try:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another validation writes to {path} now; wait until it ends, or end it"
                ) from None
            except OSError as error:  # some network file systems
                _log.info("%s cannot be locked (%s): start no second validation", path, error)
            lines = read_lines(path)
            whole = "".join(json.dumps(line) + "\n" for line in lines)
            file.seek(0)
            if file.read() != whole:
                file.truncate(0)
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            yield file, lines
    except PermissionError as error:
        raise ValueError(
            f"cannot write {path}: {error}; validation keeps its lines there"
        ) from error
