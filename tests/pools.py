"""Processes of this machine that all tests share: forking and meeting anew takes time."""

from collections import Counter

from graticule.parallel.local import LocalRanks


class Pools:
    """Ranks by how many there are, forked when first asked for and kept for all tests.

    Meshes leave groups behind, with open files and threads: now and then ranks start anew.
    """

    TESTS = 30
    SECONDS = 300
    """For what one test asks: many steps traced by four ranks take two minutes of two cores."""

    def __init__(self) -> None:
        self._pools: dict[int, LocalRanks] = {}
        self._used: Counter[int] = Counter()

    def __getitem__(self, size: int) -> LocalRanks:
        pool = self._pools.setdefault(size, LocalRanks(size, timeout_seconds=self.SECONDS))
        self._used[size] += 1
        if self._used[size] % self.TESTS == 0:
            pool.close()
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
