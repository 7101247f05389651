"""Turns: a rank waits for those before it, and never keeps a caller who has nothing to do."""

import threading
import time

from graticule.data.turns import Turns


def test_a_caller_without_data_ends_the_wait() -> None:
    turns = Turns(wave=3, first_bytes=10**12)  # at most a second a turn, whatever the bytes
    timer = threading.Timer(0.05, turns.ended.set)
    timer.start()
    began = time.perf_counter()
    turns.begin()
    assert 0.04 < time.perf_counter() - began < 2.0
    timer.join()


def test_a_turn_is_the_shortest_time_that_was_read_in_a_row() -> None:
    turns = Turns(wave=2, first_bytes=0)
    turns.begin()
    for seconds in (0.03, 0.1):
        time.sleep(seconds)
        turns.ended.set()  # the caller hurried while this rank read: the next wait is its own
        turns.end()
        began = time.perf_counter()
        turns.begin()
        assert time.perf_counter() - began >= 0.06
    assert time.perf_counter() - began < 0.2, "not twice the 0.1 s"


def test_the_first_wave_never_waits() -> None:
    turns = Turns(wave=0, first_bytes=10**12)
    began = time.perf_counter()
    turns.begin()
    turns.end()
    turns.begin()
    assert time.perf_counter() - began < 0.5
