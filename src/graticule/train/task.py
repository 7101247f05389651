"""What a configuration makes of a store: samples, model and objective, before any training."""

import logging
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graticule.assemble import PRECISIONS, Running, assemble, shapes_of, stripe_axes
from graticule.config import Config, fingerprint
from graticule.data.loader import Batch, Loader, Order
from graticule.data.normalise import Normaliser, normalised_statics
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.grid import Grid
from graticule.mesh import SAMPLE, Dim, Mesh
from graticule.parallel.exchange import Link
from graticule.train.differences import Differences
from graticule.train.loss import LossWeights, loss_kind
from graticule.train.members import Ensemble, ensemble_of
from graticule.train.objective import Objective

VALIDATION_SAMPLES = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What a configuration makes of a store: samples, model and objective, before any state.

    source: of all channels, of the part of the grid that is here (`running.stripes`). objective:
    of the channels that are here, too (`running.planes`). ensemble: of models whose members are
    scored together.
    """

    config: Config
    device: torch.device
    source: SampleSource
    running: Running
    objective: Objective
    ensemble: Ensemble | None
    train_starts: np.ndarray
    validation_starts: np.ndarray | None
    fingerprints: dict[str, str]
    statistics: Statistics

    @classmethod
    def of(cls, config: Config, device: torch.device, mesh: Mesh | None = None) -> "Task":
        """mesh: none: of one process. Of several, all of them make this call together."""
        settings, mesh = config.train, mesh or Mesh()
        store = _store_of(config)
        whole = SampleSource(store, config.data)
        if settings.roll_longitude:
            ranks, _ = mesh.stripes(stripe_axes(config))
            _require_rollable(whole, config.mesh.stripe_dim, ranks)
        if config.model.boundary == "globe":
            _require_closed(whole)
        train_starts = whole.starts("train", settings.leads)
        _log_holes(whole, len(train_starts))
        validation_starts = None
        if whole.ranges["validation"]:
            validation_starts = whole.starts("validation", settings.leads)
        elif settings.validate_every:
            whole.times("validation")  # raises: there is none
        else:
            _log.info("no validation split: no validation loss")
        statistics = Statistics.load(store)
        statistics.check_times(store, whole.times("train"))
        running = assemble(config, shapes_of(whole), mesh, device=device)
        rows, columns = running.stripes.rows, running.stripes.columns
        source = whole.part(rows, columns)
        if settings.roll_longitude:
            _require_no_land(source, running, device)
        ours = source.of(running.planes)

        dtype = PRECISIONS[settings.precision].fields
        here = {"rows": rows, "columns": columns}

        def normaliser(channels: Sequence[int]) -> Normaliser:
            return Normaliser(store, channels, statistics, dtype=dtype, **here).to(device)

        # Masks are large: what is predicted, compared and given has the same one.
        labels = normaliser(ours.predicted)
        same = ours.prognostic == ours.predicted

        area = store.grid.cell_area if settings.area_weighted else None
        weights = LossWeights.of(
            store.wet_part(ours.predicted, rows, columns),
            None if area is None else area[rows, columns],
            mean_area=None if area is None else float(area.mean()),
            denominator=settings.denominator,
            link=Link(mesh.group(*SAMPLE)),
            planes=running.planes,
            device=device,
        ).sharing(labels.wet)
        objective = Objective(
            inputs=labels if same else normaliser(ours.prognostic),
            forcing=normaliser(ours.forcing),
            labels=labels,
            statics=normalised_statics(
                store, ours.channel_names["static"], statistics, **here
            ).to(device, dtype),
            weights=weights,
            kind=loss_kind(settings),
            leads=settings.leads,
            num_prognostic=running.shapes.num_prognostic,
            num_outputs=running.shapes.num_outputs,
            detach_every=settings.detach_every,
            differences=Differences.of(
                weights, settings.gradient_loss, grid=store.grid.shape,
                periodic=store.grid.periodic, stripes=running.stripes, link=running.link,
            )
            if settings.gradient_loss
            else None,
            planes=running.planes,
        )  # fmt: skip
        statics = whole.channel_names["static"]
        names = [store.channels.names[c] for c in source.used] + statics
        mean, scale = statistics.aligned(names)
        return cls(
            config=config,
            device=device,
            source=source,
            running=running,
            objective=objective,
            ensemble=ensemble_of(config, mesh, running.model, objective, len(train_starts)),
            train_starts=train_starts,
            validation_starts=validation_starts,
            statistics=statistics,
            fingerprints={
                "config": config.fingerprint,
                "store": store.fingerprint,
                "statistics": fingerprint([names, mean.tolist(), scale.tolist()]),
            },
        )

    @property
    def model(self) -> nn.Module:
        """Of the part of the grid that is here."""
        return self.running.model

    def validation_loss(self) -> float:
        """The objective over the validation samples that `trainer.train` describes, the same on
        all ranks."""
        assert self.validation_starts is not None
        starts = evenly(self.validation_starts, VALIDATION_SAMPLES)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        with torch.no_grad(), closing(self.batches(starts, self.objective.leads)) as batches:
            for batch, counts in batches:
                for *_, errors in self.forecast(batch):
                    total += errors.sum() * counts
        self.model.train()
        total = Link(self.running.mesh.group()).sum(total, "validation")
        return total.item() / self.objective.weight(len(starts))

    def forecast(
        self, batch: Batch, leads: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(predicted, labels, error sums) of each lead of a batch, as `Objective.forecast` gives
        them; of members the first is their mean. leads: None: as many as in training."""
        objective = self.objective if leads is None else replace(self.objective, leads=leads)
        if self.ensemble:
            return self.ensemble.forecast(self.model, objective, batch)
        states = objective.inputs(objective.on_device(batch.inputs))
        return objective.forecast(self.model, states, batch)

    def batches(self, starts: np.ndarray, leads: int) -> Generator[tuple[Batch, bool], None, None]:
        """This rank's share of samples that start there, and whether a batch counts.

        All ranks call the model equally often. One that has run out of samples takes one that is
        not its own, alone in the last batch, and forgets it.
        """
        ranks, index = self.running.mesh.sizes["data"], self.running.mesh.index("data")
        own, share = starts[index::ranks], math.ceil(self.config.train.batch / ranks)
        steps = math.ceil(math.ceil(len(starts) / ranks) / share)
        counted = math.ceil(len(own) / share)
        order = Order(np.concatenate([own, starts[: steps - counted]]), seed=None)
        loader = self._loader(
            order, range(len(order.starts)), leads=leads, batch=share, rank=0, ranks=1,
            roll_seed=None,
        )  # fmt: skip
        with closing(iter(loader)) as batches:
            for number, batch in enumerate(batches):
                yield batch, number < counted

    def loader(self, order: Order, numbers: range) -> Loader:
        """Of training batches: this rank's share of each."""
        settings, mesh = self.config.train, self.running.mesh
        samples = settings.batch * settings.accumulation
        return self._loader(
            order, numbers, leads=lambda number: settings.leads_at(number // samples + 1),
            batch=settings.batch, rank=mesh.index("data"), ranks=mesh.sizes["data"],
            # Each member turns its samples by itself.
            roll_seed=settings.seed if settings.roll_longitude and not self.ensemble else None,
        )  # fmt: skip

    def _loader(self, order: Order, numbers: range, **shares: Any) -> Loader:
        return Loader(
            self.source.of(self.running.planes),
            order,
            numbers,
            threads=self.config.data.read_threads,
            waves=self.config.data.read_waves,
            reader=self.running.mesh.rank,
            device=self.device,
            **shares,
        )


def evenly(starts: np.ndarray, most: int) -> np.ndarray:
    """At most so many of them, evenly spaced, in order; the first and the last among them."""
    picked = np.unique(np.linspace(0, len(starts) - 1, most).round().astype(int))
    return starts[picked]


def in_steps(config: Config) -> Config:
    """`config` with its `train.epochs`, if it has any, in steps: enough of them to see every
    training window so often."""
    settings = config.train
    if not settings.epochs:
        return config
    windows = len(SampleSource(_store_of(config), config.data).starts("train", settings.leads))
    steps = math.ceil(settings.epochs * windows / (settings.batch * settings.accumulation))
    _log.info(
        "%d epochs of %d windows are %d steps of %d samples", settings.epochs, windows, steps,
        settings.batch * settings.accumulation,
    )  # fmt: skip
    return replace(config, train=replace(settings, steps=steps, epochs=0))


def _store_of(config: Config) -> Store:
    if not config.data.store:
        raise ValueError("nothing to train on: set data.store=PATH, a store's folder")
    return Store(config.data.store)


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


def _require_rollable(source: SampleSource, dim: Dim, ranks: int) -> None:
    """Turning a sample in longitude is a symmetry of the sphere, not of its continents."""
    if not source.store.grid.periodic:
        lon = source.store.grid.lon
        raise _unrollable(f"the grid does not close round the globe (lon {lon[0]} to {lon[-1]})")
    if source.statics:
        statics = ", ".join(source.channel_names["static"])
        raise _unrollable(f"the statics ({statics}) stay where they are")
    if dim == "lon" and ranks > 1:
        raise _unrollable(
            f"mesh.stripe_dim=lon cuts each circle of latitude among {ranks} ranks"
            " (mesh.stripe_dim=lat cuts none)"
        )


def _require_no_land(source: SampleSource, running: Running, device: torch.device) -> None:
    """source: of the part of the grid that is here; all ranks of a sample look together."""
    wet = source.store.wet_part(source.used, running.stripes.rows, running.stripes.columns)
    link = Link(running.mesh.group(*SAMPLE))
    dry = link.sum(torch.from_numpy((~wet).sum((1, 2))).to(device), "land")
    if dry.any():
        name = source.store.channels.names[source.used[int(dry.argmax())]]
        raise _unrollable(f"{name} has land, which stays where it is")


def _unrollable(reason: str) -> ValueError:
    return ValueError(f"train.roll_longitude=true is not right here: {reason}; set it to false")
