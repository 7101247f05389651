"""How processes end together: one that fails says so where the others look.

A process that waits in an exchange may hear nothing of another one's end: a GPU waits for ever. So
each looks into the store in which all have met, twice a second, in a thread.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GRACE = 10.0
"""Seconds in which a process ends by itself after another one has failed."""
ALIKE = 2.0
"""Seconds in which processes that make the same mistake all find it."""
_log = logging.getLogger(__name__)


class Agreed(BaseException):
    """Mixed into an exception that all processes raise alike: none of them has failed."""


class RankFailed(RuntimeError):
    """This process ends because another one did.

    stopped: whether that one was asked to. told: whether it has said why.
    """

    def __init__(self, message: str, *, stopped: bool, told: bool) -> None:
        super().__init__(message)
        self.stopped, self.told = stopped, told


class Processes:
    """The processes of a run, seen from one of them.

    rank, size: which one of how many. device: where it computes.
    speaks: whether this one tells what all have to say: rank 0, or the first that failed.
    blame: whose error that is, for messages: `rank 3: `, or empty where all have the same.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.device: torch.device
        self.speaks, self.blame = rank == 0, ""


class Watch:
    """Tells the other processes that this one fails, and ends this one where another has.

    Twice a second a thread looks into the store that rank 0, or torchrun, keeps.
    """

    INTERVAL = 0.5

    def __init__(self, store: Any, here: Processes) -> None:
        # A connection of its own: the group waits in the other one.
        self._store, self._here = store.clone(), here
        self._first: dict[str, Any] = {}
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._look, name="graticule-watch", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def end(self) -> None:
        """All have come to the end of the run."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1))  # not a barrier: NCCL's would choose a GPU
        self._over.set()
        dist.destroy_process_group()
        self._thread.join()

    def fail(self, error: BaseException) -> None:
        """Tell the others, or raise `RankFailed` where another one was first to fail."""
        here, text = self._here, f"{type(error).__name__}: {error}"
        here.speaks, here.blame = True, f"rank {here.rank}: "
        lost, digest = _is_lost(error), hashlib.sha256(text.encode()).hexdigest()
        ours = {
            "rank": here.rank, "error": text, "stopped": isinstance(error, KeyboardInterrupt),
        }  # fmt: skip
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            self._store.add(digest, 1)
            if not self._first:
                self._see(self._store.compare_set("failed", "", json.dumps(ours)))
            if self._first == ours:
                patience = 4 * self.INTERVAL if lost else GRACE / 2
                self._wait(lambda: self._store.add("seen", 0) == here.size, patience)
                # Who raises the same does so soon, or waits in an exchange and never will.
                if self._wait(lambda: self._store.add(digest, 0) == here.size, ALIKE):
                    here.blame = ""
                self._store.set("told", "")
            elif here.rank == 0:  # which may keep the store
                self._wait(lambda: self._store.check(["told"]), GRACE / 2)
        if self._first and self._first != ours:
            here.speaks = False
            raise RankFailed(
                f"rank {self._first['rank']} failed first: {self._first['error']}",
                stopped=self._first["stopped"], told=True,
            ) from error  # fmt: skip
        if lost:
            raise RankFailed(
                "another process ended without a word, or does not answer: it was killed (for its"
                " memory, for instance), or its machine is lost"
                f" ({str(error).splitlines()[0]:.200})",
                stopped=False, told=False,
            ) from error  # fmt: skip

    @staticmethod
    def _wait(ready: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (done := ready()) and time.monotonic() < until:
            time.sleep(0.05)
        return done

    def _see(self, failed: bytes) -> None:
        """Learn who was first to fail, and say so, once."""
        with self._lock:
            if not self._first:
                self._first = json.loads(failed)
                self._store.add("seen", 1)

    def _look(self) -> None:
        lost = False
        while not self._over.wait(self.INTERVAL):
            try:
                if not self._store.check(["failed"]):
                    continue
                self._see(self._store.get("failed"))
            except RuntimeError:
                lost = True
            break
        # Whoever tells the others takes its time for that.
        if self._over.wait(2 * GRACE if self._first.get("rank") == self._here.rank else GRACE):
            return
        if lost and not self._first:
            _log.error("rank 0 ended without a word: it was killed, or its machine is lost")
        os._exit(1)


def _is_lost(error: BaseException) -> bool:
    """Whether an exchange failed since another process is gone."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "NCCL error")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
