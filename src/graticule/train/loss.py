"""The loss: a weighted sum of errors over a global weight, never a mean of means.

    loss = sum over leads k and channels c of  S_kc / W
    S_kc = sum over sample b, output offset o, cell y, x of  w[c, y, x] |p - t|^n
    W    = (number of samples b in the whole step) x (number of o) x total

w is 0 where the channel has no value (land) and the cell's area at sea, and total is, by
`train.denominator`, the sum of w over all channels and cells (`wet`), or what that sum would be
without land (`cells`). With `channel`, w is multiplied by what makes each channel that has sea
weigh the same. A sum adds up whatever way it is cut into micro-batches, stripes or ranks; every
part divides by the same W. A channel that is all land has the sum 0 and divides nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.config import TrainConfig
from graticule.mesh import Planes
from graticule.model.layers import few
from graticule.parallel.exchange import Link

Denominator = Literal["wet", "channel", "cells"]
Kind = Literal["mae", "mse", "published mae"]
"""`published mae` gives the numbers of `mae` and keeps what the published program keeps."""


def loss_kind(settings: TrainConfig) -> Kind:
    """What `train.loss` is in `train.precision`."""
    published = settings.loss == "mae" and settings.precision == "paper"
    return "published mae" if published else settings.loss


@dataclass(frozen=True, eq=False)
class LossWeights:
    """What each predicted value counts.

    cell: (channel, lat, lon) float32, 0 where not wet. Areas are relative to the mean cell, so
        that their size does not depend on the planet's. `wet` itself where all cells are alike.
    wet: (channel, lat, lon) bool.
    total: over the whole grid, whatever part of it is here: the weight of one sample at one output
        offset. The exact sum of `cell`, but for the denominator `cells`.
    """

    cell: Tensor
    wet: Tensor
    total: float

    @classmethod
    def of(
        cls,
        wet: np.ndarray,
        cell_area: np.ndarray | None = None,
        *,
        mean_area: float | None = None,
        denominator: Denominator = "wet",
        link: Link | None = None,
        planes: Planes | None = None,
        device: torch.device | str = "cpu",
    ) -> "LossWeights":
        """wet: (channel, lat, lon) bool. cell_area: (lat, lon), any unit; None: all cells alike.

        Of a part of the grid, which may be empty: mean_area is that of the whole grid's cells,
        link the ranks that hold its parts, of all channels. They call it together and get the same
        `total`. planes: which channels `wet` is of; None: all of them.
        device: where the weights are.
        ValueError if nothing is wet anywhere.
        """
        link, first = link or Link(), planes is None or planes.index == 0

        def of_all(cell: np.ndarray) -> Tensor:
            sums = torch.tensor(cell.sum((1, 2), dtype=np.float64), device=device)
            return sums if planes is None else planes.spread(sums)

        cell = wet = wet.astype(bool)
        relative = np.ones(wet.shape[1:], np.float32)
        if cell_area is not None:
            if (cell_area <= 0).any():
                raise ValueError(f"cell areas must be positive, the least is {cell_area.min():g}")
            mean_area = cell_area.mean() if mean_area is None else mean_area
            relative = (cell_area / mean_area).astype(np.float32)
            cell = wet * relative
        # Of the rounded weights, so that an error of 2 everywhere is a loss of 2.
        sums = of_all(cell)
        # Of the ranks that hold the same points, once.
        points = sums.new_tensor([relative.sum(dtype=np.float64) if first else 0.0])
        *by_channel, whole = link.sum(torch.cat([sums, points]), "weights").tolist()
        if not any(by_channel):
            raise ValueError(f"no predicted channel has a wet cell among {wet.shape}: no loss")
        if denominator == "channel":
            factors = np.array([whole / own if own else 0.0 for own in by_channel])
            ours = factors if planes is None else factors[planes.predicted(planes.index)]
            cell = (ours[:, None, None] * cell).astype(np.float32)
            by_channel = link.sum(of_all(cell), "weights").tolist()
        total = whole * len(by_channel) if denominator == "cells" else math.fsum(by_channel)
        mask = torch.from_numpy(wet)
        return cls(mask if cell is wet else torch.from_numpy(cell), mask, total).to(device)

    def sharing(self, wet: Tensor) -> "LossWeights":
        """The same with another one's mask, which is equal."""
        return LossWeights(wet if self.cell is self.wet else self.cell, wet, self.total)

    def to(self, device: torch.device | str) -> "LossWeights":
        wet = self.wet.to(device)
        return LossWeights(wet if self.cell is self.wet else self.cell.to(device), wet, self.total)


def weighted_errors(predicted: Tensor, target: Tensor, weights: LossWeights, kind: Kind) -> Tensor:
    """(channel,) float64, weighted sums of absolute or squared errors. Not divided by anything.

    predicted, target: (batch, output offset, channel, lat, lon), normalised. What `target` holds
    where a channel is not wet, NaN too, reaches neither the sum nor the gradient. NaN at sea does.
    """
    if predicted.shape != target.shape or predicted.shape[2:] != weights.cell.shape:
        raise ValueError(
            f"predicted {tuple(predicted.shape)}, target {tuple(target.shape)} and weights"
            f" {tuple(weights.cell.shape)} do not go together: (batch, output offset, channel,"
            " lat, lon) twice and (channel, lat, lon)"
        )
    if kind == "published mae":
        difference = error_of(predicted, target, weights.wet)
        return _by_channel(_weighed(difference.abs(), weights.cell)).sum((0, 1))
    return _Errors.apply(predicted, target, weights, kind)


def error_of(predicted: Tensor, target: Tensor, wet: Tensor) -> Tensor:
    """predicted - target in float32 (float64 of float64), 0 where not wet."""
    # Half precision would round a small difference of large numbers.
    wide = torch.promote_types(torch.promote_types(predicted.dtype, target.dtype), torch.float32)
    # Before any arithmetic with a weight: 0 x NaN is NaN.
    return torch.where(wet, predicted.to(wide) - target.to(wide), 0.0)


def error_sums(difference: Tensor, cell: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """((..., channel) float64 weighted sums, what `error_gradients` takes of each value): one byte
    of an absolute error, its sign; of a squared one the error. `difference` may be overwritten.

    difference: (..., channel, lat, lon), 0 where not wet. cell: (channel, lat, lon).
    """
    if kind == "mae":
        sign = torch.sign(difference).to(torch.int8)
        return _by_channel(_weighed(difference.abs_(), cell)), sign
    return _by_channel(_weighed(difference.square(), cell)), difference


def kept_dtype(kind: Kind, fields: torch.dtype) -> torch.dtype:
    """Of what `error_sums` gives for the gradient. fields: of what is compared."""
    return torch.int8 if kind == "mae" else torch.promote_types(fields, torch.float32)


def error_gradients(kept: Tensor, sums: Tensor, cell: Tensor, kind: Kind) -> Tensor:
    """Of each value, where the channels' sums have the gradients `sums`, of whose dtype it is."""
    return kept * _gradient_of(sums if kind == "mae" else 2 * sums, cell)


def parts(shape: Sequence[int], cut: int = 0) -> Iterator[tuple[int, slice]]:
    """(sample, channels), so much of (batch, output offset, channel, lat, lon) at a time that what
    is wide and passes is small beside the fields. cut: no part has channels before and after it."""
    batch, offsets, channels, rows, columns = shape
    step = max(1, _PART // max(1, offsets * rows * columns))
    slices = [
        slice(first, min(first + step, end))
        for begin, end in ((0, cut), (cut, channels))
        for first in range(begin, end, step)
    ]
    return few((b, some) for b in range(batch) for some in slices)


_PART = 2**22
"""Values."""


def _weighed(values: Tensor, cell: Tensor) -> Tensor:
    """In place. values: 0 where not wet, so that weights that are all alike change nothing."""
    return values if cell.dtype is torch.bool else values.mul_(cell)


def _by_channel(values: Tensor) -> Tensor:
    """(..., channel, lat, lon) -> (..., channel) sums in float64."""
    return values.sum((-2, -1), dtype=torch.float64)


def _gradient_of(sums: Tensor, cell: Tensor) -> Tensor:
    """Of each value where the channels' sums of weighed values have the gradients `sums`. Where
    all weights are alike it is of dry values too."""
    sums = sums[:, None, None]
    return sums if cell.dtype is torch.bool else cell.to(sums.dtype) * sums


class _Errors(torch.autograd.Function):
    """Keeps for the backward pass what `error_gradients` takes."""

    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, target: Tensor, weights: LossWeights, kind: Kind
    ) -> Tensor:
        cell, wet = weights.cell, weights.wet
        wide = torch.promote_types(predicted.dtype, target.dtype)
        total = torch.zeros(cell.shape[0], dtype=torch.float64, device=predicted.device)
        learns = ctx.needs_input_grad[0]
        kept = predicted.new_empty(predicted.shape if learns else 0, dtype=kept_dtype(kind, wide))
        for b, some in parts(predicted.shape):
            difference = error_of(predicted[b, :, some], target[b, :, some], wet[some])
            sums, here = error_sums(difference, cell[some], kind)
            total[some] += sums.sum(0)
            if learns:
                kept[b, :, some] = here
        ctx.save_for_backward(kept, cell)
        ctx.dtype, ctx.kind = predicted.dtype, kind
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, cell = ctx.saved_tensors
        wide = torch.promote_types(torch.promote_types(ctx.dtype, kept.dtype), torch.float32)
        return error_gradients(kept, gradient.to(wide), cell, ctx.kind).to(ctx.dtype), *[None] * 3
