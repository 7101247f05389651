"""Going on together or stopping together, and adding up.

Reading, writing and checking may fail on one process alone: a torn file, a full disk. The others
would wait for it in their next exchange, until a timeout that names nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from graticule.parallel.talk import Talk, everyone


class Together:
    """Processes that go on together or raise the same error."""

    def __init__(self, talk: Talk | None = None) -> None:
        """talk: between them; none: all that were started, and this is a collective."""
        self._talk = everyone() if talk is None else talk
        self.rank, self.size = self._talk.rank, self._talk.size
        self._failure: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A block that may fail here alone: its error is kept for `settle`, which all must reach.

        The block holds no collective. Of one process, the error is raised at once.
        """
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            self._failure = self._failure or error

    def settle(self) -> None:
        """A collective. Raises on all processes what the first of those that failed has kept."""
        own, self._failure = self._failure, None
        if self.size == 1 or self._talk.least(int(own is None)):
            return
        told = self._talk.gather(None if own is None else _told(own))
        first = next(rank for rank, answer in enumerate(told) if answer is not None)
        if own is not None and first == self.rank:
            raise own
        users, text = told[first] or (False, "")
        raise (ValueError(text) if users else RuntimeError(f"rank {first}: {text}")) from own

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A block that may fail on one process alone: all leave it, or all raise the same."""
        with self.attempt():
            yield
        self.settle()

    def add(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sums over all processes, the same bits on each. A collective.

        Added in order of rank, which an all-reduce does not promise.
        """
        return [self._added(array) for array in arrays]

    def _added(self, array: np.ndarray) -> np.ndarray:
        total = torch.from_numpy(array.copy())
        if self.size == 1 or not total.numel():
            return total.numpy()
        group = self._talk.group
        if self.rank == 0:
            other = torch.empty_like(total)
            for rank in range(1, self.size):
                dist.recv(other, group=group, group_src=rank)
                total += other
        else:
            dist.send(total, group=group, group_dst=0)
        dist.broadcast(total, group=group, group_src=0)
        return total.numpy()


def _told(error: Exception) -> tuple[bool, str]:
    """(whether users can put it right, what it says)"""
    users = isinstance(error, ValueError | OSError)
    return users, str(error) if users else f"{type(error).__name__}: {error}"
