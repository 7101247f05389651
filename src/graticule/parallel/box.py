"""Which part of a tensor a rank holds: of FSDP, of tensor parallelism, or of both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dim, and how long it is there."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.starts, self.sizes, strict=True))


def box_of(tensor: Any) -> Box | None:
    """Which part of a whole tensor of torch is here; None on a rank that its mesh leaves out.

    ValueError for a layout that has no such part.
    """
    # Asked by name: the class takes a second to import, which a serial run need not spend.
    if not hasattr(tensor, "placements"):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    here = tuple(tensor.to_local().shape)
    return _box_on(tensor.device_mesh, tensor.placements, tuple(tensor.shape), here)


def _box_on(
    mesh: Any, placements: Sequence[Any], shape: tuple[int, ...], here: tuple[int, ...]
) -> Box | None:
    """here: the shape of what is here."""
    split: list[int] = []
    strided: list[int] = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise ValueError(f"{placement} holds no part of the tensor; reduce it before saving it")
        # FSDP splits what tensor parallelism left here, so its axis comes last though the mesh
        # names it first; torch calls that a strided shard. Of uneven parts torch's own arithmetic
        # (left to right) is another than what FSDP does.
        (strided if hasattr(placement, "split_factor") else split).append(axis)
    for axis in strided:
        dim = placements[axis].dim
        inside = [mesh.size(a) for a in split if placements[a].dim == dim and a > axis]
        if placements[axis].split_factor != math.prod(inside):
            raise ValueError(
                f"{tuple(placements)} over a mesh of {tuple(mesh.shape)} leaves every rank several"
                " parts of the tensor; a strided shard is saved where it comes from FSDP over"
                " tensor parallelism"
            )
    place = mesh.get_coordinate()
    if place is None:
        return None
    starts, sizes = [0] * len(shape), list(shape)
    for axis in split + strided[::-1]:
        dim = placements[axis].dim
        longest = -(-sizes[dim] // mesh.size(axis))  # as torch.chunk cuts
        begin = min(place[axis] * longest, sizes[dim])
        starts[dim] += begin
        sizes[dim] = min(longest, sizes[dim] - begin)
    if here != tuple(sizes) and not (0 in here and 0 in sizes):
        raise ValueError(
            f"{tuple(placements)} of {shape} over a mesh of {tuple(mesh.shape)} is {tuple(sizes)}"
            f" at {tuple(place)}, but {here} is there; give tensor parallelism dims that its ranks"
            " divide"
        )
    return Box(tuple(starts), tuple(sizes))
