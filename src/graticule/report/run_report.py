"""The report on a run: which sections it has, made of what there is.

A section whose pictures cannot be made says why, and the rest of the report stands.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graticule.report import curves
from graticule.report.ensemble_sections import ensemble_sections
from graticule.report.findings import activity, summary, warnings
from graticule.report.maps import forecast_maps
from graticule.report.ocean_sections import ocean_sections
from graticule.report.page import (
    Html,
    Section,
    beside,
    block,
    details,
    duration,
    figure,
    inside,
    items,
    link,
    note,
    page,
    paragraph,
    table,
    tag,
)
from graticule.report.picture import Picture
from graticule.report.provenance import (
    commands,
    data_rows,
    model_rows,
    origin_rows,
    store_command,
)
from graticule.report.subject import Subject, grouping, lead_names, ratios, series

Shown = Callable[..., Html]
"""(function that draws, its arguments) -> the figure, or the reason why there is none."""
MOST_CURVES = 12
"""A forecast with more channels shows curves of the chosen ones only; its table has them all."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """html: the page. sections: their anchors. pictures: their names. warnings: in words."""

    html: str
    sections: list[str]
    pictures: list[str]
    warnings: list[str]


def run_report(subject: Subject, *, progress: Callable[[int, int], None] | None = None) -> Report:
    """The page on a run. progress: called with (sections done, sections)."""
    drawn: list[str] = []
    found = warnings(subject)

    def shown(draw: Callable[..., Picture], *given: Any, **named: Any) -> Html:
        try:
            picture = draw(*given, **named)
        except ValueError as error:  # of this one picture: the next may be drawn
            return note(f"Not shown: {error}")
        drawn.append(picture.name)
        return figure(picture)

    makers: list[tuple[str, str, Callable[[], list[Html]]]] = [
        ("summary", "Summary", lambda: _summary(subject, found)),
        ("setup", "What ran", lambda: _setup(subject)),
        ("losses", "Losses", lambda: [shown(curves.loss_curves, _runs(subject))]),
        ("scores", "Scores against lead time", lambda: _scores(subject, shown)),
        ("table", "Score table", lambda: _score_table(subject)),
        ("activity", "Forecast activity", lambda: _activity(subject, shown)),
        ("spectra", "Zonal spectra", lambda: _spectra(subject, shown)),
        *ensemble_sections(subject, shown),
        *ocean_sections(subject, shown),
        ("maps", "Maps", lambda: _maps(subject, shown)),
        ("time", "Time", lambda: _time(subject, shown)),
        ("memory", "Memory", lambda: _memory(subject, shown)),
        ("profile", "Profile of a training step", lambda: _profile(subject)),
        ("warnings", "Warnings", lambda: _warnings(found)),
        ("again", "How to make it again", lambda: _again(subject)),
    ]
    if not subject.run.profile:
        makers = [maker for maker in makers if maker[0] != "profile"]
    sections = []
    for done, (anchor, title, make) in enumerate(makers, start=1):
        sections.append(Section(anchor=anchor, title=title, body=_or_reason(make)))
        if progress:
            progress(done, len(makers))
    name = subject.run.config.name or subject.run.path.name
    text = page(f"Report on {name}", _subtitle(subject), sections)
    return Report(html=text, sections=[s.anchor for s in sections], pictures=drawn, warnings=found)


def _or_reason(make: Callable[[], list[Html]]) -> list[Html]:
    try:
        return make()
    except ValueError as error:
        return [note(f"Not shown: {error}")]


def _subtitle(subject: Subject) -> str:
    sessions = subject.run.description.get("sessions", [])
    told = [f"Configuration {subject.run.fingerprint}", str(subject.run.path)]
    if sessions:
        told.append(f"graticule {sessions[-1]['versions']['graticule']}")
    return ", ".join(told)


def _summary(subject: Subject, found: list[str]) -> list[Html]:
    body: list[Html] = [tag("div", *(paragraph(s) for s in summary(subject)), class_="summary")]
    if found:
        count = "One thing is" if len(found) == 1 else f"{len(found)} things are"
        body.append(
            tag(
                "p", f"{count} worth knowing: ", link("warnings", "warnings"), ".", class_="warning"
            )
        )
    if subject.scores and (leads := sorted(series(subject.scores, "normalised"))):
        names = lead_names(subject.scores)
        rows = []
        for lead in leads if len(leads) <= 12 else sorted({*subject.shown_leads}):
            row: list[Any] = [names[lead]]
            for source in ("model", "persistence", "climatology"):
                row.append(series(subject.scores, "normalised", source=source).get(lead))
            for reference in ("persistence", "climatology"):
                row.append(ratios(subject.scores, reference).get(lead))
            rows.append(row)
        body.append(
            table(
                "Normalised RMSE by lead time, and its ratio to the references"
                " (below 1: better than the reference)",
                ["lead", "model", "persistence", "climatology", "/ persistence", "/ climatology"],
                rows,
            )
        )
    return body


def _setup(subject: Subject) -> list[Html]:
    config = json.dumps(subject.run.config.to_dict(), indent=1)
    body = [
        table("The run", ["what", "value"], model_rows(subject)),
        *data_rows(subject),
        table("Where it comes from", ["what", "value"], origin_rows(subject)),
    ]
    sessions = subject.run.description.get("sessions", [])
    if sessions:
        rows = [
            [i, s["after_step"], s["device"], ", ".join(f"{k} {v}" for k, v in
                                                        s["versions"].items())]
            for i, s in enumerate(sessions, start=1)
        ]  # fmt: skip
        body.append(
            table(
                "Training sessions (a resumed run has several)",
                ["session", "after step", "device", "versions"],
                rows,
            )
        )
    body.append(details("The configuration in full", block(config, "The configuration in full")))
    return body


def _runs(subject: Subject) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each run once: this one, those it comes from, those it is compared with."""
    labels = {run.path.resolve(): label for label, run in subject.others.items()}
    runs = {run.path.resolve(): run for run in
            (subject.run, *subject.lineage, *subject.others.values())}  # fmt: skip
    found = [(labels.get(path, run.config.name), run.metrics) for path, run in runs.items()]
    found = [(label, metrics) for label, metrics in found if metrics]
    if not found:
        raise ValueError("no step has been taken yet")
    return found


def _need_scores(subject: Subject) -> dict[str, Any]:
    if subject.scores is None:
        raise ValueError(_way_to_scores(subject))
    return subject.scores


def _way_to_scores(subject: Subject) -> str:
    if subject.forecast is None:
        return (
            f"there is no forecast; make one with `graticule forecast {subject.run.path}` and"
            " report again"
        )
    return (
        "the forecast has no scores and its truth is not there; name the store with --store PATH"
        " and report again"
    )


def _scores(subject: Subject, shown: Shown) -> list[Html]:
    scores = _need_scores(subject)
    assert subject.forecast
    names = list(subject.forecast.channels.names)
    body, drawn = [], []
    if len(names) > MOST_CURVES or subject.chosen:
        picked = subject.shown_channels
        body.append(
            paragraph(
                f"Curves of {len(picked)} of {len(names)} channels: {', '.join(picked)}. The ",
                link("table", "score table"),
                " has all of them; --channel shows others.",
            )
        )
        names = picked
    if series(scores, "normalised"):
        drawn.append(shown(curves.score_curves, scores, others=subject.others_scores))
    for name in names:
        others = {label: theirs for label, theirs in subject.others_scores.items()
                  if series(theirs, name)}  # fmt: skip
        drawn.append(shown(curves.score_curves, scores, channel=name, others=others))
    return [*body, beside(drawn)]


def _score_table(subject: Subject) -> list[Html]:
    scores = _need_scores(subject)
    leads_told, units = lead_names(scores), {row["channel"]: row["units"] for row in scores["rows"]}
    leads = subject.scored_leads
    if len(leads) > 5:
        leads = sorted({leads[round(i * (len(leads) - 1) / 4)] for i in range(5)})
    last = leads[-1]
    rows = []
    for name in units:
        rmse = series(scores, name)
        row: list[Any] = [name, units[name], *(rmse.get(lead) for lead in leads)]
        for reference in ("persistence", "climatology"):
            row.append(ratios(scores, reference, name).get(last))
        row += [series(scores, name, quantity).get(last) for quantity in ("bias", "mae", "acc")]
        rows.append(row)
    where = "everywhere"
    if scores["region"] is not None:
        where = "from {:g} to {:g} east and {:g} to {:g} north".format(*scores["region"])
    at = leads_told[last]
    return [
        table(
            f"RMSE by channel and lead time, {where}; ratios, bias, mean absolute error and"
            f" anomaly correlation at {at}",
            ["channel", "units", *(f"RMSE {leads_told[lead]}" for lead in leads),
             "/ persistence", "/ climatology", "bias", "MAE", "ACC"], rows,
        ),
        paragraph(
            f"Pooled by area over {scores['pairs']:,} forecast fields. Climatology:"
            f" {grouping(scores)}. Ratios below 1 are better"
            " than the reference. Normalised: mean over channels of RMSE over the training"
            " standard deviation."
        ),
    ]  # fmt: skip


def _activity(subject: Subject, shown: Shown) -> list[Html]:
    scores = _need_scores(subject)
    if not activity(scores):
        raise ValueError(
            "these scores have no activity; score the forecast again: graticule report --force"
        )
    return [
        paragraph(
            "Activity is the standard deviation over the area of a field's anomalies from"
            " climatology. Below the truth's, a forecast is too smooth, as one trained on a mean"
            " error tends to be: it may have a small RMSE and yet too little weather in it."
        ),
        shown(curves.activity_curves, scores),
    ]


def _spectra(subject: Subject, shown: Shown) -> list[Html]:
    if subject.spectra is None:
        raise ValueError(_way_to_scores(subject))
    drawn = [
        shown(curves.spectra_curves, subject.spectra, channel=name, leads=subject.shown_leads)
        for name in subject.shown_channels
    ]
    return [
        paragraph(
            "Power by zonal wavenumber. Where the forecast's power falls below the truth's, those"
            " scales are smoothed away; where it lies far above, they are noise."
        ),
        _which_channels(subject),
        beside(drawn),
    ]


def _which_channels(subject: Subject) -> Html:
    assert subject.forecast
    names, picked = subject.forecast.channels.names, subject.shown_channels
    if len(picked) == len(names):
        return paragraph(f"All channels: {', '.join(names)}.")
    why = "as asked for" if subject.chosen else "chosen to differ; --channel shows others"
    return paragraph(f"{len(picked)} of {len(names)} channels, {why}: {', '.join(picked)}.")


def _maps(subject: Subject, shown: Shown) -> list[Html]:
    if subject.forecast is None:
        raise ValueError(_way_to_scores(subject))
    if subject.store is None:
        raise ValueError(
            f"the truth is not there ({subject.run.config.data.store}); name the store with"
            " --store PATH and report again"
        )
    body = [_which_channels(subject)]
    for name in subject.shown_channels:
        body.append(
            shown(
                forecast_maps,
                subject.forecast.path,
                subject.store,
                channel=name,
                leads=subject.shown_leads,
                init=subject.init,
            )
        )
    return body


def _time(subject: Subject, shown: Shown) -> list[Html]:
    seconds = subject.seconds
    if not seconds:
        raise ValueError("no stage has left its time yet (stages.jsonl)")
    total = sum(seconds.values())
    rows = [[name, duration(value), value, _percent(value, total)]
            for name, value in seconds.items()]  # fmt: skip
    return [
        shown(curves.stage_bars, seconds),
        table(f"Time by stage, {duration(total)} in all", ["stage", "time", "seconds", "share (%)"],
              rows),
    ]  # fmt: skip


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _memory(subject: Subject, shown: Shown) -> list[Html]:
    own = [(subject.run.config.name, subject.run.metrics)]
    body = [shown(curves.memory_curve, own, profile=subject.run.profile)]
    owners = ((subject.run.profile or {}).get("memory") or {}).get("owners") or {}
    if owners:
        total = sum(owners.values())
        rows = [[name, size / 2**20, _percent(size, total)]
                for name, size in sorted(owners.items(), key=lambda pair: -pair[1])]  # fmt: skip
        body.append(
            table(
                "Who holds the memory at its peak, in the profiled steps",
                ["owner", "MiB", "share (%)"],
                rows,
            )
        )
    return body


def _profile(subject: Subject) -> list[Html]:
    profile = subject.run.profile or {}
    spent = profile.get("seconds", {})
    step = spent.get("step", 0.0)
    rows = [[name.replace("_", " "), 1e3 * value, _percent(value, step)]
            for name, value in spent.items() if value is not None]  # fmt: skip
    body = [
        table(
            f"Where a step goes, mean over {profile.get('steps')} steps from step"
            f" {profile.get('first_step')} on {profile.get('device')}",
            ["part", "milliseconds", "share (%)"], rows,
        )
    ]  # fmt: skip
    if profile.get("operations"):
        body.append(
            table(
                "The operations that take most time",
                ["operation", "milliseconds", "share (%)", "calls"],
                [[o["name"], 1e3 * o["seconds"], 100 * o["share"], round(o["calls"])]
                 for o in profile["operations"][:12]],
            )
        )  # fmt: skip
    if profile.get("advice"):
        body += [tag("h3", "What to try first"), items(profile["advice"])]
    return body


def _warnings(found: list[str]) -> list[Html]:
    if not found:
        return [paragraph("Nothing found.")]
    return [tag("p", text, class_="warning") for text in found]


def _store_words(subject: Subject) -> str:
    if store_command(subject) is None:
        return ""
    return "The first command makes the store: leave it out where the store is still there. "


def _again(subject: Subject) -> list[Html]:
    return [
        paragraph(
            f"{_store_words(subject)}These commands train, forecast, score and report once more,"
            " with the configuration above, in folders of their own. The same versions on the same"
            " kind of device give the same numbers."
        ),
        block("\n".join(commands(subject)), "Commands"),
        paragraph(
            "Numbers of every picture are below it; ",
            inside(tag("code", "graticule report --help")),
            " shows how to choose channels, initial time and runs to compare with.",
        ),
    ]
