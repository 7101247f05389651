"""Which process holds what: the axes of the mesh, and how points and channels are shared.

Ranks are numbered row by row over the axes, `tensor` fastest. One sample is spread over the
window x sequence x tensor ranks that follow one another. Either each holds a stripe of the field
of its own, in that order, and its part of the attention windows (TERRA, section IV), or the ranks
of a `tensor` group have one stripe together, each some of its channels (BEAST, section III).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

AXES = ("data", "member", "window", "sequence", "tensor")
SAMPLE = ("window", "sequence", "tensor")
"""The axes over which one sample is spread."""
POINTS = ("window", "sequence")
"""The axes over which its points are, where `tensor` shares its channels (`Planes`)."""
WEIGHTS = ("data", "member", "window", "sequence")
"""The axes whose ranks hold the same part of a weight that tensor parallelism splits."""
Dim = Literal["lat", "lon"]


class Mesh:
    """The axes' sizes, this process's place among them, and the groups it belongs to.

    Without torch.distributed it is the mesh of one process. Making one of several processes is a
    collective: all of them, with the same sizes.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, *, device: str = "cpu") -> None:
        """sizes: by axis, 1 where not named. device: `cpu` or `cuda`, where collectives run.

        ValueError where they do not make the number of processes that were started.
        """
        self.sizes = {axis: int((sizes or {}).get(axis, 1)) for axis in AXES}
        self.device = device
        started = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        product = math.prod(self.sizes.values())
        if product != self.size:
            told = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
            raise ValueError(
                f"the mesh is {told} = {product} processes and {self.size} were started; change"
                f" mesh.* or start {product} (torchrun --nproc-per-node {product} ...)"
            )
        shape = tuple(self.sizes.values())
        self._index = dict(zip(AXES, np.unravel_index(self.rank, shape), strict=True))
        self._groups: dict[tuple[str, ...], Any] = {}
        for axes in (("member",), ("sequence",), ("tensor",), SAMPLE, WEIGHTS):
            self._groups[axes] = self._new_group(axes)
        alike = self.sizes["tensor"] == 1
        self._groups[POINTS] = self._groups[SAMPLE] if alike else self._new_group(POINTS)

    def _new_group(self, axes: tuple[str, ...]) -> Any:
        """The group of the ranks that differ from this one in `axes` only; None of one rank."""
        if math.prod(self.sizes[axis] for axis in axes) == 1:
            return None
        if math.prod(self.sizes[axis] for axis in axes) == self.size:
            return dist.group.WORLD
        ranks = np.arange(self.size).reshape(tuple(self.sizes.values()))
        rest = [i for i, axis in enumerate(AXES) if axis not in axes]
        inner = [i for i, axis in enumerate(AXES) if axis in axes]
        rows = ranks.transpose(*rest, *inner).reshape(-1, math.prod(ranks.shape[i] for i in inner))
        return dist.new_subgroups_by_enumeration(rows.tolist())[0]

    def index(self, axis: str) -> int:
        """This process's place along an axis."""
        return int(self._index[axis])

    def group(self, *axes: str) -> Any:
        """The torch group of the ranks that differ from this one in `axes` only, None where that
        is this rank alone. axes: one of member, sequence, tensor, `SAMPLE`, `POINTS`, `WEIGHTS`,
        or none: all."""
        if not axes:
            return dist.group.WORLD if self.size > 1 else None
        return self._groups[axes]

    @property
    def sample_size(self) -> int:
        """Ranks that share a sample."""
        return math.prod(self.sizes[axis] for axis in SAMPLE)

    @property
    def sample_index(self) -> int:
        """This process's place among the ranks that share its sample."""
        return self.rank % self.sample_size

    def stripes(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """(how many, the number of ours) of stripes that go over `axes`, `SAMPLE` or `POINTS`."""
        size = math.prod(self.sizes[axis] for axis in axes)
        return size, self.sample_index // (self.sample_size // size)

    @cached_property
    def device_meshes(self) -> tuple[Any, Any]:
        """(all ranks, (weights, tensor)) as torch's DeviceMesh: what sharded parameters lie on.

        The first use is a collective.
        """
        from torch.distributed.device_mesh import init_device_mesh

        tensor = self.sizes["tensor"]
        everyone = init_device_mesh(self.device, (self.size,), mesh_dim_names=("world",))
        both = init_device_mesh(
            self.device, (self.size // tensor, tensor), mesh_dim_names=("weights", "tensor")
        )
        return everyone, both


def forget_meshes() -> None:
    """To be called where this process becomes another rank, or one of other processes.

    torch remembers the layout of each operation's result, with the mesh in it, and takes two
    meshes for one where they name the same ranks: whose place in it this was, and through which
    groups it talks, may differ. A copy of a sharded tensor would have the place of a rank that
    this process once was, or was forked from.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    # Two caches: Python's, and this thread's in C++.
    from torch.distributed.tensor import debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


@dataclass(frozen=True)
class Cut:
    """Points along one dim, shared among ranks: rank r holds bounds[r] to bounds[r + 1].

    Ranges may differ in length, and be empty.
    """

    bounds: tuple[int, ...]

    @classmethod
    def even(cls, size: int, ranks: int) -> "Cut":
        """Lengths that differ by one at most."""
        return cls(tuple(rank * size // ranks for rank in range(ranks + 1)))

    @property
    def mirrored(self) -> "Cut":
        """The same lengths in the opposite order."""
        return Cut(tuple(self.size - bound for bound in reversed(self.bounds)))

    @property
    def size(self) -> int:
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    def of(self, rank: int) -> slice:
        """What a rank holds."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def length(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    def owner(self, points: np.ndarray) -> np.ndarray:
        """Which rank holds each of these points."""
        return np.searchsorted(self.bounds, points, side="right") - 1

    def finer(self, factor: int, size: int) -> "Cut":
        """Of `size` points, `factor` to each of ours; of our last one they may be fewer, or more:
        a pooling leaves points out that make no whole one."""
        return Cut(tuple(size if bound == self.size else bound * factor for bound in self.bounds))

    def pooled(self, factor: int) -> "Cut":
        """Of points that are `factor` of ours each, as `finer` parts them; those that are left
        over make none. ValueError where one of them would lie in two ranges."""
        split = [bound for bound in self.bounds if bound % factor and bound != self.size]
        if split:
            raise ValueError(
                f"ranges that begin at {self.bounds[:-1]} share points that are {factor} of these"
                f" each, at {split}: make the stripes with Stripes.of from all scales of the model"
            )
        return Cut(tuple(bound // factor for bound in self.bounds))

    def strided(self, stride: int) -> "Cut":
        """Of every `stride`-th point: whoever holds point stride x i holds i."""
        return Cut(tuple(-(-bound // stride) for bound in self.bounds))

    def window(self, start: int, size: int) -> "Cut":
        """Of the `size` points that begin at our point `start`."""
        return Cut(tuple(min(max(bound - start, 0), size) for bound in self.bounds))


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """How the ranks of a sample share a field, along one dim, at every scale of a model.

    dim: the one that is cut. index: our rank among them. cuts: by the points along that dim.
    grid: of the data's own grid, which a model may pad.
    """

    dim: Dim
    index: int
    cuts: Mapping[int, Cut]
    grid: Cut

    @classmethod
    def of(
        cls,
        scales: Mapping[int, tuple[int, int]],
        *,
        grid: tuple[int, int],
        start: tuple[int, int],
        dim: Dim,
        ranks: int,
        index: int,
    ) -> "Stripes":
        """Even in points of the coarsest scale, so that no coarse point has two owners.

        scales: by how many points of the field one spans, its (lat, lon) points; 1 is the field.
        grid: (lat, lon) points of the data. start: where they begin in the field.
        """
        along = 0 if dim == "lat" else 1
        coarse = max(scales)
        even = Cut.even(scales[coarse][along], ranks)
        cuts: dict[int, Cut] = {}
        for span, points in sorted(scales.items(), reverse=True):
            assert coarse % span == 0, scales
            cut = even.finer(coarse // span, points[along])
            # Of the same points at two scales (a single row) the ranges are the same.
            assert cuts.setdefault(points[along], cut) == cut, scales
        field = cuts[scales[1][along]]
        return cls(dim=dim, index=index, cuts=cuts, grid=field.window(start[along], grid[along]))

    @property
    def ranks(self) -> int:
        return self.grid.ranks

    def at(self, points: Sequence[int]) -> Cut:
        """The cut of a scale of (lat, lon) points."""
        return self.cuts[points[0 if self.dim == "lat" else 1]]

    @property
    def rows(self) -> slice:
        """The rows of the grid that are here."""
        return self.grid.of(self.index) if self.dim == "lat" else slice(None)

    @property
    def columns(self) -> slice:
        """The columns of the grid that are here."""
        return self.grid.of(self.index) if self.dim == "lon" else slice(None)


@dataclass(frozen=True, kw_only=True)
class Planes:
    """How the ranks of the `tensor` axis share a sample's channels: each has some of every role.

    A channel's states, labels and predictions are on one rank, where its next state is the newest
    one plus a change and its error is taken. prognostic, diagnostic, forcing, static: which of each
    role a rank has. inputs, outputs, forcings: times of a sample.
    """

    index: int
    prognostic: Cut
    diagnostic: Cut
    forcing: Cut
    static: Cut
    inputs: int
    outputs: int
    forcings: int

    @classmethod
    def of(
        cls,
        *,
        prognostic: int,
        diagnostic: int,
        forcing: int,
        static: int,
        inputs: int,
        outputs: int,
        forcings: int,
        ranks: int = 1,
        index: int = 0,
    ) -> "Planes":
        """Of so many channels, each role in numbers that differ by one at most. What predicted
        channels have too many on the last ranks, the given ones have on the first.

        ValueError where a rank would have no state.
        """
        if prognostic < ranks:
            raise ValueError(
                f"{prognostic} prognostic channel{'s' * (prognostic > 1)} cannot be shared by"
                f" mesh.tensor={ranks} ranks,"
                f" each of which has states of its own: take mesh.tensor={prognostic} at most, and"
                " mesh.window for the others"
            )
        return cls(
            index=index,
            prognostic=Cut.even(prognostic, ranks),
            diagnostic=Cut.even(diagnostic, ranks),
            forcing=Cut.even(forcing, ranks).mirrored,
            static=Cut.even(static, ranks).mirrored,
            inputs=inputs, outputs=outputs, forcings=forcings,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.prognostic.ranks

    def known(self, rank: int) -> np.ndarray:
        """Which of the prognostic channels a rank has."""
        return _numbers(self.prognostic, rank)

    def predicted(self, rank: int) -> np.ndarray:
        """Which of the predicted channels: prognostic ones, then diagnostic ones."""
        more = self.prognostic.size + _numbers(self.diagnostic, rank)
        return np.concatenate([self.known(rank), more])

    def given(self, rank: int) -> np.ndarray:
        """Which of a model's input channels: states, oldest first, then forcing, then statics."""
        states = _repeated(self.known(rank), self.prognostic.size, self.inputs)
        forcing = _repeated(_numbers(self.forcing, rank), self.forcing.size, self.forcings)
        first = self.inputs * self.prognostic.size
        second = first + self.forcings * self.forcing.size
        return np.concatenate([states, first + forcing, second + _numbers(self.static, rank)])

    def said(self, rank: int) -> np.ndarray:
        """Which of a model's output channels: per output time the predicted ones."""
        total = self.prognostic.size + self.diagnostic.size
        return _repeated(self.predicted(rank), total, self.outputs)

    def spread(self, values: torch.Tensor, *, known: bool = False) -> torch.Tensor:
        """(..., our predicted channel) -> (..., predicted channel), 0 where it is another rank's:
        what may be added up over all ranks. known: of the prognostic channels alone."""
        if self.ranks == 1:
            return values
        ours = self.known(self.index) if known else self.predicted(self.index)
        total = self.prognostic.size + (0 if known else self.diagnostic.size)
        whole = values.new_zeros(*values.shape[:-1], total)
        whole[..., torch.from_numpy(ours).to(values.device)] = values
        return whole


def _numbers(cut: Cut, rank: int) -> np.ndarray:
    return np.arange(cut.bounds[rank], cut.bounds[rank + 1])


def _repeated(numbers: np.ndarray, size: int, times: int) -> np.ndarray:
    """The same of each time, which has `size` channels."""
    return (np.arange(times)[:, None] * size + numbers).ravel()
