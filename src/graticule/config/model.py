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


@dataclass(frozen=True, kw_only=True)
class BeastConfig:
    """Swin blocks at two scales, whose norms hear a member's noise (BEAST, Table 2).

    The inner stage stands between two outer ones, with twice their width and a quarter of their
    tokens. Outer windows are counted in patches, inner ones in 2 x 2 patches.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    boundary: ClassVar[str] = "globe"
    """Longitude is periodic, poles are walls: there is no other."""

    family: Literal["beast"] = "beast"
    patch: int = 2
    """Grid points per token of the outer stages, each way."""
    width: int = 1024
    """Features of a token in the outer stages; the inner one has twice as many."""
    depth: int = 4
    """Blocks of each of the two outer stages; odd ones attend in shifted windows."""
    inner_depth: int = 6
    heads: int = 16
    """Of the outer stages."""
    inner_heads: int = 32
    window: int | tuple[int, int] = (30, 60)
    """Tokens of an attention window, (lat, lon) or one number for both; one that spans all rows
    or columns is not shifted along them."""
    inner_window: int | tuple[int, int] = (20, 30)
    mlp_ratio: int = 1
    norm_groups: int = 8
    """Groups of a token's features that are normed each for itself. They belong to the model:
    ranks that share features need as many or fewer."""
    nice_noise: int = 32
    """Values of noise that the norms of a sample and member hear; 0: none."""
    nice_hidden: int = 0
    """Features of the norms' MLPs; 0: as many as their blocks."""
    nice_gate: bool = True
    """The MLPs give a factor of what a block adds, too."""

    def __post_init__(self) -> None:
        for name in ("patch", "width", "depth", "inner_depth", "heads", "inner_heads", "mlp_ratio",
                     "norm_groups"):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"model.{name}={value} must be at least 1")
        require(
            0 <= self.nice_noise <= 1024,
            f"model.nice_noise={self.nice_noise} must be 0 (none) to 1024",
        )
        require(self.nice_hidden >= 0, f"model.nice_hidden={self.nice_hidden} must not be negative")
        for name in ("window", "inner_window"):
            shape = _pair(getattr(self, name))
            require(min(shape) >= 1, f"model.{name}={shape} must be at least 1 each way")
        for name, width in (("heads", self.width), ("inner_heads", 2 * self.width)):
            value = getattr(self, name)
            require(
                width % value == 0,
                f"model.{name}={value} must divide {width} features (model.width={self.width}, of"
                " which the inner stage has twice as many)",
            )
        require(
            self.width % self.norm_groups == 0,
            f"model.width={self.width} is not a multiple of model.norm_groups={self.norm_groups}",
        )

    @property
    def window_shape(self) -> tuple[int, int]:
        """Tokens of an outer window, (lat, lon)."""
        return _pair(self.window)

    @property
    def inner_window_shape(self) -> tuple[int, int]:
        """Tokens of an inner window, (lat, lon)."""
        return _pair(self.inner_window)

    @property
    def words(self) -> str:
        """The model in a line."""
        outer, inner = (
            f"{high} x {wide}" for high, wide in (self.window_shape, self.inner_window_shape)
        )
        return (
            f"patch {self.patch}, width {self.width}/{2 * self.width}, {self.depth}/"
            f"{self.inner_depth}/{self.depth} blocks, {self.heads}/{self.inner_heads} heads,"
            f" windows {outer} and {inner}, {self.nice_noise} values of noise"
        )


ModelConfig = SwinConfig | UNetConfig | BeastConfig
FAMILIES: dict[str, type[SwinConfig] | type[UNetConfig] | type[BeastConfig]] = {
    "swin": SwinConfig, "unet": UNetConfig, "beast": BeastConfig,
}  # fmt: skip
"""Of `Config.model`, by `model.family`."""


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _list(numbers: tuple[int, ...]) -> str:
    return "/".join(map(str, numbers))
