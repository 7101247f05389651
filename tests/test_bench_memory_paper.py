"""The published memory figures beside ours, on a field small enough to count by hand."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from graticule.bench import BENCHES, Row, memory_paper
from graticule.bench.memory_paper import (
    GIB,
    PUBLISHED,
    Budget,
    Published,
    peak_gib,
    printed,
    profile_of,
    rows_of,
    volumes,
)
from graticule.memory.costs import ProfileCosts
from graticule.memory.plan import Plan
from graticule.memory.profile import Profile
from graticule.memory.published import checkpoint_plan, lead_of, offloading

FIELD = 2 * 3 * 64 * 64
TOKENS = 2 * 32 * 8 * 8
"""f and a: three channels of 64 x 64 points; 32 features of 8 x 8 tokens; both in float16."""
CASE = Published(4, 1, {}, 1.0, (Budget(1, 1, (0, 1, 0), 37, 1, 1),) * 2)


@pytest.fixture(scope="module")
def profiles() -> Iterator[tuple[Profile, Profile]]:
    with pytest.MonkeyPatch.context() as patch:
        small = replace(memory_paper.MODEL, width=32, depth=2, heads=2, norm_groups=2, window=4)
        for name, value in {"MODEL": small, "GRID": (64, 64), "CHANNELS": 3, "RANKS": 1}.items():
            patch.setattr(memory_paper, name, value)
        yield profile_of(CASE, "resident"), profile_of(CASE, "buffered")


def test_all_published_figures_have_a_row() -> None:
    assert "memory-paper" in BENCHES
    assert sum(len(case.uniform) for case in PUBLISHED) == 10
    budgets = [budget for case in PUBLISHED for budget in case.budgets]
    assert len(budgets) == 8
    assert sum(budget.sampling + budget.transformer for budget in budgets) == pytest.approx(351.6)


def test_what_goes_to_the_host_is_counted_from_what_enters_the_units(
    profiles: tuple[Profile, Profile],
) -> None:
    _, profile = profiles
    costs = ProfileCosts(profile)
    # D0: f; each block: 2 a; U0: 2 a. Nine leads, and of the tenth D0 and a block.
    found = volumes(profile, offloading(costs, (0, 1, 0), 9 * 4 + 2))
    assert found == (10 * FIELD + 18 * TOKENS, 19 * 2 * TOKENS)
    # D1: f + a + 2 a; both blocks as one: 2 a; U1: 2 a + b + 2 b + 2 b with b = 4 a.
    found = volumes(profile, offloading(costs, (1, 2, 1), 9 * 8 + 4))
    assert found == (10 * FIELD + (9 * 25 + 3) * TOKENS, 10 * 2 * TOKENS)


def test_input_buffering_saves_nine_fields_of_eleven(profiles: tuple[Profile, Profile]) -> None:
    resident, buffered = profiles
    plan = Plan((lead_of(resident.units, (0, 1, 0)),) * 10)
    saved = resident.timeline(plan).peak_bytes - buffered.timeline(plan).peak_bytes
    assert saved == 9 * FIELD


def test_a_lead_more_keeps_the_state_the_difference_and_the_boundaries(
    profiles: tuple[Profile, Profile],
) -> None:
    profile = profiles[1]
    timeline = profile.timeline(Plan((lead_of(profile.units, (0, 1, 0)),) * 10))
    begins = {lead: row for what, lead, row in timeline.marks if what == "forward"}
    ends = [int(timeline.levels[begins[lead]].sum()) for lead in (5, 6)]
    # 1 f, which is the next boundary too; float32 difference 2 f; two blocks and U0, 2 a each.
    assert 0 <= ends[1] - ends[0] - (3 * FIELD + 6 * TOKENS) < 0.01 * FIELD


def test_rows_hold_where_the_figures_are_met_and_miss_where_not(
    profiles: tuple[Profile, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_paper, "GRID", (64, 64))
    monkeypatch.setattr(memory_paper, "CHANNELS", 3)
    resident, buffered = profiles
    uniform = peak_gib(resident, Plan((lead_of(resident.units, (0, 1, 0)),) * 10))
    plan = checkpoint_plan(ProfileCosts(resident))
    planned = peak_gib(resident, plan)
    budget = 0.9 * peak_gib(buffered, plan)
    missed = Budget(budget, 0.5 * budget, (0, 1, 0), 37, 0.1, 0.1)
    case = Published(4, 1, {1: uniform, 2: 1.1 * uniform}, planned, (missed,) * 2)
    found: dict[str, Row] = {}
    for row in rows_of(case, resident, buffered):
        found[row.what] = row
    name = f"p4-dmp1-{budget:g}"
    assert found["fig13-p4-dmp1-tseg1"].holds
    assert not found["fig13-p4-dmp1-tseg2"].holds
    assert found["plan-p4-dmp1"].holds
    assert found["buffer-p4-dmp1"].ours == 9
    assert found[f"fig14-{name}"].ours <= budget
    assert not found[f"fig14-{name}"].holds
    assert not found[f"table6-{name}-sampling"].holds
    assert {row.what.partition("-")[0] for row in found.values()} == {
        "fig13", "plan", "buffer", "fig14", "table6",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gib", "figure"), [(22.748, 22.8), (4.34462, 4.3), (72.475, 72.5), (9.721, 9.7), (5.379, 5.4)]
)
def test_volumes_are_rounded_as_the_table_has_them(gib: float, figure: float) -> None:
    assert printed(round(gib * GIB)) == figure


def test_a_row_may_have_to_be_near_its_goal_on_either_side() -> None:
    def row(ours: float) -> Row:
        return Row(what="x", ours=ours, against=100.0, goal=1.0, within=0.02)

    assert [row(ours).holds for ours in (97.0, 98.5, 101.5, 103.0)] == [False, True, True, False]
