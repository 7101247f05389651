"""Stripes: what is put in the place of the modules that read other grid points.

A module becomes its substitute where it is, so that names and parameters stay. What is in no
table here is refused: under a split dim it might be wrong without a word.
"""

from typing import Any

import torch
from torch import Tensor, nn

from graticule.mesh import Cut, Stripes
from graticule.model import beast, layers, nice, resample, swin, unet, windows
from graticule.model.layers import Conv, TransposedConv
from graticule.model.norm_gelu import BatchNormGelu, GroupNormGelu, InstanceNormGelu
from graticule.model.norms import FieldGroupNorm
from graticule.model.pad import ConvPad, Crop, EdgePad, FieldPad, Pad, TransposedPad
from graticule.model.pooling import Double, Fill, Pool
from graticule.parallel.exchange import Link
from graticule.parallel.halo import STRIPED_PADS, halos_of
from graticule.parallel.norm_gelu import (
    SharedBatchNormGelu,
    StripedGroupNormGelu,
    StripedInstanceNormGelu,
)
from graticule.parallel.norms import StripedGroupNorm

ONE_TOKEN: set[type[nn.Module]] = {
    layers.Linear, layers.LayerNorm, layers.Mlp, layers.PatchEmbedding, layers.PatchRecovery,
    swin.RelativePositionBias, nice.Nice, nice.Heads, nice.Offsets, nn.Identity, nn.SiLU, nn.GELU,
    nn.ReLU,
}  # fmt: skip
"""What looks at one token (or patch) at a time, whichever are here."""
CONTAINERS: set[type[nn.Module]] = {
    nn.Sequential, nn.ModuleList, nn.ModuleDict, resample.ConvNormAct, resample.Down, resample.Up,
    swin.Swin, swin.SwinBlock, swin.WindowAttention, unet.UNet, unet.Block, unet.DownStage,
    unet.UpStage, unet.LastConv, beast.Beast, beast.Stage, beast.BeastBlock,
}  # fmt: skip
"""What does nothing to a field but by its parts."""
WINDOWS: set[type[nn.Module]] = {
    windows.Enter, windows.Leave, windows.Shift, windows.Unshift, windows.WindowMask,
    windows.Attend,
}  # fmt: skip
"""What has its substitutes in `routes`."""
PLACED: set[type[nn.Module]] = {
    ConvPad, TransposedPad, EdgePad, Crop, FieldPad, Conv, TransposedConv, FieldGroupNorm,
    InstanceNormGelu, GroupNormGelu, BatchNormGelu, Pool, Double, Fill, unet.Positions,
}  # fmt: skip
"""What has its substitutes here, or needs none where stripes are those of `Stripes.of`."""
REMEDIES: list[tuple[tuple[str, ...], str]] = [
    (("ConvTranspose",), "put TransposedPad, layers.TransposedConv and Crop there"),
    (("Conv",), "put a ConvPad and layers.Conv there, which runs without padding"),
    (
        ("Norm",),
        "put a norm of model.norms or model.norm_gelu there, which knows the statistics"
        " of the whole field",
    ),
    (
        ("Upsample", "PixelShuffle", "MaxUnpool"),
        "put an EdgePad and pooling.Double there, or a layers.TransposedConv and Crop",
    ),
    (("Pool", "Downsample"), "put a pooling.Pool there, or a ConvPad and a strided layers.Conv"),
    (("Dropout",), "leave it out: what it drops would depend on the layout"),
    (("Pad",), "put a ConvPad or TransposedPad there, which knows its consumer's kernel"),
]
"""What to do instead of a module, by what is in the name of its class."""


def specialise(module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Make `module` a `cls`, a subclass of what it is, with these attributes; parameters, buffers
    and its place in the model stay."""
    assert issubclass(cls, type(module)), (cls, type(module))
    module.__class__ = cls
    for name, value in attributes.items():
        setattr(module, name, value)


def stripe(model: nn.Module, stripes: Stripes, link: Link) -> None:
    """Make `model` compute our stripe of its field from our stripe of its input.

    link: the ranks that hold the stripes, in order. Of one rank, the model stays as it is.
    ValueError, with module path, dim and remedy, for what cannot be computed from stripes.
    """
    assert (link.size, link.rank) == (stripes.ranks, stripes.index), (link.size, stripes)
    if stripes.ranks == 1:
        return
    # All of it is looked at before anything is changed.
    _require_known(model, stripes)
    dim = -2 if stripes.dim == "lat" else -1
    for path, module in list(model.named_modules()):
        if isinstance(module, Pad):
            cut = _cut(stripes, module.points, path)
            if isinstance(module, ConvPad):
                _require_owner(stripes, cut.strided(module.stride), path)
            cuts, indices = [Cut((0, n)) for n in module.points], [0, 0]
            cuts[dim], indices[dim] = cut, stripes.index
            specialise(
                module,
                STRIPED_PADS[type(module)],
                halos=halos_of(module, (cuts[0], cuts[1]), (indices[0], indices[1])),
                dim=dim,
                link=link,
            )
        elif isinstance(module, Crop):
            here = _here(module.points, _cut(stripes, module.points, path), stripes)
            specialise(module, StripedCrop, points=here)
        elif isinstance(module, Fill):
            here = _here(module.points, _cut(stripes, module.points, path), stripes)
            specialise(module, StripedFill, points=here)
        elif isinstance(module, Pool):
            _require_owner(stripes, _cut(stripes, module.points, path).pooled(2), path)
        elif isinstance(module, FieldPad):
            specialise(module, StripedFieldPad, **_field_pad(module, stripes, path))
        elif isinstance(module, unet.Positions):
            specialise(module, StripedPositions, rows=stripes.rows, columns=stripes.columns)
        elif isinstance(module, FieldGroupNorm):
            specialise(module, StripedGroupNorm, link=link)
        elif isinstance(module, InstanceNormGelu):
            specialise(module, StripedInstanceNormGelu, link=link)
        elif isinstance(module, GroupNormGelu):
            specialise(module, StripedGroupNormGelu, link=link)
        elif isinstance(module, BatchNormGelu):
            specialise(module, SharedBatchNormGelu, link=link)
        elif isinstance(module, Conv):
            specialise(module, StripedConv)
        elif isinstance(module, TransposedConv):
            specialise(module, StripedTransposedConv)
        elif isinstance(module, Double):
            specialise(module, StripedDouble)


class StripedCrop(Crop):
    """The same of a stripe, whose last outputs may be the surplus ones. points: of the stripe."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        assert out.shape[-2:] == self.points, (tuple(x.shape), self.points)
        return out


class StripedFieldPad(FieldPad):
    """The same of a stripe; its numbers are those of what is here."""


class StripedFill(Fill):
    """The same of a stripe; the last one has the points that a pooling left out."""


class StripedPositions(unet.Positions):
    """Of the points that are here; the weight is the whole field's, and drawn as such."""

    rows: slice
    columns: slice

    def here(self) -> Tensor:
        return super().here()[:, self.rows, self.columns]


class StripedDouble(Double):
    """The same of a stripe, which may be empty."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            return super().forward(x)
        sides = (2 * max(0, size - 2) for size in x.shape[2:])
        return _Nothing.apply((*x.shape[:2], *sides), x)


class StripedConv(Conv):
    """The same of a stripe, which may be empty."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            return super().forward(x)
        taps = self.dilation * (self.kernel - 1) + 1
        sides = (max(0, (size - taps) // self.stride + 1) for size in x.shape[2:])
        x, weight, bias = self.operands(x)
        return _Nothing.apply((x.shape[0], bias.numel(), *sides), x, weight, bias)


class StripedTransposedConv(TransposedConv):
    """The same of a stripe, which may be empty."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            return super().forward(x)
        sides = ((size - 1) * self.stride + self.kernel if size else 0 for size in x.shape[2:])
        x, weight, bias = self.operands(x)
        return _Nothing.apply((x.shape[0], bias.numel(), *sides), x, weight, bias)


class _Nothing(torch.autograd.Function):
    """No points from no points: torch's kernels refuse them. Whatever takes part has a gradient,
    zero, so that all that waits for gradients goes on. What took part is asked for, as elsewhere:
    where it is computed again that begins here too, before the exchanges that come next."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        out = inputs[0].new_empty(shape)
        assert not out.numel(), shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grads[0].new_zeros(x.shape) for x in ctx.saved_tensors)


def _cut(stripes: Stripes, points: tuple[int, int], path: str) -> Cut:
    along = points[0 if stripes.dim == "lat" else 1]
    if along not in stripes.cuts:
        known = ", ".join(map(str, stripes.cuts))
        raise ValueError(
            f"{path}: a field of {points[0]} x {points[1]} points has no stripes along"
            f" {stripes.dim}; the model's scales there are {known} points: name this one among"
            " them (`scales` of the model)"
        )
    return stripes.cuts[along]


def _here(points: tuple[int, int], cut: Cut, stripes: Stripes) -> tuple[int, int]:
    """(lat, lon) points of our stripe of a field of `points`."""
    length = cut.length(stripes.index)
    return (length, points[1]) if stripes.dim == "lat" else (points[0], length)


def _field_pad(pad: FieldPad, stripes: Stripes, path: str) -> dict[str, Any]:
    """`pad`'s own numbers for what is here."""
    lat = stripes.dim == "lat"
    rows, columns = pad.grid
    shape = rows + pad.north + pad.south, columns + pad.west + pad.east
    start, size = (pad.north, rows) if lat else (pad.west, columns)
    cut = _cut(stripes, shape, path)
    assert stripes.grid == cut.window(start, size), (path, stripes.grid, cut, start)
    held, inside = cut.of(stripes.index), stripes.grid.length(stripes.index)
    before = min(max(start - held.start, 0), held.stop - held.start)
    after = held.stop - held.start - before - inside
    numbers = {"north": before, "south": after} if lat else {"west": before, "east": after}
    return {"grid": _here(pad.grid, stripes.grid, stripes), **numbers}


def _require_known(model: nn.Module, stripes: Stripes) -> None:
    """ValueError for a module that is in no table, or a convolution without its pad."""
    split = f"{stripes.dim} is split over {stripes.ranks} ranks"
    known = ONE_TOKEN | CONTAINERS | WINDOWS | PLACED
    for path, module in model.named_modules():
        name = type(module).__name__
        path = path or "the model"
        if type(module) not in known:
            remedy = next(
                (what for words, what in REMEDIES if any(word in name for word in words)),
                "give it a substitute or, where it looks at one token at a time, put it in"
                " parallel.space.ONE_TOKEN",
            )
            raise ValueError(
                f"{path}: {split}, and what {name} computes from one stripe would be wrong or is"
                f" not known to be right; {remedy}; or use mesh.window=1, mesh.sequence=1 and"
                " mesh.tensor=1"
            )
        before: nn.Module | None = None
        for child, part in module.named_children():
            wanted = _wanted_pad(part)
            if wanted and wanted != _told(before):
                needed = wanted[0].__name__
                raise ValueError(
                    f"{path}.{child}: {split}, and {type(part).__name__} of {wanted[1]} reads"
                    f" points that others hold; put {'an' if needed[0] == 'E' else 'a'} {needed} of"
                    " the same numbers right before it"
                )
            before = part


def _wanted_pad(module: nn.Module) -> tuple[type[Pad], str] | None:
    """The pad that must stand before a convolution, and what it must have been told."""
    if isinstance(module, Conv) and (module.kernel, module.stride) != (1, 1):
        return ConvPad, _numbers(module)
    if isinstance(module, TransposedConv) and module.kernel != module.stride:
        return TransposedPad, _numbers(module)
    if isinstance(module, Double):
        return EdgePad, "twice the points"
    return None


def _told(module: nn.Module | None) -> tuple[type[Pad], str] | None:
    """The pad that stands there, and what it was told."""
    if isinstance(module, ConvPad | TransposedPad):
        return type(module), _numbers(module)
    return (EdgePad, "twice the points") if isinstance(module, EdgePad) else None


def _numbers(module: Conv | TransposedConv | ConvPad | TransposedPad) -> str:
    told = f"kernel {module.kernel}, stride {module.stride}"
    if isinstance(module, Conv | ConvPad):
        told += f", dilation {module.dilation}"
    return told


def _require_owner(stripes: Stripes, out: Cut, path: str) -> None:
    """ValueError where a convolution's outputs would lie elsewhere than the stripes say."""
    told = stripes.cuts.get(out.size, out)
    if told != out:
        raise ValueError(
            f"{path}: {stripes.dim} is split over {stripes.ranks} ranks, and the stripes of its"
            f" {out.size} outputs begin at {told.bounds[:-1]}, but those of what it reads give"
            f" {out.bounds[:-1]}: make the stripes with Stripes.of from all scales of the model"
        )
