"""What processes tell each other besides the numbers of a model: plain values, through host memory.

Nothing here touches a GPU or the groups that training uses: the messages go over a gloo group of
their own, and so a thread may talk while another trains. What fails on one rank is told to all,
so that all fail alike and none waits for one that gave up.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_log = logging.getLogger(__name__)
_PATIENCE = timedelta(hours=2)
"""How long one rank may write or read its files before the others give it up."""


class Talk:
    """All processes, or this one alone. Each method is called by all of them together."""

    def __init__(self, group: Any = None) -> None:
        """group: of torch, gloo; None: this process alone."""
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def another(self) -> "Talk":
        """The same processes over a group of its own, for another thread."""
        return Talk(None if self.group is None else _new_group())

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        if self.size == 1:
            return number
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def first(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, which runs it alone, is returned on every rank.

        What others see of a file system may be old; so only rank 0 looks, and all go by it.
        Its ValueError or OSError is a ValueError of the same text on every rank.
        """
        if self.size == 1:
            return function()
        answer: list[Any] = [None]
        cause: Exception | None = None
        if self.rank == 0:
            try:
                with alone():
                    answer = [(True, function())]
            except Exception as error:
                cause, answer = error, [(False, _text(error))]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        good, value = answer[0]
        if not good:
            if not isinstance(cause, OSError | ValueError | None):
                raise cause
            raise ValueError(value) from cause
        return value

    def failures(self, error: Exception | None) -> str:
        """What failed on which ranks, the same text on all; empty where nothing did.

        error: what failed here. Alone, one that is neither OSError nor ValueError, a mistake of
        ours, is raised as it is; of several ranks the one that made it logs it.
        """
        if error is not None and not isinstance(error, OSError | ValueError):
            if self.size == 1:
                raise error
            _log.error("rank %d: a mistake of this program", self.rank, exc_info=error)
        if self.size == 1:
            return "" if error is None else str(error)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(self.gather(None if error is None else _text(error))):
            if text is not None:
                ranks_by_text.setdefault(text, []).append(rank)
        told = [
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
            for text, ranks in ranks_by_text.items()
        ]
        return "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")


def everyone() -> Talk:
    """All processes of torch.distributed; this one alone without it, and inside `alone`.

    The first use is a collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or _alone.get():
        return Talk()
    world = dist.group.WORLD
    if world not in _everyone:
        _everyone[world] = Talk(_new_group())
    return _everyone[world]


@contextmanager
def alone() -> Iterator[None]:
    """Within the block `everyone()` is this process: what all do together, it does by itself."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


_everyone: "weakref.WeakKeyDictionary[Any, Talk]" = weakref.WeakKeyDictionary()
_alone: ContextVar[bool] = ContextVar("alone", default=False)


def _new_group() -> Any:
    return dist.new_group(backend="gloo", timeout=_PATIENCE)


def _text(error: Exception) -> str:
    users = isinstance(error, OSError | ValueError)
    return str(error) if users else f"{type(error).__name__}: {error}"
