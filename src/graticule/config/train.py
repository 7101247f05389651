"""One training run."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from graticule.config.values import FORBID, require


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: pretraining with one lead, fine-tuning with several."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    steps: int = 1000
    """Optimizer steps in all; 0: those of `epochs`."""
    epochs: int = 0
    """How many times through the training windows, in the place of `steps` (which is then 0): a
    run turns them into steps, the last of which may reach into one more pass. 0: `steps` says."""
    batch: int = 8
    """Samples per micro-batch."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    leads: int = 1
    """Autoregressive steps whose losses are summed (K), the most of them with `leads_from`."""
    leads_from: tuple[tuple[int, int], ...] = ()
    """A curriculum of (step, leads) pairs: from that step on so many leads. The first pair begins
    at step 1, the last one comes to `leads`: ((1, 1), (2000, 4)). Samples, validation and memory
    plans are those of the most leads throughout; what a step does not use is not read."""
    detach_every: int = 0
    """0: the gradient goes through the whole rollout. k: it is not handed on after every k-th
    lead, which bounds what is held; 1: each lead's input is a constant."""
    loss: Literal["mae", "mse"] = "mae"
    gradient_loss: float = 0.0
    """Weight of the L1 of horizontal differences: of |e_i - e_j| over neighbours in longitude and
    latitude that are both wet, in what `loss` is counted in, where e is the error. 0: none."""
    denominator: Literal["wet", "channel", "cells"] = "wet"
    """What the sum of errors is divided by. `wet`: the weight of all wet cells of all channels, so
    that a level counts as much as it has sea. `channel`: each channel's own wet cells, then the
    mean over channels: levels count alike. `cells`: all cells, land too, as Samudra was trained:
    the loss of `wet` times the share that is wet, a constant."""
    dynamic_scale: Literal["none", "inverse"] = "none"
    """`inverse`: each predicted channel's error is multiplied by a factor w that follows the
    inverse of its error (Samudra): after each step w <- (24 w + 1 / error of the first lead) / 25.
    The loss that is reported stays the one without factors; `scaled_loss` is the one minimised."""
    dynamic_scale_limit: float = 0.0
    """No inverse error counts as more than so many times the least one (20); 0: no limit."""
    area_weighted: bool = True
    """Weigh each cell by its area on the sphere; else all wet cells alike."""
    learning_rate: float = 2e-4
    final_learning_rate: float = 1e-6
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: cosine to the final rate, or constant (fine-tuning)."""
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """On matrices and kernels only: not on biases, norms and bias tables."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    ema_decay: float = 0.0
    """Exponential moving average of the weights, and of the running statistics that belong to
    them; 0: none. Step n uses at most (1 + n) / (10 + n), so that a short run forgets its random
    start."""
    precision: Literal["fp32", "bf16", "fp16", "paper"] = "fp32"
    """Of activations and of the weights they meet; master weights stay in float32. `paper`: as
    TERRA was trained, fp16 with a float32 residual stream between float16 fields."""
    roll_longitude: bool = False
    """Turn each sample by a random number of grid points in longitude. Only right where
    nothing but the fields tells longitudes apart: no land, no statics."""
    seed: int = 0
    start_from: str = ""
    """A run whose weights (its average, if it has one) this one starts with: fine-tuning."""
    checkpoint_every: int = 500
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    save_in_background: bool = False
    """Write checkpoints from a copy in host memory while training goes on."""
    validate_every: int = 0
    """Steps between losses on the validation split; 0: only at the end."""
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in (
            "batch",
            "accumulation",
            "leads",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}={value} must be at least 1")
        for name in (
            "learning_rate",
            "final_learning_rate",
            "weight_decay",
            "clip_norm",
            "warmup_steps",
            "validate_every",
            "epochs",
            "detach_every",
            "gradient_loss",
            "dynamic_scale_limit",
        ):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}={value} must not be negative")
        require(
            self.steps >= 1 or (self.steps == 0 and self.epochs > 0),
            f"train.steps={self.steps} must be at least 1, or 0 with train.epochs set",
        )
        require(
            not (self.steps and self.epochs),
            f"train.steps={self.steps} and train.epochs={self.epochs} both say how long a run is;"
            " set train.steps=0 to have the epochs counted, or train.epochs=0",
        )
        limit = self.dynamic_scale_limit
        require(
            limit == 0 or self.dynamic_scale != "none",
            f"train.dynamic_scale_limit={limit:g} limits nothing while train.dynamic_scale=none;"
            " set train.dynamic_scale=inverse, or the limit to 0",
        )
        require(
            limit == 0 or limit >= 1,
            f"train.dynamic_scale_limit={limit:g} must be at least 1, relative to the least, or 0",
        )
        self._check_curriculum()
        require(
            0 <= self.ema_decay < 1,
            f"train.ema_decay={self.ema_decay} must be at least 0 and less than 1",
        )
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"train.betas={self.betas} must each be at least 0 and less than 1",
        )

    def _check_curriculum(self) -> None:
        told = f"train.leads_from={self.leads_from}"
        steps, leads = [pair[0] for pair in self.leads_from], [pair[1] for pair in self.leads_from]
        if not self.leads_from:
            return
        require(steps[0] == 1, f"{told} must begin with step 1: (1, leads)")
        require(
            all(a < b for a, b in itertools.pairwise(steps)),
            f"{told}: steps must ascend, each pair later than the one before",
        )
        require(min(leads) >= 1, f"{told}: each pair has at least 1 lead")
        require(
            leads[-1] == self.leads == max(leads),
            f"{told} comes to {leads[-1]} leads, {max(leads)} at most, and train.leads is"
            f" {self.leads}: the last pair has the most, which train.leads says too",
        )

    def leads_at(self, step: int) -> int:
        """Leads of optimizer step `step`, from 1 on."""
        return next((n for first, n in reversed(self.leads_from) if step >= first), self.leads)
