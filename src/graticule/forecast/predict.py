"""What one process computes of a forecast: the leads of some samples on its stripe of the grid."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from graticule.data.normalise import Normaliser, normalised_statics
from graticule.data.samples import Sample, SampleSource
from graticule.data.statistics import Statistics
from graticule.forecast.clock import Clock
from graticule.forecast.rollout import member_turns, next_states, rollout, turned
from graticule.model.bayes import keeping
from graticule.model.draws import Draw
from graticule.model.family import takes_draws
from graticule.parallel.together import Together


class Predictor:
    """A model, and how its data are read, normalised and brought back to units.

    source: of the stripe and channels that are here; so are normalisers, masks and statics.
    roll_seed: of the turns in longitude that tell members apart, of a model that was trained on
    turned samples; None: none is turned.
    """

    def __init__(
        self,
        model: nn.Module,
        source: SampleSource,
        statistics: Statistics,
        device: torch.device,
        roll_seed: int | None = None,
    ) -> None:
        store = source.store
        rows, columns = (slice(part.start, part.stop) for part in (source.rows, source.columns))
        self.model, self.source, self.device = model.eval(), source, device
        self.drawn, self.roll_seed = takes_draws(model), roll_seed
        self._states, self._given, self._predicted = (
            Normaliser(store, channels, statistics, rows=rows, columns=columns).to(device)
            for channels in (source.prognostic, source.forcing, source.predicted)
        )
        names = [store.statics.names[i] for i in source.statics]
        statics = normalised_statics(store, names, statistics)[:, rows, columns]
        self._statics = statics.contiguous().to(device)
        # Sharded weights are gathered by all ranks at once: by those that are out of samples too.
        self._fillers = int(any(isinstance(module, FSDPModule) for module in model.modules()))

    def keeping(self) -> AbstractContextManager[None]:
        """Within the block the weights of a member are drawn once, not once a lead; sharded ones
        are, since what is gathered of them is to go again."""
        return nullcontext() if self._fillers else keeping(self.model)

    def leads(
        self,
        samples: Sequence[Sample],
        leads: range,
        together: Together,
        *,
        clock: Clock,
        steps: int,
        states: Tensor | None = None,
        member: int | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, of each lead, what is predicted and what the next lead is given; normalised.

        leads: from the first that is computed to the last, 1 being that from the initial time.
        steps: how many leads all processes take together; one that has fewer, or no samples, goes
        along with nothing. states: what the first lead is given, as this yields it; none: the
        states known at the samples' initial times. member: which one is computed, of a model whose
        weights or noise are drawn or whose members are turned: its weights are one draw over all
        leads, its noise at each lead is that of the sample's initial time, by its position in the
        store, and so is its turn, one for all leads. So a member is the same whatever runs beside
        it.
        Yields (sample, output offset, predicted channel, lat, lon) and (sample, input offset,
        prognostic channel, lat, lon). All processes take part and read together. ValueError on all
        of them where one cannot read, or predicts what is not finite.
        """
        spec, source = self.source.spec, self.source
        with together.agreed(), clock("read"):
            if states is None:
                planes = len(spec.inputs), len(source.prognostic)
                states = self._read(self._states, samples, Sample.inputs, planes)
        idle = steps - (len(leads) if samples else 0)
        # Sharded weights are gathered by all ranks at once: by those that are done, too.
        nothing = states.new_zeros(self._fillers, *states.shape[1:])
        own = leads if samples else range(0)
        rolled = self._rolled(samples, states, own, member, together, clock)
        del states  # they go with the first lead
        yield from rolled
        drawn = 0 if self.drawn else None  # of any: nobody sees what is computed
        yield from self._rolled([], nothing, range(1, idle + 1), drawn, together, clock)

    def _rolled(
        self,
        samples: Sequence[Sample],
        states: Tensor,
        leads: range,
        member: int | None,
        together: Together,
        clock: Clock,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        spec, source = self.source.spec, self.source
        num_samples, num_prognostic = len(samples), len(source.prognostic)
        items = tuple(sample.start for sample in samples) or (0,) * len(states)

        def step(x: Tensor, **drawn: Draw) -> Tensor:
            if member is None or self.roll_seed is None:
                return self.model(x, **drawn)
            by = member_turns(self.roll_seed, items, member, x.shape[-1])
            return turned(self.model(turned(x, by), **drawn), [-shift for shift in by])

        def draw(lead: int) -> Draw:
            assert member is not None
            return Draw(step=0, member=member, items=items, lead=lead)

        def forcing(lead: int) -> Tensor:
            with together.agreed(), clock("read"):
                fields = self._read(
                    self._given, samples, lambda sample: sample.forcing(lead),
                    (len(spec.forcings), len(source.forcing)),
                )  # fmt: skip
            return fields

        if len(states):
            fields = rollout(
                step, states, forcing, self._statics, self._predicted.wet,
                first=leads.start, leads=leads.stop - 1, num_prognostic=num_prognostic,
                draw=draw if self.drawn else None,
            )  # fmt: skip
        else:
            fields = (forcing(lead) for lead in leads)
        for lead in leads:
            with clock("compute"):
                field = next(fields)
                with together.agreed():
                    _refuse_not_finite(field[:num_samples], samples, member, lead)
            if len(states):
                states = next_states(states, field, num_prognostic)
            yield field[:num_samples], states[:num_samples]

    def in_units(self, field: Tensor) -> Tensor:
        """(predicted channel, lat, lon) normalised -> float32 in units, NaN on land."""
        return self._predicted.denormalise(field)

    def _read(
        self,
        normaliser: Normaliser,
        samples: Sequence[Sample],
        stored: Callable[[Sample], np.ndarray],
        planes: tuple[int, int],
    ) -> Tensor:
        """(sample, *planes, lat, lon) normalised; planes: times and channels."""
        if not (samples and planes[1]):  # nothing to read, perhaps no such time
            shape = (len(samples) or self._fillers, *planes, *self.source.shape)
            return torch.zeros(shape, device=self.device)
        blocks = np.stack([stored(sample) for sample in samples])
        return normaliser(torch.from_numpy(blocks).to(self.device))


def _refuse_not_finite(
    field: Tensor, samples: Sequence[Sample], member: int | None, lead: int
) -> None:
    finite = torch.isfinite(field).flatten(1).all(1).tolist()
    if not all(finite):
        sample = samples[finite.index(False)]
        which = "the forecast" if member is None else f"member {member} of the forecast"
        raise ValueError(
            f"{which} from {sample.init_time} is not finite at lead {lead}: the model has"
            " diverged; fine-tune it over more leads or forecast fewer"
        )
