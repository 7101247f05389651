"""One training run."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from graticule.config.values import FORBID, require


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run: pretraining with one lead, fine-tuning with several."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    steps: int = 1000
    """Optimizer steps in all."""
    batch: int = 8
    """Samples per micro-batch."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    leads: int = 1
    """Autoregressive steps whose losses are summed (K)."""
    rollout_gradient: Literal["full", "detached"] = "full"
    """`full`: through the whole rollout. `detached`: each lead's input is a constant."""
    loss: Literal["mae", "mse"] = "mae"
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
    """Exponential moving average of the weights; 0: none. Step n uses at most
    (1 + n) / (10 + n), so that a short run forgets its random start."""
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
            "steps",
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
        ):
            value = getattr(self, name)
            require(value >= 0, f"train.{name}={value} must not be negative")
        require(
            0 <= self.ema_decay < 1,
            f"train.ema_decay={self.ema_decay} must be at least 0 and less than 1",
        )
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"train.betas={self.betas} must each be at least 0 and less than 1",
        )
