"""The group norm over the field, some rows at a time, once its sums over all rows are known."""

import torch
from torch import Tensor

from graticule.model.norms import FieldGroupNorm, merge
from graticule.model.pad import Rows

_aten = torch.ops.aten


class Moments:
    """Count, mean and sum of squared deviations of the rows seen so far, by sample and group."""

    def __init__(self, groups: int, like: Tensor) -> None:
        self._shape = like.shape[0], groups, -1
        self._all = like.new_zeros(3, like.shape[0], groups, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        kind = torch.promote_types(x.dtype, torch.float32)
        values = x.reshape(self._shape).to(kind)
        middle = values.mean(2, keepdim=True)
        squares = (values - middle).square_().sum(2)
        middle, squares = middle[:, :, 0].double(), squares.double()
        here = torch.stack([torch.full_like(middle, values.shape[2]), middle, squares])
        self._all = merge(torch.stack([self._all, here]))

    def merged(self, norm: FieldGroupNorm) -> Tensor:
        """(3, batch, group) of the whole field."""
        return merge(norm.gather(self._all))


class NormRows:
    """A group norm and SiLU of which the statistics are known, for some rows at a time.

    With x^ = (x - mean) rstd, d the gradient of the norm's output and N the values in a group,

        dL/dx = rstd (w d - sum(w d) / N - x^ sum(w d x^) / N)
    """

    def __init__(
        self, module: FieldGroupNorm, moments: Tensor, weight: Tensor, bias: Tensor
    ) -> None:
        """moments: (3, batch, group) of the whole field."""
        self._module, self.moments = module, moments
        self._kind = torch.promote_types(weight.dtype, torch.float32)
        self._features = weight.numel()
        count, mean, squares = moments
        rstd = (squares / count.clamp(min=1) + module.eps).rsqrt()
        self._count, self._weight = count, weight.double()
        self._mean, self._rstd = self._per_feature(mean), self._per_feature(rstd)
        self._scale = self._rstd * self._weight
        self._line = self._lines(self._scale, bias.double() - self._mean * self._scale)
        self._middle = self._lines(self._mean)[0]
        # Sums over rows of d x^ and of d.
        self._sums = moments.new_zeros(2, *self._mean.shape)

    def _per_feature(self, per_group: Tensor) -> Tensor:
        """(batch, group) -> (batch, feature)."""
        return per_group.repeat_interleave(self._features // per_group.shape[1], dim=1)

    def _lines(self, *each: Tensor) -> list[Tensor]:
        """(batch, feature) -> (batch, feature, 1, 1), as fields are computed."""
        return [x.to(self._kind)[:, :, None, None] for x in each]

    def _affine(self, x: Tensor) -> Tensor:
        scale, shift = self._line
        return torch.addcmul(shift, x.to(self._kind), scale)

    def forward(self, x: Tensor) -> Tensor:
        """What comes out."""
        return _aten.silu_(self._affine(x)).to(x.dtype)

    def of(self, field: Tensor) -> Rows:
        """Rows of what comes out, from a field that comes in."""
        return lambda first, last: self.forward(field[:, :, first:last])

    def through_silu(self, grad: Tensor, x: Tensor) -> Tensor:
        """d, from the gradient of what comes out."""
        d = self._affine(x)
        return _aten.silu_backward.grad_input(grad.to(self._kind), d, grad_input=d)

    def add(self, d: Tensor, x: Tensor) -> None:
        """Take these rows into the sums."""
        deviation = torch.sub(x.to(self._kind), self._middle)
        with_x = deviation.mul_(d).sum((2, 3)).double() * self._rstd
        self._sums += torch.stack([with_x, d.sum((2, 3)).double()])

    def close(self) -> None:
        """All rows are in the sums. A collective where a field has stripes."""
        self.grads = self._sums.sum(1).unbind(0)
        totals = (self._sums * self._weight).unflatten(2, (self._module.groups, -1)).sum(3)
        means = self._module.sum(totals) / self._count.clamp(min=1)
        by_x, by_one = map(self._per_feature, means)
        # As so much of d, so much of x and a number.
        slope = -(self._rstd**2) * by_x
        number = -self._rstd * by_one - slope * self._mean
        self._terms = self._lines(self._scale, slope, number)

    def input_grad(self, d: Tensor, x: Tensor) -> Tensor:
        """The gradient of these rows of what comes in."""
        of_d, of_x, number = self._terms
        return torch.addcmul(number, d.to(self._kind), of_d).addcmul_(x.to(self._kind), of_x)
