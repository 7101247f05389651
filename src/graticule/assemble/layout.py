"""From a configuration to a model that runs on a mesh, step by step.

The order has reasons. The model is built on `meta`, so that no rank ever holds what it does not
keep. Modules that read other grid points are put in their stripes first, windows next, since both
look only at shapes. What `tensor` shares is split before weights are sharded: FSDP shards what is
left of each. Memory comes last, when it is known how little of it is needed.

The ranks of `tensor` share a Swin's attention and MLP, each with a stripe of its own (`tensor.py`);
of a BEAST they share the channels and features of one stripe (`domain.py`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from graticule.assemble.build import Shapes, unplaced
from graticule.config import BeastConfig, Config, UNetConfig
from graticule.mesh import POINTS, SAMPLE, Mesh, Planes, Stripes
from graticule.model.beast import Beast
from graticule.model.norm_gelu import BatchNormGelu
from graticule.model.swin import Swin
from graticule.model.unet import UNet
from graticule.model.windows import WindowGrid
from graticule.parallel.data import SharedWeights, shard_weights
from graticule.parallel.domain import split_domain
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

    model: takes and gives the rank's stripe of fields, (batch, channel, rows, columns), of the
    rank's channels. stripes: which rows and columns of the grid those are. planes: which channels.
    shapes: of a sample with these channels, on the whole grid. shared: gradients and their norm.
    links: all over which numbers travel, the ranks that hold stripes of our channels first.
    """

    model: nn.Module
    mesh: Mesh
    stripes: Stripes
    planes: Planes
    shapes: Shapes
    shared: SharedWeights
    links: tuple[Link, ...]

    @property
    def link(self) -> Link:
        """The ranks that hold stripes of our channels, in order."""
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
    over = stripe_axes(config)
    size, index = mesh.stripes(over)
    stripes = Stripes.of(
        model.scales,
        grid=shapes.grid,
        start=(model.pad.north, model.pad.west),
        dim=settings.stripe_dim,
        ranks=size,
        index=index,
    )
    sharing = mesh.sample_size // size
    planes = shapes.planes(sharing, mesh.sample_index % sharing)
    link = Link(mesh.group(*over), settings.exchange)
    links = [link]
    if size > 1:
        stripe(model, stripes, link)
    if size > 1 and isinstance(model, Swin | Beast):
        topology = topology_of(config, mesh.sizes)
        sequence = Link(mesh.group("sequence"), settings.exchange)
        route_windows(model, topology, stripes, link, sequence)
        links.append(sequence)
        if mesh.rank == 0:
            _say_what_cuts_windows(window_grids(model), config, size)
    if isinstance(model, Beast):
        links.append(split_domain(model, mesh, planes))
    elif isinstance(model, Swin):
        links.append(split_tensors(model, mesh))
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
    return Running(
        model=model, mesh=mesh, stripes=stripes, planes=planes, shapes=shapes.on(planes),
        shared=shared, links=tuple(links),
    )  # fmt: skip


def stripe_axes(config: Config) -> tuple[str, ...]:
    """The axes over which stripes of a sample go: without `tensor` where its ranks share the
    channels of one."""
    return POINTS if isinstance(config.model, BeastConfig) else SAMPLE


def topology_of(config: Config, sizes: Mapping[str, int]) -> Topology:
    """How the stripes' ranks share attention windows. sizes: of the mesh, by axis."""
    shared = {axis: sizes[axis] for axis in stripe_axes(config)}
    return Topology(**shared, fixed=config.mesh.fixed_windows)


def _require_scored(config: Config) -> None:
    """ValueError for a model whose norms hear noise without members that are scored together."""
    model = config.model
    if isinstance(model, BeastConfig) and model.nice_noise and config.bayes.likelihood == "none":
        raise ValueError(
            f"model.nice_noise={model.nice_noise} makes members of an ensemble, and"
            " bayes.likelihood=none scores one forecast: choose bayes.likelihood=moments, gaussian"
            " or crps, or, for a model that is not an ensemble, model.nice_noise=0"
        )


def window_grids(model: nn.Module) -> list[WindowGrid]:
    """Of each stage that attends within windows."""
    if isinstance(model, Swin):
        return [model.windows]
    return [stage.grid for stage in model.stages.values()] if isinstance(model, Beast) else []


def _say_what_cuts_windows(grids: list[WindowGrid], config: Config, ranks: int) -> None:
    """Stripes of one dim cut each window that spans it; those of the other might cut none."""
    along = 0 if config.mesh.stripe_dim == "lat" else 1
    for grid in grids:
        there = [tokens // window for tokens, window in zip(grid.padded, grid.window, strict=True)]
        if there[along] == 1 and there[1 - along] >= ranks:
            dims = ("lat", "lon")
            _say_once(
                f"each attention window of {grid.window[0]} x {grid.window[1]} tokens spans all of"
                f" {dims[along]}, which mesh.stripe_dim={dims[along]} cuts into {ranks} stripes:"
                " every block sends most of its tokens away and back. In"
                f" {dims[1 - along]} there are {there[1 - along]} windows side by side:"
                f" mesh.stripe_dim={dims[1 - along]} cuts few of them"
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
