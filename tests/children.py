"""Forked processes for tests that kill them, limit them or take away their rights."""

import os
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
