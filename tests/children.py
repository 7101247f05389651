"""Forked processes for tests that kill them, limit them or take away their rights."""

import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable

import torch


def in_a_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; its exit status as `os.waitpid` gives it."""
    with warnings.catch_warnings():
        # From Python 3.12 on forking a process with threads warns; the child uses one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        status = 99
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(process, 0)[1]


def started_by_slurm(size: int, work: Callable[[int], None], *, within: float = 60) -> list[int]:
    """Run `work(rank)` in forked processes as the tasks of a Slurm step; their exit codes.

    A process that is killed by a signal has minus its number. All must end `within` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(size):
        environment = {
            "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_NTASKS": "64", "SLURM_STEP_NODELIST": "localhost",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            status = 99
            try:
                torch.set_num_threads(1)
                os.environ.update(environment)
                work(rank)
                status = 0
            except SystemExit as stop:
                status = int(stop.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    codes: dict[int, int] = {}
    until = time.monotonic() + within
    while len(codes) < size and time.monotonic() < until:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    late = [pid for pid in pids if pid not in codes]
    for pid in late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not late, f"ranks {[pids.index(pid) for pid in late]} did not end within {within:g} s"
    return [codes[pid] for pid in pids]
