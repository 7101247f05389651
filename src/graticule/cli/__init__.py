"""The command line. Only this room draws bars and prints; everything else logs or returns."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graticule.cli.parser import build_parser

__all__ = ["build_parser", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 (a check that fails), 2 (the user can put it right) or
    130 (stopped by SIGINT or SIGTERM)."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(levelname)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("graticule").setLevel(logging.INFO)
    try:
        with _terminated():
            return options.run(options) or 0
    except BrokenPipeError:
        # Whoever read our output has enough; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PermissionError as error:
        print(
            f"graticule: error: {error.filename}: {error.strerror}; name a place that you may"
            " write to and files that you may read",
            file=sys.stderr,
        )
        return 2
    except (ValueError, OSError) as error:
        lines = (line.strip() for line in str(error).splitlines())
        print(f"graticule: error: {' '.join(lines)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"graticule: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130


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
