"""The page on a run, of all that lies in its folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graticule.data.store import Store
from graticule.evaluate.spectra import Spectra
from graticule.report.folder import RunFolder, lineage, plan_of
from graticule.report.page import require_writable, write_page
from graticule.report.run_report import run_report
from graticule.report.subject import Opened, Subject
from graticule.tasks.scores import ensemble_of, ocean_of, scores_alone, scores_of
from graticule.tasks.stages import Bar, no_bar


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
            return scores_alone(path), None

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


def _store_at(path: str) -> Store | None:
    return Store(path) if path and (Path(path) / "zarr.json").is_file() else None


def _seconds(run: RunFolder, earlier: Sequence[RunFolder]) -> dict[str, float]:
    """By stage, the training of earlier runs first."""
    found = {}
    for before in reversed(earlier):
        if spent := before.stage_seconds().get("train"):
            found[f"train {before.config.name}"] = spent
    return found | run.stage_seconds()
