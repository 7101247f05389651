"""The loader bench on a tiny size: every way of reading gives the same tensors, one form of row."""

import builtins
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.bench import Setting, loader, run


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "GRID": (8, 16), "LEVELS": 1, "TIMES": 12, "REPEATS": 2, "SAMPLES": 2, "SLOW_SAMPLES": 1,
        "STRIPED": (2, 130, 16), "STRIPE_REPEATS": 2,
    }.items():  # fmt: skip
        monkeypatch.setattr(loader, name, value)


@pytest.mark.usefixtures("tiny")
def test_all_ways_are_measured_and_what_was_generated_is_deleted(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    result = run("loader", Setting(out=tmp_path / "made"))
    rows = {row["what"]: row for row in result["rows"]}
    assert list(rows)[: len(loader.GOALS)] == list(loader.GOALS)
    assert rows["ours"]["goal"] == 20.0
    assert rows["ours / floor"]["goal"] == 0.9
    assert rows["ours / floor"]["against"] == rows["floor"]["ours"]
    assert rows["ours"]["against"] == rows["after"]["against"]
    assert all(row["ours"] > 0 and row["against"] > 0 for row in rows.values())
    assert "CPU-seconds a sample" in rows["after"]["note"]
    assert list(rows)[len(loader.GOALS) :] == [
        "stripe-1/4", "stripe-1/4 bytes", "stripe-1/16", "stripe-1/16 bytes",
    ]  # fmt: skip
    # 33 rows from row 69 on lie in two of the five inner chunks, 9 rows in one.
    quarter, sixteenth = rows["stripe-1/4 bytes"], rows["stripe-1/16 bytes"]
    assert quarter["at_most"]
    assert quarter["goal"] == pytest.approx((33 + 64) / 130)
    assert 0 < sixteenth["ratio"] < quarter["ratio"] < 0.7
    assert list((tmp_path / "made").iterdir()) == []
    assert allowed is None or os.sched_getaffinity(0) == allowed


@pytest.mark.usefixtures("tiny")
def test_a_way_that_gives_other_tensors_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        loader, "plainly", lambda mean, std: loader.in_place(mean, np.asarray(std) * 1.001)
    )
    with pytest.raises(AssertionError, match="'floor', 0, 0"):
        run("loader", Setting(out=tmp_path))


def test_without_dask_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *given: Any, **more: Any) -> Any:
        if name == "dask":
            raise ImportError(name)
        return original(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'graticule\[bench\]'"):
        run("loader")
