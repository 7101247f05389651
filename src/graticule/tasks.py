"""What a command does with a run's folder: forecast from it, score its forecast."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from graticule.assemble import build_model, shapes_of
from graticule.config import Config, from_dict, override
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.evaluate import Scores, evaluate
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.train import checkpoint
from graticule.train.task import require_same_fields

Progress = Callable[[int, int], None]


def forecast_from_run(
    run: Path,
    out: Path | None = None,
    *,
    starts: Sequence[str] = (),
    settings: Sequence[str] = (),
    device: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Forecast with a run's weights. `run`: its folder, or one of its checkpoints.

    The store may be another than the run's, with later dates for instance: same channels, grid
    and units.

    out: none: `forecast.zarr` in the run's folder, or `forecast-step-....zarr` of a checkpoint.
    starts: dates of the store; none: every `forecast.every`-th of the split `forecast.split`.
    settings: `forecast.*`, `data.store` and splits.
    """
    found = checkpoint.find(run)
    state = checkpoint.read_state(found)
    config = override(from_dict(state["config"]), ["data.grid=none", *settings])
    _only(settings, ("forecast.", "data.store", "data.test", "data.validation", "data.holes"))
    store = Store(config.data.store)
    source = SampleSource(store, config.data)
    require_same_fields(state["fields"], source)  # instead of data.grid: it says more
    # Those of the training, whatever store the forecast starts from.
    statistics = Statistics.from_dict(state["statistics"])
    leads = config.forecast.leads
    if starts:
        chosen = sorted({store.times.find(text) for text in starts})
    else:
        chosen = source.starts(config.forecast.split, leads)[:: config.forecast.every].tolist()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(config, shapes_of(source), device=device)
    loaded = checkpoint.load_weights(
        found, model, source.channel_names,
        prefer_average=config.forecast.weights == "average",
    )  # fmt: skip
    if out is None:
        named = found.resolve() == run.resolve()
        out = found.parents[1] / (f"forecast-{found.name}.zarr" if named else "forecast.zarr")
    timing = forecast(
        model, source, statistics, out,
        starts=chosen, leads=leads, device=device, progress=progress,
        inputs=[found],
        attributes={
            "title": f"forecast of {config.name}",
            "config": json.dumps(config.to_dict()),
            "config_fingerprint": config.fingerprint,
            "run_fingerprint": f"{state['fingerprints']['config']}/step {loaded.step}",
            "weights": "moving average" if loaded.averaged else "last",
            "store_fingerprint": store.fingerprint,
        },
    )  # fmt: skip
    return {
        "forecast": str(out),
        "num_starts": len(chosen),
        "leads": leads,
        "seconds": timing.seconds,
        "simulated_years_per_day": timing.simulated_years_per_day,
    }


def evaluate_forecast(
    path: Path,
    *,
    store: str | None = None,
    settings: Sequence[str] = (),
    progress: Progress | None = None,
) -> Scores:
    """Score a forecast file against a store, by default the one it was started from."""
    with open_forecast(path) as opened:
        text = opened.attributes.get("config")
    if text is None:
        raise ValueError(f"{path} does not tell its configuration: it was not written by forecast")
    _only(settings, ("evaluate.", "data.train"))
    config: Config = override(from_dict(json.loads(text)), list(settings))
    truth = Store(store or config.data.store)
    source = SampleSource(truth, config.data)
    statistics = Statistics.load(truth)
    std = dict(zip(statistics.names, statistics.std.tolist(), strict=True))
    return evaluate(
        path, truth,
        train_ranges=source.ranges["train"],
        climatology=config.evaluate.climatology,
        region=config.evaluate.region,
        statistics_std=std,
        progress=progress,
    )  # fmt: skip


def _only(settings: Sequence[str], allowed: tuple[str, ...]) -> None:
    for setting in settings:
        if not setting.startswith(allowed):
            raise ValueError(
                f"--set {setting}: a finished run keeps its configuration; only"
                f" {', '.join(name.rstrip('.') for name in allowed)} can be set here"
            )
