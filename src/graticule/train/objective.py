"""What is minimised: the errors of a rollout's leads, over a global weight (`loss.py`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.profiler import record_function

from graticule.forecast.rollout import rollout
from graticule.mesh import Planes
from graticule.train.differences import Differences
from graticule.train.loss import Kind, LossWeights, weighted_errors


class MicroBatch(Protocol):
    """What a step needs of a batch (`data.loader.Batch` is one)."""

    keys: list[int]
    inputs: Tensor

    def lead(self) -> tuple[Tensor, Tensor]:
        """(forcing, labels) of the next lead."""

    @property
    def init_times(self) -> Sequence[Any]:
        """Of the samples, for messages."""


class Decode(Protocol):
    """Stored numbers to normalised ones (`Normaliser`)."""

    def __call__(self, stored: Tensor, channels: slice = ..., /) -> Tensor:
        """(..., channel, lat, lon), some of the channels it is for."""


def as_stored(stored: Tensor, channels: slice = slice(None)) -> Tensor:
    """For fields that are normalised already."""
    return stored


@dataclass(frozen=True, eq=False, kw_only=True)
class Objective:
    """What is minimised: the errors of a rollout's leads. Training and validation share it.

    inputs, forcing, labels: of stored numbers on the device.
    statics: (channel, lat, lon) on the device that computes.
    num_outputs: output offsets of a model step.
    detach_every: after how many leads the gradient is not handed on; 0: it is through all of them.
    differences: of the gradient loss, where there is one.
    planes: which channels those here are, of which channels of all; None: all of them.
    """

    inputs: Decode
    forcing: Decode
    labels: Decode
    statics: Tensor
    weights: LossWeights
    kind: Kind
    leads: int
    num_prognostic: int
    num_outputs: int = 1
    detach_every: int = 0
    differences: Differences | None = None
    planes: Planes | None = None

    @property
    def groups(self) -> list[range]:
        """The leads, those together through which the gradient goes."""
        every = self.detach_every or self.leads
        return [
            range(first, min(first + every, self.leads + 1))
            for first in range(1, self.leads + 1, every)
        ]

    @property
    def num_channels(self) -> int:
        """That are predicted here."""
        return int(self.weights.cell.shape[0])

    def of_all(self, values: Tensor, *, known: bool = False) -> Tensor:
        """(..., channel predicted here) -> (..., channel that any rank predicts), 0 where it is
        another's: what is added up over ranks. known: of prognostic channels alone."""
        return values if self.planes is None else self.planes.spread(values, known=known)

    def ours(self, values: Tensor) -> Tensor:
        """(channel that any rank predicts) -> (channel predicted here)."""
        planes = self.planes
        return values if planes is None else values[planes.predicted(planes.index)]

    def weight(self, samples: int) -> float:
        """The global weight of one lead of `samples` samples."""
        return self.weights.total * self.num_outputs * samples

    def on_device(self, stored: Tensor) -> Tensor:
        """Stored numbers where they are decoded."""
        with record_function("copy"):
            return stored.to(self.statics.device, non_blocking=True)

    def error(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """(channel,) float64 weighted error sums of a lead, differentiable. labels: stored ones."""
        return self._error(predicted, self.labels(self.on_device(labels)))

    def _error(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """labels: normalised."""
        errors = weighted_errors(predicted, labels, self.weights, self.kind)
        if self.differences is not None:
            errors = errors + self.differences.errors(predicted, labels, self.weights.wet)
        return errors

    def forecast(
        self, model: nn.Module, states: Tensor, batch: MicroBatch
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(predicted, labels, error sums) of leads 1, 2, ... of a batch, the first two normalised.

        states: the batch's inputs, normalised.
        """
        waiting: list[Tensor] = []

        def forcing(lead: int) -> Tensor:
            with record_function("data wait"):
                given, labels = batch.lead()
            waiting.append(labels)
            return self.forcing(self.on_device(given))

        for predicted in rollout(
            model,
            states,
            forcing,
            self.statics,
            self.weights.wet,
            leads=self.leads,
            num_prognostic=self.num_prognostic,
        ):
            labels = self.labels(self.on_device(waiting.pop()))
            yield predicted, labels, self._error(predicted, labels)
