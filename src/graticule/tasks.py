"""What a command does with a run's folder: forecast from it, score its forecast, report on it."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from graticule.assemble import assemble, shapes_of
from graticule.config import Config, from_dict, override
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.evaluate import (
    EnsembleScores,
    OceanScores,
    Scores,
    evaluate,
    load_ensemble,
    load_ocean,
)
from graticule.evaluate.scores import FORMAT as SCORES_FORMAT
from graticule.evaluate.spectra import Spectra
from graticule.forecast.clock import timing_path
from graticule.forecast.log import log_path
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.mesh import Mesh
from graticule.parallel.launch import mesh_of
from graticule.parallel.talk import everyone
from graticule.report.folder import STAGES, RunFolder, lineage, plan_of
from graticule.report.page import require_writable, write_page
from graticule.report.run_report import run_report
from graticule.report.subject import Opened, Subject
from graticule.train import checkpoint
from graticule.train.task import in_steps, require_same_fields
from graticule.train.trainer import train
from graticule.train.validate import FILE as VALIDATION
from graticule.train.validate import STARTS, Wanted, best, read_validation, validate, weights_of

Progress = Callable[[int, int], None]
Bar = Callable[[str, str], AbstractContextManager[Callable[..., None]]]
"""(title, unit) -> a progress bar."""

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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Forecast with a run's weights. `run`: its folder, or one of its checkpoints.

    The store may be another than the run's, with later dates for instance: same channels, grid
    and units.

    out: none: `forecast.zarr` in the run's folder, or `forecast-step-....zarr` of a checkpoint.
    starts: dates of the store; none: every `forecast.every`-th of the split `forecast.split`.
    settings: `forecast.*`, `data.store` and splits; `mesh.*` of the processes that were started,
    all of which make this call. By default they form the run's mesh if their number allows it.
    The file is the same whatever the mesh.
    resume: go on with what a forecast of this kind that was stopped left at `out`.
    Returns where the forecast is, how many starts and leads it has, and what this call cost, as
    `Timing.to_dict` says it.
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
    mesh = Mesh(mesh_of(config.mesh, everyone().size), device=torch.device(device).type)
    running = assemble(config, shapes_of(source), mesh, device=device)
    stripes = running.stripes
    loaded = checkpoint.load_weights(
        found, running.model, source.channel_names,
        prefer_average=config.forecast.weights == "average",
    )  # fmt: skip
    if out is None:
        named = found.resolve() == run.resolve()
        out = found.parents[1] / (f"forecast-{found.name}.zarr" if named else "forecast.zarr")
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
        starts=chosen, leads=leads, device=device, progress=progress, mesh=mesh, stripes=stripes,
        inputs=[found],
        resume=resume,
        restart_every=config.forecast.restart_every,
        log_every=config.forecast.log_every,
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
        **timing.to_dict(),
    }


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
    alike = replace(own, data=0, sequence=own.sequence or 1)
    whole = replace(own, data=0, window=1, sequence=1, tensor=1, fixed_windows=None)
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


def no_bar(title: str, unit: str) -> AbstractContextManager[Callable[..., None]]:
    """A `Bar` that shows nothing."""
    return nullcontext(lambda *_: None)


def record_stage(folder: Path, stage: str, seconds: float) -> None:
    """Append a stage's wall time to stages.jsonl, if `folder` is a run's; a report shows it."""
    if not (folder / "config.json").is_file():
        return
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"stage": stage, "seconds": round(seconds, 3), "ended": ended})
    try:
        with (folder / STAGES).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:  # the stage itself is done, and its result is worth more
        _log.warning("the time of %s is not recorded: %s", stage, error)


def scores_of(
    path: Path, *, store: str | None = None, force: bool = False, bar: Bar = no_bar
) -> tuple[dict[str, Any], Spectra]:
    """The scores and spectra beside a forecast, made where they are missing.

    force: made anew. ValueError where what is there belongs to another forecast.
    """
    _, json_path, spectra_path, ocean_path, ensemble_path = _score_files(path)
    if not force and json_path.is_file() and spectra_path.is_file():
        read, spectra = _read_scores(json_path, path), Spectra.load(spectra_path)
        _require_same_forecast(read, spectra.attributes, len(spectra.lead_seconds), spectra_path)
        beside = {"ocean": ocean_path, "ensemble": ensemble_path}
        if all(at.is_file() for kind, at in beside.items() if read.get(kind)):
            return read, spectra
    began = time.perf_counter()
    with bar(f"scoring {path.parent.name}/{path.name}", "fields") as advance:
        scores = evaluate_forecast(path, store=store, progress=advance)
    assert scores.spectra is not None
    if not os.access(path.parent, os.W_OK):
        _log.warning("%s may not be written to: the scores are not kept", path.parent)
        return scores.to_dict(), scores.spectra
    # All of them or none: what is left of an earlier scoring is not of this one.
    save_scores(scores, path, force=force or not json_path.is_file())
    record_stage(path.parent, "evaluate", time.perf_counter() - began)
    return _read_scores(json_path, path), scores.spectra


def ocean_of(path: Path, scores: dict[str, Any]) -> OceanScores | None:
    """The scores by depth beside a forecast, which `scores_of` makes with the others; None where
    these are of no ocean. ValueError where what is there belongs to other scores."""
    *_, ocean_path, _ = _score_files(path)
    if not (scores.get("ocean") and ocean_path.is_file()):
        return None
    ocean = load_ocean(ocean_path)
    _require_same_forecast(scores, ocean.attributes, ocean.valid_seconds.shape[1], ocean_path)
    return ocean


def ensemble_of(path: Path, scores: dict[str, Any]) -> EnsembleScores | None:
    """The scores of the members beside a forecast; None where these are of none. ValueError where
    what is there belongs to other scores."""
    *_, ensemble_path = _score_files(path)
    if not (scores.get("ensemble") and ensemble_path.is_file()):
        return None
    found = load_ensemble(ensemble_path)
    _require_same_forecast(scores, found.attributes, len(found.lead_seconds), ensemble_path)
    return found


def _require_same_forecast(
    scores: dict[str, Any], attributes: dict[str, Any], num_leads: int, path: Path
) -> None:
    """Scores and what lies beside them are files apart: one may have been moved, or be older.

    attributes, num_leads: of the file at `path`.
    """
    forecast = scores["provenance"]["forecast"]
    last = max(row["lead"] for row in scores["rows"])
    wanted = {
        "run_fingerprint": forecast.get("run_fingerprint"),
        "store_fingerprint": scores["provenance"]["store_fingerprint"],
        "region": scores["region"] or "everywhere",
    }
    here = {name: attributes.get(name) for name in wanted}
    other = [
        f"{name} {here[name]} there and {wanted[name]} in the scores beside it"
        for name in wanted
        if _text(here[name]) != _text(wanted[name])
    ]
    if num_leads < last:
        other.append(f"{num_leads} leads there and {last} in the scores")
    if other:
        raise ValueError(f"{path}: {'; '.join(other)}. Give --force to score the forecast again")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def save_scores(scores: Scores, forecast_path: Path, *, force: bool = False) -> None:
    """Write the table of scores, their JSON, the spectra, an ocean's scores by depth and an
    ensemble's scores beside a forecast.

    What is there is kept, scored perhaps in a region; with `force` it is replaced.
    """
    csv_path, json_path, spectra_path, ocean_path, ensemble_path = _score_files(forecast_path)
    if force or not csv_path.exists():
        scores.write_csv(csv_path, force=force)
    if force or not json_path.exists():
        scores.write_json(json_path, force=force)
    if force or not spectra_path.exists():
        scores.write_spectra(spectra_path, force=force)
    if scores.ocean is not None and (force or not ocean_path.exists()):
        scores.write_ocean(ocean_path, force=force)
    if scores.ensemble is not None and (force or not ensemble_path.exists()):
        scores.write_ensemble(ensemble_path, force=force)


def _score_files(forecast_path: Path) -> list[Path]:
    suffixes = (".scores.csv", ".scores.json", ".spectra.nc", ".ocean.nc", ".ensemble.nc")
    return [forecast_path.with_suffix(suffix) for suffix in suffixes]


def _read_scores(json_path: Path, forecast_path: Path) -> dict[str, Any]:
    try:
        scores = json.loads(json_path.read_text())
        made = scores["provenance"]["forecast"]
        pairs = scores["pairs"] + scores["skipped"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{json_path} is no file of scores ({error!r}); move it away") from error
    if scores.get("format") != SCORES_FORMAT:
        raise ValueError(
            f"{json_path} has format {scores.get('format')!r}, not {SCORES_FORMAT!r}; move it away"
            " to have the forecast scored again"
        )
    with open_forecast(forecast_path) as opened:
        other = [key for key in made if opened.attributes.get(key) != made[key]]
        if other or opened.valid_times.size != pairs:
            raise ValueError(
                f"{json_path} scores {pairs} fields of {made.get('run_fingerprint')}, and"
                f" {forecast_path} holds {opened.valid_times.size} of"
                f" {opened.attributes.get('run_fingerprint')}; give --force to score it again"
            )
    return scores


def report_run(
    folder: Path,
    out: Path | None = None,
    *,
    forecast_path: Path | None = None,
    store: str | None = None,
    compare: Sequence[str] = (),
    channels: Sequence[str] = (),
    init: str | None = None,
    force: bool = False,
    bar: Bar = no_bar,
) -> dict[str, Any]:
    """Write one HTML page on a run: `folder`, or the run that `folder`/report.json names.

    out: none: report.html in the folder; an earlier report is replaced, another file is not.
    forecast_path: none: the run's own, if it is there. store: the truth, if it was moved.
    compare: LABEL=RUN each. channels, init: of the maps and spectra. force: score again.
    Scores that are missing are made; what cannot be made is told on the page.
    """
    out = out or folder / "report.html"
    plan = plan_of(folder, compare)
    run = RunFolder.read(plan.run)
    require_writable(out)
    troubles: list[str] = []
    earlier, trouble = lineage(run)
    troubles += [trouble] if trouble else []

    def scored(path: Path, label: str) -> tuple[dict[str, Any] | None, Spectra | None]:
        try:
            return scores_of(path, store=store, force=force, bar=bar)
        except ValueError as error:
            troubles.append(f"{label} has no scores and spectra here: {error}")
            return _scores_alone(path), None

    path = forecast_path or plan.run / "forecast.zarr"
    opened = Opened.read(path) if forecast_path or path.exists() else None
    scores, spectra = scored(path, "The forecast") if opened else (None, None)
    ocean, ensemble = None, None
    if scores:
        try:
            ocean = ocean_of(path, scores)
        except ValueError as error:
            troubles.append(f"The forecast has no scores by depth here: {error}")
        try:
            ensemble = ensemble_of(path, scores)
        except ValueError as error:
            troubles.append(f"The forecast has no scores of its members here: {error}")
    others, others_scores = {}, {}
    for label, other in plan.others.items():
        others[label] = RunFolder.read(other)
        if not (other / "forecast.zarr").exists():
            troubles.append(f"{label} has no forecast (graticule forecast {other}): no scores.")
            continue
        theirs, _ = scored(other / "forecast.zarr", label)
        if theirs is not None:
            others_scores[label] = theirs
    trained_on = run.config.data.store
    truth = opened.config.data.store if opened and opened.config else trained_on
    subject = Subject(
        run=run,
        lineage=earlier,
        forecast=opened,
        scores=scores,
        spectra=spectra,
        ocean=ocean,
        ensemble=ensemble,
        store=_store_at(store or truth),
        training_store=_store_at(trained_on) or _store_at(store or ""),
        others=others,
        others_scores=others_scores,
        seconds=plan.seconds or _seconds(RunFolder.read(plan.run), earlier),
        chosen=tuple(channels),
        init=opened.init_of(init) if opened and init else 0,
        troubles=troubles,
    )
    if opened and channels:
        opened.channels.pick(channels)  # an unknown name is the user's error, not the page's
    with bar("reporting", "sections") as advance:
        report = run_report(subject, progress=advance)
    write_page(out, report.html)
    return {
        "report": str(out),
        "bytes": out.stat().st_size,
        "sections": report.sections,
        "pictures": report.pictures,
        "warnings": report.warnings,
    }


def _scores_alone(path: Path) -> dict[str, Any] | None:
    """Scores that lie beside a forecast whose spectra cannot be made."""
    _, json_path, *_ = _score_files(path)
    try:
        return _read_scores(json_path, path) if json_path.is_file() else None
    except ValueError:
        return None  # told already


def _store_at(path: str) -> Store | None:
    return Store(path) if path and (Path(path) / "zarr.json").is_file() else None


def _seconds(run: RunFolder, earlier: Sequence[RunFolder]) -> dict[str, float]:
    """By stage, the training of earlier runs first."""
    found = {}
    for before in reversed(earlier):
        if spent := before.stage_seconds().get("train"):
            found[f"train {before.config.name}"] = spent
    return found | run.stage_seconds()


def _only(settings: Sequence[str], allowed: tuple[str, ...]) -> None:
    for setting in settings:
        if not setting.startswith(allowed):
            raise ValueError(
                f"--set {setting}: a finished run keeps its configuration; only"
                f" {', '.join(name.rstrip('.') for name in allowed)} can be set here"
            )
