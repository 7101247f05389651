"""The U-Net on stripes, with shared batches and sharded weights, against one process."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from graticule.assemble import Shapes, assemble, build_model, shapes_of_config
from graticule.config import Config, TrainConfig, UNetConfig
from graticule.mesh import Cut, Mesh, Stripes
from graticule.model.pad import EdgePad
from graticule.model.pooling import Double, Pool, halved
from graticule.parallel.exchange import Link
from graticule.parallel.launch import laid_out, mesh_of, ranks_of
from graticule.parallel.space import stripe
from graticule.recipes import recipe
from graticule.verify import QUANTITIES, Results, measure, reduced
from graticule.verify.compare import size_of
from pools import Pools

# 27 rows: 13, 6, 3 at the levels, and rows left over at two of them.
BATCH = UNetConfig(widths=(5, 6, 8), dilations=(1, 2, 4, 4, 4, 2, 2))
INSTANCE = replace(BATCH, norm="instance", upsampling="plain", position_features=2)
GROUP = replace(BATCH, norm="group", norm_groups=2, factor=2)
# Dilation 16 at the fine level, 8 at the coarsest: halos of many hops.
FAR = UNetConfig(widths=(4, 6), dilations=(16, 8, 5, 8, 16), factor=1)
GRID = (27, 40)
MODELS: dict[str, tuple[UNetConfig, tuple[int, int]]] = {
    "batch": (BATCH, GRID),
    # 45 columns: 22, 11, 5, with a seam, whose points the last stripe has.
    "instance": (INSTANCE, (26, 45)),
    "group": (GROUP, GRID),
    "far": (FAR, (14, 32)),
}
ONE_LEAD = TrainConfig()
LEADS = TrainConfig(leads=2, loss="mse")


@dataclass(frozen=True)
class Case:
    model: str
    layout: str
    train: TrainConfig = ONE_LEAD


CASES = [
    *(Case("batch", f"window={n}") for n in (2, 3)),
    # Three coarse rows, four ranks: one of them holds nothing at any level.
    Case("batch", "window=4"),
    Case("batch", "window=3,stripe_dim=lon"),
    Case("batch", "data=2"),
    Case("batch", "data=2,window=2", LEADS),
    Case("batch", "window=2,weights=sharded", LEADS),
    Case("batch", "data=2,window=2,weights=sharded,shard_unit=model"),
    Case("instance", "window=3"),
    Case("instance", "window=4,stripe_dim=lon"),
    Case("instance", "window=3,weights=sharded", LEADS),
    Case("group", "window=2,exchange=p2p"),
    Case("group", "window=4,stripe_dim=lon"),
    Case("far", "window=2"),
    Case("far", "window=4"),
    Case("far", "window=4,stripe_dim=lon"),
]
SLOW = {
    Case("batch", "window=3"), Case("batch", "window=3,stripe_dim=lon"),
    Case("batch", "data=2"), Case("batch", "data=2,window=2,weights=sharded,shard_unit=model"),
    Case("instance", "window=3,weights=sharded", LEADS), Case("far", "window=2"),
}  # fmt: skip
"""`make test-all` runs them: others are of the same kind."""
PARAMETERS = [
    pytest.param(case, marks=pytest.mark.slow if case in SLOW else (),
                 id=f"{case.model}-{case.layout}-K{case.train.leads}")
    for case in CASES
]  # fmt: skip
_serial: dict[tuple[Any, ...], Results] = {}


def shapes_for(grid: tuple[int, int]) -> Shapes:
    return Shapes(
        grid=grid, num_prognostic=2, num_predicted=3, num_forcing=1, num_static=1, num_inputs=2,
        num_outputs=2, num_forcings=2,
    )  # fmt: skip


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_layout_gives_the_numbers_of_one_process(case: Case, pools: Pools) -> None:
    model, grid = MODELS[case.model]
    shapes, alone = shapes_for(grid), Config(model=model, train=case.train)
    how = shapes, torch.float64, 1
    if (case.model, case.train) not in _serial:
        parts = pools[1].run(measure, alone, *how)
        _serial[case.model, case.train] = Results.joined(parts, shapes)
    there = laid_out(alone, case.layout)
    found = Results.joined(pools[ranks_of(there)].run(measure, there, *how), shapes)
    differences = found.differences(_serial[case.model, case.train])
    assert set(differences) == set(QUANTITIES)
    assert max(differences.values()) <= 1e-12, differences
    assert bool(found.buffers) == (model.norm == "batch")


def test_samudra_mini_is_verified_on_uneven_stripes(pools: Pools) -> None:
    config = recipe("samudra-mini")
    config, shapes = reduced(config, shapes_of_config(config))
    assert size_of(config, shapes, 2).startswith(
        "43 x 32 points, 12 channels in, 8 out, widths 4/8/12"
    )
    alone, three = (
        Results.joined(pools[n].run(measure, there, shapes), shapes)
        for n, there in ((1, config), (3, laid_out(config, "window=3")))
    )
    assert max(three.differences(alone).values()) <= 1e-12


# What follows the cut


def test_stripes_of_a_unet_begin_where_no_pooling_straddles_two_ranks() -> None:
    grid = (180, 360)
    scales = {2**n: halved(grid, n) for n in range(5)}
    for dim, along in (("lat", 0), ("lon", 1)):
        cuts = Stripes.of(
            scales,
            grid=grid,
            start=(0, 0),
            dim=dim,
            ranks=4,
            index=0,  # type: ignore[arg-type]
        ).cuts
        for level in range(4):
            fine, coarse = cuts[scales[2**level][along]], cuts[scales[2 ** (level + 1)][along]]
            assert fine.pooled(2) == coarse
            assert coarse.finer(2, fine.size) == fine
            assert fine.bounds[-1] == scales[2**level][along]


def test_a_cut_through_a_pooling_is_refused() -> None:
    assert Cut((0, 4, 9)).pooled(2) == Cut((0, 2, 4))
    assert Cut((0, 4, 9, 9)).pooled(2).finer(2, 9) == Cut((0, 4, 9, 9))
    with pytest.raises(ValueError, match=r"begin at \(0, 3\) share points .* at \[3\]: make"):
        Cut((0, 3, 9)).pooled(2)


def _refused(layers: list[nn.Module]) -> str:
    cut = Cut((0, 4, 6, 8))
    link = Link(torch.distributed.group.WORLD)
    stripes = Stripes(dim="lat", index=link.rank, cuts={8: cut, 4: cut.pooled(2)}, grid=cut)
    try:
        stripe(nn.Sequential(*layers), stripes, link)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.AvgPool2d(2)], "put a pooling.Pool there"),
        ([nn.Upsample(scale_factor=2)], "put an EdgePad and pooling.Double there"),
        ([nn.BatchNorm2d(3)], "put a norm of model.norms or model.norm_gelu there"),
        ([Double()], "reads points that others hold; put an EdgePad"),
        ([EdgePad("globe", (8, 8)), Double()], ""),
        ([Pool((8, 8))], ""),
    ],
)  # fmt: skip
def test_what_would_be_wrong_in_a_stripe_is_refused(
    pools: Pools, layers: Any, message: str
) -> None:
    told = pools[3].run(_refused, layers)
    assert all((message in one) if message else not one for one in told), told


def _weights_kept() -> tuple[int, int, str]:
    """(elements of this rank, of the model, dtype in which the last convolution is gathered)."""
    config = laid_out(Config(model=BATCH, train=TrainConfig(precision="bf16")),
                      "window=2,weights=sharded")  # fmt: skip
    shapes = shapes_for(GRID)
    model = assemble(config, shapes, Mesh(mesh_of(config.mesh, 2))).model
    ours = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator]
    seen: list[torch.dtype] = []
    conv, mix = model.last.conv, model.bottom.mix  # type: ignore[union-attr]
    for layer in (conv, mix):
        layer.register_forward_hook(lambda m, i, o: seen.append(m.weight.dtype))
    rows = model.last.pad.halos[0].held  # type: ignore[union-attr, index]
    model(torch.zeros(1, shapes.in_channels, rows, GRID[1]))
    whole = sum(p.numel() for p in build_model(config, shapes, device="meta").parameters())
    return ours, whole, " ".join(map(str, seen))


def test_each_rank_keeps_half_of_the_weights_and_the_last_ones_travel_whole(pools: Pools) -> None:
    kept = pools[2].run(_weights_kept)
    assert sum(ours for ours, _, _ in kept) == kept[0][1]
    assert all(abs(ours / whole - 0.5) < 0.1 for ours, whole, _ in kept)
    assert {seen for _, _, seen in kept} == {"torch.bfloat16 torch.float32"}
