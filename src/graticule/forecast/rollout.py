"""The rollout: what training, forecasting and the memory trace do with a model, lead by lead."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from graticule.keyed import keyed
from graticule.model.draws import Draw


def model_input(states: Tensor, forcing: Tensor, statics: Tensor) -> Tensor:
    """(batch, in_channel, lat, lon): the states (oldest first), the forcing and the statics.

    states: (batch, input offset, prognostic channel, lat, lon). forcing: (batch, offset, channel,
    lat, lon). statics: (channel, lat, lon). A view where the states are all there is.
    """
    parts = [
        states.flatten(1, 2),
        forcing.flatten(1, 2),
        statics.expand(len(states), *statics.shape),
    ]
    parts = [part for part in parts if part.shape[1]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def at_sea(output: Tensor, wet: Tensor) -> Tensor:
    """A model's output -> (batch, output offset, predicted channel, lat, lon), 0 on land.

    wet: (predicted channel, lat, lon) bool.
    """
    return torch.where(wet, output.unflatten(1, (-1, wet.shape[0])), 0.0)


def next_states(states: Tensor, predicted: Tensor, num_prognostic: int) -> Tensor:
    """The newest states after a lead, as many as before; a step may yield fewer or more."""
    history = states.shape[1]
    fed_back = predicted[:, -history:, :num_prognostic]
    old = history - fed_back.shape[1]
    return torch.cat([states[:, -old:], fed_back], dim=1) if old else fed_back


def member_turns(seed: int, items: Sequence[int], member: int, columns: int) -> list[int]:
    """By how many columns each item is turned in longitude before a member's model sees it; what
    the model says is turned back. On a globe without continents a member of another patch and
    window grid, the same for all leads."""
    return [int(keyed(seed, "roll", item, member).integers(columns)) for item in items]


def turned(x: Tensor, by: Sequence[int]) -> Tensor:
    """(batch, channel, lat, lon), each item by so many columns."""
    return torch.stack([item.roll(shift, -1) for item, shift in zip(x, by, strict=True)])


def rollout(
    step: Callable[..., Tensor],
    inputs: Tensor,
    forcing: Callable[[int], Tensor],
    statics: Tensor,
    wet: Tensor,
    *,
    leads: int,
    num_prognostic: int,
    first: int = 1,
    draw: Callable[[int], Draw] | None = None,
) -> Iterator[Tensor]:
    """Yield the normalised prediction of leads `first`, ..., `leads` (TERRA, Eq. 1).

    step: the model, (batch, in_channel, lat, lon) -> (batch, output offset x predicted channel,
        lat, lon). draw: which draw of its weights and noise a lead is computed with, if any.
    inputs: (batch, input offset, prognostic channel, lat, lon), land 0; what lead `first` is given.
    forcing: called with the lead before it is computed; (batch, offset, channel, lat, lon).
    statics: (channel, lat, lon).
    wet: (predicted channel, lat, lon) bool; predictions on land are 0.
    Yields (batch, output offset, predicted channel, lat, lon).
    """
    states = inputs
    del inputs  # they go with the first lead, unless the caller keeps them
    for lead in range(first, leads + 1):
        drawn = {} if draw is None else {"draw": draw(lead)}
        predicted = at_sea(step(model_input(states, forcing(lead), statics), **drawn), wet)
        yield predicted
        states = next_states(states, predicted, num_prognostic)
