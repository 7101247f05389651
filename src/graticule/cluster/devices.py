"""What a device holds and achieves. Figures and their sources stand in `devices.toml`.

This machine's CPU is measured instead: a product of two square matrices, and a copy. Plans need
few digits: a step takes its FLOPs / (peak x achieved), and what a copy takes is hidden or not.
"""

import difflib
import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch

USABLE = 0.87
"""Of a device's memory, for a plan: the allocator rounds up and fragments, kernels take scratch,
libraries and the driver hold their own."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one die of it where that has its own memory.

    memory: bytes. half, single: peak FLOPs per second with dense 16-bit and float32 matrices.
    achieved: of the peak, in a whole step. to_host, to_device, memory_rate: bytes per second.
    sources: of these figures. precision: in which the model computes.
    """

    name: str
    memory: int
    half: float
    single: float
    achieved: float
    to_host: float
    to_device: float
    memory_rate: float
    sources: str
    precision: Literal["half", "single"] = "half"

    def __post_init__(self) -> None:
        for field in ("memory", "half", "single", "to_host", "to_device", "memory_rate"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)} of {self.name} must be above 0")
        if not 0 < self.achieved <= 1:
            raise ValueError(f"achieved={self.achieved} of {self.name} must be in (0, 1]")

    @property
    def flops_per_second(self) -> float:
        """What a step achieves."""
        return self.achieved * (self.half if self.precision == "half" else self.single)

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill: `USABLE` of the memory."""
        return int(USABLE * self.memory)


def device(name: str) -> Device:
    """A device by name; `cpu` is measured, once in a process."""
    if name == "cpu":
        return measured_cpu()
    known = _known()
    if name not in known:
        names = device_names()
        near = [each for each in names if each.startswith(name.lower())] or (
            difflib.get_close_matches(name.lower(), names, 1)
        )
        meant = f"did you mean {near[0]}? " if name and near else ""
        raise ValueError(f"no device is named {name!r}; {meant}Known are {', '.join(names)}.")
    return Device(name=name, **known[name])


def device_names() -> tuple[str, ...]:
    return (*_known(), "cpu")


@cache
def measured_cpu() -> Device:
    """This machine, with the threads that PyTorch has now: about half a second.

    Boundaries that are offloaded on a CPU are copied in its memory: one rate for all links.
    """
    side = 256
    half = _product_rate(torch.bfloat16, side)
    single = _product_rate(torch.float32, side)
    source = torch.ones(16 * 2**20)
    target = torch.empty_like(source)
    copied = source.nbytes / _seconds(lambda: target.copy_(source))
    threads = torch.get_num_threads()
    return Device(
        name="cpu",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        half=half,
        single=single,
        achieved=1.0,
        to_host=copied,
        to_device=copied,
        # A copy reads and writes.
        memory_rate=2 * copied,
        sources=f"measured: products of {side} x {side} matrices, a copy of 64 MiB, "
        f"{threads} thread{'s' * (threads > 1)}",
    )


def _product_rate(dtype: torch.dtype, side: int) -> float:
    left, right = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)
    return 2 * side**3 / _seconds(lambda: left @ right)


def _seconds(work: Callable[[], object], enough: float = 0.1) -> float:
    """Of the fastest of a few calls: what else the machine does only adds to it."""
    work()
    best, total, calls = float("inf"), 0.0, 0
    while calls < 3 or (total < enough and calls < 50):
        began = time.perf_counter()
        work()
        taken = time.perf_counter() - began
        best, total, calls = min(best, taken), total + taken, calls + 1
    return best


@cache
def _known() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
