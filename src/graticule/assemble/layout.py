"""From a configuration to a model that runs on a mesh, step by step.

The order has reasons. The model is built on `meta`, so that no rank ever holds what it does not
keep. Modules that read other grid points are put in their stripes first, windows next, since both
look only at shapes. Attention and MLP are split over `tensor` before weights are sharded: FSDP
shards what is left of each. Memory comes last, when it is known how little of it is needed.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from graticule.assemble.build import Shapes, unplaced
from graticule.config import BeastConfig, Config, UNetConfig
from graticule.mesh import SAMPLE, Mesh, Stripes
from graticule.model.beast import Beast
from graticule.model.norm_gelu import BatchNormGelu
from graticule.model.swin import Swin
from graticule.model.unet import UNet
from graticule.parallel.data import SharedWeights, shard_weights
from graticule.parallel.exchange import Link
from graticule.parallel.layouts import Topology
from graticule.parallel.materialise import materialise
from graticule.parallel.norm_gelu import share_batches
from graticule.parallel.routes import route_windows
from graticule.parallel.space import stripe
from graticule.parallel.tensor import split_tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Running:
    """A model on a mesh, as one rank runs it.

    model: takes and gives the rank's stripe of fields, (batch, channel, rows, columns).
    stripes: which rows and columns of the grid those are. shared: gradients and their norm.
    links: all over which numbers travel, the ranks that share a sample first.
    """

    model: nn.Module
    mesh: Mesh
    stripes: Stripes
    shared: SharedWeights
    links: tuple[Link, ...]

    @property
    def link(self) -> Link:
        """The ranks that share a sample."""
        return self.links[0]

    @property
    def sent(self) -> Counter[str]:
        """Bytes that left this rank so far, by what they were for (not those of FSDP)."""
        return sum((link.sent for link in self.links), Counter())


def assemble(
    config: Config,
    shapes: Shapes,
    mesh: Mesh,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    place: Callable[[nn.Module], None] | None = None,
) -> Running:
    """The configured model with its initial weights, laid out over the ranks of `mesh`.

    place: gives the weights, on `meta`, their memory; None: on `device`, with initial values.
    All ranks call it together. ValueError where a layout does not suit the model.
    """
    settings = config.mesh
    _require_scored(config)
    _require_axes(config, mesh)
    model = unplaced(config, shapes, dtype)
    if isinstance(model, UNet) and model.seam and mesh.rank == 0:
        _say_once(model.seam)
    stripes = Stripes.of(
        model.scales,
        grid=shapes.grid,
        start=(model.pad.north, model.pad.west),
        dim=settings.stripe_dim,
        ranks=mesh.sample_size,
        index=mesh.sample_index,
    )
    link = Link(mesh.group(*SAMPLE), settings.exchange)
    links = [link]
    if mesh.sample_size > 1:
        stripe(model, stripes, link)
    if mesh.sample_size > 1 and isinstance(model, Swin | Beast):
        topology = Topology(
            window=mesh.sizes["window"],
            sequence=mesh.sizes["sequence"],
            tensor=mesh.sizes["tensor"],
            fixed=settings.fixed_windows,
        )
        sequence = Link(mesh.group("sequence"), settings.exchange)
        route_windows(model, topology, stripes, link, sequence)
        links += [sequence, split_tensors(model, mesh)]
    if any(isinstance(module, BatchNormGelu) for module in model.modules()):
        links.append(Link(mesh.group(), settings.exchange))
        share_batches(model, links[-1])
    shard_weights(model, mesh, settings, model.compute_dtype)
    if place is None:
        materialise(model, config.train.seed, device)
    else:
        place(model)
    shared = SharedWeights(model, mesh)
    links += shared.links.values()
    return Running(model=model, mesh=mesh, stripes=stripes, shared=shared, links=tuple(links))


def _require_scored(config: Config) -> None:
    """ValueError for a model whose norms hear noise without members that are scored together."""
    model = config.model
    if isinstance(model, BeastConfig) and model.nice_noise and config.bayes.likelihood == "none":
        raise ValueError(
            f"model.nice_noise={model.nice_noise} makes members of an ensemble, and"
            " bayes.likelihood=none scores one forecast: choose bayes.likelihood=moments, gaussian"
            " or crps, or, for a model that is not an ensemble, model.nice_noise=0"
        )


@cache
def _say_once(what: str) -> None:
    _log.warning("%s", what)


def _require_axes(config: Config, mesh: Mesh) -> None:
    """ValueError for axes that share out what the model has not: attention windows, heads."""
    if not isinstance(config.model, UNetConfig):
        return
    for axis in ("sequence", "tensor"):
        if mesh.sizes[axis] > 1:
            raise ValueError(
                f"mesh.{axis}={mesh.sizes[axis]} shares out attention, and a U-Net has none: its"
                " samples are shared in stripes by mesh.window alone, so take"
                f" mesh.window={mesh.sample_size} and mesh.{axis}=1; weights are shared by"
                " mesh.weights=sharded"
            )
    if config.mesh.fixed_windows:
        raise ValueError(
            f"mesh.fixed_windows={config.mesh.fixed_windows} lays out attention windows, and a"
            " U-Net has none: leave it at none"
        )
