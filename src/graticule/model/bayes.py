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
from graticule.model.draws import Pool, current, has_no_values, normal
from graticule.model.layers import Layer

SigmaMap = Literal["softplus", "exp"]
PriorKind = Literal["standard", "scaled", "start", "mixture"]


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
    around the means m that `keep_start` kept, those of a pretrained model. `mixture`: N(0, sigma^2)
    with the probability `share`, else N(0, narrow^2) (Blundell et al., 2015)."""

    kind: PriorKind = "standard"
    sigma: float = 1.0
    narrow: float = 0.1
    share: float = 0.5

    def sigma_of(self, num_sources: int) -> float:
        return self.sigma / math.sqrt(3 * num_sources) if self.kind == "scaled" else self.sigma

    def of_mixture(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """(-log p, its derivative) of drawn weights."""
        logs, precisions = [], []
        for share, sigma in ((self.share, self.sigma), (1 - self.share, self.narrow)):
            precisions.append(1 / sigma**2)
            height = math.log(share) - math.log(sigma) - math.log(2 * math.pi) / 2
            logs.append(w.square().mul_(-precisions[-1] / 2).add_(height))
        wide = torch.sigmoid(logs[0] - logs[1])  # the probability that it is of the wide one
        slope = wide.mul_(precisions[0] - precisions[1]).add_(precisions[1]).mul_(w)
        return torch.logaddexp(*logs).neg_(), slope


@dataclass(frozen=True, eq=False)
class Spread:
    """What a parameter `rho` says, as long as it does not change: s and ds / d rho."""

    rho: Tensor
    deviation: Tensor
    slope: Tensor


@dataclass(eq=False, kw_only=True)
class Posterior:
    """What a layer's weights are drawn by; a layer's `sample`.

    keys: of each parameter, 64 bits. shapes: of each parameter, whole. num_sources: of the whole
    layer. boxes: which part of a parameter is here, where it is not all of it. pool: where those
    that are `pooled` are drawn, together with other layers'. kept: within `keeping`, of each
    parameter what was drawn last, and for which draw and type.
    """

    keys: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    num_sources: int
    sigma_map: SigmaMap
    initial_sigma: float
    prior: Prior
    boxes: dict[str, tuple[slice, ...]] = field(default_factory=dict)
    pool: Pool = field(default_factory=Pool)
    pooled: frozenset[str] = frozenset()
    kept: dict[str, tuple[Any, Tensor]] | None = None
    spreads: dict[str, Spread] = field(default_factory=dict)

    def spread(self, leaf: str, rho: Tensor) -> Spread | None:
        """Of a parameter, if it is known and this is its rho, not a part or a copy of it."""
        known = self.spreads.get(leaf)
        return known if known is not None and known.rho is rho else None

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
        mean, rho = layer.held(leaf), layer.held(f"{leaf}_rho")
        box = self.boxes.get(leaf)
        again = partial(self.noise, leaf, draw.words, box, mean.device)
        return _Sample.apply(mean, rho, again, self.sigma_map, dtype, self.spread(leaf, rho))

    def noise(
        self,
        leaf: str,
        words: tuple[int, int],
        box: tuple[slice, ...] | None,
        device: torch.device,
    ) -> Tensor:
        """eps of a parameter, or of a box of it: not to be written to."""
        key = self.keys[leaf]
        if leaf in self.pooled:
            whole = self.pool.normal(key, words, self.shapes[leaf], device)
            return whole if box is None else whole[box].contiguous()
        return normal(key, words, self.shapes[leaf], box, device)

    @torch.no_grad()
    def reset(self, layer: Layer) -> None:
        """The initial deviation, everywhere: `initial_sigma` times 1 / sqrt(3 n)."""
        sigma = self.initial_sigma / math.sqrt(3 * self.num_sources)
        for leaf in self.keys:
            getattr(layer, f"{leaf}_rho").fill_(rho_of(sigma, self.sigma_map))


class _Sample(torch.autograd.Function):
    """mu + s eps; keeps rho, which is the model's, and nothing else. known: of this rho."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, rho: Tensor, again: Callable[[], Tensor], sigma_map: SigmaMap,
        dtype: torch.dtype, known: Spread | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rho)
        ctx.again, ctx.sigma_map, ctx.known = again, sigma_map, known
        out = torch.empty(mean.shape, dtype=dtype, device=mean.device)
        if has_no_values(mean):
            torch.empty_like(mean, dtype=torch.float32)  # what was drawn
            return out
        if known is not None:
            return out.copy_((known.deviation * again()).add_(mean))
        for w, m, r, eps in zip(*map(_parts, (out, mean, rho, again())), strict=True):
            w.copy_(deviation(r, sigma_map).mul_(eps).add_(m))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rho,) = ctx.saved_tensors
        grad = grad.to(rho.dtype).contiguous()
        d_rho = torch.empty_like(rho)
        if has_no_values(rho):
            torch.empty_like(rho, dtype=torch.float32)
        elif ctx.known is not None:
            torch.mul(ctx.known.slope * ctx.again(), grad, out=d_rho)
        else:
            for d, r, eps, g in zip(*map(_parts, (d_rho, rho, ctx.again(), grad)), strict=True):
                torch.mul(slope(r, ctx.sigma_map).mul_(eps), g, out=d)
        return grad, d_rho, None, None, None, None


_PART = 2**17
"""Numbers at a time: what passes is small beside the rest, and stays in a CPU's cache."""


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(_PART)


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
    pool = Pool()
    for path, layer in model.named_modules():
        if not isinstance(layer, Layer) or not layer.bayesian:
            continue
        assert layer.sample is None, f"{path} is Bayesian already"
        means = dict(layer.named_parameters(recurse=False))
        keys = {leaf: key(f"{path}.{leaf}") for leaf in means}
        shapes = {leaf: tuple(mean.shape) for leaf, mean in means.items()}
        posterior = Posterior(
            keys=keys,
            shapes=shapes,
            num_sources=layer.num_sources,
            sigma_map=sigma_map,
            initial_sigma=initial_sigma,
            prior=prior or Prior(),
            pool=pool,
            pooled=frozenset(leaf for leaf in means if pool.takes(keys[leaf], shapes[leaf])),
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
    posterior: Posterior
    layer: Layer

    @property
    def leaf(self) -> str:
        """Its name in its layer."""
        return self.name.rpartition(".")[2]

    @property
    def start(self) -> Tensor | None:
        """The mean of the prior `start`, once it is there."""
        return getattr(self.layer, f"{self.leaf}_start", None)


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """All parameters of a model that are distributions."""
    for path, layer in model.named_modules():
        if isinstance(layer, Layer) and isinstance(layer.sample, Posterior):
            for leaf in layer.sample.keys:
                yield Weight(
                    name=f"{path}.{leaf}",
                    mean=getattr(layer, leaf),
                    rho=getattr(layer, f"{leaf}_rho"),
                    posterior=layer.sample,
                    layer=layer,
                )


@dataclass(frozen=True, kw_only=True)
class PosteriorNames:
    """What a model's checkpoint holds beside its means: deviations, and means of the prior."""

    deviations: set[str]
    starts: set[str]


def posterior_names(model: nn.Module) -> PosteriorNames:
    means = [weight.name for weight in weights_of(model)]
    return PosteriorNames(
        deviations={f"{name}_rho" for name in means}, starts={f"{name}_start" for name in means}
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


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within the block nobody changes weights: the deviations of small tensors are made once, all
    together, and not for each member and pass, which would cost more than the rest of a small
    model's step. The bits are the same. Of shards, and of what is traced, none is kept."""
    small: dict[tuple[SigmaMap, torch.dtype, torch.device], list[Weight]] = {}
    for weight in weights_of(model):
        whole = type(weight.rho) is nn.Parameter and weight.leaf in weight.posterior.pooled
        if whole and not weight.rho.is_meta:
            kind = weight.posterior.sigma_map, weight.rho.dtype, weight.rho.device
            small.setdefault(kind, []).append(weight)
    for (sigma_map, *_), weights in small.items():
        with torch.no_grad():
            every = torch.cat([weight.rho.flatten() for weight in weights])
            sizes = [weight.rho.numel() for weight in weights]
            both = (f(every, sigma_map).split(sizes) for f in (deviation, slope))
        for weight, s, by_rho in zip(weights, *both, strict=True):
            shape = weight.rho.shape
            known = Spread(weight.rho, s.view(shape), by_rho.view(shape))
            weight.posterior.spreads[weight.leaf] = known
    try:
        yield
    finally:
        for weights in small.values():
            for weight in weights:
                weight.posterior.spreads.clear()


@torch.no_grad()
def keep_start(model: nn.Module) -> None:
    """The means as they are now become those of the prior `start`; checkpoints hold them."""
    for layer in model.modules():
        if isinstance(layer, Layer) and isinstance(layer.sample, Posterior):
            for leaf in layer.sample.keys:
                setattr(layer, f"{leaf}_start", getattr(layer, leaf).detach().clone())
