"""Curves over the steps of training: losses and memory, several runs one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graticule.report.picture import Picture, drawing, figures, goes, svg_of
from graticule.report.strokes import COLOURS, WIDTH_INCHES, clipped, legend, log_axis, step_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Sequence[tuple[str, list[dict[str, Any]]]]
"""(label, lines of `read_metrics`), in the order in which the runs were trained."""
GROUPS = 240
"""Of steps, over all runs: a run of 100,000 steps stays a picture of some 100 kB."""
MARKS = 60
FEW = 20
"""A running median over fewer steps than these would say no more than the steps do."""
GIB = 2**30


@dataclass(kw_only=True)
class _Course:
    """The losses of a run, by groups of steps that follow each other.

    leads: of the rollout. points: (step, loss), the smallest and the largest of each group.
    median: (step, loss) over `window` steps; NaN where a group has no finite loss. Of a few steps
    the window is 1, and no line is drawn.
    ends: first, largest and last of the median.
    table: one row a group.
    """

    label: str
    leads: int
    steps: int
    window: int
    points: list[tuple[int, float]] = field(default_factory=list)
    median: list[tuple[float, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    ends: tuple[float, float, float] | None = None
    table: list[dict[str, Any]] = field(default_factory=list)


def loss_curves(runs: Runs) -> Picture:
    """Training and validation losses against the step, one panel a run, one scale for all.

    A loss is summed over leads; where runs differ in leads only its mean over leads compares, and
    that is drawn. Steps whose loss is not finite leave a gap and a cross, steps that float16 left
    out a tick. ValueError without a run.
    """
    if not runs:
        raise ValueError("no run was given, so there are no losses to draw")
    courses = [_course(label, lines, max(20, GROUPS // len(runs))) for label, lines in runs]
    drawn = [loss for c in courses for _, loss in [*c.points, *c.validation]]
    logarithmic = bool(drawn) and min(drawn) > 0
    several = any(course.leads > 1 for course in courses)
    with drawing("losses") as figure_class:
        from matplotlib.lines import Line2D

        figure = figure_class(figsize=(WIDTH_INCHES, 3.9), layout="constrained")
        axes, _ = _panels(figure, [(c.label, c.steps) for c in courses])
        for axis, course in zip(axes, courses, strict=True):
            _draw_losses(axis, course)
        axes[0].set_ylabel("loss, mean over leads" if several else "loss")
        if logarithmic:
            margin = max(1.08, (max(drawn) / min(drawn)) ** 0.06)
            log_axis(axes[0], "y", min(drawn) / margin, max(drawn) * margin)
        handles = [
            Line2D([], [], **_POINTS, label="loss of a step"),
        ]  # fmt: skip
        if any(c.window > 1 for c in courses):
            handles.append(Line2D([], [], color=COLOURS[0], label="running median"))
        if any(c.validation for c in courses):
            handles.append(Line2D([], [], **_VALIDATION, label="validation"))
        if any(c.lost for c in courses):
            handles.append(Line2D([], [], **_LOST, label="loss not finite"))
        if any(c.skipped for c in courses):
            handles.append(Line2D([], [], **_SKIPPED, label="skipped (float16)"))
        legend(figure, handles)
        svg = svg_of(figure, "losses")
    widest = max(
        len(lines) // max(1, len(c.table)) for c, (_, lines) in zip(courses, runs, strict=True)
    )
    return Picture(
        name="losses",
        title="Losses",
        caption=(
            f"Loss (normalised, without unit) against the optimizer step of each run"
            f"{', logarithmic' if logarithmic else ''}. "
            + " ".join(
                f"{c.label}: {c.leads} lead{'s' if c.leads > 1 else ''}"
                + (f", line: median over {c.window} steps" if c.window > 1 else "")
                + (f", {len(c.lost)} steps without a finite loss" if c.lost else "")
                + (f", {len(c.skipped)} steps skipped" if c.skipped else "")
                + "."
                for c in courses
            )
            + (" A loss is summed over leads; drawn is its mean over them." if several else "")
            + (" Of steps that lie close the smallest and the largest loss are drawn."
               if widest > 2 else "")
        ),
        alt=" ".join(_loss_words(course, several) for course in courses),
        svg=svg,
        table=[row for course in courses for row in course.table],
    )  # fmt: skip


_POINTS: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.45, "linestyle": "", "marker": "o",
                           "markersize": 2.6, "markeredgewidth": 0}  # fmt: skip
_VALIDATION: dict[str, Any] = {"color": COLOURS[1], "linestyle": (0, (5, 1.5)), "marker": "D",
                               "markersize": 4.5, "linewidth": 1.2}  # fmt: skip
_LOST: dict[str, Any] = {"color": "#A00000", "linestyle": "", "marker": "x", "markersize": 5}
_SKIPPED: dict[str, Any] = {"color": "black", "linestyle": "", "marker": "|", "markersize": 9}


def _course(label: str, lines: list[dict[str, Any]], groups: int) -> _Course:
    leads = max((len(line.get("lead_losses") or [0]) for line in lines), default=1)
    steps = np.array([int(line["step"]) for line in lines], dtype=np.int64)
    losses = np.array([_number(line.get("loss")) for line in lines], dtype=np.float64) / leads
    window = max(5, 2 * (len(lines) // 80) + 1) if len(lines) >= FEW else 1
    last = int(steps[-1]) if len(lines) else 0
    course = _Course(label=label, leads=leads, steps=last, window=window)
    course.validation = [
        (int(line["step"]), _number(line.get("validation_loss")) / leads)
        for line in lines
        if np.isfinite(_number(line.get("validation_loss")))
    ]
    course.lost = [int(step) for step in steps[~np.isfinite(losses)]]
    course.skipped = [int(line["step"]) for line in lines if line.get("skipped")]
    validation = dict(course.validation)
    for part in np.array_split(np.arange(len(lines)), min(groups, max(1, len(lines)))):
        if not part.size:
            continue
        middle = int(part[len(part) // 2])
        around = losses[max(0, middle - window // 2) : middle + window // 2 + 1]
        finite = part[np.isfinite(losses[part])]
        near = around[np.isfinite(around)]
        median = float(np.median(near)) if finite.size and near.size else np.nan
        course.median.append((float(steps[middle]), median))
        ends = {int(part_) for part_ in _extremes(finite, losses)}
        course.points += [(int(steps[i]), float(losses[i])) for i in sorted(ends)]
        held = [validation[s] for s in steps[part].tolist() if s in validation]
        course.table.append(
            {
                "run": label, "first_step": int(steps[part[0]]), "last_step": int(steps[part[-1]]),
                "median": None if np.isnan(median) else median,
                "smallest": float(losses[finite].min()) if finite.size else None,
                "largest": float(losses[finite].max()) if finite.size else None,
                "validation": held[-1] if held else None,
                "not_finite": int(part.size - finite.size),
                "skipped": int(sum(bool(lines[i].get("skipped")) for i in part)),
            }
        )  # fmt: skip
    medians = [median for _, median in course.median if np.isfinite(median)]
    if medians:
        course.ends = medians[0], max(medians), medians[-1]
    return course


def _extremes(finite: np.ndarray, losses: np.ndarray) -> list[int]:
    if not finite.size:
        return []
    return [int(finite[losses[finite].argmin()]), int(finite[losses[finite].argmax()])]


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


def _draw_losses(axis: "Axes", course: _Course) -> None:
    axis.grid(axis="y")
    dots: dict[str, Any] = {
        "color": COLOURS[0],
        "alpha": 0.45,
        "markersize": 2.4,
        "markeredgewidth": 0,
    }
    axis.plot(*_columns(course.points), marker="o", linestyle="", **dots)
    steps, median = _columns(course.median)
    if course.window > 1:
        # A line needs two points: one between two gaps is a dot.
        alone = sum(np.isfinite(median)) == 1
        axis.plot(steps, median, color=COLOURS[0], marker="o" if alone else "")
    kept = _thinned(course.validation, MARKS)
    axis.plot(*_columns(kept), **_VALIDATION)
    foot = axis.get_xaxis_transform()
    for marked, look, height in ((course.lost, _LOST, 0.03), (course.skipped, _SKIPPED, 0.025)):
        if not marked:
            continue
        at = _thinned(marked, MARKS)
        axis.plot(at, [height] * len(at), transform=foot, clip_on=False, **look)
    if not course.points:
        said = "no finite loss" if course.steps else "no step yet"
        axis.text(0.5, 0.5, said, transform=axis.transAxes, ha="center", va="center")


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most`, evenly taken, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _loss_words(course: _Course, several: bool) -> str:
    if course.ends is None:
        return f"{course.label} has no finite loss in {course.steps} steps."
    first, largest, last = course.ends
    what = "loss (mean over leads)" if several else "loss"
    if course.steps == 1:
        text = f"The {what} of {course.label} is {figures(first)} at its one step"
    else:
        between = largest > 1.02 * max(first, last) > 0
        over = f" (running median over {course.window} steps)" if course.window > 1 else ""
        text = (
            f"The {what} of {course.label}{over} {'goes' if between else goes(first, last)} from"
            f" {figures(first)} to {figures(last)} over {course.steps} steps"
        )
        if between:
            text += f" and is {figures(largest)} at its largest in between"
    if course.validation:
        step, loss = course.validation[-1]
        text += f"; the validation loss is {figures(loss)} at step {step}"
        if len(course.validation) > 1:
            text += f", from {figures(course.validation[0][1])} at {course.validation[0][0]}"
    if course.lost:
        text += f"; {len(course.lost)} steps have no finite loss"
    if course.skipped:
        text += f"; float16 skipped {len(course.skipped)} steps"
    return text + "."


def _panels(
    figure: "Figure", runs: Sequence[tuple[str, int]], *, below: bool = False
) -> "tuple[list[Axes], Axes | None]":
    """One a run, side by side on one scale, widths after the roots of the steps; one below all."""
    widths = np.sqrt([max(1, steps) for _, steps in runs])
    widths = np.maximum(widths, 0.25 * widths.max())
    grid = figure.add_gridspec(2 if below else 1, len(runs), width_ratios=widths.tolist())
    axes: list[Axes] = []
    for i, (label, steps) in enumerate(runs):
        axis = figure.add_subplot(grid[0, i], sharey=axes[0] if axes else None)
        share = widths[i] / widths.sum()
        if len(runs) > 1:
            axis.set_title(clipped(label, max(4, int(52 * share))), loc="left")
        step_axis(axis, 2 if share < 0.3 else 5)
        axis.set_xlim(0, max(1, steps) * (1.02 if steps > 1 else 2))
        axis.set_xlabel("step")
        if axes:
            axis.tick_params(labelleft=False)
        axes.append(axis)
    return axes, figure.add_subplot(grid[1, :]) if below else None


def memory_curve(runs: Runs, *, profile: dict[str, Any] | None = None) -> Picture:
    """Peak memory so far by step, GiB, one panel a run; below it one step by owner.

    profile: what `profile.json` holds, or none. ValueError where no line tells its memory.
    """
    told = [
        (label, [(int(line["step"]), float(line["memory_gib"])) for line in lines
                 if line.get("memory_gib") is not None])
        for label, lines in runs
    ]  # fmt: skip
    told = [(label, points) for label, points in told if points]
    if not told:
        raise ValueError("no step of these runs tells its memory")
    timeline = ((profile or {}).get("memory") or {}).get("timeline") or []
    with drawing("memory") as figure_class:
        height = 2.7 + (2.4 if timeline else 0)
        figure = figure_class(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes, owners = _panels(
            figure, [(label, points[-1][0]) for label, points in told], below=bool(timeline)
        )
        rows: list[dict[str, Any]] = []
        for axis, (label, points) in zip(axes, told, strict=True):
            kept = _changes(points)
            axis.plot(*_columns(kept), drawstyle="steps-post", color=COLOURS[0],
                      marker="o" if len(kept) == 1 else "")  # fmt: skip
            axis.grid(axis="y")
            rows += [{"run": label, "step": step, "peak_gib": value} for step, value in kept]
        axes[0].set_ylim(0, 1.1 * max(value for _, points in told for _, value in points))
        axes[0].set_ylabel("peak (GiB)")
        if owners is not None:
            _draw_owners(figure, owners, timeline)
        svg = svg_of(figure, "memory")
    words = " ".join(
        f"Peak memory of {label} is {figures(max(v for _, v in points))} GiB after"
        f" {points[-1][0]} steps, {figures(points[0][1])} GiB after the first."
        for label, points in told
    )
    return Picture(
        name="memory",
        title="Memory",
        caption=(
            "Peak memory so far (GiB) by optimizer step: that of the device's allocator on a GPU,"
            " else of the process."
            + (
                " Below: who holds the memory within one profiled step, stacked."
                if timeline
                else ""
            )
        ),
        alt=words + (_owner_words(timeline) if timeline else ""),
        svg=svg,
        table=rows,
    )


def _changes(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The steps after which the peak changed, and the last step; at most 150 of them."""
    kept = [p for i, p in enumerate(points) if i == 0 or p[1] != points[i - 1][1]]
    kept = _thinned(kept, 150)
    return kept if kept[-1][0] == points[-1][0] else [*kept, points[-1]]


def _by_owner(timeline: list[Any]) -> tuple[list[str], np.ndarray]:
    """Owners, largest first, at most six with the rest as `others`; (owner, time) in GiB."""
    names = list(dict.fromkeys(name for _, owners in timeline for name in owners))
    held = np.array([[owners.get(name, 0) for _, owners in timeline] for name in names]) / GIB
    peak = int(held.sum(0).argmax())
    order = np.argsort(-held[:, peak], kind="stable")
    names, held = [names[i] for i in order], held[order]
    if len(names) > 6:
        names = [*names[:5], "others"]
        held = np.concatenate([held[:5], held[5:].sum(0, keepdims=True)])
    return names, held


def _draw_owners(figure: "Figure", axis: "Axes", timeline: list[Any]) -> None:
    names, held = _by_owner(timeline)
    seconds = np.array([float(t) for t, _ in timeline])
    # Of times that lie close the one with the most memory: the peak stays.
    groups = np.array_split(np.arange(seconds.size), min(120, seconds.size))
    kept = sorted({int(g[held[:, g].sum(0).argmax()]) for g in groups} | {0, seconds.size - 1})
    hatches = ("", "//", "..", "\\\\", "xx", "--")
    for i, layer in enumerate(axis.stackplot(
        seconds[kept], held[:, kept], labels=names, colors=COLOURS, alpha=0.75,
    )):  # fmt: skip
        layer.set_hatch(hatches[i % len(hatches)])
        layer.set_edgecolor("white")
        layer.set_linewidth(0.3)
    axis.set_xlabel("time in the step (s)")
    axis.set_ylabel("held (GiB)")
    axis.set_ylim(bottom=0)
    axis.margins(x=0)
    legend(figure, axis.get_legend_handles_labels()[0], axis)


def _owner_words(timeline: list[Any]) -> str:
    names, held = _by_owner(timeline)
    peak = int(held.sum(0).argmax())
    parts = ", ".join(f"{name} {figures(h)}" for name, h in zip(names, held[:, peak], strict=True))
    return f" Within a step at most {figures(held[:, peak].sum())} GiB are held: {parts}."
