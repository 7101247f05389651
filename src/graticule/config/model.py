"""What a model is, family by family."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from graticule.config.values import FORBID, require


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hierarchical Swin model (TERRA, section II and Table V)."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    family: Literal["swin"] = "swin"
    patch: int = 4
    """Grid points per token, each way."""
    sampling: int = 2
    """Stride of the down- and up-sampling modules (alpha); 1: no such modules."""
    width: int = 256
    """Features of a token (d)."""
    depth: int = 4
    """Swin blocks (L); odd ones attend in shifted windows."""
    heads: int = 8
    window: int | tuple[int, int] = 8
    """Tokens of an attention window, (lat, lon) or one number for both."""
    mlp_ratio: int = 4
    norm_groups: int = 32
    """Groups of the group norms in the sampling modules."""
    bias_table: bool = True
    """Learned relative position bias."""
    boundary: Literal["globe", "paper"] = "globe"
    """`globe`: longitude is periodic, poles are walls, padding does not exist for the model.
    `paper`: zero padding on all sides, four walls, padding counts in norms (as published)."""
    padded_shape: tuple[int, int] | None = None
    """(lat, lon) of the padded field; none: the smallest legal one."""

    def __post_init__(self) -> None:
        for name in ("patch", "sampling", "width", "depth", "heads", "mlp_ratio", "norm_groups"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}={value} must be at least 1")
        require(
            min(self.window_shape) >= 1, f"model.window={self.window} must be at least 1 each way"
        )
        require(
            self.width % self.heads == 0,
            f"model.width={self.width} is not a multiple of model.heads={self.heads}",
        )
        require(
            self.sampling == 1 or self.width % self.norm_groups == 0,
            f"model.width={self.width} is not a multiple of model.norm_groups={self.norm_groups}",
        )

    @property
    def window_shape(self) -> tuple[int, int]:
        """Tokens of a window, (lat, lon)."""
        return (self.window, self.window) if isinstance(self.window, int) else self.window
