"""The prior of weights that are distributions, and what a log says of their posterior.

What is minimised, with N training items, B items in a step and D output values of an item:

    L = (1 / (B D)) sum_b NLL_b  +  lambda / (N D) KL(q || p)

The KL belongs to the weights and to no sample, member or rank: its gradient is added once, to the
gradients that the ranks have summed up.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from graticule.model.bayes import Weight, deviation, slope, weights_of
from graticule.model.layers import few
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
    gradient is there. Of Gaussians it is exact: it has no noise and needs no member. Of split
    weights the parts add up; of copies one counts.

    sums: (5,) float64 `SUMS` of what was taken so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of: dict[Tensor, tuple[Weight, bool]] = {}
        for weight in weights_of(model):
            self._of[weight.mean], self._of[weight.rho] = (weight, False), (weight, True)
        if not self._of:
            raise ValueError("no weight of this model is a distribution: set bayes.weights=true")
        self.clear()

    def clear(self) -> None:
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
        prior, posterior = weight.posterior.prior, weight.posterior
        sigma = prior.sigma_of(posterior.num_sources)
        parts = _parts(weight.mean, weight.rho, weight.start)
        known = posterior.spread(weight.leaf, weight.rho)  # of a small tensor, which is one part
        for (m, r, c), into in zip(parts, few(changes), strict=True):
            if is_rho:
                s = deviation(r, posterior.sigma_map) if known is None else known.deviation.view(-1)
                relative = s / sigma
                # Together, not one sum less another: near the prior each term is nearly 0.
                terms = (relative - 1) * (relative + 1) - 2 * torch.log(relative)
                sums[3] += s.square().sum(dtype=torch.float64)
                sums[4] += (s < LOST * m.abs()).sum()
                if into is not None:
                    # d KL / d s = s / sp^2 - 1 / s
                    by_rho = (
                        slope(r, posterior.sigma_map) if known is None else known.slope.view(-1)
                    )
                    pull = (s / sigma**2 - 1 / s).mul_(by_rho)
                    torch.mul(pull, scale, out=into)
            else:
                away = m if c is None else m - c
                terms = (away / sigma).square_()
                sums[1] += m.numel()
                sums[2] += m.square().sum(dtype=torch.float64)
                if into is not None:
                    torch.mul(away, scale / sigma**2, out=into)
            sums[0] += terms.sum(dtype=torch.float64) / 2
        if gradient is not None and change is not None:
            gradient.add_(change)
        self.sums += sums / copies


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
