"""The sections of a report on an ocean: errors by depth, heat, energy, means, season, range."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from graticule.evaluate.depths import Column
from graticule.evaluate.ocean import OceanScores
from graticule.evaluate.spectra import Spectra
from graticule.report.maps import difference_scale, draw, field_scale
from graticule.report.mesh import Mesh
from graticule.report.ocean import depth_curves, profile_curves
from graticule.report.ocean_leads import content_curves, mean_curves, range_curves
from graticule.report.page import Html, beside, note, paragraph, table
from graticule.report.picture import Picture, drawing, figures, png_of, safe_name, short_weights
from graticule.report.spectra import spectra_curves
from graticule.report.subject import Subject

PIXELS = 390
"""Of a panel of a map, as `maps` draws them."""
MOST_VARIABLES = 4
MOST_LEVELS = 3
Section = tuple[str, str, Callable[[], list[Html]]]
"""(anchor, title, what makes it)"""


def ocean_sections(subject: Subject, shown: Callable[..., Html]) -> list[Section]:
    """None for a forecast without levels of an ocean. shown: draws one picture or says why not."""
    ocean = subject.ocean
    if ocean is None:
        forecast = subject.forecast
        if forecast is None or Column.of(forecast.channels, forecast.channels) is None:
            return []
        return [("depth", "Errors by depth", lambda: [note(_way_to_scores(subject))])]
    kinds = [kind for kind in ("temperature", "salinity") if ocean.column.levels_of(kind)]
    wanted: list[tuple[Any, Section]] = [
        (True, ("depth", "Errors by depth", lambda: _depth(ocean, shown))),
        (kinds, ("heat", "Heat and salt content", lambda: _contents(ocean, kinds, shown))),
        (ocean.column.currents,
         ("energy", "Kinetic energy", lambda: _energy(subject, ocean, shown))),
        (_variables(ocean), ("profiles", "Mean profiles", lambda: _profiles(ocean, shown))),
        (True, ("means", "Means over leads", lambda: _means(subject, ocean, shown))),
        (ocean.sums.mapped, ("season", "Without the season", lambda: _season(ocean, shown))),
        (True, ("range", "Rollout within the training range", lambda: _range(ocean, shown))),
    ]  # fmt: skip
    return [section for there, section in wanted if there]


def season_maps(ocean: OceanScores, channel: str) -> Picture:
    """Mean anomalies of truth and forecast from the climatology of each date, and their difference.

    Two anomalies share a scale centred on zero, the difference has its own. Land is grey.
    ValueError where the channel has no maps.
    """
    place = ocean.column.channels.index(channel)
    units = ocean.column.channels[place].units
    fields = ocean.maps(place)
    if not np.isfinite(fields["truth"]).any():
        raise ValueError(f"no cell of {channel} was scored: there is no map")
    mesh = Mesh.of(ocean.grid, PIXELS)
    names = ("truth", "model", "error")
    drawn = [mesh.mean(fields[name]) for name in names]
    name = safe_name("season", channel)
    weights = short_weights(str(ocean.attributes.get("run_fingerprint", "")))
    height, width = ocean.grid.shape
    pairs = int((ocean.weight[..., place] > 0).sum())
    titles = ("truth - climatology", "forecast - climatology", "forecast - truth")
    with drawing(name) as figure_class:
        png = png_of(
            draw(
                figure_class,
                mesh,
                [(drawn, titles)],
                field_scale(drawn[:1], drawn[1:2]),
                difference_scale(drawn[2:]),
                f"anomaly of {channel} ({units})",
                f"difference ({units})",
                f"{channel}, mean over {pairs} fields, grid {height} x {width}, weights {weights}",
            )
        )
    weight, rows, numbers = _area(ocean), [], []
    for title, key in zip(titles, names, strict=True):
        values = fields[key]
        some = np.isfinite(values)
        area = weight[some] / weight[some].sum()
        found = {
            "mean": float(area @ values[some]),
            "least": float(values[some].min()),
            "largest": float(values[some].max()),
            "rms": float(np.sqrt(area @ values[some] ** 2)),
        }
        numbers.append(found)
        rows.append({"map": title, "cells": int(some.sum()), **found})
    truth, model, error = numbers
    return Picture(
        name=name,
        title=f"{channel} without its season",
        caption=(
            f"Mean anomalies of {channel} ({units}) from the training climatology of each date (by"
            f" {ocean.climatology}), over {pairs} fields: truth, forecast and their difference,"
            f" which is the mean error of each cell. Grid {height} x {width}, weights {weights}."
            " One scale for both anomalies; land is grey. The numbers are weighted by area."
        ),
        alt=(
            f"Without its season {channel} lies {figures(truth['mean'])} {units} from the"
            f" climatology in the truth and {figures(model['mean'])} in the forecast, mean over the"
            f" sea; the forecast's mean error reaches from {figures(error['least'])} to"
            f" {figures(error['largest'])} {units}, {figures(error['rms'])} in root mean square,"
            f" where the truth's own anomaly is {figures(truth['rms'])}."
        ),
        png=png,
        table=rows,
    )


def _area(ocean: OceanScores) -> np.ndarray:
    """Of a row or column alone there is none: all cells alike."""
    return ocean.grid.cell_area if min(ocean.grid.shape) > 1 else np.ones(ocean.grid.shape)


def energy_curves(spectra: Spectra, ocean: OceanScores, pair: int, leads: list[int]) -> Picture:
    """The spectrum of the kinetic energy of a level, from those of its currents."""
    east, north = ocean.column.currents[pair]
    energy = spectra.kinetic_energy([(east, north)])
    depth = ocean.column.depth[east]
    drawn = spectra_curves(energy, channel=energy.names[0], leads=leads)
    names = f"{ocean.names[east]} and {ocean.names[north]}"
    return replace(
        drawn,
        title=f"Spectrum of the kinetic energy at {depth:g} m",
        caption=f"Kinetic energy of {names}: half the sum of their powers. {drawn.caption}",
    )


def _way_to_scores(subject: Subject) -> str:
    assert subject.forecast
    return (
        "Not shown: the forecast has no scores by depth here; score it again: graticule evaluate"
        f" {subject.forecast.path} --force"
    )


def _depth(ocean: OceanScores, shown: Callable[..., Html]) -> list[Html]:
    rows = [
        [ocean.names[i], channel.units, ocean.rmse(overall=True)[i],
         ocean.rmse("persistence", overall=True)[i], ocean.rmse("climatology", overall=True)[i],
         ocean.r2(overall=True)[i], ocean.r2("climatology", overall=True)[i],
         float(ocean.weight[..., i].max()) / 1e12]
        for i, channel in enumerate(ocean.column.channels)
    ]  # fmt: skip
    return [
        beside([shown(depth_curves, ocean, name) for name in _variables(ocean)]),
        table(
            "RMSE (mean over times of each time's), R2 and R2 against the climatology by channel,"
            " over all initial times and leads; an en dash where the truth does not vary or is"
            " land",
            ["channel", "units", "RMSE", "persistence", "climatology", "R2",
             "R2, climatology", "sea (10⁶ km²)"],
            rows,
        ),
        paragraph(f"Weighted by cell area: {ocean.area}."),
    ]  # fmt: skip


def _contents(ocean: OceanScores, kinds: list[str], shown: Callable[..., Html]) -> list[Html]:
    drawn = [shown(content_curves, ocean, kind) for kind in kinds]
    return [
        paragraph(
            "Summed over the sea of each level and the thickness of its layer, in the middle of"
            " which it lies. A range of depths that the layers do not fill is left out; the last"
            " one is all of them."
        ),
        beside(drawn),
    ]


def _energy(subject: Subject, ocean: OceanScores, shown: Callable[..., Html]) -> list[Html]:
    pairs = ocean.column.currents
    model, truth = (ocean.kinetic_energy(source) for source in ("model", "truth"))
    rows = []
    for k, (east, _) in enumerate(pairs):
        ours, theirs = (_finite_mean(values[..., k]) for values in (model, truth))
        ratio = ours / theirs if ours is not None and theirs else None
        rows.append([f"{ocean.column.depth[east]:g} m", ours, theirs, ratio])
    levels = sorted({round(float(p)) for p in np.linspace(0, len(pairs) - 1, MOST_LEVELS)})
    spectra = subject.spectra
    drawn = [
        shown(energy_curves, spectra, ocean, level, list(subject.shown_leads))
        for level in (levels if spectra is not None else [])
    ]
    return [
        table(
            "Kinetic energy per unit mass, mean over the sea of the level and all fields"
            " (m² s⁻²)",
            ["depth", "model", "truth", "model / truth"], rows,
        ),
        beside(drawn),
    ]  # fmt: skip


def _profiles(ocean: OceanScores, shown: Callable[..., Html]) -> list[Html]:
    return [beside([shown(profile_curves, ocean, name) for name in _variables(ocean)])]


def _means(subject: Subject, ocean: OceanScores, shown: Callable[..., Html]) -> list[Html]:
    return [beside([shown(mean_curves, ocean, name) for name in subject.shown_channels])]


def _season(ocean: OceanScores, shown: Callable[..., Html]) -> list[Html]:
    return [shown(season_maps, ocean, ocean.names[i]) for i in ocean.sums.mapped]


def _range(ocean: OceanScores, shown: Callable[..., Html]) -> list[Html]:
    least, most = ocean.sums.trained
    low, high = ocean.extremes("model")
    beyond, truth = ocean.beyond(), ocean.beyond("truth")
    rows = [
        [name, ocean.column.channels[i].units, float(least[i]), float(most[i]),
         _least(low[:, i]), _most(high[:, i]), _percent(beyond[:, i]), _percent(truth[:, i])]
        for i, name in enumerate(ocean.names)
    ]  # fmt: skip
    return [
        shown(range_curves, ocean),
        table(
            "Least and largest value in the training times and in the forecast, over all leads,"
            " and by how much of the training range forecast and truth lie outside of it",
            ["channel", "units", "training, least", "largest", "forecast, least", "largest",
             "beyond (%)", "truth beyond (%)"],
            rows,
        ),
    ]  # fmt: skip


def _variables(ocean: OceanScores) -> list[str]:
    """Those with several levels: of one level the tables say as much as a picture."""
    found = [name for name, levels in ocean.column.profiles.items() if len(levels) > 1]
    return found[:MOST_VARIABLES]


def _finite_mean(values: np.ndarray) -> float | None:
    some = np.isfinite(values)
    return float(values[some].mean()) if some.any() else None


def _least(values: np.ndarray) -> float | None:
    return float(np.nanmin(values)) if np.isfinite(values).any() else None


def _most(values: np.ndarray) -> float | None:
    return float(np.nanmax(values)) if np.isfinite(values).any() else None


def _percent(values: np.ndarray) -> float | None:
    return 100 * most if (most := _most(values)) is not None else None
