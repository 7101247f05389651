"""Whole models on every kind of layout against one process: one table.

Difference = max|a - b| / max(max|b|, a thousandth of the model's largest gradient), in float64.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from graticule.assemble import Shapes
from graticule.config import Config, SwinConfig, TrainConfig
from graticule.parallel.launch import laid_out, ranks_of
from graticule.verify import QUANTITIES, Results, difference, measure
from pools import Pools

GLOBE = SwinConfig(
    patch=2, sampling=2, width=16, depth=2, heads=4, window=(3, 4), norm_groups=4, mlp_ratio=2
)
PAPER = replace(GLOBE, boundary="paper", window=3)
# Deeper: from shifted windows back to regular ones and on.
PLAIN = replace(GLOBE, sampling=1, patch=4, bias_table=False, depth=4)
# Odd rows, padding in the south (globe) or all around (paper), more of it than one window.
GLOBE_GRID, PAPER_GRID = (33, 32), (29, 31)
ONE_LEAD = TrainConfig()
LEADS_3 = TrainConfig(leads=3, loss="mse")
ACCUMULATED = TrainConfig(accumulation=3, leads=2, detach_every=1)


@dataclass(frozen=True)
class Case:
    """A model and a layout. tolerance: of every quantity."""

    model: str
    layout: str
    train: TrainConfig = ONE_LEAD
    tolerance: float = 1e-12


MODELS = {"globe": (GLOBE, GLOBE_GRID), "paper": (PAPER, PAPER_GRID), "plain": (PLAIN, GLOBE_GRID)}
SHARDED = "weights=sharded"
ANY_MODEL = (
    "window=2", "window=3", "window=4", "data=2", "sequence=2", "tensor=2",
    "window=2,sequence=2", "window=2,tensor=2", "sequence=2,tensor=2", "sequence=4",
    "tensor=4", "window=2,stripe_dim=lon", "window=3,stripe_dim=lon",
    "window=2,fixed_windows=2x1", "window=4,fixed_windows=2x2", "window=2,exchange=p2p",
)  # fmt: skip
# Figs. 5 and 8 scaled down, and eight ranks, more than rows of tokens or of windows.
LARGE = (
    "window=8", "window=4,sequence=2", "window=4,tensor=2", "window=2,sequence=2,tensor=2",
    "data=2,window=2,sequence=2", "data=2,window=2,tensor=2",
    "window=8,fixed_windows=2x4", "window=4,sequence=2,fixed_windows=2x2",
    "window=8,stripe_dim=lon",
)  # fmt: skip
FSDP = (
    "window=2", "data=2", "window=3", "sequence=2", "tensor=2", "window=2,tensor=2",
    "window=2,sequence=2", "data=2,window=2", "window=2,reshard=false",
    "window=2,shard_unit=model", "window=2,tensor=2,shard_unit=model",
    "window=2,gather=fp32", "data=2,window=2,tensor=2",
)  # fmt: skip
TRAINED = (
    "window=3", "window=2,sequence=2", "window=2,tensor=2", f"window=2,{SHARDED}",
    f"window=2,tensor=2,{SHARDED}", "data=2,window=2",
)  # fmt: skip
ALL = [
    *(Case(model, layout) for model in MODELS for layout in ANY_MODEL),
    *(Case("globe", layout) for layout in LARGE),
    *(Case("paper", f"{layout},{SHARDED}") for layout in FSDP),
    *(Case("globe", layout, train) for train in (LEADS_3, ACCUMULATED) for layout in TRAINED),
]
# Every kind of layout with a model or two; `make test-all` runs the whole table.
FAST = {
    *(Case("globe", layout) for layout in ANY_MODEL[1::2]),
    *(Case("paper", layout) for layout in ANY_MODEL[::2]),
    *(Case("plain", layout) for layout in ANY_MODEL[::4]),
    *(Case("globe", layout) for layout in (LARGE[0], LARGE[3], LARGE[5])),
    *(Case("paper", f"{FSDP[i]},{SHARDED}") for i in (0, 1, 3, 4, 5, 8, 9, 11)),
    *(Case("globe", TRAINED[i], LEADS_3) for i in (0, 1, 4, 5)),
    *(Case("globe", TRAINED[i], ACCUMULATED) for i in (2, 3)),
}
CASES = [
    pytest.param(case, marks=() if case in FAST else pytest.mark.slow,
                 id=f"{case.model}-{case.layout}-K{case.train.leads}")
    for case in ALL
]  # fmt: skip


def shapes_for(grid: tuple[int, int]) -> Shapes:
    return Shapes(
        grid=grid, num_prognostic=2, num_predicted=3, num_forcing=1, num_static=1, num_inputs=2,
        num_outputs=2, num_forcings=1,
    )  # fmt: skip


def config_of(case: Case) -> Config:
    return laid_out(Config(model=MODELS[case.model][0], train=case.train), case.layout)


_serial: dict[tuple, Results] = {}


def results(pools: Pools, config: Config, shapes: Shapes, *how) -> Results:
    """Of one process these are kept: many layouts are compared with them."""
    if ranks_of(config) > 1:
        return Results.joined(pools[ranks_of(config)].run(measure, config, shapes, *how), shapes)
    key = (config.model, config.train, shapes, how)
    if key not in _serial:
        _serial[key] = Results.joined(pools[1].run(measure, config, shapes, *how), shapes)
    return _serial[key]


@pytest.mark.parametrize("case", CASES)
def test_a_layout_gives_the_numbers_of_one_process(case: Case, pools: Pools) -> None:
    config = config_of(case)
    shapes = shapes_for(MODELS[case.model][1])
    # One step after the gradients: three are verify's, and these cases are many.
    how = torch.float64, 1
    serial = results(pools, Config(model=config.model, train=case.train), shapes, *how)
    found = results(pools, config, shapes, *how).differences(serial)
    assert set(found) == set(QUANTITIES)
    assert max(found.values()) <= case.tolerance, found


@pytest.mark.parametrize(
    "layout", ["window=4", "window=2,sequence=2", "window=2,tensor=2", "data=2,weights=sharded"]
)
def test_five_steps_in_float32_agree_to_rounding(layout: str, pools: Pools) -> None:
    shapes = shapes_for(GLOBE_GRID)
    serial_config = Config(model=GLOBE)
    serial = results(pools, serial_config, shapes, torch.float32, 5)
    there = results(pools, laid_out(serial_config, layout), shapes, torch.float32, 5)
    for name, value in serial.parameters.items():
        # Of the order of a weight: some parameters start at zero and have a gradient of zero.
        assert difference(there.parameters[name], value, 0.1) <= 1e-5, name
