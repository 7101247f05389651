"""The samudra bench, tiny: every act has a row, and what a CPU cannot show has no figure."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from graticule.bench import Row, Setting, checkpointing, run, samudra
from graticule.bench.samudra.size import Size
from graticule.data.basin import Ocean
from graticule.recipes import recipe

ROWS = [
    "loader: after / before", "loader: ours / before", "loader: ours / after",
    "waiting: after / before", "training: after / before",
    "waiting: ours / before", "training: ours / before",
    "waiting: ours / after", "training: ours / after",
    "10 times a chunk / 1", "normalise: fused pass / in a worker",
    "log: every tenth / every lead", "log: no / every lead",
    "validation: apart / among the steps",
    "held: simple / none", "CPU: simple / none", "held: full / none", "CPU: full / none",
]  # fmt: skip
NOT_HERE = ["pinned memory", "copies beside kernels", "4 days to 4 hours", "4,800 years a day"]


TINY = Size(
    basin=Ocean(num_lat=24, num_lon=48, num_years=3, spin_up_years=0, dt_seconds=86400),
    repeats=1, samples=2, slow_samples=1, steps=1, batch=1, training_steps=1, workers=0, leads=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("bench")
    mini = recipe("samudra-mini")
    mini = replace(mini, train=replace(mini.train, batch=1, leads_from=()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samudra, "SIZE", TINY)
        patch.setattr(checkpointing, "workload", lambda: mini)
        patch.setattr(checkpointing, "REPEATS", 1)
        result = json.loads(json.dumps(run("samudra", Setting(out=out))))
    assert list(Path(out).iterdir()) == []
    return {row["what"]: row for row in result["rows"]}


def test_every_act_has_a_row_with_the_published_figure_beside_it(rows: dict[str, dict]) -> None:
    assert list(rows) == ROWS + NOT_HERE
    for what in ROWS:
        row = rows[what]
        assert row["ours"] > 0
        assert row["ratio"] == row["ours"] / row["against"]
        assert "published" in row["note"]
        assert row["goal"] is None
    assert "75 %" in rows["waiting: ours / before"]["note"]


def test_what_a_cpu_cannot_show_has_no_figure_and_says_why(rows: dict[str, dict]) -> None:
    for what in NOT_HERE:
        row = rows[what]
        assert (row["ours"], row["against"], row["ratio"], row["holds"]) == (None,) * 4
        assert row["note"].startswith("published")
    assert Row("x", None, 1.0, 2.0).holds is None


def test_shares_of_waiting_are_shares_and_less_is_held_where_more_is_recomputed(
    rows: dict[str, dict],
) -> None:
    for what in ROWS[3:9:2]:
        assert 0 < rows[what]["ours"] < 1
    assert rows["held: full / none"]["ratio"] < rows["held: simple / none"]["ratio"] < 1
    # Four times in a row lie in one chunk of ten or, three times of ten, in two: 13 for 4.
    assert "12.9 planes" in rows["10 times a chunk / 1"]["note"]
