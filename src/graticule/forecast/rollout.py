"""The rollout: one generator over leads for training, forecasting and the memory trace alike."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def rollout(
    step: Callable[[Tensor], Tensor],
    inputs: Tensor,
    forcing: Callable[[int], Tensor],
    statics: Tensor,
    wet: Tensor,
    *,
    leads: int,
    num_prognostic: int,
    detach: bool = False,
) -> Iterator[Tensor]:
    """Yield the normalised prediction of leads 1, 2, ..., `leads` (TERRA, Eq. 1).

    step: the model, (batch, in_channel, lat, lon) -> (batch, output offset x predicted channel,
        lat, lon). Its input is the states (oldest first), the forcing and the statics.
    inputs: (batch, input offset, prognostic channel, lat, lon), land 0.
    forcing: called with the lead before it is computed; (batch, offset, channel, lat, lon).
    statics: (channel, lat, lon).
    wet: (predicted channel, lat, lon) bool; predictions on land are 0.
    detach: the state fed back is a constant: the gradient stays within each lead.
    Yields (batch, output offset, predicted channel, lat, lon), differentiable.
    """
    batch, history = inputs.shape[:2]
    fixed = statics.expand(batch, *statics.shape)
    states = inputs
    for lead in range(1, leads + 1):
        given = forcing(lead).flatten(1, 2)
        predicted = step(torch.cat([states.flatten(1, 2), given, fixed], dim=1))
        predicted = predicted.unflatten(1, (-1, wet.shape[0]))
        predicted = torch.where(wet, predicted, 0.0)
        yield predicted
        fed_back = predicted[:, :, :num_prognostic]
        if detach:
            fed_back = fed_back.detach()
        # The newest `history` states; a step may yield fewer or more than that.
        states = torch.cat([states, fed_back], dim=1)[:, -history:]
