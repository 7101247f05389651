"""What a model costs, before it exists."""

from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from graticule.assemble.build import Shapes, build_model
from graticule.config import Config
from graticule.model.beast import Beast
from graticule.model.draws import Draw
from graticule.model.nice import Nice
from graticule.model.swin import Swin
from graticule.model.unet import UNet
from graticule.model.windows import Attend


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
    return bias.new_zeros(nice.norms, num_samples, *bias.shape[1:])


def _uncounted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    """In the place of attention while linears and convolutions are counted."""
    return v.flatten(2)
