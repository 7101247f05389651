"""One set of tensors in many layouts, for tests of what saves and loads them."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DTensors import it: before ranks are forked it is once, and not in each
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from graticule.parallel.data import local
from graticule.train import checkpoint
from pools import Pools

SHAPES = {
    "column.weight": (8, 3), "column.bias": (8,), "row.weight": (5, 8), "row.bias": (5,),
    "kernel": (3, 2, 3, 3), "one": (1,), "scalar": (), "none": (0, 4),
}  # fmt: skip
BOTH = (_StridedShard(0, split_factor=2), Shard(0))
COLUMN, ROW = ("column.weight", "column.bias"), ("row.weight",)
LAYOUTS = {"serial": 1, "fsdp 2": 2, "fsdp 3": 3, "fsdp 4": 4, "tensor 4": 4, "tensor 2": 4,
           "fsdp x tensor": 4}  # fmt: skip


@cache
def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("weights", "tensor")[: len(sizes)])


def shard(whole: Tensor, mesh: Any, placements: Any) -> DTensor:
    """As FSDP and tensor parallelism cut it: the axis of a strided shard comes last."""
    place, local = mesh.get_coordinate(), whole
    for axis in sorted(range(mesh.ndim), key=lambda a: hasattr(placements[a], "split_factor")):
        if not placements[axis].is_replicate():
            dim = placements[axis].dim
            chunks = local.chunk(mesh.size(axis), dim) if local.shape[dim] else ()
            empty = local.narrow(dim, 0, 0)
            local = chunks[place[axis]] if place[axis] < len(chunks) else empty
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def laid_out(name: str, whole: Tensor, layout: str) -> Tensor:
    """A tensor as a layout has it; `name` says which kind of parameter it is."""
    name = name.removeprefix("exp_avg.")
    if layout == "serial" or not whole.dim() or name.startswith("step."):
        return whole.clone()
    if layout.startswith("fsdp ") and layout[-1].isdigit():
        return shard(whole, mesh_of(int(layout[-1])), (Shard(0),))
    if layout == "tensor 4":
        split = Shard(0) if name in COLUMN else Shard(1) if name in ROW else None
        return shard(whole, mesh_of(4), (split,)) if split else whole.clone()
    if layout == "tensor 2":  # each pair a replica of its own
        inner = mesh_of(2, 2)["tensor"]
        split = Shard(0) if name in COLUMN else Shard(1) if name in ROW else Replicate()
        return shard(whole, inner, (split,))
    assert layout == "fsdp x tensor"
    if name in COLUMN:
        return shard(whole, mesh_of(2, 2), BOTH)
    if name in ROW:
        return shard(whole, mesh_of(2, 2), (Shard(0), Shard(1)))
    return shard(whole, mesh_of(4), (Shard(0),))


def wholes() -> dict[str, dict[str, Tensor]]:
    """No number twice."""
    groups: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    end = 1
    for name, shape in SHAPES.items():
        for group, full in (("model", name), ("optimizer", f"exp_avg.{name}")):
            numbers = torch.arange(end, end + math.prod(shape), dtype=torch.float32)
            groups[group][full] = numbers.reshape(shape)
            end += math.prod(shape)
        groups["optimizer"][f"step.{name}"] = torch.tensor(float(end))
        end += 1
    groups["model"]["count"] = torch.tensor([end], dtype=torch.int64)
    groups["model"]["half"] = torch.arange(7.0).bfloat16().reshape(7, 1)
    return groups


def in_layout(layout: str) -> dict[str, dict[str, Tensor]]:
    return {
        group: {name: laid_out(name, whole, layout) for name, whole in named.items()}
        for group, named in wholes().items()
    }


def save_in(run: Path, layout: str, step: int = 5, background: bool = False) -> Path:
    saver = checkpoint.Saver(run, keep=9, background=background)
    path = saver.save(step, in_layout(layout), {"next_sample": 8 * step})
    saver.close()
    return path


def wrong_in(path: Path, layout: str) -> list[str]:
    """Load into a layout: which tensors are not what they were here, or have other memory."""
    checkpoint.find(path)
    assert checkpoint.read_state(path)["next_sample"] == 40
    wrong = []
    for group, named in in_layout(layout).items():
        into = {name: torch.zeros_like(value) for name, value in named.items()}
        memory = {name: local(value).detach().data_ptr() for name, value in into.items()}
        assert checkpoint.saved_names(path, group).keys() == named.keys()
        checkpoint.load_tensors(path, group, into)
        for name, value in named.items():
            here = local(into[name]).detach()
            if not torch.equal(here, local(value)) or memory[name] != here.data_ptr():
                wrong.append(name)
    return wrong


def run_in(pools: Pools, layout: str, function: Any, *arguments: Any) -> list[Any]:
    size = LAYOUTS[layout]
    return [function(*arguments)] if size == 1 else pools[size].run(function, *arguments)
