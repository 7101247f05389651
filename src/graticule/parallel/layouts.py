"""Which rank holds which token, and what goes where from one layout to another.

A token is known by its number on the model's field, row x columns + column. A layout says in
closed form which tokens a rank holds, slot by slot, and which rank holds a token; a plan compares
two layouts from one rank's point of view. Arrays only: what is planned here runs in `routes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from graticule.mesh import Cut, Dim
from graticule.model.windows import WindowGrid


class Layout(Protocol):
    """Tokens of one sample over ranks. ranks: how many. field: (lat, lon) tokens."""

    @property
    def ranks(self) -> int: ...

    @property
    def field(self) -> tuple[int, int]: ...

    def tokens(self, rank: int) -> np.ndarray:
        """(slot,) int64: which token each slot of a rank holds, -1 where it holds none."""

    def owner(self, tokens: np.ndarray) -> np.ndarray:
        """The rank that holds each of these tokens; -1 for token -1."""


@dataclass(frozen=True)
class Topology:
    """How the ranks of a sample share its attention windows: TERRA's Topo(m, n, s, t).

    window: groups of ranks that hold windows of their own (m x n). sequence, tensor: ranks that
    share the tokens of each window (s, t). fixed: (m, n), windows in round robin over the two dims
    of their grid, which is filled up with empty ones (AERIS); None: row-major ranges whose lengths
    differ by one at most (TERRA, Eq. 4).
    """

    window: int = 1
    sequence: int = 1
    tensor: int = 1
    fixed: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        assert self.fixed is None or self.fixed[0] * self.fixed[1] == self.window, self

    @property
    def ranks(self) -> int:
        return self.window * self.sequence * self.tensor

    @property
    def chunks(self) -> int:
        """Parts that each window's tokens are cut into."""
        return self.sequence * self.tensor

    def windows(self, shape: tuple[int, int], part: int) -> np.ndarray:
        """The windows of group `part`, of a grid of (lat, lon) windows numbered row by row.

        Row by row; -1 for an empty window that fills the grid up (`fixed` only).
        """
        if self.fixed is None:
            total = shape[0] * shape[1]
            return np.arange(part * total // self.window, (part + 1) * total // self.window)
        (down, right), (i, j) = self.fixed, divmod(part, self.fixed[1])
        row = np.arange(i, -(-shape[0] // down) * down, down)[:, None]
        column = np.arange(j, -(-shape[1] // right) * right, right)
        there = (row < shape[0]) & (column < shape[1])
        return np.where(there, row * shape[1] + column, -1).ravel()

    def part(self, shape: tuple[int, int], row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The group that holds the window in this row and column of the grid of windows."""
        if self.fixed is not None:
            return row % self.fixed[0] * self.fixed[1] + column % self.fixed[1]
        # The last r whose range begins at or before window i: r x total // parts <= i.
        window, total = row * shape[1] + column, shape[0] * shape[1]
        return ((window + 1) * self.window - 1) // total


@dataclass(frozen=True)
class StripeLayout:
    """Whole rows (lat) or columns (lon) of the field, each stripe row by row."""

    field: tuple[int, int]
    cut: Cut
    dim: Dim

    @property
    def ranks(self) -> int:
        return self.cut.ranks

    def shape(self, rank: int) -> tuple[int, int]:
        """(rows, columns) of a rank's stripe."""
        rows, columns = self.field
        length = self.cut.length(rank)
        return (length, columns) if self.dim == "lat" else (rows, length)

    def tokens(self, rank: int) -> np.ndarray:
        ours = self.cut.of(rank)
        rows = np.arange(self.field[0])[ours if self.dim == "lat" else slice(None)]
        columns = np.arange(self.field[1])[ours if self.dim == "lon" else slice(None)]
        return (rows[:, None] * self.field[1] + columns).ravel()

    def owner(self, tokens: np.ndarray) -> np.ndarray:
        row, column = np.divmod(tokens, self.field[1])
        return np.where(tokens < 0, -1, self.cut.owner(row if self.dim == "lat" else column))


@dataclass(frozen=True)
class WindowLayout:
    """Attention windows, or parts of them: chunk k x t + l of its windows for rank (w, k, l).

    shifted: the windows that start half a window further south and east. Their slots are in the
    order of the regular windows' slots that their tokens come from, so that a token stays in its
    chunk: a shift sends what goes to another group's window, whatever the windows are cut into.
    Slots beyond the field, beyond a window's last token and of empty windows hold no token.
    """

    grid: WindowGrid
    topology: Topology
    shifted: bool = False

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @property
    def field(self) -> tuple[int, int]:
        return self.grid.tokens

    @property
    def chunk(self) -> int:
        """Slots for one window on each of the ranks that share it."""
        return -(-self.grid.window_tokens // self.topology.chunks)

    @property
    def shape(self) -> tuple[int, int]:
        """(lat, lon) windows."""
        (rows, columns), (high, wide) = self.grid.padded, self.grid.window
        return rows // high, columns // wide

    @property
    def offset(self) -> tuple[int, int]:
        """Rows and columns that these windows are displaced by."""
        return self.grid.offset if self.shifted else (0, 0)

    @property
    def order(self) -> np.ndarray:
        """(slot,) which token of a window, counted row by row from its first, a slot is for."""
        tokens = np.arange(self.grid.window_tokens).reshape(self.grid.window)
        return np.roll(tokens, self.offset, axis=(0, 1)).ravel()

    def windows(self, rank: int) -> np.ndarray:
        """Numbers of the windows that a rank holds or shares, -1 for empty ones."""
        return self.topology.windows(self.shape, rank // self.topology.chunks)

    def regions(self, rank: int) -> np.ndarray:
        """(window, slot) of whole windows: slots attend to each other where numbers are equal."""
        windows = self.windows(rank)[:, None]
        regions = self.grid.regions(self.shifted)[windows, self.order]
        return np.where(windows < 0, 0, regions)

    def tokens(self, rank: int) -> np.ndarray:
        slot = rank % self.topology.chunks * self.chunk + np.arange(self.chunk)
        within = slot < self.grid.window_tokens
        number = self.order[np.where(within, slot, 0)]
        windows = self.windows(rank)[:, None]
        (high, wide), (down, right) = self.grid.window, self.offset
        row = windows // self.shape[1] * high + number // wide + down
        column = windows % self.shape[1] * wide + number % wide + right
        # Shifted windows reach round the field.
        row, column = row % self.grid.padded[0], column % self.grid.padded[1]
        there = (windows >= 0) & within & (row < self.field[0]) & (column < self.field[1])
        return np.where(there, row * self.field[1] + column, -1).ravel()

    def owner(self, tokens: np.ndarray) -> np.ndarray:
        row, column = np.divmod(tokens, self.field[1])
        (high, wide), (down, right) = self.grid.window, self.offset
        part = self.topology.part(
            self.shape,
            (row - down) % self.grid.padded[0] // high,
            (column - right) % self.grid.padded[1] // wide,
        )
        chunk = (row % high * wide + column % wide) // self.chunk
        return np.where(tokens < 0, -1, part * self.topology.chunks + chunk)


@dataclass(frozen=True, eq=False)
class RoutePlan:
    """One rank's part of a route from a source to a target layout.

    take: our source slots that go to ranks 0, 1, ..., one rank's behind the other's; send: how
    many to each. place: the target slots of what comes from ranks 0, 1, ...; receive: how many
    from each. Tokens of a pair of ranks go in the order of their numbers, so both sides know them
    without a word. kept: (source slots, target slots) of tokens that stay here. slots: (source,
    target) in all. quiet: no rank sends anything to another. identity: quiet, and every slot
    stays where it is.
    """

    take: np.ndarray
    send: tuple[int, ...]
    place: np.ndarray
    receive: tuple[int, ...]
    kept: tuple[np.ndarray, np.ndarray]
    slots: tuple[int, int]
    quiet: bool
    identity: bool

    def inverse(self) -> "RoutePlan":
        """From the target back to the source: the adjoint."""
        return RoutePlan(
            take=self.place, send=self.receive, place=self.take, receive=self.send,
            kept=self.kept[::-1], slots=self.slots[::-1], quiet=self.quiet, identity=self.identity,
        )  # fmt: skip

    @property
    def sources(self) -> np.ndarray:
        """(target slot,) the source slot of what stays here, 0 for all other target slots."""
        sources = np.zeros(self.slots[1], dtype=np.int64)
        sources[self.kept[1]] = self.kept[0]
        return sources

    @property
    def empty(self) -> np.ndarray:
        """Target slots that nothing goes to."""
        empty = np.ones(self.slots[1], dtype=bool)
        empty[self.kept[1]] = empty[self.place] = False
        return np.flatnonzero(empty)


def plan_route(source: Layout, target: Layout, rank: int) -> RoutePlan:
    """What `rank` does to bring the tokens from one layout into another.

    Costs a sort of the rank's own tokens. Only a rank that neither sends nor receives looks at
    the others', since it has to know whether they will wait for it.
    """
    assert source.ranks == target.ranks, (source, target)
    assert source.field == target.field, (source, target)
    ours, theirs = source.tokens(rank), target.tokens(rank)
    to, by = target.owner(ours), source.owner(theirs)
    take, send = _by_peer(ours, to, rank, source.ranks)
    place, receive = _by_peer(theirs, by, rank, source.ranks)
    quiet = not (take.size or place.size)
    if quiet and source.ranks > 1:
        everything = np.arange(source.field[0] * source.field[1])
        quiet = np.array_equal(source.owner(everything), target.owner(everything))
    return RoutePlan(
        take=take, send=send, place=place, receive=receive,
        kept=(_in_order(ours, to == rank), _in_order(theirs, by == rank)),
        slots=(ours.size, theirs.size), quiet=quiet,
        identity=quiet and np.array_equal(ours, theirs),
    )  # fmt: skip


def _in_order(tokens: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The slots where `which` is true, by the number of their token."""
    slots = np.flatnonzero(which)
    return slots[np.argsort(tokens[slots])]


def _by_peer(
    tokens: np.ndarray, peers: np.ndarray, rank: int, ranks: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """(slots whose token another rank has too, by that rank and then by token; how many each)."""
    slots = np.flatnonzero((peers >= 0) & (peers != rank))
    order = np.lexsort((tokens[slots], peers[slots]))
    counts: Sequence[int] = np.bincount(peers[slots], minlength=ranks).tolist()
    return slots[order], tuple(counts)
