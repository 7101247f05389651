"""Reading in turns: ranks of a parallel file system that need not all begin at once."""

import threading
import time


class Turns:
    """When a rank begins to read, so that ranks that read in step do not read at once.

    Ranks that train together wake together: each reader sleeps while its queue is full, and all of
    them find room in the same step. Rank r then waits r mod n turns, a turn being the time that it
    has itself read in a row, at the shortest so far; before anything is read, the time of one
    delivery at `FIRST_BYTES_PER_SECOND`. No clock and no message is shared: turns are as even as
    the ranks' shares are. A caller that has nothing left to take ends the wait, so that beyond the
    first one, of `LONGEST` seconds a turn at most, waves cost the training nothing.
    """

    FIRST_BYTES_PER_SECOND = 1e9
    LONGEST = 1.0

    def __init__(self, wave: int, first_bytes: int) -> None:
        self._wave = wave
        self._turn = min(first_bytes / self.FIRST_BYTES_PER_SECOND, self.LONGEST)
        self._measured = False
        self._began = 0.0
        self.ended = threading.Event()
        """Set by whoever cannot wait: a caller without data, or one that wants no more."""

    def begin(self) -> None:
        """Wait for this rank's turn."""
        if self._wave:
            self.ended.wait(self._wave * self._turn)
        self._began = time.perf_counter()

    def end(self) -> None:
        """The rank has read all that there is room for."""
        took = min(time.perf_counter() - self._began, self.LONGEST)
        self._turn = min(took, self._turn) if self._measured else took
        self._measured = True
        self.ended.clear()
