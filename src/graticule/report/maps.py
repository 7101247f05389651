"""Maps of truth, forecast and difference for one initial time, one row a lead."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cftime
import numpy as np

from graticule.data.store import Store
from graticule.data.times import seconds_of
from graticule.forecast.reader import Forecast, open_forecast
from graticule.grid import Grid
from graticule.report.mesh import Mesh
from graticule.report.picture import (
    DPI,
    Picture,
    drawing,
    figures,
    lead_words,
    png_of,
    safe_name,
    short_weights,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAND = "0.75"
PANEL_INCHES = 2.6
PIXELS = round(PANEL_INCHES * DPI)
"""Of a panel. More rows or columns than these are averaged to about as many before drawing."""
_LEFT, _BETWEEN, _TITLE, _FOOT = 0.65, 0.2, 0.5, 1.05
"""Inches: left of a row, between panels, above and below them."""
_UNSIGNED, _SIGNED, _DIFFERENCE = "viridis", "BrBG", "RdBu_r"
HEADINGS = {
    "rmse": "RMSE of this start, area-weighted",
    "bias": "bias of this start, area-weighted",
}
_USUAL = ("standard", "gregorian", "proleptic_gregorian")
_DATE = "%Y-%m-%d %H:%M"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """One lead. truth, forecast, difference: (lat, lon) as drawn, averaged where large.

    scores: of all cells, before averaging.
    """

    lead: int
    hours: float
    valid: cftime.datetime
    truth: np.ndarray
    forecast: np.ndarray
    difference: np.ndarray
    scores: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Colours from low to high; `extend` says at which ends drawn values lie beyond."""

    low: float
    high: float
    colours: str
    extend: str


def forecast_maps(
    forecast_path: str | Path,
    store: Store,
    *,
    channel: str,
    leads: tuple[int, ...],
    init: int = 0,
) -> Picture:
    """Truth, forecast and their difference of `channel`, one row a lead (1, 2, ...).

    Truth and forecast share one scale, that of the truth (0.1 to 99.9 %) over all leads; the
    differences share another, centred on zero. A variable whose truth lies on both sides of zero
    has a diverging scale centred there: its sign is a direction, and calm must look calm.
    Land is grey, what the grid does not cover white. Grids larger than a panel's pixels are
    averaged over sea first, so that 2041 x 4320 cells are drawn in seconds.
    ValueError where the store has not the forecast's grid, its channel or its valid times.
    """
    units = store.channels[store.channels.index(channel)].units
    with open_forecast(forecast_path) as forecast:
        forecast.channels.index(channel)
        if not forecast.grid.same_as(store.grid):
            raise ValueError(f"{forecast_path} and {store.path} are on different grids")
        if not 0 <= init < len(forecast.init_times):
            last = len(forecast.init_times) - 1
            raise ValueError(f"init={init}: {forecast_path} has initial times 0 to {last}")
        if not leads or not all(1 <= lead <= forecast.num_leads for lead in leads):
            raise ValueError(f"leads {leads}: {forecast_path} has leads 1 to {forecast.num_leads}")
        mesh = Mesh.of(store.grid, PIXELS)
        rows = list(_rows(forecast, store, mesh, channel, leads, init))
        started = forecast.init_times[init]
        attributes, calendar = forecast.attributes, forecast.calendar
        members = forecast.num_members
    told = lead_words([row.hours for row in rows])
    field = field_scale([row.truth for row in rows], [row.forecast for row in rows])
    difference = difference_scale([row.difference for row in rows])
    drawn = []
    for row, lead in zip(rows, told, strict=True):
        date = f"{row.valid:{_DATE}}"
        titles = (f"truth\n{date}", f"forecast, lead {lead}\n{date}", f"forecast - truth\n{date}")
        drawn.append(((row.truth, row.forecast, row.difference), titles))
    weights = short_weights(str(attributes.get("run_fingerprint", "")))
    height, width = store.grid.shape
    corner = f"{channel} from {started:{_DATE}}, grid {height} x {width}, weights {weights}"
    name = safe_name("maps", channel)
    with drawing(name) as figure_class:
        png = png_of(draw(figure_class, mesh, drawn, field, difference,
                          f"{channel} ({units})", f"difference ({units})", corner))  # fmt: skip
    blocks = mesh.blocks
    dates = "" if calendar in _USUAL else f" Dates of the {calendar} calendar."
    return Picture(
        name=name,
        title=f"Maps of {channel}",
        caption=(
            f"{channel} ({units}) of the forecast from {started:{_DATE}}: truth, forecast and"
            f" forecast - truth at lead {', '.join(told)}, valid"
            f" {', '.join(f'{row.valid:{_DATE}}' for row in rows)}. Grid {height} x {width},"
            f" weights {weights}"
            f"{' (' + str(attributes['weights']) + ')' if 'weights' in attributes else ''}."
            f" One scale for truth and forecast, one for all differences; arrows where values lie"
            f" beyond. RMSE and bias in the table are of this start alone, weighted by area."
            + (f" The forecast is the mean of {members} members." if members else "")
            + (" Land is grey." if any(np.isnan(row.truth).any() for row in rows) else "")
            + (
                ""
                if blocks == (1, 1)
                else f" Means over {blocks[0]} x {blocks[1]} cells; a block that is mostly land is"
                " drawn as land."
            )
            + dates
        ),
        alt=_words(channel, units, rows, told),
        png=png,
        table=[
            {HEADINGS.get(name, name): value for name, value in row.scores.items()} for row in rows
        ],
    )


def _rows(
    forecast: Forecast, store: Store, mesh: Mesh, channel: str, leads: tuple[int, ...], init: int
) -> Iterator[_Row]:
    position, place = store.channels.index(channel), forecast.channels.index(channel)
    for lead in leads:
        valid = forecast.valid_times[init, lead - 1]
        index = int(np.searchsorted(store.times.seconds, seconds_of(valid)))
        if index == len(store.times) or store.times.seconds[index] != seconds_of(valid):
            raise ValueError(f"{store.path} has no truth for {valid}")
        truth = store.read(index, [position])[0]
        field = forecast.read(init, lead - 1)[place].copy()  # the other channels can go
        hours = float(forecast.lead_seconds[lead - 1]) / 3600
        yield _Row(
            lead=lead,
            hours=hours,
            valid=valid,
            truth=mesh.mean(truth),
            forecast=mesh.mean(field),
            difference=mesh.mean(field - truth),
            scores={
                "lead": lead,
                "lead_hours": hours,
                "valid_time": f"{valid:{_DATE}}",
                **_scores(truth, field, store.grid),
            },
        )


def _scores(truth: np.ndarray, field: np.ndarray, grid: Grid) -> dict[str, Any]:
    """What a reader of the map wants as numbers, weighted by area; None where nothing is."""
    present = np.isfinite(truth) & np.isfinite(field)
    names = ("truth_min", "truth_max", "forecast_min", "forecast_max", "rmse", "bias",
             "largest_difference")  # fmt: skip
    if not present.any():
        return {"cells": 0, **dict.fromkeys(names)}
    # One row or column alone has no width, so its cells count alike.
    area = (grid.cell_area if min(grid.shape) > 1 else np.ones(grid.shape))[present]
    true, ours = truth[present].astype(np.float64), field[present].astype(np.float64)
    error = ours - true
    values = (
        true.min(), true.max(), ours.min(), ours.max(),
        np.sqrt(area @ error**2 / area.sum()), area @ error / area.sum(), np.abs(error).max(),
    )  # fmt: skip
    return {"cells": int(present.sum())} | {
        name: float(value) for name, value in zip(names, values, strict=True)
    }


def _words(channel: str, units: str, rows: list[_Row], told: list[str]) -> str:
    parts = []
    for row, lead in zip(rows, told, strict=True):
        if not row.scores["cells"]:
            parts.append(f"At {lead} no cell has both.")
            continue
        s = {key: figures(value) for key, value in row.scores.items() if isinstance(value, float)}
        parts.append(
            f"At {lead} the truth reaches from {s['truth_min']} to {s['truth_max']} {units} and the"
            f" forecast from {s['forecast_min']} to {s['forecast_max']}; they differ by"
            f" {s['rmse']} (RMSE of this start, area-weighted), at most by"
            f" {s['largest_difference']}."
        )
    return f"Maps of {channel}: truth, forecast and their difference. " + " ".join(parts)


# Scales


def field_scale(true: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> Scale:
    """Of truth and forecast together, by the truth's values (0.1 to 99.9 %)."""
    truth = _finite(true)
    drawn = np.concatenate([truth, _finite(ours)])
    if not drawn.size:
        return Scale(low=0, high=1, colours=_UNSIGNED, extend="neither")
    low, high = (float(v) for v in np.percentile(truth if truth.size else drawn, (0.1, 99.9)))
    colours = _UNSIGNED
    # A fifth: winds and anomalies are signed, degrees Celsius of the sea are not.
    if low < 0 < high and min(-low, high) > 0.2 * max(-low, high):
        high = max(-low, high)
        low, colours = -high, _SIGNED
    return Scale(**_wide(low, high), colours=colours, extend=_beyond(drawn, low, high))


def difference_scale(differences: Sequence[np.ndarray]) -> Scale:
    """Centred on zero."""
    drawn = _finite(differences)
    most = float(np.percentile(np.abs(drawn), 99.9)) if drawn.size else 0.0
    limits = _wide(-most, most)
    return Scale(**limits, colours=_DIFFERENCE, extend=_beyond(drawn, -most, most))


def _finite(fields: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([field[np.isfinite(field)] for field in fields])


def _wide(low: float, high: float) -> dict[str, float]:
    """The limits, apart where all values are equal: a constant is the middle of its scale."""
    if high - low > 1e-6 * max(abs(low), abs(high)):
        return {"low": low, "high": high}
    half = 0.01 * abs(high) or 1.0
    return {"low": low - half, "high": high + half}


def _beyond(drawn: np.ndarray, low: float, high: float) -> str:
    rounding = 1e-6 * max(abs(low), abs(high))
    under, over = (drawn < low - rounding).any(), (drawn > high + rounding).any()
    return {(0, 0): "neither", (1, 0): "min", (0, 1): "max"}.get((int(under), int(over)), "both")


# Drawing


def draw(
    figure_class: type["Figure"],
    mesh: Mesh,
    rows: Sequence[tuple[Sequence[np.ndarray], Sequence[str]]],
    field: Scale,
    difference: Scale,
    field_label: str,
    difference_label: str,
    corner: str,
) -> "Figure":
    """rows: truth, forecast and difference (lat, lon), `mesh.mean` of them, and their titles."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    west, east, south, north = mesh.extent
    # One row or one column alone is still a picture.
    high = PANEL_INCHES * float(np.clip((north - south) / (east - west), 0.3, 1.6))
    width = _LEFT + 3 * PANEL_INCHES + 2 * _BETWEEN + 0.3
    height = 0.3 + len(rows) * (_TITLE + high) + _FOOT
    figure = figure_class(figsize=(width, height))

    # Placed by hand: the sizes are known, and matplotlib's layout would double the time.
    def axes(column: int, bottom: float, panels: int, tall: float) -> "Axes":
        left = _LEFT + column * (PANEL_INCHES + _BETWEEN)
        wide = panels * (PANEL_INCHES + _BETWEEN) - _BETWEEN
        return figure.add_axes((left / width, bottom / height, wide / width, tall / height))

    scales = [_coloured(scale) for scale in (field, field, difference)]
    for i, (fields, titles) in enumerate(rows):
        bottom = _FOOT + (len(rows) - 1 - i) * (_TITLE + high)
        for column, (scale, cmap) in enumerate(scales):
            axis = axes(column, bottom, 1, high)
            _panel(axis, mesh, fields[column], cmap, Normalize(scale.low, scale.high))
            axis.set_title(titles[column], fontsize=10, loc="left")
            axis.tick_params(labelleft=column == 0, labelbottom=i == len(rows) - 1)
    for column, panels, label in ((0, 2, field_label), (2, 1, difference_label)):
        scale, cmap = scales[column]
        mappable = ScalarMappable(Normalize(scale.low, scale.high), cmap)
        bar = figure.colorbar(
            mappable, cax=axes(column, 0.55, panels, 0.15), orientation="horizontal", label=label,
            extend=scale.extend, extendfrac=0.12 / (panels * PANEL_INCHES),
            ticks=MaxNLocator(4 if panels == 1 else 6),
        )  # fmt: skip
        bar.outline.set_linewidth(0.6)
    figure.text(0.1 / width, 1 - 0.1 / height, corner, fontsize=9, va="top")
    return figure


def _coloured(scale: Scale) -> tuple[Scale, Any]:
    from matplotlib import colormaps

    return scale, colormaps[scale.colours].with_extremes(bad=LAND)


def _panel(axis: "Axes", mesh: Mesh, values: np.ndarray, cmap: Any, norm: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for x, y, part in mesh.parts(values):
        axis.pcolormesh(x, y, np.ma.masked_invalid(part), cmap=cmap, norm=norm)
    west, east, south, north = mesh.extent
    axis.set_xlim(west, east)
    axis.set_ylim(south, north)
    for side, formatter in ((axis.xaxis, _longitude), (axis.yaxis, _latitude)):
        side.set_major_locator(MaxNLocator(4, steps=[1, 2, 3, 4.5, 6, 9, 10]))
        side.set_major_formatter(FuncFormatter(formatter))
        side.set_tick_params(labelsize=9)
    for spine in axis.spines.values():
        spine.set_visible(True)


def _longitude(value: float, _: Any = None) -> str:
    east = (round(value, 6) + 180) % 360 - 180
    return f"{abs(east):g}°" + ("" if east in (0, -180) else "E" if east > 0 else "W")


def _latitude(value: float, _: Any = None) -> str:
    return f"{abs(value):g}°" + ("" if value == 0 else "N" if value > 0 else "S")
