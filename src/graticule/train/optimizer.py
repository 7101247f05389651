"""The optimizer, its learning rate as a function of the step, and the moving average."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graticule.config import TrainConfig
from graticule.parallel.data import local


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each step: linear warm-up, then cosine to the final rate, or constant.

    There is no counter and nothing to save: the rate is a function of the step alone.
    """

    config: TrainConfig

    def rate(self, step: int) -> float:
        """Of optimizer step `step`, from 1 to `train.steps` (and constant beyond)."""
        peak, warmup = self.config.learning_rate, self.config.warmup_steps
        if step <= warmup:
            return peak * step / warmup
        if self.config.schedule == "constant":
            return peak
        final = self.config.final_learning_rate
        done = min((step - warmup) / max(self.config.steps - warmup, 1), 1.0)
        return final + (peak - final) * (1 + math.cos(math.pi * done)) / 2


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay holds for a parameter: matrices and kernels, not biases, norms or
    tables of relative position bias, nor what says how far a weight is spread (it would go to
    softplus(0) = 0.69)."""
    return parameter.dim() >= 2 and not name.endswith(("bias", "bias_table", "_rho"))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices and kernels only; of those that are
    distributions the prior does it."""
    named = list(model.named_parameters())
    names = {name for name, _ in named}
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for name, parameter in named:
        # One kernel takes parameters that lie on one device mesh, or on none.
        mesh = getattr(parameter, "device_mesh", None)
        decay = decays(name, parameter) and f"{name}_rho" not in names
        groups.setdefault((decay, mesh), []).append(parameter)
    # One kernel for all parameters; the same numbers as the loop to rounding (tested).
    fused = all(p.device.type in ("cpu", "cuda") for _, p in named)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decay else 0.0}
            for (decay, _), parameters in groups.items()
        ],
        lr=config.learning_rate,
        betas=config.betas,
        fused=fused,
    )


STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value
    return tensors


def empty_optimizer_tensors(model: nn.Module, saved: Mapping[str, object]) -> dict[str, Tensor]:
    """Tensors to load an optimizer's state into, for the parameters that `saved` names.

    A parameter that has not had a gradient yet has no state.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        if any(f"{key}.{name}" in saved for key in STATE_KEYS):
            tensors[f"exp_avg.{name}"] = torch.zeros_like(parameter, requires_grad=False)
            tensors[f"exp_avg_sq.{name}"] = torch.zeros_like(parameter, requires_grad=False)
            tensors[f"step.{name}"] = torch.zeros(())
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = optimizer.state_dict()
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            if f"step.{name}" in tensors:
                values["state"][index] = {key: tensors[f"{key}.{name}"] for key in STATE_KEYS}
            index += 1
    # torch's own loading puts `step` where the fused kernel wants it.
    optimizer.load_state_dict(values)


class Average:
    """Exponential moving average of the parameters, and of the statistics that belong to them.

    average <- average + (1 - d) (parameter - average), d = min(decay, (1 + n) / (10 + n)) at
    update n: a short run's average does not remember its random start.

    Persistent buffers of floating point, batch norm's running means and variances, are averaged
    alike; those of integers are copied. Copies would be the statistics of the newest weights, which
    the averaged ones do not have: behind a linear layer y = A x the mean of averaged weights is
    the average of the means, mean(A) E[x], exactly, and their variance is the average of the
    variances but for the spread of the weights squared, of second order. Copies are wrong to first
    order, by how far the weights have moved since. A buffer that does not change stays what it is.

    How far a weight is spread (`_rho`) is that of the newest weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: value.clone() for name, value in model.state_dict().items()}
        """By the model's own names, as a checkpoint holds them."""

    def decay_at(self, step: int) -> float:
        """The decay of the update that follows optimizer step `step`, from 1 on."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        share = 1 - self.decay_at(step)
        # A parameter with two names is averaged under both.
        for name, value in model.state_dict().items():
            # Of a sharded parameter, this rank's part: no communication.
            ours, value = local(self.tensors[name]), local(value)
            if value.is_floating_point() and not name.endswith("_rho"):
                ours.lerp_(value, share)
            else:
                ours.copy_(value)
