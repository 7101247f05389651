"""The folder of a run: what may be written there, what a resumed run may change.

config.json     the whole configuration
run.json        versions, fingerprints, channels, sessions and their layouts
metrics.jsonl   one line a step (`progress.py`)
ranks/          the same of ranks 1, 2, ..., as far as theirs differ
checkpoints/    `checkpoint.py`
plan.json       what its steps do with their memory, where that is planned (`budget.py`)

Rank 0 of a run holds the folder and decides for all.
"""

import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import graticule
from graticule.config import Config, from_dict
from graticule.data.store import write_json
from graticule.train import checkpoint
from graticule.train.progress import read_metrics
from graticule.train.task import Task

MAY_CHANGE = (
    "train.steps", "train.checkpoint_every", "train.keep_checkpoints", "train.validate_every",
    "train.save_in_background", "train.tensorboard", "data.read_threads", "data.read_waves",
    "mesh.*", "memory.*",
)  # fmt: skip
"""`mesh.*`: all keys of that section."""
_log = logging.getLogger(__name__)


@contextmanager
def opened(out: Path, resume: bool) -> Iterator[None]:
    """The folder of a run, new or with `resume` an old one, held until the block ends.

    ValueError, before any data is read, for what cannot be written to or must not be written over.
    Folders that were made for a run that the block then refuses, before anything was written, are
    taken away again.
    """
    _require_free(out, resume)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        _require_writable(out)
        with held(out):
            yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # there is something in it
                folder.rmdir()
        raise


def _require_free(out: Path, resume: bool) -> None:
    if resume and not (out / "config.json").is_file():
        raise ValueError(
            f"{out} holds no run to resume (no config.json there); name the run's folder, or start"
            " a new run without --resume"
        )
    if not resume and out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"{out} exists already and is not overwritten; go on with --resume, or name another"
            " folder with --out"
        )


def _require_writable(out: Path) -> None:
    """Also make it."""
    probe = out / ".writable"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"the output folder {out} is not writable: {error}; name another with --out"
        ) from error


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Keep other processes out of the folder until the block, or this process, ends.

    A lock of the operating system on the folder itself: a kill leaves nothing behind.
    """
    descriptor = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process trains in {out} now; wait until it ends, or name another folder"
                " with --out"
            ) from None
        except OSError as error:  # some network file systems
            _log.info("%s cannot be locked (%s): start no second process there", out, error)
        yield
    finally:
        os.close(descriptor)


def point_of_resume(config: Config, out: Path) -> Path | None:
    """The checkpoint to go on from, if `config` is the run's own.

    None, and a warning, for a run that was killed before its first checkpoint was due: there is
    nothing to lose. Later than that a missing checkpoint is an error, never a fresh start.
    """
    saved = from_dict(_read(out / "config.json"))
    before, now = _flat(saved), _flat(config)
    changed = [
        key
        for key in now
        if before[key] != now[key] and not {key, f"{key.partition('.')[0]}.*"} & {*MAY_CHANGE}
    ]
    if changed:
        told = [f"{key}: {before[key]!r} in the run, now {now[key]!r}" for key in changed]
        shown = "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")
        raise ValueError(
            f"{out} was started with another configuration ({shown}). Resume it as it was, or"
            f" start a new run with train.start_from={out}. Only {', '.join(MAY_CHANGE)} may change"
        )
    done = max((checkpoint.step_of(path) for path in checkpoint.complete(out)), default=0)
    if config.train.steps < done:
        _log.warning("train.steps=%d, and %s has %d already: nothing is trained, and its"
                     " train.steps stays %d", config.train.steps, out, done,
                     saved.train.steps)  # fmt: skip
    elif saved.train.steps != config.train.steps and config.train.schedule == "cosine":
        _log.warning(
            "train.steps was %d and is %d: the cosine schedule is that of %d steps from here on",
            saved.train.steps, config.train.steps, config.train.steps,
        )  # fmt: skip
    if not checkpoint.complete(out):
        reached = max((line["step"] for line in read_metrics(out)), default=0)
        due = min(saved.train.checkpoint_every, saved.train.steps)
        if reached < due or (reached == due and checkpoint.incomplete(out)):
            _log.warning(
                "%s was stopped at step %d, before its first checkpoint: it begins again", out,
                reached,
            )  # fmt: skip
            return None
    return checkpoint.find(out)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:  # neither JSON nor, perhaps, text
        raise ValueError(f"{path} is damaged: {error}; restore it") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it holds {values!r:.60}, not a table; restore it")
    return values


def _flat(config: Config) -> dict[str, Any]:
    values = config.to_dict()
    name = values.pop("name")
    return {"name": name} | {
        f"{section}.{key}": value for section in values for key, value in values[section].items()
    }


def write_description(
    out: Path, task: Task, step: int, started_from: str, tried: Sequence[dict[str, Any]] = ()
) -> None:
    """started_from: which weights a new run began with; empty: random ones, or it is resumed.
    tried: what was measured before the mesh's split was chosen, if it was (`topology.py`)."""
    mesh, stripes = task.running.mesh, task.running.stripes
    session = {
        "after_step": step,
        "device": str(task.device),
        "processes": mesh.size,
        # As configured, but for the sizes that were found.
        "mesh": task.config.to_dict()["mesh"] | mesh.sizes,
        "stripes": {"dim": stripes.dim, "bounds": list(stripes.grid.bounds)},
        **({"tried": list(tried)} if tried else {}),
        "versions": versions(),
    }
    path = out / "run.json"
    before = _read(path) if path.exists() else {}
    earlier = before.get("sessions", [])
    write_json(out / "config.json", task.config.to_dict())
    write_json(
        path,
        {
            "name": task.config.name,
            "fingerprints": task.fingerprints,
            "channels": task.source.channel_names,
            "parameters": sum(p.numel() for p in task.model.parameters()),
            "detach_every": task.config.train.detach_every,
            "leads": task.config.train.leads,
            "started_from": started_from or before.get("started_from", ""),
            "sessions": [*earlier, session],
        },
    )


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    return {
        "graticule": graticule.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
