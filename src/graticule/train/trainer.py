"""The training run: from a configuration to a folder of checkpoints and metrics.

A step's samples, learning rate and random draws are functions of the step number, so there is
nothing else to restore: a run stopped and resumed gives the numbers of a run that was not, on
whatever mesh. Of several processes each runs this; rank 0 decides what the folder's state means.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from graticule.config import Config, TrainConfig
from graticule.data.loader import Loader
from graticule.mesh import Mesh
from graticule.parallel.launch import mesh_of, processes
from graticule.parallel.talk import everyone
from graticule.parallel.watch import Agreed
from graticule.train import checkpoint
from graticule.train.budget import kind_of_device, memory_of, planned, say, store_plan
from graticule.train.folder import opened, point_of_resume, write_description
from graticule.train.profile import Profiler, require_steps
from graticule.train.progress import Metrics
from graticule.train.run import Run
from graticule.train.task import Task, in_steps
from graticule.train.topology import candidates, fastest

ONE_WISH = 2.0
"""Seconds within which several signals are one wish."""
_log = logging.getLogger(__name__)


class Stopped(Agreed, KeyboardInterrupt):
    """SIGINT or SIGTERM, on any process, ended the run after a whole step, with a checkpoint.

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
    """Train as `config.train` and `config.mesh` say and return the last checkpoint.

    Under torchrun or in a Slurm step all processes make this call together: they find each other,
    unless torch.distributed has been started already.
    out: folder of the run: new or empty, or with `resume` one that holds a run. A resumed run
        keeps its configuration, but for `folder.MAY_CHANGE`.
    device: of torch; None: a GPU if there is one; with several processes, each its own.
    progress: called after each step with (step, steps, that step's metrics), on each process.
    profile: how many steps `profile.py` looks at, after its warm-up; None: none.
    The validation loss is that of the weights being trained over `train.leads` leads, whatever the
    curriculum, of at most 64 samples evenly spaced through the split, in order of time, each
    counted once, without the channels' factors. `validate.py` rolls out further, apart from this.
    Raises Stopped on SIGINT and SIGTERM, ValueError for whatever the user can put right.
    """
    out = Path(out)
    with processes(device) as here, ExitStack() as folder:
        tried: list[dict[str, Any]] = []
        mesh_of(candidates(config)[0].mesh, here.size)  # before anything is written
        everyone().first(lambda: folder.enter_context(opened(out, resume)))
        _require_one_configuration(config, here.rank)
        config = everyone().first(partial(in_steps, config))
        start = everyone().first(partial(_checked, config, out, resume, profile))
        if config.mesh.sequence == 0:
            config, tried = fastest(config, here.size, here.device)
        kind = kind_of_device(here.device)
        plan = everyone().first(lambda: planned(config, out, kind, here.size))
        if plan:
            _log.info("%s", say(plan))
        memory = folder.enter_context(memory_of(plan, config, here.device))
        mesh = Mesh(mesh_of(config.mesh, here.size), device=here.device.type)
        task = Task.of(config, here.device, mesh)
        run = Run(task, start, memory)
        if start:
            _log.info("resuming %s after step %d", out, run.step)
        if run.step >= config.train.steps:
            _log.info("%s has its %d steps already", out, config.train.steps)
            return checkpoint.find(out)
        loader = run.loader(config.train.steps)  # what is refused up to here leaves no folder
        everyone().first(lambda: write_description(out, task, run.step, run.started_from, tried))
        everyone().first(lambda: store_plan(out, plan))
        _log.info("%s", _in_words(config.train))
        return _train(run, loader, out, progress, profile or 0)


def _in_words(settings: TrainConfig) -> str:
    """Through which leads the gradient goes, and when there are how many."""

    def some(leads: int) -> str:
        return f"{leads} lead{'' if leads == 1 else 's'}"

    every, leads = settings.detach_every, settings.leads
    told = f"full over {some(leads)}"
    if every and every < leads:
        told = f"over {some(every)} at a time of {some(leads)}"
    if settings.leads_from:
        curriculum = ", ".join(f"{some(n)} from step {first}" for first, n in settings.leads_from)
        told += f" at most: {curriculum}"
    last = settings.leads_at(settings.steps)
    if last < leads:
        told += f"; the run ends at step {settings.steps}, with {some(last)}"
    return f"rollout gradient: {told}"


def _checked(config: Config, out: Path, resume: bool, profile: int | None) -> Path | None:
    """The checkpoint to go on from. ValueError where the folder and the wishes do not agree."""
    start = point_of_resume(config, out) if resume else None
    if start is None and config.train.start_from:
        checkpoint.find(config.train.start_from)
    if profile is not None:
        taken = checkpoint.step_of(start) if start else 0
        require_steps(profile, out, taken, config.train.steps)
    return start


def _require_one_configuration(config: Config, rank: int) -> None:
    """Processes that train different things would compute something, and wait for each other."""
    of_first = everyone().first(lambda: config.fingerprint)
    error = None
    if config.fingerprint != of_first:
        error = ValueError(
            f"another configuration (fingerprint {config.fingerprint}) than rank 0"
            f" ({of_first}): start all processes with the same command"
        )
    if told := everyone().failures(error):
        raise ValueError(told)


def _train(
    run: Run,
    loader: Loader,
    out: Path,
    progress: Callable[[int, int, dict[str, Any]], None] | None,
    profile: int,
) -> Path:
    settings, task = run.settings, run.task
    mesh = task.running.mesh
    profiler = Profiler(
        profile, out, task, run.optimizer, run.average, run.memory, after_step=run.step
    )
    last = out
    task.model.train()
    with (
        closing(
            Metrics(
                out,
                rank=mesh.rank,
                ranks=mesh.size,
                after_step=run.step,
                tensorboard=settings.tensorboard,
            )
        ) as metrics,
        closing(
            checkpoint.Saver(
                out, keep=settings.keep_checkpoints, background=settings.save_in_background
            )
        ) as saver,
        _signals() as received,
        closing(iter(loader)) as batches,
        closing(profiler),
    ):
        while run.step < settings.steps:
            line, told = run.one_step(
                loader, batches, tell=_told(received, mesh.size), take=profiler.run
            )
            stop = _heard(told, mesh.size)
            saver.check()
            profiler.took(line["seconds"])
            ends = run.step == settings.steps
            due = settings.validate_every and run.step % settings.validate_every == 0
            if task.validation_starts is not None and (due or ends):
                line["validation_loss"] = task.validation_loss()
            metrics.write(line)
            if progress:
                progress(run.step, settings.steps, line)
            if mesh.size == 1 and received:  # nobody else need hear of it
                stop = received[0]
            if ends or stop or run.step % settings.checkpoint_every == 0:
                last = run.save(saver)
            if stop and not ends:
                saver.wait()
                raise Stopped(stop, run.step, last)
    return last


def _told(received: list[int], ranks: int) -> float:
    """What a rank adds to a sum over all, from which `_heard` knows the signal again."""
    if not received:
        return 0.0
    return 1.0 if received[0] == signal.SIGINT else ranks + 1.0


def _heard(total: float, ranks: int) -> int | None:
    if not total:
        return None
    return signal.SIGTERM if total > ranks else signal.SIGINT


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list; a second one acts as usual, at once.

    Not so within `ONE_WISH` seconds: a terminal and torchrun each pass on the same Ctrl-C.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    first: list[float] = []

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        now = time.monotonic()
        if received and now - first[0] > ONE_WISH:
            restore()
            os.kill(os.getpid(), number)
        elif not received:
            first.append(now)
            received.append(number)
            _log.warning("%s: finishing this step", signal.Signals(number).name)

    for number in former:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()
