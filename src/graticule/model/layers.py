"""Layers that look at one token (or get what they need padded): weights, casts, initial values.

Master weights are float32. A layer casts them to the dtype of its input, explicitly, through one
method, `weights`: the place where sampled or sharded weights come in. Where the residual stream is
wider than what is computed, layers cast their input too, `operands`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

T = TypeVar("T")


@cache
def _native(dtype: torch.dtype) -> bool:
    """Whether this CPU's matrix kernels know a 16-bit type."""
    known = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in known or bool(known[dtype]())


_imitated = ""


@contextmanager
def imitating(kind: str) -> Iterator[None]:
    """Choose on tensors without values what a device of this kind (`cpu`, `cuda`) would choose."""
    global _imitated
    before, _imitated = _imitated, kind
    try:
        yield
    finally:
        _imitated = before


def kind_of(tensor: Tensor) -> str:
    """The kind of device whose kernels and sizes a tensor meets."""
    return _imitated or tensor.device.type


def few(parts: Iterable[T]) -> Iterator[T]:
    """Parts that take the same memory one after another: all, or two where values do not matter."""
    return islice(iter(parts), 2 if _imitated else None)


def attention(q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> Tensor:
    """Scaled dot product attention over (..., token, dim); added: to the scores, if anything."""
    if _imitated == "cuda":
        return _GpuAttention.apply(q, k, v, *added)
    return F.scaled_dot_product_attention(q, k, v, *added)  # type: ignore[arg-type]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *added: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as it is written, with the softmax in `dtype` and all scores kept."""
    scores = dense(torch.matmul, q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    for each in added:
        scores = scores + each
    return dense(torch.matmul, scores.softmax(-1, dtype=dtype).to(v.dtype), v)


class _GpuAttention(torch.autograd.Function):
    """The memory that a GPU's fused kernel takes: it keeps operands, result and a number a query,
    and gives the gradient of what was added for every window."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), *added)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, *added = ctx.saved_tensors
        grads: list[Tensor | None] = [torch.empty_like(x) for x in (q, k, v)]
        for bias in added:
            scores = q.new_empty(*q.shape[:-1], k.shape[-2])
            grads.append(scores.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None)
        return tuple(grads)


def dense(operation: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """operation(*operands), all of one dtype, accumulated in float32 and rounded once at the end.

    That is what 16-bit matrix units do. A CPU without them would fall back to loops that are 50
    times slower (AVX2, 4096^3), so there the rounded operands are widened to float32 first: the
    same products and sums, a copy dearer.
    """
    dtype = operands[0].dtype
    if kind_of(operands[0]) != "cpu" or _native(dtype):
        return operation(*operands)
    return operation(*(operand.float() for operand in operands)).to(dtype)


class Layer(nn.Module):
    """A weight and a bias, drawn by `reset`."""

    weight: nn.Parameter
    bias: nn.Parameter
    input_dtype: torch.dtype | None = None
    """What an input is cast to before anything else; None: it stays as it is."""
    bayesian: bool = True
    """Whether its numbers become distributions in a Bayesian model (`bayes`)."""
    sample: Callable[["Layer", str, torch.dtype], Tensor] | None = None
    """What draws the value of a parameter, in a Bayesian model."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(input, weight, bias) as the computation uses them, of one dtype."""
        x = x if self.input_dtype is None else x.to(self.input_dtype)
        return x, *self.weights(x.dtype)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(weight, bias) as the computation uses them."""
        return self.value("weight", dtype), self.value("bias", dtype)

    def value(self, leaf: str, dtype: torch.dtype) -> Tensor:
        """The parameter of that name as the computation uses it."""
        if self.sample is not None:
            return self.sample(self, leaf, dtype)
        return self.held(leaf).to(dtype)

    def held(self, leaf: str) -> Tensor:
        """The parameter of that name, or the part of it that is here."""
        return getattr(self, leaf)

    @property
    def num_sources(self) -> int:
        """How many products an output adds up; 1 of numbers that are added as they are."""
        return 1

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

    @property
    def num_sources(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return dense(F.linear, *self.operands(x))


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

    @property
    def num_sources(self) -> int:
        return self.weight[0].numel()

    def forward(self, x: Tensor) -> Tensor:
        convolve = partial(F.conv2d, stride=self.stride, dilation=self.dilation, groups=self.groups)
        return dense(convolve, *self.operands(x))


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

    @property
    def num_sources(self) -> int:
        return self.weight.shape[0] * self.kernel**2 // self.stride**2

    def forward(self, x: Tensor) -> Tensor:
        return dense(partial(F.conv_transpose2d, stride=self.stride), *self.operands(x))


class Norm(Layer):
    """A scale and an offset per feature, 1 and 0 at first. eps: added to the variance."""

    bayesian = False

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
        x, weight, bias = self.operands(x)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class Mlp(nn.Module):
    """x -> fc2(GELU(fc1(x))).

    Of activations the gradient needs x and what fc1 gives; with an `input_dtype`, all that the
    published program keeps, GELU's result too.
    """

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, ratio * width)
        self.fc2 = Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.fc1.input_dtype is not None:
            return self.fc2(F.gelu(self.fc1(x)))
        return self.fused(x, *self.fc2.weights(x.dtype))

    def fused(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """weight, bias: of fc2. None: without."""
        placeholder, hidden = _Hidden.apply(x, *self.fc1.weights(x.dtype), weight, bias)
        with torch.no_grad():
            parts = (F.gelu(hidden), weight) if bias is None else (F.gelu(hidden), weight, bias)
            out = dense(F.linear, *parts)
        return _Stands.apply(placeholder, out)


class _Hidden(torch.autograd.Function):
    """fc1, and the gradients of a whole MLP: (a placeholder of its output, hidden features).

    Apart from fc2, so that recomputing stops before it. The gradient is made for some tokens at a
    time: of hidden features nothing but the kept ones is ever whole.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hidden = dense(F.linear, x, w1, b1)
        ctx.save_for_backward(x, hidden, w1, w2)
        ctx.mark_non_differentiable(hidden)
        ctx.set_materialize_grads(False)
        return x.new_empty(1).expand(*x.shape[:-1], w2.shape[0]), hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, hidden, w1, w2 = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        kind = torch.promote_types(x.dtype, torch.float32)
        sums = [torch.zeros_like(w, dtype=kind) for w in (w1, w1[:, 0], w2, w2[:, 0])]
        fields = [each.reshape(-1, each.shape[-1]) for each in (x, hidden, grad)]
        flat = dx.view(-1, x.shape[-1])
        size = max(-(-len(flat) // _PARTS), _LEAST_TOKENS)
        for tokens, features, d, out in few(
            zip(*(each.split(size) for each in (*fields, flat)), strict=True)
        ):
            if len(out):
                active = F.gelu(features)
                sums[2] += dense(torch.mm, d.T, active)
                sums[3] += d.sum(0, dtype=kind)
                del active
                d = torch.ops.aten.gelu_backward(dense(torch.mm, d, w2), features)
                sums[0] += dense(torch.mm, d.T, tokens)
                sums[1] += d.sum(0, dtype=kind)
                out.copy_(dense(torch.mm, d, w1))
        grads = [each.to(x.dtype) for each in sums]
        return dx, *grads[:3], grads[3] if ctx.needs_input_grad[4] else None


_PARTS = 8
_LEAST_TOKENS = 2048
"""Of a part: less would cost matrix products their speed."""


class _Stands(torch.autograd.Function):
    """`out` in the place of a placeholder, whose gradient it has."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


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
