"""What a plan is, what it holds at each moment, and what it costs."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graticule.memory.plan import (
    SHARED,
    LeadPlan,
    Peak,
    Plan,
    Segment,
    SegmentCost,
    levels,
    peak_of,
    plain_plan,
    price_of,
)
from small_costs import Slow, TableCosts, lead_plans, random_costs, swin_costs

UNITS = ("embed", "down.0", "down.1", *(f"blocks.{i}" for i in range(10)),
         "up", "up.0", "up.1", "recover")  # fmt: skip


def cut(*cuts: int, action: str = "recompute") -> LeadPlan:
    return tuple(
        Segment(first, last, action)  # type: ignore[arg-type]
        for first, last in pairwise(cuts)
    )


# What a plan is


@pytest.mark.parametrize(
    ("leads", "why"),
    [
        ((), "at least one lead"),
        (((),), "at least one segment"),
        (((Segment(1, 2, "keep"),),), "begins at unit 1 and the one before ends at 0"),
        (((Segment(0, 1, "keep"), Segment(2, 3, "keep")),), "begins at unit 2 .* ends at 1"),
        (((Segment(0, 2, "keep"), Segment(1, 3, "keep")),), "begins at unit 1 .* ends at 2"),
        ((cut(0, 3), cut(0, 2)), "lead 2 covers 2 units and lead 1 covers 3"),
    ],
)
def test_a_plan_with_holes_is_refused(leads: tuple[LeadPlan, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Plan(leads)


@pytest.mark.parametrize(
    ("segment", "why"),
    [
        ((2, 2, "keep"), "empty"),
        ((-1, 2, "keep"), "empty"),
        ((0, 1, "forget"), "none of keep, recompute, offload, simple"),
        ((0, 1, "recompute", 0), "tiles=0"),
        ((0, 1, "keep", 2), "tiles=2 .* action='keep'"),
    ],
)
def test_a_segment_that_makes_no_sense_is_refused(segment: tuple, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Segment(*segment)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_plan_comes_back_from_json(data: st.DataObject) -> None:
    some = lead_plans(4, offload=True, tiled=(1, 2))
    leads = data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=6))
    plan = Plan(tuple(leads), data.draw(st.booleans()))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_equal_leads_are_written_once() -> None:
    data = Plan((cut(0, 3),) * 8 + (cut(0, 1, 3),) * 2).to_dict()
    assert [entry["times"] for entry in data["leads"]] == [8, 2]


def test_a_plan_of_another_make_is_refused_by_its_keys() -> None:
    data = Plan((cut(0, 3),)).to_dict()
    with pytest.raises(ValueError, match="unknown: color"):
        Plan.from_dict({**data, "color": "blue"})
    del data["lead_wise"]
    with pytest.raises(ValueError, match="missing or unknown: lead_wise"):
        Plan.from_dict(data)


# In words


def test_a_plan_is_told_in_words() -> None:
    coarse = cut(0, 3, 8, 13, 17)
    fine = (
        *cut(0, 3, action="offload"),
        *cut(3, 6, 9, 12, 13),
        *cut(13, 15),
        *cut(15, 16, 17, action="keep"),
    )
    assert Plan((coarse,) * 8 + (fine,)).in_words(UNITS).split("\n") == [
        "leads 1-8: embedding and down-sampling recomputed as one, blocks recomputed in fives, "
        "up-sampling and recovery recomputed as one",
        "lead 9: embedding and down-sampling recomputed from boundaries on the host as one, blocks "
        "recomputed in threes, up and up.0 recomputed as one, up.1 and recovery kept",
    ]


def test_words_tell_uneven_groups_tiles_and_lead_wise() -> None:
    lead = (Segment(0, 3, "recompute", 4), *cut(3, 5, 7, 8, 9, 10, 11, 12, 13), *cut(13, 17))
    told = Plan((lead,), lead_wise=True).in_words(UNITS)
    assert told.startswith("lead-wise: each lead once without gradient")
    assert "as one in 4 row tiles, blocks recomputed in groups of 2 x 2 and 6 x 1, " in told


def test_words_tell_parts_of_parts() -> None:
    lead = (*cut(0, 2), *cut(2, 4, 7), *cut(7, 17, action="keep"))
    assert Plan((lead,)).in_words(UNITS) == (
        "lead 1: embedding and down.0 recomputed as one, down.1 and blocks.0 recomputed as one, "
        "blocks 1-3 recomputed as one, blocks 4-9, up-sampling and recovery kept"
    )


def test_words_need_the_units_of_the_plan() -> None:
    with pytest.raises(ValueError, match="of 3 units, not of 17"):
        Plan((cut(0, 3),)).in_words(UNITS)


# Levels


def by_hand() -> TableCosts:
    """Two units, two leads, numbers that can be told apart in a sum."""
    one, two = Segment(0, 1, "offload"), Segment(1, 2, "recompute")
    table = {
        ("first", one): SegmentCost(1, 10, 20, 5.0, host_bytes=300),
        ("first", two): SegmentCost(40, 50, 60, 6.0),
        ("last", one): SegmentCost(2, 11, 21, 5.0, host_bytes=300),
        ("last", two): SegmentCost(41, 51, 61, 6.0),
    }
    for kind in ("first", "last"):
        for unit in (0, 1):
            plain = Segment(unit, unit + 1, "recompute")
            table.setdefault((kind, plain), SegmentCost(0, 0, 0, 5.0 + unit))
    losses = {"first": SegmentCost(4, 7, 8), "last": SegmentCost(5, 8, 9)}
    return TableCosts(
        ("down.0", "blocks.0"), 2, table, losses, base=1000, update_peak=2, field=100,
        forward_flops=12.0, backward_flops=24.0, lead_peak=30, lead_wise_base=1500,
    )  # type: ignore[arg-type] # fmt: skip


LEAD = (Segment(0, 1, "offload"), Segment(1, 2, "recompute"))


def test_each_moment_of_a_step_holds_what_came_before_it() -> None:
    found = list(levels(by_hand(), Plan((LEAD, LEAD))))
    assert found == [
        Peak(1010, 1, LEAD[0], "forward"),
        # The boundary of the first segment is on the device until this one is over.
        Peak(1000 + 1 + 300 + 50, 1, LEAD[1], "forward"),
        Peak(1000 + 1 + 40 + 7, 1, None, "forward"),
        Peak(1045 + 11, 2, LEAD[0], "forward"),
        Peak(1045 + 2 + 300 + 51, 2, LEAD[1], "forward"),
        Peak(1045 + 2 + 41 + 8, 2, None, "forward"),
        Peak(1045 + 2 + 41 + 9, 2, None, "backward"),
        # It comes back before the backward of the segment after its own.
        Peak(1045 + 2 + 300 + 61, 2, LEAD[1], "backward"),
        Peak(1045 + 21, 2, LEAD[0], "backward"),
        Peak(1000 + 1 + 40 + 8, 1, None, "backward"),
        Peak(1000 + 1 + 300 + 60, 1, LEAD[1], "backward"),
        Peak(1000 + 20, 1, LEAD[0], "backward"),
        Peak(1002, 0, None, "update"),
    ]
    assert peak_of(by_hand(), Plan((LEAD, LEAD))) == found[7]


def test_a_lead_wise_step_holds_one_field_a_lead() -> None:
    found = list(levels(by_hand(), Plan((LEAD, LEAD), lead_wise=True)))
    assert [(p.bytes, p.lead, p.phase) for p in found] == [
        # The last lead is differentiated at once: it has no first pass.
        (1630, 1, "first pass"),
        (1700 + 11, 2, "forward"),
        (1700 + 2 + 300 + 51, 2, "forward"),
        (1700 + 2 + 41 + 8, 2, "forward"),
        (1700 + 2 + 41 + 9, 2, "backward"),
        (1700 + 2 + 300 + 61, 2, "backward"),
        (1700 + 21, 2, "backward"),
        (1600 + 10, 1, "forward"),
        (1600 + 1 + 300 + 50, 1, "forward"),
        (1600 + 1 + 40 + 7, 1, "forward"),
        (1600 + 1 + 40 + 8, 1, "backward"),
        (1600 + 1 + 300 + 60, 1, "backward"),
        (1600 + 20, 1, "backward"),
        (1002, 0, "update"),
    ]


def test_the_update_can_be_the_peak() -> None:
    costs = replace(by_hand(), update_peak=10_000)
    assert peak_of(costs, Plan((LEAD, LEAD))) == Peak(11_000, 0, None, "update")


def test_lead_wise_grows_by_one_field_a_lead_and_nothing_else() -> None:
    peaks = []
    for leads in (4, 5, 9):
        costs = swin_costs(depth=4, leads=leads)
        lead = plain_plan(costs).leads[0]
        peaks.append(peak_of(costs, Plan((lead,) * leads, lead_wise=True)).bytes)
    assert peaks[1] - peaks[0] == costs.field
    assert peaks[2] - peaks[0] == 5 * costs.field


def test_a_plan_for_another_model_is_refused() -> None:
    costs = random_costs(0, units=3, leads=2)
    for plan in (Plan((cut(0, 3),)), Plan((cut(0, 2),) * 2)):
        with pytest.raises(ValueError, match=r"has 2 leads and 3 units"):
            peak_of(costs, plan)
        with pytest.raises(ValueError, match=r"has 2 leads and 3 units"):
            price_of(costs, plan, Slow())


# Prices


def test_extra_compute_is_counted_from_units_recomputed_alone() -> None:
    costs = swin_costs(depth=10, leads=3)
    plain = plain_plan(costs)
    assert price_of(costs, plain, Slow()).extra_compute == 0
    kept = Plan((cut(0, 17, action="keep"),) * 3)
    again = price_of(costs, plain, Slow()).recomputed_flops
    step = 3 * 3 * costs.forward_flops + again
    assert price_of(costs, kept, Slow()).extra_compute == pytest.approx(-again / step)
    twice = price_of(costs, replace(plain, lead_wise=True), Slow())
    assert twice.extra_compute == pytest.approx(2 * costs.forward_flops / step)
    # One more forward of two leads of three; it stops early in this model too.
    assert 0.16 < twice.extra_compute < 0.187


def test_a_price_is_recomputing_waiting_and_a_share_of_all_copies() -> None:
    price = price_of(by_hand(), Plan((LEAD, LEAD)), Slow(1.0, to_host=4.0, to_device=3.0))
    assert price.recomputed_flops == 22
    assert (price.offload_sampling, price.offload_transformer) == (600, 0)
    # To the host beside 5 s of its own forward; back beside the next segment's backward, 2 x 6 s,
    # and its recomputing, 6 s.
    waiting = 2 * ((300 / 4 - 5) + (300 / 3 - 18))
    assert price.waiting_seconds == pytest.approx(waiting)
    assert price.seconds == pytest.approx(22 + waiting + SHARED * 2 * (300 / 4 + 300 / 3))


def test_copies_that_hide_are_not_waited_for() -> None:
    price = price_of(by_hand(), Plan((LEAD, LEAD)), Slow(1.0, to_host=60.0, to_device=20.0))
    assert price.waiting_seconds == 0
    assert price.seconds == pytest.approx(22 + SHARED * 2 * (300 / 60 + 300 / 20))


def test_the_last_boundary_of_a_lead_comes_back_beside_nothing() -> None:
    costs = by_hand()
    last = Segment(1, 2, "offload")
    lead = (Segment(0, 1, "recompute"), last)
    costs.table["first", last] = costs.table["last", last] = SegmentCost(0, 0, 0, 6.0, 60)
    price = price_of(costs, Plan((lead, lead)), Slow(1.0, to_host=10.0, to_device=20.0))
    assert price.waiting_seconds == pytest.approx(2 * 60 / 20)
    assert (price.offload_sampling, price.offload_transformer) == (0, 120)
