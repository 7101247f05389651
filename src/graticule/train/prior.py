"""The prior of weights that are distributions, and what a log says of their posterior.

What is minimised, with N training items, B items in a step and D output values of an item:

    L = (1 / (B D)) sum_b NLL_b  +  lambda / (N D) KL(q || p)

The KL belongs to the weights and to no sample, member or rank: its gradient is added once, to the
gradients that the ranks have summed up.

Of Gaussian priors it is exact. Of others the part with the prior is the mean over draws of the
weights, those of all the step's members, which any rank makes for what it holds:

    KL = -log s - (1 + log 2 pi) / 2 - mean log p(w),   w = mu + s eps
    d KL / d mu = -mean (log p)'(w),   d KL / d s = -1 / s - mean (log p)'(w) eps
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from graticule.model.bayes import Posterior, Prior, Weight, deviation, slope, weights_of
from graticule.model.draws import has_no_values
from graticule.model.layers import few
from graticule.parallel.box import box_of
from graticule.parallel.data import local

LOST = 2.0**-9
"""s / |mu| below which the noise is mostly lost when a weight is rounded to bfloat16: half of the
spacing of its 8 bits."""
_PART = 2**20
"""Numbers of a parameter at a time."""
SUMS = ("kl", "count", "mean_square", "variance", "lost")


class Pull:
    """The prior's pull at a model's weights, one parameter at a time.

    KL(q || p) = sum of log(sp / s) + (s^2 + (mu - m)^2) / (2 sp^2) - 1/2, which a mean and a
    deviation share out between them, so that each parameter's part can be added as soon as its
    gradient is there. Of split weights the parts add up; of copies one counts.

    sums: (5,) float64 `SUMS` of what was taken since the last `begin`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of: dict[Tensor, tuple[Weight, bool]] = {}
        for weight in weights_of(model):
            self._of[weight.mean], self._of[weight.rho] = (weight, False), (weight, True)
        if not self._of:
            raise ValueError("no weight of this model is a distribution: set bayes.weights=true")
        self.begin([(0, 0)])

    def begin(self, draws: Sequence[tuple[int, int]]) -> None:
        """Of a step. draws: `Draw.words` of those over which a prior without closed form is
        averaged."""
        self._draws = list(draws)
        device = next(iter(self._of)).device
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def take(self, parameter: Tensor, scale: float = 0.0, copies: int = 1) -> None:
        """Add `scale` times d KL / d parameter to the parameter's gradient, where it has one, and
        what the parameter's part is to `sums`, divided by the number of its `copies`. What is no
        distribution's stays as it is."""
        if parameter not in self._of:
            return
        weight, is_rho = self._of[parameter]
        if weight.posterior.prior.kind == "start" and weight.start is None:
            raise ValueError(
                f"the prior is around the weights that a run starts with, and {weight.name} has"
                " none: call keep_start once they are loaded"
            )
        sums = torch.zeros_like(self.sums)
        gradient = None if parameter.grad is None or not scale else local(parameter.grad)
        # A gradient's memory may be in another order than its parameter's.
        change = None if gradient is None else torch.empty_like(local(parameter))
        changes = [None] * len(_flat(parameter)) if change is None else _flat(change)
        if has_no_values(local(parameter)):
            return
        parts = _parts(weight.mean, weight.rho, weight.start)
        known = weight.posterior.spread(weight.leaf, weight.rho)  # of a small tensor: one part
        sigma_map = weight.posterior.sigma_map
        for (m, r, c), into, eps in zip(parts, few(changes), self._drawn(weight), strict=False):
            s = None
            if is_rho or eps is not None:
                s = known.deviation.view(-1) if known else deviation(r, sigma_map)
            if eps is None:
                terms, pull = _exact(weight.posterior, m, s, c)
            else:
                assert s is not None
                terms, pull = _averaged(weight.posterior.prior, m, s, eps, is_rho)
            sums[0] += terms.sum(dtype=torch.float64)
            if is_rho and s is not None:
                sums[3] += s.square().sum(dtype=torch.float64)
                sums[4] += (s < LOST * m.abs()).sum()
            else:
                sums[1] += m.numel()
                sums[2] += m.square().sum(dtype=torch.float64)
            if into is not None:
                if is_rho:
                    pull = pull.mul_(known.slope.view(-1) if known else slope(r, sigma_map))
                torch.mul(pull, scale, out=into)
        if gradient is not None and change is not None:
            gradient.add_(change)
        self.sums += sums / copies

    def _drawn(self, weight: Weight) -> Iterator[Tensor | None]:
        """(draw, number) of each of `_flat`'s parts; None where the prior needs none."""
        posterior = weight.posterior
        if posterior.prior.kind != "mixture":
            return itertools.repeat(None)
        box, leaf = box_of(weight.mean), weight.name.rpartition(".")[2]
        assert box is not None, weight.name
        each = [
            posterior.noise(leaf, words, box.slices, weight.mean.device).reshape(-1).split(_PART)
            for words in self._draws
        ]
        return (torch.stack(parts) for parts in zip(*each, strict=True))


def _exact(
    posterior: Posterior, mean: Tensor, s: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the mean (without s) or the deviation s adds to the KL of Gaussians, and the derivative
    by it."""
    sigma = posterior.prior.sigma_of(posterior.num_sources)
    if s is None:
        away = mean if start is None else mean - start
        return (away / sigma).square_().div_(2), away / sigma**2
    relative = s / sigma
    # Together, not one sum less another: near the prior each term is nearly 0.
    terms = (relative - 1) * (relative + 1) - 2 * torch.log(relative)
    return terms.div_(2), s / sigma**2 - 1 / s


def _averaged(
    prior: Prior, mean: Tensor, s: Tensor, draws: Tensor, is_rho: bool
) -> tuple[Tensor, Tensor]:
    """The same of a prior that is averaged over draws: with the mean comes the prior's part, with
    the deviation what the posterior adds."""
    cost, pull = torch.zeros_like(mean), torch.zeros_like(mean)
    for eps in draws.to(mean.dtype):
        of_draw, by_weight = prior.of_mixture(torch.addcmul(mean, s, eps))
        cost.add_(of_draw, alpha=1 / len(draws))
        pull.add_(by_weight.mul_(eps) if is_rho else by_weight, alpha=1 / len(draws))
    if is_rho:
        return torch.log(s).add_((1 + math.log(2 * math.pi)) / 2).neg_(), pull.sub_(1 / s)
    return cost, pull


def posterior_sums(model: nn.Module) -> Tensor:
    """(5,) float64 `SUMS` over the weights that are here, each once; those of parts add up."""
    pull = Pull(model)
    for weight in weights_of(model):
        pull.take(weight.mean)
        pull.take(weight.rho)
    return pull.sums


def _parts(
    mean: Tensor, rho: Tensor, start: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    starts = [None] * len(_flat(mean)) if start is None else _flat(start)
    return few(zip(_flat(mean), _flat(rho), starts, strict=True))


def _flat(tensor: Tensor) -> list[Tensor]:
    """Views of what is here, `_PART` numbers each."""
    return list(local(tensor.detach()).view(-1).split(_PART))


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


def summary(sums: Sequence[float], scale: float) -> dict[str, float]:
    """What a log says of a posterior. scale: `kl_scale`.

    kl: nats. kl_per_weight: nats. kl_scale, kl_loss: what it is multiplied by, and the product.
    signal_to_noise: root of sum mu^2 / sum s^2. noise_lost: share of weights whose noise bfloat16
    mostly rounds away.
    """
    value = dict(zip(SUMS, sums, strict=True))
    return {
        "kl": value["kl"],
        "kl_per_weight": value["kl"] / value["count"],
        "kl_scale": scale,
        "kl_loss": scale * value["kl"],
        "signal_to_noise": math.sqrt(value["mean_square"] / value["variance"]),
        "noise_lost": value["lost"] / value["count"],
    }
