"""Curves of an ocean's scores by depth: errors and mean profiles."""

from typing import TYPE_CHECKING

import numpy as np

from graticule.evaluate.ocean import OceanScores
from graticule.report.picture import (
    Picture,
    corner_line,
    drawing,
    plain,
    safe_name,
    said,
    svg_of,
    weights_line,
)
from graticule.report.strokes import (
    GREY,
    WIDTH_INCHES,
    legend,
    reference_stroke,
    stroke,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def depth_curves(ocean: OceanScores, variable: str) -> Picture:
    """RMSE of the forecast and its references, and R2, of a variable against depth.

    Over all initial times and leads. ValueError where it has no levels or was never scored.
    """
    place, depth = _levels(ocean, variable)
    rmse = {source: ocean.rmse(source, overall=True)[place]
            for source in ("model", "persistence", "climatology")}  # fmt: skip
    r2 = {
        "R2": ocean.r2(overall=True)[place],
        "R2 against climatology": ocean.r2("climatology", overall=True)[place],
    }
    units, name = ocean.column.channels[place[0]].units, safe_name("depth", variable)
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for source in ("persistence", "climatology"):
            left.plot(rmse[source], depth, label=source, **reference_stroke(source))
        left.plot(rmse["model"], depth, label="model", **stroke(0))
        left.set_xlim(0, 1.06 * max(np.nanmax(v, initial=0) for v in rmse.values()) or 1.0)
        left.set_xlabel(f"RMSE ({units})")
        for i, (label, values) in enumerate(r2.items()):
            right.plot(np.maximum(values, -1), depth, label=label, **stroke(i + 1))
        right.axvline(0, color=GREY, linewidth=1)
        right.set_xlim(max(-1.04, min([0, *(np.nanmin(v, initial=0) for v in r2.values())]) - 0.04),
                       1.04)  # fmt: skip
        right.set_xlabel("R2")
        _depth_axis(left, depth)
        for axis in (left, right):
            axis.grid()
        left.set_title(corner_line(ocean.attributes, ocean.grid.shape), fontsize=9, loc="left")
        handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        legend(figure, handles)
        svg = svg_of(figure, name)
    undefined = int(np.isnan(r2["R2"]).sum())
    cut = any((values < -1).any() for values in r2.values())
    return Picture(
        name=name,
        title=f"Errors of {variable} by depth",
        caption=(
            f"RMSE ({units}; of each time, by area over the sea of each level, then the mean over"
            f" times) and R2 of {variable} against depth, over {_pairs(ocean)}. R2 is 1 minus the"
            " squared error over the variance of the truth around its mean; against climatology,"
            f" over the squared anomaly. Climatology by {ocean.climatology}."
            f" {weights_line(ocean.attributes)}"
            + (" R2 below -1 is drawn at -1." if cut else "")
            + (f" R2 is not defined on {undefined} levels, where the truth does not vary."
               if undefined else "")
        ),
        alt=(
            f"{variable} by depth: "
            + "; ".join(
                f"at {depth[k]:g} m RMSE {said(rmse['model'][k])} {units} (persistence"
                f" {said(rmse['persistence'][k])}, climatology"
                f" {said(rmse['climatology'][k])}), R2 {said(r2['R2'][k])} and against"
                f" climatology {said(r2['R2 against climatology'][k])}"
                for k in _few(len(depth))
            )
            + "."
        ),
        svg=svg,
        table=[
            {"depth_m": float(depth[k]), **{f"rmse_{s}": plain(v[k]) for s, v in rmse.items()},
             "r2": plain(r2["R2"][k]), "r2_climatology": plain(r2["R2 against climatology"][k])}
            for k in range(len(depth))
        ],
    )  # fmt: skip


def profile_curves(ocean: OceanScores, variable: str) -> Picture:
    """The mean of forecast and truth over sea and time against depth, and their difference."""
    place, depth = _levels(ocean, variable)
    model, truth = (ocean.profile(source)[place] for source in ("model", "truth"))
    units, name = ocean.column.channels[place[0]].units, safe_name("profile", variable)
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.plot(truth, depth, label="truth", color=GREY, linewidth=3.2)
        left.plot(model, depth, label="model", **stroke(0))
        left.set_xlabel(f"mean ({units})")
        right.axvline(0, color=GREY, linewidth=1)
        right.plot(model - truth, depth, label="model - truth", **stroke(1))
        right.set_xlabel(f"difference ({units})")
        _depth_axis(left, depth)
        for axis in (left, right):
            axis.grid()
        left.set_title(corner_line(ocean.attributes, ocean.grid.shape), fontsize=9, loc="left")
        handles = [*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        legend(figure, handles)
        svg = svg_of(figure, name)
    return Picture(
        name=name,
        title=f"Mean profile of {variable}",
        caption=(
            f"Mean of {variable} ({units}) over the sea of each level, by area, and over"
            f" {_pairs(ocean)}; right, forecast - truth. {weights_line(ocean.attributes)}"
        ),
        alt=(
            f"Mean of {variable}: "
            + "; ".join(
                f"at {depth[k]:g} m {said(model[k])} {units} in the forecast and"
                f" {said(truth[k])} in the truth"
                for k in _few(len(depth))
            )
            + "."
        ),
        svg=svg,
        table=[
            {"depth_m": float(d), "model": plain(m), "truth": plain(t),
             "difference": plain(m - t)}
            for d, m, t in zip(depth, model, truth, strict=True)
        ],
    )  # fmt: skip


def _levels(ocean: OceanScores, variable: str) -> tuple[list[int], np.ndarray]:
    place = ocean.column.profiles.get(variable)
    if not place:
        raise ValueError(
            f"{variable} has no levels in metres; there are"
            f" {', '.join(ocean.column.profiles) or 'none'}"
        )
    if not ocean.weight[..., place].any():
        raise ValueError(f"no cell of {variable} was scored on any level")
    return place, ocean.column.depth[place]


def _depth_axis(axis: "Axes", depth: np.ndarray) -> None:
    """The surface on top; on a root scale where levels crowd there."""
    if depth[-1] > 8 * max(depth[0], 1) and len(depth) > 4:
        axis.set_yscale("function", functions=(
            lambda d: np.sqrt(np.maximum(d, 0)), lambda r: np.asarray(r) ** 2))  # fmt: skip
        # Of the levels those that lie about evenly on this scale.
        even = np.linspace(0, np.sqrt(depth[-1]), 8)
        near = np.abs(np.sqrt(depth)[:, None] - even).argmin(0)
        ticks = [float(depth[k]) for k in np.unique(near)]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ylim(1.04 * float(depth[-1]) or 1.0, 0)
    axis.set_ylabel("depth (m)")


def _few(number: int) -> list[int]:
    """Levels that are told in words: the first, the middle one, the last."""
    return sorted({0, number // 2, number - 1})


def _pairs(ocean: OceanScores) -> str:
    return f"{int(ocean.weight.any(2).sum()):,} forecast fields"
