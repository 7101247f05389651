"""A run's folder: train into it, forecast from it, validate it, score its forecast."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graticule.assemble import assemble, describe, shapes_of
from graticule.config import BeastConfig, Config, from_dict, override
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.evaluate import (
    Scores,
    evaluate,
)
from graticule.forecast.clock import timing_path
from graticule.forecast.log import log_path
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.forecast.schedule import shared_out
from graticule.mesh import Mesh
from graticule.parallel.launch import mesh_of
from graticule.parallel.talk import everyone
from graticule.tasks.stages import Progress
from graticule.train import checkpoint
from graticule.train.task import in_steps, require_same_fields
from graticule.train.trainer import train
from graticule.train.validate import FILE as VALIDATION
from graticule.train.validate import STARTS, Wanted, best, read_validation, validate, weights_of

_log = logging.getLogger(__name__)


def is_trained(run: Path, config: Config) -> bool:
    """Whether a run has all steps that `config` wants of it."""
    if not (run / "config.json").is_file():
        return False
    done = checkpoint.complete(run)
    return bool(done) and checkpoint.step_of(done[-1]) >= in_steps(config).train.steps


def trained_run(config: Config, run: Path, *, progress: Any = None) -> float:
    """Train a run that is not there, go on with one that was stopped, leave one that is whole.

    Returns the seconds spent now. ValueError where `run` was trained as something else, or began
    with weights that `train.start_from` no longer holds.
    """
    began = time.perf_counter()
    _require_same_start(run, config.train.start_from)
    train(config, run, resume=(run / "config.json").is_file(), progress=progress)
    return time.perf_counter() - began


def _require_same_start(run: Path, start_from: str) -> None:
    """A run that others began with may have been trained on: they are then not what they seem."""
    path = run / "run.json"
    began_with = json.loads(path.read_text()).get("started_from", "") if path.is_file() else ""
    now = checkpoint.weights_of(checkpoint.find(start_from)) if start_from else ""
    if began_with and began_with != now:
        raise ValueError(
            f"{run} began with the weights {began_with} of {start_from}, which now holds {now}:"
            f" remove {run} to train it again"
        )


def forecast_of(run: Path, *, progress: Progress | None = None) -> tuple[Path, dict[str, Any]]:
    """The forecast of a run's last weights in its folder, made unless it is there, and what
    `forecast_from_run` says of it ({} where it was there). ValueError where it is of other weights.
    """
    path, part = run / "forecast.zarr", run / ".forecast-part.zarr"
    made: dict[str, Any] = {}
    talk = everyone()
    if not talk.first(path.exists):

        def clear() -> None:  # what a killed process left
            shutil.rmtree(part, ignore_errors=True)
            for beside in (log_path, timing_path):
                beside(part).unlink(missing_ok=True)

        talk.first(clear)
        made = forecast_from_run(run, part, progress=progress) | {"forecast": str(path)}

        def name() -> None:
            for beside in (log_path, timing_path):
                if beside(part).exists():
                    beside(part).replace(beside(path))
            part.rename(path)

        talk.first(name)
    wanted = checkpoint.weights_of(checkpoint.find(run))
    with open_forecast(path) as opened:
        if opened.attributes["run_fingerprint"] != wanted:
            raise ValueError(
                f"{path} was made by other weights ({opened.attributes['run_fingerprint']}) than"
                f" {run} has now ({wanted}); remove it"
            )
    return path, made


def forecast_from_run(
    run: Path,
    out: Path | None = None,
    *,
    starts: Sequence[str] = (),
    settings: Sequence[str] = (),
    device: str | None = None,
    resume: bool = False,
    members: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Forecast with a run's weights. `run`: its folder, or one of its checkpoints.

    The store may be another than the run's, with later dates for instance: same channels, grid
    and units.

    out: none: `forecast.zarr` in the run's folder, or `forecast-step-....zarr` of a checkpoint.
    starts: dates of the store; none: every `forecast.every`-th of the split `forecast.split`.
    settings: `forecast.*`, `data.store` and splits; `mesh.*` of the processes that were started,
    all of which make this call. By default they form the run's mesh if their number allows it, and
    those that do not share a sample are given initial times and members so that the last is done
    soonest. The file is the same whatever the mesh.
    resume: go on with what a forecast of this kind that was stopped left at `out`.
    members: of an ensemble; none: `bayes.members` where weights or noise are drawn. Of a run with
    `train.roll_longitude` each is turned, as in training, which alone makes members too.
    Returns where the forecast is, how many starts and leads it has, and what this call cost, as
    `Timing.to_dict` says it. ValueError for members of a run where nothing tells them apart.
    """
    found = checkpoint.find(run)
    state = checkpoint.read_state(found)
    trained = from_dict(state["config"])
    config = override(trained, ["data.grid=none", *settings])
    allowed = ("forecast.", "data.store", "data.test", "data.validation", "data.holes", "mesh.")
    _only(settings, allowed)
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
    asked = any(setting.startswith("mesh.") for setting in settings)
    config = _laid_out(config, everyone().size, asked=asked)
    sizes = mesh_of(config.mesh, everyone().size)
    if members is None and _draws(config):
        members = config.bayes.members
    if not any(setting.startswith(("mesh.data", "mesh.member")) for setting in settings):
        sizes |= shared_out(sizes["data"] * sizes["member"], len(chosen), members or 1)
    mesh = Mesh(sizes, device=torch.device(device).type)
    if mesh.sizes["member"] > 1 and mesh.rank == 0:
        _log.info("%d initial times over mesh.data=%d, %d members over mesh.member=%d",
                  len(chosen), sizes["data"], members or 1, sizes["member"])  # fmt: skip
    running = assemble(config, shapes_of(source), mesh, device=device)
    stripes = running.stripes
    loaded = checkpoint.load_weights(
        found, running.model, source.channel_names,
        prefer_average=config.forecast.weights == "average",
    )  # fmt: skip
    kind = "averaged" if loaded.averaged else "last"
    if mesh.rank == 0:
        _log.info("forecasting with the %s weights of %s, step %d of %d", kind, found, loaded.step,
                  trained.train.steps)  # fmt: skip
    if out is None:
        named = found.resolve() == run.resolve()
        out = found.parents[1] / (f"forecast-{found.name}.zarr" if named else "forecast.zarr")
    # The counter takes seconds to import, so it is for those who ask how fast an ensemble is.
    counts = members is not None and mesh.rank == 0
    flops = describe(config, shapes_of(source))["forward_flops"] if counts else 0.0
    # What it is a forecast of, not who computed it, nor what is told on the way.
    told = replace(
        config,
        mesh=trained.mesh,
        forecast=replace(
            config.forecast, log_every=trained.forecast.log_every,
            restart_every=trained.forecast.restart_every,
        ),
    )  # fmt: skip
    timing = forecast(
        running.model,
        SampleSource(store, config.data, rows=stripes.rows, columns=stripes.columns),
        statistics, out,
        starts=chosen, leads=leads, members=members, device=device, progress=progress, mesh=mesh,
        stripes=stripes,
        planes=running.planes,
        roll_seed=config.train.seed if config.train.roll_longitude else None,
        inputs=[found],
        resume=resume,
        restart_every=config.forecast.restart_every,
        log_every=config.forecast.log_every,
        forward_flops=flops,
        attributes={
            "title": f"forecast of {config.name}",
            "config": json.dumps(told.to_dict()),
            "config_fingerprint": told.fingerprint,
            "run_fingerprint": f"{state['fingerprints']['config']}/step {loaded.step}",
            "weights": "moving average" if loaded.averaged else "last",
            "store_fingerprint": store.fingerprint,
        },
    )  # fmt: skip
    return {
        "forecast": str(out),
        "num_starts": len(chosen),
        "leads": leads,
        "times_of_a_step": len(source.spec.outputs),
        **timing.to_dict(),
    }


def _draws(config: Config) -> bool:
    """Whether weights or noise of its model are drawn."""
    noisy = isinstance(config.model, BeastConfig) and config.model.nice_noise > 0
    return config.bayes.weights or noisy


def validate_run(
    run: Path,
    *,
    leads: Sequence[int] = (),
    starts: int = STARTS,
    follow: bool = False,
    settings: Sequence[str] = (),
    device: str | None = None,
    progress: Progress | None = None,
    told: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Roll out from a run's checkpoints over its validation split (`train/validate.py`).

    leads: horizons; none: `train.leads` and `forecast.leads`. settings: `data.store` where it was
    moved, `forecast.weights`, and `mesh.*` of the processes that make this call.
    Returns the lines that were added and, by horizon, the best checkpoint so far.
    """
    path = run / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{run} holds no run (no config.json there); name a run's folder, once training began"
        )
    _only(settings, ("mesh.", "data.store", "data.read_", "forecast.weights"))
    config = override(from_dict(json.loads(path.read_text())), list(settings))
    asked = any(setting.startswith("mesh.") for setting in settings)
    config = _laid_out(config, everyone().size, asked=asked)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    mesh = Mesh(mesh_of(config.mesh, everyone().size), device=torch.device(device).type)
    wanted = Wanted(
        leads=tuple(leads) or (config.train.leads, config.forecast.leads), starts=starts
    )
    added = validate(
        run, config, wanted, device=torch.device(device), mesh=mesh, follow=follow,
        progress=progress, told=told,
    )  # fmt: skip
    lines = everyone().first(lambda: read_validation(run))
    there = {found.name for found in everyone().first(lambda: checkpoint.complete(run))}
    alike = [line for line in lines if line["weights"] == weights_of(config)]
    most = max((line["starts"] for line in alike if line["starts"] <= starts), default=0)
    found = best([line for line in alike if line["starts"] == most])
    return {
        "validation": str(run / VALIDATION),
        "added": added,
        "best": [
            {
                **{key: line[key] for key in ("leads", "lead_hours", "checkpoint", "step", "loss")},
                "mean_ratio": line["mean_ratio"],
                "there": line["checkpoint"] in there,
            }
            for line in found.values()
        ],
    }


def _laid_out(config: Config, size: int, *, asked: bool) -> Config:
    """The configuration with a mesh of `size` processes, and a word where it is not the run's.

    asked: the mesh was set for this command: then it has to fit.
    """
    own = config.mesh
    alike = replace(own, data=0, member=1, sequence=own.sequence or 1)
    whole = replace(own, data=0, member=1, window=1, sequence=1, tensor=1, fixed_windows=None)
    for mesh in (own,) if asked else (own, alike, whole):
        try:
            sizes = mesh_of(mesh, size)
            break
        except ValueError:
            if asked:
                raise
    if mesh is not own and size == 1:
        _log.info("the run's mesh does not fit one process, which forecasts alone")
    elif mesh is not own:
        told = " x ".join(f"mesh.{axis}={number}" for axis, number in sizes.items() if number > 1)
        _log.info("the run's mesh does not fit %d processes: %s", size, told)
    return replace(config, mesh=mesh)


def evaluate_forecast(
    path: Path,
    *,
    store: str | None = None,
    settings: Sequence[str] = (),
    progress: Progress | None = None,
) -> Scores:
    """Score a forecast file against a store, by default the one it was started from.

    All processes that were started make this call, and get the same scores.
    """
    with open_forecast(path) as opened:
        text = opened.attributes.get("config")
    if text is None:
        raise ValueError(f"{path} does not tell its configuration: it was not written by forecast")
    _only(settings, ("evaluate.", "data.train"))
    config: Config = override(from_dict(json.loads(text)), list(settings))
    truth = Store(store or config.data.store)
    source = SampleSource(truth, config.data)
    statistics = Statistics.load(truth)
    statistics.check_times(truth, source.times("train"))
    std = dict(zip(statistics.names, statistics.std.tolist(), strict=True))
    return evaluate(
        path, truth,
        train_ranges=source.ranges["train"],
        climatology=config.evaluate.climatology,
        region=config.evaluate.region,
        statistics_std=std,
        thresholds=config.evaluate.thresholds,
        point=config.evaluate.point,
        progress=progress,
    )  # fmt: skip


def _only(settings: Sequence[str], allowed: tuple[str, ...]) -> None:
    for setting in settings:
        if not setting.startswith(allowed):
            raise ValueError(
                f"--set {setting}: a finished run keeps its configuration; only"
                f" {', '.join(name.rstrip('.') for name in allowed)} can be set here"
            )
