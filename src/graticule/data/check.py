"""Check a store before anything is trained on it: times, values, mask, chunks, statistics."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from graticule.data.shardfile import content_digest
from graticule.data.statistics import FILE_NAME, Statistics
from graticule.data.store import DIGESTS, Store
from graticule.variables import Channel, Channels

Severity = Literal["info", "warning", "error"]
Policy = Literal["error", "drop-window"]
POLICIES: dict[str, Policy] = {
    "gap": "drop-window", "hole": "drop-window", "lost": "error", "changed": "error",
    "mask": "error", "range": "error", "statistics": "error",
}  # fmt: skip
"""What a fault means unless said otherwise. `drop-window`: samples whose window holds it are left
out (of holes, where the run has data.holes=drop-window), and it is no error here."""
_DROPPED = ("gap", "hole")
LARGEST_NORMALISED = 20.0
"""Standard deviations from the mean that point to a wrong unit or a lost fill. A warning only: the
Black Sea's salinity at 50 m is 21 away in a global climatology."""


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    kind: gap, hole, lost, changed, mask, range, constant, statistics, extreme. channel: empty
    where it concerns the whole store. dates: ISO 8601, all of them.
    """

    kind: str
    severity: Severity
    channel: str
    dates: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Row:
    """One channel or static over the times that were checked; NaN where nothing could be read."""

    name: str
    units: str
    low: float
    mean: float
    high: float
    wet_fraction: float
    dates_with_holes: int


@dataclass(frozen=True)
class Report:
    """What was found in a store."""

    store: str
    fingerprint: str
    num_times: int
    first: str
    last: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    policies: Mapping[str, Policy]

    @property
    def ok(self) -> bool:
        """Whether nothing that was found is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def lines(self) -> list[str]:
        """A table of channels, then what was found, worst first."""
        width = max([len(row.name) for row in self.rows] + [7])
        units = max([len(row.units) for row in self.rows] + [5])
        lines = [
            f"{self.store}: {self.num_times} times, {self.first} to {self.last}",
            f"{'channel':{width}}  {'units':{units}}  {'lowest':>11}  {'mean':>11}  {'highest':>11}"
            f"  {'wet':>6}  holes",
        ]
        lines += [
            f"{row.name:{width}}  {row.units:{units}}  {row.low:11.5g}  {row.mean:11.5g}"
            f"  {row.high:11.5g}  {row.wet_fraction:6.1%}  {row.dates_with_holes:5d}"
            for row in self.rows
        ]
        order = ("error", "warning", "info")
        for finding in sorted(self.findings, key=lambda f: order.index(f.severity)):
            lines.append(f"{finding.severity}: {finding.kind}: {finding.text}")
        lines.append(
            "policy: " + ", ".join(f"{kind} {policy}" for kind, policy in self.policies.items())
        )
        counts = [sum(f.severity == severity for f in self.findings) for severity in order]
        lines.append(f"{counts[0]} errors, {counts[1]} warnings, {counts[2]} notes")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain values; a number that is not there is None."""
        rows = [
            {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in asdict(r).items()}
            for r in self.rows
        ]
        findings = [{**asdict(f), "dates": list(f.dates)} for f in self.findings]
        return {
            "store": self.store, "fingerprint": self.fingerprint, "ok": self.ok,
            "num_times": self.num_times, "first": self.first, "last": self.last,
            "channels": rows, "findings": findings, "policies": dict(self.policies),
        }  # fmt: skip


def check(
    store: Store,
    *,
    times: np.ndarray | None = None,
    policies: Mapping[str, Policy] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read every value of the store at the times with these indices (all of them by default).

    Errors: chunks that are lost or torn, numbers that are not those written, values outside the
    bounds of their channel, values where the mask has none, statistics of another store.
    Warnings: holes (what to do with them is the run's policy), constant channels, statistics that
    are missing or of other times, values that are more than 20 standard deviations from the mean.
    Gaps in time are for information: windows never cross them.
    policies: of kinds of fault that differ from `POLICIES`: `error` makes gaps or holes errors.
    """
    chosen = {**POLICIES, **(policies or {})}
    for kind, policy in chosen.items():
        if kind not in POLICIES or policy not in ("error", "drop-window"):
            raise ValueError(
                f"policy {kind}={policy}: kinds are {', '.join(POLICIES)}; a policy is error or"
                " drop-window"
            )
        if policy == "drop-window" and kind not in _DROPPED:
            raise ValueError(
                f"policy {kind}={policy}: only windows with a {' or a '.join(_DROPPED)} are dropped"
                " by a run; write the store again without what is wrong"
            )
    indices = np.arange(len(store.times)) if times is None else np.unique(np.asarray(times))
    if indices.size == 0:
        raise ValueError("no times to check")
    findings = _gaps(store, indices)
    scan = _Scan(store)
    for done, index in enumerate(indices, 1):
        scan.add(int(index))
        if progress is not None:
            progress(done, int(indices.size))
    findings += scan.findings()
    statics = _Scan(store, static=True)
    if len(store.statics):
        fields = store.read_statics(store.statics.names)
        for position, plane in enumerate(fields):
            statics.add_plane(position, plane, int(indices[0]))
        findings += statics.findings()
    findings += _statistics(store, [scan, statics])
    return Report(
        store=store.path.name,
        fingerprint=store.fingerprint,
        num_times=int(indices.size),
        first=_date(store, int(indices[0])),
        last=_date(store, int(indices[-1])),
        rows=(*scan.rows(), *statics.rows()),
        findings=tuple(
            replace(finding, severity="error")
            if finding.kind in _DROPPED and chosen[finding.kind] == "error"
            else finding
            for finding in findings
        ),
        policies=chosen,
    )


class _Scan:
    """Extremes, sums, holes and faults of each channel (or static), gathered plane by plane."""

    def __init__(self, store: Store, static: bool = False) -> None:
        self.store, self.static = store, static
        self.channels: Channels = store.statics if static else store.channels
        num = len(self.channels)
        self.low, self.high = np.full(num, np.inf), np.full(num, -np.inf)
        self.low_at, self.high_at = np.zeros(num, int), np.zeros(num, int)
        self.total, self.count = np.zeros(num), np.zeros(num, np.int64)
        self.planes = np.zeros(num, np.int64)
        self.holes: list[dict[int, int]] = [{} for _ in range(num)]
        self.changed: list[dict[int, int]] = [{} for _ in range(num)]
        self.beyond: list[dict[int, int]] = [{} for _ in range(num)]
        self.example: list[str] = [""] * num
        self.lost: dict[int, list[tuple[int, str]]] = {}
        self.other: dict[int, int] = {}
        self._written = _written_digests(store)

    def add(self, index: int) -> None:
        """One time of all channels. Where it cannot be read whole, each channel is tried alone."""
        try:
            stored = self.store.read_stored(index)
        except ValueError:
            for channel in range(len(self.channels)):
                try:
                    plane = self.store.read(index, [channel])[0]
                except ValueError as error:
                    self.lost.setdefault(index, []).append((channel, str(error)))
                else:
                    self.add_plane(channel, plane, index)
            return
        if self._written and content_digest(stored) != self._written[index]:
            self.other[index] = 1
        # Plane by plane: all of them as float64 are 6.6 GB at 1/12 degree.
        for channel, plane in enumerate(stored):
            values = self.store.packing.take([channel]).unpack(plane[None])[0]
            self.add_plane(channel, values, index)

    def add_plane(self, channel: int, plane: np.ndarray, index: int) -> None:
        present = np.isfinite(plane)
        values = plane[present].astype(np.float64)
        self.planes[channel] += present.sum() if self.static else 0
        if not self.static:
            wet = self.store.wet[channel]
            hole = int((wet & ~present).sum())
            if hole:
                self.holes[channel][index] = hole
            outside = int((present & ~wet).sum())
            if outside or hole != self.store.missing[index, channel]:
                self.changed[channel][index] = outside
        if values.size == 0:
            return
        low, high = float(values.min()), float(values.max())
        if low < self.low[channel]:
            self.low[channel], self.low_at[channel] = low, index
        if high > self.high[channel]:
            self.high[channel], self.high_at[channel] = high, index
        self.total[channel] += values.sum()
        self.count[channel] += values.size
        self._hold_to_bounds(channel, plane, index)

    def _hold_to_bounds(self, channel: int, plane: np.ndarray, index: int) -> None:
        what: Channel = self.channels[channel]
        least = -np.inf if what.low is None else what.low
        most = np.inf if what.high is None else what.high
        wrong = (plane < least) | (plane > most)
        if not wrong.any():
            return
        if not self.example[channel]:
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            grid = self.store.grid
            self.example[channel] = (
                f"{plane[row, column]:g} {what.units} at lat {grid.lat[row]:g}, lon"
                f" {grid.lon[column]:g}"
            )
        self.beyond[channel][index] = int(wrong.sum())

    def rows(self) -> list[Row]:
        rows = []
        for i, channel in enumerate(self.channels):
            some = bool(self.count[i])
            share = self.planes[i] / np.prod(self.store.grid.shape) if self.static else float(
                self.store.wet[i].mean()
            )  # fmt: skip
            rows.append(Row(
                channel.name, channel.units,
                float(self.low[i]) if some else np.nan,
                float(self.total[i] / self.count[i]) if some else np.nan,
                float(self.high[i]) if some else np.nan,
                float(share), len(self.holes[i]),
            ))  # fmt: skip
        return rows

    def findings(self) -> list[Finding]:
        store, found = self.store, []
        for index, faults in self.lost.items():
            date = _date(store, index)
            if len(faults) == len(self.channels) > 1:
                text = f"all channels on {date}: {faults[0][1]}"
                found.append(Finding("lost", "error", "", (date,), text))
                continue
            found += [Finding("lost", "error", self.channels.names[position], (date,), text)
                      for position, text in faults]  # fmt: skip
        if self.other:
            dates = _dates(store, self.other)
            found.append(Finding(
                "changed", "error", "", dates,
                f"the numbers on {_few(dates)} are not those that were written; write the store"
                " again",
            ))  # fmt: skip
        for i, channel in enumerate(self.channels):
            name = channel.name
            if self.changed[i]:
                dates = _dates(store, self.changed[i])
                found.append(Finding(
                    "mask", "error", name, dates,
                    f"{name} does not have its values where the mask says on {_few(dates)}"
                    f" ({sum(self.changed[i].values())} values outside the mask); the store was"
                    " changed after it was written",
                ))  # fmt: skip
            if self.beyond[i]:
                dates = _dates(store, self.beyond[i])
                place = "" if self.static else f" on {_few(dates)}"
                found.append(Finding(
                    "range", "error", name, () if self.static else dates,
                    f"{name} has {sum(self.beyond[i].values())} values outside"
                    f" {_bound(channel.low)} to {_bound(channel.high)} {channel.units}{place}; the"
                    f" first is {self.example[i]}: are the units right?",
                ))  # fmt: skip
            if self.holes[i]:
                dates, wet = _dates(store, self.holes[i]), int(store.wet[i].sum())
                most = max(self.holes[i].values())
                found.append(Finding(
                    "hole", "warning", name, dates,
                    f"{name} has no value at up to {most} of {wet} wet cells on {_few(dates)}",
                ))  # fmt: skip
            if self.count[i] > 1 and self.low[i] == self.high[i]:
                found.append(Finding(
                    "constant", "warning", name, (),
                    f"{name} is {self.low[i]:g} {channel.units} everywhere; it will be"
                    " normalised to 0",
                ))  # fmt: skip
        return found


def _written_digests(store: Store) -> list[str]:
    """Of each step's stored numbers; none of a store that was written before they were kept."""
    path = store.path / DIGESTS
    return json.loads(path.read_text()) if path.is_file() else []


def _gaps(store: Store, indices: np.ndarray) -> list[Finding]:
    axis = store.times
    jumps = [i for i in indices[indices > 0] if axis.segments[i] != axis.segments[i - 1]]
    if not jumps:
        return []
    dates = tuple(_date(store, int(i)) for i in jumps)
    step = "a month" if axis.step_seconds is None else f"{axis.step_seconds} s"
    return [Finding(
        "gap", "info", "", dates,
        f"{len(jumps)} gaps in time (step {step}): from {_date(store, int(jumps[0]) - 1)} to"
        f" {dates[0]}{' and others' if len(jumps) > 1 else ''}; windows do not cross them",
    )]  # fmt: skip


def _statistics(store: Store, scans: Sequence[_Scan]) -> list[Finding]:
    if not (store.path / FILE_NAME).is_file():
        text = "the store has no statistics yet; compute them for the training times"
        return [Finding("statistics", "warning", "", (), text)]
    try:
        statistics = Statistics.load(store)
    except ValueError as error:
        return [Finding("statistics", "error", "", (), str(error))]
    found = []
    if store.splits.get("train"):
        try:
            training = np.flatnonzero(store.times.within(store.splits["train"]))
            statistics.check_times(store, training)
        except ValueError as error:
            found.append(Finding("statistics", "warning", "", (), str(error)))
    for scan in scans:
        if not len(scan.channels):
            continue
        mean, scale = statistics.aligned(scan.channels.names)
        scale = np.where(statistics.constant(scan.channels.names), np.nan, scale)
        for i, name in enumerate(scan.channels.names):
            least, most = scan.low[i], scan.high[i]
            if np.isnan(scale[i]) and scan.count[i] and not least == mean[i] == most:
                text = (
                    f"{name} is {mean[i]:g} in training and {least:g} to {most:g} here: it will be"
                    " normalised to 0, a constant; train where it varies, or set data.without"
                )
                found.append(Finding("constant", "warning", name, (), text))
            for value, index in ((least, scan.low_at[i]), (most, scan.high_at[i])):
                distance = abs(value - mean[i]) / scale[i]
                if np.isfinite(distance) and distance > LARGEST_NORMALISED:
                    date = _date(store, int(index))
                    found.append(Finding(
                        "extreme", "warning", name, () if scan.static else (date,),
                        f"{name} = {value:g} {scan.channels[i].units} on {date} is {distance:.3g}"
                        f" standard deviations from the mean {mean[i]:g} (more than"
                        f" {LARGEST_NORMALISED:g}): are units and statistics right?",
                    ))  # fmt: skip
    return found


def _date(store: Store, index: int) -> str:
    """ISO 8601; midnight is not spelled out."""
    return store.times.date(index).isoformat().removesuffix("T00:00:00")


def _dates(store: Store, indices: dict[int, int]) -> tuple[str, ...]:
    return tuple(_date(store, index) for index in sorted(indices))


def _few(dates: Sequence[str]) -> str:
    shown = ", ".join(dates[:3])
    return shown if len(dates) <= 3 else f"{shown} and {len(dates) - 3} other dates"


def _bound(value: float | None) -> str:
    return "any" if value is None else f"{value:g}"
