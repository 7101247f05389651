"""From a configuration to a model that runs on a mesh, step by step, and what it costs.

The order has reasons. The model is built on `meta`, so that no rank ever holds what it does not
keep. Modules that read other grid points are put in their stripes first, windows next, since both
look only at shapes. Attention and MLP are split over `tensor` before weights are sharded: FSDP
shards what is left of each. Memory comes last, when it is known how little of it is needed.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from graticule.config import BeastConfig, Config, UNetConfig
from graticule.data.samples import SampleSource
from graticule.data.store import Store
from graticule.keyed import keyed_seed
from graticule.mesh import SAMPLE, Mesh, Stripes
from graticule.model.bayes import Prior, make_bayesian
from graticule.model.beast import Beast
from graticule.model.draws import Draw
from graticule.model.family import Model
from graticule.model.nice import Nice
from graticule.model.norm_gelu import BatchNormGelu
from graticule.model.swin import Swin
from graticule.model.unet import UNet
from graticule.model.windows import Attend
from graticule.parallel.data import SharedWeights, shard_weights
from graticule.parallel.exchange import Link
from graticule.parallel.layouts import Topology
from graticule.parallel.materialise import materialise
from graticule.parallel.norm_gelu import share_batches
from graticule.parallel.routes import route_windows
from graticule.parallel.space import stripe
from graticule.parallel.tensor import split_tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What `train.precision` says of dtypes; master weights are float32 in all.

    compute: of activations, and of the weights that meet them. stream: of the residual stream.
    fields: of states, forcing and labels.
    """

    compute: torch.dtype
    stream: torch.dtype
    fields: torch.dtype = torch.float32


PRECISIONS = {
    "fp32": Precision(compute=torch.float32, stream=torch.float32),
    "bf16": Precision(compute=torch.bfloat16, stream=torch.bfloat16),
    "fp16": Precision(compute=torch.float16, stream=torch.float16),
    "paper": Precision(compute=torch.float16, stream=torch.float32, fields=torch.float16),
}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What a model must know of its data: (lat, lon) points, channels and times of a sample."""

    grid: tuple[int, int]
    num_prognostic: int
    num_predicted: int
    num_forcing: int
    num_static: int
    num_inputs: int
    num_outputs: int
    num_forcings: int

    @property
    def in_channels(self) -> int:
        states = self.num_inputs * self.num_prognostic
        return states + self.num_forcings * self.num_forcing + self.num_static

    @property
    def out_channels(self) -> int:
        return self.num_outputs * self.num_predicted


def shapes_of(source: SampleSource) -> Shapes:
    """The shapes of a store's samples."""
    spec = source.spec
    return Shapes(
        grid=source.store.grid.shape,
        num_prognostic=len(source.prognostic),
        num_predicted=len(source.predicted),
        num_forcing=len(source.forcing),
        num_static=len(source.statics),
        num_inputs=len(spec.inputs),
        num_outputs=len(spec.outputs),
        num_forcings=len(spec.forcings),
    )


def shapes_of_config(config: Config) -> Shapes:
    """The same from the store that the configuration names, if it is there already, else from
    the configuration alone."""
    data = config.data
    enough = data.grid is not None and data.prognostic
    if data.store and (Path(data.store).exists() or not enough):
        # Its roles fill what the configuration leaves open, as they do in training.
        return shapes_of(SampleSource(Store(data.store), data))
    if data.grid is None or not data.prognostic:
        raise ValueError(
            "the grid and the channels are not known: set data.store=PATH, or data.grid=LAT,LON"
            " and data.prognostic=NAME,NAME,..."
        )
    return Shapes(
        grid=data.grid,
        num_prognostic=len(data.prognostic),
        num_predicted=len(data.prognostic) + len(data.diagnostic),
        num_forcing=len(data.forcing),
        num_static=len(data.static),
        num_inputs=len(data.input_offsets),
        num_outputs=len(data.output_offsets),
        num_forcings=len(data.forcing_offsets),
    )


def build_model(
    config: Config,
    shapes: Shapes,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """The configured model of one process with its initial weights, or, on `meta`, without any.

    dtype: of the master weights. Each parameter is drawn from a key of the seed and its name, so
    that its first value depends on nothing else.
    """
    model = _unplaced(config, shapes, dtype)
    if torch.device(device).type == "meta":
        return model.to("meta")
    materialise(model, config.train.seed, device)
    return model


def _unplaced(config: Config, shapes: Shapes, dtype: torch.dtype) -> Model:
    """The configured model with its parameters on `meta` and its buffers in memory."""
    model, bayes, seed = _of_family(config, shapes, dtype), config.bayes, config.train.seed
    if bayes.weights:

        def key(name: str) -> int:
            return keyed_seed(seed, "sample", int.from_bytes(name.encode(), "little"))

        make_bayesian(
            model,
            key=key,
            prior=Prior(kind=bayes.prior, sigma=bayes.prior_sigma),
            sigma_map=bayes.sigma_map,
            initial_sigma=bayes.initial_sigma,
        )
    return model


def _of_family(config: Config, shapes: Shapes, dtype: torch.dtype) -> Model:
    """The same before its weights become distributions."""
    model = config.model
    newest = (shapes.num_inputs - 1) * shapes.num_prognostic
    if isinstance(model, UNetConfig) and config.train.precision == "paper":
        raise ValueError(
            "train.precision=paper is how TERRA was trained, which is of the family swin; a U-Net"
            " computes its last convolution in float32 with bf16 or fp16 too"
        )
    if isinstance(model, BeastConfig) and config.train.precision == "paper":
        raise ValueError(
            "train.precision=paper is how TERRA was trained, which is of the family swin; BEAST is"
            " trained in bf16"
        )
    precision = PRECISIONS[config.train.precision]
    if dtype is not torch.float32:
        precision = Precision(compute=dtype, stream=dtype, fields=dtype)
    told: dict[str, Any] = {
        "grid": shapes.grid,
        "in_channels": shapes.in_channels,
        "out_channels": shapes.out_channels,
        "states": (newest, newest + shapes.num_prognostic),
        "num_outputs": shapes.num_outputs,
        "compute_dtype": precision.compute,
    }
    with torch.device("meta"):
        if isinstance(model, UNetConfig):
            return UNet(
                **told,
                widths=model.widths,
                factor=model.factor,
                dilations=model.dilations,
                norm=model.norm,
                norm_groups=model.norm_groups,
                most=model.activation_max,
                upsampling=model.upsampling,
                position_features=model.position_features,
            ).to(dtype=dtype)
        if isinstance(model, BeastConfig):
            return Beast(
                **told,
                patch=model.patch,
                width=model.width,
                depth=model.depth,
                inner_depth=model.inner_depth,
                heads=model.heads,
                inner_heads=model.inner_heads,
                window=model.window_shape,
                inner_window=model.inner_window_shape,
                mlp_ratio=model.mlp_ratio,
                norm_groups=model.norm_groups,
                num_noise=model.nice_noise,
                nice_hidden=model.nice_hidden,
                gated=model.nice_gate,
                noise_key=keyed_seed(config.train.seed, "nice"),
            ).to(dtype=dtype)
        return Swin(
            **told,
            patch=model.patch,
            sampling=model.sampling,
            width=model.width,
            depth=model.depth,
            heads=model.heads,
            window=model.window_shape,
            mlp_ratio=model.mlp_ratio,
            norm_groups=model.norm_groups,
            bias_table=model.bias_table,
            boundary=model.boundary,
            padded_shape=model.padded_shape,
            stream_dtype=precision.stream,
        ).to(dtype=dtype)


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
    require_no_members(config)
    _require_axes(config, mesh)
    model = _unplaced(config, shapes, dtype)
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
    if mesh.sample_size > 1 and isinstance(model, Swin):
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


def require_no_members(config: Config) -> None:
    """ValueError for what takes a draw: training and forecasting ask for none yet."""
    if isinstance(config.model, BeastConfig) or config.bayes.draws:
        raise ValueError(
            f"{config.name or 'this model'} computes members of an ensemble, and members are not"
            " trained yet, nor forecast with: `graticule info` tells what such a model is and"
            " costs; to train, take a recipe of another family with bayes.weights=false and"
            " bayes.likelihood=none"
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


def describe(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Parameters, shapes and FLOPs (2 per multiply-add), allocating nothing.

    The model runs on PyTorch's meta device under PyTorch's own counter, which gives linears and
    convolutions. Attention goes by formula, 4 x tokens x window tokens x width per block, since
    the kernel that runs it differs from device to device. A training step costs 3 times the
    forward of linears and convolutions and 3.5 times that of attention (two gradients, and
    scores computed anew), for one sample, one member and all of its leads. What conditions BEAST's
    norms is told by itself (`forward_flops_noise`) and in no sum, as published; so is the
    embedding, which is in `dense`.
    """
    if shapes.grid[0] * shapes.grid[1] < 1:
        raise ValueError(f"data.grid={shapes.grid} holds no point")
    model = build_model(config, shapes, device="meta")
    for module in model.modules():
        if isinstance(module, Attend):
            module.forward = _uncounted  # type: ignore[method-assign, assignment]
        elif isinstance(module, Nice):
            module.forward = partial(_silent, module)  # type: ignore[method-assign]
    field = torch.empty(1, shapes.in_channels, *shapes.grid, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(field, draw=Draw(step=0, member=0, items=(0,)))
    dense = counter.get_total_flops()
    attention = 0
    if isinstance(model, Swin):
        tokens, width = model.num_tokens, model.recover.linear.weight.shape[1]
        attention = 4 * tokens * model.windows.window_tokens * width * len(model.blocks)
    if isinstance(model, Beast):
        attention = model.attention_flops
    return {
        "recipe": config.name,
        "family": config.model.family,
        "parameters": sum(p.numel() for p in model.parameters()),
        "grid": list(shapes.grid),
        **(_of_swin(model) if isinstance(model, Swin) else {}),
        **(_of_unet(model) if isinstance(model, UNet) else {}),
        **(_of_beast(model) if isinstance(model, Beast) else {}),
        "in_channels": shapes.in_channels,
        "out_channels": shapes.out_channels,
        "forward_flops": dense + attention,
        "forward_flops_dense": dense,
        "forward_flops_attention": attention,
        "step_flops": (3 * dense + 7 * attention // 2) * config.train.leads,
        "leads": config.train.leads,
    }


def _of_swin(model: Swin) -> dict[str, Any]:
    return {
        "padded_shape": list(model.padded_shape),
        "tokens": model.num_tokens,
        "windows": model.windows.num_windows,
    }


def _of_unet(model: UNet) -> dict[str, Any]:
    """stages: of each block its grid, features that go in, are inside and come out, dilation and
    parameters. seam: see `UNet`."""
    return {
        "stages": [
            {
                "name": name,
                "grid": list(block.points),
                "features": [block.conv1.weight.shape[1], *block.mix.weight.shape[1::-1]],
                "dilation": block.dilation,
                "parameters": sum(p.numel() for p in block.parameters()),
            }
            for name, block in model.blocks
        ],
        "seam": model.seam,
    }


def _of_beast(model: Beast) -> dict[str, Any]:
    """stages: of each its grid of tokens, features, blocks, windows, their tokens and parameters.
    forward_flops_embedding: of embedding and recovery, by formula. forward_flops_noise: of what
    conditions the norms. parameters_of: those of means, deviations, and all others."""
    names = {name: p.numel() for name, p in model.named_parameters()}
    rho = sum(count for name, count in names.items() if name.endswith("_rho"))
    means = sum(count for name, count in names.items() if f"{name}_rho" in names)
    patches = model.scales[1][0] * model.scales[1][1]
    ends = model.embed.linear.weight.shape[1], model.recover.linear.weight.shape[0]
    width, square = model.first.width, model.embed.patch**2
    return {
        "stages": [
            {
                "name": name,
                "grid": list(stage.grid.tokens),
                "features": stage.width,
                "blocks": len(stage.blocks),
                "windows": stage.grid.num_windows,
                "window": list(stage.grid.window),
                "parameters": sum(p.numel() for p in stage.parameters()),
            }
            for name, stage in model.stages.items()
        ],
        "parameters_of": {
            "means": means,
            "deviations": rho,
            "others": sum(names.values()) - means - rho,
        },
        "forward_flops_embedding": 2 * (patches // square) * sum(ends) * width,
        "forward_flops_noise": sum(
            module.forward_flops for module in model.modules() if isinstance(module, Nice)
        ),
    }


def _silent(nice: Nice, num_samples: int) -> torch.Tensor:
    """In the place of a norm's conditioning while linears and convolutions are counted."""
    bias = nice.second.bias
    return bias.new_zeros(nice.norms, num_samples, nice.parts, bias.shape[1] // nice.parts)


def _uncounted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    """In the place of attention while linears and convolutions are counted."""
    return v.flatten(2)
