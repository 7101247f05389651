"""Measurements: ours and a named baseline from one run, medians, as rows of one form."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from graticule.bench import (
    beast_comm,
    consistency,
    ensembles,
    loader,
    memory_best,
    memory_paper,
    ocean_skill,
    overhead,
    samudra,
    skill,
    step,
    store,
    windows,
)
from graticule.bench.environment import environment
from graticule.bench.rows import Row, Setting

__all__ = ["BENCHES", "Bench", "Row", "Setting", "run"]


@dataclass(frozen=True)
class Bench:
    """A named measurement. title: what it measures, and against what."""

    title: str
    rows: Callable[[Setting], list[Row]]


BENCHES = {
    "beast-comm": Bench(beast_comm.TITLE, beast_comm.rows),
    "consistency": Bench(consistency.TITLE, consistency.rows),
    "ensembles": Bench(ensembles.TITLE, ensembles.rows),
    "loader": Bench(loader.TITLE, loader.rows),
    "memory-best": Bench(memory_best.TITLE, memory_best.rows),
    "memory-paper": Bench(memory_paper.TITLE, memory_paper.rows),
    "ocean-skill": Bench(ocean_skill.TITLE, ocean_skill.rows),
    "overhead": Bench(overhead.TITLE, overhead.rows),
    "samudra": Bench(samudra.TITLE, samudra.rows),
    "skill": Bench(skill.TITLE, skill.rows),
    "step": Bench(step.TITLE, step.rows),
    "store": Bench(store.TITLE, store.rows),
    "windows": Bench(windows.TITLE, windows.rows),
}


def run(name: str, setting: Setting | None = None) -> dict[str, Any]:
    """{"bench", "environment", "rows"}; ValueError lists the benches."""
    if name not in BENCHES:
        raise ValueError(f"no bench {name!r}; there are {', '.join(BENCHES)}")
    rows = BENCHES[name].rows(setting or Setting())
    return {"bench": name, "environment": environment(), "rows": [asdict(row) for row in rows]}
