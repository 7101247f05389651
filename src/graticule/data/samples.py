"""Samples: which times belong together, and the stored numbers of each.

A model step leads from states at `input_offsets` to states at `output_offsets`, counted in
strides from its initial time: Wenhai (0) -> (1); a model with history (-1, 0) -> (1, 2). A
rollout of K leads starts lead k where lead k - 1 ended, `advance` store steps further.
"""

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import cftime
import numpy as np

from graticule.config import DataConfig
from graticule.data.shards import Target
from graticule.data.store import Store
from graticule.mesh import Planes
from graticule.variables import Channels, Role

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """The offsets of a sample, in store steps from its initial time."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forcings: tuple[int, ...]

    @classmethod
    def of(cls, config: DataConfig) -> "SampleSpec":
        def scaled(offsets: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(offset * config.stride for offset in offsets)

        return cls(
            inputs=scaled(config.input_offsets),
            outputs=scaled(config.output_offsets),
            forcings=scaled(config.forcing_offsets),
        )

    @property
    def advance(self) -> int:
        """Store steps from one lead's initial time to the next one's."""
        return max(self.outputs)

    def label_offsets(self, lead: int) -> tuple[int, ...]:
        """Store steps from the sample's initial time to the states of `lead` (1, 2, ...)."""
        return tuple((lead - 1) * self.advance + offset for offset in self.outputs)

    def given_offsets(self, lead: int) -> tuple[int, ...]:
        """As `label_offsets`, of the forcing that the step to `lead` is given."""
        return tuple((lead - 1) * self.advance + offset for offset in self.forcings)


@dataclass(frozen=True, eq=False)
class Sample:
    """One initial time of a store. Leads are read one at a time, in any order.

    key: the sample's number, which random draws for it depend on.
    All reads return stored numbers, (offset, channel, lat, lon), int16 or float32.
    """

    source: "SampleSource"
    start: int
    key: int

    @property
    def init_time(self) -> cftime.datetime:
        return self.source.store.times.date(self.start)

    def inputs(self) -> np.ndarray:
        """The known states, prognostic channels."""
        return self.source.read(self.start, self.source.spec.inputs, self.source.prognostic)

    def forcing(self, lead: int) -> np.ndarray:
        """What the step to `lead` (1, 2, ...) is given."""
        offsets = self.source.spec.given_offsets(lead)
        return self.source.read(self.start, offsets, self.source.forcing)

    def labels(self, lead: int) -> np.ndarray:
        """The true states of `lead`, predicted channels."""
        offsets = self.source.spec.label_offsets(lead)
        return self.source.read(self.start, offsets, self.source.predicted)


class SampleSource:
    """The samples that a data configuration makes of a store.

    prognostic, forcing, diagnostic, predicted (prognostic then diagnostic): positions in the
    store's channels. A channel that is not named is not copied.
    rows, columns: the part of the grid that is read, the whole of it by default; a stripe reads
    the inner chunks that it lies in, and an empty one none.
    """

    def __init__(
        self,
        store: Store,
        config: DataConfig,
        *,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> None:
        self.store, self.config = store, config
        self.rows, self.columns = store.extent(rows, columns)
        self.spec = SampleSpec.of(config)
        channels = store.channels
        if config.grid is not None and tuple(config.grid) != store.grid.shape:
            raise ValueError(
                f"data.grid={config.grid} but {store.path} is {store.grid.shape} (lat, lon);"
                " name another store, or set data.grid=none"
            )
        roles: tuple[Role, ...] = ("prognostic", "diagnostic", "forcing")
        named = {role: channels.pick(getattr(config, role)) for role in roles}
        for first, second in (roles[:2], roles[1:], roles[::2]):
            both = [channels.names[c] for c in named[first] if c in named[second]]
            if both:
                raise ValueError(
                    f"data.{first} and data.{second} both name {', '.join(both)}; a channel has"
                    " one role"
                )
        # What the configuration names has the role it names; the store's own roles fill the rest.
        for role in roles:
            for c in named[role]:
                if channels[c].role != role:
                    _log.info(
                        "%s is %s in %s and %s by data.%s", channels.names[c], channels[c].role,
                        store.path, role, role,
                    )  # fmt: skip
        taken = {c for picked in named.values() for c in picked}
        everything = Channels([*channels, *store.statics])
        absent = {everything.names[i] for i in everything.pick(config.without)}
        picked = {
            role: [
                c
                for c in named[role] or [c for c in channels.with_role(role) if c not in taken]
                if channels.names[c] not in absent
            ]
            for role in roles
        }
        self.prognostic, self.diagnostic, self.forcing = (picked[role] for role in roles)
        if not self.prognostic:
            raise ValueError(f"{store.path} has no prognostic channel: {channels!r}")
        self.predicted = self.prognostic + self.diagnostic
        self.statics = [
            c
            for c in store.statics.pick(config.static or store.statics.names)
            if store.statics.names[c] not in absent
        ]

    def part(self, rows: slice, columns: slice) -> "SampleSource":
        """The same samples, of a part of the grid."""
        part = copy(self)
        part.rows, part.columns = self.store.extent(rows, columns)
        return part

    def of(self, planes: Planes) -> "SampleSource":
        """The same samples, of the channels of each role that `planes` gives to a rank."""
        if planes.ranks == 1:
            return self
        part = copy(self)
        part.prognostic = self.prognostic[planes.prognostic.of(planes.index)]
        part.diagnostic = self.diagnostic[planes.diagnostic.of(planes.index)]
        part.forcing = self.forcing[planes.forcing.of(planes.index)]
        part.statics = self.statics[planes.static.of(planes.index)]
        part.predicted = part.prognostic + part.diagnostic
        return part

    @property
    def predicted_channels(self) -> Channels:
        return self.store.channels.subset(self.predicted)

    @property
    def channel_names(self) -> dict[str, list[str]]:
        """Names in order by role: what a model's input and output channels mean."""
        names = self.store.channels.names
        return {
            "prognostic": [names[c] for c in self.prognostic],
            "diagnostic": [names[c] for c in self.diagnostic],
            "forcing": [names[c] for c in self.forcing],
            "static": [self.store.statics.names[c] for c in self.statics],
        }

    @cached_property
    def ranges(self) -> dict[str, Sequence[str]]:
        """`first/last` ranges of train, validation and test: the configuration's, else the
        store's. ValueError where two splits share a time."""
        ranges: dict[str, Sequence[str]] = {}
        for split in ("train", "validation", "test"):
            ranges[split] = getattr(self.config, split) or self.store.splits.get(split, ())
        self.store.times.check_splits(ranges)
        return ranges

    def times(self, split: str) -> np.ndarray:
        """Indices of all times of a split."""
        if not self.ranges[split]:
            raise ValueError(
                f"data.{split} is empty and {self.store.path} declares no {split} split; set"
                f" data.{split}=first/last"
                + (
                    f" and compute statistics over the same dates: graticule data stats"
                    f" {self.store.path} --train first/last"
                    if split == "train"
                    else ""
                )
            )
        return np.flatnonzero(self.store.times.within(self.ranges[split]))

    def starts(self, split: str, leads: int) -> np.ndarray:
        """Initial times whose inputs, forcings and labels of all leads lie inside the split and
        no gap. Missing values follow `data.holes`."""
        inside = np.zeros(len(self.store.times), dtype=bool)
        inside[self.times(split)] = True
        offsets: set[int] = set(self.spec.inputs)
        for lead in range(1, leads + 1):
            offsets |= {*self.spec.label_offsets(lead)}
            offsets |= {*self.spec.given_offsets(lead)} if self.forcing else set()
        allowed = inside & ~self.holes if self.config.holes == "drop-window" else inside
        starts = self.store.times.windows(sorted(offsets), allowed)
        if self.config.holes == "error":
            self._refuse_holes(inside)
        if not starts.size:
            raise ValueError(
                f"the {split} split has {int(inside.sum())} times but no unbroken window of"
                f" {max(offsets) - min(offsets) + 1} steps ({leads} leads)"
                + (
                    f" once the {int((inside & self.holes).sum())} times with missing values at"
                    " sea are left out"
                    if self.holes[inside].any()
                    else ""
                )
                + "; use fewer leads or a longer split (of a generated ocean: --test-years)"
            )
        return starts

    @cached_property
    def holes(self) -> np.ndarray:
        """(time,) bool: a channel that samples use lacks values at sea."""
        return np.asarray(self.store.missing[:, self.used].any(1))

    @property
    def used(self) -> list[int]:
        """Positions of the channels that samples read, in store order."""
        return sorted({*self.predicted, *self.forcing})

    def _refuse_holes(self, inside: np.ndarray) -> None:
        bad = np.flatnonzero(self.holes & inside)
        if bad.size:
            time = int(bad[0])
            channel = max(self.used, key=lambda c: self.store.missing[time, c])
            raise ValueError(
                f"{bad.size} times miss values at sea, the first is"
                f" {self.store.channels.names[channel]} at {self.store.times.date(time)}"
                f" ({self.store.missing[time, channel]} cells); `graticule data check"
                f" {self.store.path}` lists them; data.holes=drop-window leaves their windows out"
            )

    def sample(self, start: int, key: int = 0) -> Sample:
        return Sample(self, int(start), key)

    @property
    def shape(self) -> tuple[int, int]:
        """(lat, lon) points of the part that is read."""
        return len(self.rows), len(self.columns)

    def read(self, start: int, offsets: Sequence[int], channels: Sequence[int]) -> np.ndarray:
        """(offset, channel, lat, lon) stored numbers."""
        planes = np.empty((len(offsets), len(channels), *self.shape), self.store.packing.dtype)
        wanted = [
            (start + offset, [Target(tuple(channels), out)])
            for offset, out in zip(offsets, planes, strict=True)
        ]
        self.store.read_into(wanted, self.rows, self.columns)
        return planes
