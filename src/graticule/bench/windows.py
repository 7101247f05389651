"""`graticule bench windows`: who gets which attention windows, and what that costs.

The assignments of TERRA, Fig. 12, counted instead of timed: the small model (patch 4, stride 2,
1024 features in 16 bits) with windows of 8, 32, 64 and 128 tokens a side on 16 and 32 processes,
two samples side by side, so on 8 and 16 ranks a sample. Fixed: AERIS's round robin, Topo(2, 4),
Topo(4, 4) and, with shared windows, Topo(2, 2, 2), Topo(2, 2, 4). Ragged: Topo(mn, 1).
Density-aware: the Topo(mn/s, 1, s) that leaves the busiest rank the fewest tokens, with the
smallest s among equals; what its all-to-all takes is in the note, and time decides in a real run.

Rows, per number of ranks and window size:

- padding: token slots beyond the field's own, of its points (Eq. 3); ragged against fixed
- busiest rank: the slots that the others wait for; density-aware against the better fixed one
- shift, busiest / all: MiB sent in one shift of one sample; ragged against fixed Topo(m, n)
- shift, shared: density-aware, where it shares windows, against the fixed topology that does. Both
  are cut so that a shift moves no token within a group (see `parallel/layouts.py`)
- rectangular: padding of the best window of about that size against the square one, where better

And planning: CPU seconds for all routes (enter, leave, shift, unshift) of a rank of 96, on
2304 x 4352 points with patch 2 and stride 2, against 0.1 s.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from graticule.bench.rows import Row, Setting
from graticule.mesh import Cut
from graticule.model.swin import smallest_padded_shape
from graticule.model.windows import WindowGrid
from graticule.parallel.layouts import StripeLayout, Topology, WindowLayout, plan_route
from graticule.recipes import recipe

TITLE = (
    "attention windows over 8 and 16 ranks, 8 to 128 tokens a side: padding, busiest rank and bytes"
    " per shift, ragged against fixed; planning all routes of a rank of 96 against 0.1 s"
)
SIDES = (8, 32, 64, 128)
FIXED = {8: ((2, 4), (2, 2)), 16: ((4, 4), (2, 2))}
"""By ranks of a sample: (m, n) of fixed windows, without and with shared windows."""
PLAN_SECONDS, PLAN_RANKS, PLAN_POINTS, PLAN_REPEATS = 0.1, 96, (2304, 4352), 7
BYTES = 2
"""Of a number in 16 bits."""

MODEL = recipe("wenhai-small").swin
GRID = recipe("wenhai-small").data.grid or (0, 0)
FINE = MODEL.patch * MODEL.sampling


@dataclass(frozen=True)
class Assignment:
    """Windows of the small model's field over the ranks of a sample."""

    window: tuple[int, int]
    topology: Topology

    @cached_property
    def grid(self) -> WindowGrid:
        padded = smallest_padded_shape(GRID, MODEL.patch, MODEL.sampling, self.window, "paper")
        tokens = padded[0] // FINE, padded[1] // FINE
        return WindowGrid(tokens, tokens, self.window, "paper")

    @cached_property
    def layout(self) -> WindowLayout:
        return WindowLayout(self.grid, self.topology)

    @cached_property
    def slots(self) -> list[int]:
        """Token slots by rank."""
        ranks = range(self.topology.ranks)
        return [self.layout.windows(rank).size * self.layout.chunk for rank in ranks]

    @property
    def padding(self) -> float:
        """Points that all slots could hold beyond the field's own, in per cent of these."""
        return 100 * (sum(self.slots) * FINE**2 / (GRID[0] * GRID[1]) - 1)

    @property
    def windows(self) -> tuple[int, int]:
        """(least, most) windows of a rank."""
        counts = [self.layout.windows(rank).size for rank in range(self.topology.ranks)]
        return min(counts), max(counts)

    @cached_property
    def shift_bytes(self) -> list[int]:
        """By rank, what it sends in one shift of one sample."""
        shifted = WindowLayout(self.grid, self.topology, shifted=True)
        plans = (plan_route(self.layout, shifted, r) for r in range(self.topology.ranks))
        return [sum(plan.send) * MODEL.width * BYTES for plan in plans]

    @property
    def swap_bytes(self) -> int:
        """What the busiest rank sends around one attention: q, k, v there and the result back."""
        s = self.topology.sequence
        return 4 * max(self.slots) * MODEL.width * BYTES * (s - 1) // s

    def __str__(self) -> str:
        least, most = self.windows
        s = self.topology.sequence
        shared = f", shared by {s}" if s > 1 else ""
        return (
            f"{topo(self.topology)}: padding {self.padding:.1f} %, {least} to {most} windows a rank"
            f"{shared}, shift {mib(max(self.shift_bytes)):.1f} of {mib(sum(self.shift_bytes)):.1f}"
            " MiB"
        )


def topo(topology: Topology) -> str:
    """In the words of the paper."""
    sizes = [*(topology.fixed or (topology.window, 1))]
    sizes += [topology.sequence] if topology.sequence > 1 else []
    return f"{'fixed' if topology.fixed else 'ragged'} Topo({', '.join(map(str, sizes))})"


def mib(size: float) -> float:
    return size / 2**20


def fixed(ranks: int, side: int) -> list[Assignment]:
    """Round robin over m x n ranks: whole windows, and shared ones."""
    whole, shared = FIXED[ranks]
    topologies = [
        Topology(ranks, fixed=whole),
        Topology(shared[0] * shared[1], ranks // (shared[0] * shared[1]), fixed=shared),
    ]
    return [Assignment((side, side), topology) for topology in topologies]


def ragged(ranks: int, side: int) -> Assignment:
    return Assignment((side, side), Topology(ranks))


def density_aware(ranks: int, side: int) -> Assignment:
    """Of all that the heads allow, the one whose busiest rank has the fewest slots."""
    shares = [s for s in range(1, ranks + 1) if ranks % s == 0 and MODEL.heads % s == 0]
    every = [Assignment((side, side), Topology(ranks // s, s)) for s in shares]
    return min(every, key=lambda one: (max(one.slots), one.topology.sequence))


def rectangular(side: int) -> Assignment:
    """The least padding of windows with the square's tokens, a quarter more or less, and twice as
    long as wide at most; the one nearest in tokens, and then in shape, among equals."""
    sides = [
        (high, wide)
        for high in range(side // 2, 2 * side + 1)
        for wide in range(-(-3 * side**2 // (4 * high)), 5 * side**2 // (4 * high) + 1)
        if max(high, wide) <= 2 * min(high, wide)
    ]

    def merit(window: tuple[int, int]) -> tuple[int, int, int]:
        rows, columns = smallest_padded_shape(GRID, MODEL.patch, MODEL.sampling, window, "paper")
        return rows * columns, abs(window[0] * window[1] - side**2), abs(window[0] - window[1])

    return Assignment(min(sides, key=merit), Topology())


def rows(setting: Setting) -> list[Row]:
    result: list[Row] = []
    for ranks in FIXED:
        for side in SIDES:
            setting.say(f"windows of {side} x {side} on {ranks} ranks")
            result += _assignment_rows(ranks, side)
    for side in SIDES:
        best, square = rectangular(side), ragged(1, side)
        if best.padding < square.padding:
            result.append(
                Row(
                    what=f"rectangular, w {side}", ours=best.padding, against=square.padding,
                    goal=1.0, at_most=True, unit="% padding",
                    note=f"{best.window[0]} x {best.window[1]} tokens"
                    f" ({best.window[0] * best.window[1]} against {side**2}),"
                    f" {best.layout.shape[0]} x {best.layout.shape[1]} windows against"
                    f" {square.layout.shape[0]} x {square.layout.shape[1]}",
                )
            )  # fmt: skip
    setting.say(f"planning the routes of a rank of {PLAN_RANKS}")
    result.append(planning())
    return result


def _assignment_rows(ranks: int, side: int) -> Iterator[Row]:
    theirs, ours, aware = fixed(ranks, side), ragged(ranks, side), density_aware(ranks, side)
    whole = theirs[0]
    better = min(theirs, key=lambda one: max(one.slots))
    every = [*theirs, ours] + ([aware] if aware.topology != ours.topology else [])
    swaps = f"; all-to-all of an attention {mib(aware.swap_bytes):.1f} MiB"

    def row(what: str, ours: float, against: float, unit: str, note: str) -> Row:
        return Row(
            what=f"{what}, w {side}, {ranks} ranks", ours=ours, against=against, goal=1.0,
            at_most=True, unit=unit, note=note,
        )  # fmt: skip

    yield row("padding", ours.padding, whole.padding, "%", "; ".join(map(str, every)))
    yield row(
        "busiest rank", max(aware.slots), max(better.slots), "slots",
        f"{topo(aware.topology)} against {topo(better.topology)}"
        + (swaps if aware.topology.sequence > 1 else ""),
    )  # fmt: skip
    for name, one, other in (("shift", ours, whole), ("shift, shared", aware, theirs[1])):
        if one is aware and aware.topology == ours.topology:
            continue
        pair = f"{topo(one.topology)} against {topo(other.topology)}"
        sent, against = one.shift_bytes, other.shift_bytes
        yield row(f"{name}, busiest", mib(max(sent)), mib(max(against)), "MiB", pair)
        yield row(f"{name}, all", mib(sum(sent)), mib(sum(against)), "MiB", pair)


def planning() -> Row:
    """The slowest of a first, a middle and a last rank."""
    model = recipe("wenhai-small-p2").swin
    fine = model.patch * model.sampling
    tokens = PLAN_POINTS[0] // fine, PLAN_POINTS[1] // fine
    grid = WindowGrid(tokens, tokens, model.window_shape, "paper")
    topology = Topology(PLAN_RANKS)
    stripes = StripeLayout(tokens, Cut.even(tokens[0], PLAN_RANKS), "lat")
    regular, shifted = (WindowLayout(grid, topology, shifted) for shifted in (False, True))
    seconds = {}
    for rank in (0, PLAN_RANKS // 2, PLAN_RANKS - 1):
        taken = []
        for _ in range(PLAN_REPEATS):
            began = time.process_time()
            for plan in (plan_route(stripes, regular, rank), plan_route(regular, shifted, rank)):
                plan.inverse()
            taken.append(time.process_time() - began)
        seconds[rank] = statistics.median(taken)
    slowest = max(seconds, key=lambda rank: seconds[rank])
    return Row(
        what="planning",
        ours=seconds[slowest],
        against=PLAN_SECONDS,
        goal=1.0,
        at_most=True,
        unit="CPU s",
        note=f"rank {slowest} of {PLAN_RANKS}, {tokens[0]} x {tokens[1]} tokens, windows of"
        f" {grid.window[0]} x {grid.window[1]}; median of {PLAN_REPEATS}",
    )
