"""Scores beside a forecast: made where they are missing, read where they are there."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from graticule.evaluate import (
    EnsembleScores,
    OceanScores,
    Scores,
    load_ensemble,
    load_ocean,
)
from graticule.evaluate.scores import FORMAT as SCORES_FORMAT
from graticule.evaluate.spectra import Spectra
from graticule.forecast.reader import open_forecast
from graticule.tasks.runs import evaluate_forecast
from graticule.tasks.stages import Bar, no_bar, record_stage

_log = logging.getLogger(__name__)


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


def scores_alone(path: Path) -> dict[str, Any] | None:
    """Scores that lie beside a forecast whose spectra cannot be made."""
    _, json_path, *_ = _score_files(path)
    try:
        return _read_scores(json_path, path) if json_path.is_file() else None
    except ValueError:
        return None  # told already
