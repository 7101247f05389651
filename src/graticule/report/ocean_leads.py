"""Curves of an ocean's scores over leads: heat and salt, means, and the range of values.

Leads are real days: over 29 February a step of five-day means has six.
"""

from collections.abc import Sequence

import numpy as np

from graticule.evaluate.ocean import DENSITY, HEAT_CAPACITY, Content, OceanScores
from graticule.report.picture import (
    Picture,
    corner_line,
    drawing,
    goes,
    lead_words,
    plain,
    safe_name,
    said,
    svg_of,
    weights_line,
)
from graticule.report.strokes import (
    GREY,
    WIDTH_INCHES,
    lead_axis,
    legend,
    reference_stroke,
    stroke,
)

Z = 1e21
"""A zettajoule in J."""
PETA = 1e15
"""10^12 tonnes in kg."""
MOST_POINTS = 400
"""Of a line over leads: a long rollout is thinned evenly, its first and last lead stay."""


def content_curves(ocean: OceanScores, kind: str) -> Picture:
    """Heat or salt by range of depths over leads, and the forecast's error.

    kind: `temperature` or `salinity`. Of several initial times the mean; the band of the error
    reaches from the least of them to the largest. ValueError where there is no such content.
    """
    contents = [c for c in ocean.content(kind) if np.isfinite(c.error).any()]
    if not contents:
        raise ValueError(f"no range of depths has any {kind} that was scored")
    what, one, unit = (
        ("heat content", Z, "ZJ") if kind == "temperature" else ("salt content", PETA, "10¹⁵ kg")
    )
    leads = _thinned(ocean)
    at = [lead - 1 for lead in leads]
    days = ocean.elapsed_days[at]
    name = safe_name("content", kind)
    lines = {c.range.name: [line / one for line in _by_lead(c, at)] for c in contents}
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 5.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        day = lead_axis(lower, (24 * days).tolist()) / 24
        for i, (label, (model, truth, error, low, high)) in enumerate(lines.items()):
            look = stroke(i) | {"markevery": max(1, len(at) // 8)}
            upper.plot(days / day, truth - truth[0], color=GREY, linewidth=3.2, zorder=1.5,
                       label="truth" if i == 0 else "")  # fmt: skip
            upper.plot(days / day, model - truth[0], label=f"model, {label}", **look)
            lower.fill_between(days / day, low, high, color=look["color"], alpha=0.15, linewidth=0)
            lower.plot(days / day, error, **look)
        lower.axhline(0, color=GREY, linewidth=1)
        upper.set_ylabel(f"change ({unit})")
        lower.set_ylabel(f"model - truth ({unit})")
        upper.set_title(corner_line(ocean.attributes, ocean.grid.shape), fontsize=9, loc="left")
        for axis in (upper, lower):
            axis.grid()
        legend(figure, upper.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    words = lead_words([float(d) * 24 for d in days])
    first, last = words[0], words[-1]
    return Picture(
        name=name,
        title=what.capitalize(),
        caption=(
            f"{what.capitalize()} ({unit}) by range of depths against lead, above as the change"
            f" from the truth at {first}, below forecast - truth, mean over"
            f" {ocean.valid_seconds.shape[0]} initial times (band: from the least to the largest)."
            f" Density {DENSITY:g} kg m-3"
            + (f", heat capacity {HEAT_CAPACITY:g} J kg-1 K-1" if kind == "temperature" else "")
            + "; land on a level is left out of it."
            f" {weights_line(ocean.attributes)}"
        ),
        alt=(
            f"{what.capitalize()}: "
            + "; ".join(
                f"{label}, forecast minus truth {goes(line[2][0], line[2][-1])} from"
                f" {said(line[2][0])} {unit} at {first} to {said(line[2][-1])} {unit} at"
                f" {last}, while the truth changes by {said(line[1][-1] - line[1][0])} {unit}"
                for label, line in lines.items()
            )
            + "."
        ),
        svg=svg,
        table=[
            {"lead": lead, "days": float(days[k]),
             **{f"{label} {source}": plain(line[j][k]) for label, line in lines.items()
                for j, source in enumerate(("model", "truth", "error"))}}
            for k, lead in enumerate(leads)
        ],
    )  # fmt: skip


def mean_curves(ocean: OceanScores, channel: str) -> Picture:
    """The mean over the sea of forecast, truth and climatology against lead."""
    i = ocean.column.channels.index(channel)
    leads = _thinned(ocean)
    at = [lead - 1 for lead in leads]
    days, units = ocean.elapsed_days[at], ocean.column.channels[i].units
    lines = {source: ocean.mean_by_lead(source)[at, i]
             for source in ("climatology", "truth", "model")}  # fmt: skip
    if not np.isfinite(lines["truth"]).any():
        raise ValueError(f"no cell of {channel} was scored: there is no mean")
    name = safe_name("mean", channel)
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.2), layout="constrained")
        axis = figure.add_subplot()
        day = lead_axis(axis, (24 * days).tolist()) / 24
        looks = {
            "climatology": reference_stroke("climatology"),
            "truth": {"color": GREY, "linewidth": 3.2},
            "model": stroke(0) | {"markevery": max(1, len(at) // 8)},
        }
        for source, values in lines.items():
            axis.plot(days / day, values, label=source, **looks[source])
        axis.set_ylabel(f"mean ({units})")
        axis.set_title(
            f"{channel}; {corner_line(ocean.attributes, ocean.grid.shape)}", fontsize=9, loc="left"
        )
        axis.grid()
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    told = lead_words([float(d) * 24 for d in days])
    model, truth = lines["model"], lines["truth"]
    return Picture(
        name=name,
        title=f"Mean of {channel} over leads",
        caption=(
            f"Mean of {channel} ({units}) over its sea, by area, against lead, over"
            f" {ocean.valid_seconds.shape[0]} initial times; the climatology is by"
            f" {ocean.climatology}. The numbers below hold both without their season, less the"
            f" climatology. {weights_line(ocean.attributes)}"
        ),
        alt=(
            f"The mean of {channel} is {said(model[0])} {units} at {told[0]} in the forecast"
            f" and {said(truth[0])} in the truth, and {said(model[-1])} and"
            f" {said(truth[-1])} at {told[-1]}."
        ),
        svg=svg,
        table=[
            {"lead": lead, "days": float(days[k]),
             **{source: plain(values[k]) for source, values in lines.items()},
             "model_deseasonalised": plain(model[k] - lines["climatology"][k]),
             "truth_deseasonalised": plain(truth[k] - lines["climatology"][k])}
            for k, lead in enumerate(leads)
        ],
    )  # fmt: skip


def range_curves(ocean: OceanScores) -> Picture:
    """Least and largest value of each variable against lead, in its range of training values.

    0 is the least and 1 the largest training value of a channel; of a variable with levels, the
    ones that lie farthest out are drawn. ValueError where no channel has a range.
    """
    least, most = ocean.sums.trained
    span = np.where(most > least, most - least, np.nan)
    low, high = ((bound - least) / span for bound in ocean.extremes("model"))
    at = [lead - 1 for lead in _thinned(ocean)]
    days = ocean.elapsed_days[at]
    variables: dict[str, list[int]] = {}
    for i, channel in enumerate(ocean.column.channels):
        if np.isfinite(high[at, i]).all():
            variables.setdefault(channel.variable, []).append(i)
    if not variables:
        raise ValueError("no channel varies in the training times: there is no range to keep to")
    lines = {name: (low[at][:, place].min(1), high[at][:, place].max(1))
             for name, place in variables.items()}  # fmt: skip
    with drawing("range") as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.8), layout="constrained")
        axis = figure.add_subplot()
        day = lead_axis(axis, (24 * days).tolist()) / 24
        axis.axhspan(0, 1, color="0.93", zorder=0)
        for i, (name, pair) in enumerate(lines.items()):
            look = stroke(i) | {"markevery": max(1, len(at) // 8)}
            for j, line in enumerate(pair):
                axis.plot(days / day, line, label="" if j else name, **look)
        ends = np.concatenate([line for pair in lines.values() for line in pair])
        axis.set_ylim(
            max(-2.0, min(-0.1, ends.min() - 0.05)), min(3.0, max(1.1, ends.max() + 0.05))
        )
        axis.set_ylabel("share of the training range")
        axis.set_title(corner_line(ocean.attributes, ocean.grid.shape), fontsize=9, loc="left")
        axis.grid(axis="y")
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, "range")
    beyond, true = (_worst(ocean.beyond(source), variables) for source in ("model", "truth"))
    told = lead_words([float(days[-1]) * 24])[0]
    inside = [name for name, value in beyond.items() if value == 0]
    rest = ", ".join(
        f"{name} by up to {value:.1%} of it (the truth by {true[name]:.1%})"
        for name, value in beyond.items()
        if value > 0
    )
    return Picture(
        name="range",
        title="Values within their training range",
        caption=(
            "Least and largest value over sea and initial times by lead, where 0 and 1 (shaded)"
            " are the least and the largest value of the channel in the training times that the"
            " climatology of these dates comes from; of a variable the level that lies farthest"
            f" out. {weights_line(ocean.attributes)}"
            + (" The axis is cut at -2 and 3." if ends.min() < -2 or ends.max() > 3 else "")
        ),
        alt=(
            f"Over {told}, within the range of their training values: {', '.join(inside) or 'none'}"
            f"; outside of it: {rest or 'none'}."
        ),
        svg=svg,
        table=[
            {"lead": lead, "days": float(days[k]),
             **{f"{name} {end}": plain(pair[j][k]) for name, pair in lines.items()
                for j, end in enumerate(("least", "largest"))}}
            for k, lead in enumerate(_thinned(ocean))
        ],
    )  # fmt: skip


def _worst(beyond: np.ndarray, variables: dict[str, list[int]]) -> dict[str, float]:
    """By variable, the largest share over leads and levels."""
    return {
        name: float(np.nanmax(beyond[:, place], initial=0)) for name, place in variables.items()
    }


def _by_lead(content: Content, at: Sequence[int]) -> list[np.ndarray]:
    """(lead,) each: mean of model, truth and error over initial times; least and largest error.

    Over the initial times that have a truth at a lead; a lead with none is not among `at`.
    """
    some = np.isfinite(content.error[:, at])
    number = np.maximum(some.sum(0), 1)
    model, truth = (
        np.where(some, values[:, at], 0).sum(0) / number
        for values in (content.model, content.truth)
    )
    error = content.error[:, at]
    low = np.where(some, error, np.inf).min(0)
    return [model, truth, model - truth, low, np.where(some, error, -np.inf).max(0)]


def _thinned(ocean: OceanScores) -> list[int]:
    places = np.linspace(0, len(ocean.leads) - 1, min(MOST_POINTS, len(ocean.leads)))
    return [ocean.leads[place] for place in np.unique(places.round().astype(int))]
