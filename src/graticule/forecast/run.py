"""Forecast from initial times of a store: roll the model out and stream every lead to a file."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graticule.data.normalise import Normaliser, normalised_statics
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.forecast.rollout import rollout
from graticule.forecast.writer import ForecastWriter

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
) -> Timing:
    """Roll `model` out over `leads` model steps from each start and write the forecast file.

    starts: indices of initial times in the store, increasing. batch: how many run side by side.
    attributes: provenance for the file. inputs: paths that must not be written to.
    ValueError for starts without the data they need, an output that exists, and predictions that
    are not finite (which names initial time and lead).
    """
    check_starts(source, starts, leads)
    store, spec = source.store, source.spec
    device = torch.device(device)
    states = Normaliser(store, source.prognostic, statistics).to(device)
    given = Normaliser(store, source.forcing, statistics).to(device)
    predicted = Normaliser(store, source.predicted, statistics).to(device)
    static_names = [store.statics.names[i] for i in source.statics]
    statics = normalised_statics(store, static_names, statistics).to(device)
    # A model step may end at several times; each is a lead of the file.
    offsets = [offset for lead in range(1, leads + 1) for offset in spec.label_offsets(lead)]
    times = store.times
    valid = [[times.advanced(start, offset) for offset in offsets] for start in starts]
    stride = source.config.stride
    with (
        ForecastWriter(
            out,
            channels=source.predicted_channels,
            grid=store.grid,
            init_times=[times.date(start) for start in starts],
            valid_times=np.array(valid, dtype=object),
            nominal_step_seconds=times.nominal_step_seconds * stride,
            regular=times.regular,
            attributes=attributes,
            inputs=[store.path, *inputs],
        ) as writer,
        torch.inference_mode(),
    ):
        model.eval()
        began = time.perf_counter()
        for first in range(0, len(starts), batch):
            samples = [source.sample(start) for start in starts[first : first + batch]]

            def forcing(lead: int, samples: list = samples) -> Tensor:
                if not source.forcing:  # nothing to read, perhaps no such time
                    return torch.empty(len(samples), 1, 0, *store.grid.shape, device=device)
                return given(_stacked([s.forcing(lead) for s in samples]).to(device))

            fields = rollout(
                model,
                states(_stacked([sample.inputs() for sample in samples]).to(device)),
                forcing,
                statics,
                predicted.wet,
                leads=leads,
                num_prognostic=len(source.prognostic),
            )
            for lead, field in enumerate(fields, start=1):
                _refuse_not_finite(field, samples, lead)
                values = predicted.denormalise(field).cpu().numpy()
                for number in range(len(samples)):
                    for output in range(values.shape[1]):
                        place = (lead - 1) * values.shape[1] + output
                        writer.write(first + number, place, values[number, output])
                if progress:
                    progress(first * leads + lead * len(samples), len(starts) * leads)
    years = len(starts) * len(offsets) * times.nominal_step_seconds * stride / SECONDS_A_YEAR
    return Timing(time.perf_counter() - began, years)


def _stacked(blocks: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(blocks))


def _refuse_not_finite(field: Tensor, samples: list, lead: int) -> None:
    finite = torch.isfinite(field).flatten(1).all(1).tolist()
    if not all(finite):
        sample = samples[finite.index(False)]
        raise ValueError(
            f"the forecast from {sample.init_time} is not finite at lead {lead}: the model has"
            " diverged; fine-tune it over more leads or forecast fewer"
        )
