"""Work in child processes, which end with their parent however it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

_AWAKE_SECONDS = 0.5
"""How long at most a wait sleeps. Where the system hands Ctrl-C to another thread, the main one
hears of it only when it wakes."""


@contextmanager
def child_processes(workers: int) -> Iterator[Callable[..., Future]]:
    """A function `submit(work, *arguments)` that has so many processes compute.

    They end with this block, however it ends.
    """
    # Forked children of a process with threads may hang: they are started afresh.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)

    def submit(work: Callable, *arguments: Any) -> Future:
        with _quiet_children():
            return pool.submit(work, *arguments)

    try:
        yield submit
    except BaseException as error:  # of a child, Ctrl-C, a reader who has enough
        for process in [p for p in multiprocessing.active_children() if p not in others]:
            # A signal that comes between fork and exec is lost: again, until the child is gone. The
            # pause is for one that finishes what it must not leave half done.
            while process.is_alive():
                process.terminate()
                process.join(5)
        if isinstance(error, BrokenProcessPool):
            raise ValueError(
                f"a process that computed ended without a word ({error}): out of memory? In a"
                " script of your own, call this under `if __name__ == '__main__':` or with"
                " workers=1"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _quiet_children() -> Iterator[None]:
    """Processes started in this block compute with one thread and never see Ctrl-C, which a
    terminal sends to all: their parent ends them. A signal to the parent waits for the end of the
    block, lest a child is left half started."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    variables = {name: os.environ.get(name) for name in names}
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # the only one that signals reach
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda number, _: received.append(number))
    os.environ.update(dict.fromkeys(names, "1"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        for name, value in variables.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for caught, handler in handlers.items():
            signal.signal(caught, handler)
        if received:
            signal.raise_signal(received[0])


def _end_with_parent() -> None:
    """In a child: a parent that is killed cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def lock_across_forks() -> threading.Lock:
    """A lock, for the life of the process, that no other thread holds while this process forks: it
    would be held in the child for ever."""
    lock = threading.Lock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


def num_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_completed(futures: Sequence[Future]) -> Iterator[Future]:
    """The futures as they end; Ctrl-C is heard meanwhile."""
    unseen = set(futures)
    while unseen:
        finished, unseen = wait(unseen, _AWAKE_SECONDS, FIRST_COMPLETED)
        yield from finished


def result_of(future: Future) -> Any:
    """What the work returned or raised; Ctrl-C is heard meanwhile."""
    for finished in as_completed([future]):
        return finished.result()


def each(job: Callable[[int], Any], indices: Sequence[int], workers: int = 1) -> Iterator[Any]:
    """`job` of every index, in any order.

    workers: processes, given neighbouring indices together. job: must be picklable if workers > 1.
    ValueError of a job stops all.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if min(workers, len(indices)) <= 1:
        yield from map(job, indices)
        return
    # Eight runs a worker: neighbours share a source's chunks, and none is long idle at the end.
    length = max(1, -(-len(indices) // (8 * workers)))
    runs = [list(indices[i : i + length]) for i in range(0, len(indices), length)]
    with child_processes(workers) as submit:
        for future in as_completed([submit(_jobs, job, run) for run in runs]):
            yield from future.result()


def _jobs(job: Callable[[int], Any], indices: Sequence[int]) -> list[Any]:
    return [job(index) for index in indices]
