"""What a training step will hold on one rank of any job, from a laptop: on fake tensors.

The job's heaviest rank is built as it will be, in a process group that sends nothing, with tensors
that have shapes and no values; its step runs a few times under the memory tracer
(`memory/profile`). Nothing of it knows that it is not real, but for what the kind of device
decides (`layers.imitating`).
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graticule.assemble import Shapes, assemble, build_model, topology_of, window_grids
from graticule.config import Config, SwinConfig
from graticule.memory.profile import Profile, profile_step
from graticule.memory.repeat import traced_depth, with_blocks
from graticule.mesh import SAMPLE, Mesh, Stripes, forget_meshes
from graticule.model.layers import imitating
from graticule.model.windows import window_kinds
from graticule.parallel.launch import mesh_of
from graticule.parallel.layouts import Topology, WindowLayout
from graticule.train.rehearsal import DataPath, Rehearsal, leads_together

_log = logging.getLogger(__name__)


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """torch.distributed as this rank of so many sees it; nothing is sent."""
    if size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    forget_meshes()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def heaviest_rank(config: Config, shapes: Shapes, ranks: int) -> int:
    """The rank of a sample that holds most: most window tokens, then most rows (columns) of the
    field and of the grid, then most kinds of shifted windows (each kind attends by itself, and
    what comes out is put together), then most neighbours whose halos it has, then, where several
    ranks share the channels of its stripe, most channels; the first of several.
    """
    sizes = mesh_of(config.mesh, ranks)
    topology = topology_of(config, sizes)
    sharing = math.prod(sizes[axis] for axis in SAMPLE) // topology.ranks
    planes = shapes.planes(sharing, 0)
    most = max(range(sharing), key=lambda n: (len(planes.given(n)), len(planes.said(n))))
    return heaviest_stripe(config, shapes, topology) * sharing + most


def heaviest_stripe(config: Config, shapes: Shapes, topology: Topology) -> int:
    """The number of the stripe whose rank holds most, by the same order."""
    if topology.ranks == 1:
        return 0
    model = build_model(config, shapes, device="meta")
    stripes = Stripes.of(
        model.scales,
        grid=shapes.grid,
        start=(model.pad.north, model.pad.west),
        dim=config.mesh.stripe_dim,
        ranks=topology.ranks,
        index=0,
    )
    grids = window_grids(model)
    layouts = [WindowLayout(grid, topology) for grid in grids]
    shifted = [WindowLayout(grid, topology, shifted=True) for grid in grids]
    field, last = stripes.at(model.scales[1]), topology.ranks - 1

    def weight(rank: int) -> tuple[int, ...]:
        tokens = sum(len(layout.windows(rank)) * layout.chunk for layout in layouts)
        kinds = sum(len(window_kinds(layout.regions(rank))) for layout in shifted)
        neighbours = (rank > 0) + (rank < last)
        return tokens, field.length(rank), stripes.grid.length(rank), kinds, neighbours

    return max(range(topology.ranks), key=weight)


def foresee(
    config: Config,
    shapes: Shapes,
    *,
    ranks: int = 1,
    rank: int | None = None,
    on: str = "cpu",
    data: DataPath = "stored",
    stored: torch.dtype = torch.int16,
    tiles: int = 1,
    simple: bool = False,
) -> Profile:
    """Of a rank's steps; where no gradient is handed on after some leads (`train.detach_every`), of
    such a group of leads in the middle of the rollout.

    rank: None: the heaviest. on: the kind of device, `cpu` or `cuda`. stored: of the store's
    numbers. tiles: row tiles that plans may have, where weights allow it.
    simple: whether plans may have that.
    ValueError for weights that stay whole between passes (`mesh.reshard=false`)."""
    if ranks > 1 and config.mesh.weights == "sharded" and not config.mesh.reshard:
        raise ValueError(
            "mesh.reshard=false is not planned: weights stay whole from the first lead's forward"
            " pass to the last one's backward pass, and are gathered again for others, by what a"
            " plan recomputes. Set mesh.reshard=true, or run without memory.budget and with"
            " memory.mode=best (nothing is recomputed then)"
        )
    if rank is None:
        rank = heaviest_rank(config, shapes, ranks)
    _log.info(
        "foreseeing what a step holds on rank %d of %d, on tensors without numbers", rank, ranks
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def place(model: nn.Module) -> None:
        with mode:
            _place(model)

    with fake_ranks(rank, ranks):
        mesh = Mesh(mesh_of(config.mesh, ranks))
        fewer = _few_blocks(config)
        running = assemble(fewer, shapes, mesh, place=place)
        with mode, imitating(on):
            job = Rehearsal(fewer, running, on, data, stored)
            tiles = tiles if _whole(config) else 1
            profile = profile_step(
                job, leads_together(config), tiles=tiles, simple=simple,
                # Lead-wise, members are rolled out once more before, which no part stands for.
                lead_wise=config.bayes.likelihood == "none",
            )  # fmt: skip
            if isinstance(config.model, SwinConfig):
                held = [job.held(f"blocks.{number}.") for number in range(fewer.swin.depth)]
                profile = with_blocks(profile, config.model.depth, held)
            return profile


def _few_blocks(config: Config) -> Config:
    """With as many blocks as differ. What is gathered and summed as one whole model has bytes of
    every block wherever that is done, and is traced with all of them."""
    model, mesh = config.model, config.mesh
    as_one = mesh.weights == "sharded" and mesh.shard_unit == "model"
    if not isinstance(model, SwinConfig) or as_one:
        return config
    return replace(config, model=replace(model, depth=traced_depth(model.depth)))


def _whole(config: Config) -> bool:
    """Whether a sampling module's weights are all there when it runs: what FSDP gathers for one
    layer at a time is not."""
    return config.mesh.weights == "replicated" or config.mesh.shard_unit == "model"


def _place(model: nn.Module) -> None:
    """Give the parameters fake memory; torch's own `to_empty` cannot swap a tensor for a fake."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, value in list(module.named_buffers(recurse=False)):
            # Else each use would make another fake of it.
            setattr(module, name, torch.empty_like(value))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # What FSDP does itself when a module's tensors are replaced.
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for sharded in group.fsdp_params:
                    sharded.reset_sharded_param()
