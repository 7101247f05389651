"""What a long forecast tells while it runs: statistics of some leads, as JSON lines beside it.

`f.log.jsonl` has a line for each logged lead of an initial time, and member: valid time, seconds
since the call began, and by channel the mean over the sea (by cell area), the least and the
greatest value, in units. A resumed forecast adds to it; of a lead that was computed twice the last
line counts.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from graticule.variables import Channels

STATISTICS = ("mean", "least", "greatest")


def log_path(forecast: Path) -> Path:
    """Beside a forecast."""
    return forecast.with_suffix(".log.jsonl")


def statistics(fields: np.ndarray, area: np.ndarray) -> np.ndarray:
    """(statistic, channel) float64 of (channel, lat, lon), NaN on land; NaN where all is land.

    area: (lat, 1) or (lat, lon).
    """
    weight = np.broadcast_to(area, fields.shape[1:])
    found = np.full((len(STATISTICS), len(fields)), np.nan)
    # Channel by channel: a mask and a product of all of them would be a second copy of the lead.
    for c, field in enumerate(fields):
        wet = np.isfinite(field)
        if wet.any():
            values, weights = field[wet].astype(np.float64), weight[wet]
            found[:, c] = (values @ weights) / weights.sum(), values.min(), values.max()
    return found


def add(path: Path, channels: Channels, values: np.ndarray, **told: Any) -> None:
    """Add a line, which is with the system on return. values: of `statistics`. told: what else
    the line says, first."""
    by_name = {
        what: {
            name: None if np.isnan(value) else float(value)
            for name, value in zip(channels.names, row, strict=True)
        }
        for what, row in zip(STATISTICS, values, strict=True)
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**told, **by_name}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines, of each initial time, member and lead the last, in this order."""
    lines: dict[tuple[str, int, int], dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # cut off by a kill
        lines[line["init_time"], line.get("member", 0), line["lead"]] = line
    return [lines[key] for key in sorted(lines)]


def chosen(lead: int, leads: int, every: int) -> bool:
    """Whether a lead is among every `every`-th and the last; every = 0: none is."""
    return every > 0 and (lead % every == 0 or lead == leads)
