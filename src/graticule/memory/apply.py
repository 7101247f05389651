"""A plan at work: which units of a lead keep what they compute, and which compute it again.

A segment that is recomputed is a checkpoint of `torch.utils.checkpoint`: of the forward pass only
its boundary stays, the tensors that entered it. One whose boundary is offloaded lets even that go
to the host until the backward pass comes near. Each segment is bound to the plan of the lead that
made it. All ranks of a sample have one plan: exchanges inside a segment run again on all of them.
One in row tiles needs no checkpoint: it keeps what enters it and makes the rest again itself.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graticule.memory.offload import Host
from graticule.memory.plan import LeadPlan, Plan, Segment
from graticule.model.units import Runner, State, Tiled, Unit, straight


@dataclass(eq=False)
class Memory:
    """What a step does with its memory. plan: none: everything is kept. host: where boundaries
    that are offloaded lie."""

    plan: Plan | None = None
    host: Host | None = None

    @property
    def lead_wise(self) -> bool:
        return self.plan is not None and self.plan.lead_wise

    def runner(self, lead: int) -> tuple[Runner, ...]:
        """What calls the units of lead 1, 2, ..., if not the model itself."""
        if self.plan is None:
            return ()
        return (partial(_run, self.plan.leads[lead - 1], self.host, lead),)


def _run(
    plan: LeadPlan, host: Host | None, lead: int, units: Sequence[Unit], state: State
) -> State:
    for segment in plan:
        part = units[segment.first : segment.last]
        if segment.action == "keep" or not torch.is_grad_enabled():
            # Not `straight`: what calls it would hold the state that enters until the last unit.
            for unit in part:
                state = unit.run(*state)
            continue
        away: Any = nullcontext()
        if segment.action == "offload":
            assert host is not None, "a plan that offloads needs a host"
            away = host.boundary(*state, lead=lead)
        if segment.tiles > 1:
            with away:
                state = tiled_of(units, segment).run(segment.tiles, *state)
            continue
        if segment.action == "simple":
            for unit in part:
                state = simple_checkpoint(unit.run, *state)
            continue
        # Draws are keyed: there is no state of a generator to bring back.
        again = partial(_again, part)
        with away:
            state = checkpoint(again, *state, use_reentrant=False, preserve_rng_state=False)
    return state


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution,
    _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_cudnn_attention,
}  # fmt: skip
"""What `simple` keeps the results of: nearly all the work, in a few large tensors."""


def simple_checkpoint(run: Callable[..., State], *state: Tensor) -> State:
    """run(*state), of which recomputing finds the products done."""
    return checkpoint(
        run, *state, use_reentrant=False, preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, _kept_if_product),
    )  # fmt: skip


def _kept_if_product(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = getattr(operation, "overloadpacket", operation) in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def tiled_of(units: Sequence[Unit], segment: Segment) -> Tiled:
    """What runs a segment in row tiles. ValueError where nothing does."""
    tiled = units[segment.first].tiled
    if tiled is None or segment.last - segment.first != tiled.num_units:
        able = ", ".join(
            f"{unit.name} with the {unit.tiled.num_units - 1} after it"
            for unit in units
            if unit.tiled
        )
        names = " to ".join(units[at].name for at in (segment.first, segment.last - 1))
        raise ValueError(
            f"a plan has {names} in {segment.tiles} row tiles; this model has tiles for"
            f" {able or 'no units'}: make a plan for this model and precision"
        )
    return tiled


def _again(units: Sequence[Unit], *state: Tensor) -> State:
    return straight(units, state)
