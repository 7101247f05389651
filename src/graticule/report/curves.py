"""Curves of a report: scores and activity by lead, and time by stage.

Those over the steps of training are in `steps`, those over wavenumbers in `spectra`; both are
offered here too, so that a report finds all curves in one place.
"""

from collections.abc import Mapping
from typing import Any

from graticule.report.picture import (
    Picture,
    drawing,
    figures,
    goes,
    lead_words,
    safe_name,
    short_weights,
    svg_of,
)
from graticule.report.spectra import spectra_curves
from graticule.report.steps import loss_curves, memory_curve
from graticule.report.strokes import (
    COLOURS,
    GREY,
    WIDTH_INCHES,
    clipped,
    lead_axis,
    legend,
    reference_stroke,
    stroke,
)
from graticule.report.subject import grouping

__all__ = [
    "activity_curves", "loss_curves", "memory_curve", "score_curves", "spectra_curves",
    "stage_bars",
]  # fmt: skip

REFERENCES = ("persistence", "climatology")
MOST_LINES = 6


def score_curves(
    scores: dict[str, Any],
    *,
    channel: str = "normalised",
    others: Mapping[str, dict[str, Any]] | None = None,
) -> Picture:
    """RMSE against lead of a forecast, its references (drawn first, grey) and other forecasts.

    scores, others: `Scores.to_dict()`, others by label. The axis begins at 0, for an RMSE is a
    distance, unless all of it would lie in the upper third.
    ValueError where one of them has no such channel.
    """
    lines = {name: _series(scores, channel, source=name) for name in ("model", *REFERENCES)}
    rivals = {}
    for label, theirs in (others or {}).items():
        if label in lines:
            raise ValueError(f"another run cannot be labelled {label}: give it a label of its own")
        try:
            rivals[label] = _series(theirs, channel)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
    hours, units = _hours(scores), _units(scores, channel)
    for theirs in (others or {}).values():
        hours |= {lead: hour for lead, hour in _hours(theirs).items() if lead not in hours}
    name = safe_name("scores", *([] if channel == "normalised" else [channel]))
    drawn = {**{r: lines[r] for r in REFERENCES}, **rivals, "model": lines["model"]}
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 4.0), layout="constrained")
        axis = figure.add_subplot()
        one = lead_axis(axis, [hours[lead] for line in drawn.values() for lead in line])
        for label, line in drawn.items():
            if label in REFERENCES:
                look = reference_stroke(label)
            elif label == "model":
                look = stroke(0) | {"linewidth": 2.4, "zorder": 4}
            else:
                look = stroke(1 + list(rivals).index(label))
            dot = {"marker": "o", "markersize": 4} if len(line) == 1 else {}
            axis.plot([hours[k] / one for k in line], list(line.values()), label=label,
                      **{**look, **dot})  # fmt: skip
        values = [value for line in drawn.values() for value in line.values()]
        low, high = min(values), max(values)
        if low > 0.7 * high and high > low:
            axis.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
        else:
            axis.set_ylim(0, 1.06 * high or 1.0)
        axis.grid(axis="y")
        axis.set_ylabel("normalised RMSE" if channel == "normalised" else f"RMSE ({units})")
        axis.set_title(_corner(scores), fontsize=9, loc="left")
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    leads = sorted({lead for line in drawn.values() for lead in line})
    return Picture(
        name=name,
        title="RMSE against lead" + ("" if channel == "normalised" else f": {channel}"),
        caption=(
            ("Normalised RMSE: mean over channels of RMSE / training standard deviation"
             if channel == "normalised" else f"RMSE of {channel} ({units})")
            + f", weighted by area, {_scored(scores)}. {_weights(scores)}"
            f" References: persistence and the climatology ({grouping(scores)})."
        ),
        alt=_score_words(channel, units, lines, rivals, hours),
        svg=svg,
        table=[
            {"lead": lead, "lead_hours": hours[lead],
             **{label: line.get(lead) for label, line in drawn.items()}}
            for lead in leads
        ],
    )  # fmt: skip


def _series(
    scores: dict[str, Any], channel: str, quantity: str = "rmse", source: str = "model"
) -> dict[int, float]:
    """By lead, where there is a number; ValueError where there is none at all."""
    found = {
        int(row["lead"]): float(row[quantity])
        for row in scores["rows"]
        if row["source"] == source and row["channel"] == channel and row.get(quantity) is not None
    }
    if not found:
        names = list(dict.fromkeys(row["channel"] for row in scores["rows"]))
        raise ValueError(
            f"these scores hold no {quantity} of {channel} ({source}); there are"
            f" {', '.join(names) or 'none'}"
        )
    return dict(sorted(found.items()))


def _hours(scores: dict[str, Any]) -> dict[int, float]:
    return {int(row["lead"]): float(row["lead_hours"]) for row in scores["rows"]}


def _units(scores: dict[str, Any], channel: str) -> str:
    return next(row["units"] for row in scores["rows"] if row["channel"] == channel)


def _fingerprint(scores: dict[str, Any]) -> str:
    return str(scores["provenance"].get("forecast", {}).get("run_fingerprint", ""))


def _weights(scores: dict[str, Any]) -> str:
    return f"Weights {short_weights(_fingerprint(scores))}."


def _scored(scores: dict[str, Any]) -> str:
    region = scores.get("region")
    where = "everywhere" if not region else f"region {', '.join(f'{edge:g}' for edge in region)}"
    return f"{scores['pairs']} forecast fields, {where}"


def _corner(scores: dict[str, Any]) -> str:
    return f"weights {short_weights(_fingerprint(scores))}; {_scored(scores)}"


def _score_words(
    channel: str,
    units: str,
    lines: dict[str, dict[int, float]],
    rivals: dict[str, dict[int, float]],
    hours: dict[int, float],
) -> str:
    leads = sorted({lead for line in [*lines.values(), *rivals.values()] for lead in line})
    at = dict(zip(leads, lead_words([hours[lead] for lead in leads]), strict=True))

    def course(line: dict[int, float]) -> str:
        first, last = min(line), max(line)
        if first == last:
            return f"is {figures(line[first])} at {at[first]}"
        return (
            f"{goes(line[first], line[last])} from {figures(line[first])} at"
            f" {at[first]} to {figures(line[last])} at {at[last]}"
        )

    model = lines["model"]
    what = "The normalised RMSE" if channel == "normalised" else f"The RMSE of {channel} ({units})"
    parts = [f"{what} of the model {course(model)}"]
    for name in REFERENCES:
        parts.append(f"that of {name} {course(lines[name])}")
    for name in REFERENCES:
        parts.append(f"the model is below {name} at {_how_many(model, lines[name])}")
    text = "; ".join(parts) + ". "
    for label, theirs in rivals.items():
        shared = [lead for lead in model if lead in theirs]
        text += f"That of {label} {course(theirs)}"
        if shared:
            last = shared[-1]
            text += f"; the model is {_compared(model[last], theirs[last])} it at {at[last]}"
        text += ". "
    return text.strip()


def _compared(ours: float, theirs: float) -> str:
    if not theirs or abs(ours / theirs - 1) < 0.005:
        return "level with"
    return f"{abs(1 - ours / theirs):.0%} {'below' if ours < theirs else 'above'}"


def _how_many(ours: dict[int, float], theirs: dict[int, float]) -> str:
    shared = [lead for lead in ours if lead in theirs]
    below = sum(ours[lead] < theirs[lead] for lead in shared)
    if len(shared) == 1:
        return "the one lead" if below else "no lead"
    return {0: "no lead", len(shared): "every lead"}.get(below, f"{below} of {len(shared)} leads")


def activity_curves(scores: dict[str, Any]) -> Picture:
    """How much a forecast's anomalies vary over how much the truth's do, by lead and channel.

    Of more than six channels those farthest from 1 at the last lead are named, the rest grey.
    ValueError where the scores hold no activity.
    """
    names = list(dict.fromkeys(row["channel"] for row in scores["rows"]))
    lines: dict[str, dict[int, float]] = {}
    for name in names:
        if any(row.get("activity_ratio") is not None for row in scores["rows"]
               if row["channel"] == name and row["source"] == "model"):  # fmt: skip
            lines[name] = _series(scores, name, "activity_ratio")
    if not lines:
        raise ValueError("these scores hold no activity; `graticule evaluate --force` adds it")
    hours = _hours(scores)
    far = sorted(lines, key=lambda name: -abs(list(lines[name].values())[-1] - 1))
    named = [name for name in lines if name in far[:MOST_LINES]]
    with drawing("activity") as figure_class:
        from matplotlib.lines import Line2D

        figure = figure_class(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        axis = figure.add_subplot()
        one = lead_axis(axis, [hours[lead] for line in lines.values() for lead in line])
        axis.axhline(1, color=GREY, linewidth=1.2, label="as active as the truth")
        for name in lines:
            look = (
                stroke(named.index(name))
                if name in named
                else {"color": "0.8", "linewidth": 0.8, "zorder": 1.2}
            )
            label = name if name in named else ""
            axis.plot([hours[k] / one for k in lines[name]], list(lines[name].values()),
                      label=label, **look)  # fmt: skip
        values = [value for line in lines.values() for value in line.values()]
        axis.set_ylim(min(0.9, min(values) - 0.03), max(1.1, max(values) + 0.03))
        axis.grid(axis="y")
        axis.set_ylabel("activity / truth's")
        axis.set_title(_corner(scores), fontsize=9, loc="left")
        handles = axis.get_legend_handles_labels()[0]
        if len(named) < len(lines):
            rest = f"{len(lines) - len(named)} other channels"
            handles.append(Line2D([], [], color="0.8", linewidth=0.8, label=rest))
        legend(figure, handles)
        svg = svg_of(figure, "activity")
    at = dict(zip(hours, lead_words(list(hours.values())), strict=True))
    told = [
        f"{name} {figures(line[min(line)])} at {at[min(line)]} and {figures(line[max(line)])} at"
        f" {at[max(line)]}"
        for name, line in ((name, lines[name]) for name in named)
    ]
    last = [list(line.values())[-1] for line in lines.values()]
    smooth, lively = sum(v < 0.95 for v in last), sum(v > 1.05 for v in last)
    return Picture(
        name="activity",
        title="Forecast activity",
        caption=(
            "Standard deviation of the forecast's anomalies from the climatology over that of the"
            f" truth's, by lead: 1 as active, below 1 smoother. {_scored(scores)}."
            f" {_weights(scores)}"
        ),
        alt=(
            f"Activity over the truth's: {'; '.join(told)}. At the last lead {smooth} of"
            f" {len(lines)} channels are smoother than the truth by more than 5 %, {lively} more"
            " active."
        ),
        svg=svg,
        table=[
            {"lead": lead, "lead_hours": hours[lead],
             **{name: line.get(lead) for name, line in lines.items()}}
            for lead in sorted(hours)
        ],
    )  # fmt: skip


def stage_bars(seconds: Mapping[str, float]) -> Picture:
    """Wall time of each stage as a bar, in the order given. ValueError without a stage."""
    if not seconds:
        raise ValueError("no stage was timed")
    names, spent = list(seconds), [float(value) for value in seconds.values()]
    longest, total = max(spent), sum(spent)
    one, unit = (1, "s") if longest < 120 else (60, "min") if longest < 7200 else (3600, "h")
    with drawing("stages") as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 0.36 * len(names) + 0.8), layout="constrained")
        axis = figure.add_subplot()
        bars = axis.barh(range(len(names)), [value / one for value in spent], color=COLOURS[0],
                         height=0.62, tick_label=[clipped(name, 24) for name in names])  # fmt: skip
        axis.bar_label(bars, [_time_words(value) for value in spent], padding=4)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.3 * longest / one or 1.0)
        axis.set_xlabel(f"wall time ({unit})")
        axis.tick_params(axis="y", length=0)
        svg = svg_of(figure, "stages")
    top = names[spent.index(longest)]
    share = f" ({longest / total:.0%})" if total else ""
    return Picture(
        name="stages",
        title="Time by stage",
        caption=f"Wall time of each stage; {_time_words(total)} together.",
        alt=(
            f"The stages took {_time_words(total)} together, the longest {top} with"
            f" {_time_words(longest)}{share}: "
            + ", ".join(f"{n} {_time_words(v)}" for n, v in zip(names, spent, strict=True))
            + "."
        ),
        svg=svg,
        table=[{"stage": n, "seconds": v} for n, v in zip(names, spent, strict=True)],
    )


def _time_words(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
