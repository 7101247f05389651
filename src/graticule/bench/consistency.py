"""`graticule bench consistency`: losses of the demo's training in several layouts (TERRA, Fig. 8).

Float32 adds in another order in each layout, and training amplifies it. How far apart two runs
drift for that reason alone is seen on one process, by adding up the same batch in smaller parts.
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graticule.bench.rows import Row, Setting
from graticule.bench.worlds import planet_in
from graticule.config import Config
from graticule.data.store import write_json
from graticule.parallel.launch import laid_out, ranks_of
from graticule.parallel.local import LocalRanks
from graticule.recipes import recipe
from graticule.report.drift import drift_curves
from graticule.train.run import rehearsed

TITLE = (
    "losses of 300 float32 steps on the demo planet: how far layouts drift from one process,"
    " against how far one process drifts that adds up its batch in smaller parts"
)
OUT = Path("runs/bench-consistency")
STEPS = 300
LAYOUTS = {
    "WP": "window=4",
    "WP+SP": "window=2,sequence=2",
    "WP+TP": "window=2,tensor=2",
    "WP+SP+TP": "window=2,sequence=2,tensor=2",
}
PARTS = (2, 4, 8)
"""Micro-batches that one process cuts its batch into, for the spread."""


def configs(store: Path) -> dict[str, Config]:
    """By name: one process, the same with its batch in parts, the layouts."""
    base = recipe("demo")
    base = replace(base, data=replace(base.data, store=str(store)))
    parts = {
        f"serial, {n} parts": replace(
            base, train=replace(base.train, batch=base.train.batch // n, accumulation=n)
        )
        for n in PARTS
    }
    layouts = {name: laid_out(base, layout) for name, layout in LAYOUTS.items()}
    return {"serial": base, **parts, **layouts}


def rows(setting: Setting) -> list[Row]:
    """A row a layout. `ours` is its distance from the serial run, `against` the largest distance of
    two serial runs: root mean square, over steps, of the difference of log losses.

    A stopped bench goes on with the runs that it does not have yet.
    """
    out = setting.out or OUT
    store = planet_in(out, setting)
    lines = {name: _run(setting, out, name, config) for name, config in configs(store).items()}
    serial = [name for name in lines if name not in LAYOUTS]
    picture = drift_curves(list(lines.items()), serial=len(serial)).save(out)
    spread = max(
        distance(lines[one], lines[other]) for one, other in itertools.combinations(serial, 2)
    )
    return [
        Row(
            what=name,
            ours=distance(lines[name], lines["serial"]),
            against=spread,
            goal=1.0,
            unit="rms log loss",
            note=f"{layout}; first step {_first(lines[name], lines['serial']):.1e} apart; largest"
            f" of {len(serial)} serial runs' distances; curves in {picture}",
            at_most=True,
        )
        for name, layout in LAYOUTS.items()
    ]


def distance(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """Root mean square, over steps, of the difference of log losses."""
    return math.sqrt(
        statistics.fmean(
            math.log(a["loss"] / b["loss"]) ** 2 for a, b in zip(one, other, strict=True)
        )
    )


def _first(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    return abs(one[0]["loss"] / other[0]["loss"] - 1)


def _run(setting: Setting, out: Path, name: str, config: Config) -> list[dict[str, Any]]:
    path = out / f"{name.replace(', ', '-').replace(' ', '-')}.json"
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["fingerprint"] != config.fingerprint:
            raise ValueError(
                f"{path} is of another configuration than {name} has now; remove it, or name"
                " another folder with --out"
            )
        return kept["lines"]
    setting.say(f"{name}: {STEPS} steps on {ranks_of(config)} processes")
    with LocalRanks(ranks_of(config), timeout_seconds=3600) as ranks:
        lines = ranks.run(rehearsed, config, STEPS)[0]
    write_json(path, {"fingerprint": config.fingerprint, "lines": lines})
    return lines
