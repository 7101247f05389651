"""Weights as distributions: each number w of a layer is N(mu, s^2), independent of all others.

The rule: every `Layer` but norms and what conditions them (`Layer.bayesian`) keeps its
parameters, under their names, as means, and has beside each one `NAME_rho` of the same shape and
type, with s = softplus(rho) (or e^rho). A layer asks for its weights through `Layer.value`; what it
gets is

    w = mu + s eps,    eps ~ N(0, 1) by (key of the parameter, step, member, index in it)

made in the type of mu and rounded once. eps is never kept: the backward pass draws it again, for
d/d rho = (d/d w) eps s'(rho). One draw holds for all samples and points of a forward pass, and for
all leads of a rollout: noise by row or point, cheaper by local reparameterisation, would make
fields that no set of weights makes, so there is none.

What is minimised, with N training items, B items in a step and D output values of an item:

    L = (1 / (B D)) sum_b NLL_b  +  lambda / (N D) KL(q || p)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graticule.model import elementary
from graticule.model.draws import current, normal
from graticule.model.layers import Layer, few

SigmaMap = Literal["softplus", "exp"]
PriorKind = Literal["standard", "scaled", "start"]
LOST = 2.0**-9
"""s / |mu| below which the noise is mostly lost when a weight is rounded to bfloat16: half of the
spacing of its 8 bits."""
_PART = 2**20
"""Numbers of a parameter at a time."""


def deviation(rho: Tensor, sigma_map: SigmaMap) -> Tensor:
    """s of rho, with the same bits for a number wherever in a tensor it stands."""
    return elementary.softplus(rho) if sigma_map == "softplus" else elementary.exp(rho)


def slope(rho: Tensor, sigma_map: SigmaMap) -> Tensor:
    """ds / d rho."""
    return elementary.sigmoid(rho) if sigma_map == "softplus" else elementary.exp(rho)


def rho_of(sigma: float, sigma_map: SigmaMap) -> float:
    """rho whose deviation is `sigma`."""
    return math.log(math.expm1(sigma) if sigma_map == "softplus" else sigma)


@dataclass(frozen=True, kw_only=True)
class Prior:
    """p(w) of each weight. `standard`: N(0, sigma^2). `scaled`: N(0, sigma^2 / (3 n)), n products
    an output adds up: of sigma 1 the spread of the usual initial values. `start`: N(m, sigma^2)
    around the means m that `keep_start` kept, those of a pretrained model."""

    kind: PriorKind = "standard"
    sigma: float = 1.0

    def sigma_of(self, num_sources: int) -> float:
        return self.sigma / math.sqrt(3 * num_sources) if self.kind == "scaled" else self.sigma


@dataclass(eq=False, kw_only=True)
class Posterior:
    """What a layer's weights are drawn by; a layer's `sample`.

    keys: of each parameter, 64 bits. shapes: of each parameter, whole. num_sources: of the whole
    layer. boxes: which part of a parameter is here, where it is not all of it. kept: within
    `keeping`, of each parameter what was drawn last, and for which draw and type.
    """

    keys: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    num_sources: int
    sigma_map: SigmaMap
    initial_sigma: float
    prior: Prior
    boxes: dict[str, tuple[slice, ...]] = field(default_factory=dict)
    kept: dict[str, tuple[Any, Tensor]] | None = None

    def __call__(self, layer: Layer, leaf: str, dtype: torch.dtype) -> Tensor:
        if self.kept is None:
            return self._drawn(layer, leaf, dtype)
        which = current().words, dtype
        if leaf not in self.kept or self.kept[leaf][0] != which:
            self.kept.pop(leaf, None)  # before there is another
            self.kept[leaf] = which, self._drawn(layer, leaf, dtype)
        return self.kept[leaf][1]

    def _drawn(self, layer: Layer, leaf: str, dtype: torch.dtype) -> Tensor:
        draw = current()
        mean, rho = getattr(layer, leaf), getattr(layer, f"{leaf}_rho")
        again = partial(
            normal, self.keys[leaf], draw.words, self.shapes[leaf], self.boxes.get(leaf),
            mean.device,
        )  # fmt: skip
        return _Sample.apply(mean, rho, again, self.sigma_map, dtype)

    @torch.no_grad()
    def reset(self, layer: Layer) -> None:
        """The initial deviation, everywhere: `initial_sigma` times 1 / sqrt(3 n)."""
        sigma = self.initial_sigma / math.sqrt(3 * self.num_sources)
        for leaf in self.keys:
            getattr(layer, f"{leaf}_rho").fill_(rho_of(sigma, self.sigma_map))


class _Sample(torch.autograd.Function):
    """mu + s eps; keeps rho, which is the model's, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, rho: Tensor, again: Callable[[], Tensor], sigma_map: SigmaMap,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rho)
        ctx.again, ctx.sigma_map = again, sigma_map
        if mean.is_meta:
            return torch.empty_like(mean, dtype=dtype)
        return deviation(rho, sigma_map).mul_(again()).add_(mean).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rho,) = ctx.saved_tensors
        grad = grad.to(rho.dtype)
        if rho.is_meta:
            return grad, torch.empty_like(rho), None, None, None
        return grad, slope(rho, ctx.sigma_map).mul_(ctx.again()).mul_(grad), None, None, None


def make_bayesian(
    model: nn.Module,
    *,
    key: Callable[[str], int],
    prior: Prior | None = None,
    sigma_map: SigmaMap = "softplus",
    initial_sigma: float = 0.05,
) -> None:
    """Turn a model's weights into distributions, in place, by the module's rule.

    key: of a parameter's name, 64 bits. initial_sigma: of each deviation, in 1 / sqrt(3 n), n
    products that an output adds up: relative to the usual initial values. The means stay.
    """
    for path, layer in model.named_modules():
        if not isinstance(layer, Layer) or not layer.bayesian:
            continue
        assert layer.sample is None, f"{path} is Bayesian already"
        means = dict(layer.named_parameters(recurse=False))
        posterior = Posterior(
            keys={leaf: key(f"{path}.{leaf}") for leaf in means},
            shapes={leaf: tuple(mean.shape) for leaf, mean in means.items()},
            num_sources=layer.num_sources,
            sigma_map=sigma_map,
            initial_sigma=initial_sigma,
            prior=prior or Prior(),
        )
        for leaf, mean in means.items():
            layer.register_parameter(f"{leaf}_rho", nn.Parameter(torch.empty_like(mean)))
            if posterior.prior.kind == "start":
                layer.register_buffer(f"{leaf}_start", None)
        layer.sample = posterior
        posterior.reset(layer)


@dataclass(frozen=True, eq=False, kw_only=True)
class Weight:
    """One parameter that is a distribution."""

    name: str
    mean: Tensor
    rho: Tensor
    start: Tensor | None
    posterior: Posterior


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """All parameters of a model that are distributions."""
    for path, layer in model.named_modules():
        if isinstance(layer, Layer) and isinstance(layer.sample, Posterior):
            for leaf in layer.sample.keys:
                yield Weight(
                    name=f"{path}.{leaf}",
                    mean=getattr(layer, leaf),
                    rho=getattr(layer, f"{leaf}_rho"),
                    start=getattr(layer, f"{leaf}_start", None),
                    posterior=layer.sample,
                )


@contextmanager
def keeping(model: nn.Module) -> Iterator[None]:
    """Within the block, where nobody takes gradients or changes weights, what is drawn stays until
    another draw is asked for: all leads of a member draw its weights once, for a copy of them."""
    posteriors = [
        layer.sample
        for layer in model.modules()
        if isinstance(layer, Layer) and isinstance(layer.sample, Posterior)
    ]
    for posterior in posteriors:
        posterior.kept = {}
    try:
        yield
    finally:
        for posterior in posteriors:
            posterior.kept = None


@torch.no_grad()
def keep_start(model: nn.Module) -> None:
    """The means as they are now become those of the prior `start`; checkpoints hold them."""
    for layer in model.modules():
        if isinstance(layer, Layer) and isinstance(layer.sample, Posterior):
            for leaf in layer.sample.keys:
                setattr(layer, f"{leaf}_start", getattr(layer, leaf).detach().clone())


def kl(model: nn.Module) -> Tensor:
    """KL(q || p) in nats, float64, of the weights that are here, each once; differentiable.

    Of Gaussians it is exact, so it has no noise and needs no member. Of split weights the parts
    add up; of copies one counts.
    """
    total: Tensor | None = None
    for weight in weights_of(model):
        prior = weight.posterior.prior
        if prior.kind == "start" and weight.start is None:
            raise ValueError(
                f"the prior is around the weights that a run starts with, and {weight.name} has"
                " none: call keep_start once they are loaded"
            )
        sigma = prior.sigma_of(weight.posterior.num_sources)
        each = _Kl.apply(weight.mean, weight.rho, weight.start, sigma, weight.posterior.sigma_map)
        total = each if total is None else total + each
    if total is None:
        raise ValueError("no weight of this model is a distribution: set bayes.weights=true")
    return total


class _Kl(torch.autograd.Function):
    """Sum of log(sp / s) + (s^2 + (mu - m)^2) / (2 sp^2) - 1/2.

    d/d mu = (mu - m) / sp^2, d/d s = s / sp^2 - 1 / s. Terms are made in the weights' type and
    added in float64.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, rho: Tensor, start: Tensor | None, sigma: float,
        sigma_map: SigmaMap,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(mean, rho, start)
        ctx.sigma, ctx.sigma_map = sigma, sigma_map
        total = torch.zeros((), dtype=torch.float64, device=mean.device)
        for m, r, c in _parts(mean, rho, start):
            s = deviation(r, sigma_map) / sigma
            away = (m if c is None else m - c) / sigma
            # Together, not one sum less another: near the prior each term is nearly 0.
            terms = (s - 1) * (s + 1) + away * away - 2 * torch.log(s)
            total += terms.sum(dtype=torch.float64) / 2
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, rho, start = ctx.saved_tensors
        d_mean, d_rho = torch.empty_like(mean), torch.empty_like(rho)
        out = zip(_flat(d_mean), _flat(d_rho), strict=True)
        for (m, r, c), (dm, dr) in zip(_parts(mean, rho, start), out, strict=True):
            scale = grad.to(m.dtype)
            torch.mul(m if c is None else m - c, scale / ctx.sigma**2, out=dm)
            s = deviation(r, ctx.sigma_map)
            dr.copy_((s / ctx.sigma**2 - 1 / s).mul_(slope(r, ctx.sigma_map)).mul_(scale))
        return d_mean, d_rho, None, None, None


def _parts(
    mean: Tensor, rho: Tensor, start: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    starts = [None] * len(_flat(mean)) if start is None else _flat(start)
    return few(zip(_flat(mean.detach()), _flat(rho.detach()), starts, strict=True))


def _flat(tensor: Tensor) -> list[Tensor]:
    """Views, `_PART` numbers each."""
    return list(tensor.view(-1).split(_PART))


def kl_scale(cold: float, items: int, outputs: float) -> float:
    """What the KL is multiplied by beside the mean NLL of an output value: lambda / (N D).

    cold: lambda, below 1 of a cold posterior. items: training samples, N; neither the batches nor
    what a step has of either. outputs: values that a sample predicts and that count, D.
    """
    if items < 1 or outputs <= 0:
        raise ValueError(
            f"the prior of {items} training samples with {outputs:g} output values each has no"
            " weight: both must be above 0"
        )
    return cold / (items * outputs)


SUMS = ("kl", "count", "mean_square", "variance", "lost")


@torch.no_grad()
def posterior_sums(model: nn.Module) -> Tensor:
    """(5,) float64 `SUMS` over the weights that are here; those of parts add up."""
    first = next(weights_of(model), None)
    device = "cpu" if first is None else first.mean.device
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
    sums[0] = kl(model)
    for weight in weights_of(model):
        for m, r, _ in _parts(weight.mean, weight.rho, None):
            s = deviation(r, weight.posterior.sigma_map)
            sums[1] += m.numel()
            sums[2] += m.square().sum(dtype=torch.float64)
            sums[3] += s.square().sum(dtype=torch.float64)
            sums[4] += (s < LOST * m.abs()).sum()
    return sums


def summary(sums: Tensor, scale: float) -> dict[str, float]:
    """What a log says of a posterior. scale: `kl_scale`.

    kl: nats. kl_per_weight: nats. kl_scale, kl_loss: what it is multiplied by, and the product.
    signal_to_noise: root of sum mu^2 / sum s^2. noise_lost: share of weights whose noise bfloat16
    mostly rounds away.
    """
    value = dict(zip(SUMS, sums.tolist(), strict=True))
    return {
        "kl": value["kl"],
        "kl_per_weight": value["kl"] / value["count"],
        "kl_scale": scale,
        "kl_loss": scale * value["kl"],
        "signal_to_noise": math.sqrt(value["mean_square"] / value["variance"]),
        "noise_lost": value["lost"] / value["count"],
    }
