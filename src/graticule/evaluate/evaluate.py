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
from graticule.evaluate.area import cell_area_of
from graticule.evaluate.climatology import Climatology, Grouping
from graticule.evaluate.depths import Column
from graticule.evaluate.ensemble_scores import EnsembleScores
from graticule.evaluate.ensemble_sums import EnsembleSums, Threshold
from graticule.evaluate.members import Members
from graticule.evaluate.ocean import OceanScores
from graticule.evaluate.ocean_sums import OceanSums, origin_of
from graticule.evaluate.scores import Scores
from graticule.evaluate.spectra import Spectra
from graticule.evaluate.stretches import Stretches
from graticule.evaluate.sums import Sums, pair_sums
from graticule.forecast.reader import Forecast, open_forecast
from graticule.grid import Grid
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
    thresholds: Sequence[str] = (),
    point: tuple[float, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores of a forecast, of persistence and of climatology, over the same cells and times.

    train_ranges: `first/last` dates of the training times, for the climatology.
    region: (west, east, south, north) degrees. statistics_std: by channel, in its units.
    progress: of this process's share of the pairs. All processes that were started take part, and
    get the same scores or the same error; `parallel.talk.alone` keeps them out.
    Pairs whose initial or valid time is not in the store are skipped and counted.
    Channels of an ocean on levels in metres have `OceanScores` too. A forecast with members has
    `EnsembleScores`, with the events of `thresholds` (`u@850>20`) and plumes at the counted cell
    near `point` (lat, lon); its other scores are of the mean over members, but for activity and
    spectra, which are the members' on average.
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
        cell_area, area_told = cell_area_of(store)
        column = Column.of(forecast.channels, store.channels)
        usual = Climatology(
            store, np.flatnonzero(store.times.within(train_ranges)), climatology,
            channels=positions, keep=1, counted=None if column is None else counted,
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
        stretches = Stretches.choose(
            names, _both_currents(counted, column), store.grid, store.grid.cell_area
        )
        std = None
        if statistics_std is not None:
            std = {name: float(statistics_std[name]) for name in names if name in statistics_std}
            if std and not any(value > 0 for value in std.values()):
                log.warning("no channel varies in training: there is no normalised mean")
                std = None
        ensemble = None
        events = [Threshold.read(text, names) for text in thresholds]
        if forecast.num_members is not None:
            ensemble = EnsembleSums.zero(
                names, forecast.num_members, forecast.valid_times.shape,
                thresholds=events, point=_cell_near(point, region, store.grid, counted),
            )  # fmt: skip
        elif thresholds or point is not None:
            log.warning("evaluate.thresholds and evaluate.point are of ensembles: %s has no"
                        " members, and they are left out", forecast_path)  # fmt: skip
        ocean = None
        if column is not None:
            ocean = OceanSums.zero(
                names, forecast.valid_times.shape, store.grid.shape,
                # Of the first of all pairs, not of this process's: the same everywhere.
                origin=origin_of(store.read(pairs[0].valid_time, positions), counted),
                mapped=column.surface,
            )  # fmt: skip
        none = [(name, kind.removeprefix("none: "))
                for name, kind in zip(names, stretches.kind, strict=True)
                if kind.startswith("none: ")]  # fmt: skip
        if none:
            log.warning("no spectrum of %s: %s", ", ".join(name for name, _ in none), none[0][1])
        sums, spectra = sums_of(
            forecast, store, usual, share, positions, counted, stretches, progress,
            cell_area=cell_area, ocean=ocean, ensemble=ensemble,
            std=None if std is None else np.array([std.get(name, 0.0) for name in names]),
        )  # fmt: skip
        if ocean is not None:
            ocean.see(usual.low, usual.high)
    sums, spectra = _added(sums, spectra, together)
    began = forecast.attributes.get("store_fingerprint", store.fingerprint)
    if began != store.fingerprint and together.rank == 0:
        log.warning(
            "%s started from another store (fingerprint %s) than %s (%s): its scores say something"
            " if both hold the same planet", forecast_path, began, store.path, store.fingerprint,
        )  # fmt: skip
    provenance = {
        "forecast": {key: value for key, value in forecast.attributes.items()
                     if key not in ("channels", "complete")},
        "store_fingerprint": store.fingerprint,
        "train_ranges": list(train_ranges),
    }  # fmt: skip
    told = {**forecast.attributes, "store_fingerprint": store.fingerprint,
            "region": list(region) if region else "everywhere"}  # fmt: skip
    keep = ("config_fingerprint", "run_fingerprint", "weights", "store_fingerprint", "region")
    kept = {key: told[key] for key in keep if key in told}
    scores = None
    if column is not None and ocean is not None:
        scores = OceanScores(
            column=column,
            sums=ocean.added(together),
            grid=store.grid,
            init_seconds=_seconds(np.array(forecast.init_times, object)),
            valid_seconds=_seconds(forecast.valid_times),
            calendar=forecast.calendar,
            climatology=climatology,
            area=area_told,
            attributes=kept,
        )
    members = None
    if ensemble is not None:
        members = EnsembleScores(
            sums=ensemble.added(together),
            channels=forecast.channels,
            grid=store.grid,
            lead_seconds=forecast.lead_seconds,
            init_seconds=_seconds(np.array(forecast.init_times, object)),
            valid_seconds=_seconds(forecast.valid_times),
            calendar=forecast.calendar,
            normalised=std is not None,
            attributes=kept,
        )
    return Scores(
        sums=sums,
        channels=forecast.channels,
        lead_seconds=forecast.lead_seconds,
        climatology=climatology,
        region=region,
        std=std,
        skipped=skipped,
        first_skipped=first_skipped,
        provenance=provenance,
        spectra=replace(spectra, attributes=kept),
        ocean=scores,
        ensemble=members,
    )


def _both_currents(counted: np.ndarray, column: Column | None) -> np.ndarray:
    """`counted`, with both currents of a level where both are: their spectra are added to that of
    the kinetic energy, which has the same stretches of sea then."""
    if column is None or not column.currents:
        return counted
    shared = counted.copy()
    for east, north in column.currents:
        shared[[east, north]] = counted[east] & counted[north]
    return shared


def _cell_near(
    point: tuple[float, float] | None,
    region: tuple[float, float, float, float] | None,
    grid: Grid,
    counted: np.ndarray,
) -> tuple[int, int]:
    """(row, column) of the cell nearest to the point among those that count in most channels."""
    if point is None and region is not None:
        west, east, south, north = region
        point = (south + north) / 2, west + ((east - west) % 360 or 360) / 2
    lat, lon = np.deg2rad(point or (45.0, 0.0))
    rows, columns = np.deg2rad(grid.lat)[:, None], np.deg2rad(grid.lon)
    # Of the angle between two directions, the cosine.
    near = np.sin(lat) * np.sin(rows) + np.cos(lat) * np.cos(rows) * np.cos(columns - lon)
    number = counted.sum(0)
    row, column = divmod(int(np.argmax(np.where(number == number.max(), near, -2))), grid.lon.size)
    return row, column


def _seconds(dates: np.ndarray) -> np.ndarray:
    """int64 seconds since 1970 of cftime dates, in their calendar."""
    return np.array([seconds_of(date) for date in dates.ravel()], np.int64).reshape(dates.shape)


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
    *,
    cell_area: np.ndarray,
    ocean: OceanSums | None = None,
    ensemble: EnsembleSums | None = None,
    std: np.ndarray | None = None,
) -> tuple[Sums, Spectra]:
    """The sums over these pairs; a process takes its share of them and all shares add up.

    positions: of the forecast's channels in the store. counted: (channel, lat, lon) bool.
    cell_area: (lat, lon) m2. ocean, ensemble: sums that the pairs are added to.
    std: (channel,) training standard deviations, of distances over all channels of an ensemble.
    Each field is read once for all, but for members that do not fit into memory together.
    """
    total = Sums.zero(forecast.channels.names, forecast.num_leads)
    spectra = Spectra.zero(forecast.channels, forecast.lead_seconds, stretches)
    read_time, truth = -1, np.empty(0, np.float32)
    for done, pair in enumerate(pairs, start=1):
        if pair.valid_time != read_time:
            read_time, truth = pair.valid_time, store.read(pair.valid_time, positions)
            power_of_truth = stretches.power(truth)
        before = store.read(pair.init_time, positions)
        usually = usual.mean(store.times.date(pair.valid_time))
        activity = None
        if ensemble is None:
            fields = forecast.read(pair.init, pair.lead)
            power = stretches.power(fields, power_of_truth.used)
        else:
            present = counted & np.isfinite(truth) & np.isfinite(before) & np.isfinite(usually)
            members = Members(forecast, pair.init, pair.lead)
            fields, power, activity = members.streamed(
                present, usually, cell_area, stretches, power_of_truth.used
            )
            start = seconds_of(forecast.init_times[pair.init])
            members.add_to(ensemble, truth, present, cell_area, init_seconds=start, std=std)
        compared = (fields, truth, before, usually)
        ours = pair_sums(
            total.names,
            forecast.num_leads,
            pair.lead,
            *compared,
            counted=counted,
            cell_area=cell_area,
            where=f"init_time {forecast.init_times[pair.init]}, lead {pair.lead + 1}",
        )
        if activity is not None:
            ours.activity[0, pair.lead] = activity
        total = total + ours
        if ocean is not None:
            ocean.add_pair(pair.init, pair.lead, *compared, counted=counted, cell_area=cell_area)
        spectra = spectra.with_pair(pair.lead, power, power_of_truth)
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
