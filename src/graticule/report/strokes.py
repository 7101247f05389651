"""How curves look: colours with dashes and markers, axes, legends outside of the data."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graticule.report.picture import lead_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 5.8
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9")
"""Told apart by colour-blind readers; Okabe and Ito 2008."""
GREY = "0.55"
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1)), (0, (8, 2)))
_MARKERS = "osD^vP"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def stroke(position: int) -> dict[str, Any]:
    """Colour, dash and marker of a line, so that print in grey tells them apart too."""
    at = position % len(COLOURS)
    return {"color": COLOURS[at], "linestyle": _DASHES[at], "marker": _MARKERS[at],
            "markersize": 4.5}  # fmt: skip


def reference_stroke(name: str) -> dict[str, Any]:
    """Grey, and wide enough to be seen under a line that lies on it."""
    dash = {"persistence": (0, (4, 1.2)), "climatology": (0, (1, 1))}.get(name, "-")
    return {"color": GREY, "linestyle": dash, "linewidth": 3.2, "zorder": 1.5}


def clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"


def legend(figure: "Figure", handles: Sequence[Any], axis: "Axes | None" = None) -> None:
    """Outside of the data, above all axes or above `axis`, in as many columns as fit."""
    labels = [clipped(str(handle.get_label()), 48) for handle in handles]
    # Above one axis the legend begins where the axis does, right of its labels.
    room = figure.get_figwidth() * 72 - (10 if axis is None else 60)
    fitting = (n for n in range(len(labels), 0, -1) if _legend_points(labels, n) <= room)
    look: dict[str, Any] = {
        "ncols": next(fitting, 1), "handlelength": 2.2, "columnspacing": 1.2, "borderpad": 0.1,
        "labelspacing": 0.3,
    }  # fmt: skip
    if axis is None:
        figure.legend(handles, labels, loc="outside upper left", **look)
    else:
        axis.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), **look)


def _legend_points(labels: Sequence[str], columns: int) -> float:
    """About how wide a legend is; matplotlib splits labels evenly over all of the columns."""
    parts = np.array_split(np.arange(len(labels)), columns)
    widest = [max(len(labels[i]) for i in part) for part in parts if part.size]
    return sum(5.9 * letters + 42 for letters in widest)


def lead_axis(axis: "Axes", hours: Sequence[float]) -> float:
    """Label x as lead from 0, in hours, days or months by their range; hours of one."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    unit, one = lead_unit(hours)
    longest = max(hours) / one
    axis.set_xlabel(f"lead ({unit}s)")
    axis.set_xlim(0, 1.03 * longest)
    if unit == "hour":
        step = next((s for s in (1, 2, 3, 6, 12, 24) if longest / s <= 10.5), 24)
        axis.xaxis.set_major_locator(MultipleLocator(step))
    else:
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return one


def step_axis(axis: "Axes", ticks: int) -> None:
    """Steps as 200 or 40k."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{v / 1000:g}k" if abs(v) >= 10_000 else f"{v:g}")
    )


def log_axis(axis: "Axes", which: str, low: float, high: float) -> None:
    """A logarithmic x or y from `low` to `high`, with as many numbers as there is room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    side = axis.xaxis if which == "x" else axis.yaxis
    decades = float(np.log10(high / low))
    subs: tuple[float, ...] = (1.0, 2.0, 5.0) if decades < 2.6 else (1.0,)
    if decades < 0.8:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    (axis.set_xscale if which == "x" else axis.set_yscale)("log")
    (axis.set_xlim if which == "x" else axis.set_ylim)(low, high)
    side.set_major_locator(LogLocator(subs=subs, numticks=8 if decades > 5 else 15))
    side.set_major_formatter(FuncFormatter(_power_of_ten))
    side.set_minor_formatter(NullFormatter())


def _power_of_ten(value: float, _: Any = None) -> str:
    if value <= 0:
        return ""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    if -4 <= exponent <= 4:
        return f"{value:g}"
    digits = value / 10.0**exponent
    front = "" if abs(digits - 1) < 1e-6 else f"{digits:g}·"
    return f"{front}10{str(exponent).translate(_SUPERSCRIPTS)}"
