"""A rank's training steps without the decisions that numbers make, for the memory tracer: as they
run on fake tensors (`foresee`) or on real ones.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from graticule.assemble import PRECISIONS, Running
from graticule.config import Config
from graticule.memory.apply import Memory
from graticule.memory.trace import GRADIENTS, INPUTS, own
from graticule.model.bayes import weights_of
from graticule.parallel.data import local
from graticule.train import likelihoods
from graticule.train.differences import Differences
from graticule.train.differentiated import Differentiated
from graticule.train.loss import LossWeights, loss_kind
from graticule.train.members import ensemble_of
from graticule.train.objective import Decode, Objective, as_stored
from graticule.train.optimizer import Average, make_optimizer

DataPath = Literal["stored", "resident", "buffered"]
"""How fields come to the device. stored: packed, a lead at a time, and are decoded there, as ours
do. resident: normalised, input and labels of all leads before the step and to its end, as
published. buffered: so too, but for labels, of which the newest is there to the end of the step
(TERRA's input buffering; the one that comes beside it is there in forward passes alone, where no
peak is, and left out)."""


class _GroupIsOver(Exception):
    pass


@dataclass
class _Batch:
    """A sample whose numbers nobody looks at."""

    inputs: Tensor
    forcing: list[Tensor]
    labels: list[Tensor]
    init_times = ("traced",)

    @property
    def keys(self) -> range:
        return range(len(self.inputs))

    def lead(self) -> tuple[Tensor, Tensor]:
        return self.forcing.pop(0), self.labels.pop(0)


@dataclass
class _Later:
    """A sample's leads from one on at whose states no gradient is handed on: a group in the middle
    of a rollout, which begins with normalised states that nobody else holds."""

    states: list[Tensor]
    forcing: list[Tensor]
    labels: list[Tensor]
    keys: range
    init_times = ("traced",)

    @property
    def inputs(self) -> Tensor:
        return self.states.pop()

    def lead(self) -> tuple[Tensor, Tensor]:
        if not self.labels:
            raise _GroupIsOver
        return self.forcing.pop(0), self.labels.pop(0)


@dataclass
class _Buffered:
    """A sample whose labels are made when they are asked for, each in the place of the last."""

    inputs: Tensor
    forcing: list[Tensor]
    make: Callable[[], Tensor]
    label: Tensor | None = None
    keys = (0,)
    init_times = ("traced",)

    def lead(self) -> tuple[Tensor, Tensor]:
        self.label = None
        self.label = self.make()
        own(INPUTS, [self.label])
        return self.forcing.pop(0), self.label


class _Decode(nn.Module):
    """The memory that `Normaliser` takes: that of its result, as good as alone."""

    wet: Tensor
    centre: Tensor
    gain: Tensor
    rest: Tensor
    constant: Tensor

    def __init__(self, wet: Tensor, on: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.on, self.dtype = on, dtype
        self.register_buffer("wet", wet)
        channels = len(wet)
        for name in ("centre", "gain", "rest"):
            self.register_buffer(name, torch.ones(channels, 1, 1))
        self.register_buffer("constant", torch.zeros(channels, 1, 1, dtype=torch.bool))

    def forward(self, stored: Tensor, channels: slice = slice(None)) -> Tensor:
        stored = stored.view(stored.shape)  # read, and so held until here
        if self.on == "cpu":
            return torch.empty(stored.shape, dtype=torch.float32).to(self.dtype)
        return torch.empty(stored.shape, dtype=self.dtype)


def leads_together(config: Config) -> int:
    """Through how many leads a gradient goes: those that a plan is of."""
    train = config.train
    return min(train.detach_every or train.leads, train.leads)


class Rehearsal:
    """A rank's training steps, for `profile_step`."""

    def __init__(
        self,
        config: Config,
        running: Running,
        on: str,
        data: DataPath,
        stored: torch.dtype,
    ) -> None:
        shapes = running.shapes
        self.config, self.shapes, self.running = config, shapes, running
        self.data, self.stored = data, stored
        parts = (running.stripes.rows, running.stripes.columns)
        rows, columns = (
            len(range(*part.indices(points)))
            for part, points in zip(parts, shapes.grid, strict=True)
        )
        self.here = rows, columns
        self.fields: list[Tensor] = []
        self.optimizer = make_optimizer(running.model, config.train)
        for parameter in running.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.detached = leads_together(config) < config.train.leads
        # A later micro-batch of a step, a later group of leads or another member finds the
        # gradients of those before it.
        members = config.bayes.members // running.mesh.sizes["member"]
        self.alone = config.train.accumulation == members == 1 and not self.detached
        if self.alone:
            self.optimizer.zero_grad(set_to_none=True)
        self.average = (
            Average(running.model, config.train.ema_decay) if config.train.ema_decay else None
        )
        wet = torch.ones(shapes.num_predicted, *self.here, dtype=torch.bool)
        dtype = PRECISIONS[config.train.precision].fields

        def decode(channels: int) -> Decode:
            if data != "stored":
                return as_stored
            if channels == shapes.num_predicted:  # one mask of them all, as in a run
                return _Decode(wet, on, dtype)
            return _Decode(torch.ones(channels, *self.here, dtype=torch.bool), on, dtype)

        alike = not config.train.area_weighted and config.train.denominator != "channel"
        weights = LossWeights(wet if alike else wet.float(), wet, 1.0)
        self.objective = Objective(
            inputs=decode(shapes.num_prognostic),
            forcing=decode(shapes.num_forcing),
            labels=decode(shapes.num_predicted),
            statics=torch.zeros(shapes.num_static, *self.here, dtype=dtype),
            weights=weights,
            kind=loss_kind(config.train),
            leads=config.train.leads,
            num_prognostic=shapes.num_prognostic,
            num_outputs=shapes.num_outputs,
            planes=running.planes,
            differences=Differences.of(
                weights,
                config.train.gradient_loss,
                grid=shapes.grid,
                periodic=True,
                stripes=running.stripes,
                link=running.link,
            )
            if config.train.gradient_loss
            else None,
        )
        self.kept: list[Tensor] = []
        self.ensemble = ensemble_of(config, running.mesh, running.model, self.objective, 1)
        if self.ensemble:
            # Members come one at a time: the last one's step, with what is left of the others.
            own = len(self.ensemble.own)
            self.ensemble = replace(self.ensemble, own=self.ensemble.own[:1])
            if isinstance(local(next(running.model.parameters())), FakeTensor):
                self.kept = [
                    torch.empty(nbytes, dtype=torch.uint8) for nbytes in self._of_others(own)
                ]

    def _of_others(self, own: int) -> list[int]:
        """Bytes of what is there besides one member's step where a rank has `own` of them: draws
        that are kept, and what the CRPS hears, which is there until it is settled, with what it is
        ordered in: an upper bound, since nothing else need be at its most then."""
        config, shapes = self.config, self.shapes
        kept = [w.posterior.pool.nbytes(own) for w in weights_of(self.running.model)][:1]
        if config.bayes.likelihood == "crps":
            samples = -(-config.train.batch // self.running.mesh.sizes["data"])
            field = samples * shapes.num_outputs * shapes.num_predicted * math.prod(self.here)
            heard = 4 * (config.train.leads + 2) * (own - 1) * field
            kept.append(heard + 24 * (own - 1) * min(field, likelihoods.PART))
        return kept

    def owned(self) -> dict[str, list[Tensor]]:
        objective, model = self.objective, self.running.model
        decoders = (objective.inputs, objective.forcing, objective.labels)
        parts = [model, *(part for part in decoders if isinstance(part, nn.Module))]
        constants = [objective.statics, objective.weights.cell, objective.weights.wet]
        constants += [b for part in parts for b in part.buffers()]
        constants += self.kept
        owned: dict[str, list[Tensor]] = {
            "parameters": list(model.parameters()),
            "optimizer": [
                t
                for s in self.optimizer.state.values()
                for t in s.values()
                if isinstance(t, Tensor)
            ],
            "constants": constants,
            INPUTS: self.fields,
        }
        if objective.differences is not None:
            constants.append(objective.differences.cell)
        if self.average:
            owned["average"] = list(self.average.tensors.values())
        return owned

    def held(self, prefix: str) -> dict[str, int]:
        """Bytes by owner of what belongs to parameters and buffers of such names."""
        model = self.running.model
        parameters = {n: p for n, p in model.named_parameters() if n.startswith(prefix)}
        state = self.optimizer.state
        tensors: dict[str, list[Any]] = {
            "parameters": list(parameters.values()),
            "optimizer": [t for p in parameters.values() for t in state[p].values()],
            "constants": [b for n, b in model.named_buffers() if n.startswith(prefix)],
            GRADIENTS: [p.grad for p in parameters.values()],
        }
        if self.average:
            tensors["average"] = [self.average.tensors[name] for name in parameters]
        return {
            owner: sum(_bytes(t) for t in found if isinstance(t, Tensor))
            for owner, found in tensors.items()
        }

    def step(self, leads: int, memory: Memory) -> Callable[[], None]:
        """A whole step of so many leads, without the decisions that numbers make."""
        shapes, running = self.shapes, self.running
        samples = -(-self.config.train.batch // running.mesh.sizes["data"])

        dtype = self.stored if self.data == "stored" else self.objective.statics.dtype

        def fields(offsets: int, channels: int) -> Tensor:
            return torch.zeros(samples, offsets, channels, *self.here, dtype=dtype)

        inputs = fields(shapes.num_inputs, shapes.num_prognostic)
        forcing = [fields(shapes.num_forcings, shapes.num_forcing) for _ in range(leads)]
        label = partial(fields, shapes.num_outputs, shapes.num_predicted)
        batch: Any
        objective = replace(self.objective, leads=leads)
        if self.detached:
            # The group after it is not run: the states that it would have are there all the same.
            objective = replace(objective, leads=leads + 1, detach_every=leads)
            if self.data == "stored":
                objective = replace(objective, inputs=as_stored)
            self.fields = [inputs]
            states = torch.zeros_like(inputs, dtype=objective.statics.dtype)
            labels = [label() for _ in range(leads)]
            batch = _Later([states], forcing, labels, range(samples))
            del states
        elif self.data == "buffered":
            self.fields = [inputs]
            batch = _Buffered(inputs, forcing, label)
        else:
            batch = _Batch(inputs, forcing, [label() for _ in range(leads)])
        if self.data == "resident":
            more = range(leads, self.config.train.leads)
            self.fields = [inputs, *batch.labels, *(label() for _ in more)]
        ensemble = self.ensemble
        sums = torch.zeros(leads, objective.num_channels, dtype=torch.float64)
        factors = torch.ones(objective.num_channels, dtype=torch.float64)

        def step() -> None:
            if self.alone:
                self.optimizer.zero_grad(set_to_none=True)
            given = running.model, objective, factors, memory
            with suppress(_GroupIsOver):
                (ensemble.rollouts(1, *given) if ensemble else Differentiated(*given))(batch, sums)
            if self.data == "buffered":
                batch.label = None
            running.shared.reduce(ensemble.pulled(1, 1.0) if ensemble else None)
            running.shared.total(sums.sum(1))
            running.shared.scale_(1.0)
            self.optimizer.step()
            if self.average:
                self.average.update(running.model, 1)

        return step


def _bytes(tensor: Tensor) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes())
