"""What a model of any family is to those that lay it out, train it and forecast with it."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from graticule.model.pad import FieldPad
from graticule.model.units import Runner, Unit, straight


class Model(nn.Module):
    """(batch, in_channel, lat, lon) -> (batch, out_channel, lat, lon), normalised, of one dtype.

    grid: (lat, lon) points of the data. scales: (lat, lon) points of what the modules hold, by how
    many field points one spans; 1 is the field, which `pad` makes of the grid. states: (first,
    last + 1) input channels of the newest state. num_outputs: output times in one step.
    compute_dtype: of activations.
    """

    grid: tuple[int, int]
    scales: dict[int, tuple[int, int]]
    pad: FieldPad
    states: tuple[int, int]
    num_outputs: int
    compute_dtype: torch.dtype

    @abstractmethod
    def units(self) -> list[Unit]:
        """From the input to what the network says, in the steps that memory plans name."""

    @abstractmethod
    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """The prediction from the input `x` and what the network says, in the dtype of `x`."""

    def forward(self, x: Tensor, run: Runner = straight, *, added: bool = True) -> Tensor:
        """run: calls the units. added: what is predicted; without it, what `add` takes."""
        (change,) = run(self.units(), (x,))
        return self.add(x, change) if added else change
