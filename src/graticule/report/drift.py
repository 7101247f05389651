"""Runs of the same thing computed in other orders: their losses, and how they drift apart."""

import math

from graticule.report.picture import Picture, drawing, svg_of
from graticule.report.steps import Runs
from graticule.report.strokes import GREY, WIDTH_INCHES, legend, log_axis, stroke

_LEAST = 1e-9
"""Below this two losses are drawn as if they were so far apart: a logarithm knows no zero."""


def drift_curves(runs: Runs, serial: int) -> Picture:
    """Losses of all runs over each other; below, each one's distance from the first run.

    runs: of as many steps; the first is what others are compared with. serial: how many of the
    first ones ran on one process, and are drawn in grey.
    """
    (label, first), others = runs[0], runs[1:]
    steps = [int(line["step"]) for line in first]
    apart = {
        name: [
            abs(math.log(line["loss"] / reference["loss"]))
            for line, reference in zip(lines, first, strict=True)
        ]
        for name, lines in others
    }
    with drawing("drift") as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 5.4), layout="constrained")
        losses, distances = figure.subplots(2, 1, sharex=True)
        for number, (name, lines) in enumerate(runs):
            style = stroke(number if number < serial else number - serial)
            style |= {"linewidth": 1.1, "marker": "", "label": name}
            if number < serial:
                style["color"] = GREY
            losses.plot(steps, [line["loss"] for line in lines], **style)
            if number:
                distances.plot(steps, [max(d, _LEAST) for d in apart[name]], **style)
        drawn = [line["loss"] for _, lines in runs for line in lines]
        log_axis(losses, "y", min(drawn) / 1.1, max(drawn) * 1.1)
        far = [max(d, _LEAST) for values in apart.values() for d in values]
        log_axis(distances, "y", min(far) / 2, max(far) * 2)
        losses.set_ylabel("loss")
        distances.set_ylabel(f"|log loss - that of {label}|")
        distances.set_xlabel("optimizer step")
        legend(figure, losses.get_lines())
        svg = svg_of(figure, "drift")
    ends = {name: lines[-1]["loss"] for name, lines in runs}
    return Picture(
        name="drift",
        title="The same run in several layouts",
        caption=(
            "Above: loss (normalised, without unit) against the optimizer step. Below: how far each"
            f" run's loss is from that of {label}, as the difference of logarithms. Grey: one"
            " process, which adds up its batch in parts."
        ),
        alt=f"After {steps[-1]} steps the losses are "
        + ", ".join(f"{end:.4f} ({name})" for name, end in ends.items())
        + ". Largest distance from the first run: "
        + ", ".join(f"{max(values):.1e} ({name})" for name, values in apart.items())
        + ".",
        svg=svg,
        table=[
            {"step": step, **{name: lines[i]["loss"] for name, lines in runs}}
            for i, step in enumerate(steps)
        ],
    )
