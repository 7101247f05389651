"""Checkpoints: complete or not there, verified when read, the same in every layout, no pickle.

    checkpoints/step-00000500/
      model/      *.safetensors   the weights, by the model's own names
      average/    *.safetensors   their moving average, by the same names (if the run keeps one)
      optimizer/  *.safetensors   exp_avg.NAME, exp_avg_sq.NAME, step.NAME
      state.json                  step, sample position, configuration, fingerprints, channels
      complete.json               size and SHA-256 of every file above; written last

The files hold whole tensors (`tensors.py`): what one layout saved any other loads. A checkpoint is
written under a hidden name, synced to disk, then renamed: whenever a process is killed, the former
checkpoint is whole. Where there are several processes, all of them save, find and load together:
each writes and reads its share, rank 0 says what is there, and what fails on one fails on all.
"""

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graticule.model.bayes import posterior_names
from graticule.parallel.box import box_of
from graticule.parallel.talk import Talk, everyone
from graticule.train import parts, seal
from graticule.train import tensors as storage
from graticule.train.seal import COMPLETE

FORMAT = "graticule checkpoint 1"
STATE = "state.json"
_GRACE_SECONDS = 10
"""In which threads that failed together end together."""
_log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run, in the background if wanted: one at a time.

    Made, and its methods called, by all ranks together. Close it: only then is the last one there.
    """

    def __init__(self, run: Path, *, keep: int, background: bool = False) -> None:
        """keep: how many checkpoints stay. background: a thread writes copies in host memory.

        The thread has a group of its own: training may talk over any other meanwhile.
        """
        self.run, self.keep, self.background = run, keep, background
        self._talk = everyone()
        self._thread_talk = self._talk.another() if background else self._talk
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> Path:
        """Write `run/checkpoints/step-STEP` and remove all but the last `keep` checkpoints.

        tensors: by group (`model`, `average`, `optimizer`) and name: the same on all ranks, or
            DTensors. state: plain values; rank 0's are kept.
        In the background it returns when `tensors` may change again; the folder is there later.
        ValueError, the same on all ranks, where the disk refuses, now or for the save before this
        one; what was there before is then untouched.
        """
        self.wait()
        # JSON now: what is written later is what holds now.
        text = json.dumps({"format": FORMAT, "step": step, **state}, indent=1) + "\n"
        entries = parts.plan(tensors, self._talk)
        held = parts.held(tensors, entries, self._talk.rank)
        final, groups = self.run / "checkpoints" / f"step-{step:08d}", sorted(tensors)
        if not self.background:
            _write(final, groups, entries, held, text, self.keep, self._talk)
            return final
        copies = parts.in_host_memory(held)

        def work() -> None:
            try:
                _write(final, groups, entries, copies, text, self.keep, self._thread_talk)
            except Exception as error:
                self._error = error

        # A process that fails ends without it: that is a kill, and kills are safe.
        self._thread = threading.Thread(target=work, name=final.name, daemon=True)
        self._thread.start()
        return final

    def check(self) -> None:
        """Raise what the thread met, on all ranks at once. Costs nothing while none is writing."""
        if self._thread is None:
            return
        failed, ended = self._error is not None, not self._thread.is_alive()
        worst = self._talk.least(0 if failed else 2 if ended else 1)
        if worst == 0:
            # Where all failed together ours ends, too; else it waits for one that fell, in vain.
            thread, self._thread = self._thread, None
            thread.join(timeout=_GRACE_SECONDS)
            raise self._taken_error() or ValueError(
                f"cannot write {thread.name} of {self.run}: another rank failed, and says why"
            )
        if worst == 2:
            self.wait()

    def wait(self) -> None:
        """Return when no save is under way. ValueError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if error := self._taken_error():
            raise error

    close = wait

    def _taken_error(self) -> Exception | None:
        error, self._error = self._error, None
        return error


def save(
    run: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """One checkpoint, at once: see `Saver.save`."""
    return Saver(run, keep=keep).save(step, tensors, state)


def _write(
    final: Path,
    groups: list[str],
    entries: list[parts.Entry],
    held: Mapping[parts.Key, Tensor],
    state: str,
    keep: int,
    talk: Talk,
) -> None:
    """All ranks together: each its files, rank 0 the rest."""
    folder = final.parent
    run, part = folder.parent, folder / f".{final.name}.part"
    error: Exception | None = None

    def refused(what: object) -> ValueError:
        whole = complete(run)
        return ValueError(
            f"cannot write checkpoint {final}: {what}; the last whole one is"
            f" {whole[-1] if whole else 'none'}. Make room or access"
            f"{' (all ranks write into this folder)' if talk.size > 1 else ''}, then resume"
        )

    def begin() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            for group in groups:
                (part / group).mkdir(parents=True)
        except OSError as error:
            raise refused(error) from error

    def end() -> None:
        if told:
            raise refused(told)
        sealed = {name: entry for ours in every for name, entry in ours.items()}
        try:
            for group in groups:
                name = storage.write_index(part, group, entries)
                sealed[name] = seal.of_file(part / name)
            (part / STATE).write_text(state)
            sealed[STATE] = seal.of_file(part / STATE)
            seal.write(part, sealed)
            if final.exists() and not (final / COMPLETE).is_file():
                shutil.rmtree(final)
            os.rename(part, final)
            seal.sync(folder)
        except OSError as refusal:
            raise refused(refusal) from refusal
        for old in complete(run)[:-keep]:
            # Out of sight first: a half-removed checkpoint never looks like one.
            os.rename(old, folder / f".{old.name}.old")
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)

    try:
        talk.first(begin)
        files, error = storage.write(part, entries, held, talk)
        told, every = talk.failures(error), talk.gather(files)
        talk.first(end)
    except ValueError as refusal:
        raise refusal from refusal.__cause__ or error
    finally:
        if talk.rank == 0:
            shutil.rmtree(part, ignore_errors=True)


def complete(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first, as this process sees them."""
    return [path for path in _named_steps(run) if (path / COMPLETE).is_file()]


def incomplete(run: Path) -> list[Path]:
    """What an interrupted save left behind, as this process sees it."""
    broken = [path for path in _named_steps(run) if not (path / COMPLETE).is_file()]
    return sorted((run / "checkpoints").glob(".step-*.part")) + broken


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name, complete or not."""
    found = re.search(r"step-(\d+)", checkpoint.name)
    assert found, checkpoint
    return int(found[1])


def find(run_or_checkpoint: str | Path) -> Path:
    """The checkpoint itself, or a run's last complete one. Says so if a later one is incomplete.

    The one that rank 0 sees, on all ranks. ValueError if there is none.
    """
    return everyone().first(lambda: _found(Path(run_or_checkpoint)))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json, verified."""
    talk = everyone()
    seal.verify(checkpoint, STATE, talk)
    state = talk.first(lambda: json.loads((checkpoint / STATE).read_text()))
    if state.get("format") != FORMAT:
        raise ValueError(f"{checkpoint} has format {state.get('format')!r}, not {FORMAT!r}")
    return state


def weights_of(checkpoint: Path) -> str:
    """Which weights these are: `CONFIG FINGERPRINT/step N`, as a forecast of them names them."""
    state = read_state(checkpoint)
    return f"{state['fingerprints']['config']}/step {state['step']}"


def groups(checkpoint: Path) -> list[str]:
    """Which of `model`, `average`, `optimizer` are there."""
    return everyone().first(
        lambda: sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
    )


def saved_names(checkpoint: Path, group: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor of a group, from the headers of its files, verified."""
    found = _saved(checkpoint, group, everyone())
    return {name: (entry.shape, entry.dtype) for name, entry in found.items()}


def load_tensors(
    checkpoint: Path, group: str, into: Mapping[str, Tensor], *, besides: Collection[str] = ()
) -> None:
    """Fill `into` in place from one group; files are verified first.

    into: whole tensors, or DTensors in any layout: each rank reads its part. besides: names that
    may be there and are not wanted.
    ValueError, the same on all ranks, unless names, shapes and types are the same on both sides;
    it lists the differences.
    """
    talk = everyone()
    files = _saved(checkpoint, group, talk)
    files = {n: entry for n, entry in files.items() if n in into or n not in besides}
    error: Exception | None = None
    try:
        _require_fit(checkpoint / group, files, into)
        boxes = {name: box_of(value) for name, value in into.items()}
    except ValueError as caught:
        error = caught
    _raise_together(error, talk)
    try:
        storage.read(checkpoint / group, files, into, boxes)
    except Exception as caught:
        error = caught
    _raise_together(error, talk)


def _saved(checkpoint: Path, group: str, talk: Talk) -> dict[str, storage.Saved]:
    seal.verify(checkpoint, group, talk)
    return talk.first(lambda: storage.saved(checkpoint / group))


def _raise_together(error: Exception | None, talk: Talk) -> None:
    if told := talk.failures(error):
        raise ValueError(told) from error


def _require_fit(
    source: Path, files: Mapping[str, storage.Saved], into: Mapping[str, Tensor]
) -> None:
    saved = {name: (entry.shape, entry.dtype) for name, entry in files.items()}
    wanted = {name: (tuple(value.shape), value.dtype) for name, value in into.items()}
    if saved != wanted:
        lines = []
        for name in sorted({*saved, *wanted}):
            there, here = saved.get(name), wanted.get(name)
            if there != here:
                lines.append(f"{name}: checkpoint {_shape(there)}, model {_shape(here)}")
        shown = "\n  ".join(lines[:20])
        raise ValueError(
            f"{source} does not fit this model: {len(lines)} of"
            f" {len({*saved, *wanted})} tensors differ\n  {shown}"
            + (f"\n  and {len(lines) - 20} more" if len(lines) > 20 else "")
        )


@dataclass(frozen=True)
class Loaded:
    """Where weights came from. averaged: whether they are the moving average. deviations: whether
    those of weights that are distributions came with them."""

    checkpoint: Path
    step: int
    averaged: bool
    state: dict[str, Any]
    deviations: bool = True


def load_weights(
    run_or_checkpoint: str | Path,
    model: nn.Module,
    channels: Mapping[str, list[str]],
    *,
    prefer_average: bool = True,
    initial_deviations: bool = False,
) -> Loaded:
    """Give `model` the weights of a run (its last checkpoint) or of one checkpoint.

    channels: names in order, by role, as `channels_of` gives them for the data at hand. The
    model's input and output channels have no names of their own: another order is an error that
    prints both, and so is any difference of parameter names and shapes. Of weights that are
    distributions it leaves out what that run's prior was around. initial_deviations: of a
    checkpoint whose weights are numbers these become the means, and deviations stay as they are.
    """
    checkpoint = find(run_or_checkpoint)
    state = read_state(checkpoint)
    check_channels(state["channels"], channels, str(checkpoint))
    averaged = prefer_average and "average" in groups(checkpoint)
    group, into = "average" if averaged else "model", model.state_dict()
    of = posterior_names(model)
    missing = False
    if initial_deviations and of.deviations:
        missing = of.deviations.isdisjoint(saved_names(checkpoint, group))
    # What the prior is around is kept anew, where there is one.
    left = of.starts | (of.deviations if missing else set())
    into = {name: value for name, value in into.items() if name not in left}
    load_tensors(checkpoint, group, into, besides=of.starts)
    return Loaded(checkpoint, int(state["step"]), averaged, state, not missing)


def check_channels(
    saved: Mapping[str, list[str]], here: Mapping[str, list[str]], source: str
) -> None:
    """ValueError prints both orders where channels differ in any role."""
    for role in sorted({*saved, *here}):
        there, wanted = list(saved.get(role, [])), list(here.get(role, []))
        if there != wanted:
            same = " (the same names in another order)" if sorted(there) == sorted(wanted) else ""
            raise ValueError(
                f"{role} channels differ{same}:\n  {source} has {', '.join(there) or 'none'}\n"
                f"  the data has {', '.join(wanted) or 'none'}\n"
                f"set data.{role} to the checkpoint's order"
            )


def _found(path: Path) -> Path:
    if (path / COMPLETE).is_file():
        return path
    whole = complete(path)
    last = step_of(whole[-1]) if whole else -1
    left = [broken for broken in incomplete(path) if step_of(broken) > last]
    told = "".join(f"; step {step_of(broken)} is incomplete ({broken})" for broken in left)
    if not whole:
        raise ValueError(
            f"{path} holds no complete checkpoint{told}; name a run's folder or one of its"
            " checkpoints/step-..., or start a new run"
        )
    if told:
        _log.warning("%s%s: step %d is the last whole one", path, told.replace(";", ":", 1), last)
    return whole[-1]


def _named_steps(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in names if re.fullmatch(r"step-\d{8,}", path.name)]


def _shape(entry: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "has none" if entry is None else f"{entry[0]} {str(entry[1]).removeprefix('torch.')}"
