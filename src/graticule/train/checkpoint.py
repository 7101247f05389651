"""Checkpoints: complete or not there, verified when read, and without pickle.

    checkpoints/step-00000500/
      model/      *.safetensors   the weights, by the model's own names
      average/    *.safetensors   their moving average, by the same names (if the run keeps one)
      optimizer/  *.safetensors   exp_avg.NAME, exp_avg_sq.NAME, step.NAME
      state.json                  step, sample position, configuration, fingerprints, channels
      complete.json               size and SHA-256 of every file above; written last

Tensors go through torch.distributed.checkpoint with its safetensors storage, whose files any
safetensors reader opens. A checkpoint is written under a hidden name, synced to disk, then
renamed: whenever a process is killed, the former checkpoint is whole.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

FORMAT = "graticule checkpoint 1"
COMPLETE = "complete.json"
STATE = "state.json"
_log = logging.getLogger(__name__)


def save(
    run: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write `run/checkpoints/step-STEP` and remove all but the last `keep` checkpoints.

    tensors: by group (`model`, `average`, `optimizer`) and name. state: plain values.
    ValueError where the disk refuses; what was there before is then untouched.
    """
    folder = run / "checkpoints"
    final = folder / f"step-{step:08d}"
    part = folder / f".{final.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for group, named in tensors.items():
            _write_tensors(part / group, named)
        text = json.dumps({"format": FORMAT, "step": step, **state}, indent=1)
        (part / STATE).write_text(text + "\n")
        _seal(part)
        if final.exists() and not (final / COMPLETE).is_file():
            shutil.rmtree(final)
        os.rename(part, final)
        _sync(folder)
    except OSError as error:
        whole = complete(run)
        raise ValueError(
            f"cannot write checkpoint {final}: {error}; the last whole one is"
            f" {whole[-1] if whole else 'none'}. Make room or access, then resume"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for old in complete(run)[:-keep]:
        # Out of sight first: a half-removed checkpoint never looks like one.
        os.rename(old, folder / f".{old.name}.old")
    for left in folder.glob(".step-*"):
        shutil.rmtree(left)
    return final


def complete(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return [path for path in _named_steps(run) if (path / COMPLETE).is_file()]


def incomplete(run: Path) -> list[Path]:
    """What an interrupted save left behind."""
    broken = [path for path in _named_steps(run) if not (path / COMPLETE).is_file()]
    return sorted((run / "checkpoints").glob(".step-*.part")) + broken


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name, complete or not."""
    found = re.search(r"step-(\d+)", checkpoint.name)
    assert found, checkpoint
    return int(found[1])


def find(run_or_checkpoint: str | Path) -> Path:
    """The checkpoint itself, or a run's last complete one. Says so if a later one is incomplete.

    ValueError if there is none.
    """
    path = Path(run_or_checkpoint)
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


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json, verified."""
    _verify(checkpoint, STATE)
    state = json.loads((checkpoint / STATE).read_text())
    if state.get("format") != FORMAT:
        raise ValueError(f"{checkpoint} has format {state.get('format')!r}, not {FORMAT!r}")
    return state


def weights_of(checkpoint: Path) -> str:
    """Which weights these are: `CONFIG FINGERPRINT/step N`, as a forecast of them names them."""
    state = read_state(checkpoint)
    return f"{state['fingerprints']['config']}/step {state['step']}"


def groups(checkpoint: Path) -> list[str]:
    """Which of `model`, `average`, `optimizer` are there."""
    return sorted(path.name for path in checkpoint.iterdir() if path.is_dir())


def saved_names(checkpoint: Path, group: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor of a group, from the headers of its files, verified."""
    _verify(checkpoint, group)
    metadata = HuggingFaceStorageReader(path=str(checkpoint / group)).read_metadata()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # safetensors holds nothing else
    }


def load_tensors(checkpoint: Path, group: str, into: Mapping[str, Tensor]) -> None:
    """Fill `into` in place from one group; files are verified first.

    ValueError unless names, shapes and types are the same on both sides; it lists the differences.
    """
    saved = saved_names(checkpoint, group)
    wanted = {name: (tuple(value.shape), value.dtype) for name, value in into.items()}
    if saved != wanted:
        lines = []
        for name in sorted({*saved, *wanted}):
            there, here = saved.get(name), wanted.get(name)
            if there != here:
                lines.append(f"{name}: checkpoint {_shape(there)}, model {_shape(here)}")
        shown = "\n  ".join(lines[:20])
        raise ValueError(
            f"{checkpoint / group} does not fit this model: {len(lines)} of"
            f" {len({*saved, *wanted})} tensors differ\n  {shown}"
            + (f"\n  and {len(lines) - 20} more" if len(lines) > 20 else "")
        )
    with _single_process():
        # Shapes and names agree: the planner has nothing to leave out.
        dcp.load(
            dict(into),
            storage_reader=HuggingFaceStorageReader(path=str(checkpoint / group)),
            no_dist=True,
        )


@dataclass(frozen=True)
class Loaded:
    """Where weights came from. averaged: whether they are the moving average."""

    checkpoint: Path
    step: int
    averaged: bool
    state: dict[str, Any]


def load_weights(
    run_or_checkpoint: str | Path,
    model: nn.Module,
    channels: Mapping[str, list[str]],
    *,
    prefer_average: bool = True,
) -> Loaded:
    """Give `model` the weights of a run (its last checkpoint) or of one checkpoint.

    channels: names in order, by role, as `channels_of` gives them for the data at hand. The
    model's input and output channels have no names of their own: another order is an error that
    prints both, and so is any difference of parameter names and shapes.
    """
    checkpoint = find(run_or_checkpoint)
    state = read_state(checkpoint)
    check_channels(state["channels"], channels, str(checkpoint))
    averaged = prefer_average and "average" in groups(checkpoint)
    load_tensors(checkpoint, "average" if averaged else "model", model.state_dict())
    return Loaded(checkpoint, int(state["step"]), averaged, state)


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


def _write_tensors(folder: Path, named: Mapping[str, Tensor]) -> None:
    # safetensors stores dense row-major tensors only.
    dense = {name: value.detach().contiguous() for name, value in named.items()}
    with _single_process():
        try:
            dcp.save(dense, storage_writer=HuggingFaceStorageWriter(path=str(folder)), no_dist=True)
        except CheckpointException as wrapped:
            # torch hides the cause, such as a full disk, in an exception of its own.
            cause, _ = next(iter(wrapped.failures.values()))
            raise cause from None


class _single_process(warnings.catch_warnings):
    """Without torch's warning that one process is one process."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _seal(folder: Path) -> None:
    """Sync all files and record their sizes and digests."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync(path)
        files[str(path.relative_to(folder))] = {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
    (folder / COMPLETE).write_text(json.dumps({"files": files}, indent=1) + "\n")
    _sync(folder / COMPLETE)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(path)


def _verify(checkpoint: Path, part: str) -> None:
    """ValueError unless `part` (a file or folder) holds just what was sealed."""
    try:
        sealed = json.loads((checkpoint / COMPLETE).read_text())["files"]
        wanted = {
            name: (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in sealed.items()
            if name.split("/")[0] == part
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(checkpoint, f"{COMPLETE} is not what was written ({error!r})") from error
    root = checkpoint / part
    there = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    names = {str(path.relative_to(checkpoint)) for path in there}
    wrong = [f"{name} is missing" for name in sorted({*wanted} - names)]
    wrong += [f"{name} was not there when it was written" for name in sorted(names - {*wanted})]
    for name in sorted(names & {*wanted}):
        path, (size, digest) = checkpoint / name, wanted[name]
        found = path.stat().st_size
        if found != size:
            wrong.append(f"{name} has {found} bytes, not {size}")
        elif _sha256(path) != digest:
            wrong.append(f"{name} has another SHA-256 than when it was written")
    if wrong or not wanted:
        raise _damaged(checkpoint, "; ".join(wrong) or f"it has no {part}")


def _damaged(checkpoint: Path, what: str) -> ValueError:
    return ValueError(
        f"checkpoint {checkpoint} is damaged: {what}."
        " Restore it, or move this folder away to go on from the checkpoint before it"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named_steps(run: Path) -> list[Path]:
    folder = run / "checkpoints"
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in names if re.fullmatch(r"step-\d{8,}", path.name)]


def _shape(entry: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "has none" if entry is None else f"{entry[0]} {str(entry[1]).removeprefix('torch.')}"
