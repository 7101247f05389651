"""`train --profile N`: some steps looked at closely, with the numbers that any run computes.

Of the steps that a session takes, from its first one on:

1, 2, 3, 4      warm up: nothing is attached. 2 to 4 are what the profiled ones are compared with
5               its memory is traced (`memory/trace.py`), which slows it down: it is timed nowhere
6, ..., 5 + N   timed by `torch.profiler`

RUN/profile/trace.json    the N steps in Chrome's format, for Perfetto and other viewers
RUN/profile/profile.json  what follows from them: `Profiler._summary`
RUN/profile/profile.txt   the same in words, as the command prints it

Another process than the first one writes its rank into these names.
"""

import json
import logging
import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from graticule.memory.apply import Memory
from graticule.memory.trace import ACTIVATIONS, INPUTS, TEMPORARIES, MemoryTrace, trace_memory
from graticule.train.advice import Measured, advice
from graticule.train.optimizer import Average
from graticule.train.split import PARTS, STEP, operations, split
from graticule.train.task import Task

WARM_UP = 5
"""Steps before the timed ones; the last of them traces memory."""
POINTS, OPERATIONS = 400, 10
FOLDER, SUMMARY, TRACE, TEXT = "profile", "profile.json", "trace.json", "profile.txt"
T = TypeVar("T")
_log = logging.getLogger(__name__)


def require_steps(count: int, out: Path, taken: int, steps: int) -> None:
    """ValueError unless `count` steps can be profiled of those after `taken` up to `steps`."""
    if count < 1:
        raise ValueError(f"--profile {count}: profile at least 1 step")
    left, needed = steps - taken, WARM_UP + count
    if left < needed:
        most = left - WARM_UP
        raise ValueError(
            f"--profile {count} needs {needed} steps, {WARM_UP} to warm up and {count} to profile,"
            f" and {left} are left of train.steps={steps}: set train.steps to at least"
            f" {taken + needed}" + (f", or profile {most} at most" if most > 0 else "")
        )
    if (out / FOLDER).exists():
        raise ValueError(
            f"{out / FOLDER} exists already and is not overwritten: move it away, or profile in"
            " a new run"
        )


class Profiler:
    """Takes a session's steps, one call of `run` each, and writes the profile when it is due.

    count: steps to profile; 0: `run` does nothing but take the step.
    """

    def __init__(
        self,
        count: int,
        out: Path,
        task: Task,
        optimizer: torch.optim.Optimizer,
        average: Average | None,
        memory: Memory | None = None,
        *,
        after_step: int,
    ) -> None:
        self._count, self._folder, self._task = count, out / FOLDER, task
        self._optimizer, self._average, self._first = optimizer, average, after_step + 1
        # On a CPU boundaries on the host lie in the same memory as all else.
        self._elsewhere = memory.host.owned if memory and memory.host else tuple
        self._taken = 0
        self._memory: MemoryTrace | None = None
        self._profile: torch.profiler.profile | None = None
        self._seconds: list[float] = []
        self._cpu_seconds: list[float] = []

    def run(self, step: Callable[[], T]) -> T:
        """What `step` returns."""
        if self._taken >= WARM_UP + self._count or not self._count:
            return step()
        device, number = self._task.device, self._first + self._taken
        self._taken += 1
        began = time.process_time()
        if self._taken == WARM_UP:
            result, self._memory = trace_memory(
                step, self._owned, device=device, elsewhere=self._elsewhere
            )
        elif self._profile:
            with record_function(f"{STEP}{number}"):
                result = step()
                if device.type == "cuda":
                    # Otherwise its last kernels would run in the next step's time.
                    torch.cuda.synchronize(device)
        else:
            result = step()
        self._cpu_seconds.append(time.process_time() - began)
        return result

    def took(self, seconds: float) -> None:
        """Wall time of the step just taken. Between steps, so that none is charged for it, the
        profiler starts or ends."""
        if len(self._seconds) == self._taken:
            return
        self._seconds.append(seconds)
        if self._taken == WARM_UP:
            kinds = [ProfilerActivity.CPU]
            if self._task.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()
        elif self._taken == WARM_UP + self._count:
            assert self._profile is not None
            profile, self._profile = self._profile, None
            profile.stop()
            self._write(profile)

    def close(self) -> None:
        """Let go of the profiler where the run ends early; there is no profile then."""
        if self._profile:
            self._profile.stop()
            self._profile = None
        if self._count and self._taken < WARM_UP + self._count:
            _log.warning(
                "the run ended before its profile: %d of %d steps were taken",
                self._taken, WARM_UP + self._count,
            )  # fmt: skip

    def _owned(self) -> dict[str, Iterable[Tensor]]:
        objective, model = self._task.objective, self._task.model
        constants = [objective.statics, objective.weights.cell, objective.weights.wet]
        for part in (model, objective.inputs, objective.forcing, objective.labels):
            if isinstance(part, torch.nn.Module):
                constants += part.buffers()
        state = self._optimizer.state.values()
        return {
            "parameters": list(model.parameters()),
            "optimizer": [v for values in state for v in values.values() if torch.is_tensor(v)],
            "average": list(self._average.tensors.values()) if self._average else [],
            "constants": constants,
        }

    def _write(self, profile: torch.profiler.profile) -> None:
        trace, summary, text = (_of_rank(name) for name in (TRACE, SUMMARY, TEXT))
        try:
            self._folder.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(self._folder / trace))
            events = json.loads((self._folder / trace).read_text())["traceEvents"]
            found = self._summary(events)
            (self._folder / text).write_text(describe(found) + "\n")
            # Last: whoever sees it sees a whole profile.
            (self._folder / summary).write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise ValueError(
                f"cannot write the profile to {self._folder}: {error}; make room or access, remove"
                " that folder and profile again"
            ) from error
        _log.info("profile of steps %d to %d: %s", found["first_step"],
                  found["first_step"] + self._count - 1, self._folder / text)  # fmt: skip

    def _summary(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        """The plain values of profile.json; times are means per step, but for `overhead`."""
        assert self._memory is not None
        memory, seconds = self._memory, split(events)
        found = operations(events)
        cpu_seconds = statistics.fmean(self._cpu_seconds[WARM_UP:])
        at_peak = memory.at(memory.peak)
        device, settings = self._task.device, self._task.config.train
        allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        growing = sum(at_peak[owner] for owner in (INPUTS, ACTIVATIONS, TEMPORARIES))
        measured = Measured(
            device=device.type, seconds=seconds, cpu_seconds=cpu_seconds, operations=found,
            threads=torch.get_num_threads(), cores=_cores(), load=os.getloadavg()[0],
            peak_bytes=max(memory.peak_bytes, allocated or 0),
            fixed_bytes=memory.peak_bytes - growing, memory_bytes=_memory_of(device),
            kernels_bf16=_kernels_bf16(device), precision=settings.precision,
            batch=settings.batch, accumulation=settings.accumulation,
        )  # fmt: skip
        return {
            "steps": self._count,
            "first_step": self._first + WARM_UP,
            "device": str(device),
            "threads": measured.threads,
            "cores": measured.cores,
            "load": measured.load,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "overhead": {
                # The first step also makes the optimizer's state.
                "plain_steps": WARM_UP - 2,
                "plain_seconds": statistics.median(self._seconds[1 : WARM_UP - 1]),
                "profiled_seconds": statistics.median(self._seconds[WARM_UP:]),
                "plain_cpu_seconds": statistics.median(self._cpu_seconds[1 : WARM_UP - 1]),
                "profiled_cpu_seconds": statistics.median(self._cpu_seconds[WARM_UP:]),
            },
            "operations": [vars(operation) for operation in found[:OPERATIONS]],
            "memory": {
                "step": self._first + WARM_UP - 1,
                "peak_bytes": memory.peak_bytes,
                "peak_at_seconds": float(memory.seconds[memory.peak]),
                "allocator_peak_bytes": allocated,
                "owners": at_peak,
                "timeline": [[at, owners] for at, owners in memory.timeline(POINTS)],
            },
            "advice": advice(measured),
        }


def read_profile(run: Path) -> dict[str, Any]:
    """profile.json of a run's first process."""
    return json.loads((run / FOLDER / SUMMARY).read_text())


def describe(profile: Mapping[str, Any]) -> str:
    """A profile (the values of profile.json) in words, for a terminal of 80 columns."""
    blocks = (_describe_split, _describe_operations, _describe_memory, _describe_advice)
    return "\n\n".join("\n".join(block(profile)) for block in blocks)


def _describe_split(profile: Mapping[str, Any]) -> list[str]:
    first, count, seconds = profile["first_step"], profile["steps"], profile["seconds"]
    where = f"{profile['device']}, {_count(profile['threads'], 'thread')}"
    overhead = profile["overhead"]
    which = f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"
    lines = [
        f"{which} on {where}; means of a step",
        f"{'step':15}{_ms(seconds['step'])}{1:7.0%}",
    ]
    lines += [
        f"  {part.replace('_', ' '):13}{_ms(seconds[part])}{_share(seconds[part], seconds['step'])}"
        for part in PARTS
    ]
    busy = profile["cpu_seconds"] / seconds["step"]
    lines.append(f"{'CPU time':15}{_ms(profile['cpu_seconds'])}  {busy:.2f} cores busy")
    for kind, name in (("seconds", "wall"), ("cpu_seconds", "CPU")):
        plain, profiled = overhead[f"plain_{kind}"], overhead[f"profiled_{kind}"]
        more = profiled / plain - 1 if plain else 0.0
        lines.append(
            f"{name + ', median':15}{_ms(profiled)}  {_ms(plain).strip()} in the"
            f" {overhead['plain_steps']} steps before ({more:+.1%})"
        )
    return lines


def _describe_operations(profile: Mapping[str, Any]) -> list[str]:
    lines = [f"{'most costly operations':40}{'a step':>12}  share     calls"]
    for operation in profile["operations"]:
        lines.append(
            f"  {operation['name'][:38]:38}{_ms(operation['seconds'])}"
            f"{operation['share']:7.1%}{operation['calls']:10,.1f}"
        )
    return lines


def _describe_memory(profile: Mapping[str, Any]) -> list[str]:
    memory = profile["memory"]
    peak = memory["peak_bytes"]
    lines = [f"memory of tensors in step {memory['step']}: {_mib(peak)} at the peak, of which"]
    lines += [
        f"  {_LETTERS[owner]} {owner:13}{_mib(size)}{_share(size, peak)}"
        for owner, size in memory["owners"].items()
        if any(held[owner] for _, held in memory["timeline"])
    ]
    if memory["allocator_peak_bytes"] is not None:
        lines.append(
            f"CUDA's allocator: {_mib(memory['allocator_peak_bytes'])} at the peak of all steps so"
            " far, scratch and rounding included"
        )
    return [*lines, *_chart([held for _, held in memory["timeline"]], peak)]


def _describe_advice(profile: Mapping[str, Any]) -> list[str]:
    lines = ["try first"]
    for number, text in enumerate(profile["advice"], start=1):
        lines += textwrap.wrap(
            text, 80, initial_indent=f"  {number}. ", subsequent_indent="     ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines


_LETTERS = {
    "parameters": "P", "optimizer": "O", "average": "M", "constants": "C", "gradients": "G",
    "inputs": "I", "activations": "A", "temporaries": "T",
}  # fmt: skip
_COLUMNS, _ROWS = 60, 10


def _chart(held: list[dict[str, int]], peak: int) -> list[str]:
    """Bytes by owner, stacked as letters, over the step's events from first to last."""
    columns = []
    for column in range(min(_COLUMNS, len(held))):
        first = column * len(held) // min(_COLUMNS, len(held))
        end = (column + 1) * len(held) // min(_COLUMNS, len(held))
        columns.append(max(held[first:end], key=lambda owners: sum(owners.values())))
    lines = []
    for row in reversed(range(_ROWS)):
        height, cells = (row + 0.5) / _ROWS * peak, ""
        for owners in columns:
            level, letter = 0, " "
            for owner, size in owners.items():
                if level <= height < level + size:
                    letter = _LETTERS[owner]
                level += size
            cells += letter
        label = _mib(peak) if row == _ROWS - 1 else ""
        lines.append(f"{label:>13} |{cells}".rstrip())
    lines.append(f"{'0':>9}     +{'-' * len(columns)}")
    lines.append(f"{'':15}operations of the step, from first to last")
    return lines


def _of_rank(name: str) -> str:
    """A file's name for this process."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if together else 0
    stem, dot, kind = name.partition(".")
    return f"{stem}-rank{rank}{dot}{kind}" if rank else name


def _cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _kernels_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:9,.1f} ms"


def _mib(size: float) -> str:
    return f"{size / 2**20:9,.1f} MiB"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:7.1%}"
