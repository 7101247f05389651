"""What a model of any family is to those that lay it out, train it and forecast with it."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from graticule.model.draws import Draw, bound
from graticule.model.layers import Layer
from graticule.model.nice import Nice
from graticule.model.pad import FieldPad
from graticule.model.units import Runner, Unit, straight


class Model(nn.Module):
    """(batch, in_channel, lat, lon) -> (batch, out_channel, lat, lon), normalised, of one dtype.

    grid: (lat, lon) points of the data. scales: (lat, lon) points of what the modules hold, by how
    many field points one spans; 1 is the field, which `pad` makes of the grid. states: (first,
    last + 1) input channels of the newest state. num_outputs: output times in one step.
    compute_dtype: of activations. adds: whether a prediction is the newest state plus what the
    network says, or that itself.
    """

    grid: tuple[int, int]
    scales: dict[int, tuple[int, int]]
    pad: FieldPad
    states: tuple[int, int]
    num_outputs: int
    compute_dtype: torch.dtype
    adds: bool = True

    @abstractmethod
    def units(self) -> list[Unit]:
        """From the input to what the network says, in the steps that memory plans name."""

    @abstractmethod
    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """The prediction from the input `x` and what the network says, in the dtype of `x`."""

    def forward(
        self, x: Tensor, run: Runner = straight, *, added: bool = True, draw: Draw | None = None
    ) -> Tensor:
        """run: calls the units. added: what is predicted; without it, what `add` takes.
        draw: which draw of weights and noise, of a model that has such."""
        units = self.units() if draw is None else bound(self.units(), draw)
        (change,) = run(units, (x,))
        return self.add(x, change) if added else change

    def changed(self, x: Tensor, change: Tensor) -> Tensor:
        """The newest state in the input `x` plus a change of it, in the dtype of `x`; diagnostic
        channels of the change as they are."""
        first, last = self.states
        change = change.to(x.dtype)
        if first == last:
            return change
        state = x[:, first:last]
        change = change.unflatten(1, (self.num_outputs, -1))
        known, diagnostic = change[:, :, : last - first], change[:, :, last - first :]
        known = known + state.unsqueeze(1)
        parts = [known, diagnostic] if diagnostic.shape[2] else [known]
        return (torch.cat(parts, dim=2) if len(parts) > 1 else known).flatten(1, 2)


def takes_draws(model: nn.Module) -> bool:
    """Whether weights or noise of a model are drawn: without a draw it cannot be called."""
    return any(
        (isinstance(module, Layer) and module.sample is not None)
        or (isinstance(module, Nice) and module.num_noise > 0)
        for module in model.modules()
    )
