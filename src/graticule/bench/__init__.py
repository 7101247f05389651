"""Measurements: ours and a named baseline from one run, medians, as rows of one form."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from graticule.bench import step
from graticule.bench.environment import environment
from graticule.bench.rows import Row

__all__ = ["BENCHES", "Bench", "Row", "run"]


@dataclass(frozen=True)
class Bench:
    """A named measurement. title: what it measures, and against what."""

    title: str
    rows: Callable[[Callable[[str], None]], list[Row]]


BENCHES = {"step": Bench(step.TITLE, step.rows)}


def run(name: str, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """{"bench", "environment", "rows"}; ValueError lists the benches. say: told what goes on."""
    if name not in BENCHES:
        raise ValueError(f"no bench {name!r}; there are {', '.join(BENCHES)}")
    rows = BENCHES[name].rows(say)
    return {"bench": name, "environment": environment(), "rows": [asdict(row) for row in rows]}
