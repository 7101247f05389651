"""What a model is, family by family."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from graticule.config.values import FORBID, require


@dataclass(frozen=True, kw_only=True)
class SwinConfig:
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

    @property
    def words(self) -> str:
        """The model in a line."""
        return (
            f"patch {self.patch}, stride {self.sampling}, width {self.width}, {self.depth} blocks,"
            f" {self.heads} heads, windows {self.window_shape[0]} x {self.window_shape[1]},"
            f" {self.boundary} boundary"
        )


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """The ConvNeXt-like U-Net (Samudra; Samudra 2 with the values that stand here).

    Of L levels it has 2 L + 1 blocks: L on the way down, one at the bottom, L on the way up.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    boundary: ClassVar[str] = "globe"
    """Longitude is periodic, poles are walls: there is no other."""

    family: Literal["unet"] = "unet"
    widths: tuple[int, ...] = (280, 380, 480, 520)
    """Features behind each block on the way down, one number a level."""
    factor: int = 2
    """A block's inner features, in those that it is given."""
    dilations: tuple[int, ...] = (1, 2, 4, 8, 8, 8, 4, 2, 2)
    """Grid points from tap to tap of each block's 3 x 3 convolutions, in the order in which they
    run: down, bottom, up. Samudra's last one is 2, not 1."""
    norm: Literal["batch", "instance", "group"] = "batch"
    """`batch`: over samples and points, with running statistics for forecasts. `instance`: over
    the points of each sample and feature, without weights. `group`: over those of a group of
    features."""
    norm_groups: int = 4
    """Groups of features, where model.norm=group."""
    activation_max: float = 10.0
    """GELU's results are at most this; 0: they are not limited."""
    upsampling: Literal["circular", "plain"] = "circular"
    """Bilinear. `circular`: across the ends of the circle of longitudes (Samudra 2). `plain`: the
    last columns continue beyond them, which is a seam (Samudra 1)."""
    position_features: int = 0
    """Learned numbers of each grid point, given with every input."""

    def __post_init__(self) -> None:
        levels = len(self.widths)
        require(
            levels >= 1 and min(self.widths) >= 1,
            f"model.widths={self.widths}: a number of at least 1 for each level, and a level at"
            " least",
        )
        require(
            len(self.dilations) == 2 * levels + 1 and min(self.dilations) >= 1,
            f"model.dilations={self.dilations}: model.widths={self.widths} are {levels} levels,"
            f" so there are {levels} blocks on the way down, one at the bottom and {levels} on"
            f" the way up: {2 * levels + 1} numbers of at least 1",
        )
        for name, least in (("factor", 1), ("norm_groups", 1), ("position_features", 0)):
            value = getattr(self, name)
            require(value >= least, f"model.{name}={value} must be at least {least}")
        require(
            self.activation_max >= 0,
            f"model.activation_max={self.activation_max} must be at least 0",
        )

    @property
    def words(self) -> str:
        """The model in a line."""
        return (
            f"widths {_list(self.widths)}, factor {self.factor}, dilations {_list(self.dilations)},"
            f" {self.norm} norm, {self.upsampling} up-sampling"
        )


ModelConfig = SwinConfig | UNetConfig
FAMILIES: dict[str, type[SwinConfig] | type[UNetConfig]] = {"swin": SwinConfig, "unet": UNetConfig}
"""Of `Config.model`, by `model.family`."""


def _list(numbers: tuple[int, ...]) -> str:
    return "/".join(map(str, numbers))
