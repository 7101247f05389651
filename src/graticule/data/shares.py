"""The work of an ingest shared out over processes; messages and progress gathered."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from graticule.data.processes import each
from graticule.data.steps import Steps
from graticule.data.store import read_attributes
from graticule.data.writer import StoreWriter

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass
class Everyone:
    """All processes of an ingest: steps shared out, messages and progress gathered."""

    steps: Steps
    workers: int
    progress: Progress | None
    done: int = 0
    total: int = 0
    said: set[str] = field(default_factory=set)

    def write(self, indices: Sequence[int], writer: StoreWriter) -> None:
        """Write the steps at `indices`; those that are there, of the same files, are verified."""
        self.total += len(indices)
        there = 0
        for messages, was_there in each(_Write(self.steps, writer), indices, self.workers):
            there += was_there
            self._tell(messages)
        if there:
            logger.info("%s: %d finished steps were there and are verified", writer.path, there)

    def write_changes(self, writer: StoreWriter) -> None:
        """Compute the changes from step to step that nobody could while writing."""
        try:
            left = writer.changes_left()
            if not left:
                return
            logger.info(
                "statistics: both steps are read again for %d changes from step to step, of steps"
                " that were written at the same moment or before a stop", len(left),
            )  # fmt: skip
            self.total += len(left)
            for _ in each(writer.write_change, left, self.workers):
                self._tell({})
        except (FileNotFoundError, ValueError):
            if not read_attributes(writer.path).get("complete"):
                raise
            # Another part finished, and removed the records, meanwhile.

    def extremes(self) -> tuple[np.ndarray, np.ndarray, set[str]]:
        """(channel,) lowest and highest value of all times, and `Steps.extremes`'s clashes."""
        number = len(self.steps.times)
        self.total += 2 * number  # the second time is `write`'s
        low = np.full(len(self.steps.channels), np.inf)
        high = -low
        clashes: set[str] = set()
        for least, most, clash, messages in each(
            _Extremes(self.steps), range(number), self.workers
        ):
            low, high, clashes = np.minimum(low, least), np.maximum(high, most), clashes | clash
            self._tell(messages)
        self.total -= number
        return low, high, clashes

    def _tell(self, messages: dict[str, str]) -> None:
        for key, text in messages.items():
            if key not in self.said:
                self.said.add(key)
                logger.warning("%s", text)
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


@dataclass(frozen=True)
class _Write:
    steps: Steps
    writer: StoreWriter

    def __call__(self, index: int) -> tuple[dict[str, str], bool]:
        made_from = self.steps.made_from(index)
        there = self.writer.finished(index) == made_from
        if not there:
            groups = self.steps.stored(index, self.writer.layout.groups)
            self.writer.write_stored(index, groups, made_from)
        return self.steps.take_messages(), there


@dataclass(frozen=True)
class _Extremes:
    steps: Steps

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray, set[str], dict[str, str]]:
        return (*self.steps.extremes(index), self.steps.take_messages())
