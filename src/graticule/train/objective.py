"""What is minimised: the errors of a rollout's leads, over a global weight (`loss.py`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.profiler import record_function

from graticule.forecast.rollout import rollout
from graticule.train.loss import Kind, LossWeights, weighted_error


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

    def on_device(self, stored: Tensor) -> Tensor:
        """Stored numbers where they are decoded."""
        with record_function("copy"):
            return stored.to(self.statics.device, non_blocking=True)

    def error(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """Weighted error sum of a lead, a float64 scalar, differentiable. labels: stored ones."""
        return weighted_error(
            predicted, self.labels(self.on_device(labels)), self.weights, self.kind
        )

    def errors(self, model: nn.Module, batch: MicroBatch) -> Iterator[Tensor]:
        """Weighted error sums of leads 1, 2, ...: of a forecast, whose gradient nobody takes."""
        waiting: list[Tensor] = []

        def forcing(lead: int) -> Tensor:
            with record_function("data wait"):
                given, labels = batch.lead()
            waiting.append(labels)
            return self.forcing(self.on_device(given))

        for predicted in rollout(
            model,
            self.inputs(self.on_device(batch.inputs)),
            forcing,
            self.statics,
            self.weights.wet,
            leads=self.leads,
            num_prognostic=self.num_prognostic,
        ):
            yield self.error(predicted, waiting.pop())
