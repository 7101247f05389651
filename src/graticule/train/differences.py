"""The gradient loss: the L1 of the differences between neighbours, of what is predicted and true.

    G_c = sum over sample, output offset and pairs i, j of  v[c, i, j] |(p_i - p_j) - (t_i - t_j)|

The pairs are neighbours in longitude, round the globe where the grid closes, and in latitude. v is
the mean of the cells' weights where both are wet, else 0: nothing is asked of a step across a
coast, where normalised fields are 0 on land by convention. What stands between the bars is
e_i - e_j, the difference of errors, so that one row or column of errors is all that ranks tell
each other, once and in the forward pass alone. Each rank has

    half the sum over its own cells i and their neighbours n of  v[c, i, n] |e_i - e_n|
    d G_c / d e_i = sum over neighbours n of  v[c, i, n] sign(e_i - e_n)

The halves of a pair meet in the sum over the ranks, and a cell's gradient needs nothing but its
neighbours' errors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graticule.mesh import Cut, Stripes
from graticule.model.pad import ConvPad, Pad
from graticule.parallel.exchange import Link
from graticule.parallel.halo import StripedConvPad, halos_of
from graticule.parallel.space import specialise
from graticule.train.loss import LossWeights, error_of


@dataclass(frozen=True, eq=False)
class Differences:
    """Of errors between neighbours on a stripe of the grid.

    pad: adds a row or column on each side, the neighbours' or zeros. cell: (channel, lat + 2, lon
    + 2) float32, the loss's weights so padded: 0 where a channel is not wet, and beyond the grid.
    share: what the sum of differences is multiplied by, `train.gradient_loss`.
    """

    pad: Pad
    cell: Tensor
    share: float

    @classmethod
    def of(
        cls,
        weights: LossWeights,
        share: float,
        *,
        grid: tuple[int, int],
        periodic: bool,
        stripes: Stripes | None = None,
        link: Link | None = None,
    ) -> "Differences":
        """weights: of the stripe that is here. grid: (lat, lon) points of the whole grid; periodic:
        whether it closes round the globe. stripes, link: of the ranks that share a sample, which
        make this call together; none: all of the grid is here."""
        pad: Pad = ConvPad("globe" if periodic else "paper", grid, kernel=3)
        if stripes is not None and stripes.ranks > 1:
            along = 0 if stripes.dim == "lat" else 1
            cuts, indices = [Cut((0, points)) for points in grid], [0, 0]
            cuts[along], indices[along] = stripes.grid, stripes.index
            specialise(
                pad,
                StripedConvPad,
                halos=halos_of(pad, (cuts[0], cuts[1]), (indices[0], indices[1])),
                dim=along - 2,
                link=link,
            )
        return cls(pad, pad(weights.cell.float()), share)

    def errors(self, predicted: Tensor, target: Tensor, wet: Tensor) -> Tensor:
        """(channel,) float64, `share` x G. Arguments as those of `weighted_errors`. All ranks that
        share the sample call it together."""
        return _Differences.apply(predicted, target, wet, self)


class _Differences(torch.autograd.Function):
    """Keeps the gradient of each value for the backward pass, four bytes (eight of float64)."""

    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, target: Tensor, wet: Tensor, differences: Differences
    ) -> Tensor:
        error = error_of(predicted, target, wet)
        padded, cell = differences.pad(error), differences.cell
        total = torch.zeros(cell.shape[0], dtype=torch.float64, device=error.device)
        gradient = torch.zeros_like(error) if ctx.needs_input_grad[0] else None
        # One sample at a time: the temporaries are those of one sample.
        for sample in range(len(error) if error.numel() else 0):
            here = error[sample]
            for there, weight in _neighbours(padded[sample], cell):
                step = here - there
                total += (step.abs() * weight).sum((-2, -1), dtype=torch.float64).sum(0)
                if gradient is not None:
                    gradient[sample] += step.sign_() * weight
        ctx.save_for_backward(gradient)
        ctx.dtype, ctx.share = predicted.dtype, differences.share
        return total * (differences.share / 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        factors = (ctx.share * gradient).to(own.dtype)[:, None, None]
        return (own * factors).to(ctx.dtype), None, None, None


def _neighbours(padded: Tensor, cell: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(..., channel, lat, lon) of the north, south, west and east neighbours, and (channel, lat,
    lon) the weight of each pair. padded, cell: with a row or column more on each side."""
    rows, columns = cell.shape[-2] - 2, cell.shape[-1] - 2

    def seen(field: Tensor, south: int, east: int) -> Tensor:
        return field.narrow(-2, 1 + south, rows).narrow(-1, 1 + east, columns)

    own = seen(cell, 0, 0)
    for south, east in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        other = seen(cell, south, east)
        both = (own > 0) & (other > 0)
        yield seen(padded, south, east), torch.where(both, (own + other) / 2, 0.0)
