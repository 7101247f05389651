"""Zonal power of forecast and truth against wavenumber: what a forecast has smoothed away."""

from collections.abc import Sequence

import numpy as np

from graticule.evaluate.spectra import Spectra
from graticule.report.picture import (
    Picture,
    drawing,
    figures,
    lead_words,
    safe_name,
    short_weights,
    svg_of,
)
from graticule.report.strokes import WIDTH_INCHES, legend, log_axis, stroke

MOST_WAVENUMBERS = 160
WIDEST = 1000
"""The ratio's axis reaches to this and to one part of it, no farther."""


def spectra_curves(spectra: Spectra, *, channel: str, leads: Sequence[int]) -> Picture:
    """Zonal power against wavenumber, truth first and grey; below it model / truth.

    leads: 1 is one model step. Both axes are logarithmic. Many wavenumbers are averaged to 160,
    evenly spaced on them. ValueError where there is no such channel or lead, or no spectrum of it.
    """
    place = spectra.channels.index(channel)
    hours = np.asarray(spectra.lead_seconds, dtype=np.float64) / 3600
    if not leads or not all(1 <= lead <= hours.size for lead in leads):
        raise ValueError(f"leads {tuple(leads)}: these spectra have leads 1 to {hours.size}")
    empty = [lead for lead in leads if not spectra.rows[lead - 1, place]]
    if empty:
        raise ValueError(f"no spectrum of {channel} at lead {empty[0]} ({spectra.kind[place]})")
    groups = _wavenumber_groups(spectra.wavenumber)
    wavenumber = _grouped(spectra.wavenumber, groups)
    told = lead_words([float(hours[lead - 1]) for lead in leads])
    model, truth = (
        np.stack([_grouped(power[lead - 1, place], groups) for lead in leads])
        for power in (spectra.model, spectra.truth)
    )
    power = np.concatenate([model.ravel(), truth.ravel()])
    power = power[np.isfinite(power) & (power > 0)]
    if not truth.any() or not power.size:
        raise ValueError(f"{channel} has no power at any wavenumber: it is constant along rows")
    last = float(spectra.wavenumber[spectra.short[place]][-1])
    # Of a wave that the truth has not, a ratio would be of rounding.
    has = (truth > 0) & (wavenumber <= last)
    ratio = np.divide(model, truth, out=np.full_like(model, np.nan), where=has)
    cut = last < spectra.wavenumber[-1]
    units = spectra.units[place]
    squared = f"{units}²" if units.isalnum() else f"({units})²"
    name = safe_name("spectra", channel)
    weights = short_weights(str(spectra.attributes.get("run_fingerprint", "")))
    with drawing(name) as figure_class:
        figure = figure_class(figsize=(WIDTH_INCHES, 5.6), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1.7, 1])
        for i, line in enumerate(truth):
            upper.plot(wavenumber, _positive(line), color="0.6", linewidth=3.2,
                       label="" if i else "truth", zorder=1.5)  # fmt: skip
        lower.axhline(1, color="0.6", linewidth=2)
        for i, lead in enumerate(told):
            # A marker at every wavenumber would hide the line.
            look = stroke(i) | {"markevery": max(1, wavenumber.size // 8)}
            upper.plot(wavenumber, _positive(model[i]), label=f"model, {lead}", **look)
            lower.plot(wavenumber, _positive(ratio[i]), **look)
        # Nine decades: smaller power is rounding, and would flatten the rest.
        log_axis(upper, "y", max(power.min(), 1e-9 * power.max()) / 1.6, power.max() * 1.6)
        if cut:
            for axis in (upper, lower):
                axis.axvspan(last, 2 * spectra.wavenumber[-1], color="0.92", zorder=0)
        log_axis(lower, "x", wavenumber[0] * 0.93, wavenumber[-1] * 1.07)
        shares = ratio[np.isfinite(ratio) & (ratio > 0)]
        # A tail that one of them lacks would flatten what matters.
        log_axis(lower, "y", max(1 / WIDEST, min(0.7, shares.min(initial=1) / 1.1)),
                 min(WIDEST, max(1.4, shares.max(initial=1) * 1.1)))  # fmt: skip
        upper.set_ylabel("power" if units == "1" else f"power ({squared})")
        lower.set_ylabel("model / truth")
        lower.set_xlabel("wavenumber (cycles per circle of latitude)")
        upper.set_title(f"{channel}; weights {weights}", fontsize=9, loc="left")
        for axis in (upper, lower):
            axis.grid()
        legend(figure, upper.get_legend_handles_labels()[0])
        svg = svg_of(figure, name)
    return Picture(
        name=name,
        title=f"Zonal power of {channel}",
        caption=(
            f"Power of {channel} per unit wavenumber"
            f"{'' if units == '1' else f' ({squared})'} along rows of the grid"
            f" ({spectra.kind[place]}), mean over rows by area, at lead {', '.join(told)}; below,"
            f" that of the model over the truth's: below 1 the forecast is smoother. A wave of"
            f" wavenumber 10 is {spectra.wavelength_km(0)[0] * spectra.wavenumber[0] / 10:.0f} km"
            f" long at the equator. Weights {weights}."
            + (f" Beyond wavenumber {last:g} (shaded) the truth has no more than a millionth of its"
               " variance, and no ratio is drawn." if cut else "")
            + (f" The ratio reaches from {figures(shares.min())} to {figures(shares.max())}; its"
               f" axis is cut at 1/{WIDEST} and {WIDEST}."
               if shares.size and (shares.min() < 1 / WIDEST or shares.max() > WIDEST) else "")
            + ("" if wavenumber.size == spectra.wavenumber.size
               else f" {spectra.wavenumber.size} wavenumbers, averaged to {wavenumber.size}.")
        ),
        alt=_spectra_words(spectra, place, leads, told),
        svg=svg,
        table=[
            {"lead": lead, "lead_hours": float(hours[lead - 1]), "wavenumber": float(k),
             "model": float(model[i, j]), "truth": float(truth[i, j]),
             "ratio": None if np.isnan(ratio[i, j]) else float(ratio[i, j])}
            for i, lead in enumerate(leads)
            for j, k in enumerate(wavenumber)
        ],
    )  # fmt: skip


def _positive(values: np.ndarray) -> np.ndarray:
    """NaN where a logarithmic axis has no place."""
    return np.where(values > 0, values, np.nan)


def _wavenumber_groups(wavenumber: np.ndarray) -> np.ndarray:
    """Starts of groups that are about equally wide on a logarithmic axis."""
    if wavenumber.size <= MOST_WAVENUMBERS:
        return np.arange(wavenumber.size)
    even = np.geomspace(wavenumber[0], wavenumber[-1] * (1 + 1e-9), MOST_WAVENUMBERS + 1)[:-1]
    return np.unique(np.searchsorted(wavenumber, even))


def _grouped(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, groups) / np.diff(np.append(groups, values.size))


def _spectra_words(spectra: Spectra, place: int, leads: Sequence[int], told: Sequence[str]) -> str:
    """What is left at the shortest waves, where smoothing shows first."""
    name = spectra.names[place]
    short = spectra.wavenumber[spectra.short[place]]
    parts = []
    for lead, words in zip(leads, told, strict=True):
        left = float(spectra.short_ratio()[lead - 1, place])
        ratio = spectra.ratio[lead - 1, place]
        half = np.flatnonzero((ratio < 0.5) & (spectra.wavenumber <= short[-1]))
        if np.isnan(left):
            parts.append(f"at {words} the truth has no power there")
            continue
        below = f", below half from wavenumber {spectra.wavenumber[half[0]]:g}" if half.size else ""
        parts.append(f"at {words} the model has {figures(left)} times the truth's power{below}")
    return (
        f"Zonal power of {name} against wavenumber. At the shortest quarter of the truth's waves,"
        f" wavenumbers {short[0]:g} to {short[-1]:g}, {'; '.join(parts)}."
    )
