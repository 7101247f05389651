"""The gradient of a rollout: forward through its leads, and back. Nothing else calls `backward`.

The graph of a rollout is cut between leads: each lead is differentiated by itself, from the last
to the first, given the gradient of what it fed back. Where the gradient is not handed on, after
every `detach_every` leads, those before are differentiated, and freed, before the next one runs.
With a lead-wise plan no graph waits for that either: what the network said in each lead is kept,
nothing else, and a lead runs again before it is differentiated. States come back bit for bit,
since they are the first one plus what was said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graticule.memory.apply import Memory
from graticule.memory.trace import span
from graticule.model.family import Model
from graticule.train.ending import Ending, States, Wanted, ending, given
from graticule.train.objective import MicroBatch, Objective


@dataclass(frozen=True, eq=False)
class _Lead:
    """A lead that waits for its backward pass. ending: where that starts. given: where the gradient
    of what the network was given will be; None: nobody wants it."""

    ending: Ending
    given: list[Tensor] | None


@dataclass(frozen=True, eq=False)
class Differentiated:
    """Takes the gradient of a micro-batch's rollout.

    model: with a plan, one of ours (`Model`), which takes a runner.
    factors: (channel,) float64, of each channel's sum of errors.
    memory: whose plan is of as many leads as a group of the objective's has, or of more.
    """

    model: Any
    objective: Objective
    factors: Tensor
    memory: Memory

    def __call__(self, batch: MicroBatch, sums: Tensor) -> None:
        """Add the errors of leads 1, 2, ... to `sums`, (lead, channel) float64, and their gradients
        to the parameters'."""
        if self.memory.lead_wise and self.objective.leads > 1:
            self._lead_wise(batch, sums)
        else:
            self._together(batch, sums)

    def _together(self, batch: MicroBatch, sums: Tensor) -> None:
        """Forward through the leads of a group, then back."""
        objective = self.objective
        first: Tensor | None = objective.inputs(objective.on_device(batch.inputs))
        assert first is not None
        # The first lead's states belong to the caller, who may want their gradient himself.
        asked = first if first.requires_grad else None
        states, first = self._states(first.detach()), None
        waiting: list[_Lead] = []
        for leads in objective.groups:
            for lead in leads:
                learns = lead > leads[0] or (lead == 1 and asked is not None)
                wanted = Wanted(learns=learns, after=lead < objective.leads, fed=lead < leads[-1])
                done = self._forward(lead, leads, states, *self._data(batch), sums, wanted)
                waiting.append(done)
                if done.ending.after is not None:
                    states = self._states(done.ending.after)
                    done.ending.after = None
                del done  # `waiting` alone holds it: it goes when it is differentiated
            self._settle(leads, sums)
            if leads[-1] == objective.leads:
                del states
            gradient = None
            while waiting:
                gradient = self._back(waiting.pop(), gradient)
            if asked is not None and leads[0] == 1:
                torch.autograd.backward([asked], [gradient])

    def _lead_wise(self, batch: MicroBatch, sums: Tensor) -> None:
        """Forward without a graph; then each lead of a group again, from the last, and back."""
        objective = self.objective
        start = self._states(objective.on_device(batch.inputs), stored=True)
        for leads in objective.groups:
            data = []
            said: list[Tensor] = []
            with torch.no_grad():
                running = start.whole() if len(leads) > 1 else start
                for lead in leads[:-1]:
                    data.append(self._data(batch))
                    with span(f"forward lead {lead}"):
                        said.append(self._say(lead, leads, running, data[-1][0]))
                        running.go_on(said[-1])
                del running
            data.append(self._data(batch))
            gradient = after = None
            for lead in reversed(leads):
                learns, more = lead > leads[0], lead == leads[-1] < objective.leads
                states = replace(start, said=tuple(said[: lead - leads[0]]))
                del said[lead - leads[0] :]
                wanted = Wanted(learns=learns, after=more, fed=lead < leads[-1])
                done = self._forward(lead, leads, states, *data.pop(), sums, wanted)
                del states
                if more:
                    after, done.ending.after = done.ending.after, None
                gradient = self._back(done, gradient)
                del done
            if after is not None:
                start = self._states(after)

    def _states(self, first: Tensor, *, stored: bool = False) -> States:
        model = self.model
        adds = isinstance(model, Model) and model.adds and model.states[0] < model.states[1]
        return States(self.objective, adds, first, stored)

    def _error_of(self, lead: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Of a lead's prediction and stored labels, (channel,) float64, whose gradient is taken;
        None: the objective's."""
        return None

    def _settle(self, leads: range, sums: Tensor) -> None:
        """Between the forward passes of a group of leads and its backward passes."""

    def _data(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Stored (forcing, labels) of the next lead."""
        with span("data wait"):
            return batch.lead()

    def _say(
        self,
        lead: int,
        group: range,
        states: States,
        forcing: Tensor,
        gradient: list[Tensor] | None = None,
    ) -> Tensor:
        """What the network says in a lead. group: the leads of its own. gradient: where that of
        what it is given will go."""
        objective, model = self.objective, self.model
        forcing = objective.forcing(objective.on_device(forcing))
        x = states.input(forcing, model.compute_dtype if isinstance(model, Model) else None)
        del forcing
        if gradient is not None:
            x = given(x, gradient)
        return self._compute(lead, x, self.memory.runner(lead - group[0] + 1))

    def _compute(self, lead: int, x: Tensor, run: Sequence[Any]) -> Tensor:
        """What the network says of its input. run: what calls its units, if not itself."""
        model = self.model
        return model(x, *run, added=False) if isinstance(model, Model) else model(x)

    def _forward(
        self,
        lead: int,
        group: range,
        states: States,
        forcing: Tensor,
        labels: Tensor,
        sums: Tensor,
        wanted: Wanted,
    ) -> _Lead:
        """A lead with its graph; see `ending`. group: the leads of its own."""
        with span(f"forward lead {lead}"):
            gradient = list[Tensor]() if wanted.learns else None
            say = partial(self._say, lead, group, states, forcing, gradient)
            done = ending(self.model, states, say, labels, wanted, error=self._error_of(lead))
            sums[lead - 1] += done.errors
        return _Lead(done, gradient)

    def _back(self, lead: _Lead, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the states that the lead was given; `gradient`: of those after it."""
        with span("backward"):
            torch.autograd.backward(*lead.ending.roots(self.factors, gradient))
            return lead.ending.handed_on(lead.given.pop()) if lead.given else None
