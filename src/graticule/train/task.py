"""What a configuration makes of a store: samples, model and objective, before any training."""

import logging
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from graticule.assemble import build_model, shapes_of
from graticule.config import Config, fingerprint
from graticule.data.loader import Loader, Order
from graticule.data.normalise import Normaliser, normalised_statics
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.grid import Grid
from graticule.train.loss import LossWeights
from graticule.train.step import Objective

VALIDATION_SAMPLES = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What a configuration makes of a store: samples, model and objective, before any state."""

    config: Config
    device: torch.device
    source: SampleSource
    model: nn.Module
    objective: Objective
    train_starts: np.ndarray
    validation_starts: np.ndarray | None
    fingerprints: dict[str, str]
    statistics: Statistics

    @classmethod
    def of(cls, config: Config, device: torch.device) -> "Task":
        settings = config.train
        if not config.data.store:
            raise ValueError("nothing to train on: set data.store=PATH, a store's folder")
        store = Store(config.data.store)
        source = SampleSource(store, config.data)
        if settings.roll_longitude:
            _require_rollable(source)
        if config.model.boundary == "globe":
            _require_closed(source)
        train_starts = source.starts("train", settings.leads)
        _log_holes(source, len(train_starts))
        validation_starts = None
        if source.ranges["validation"]:
            validation_starts = source.starts("validation", settings.leads)
        elif settings.validate_every:
            source.times("validation")  # raises: there is none
        else:
            _log.info("no validation split: no validation loss")
        statistics = Statistics.load(store)
        statistics.check_times(store, source.times("train"))
        statics = source.channel_names["static"]
        shapes = shapes_of(source)
        area = store.grid.cell_area if settings.area_weighted else None
        objective = Objective(
            inputs=Normaliser(store, source.prognostic, statistics).to(device),
            forcing=Normaliser(store, source.forcing, statistics).to(device),
            labels=Normaliser(store, source.predicted, statistics).to(device),
            statics=normalised_statics(store, statics, statistics).to(device),
            weights=LossWeights.of(store.wet[source.predicted], area).to(device),
            kind=settings.loss,
            leads=settings.leads,
            num_prognostic=shapes.num_prognostic,
            num_outputs=shapes.num_outputs,
            detach=settings.rollout_gradient == "detached",
        )
        names = [store.channels.names[c] for c in source.used] + statics
        mean, scale = statistics.aligned(names)
        return cls(
            config=config,
            device=device,
            source=source,
            model=build_model(config, shapes, device=device),
            objective=objective,
            train_starts=train_starts,
            validation_starts=validation_starts,
            statistics=statistics,
            fingerprints={
                "config": config.fingerprint,
                "store": store.fingerprint,
                "statistics": fingerprint([names, mean.tolist(), scale.tolist()]),
            },
        )

    def validation_loss(self) -> float:
        """The objective over the validation samples that `trainer.train` describes."""
        starts = self.validation_starts
        assert starts is not None
        picked = np.unique(np.linspace(0, len(starts) - 1, VALIDATION_SAMPLES).round().astype(int))
        loader = self.loader(Order(starts[picked], seed=None), range(len(picked)), rolled=False)
        total = 0.0
        self.model.eval()
        with torch.no_grad(), closing(iter(loader)) as batches:
            for batch in batches:
                total += sum(error.item() for error in self.objective.errors(self.model, batch))
        self.model.train()
        return total / self.objective.weight(len(picked))

    def loader(self, order: Order, numbers: range, *, rolled: bool) -> Loader:
        settings = self.config.train
        return Loader(
            self.source,
            order,
            numbers,
            batch=settings.batch,
            leads=settings.leads,
            roll_seed=settings.seed if rolled else None,
            threads=self.config.data.read_threads,
            waves=self.config.data.read_waves,
            device=self.device,
        )


def fields_of(source: SampleSource) -> dict[str, Any]:
    """What a model takes for granted of its fields: the grid, and units by channel."""
    grid, store = source.store.grid, source.store
    channels = [store.channels[c] for c in source.used] + [store.statics[c] for c in source.statics]
    return {
        "lat": grid.lat.tolist(),
        "lon": grid.lon.tolist(),
        "units": {channel.name: channel.units for channel in channels},
    }


def require_same_fields(trained: dict[str, Any], source: SampleSource) -> None:
    """ValueError unless a store's grid and units are those of `fields_of` at training."""
    here = fields_of(source)
    if not Grid(trained["lat"], trained["lon"]).same_as(source.store.grid):
        shape = len(trained["lat"]), len(trained["lon"])
        raise ValueError(
            f"{source.store.path} has a grid of {source.store.grid.shape} points (lat"
            f" {here['lat'][0]:g} to {here['lat'][-1]:g}, lon {here['lon'][0]:g} to"
            f" {here['lon'][-1]:g}); the run was trained on {shape} (lat {trained['lat'][0]:g} to"
            f" {trained['lat'][-1]:g}, lon {trained['lon'][0]:g} to {trained['lon'][-1]:g}):"
            " regrid the fields"
        )
    for name, units in here["units"].items():
        before = trained["units"].get(name, units)
        if units != before:
            raise ValueError(
                f"{name} is in {units!r} in {source.store.path} and was in {before!r} at training;"
                f" ingest it with --units {name.partition('@')[0]}={before}"
            )


def _log_holes(source: SampleSource, num_windows: int) -> None:
    """Say which policy holds for missing values before anything is trained."""
    policy, times = source.config.holes, source.times("train")
    bad = times[source.holes[times]]
    if not bad.size:
        _log.info("holes at sea: none in %d training times (data.holes=%s)", times.size, policy)
        return
    first = int(bad[0])
    missing = source.store.missing[first]
    names = ", ".join(source.store.channels.names[c] for c in source.used if missing[c])
    _log.info(
        "holes at sea: %d of %d training times, the first is %s (%s); data.holes=%s leaves out the"
        " windows that touch them, %d are left",
        bad.size, times.size, source.store.times.date(first), names, policy, num_windows,
    )  # fmt: skip


def _require_closed(source: SampleSource) -> None:
    grid = source.store.grid
    if not grid.periodic:
        raise ValueError(
            f"the grid of {source.store.path} does not close round the globe (lon {grid.lon[0]:g}"
            f" to {grid.lon[-1]:g}), and model.boundary=globe would make its west and east edges"
            " neighbours; set model.boundary=paper"
        )


def _require_rollable(source: SampleSource) -> None:
    """Turning a sample in longitude is a symmetry of the sphere, not of its continents."""
    reason = ""
    if not source.store.grid.periodic:
        lon = source.store.grid.lon
        reason = f"the grid does not close round the globe (lon {lon[0]} to {lon[-1]})"
    elif source.statics:
        statics = ", ".join(source.channel_names["static"])
        reason = f"the statics ({statics}) stay where they are"
    else:
        dry = ~source.store.wet[source.used].all((1, 2))
        if dry.any():
            name = source.store.channels.names[source.used[int(dry.argmax())]]
            reason = f"{name} has land, which stays where it is"
    if reason:
        raise ValueError(f"train.roll_longitude=true is not right here: {reason}; set it to false")
