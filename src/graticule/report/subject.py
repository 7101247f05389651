"""All that one report is made of, and which leads and channels it shows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import cftime

from graticule.config import Config, from_dict
from graticule.data.store import Store
from graticule.evaluate.ensemble_scores import EnsembleScores
from graticule.evaluate.ocean import OceanScores
from graticule.evaluate.spectra import Spectra
from graticule.forecast.reader import open_forecast
from graticule.report.folder import RunFolder
from graticule.report.picture import lead_words
from graticule.variables import Channel, Channels

MOST_CHANNELS = 4
"""Channels with maps and spectra of their own, unless others are asked for."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a forecast file says of itself. hours: (lead,)."""

    path: Path
    attributes: dict[str, Any]
    channels: Channels
    init_times: list[cftime.datetime]
    hours: list[float]
    grid: tuple[int, int]
    num_members: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Opened":
        with open_forecast(path) as forecast:
            return cls(
                path=path,
                attributes=forecast.attributes,
                channels=forecast.channels,
                init_times=forecast.init_times,
                hours=(forecast.lead_seconds / 3600).tolist(),
                grid=forecast.grid.shape,
                num_members=forecast.num_members,
            )

    @cached_property
    def config(self) -> Config | None:
        """The configuration it was made with; None for a file that another program wrote."""
        text = self.attributes.get("config")
        return from_dict(json.loads(text)) if isinstance(text, str) else None

    def init_of(self, text: str) -> int:
        """Position of the initial time that `text` begins to write, as in 2001-12-10T06."""
        found = [i for i, date in enumerate(self.init_times) if date.isoformat().startswith(text)]
        if len(found) != 1:
            dates = [f"{date:%Y-%m-%dT%H:%M}" for date in self.init_times]
            shown = ", ".join(dates[:6]) + (f", ... {dates[-1]}" if len(dates) > 6 else "")
            raise ValueError(
                f"--init {text} stands for {len(found)} initial times of {self.path}, which has"
                f" {shown}"
            )
        return found[0]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """scores, others_scores: `Scores.to_dict()`. store: the truth of the forecast, and
    training_store: what the run was trained on, if they are where they were.
    ocean: scores by depth, of a forecast with levels of an ocean. ensemble: of one with members.

    lineage: the runs its weights come from, nearest first. others: runs to compare with.
    seconds: by stage. chosen: channels that were asked for; empty: chosen here.
    init: position of the initial time that maps show. troubles: what is missing and why.
    """

    run: RunFolder
    lineage: Sequence[RunFolder] = ()
    forecast: Opened | None = None
    scores: dict[str, Any] | None = None
    spectra: Spectra | None = None
    ocean: OceanScores | None = None
    ensemble: EnsembleScores | None = None
    store: Store | None = None
    training_store: Store | None = None
    others: dict[str, RunFolder] = field(default_factory=dict)
    others_scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    chosen: Sequence[str] = ()
    init: int = 0
    troubles: Sequence[str] = ()

    @cached_property
    def shown_channels(self) -> list[str]:
        """Those asked for, else at most four that differ: each variable's first level, then
        further levels."""
        assert self.forecast
        channels = self.forecast.channels
        if self.chosen:
            return [channels.names[i] for i in channels.pick(self.chosen)]
        first: list[str] = []
        rest: list[str] = []
        seen: set[str] = set()
        for channel in channels:
            (rest if channel.variable in seen else first).append(channel.name)
            seen.add(channel.variable)
        # Of many levels those far apart say more than neighbours.
        wanted = max(0, MOST_CHANNELS - len(first))
        spread = [rest[(i + 1) * len(rest) // wanted - 1] for i in range(wanted)] if rest else []
        picked = {*first[:MOST_CHANNELS], *spread}
        return [name for name in channels.names if name in picked]

    @cached_property
    def scored_leads(self) -> list[int]:
        """Labels of the leads that have a score, 1 for the first model step."""
        return sorted({row["lead"] for row in self.scores["rows"]}) if self.scores else []

    @cached_property
    def shown_leads(self) -> tuple[int, ...]:
        """The first, a middle and the last lead with a truth, or of the forecast."""
        assert self.forecast
        leads = self.scored_leads or list(range(1, len(self.forecast.hours) + 1))
        return tuple(sorted({leads[0], leads[(len(leads) - 1) // 2], leads[-1]}))

    def channel(self, name: str) -> Channel:
        assert self.forecast
        return self.forecast.channels[self.forecast.channels.index(name)]


def series(
    scores: dict[str, Any], channel: str, quantity: str = "rmse", source: str = "model"
) -> dict[int, float]:
    """By lead, where there is a number."""
    return {
        row["lead"]: row[quantity]
        for row in scores["rows"]
        if row["source"] == source and row["channel"] == channel and row.get(quantity) is not None
    }


def ratios(scores: dict[str, Any], reference: str, channel: str = "normalised") -> dict[int, float]:
    """By lead, RMSE of the model over that of a reference."""
    ours, theirs = series(scores, channel), series(scores, channel, source=reference)
    return {lead: ours[lead] / theirs[lead] for lead in ours if theirs.get(lead)}


def lead_names(scores: dict[str, Any]) -> dict[int, str]:
    """By lead, as the pictures write it: 6 h, 2 d."""
    hours = {row["lead"]: row["lead_hours"] for row in scores["rows"]}
    return dict(zip(hours, lead_words(list(hours.values())), strict=True))


def grouping(scores: dict[str, Any]) -> str:
    """What the climatology is: a mean of all training times, or of those of a group."""
    how = scores["climatology"]
    if how == "all":
        return "the mean of all training times"
    return f"the mean of the training times, grouped by {how}"


def by(shape: Sequence[int]) -> str:
    return " × ".join(str(n) for n in shape)
