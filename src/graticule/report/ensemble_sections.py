"""The sections of a report on an ensemble: spread and error, ranks, events, plumes, members."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graticule.data.store import Store
from graticule.data.times import seconds_of
from graticule.evaluate.ensemble_scores import EnsembleScores
from graticule.forecast.reader import open_forecast
from graticule.report.ensemble import (
    plume_curves,
    rank_histogram,
    ratio_curves,
    reliability_curves,
    spread_curves,
)
from graticule.report.maps import difference_scale, draw, field_scale
from graticule.report.mesh import Mesh
from graticule.report.page import Html, beside, note, paragraph, table
from graticule.report.picture import (
    Picture,
    drawing,
    figures,
    lead_words,
    png_of,
    safe_name,
    short_weights,
)
from graticule.report.subject import Subject

PIXELS = 390
"""Of a panel of a map, as `maps` draws them."""
MOST_MEMBERS = 4
_DATE = "%Y-%m-%d %H:%M"
Section = tuple[str, str, Callable[[], list[Html]]]
"""(anchor, title, what makes it)"""


def ensemble_sections(subject: Subject, shown: Callable[..., Html]) -> list[Section]:
    """None for a forecast without members. shown: draws one picture or says why not."""
    forecast, ensemble = subject.forecast, subject.ensemble
    if forecast is None or forecast.num_members is None:
        return []
    members: Section = ("members", "Maps of members", lambda: _members(subject, shown))
    if ensemble is None:
        way = (
            "Not shown: the scores of the members are not there; score the forecast again:"
            f" graticule evaluate {forecast.path} --force"
        )
        return [("spread", "Spread and error of the ensemble", lambda: [note(way)]), members]
    wanted: list[tuple[Any, Section]] = [
        (True, ("spread", "Spread and error of the ensemble",
                lambda: _spread(subject, ensemble, shown))),
        (True, ("ranks", "Rank histograms", lambda: _ranks(subject, ensemble, shown))),
        (ensemble.sums.thresholds,
         ("events", "Probabilities of events", lambda: _events(subject, ensemble, shown))),
        (True, ("plumes", "Members at a point", lambda: _plumes(subject, ensemble, shown))),
        (True, members),
    ]  # fmt: skip
    return [section for there, section in wanted if there]


def member_maps(
    forecast_path: str | Path, store: Store, *, channel: str, lead: int, init: int = 0
) -> Picture:
    """Truth, mean of the members and its error; and pairs of members with their difference.

    lead: label, 1 for one model step. One scale for all fields, that of the truth; one for all
    differences, centred on zero: members that are like the truth differ from each other by
    sqrt(2) of their spread, and their mean from the truth by about as much as the spread.
    ValueError where the forecast has no members, or the store no truth.
    """
    units = store.channels[store.channels.index(channel)].units
    with open_forecast(forecast_path) as forecast:
        place = forecast.channels.index(channel)
        if forecast.num_members is None:
            raise ValueError(f"{forecast_path} has no members")
        valid = forecast.valid_times[init, lead - 1]
        index = int(np.searchsorted(store.times.seconds, seconds_of(valid)))
        if index == len(store.times) or store.times.seconds[index] != seconds_of(valid):
            raise ValueError(f"{store.path} has no truth for {valid}")
        truth = store.read(index, [store.channels.index(channel)])[0]
        total, square = np.zeros(truth.shape), np.zeros(truth.shape)
        kept: list[np.ndarray] = []
        for member in range(forecast.num_members):
            field = forecast.read(init, lead - 1, member, channels=[place])[0]
            deviation = field.astype(np.float64) - truth
            total += deviation
            square += deviation**2
            if member < MOST_MEMBERS:
                kept.append(field)
        num, started = forecast.num_members, forecast.init_times[init]
        hours = float(forecast.lead_seconds[lead - 1]) / 3600
        weights = short_weights(str(forecast.attributes.get("run_fingerprint", "")))
    error = total / num
    variance = np.maximum(square - num * error**2, 0) / max(1, num - 1)
    mesh = Mesh.of(store.grid, PIXELS)
    rows: list[tuple[list[np.ndarray], tuple[str, ...]]] = [
        ([truth, truth + error, error],
         (f"truth\n{valid:{_DATE}}", f"mean of {num}\n{valid:{_DATE}}", "mean - truth\n"))
    ]  # fmt: skip
    for k in range(0, len(kept) - 1, 2):
        rows.append(
            ([kept[k], kept[k + 1], kept[k + 1].astype(np.float64) - kept[k]],
             (f"member {k}\n", f"member {k + 1}\n", f"member {k + 1} - {k}\n"))
        )  # fmt: skip
    drawn = [([mesh.mean(field) for field in row], titles) for row, titles in rows]
    told, (height, width) = lead_words([hours])[0], store.grid.shape
    name = safe_name("members", channel)
    with drawing(name) as figure_class:
        png = png_of(
            draw(
                figure_class,
                mesh,
                drawn,
                field_scale([drawn[0][0][0]], [f for row, _ in drawn for f in row[:2]]),
                difference_scale([row[2] for row, _ in drawn]),
                f"{channel} ({units})",
                f"difference ({units})",
                f"{channel} from {started:{_DATE}}, lead {told}, grid {height} x {width}, weights"
                f" {weights}",
            )
        )
    area = store.grid.cell_area if min(store.grid.shape) > 1 else np.ones(store.grid.shape)
    fields = {"truth": truth, f"mean of {num}": truth + error, "mean - truth": error}
    fields |= {"spread": np.sqrt((num + 1) / num * variance)} if num > 1 else {}
    fields |= {f"member {k}": field for k, field in enumerate(kept)}
    found = [{"map": what, **_numbers(field, area)} for what, field in fields.items()]
    by = {row["map"]: row for row in found}
    if not by["truth"]["cells"]:
        raise ValueError(f"no cell of {channel} has a truth at {valid}")
    said = (
        f"spread {figures(by['spread']['rms'])}" if num > 1 else "no spread, as of one member alone"
    )
    return Picture(
        name=name,
        title=f"Members of {channel}",
        caption=(
            f"{channel} ({units}) from {started:{_DATE}} at lead {told}, valid {valid:{_DATE}}:"
            f" truth, mean of {num} members and its error"
            + (f"; members 0 to {2 * (len(rows) - 1) - 1} in pairs and how they differ"
               if len(rows) > 1 else "")
            + f". Grid {height} x {width}, weights {weights}. One scale for fields, one for"
            " differences; land is grey. The numbers are weighted by area; spread has the factor"
            " (m + 1) / m."
        ),
        alt=(
            f"Maps of {channel} at {told}: the truth reaches from"
            f" {figures(by['truth']['least'])} to {figures(by['truth']['largest'])} {units}, the"
            f" mean of {num} members from {figures(by[f'mean of {num}']['least'])} to"
            f" {figures(by[f'mean of {num}']['largest'])}; its error is"
            f" {figures(by['mean - truth']['rms'])} in root mean square, {said}."
        ),
        png=png,
        table=found,
    )  # fmt: skip


def _numbers(field: np.ndarray, area: np.ndarray) -> dict[str, Any]:
    some = np.isfinite(field)
    if not some.any():
        return {"cells": 0, "least": None, "largest": None, "rms": None}
    values, weight = field[some].astype(np.float64), area[some] / area[some].sum()
    return {
        "cells": int(some.sum()), "least": float(values.min()), "largest": float(values.max()),
        "rms": float(np.sqrt(weight @ values**2)),
    }  # fmt: skip


def _spread(
    subject: Subject, ensemble: EnsembleScores, shown: Callable[..., Html]
) -> list[Html]:  # fmt: skip
    told = ensemble.told()
    names = lead_words([row["lead_hours"] for row in told["rows"]])
    last = ensemble.leads[-1]
    at = next(n for n, row in zip(names, told["rows"], strict=True) if row["lead"] == last)
    columns = {
        "RMSE of the mean": "rmse", "of one member": "rmse_of_members", "spread": "spread",
        "spread / error": "spread_skill", "CRPS": "crps", "fair CRPS": "fair_crps",
        "almost fair": "almost_fair_crps", "energy score": "energy", "fair": "fair_energy",
    }  # fmt: skip
    columns = {head: key for head, key in columns.items() if key in told["rows"][0]}
    rows = [
        [row["channel"], row["units"], *(row[key] for key in columns.values())]
        for row in told["rows"]
        if row["lead"] == last
    ]
    body: list[Html] = [
        paragraph(
            f"An ensemble of {ensemble.num_members} members. The errors in the sections above are"
            " of the mean over members; activity and spectra are those of the members, on average."
        )
    ]
    if told["left_out"]:
        body.append(note(f"Not shown: {told['left_out']}."))
    else:
        body.append(shown(ratio_curves, ensemble, subject.shown_channels))
    return [
        *body,
        beside([shown(spread_curves, ensemble, name) for name in subject.shown_channels]),
        table(
            f"Scores of the ensemble at {at}; the energy score is of whole fields",
            ["channel", "units", *columns],
            rows,
        ),
    ]


def _ranks(subject: Subject, ensemble: EnsembleScores, shown: Callable[..., Html]) -> list[Html]:
    leads = list(subject.shown_leads)
    return [
        beside([shown(rank_histogram, ensemble, name, leads) for name in subject.shown_channels])
    ]


def _events(subject: Subject, ensemble: EnsembleScores, shown: Callable[..., Html]) -> list[Html]:
    number, leads = range(len(ensemble.sums.thresholds)), list(subject.shown_leads)
    rows = []
    for i in number:
        parts = {"brier": ensemble.brier(i), **ensemble.brier_parts(i)}
        for lead in leads:
            words = lead_words([float(ensemble.lead_seconds[lead - 1]) / 3600])[0]
            values = {key: float(v[lead - 1]) for key, v in parts.items()}
            base = values["uncertainty"]
            rows.append(
                [str(ensemble.sums.thresholds[i]), words, 100 * values["frequency"],
                 values["brier"], base, values["brier"] / base if base > 0 else None,
                 values["reliability"], values["resolution"]]
            )  # fmt: skip
    return [
        table(
            "Brier scores by event and lead: reliability - resolution + uncertainty, which is the"
            " score of always giving the event's frequency (ratio below 1: better)",
            ["event", "lead", "frequency (%)", "Brier score", "uncertainty", "ratio",
             "reliability", "resolution"],
            rows,
        ),
        beside([shown(reliability_curves, ensemble, i, leads) for i in number]),
    ]  # fmt: skip


def _plumes(subject: Subject, ensemble: EnsembleScores, shown: Callable[..., Html]) -> list[Html]:
    return [
        beside([shown(plume_curves, ensemble, n, subject.init) for n in subject.shown_channels]),
        paragraph("Another point: evaluate.point=LAT,LON when the forecast is scored."),
    ]


def _members(subject: Subject, shown: Callable[..., Html]) -> list[Html]:
    assert subject.forecast
    if subject.store is None:
        raise ValueError(
            f"the truth is not there ({subject.run.config.data.store}); name the store with"
            " --store PATH and report again"
        )
    return [
        shown(
            member_maps,
            subject.forecast.path,
            subject.store,
            channel=name,
            lead=subject.shown_leads[-1],
            init=subject.init,
        )
        for name in subject.shown_channels
    ]
