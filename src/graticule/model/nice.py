"""Noise input conditioning for ensembles (NICE): norms whose scale and offset come from noise.

BEAST, section IV: of each sample and member one vector of noise, the same for all norms and all
points. A block's two norms make their numbers together, in two products; not all blocks' at once,
so that a block can be computed again, and its weights be gathered, by itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from graticule.model.draws import current, has_no_values, noise
from graticule.model.layers import Layer, Linear

_aten = torch.ops.aten


class Nice(nn.Module):
    """What a block's norms scale and add: (norm, sample, part, width), of the master weights' type.

    A linear layer to `hidden` features, GELU, and another one, for each norm its own. The last one
    starts at 0: a new model does not hear the noise.

    norms: side by side. parts: scale, offset, and what else comes per feature. num_noise: values
    of noise; 0: learned numbers alone. key: of the noise, one of the whole model.
    """

    def __init__(
        self, norms: int, width: int, *, parts: int, num_noise: int, hidden: int, key: int
    ) -> None:
        super().__init__()
        self.norms, self.parts, self.num_noise, self.key = norms, parts, num_noise, key
        self.second: Heads | Offsets
        if num_noise:
            self.first = Linear(num_noise, norms * hidden, std=num_noise**-0.5)
            self.first.bayesian = False
            self.second = Heads(norms, hidden, parts, width)
        else:
            self.second = Offsets(norms, parts, width)

    def forward(self, num_samples: int) -> Tensor:
        bias = self.second.held("bias")
        if not self.num_noise:
            return bias[:, None].expand(-1, num_samples, -1, -1)
        draw = current()
        if len(draw.items) != num_samples:
            raise ValueError(
                f"a batch of {num_samples} samples was called with a draw of"
                f" {len(draw.items)} items: each sample's noise has the number of its own"
                " item (Draw.items)"
            )
        if has_no_values(bias):
            e = bias.new_empty(num_samples, self.num_noise)
        else:
            e = noise(self.key, draw, self.num_noise, bias.device).to(bias.dtype)
        hidden = F.gelu(self.first(e)).unflatten(1, (self.norms, -1))
        return self.second(hidden.transpose(0, 1))

    @property
    def forward_flops(self) -> int:
        """Of one sample, 2 per multiply-add."""
        products = self.first.weight.numel() + self.second.weight.numel() if self.num_noise else 0
        return 2 * products


class Heads(Layer):
    """(norm, sample, in) -> (norm, sample, part, width), a linear layer for each norm, 0 at
    first."""

    bayesian = False

    def __init__(self, norms: int, num_in: int, parts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(norms, parts, width, num_in))
        self.bias = nn.Parameter(torch.empty(norms, parts, width))

    def reset(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weights(x.dtype)
        flat = bias.flatten(1)[:, None], x, weight.flatten(1, 2).transpose(1, 2)
        return torch.baddbmm(*flat).unflatten(-1, bias.shape[1:])


class Offsets(Layer):
    """Learned numbers in the place of `Heads`, (norm, part, width), 0 at first."""

    bayesian = False

    def __init__(self, norms: int, parts: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(norms, parts, width))

    def reset(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.bias)


def conditioned(x: Tensor, scale: Tensor, offset: Tensor, groups: int, eps: float) -> Tensor:
    """(1 + scale) norm(x) + offset, the norm of each token over each group of its features.

    x: (sample * window, token, feature). scale, offset: (sample, feature). Of activations the
    gradient needs x alone. Groups are the model's own, so features may be shared among ranks.
    """
    return _Conditioned.apply(x, scale.to(x.dtype), offset.to(x.dtype), groups, eps)


def by_sample(x: Tensor, samples: int) -> tuple[int, int, int]:
    """(sample, tokens of all its windows, feature): the shape of tokens by window, seen so."""
    return samples, x.shape[0] * x.shape[1] // samples, x.shape[-1]


class _Conditioned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, offset: Tensor, groups: int, eps: float
    ) -> Tensor:
        x = x.contiguous()
        split = x.view(*x.shape[:-1], groups, x.shape[-1] // groups)
        normed, mean, rstd = _aten.native_layer_norm(split, split.shape[-1:], None, None, eps)
        ctx.save_for_backward(x, scale, mean, rstd)
        ctx.groups = groups
        out = normed.view(by_sample(x, len(scale))).mul_(1 + scale[:, None])
        return out.add_(offset[:, None]).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, mean, rstd = ctx.saved_tensors
        split = x.view(*x.shape[:-1], ctx.groups, x.shape[-1] // ctx.groups)
        samples = by_sample(x, len(scale))
        grad = grad.contiguous()
        through = (grad.view(samples) * (1 + scale[:, None])).view(split.shape)
        dx, _, _ = _aten.native_layer_norm_backward(
            through, split, split.shape[-1:], mean, rstd, None, None, [True, False, False]
        )
        del through
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = ((split - mean) * rstd).to(x.dtype).view(samples)
        d_scale = normed.mul_(grad.view(samples)).sum(1, dtype=wide)
        d_offset = grad.view(samples).sum(1, dtype=wide)
        return dx.view(x.shape), d_scale.to(x.dtype), d_offset.to(x.dtype), None, None
