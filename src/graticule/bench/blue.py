"""Members' training steps beside torch-blue's, on one process.

torch-blue 1.1.0 (BEAST, section V) computes all members at once with `vmap`, so that their drawn
weights and graphs are alive together. Here one is alive at a time, and what runs twice is the
forward pass of all but one. The network is the same: patches, and blocks that mix each row's
tokens and each token's features, of linear layers, a convolution and plain norms. Both minimise
the NLL of a Gaussian with the members' mean and variance and a KL, by AdamW.
"""

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.bench.blue_failures import failures
from graticule.bench.rows import Row, Setting
from graticule.memory.trace import trace_memory
from graticule.model.bayes import make_bayesian
from graticule.model.draws import Draw, drawing
from graticule.model.layers import Conv, Linear
from graticule.parallel.exchange import Link
from graticule.train.loss import LossWeights
from graticule.train.members import Ensemble
from graticule.train.objective import Objective
from graticule.train.prior import Pull, kl_scale
from graticule.train.step import training_step

VERSION = "1.1.0"
HINT = (
    f"not measured: it needs torch-blue {VERSION}, which nothing else here does: `pip install"
    f" --no-deps torch-blue=={VERSION}` (or `--target FOLDER`, with FOLDER in PYTHONPATH)"
)
GRID, CHANNELS, WIDTH, BLOCKS, BATCH, ITEMS = (64, 128), 6, 256, 4, 2, 1000
REPEATS = 5


def rows(setting: Setting) -> list[Row]:
    vi = _torch_blue()
    if vi is None:
        return [
            Row(what=what, ours=None, against=None, goal=None, note=HINT)
            for what in ("torch-blue-m2", "torch-blue-m8", "torch-blue-failures")
        ]
    found: list[Row] = []
    for members in (2, 8):
        setting.say(f"steps of {members} members")
        found += _steps(members, vi)
    setting.say("what goes wrong with others")
    return found + list(failures(vi))


def _torch_blue() -> Any:
    try:
        if version("torch-blue") != VERSION:
            return None
    except PackageNotFoundError:
        return None
    return importlib.import_module("torch_blue.vi")


# The network, of either's layers


class Block(nn.Module):
    def __init__(self, linear: Any, columns: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.along = linear(columns, columns)
        self.up, self.down = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, row, column, feature)."""
        x = x + self.along(self.first(x).transpose(-1, -2)).transpose(-1, -2)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Mixer(nn.Module):
    """(batch, channel, lat, lon) to the same. linear, conv: classes of layers."""

    def __init__(self, linear: Any, conv: Any) -> None:
        super().__init__()
        self.embed = conv(CHANNELS, WIDTH, 2)
        self.blocks = nn.ModuleList(Block(linear, GRID[1] // 2) for _ in range(BLOCKS))
        self.recover = linear(WIDTH, 4 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            y = block(y)
        y = self.recover(y).unflatten(-1, (CHANNELS, 2, 2))
        return x + y.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class Drawn(nn.Module):
    """One of our layers' networks, called with a draw."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, draw: Draw) -> Tensor:
        with drawing(draw):
            return self.network(x)


def our_layers(seed: int = 0) -> Drawn:
    network = Mixer(Linear, lambda i, o, k: Conv(i, o, kernel=k, stride=k))
    for number, layer in enumerate(m for m in network.modules() if isinstance(m, (Linear, Conv))):
        layer.reset(torch.Generator().manual_seed(seed + number))
    numbers = itertools.count(1)
    make_bayesian(network, key=lambda name: next(numbers))
    return Drawn(network)


def their_layers(vi: Any) -> nn.Module:
    network = Mixer(nn.Linear, lambda i, o, k: nn.Conv2d(i, o, k, stride=k))
    vi.convert_to_vimodule(network)
    return network


# A step


class _Fields:
    """Two samples of noise."""

    keys, init_times = list(range(BATCH)), list(range(BATCH))

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = BATCH, 1, CHANNELS, *GRID
        self.inputs, self.label = (torch.randn(shape, generator=generator) for _ in range(2))

    def lead(self) -> tuple[Tensor, Tensor]:
        return self.label[:, :, :0], self.label


def our_step(members: int) -> tuple[nn.Module, Callable[[], float]]:
    model, fields = our_layers(), _Fields()
    objective = Objective(
        inputs=nn.Identity(), forcing=nn.Identity(), labels=nn.Identity(),
        statics=torch.zeros(0, *GRID), kind="mse", leads=1, num_prognostic=CHANNELS,
        weights=LossWeights.of(torch.ones(CHANNELS, *GRID, dtype=torch.bool).numpy()),
    )  # fmt: skip
    ensemble = Ensemble(
        num_members=members, own=range(members), likelihood="moments", floor=0.01, alpha=0.0,
        link=Link(), pull=Pull(model), kl_scale=kl_scale(1.0, ITEMS, objective.weight(1)),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    numbers = itertools.count(1)

    def step() -> float:
        return training_step(
            model, objective, [fields], optimizer=optimizer, step=next(numbers), samples=BATCH,
            learning_rate=1e-4, ensemble=ensemble,
        ).loss  # fmt: skip

    return model, step


def their_step(members: int, vi: Any) -> tuple[nn.Module, Callable[[], float]]:
    torch.manual_seed(0)
    model, fields = their_layers(vi), _Fields()
    loss_of = vi.KullbackLeiblerLoss(vi.distributions.MeanFieldNormal(), dataset_size=ITEMS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    x, y = fields.inputs[:, 0], fields.label[:, 0]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x, samples=members), y)
        torch.autograd.backward(loss)
        optimizer.step()
        return float(loss.detach())

    return model, step


def _steps(members: int, vi: Any) -> Iterator[Row]:
    peaks, seconds = [], []
    both = [our_step(members), their_step(members, vi)]
    for model, step in both:
        step()  # the optimizer has its state
        _, trace = trace_memory(step, lambda: {"parameters": model.parameters()})  # noqa: B023
        peaks.append(trace.peak_bytes / 2**20)
    for _ in range(REPEATS):
        taken = []
        for _, step in both:
            began = time.process_time()
            step()
            taken.append(time.process_time() - began)
        seconds.append(taken)
    ours, theirs = (statistics.median(each) for each in zip(*seconds, strict=True))
    number = sum(p.numel() for p in both[0][0].parameters())
    note = f"{number} parameters, {GRID[0]} x {GRID[1]} points, {BATCH} samples"
    yield Row(
        what=f"torch-blue-m{members}: memory", ours=peaks[0], against=peaks[1], goal=1.0,
        at_most=True, unit="MiB live at the peak", note=note,
    )  # fmt: skip
    yield Row(
        what=f"torch-blue-m{members}: CPU", ours=ours, against=theirs, goal=None,
        unit="CPU-s a step", at_most=True,
        note=f"{note}; ours passes forward {members - 1} times more and draws by key; medians of"
        f" {REPEATS}",
    )  # fmt: skip
