"""Ranks on this machine: forked processes that share a gloo group and run functions together.

Forking a process that has imported torch takes a tenth of a second; starting one anew takes
seconds. The group lives as long as the pool, so that the second function starts at once.
"""

import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from graticule.mesh import forget_meshes


class RankError(RuntimeError):
    """A function failed on a rank, or did not end in time. rank: the first that told."""

    def __init__(self, rank: int, told: str) -> None:
        super().__init__(f"rank {rank}: {told}")
        self.rank = rank


class LocalRanks:
    """A pool of `size` forked processes with one thread each; use it in a `with` block.

    Functions are run by all ranks at once and may use torch.distributed and `Mesh`. They and
    their arguments are pickled: module-level functions. Where one rank fails or `timeout_seconds`
    pass, all are killed, and the next function starts new ones.
    """

    def __init__(self, size: int, *, timeout_seconds: float = 60) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self._pids: list[int] = []
        self._folder = ""
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(*arguments)` returns on ranks 0, 1, ...; RankError where one fails."""
        if not self._pids:
            self._start()
        for pipe in self._pipes:
            _send(pipe, (function, arguments))
        results: list[Any] = [None] * self.size
        failures: dict[int, str] = {}
        waiting: dict[Any, int] = dict(zip(self._pipes, range(self.size), strict=True))
        until = time.monotonic() + self.timeout_seconds
        while waiting and not failures:
            ready: list[Any] = wait(list(waiting), max(until - time.monotonic(), 0))
            if not ready:
                lost = ", ".join(map(str, waiting.values()))
                failures[min(waiting.values())] = (
                    f"no answer within {self.timeout_seconds:g} s (waiting for rank {lost})"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, value = _received(pipe)
                except EOFError:
                    good, value = False, self._how_ended(rank)
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
        if failures:
            # A rank that fails makes others fail where they wait for it: theirs is no cause.
            time.sleep(0.2)
            for pipe, rank in waiting.items():
                if pipe.poll():
                    try:
                        good, value = _received(pipe)
                    except EOFError:
                        continue
                    if not good:
                        failures[rank] = value
            self.close()
            cause = min(failures, key=lambda rank: ("Connection" in failures[rank], rank))
            raise RankError(cause, failures[cause])
        return results

    def _start(self) -> None:
        # Seconds to import, here once instead of in each child: an optimizer's first step takes
        # the compiler along.
        import torch._dynamo
        import torch.distributed.fsdp
        import torch.distributed.tensor  # noqa: F401

        self._folder = tempfile.mkdtemp(prefix="graticule-ranks-")
        for rank in range(self.size):
            ours, theirs = Pipe()
            with warnings.catch_warnings():
                # From Python 3.12 on forking a process with threads warns; a child uses one.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                try:
                    for pipe in [ours, *self._pipes]:
                        pipe.close()
                    _serve(rank, self.size, theirs, Path(self._folder), self.timeout_seconds)
                except BaseException:  # what a rank is asked is caught where it is asked
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            theirs.close()
            self._pids.append(pid)
            self._pipes.append(ours)

    def _how_ended(self, rank: int) -> str:
        _, status = os.waitpid(self._pids[rank], 0)
        self._pids[rank] = 0
        if os.WIFSIGNALED(status):
            return f"ended without a word, by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended without a word, with exit code {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for pid in self._pids:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._pids, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def _serve(rank: int, size: int, pipe: Connection, folder: Path, timeout_seconds: float) -> None:
    # First of all: several threads in the child of a threaded parent hang.
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    started = False
    while True:
        try:
            function, arguments = _received(pipe)
        except (EOFError, OSError):
            return
        try:
            if not started:
                forget_meshes()  # the parent's
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder / 'store'}",
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout_seconds),
                )
                started = True
            answer = pickle.dumps((True, function(*arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _send(pipe: Connection, value: Any) -> None:
    # Not `pipe.send`: torch may have taught that one to pass tensors as open files, which a rank
    # that is gone, or has forked, cannot give any more.
    pipe.send_bytes(pickle.dumps(value))


def _received(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
