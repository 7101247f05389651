"""Where a forecast's time went, and how many years it simulated in it."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS_A_YEAR = 365.25 * 86400
PARTS = {
    "read": "reading forcing, normalising it and bringing it to the device",
    "compute": "the model, and whether what it says is finite",
    "copy": "bringing predictions to units, to the host and together",
    "write": "the forecast file",
    "restart": "what a resumed forecast begins with",
    "log": "statistics of each logged lead, and progress",
    "other": "anything else",
}
"""In the order in which they are told. Waiting for other processes counts where it is done."""


class Clock:
    """Wall and CPU seconds of this process by part; a part within another is not in the other.

    On a GPU a part ends when its kernels have: `compute` and `copy` end with numbers on the host.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.cpu_seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["other"]
        self._since = _now()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._turn()
        self._open.append(part)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def stop(self) -> float:
        """Wall seconds since it was made."""
        self._turn()
        return sum(self.seconds.values())

    def _turn(self) -> None:
        wall, cpu = _now()
        self.seconds[self._open[-1]] += wall - self._since[0]
        self.cpu_seconds[self._open[-1]] += cpu - self._since[1]
        self._since = wall, cpu


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one call cost: a resumed forecast's, of what was left.

    simulated_years: of 365.25 days, from the real dates of the leads made now, of all initial
    times and members together. steps: of one sample and member, made now. members: of the ensemble;
    none: no ensemble. forward_flops: of such a step; 0: not known. parts, cpu_parts: seconds by
    part (`PARTS`): wall of the first process, CPU of all. joules: of all processes' GPUs; none: not
    known.
    """

    simulated_years: float
    steps: int
    members: int | None
    forward_flops: float
    parts: Mapping[str, float]
    cpu_parts: Mapping[str, float]
    joules: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def cpu_seconds(self) -> float:
        return sum(self.cpu_parts.values())

    @property
    def simulated_years_per_day(self) -> float:
        return self.simulated_years / (self.seconds / 86400) if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples of one member that go on by a model step: sample/s."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def forecasts_per_second(self) -> float:
        """Samples of all members that go on by a model step: forecast/s."""
        return self.samples_per_second / (self.members or 1)

    @property
    def flops_per_second(self) -> float | None:
        """Sustained: of all processes, over all that the call did; none: not known."""
        known = self.forward_flops and self.steps
        return self.samples_per_second * self.forward_flops if known else None

    @property
    def peak_flops_per_second(self) -> float | None:
        """The same over the time that the first process computed."""
        compute = self.parts["compute"]
        known = self.forward_flops and self.steps and compute
        return self.steps * self.forward_flops / compute if known else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "simulated_years": self.simulated_years,
            "members": self.members,
            "steps": self.steps,
            "forecasts_per_second": self.forecasts_per_second,
            "samples_per_second": self.samples_per_second,
            "flops_per_second": self.flops_per_second,
            "peak_flops_per_second": self.peak_flops_per_second,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "joules": self.joules,
            "simulated_years_per_day": self.simulated_years_per_day,
            "parts": {
                part: {"seconds": self.parts[part], "cpu_seconds": self.cpu_parts[part]}
                for part in self.parts
            },
        }

    def append(self, path: Path, **told: Any) -> None:
        """Add a line to the file of JSON lines at `path`; told: what else it says."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**told, **self.to_dict()}) + "\n")


def timing_path(forecast: Path) -> Path:
    """Beside a forecast: a line of `Timing` for each call that wrote of it and ended."""
    return forecast.with_suffix(".timing.jsonl")


def told(timing: Mapping[str, Any]) -> str:
    """`Timing.to_dict()` in lines: years a day, forecasts a second, and the share and seconds of
    each part."""
    seconds = timing["seconds"]
    if not timing["simulated_years"]:
        return "it was complete already: nothing was computed"
    parts = ", ".join(
        f"{part} {times['seconds'] / seconds:.1%} ({times['seconds']:.3g} s,"
        f" {times['cpu_seconds']:.3g} CPU-s)"
        for part, times in timing["parts"].items()
        if times["seconds"]
    )
    return (
        f"{timing['simulated_years_per_day']:,.4g} simulated years per day:"
        f" {timing['simulated_years']:.4g} years in {seconds:.4g} s"
        f" ({timing['cpu_seconds']:.4g} CPU-seconds)\n{_rates(timing)}\n{parts}"
    )


def _rates(timing: Mapping[str, Any]) -> str:
    told = f"{timing['forecasts_per_second']:,.4g} forecast/s"
    if timing["members"] is not None:
        members = f"{timing['members']} member{'s' if timing['members'] > 1 else ''}"
        told += f" of {members}, {timing['samples_per_second']:,.4g} sample/s"
    told += " (a forecast is an initial time that goes on by a model step)"
    if timing["flops_per_second"] is not None:
        told += f"; {_flops(timing['flops_per_second'])} sustained"
    if timing["peak_flops_per_second"] is not None:
        told += f", {_flops(timing['peak_flops_per_second'])} while computing"
    if timing["joules"] is not None:
        told += f"; {timing['joules'] / 1e3:,.4g} kJ"
    return told


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.4g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:,.4g} GFLOP/s"


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
