"""Members' training steps beside torch-blue's, on one process, and what goes wrong there.

torch-blue 1.1.0 (BEAST, section V) computes all members at once with `vmap`, so that their drawn
weights and graphs are alive together. Here one is alive at a time, and what runs twice is the
forward pass of all but one. The network is the same: patches, and blocks that mix each row's
tokens and each token's features, of linear layers, a convolution and plain norms. Both minimise
the NLL of a Gaussian with the members' mean and variance and a KL, by AdamW.
"""

import importlib
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graticule.bench.rows import Row, Setting
from graticule.memory.trace import trace_memory
from graticule.model.bayes import Prior, deviation, make_bayesian, weights_of
from graticule.model.draws import Draw, drawing
from graticule.model.layers import Conv, Linear
from graticule.parallel.exchange import Link
from graticule.train.likelihoods import score_of
from graticule.train.loss import LossWeights
from graticule.train.members import Ensemble
from graticule.train.objective import Objective
from graticule.train.prior import Pull, kl_scale, posterior_sums
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


# What goes wrong


def failures(vi: Any) -> Iterator[Row]:
    """Each as a number that ought to be 0: ours, and torch-blue's."""
    cases: dict[str, tuple[Callable[[], float], Callable[[Any], float], str]] = {
        "noise by row": (_our_rows, _their_rows, "deviation over 4 equal rows of one member"),
        "no gradient at zero": (
            _our_zero, _their_zero, "share of rho's gradients that is NaN, of an input of 0",
        ),
        "one member": (_our_one, _their_one, "1 where its loss is NaN; ours is an error"),
        "other members": (
            _our_others, _their_others, "change of member 0 when 8 are asked for and not 2",
        ),
        "recomputation": (_our_again, _their_again, "1 where torch's checkpoint inside fails"),
        "in place": (_our_in_place, _their_in_place, "1 where `x += ...` in a forecast fails"),
        "KL in bfloat16": (_our_kl, _their_kl, "relative error of the log densities' sum"),
    }  # fmt: skip
    for name, (ours, theirs, note) in cases.items():
        torch.manual_seed(0)
        yield Row(
            what=f"torch-blue-failures: {name}", ours=ours(), against=theirs(vi),
            goal=1e-3, at_most=True, note=note,
        )  # fmt: skip


def _linear(num_in: int, num_out: int, sigma: float = 1.0) -> Linear:
    layer = Linear(num_in, num_out, std=num_in**-0.5)
    layer.reset(torch.Generator().manual_seed(0))
    numbers = itertools.count(1)
    make_bayesian(layer, key=lambda name: next(numbers), initial_sigma=sigma, prior=Prior())
    return layer


def _analytic(vi: Any, network: Any) -> Any:
    return vi.AnalyticalKullbackLeiblerLoss(
        network, vi.distributions.MeanFieldNormal(), dataset_size=10
    )


def _our_rows() -> float:
    with drawing(Draw(step=1, member=0)), torch.no_grad():
        return float(_linear(8, 4)(torch.ones(4, 8)).std(0).mean())


def _their_rows(vi: Any) -> float:
    network = vi.VISequential(vi.VILinear(8, 4))
    _analytic(vi, network)
    with torch.no_grad():
        return float(network(torch.ones(4, 8), samples=2)[0].std(0).mean())


def _our_zero() -> float:
    layer = _linear(8, 4)
    with drawing(Draw(step=1, member=0)):
        out = layer(torch.zeros(4, 8))
    (gradient,) = torch.autograd.grad(out.sum(), [layer.get_parameter("weight_rho")])
    return float(gradient.isnan().double().mean())


def _their_zero(vi: Any) -> float:
    layer = vi.VILinear(8, 4, bias=False)
    network = vi.VISequential(layer)
    _analytic(vi, network)
    out = network(torch.zeros(4, 8), samples=2)
    (gradient,) = torch.autograd.grad(out.sum(), [layer.get_parameter("_weight_log_std")])
    return float(gradient.isnan().double().mean())


def _our_one() -> float:
    weights = LossWeights.of(torch.ones(1, 2, 2, dtype=torch.bool).numpy())
    try:
        score_of("moments", weights, num_members=1, floor=0.1, alpha=1.0)
    except ValueError:
        return 0.0
    return 1.0


def _their_one(vi: Any) -> float:
    network = vi.VISequential(vi.VILinear(8, 4))
    loss_of = vi.KullbackLeiblerLoss(vi.distributions.MeanFieldNormal(), dataset_size=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a deviation of one number
        loss = loss_of(network(torch.ones(4, 8), samples=1), torch.zeros(4, 4))
    return float(math.isnan(float(loss.detach())))


def _our_others() -> float:
    layer, first = _linear(8, 4), []
    for members in (2, 8):
        said = []
        for member in range(members):
            with drawing(Draw(step=1, member=member)), torch.no_grad():
                said.append(layer(torch.ones(4, 8)))
        first.append(said[0])
    return float((first[0] - first[1]).abs().max())


def _their_others(vi: Any) -> float:
    network, first = vi.VISequential(vi.VILinear(8, 4)), []
    for members in (2, 8):
        torch.manual_seed(1)
        with torch.no_grad():
            first.append(network(torch.ones(4, 8), samples=members)[0])
    return float((first[0] - first[1]).abs().max())


class _Again(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class _InPlace(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x += self.layer(x)
        return x


def _fails(network: nn.Module, *, graph: bool = True, **more: Any) -> float:
    try:
        with torch.set_grad_enabled(graph):
            out = network(torch.ones(4, 8), **more).square().sum()
        if graph:
            torch.autograd.grad(out, [p for p in network.parameters() if p.requires_grad])
    except RuntimeError:
        return 1.0
    return 0.0


def _our_again() -> float:
    # By key: what runs again draws the same. Bound to its draw, as units are.
    with drawing(Draw(step=1, member=0)):
        return _fails(_Again(_linear(8, 8)))


def _their_again(vi: Any) -> float:
    network = _Again(nn.Linear(8, 8))
    vi.convert_to_vimodule(network)
    return _fails(network, samples=2)


def _our_in_place() -> float:
    with drawing(Draw(step=1, member=0)):
        return _fails(_InPlace(_linear(8, 8)), graph=False)


def _their_in_place(vi: Any) -> float:
    network = _InPlace(nn.Linear(8, 8))
    vi.convert_to_vimodule(network)
    return _fails(network, graph=False, samples=2)


def _our_kl() -> float:
    layer = _linear(300, 100)
    weights = list(weights_of(layer))
    exact = sum(
        float(torch.distributions.kl_divergence(
            torch.distributions.Normal(
                w.mean.detach().double(), deviation(w.rho.detach().double(), "softplus")
            ),
            torch.distributions.Normal(0.0, 1.0),
        ).sum()) for w in weights
    )  # fmt: skip
    # Means and deviations are float32 whatever is computed in.
    with drawing(Draw(step=1, member=0)), torch.no_grad():
        assert layer(torch.ones(1, 300, dtype=torch.bfloat16)).dtype is torch.bfloat16
    return abs(float(posterior_sums(layer)[0]) / exact - 1)


def _their_kl(vi: Any) -> float:
    layer = vi.VILinear(300, 100).to(torch.bfloat16)
    weight = layer.sample_variable("weight")
    found = float(layer.get_log_probs(weight, "weight")[1])
    mean, log_std = (
        layer.get_parameter(f"_weight_{name}").double() for name in ("mean", "log_std")
    )
    deviations = ((weight.double() - mean) / log_std.exp()).square() / 2
    return abs(found / -float((deviations + log_std).sum()) - 1)
