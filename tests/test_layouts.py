"""Layouts and plans as arrays: every token has one place, and both sides of a route agree."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graticule.mesh import Cut
from graticule.model.windows import WindowGrid
from graticule.parallel.layouts import (
    Layout,
    RoutePlan,
    StripeLayout,
    Topology,
    WindowLayout,
    plan_route,
)

SMALL = st.integers(1, 4)


@st.composite
def grids(draw: st.DrawFn) -> WindowGrid:
    window = draw(SMALL), draw(SMALL)
    boundary = draw(st.sampled_from(["globe", "paper"]))
    padded = window[0] * draw(SMALL), window[1] * draw(SMALL)
    # Whole windows beyond the field occur: model.padded_shape may be larger than need be.
    rows = padded[0] if boundary == "paper" else draw(st.integers(1, padded[0]))
    return WindowGrid((rows, padded[1]), padded, window, boundary)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    fixed = draw(st.none() | st.tuples(st.integers(1, 3), st.integers(1, 3)))
    window = math.prod(fixed) if fixed else draw(st.integers(1, 9))
    return Topology(window, draw(st.integers(1, 3)), draw(st.integers(1, 3)), fixed)


@st.composite
def stripes(draw: st.DrawFn, field: tuple[int, int], ranks: int) -> StripeLayout:
    dim = draw(st.sampled_from(["lat", "lon"]))
    size = field[0 if dim == "lat" else 1]
    inner = draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1))
    return StripeLayout(field, Cut((0, *sorted(inner), size)), dim)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    grid, topology = draw(grids()), draw(topologies())
    regular, shifted = (WindowLayout(grid, topology, shifted) for shifted in (False, True))
    stripe = draw(stripes(grid.tokens, topology.ranks))
    return draw(st.sampled_from([(stripe, regular), (regular, shifted), (stripe, shifted)]))


def plans(source: Layout, target: Layout) -> list[RoutePlan]:
    return [plan_route(source, target, rank) for rank in range(source.ranks)]


def arrived(plans: list[RoutePlan], held: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank holds after the route; -7 in slots that nothing came to."""
    sent = [np.split(x[p.take], np.cumsum(p.send)[:-1]) for p, x in zip(plans, held, strict=True)]
    out = []
    for rank, (plan, x) in enumerate(zip(plans, held, strict=True)):
        here = np.full(plan.slots[1], -7)
        here[plan.kept[1]] = x[plan.kept[0]]
        received = [sent[peer][rank] for peer in range(len(plans))]
        assert tuple(map(len, received)) == plan.receive
        here[plan.place] = np.concatenate(received)
        out.append(here)
    return out


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_every_token_is_in_one_slot_of_the_rank_that_owns_it(pair):
    for layout in pair:
        everything = np.arange(math.prod(layout.field))
        held = [layout.tokens(rank) for rank in range(layout.ranks)]
        tokens = np.concatenate(held)
        assert np.array_equal(np.sort(tokens[tokens >= 0]), everything)
        assert (tokens >= -1).all()
        for rank, ours in enumerate(held):
            assert np.array_equal(np.sort(ours[ours >= 0]),
                                  everything[layout.owner(everything) == rank])  # fmt: skip
            assert (layout.owner(ours)[ours < 0] == -1).all()


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_a_route_brings_every_token_to_its_slot_once_and_its_inverse_brings_it_back(pair):
    source, target = pair
    there = plans(source, target)
    held = [source.tokens(rank) for rank in range(source.ranks)]
    for rank, here in enumerate(arrived(there, held)):
        tokens = target.tokens(rank)
        assert np.array_equal(here, np.where(tokens < 0, -7, tokens))
        assert np.array_equal(there[rank].empty, np.flatnonzero(tokens < 0))
    back = [plan.inverse() for plan in there]
    moved = arrived(back, [target.tokens(rank) for rank in range(source.ranks)])
    for tokens, here in zip(held, moved, strict=True):
        assert np.array_equal(here, np.where(tokens < 0, -7, tokens))


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_only_tokens_of_another_owner_are_sent_and_all_ranks_know_when_none_is(pair):
    source, target = pair
    there = plans(source, target)
    everything = np.arange(math.prod(source.field))
    strangers = int((source.owner(everything) != target.owner(everything)).sum())
    assert sum(sum(plan.send) for plan in there) == strangers
    assert all(plan.send[rank] == plan.receive[rank] == 0 for rank, plan in enumerate(there))
    assert [plan.quiet for plan in there] == [strangers == 0] * source.ranks


@settings(max_examples=100, deadline=None)
@given(grids(), topologies())
def test_window_slots_are_the_chunks_of_the_serial_windows(grid, topology):
    numbers = np.full(grid.padded, -1)
    rows, columns = grid.tokens
    numbers[:rows, :columns] = np.arange(rows * columns).reshape(grid.tokens)
    for shifted in (False, True):
        layout = WindowLayout(grid, topology, shifted)
        down, right = grid.offset if shifted else (0, 0)
        windows = grid.slots(np.roll(numbers, (-down, -right), axis=(0, 1)))
        # In the order of the slots that they come from: rolled back inside each window.
        cut = windows.reshape(-1, *grid.window)
        windows = np.roll(cut, (down, right), axis=(1, 2)).reshape(windows.shape)
        surplus = topology.chunks * layout.chunk - grid.window_tokens
        windows = np.pad(windows, ((0, 1), (0, surplus)), constant_values=-1)
        windows[-1] = -1  # the empty window
        for rank in range(topology.ranks):
            group, chunk = divmod(rank, topology.chunks)
            here = layout.windows(rank)
            assert np.array_equal(here, layout.windows(group * topology.chunks))
            want = windows[here][:, chunk * layout.chunk : (chunk + 1) * layout.chunk]
            assert np.array_equal(layout.tokens(rank), want.ravel())


def test_ragged_windows_are_ranges_whose_lengths_differ_by_one_at_most():
    topology = Topology(4)
    assert [topology.windows((2, 5), part).tolist() for part in range(4)] == [
        [0, 1], [2, 3, 4], [5, 6], [7, 8, 9],
    ]  # fmt: skip
    assert [Topology(3).windows((1, 2), part).size for part in range(3)] == [0, 1, 1]


def test_fixed_windows_go_round_and_empty_ones_fill_the_grid_up():
    topology = Topology(4, fixed=(2, 2))
    # Three rows of three windows, filled up to four of four.
    assert [topology.windows((3, 3), part).tolist() for part in range(4)] == [
        [0, 2, 6, 8], [1, -1, 7, -1], [3, 5, -1, -1], [4, -1, -1, -1],
    ]  # fmt: skip


def test_columns_are_stripes_too():
    stripe = StripeLayout((2, 5), Cut((0, 2, 2, 5)), "lon")
    assert [stripe.tokens(rank).tolist() for rank in range(3)] == [
        [0, 1, 5, 6], [], [2, 3, 4, 7, 8, 9],
    ]  # fmt: skip
    assert stripe.owner(np.array([6, 7, -1])).tolist() == [0, 2, -1]
    assert [stripe.shape(rank) for rank in range(3)] == [(2, 2), (2, 0), (2, 3)]


@pytest.mark.parametrize(("high", "wide"), [(4, 4), (5, 3), (2, 6)])
def test_a_shift_of_whole_window_rows_sends_half_a_window_row_of_each_rank(high, wide):
    ranks, columns = 3, 12 * wide
    grid = WindowGrid((6 * high, columns), (6 * high, columns), (high, wide), "globe")
    topology = Topology(ranks)
    regular, shifted = WindowLayout(grid, topology), WindowLayout(grid, topology, shifted=True)
    for rank, plan in enumerate(plans(regular, shifted)):
        # The north of its windows goes to the rank before, which shifts it into its last ones.
        want = [0] * ranks
        want[(rank - 1) % ranks] = high // 2 * columns
        assert list(plan.send) == want


def test_a_window_row_shared_by_ranks_sends_half_a_window_at_each_of_their_ends_too():
    # One row of 8 windows of 4 x 4 on 2 ranks: columns move by 2, so at both of its ends (the
    # circle has two) half a window goes over; rows meet at the poles and stay with the rank.
    grid = WindowGrid((4, 32), (4, 32), (4, 4), "globe")
    pair = [WindowLayout(grid, Topology(2), shifted) for shifted in (False, True)]
    assert [plan.send for plan in plans(*pair)] == [(0, 4 * 2), (4 * 2, 0)]


@pytest.mark.parametrize("shared", [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("fixed", [None, (2, 2)])
def test_a_shift_sends_no_more_where_ranks_share_windows(shared, fixed):
    grid = WindowGrid((12, 16), (12, 16), (3, 4), "globe")

    def sent(topology: Topology) -> int:
        pair = [WindowLayout(grid, topology, shifted) for shifted in (False, True)]
        return sum(sum(plan.send) for plan in plans(*pair))

    assert sent(Topology(4, *shared, fixed)) == sent(Topology(4, fixed=fixed)) > 0
    assert sent(Topology(1, *shared)) == 0


def test_stripes_that_are_windows_need_no_route():
    grid = WindowGrid((6, 4), (6, 4), (2, 4), "globe")
    regular = WindowLayout(grid, Topology(3))
    stripe = StripeLayout((6, 4), Cut.even(6, 3), "lat")
    assert [plan.identity for plan in plans(stripe, regular)] == [True] * 3
    # One rank whose tokens stay, but not in their slots.
    narrow = WindowLayout(WindowGrid((6, 4), (6, 4), (2, 2), "globe"), Topology(1))
    plan = plan_route(StripeLayout((6, 4), Cut.even(6, 1), "lat"), narrow, 0)
    assert (plan.quiet, plan.identity) == (True, False)
    # Its own tokens stay, others' do not: it has to take part.
    moved = StripeLayout((6, 4), Cut((0, 2, 3, 6)), "lat")
    assert [plan.quiet for plan in plans(moved, regular)] == [False] * 3
    assert plan_route(moved, regular, 0).send == (0, 0, 0)


def test_windows_of_one_token_do_not_shift():
    grid = WindowGrid((2, 3), (2, 3), (1, 1), "globe")
    pair = [WindowLayout(grid, Topology(2), shifted) for shifted in (False, True)]
    assert [plan.identity for plan in plans(*pair)] == [True] * 2


@dataclass(frozen=True)
class _Counted:
    """A layout that notes how many tokens it is asked for."""

    layout: Layout
    asked: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def field(self) -> tuple[int, int]:
        return self.layout.field

    def tokens(self, rank: int) -> np.ndarray:
        tokens = self.layout.tokens(rank)
        self.asked.append(tokens.size)
        return tokens

    def owner(self, tokens: np.ndarray) -> np.ndarray:
        self.asked.append(tokens.size)
        return self.layout.owner(tokens)


def test_a_plan_of_one_rank_looks_at_its_own_tokens_only():
    grid = WindowGrid((576, 1088), (576, 1088), (8, 8), "paper")
    topology = Topology(96)
    stripe = StripeLayout(grid.tokens, Cut.even(576, 96), "lat")
    regular, shifted = WindowLayout(grid, topology), WindowLayout(grid, topology, shifted=True)
    for pair in ((stripe, regular), (regular, shifted)):
        source, target = map(_Counted, pair)
        plan = plan_route(source, target, 41)
        assert max(source.asked + target.asked) == 102 * 64
    # 102 of 136 windows in a row: all of the north of its windows shifts into the row before, and
    # of the south the west of the first window.
    assert sum(plan.send) == 102 * 4 * 8 + 4 * 4
