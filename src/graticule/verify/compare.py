"""A recipe's model on several layouts against one process; a run's steps on another layout."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graticule.assemble import Shapes, shapes_of_config
from graticule.config import Config, override
from graticule.mesh import AXES
from graticule.parallel.launch import laid_out, ranks_of
from graticule.parallel.local import LocalRanks, RankError
from graticule.train.run import rehearsed
from graticule.verify.measure import BATCH, STEPS, Results, measure

LAYOUTS = (
    "data=2", "window=2", "window=3", "window=4", "window=2,stripe_dim=lon", "sequence=2",
    "tensor=2", "window=2,sequence=2", "window=2,tensor=2", "sequence=2,tensor=2",
    "window=4,fixed_windows=2x2", "window=2,weights=sharded", "window=2,tensor=2,weights=sharded",
    "data=2,window=2,weights=sharded,shard_unit=model",
)  # fmt: skip
"""What is verified when nothing else is asked for: four processes at most."""
MEMBERS = (
    "member=2", "member=4", "data=2,member=2", "member=2,weights=sharded", "window=2",
    "window=3,stripe_dim=lon", "member=2,window=2,stripe_dim=lon", "member=2,tensor=2",
    "window=2,tensor=2,weights=sharded", "data=2,member=2,weights=sharded,shard_unit=model",
)  # fmt: skip
"""The same of models whose members are scored together."""
TOLERANCE = 1e-12
MEMBERS_TOLERANCE = 1e-10
"""The variance of members that are close to each other loses digits of the sums it comes from."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One layout against one process. differences: by quantity. bytes_sent: by all ranks in one
    step (forward and backward), by what they were for; what FSDP sends of `sharded` weights is not
    counted. refused: why the model cannot be laid out so; it is then not compared."""

    layout: str
    ranks: int
    differences: dict[str, float]
    bytes_sent: dict[str, int]
    sharded: bool = False
    refused: str = ""
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        return not self.refused and all(
            difference <= self.tolerance for difference in self.differences.values()
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "ranks": self.ranks,
            "passed": self.passed,
            "refused": self.refused,
            "differences": self.differences,
            "bytes_sent": self.bytes_sent,
        }


def verify(
    config: Config,
    layouts: Sequence[str] = (),
    *,
    full: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[str, list[Verdict]]:
    """Compare the layouts (`window=2,sequence=2`: keys of the mesh section) with one process.

    full: at the recipe's own size; else `reduced`. Returns what ran, in a line, and a
    verdict for each layout. ValueError for a layout that is no layout.
    """
    shapes = shapes_of_config(config)
    if not full:
        config, shapes = reduced(config, shapes)
    config = override(config, [f"mesh.{axis}=1" for axis in AXES])
    tried = layouts or (MEMBERS if config.bayes.members > 1 else LAYOUTS)
    named = {layout: laid_out(config, layout) for layout in tried}
    # A sample for each of mesh.data at least.
    batch = max(BATCH, *(there.mesh.data for there in named.values()))
    how = torch.float64, STEPS, batch
    with LocalRanks(1) as one:
        serial = Results.joined(one.run(measure, config, shapes, *how), shapes)
    verdicts = []
    pools: dict[int, LocalRanks] = {}
    try:
        for number, (layout, there) in enumerate(named.items(), start=1):
            ranks = ranks_of(there)
            pool = pools.setdefault(ranks, LocalRanks(ranks, timeout_seconds=180))
            try:
                results = Results.joined(pool.run(measure, there, shapes, *how), shapes)
                verdicts.append(
                    Verdict(
                        layout=layout,
                        ranks=ranks,
                        sharded=there.mesh.weights == "sharded",
                        differences=results.differences(serial),
                        bytes_sent=dict(results.sent),
                        tolerance=tolerance_of(config),
                    )
                )
            except RankError as error:
                refusal = re.search(r"^ValueError: (.*)\Z", str(error), re.DOTALL | re.MULTILINE)
                if refusal is None:
                    raise
                verdicts.append(
                    Verdict(
                        layout=layout, ranks=ranks, differences={}, bytes_sent={},
                        refused=refusal[1].strip(),
                    )
                )  # fmt: skip
            if progress:
                progress(number, len(named))
    finally:
        for pool in pools.values():
            pool.close()
    return size_of(config, shapes, batch), verdicts


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The first steps of a run, taken again on another layout.

    agreement: the largest relative difference of a step's loss from the one that was recorded.
    """

    layout: str
    steps: int
    agreement: float
    tolerance: float = 1e-5

    @property
    def holds(self) -> bool:
        return self.agreement <= self.tolerance


def tolerance_of(config: Config) -> float:
    """The largest difference between a layout and one process that is rounding."""
    return MEMBERS_TOLERANCE if config.bayes.members > 1 else TOLERANCE


def replay(
    config: Config, recorded: Sequence[dict[str, Any]], layout: str, *, steps: int = 20
) -> Replay:
    """Take the first steps of a run on local processes, in its own precision and with its data.

    recorded: the lines of its metrics, from step 1 on.
    """
    before = [line["loss"] for line in recorded[:steps]]
    there = laid_out(config, layout)
    with LocalRanks(ranks_of(there), timeout_seconds=600) as ranks:
        lines = ranks.run(rehearsed, there, len(before))[0]
    worst = max(abs(line["loss"] / loss - 1) for line, loss in zip(lines, before, strict=True))
    return Replay(layout=layout, steps=len(before), agreement=worst)


def reduced(config: Config, shapes: Shapes) -> tuple[Config, Shapes]:
    """A model of the same kind that two cores compute in a second.

    At most 4 channels of each role and 2 leads. Of a Swin at most 8 heads of 8 features, 4 blocks,
    windows of 8 x 8 tokens, and 3 x 4 windows less a row and a half of patches: what the grid does
    not fill is padded, as in the recipe; patch, stride and boundary stay. Of a U-Net at most 8
    features and as many columns as the dilations need, five of the coarsest rows and some that
    make none; levels, dilations and norm stay. Of a BEAST at most 4 heads of 8 features, 2 blocks
    a stage, windows of 4 x 6 and 6 x 4 tokens and 21 rows; of all at most 4 members.
    """
    small, grid = _SMALL[config.model.family](config.model, shapes.grid)
    train = replace(
        config.train, leads=min(config.train.leads, 2), leads_from=(), batch=BATCH, accumulation=1
    )
    # Of members that hardly differ the variance is rounding, in any layout.
    bayes = replace(config.bayes, members=min(config.bayes.members, 4), initial_sigma=0.5)
    fewer = {
        name: min(getattr(shapes, name), 4)
        for name in ("num_prognostic", "num_predicted", "num_forcing", "num_static")
    }
    fewer["num_predicted"] = fewer["num_prognostic"] + min(
        shapes.num_predicted - shapes.num_prognostic, 2
    )
    return (
        replace(config, model=small, train=train, bayes=bayes),
        replace(shapes, grid=grid, **fewer),
    )


def _small_swin(model: Any, grid: tuple[int, int]) -> tuple[Any, tuple[int, int]]:
    heads = min(model.heads, 8)
    width = min(model.width, 8 * heads)
    window = (min(model.window_shape[0], 8), min(model.window_shape[1], 8))
    unit = model.patch * model.sampling
    rows = min(grid[0], 3 * unit * window[0] - unit - model.patch // 2)
    columns = 4 * unit * window[1]
    if model.boundary == "paper":
        columns -= unit + model.patch // 2
    columns = min(grid[1], columns)
    groups = max(g for g in range(1, model.norm_groups + 1) if width % g == 0)
    small = replace(
        model, heads=heads, width=width, depth=min(model.depth, 4), window=window,
        norm_groups=groups, padded_shape=None,
    )  # fmt: skip
    return small, (rows, columns)


def _small_unet(model: Any, grid: tuple[int, int]) -> tuple[Any, tuple[int, int]]:
    levels = len(model.widths)
    unit = 2**levels
    # A block may read once round the circle at its level.
    needed = max(
        dilation << min(number, 2 * levels - number)
        for number, dilation in enumerate(model.dilations)
    )
    odd = grid[1] % unit and unit // 2  # a seam stays a seam
    columns = min(grid[1], -(-needed // unit) * unit + odd)
    rows = min(grid[0], 5 * unit + unit // 2 + 1)
    # The channels that come in make no groups of their own.
    small = replace(model, widths=tuple(min(w, 4 + 4 * n) for n, w in enumerate(model.widths)))
    return (replace(small, norm_groups=1) if model.norm == "group" else small), (rows, columns)


def _small_beast(model: Any, grid: tuple[int, int]) -> tuple[Any, tuple[int, int]]:
    heads = min(model.heads, 4)
    width = min(model.width, 8 * heads)
    window, inner = (
        (min(tokens[0], most[0]), min(tokens[1], most[1]))
        for tokens, most in ((model.window_shape, (4, 6)), (model.inner_window_shape, (6, 4)))
    )
    small = replace(
        model, heads=heads, inner_heads=min(model.inner_heads, 4), width=width,
        depth=min(model.depth, 2), inner_depth=min(model.inner_depth, 2), window=window,
        inner_window=inner, nice_noise=min(model.nice_noise, 8),
        norm_groups=max(g for g in range(1, model.norm_groups + 1) if width % g == 0),
    )  # fmt: skip
    columns = 2 * math.lcm(model.patch * window[1], 2 * model.patch * inner[1])
    return small, (min(grid[0], 21), columns)


_SMALL = {"swin": _small_swin, "unet": _small_unet, "beast": _small_beast}


def size_of(config: Config, shapes: Shapes, batch: int) -> str:
    """What ran, in a line."""
    members = f" {config.bayes.members} members," if config.bayes.members > 1 else ""
    return (
        f"{shapes.grid[0]} x {shapes.grid[1]} points, {shapes.in_channels} channels in,"
        f" {shapes.out_channels} out, {config.model.words}, {config.train.leads} leads,"
        f"{members} batch {batch}"
    )
