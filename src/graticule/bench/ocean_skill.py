"""`graticule bench ocean-skill`: what a small Samudra can forecast of the generated ocean.

Whether it beats persistence and climatology, whether it uses the forcing (the same model trained
without), and whether it stays in its bounds over years. A step here is one of the model: two
states, ten days.
"""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from graticule.bench.rows import Row, Setting
from graticule.bench.trained import measured, rmse_by_lead
from graticule.bench.worlds import ocean_in
from graticule.config import Config
from graticule.data.basin import Ocean
from graticule.data.ocean import FORCINGS, rmse_without_forcing
from graticule.data.statistics import Statistics
from graticule.data.store import Store, write_json
from graticule.forecast.reader import open_forecast
from graticule.recipes import recipe
from graticule.tasks import forecast_from_run

TITLE = (
    "a small Samudra on the generated ocean: RMSE over 20 steps against persistence, climatology"
    " and the same model without the forcing; over 200 steps, what it covers of each variable"
    " against the training range"
)
OUT = Path("runs/bench-ocean-skill")
OCEAN = Ocean(
    num_lat=24, num_lon=48, num_years=26, test_years=6, calendar="julian", dt_seconds=86400
)
LEADS, LONG = 20, 200
"""Model steps of the forecasts that are scored, and of the long one."""
EVERY = 20
"""Store steps from one initial time that is scored to the next."""


def configs(store: Path, seed: int) -> dict[str, Config]:
    """The runs of one seed: given the forcing, and without it."""
    base = recipe("samudra-ocean")
    given = replace(
        base,
        name="given",
        data=replace(base.data, store=str(store)),
        train=replace(base.train, seed=seed),
        forecast=replace(base.forecast, leads=LEADS, every=EVERY),
    )
    without = replace(given, name="without", data=replace(given.data, without=FORCINGS))
    return {"given": given, "without": without}


def rows(setting: Setting) -> list[Row]:
    """Ratios below 1 where ours is better, of means over steps and seeds; of the ranges, 1 where
    nothing left them, the widest seed's. A stopped bench goes on where it was."""
    out = setting.out or OUT
    store = Store(ocean_in(out, OCEAN, setting))
    results = {seed: _seed(setting, store, out / f"seed-{seed}", seed) for seed in setting.seeds}
    write_json(out / "ocean-skill.json", {str(seed): found for seed, found in results.items()})
    floor = _floor(store, len(results[setting.seeds[0]]["given"]["rmse"]))

    def mean(run: str, source: str) -> float:
        return statistics.fmean(statistics.fmean(found[run][source]) for found in results.values())

    def compare(what: str, run: str, source: str, note: str) -> Row:
        each = "; ".join(
            f"seed {seed}: {found['given']['rmse'][k] / found[run][source][k]:.3f} at {days} days"
            for seed, found in results.items()
            for k, days in _some(len(found["given"]["rmse"]))
        )
        return Row(
            what=what, ours=mean("given", "rmse"), against=mean(run, source), goal=1.0,
            unit="normalised RMSE", at_most=True, note=f"{note}; {each}",
        )  # fmt: skip

    steps = f"{LEADS} steps"
    return [
        compare(f"{steps}: ours / persistence", "given", "persistence", "of channels, the mean"),
        compare(f"{steps}: ours / climatology", "given", "climatology", "of the same date"),
        compare(f"{steps}: with / without the forcing", "without", "rmse", "trained without"),
        Row(
            what=f"{steps}: with / the best possible without",
            ours=mean("given", "rmse"), against=statistics.fmean(floor), goal=1.0,
            unit="normalised RMSE", at_most=True,
            note="with the exact model and all the past, in expectation and for steps of five days",
        ),
        *_ranges(store, results),
    ]  # fmt: skip


def _some(num_states: int) -> list[tuple[int, int]]:
    """(position, days) of the first, middle and last state of a forecast."""
    chosen = sorted({0, num_states // 2 - 1, num_states - 1})
    return [(k, 5 * (k + 1)) for k in chosen if k >= 0]


def _seed(setting: Setting, store: Store, out: Path, seed: int) -> dict[str, Any]:
    def measure(run: Path) -> dict[str, Any]:
        scores: dict[str, Any] = rmse_by_lead(run)
        if run.name == "given":
            scores["reach"] = _reach(run, store, setting)
        return scores

    return {
        name: measured(config, out, setting, told=f"seed {seed}, ", measure=measure)
        for name, config in configs(store.path, seed).items()
    }


def _reach(run: Path, store: Store, setting: Setting) -> dict[str, list[float]]:
    """By channel: least and greatest value of all states of a forecast over `LONG` steps from the
    test years' first date on. One that was stopped goes on."""
    path = run / "long.zarr"
    settings = [f"forecast.leads={LONG}", f"forecast.every={len(store.times)}"]
    with setting.bar("long forecast", "leads") as progress:
        forecast_from_run(
            run, path, settings=settings, resume=path.exists(), progress=progress
        )  # fmt: skip
    with open_forecast(path) as opened:
        reach = _bounds(opened.read(0, lead) for lead in range(opened.num_leads))
        return dict(zip(opened.channels.names, reach.T.tolist(), strict=True))


def _bounds(fields: Iterable[np.ndarray]) -> np.ndarray:
    """(2, channel) least and greatest value at sea of (channel, lat, lon) fields."""
    found = [(np.nanmin(field, (1, 2)), np.nanmax(field, (1, 2))) for field in fields]
    return np.stack([np.min([least for least, _ in found], axis=0),
                     np.max([greatest for _, greatest in found], axis=0)])  # fmt: skip


def _ranges(store: Store, results: dict[int, Any]) -> list[Row]:
    """A row a variable: what training and long forecast cover together against training alone."""
    names = list(results[next(iter(results))]["given"]["reach"])
    here = [store.channels.names.index(name) for name in names]
    of = {}
    for split in ("train", "test"):
        times = np.flatnonzero(store.times.within(store.splits[split]))
        of[split] = _bounds(store.read(int(time))[here] for time in times)
    low, high = of["train"]
    width = high - low

    def over(bounds: np.ndarray) -> np.ndarray:
        """(channel,) per cent of the training range, negative inside."""
        return 100 * np.maximum(low - bounds[0], bounds[1] - high) / width

    found = []
    for variable in dict.fromkeys(store.channels[c].variable for c in here):
        own = [i for i, c in enumerate(here) if store.channels[c].variable == variable]
        span = low[own].min(), high[own].max()
        widest, told = span, []
        for seed, result in results.items():
            reach = np.array([result["given"]["reach"][name] for name in names]).T
            widest = min(widest[0], reach[0, own].min()), max(widest[1], reach[1, own].max())
            told.append(f"seed {seed} {_percent(over(reach)[own])}")
        found.append(Row(
            what=f"{LONG} steps: range of {variable}",
            ours=float(widest[1] - widest[0]), against=float(span[1] - span[0]), goal=1.0,
            unit=store.channels[here[own[0]]].units, at_most=True,
            note=f"{100 * ((widest[1] - widest[0]) / (span[1] - span[0]) - 1):.2f} % beyond the"
            f" training range; by level, beyond its own, negative inside: {'; '.join(told)}; the"
            f" truth of those years {_percent(over(of['test'])[own])}",
        ))  # fmt: skip
    return found


def _percent(values: np.ndarray) -> str:
    return " ".join(f"{value:.1f}" for value in values) + " %"


def _floor(store: Store, num_states: int) -> np.ndarray:
    """(state,) normalised RMSE, mean over channels, of the best forecast without the forcing."""
    predicted = [channel.name for channel in store.channels if channel.role == "prognostic"]
    _, std = Statistics.load(store).aligned(predicted)
    return (rmse_without_forcing(OCEAN, num_states) / std).mean(1)
