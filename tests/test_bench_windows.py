"""The windows bench: the paper's own figures, counts that can be done by hand, and its rows."""

import json

import pytest

from graticule.bench import Setting, run, windows
from graticule.bench.windows import Assignment, density_aware, fixed, ragged, rectangular
from graticule.parallel.layouts import Topology


def test_padding_of_the_largest_windows_is_what_the_paper_reports() -> None:
    # TERRA, section VII.D: the 2 x 5 windows are padded to 4 x 8.
    assert fixed(16, 128)[0].padding == pytest.approx(280.6, abs=0.05)
    assert fixed(16, 128)[0].windows == (2, 2)
    assert density_aware(16, 128).padding == pytest.approx(18.9, abs=0.05)


def test_the_papers_choices_for_the_largest_windows_are_the_best_balanced() -> None:
    assert density_aware(8, 128).topology == Topology(2, 4)
    assert density_aware(16, 128).topology == Topology(2, 8)
    assert density_aware(16, 128).windows == (5, 5)
    # Ten windows on sixteen ranks leave some without.
    assert ragged(16, 128).windows == (0, 1)


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("side", windows.SIDES)
def test_fixed_padding_is_equation_3(ranks: int, side: int) -> None:
    for one in fixed(ranks, side):
        m, n = one.topology.fixed or (0, 0)
        high, wide = (4 * 2 * side * parts for parts in (m, n))
        points = (-(-2041 // high) * high) * (-(-4320 // wide) * wide)
        assert one.padding == pytest.approx(100 * (points / (2041 * 4320) - 1))


def test_dense_ragged_windows_shift_half_a_window_row_per_rank() -> None:
    # 32 rows of 68 windows of 8 x 8: two whole rows a rank, of which four rows of 544 tokens go.
    one = ragged(16, 8)
    assert one.windows == (136, 136)
    assert one.shift_bytes == [4 * 544 * 1024 * 2] * 16


def test_what_shared_windows_exchange_is_all_but_their_own_share() -> None:
    one = Assignment((128, 128), Topology(2, 4))
    assert one.swap_bytes == 4 * (5 * 128 * 128 // 4) * 1024 * 2 * 3 // 4
    assert ragged(8, 128).swap_bytes == 0


@pytest.mark.parametrize("side", windows.SIDES)
def test_rectangular_windows_pad_no_more_and_are_of_about_the_size(side: int) -> None:
    one = rectangular(side)
    assert one.padding <= ragged(1, side).padding
    # 256 x 540 tokens are the least that whole patches and strides allow.
    assert one.grid.padded == (256, 540)
    assert 0.75 <= one.grid.window_tokens / side**2 <= 1.25


def test_the_windows_bench_gives_rows_of_the_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "SIDES", (128,))
    monkeypatch.setattr(windows, "PLAN_REPEATS", 1)
    said: list[str] = []
    result = json.loads(json.dumps(run("windows", Setting(say=said.append))))
    rows = {row["what"]: row for row in result["rows"]}
    assert list(rows) == [
        *(
            f"{what}, w 128, {ranks} ranks"
            for ranks in (8, 16)
            for what in ("padding", "busiest rank", "shift, busiest", "shift, all",
                         "shift, shared, busiest", "shift, shared, all")
        ),
        "rectangular, w 128",
        "planning",
    ]  # fmt: skip
    padding = rows["padding, w 128, 16 ranks"]
    assert padding["note"].startswith("fixed Topo(4, 4): padding 280.6 %, 2 to 2 windows a rank")
    assert (
        "ragged Topo(2, 1, 8): padding 18.9 %, 5 to 5 windows a rank, shared by 8"
        in (padding["note"])
    )
    assert rows["busiest rank, w 128, 16 ranks"]["ours"] == 5 * 128 * 128 / 8
    assert rows["planning"]["against"] == 0.1
    assert rows["planning"]["ours"] > 0
    assert "576 x 1088 tokens" in rows["planning"]["note"]
    assert said[0] == "windows of 128 x 128 on 8 ranks"
