"""Forecast from initial times of a store: roll the model out and stream every lead to a file.

Initial times are shared over the `data` axis of a mesh, members of an ensemble over `member`; along
both nothing but errors is told. The ranks of a sample read and compute its stripes; the first of
them collects every lead and writes it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from graticule.cluster.energy import EnergyMeter
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.times import seconds_of
from graticule.forecast.clock import PARTS, SECONDS_A_YEAR, Clock, Timing, timing_path
from graticule.forecast.collect import Collector
from graticule.forecast.keeper import Keeper
from graticule.forecast.predict import Predictor
from graticule.forecast.reader import is_complete
from graticule.forecast.restart import Kept, kept, remove
from graticule.forecast.schedule import Places, shares, turns
from graticule.forecast.writer import ForecastWriter
from graticule.mesh import SAMPLE, Mesh, Planes, Stripes
from graticule.parallel.exchange import Link
from graticule.parallel.talk import everyone
from graticule.parallel.together import Together


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
    members: int | None = None,
    roll_seed: int | None = None,
    inputs: Sequence[str | Path] = (),
    batch: int = 8,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], None] | None = None,
    mesh: Mesh | None = None,
    stripes: Stripes | None = None,
    planes: Planes | None = None,
    resume: bool = False,
    restart_every: int = 0,
    log_every: int = 0,
    forward_flops: float = 0.0,
) -> Timing:
    """Roll `model` out over `leads` model steps from each start and write the forecast file.

    starts: indices of initial times in the store, increasing. members: of an ensemble, of a model
    whose weights or noise are drawn; none: of one where nothing is. A member depends on its number
    and the initial time alone (`Predictor.leads`). roll_seed: members are turned in longitude as
    they were in training, which then is enough to tell them apart; none: they are not. batch: how
    many initial times run side by side on the ranks of a sample, always of one member. attributes:
    provenance for the file. inputs: paths that must not be written to.
    mesh: none: of one process. Of several, all make this call with the same arguments but for the
    model, the source of their stripe (of all channels), and `stripes` and `planes`: how the ranks
    of a sample share its points and channels.
    resume: go on with what a forecast that was stopped left at `out` (Zarr), on whatever mesh it
    ran; one that is complete is left as it is, and where there is nothing it begins.
    restart_every, log_every: after how many leads it keeps what a resumed one goes on with
    (`restart.py`), and logs statistics (`log.py`); 0: never.
    forward_flops: of a model step of one sample and member; 0: not known.
    Returns what this call cost, which is also a line of the file `timing_path(out)`.
    ValueError, the same on all processes, for starts without the data they need, an output that
    exists (to resume: is of another forecast), members of a model that draws nothing, and
    predictions that are not finite (which names initial time, member and lead).
    """
    out, mesh = Path(out), mesh or Mesh()
    together, link = Together(), Link(mesh.group(*SAMPLE))
    places = Places(len(starts), members)
    by_rank = shares(places, mesh.sizes)
    rank = mesh.index("data") * mesh.sizes["member"] + mesh.index("member")
    times, spec = source.store.times, source.spec
    ours = source if planes is None else source.of(planes)
    # A model step may end at several times; each is a lead of the file.
    offsets = [o for lead in range(1, leads + 1) for o in spec.label_offsets(lead)]
    valid = np.array(
        [[times.advanced(start, o) for o in offsets] for start in starts], dtype=object
    )
    init_times = [times.date(start) for start in starts]
    left = everyone().first(lambda: _left(out, len(places), leads)) if resume else None
    there = {place: record.lead for place, record in (left or {}).items()}

    def writer_of() -> ForecastWriter:
        return ForecastWriter(
            out,
            channels=source.predicted_channels,
            grid=source.store.grid,
            init_times=init_times,
            valid_times=valid,
            nominal_step_seconds=times.nominal_step_seconds * source.config.stride,
            regular=times.regular,
            attributes=attributes,
            members=members,
            inputs=[source.store.path, *inputs],
            own=None if len(by_rank) == 1 else [place for part in by_rank[rank] for place in part],
            joins=mesh.rank > 0,
            done=None
            if left is None
            else {place: lead * len(spec.outputs) for place, lead in there.items()},
        )

    with ExitStack() as stack, torch.inference_mode():
        with together.agreed():
            check_starts(source, starts, leads)
            predictor = Predictor(model, ours, statistics, torch.device(device), roll_seed)
            _check_members(members, predictor.drawn, roll_seed is not None)
            if members is not None and roll_seed is not None:
                _require_circles(source)
            writer = stack.enter_context(writer_of()) if mesh.rank == 0 else None
        with together.agreed():  # now the file is there
            if link.rank == 0 and mesh.rank > 0:
                writer = stack.enter_context(writer_of())
        stack.enter_context(predictor.keeping())
        clock, meter = Clock(), EnergyMeter(torch.device(device))
        keeper = Keeper(
            writer, predictor, Collector(stripes, planes, link, mesh.device), together,
            channels=source.predicted_channels, clock=clock,
            places=places, valid_times=valid, log_every=log_every,
            restart_every=restart_every if out.suffix == ".zarr" else 0,
        )  # fmt: skip
        before = sum(there.values())
        done, total = before, len(places) * leads
        for turn in turns(by_rank, there, leads, batch):
            here, after = turn.batches[rank]
            states = None
            with together.attempt(), clock("restart"):  # all hear of it when they read
                if after:
                    assert left is not None, "leads are there of what was left"
                    states = torch.stack(
                        [left[place].states(source.rows, source.columns) for place in here]
                    )
                    if planes is not None:
                        states = states[:, :, planes.known(planes.index)]
                    states = states.to(device)
            fields = predictor.leads(
                [ours.sample(starts[places.start(place)]) for place in here],
                range(after + 1, leads + 1), together, clock=clock, states=states,
                steps=turn.steps, member=places.member(here[0]) if here else None,
            )  # fmt: skip
            states = None
            for step, (field, fed_back) in enumerate(fields, start=1):
                at = turn.at(step)
                keeper.take([place for place in here if place in at], after + step, field, fed_back)
                done += len(at)
                with clock("log"):
                    keeper.log(at, init_times)
                    if progress:  # of all: they go from lead to lead together
                        progress(done, total)
        together.settle()
        (written,) = together.add([np.array(writer.written if writer is not None else 0)])
        with together.agreed():
            if writer is not None:
                writer.close(int(written))
        if mesh.rank == 0 and out.is_dir():
            remove(out)
        clock.stop()
        joules = meter.joules()
        cpu, energy = together.add(
            [
                np.array([clock.cpu_seconds[part] for part in PARTS]),
                np.array(np.nan if joules is None else joules),  # known of all, or not
            ]
        )
    made = 0
    for place in range(len(places)):
        dates, known = valid[places.start(place)], there.get(place, 0) * len(spec.outputs)
        since = dates[known - 1] if known else init_times[places.start(place)]
        made += seconds_of(dates[-1]) - seconds_of(since)
    timing = Timing(
        simulated_years=made / SECONDS_A_YEAR,
        steps=total - before,
        members=members,
        forward_flops=forward_flops,
        parts=dict(clock.seconds),
        cpu_parts=dict(zip(PARTS, cpu.tolist(), strict=True)),
        joules=None if np.isnan(energy) else float(energy),
    )
    if mesh.rank == 0 and total > before:
        timing.append(
            timing_path(out), starts=len(starts), leads=leads, leads_before=before,
            processes=mesh.size, log_every=log_every, restart_every=restart_every,
        )  # fmt: skip
    return timing


def _require_circles(source: SampleSource) -> None:
    columns = source.store.grid.shape[1]
    if len(source.columns) != columns:
        raise ValueError(
            f"the members of this run are turned in longitude (train.roll_longitude=true), which"
            f" takes whole circles of latitude, and mesh.stripe_dim=lon gives a rank"
            f" {len(source.columns)} of {columns} columns: set mesh.stripe_dim=lat"
        )


def _check_members(members: int | None, drawn: bool, turned: bool) -> None:
    """ValueError for members that nothing tells apart, or that are needed and not named."""
    if members is None and drawn:
        raise ValueError(
            "this model draws its weights or its norms' noise, and what it forecasts are members of"
            " an ensemble: say how many (members=1 or more)"
        )
    if members is not None and members < 1:
        raise ValueError(f"members={members} of a forecast must be at least 1")
    if members is not None and not (drawn or turned):
        raise ValueError(
            f"{members} member{'s' if members > 1 else ''} of this model would be one forecast"
            f"{f', {members} times' if members > 1 else ''}: nothing tells them apart, since its"
            " weights are numbers (bayes.weights=false), its norms hear no noise (model.nice_noise"
            " of the family beast) and it saw no turned samples (train.roll_longitude=false);"
            " forecast without members, or train a model"
            " that has them, such as beast-demo"
        )


def _left(out: Path, num_places: int, leads: int) -> dict[int, Kept] | None:
    """What a forecast that was stopped, or ended, has of each place; None: nothing."""
    if not out.exists():
        return None
    if out.is_file():
        raise ValueError(
            f"{out}: only a Zarr forecast can be resumed; what a kill leaves of a netCDF file may"
            " be torn. Delete it and forecast again, to a name that ends with .zarr if you like"
        )
    if is_complete(out):
        return dict.fromkeys(range(num_places), Kept(leads))
    return kept(out)
