"""What BEAST's layouts are meant to send, in closed form.

With N tokens of C features in a stage, s stripes of longitudes and c ranks that share the features
of each (BEAST's [s, c]), a gather of F features of n tokens, or a sum that is scattered, is (c - 1)
n F of all ranks together. In bytes of all ranks:

                            forward                      backward
    embedding (column)      (c - 1) N p^2 I              twice that: gathered again, and summed
    a block  q, k, v        (c - 1) N C                  twice that
             proj           (c - 1) N C                  the same: one gather of the output's
             fc1, ratio 1   (c - 1) N C                  gradient serves those of input and weight
             fc1, ratio r   (c - 1) N C, a column        twice that
             fc2            (c - 1) N C                  the same
    down (row)              (c - 1) N/4 2C               the same
    up (column), mixing     (c - 1) (N/4 2C + N C)       (c - 1) (2 N/4 2C + N C)
    recovery (row)          (c - 1) N p^2 O              the same
    a shift, and back       2 s R C w / 2                the same: R rows, windows w wide
    into windows, out       0                            a stripe of longitudes is whole windows
    norms, noise, skips     0
    moments over u ranks    4 (u - 1) D                  S and Q, of D bytes each
    crps over u ranks       5/4 (u - 1) m D / u          m members there, orders (1 byte) back
    gradients over r ranks  2 (r - 1) P                  means and deviations, once a step; of few
                                                         (`FEW_BYTES`) r (r - 1) P

where N C, D and P are in bytes; I and O are input and output channels, of a rank with most of them
times c. Windows span all latitudes, and s and c divide what they share.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from graticule.config import BeastConfig
from graticule.mesh import Planes
from graticule.model.beast import Stage
from graticule.parallel.domain import form_of
from graticule.parallel.exchange import FEW_BYTES

Passes = dict[tuple[str, str], "Sent"]
"""By (unit, direction)."""


@dataclass(frozen=True)
class Sent:
    """bytes: of all ranks. calls: exchanges that a rank takes part in."""

    bytes: float
    calls: int

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.bytes + other.bytes, self.calls + other.calls)


NOTHING = Sent(0.0, 0)


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

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True)
class Layout:
    """[s, c], and what is sent: bytes of a number, hidden features per feature, the patch's points,
    input and output channels of the rank that has most."""

    s: int
    c: int
    itemsize: int
    mlp_ratio: int
    square: int
    given: int
    said: int

    @classmethod
    def of(cls, s: int, c: int, itemsize: int, model: BeastConfig, planes: Planes) -> "Layout":
        """planes: of c ranks."""
        return cls(
            s=s, c=c, itemsize=itemsize, mlp_ratio=model.mlp_ratio, square=model.patch**2,
            given=max(len(planes.given(rank)) for rank in range(c)),
            said=max(len(planes.said(rank)) for rank in range(c)),
        )  # fmt: skip

    def once(self, tokens: int, features: int) -> Sent:
        """A gather, or a sum that is scattered."""
        return (
            Sent((self.c - 1.0) * tokens * features * self.itemsize, 1) if self.c > 1 else NOTHING
        )

    def linear(self, tokens: int, num_in: int, num_out: int) -> tuple[Sent, Sent]:
        """(forward, backward) of a linear map in the form that it has."""
        if form_of(num_in, num_out) == "row":
            there = self.once(tokens, num_out)
            return there, there
        there = self.once(tokens, num_in)
        return there, there + there

    def block(self, scale: Scale, shifted: bool) -> tuple[Sent, Sent]:
        wide = scale.width
        hidden = self.mlp_ratio * wide
        parts = [(wide, 3 * wide), (wide, wide), (wide, hidden), (hidden, wide)]
        ahead, back = _both(self.linear(scale.tokens, *part) for part in parts)
        if shifted and scale.shift and self.s > 1:
            moved = 2.0 * self.s * scale.rows * scale.shift * wide * self.itemsize
            ahead, back = ahead + Sent(moved, 2), back + Sent(moved, 2)
        return ahead, back


def of_units(stages: dict[str, Scale], layout: Layout) -> Passes:
    """Of one sample, whose input wants a gradient."""
    outer, inner = stages["first"], stages["inner"]
    ends = layout.square * layout.c
    given = layout.once(outer.tokens, ends * layout.given)
    said = layout.once(outer.tokens, ends * layout.said)
    up = layout.linear(inner.tokens, inner.width, 4 * outer.width)
    mix = layout.linear(outer.tokens, outer.width, outer.width)
    found = {
        "embed": (given, given + given),
        "down": layout.linear(inner.tokens, 4 * outer.width, inner.width),
        "up": _both([up, mix]),
        "recover": (said, said),
    }
    for name, scale in stages.items():
        for number in range(scale.blocks):
            found[f"{name}.{number}"] = layout.block(scale, bool(number % 2))
    return {
        (unit, direction): sent
        for unit, passes in found.items()
        for direction, sent in zip(("forward", "backward"), passes, strict=True)
    }


def _both(parts: Iterable[tuple[Sent, Sent]]) -> tuple[Sent, Sent]:
    ahead, back = NOTHING, NOTHING
    for forward, backward in parts:
        ahead, back = ahead + forward, back + backward
    return ahead, back


def of_members(likelihood: str, ranks: dict[str, int], members: int, values: int) -> Sent:
    """Of one lead. ranks: by axis. values: of the samples of a group, in float32."""
    u, groups = ranks["member"], ranks["data"]
    if u == 1 or likelihood == "gaussian":
        return NOTHING
    if likelihood == "moments":
        return Sent(groups * 2 * (u - 1) * 2 * values * 4, 1)
    return Sent(groups * (u - 1) * members / u * values * (4 + 1), 2)


def weights_of(model: BeastConfig, in_channels: int, out_channels: int) -> tuple[int, int]:
    """(numbers that the ranks of a tensor group share, all others): of weights that are
    distributions two each. The others are what hears the noise first, and the recovery's bias."""
    split = whole = 0
    wide = model.width
    for d, blocks in ((wide, 2 * model.depth), (2 * wide, model.inner_depth)):
        hidden = model.mlp_ratio * d
        split += blocks * 2 * (4 * d * d + 4 * d + 2 * d * hidden + hidden + d)
        parts, features = (3 if model.nice_gate else 2), model.nice_hidden or d
        split += blocks * 2 * parts * d * (features + 1)
        whole += blocks * 2 * features * (model.nice_noise + 1)
    patch = model.patch**2
    split += 2 * wide * (patch * in_channels + 1)  # embedding
    split += 2 * 2 * wide * (4 * wide + 1)  # down
    split += 2 * wide * (4 * 2 * wide + 1)  # up
    split += 2 * wide * (wide + 1)  # mixing
    split += 2 * patch * out_channels * wide  # recovery
    whole += 2 * patch * out_channels
    return split, whole


def of_gradients(split: int, whole: int, ranks: dict[str, int]) -> Sent:
    """In float32. split, whole: as of `weights_of`. One exchange for the split weights and one for
    all others, as long as they are few."""
    world, c = math.prod(ranks.values()), ranks["tensor"]
    if c == 1:
        return _summed(split + whole, world)
    found, alike = _summed(whole, world), world // c
    if alike > 1:
        of_each = _summed(split // c, alike)
        found += Sent(c * of_each.bytes, of_each.calls)
    return found


def _summed(numbers: int, ranks: int) -> Sent:
    few = 4 * numbers <= FEW_BYTES
    return Sent((ranks if few else 2.0) * (ranks - 1) * numbers * 4, 1)
