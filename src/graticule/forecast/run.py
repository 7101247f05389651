"""Forecast from initial times of a store: roll the model out and stream every lead to a file.

Initial times are shared over the `data` axis of a mesh. The ranks of a sample read and compute its
stripes; the first of them collects every lead and writes it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.forecast.predict import Predictor, collected
from graticule.forecast.writer import ForecastWriter
from graticule.mesh import SAMPLE, Cut, Mesh, Stripes
from graticule.parallel.exchange import Link
from graticule.parallel.together import Together

SECONDS_A_YEAR = 365.25 * 86400


@dataclass(frozen=True)
class Timing:
    """What a forecast cost. seconds: wall time of reading, model and writing.

    simulated_years_per_day: of all initial times together.
    """

    seconds: float
    simulated_years: float

    @property
    def simulated_years_per_day(self) -> float:
        return self.simulated_years / (self.seconds / 86400)


def check_starts(source: SampleSource, starts: Sequence[int], leads: int) -> None:
    """ValueError unless inputs of every start, and forcing of all its leads, are in the store.

    Labels are not needed: a forecast may reach beyond the store's last time.
    """
    times, spec = source.store.times, source.spec
    for start in starts:
        needed = {offset: source.prognostic for offset in spec.inputs}
        if source.forcing:
            for lead in range(1, leads + 1):
                for offset in spec.given_offsets(lead):
                    needed[offset] = [*needed.get(offset, []), *source.forcing]
        for offset in sorted(needed):
            index = start + offset
            what = "the input" if offset <= 0 and offset in spec.inputs else "the forcing"
            there = 0 <= index < len(times) and times.segments[index] == times.segments[start]
            if not there:
                raise ValueError(
                    f"a forecast from {times.date(start)} over {leads} leads needs {what} of"
                    f" {times.advanced(start, offset)}, which {source.store.path} does not have;"
                    " start elsewhere or forecast fewer leads"
                )
            missing = [c for c in needed[offset] if source.store.missing[index, c]]
            if missing:
                raise ValueError(
                    f"a forecast from {times.date(start)} needs {what} of {times.date(index)},"
                    f" where {source.store.channels.names[missing[0]]} lacks"
                    f" {source.store.missing[index, missing[0]]} values at sea; start elsewhere"
                )


def forecast(
    model: nn.Module,
    source: SampleSource,
    statistics: Statistics,
    out: str | Path,
    *,
    starts: Sequence[int],
    leads: int,
    attributes: dict[str, Any],
    inputs: Sequence[str | Path] = (),
    batch: int = 8,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
    mesh: Mesh | None = None,
    stripes: Stripes | None = None,
) -> Timing:
    """Roll `model` out over `leads` model steps from each start and write the forecast file.

    starts: indices of initial times in the store, increasing. batch: how many run side by side on
    the ranks of a sample. attributes: provenance for the file. inputs: paths that must not be
    written to.
    mesh: none: of one process. Of several, all make this call with the same arguments but for the
    model, the source of their stripe, and `stripes`: how the ranks of a sample share a field.
    ValueError, the same on all processes, for starts without the data they need, an output that
    exists, and predictions that are not finite (which names initial time and lead).
    """
    mesh = mesh or Mesh()
    together, link = Together(), Link(mesh.group(*SAMPLE))
    share = Cut.even(len(starts), mesh.sizes["data"])
    own = range(len(starts))[share.of(mesh.index("data"))]
    shares = [share.length(rank) for rank in range(share.ranks)]
    times, stride = source.store.times, source.config.stride
    # A model step may end at several times; each is a lead of the file.
    offsets = [o for lead in range(1, leads + 1) for o in source.spec.label_offsets(lead)]

    def writer_of() -> ForecastWriter:
        valid = [[times.advanced(start, offset) for offset in offsets] for start in starts]
        return ForecastWriter(
            out,
            channels=source.predicted_channels,
            grid=source.store.grid,
            init_times=[times.date(start) for start in starts],
            valid_times=np.array(valid, dtype=object),
            nominal_step_seconds=times.nominal_step_seconds * stride,
            regular=times.regular,
            attributes=attributes,
            inputs=[source.store.path, *inputs],
            own=None if share.ranks == 1 else own,
            joins=mesh.rank > 0,
        )

    with ExitStack() as stack, torch.inference_mode():
        with together.agreed():
            check_starts(source, starts, leads)
            predictor = Predictor(model, source, statistics, torch.device(device))
            writer = stack.enter_context(writer_of()) if mesh.rank == 0 else None
        with together.agreed():  # now the file is there
            if link.rank == 0 and mesh.rank > 0:
                writer = stack.enter_context(writer_of())
        began = time.perf_counter()
        for first in range(0, max(shares), batch):
            here = own[first : first + batch]
            samples = [source.sample(starts[place]) for place in here]
            fields = predictor.leads(samples, leads, together)
            for lead, field in enumerate(fields, start=1):
                for place, outputs in zip(here, field, strict=True):
                    for output, values in enumerate(outputs, start=(lead - 1) * len(outputs)):
                        whole = collected(predictor.in_units(values), stripes, link, mesh.device)
                        with together.attempt():  # all hear of it when they read the next lead
                            if writer is not None and whole is not None:
                                writer.write(place, output, whole)
                if progress:  # of all: they go from lead to lead together
                    done = sum(
                        min(first, length) * leads + len(range(first, length)[:batch]) * lead
                        for length in shares
                    )
                    progress(done, len(starts) * leads)
        together.settle()
        (written,) = together.add([np.array(writer.written if writer is not None else 0)])
        with together.agreed():
            if writer is not None:
                writer.close(int(written))
    years = len(starts) * len(offsets) * times.nominal_step_seconds * stride / SECONDS_A_YEAR
    return Timing(time.perf_counter() - began, years)
