"""A step's members: each rolled out with a draw of its own, all scored together (`likelihoods`).

Members come one at a time, so that the graph of one is alive at once. Where the score of one
depends on the others', all but the last are first rolled out without a graph and heard; the last
one is heard with its graph, the ranks that share members settle, it is differentiated, and then
the others run again with theirs. A rank with one member has no pass more than without members;
with n of them a step costs (n - 1) / n forward passes more. Draws are keyed (`model/draws`): a
member that runs again says the same.

One draw of the weights holds for all samples, micro-batches and leads of a step, and noise is drawn
for each item and lead anew.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graticule.config import Config
from graticule.forecast.rollout import member_turns, next_states, turned
from graticule.memory.apply import Memory
from graticule.memory.trace import span
from graticule.mesh import Mesh
from graticule.model.draws import Draw
from graticule.model.family import Model
from graticule.parallel.exchange import Link
from graticule.train.differentiated import Differentiated
from graticule.train.likelihoods import Likelihood, Score, score_of
from graticule.train.loss import LossWeights
from graticule.train.objective import MicroBatch, Objective
from graticule.train.prior import Pull, kl_scale


@dataclass(frozen=True, eq=False, kw_only=True)
class Ensemble:
    """Which members of how many are here, how they are scored, and the prior of their weights.

    own: numbers of the members that are here, of `num_members`. link: the ranks that share them.
    floor, alpha: of the likelihood. pull: of weights that are distributions; kl_scale: what their
    KL is multiplied by. roll_seed: of the turn in longitude that each member sees a sample at;
    None: none is turned.
    """

    num_members: int
    own: range
    likelihood: Likelihood
    floor: float
    alpha: float
    link: Link
    pull: Pull | None = None
    kl_scale: float = 0.0
    roll_seed: int | None = None

    def scores(self, weights: LossWeights, leads: int) -> list[Score]:
        """Of the leads of a micro-batch."""
        return [
            score_of(
                self.likelihood, weights, num_members=self.num_members, floor=self.floor,
                alpha=self.alpha, own=len(self.own), link=self.link,
            )
            for _ in range(leads)
        ]  # fmt: skip

    def pulled(self, step: int, loss_scale: float) -> Callable[[nn.Parameter, int], None] | None:
        """What adds the prior's gradient to a parameter's, as `SharedWeights.reduce` calls it."""
        if self.pull is None:
            return None
        self.pull.begin([Draw(step=step, member=m).words for m in range(self.num_members)])
        scale = self.kl_scale * loss_scale
        return lambda parameter, copies: self.pull.take(parameter, scale, copies)  # type: ignore

    def rollouts(
        self, step: int, model: nn.Module, objective: Objective, factors: Tensor, memory: Memory
    ) -> "Rollouts":
        """What takes the gradients of a micro-batch's members in optimizer step `step`; the other
        arguments as of `Differentiated`."""
        return Rollouts(self, step, model, objective, factors, memory)

    def members(
        self,
        step: int,
        items: Sequence[int],
        scores: list[Score],
        model: nn.Module,
        objective: Objective,
        factors: Tensor | None = None,
        memory: Memory | None = None,
    ) -> "list[Member]":
        """Those that are here, of a micro-batch with these items. step: 0: of no optimizer step.
        factors, memory: of those that are differentiated."""
        factors = torch.empty(0) if factors is None else factors
        return [
            Member(
                model, objective, factors, memory or Memory(), scores=scores, number=number,
                draw=Draw(step=step, member=member, items=tuple(items)), roll_seed=self.roll_seed,
            )
            for number, member in enumerate(self.own)
        ]  # fmt: skip

    @torch.no_grad()
    def forecast(
        self, model: nn.Module, objective: Objective, batch: MicroBatch
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(the members' mean, labels, score sums) of leads 1, 2, ... of a batch, the first two
        normalised; the sums are our share. The draws are those of no optimizer step, the same
        whenever they are asked for. Ranks that share members take part together."""
        scores = self.scores(objective.weights, objective.leads)
        again = _Again(batch)
        members = self.members(0, batch.keys, scores, model, objective)
        runs = [member.forecast(again.begun()) for member in members]
        for score, together in zip(scores, zip(*runs, strict=True), strict=True):
            stored = together[0][1]
            labels = objective.labels(objective.on_device(stored))
            mean = torch.zeros_like(together[0][0])
            for number, (predicted, _) in enumerate(together):
                score.of(predicted, labels, number)
                mean += predicted / self.num_members
            yield self.link.sum(mean, "members"), labels, score.settle()


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Takes the gradients of a micro-batch's members, as `Differentiated` does of one rollout."""

    ensemble: Ensemble
    step: int
    model: nn.Module
    objective: Objective
    factors: Tensor
    memory: Memory

    def __call__(self, batch: MicroBatch, sums: Tensor) -> None:
        scores = self.ensemble.scores(self.objective.weights, self.objective.leads)
        members = self.ensemble.members(
            self.step, batch.keys, scores, self.model, self.objective, self.factors, self.memory
        )
        again = _Again(batch)
        if scores[0].together:
            # Lead-wise, leads are differentiated before all of them have a graph.
            lead_wise = self.memory.lead_wise and self.objective.leads > 1
            for member in members if lead_wise else members[:-1]:
                member.listen(again.begun())
            if lead_wise:
                members[-1].settle(self.objective.leads, sums)
        for member in reversed(members):
            member(again.begun(), sums)
        for lead, score in enumerate(scores):
            if not score.settled:
                sums[lead] += score.settle()


@dataclass(frozen=True, eq=False)
class Member(Differentiated):
    """One member's rollout. scores: of the leads. number: among our own members.

    roll_seed: of the turns of `member_turns`; None: there are none.
    """

    scores: list[Score]
    number: int
    draw: Draw
    roll_seed: int | None = None

    @torch.no_grad()
    def forecast(self, batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """(predicted, stored labels) of leads 1, 2, ..., without a graph."""
        objective = self.objective
        states = objective.inputs(objective.on_device(batch.inputs))
        for group in objective.groups:
            for lead in group:
                forcing, labels = self._data(batch)
                given = self._states(states)
                predicted = given.after_saying(
                    self.model, states, self._say(lead, group, given, forcing)
                )
                del given
                yield predicted, labels
                states = next_states(states, predicted, objective.num_prognostic)

    @torch.no_grad()
    def listen(self, batch: MicroBatch) -> None:
        """Let the scores hear the member's forecast."""
        with span("forward of members"):
            for lead, (predicted, labels) in enumerate(self.forecast(batch), start=1):
                self._error(lead, predicted, labels)

    def settle(self, leads: int, sums: Tensor) -> None:
        """Of leads 1, 2, ..., once all members are heard."""
        self._settle(range(1, leads + 1), sums)

    def _compute(self, lead: int, x: Tensor, run: Sequence[Any]) -> Tensor:
        draw = replace(self.draw, lead=lead)
        said = {"added": False} if isinstance(self.model, Model) else {}
        say = partial(self.model, draw=draw, **said)
        if self.roll_seed is None:
            return say(x, *run)
        by = member_turns(self.roll_seed, draw.items, draw.member, x.shape[-1])
        return turned(say(turned(x, by), *run), [-shift for shift in by])

    def _error_of(self, lead: int) -> Callable[[Tensor, Tensor], Tensor]:
        return partial(self._error, lead)

    def _error(self, lead: int, predicted: Tensor, labels: Tensor) -> Tensor:
        objective = self.objective
        target = objective.labels(objective.on_device(labels))
        return self.scores[lead - 1].of(predicted, target, self.number)

    def _settle(self, leads: range, sums: Tensor) -> None:
        for lead in leads:
            score = self.scores[lead - 1]
            if score.together and not score.settled:
                sums[lead - 1] += score.settle()


class _Again:
    """A micro-batch that is read once and given to each member."""

    def __init__(self, batch: MicroBatch) -> None:
        self.keys, self.inputs, self.init_times = batch.keys, batch.inputs, batch.init_times
        self._batch, self._data = batch, list[tuple[Tensor, Tensor]]()

    def begun(self) -> "_Reading":
        """It, from the first lead on."""
        return _Reading(self)

    def lead(self, number: int) -> tuple[Tensor, Tensor]:
        """From 0 on, by whoever comes first."""
        if number == len(self._data):
            self._data.append(self._batch.lead())
        return self._data[number]


class _Reading:
    """What one member sees of a micro-batch."""

    def __init__(self, of: _Again) -> None:
        self.keys, self.inputs, self.init_times = of.keys, of.inputs, of.init_times
        self._leads = map(of.lead, itertools.count())

    def lead(self) -> tuple[Tensor, Tensor]:
        return next(self._leads)


def ensemble_of(
    config: Config, mesh: Mesh, model: nn.Module, objective: Objective, samples: int
) -> Ensemble | None:
    """What the configuration says of members; None: nothing is drawn and there is one.

    samples: training windows. All ranks make it together.
    """
    bayes = config.bayes
    if bayes.likelihood == "none":
        return None
    ranks, index = mesh.sizes["member"], mesh.index("member")
    own = bayes.members // ranks
    return Ensemble(
        num_members=bayes.members,
        own=range(index * own, (index + 1) * own),
        likelihood=bayes.likelihood,
        floor=bayes.floor,
        alpha=bayes.alpha,
        link=Link(mesh.group("member")),
        pull=Pull(model) if bayes.weights else None,
        kl_scale=kl_scale(bayes.cold, samples, objective.weight(1)),
        roll_seed=config.train.seed if config.train.roll_longitude else None,
    )
