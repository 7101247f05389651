"""What a run says while it runs: one JSON line a step, and TensorBoard where it is wanted.

metrics.jsonl               of rank 0, on behalf of all
ranks/metrics-00001.jsonl   of rank 1, and so on: `RANK_KEYS`, which differ from rank to rank

Keys of a line:

step                optimizer step, from 1
loss                summed over leads; `lead_losses` each of them where there are several
scaled_loss         with `train.dynamic_scale`: what was minimised, the channels' factors included,
                    which `loss` is without
gradient_norm       global, before clipping
learning_rate       that this step used
seconds             wall time of this step, waits included, without what comes between steps
samples_per_s       samples of this step, of all ranks, over its wall time
cells_per_s         values predicted and scored per second: samples x leads x output times x
                    predicted channels x lat x lon. It compares runs of different resolution
data_wait_share     share of the wall time spent waiting for the reader
memory_gib          peak so far: CUDA's allocator on a GPU, else this process's resident set
joules              energy of this rank's GPU in this step, where its vendor's library counts it
                    (the extra `energy`; not run yet): of a run, the sum over all ranks' files
loss_scale          float16 only; `skipped` is true where the step was left out
validation_loss     where it was computed after this step
"""

import json
import math
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

FILE, RANKS = "metrics.jsonl", "ranks"
RANK_KEYS = ("step", "seconds", "data_wait_share", "memory_gib", "joules")


class Metrics:
    """Appends to a rank's file, each line flushed.

    rank, ranks: which of how many. after_step: lines past it are dropped, also those of ranks that
    there are no longer: a resumed run takes these steps again. tensorboard: of rank 0 alone.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        after_step: int = 0,
        tensorboard: bool = False,
    ) -> None:
        self._rank = rank
        self._board = _summary_writer(run, after_step) if tensorboard and not rank else None
        path = _file_of(run, rank)
        try:
            _drop_after(path, after_step)
            if rank:
                path.parent.mkdir(exist_ok=True)
            for left in sorted((run / RANKS).glob("metrics-*.jsonl")) if not rank else ():
                if left not in {_file_of(run, other) for other in range(ranks)}:
                    _drop_after(left, after_step)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error

    def write(self, metrics: dict[str, Any]) -> None:
        """One step's line. Numbers that are not finite become null: JSON has no others."""
        if self._rank:
            metrics = {key: metrics[key] for key in RANK_KEYS if key in metrics}
        line = json.dumps(plain(metrics))
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            # The rest of the line waits in the buffer: closing tries again and fails again.
            with suppress(OSError):
                self._file.close()
            raise _unwritable(Path(self._file.name), error) from error
        if self._board:
            for key, value in metrics.items():
                if isinstance(value, float):
                    self._board.add_scalar(key, value, metrics["step"])
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's `metrics.jsonl`."""
    return read_lines(run / FILE)


def _file_of(run: Path, rank: int) -> Path:
    return run / RANKS / f"metrics-{rank:05d}.jsonl" if rank else run / FILE


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of one JSON table a line, each with its `step`."""
    # A crash of the machine can leave bytes at the end that are no text.
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.splitlines()
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            int(values["step"])
            metrics.append(values)
        except (ValueError, TypeError, KeyError):
            # A killed process leaves half a line at the end, and nowhere else.
            if number < len(lines):
                raise ValueError(
                    f"{path}: line {number} is not the JSON of a step; remove that line"
                ) from None
    return metrics


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"cannot write {path}: {error}; make room or access, then resume from the last checkpoint"
    )


def memory_gib(device: torch.device) -> float:
    """Peak memory so far, GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def plain(value: Any) -> Any:
    """As JSON holds it: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in read_lines(path) if line["step"] <= step]
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _summary_writer(run: Path, after_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "train.tensorboard=true needs TensorBoard: pip install 'graticule[tensorboard]'"
        ) from None
    return SummaryWriter(log_dir=str(run / "tensorboard"), purge_step=after_step + 1)
