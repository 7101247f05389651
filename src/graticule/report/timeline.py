"""The memory of a planned step as a picture: who holds what, from its first event to its last."""

import numpy as np

from graticule.memory.profile import Timeline
from graticule.report.picture import Picture, drawing, figures, svg_of
from graticule.report.strokes import COLOURS, GREY, WIDTH_INCHES, legend

GIB = 2**30
_COLUMNS = 600
_PHASES = {"forward": "forward", "ahead": "first pass", "backward": "backward", "end": "update"}


def timeline_picture(timeline: Timeline, *, title: str, budget: int | None = None) -> Picture:
    """Bytes alive by owner, stacked, in the order of events (not of time); forward and backward
    passes by their leads. budget: a line at so many bytes."""
    total = timeline.levels.sum(1)
    # Of events that lie close the fullest one: the peak stays.
    groups = np.array_split(np.arange(len(total)), min(_COLUMNS, len(total)))
    rows = [int(group[total[group].argmax()]) for group in groups]
    held = timeline.levels[rows] / GIB
    names, held = _largest(timeline, held)
    phases = _phases(timeline, len(total))
    with drawing("memory-plan") as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        axis = figure.add_subplot()
        layers = axis.stackplot(rows, held.T, labels=names, colors=(*COLOURS, GREY)[: len(names)],
                                linewidth=0)  # fmt: skip
        for begin, end, what in phases:
            axis.axvline(begin, color="0.2", linewidth=0.5)
            if end - begin > 0.09 * len(total):
                axis.text((begin + end) / 2, 1.01, what, ha="center", va="bottom", fontsize=8,
                          transform=axis.get_xaxis_transform())  # fmt: skip
        if budget:
            axis.axhline(budget / GIB, color="0.2", linewidth=1, linestyle=(0, (4, 2)))
        axis.set_xlim(0, len(total) - 1)
        axis.set_ylim(0, 1.05 * max(total.max(), budget or 0) / GIB)
        axis.set_xticks([])
        axis.set_xlabel("events of one step, in order")
        axis.set_ylabel("held (GiB)")
        legend(figure, layers[::-1])
        svg = svg_of(figure, "memory-plan")
    peak = total.max() / GIB
    most = ", ".join(
        f"{name} {figures(value)}" for name, value in zip(names, held[held.sum(1).argmax()],
                                                          strict=True)
    )  # fmt: skip
    return Picture(
        name="memory-plan",
        title="Memory of a step",
        caption=(
            f"{title}. What is held on the device (GiB) by owner, from the first event of a step"
            " to its last; vertical lines where a pass begins."
            + (" Dashed: the budget." if budget else "")
        ),
        alt=f"The step holds at most {figures(peak)} GiB, of which (GiB) {most}.",
        svg=svg,
        table=[
            {"event": row, **dict(zip(names, map(float, values), strict=True))}
            for row, values in zip(rows, held, strict=True)
        ],
    )


def _largest(timeline: Timeline, held: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Owners by what they hold at the peak, most first; from the seventh on as others."""
    peak = timeline.levels[timeline.peak]
    order = [place for place in np.argsort(-peak, kind="stable") if held[:, place].any()]
    names, held = [timeline.owners[place] for place in order], held[:, order]
    if len(names) > 7:
        names = [*names[:6], "others"]
        held = np.concatenate([held[:, :6], held[:, 6:].sum(1, keepdims=True)], 1)
    return names, held


def _phases(timeline: Timeline, rows: int) -> list[tuple[int, int, str]]:
    """(first row, last row, name) of passes of one kind that follow each other."""
    found: list[tuple[int, int, str]] = []
    marks = timeline.marks
    for (what, _, begin), after in zip(marks, [*marks[1:], ("", 0, rows)], strict=True):
        name = _PHASES[what]
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], after[2], name)
        else:
            found.append((begin, after[2], name))
    return found
