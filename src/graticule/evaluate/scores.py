"""Scores from sums: errors, ACC and activity by lead and channel, as a table, CSV and JSON."""

import csv
import io
import logging
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from graticule import __version__
from graticule.config import fingerprint
from graticule.data.store import write_json
from graticule.data.times import lead_in_words
from graticule.evaluate.ensemble_file import save_ensemble
from graticule.evaluate.ensemble_scores import EnsembleScores
from graticule.evaluate.ocean import OceanScores
from graticule.evaluate.ocean_file import save_ocean
from graticule.evaluate.spectra import Spectra
from graticule.evaluate.sums import ACTIVE, SOURCES, Sums
from graticule.variables import Channels

FORMAT = "graticule scores 2"
_ANY_FORMAT = "graticule scores "
COLUMNS = (
    "source", "channel", "variable", "level", "level_units", "units", "lead", "lead_hours",
    "samples", "cells", "rmse", "bias", "mae", "acc", "activity", "activity_ratio",
)  # fmt: skip
WIDEST = 100
"""Columns of a terminal that `Scores.table` keeps to, where the names allow it."""
ALIKE = 0.9
"""A ratio to the truth from here to 1 / here is called alike, in activity and power."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Scores of a forecast and of its references, pooled over times and cells by area.

    RMSE is the root of the pooled mean square and ACC the ratio of pooled sums; neither is a mean
    of daily scores. ACC is uncentred: no area mean is taken off the anomalies (f - c), (o - c).
    Only leads with at least one truth are scored: `leads` are their labels, k for its k-th time,
    and the first dim of every array.

    Activity is, as at ECMWF, the standard deviation over the area of the anomaly (f - c): each
    field's own area mean is taken off, and the variances are pooled over times.

    lead_seconds: (lead,) of all leads of the forecast. climatology: its grouping.
    region: (west, east, south, north) degrees, or none: everywhere.
    std: training standard deviations by channel, for the `normalised` mean; none: no such row.
    skipped: (init, lead) pairs without a truth; first_skipped: the first date missed.
    spectra: zonal power of the same pairs, over all leads of the forecast.
    ocean: scores by depth of the same pairs, where there are levels of an ocean.
    ensemble: of a forecast with members; the scores here are then of their mean, but for activity
    and spectra, which are the members' on average.
    """

    sums: Sums
    channels: Channels
    lead_seconds: np.ndarray
    climatology: str
    region: tuple[float, float, float, float] | None = None
    std: dict[str, float] | None = None
    skipped: int = 0
    first_skipped: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    spectra: Spectra | None = None
    ocean: OceanScores | None = None
    ensemble: EnsembleScores | None = None

    def __post_init__(self) -> None:
        if self.channels.names != self.sums.names:
            raise ValueError(f"{self.channels} are not the channels of the sums: {self.sums.names}")
        if not self.leads:
            raise ValueError("no (init, lead) pair was compared with a truth: there is no score")
        empty = np.argwhere(self.sums.weight[self._rows] <= 0)
        if empty.size:
            row, channel = (int(i) for i in empty[0])
            raise ValueError(
                f"no cell of {self.channels.names[channel]} at lead {self.leads[row]} has a truth"
                f" and a climatology (region {self.region or 'everywhere'}): there is no score"
            )
        if self.std is not None:
            unknown = [name for name in self.channels.names if name not in self.std]
            if unknown:
                raise ValueError(f"no training standard deviation of {', '.join(unknown)}")
            constant = [name for name in self.channels.names if not self.std[name] > 0]
            if constant:
                log.warning("constant, not in the normalised mean: %s", ", ".join(constant))

    @cached_property
    def _rows(self) -> np.ndarray:
        return np.flatnonzero(self.sums.samples > 0)

    @cached_property
    def leads(self) -> list[int]:
        """Labels of the scored leads: 1 is the first time that the forecast has."""
        return [int(row) + 1 for row in self._rows]

    def _mean(self, source: str, quantity: str) -> np.ndarray:
        return (self.sums.of(source, quantity) / np.maximum(self.sums.weight, 1e-300))[self._rows]

    def rmse(self, source: str = "model") -> np.ndarray:
        """(lead, channel) in the channels' units."""
        return np.sqrt(self._mean(source, "squared_error"))

    def bias(self, source: str = "model") -> np.ndarray:
        """(lead, channel) mean of forecast minus truth, in the channels' units."""
        return self._mean(source, "error")

    def mae(self, source: str = "model") -> np.ndarray:
        """(lead, channel) in the channels' units."""
        return self._mean(source, "absolute_error")

    def acc(self, source: str = "model") -> np.ndarray:
        """(lead, channel) from -1 to 1; NaN where a side has no anomaly (the climatology has none).

        sum w (f - c)(o - c) / sqrt(sum w (f - c)^2  sum w (o - c)^2)
        """
        product = self._mean(source, "anomaly_product")
        scale = np.sqrt(
            self._mean(source, "anomaly_squared") * self._mean("climatology", "squared_error")
        )
        return np.divide(product, scale, out=np.full_like(product, np.nan), where=scale > 0)

    def skill(self, reference: str) -> np.ndarray:
        """(lead, channel) RMSE of the model / RMSE of the reference; NaN where that is 0."""
        ours, theirs = self.rmse(), self.rmse(reference)
        return np.divide(ours, theirs, out=np.full_like(ours, np.nan), where=theirs > 0)

    def activity(self, source: str = "model") -> np.ndarray:
        """(lead, channel) in the channels' units; source: one of `SOURCES`, or "truth"."""
        sums = self.sums.activity[ACTIVE.index(source)]
        return np.sqrt(sums / np.maximum(self.sums.weight, 1e-300))[self._rows]

    def activity_ratio(self, source: str = "model") -> np.ndarray:
        """(lead, channel) activity / the truth's: 1 as active, below 1 smoother or too close to
        the climatology; NaN where the truth has none."""
        ours, truth = self.activity(source), self.activity("truth")
        # An anomaly that is the same everywhere leaves rounding.
        some = truth > 1e-6 * self.rmse("climatology")
        return np.divide(ours, truth, out=np.full_like(ours, np.nan), where=some)

    def short_power_ratio(self) -> np.ndarray:
        """(lead, channel) power of model / truth at short waves; see `Spectra.short_ratio`.

        NaN where there is no spectrum.
        """
        if self.spectra is None:
            return np.full((len(self.leads), len(self.channels)), np.nan)
        return self.spectra.short_ratio()[self._rows]

    def normalised(self, source: str = "model") -> np.ndarray:
        """(lead,) mean over channels of RMSE / training standard deviation, without units.

        Channels that never vary are left out, with a warning when the scores are made.
        """
        if self.std is None:
            raise ValueError("the normalised mean needs the training standard deviations")
        std = np.array([self.std[name] for name in self.channels.names])
        vary = std > 0
        if not vary.any():
            raise ValueError("no channel varies: there is no normalised mean")
        return (self.rmse(source)[:, vary] / std[vary]).mean(1)

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per source, channel and lead, keys `COLUMNS`; None where undefined."""
        rows = []
        for source in SOURCES:
            scores = [self.rmse(source), self.bias(source), self.mae(source), self.acc(source),
                      self.activity(source), self.activity_ratio(source)]  # fmt: skip
            for i, channel in enumerate(self.channels):
                for k, lead in enumerate(self.leads):
                    values = [_plain(score[k, i]) for score in scores]
                    counts = [self.sums.samples[lead - 1], self.sums.cells[lead - 1, i]]
                    rows.append([
                        source, channel.name, channel.variable, channel.level,
                        channel.level_units, channel.units, lead, self._hours(lead),
                        *(int(count) for count in counts), *values,
                    ])  # fmt: skip
            means = [] if self.std is None else self.normalised(source).tolist()
            for lead, mean in zip(self.leads, means, strict=False):
                rows.append([
                    source, "normalised", "normalised", None, "", "1", lead, self._hours(lead),
                    int(self.sums.samples[lead - 1]), None, mean, *[None] * 5,
                ])  # fmt: skip
        return [dict(zip(COLUMNS, row, strict=True)) for row in rows]

    def _hours(self, lead: int) -> float:
        return float(self.lead_seconds[lead - 1]) / 3600

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader or a plot needs, as JSON holds it."""
        description = {
            "climatology": self.climatology,
            "region": list(self.region) if self.region else None,
            "pairs": int(self.sums.samples.sum()),
            "skipped": self.skipped,
            "first_skipped": self.first_skipped,
            "std": self.std,
            "provenance": {"graticule": __version__, **self.provenance},
            "spectra": self._spectra_told(),
            "ocean": None if self.ocean is None else self.ocean.told(),
        }
        if self.ensemble is not None:
            description["ensemble"] = self.ensemble.told()
        rows = self.rows()
        digest = fingerprint({**description, "rows": rows})
        return {"format": FORMAT, "fingerprint": digest, **description, "rows": rows}

    def _spectra_told(self) -> dict[str, Any] | None:
        """What a spectrum says in one number by lead; the whole of it is in a file of its own."""
        if self.spectra is None:
            return None
        ratios = self.short_power_ratio()
        return {
            "leads": self.leads,
            "channels": {
                name: {
                    "kind": self.spectra.kind[i],
                    "share": float(self.spectra.share[i]),
                    "short_wavenumbers": self._short_waves(i),
                    "short_power_ratio": [_plain(ratio) for ratio in ratios[:, i]],
                }
                for i, name in enumerate(self.channels.names)
            },
        }

    def _short_waves(self, channel: int) -> list[float] | None:
        """The first and the last wavenumber of `Spectra.short`."""
        assert self.spectra is not None
        short = self.spectra.wavenumber[self.spectra.short[channel]]
        return [float(short[0]), float(short[-1])] if short.size else None

    def table(self, leads: Sequence[int] | None = None) -> str:
        """Text: RMSE per channel at some leads, and the rest at the last of them.

        leads: labels; by default five at most, the first and the last among them, and fewer
        where five would be wider than `WIDEST`.
        """
        shown = list(leads or [])
        if leads is None:
            for number in (5, 4, 3, 2):
                places = np.linspace(0, len(self.leads) - 1, number).round().astype(int)
                shown = [self.leads[place] for place in np.unique(places)]
                rows = self._table_rows(shown)
                if max(map(len, rows)) <= WIDEST:
                    break
        else:
            unknown = [lead for lead in shown if lead not in self.leads]
            if unknown or not shown:
                raise ValueError(f"no score at lead {unknown or 'none'}; there are {self.leads}")
            rows = self._table_rows(shown)
        region = ", ".join(f"{edge:g}" for edge in self.region) if self.region else "everywhere"
        notes = [
            "Ratios (below 1: better), bias, ACC and activity / truth's at"
            f" {lead_in_words(self._hours(shown[-1]))}."
            f" {int(self.sums.samples.sum())} forecast fields,",
            f"climatology by {self.climatology}, region {region}.",
        ]
        if self.skipped:
            notes.append(f"{self.skipped} fields had no truth in the store, the first at"
                         f" {self.first_skipped}.")  # fmt: skip
        ocean = [] if self.ocean is None else self.ocean.lines(WIDEST)
        members = [] if self.ensemble is None else self.ensemble.lines(WIDEST)
        return "\n".join([*rows, *notes, *members, *self._smoothness(shown[-1]), *ocean])

    def _table_rows(self, leads: Sequence[int]) -> list[str]:
        at = [self.leads.index(lead) for lead in leads]
        last = at[-1]
        head = ["RMSE", "units", *(lead_in_words(self._hours(lead)) for lead in leads),
                "/persistence", "/climatology", "bias", "ACC", "activity"]  # fmt: skip
        rmse, bias, acc, activity = self.rmse(), self.bias(), self.acc(), self.activity_ratio()
        ratios = [self.skill("persistence"), self.skill("climatology")]
        lines = [head]
        for i, channel in enumerate(self.channels):
            lines.append([
                channel.name, channel.units, *(f"{rmse[k, i]:.4g}" for k in at),
                *(_short(ratio[last, i], ".3f") for ratio in ratios),
                f"{bias[last, i]:+.3g}", _short(acc[last, i], ".3f"),
                _short(activity[last, i], ".3f"),
            ])  # fmt: skip
        if self.std is not None:
            model, *others = (self.normalised(source) for source in SOURCES)
            lines.append([
                "normalised", "1", *(f"{model[k]:.4g}" for k in at),
                *(_short(model[last] / o[last] if o[last] > 0 else np.nan, ".3f") for o in others),
                "", "", "",
            ])  # fmt: skip
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]

    def _smoothness(self, lead: int) -> list[str]:
        """Whether the forecast is as active and as fine as the truth at a lead, in words."""
        when, last = lead_in_words(self._hours(lead)), self.leads.index(lead)
        text = self._verdict(
            f"Activity at {when}", self.activity_ratio()[last], "damped", "too active", "as active"
        )
        if self.spectra is None:
            return text
        ratio = self.short_power_ratio()[last]
        text += self._verdict(
            f"Power at short waves at {when}", ratio, "smoother", "rougher", "as fine"
        )
        if np.isfinite(ratio).any():
            lowest = int(np.nanargmin(ratio))
            first, end = self._short_waves(lowest) or (np.nan, np.nan)
            text += textwrap.wrap(
                "Short waves: the shortest quarter of those that the truth has"
                f" ({self.channels.names[lowest]}: {first:.4g} to {end:.4g} round a circle of"
                f" latitude, {self.spectra.kind[lowest]}, {self.spectra.share[lowest]:.0%} of its"
                " area).",
                WIDEST,
            )
        return text + self._unspectral()

    def _verdict(self, what: str, ratio: np.ndarray, less: str, more: str, alike: str) -> list[str]:
        """ratio: (channel,), forecast / truth."""
        known, names = np.flatnonzero(np.isfinite(ratio)), self.channels.names
        if not known.size:
            return []
        low, high = (int(known[find(ratio[known])]) for find in (np.argmin, np.argmax))
        lower, higher = (
            [names[i] for i in known if beyond(ratio[i])]
            for beyond in (lambda r: r < ALIKE, lambda r: r > 1 / ALIKE)
        )
        told = [f"{word} in {_some(found)}"
                for word, found in ((less, lower), (more, higher)) if found]  # fmt: skip
        return textwrap.wrap(
            f"{what} / truth's: {ratio[low]:.3g} ({names[low]}) to {ratio[high]:.3g}"
            f" ({names[high]}), {'; '.join(told) or alike}.",
            WIDEST,
        )

    def _unspectral(self) -> list[str]:
        assert self.spectra is not None
        by_kind = zip(self.channels.names, self.spectra.kind, strict=True)
        none = [name for name, kind in by_kind if kind.startswith("none")]
        return [f"No spectrum of {_some(none)}; the file of spectra says why."] if none else []

    def write_csv(self, path: str | Path, *, force: bool = False) -> None:
        """One line per row of `rows`. An existing file is refused; see `write_json`."""
        path = _may_write(Path(path), force, ",".join(COLUMNS[:8]))
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text.getvalue())
            os.replace(part, path)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error}; make room or access") from error
        finally:
            part.unlink(missing_ok=True)

    def write_json(self, path: str | Path, *, force: bool = False) -> None:
        """`to_dict` as a file, whole or not at all.

        An existing file is refused; with `force` it is replaced if it is a file of scores.
        """
        write_json(_may_write(Path(path), force, _ANY_FORMAT), self.to_dict())

    def write_spectra(self, path: str | Path, *, force: bool = False) -> None:
        """The spectra as netCDF; see `Spectra.save`."""
        if self.spectra is None:
            raise ValueError("these scores were made without spectra")
        self.spectra.save(path, force=force)

    def write_ocean(self, path: str | Path, *, force: bool = False) -> None:
        """The scores by depth as netCDF; see `save_ocean`."""
        if self.ocean is None:
            raise ValueError("these scores are of no ocean with levels in metres")
        save_ocean(self.ocean, path, force=force)

    def write_ensemble(self, path: str | Path, *, force: bool = False) -> None:
        """The scores of the members as netCDF; see `save_ensemble`."""
        if self.ensemble is None:
            raise ValueError("these scores are of a forecast without members")
        save_ensemble(self.ensemble, path, force=force)


def _may_write(path: Path, force: bool, mark: str) -> Path:
    """`path`; ValueError if it exists, unless forced and its first 300 characters hold our mark."""
    if path.exists() or path.is_symlink():
        if not force:
            raise ValueError(f"{path} exists already and is not overwritten; name another path")
        if not path.is_file() or mark not in path.read_text(errors="replace")[:300]:
            raise ValueError(f"{path} is no file of scores, so it is not replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _plain(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _short(value: float, spec: str) -> str:
    return format(value, spec) if np.isfinite(value) else "-"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
