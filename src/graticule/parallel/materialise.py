"""Memory and first values for a model that was built on `meta`, cut or not.

A rank draws one whole layer at a time, on the CPU, and keeps its part of it. (torch's truncated
normal draws and rejects, for which it takes three times the layer's memory.)
"""

import torch
from torch import nn

from graticule.keyed import keyed_seed
from graticule.model.bayes import Posterior
from graticule.model.layers import Layer
from graticule.parallel.box import box_of
from graticule.parallel.data import local


def materialise(model: nn.Module, seed: int, device: str | torch.device) -> None:
    """Give a model on `meta` memory on `device`, and its initial values."""
    allocate(model, device)
    draw_weights(model, seed)


def allocate(model: nn.Module, device: str | torch.device) -> None:
    """Give the parameters of a model on `meta` memory on `device`, without values.

    Buffers (indices, masks, running statistics) have values already: they keep them and move.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    lost = [name for name, value in buffers.items() if value.is_meta]
    assert not lost, f"built on meta without values: {lost}"
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device=device)
    for name, value in buffers.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, value.to(device))


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Give every layer its initial values, by the key (seed, layer name).

    Drawn whole, in the type of the parameters, on the CPU: the same bits on every device and in
    every layout.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, Layer):
            continue
        key = int.from_bytes(name.encode(), "little")
        generator = torch.Generator().manual_seed(keyed_seed(seed, "weights", key))
        ours = dict(layer.named_parameters(recurse=False))
        whole = {
            leaf: nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"),
                requires_grad=False,
            )
            for leaf, parameter in ours.items()
        }
        try:
            _put(layer, whole)
            layer.reset(generator)
            if isinstance(layer.sample, Posterior):
                layer.sample.reset(layer)
        finally:
            _put(layer, ours)
        for leaf, parameter in ours.items():
            box = box_of(parameter)
            assert box is not None, "every rank is in the mesh of its parameters"
            local(parameter).copy_(whole[leaf][box.slices])


def _put(layer: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for leaf, parameter in parameters.items():
        setattr(layer, leaf, parameter)
