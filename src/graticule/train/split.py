"""From a profiler's trace to where a step's time went.

Each moment of a step counts once, for the first of these that holds:

forward, backward, optimizer   an operation runs that was started there
other            an operation runs that was started elsewhere in the step
communication    nothing of the above, but an operation of communication runs
copy             nothing of the above, but a copy from host to device runs
data_wait        nothing of the above, and the step waits for the reader
idle             none of these: Python between operations, the launching of kernels, or a thread
                 that the system does not let run

So the parts add up to the step. On a CPU an operation is what PyTorch runs in the step's own
thread, from its outermost call to its return. On a GPU it is a kernel, a copy or a fill on any
stream, and it belongs where it was launched: only what of copies and communication is *not*
overlapped by computation counts as theirs, whatever the host does meanwhile.

The trace is a list of events of Chrome's format, as `torch.profiler` writes it: times in
microseconds; `cat`, the kind of event; `user_annotation`, the ranges that the step names.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

STEP = "ProfilerStep#"
"""Of a step's range, before its number: the name by which viewers know a step."""
PARTS = (
    "data_wait", "copy", "forward", "backward", "communication", "optimizer", "other", "idle",
)  # fmt: skip
_FIRST = ("forward", "backward", "optimizer", "other", "communication", "copy", "data_wait", "idle")
_RANGES = {
    "data wait": "data_wait", "copy": "copy", "backward": "backward", "optimizer": "optimizer",
}  # fmt: skip
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Mean per step. seconds: its own, without operations it calls. calls: how many."""

    name: str
    seconds: float
    share: float
    calls: float


@dataclass(frozen=True, kw_only=True)
class _Interval:
    """In nanoseconds: whole numbers, which add up exactly."""

    start: int
    end: int
    name: str


def split(trace: Iterable[Event]) -> dict[str, float]:
    """Mean seconds of a step by `PARTS`, and `step`, their sum.

    ValueError if the trace has no step.
    """
    events = _complete(trace)
    steps, ranges = _steps(events), _Ranges(events)
    busy = _on_device(events, ranges) if _has_device(events) else _on_host(events, ranges)
    total = dict.fromkeys(PARTS, 0)
    for step in steps:
        for part, nanoseconds in _sweep(step, [*busy, *ranges.waits]).items():
            total[part] += nanoseconds
    seconds = {part: value / len(steps) / 1e9 for part, value in total.items()}
    return {"step": sum(total.values()) / len(steps) / 1e9} | seconds


def operations(trace: Iterable[Event]) -> list[Operation]:
    """All operations in the steps, the most costly first.

    On a GPU the time of an operation is that of the kernels it launched, and kernels that no
    operation launched have their own names. Shares are of the mean step; on a GPU with several
    streams they can add up to more than 1.
    """
    events = _complete(trace)
    steps = _steps(events)
    own = _device_times(events) if _has_device(events) else _host_times(events, _thread(events))
    length = sum(step.end - step.start for step in steps)
    seconds, calls = defaultdict[str, int](int), defaultdict[str, int](int)
    for at, name, nanoseconds in own:
        if any(step.start <= at < step.end for step in steps):
            seconds[name] += nanoseconds
            calls[name] += 1
    found = [
        Operation(
            name=name.removeprefix("aten::"), seconds=value / len(steps) / 1e9,
            share=value / length, calls=calls[name] / len(steps),
        )
        for name, value in seconds.items()
    ]  # fmt: skip
    return sorted(found, key=lambda operation: (-operation.seconds, operation.name))


def _complete(trace: Iterable[Event]) -> list[Event]:
    """Events with a duration, outer ones before what they hold."""
    events = [event for event in trace if event.get("ph") == "X" and "cat" in event]
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def _interval(event: Event, name: str) -> _Interval:
    start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
    return _Interval(start=start, end=end, name=name)


def _is_step(event: Event) -> bool:
    return event["cat"] == "user_annotation" and event["name"].startswith(STEP)


def _steps(events: list[Event]) -> list[_Interval]:
    steps = [_interval(event, event["name"]) for event in events if _is_step(event)]
    if not steps:
        raise ValueError(f"the trace has no range whose name starts with {STEP}: no step to split")
    return steps


def _thread(events: list[Event]) -> Any:
    """Of the steps."""
    return next(event["tid"] for event in events if _is_step(event))


def _has_device(events: list[Event]) -> bool:
    return any(event["cat"] in _ON_DEVICE for event in events)


class _Ranges:
    """The step's named ranges: which part a moment of its thread belongs to."""

    def __init__(self, events: list[Event]) -> None:
        thread = _thread(events)
        marks: list[tuple[int, str]] = []
        open_: list[_Interval] = []

        def close(until: int | None) -> None:
            while open_ and (until is None or open_[-1].end <= until):
                end = open_.pop().end
                marks.append((end, open_[-1].name if open_ else "other"))

        self.waits: list[_Interval] = []
        for event in events:
            if event["cat"] != "user_annotation" or event["tid"] != thread:
                continue
            name = event["name"]
            part = "forward" if name.startswith("forward lead") else _RANGES.get(name)
            if part is None:
                continue
            interval = _interval(event, part)
            close(interval.start)
            open_.append(interval)
            marks.append((interval.start, part))
            if part == "data_wait":
                self.waits.append(interval)
        close(None)
        self._times, self._parts = [at for at, _ in marks], [part for _, part in marks]

    def part(self, at: int) -> str:
        """Of the innermost range at a time, `other` outside all of them."""
        index = bisect.bisect_right(self._times, at) - 1
        return self._parts[index] if index >= 0 else "other"


def _on_host(events: list[Event], ranges: _Ranges) -> list[_Interval]:
    """The outermost operations of the step's thread."""
    thread, found, end = _thread(events), list[_Interval](), 0
    for event in events:
        if event["cat"] == "cpu_op" and event["tid"] == thread:
            interval = _interval(event, "")
            if interval.end > end:
                part = ranges.part(interval.start)
                found.append(_Interval(start=max(interval.start, end), end=interval.end, name=part))
                end = interval.end
    return found


def _on_device(events: list[Event], ranges: _Ranges) -> list[_Interval]:
    launched = {
        event["args"]["correlation"]: round(event["ts"] * 1000)
        for event in events
        if event["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    found = []
    for event in events:
        if event["cat"] not in _ON_DEVICE:
            continue
        if event["name"].startswith("nccl"):
            part = "communication"
        elif event["name"].startswith("Memcpy HtoD"):
            part = "copy"
        else:
            at = launched.get(event["args"].get("correlation"))
            part = "other" if at is None else ranges.part(at)
            if part in ("copy", "data_wait"):  # the device computes all the same
                part = "other"
        found.append(_interval(event, part))
    return found


def _sweep(step: _Interval, intervals: list[_Interval]) -> dict[str, int]:
    """Nanoseconds of a step by the first part of `_FIRST` that is under way."""
    edges: list[tuple[int, int, str]] = []
    for interval in intervals:
        start, end = max(interval.start, step.start), min(interval.end, step.end)
        if start < end:
            edges += [(start, 1, interval.name), (end, -1, interval.name)]
    edges.append((step.end, 0, "idle"))
    running, times = dict.fromkeys(_FIRST, 0), dict.fromkeys(PARTS, 0)
    running["idle"] = 1  # where there is nothing else
    at = step.start
    for edge, change, part in sorted(edges):
        times[next(part for part in _FIRST if running[part])] += edge - at
        running[part] += change
        at = edge
    return times


def _host_times(events: list[Event], thread: Any) -> list[tuple[int, str, int]]:
    """(start, name, own nanoseconds) of every operation of a thread."""
    own: list[tuple[int, str, int]] = []
    open_: list[tuple[int, int]] = []  # (end, index in `own`)
    for event in events:
        if event["cat"] != "cpu_op" or event["tid"] != thread:
            continue
        interval = _interval(event, event["name"])
        while open_ and open_[-1][0] <= interval.start:
            open_.pop()
        length = interval.end - interval.start
        if open_:
            at, name, before = own[open_[-1][1]]
            own[open_[-1][1]] = (at, name, before - length)
        open_.append((interval.end, len(own)))
        own.append((interval.start, interval.name, length))
    return own


def _device_times(events: list[Event]) -> list[tuple[int, str, int]]:
    """(start, name of the launching operation, nanoseconds) of everything on the device."""
    names: dict[Any, str] = {
        event["args"]["External id"]: event["name"]
        for event in events
        if event["cat"] == "cpu_op" and "External id" in event["args"]
    }
    found = []
    for event in events:
        if event["cat"] in _ON_DEVICE:
            name = names.get(event["args"].get("External id")) or str(event["name"])
            interval = _interval(event, name)
            found.append((interval.start, name, interval.end - interval.start))
    return found
