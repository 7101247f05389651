"""What holds for every test."""

import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from graticule.parallel.local import LocalRanks
from pools import Pools

# Tests fork, and compare bit by bit with what a child computes: threads of a threaded parent hang
# in its children, and another number of threads adds in another order.
torch.set_num_threads(1)

# A shell has what it starts in the background ignore Ctrl-C, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What a test draws does not depend on those before it, of which each worker has others.


@pytest.fixture(autouse=True, scope="module")
def a_seed_for_a_module() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def a_seed_for_a_test(a_seed_for_a_module: None) -> None:
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command line sets up logging for its whole process; a test puts it back."""
    root, own = logging.getLogger(), logging.getLogger("graticule")
    handlers, levels = root.handlers[:], (root.level, own.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Of as many ranks as a test asks for; what fails in one starts it anew."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def two(pools: Pools) -> LocalRanks:
    return pools[2]


@pytest.fixture
def three(pools: Pools) -> LocalRanks:
    return pools[3]


@pytest.fixture
def four(pools: Pools) -> LocalRanks:
    return pools[4]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def spy(self: Figure, *args: Any, **kwargs: Any) -> None:
        saved.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return saved
