"""What lies in the folder of a run, read for a report. What is not there is None or empty.

A run that was killed has less than a finished one, and is reported on all the same: only a folder
without a configuration is no run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graticule.config import Config, fingerprint, from_dict
from graticule.train import checkpoint
from graticule.train.progress import read_metrics

STAGES = "stages.jsonl"
PLAN = "report.json"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """description: run.json. metrics: lines of metrics.jsonl. stages: lines of stages.jsonl.

    last: the newest complete checkpoint; state: its state.json. profile: profile/profile.json.
    troubles: what could not be read, in words.
    """

    path: Path
    config: Config
    description: dict[str, Any]
    metrics: list[dict[str, Any]]
    stages: list[dict[str, Any]]
    last: Path | None
    state: dict[str, Any]
    profile: dict[str, Any] | None
    troubles: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "RunFolder":
        """ValueError where `path` holds no configuration or a file is damaged."""
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} holds no run (no config.json there); name the folder that `graticule"
                " train` wrote, or one with a report.json"
            )
        troubles: list[str] = []
        last, state = None, {}
        if checkpoint.complete(path):
            try:
                last = checkpoint.find(path)
                state = checkpoint.read_state(last)
            except ValueError as error:
                troubles.append(str(error))
        return cls(
            path=path,
            config=from_dict(_read_json(path / "config.json") or {}),
            description=_read_json(path / "run.json") or {},
            metrics=read_metrics(path),
            stages=_read_stages(path / STAGES),
            last=last,
            state=state,
            profile=_read_json(path / "profile" / "profile.json"),
            troubles=troubles,
        )

    @property
    def fingerprint(self) -> str:
        """Of the configuration, as the run itself wrote it."""
        saved = self.description.get("fingerprints", {})
        return saved.get("config", self.config.fingerprint)

    @property
    def steps(self) -> int:
        """The last step that was taken."""
        return max((line["step"] for line in self.metrics), default=0)

    @property
    def start_from(self) -> Path | None:
        """The folder of the run whose weights this one started with."""
        named = self.config.train.start_from
        if not named:
            return None
        path = Path(named)
        return path.parents[1] if path.parent.name == "checkpoints" else path

    def weights(self) -> dict[str, str]:
        """By group of the last checkpoint, 16 hexadecimal digits of what was sealed there."""
        if self.last is None:
            return {}
        files = json.loads((self.last / checkpoint.COMPLETE).read_text())["files"]
        groups: dict[str, dict[str, str]] = {}
        for name, entry in files.items():
            if "/" in name:
                groups.setdefault(name.split("/")[0], {})[name] = entry["sha256"]
        return {group: fingerprint(groups[group]) for group in ("model", "average")
                if group in groups}  # fmt: skip

    def step_seconds(self) -> float:
        """What the steps of the metrics took together, waits included."""
        settings = self.config.train
        samples = settings.batch * settings.accumulation
        return sum(
            samples / line["samples_per_s"] for line in self.metrics if line.get("samples_per_s")
        )

    def stage_seconds(self) -> dict[str, float]:
        """By stage: training over all sessions, other stages as they went the last time.

        A session that was killed left no line: training is at least what its steps took.
        """
        found: dict[str, float] = {}
        for line in self.stages:
            added = found.get("train", 0.0) if line["stage"] == "train" else 0.0
            found[line["stage"]] = added + float(line["seconds"])
        steps = self.step_seconds()
        if steps > found.get("train", 0.0):
            found = {"train": steps, **{k: v for k, v in found.items() if k != "train"}}
        return found


def lineage(run: RunFolder) -> tuple[list[RunFolder], str]:
    """The runs that a run's weights come from, nearest first, and what is in the way of more."""
    found: list[RunFolder] = []
    seen = {run.path.resolve()}
    here = run
    while (earlier := here.start_from) is not None:
        if earlier.resolve() in seen:
            break
        seen.add(earlier.resolve())
        try:
            here = RunFolder.read(earlier)
        except ValueError as error:
            return found, f"The run that {here.config.name} started from cannot be read: {error}"
        found.append(here)
    return found, ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which run a folder is about. others: label -> run to compare with. seconds: by stage."""

    run: Path
    others: dict[str, Path]
    seconds: dict[str, float]


def plan_of(folder: Path, compare: Sequence[str] = ()) -> Plan:
    """Of a run's folder, or of one whose report.json names a main run and others beside it.

    compare: LABEL=RUN each, after those of report.json.
    """
    values = _read_json(folder / PLAN) or {}
    try:
        run = folder / values["run"] if "run" in values else folder
        others = {str(k): folder / v for k, v in values.get("compare", {}).items()}
        seconds = {str(k): float(v) for k, v in values.get("seconds", {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f'{folder / PLAN} is damaged ({error}); it holds {{"run": NAME, "compare": {{LABEL:'
            ' NAME}, "seconds": {STAGE: SECONDS}}'
        ) from error
    for text in compare:
        label, equals, path = text.partition("=")
        if not (label and equals and path):
            raise ValueError(
                f"--compare {text}: write LABEL=RUN, for instance pretrained=runs/first"
            )
        if label in others:
            raise ValueError(f"--compare {text}: there is another run of that label")
        others[label] = Path(path)
    return Plan(run=run, others=others, seconds=seconds)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; restore it or move it away") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it holds {values!r:.60}, not a table")
    return values


def _read_stages(path: Path) -> list[dict[str, Any]]:
    """Whole lines; a killed process leaves half a line at the end."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    stages = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            stages.append({"stage": str(values["stage"]), "seconds": float(values["seconds"])})
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise ValueError(
                    f"{path}: line {number} is not the JSON of a stage; remove that line"
                ) from None
    return stages
