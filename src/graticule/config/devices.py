"""How processes share the work, and what their devices may hold."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from graticule.config.values import FORBID, bytes_of, require


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many processes share the work, by axis, and how.

    data x member x window x sequence x tensor is the number of processes. One sample is spread
    over window x sequence x tensor of them, each of which reads and keeps a stripe of its own; of
    the family beast the ranks of `tensor` share the channels of one stripe.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    data: int = 0
    """Samples side by side; 0: what the other axes leave of the processes that were started."""
    member: int = 1
    """Ranks that share the members of an ensemble (`bayes.members`)."""
    window: int = 1
    """Ranks that share a sample: its stripes, and of a Swin its attention windows too."""
    sequence: int = 1
    """Ranks that share each window's tokens; 0: the split of mesh.window ranks into window x
    sequence that is fastest, found out before training (TERRA, Algorithm 1)."""
    tensor: int = 1
    """Ranks that share the weights of attention and MLP; of the family beast all weights, and the
    channels and features of what they read and compute."""
    stripe_dim: Literal["lat", "lon"] = "lat"
    """Stripes of rows or of columns."""
    fixed_windows: tuple[int, int] | None = None
    """(m, n) with m x n = mesh.window: windows in round robin over m x n ranks, the grid of windows
    filled up with empty ones (AERIS). None: ragged row-major ranges (TERRA, Eq. 4)."""
    weights: Literal["replicated", "sharded"] = "replicated"
    """Whether each rank keeps all weights, gradients and optimizer state, or its shard (FSDP)."""
    shard_unit: Literal["block", "model"] = "block"
    """What sharded weights are gathered for at a time."""
    reshard: bool = True
    """Free gathered weights after the forward pass and gather them again for the backward pass."""
    gather: Literal["compute", "fp32"] = "compute"
    """Type in which sharded weights travel: the one they are computed in, or float32, which adds
    up the gradients of several leads in float32 too."""
    exchange: Literal["all_to_all", "p2p"] = "all_to_all"
    """How halos and tokens travel: one collective, or a message for each pair of ranks."""

    def __post_init__(self) -> None:
        for axis in ("data", "member", "window", "sequence", "tensor"):
            size, least = getattr(self, axis), int(axis in ("member", "window", "tensor"))
            require(size >= least, f"mesh.{axis}={size} must be at least {least}")
        fixed = self.fixed_windows
        if fixed is not None:
            require(
                min(fixed) >= 1 and fixed[0] * fixed[1] == self.window,
                f"mesh.fixed_windows={fixed} must be two numbers whose product is"
                f" mesh.window={self.window}",
            )
            require(
                self.sequence > 0,
                "mesh.sequence=0 looks among ragged windows; set mesh.fixed_windows=none, or say"
                " mesh.sequence",
            )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The memory budget of a device."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID

    budget: str = ""
    """What a step may hold on the device, such as `40GiB`; empty: no limit. A run that cannot
    keep to it is refused before it starts."""
    mode: Literal["best", "paper", "full", "simple", "none"] = "best"
    """Which plan: `best` the cheapest in predicted time that meets the budget (without one,
    everything is kept); `paper` as published for TERRA (Eq. 5, Algorithm 2); `full` each unit of
    the model recomputed by itself; `simple` so too, but products of matrices, convolutions and
    attention are kept (both modes as for Samudra); `none` everything kept."""
    offload: bool = True
    """Whether boundaries of recomputed units may wait on the host. On a CPU, whose memory that is,
    with `folder` alone."""
    folder: str = ""
    """On a local disk, where they wait then; empty: in host memory."""

    def __post_init__(self) -> None:
        if self.budget:
            bytes_of(self.budget, "memory.budget")

    @property
    def budget_bytes(self) -> int | None:
        return bytes_of(self.budget, "memory.budget") if self.budget else None
