"""Read planes from the store's shards: an index once, then exactly the inner chunks wanted.

A shard is the file of one time: inner chunks (channels x rows x columns, compressed by blosc, each
followed by its crc32c) and at the end an index of (offset, size) for each chunk, 64-bit
little-endian in C order, followed by its own crc32c. Zarr writes it and is the reference; reading
it through Zarr costs 3 to 5 ms a call, a millisecond of them for each inner chunk, and memory that
is new every time.
"""

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from numcodecs import blosc

from graticule.data.processes import lock_across_forks
from graticule.data.shardfile import ShardLayout

Job = Callable[[], None]
"""Reads one inner chunk to all places where planes of it are wanted."""


def one_by_one(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()


_lock = lock_across_forks()
"""Of all stores; held for a sum or for an entry."""
_ABSENT = 2**64 - 1
_LAST_BYTE = 2**63 - 1
_CACHED_INDEX_BYTES = 2**26
"""Of a store's indices, kept to read each once: of 84 channels of 720 x 1440 points in chunks of
1 x 32 x 32 one index has 1.4 MB, and there is one for each time."""
_ENTRY_BYTES = 512
"""Of Python's objects around one: of the small indices of many times they are the most."""


@dataclass(frozen=True, eq=False)
class Target:
    """Where planes of one time go.

    channels: positions in the store. out: (channel, row, column) of the store's dtype, the whole
    of what is read. turn: columns by which the planes are turned to the east.
    """

    channels: tuple[int, ...]
    out: np.ndarray
    turn: int = 0


class _Place(NamedTuple):
    """An inner chunk: of which time, its place among the others, where it is in the file."""

    time: int
    layer: int
    band: int
    strip: int
    start: int
    size: int


def layout_of(fields: Any) -> ShardLayout:
    """Of the array `fields`; ValueError unless it is laid out as `ShardWriter` writes it."""
    about: dict[str, Any] = fields.metadata.to_dict()
    outer = tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
    (sharding, *others) = about["codecs"]
    settings = sharding["configuration"]
    inner: Any = tuple(settings.get("chunk_shape", outer))
    codecs = [codec["name"] for codec in settings.get("codecs", ())]
    index = [codec["name"] for codec in settings.get("index_codecs", ())]
    layout = ShardLayout(fields.shape[1:], inner[1:4], np.dtype(fields.dtype))
    if (
        [sharding["name"], *others] != ["sharding_indexed"]
        or codecs != ["bytes", "blosc", "crc32c"]
        or index != ["bytes", "crc32c"]
        or settings["index_location"] != "end"
        or inner != (1, *layout.chunk)
        or outer != (1, *layout.padded)
    ):
        raise ValueError(
            f"the array fields has chunks of {outer}, inside them {inner}, and codecs"
            f" {[codec['name'] for codec in about['codecs']]}, inside them {codecs}; a store has"
            " one shard a time, of chunks with a checksum each: write it again"
        )
    return layout


class Shards:
    """The shards of one store, for any number of threads.

    names: of the channels. date: of a time, for messages. `bytes_read` counts what came from
    disk, indices included.
    """

    def __init__(
        self, fields: Any, path: Path, names: Sequence[str], date: Callable[[int], Any]
    ) -> None:
        self.layout = layout_of(fields)
        self.bytes_read = 0
        self._path, self._names, self._date = path, names, date
        self._scratch = threading.local()
        self._indices: dict[int, tuple[tuple[int, int, int], np.ndarray]] = {}

    def path(self, time: int) -> Path:
        """The file that holds one time."""
        return self._path / "fields" / "c" / str(time) / "0" / "0" / "0"

    def read(
        self,
        wanted: Iterable[tuple[int, Sequence[Target]]],
        rows: range,
        columns: range,
        run: Callable[[Sequence[Job]], None],
    ) -> None:
        """Fill the targets of each time. Every inner chunk that holds a plane of one is read
        once, however many targets want it.

        rows, columns: of the grid, contiguous; the extent of each target's `out`. Where there are
        none, no file is opened.
        run: calls all jobs, in any order and in any threads, and raises what they raise.
        ValueError names file, variable and date where a chunk is lost or torn.
        """
        with ExitStack() as files:
            jobs: list[Job] = []
            for time, targets in wanted:
                jobs += self._jobs(time, targets, rows, columns, files)
            run(jobs)

    def _jobs(
        self, time: int, targets: Sequence[Target], rows: range, columns: range, files: ExitStack
    ) -> list[Job]:
        used = sorted({channel for target in targets for channel in target.channels})
        if not used or not rows or not columns:
            return []
        try:
            file = os.open(self.path(time), os.O_RDONLY)
            files.callback(os.close, file)
            index = self._index(time, file)
        except FileNotFoundError:
            raise self._lost(time, used[0], rows[0], columns[0]) from None
        except (OSError, ValueError) as error:
            raise self._damaged(time, used[0], error) from error
        depth, height, width = self.layout.chunk
        jobs: list[Job] = []
        for layer, band, strip in itertools.product(
            sorted({channel // depth for channel in used}),
            range(rows[0] // height, rows[-1] // height + 1),
            range(columns[0] // width, columns[-1] // width + 1),
        ):
            start, size = index[layer, band, strip]
            place = _Place(time, layer, band, strip, int(start), int(size))
            jobs.append(partial(self._chunk, file, place, targets, rows, columns))
        return jobs

    def _index(self, time: int, file: int) -> np.ndarray:
        """(*layout.counts, 2) uint64: offset and size of each inner chunk."""
        status = os.fstat(file)
        # These differ once the file is written anew.
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._indices.get(time)
        if known is not None and known[0] == state:
            return known[1]
        length = 16 * math.prod(self.layout.counts) + 4
        if status.st_size < length:
            raise ValueError(f"the file has {status.st_size} bytes, its index alone {length}")
        raw = np.empty(length, np.uint8)
        self._pread(file, raw, status.st_size - length)
        _check(raw)
        index = raw[:-4].view("<u8").reshape(*self.layout.counts, 2)
        with _lock:
            if (len(self._indices) + 1) * (length + _ENTRY_BYTES) > _CACHED_INDEX_BYTES:
                self._indices.clear()
            self._indices[time] = (state, index)
        return index

    def _chunk(
        self,
        file: int,
        place: "_Place",
        targets: Sequence[Target],
        rows: range,
        columns: range,
    ) -> None:
        """Read, check and decompress one inner chunk and copy the planes that are wanted."""
        time, layer, band, strip, start, size = place
        depth, height, width = self.layout.chunk
        first_row, first_column = band * height, strip * width
        top, bottom = max(rows.start, first_row), min(rows.stop, first_row + height)
        left, right = max(columns.start, first_column), min(columns.stop, first_column + width)
        pieces = [
            (target, runs)
            for target in targets
            if (runs := _runs(target.channels, layer * depth, (layer + 1) * depth))
        ]
        used = sorted(first for _, runs in pieces for first, _, _ in runs)
        if not used:
            return
        name = layer * depth + used[0]
        if start == _ABSENT and size == _ABSENT:
            raise self._lost(time, name, top, left)
        try:
            chunk = self._decompressed(file, start, size)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._damaged(time, name, error) from error
        here = slice(top - first_row, bottom - first_row)
        across = slice(left - first_column, right - first_column)
        there = slice(top - rows.start, bottom - rows.start)
        for target, runs in pieces:
            for first, into, count in runs:
                planes = chunk[first : first + count, here]
                lost = planes[:, :, 0] == self.layout.fill
                if lost.any():
                    channel, row = (int(i) for i in np.argwhere(lost)[0])
                    raise self._lost(time, layer * depth + first + channel, top + row, left)
                _copy_around(
                    planes[:, :, across],
                    target.out[into : into + count, there],
                    left - columns.start + target.turn,
                )

    def _decompressed(self, file: int, start: int, size: int) -> np.ndarray:
        """(channel, row, column) in this thread's own memory, until its next chunk."""
        own = self._scratch
        if not hasattr(own, "chunk"):
            own.raw = np.empty(0, np.uint8)
            own.chunk = np.empty(self.layout.chunk, self.layout.dtype)
        if not 4 < size <= 2 * own.chunk.nbytes + 1024:
            raise ValueError(f"a chunk of {size} bytes does not hold {own.chunk.nbytes}")
        if start > _LAST_BYTE:  # the system cannot even be asked for it
            raise ValueError(f"a chunk is said to begin at byte {start}, beyond any file")
        if own.raw.size < size:
            own.raw = np.empty(size, np.uint8)
        raw = own.raw[:size]
        self._pread(file, raw, start)
        _check(raw)
        body = raw[:-4]
        # Bytes 4 to 7 of a blosc frame: the size of what it holds.
        holds = int(body[4:8].view("<u4")[0]) if body.size >= 16 else 0
        if holds != own.chunk.nbytes:
            raise ValueError(f"a chunk holds {holds} bytes instead of {own.chunk.nbytes}")
        blosc.decompress(body, own.chunk)
        return own.chunk

    def _pread(self, file: int, out: np.ndarray, start: int) -> None:
        view, done = out.data, 0
        while done < len(view):
            got = os.preadv(file, [view[done:]], start + done)
            if got == 0:
                raise ValueError(f"the file ends at byte {start + done}, in the middle of a chunk")
            done += got
        with _lock:
            self.bytes_read += done

    def _lost(self, time: int, channel: int, row: int, column: int) -> ValueError:
        return ValueError(
            f"{self._path}: {self._names[channel]} at {self._date(time)} was never written or is"
            f" lost (shard {self.path(time)}, from row {row}, column {column}); write the store"
            " again"
        )

    def _damaged(self, time: int, channel: int, error: Exception) -> ValueError:
        return ValueError(
            f"{self._path}: {self._names[channel]} at {self._date(time)} cannot be read, its file"
            f" is damaged (shard {self.path(time)}): {error}; write the store again"
        )


def _check(raw: np.ndarray) -> None:
    """ValueError unless the last four bytes are the crc32c of those before."""
    computed, stored = google_crc32c.value(raw[:-4]), int(raw[-4:].view("<u4")[0])
    if computed != stored:
        raise ValueError(f"checksum {computed:#010x}, written as {stored:#010x}")


@lru_cache(maxsize=256)
def _runs(channels: tuple[int, ...], first: int, last: int) -> list[tuple[int, int, int]]:
    """Which of `channels` lie in [first, last), neighbours together: (position there, position
    in `channels`, how many)."""
    runs: list[tuple[int, int, int]] = []
    for into, channel in enumerate(channels):
        if not first <= channel < last:
            continue
        if (
            runs
            and runs[-1][0] + runs[-1][2] == channel - first
            and (runs[-1][1] + runs[-1][2] == into)
        ):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((channel - first, into, 1))
    return runs


def _copy_around(planes: np.ndarray, out: np.ndarray, first: int) -> None:
    """Copy (channel, row, column) to where the columns from `first` on are, once around."""
    first %= out.shape[-1]
    before = min(planes.shape[-1], out.shape[-1] - first)
    out[..., first : first + before] = planes[..., :before]
    out[..., : planes.shape[-1] - before] = planes[..., before:]
