"""What one process computes of a forecast: the leads of some samples on its stripe of the grid."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from graticule.data.normalise import Normaliser, normalised_statics
from graticule.data.samples import Sample, SampleSource
from graticule.data.statistics import Statistics
from graticule.forecast.rollout import rollout
from graticule.mesh import Stripes
from graticule.parallel.exchange import Link
from graticule.parallel.together import Together


class Predictor:
    """A model, and how its data are read, normalised and brought back to units.

    source: of the stripe that is here; the normalisers, masks and statics are of its size.
    """

    def __init__(
        self, model: nn.Module, source: SampleSource, statistics: Statistics, device: torch.device
    ) -> None:
        store = source.store
        rows, columns = (slice(part.start, part.stop) for part in (source.rows, source.columns))
        self.model, self.source, self.device = model.eval(), source, device
        self._states, self._given, self._predicted = (
            Normaliser(store, channels, statistics, rows=rows, columns=columns).to(device)
            for channels in (source.prognostic, source.forcing, source.predicted)
        )
        names = [store.statics.names[i] for i in source.statics]
        statics = normalised_statics(store, names, statistics)[:, rows, columns]
        self._statics = statics.contiguous().to(device)
        # Sharded weights are gathered by all ranks at once: by those that are out of samples too.
        self._fillers = int(any(isinstance(module, FSDPModule) for module in model.modules()))

    def leads(self, samples: Sequence[Sample], leads: int, together: Together) -> Iterator[Tensor]:
        """Yield (sample, output offset, predicted channel, lat, lon) of leads 1, 2, ..., `leads`.

        Normalised. All processes take part and read together, also one that has no samples.
        ValueError on all of them where one cannot read, or predicts what is not finite.
        """
        spec, source = self.source.spec, self.source

        def forcing(lead: int) -> Tensor:
            with together.agreed():
                fields = self._read(
                    self._given, samples, lambda sample: sample.forcing(lead),
                    (len(spec.forcings), len(source.forcing)),
                )  # fmt: skip
            return fields

        with together.agreed():
            known = self._read(
                self._states, samples, Sample.inputs, (len(spec.inputs), len(source.prognostic))
            )
        if len(known):
            fields = rollout(
                self.model, known, forcing, self._statics, self._predicted.wet,
                leads=leads, num_prognostic=len(source.prognostic),
            )  # fmt: skip
        else:
            fields = (forcing(lead) for lead in range(1, leads + 1))
        for lead, field in enumerate(fields, start=1):
            with together.agreed():
                _refuse_not_finite(field[: len(samples)], samples, lead)
            yield field[: len(samples)]

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


def collected(
    values: Tensor, stripes: Stripes | None, link: Link, device: str
) -> np.ndarray | None:
    """(channel, lat, lon) of each stripe -> of the whole grid on the first rank, None on others.

    link: between the ranks that share the field, as `stripes` says; a collective of theirs, which
    runs on `device`.
    """
    if link.size == 1:
        return values.cpu().numpy()
    assert stripes is not None, "ranks that share a field hold stripes of it"
    dim = 1 if stripes.dim == "lat" else 2
    line = len(values) * values.shape[3 - dim]  # values of one row, or column
    sizes = [line * stripes.grid.length(rank) for rank in range(link.size)]
    nothing = [0] * link.size
    if link.rank > 0:
        send = [sizes[link.rank], *nothing[1:]]
        link.exchange(values.to(device).flatten(), send, nothing, "forecast")
        return None
    receive = [0, *sizes[1:]]
    received = link.exchange(values.new_empty(0, device=device), nothing, receive, "forecast")
    shape = list(values.shape)
    shape[dim] = stripes.grid.size
    whole = torch.empty(shape)
    for rank, part in enumerate(received.split(receive)):
        place = whole.narrow(dim, stripes.grid.bounds[rank], stripes.grid.length(rank))
        place.copy_(part.view(place.shape) if rank else values)
    return whole.numpy()


def _refuse_not_finite(field: Tensor, samples: Sequence[Sample], lead: int) -> None:
    finite = torch.isfinite(field).flatten(1).all(1).tolist()
    if not all(finite):
        sample = samples[finite.index(False)]
        raise ValueError(
            f"the forecast from {sample.init_time} is not finite at lead {lead}: the model has"
            " diverged; fine-tune it over more leads or forecast fewer"
        )
