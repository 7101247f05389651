"""`graticule demo`: the whole path on the demo planet, each stage once, reused where it is there.

data -> pretraining -> fine-tuning over leads -> forecast -> scores -> picture, and a summary.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graticule.config import Config, override
from graticule.data.demo import write_demo_store
from graticule.data.planet import Planet
from graticule.data.store import Store, write_json
from graticule.evaluate import Scores
from graticule.forecast.reader import open_forecast
from graticule.recipes import recipe
from graticule.report.maps import forecast_maps
from graticule.tasks import evaluate_forecast, forecast_from_run
from graticule.train import checkpoint
from graticule.train.trainer import train

Bar = Callable[[str, str], AbstractContextManager[Callable[..., None]]]


def run_demo(
    out: Path,
    data: Path,
    *,
    settings: Sequence[str] = (),
    planet: Planet | None = None,
    bar: Bar,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run what is not there yet and return the summary that `out`/summary.json holds.

    settings: overrides of the pretraining; fine-tuning takes its model and data from there.
    bar: (title, unit) -> progress bar. say: told of each stage.
    """
    seconds: dict[str, float] = {}
    pretrain, finetune = _configs(out, data, settings)

    def stage(name: str, there: bool, work: Callable[[], Any]) -> Any:
        say(f"{name}: {'found, used again' if there else 'begins'}")
        began = time.perf_counter()
        result = work()
        seconds[name] = 0.0 if there else round(time.perf_counter() - began, 2)
        return result

    def made_store() -> Store:
        if data.exists():
            return Store(data)
        with bar("simulating the planet", "samples") as advance:
            return write_demo_store(data, planet, progress=advance)

    store = stage("planet", data.exists(), made_store)
    for config in (pretrain, finetune):
        folder = out / config.name
        work = partial(_train, config, folder, bar)
        stage(config.name, _is_trained(folder, config), work)
    tuned = out / finetune.name
    path = out / "forecast.zarr"
    newest = checkpoint.find(tuned)

    def made_forecast() -> dict[str, Any] | None:
        if path.exists():
            return None
        try:
            with bar("forecasting", "leads") as advance:
                return forecast_from_run(tuned, path, progress=advance)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # half of it; the next run makes it anew
            raise

    speed = stage("forecast", path.exists(), made_forecast)
    with open_forecast(path) as opened:
        wanted = f"{checkpoint.read_state(newest)['fingerprints']['config']}/step"
        if not str(opened.attributes["run_fingerprint"]).startswith(wanted):
            raise ValueError(f"{path} was made by other weights than {tuned}; remove it, or --out")
    with bar("scoring", "fields") as advance:
        scores = stage("scores", False, lambda: evaluate_forecast(path, progress=advance))
    scores.write_csv(out / "scores.csv", force=True)
    scores.write_json(out / "scores.json", force=True)
    picture = stage(
        "picture", False,
        lambda: forecast_maps(path, store, out / "forecast.png", channel=store.channels.names[0],
                              leads=_three(scores.leads)),
    )  # fmt: skip
    earlier = _earlier(out / "summary.json")
    spent = {name: cost or earlier["seconds"].get(name, 0.0) for name, cost in seconds.items()}
    figures = speed or earlier
    summary = {
        "leads": scores.leads,
        "lead_hours": [float(scores.lead_seconds[lead - 1] / 3600) for lead in scores.leads],
        "rmse_model": scores.normalised().tolist(),
        "rmse_persistence": scores.normalised("persistence").tolist(),
        "rmse_climatology": scores.normalised("climatology").tolist(),
        "seconds": spent,
        "simulated_years_per_day": figures["simulated_years_per_day"],
        "store": str(data),
        "checkpoint": str(newest),
        "picture": str(picture),
    }
    write_json(out / "summary.json", summary)
    return {**summary, "text": _text(summary, scores)}


def _configs(out: Path, data: Path, settings: Sequence[str]) -> tuple[Config, Config]:
    for setting in settings:
        key = setting.partition("=")[0]
        if key in ("name", "data.store"):
            raise ValueError(f"--set {setting}: the demo names its own; --out and --data move them")
    # The store says how large the planet is.
    pretrain = override(recipe("demo"), [f"data.store={data}", "data.grid=none", *settings])
    pretrain = replace(pretrain, name="pretrain")
    finetune = recipe("demo-finetune")
    finetune = replace(
        finetune,
        name="finetune",
        data=pretrain.data,
        model=pretrain.model,
        forecast=pretrain.forecast,
        evaluate=pretrain.evaluate,
        train=replace(
            finetune.train,
            start_from=str(out / "pretrain"),
            precision=pretrain.train.precision,
            seed=pretrain.train.seed,
        ),
    )
    return pretrain, finetune


def _is_trained(folder: Path, config: Config) -> bool:
    if not (folder / "config.json").is_file():
        return False
    done = checkpoint.complete(folder)
    return bool(done) and checkpoint.step_of(done[-1]) >= config.train.steps


def _train(config: Config, folder: Path, bar: Bar) -> Path:
    resume = (folder / "config.json").is_file()
    with bar(config.name, "steps") as advance:
        return train(config, folder, resume=resume, progress=advance)


def _three(leads: list[int]) -> tuple[int, ...]:
    """The first, a middle and the last lead."""
    return tuple(sorted({leads[0], leads[(len(leads) - 1) // 2], leads[-1]}))


def _earlier(path: Path) -> dict[str, Any]:
    """What stages cost when they ran: a stage that is used again keeps its figure."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {"seconds": {}, "simulated_years_per_day": None}


def _text(summary: dict[str, Any], scores: Scores) -> str:
    ratio = np.array(summary["rmse_model"]) / np.array(summary["rmse_persistence"])
    spent = "  ".join(f"{name} {value:.0f} s" for name, value in summary["seconds"].items())
    return "\n".join(
        [
            scores.table(),
            "",
            f"RMSE over persistence's: {ratio.min():.2f} to {ratio.max():.2f} over"
            f" {len(ratio)} leads ({'beats' if ratio.max() < 1 else 'does not beat'} it at every"
            " lead)",
            f"picture {summary['picture']}, summary beside it; {spent}",
        ]
    )
