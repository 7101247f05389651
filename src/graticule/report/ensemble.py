"""Curves of an ensemble's scores: spread and error, ranks, probabilities of events, plumes."""

from collections.abc import Sequence
from typing import Any

import cftime
import numpy as np

from graticule.data.times import UNITS
from graticule.evaluate.ensemble_scores import ONE_MEMBER, EnsembleScores
from graticule.report.picture import (
    Picture,
    corner_line,
    drawing,
    figures,
    lead_words,
    plain,
    safe_name,
    said,
    svg_of,
    weights_line,
)
from graticule.report.strokes import GREY, WIDTH_INCHES, lead_axis, legend, stroke

MOST_LEADS = 3
MOST_LINES = 6
_DATE = "%Y-%m-%d %H:%M"


def spread_curves(ensemble: EnsembleScores, channel: str) -> Picture:
    """The error of the ensemble's mean, its spread and its fair CRPS against lead.

    Of one member the error and the CRPS. ValueError where the channel was never scored.
    """
    i, leads, hours = _scored(ensemble, channel)
    at, units = [lead - 1 for lead in leads], ensemble.channels[i].units
    several = ensemble.num_members > 1
    lines = {"error of the mean": ensemble.rmse()}
    if several:
        lines |= {"spread": ensemble.spread(), "fair CRPS": ensemble.crps("fair")}
        ratio = ensemble.spread_skill()[at, i]
    else:
        lines["CRPS"] = ensemble.crps("standard")
    drawn = {label: values[at, i] for label, values in lines.items()}
    name = safe_name("spread", channel)
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        axis = figure.add_subplot()
        one = lead_axis(axis, hours)
        for place, (label, values) in enumerate(drawn.items()):
            axis.plot(np.array(hours) / one, values, label=label, **stroke(place))
        lowest = min(float(values.min()) for values in drawn.values())
        axis.set_ylim(min(0.0, 1.06 * lowest),
                      1.06 * max(float(v.max()) for v in drawn.values()) or 1.0)  # fmt: skip
        axis.grid(axis="y")
        axis.set_ylabel(f"{channel} ({units})")
        axis.set_title(_corner(ensemble), fontsize=9, loc="left")
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    told = lead_words(hours)
    parts = [
        f"{label} {figures(values[0])} {units} at {told[0]} and {figures(values[-1])} at {told[-1]}"
        for label, values in drawn.items()
    ]
    if several:
        parts.append(
            f"spread over error {said(ratio[0])} at {told[0]} and {said(ratio[-1])} at {told[-1]}"
        )
    return Picture(
        name=name,
        title=f"Spread and error of {channel}",
        caption=(
            f"RMSE of the mean of {_number(ensemble)} and"
            + (" the spread between them, with the factor (m + 1) / m of a mean of m members, and"
               " fair CRPS" if several else " CRPS")
            + f" of {channel} ({units}) against lead, weighted by area, over"
            f" {_pairs(ensemble)}. "
            + ("Spread below the error: the ensemble is too sure."
               if several else f"{ONE_MEMBER.capitalize()}.")
            + f" {weights_line(ensemble.attributes)}"
        ),
        alt=f"{channel}: {'; '.join(parts)}.",
        svg=svg,
        table=[
            {"lead": lead, "lead_hours": hours[k],
             **{label: plain(values[k]) for label, values in drawn.items()},
             **({"spread / error": plain(ratio[k])} if several else {})}
            for k, lead in enumerate(leads)
        ],
    )  # fmt: skip


def ratio_curves(ensemble: EnsembleScores, channels: Sequence[str]) -> Picture:
    """Spread over the error of the mean against lead, a line a channel.

    ValueError of one member, and where no channel has any error to compare with.
    """
    ratio = ensemble.spread_skill()
    places = {name: ensemble.channels.index(name) for name in channels[:MOST_LINES]}
    at = [lead - 1 for lead in ensemble.leads]
    lines = {name: ratio[at, i] for name, i in places.items() if np.isfinite(ratio[at, i]).any()}
    if not lines:
        raise ValueError(
            "the mean of the members has no error at any lead: there is no ratio of spread to error"
        )
    hours = [float(ensemble.lead_seconds[k]) / 3600 for k in at]
    with drawing("spread-error") as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.4), layout="constrained")
        axis = figure.add_subplot()
        one = lead_axis(axis, hours)
        axis.axhline(1, color=GREY, linewidth=1.2, label="members like the truth")
        for place, (name, values) in enumerate(lines.items()):
            axis.plot(np.array(hours) / one, values, label=name, **stroke(place))
        known = np.concatenate([v[np.isfinite(v)] for v in lines.values()])
        axis.set_ylim(max(0.0, min(0.8, known.min() - 0.05)), max(1.2, known.max() + 0.05))
        axis.grid(axis="y")
        axis.set_ylabel("spread / error of the mean")
        axis.set_title(_corner(ensemble), fontsize=9, loc="left")
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, "spread-error")
    told = lead_words(hours)
    return Picture(
        name="spread-error",
        title="Spread over error",
        caption=(
            f"Spread of {_number(ensemble)} over the RMSE of their mean against lead: 1 where the"
            " members are like the truth, below 1 for an ensemble that is too sure. The variance is"
            " averaged over area and times before the root, and has the factor (m + 1) / m. Over"
            f" {_pairs(ensemble)}. {weights_line(ensemble.attributes)}"
        ),
        alt=(
            "Spread over error of the mean: "
            + "; ".join(f"{name} {said(v[0])} at {told[0]} and {said(v[-1])} at {told[-1]}"
                        for name, v in lines.items())
            + "."
        ),
        svg=svg,
        table=[
            {"lead": lead, "lead_hours": hours[k],
             **{name: plain(values[k]) for name, values in lines.items()}}
            for k, lead in enumerate(ensemble.leads)
        ],
    )  # fmt: skip


def rank_histogram(ensemble: EnsembleScores, channel: str, leads: Sequence[int]) -> Picture:
    """How often so many members lie below the truth, at some leads (labels from 1)."""
    i, scored, _ = _scored(ensemble, channel)
    shown = [lead for lead in leads if lead in scored][:MOST_LEADS] or scored[-1:]
    hours = [float(ensemble.lead_seconds[lead - 1]) / 3600 for lead in shown]
    told = lead_words(hours)
    shares, m = ensemble.ranks()[:, i], ensemble.num_members
    name = safe_name("ranks", channel)
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.2), layout="constrained")
        axis = figure.add_subplot()
        edges = np.arange(m + 2) - 0.5
        axis.axhline(1 / (m + 1), color=GREY, linewidth=1.2, label="members like the truth")
        for place, (lead, words) in enumerate(zip(shown, told, strict=True)):
            look = {k: v for k, v in stroke(place).items() if not k.startswith("marker")}
            axis.stairs(shares[lead - 1], edges, label=f"lead {words}", linewidth=1.8, **look)
        axis.set_xlim(edges[0] - 0.02 * (m + 1), edges[-1] + 0.02 * (m + 1))
        axis.set_ylim(0, 1.1 * max(2 / (m + 1), *(float(shares[k - 1].max()) for k in shown)))
        axis.set_xlabel(f"members below the truth, of {m}")
        axis.set_ylabel("share of area and times")
        axis.set_title(f"{channel}; {_corner(ensemble)}", fontsize=9, loc="left")
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    outer = ensemble.outliers()[:, i]
    parts = [
        f"at {words} the truth lies below all members in {shares[lead - 1, 0]:.1%}, above all in"
        f" {shares[lead - 1, -1]:.1%}"
        for lead, words in zip(shown, told, strict=True)
    ]
    return Picture(
        name=name,
        title=f"Rank histogram of {channel}",
        caption=(
            f"Share of the area and times where so many of {_number(ensemble)} lie below the truth"
            f" of {channel}, at lead {', '.join(told)}; land is left out, and among equal values"
            f" the truth's rank is drawn by lot. Level at {1 / (m + 1):.3g} where members are like"
            " the truth; high at both ends for too little spread, in the middle for too much."
            f" {weights_line(ensemble.attributes)}"
        ),
        alt=(
            f"Ranks of the truth of {channel} among {_number(ensemble)}: {'; '.join(parts)}. Beyond"
            f" all members at {told[-1]}: {outer[shown[-1] - 1]:.1%}, where {2 / (m + 1):.1%} is"
            " usual."
        ),
        svg=svg,
        table=[
            {"members_below": k, "expected": 1 / (m + 1),
             **{f"lead {lead}": plain(shares[lead - 1, k]) for lead in shown}}
            for k in range(m + 1)
        ],
    )  # fmt: skip


def reliability_curves(ensemble: EnsembleScores, threshold: int, leads: Sequence[int]) -> Picture:
    """How often an event is where it has a probability, at some leads, against that probability."""
    event = ensemble.sums.thresholds[threshold]
    units = ensemble.channels[event.channel].units
    what = str(event) if units == "1" else f"{event} {units}"
    _, scored, _ = _scored(ensemble, event.name)
    shown = [lead for lead in leads if lead in scored][:MOST_LEADS] or scored[-1:]
    told = lead_words([float(ensemble.lead_seconds[lead - 1]) / 3600 for lead in shown])
    found = ensemble.reliability(threshold)
    brier, parts = ensemble.brier(threshold), ensemble.brier_parts(threshold)
    name = safe_name("reliability", event.name, "above" if event.above else "below",
                     f"{event.value:g}")  # fmt: skip
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.8), layout="constrained")
        axis = figure.add_subplot()
        axis.plot([0, 1], [0, 1], color=GREY, linewidth=1.2, label="as often as it is said")
        for place, (lead, words) in enumerate(zip(shown, told, strict=True)):
            axis.plot(found.probability, found.observed[lead - 1], label=f"lead {words}",
                      **stroke(place))  # fmt: skip
        axis.set_xlim(-0.02, 1.02)
        axis.set_ylim(-0.02, 1.02)
        axis.set_xlabel("share of members with the event")
        axis.set_ylabel("how often it is")
        axis.grid()
        axis.set_title(f"{what}; {_corner(ensemble)}", fontsize=9, loc="left")
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    return Picture(
        name=name,
        title=f"Reliability of {what}",
        caption=(
            f"How often {what} is, against the share of {_number(ensemble)} that have it,"
            f" at lead {', '.join(told)}, weighted by area, over {_pairs(ensemble)}. On the line,"
            f" probabilities can be taken at their word. {weights_line(ensemble.attributes)}"
        ),
        alt=(
            f"Probability of {what}: "
            + "; ".join(
                f"at {words} it is {parts['frequency'][lead - 1]:.1%} of area and times, the Brier"
                f" score is {said(brier[lead - 1])} (always giving its frequency"
                f" {said(parts['uncertainty'][lead - 1])}), of that reliability"
                f" {said(parts['reliability'][lead - 1])}"
                for lead, words in zip(shown, told, strict=True)
            )
            + "."
        ),
        svg=svg,
        table=[
            {"lead": lead, "probability": float(p), "weight": plain(found.weight[lead - 1, k]),
             "observed": plain(found.observed[lead - 1, k])}
            for lead in shown for k, p in enumerate(found.probability)
        ],
    )  # fmt: skip


def plume_curves(ensemble: EnsembleScores, channel: str, init: int = 0) -> Picture:
    """Each member and the truth at one point against lead, from one initial time.

    ValueError where the channel has no value there, or the start no truth.
    """
    i = ensemble.channels.index(channel)
    at = np.flatnonzero(ensemble.scored[init])
    lat, lon = ensemble.point
    where = f"{abs(lat):g}°{'N' if lat >= 0 else 'S'}, {lon:g}°E"
    lines = ensemble.sums.plumes[init, at, i]  # (lead, member + 1)
    if not at.size or not np.isfinite(lines).any():
        raise ValueError(f"no value of {channel} at {where} in the forecast of this start")
    members, truth = lines[:, :-1], lines[:, -1]
    mean, units = members.mean(1), ensemble.channels[i].units
    hours = [float(ensemble.lead_seconds[k]) / 3600 for k in at]
    date = cftime.num2date(ensemble.init_seconds[init], UNITS, ensemble.calendar)
    name = safe_name("plume", channel)
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        axis = figure.add_subplot()
        one = lead_axis(axis, hours)
        x = np.array(hours) / one
        dot: dict[str, Any] = {"marker": "o", "markersize": 4} if len(at) == 1 else {}
        for k in range(ensemble.num_members):
            axis.plot(x, members[:, k], color="#56B4E9", linewidth=0.8, alpha=0.8,
                      label="" if k else "members", **dot)  # fmt: skip
        axis.plot(x, mean, label="their mean", **stroke(0))
        axis.plot(x, truth, label="truth", **(stroke(4) | {"linestyle": "-", "linewidth": 2.2}))
        axis.set_ylabel(f"{channel} ({units})")
        title = f"{where}, from {date:{_DATE}}\n{_corner(ensemble)}"
        axis.set_title(title, fontsize=9, loc="left")
        axis.grid(axis="y")
        legend(figure, axis.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    told = lead_words(hours)
    inside = int(((truth >= members.min(1)) & (truth <= members.max(1))).sum())
    return Picture(
        name=name,
        title=f"Members of {channel} at a point",
        caption=(
            f"{channel} ({units}) of {_number(ensemble)}, their mean and the truth at {where}"
            f" against lead, from {date:{_DATE}}. {weights_line(ensemble.attributes)}"
        ),
        alt=(
            f"{channel} at {where}: "
            + "; ".join(
                f"at {told[k]} members from {figures(members[k].min())} to"
                f" {figures(members[k].max())} {units} with mean {figures(mean[k])}, truth"
                f" {figures(truth[k])}"
                for k in sorted({0, len(at) - 1})
            )
            + f". The truth lies among the members at {inside} of {len(at)} leads."
        ),
        svg=svg,
        table=[
            {"lead": int(k) + 1, "lead_hours": hours[row], "truth": plain(truth[row]),
             "mean": plain(mean[row]),
             **{f"member {n}": plain(members[row, n]) for n in range(ensemble.num_members)}}
            for row, k in enumerate(at)
        ],
    )  # fmt: skip


def _scored(ensemble: EnsembleScores, channel: str) -> tuple[int, list[int], list[float]]:
    """Position of a channel, the leads where it was scored (from 1) and their hours."""
    i = ensemble.channels.index(channel)
    leads = [int(k) + 1 for k in np.flatnonzero(ensemble.weight[..., i].sum(0) > 0)]
    if not leads:
        raise ValueError(f"no cell of {channel} was scored")
    return i, leads, [float(ensemble.lead_seconds[lead - 1]) / 3600 for lead in leads]


def _number(ensemble: EnsembleScores) -> str:
    return "one member" if ensemble.num_members == 1 else f"{ensemble.num_members} members"


def _pairs(ensemble: EnsembleScores) -> str:
    return f"{int(ensemble.scored.sum()):,} forecast fields"


def _corner(ensemble: EnsembleScores) -> str:
    return f"{_number(ensemble)}; {corner_line(ensemble.attributes, ensemble.grid.shape)}"
