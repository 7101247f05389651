"""Elementary functions of tensors by additions, multiplications, divisions and roots alone.

IEEE 754 rounds these alike everywhere, so the bits of a result depend on the bits of the argument
and on nothing else. PyTorch's own `log`, `exp` and `cos` differ in the last place between devices,
and on one CPU between the body of a tensor, which goes through vector registers, and its tail: a
part of a tensor would not be that part of the whole.
"""

import math

import torch
from torch import Tensor

_LN2 = {
    torch.float32: (0.693359375, -2.12194440e-4),
    torch.float64: (6.93147180369123816490e-1, 1.90821492927058770002e-10),
}
"""ln 2 in two parts, the first with so many zeros at its end that whole multiples are exact."""
_ATANH = {torch.float32: (9, 5), torch.float64: (18, 12)}
"""Terms of its series up to 1/3, and up to (sqrt(2) - 1) / (sqrt(2) + 1)."""
_EXP = {torch.float32: 8, torch.float64: 14}
"""Terms of its series up to ln(2) / 2."""
_EXPONENT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
"""Of a floating-point type: integers of its size, bits of its mantissa, bias of its exponent."""


def log(u: Tensor) -> Tensor:
    """Natural logarithm of positive normal numbers, float32 or float64."""
    mantissa, exponent = torch.frexp(u)  # in [1/2, 1)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = (exponent - low.to(exponent.dtype)).to(u.dtype)
    large, small = _LN2[u.dtype]
    part = _two_atanh((mantissa - 1) / (mantissa + 1), _ATANH[u.dtype][1]).add_(exponent * small)
    return part.add_(exponent * large)


def exp(x: Tensor) -> Tensor:
    """e^x where that is a normal number; the least of them below, the greatest power of 2 above."""
    large, small = _LN2[x.dtype]
    integers, bits, bias = _EXPONENT[x.dtype]
    powers = (x * (1 / math.log(2))).round_().clamp_(1 - bias, bias)
    rest = (x - powers * large).sub_(powers * small).clamp_(-0.5, 0.5)
    out = _series(rest, [1 / math.factorial(n) for n in range(_EXP[x.dtype])])
    return out.mul_((powers.to(integers) + bias).bitwise_left_shift_(bits).view(x.dtype))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), with all its digits where that is small."""
    e = exp(-x.abs())
    return _two_atanh(e / (e + 2), _ATANH[x.dtype][0]).add_(x.clamp(min=0))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), the slope of `softplus`."""
    e = exp(-x.abs())
    return torch.where(x < 0, e, 1.0) / (e + 1)


def rotation(turn: Tensor) -> tuple[Tensor, Tensor]:
    """(cos a, sin a) of a = pi/2 x turn, |turn| <= 1/2, float32."""
    a = turn * (math.pi / 2)
    square = a * a
    cosine = _series(square, [(-1) ** n / math.factorial(2 * n) for n in range(6)])
    sine = _series(square, [(-1) ** n / math.factorial(2 * n + 1) for n in range(5)])
    return cosine, sine.mul_(a)


def _two_atanh(z: Tensor, terms: int) -> Tensor:
    """log((1 + z) / (1 - z))."""
    return _series(z * z, [2 / (2 * n + 1) for n in range(terms)]).mul_(z)


def _series(x: Tensor, coefficients: list[float]) -> Tensor:
    """sum_n c_n x^n. Not by fused multiply-adds, which not all devices have."""
    *rest, last = coefficients
    out = x * last
    for each in reversed(rest[1:]):
        out.add_(each).mul_(x)
    return out.add_(rest[0])
