"""What a bench trains: each run once, and what it measured of it. What is there is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from graticule.bench.results import kept
from graticule.bench.rows import Setting
from graticule.config import Config
from graticule.tasks import evaluate_forecast, forecast_of, trained_run


def measured(
    config: Config,
    out: Path,
    setting: Setting,
    *,
    told: str,
    measure: Callable[[Path], dict[str, Any]],
) -> dict[str, Any]:
    """What `measure` says of the trained run `out`/NAME, NAME the configuration's, beside its
    fingerprint, steps, leads and seconds of training; kept in `out`/NAME.json.

    A stopped one goes on: training from its checkpoint. told: what the words say before the name.
    ValueError where what is kept is of another configuration.
    """
    run = out / config.name

    def made() -> dict[str, Any]:
        steps, leads = config.train.steps, config.train.leads
        setting.say(f"{told}{config.name}: {steps} steps of {leads} leads")
        with setting.bar(config.name, "steps") as progress:
            seconds = trained_run(config, run, progress=progress)
        return {"steps": steps, "leads": leads, "seconds": seconds, **measure(run)}

    return kept(out, config.name, config.fingerprint, made)


def rmse_by_lead(run: Path) -> dict[str, list[float]]:
    """Normalised RMSE of the run's forecast and of the references, by lead."""
    forecast, _ = forecast_of(run)
    scores = evaluate_forecast(forecast)
    return {
        "rmse": scores.normalised().tolist(),
        "persistence": scores.normalised("persistence").tolist(),
        "climatology": scores.normalised("climatology").tolist(),
    }
