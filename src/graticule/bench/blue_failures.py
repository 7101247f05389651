"""What goes wrong in torch-blue 1.1.0, beside the same here: each a number that ought to be 0."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graticule.bench.rows import Row
from graticule.model.bayes import Prior, deviation, make_bayesian, weights_of
from graticule.model.draws import Draw, drawing
from graticule.model.layers import Linear
from graticule.train.likelihoods import score_of
from graticule.train.loss import LossWeights
from graticule.train.prior import posterior_sums


def failures(vi: Any) -> Iterator[Row]:
    """A row a case. vi: `torch_blue.vi`."""
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
    with torch.no_grad():
        weight = layer.sample_variable("weight")
        found = float(layer.get_log_probs(weight, "weight")[1])
    mean, log_std = (
        layer.get_parameter(f"_weight_{name}").detach().double() for name in ("mean", "log_std")
    )
    deviations = ((weight.double() - mean) / log_std.exp()).square() / 2
    return abs(found / -float((deviations + log_std).sum()) - 1)
