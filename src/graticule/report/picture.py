"""A picture of the report: drawn once, its data and its words beside it."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graticule.data.times import MEAN_MONTH_SECONDS, whole_months

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STYLE = {
    # At 5.8 inches (418 points) wide, 11 points are 9.5 pixels on a telephone's 360.
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "grid.color": "0.9",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    # Names of channels and runs are words: a dollar sign is no formula.
    "text.parse_math": False,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """A figure as SVG text (curves) or PNG bytes (maps), exactly one of the two.

    name: safe in file names and in SVG ids, unique in a report. title: a heading.
    caption: what is drawn: units, lead, valid time, grid, checkpoint.
    alt: the result in words with its numbers, for those who do not see it.
    svg: begins with `<svg`, without prolog, so that it stands in a page as it is; all its ids
        begin with the name, and nothing in it is fetched.
    table: the data behind it, rows of plain values.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: str = ""
    png: bytes = b""
    table: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        assert bool(self.svg) != bool(self.png), "a picture is either SVG or PNG"

    def save(self, folder: str | Path) -> Path:
        """Write NAME.svg or NAME.png and NAME.csv, its data; return the picture's path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.{'svg' if self.svg else 'png'}"
        path.write_bytes(self.svg.encode() if self.svg else self.png)
        columns = list(dict.fromkeys(key for row in self.table for key in row))
        with (folder / f"{self.name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.table)
        return path


def safe_name(*parts: str) -> str:
    """A picture's name from words of any kind: `maps`, `u@850` is `maps-u-850`."""
    words = (re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-._") for part in parts)
    return "-".join(word for word in words if word)


@contextmanager
def drawing(salt: str) -> Iterator[type["Figure"]]:
    """matplotlib's Figure, in the report's style whatever a matplotlibrc says.

    salt: makes the ids inside an SVG the same each time. Without pyplot: no window opens, and no
    figure outlives the function that drew it. ValueError where matplotlib is missing.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'graticule[demo]'") from None
    with style.context(["default", {**_STYLE, "svg.hashsalt": salt}]):
        yield Figure


def svg_of(figure: "Figure", name: str) -> str:
    """The figure as `Picture.svg` wants it; call it inside `drawing(name)`."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    # A style sheet would hold for the whole page that the SVG stands in; these two are inherited.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    return text.replace(
        "<svg ", '<svg style="stroke-linejoin: round; stroke-linecap: butt" ', 1
    ).strip()


def png_of(figure: "Figure") -> bytes:
    """The figure as `Picture.png`, the same bytes each time."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def lead_unit(hours: Sequence[float]) -> tuple[str, float]:
    """(`hour`, `day` or `month`, hours of one) that leads of these hours are told in.

    Days where all are whole days, or beyond five days; months where all are mean months.
    """
    leads = np.asarray(hours, dtype=np.float64)
    if whole_months(hours):
        return "month", MEAN_MONTH_SECONDS / 3600
    days = leads.max() > 120 or (leads.max() >= 48 and not (leads % 24).any())
    return ("day", 24.0) if days else ("hour", 1.0)


def lead_words(hours: Sequence[float]) -> list[str]:
    """`6 h`, `2 d` or `1 month` for each lead, all in the same unit."""
    unit, one = lead_unit(hours)
    counts = [f"{value / one:.4g}" for value in hours]
    if unit == "month":
        return [f"{count} month{'' if count == '1' else 's'}" for count in counts]
    return [f"{count} {unit[0]}" for count in counts]


def figures(value: float) -> str:
    """A number for a sentence: three figures that matter, or all before the point."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def goes(first: float, last: float) -> str:
    """`rises`, `falls`, or `goes` where both are the same within a percent."""
    if abs(last - first) <= 0.01 * max(abs(first), abs(last)):
        return "goes"
    return "rises" if last > first else "falls"


def short_weights(fingerprint: str) -> str:
    """`7fe2a54bb9e0d08a/step 400` is `7fe2a54b, step 400`."""
    digest, _, step = fingerprint.partition("/")
    return ", ".join(part for part in (digest[:8], step) if part) or "unknown"


def weights_line(attributes: Mapping[str, Any]) -> str:
    """Whose weights made a forecast. attributes: of the forecast."""
    return f"Weights {short_weights(str(attributes.get('run_fingerprint', '')))}."


def corner_line(attributes: Mapping[str, Any], grid: tuple[int, int]) -> str:
    """The same with the grid's (lat, lon) points, for a corner of a picture."""
    weights = short_weights(str(attributes.get("run_fingerprint", "")))
    return f"grid {grid[0]} x {grid[1]}; weights {weights}"


def said(value: Any) -> str:
    """A number in a sentence, if it is one."""
    return figures(float(value)) if np.isfinite(value) else "undefined"


def plain(value: Any) -> float | None:
    """A number among the data that were drawn: none where it is not finite."""
    return float(value) if np.isfinite(value) else None
