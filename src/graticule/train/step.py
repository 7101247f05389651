"""One optimizer step: rollout, loss, backward, one global norm, update.

The loss is a local weighted sum over a *global* weight (`loss.py`), so micro-batches and ranks add
up without any further division: gradients are summed over ranks, never averaged.

The ranges that a profiler shows are named here (`split.py` reads them). Without a profiler one
costs microseconds, and a step has a few for each lead.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from graticule.memory.apply import Memory
from graticule.memory.trace import span
from graticule.mesh import Mesh
from graticule.model.bayes import unchanged
from graticule.parallel.data import SharedWeights
from graticule.train.differentiated import Differentiated
from graticule.train.dynamic_scale import DynamicScale
from graticule.train.members import Ensemble
from graticule.train.objective import MicroBatch, Objective
from graticule.train.optimizer import Average
from graticule.train.prior import SUMS, summary

T = TypeVar("T")


@dataclass
class LossScale:
    """Factor of the loss that lifts float16 gradients out of the range where they vanish.

    Halved at a step whose gradients are not finite, doubled after `growth_steps` good ones in a
    row. A power of two: scaling and unscaling round nothing.
    """

    value: float = 2.0**16
    good_steps: int = 0
    growth_steps: int = 2000
    least: float = field(default=1.0, repr=False)

    def good(self) -> None:
        self.good_steps += 1
        if self.good_steps >= self.growth_steps:
            self.value, self.good_steps = self.value * 2, 0

    def bad(self) -> bool:
        """Halve; False if the scale is at its least already."""
        self.good_steps = 0
        if self.value <= self.least:
            return False
        self.value = max(self.value / 2, self.least)
        return True


@dataclass(frozen=True)
class StepResult:
    """loss: summed over leads, whatever factors the channels have. lead_losses: of each.
    gradient_norm: before clipping. applied: False where a float16 step was left out and the loss
    scale lowered. told: the sum of what the ranks told each other. scaled_loss: the loss that was
    minimised, with the channels' factors, where they have any. posterior: of weights that are
    distributions, as `prior.summary` says; what their prior adds is in the loss, and in no lead's.
    All of it is the same on every rank."""

    loss: float
    lead_losses: tuple[float, ...]
    gradient_norm: float
    applied: bool
    told: float = 0.0
    scaled_loss: float | None = None
    posterior: dict[str, float] | None = None


def training_step(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[MicroBatch],
    *,
    optimizer: torch.optim.Optimizer,
    step: int,
    samples: int,
    learning_rate: float,
    clip_norm: float = 0.0,
    loss_scale: LossScale | None = None,
    dynamic_scale: DynamicScale | None = None,
    average: Average | None = None,
    shared: SharedWeights | None = None,
    memory: Memory | None = None,
    ensemble: Ensemble | None = None,
    tell: float = 0.0,
) -> StepResult:
    """Take optimizer step `step` on the micro-batches, which hold `samples` samples in all.

    samples: of all ranks. learning_rate: of this step. clip_norm: largest global norm; 0: no
    clipping. loss_scale: for float16. dynamic_scale: the channels' factors; they follow the errors
    of this step's first lead. Gradients stay in `.grad`, clipped, until the next step.
    shared: the ranks that train this model together; None: this process alone.
    memory: what is kept and what is computed again; None: everything is kept.
    ensemble: the members of each sample, and the prior of weights that are drawn.
    tell: a number that is added up over the ranks, at no further wait.
    ValueError where loss or gradient is not finite. The parameters are then untouched, here as in
    a float16 step that is left out, and running statistics are what they were before.
    """
    shared = shared or SharedWeights(model, Mesh())
    optimizer.zero_grad(set_to_none=True)
    weight = objective.weight(samples)
    scale = loss_scale.value if loss_scale else 1.0
    channels, leads = objective.num_channels, objective.leads
    sums = torch.zeros(leads, channels, dtype=torch.float64, device=objective.statics.device)
    seen: list[Any] = []
    factors = sums.new_ones(channels)
    if dynamic_scale:
        factors = objective.ours(sums.new_tensor(dynamic_scale.factors))
    given = model, objective, factors * (scale / weight), memory or Memory()
    rollout = ensemble.rollouts(step, *given) if ensemble else Differentiated(*given)
    pull = ensemble.pull if ensemble else None
    before = _statistics(model)
    with unchanged(model) if pull else nullcontext():
        for batch in _ranged(batches, itertools.repeat("data wait")):
            seen += batch.init_times
            rollout(batch, sums)
        with span("communication"):
            shared.reduce(ensemble.pulled(step, scale) if ensemble else None)
            others = torch.tensor([len(seen), tell], dtype=torch.float64, device=sums.device)
            parts = [sums.sum(1) / weight, others]
            if dynamic_scale:
                parts += [(sums * factors).sum().reshape(1) / weight]
                by_channel = objective.of_all(sums[0])
                parts += [by_channel * (len(by_channel) / weight)]
            if pull:
                parts.append(pull.sums)
            totals, norm = shared.total(torch.cat(parts))
            # The only wait for the device in a step.
            *found, gradient_norm = torch.cat([totals, norm.reshape(1)]).tolist()
    lead_losses, (came, told), scaled = found[:leads], found[leads : leads + 2], found[leads + 2 :]
    gradient_norm /= scale
    posterior = None
    if ensemble and pull:
        scaled, told_of = scaled[: -len(SUMS)], scaled[-len(SUMS) :]
        posterior = summary(told_of, ensemble.kl_scale)
    assert came == samples * shared.sample_size, f"{came} samples came, not {samples}"
    with span("optimizer"):
        loss = math.fsum([*lead_losses, posterior["kl_loss"] if posterior else 0.0])
        result = StepResult(
            loss, tuple(lead_losses), gradient_norm, True, told, posterior=posterior
        )
        if dynamic_scale:
            result = replace(result, scaled_loss=scaled[0])
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            with torch.no_grad():
                for kept, value in before:
                    kept.copy_(value)
            if loss_scale and loss_scale.bad():
                return replace(result, applied=False)
            times = ", ".join(str(time) for time in seen)
            raise ValueError(
                f"step {step}: loss {loss:g}, gradient norm {gradient_norm:g} with samples that"
                f" start at {times}; the weights are as they were before this step. Look at these"
                " dates with `graticule data check`; if they are sound, lower train.learning_rate"
                " or train.clip_norm, or use train.precision=fp32"
            )
        # As torch clips. The loss scale is a power of two: dividing by it rounds nothing.
        clip = min(clip_norm / (gradient_norm + 1e-6), 1.0) if clip_norm > 0 else 1.0
        if clip != 1.0 or scale != 1.0:
            shared.scale_(clip / scale)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        if loss_scale:
            loss_scale.good()
        if dynamic_scale:
            dynamic_scale.update(scaled[1:])
        if average:
            average.update(model, step)
        return result


def _statistics(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """What the backward pass moves besides gradients, running statistics: each with a copy."""
    saved = model.state_dict()
    return [
        (kept, kept.clone())
        for name, kept in model.named_buffers()
        if name in saved and not name.endswith("_start")  # means of a prior, which stay
    ]


def _ranged(items: Iterable[T], names: Iterable[str]) -> Iterator[T]:
    """As many items as there are names, each made in the range of its name."""
    iterator = iter(items)
    for name in names:
        with span(name):
            item = next(iterator, None)
        if item is None:
            return
        yield item
