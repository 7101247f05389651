"""Statistics gathered while a store is written, by any number of processes in any order.

The record of a training step holds the moments of its values. The change from one step to the
next has a record of its own, with the digests of both steps' numbers: a step that is written again
with other numbers makes it void. Merged in the order of time they are what `statistics.compute`
finds, bit for bit.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from graticule.data.shardfile import ShardLayout
from graticule.data.shards import Shards, Target, one_by_one
from graticule.data.statistics import Moments, Statistics, StepSums, merged, pieces, steps_after
from graticule.data.store import Packing, write_json
from graticule.data.times import TimeAxis
from graticule.variables import Channels

RECORDS = "records"
"""While a store is being written: what is known of each finished step, masks, and whatever is not
in its place yet. Gone when the store is complete, and with it what a killed process left."""


class Gatherer:
    """The sums of the training times of one store that is being written at `path`.

    fixed: moments of the statics. training: indices of times, which may be none.

    A change needs two steps. Whoever writes the second of them, whichever that is, reads the first
    one back, an inner chunk at a time. Of two that are written at the same moment neither finds
    the other, and a kill may fall between a step and its change: those are `changes_left`, and
    `write_change` reads both steps again.
    """

    def __init__(
        self,
        path: Path,
        layout: ShardLayout,
        packing: Packing,
        times: TimeAxis,
        channels: Channels,
        statics: Channels,
        fixed: Moments,
        training: np.ndarray | Sequence[int],
    ) -> None:
        self._path, self._layout, self._packing = path, layout, packing
        self._times, self._channels, self._statics, self._fixed = times, channels, statics, fixed
        self._training = np.unique(np.asarray(training, np.int64))
        self._wanted = frozenset(self._training.tolist())
        self._following = frozenset(steps_after(times, self._training))

    def __getstate__(self) -> dict[str, Any]:
        """For other processes; each makes a reader of its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_shards"}

    def record(self, time: int) -> Path:
        return self._path / RECORDS / f"{time}.json"

    def read_record(self, time: int) -> dict[str, Any]:
        return json.loads(self.record(time).read_text())

    def wants(self, time: int) -> bool:
        """Whether this is a training time."""
        return time in self._wanted

    def joined(self, time: int, neighbour: int) -> bool:
        """Whether the change between a time and the one before (-1) or after (1) counts."""
        return time + max(neighbour, 0) in self._following

    def sums(self, neighbours: Iterable[int]) -> StepSums:
        return StepSums(self._packing, len(self._channels), neighbours)

    def passing(
        self, time: int, groups: Iterable[np.ndarray], sums: StepSums
    ) -> Iterator[np.ndarray]:
        """The groups of a step, each once its sums, and those with its neighbours, are taken."""
        blocks = iter(groups)
        block = np.empty(0)
        for group, rows in pieces(self._layout):
            if rows.start == 0:
                block = next(blocks)
            others = {n: self._read_back(time + n, group, rows) for n in sums.changes}
            sums.add(group, block[:, rows], others)
            if rows.stop == self._layout.shape[1]:
                yield block

    def keep_changes(
        self, time: int, content: str, neighbours: Mapping[int, str], sums: StepSums
    ) -> None:
        """Record the changes that a step was written with. content, neighbours: digests."""
        for neighbour, theirs in neighbours.items():
            contents = [theirs, content] if neighbour < 0 else [content, theirs]
            self._keep(time + max(neighbour, 0), contents, sums.changes[neighbour])

    def changes_left(self) -> list[int]:
        """Times whose change from the step before is not recorded, or of other numbers."""
        left = []
        for time in sorted(self._following):
            path = self._change(time)
            recorded = json.loads(path.read_text())["contents"] if path.is_file() else None
            if recorded != self._contents(time):
                left.append(time)
        return left

    def write_change(self, time: int) -> None:
        """Compute and record the change from the step before, from both steps' files."""
        sums = self.sums([-1])
        for group, rows in pieces(self._layout):
            before = self._read_back(time - 1, group, rows)
            sums.add(group, self._read_back(time, group, rows), {-1: before})
        self._keep(time, self._contents(time), sums.changes[-1])

    def statistics(self, store_fingerprint: str) -> Statistics | None:
        """Of the training times, all of which are recorded; None: there are none."""
        if not self._training.size:
            return None

        def recorded(path: Path) -> Moments:
            return Moments.from_dict(json.loads(path.read_text())["sums"])

        sums = (
            (recorded(self.record(time)),
             recorded(self._change(time)) if time in self._following else None)
            for time in self._training.tolist()
        )  # fmt: skip
        return merged(
            self._channels, self._statics, self._times, self._training, sums, self._fixed,
            store_fingerprint,
        )  # fmt: skip

    def _change(self, time: int) -> Path:
        return self._path / RECORDS / f"{time - 1}-{time}.json"

    def _contents(self, time: int) -> list[str]:
        return [self.read_record(at)["content"] for at in (time - 1, time)]

    def _keep(self, time: int, contents: list[str], change: Moments) -> None:
        write_json(self._change(time), {"contents": contents, "sums": change.to_dict()})

    @cached_property
    def _shards(self) -> Shards:
        fields: Any = zarr.open_group(str(self._path), mode="r")["fields"]
        return Shards(fields, self._path, self._channels.names, self._times.date)

    def _read_back(self, time: int, group: slice, rows: slice) -> np.ndarray:
        """(channel, lat, lon) stored numbers of a step that is written."""
        _, height, width = self._layout.shape
        channels, here = range(group.start, group.stop), range(height)[rows]
        out = np.empty((len(channels), len(here), width), self._layout.dtype)
        wanted = [(time, [Target(tuple(channels), out)])]
        self._shards.read(wanted, here, range(width), one_by_one)
        return out
