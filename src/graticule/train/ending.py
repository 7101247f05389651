"""Where a lead begins and ends: states become what the network is given, and what it says becomes
the next states and the error; and back.

    predicted = newest state + what the network says, 0 on land
    error     = sum of w |predicted - label|^n;  next states: the newest that are predicted

A field of all channels is the largest thing there is, and here a step could hold a dozen of them
in float32. So all of it is done a channel at a time (`loss.parts`), the decoding of states and
labels too. What is whole: what the network is given and says, and its gradient, in the network's
dtype; what the error keeps, a byte a value; and in float32 the states, where they are in memory at
all, and their gradient, which is written over itself. Numbers are those of whole fields.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from graticule.forecast.rollout import at_sea, next_states
from graticule.train.loss import error_gradients, error_of, error_sums, parts
from graticule.train.objective import Objective

Roots = tuple[list[GradientEdge], list[Tensor]]


class Given(torch.autograd.Function):
    """Fields that a lead is given. Their gradient goes to a list: a leaf, which has its own, would
    hold the fields until then, also where the lead needs them no more or has them on the host."""

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, fields: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return fields.view_as(fields)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.gradient.append(gradient)
        return None, None, None


def given(fields: Tensor, gradient: list[Tensor]) -> Tensor:
    """`fields`, whose gradient will be put into that list."""
    return Given.apply(fields.new_empty(0).requires_grad_(), fields, gradient)


class _Begins(torch.autograd.Function):
    """A number to begin the backward pass at. The gradient of `said` comes from a list: whoever
    hands one to `backward` holds it until all of it is over."""

    @staticmethod
    def forward(ctx: Any, said: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return said.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


@dataclass(frozen=True, eq=False)
class States:
    """What a lead is given, (batch, input offset, prognostic channel, lat, lon), oldest first.

    first: normalised states; where `stored`, as they are stored.
    said: by the network in each lead since, (batch, output offset x predicted channel, lat, lon).
    Where there is any, or `stored`, the states are not in memory: they are made a channel at a
    time by whoever reads them.
    adds: whether what the network says is a change of the newest state, or the next one itself.
    """

    objective: Objective
    adds: bool
    first: Tensor
    stored: bool = False
    said: Sequence[Tensor] = ()

    @property
    def in_memory(self) -> bool:
        return not (self.stored or self.said)

    def some(self, sample: int, channels: slice) -> list[Tensor]:
        """(channel, lat, lon) of each input offset, of prognostic channels."""
        here = self.first[sample, :, channels]
        planes = list(self.objective.inputs(here, channels) if self.stored else here)
        for said in self.said:
            planes = self.newest(planes, self.predicted(planes, self.part(said, sample, channels)))
        # Once for all leads: no cell looks at another one.
        return self.at_sea(planes, channels) if self.said else planes

    def part(self, said: Tensor, sample: int, channels: slice) -> Tensor:
        """(output offset, channel, lat, lon) of what the network says or is told."""
        return said[sample].unflatten(0, (-1, self.objective.num_channels))[:, channels]

    def predicted(self, planes: list[Tensor], said: Tensor) -> Tensor:
        """Of prognostic channels; on land whatever comes out."""
        said = said.to(planes[-1].dtype)
        return said + planes[-1] if self.adds else said

    def after_saying(self, model: Any, before: Tensor, said: Tensor) -> Tensor:
        """(batch, output offset, predicted channel, lat, lon), 0 on land; of whole states, which
        are `before`."""
        output = model.add(before.flatten(1, 2), said) if self.adds else said.to(before.dtype)
        return at_sea(output, self.objective.weights.wet)

    def newest(self, planes: list[Tensor], predicted: Tensor) -> list[Tensor]:
        """The next states, as many as `planes`."""
        return [*planes, *predicted][-len(planes) :]

    def at_sea(self, planes: list[Tensor], channels: slice) -> list[Tensor]:
        wet = self.objective.weights.wet[channels]
        return [torch.where(wet, plane, 0.0) for plane in planes]

    def whole(self) -> "States":
        """The same, in memory of their own."""
        out: Tensor | None = None
        for sample, channels in parts(self.first.shape):
            planes = self.some(sample, channels)
            out = planes[0].new_empty(self.first.shape) if out is None else out
            _copy(planes, out[sample, :, channels])
        assert out is not None, self.first.shape
        return replace(self, first=out, stored=False, said=())

    def go_on(self, said: Tensor) -> None:
        """To those after a lead, in the same memory. Of `whole` ones."""
        assert self.in_memory
        for sample, channels in parts(self.first.shape):
            here = self.first[sample, :, channels]
            predicted = self.predicted(list(here), self.part(said, sample, channels))
            # Copies, all of them, before the first is overwritten.
            _copy(self.at_sea(self.newest(list(here), predicted), channels), here)

    def input(self, forcing: Tensor, dtype: torch.dtype | None) -> Tensor:
        """(batch, in_channel, lat, lon), what the network is given, as `rollout.model_input`; a
        view of the states where they are all there is. forcing: normalised. dtype: None: theirs.
        """
        batch, offsets, channels, *points = self.first.shape
        forcing, statics = forcing.flatten(1, 2), self.objective.statics
        num = offsets * channels
        beside = num + forcing.shape[1]
        total = beside + len(statics)
        if self.in_memory:
            dtype = dtype or self.first.dtype
            if total == num and dtype == self.first.dtype:
                return self.first.flatten(1, 2)
        assert dtype is not None, "states that are not in memory are of a model of ours"
        x = torch.empty(batch, total, *points, dtype=dtype, device=statics.device)
        if self.in_memory:
            x[:, :num] = self.first.flatten(1, 2)
        else:
            states = x[:, :num].unflatten(1, (offsets, channels))
            for sample, some in parts(self.first.shape):
                _copy(self.some(sample, some), states[sample, :, some])
        x[:, num:beside] = forcing
        x[:, beside:] = statics
        return x


def _copy(planes: Iterable[Tensor], out: Tensor) -> None:
    for place, plane in zip(out, planes, strict=True):
        place.copy_(plane)


class Ending(Protocol):
    """Of a lead. errors: (channel,) float64 error sums. after: the states after it, if wanted."""

    errors: Tensor
    after: Tensor | None

    def roots(self, factors: Tensor, gradient: Tensor | None) -> Roots:
        """Where the backward pass through the network begins, and the gradients there.

        factors: of each channel's errors. gradient: of the states after the lead, if anybody wants
        it; the ending may write over it.
        """

    def handed_on(self, inner: Tensor) -> Tensor:
        """The gradient of the states before the lead. inner: of what the network was given."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Of a lead's ending. after: whether the states after the lead are wanted. fed: whether their
    gradient will come. learns: whether that of the states before it is wanted."""

    after: bool
    fed: bool
    learns: bool


def ending(
    model: Any,
    states: States,
    say: Callable[[], Tensor],
    labels: Tensor,
    wanted: Wanted,
    *,
    error: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Ending:
    """Of a lead. say: what the network says, with its graph; not the caller's, who would hold it.
    labels: stored ones. error: of what is predicted and stored labels, (channel,) float64, where it
    is not the objective's own."""
    objective = states.objective
    if error or objective.kind == "published mae" or objective.differences is not None:
        return _Whole(model, states, say, labels, wanted, error or objective.error)
    return _ByChannel(states, say(), labels, wanted)


class _ByChannel:
    """See the module."""

    def __init__(self, states: States, said: Tensor, labels: Tensor, wanted: Wanted) -> None:
        objective, self._learns = states.objective, wanted.learns
        # Not the states: they, or what they are made from, go when the caller lets them.
        self._rules = replace(states, first=states.first.new_empty(0), said=())
        self._out: list[Tensor] = []
        self._edge, said = get_gradient_edge(_Begins.apply(said, self._out)), said.detach()
        self._states, self._said, self._said_dtype = states.first.shape, said.shape, said.dtype
        weights, labels = objective.weights, objective.on_device(labels)
        self._labels = labels.shape
        self._kept: Tensor | None = None
        self._factors: Tensor | None = None
        self.errors = torch.zeros(len(weights.wet), dtype=torch.float64, device=said.device)
        self.after: Tensor | None = None
        for sample, some in self._parts():
            predicted = states.part(said, sample, some)
            if some.start < objective.num_prognostic:
                planes = states.some(sample, some)
                self._dtype = planes[-1].dtype
                predicted = states.predicted(planes, predicted)
                if wanted.after:
                    if self.after is None:
                        self.after = planes[-1].new_empty(self._states)
                    planes = states.at_sea(states.newest(planes, predicted), some)
                    _copy(planes, self.after[sample, :, some])
            target = objective.labels(labels[sample, :, some], some)
            difference = error_of(predicted, target, weights.wet[some])
            sums, here = error_sums(difference, weights.cell[some], objective.kind)
            self.errors[some] += sums.sum(0)
            if self._kept is None:
                self._kept = here.new_empty(self._labels)
            self._kept[sample, :, some] = here

    def _parts(self) -> Iterable[tuple[int, slice]]:
        return parts(self._labels, self._rules.objective.num_prognostic)

    def roots(self, factors: Tensor, gradient: Tensor | None) -> Roots:
        assert self._kept is not None
        self._factors = factors.to(torch.promote_types(self._dtype, torch.float32))
        out = torch.empty(self._said, dtype=self._said_dtype, device=factors.device)
        for sample, some in self._parts():
            d = self._predicted(sample, some, gradient)
            self._rules.part(out, sample, some).copy_(d)
            if gradient is not None and some.start < self._rules.objective.num_prognostic:
                self._through(gradient[sample, :, some], d)
        self._gradient = gradient
        if gradient is not None or not self._learns:
            self._kept = None
        self._out.append(out)
        return [self._edge], [out.new_ones(1)]

    def _predicted(self, sample: int, some: slice, gradient: Tensor | None) -> Tensor:
        """(output offset, channel, lat, lon), the gradient of what is predicted."""
        objective = self._rules.objective
        weights, kept, factors = objective.weights, self._kept, self._factors
        assert kept is not None
        assert factors is not None
        d = error_gradients(
            kept[sample, :, some], factors[some], weights.cell[some], objective.kind
        ).to(self._dtype)
        if gradient is not None and some.start < objective.num_prognostic:
            newest = min(len(d), self._states[1])
            d[-newest:] += gradient[sample, -newest:, some]
        return torch.where(weights.wet[some], d, 0.0)

    def _through(self, gradient: Tensor, d: Tensor) -> None:
        """From the gradient of the next states, (offset, channel, lat, lon), to that of these, but
        for the network's share; in place. d: of what is predicted."""
        old = max(len(gradient) - len(d), 0)
        kept = gradient[:old].clone()
        gradient[: len(gradient) - old] = 0
        gradient[len(gradient) - old :] = kept
        if self._rules.adds:
            gradient[-1] += d.sum(0)

    def handed_on(self, inner: Tensor) -> Tensor:
        gradient = self._gradient
        if gradient is None:
            # Nobody wanted that of the states after: until here, the error's bytes stood for it.
            gradient = torch.zeros(self._states, dtype=self._dtype, device=inner.device)
            for sample, some in parts(self._states) if self._rules.adds else ():
                gradient[sample, -1, some] = self._predicted(sample, some, None).sum(0)
            self._kept = None
        return gradient.add_(_of_states(inner, self._states))


class _Whole:
    """The same with whole fields, left to autograd: differences between neighbours take a field's,
    members are scored by fields, and what the published program keeps is what this keeps."""

    def __init__(
        self, model: Any, states: States, say: Callable[[], Tensor], labels: Tensor,
        wanted: Wanted, error: Callable[[Tensor, Tensor], Tensor],
    ) -> None:  # fmt: skip
        objective, said = states.objective, say()
        before = (states if states.in_memory else states.whole()).first
        self._states, self._dtype, self._given = before.shape, before.dtype, list[Tensor]()
        if wanted.learns:
            before = given(before, self._given)
        predicted = states.after_saying(model, before, said)
        del said
        errors = error(predicted, labels)
        self._edges = [get_gradient_edge(errors)]
        self.errors = errors.detach()
        self.after: Tensor | None = None
        if wanted.after or wanted.fed:
            next_ones = next_states(before, predicted, objective.num_prognostic)
            if wanted.fed:
                self._edges.append(get_gradient_edge(next_ones))
            self.after = next_ones.detach() if wanted.after else None

    def roots(self, factors: Tensor, gradient: Tensor | None) -> Roots:
        return self._edges, [factors] if gradient is None else [factors, gradient]

    def handed_on(self, inner: Tensor) -> Tensor:
        inner = _of_states(inner, self._states)
        return self._given.pop().add_(inner) if self._given else inner.to(self._dtype)


def _of_states(inner: Tensor, shape: Sequence[int]) -> Tensor:
    """Of the gradient of what the network was given, that of the states."""
    return inner[:, : shape[1] * shape[2]].unflatten(1, tuple(shape[1:3]))
