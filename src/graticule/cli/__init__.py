"""The command line. Only this room draws bars and prints; everything else logs or returns."""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from graticule.cli.parser import build_parser
from graticule.parallel.launch import Launch, launched
from graticule.parallel.watch import RankFailed

__all__ = ["build_parser", "main"]

TOGETHER = (["train"], ["validate"], ["forecast"], ["evaluate"], ["report"])
"""Commands that several processes run together."""
OF_ITS_OWN = (["demo"], ["bench"])
"""Commands that train by the way: never several at once in one folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 (a check that fails), 2 (the user can put it right) or
    130 (stopped by SIGINT or SIGTERM).

    Of several processes that run a command together, rank 0 prints, and whichever fails.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = argparse.Namespace(here=None)
    try:
        launch = _launched(given)
        _parse(given, options, silent=launch.rank > 0)
        _log_as(launch.rank, options.verbose)
        with _terminated():
            return options.run(options) or 0
    except BrokenPipeError:
        # Whoever read our output has enough; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PermissionError as error:
        return _tell(
            options,
            f"error: {error.filename}: {error.strerror}; name a place that you may write to and"
            " files that you may read",
            2,
        )
    except (ValueError, OSError) as error:
        lines = (line.strip() for line in str(error).splitlines())
        return _tell(options, f"error: {' '.join(lines)}", 2)
    except KeyboardInterrupt as stop:
        return _tell(options, str(stop) or "interrupted", 130)
    except RankFailed as failed:
        if failed.told:
            return 130 if failed.stopped else 2
        return _tell(options, f"error: {failed}", 2)


def _launched(given: Sequence[str]) -> Launch:
    """Who else runs this command. ValueError where several processes would do the same work."""
    launch = launched()
    if launch.size == 1 or given[:1] in TOGETHER:
        return launch
    # The tasks of a Slurm step may each have a file or a part of their own.
    if launch.by == "torchrun" or given[:1] in OF_ITS_OWN:
        raise ValueError(
            f"{launch.by} started {launch.size} processes, and this command runs on one; only"
            f" {', '.join(command for (command,) in TOGETHER)} share their work"
        )
    return Launch()


def _parse(given: Sequence[str], options: argparse.Namespace, *, silent: bool) -> None:
    with ExitStack() as stack:
        if silent:  # rank 0 has the same arguments, and says what is wrong with them
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        build_parser().parse_args(given, options)


def _log_as(rank: int, verbose: bool) -> None:
    """Rank 0 logs for all; another one its errors, and no warnings of Python's either."""
    usual = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(
        level=logging.ERROR if rank else usual,
        format=f"rank {rank}: %(levelname)s: %(message)s" if rank else "%(levelname)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.captureWarnings(rank > 0)
    logging.getLogger("graticule").setLevel(logging.ERROR if rank else logging.INFO)


def _tell(options: argparse.Namespace, text: str, code: int) -> int:
    """Print one line, where it is this process that speaks for all; the exit code."""
    here = options.here
    if here is None or here.speaks:
        kind, colon, rest = text.partition("error: ")
        blame = here.blame if here else ""
        print(f"graticule: {kind}{colon}{blame}{rest}", file=sys.stderr)
    return code


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends what runs in this block as Ctrl-C does: files closed, children ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("SIGTERM: stopped")

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
