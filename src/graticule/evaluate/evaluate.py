"""Score a forecast file against a store: the truth is looked up by valid time.

Several processes share the pairs of forecast and truth and add up what they find.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graticule.data.store import Store
from graticule.data.times import seconds_of
from graticule.evaluate.climatology import Climatology, Grouping
from graticule.evaluate.scores import Scores
from graticule.evaluate.spectra import Spectra
from graticule.evaluate.stretches import Stretches
from graticule.evaluate.sums import Sums, pair_sums
from graticule.forecast.reader import Forecast, open_forecast
from graticule.mesh import Cut
from graticule.parallel.together import Together

_ALIASES = {"gregorian": "standard", "365_day": "noleap", "366_day": "all_leap"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One forecast field and the store indices of what it is compared with."""

    init: int
    lead: int
    init_time: int
    valid_time: int


def evaluate(
    forecast_path: str | Path,
    store: Store,
    *,
    train_ranges: Sequence[str],
    climatology: Grouping,
    region: tuple[float, float, float, float] | None = None,
    statistics_std: dict[str, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores of a forecast, of persistence and of climatology, over the same cells and times.

    train_ranges: `first/last` dates of the training times, for the climatology.
    region: (west, east, south, north) degrees. statistics_std: by channel, in its units.
    progress: of this process's share of the pairs. All processes that were started take part, and
    get the same scores or the same error; `parallel.talk.alone` keeps them out.
    Pairs whose initial or valid time is not in the store are skipped and counted.
    ValueError where grid, channels, units or calendar differ, where the forecast has holes, and
    where nothing is left to score.
    """
    together = Together()
    with together.agreed(), open_forecast(forecast_path) as forecast:
        positions = _matched(forecast, store)
        names = forecast.channels.names
        counted = store.wet_part(positions)
        if region is not None:
            counted &= store.grid.region(*region)
        dry = np.flatnonzero(~counted.any((1, 2)))
        if dry.size:
            raise ValueError(
                f"region {region or 'everywhere'} holds no sea cell of {names[int(dry[0])]}"
            )
        usual = Climatology(
            store, np.flatnonzero(store.times.within(train_ranges)), climatology,
            channels=positions, keep=1,
        )  # fmt: skip
        pairs, skipped, first_skipped = _paired(forecast, store)
        for pair in pairs:  # before hours of reading
            usual.times_of(store.times.date(pair.valid_time))
        # By group of the climatology, then by valid time: each mean is made once, each truth
        # read once, and one of either is in memory. Processes take runs of this order.
        pairs.sort(
            key=lambda pair: (
                usual.group_of(store.times.date(pair.valid_time)),
                pair.valid_time,
                pair.init,
            )
        )
        share = pairs[Cut.even(len(pairs), together.size).of(together.rank)]
        stretches = Stretches.choose(names, counted, store.grid, store.grid.cell_area)
        none = [(name, kind.removeprefix("none: "))
                for name, kind in zip(names, stretches.kind, strict=True)
                if kind.startswith("none: ")]  # fmt: skip
        if none:
            log.warning("no spectrum of %s: %s", ", ".join(name for name, _ in none), none[0][1])
        sums, spectra = sums_of(
            forecast, store, usual, share, positions, counted, stretches, progress
        )
    sums, spectra = _added(sums, spectra, together)
    provenance = {
        "forecast": {key: value for key, value in forecast.attributes.items()
                     if key not in ("channels", "complete")},
        "store_fingerprint": store.fingerprint,
        "train_ranges": list(train_ranges),
    }  # fmt: skip
    told = {**forecast.attributes, "store_fingerprint": store.fingerprint,
            "region": list(region) if region else "everywhere"}  # fmt: skip
    keep = ("config_fingerprint", "run_fingerprint", "weights", "store_fingerprint", "region")
    return Scores(
        sums=sums,
        channels=forecast.channels,
        lead_seconds=forecast.lead_seconds,
        climatology=climatology,
        region=region,
        std=None if statistics_std is None else {n: float(statistics_std[n]) for n in names
                                                 if n in statistics_std},
        skipped=skipped,
        first_skipped=first_skipped,
        provenance=provenance,
        spectra=replace(spectra, attributes={key: told[key] for key in keep if key in told}),
    )  # fmt: skip


def _added(sums: Sums, spectra: Spectra, together: Together) -> tuple[Sums, Spectra]:
    """The sums over all processes, of their shares of the pairs."""
    ours = [sums.samples, sums.cells, sums.weight, sums.values, sums.activity,
            spectra.rows, spectra.area, spectra.sums]  # fmt: skip
    samples, cells, weight, values, activity, rows, area, power = together.add(ours)
    return (
        replace(sums, samples=samples, cells=cells, weight=weight, values=values,
                activity=activity),
        replace(spectra, rows=rows, area=area, sums=power),
    )  # fmt: skip


def sums_of(
    forecast: Forecast,
    store: Store,
    usual: Climatology,
    pairs: Sequence[Pair],
    positions: Sequence[int],
    counted: np.ndarray,
    stretches: Stretches,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Sums, Spectra]:
    """The sums over these pairs; a process takes its share of them and all shares add up.

    positions: of the forecast's channels in the store. counted: (channel, lat, lon) bool.
    Each field is read once for both.
    """
    total = Sums.zero(forecast.channels.names, forecast.num_leads)
    spectra = Spectra.zero(forecast.channels, forecast.lead_seconds, stretches)
    read_time, truth = -1, np.empty(0, np.float32)
    for done, pair in enumerate(pairs, start=1):
        if pair.valid_time != read_time:
            read_time, truth = pair.valid_time, store.read(pair.valid_time, positions)
            power_of_truth = stretches.power(truth)
        fields = forecast.read(pair.init, pair.lead)
        total = total + pair_sums(
            total.names,
            forecast.num_leads,
            pair.lead,
            fields,
            truth,
            store.read(pair.init_time, positions),
            usual.mean(store.times.date(pair.valid_time)),
            counted=counted,
            cell_area=store.grid.cell_area,
            where=f"init_time {forecast.init_times[pair.init]}, lead {pair.lead + 1}",
        )
        spectra = spectra.with_pair(
            pair.lead, stretches.power(fields, power_of_truth.used), power_of_truth
        )
        if progress is not None:
            progress(done, len(pairs))
    return total, spectra


def _matched(forecast: Forecast, store: Store) -> list[int]:
    """Positions of the forecast's channels in the store, by name, units and grid."""
    if not forecast.grid.same_as(store.grid):
        ours, theirs = (
            f"lat {grid.lat[0]:g} to {grid.lat[-1]:g}, lon {grid.lon[0]:g} to {grid.lon[-1]:g},"
            f" {grid.shape[0]} x {grid.shape[1]}"
            for grid in (forecast.grid, store.grid)
        )
        raise ValueError(
            f"the forecast's grid ({ours}) is not the store's ({theirs}); score it against a store"
            " on its own grid"
        )
    unknown = [name for name in forecast.channels.names if name not in store.channels.names]
    if unknown:
        raise ValueError(
            f"the store has no {', '.join(unknown)}: the forecast holds"
            f" {', '.join(forecast.channels.names)}, the store {', '.join(store.channels.names)}"
        )
    positions = [store.channels.index(name) for name in forecast.channels.names]
    for channel, position in zip(forecast.channels, positions, strict=True):
        truth = store.channels[position]
        ours, theirs = (
            f"{c.units!r}" + (f" on levels in {c.level_units!r}" if c.level is not None else "")
            for c in (channel, truth)
        )
        if ours != theirs:
            raise ValueError(
                f"{channel.name} is in {ours} in the forecast and in {theirs} in the store; ingest"
                " the truth in the forecast's units"
            )
    return positions


def _paired(forecast: Forecast, store: Store) -> tuple[list[Pair], int, str]:
    """Pairs with a truth; how many have none, and the first date that the store lacks."""
    calendars = [_ALIASES.get(c, c) for c in (forecast.calendar, store.times.calendar)]
    if calendars[0] != calendars[1]:
        raise ValueError(
            f"the forecast is in the {calendars[0]} calendar, the store in {calendars[1]}"
        )
    index = {int(second): i for i, second in enumerate(store.times.seconds)}
    pairs, missing = [], []
    for init, start in enumerate(forecast.init_times):
        init_time = index.get(seconds_of(start))
        for lead, valid in enumerate(forecast.valid_times[init]):
            valid_time = index.get(seconds_of(valid))
            if init_time is None or valid_time is None:
                missing.append(start if init_time is None else valid)
                continue
            pairs.append(Pair(init=init, lead=lead, init_time=init_time, valid_time=valid_time))
    first = str(min(missing)) if missing else ""
    if not pairs:
        raise ValueError(
            f"nothing to score: the store has no {first}, nor any other valid time of the forecast"
            f" with its initial time; it runs from {store.times.date(0)} to"
            f" {store.times.date(len(store.times) - 1)}"
        )
    if missing:
        log.warning("%d of %d forecast fields have no truth in the store, the first at %s",
                    len(missing), len(missing) + len(pairs), first)  # fmt: skip
    return pairs, len(missing), first
