"""One optimizer step: rollout, loss, backward, one global norm, update.

The loss is a local weighted sum over a *global* weight (`loss.py`), so micro-batches and ranks add
up without any further division: gradients are summed over ranks, never averaged. Nothing else in
the package calls `backward`.

The ranges that a profiler shows are named here (`split.py` reads them). Without a profiler one
costs microseconds, and a step has a few for each lead.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from graticule.forecast.rollout import rollout
from graticule.mesh import Mesh
from graticule.parallel.data import SharedWeights
from graticule.train.loss import Kind, LossWeights, weighted_error
from graticule.train.optimizer import Average

T = TypeVar("T")


class MicroBatch(Protocol):
    """What a step needs of a batch (`data.loader.Batch` is one)."""

    keys: list[int]
    inputs: Tensor

    def lead(self) -> tuple[Tensor, Tensor]:
        """(forcing, labels) of the next lead."""

    @property
    def init_times(self) -> Sequence[Any]:
        """Of the samples, for messages."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Objective:
    """What is minimised: the errors of a rollout's leads. Training and validation share it.

    inputs, forcing, labels: stored numbers on the device to normalised ones (`Normaliser`).
    statics: (channel, lat, lon) on the device that computes.
    num_outputs: output offsets of a model step.
    detach: each lead's input is a constant, the gradient does not cross leads.
    """

    inputs: Callable[[Tensor], Tensor]
    forcing: Callable[[Tensor], Tensor]
    labels: Callable[[Tensor], Tensor]
    statics: Tensor
    weights: LossWeights
    kind: Kind
    leads: int
    num_prognostic: int
    num_outputs: int = 1
    detach: bool = False

    def weight(self, samples: int) -> float:
        """The global weight of one lead of `samples` samples."""
        return self.weights.total * self.num_outputs * samples

    def errors(self, model: nn.Module, batch: MicroBatch) -> Iterator[Tensor]:
        """Weighted error sums of leads 1, 2, ..., float64 scalars, differentiable."""
        labels: list[Tensor] = []

        def forcing(lead: int) -> Tensor:
            with record_function("data wait"):
                given, truth = batch.lead()
            labels.append(truth)
            return self.forcing(self._on_device(given))

        inputs = self.inputs(self._on_device(batch.inputs))
        for predicted in rollout(
            model,
            inputs,
            forcing,
            self.statics,
            self.weights.wet,
            leads=self.leads,
            num_prognostic=self.num_prognostic,
            detach=self.detach,
        ):
            # Without a name: this frame lives on in the backward pass, the labels need not.
            yield weighted_error(
                predicted, self.labels(self._on_device(labels.pop())), self.weights, self.kind
            )

    def _on_device(self, stored: Tensor) -> Tensor:
        with record_function("copy"):
            return stored.to(self.statics.device, non_blocking=True)


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
    """loss: summed over leads. lead_losses: of each. gradient_norm: before clipping.
    applied: False where a float16 step was left out and the loss scale lowered.
    told: the sum of what the ranks told each other. All of it is the same on every rank."""

    loss: float
    lead_losses: tuple[float, ...]
    gradient_norm: float
    applied: bool
    told: float = 0.0


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
    average: Average | None = None,
    shared: SharedWeights | None = None,
    tell: float = 0.0,
) -> StepResult:
    """Take optimizer step `step` on the micro-batches, which hold `samples` samples in all.

    samples: of all ranks. learning_rate: of this step. clip_norm: largest global norm; 0: no
    clipping. loss_scale: for float16. Gradients stay in `.grad`, clipped, until the next step.
    shared: the ranks that train this model together; None: this process alone.
    tell: a number that is added up over the ranks, at no further wait.
    ValueError where loss or gradient is not finite; the parameters are then untouched.
    """
    shared = shared or SharedWeights(model, Mesh())
    optimizer.zero_grad(set_to_none=True)
    weight = objective.weight(samples)
    scale = loss_scale.value if loss_scale else 1.0
    sums = torch.zeros(objective.leads, dtype=torch.float64, device=objective.statics.device)
    seen: list[Any] = []
    leads = [f"forward lead {lead}" for lead in range(1, objective.leads + 1)]
    for batch in _ranged(batches, itertools.repeat("data wait")):
        seen += batch.init_times
        waiting: list[Tensor] = []
        for lead, error in enumerate(_ranged(objective.errors(model, batch), leads), start=1):
            sums[lead - 1] += error.detach()
            waiting.append(error)
            # Detached leads share no graph: each is freed before the next one is computed.
            if objective.detach or lead == objective.leads:
                with record_function("backward"):
                    (torch.stack(waiting).sum() * (scale / weight)).backward()
                waiting.clear()

    with record_function("communication"):
        shared.reduce()
        others = torch.tensor([len(seen), tell], dtype=torch.float64, device=sums.device)
        totals, norm = shared.total(torch.cat([sums / weight, others]))
        # The only wait for the device in a step.
        *lead_losses, came, told, gradient_norm = torch.cat([totals, norm.reshape(1)]).tolist()
    gradient_norm /= scale
    assert came == samples * shared.sample_size, f"{came} samples came, not {samples}"
    with record_function("optimizer"):
        loss = math.fsum(lead_losses)
        result = StepResult(loss, tuple(lead_losses), gradient_norm, True, told)
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
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
        if average:
            average.update(model, step)
        return result


def _ranged(items: Iterable[T], names: Iterable[str]) -> Iterator[T]:
    """As many items as there are names, each made in the range of its name."""
    iterator = iter(items)
    for name in names:
        with record_function(name):
            item = next(iterator, None)
        if item is None:
            return
        yield item
