"""Published Samudra weights: found by name, checked by shape, made a run of ours.

Samudra 2 names `unet.layers.N.convblock.M`, `unet.layers.N.skip_module` and `decoder`, Samudra 1
`layers.N...` with the last convolution as the last layer. N counts blocks, poolings and
up-samplings in the order in which they run, so that block k is layer 2 k; M counts convolution,
norm and activation: 0, 1, 2, 3, 4, 5 and the 1 x 1 convolution 6.

The channels of a file have no names. Ours must come in its order: all channels of the older state,
then of the newer one, then the forcing of both times (`recipes/samudra.py` has the published one).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graticule.config import Config
from graticule.model.unet import Block, UNet
from graticule.parallel.box import box_of
from graticule.parallel.data import local
from graticule.train.checkpoint import Saver
from graticule.train.folder import opened, write_description
from graticule.train.run import Run
from graticule.train.task import Task

_PARTS = {"conv1": 0, "norm1": 1, "conv2": 3, "norm2": 4, "mix": 6}
_WRAPPERS = ("model", "model_state_dict", "state_dict")
"""Under which a training checkpoint has its weights."""
_PREFIXES = ("module.", "_orig_mod.")
"""What distributed and compiled modules put before names."""
_NO_WEIGHTS = ("num_batches_tracked", "n_averaged", "cap")
"""Last parts of names of what is counted or set, not learnt."""


def adopt(config: Config, file: str | Path, out: str | Path, *, device: str = "cpu") -> Path:
    """Make the new folder `out` a run at step 0 of the configured model with published weights.

    It forecasts, is evaluated and is trained on (`train.start_from`) like any other. Fields are
    normalised by the store's own statistics: the store must be what the weights were trained on.
    Returns the checkpoint. ValueError where names or shapes are not those of the model.
    """
    file, out = Path(file), Path(out)
    weights = read_weights(file)
    task = Task.of(config, torch.device(device))
    load_published(task.model, weights, str(file))
    with opened(out, resume=False):
        run = Run(task, None)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        write_description(out, task, 0, f"{file.name} (SHA-256 {digest}...)")
        saver = Saver(out, keep=1)
        path = run.save(saver)
        saver.close()
    return path


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a torch checkpoint, of which no code is run."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(file)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    except Exception as error:  # of pickle, zip files, safetensors: none has a common class
        raise ValueError(
            f"{file} holds no plain tensors: {str(error).splitlines()[0]}. Where you trust it, save"
            " its weights alone: torch.save(torch.load(FILE, weights_only=False)['model'], NEW)"
        ) from error
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    tensors = {
        str(name): value
        for name, value in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(value, Tensor)
    }
    if not tensors:
        raise ValueError(
            f"{file} holds no weights, neither by their names nor under {', '.join(_WRAPPERS)}"
        )
    return {_bare(name): value for name, value in tensors.items()}


def _bare(name: str) -> str:
    while any(name.startswith(prefix) for prefix in _PREFIXES):
        name = name[len(next(p for p in _PREFIXES if name.startswith(p))) :]
    return name


def published_names(model: UNet, *, first: bool = False) -> dict[str, str]:
    """How a published file names what our model's state dict has, by our names.

    first: as Samudra 1 has it.
    """
    root = "layers" if first else "unet.layers"
    names = {}
    for number, (ours, block) in enumerate(model.blocks):
        at = ours if ours == "bottom" else f"{ours}.block"
        theirs = f"{root}.{2 * number}"
        for part, place in _PARTS.items():
            for leaf in getattr(block, part).state_dict():
                names[f"{at}.{part}.{leaf}"] = f"{theirs}.convblock.{place}.{leaf}"
        for leaf in block.skip.state_dict():
            names[f"{at}.skip.{leaf}"] = f"{theirs}.skip_module.{leaf}"
    last = f"layers.{2 * len(model.blocks) - 1}" if first else "decoder"
    names |= {f"last.conv.{leaf}": f"{last}.{leaf}" for leaf in ("weight", "bias")}
    if model.state_dict().keys() - names.keys():
        names["positions.weight"] = "positional_params"
    return names


@torch.no_grad()
def load_published(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Give `model` published weights, running statistics included, or leave it as it is.

    ValueError lists what is missing, has another shape, or has no place here.
    """
    if not isinstance(model, UNet):
        raise ValueError(f"{source}: published Samudra weights are of a U-Net; take recipe samudra")
    names = published_names(model, first=any(name.startswith("layers.") for name in weights))
    state = model.state_dict()
    assert names.keys() == state.keys(), names.keys() ^ state.keys()
    wrong = [
        f"{theirs}: {_shape(weights.get(theirs))} in the file, {_shape(state[ours])} here ({ours})"
        for ours, theirs in names.items()
        if theirs not in weights or weights[theirs].shape != state[ours].shape
    ]
    wrong += [
        f"{name}: {_shape(value)} in the file, no place here"
        for name, value in weights.items()
        if name not in names.values() and name.rpartition(".")[2] not in _NO_WEIGHTS
    ]
    caps = {float(value) for name, value in weights.items() if name.endswith(".cap")}
    most = next(m for m in model.modules() if isinstance(m, Block)).norm1.most
    if caps - {most}:
        wrong.append(f"activations are limited to {sorted(caps)} there and to {most:g} here")
    if wrong:
        shown = "\n  ".join(wrong[:20])
        more = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(
            f"{source} is another model ({len(wrong)} of {len(names)} tensors); see model.widths,"
            " model.factor, model.norm, model.position_features, and data.prognostic and"
            f" data.forcing for the channels:\n  {shown}{more}"
        )
    for ours, theirs in names.items():
        box = box_of(state[ours])
        if box is not None and box.count:
            local(state[ours]).copy_(weights[theirs][box.slices])


def _shape(value: Tensor | None) -> str:
    return "none" if value is None else str(tuple(value.shape))
