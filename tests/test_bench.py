"""The form of a measurement, and the step bench on a tiny size."""

import json
import math
from typing import Any

import pytest
import torch

from graticule.bench import BENCHES, Row, Setting, run, step


@pytest.mark.parametrize(
    ("ours", "against", "goal", "ratio", "holds"),
    [
        (3.0, 4.0, 0.75, 0.75, True),
        (2.999, 4.0, 0.75, 0.74975, False),
        (9.0, 3.0, 0.4, 3.0, True),
        (0.0, 5.0, 0.1, 0.0, False),
    ],
)
def test_a_ratio_is_ours_over_theirs_and_holds_from_the_goal_on(
    ours: float, against: float, goal: float, ratio: float, holds: bool
) -> None:
    row = Row(what="x", ours=ours, against=against, goal=goal)
    assert row.ratio == pytest.approx(ratio)
    assert row.holds is holds


@pytest.mark.parametrize(("ours", "holds"), [(1.9, True), (2.0, True), (2.001, False)])
def test_a_row_of_errors_holds_up_to_its_goal(ours: float, holds: bool) -> None:
    assert Row(what="x", ours=ours, against=4.0, goal=0.5, at_most=True).holds is holds


@pytest.mark.parametrize("at_most", [False, True])
def test_a_row_without_a_goal_neither_holds_nor_fails(at_most: bool) -> None:
    row = Row(what="x", ours=3.0, against=4.0, goal=None, at_most=at_most)
    assert (row.ratio, row.holds) == (0.75, None)


def test_an_unknown_bench_lists_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"no bench 'stp'; there are .*step"):
        run("stp")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "GRID", (16, 32))
    monkeypatch.setattr(step, "CHANNELS", 2)
    monkeypatch.setattr(step, "SIDE", 64)
    monkeypatch.setattr(step, "REPEATS", 3)


@pytest.mark.usefixtures("tiny")
def test_the_step_bench_gives_rows_of_the_one_form_as_json() -> None:
    said: list[str] = []
    result = json.loads(json.dumps(run("step", Setting(say=said.append))))
    assert list(result) == ["bench", "environment", "rows"]
    assert result["bench"] == "step"
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["threads"] == torch.get_num_threads()
    assert [row["what"] for row in result["rows"]] == ["fp32", "bf16"]
    for row in result["rows"]:
        assert {"what", "ours", "against", "ratio", "goal", "holds"} <= set(row)
        assert row["unit"] == "GFLOP/s"
        assert row["goal"] == step.GOALS[row["what"]]
        assert row["ratio"] == pytest.approx(row["ours"] / row["against"])
        assert row["holds"] == (row["ratio"] >= row["goal"])
        assert "medians of 3" in row["note"]
    assert said[:2] == ["fp32: warming up", "fp32: 1 of 3"]


@pytest.mark.usefixtures("tiny")
def test_figures_are_flops_over_the_median_of_times_taken_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    steps, products = iter([2.0, 9.0, 1.0]), iter([0.5, 4.0, 2.0, 3.0])

    def seconds(work: Any) -> float:
        name = "step" if work is fake_step else "product"
        order.append(name)
        return next(steps if name == "step" else products)

    def fake_step() -> None:
        return None

    monkeypatch.setattr(step, "_training_step", lambda precision: (fake_step, 6e9))
    monkeypatch.setattr(step, "_seconds", seconds)
    monkeypatch.setattr(step, "GOALS", {"fp32": 0.75})
    (row,) = step.rows(Setting())
    assert order == ["product", *["step", "product"] * 3]
    assert row.ours == pytest.approx(3.0)  # 6 GFLOP in 2 s
    assert row.against == pytest.approx(2 * 64**3 / 3.0 / 1e9)


@pytest.mark.usefixtures("tiny")
def test_a_slow_product_is_timed_twice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_training_step", lambda precision: (lambda: None, 1.0))
    monkeypatch.setattr(step, "_seconds", lambda work: 21.0)
    assert all("medians of 2" in row.note for row in step.rows(Setting()))


@pytest.mark.usefixtures("tiny")
def test_the_benched_step_is_a_whole_training_step() -> None:
    work, flops = step._training_step("fp32")
    first, second = work(), work()
    assert math.isfinite(first.loss)
    assert first.loss != second.loss, "the optimizer changed the weights"
    # 2 per multiply-add: the embedding alone, forward, has 2 x 8 x 16 tokens x 8 in x 256 out.
    assert flops > 3 * 2 * 8 * 16 * 8 * 256


def test_every_bench_says_what_it_measures_against_what() -> None:
    for bench in BENCHES.values():
        assert " against " in bench.title
