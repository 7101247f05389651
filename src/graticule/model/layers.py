"""Layers that look at one token (or get what they need padded): weights, casts, initial values.

Master weights are float32. A layer casts them to the dtype of its input, explicitly, through one
method, `weights`: the place where sampled or sharded weights come in.
"""

import math
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@cache
def _native(dtype: torch.dtype) -> bool:
    """Whether this CPU's matrix kernels know a 16-bit type."""
    known = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in known or bool(known[dtype]())


def dense(operation: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """operation(*operands), all of one dtype, accumulated in float32 and rounded once at the end.

    That is what 16-bit matrix units do. A CPU without them would fall back to loops that are 50
    times slower (AVX2, 4096^3), so there the rounded operands are widened to float32 first: the
    same products and sums, a copy dearer.
    """
    dtype = operands[0].dtype
    if operands[0].device.type != "cpu" or _native(dtype):
        return operation(*operands)
    return operation(*(operand.float() for operand in operands)).to(dtype)


class Layer(nn.Module):
    """A weight and a bias, drawn by `reset`."""

    weight: nn.Parameter
    bias: nn.Parameter

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(weight, bias) as the computation uses them."""
        return self.weight.to(dtype), self.bias.to(dtype)

    def reset(self, generator: torch.Generator) -> None:
        """Draw initial values from `generator`; the same draw whatever came before."""
        raise AssertionError("every layer says how it starts")


class Linear(Layer):
    """(..., in) -> (..., out). std: of the truncated normal that the weight starts with."""

    def __init__(self, num_in: int, num_out: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out))

    def reset(self, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(
            self.weight, std=self.std, a=-2 * self.std, b=2 * self.std, generator=generator
        )
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return dense(F.linear, x, *self.weights(x.dtype))


class Conv(Layer):
    """Convolution without padding over (batch, feature, lat, lon)."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        kernel: int,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.dilation, self.groups = kernel, stride, dilation, groups
        self.weight = nn.Parameter(torch.empty(num_out, num_in // groups, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(num_out))

    def reset(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        convolve = partial(F.conv2d, stride=self.stride, dilation=self.dilation, groups=self.groups)
        return dense(convolve, x, *self.weights(x.dtype))


class TransposedConv(Layer):
    """Transposed convolution over (batch, feature, lat, lon), all of its outputs.

    kernel: the stride where not given, so that every output has one source token; a larger one
    stands between a `TransposedPad` and a `Crop`.
    """

    def __init__(self, num_in: int, num_out: int, *, stride: int, kernel: int = 0) -> None:
        super().__init__()
        self.stride, self.kernel = stride, kernel or stride
        self.weight = nn.Parameter(torch.empty(num_in, num_out, self.kernel, self.kernel))
        self.bias = nn.Parameter(torch.empty(num_out))

    def reset(self, generator: torch.Generator) -> None:
        # As many source tokens as an output has, each with all features.
        bound = 1 / (math.sqrt(self.weight.shape[0]) * (self.kernel / self.stride))
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return dense(partial(F.conv_transpose2d, stride=self.stride), x, *self.weights(x.dtype))


class Norm(Layer):
    """A scale and an offset per feature, 1 and 0 at first. eps: added to the variance."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))

    def reset(self, generator: torch.Generator) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


class LayerNorm(Norm):
    """Over the features of one token."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weights(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class Mlp(nn.Module):
    """x -> fc2(GELU(fc1(x)))."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, ratio * width)
        self.fc2 = Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class PatchEmbedding(nn.Module):
    """(batch, channel, lat, lon) -> tokens (batch, width, lat / patch, lon / patch).

    A linear map of each patch's values, in the order (row, column, channel).
    """

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.linear = Linear(channels * patch**2, width)

    def forward(self, field: Tensor) -> Tensor:
        batch, channels, height, width = field.shape
        p = self.patch
        patches = field.view(batch, channels, height // p, p, width // p, p)
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3)  # (batch, lat, lon, p * p * c)
        # Contiguous: convolutions whose features come last are 2 to 4 times slower on CPUs
        # (gradient of the weight, AVX2, 256 features).
        return self.linear(patches).permute(0, 3, 1, 2).contiguous()


class PatchRecovery(nn.Module):
    """Tokens (batch, width, lat, lon) -> field (batch, channel, lat * patch, lon * patch)."""

    def __init__(self, width: int, channels: int, patch: int) -> None:
        super().__init__()
        self.patch, self.channels = patch, channels
        # Small: the untrained model is close to persistence, its residual connection alone.
        self.linear = Linear(width, channels * patch**2, std=2e-3)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, _, height, width = tokens.shape
        p = self.patch
        patches = self.linear(tokens.permute(0, 2, 3, 1))
        patches = patches.view(batch, height, width, p, p, self.channels)
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(
            batch, self.channels, height * p, width * p
        )
