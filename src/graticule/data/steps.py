"""One time step of an ingest: planes read, decoded or kept as they are, ready to be stored."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from graticule.config import fingerprint
from graticule.data.pieces import BlockReader, Piece
from graticule.data.plan import Variable
from graticule.data.shardfile import LAND
from graticule.data.store import LARGEST, Packing
from graticule.data.times import TimeAxis
from graticule.grid import Grid
from graticule.variables import Channel, Channels

logger = logging.getLogger(__name__)

HELD_BYTES = 2**29
"""Most bytes of all blocks of several times that stay in memory between steps."""


class Steps:
    """Reads the channels of an ingest at one time after the other. Goes to other processes.

    identities: stands for each source file as it is now. packing: of the store. kept: names of
    variables whose own stored numbers are the store's.
    """

    def __init__(
        self, dynamic: Sequence[Variable], times: TimeAxis, grid: Grid, identities: dict[Path, str]
    ) -> None:
        self.dynamic, self.times, self.grid = list(dynamic), times, grid
        self.identities = identities
        self.channels = Channels([channel for variable in dynamic for channel in variable.channels])
        self.packing = Packing()
        self.kept: frozenset[str] = frozenset()
        self._messages: dict[str, str] = {}
        self._told: set[str] = set()
        self._rows = [(variable, row) for variable in self.dynamic
                      for row in range(len(variable.levels))]  # fmt: skip
        self._readers = {variable.name: BlockReader(HELD_BYTES // len(self.dynamic))
                         for variable in self.dynamic}  # fmt: skip

    def with_packing(self, packing: Packing, kept: frozenset[str]) -> "Steps":
        other = Steps(self.dynamic, self.times, self.grid, self.identities)
        other.packing, other.kept = packing, kept
        return other

    def take_messages(self) -> dict[str, str]:
        """What is worth a warning since the last call, by what it is about, once for each."""
        taken, self._messages = self._messages, {}
        self._told |= taken.keys()
        return taken

    def _say(self, about: str, text: str) -> None:
        if about not in self._told:
            self._messages.setdefault(about, text)

    def stored(self, index: int, groups: Sequence[slice]) -> Iterator[np.ndarray]:
        """(channel, lat, lon) stored numbers of one time, one group of channels after the other."""
        for group in groups:
            numbers = range(*group.indices(len(self.channels)))
            block = np.empty((len(numbers), *self.grid.shape), self.packing.dtype)
            for plane, number in zip(block, numbers, strict=True):
                self._store_plane(index, number, plane)
            yield block

    def made_from(self, index: int) -> str:
        """Stands for the files that one time is read from, as they are now."""
        seconds = int(self.times.seconds[index])
        paths = {piece.path for variable in self.dynamic
                 for piece, _ in variable.dates.get(seconds, [])}  # fmt: skip
        return fingerprint(sorted([path.name, self.identities[path]] for path in paths))

    def extremes(self, index: int) -> tuple[np.ndarray, np.ndarray, set[str]]:
        """(channel,) lowest and highest value of one time, infinities where there is none, and
        the variables whose own numbers meet the store's codes."""
        low, high = np.full(len(self.channels), np.inf), np.full(len(self.channels), -np.inf)
        clash: set[str] = set()
        for number, (variable, row) in enumerate(self._rows):
            plane = self._read(index, variable, row, kept=False)
            if plane is None or np.isnan(plane).all():
                continue
            low[number], high[number] = np.nanmin(plane), np.nanmax(plane)
            own, _ = own_packing(variable)
            # -32767 and -32768 are the store's own codes.
            if own is not None and np.rint((low[number] - own[1]) / own[0]) < -LARGEST:
                clash.add(variable.name)
        return low, high, clash

    def _store_plane(self, index: int, number: int, into: np.ndarray) -> None:
        variable, row = self._rows[number]
        channel = self.channels[number]
        kept = variable.name in self.kept
        plane = self._read(index, variable, row, kept)
        if plane is None:
            into[...] = np.nan if into.dtype == np.float32 else LAND
            return
        if kept:
            into[...] = plane
            self._watch_codes(plane, number, channel, index)
        else:
            self._watch(plane, channel, index)
            one = Channels([channel])
            into[...] = self.packing.take([number]).pack(plane[None], one)[0]

    def _read(self, index: int, variable: Variable, row: int, kept: bool) -> np.ndarray | None:
        """(lat, lon) of one plane: int16 codes if `kept`, else values; None: no source has it."""
        copies = variable.planes(int(self.times.seconds[index]), row)
        reader = self._readers[variable.name]
        plane = _one_plane(variable, copies, reader, self.grid, kept, self._say)
        if row == len(variable.levels) - 1:
            reader.drop_single()
        return plane

    def _watch_codes(self, codes: np.ndarray, number: int, channel: Channel, index: int) -> None:
        """As `_watch`, decoding the two extremes only."""
        wet = codes != LAND
        if (channel.low is None and channel.high is None) or not wet.any():
            return
        extremes = np.array([[codes.min(where=wet, initial=32767), codes.max()]], np.int16)
        self._watch(self.packing.take([number]).unpack(extremes[None])[0], channel, index)

    def _watch(self, plane: np.ndarray, channel: Channel, index: int) -> None:
        if channel.low is None and channel.high is None:
            return
        low = -np.inf if channel.low is None else channel.low
        high = np.inf if channel.high is None else channel.high
        wrong = (plane < low) | (plane > high)
        if wrong.any():
            self._say(
                f"bounds {channel.name}",
                f"{channel.name} holds {plane[wrong][0]:g} {channel.units} on"
                f" {self.times.date(index)}, outside {low:g} to {high:g}: are its units right?",
            )


def read_statics(static: Sequence[Variable], grid: Grid) -> np.ndarray | None:
    """(static, lat, lon) float32; all copies of a static, over files and times, must agree."""
    if not static:
        return None
    planes = []
    for variable in static:
        reader = BlockReader(HELD_BYTES)
        for row in range(len(variable.levels)):
            copies = variable.copies([(p, t) for p in variable.pieces for t in range(p.num_times)],
                                     row)  # fmt: skip
            try:
                plane = _one_plane(variable, copies, reader, grid, False, _warn)
            except ValueError as error:
                raise ValueError(f"static {variable.name} is not one field: {error}") from error
            planes.append(np.full(grid.shape, np.nan) if plane is None else plane)
    with np.errstate(over="ignore"):  # beyond float32 is refused by the writer
        return np.stack(planes).astype(np.float32)


def _warn(about: str, text: str) -> None:
    logger.warning("%s", text)


def _one_plane(
    variable: Variable,
    copies: Sequence[tuple[Piece, int, int]],
    reader: BlockReader,
    grid: Grid,
    kept: bool,
    say: Callable[[str, str], None],
) -> np.ndarray | None:
    """(lat, lon) of a plane that several sources may hold; what two of them hold must be the
    same. int16 codes if `kept`, else values; None: no source has it."""
    given: np.ndarray | None = None
    first: Piece | None = None
    for piece, time, level in copies:
        raw = reader.raw(piece, time, level)
        if kept:
            field = piece.codes(raw, time, level)
        else:
            field = piece.values(raw, time, level, *variable.convert)
        for repeated, column in piece.repeats:
            one, other = field[:, repeated], field[:, column]
            if not np.array_equal(one, other, equal_nan=not kept):
                say(
                    f"repeats {piece.name}",
                    f"{piece.where(time)}: the repeated meridian (column {column}, again at"
                    f" {repeated}) holds other values the second time; the first is kept here and"
                    " at all times",
                )
        plane = np.empty(grid.shape, field.dtype)
        piece.place(field, plane)
        if given is None or first is None:
            given, first = plane, piece
        elif not np.array_equal(given, plane, equal_nan=not kept):
            both = " and ".join(sorted({first.path.name, piece.path.name}))
            raise ValueError(
                f"{piece.where(time)} occurs twice with different values (in {both}); keep one of"
                " them"
            )
    return given


def own_packing(variable: Variable) -> tuple[tuple[float, float], str] | tuple[None, str]:
    """((scale, offset), "") in the store's units where int16 holds all pieces' own numbers with
    one scale and offset; else (None, why)."""
    found = {piece.own_packing for piece in variable.pieces}
    head = variable.pieces[0]
    if None in found:
        return None, f"{variable.name} is {head.variable.dtype.name} in {head.path.name}"
    if len(found) > 1:
        return None, f"{variable.name} has {len(found)} different scales or offsets in its files"
    packing = found.pop()
    assert packing is not None
    (scale, offset), (factor, shift) = packing, variable.convert
    if scale * factor <= 0:
        return None, f"{variable.name} has scale_factor {scale:g}"
    return (scale * factor, offset * factor + shift), ""
