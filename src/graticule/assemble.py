"""From a configuration to a model that runs. Today: build, draw initial weights, place.

Layouts, plans and sharding go on here, in this order, when they come: build on meta ->
substitute spatial modules -> split tensors -> checkpoint and offload -> shard -> materialise.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from graticule.config import Config
from graticule.data.samples import SampleSource
from graticule.data.store import Store
from graticule.keyed import keyed_seed
from graticule.model.layers import Layer
from graticule.model.swin import Swin
from graticule.model.windows import Attend

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
) -> Swin:
    """The configured model with its initial weights, or, on `meta`, without any.

    dtype: of the master weights. Each parameter is drawn from a key of the seed and its name, so
    that its first value depends on nothing else.
    """
    model = config.model
    newest = (shapes.num_inputs - 1) * shapes.num_prognostic
    compute = PRECISIONS[config.train.precision] if dtype is torch.float32 else dtype
    meta = torch.device(device).type == "meta"
    # Drawn on the CPU, then placed: every device starts with the same weights.
    with torch.device("meta" if meta else "cpu"):
        built = Swin(
            grid=shapes.grid,
            in_channels=shapes.in_channels,
            out_channels=shapes.out_channels,
            states=(newest, newest + shapes.num_prognostic),
            num_outputs=shapes.num_outputs,
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
            compute_dtype=compute,
        ).to(dtype=dtype)
    if not meta:
        draw_weights(built, config.train.seed)
    return built.to(device)


def draw_weights(model: nn.Module, seed: int) -> None:
    """Give every layer its initial values, by the key (seed, layer name)."""
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            key = int.from_bytes(name.encode(), "little")
            generator = torch.Generator().manual_seed(keyed_seed(seed, "weights", key))
            with torch.no_grad():
                module.reset(generator)


def describe(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Parameters, tokens, padded shape and FLOPs (2 per multiply-add), allocating nothing.

    The model runs on PyTorch's meta device under PyTorch's own counter, which gives linears and
    convolutions. Attention goes by formula, 4 x tokens x window tokens x width per block, since
    the kernel that runs it differs from device to device. A training step costs 3 times the
    forward of linears and convolutions and 3.5 times that of attention (two gradients, and
    scores computed anew), for one sample and all of its leads.
    """
    if config.model.padded_shape is None and shapes.grid[0] * shapes.grid[1] < 1:
        raise ValueError(f"data.grid={shapes.grid} holds no point")
    model = build_model(config, shapes, device="meta")
    for module in model.modules():
        if isinstance(module, Attend):
            module.forward = _uncounted  # type: ignore[method-assign, assignment]
    field = torch.empty(1, shapes.in_channels, *shapes.grid, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(field)
    dense = counter.get_total_flops()
    window = model.windows.window_tokens
    attention = 4 * model.num_tokens * window * config.model.width * config.model.depth
    return {
        "recipe": config.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "grid": list(shapes.grid),
        "padded_shape": list(model.padded_shape),
        "tokens": model.num_tokens,
        "windows": model.windows.num_windows,
        "in_channels": shapes.in_channels,
        "out_channels": shapes.out_channels,
        "forward_flops": dense + attention,
        "forward_flops_dense": dense,
        "forward_flops_attention": attention,
        "step_flops": (3 * dense + 7 * attention // 2) * config.train.leads,
        "leads": config.train.leads,
    }


def _uncounted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    """In the place of attention while linears and convolutions are counted."""
    return v.flatten(2)
