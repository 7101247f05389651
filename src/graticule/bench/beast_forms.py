"""What BEAST's layouts are meant to send, in closed form.

With N tokens of C features, s groups of windows along the circle and c ranks of a tensor group
(BEAST's [s, c]), the bytes of all ranks together, in either direction:

    into windows, out of them   N C (c - 1) / c         one exchange; none where c = 1: a stripe of
                                                        longitudes is a group of windows
    a shift, and back           2 s R C w / 2           R rows, windows w wide: half a window each
    a block                     4 (c - 1) N C           gather, sum and scatter of attention and of
                                                        MLP; one gather of the output's gradient
                                                        serves those of input and weight
    everything else             0                       patches, stride-2 convolutions, norms, noise
    moments over u ranks        4 (u - 1) D             S and Q, of D bytes each
    crps over u ranks           5/4 (u - 1) m D / u     m members there, orders (1 byte) back
    gradients over r ranks      2 (r - 1) P             means and deviations, once a step

where N C, D and P are in bytes. Windows span all latitudes, and s and c divide what they share.
"""

import math
from dataclasses import dataclass

from graticule.config import BeastConfig
from graticule.model.beast import Stage


@dataclass(frozen=True)
class Sent:
    """bytes: of all ranks. calls: exchanges that a rank takes part in."""

    bytes: float
    calls: int


def of_units(stages: dict[str, "Scale"], s: int, c: int, itemsize: int) -> dict[str, Sent]:
    """By unit, in either direction, of one sample."""
    found = {"embed": Sent(0, 0), "down": Sent(0, 0), "up": Sent(0, 0), "recover": Sent(0, 0)}
    for name, scale in stages.items():
        whole = scale.rows * scale.columns * scale.width * itemsize
        into = Sent(whole * (c - 1) / c, 1) if c > 1 else Sent(0, 0)
        for block in range(scale.blocks):
            size, calls = (4.0 * (c - 1) * whole, 4) if c > 1 else (0.0, 0)
            if block % 2 and scale.shift and s > 1:
                size += 2 * s * scale.rows * scale.shift * scale.width * itemsize
                calls += 2
            for edge in (0, scale.blocks - 1):
                if block == edge:
                    size, calls = size + into.bytes, calls + into.calls
            found[f"{name}.{block}"] = Sent(size, calls)
    return found


@dataclass(frozen=True)
class Scale:
    """Of a stage: (rows, columns) tokens, width, blocks, columns of a shift (0: none)."""

    rows: int
    columns: int
    width: int
    blocks: int
    shift: int

    @classmethod
    def of(cls, stage: Stage) -> "Scale":
        rows, columns = stage.grid.tokens
        return cls(rows, columns, stage.width, len(stage.blocks), stage.grid.offset[1])


def of_members(likelihood: str, ranks: dict[str, int], members: int, values: int) -> Sent:
    """Of one lead. ranks: by axis. values: of the samples of a group, in float32."""
    u, groups = ranks["member"], ranks["data"]
    if u == 1 or likelihood == "gaussian":
        return Sent(0, 0)
    if likelihood == "moments":
        return Sent(groups * 2 * (u - 1) * 2 * values * 4, 1)
    return Sent(groups * (u - 1) * members / u * values * (4 + 1), 2)


def weights_of(model: BeastConfig, in_channels: int, out_channels: int) -> tuple[int, int]:
    """(numbers that tensor parallelism splits, all others): of weights that are distributions two
    each."""
    split = whole = 0
    wide = model.width
    for d, blocks in ((wide, 2 * model.depth), (2 * wide, model.inner_depth)):
        hidden = model.mlp_ratio * d
        split += blocks * 2 * (4 * d * d + 3 * d + 2 * d * hidden + hidden)
        parts, features = (3 if model.nice_gate else 2), model.nice_hidden or d
        noise = 2 * features * (model.nice_noise + 1) + 2 * parts * d * (features + 1)
        whole += blocks * (2 * 2 * d + noise)
    patch = model.patch**2
    whole += 2 * wide * (patch * in_channels + 1)  # embedding
    whole += 2 * 2 * wide * (4 * wide + 1)  # down
    whole += 2 * wide * (4 * 2 * wide + 1)  # up
    whole += 2 * wide * (wide + 1)  # mixing
    whole += 2 * patch * out_channels * (wide + 1)  # recovery
    return split, whole


def of_gradients(split: int, whole: int, ranks: dict[str, int]) -> Sent:
    """In float32. split, whole: as of `weights_of`. One exchange for the split weights and one for
    all others, as long as they are few."""
    world, c = math.prod(ranks.values()), ranks["tensor"]
    size = 2.0 * (world - 1) * whole * 4
    if c == 1:
        return Sent(size + 2.0 * (world - 1) * split * 4, 1)
    alike = world // c
    if alike == 1:
        return Sent(size, 1)
    return Sent(size + c * 2.0 * (alike - 1) * (split / c) * 4, 2)
