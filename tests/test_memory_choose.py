"""The plan for a budget: it fits by its timeline, larger budgets are not dearer, refusals help."""

from functools import cache

import pytest

from graticule.assemble import Shapes, shapes_of_config
from graticule.config import (
    Config,
    MemoryConfig,
    MeshConfig,
    SwinConfig,
    TrainConfig,
    override,
)
from graticule.memory.choose import Chooser, Mode, choose
from graticule.memory.plan import Plan, Segment, plain_plan, price_of
from graticule.memory.profile import Profile
from graticule.memory.search import size
from graticule.recipes import recipe
from graticule.train.foresee import foresee, heaviest_rank
from small_costs import Slow

RATES = Slow(1e9, to_host=2e9, to_device=2e9)
SHAPES = Shapes(
    grid=(32, 64), num_prognostic=3, num_predicted=3, num_forcing=1, num_static=0, num_inputs=1,
    num_outputs=1, num_forcings=1,
)  # fmt: skip


def config(leads: int, **train: object) -> Config:
    return Config(
        model=SwinConfig(patch=2, width=16, depth=2, heads=2, window=4, norm_groups=4),
        train=TrainConfig(batch=1, leads=leads, **train),  # type: ignore[arg-type]
        memory=MemoryConfig(),
    )


@cache
def profile(leads: int = 3) -> Profile:
    return foresee(config(leads), SHAPES)


@cache
def chooser(mode: Mode = "best", offload: bool = True) -> Chooser:
    return Chooser(profile(), RATES, mode=mode, offload=offload)


def budgets(mode: Mode, offload: bool) -> list[int]:
    """From the least upwards, unevenly."""
    least = chooser(mode, offload).least.peak
    return [int(least * factor) for factor in (1, 1.003, 1.02, 1.05, 1.11, 1.23, 1.4, 1.9, 3, 9)]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mode", ["best", "paper"])
def test_the_composed_step_keeps_to_the_budget(mode: Mode, offload: bool) -> None:
    for budget in budgets(mode, offload):
        chosen = chooser(mode, offload).at(budget)
        assert chosen.peak <= budget
        assert chosen.peak == profile().timeline(chosen.plan).peak_bytes
        assert chosen.price == price_of(chooser(mode, offload).costs, chosen.plan, RATES)
        moved = chosen.price.offload_sampling + chosen.price.offload_transformer
        assert offload or not moved


@pytest.mark.parametrize("offload", [False, True])
def test_a_larger_budget_never_has_a_dearer_plan(offload: bool) -> None:
    least = chooser("best", offload).least.peak
    prices = [
        chooser("best", offload).at(least + step * least // 40).price.seconds for step in range(41)
    ]
    assert prices == sorted(prices, reverse=True)
    assert prices[-1] < prices[0]


@pytest.mark.parametrize("offload", [False, True])
def test_best_is_never_worse_than_the_paper(offload: bool) -> None:
    assert chooser("best", offload).least.peak <= chooser("paper", offload).least.peak
    for budget in budgets("paper", offload):
        paper = chooser("paper", offload).at(budget).price.seconds
        assert chooser("best", offload).at(budget).price.seconds <= paper


@pytest.mark.parametrize("slowness", [1, 30, 1000])
@pytest.mark.parametrize("leads", [1, 3])
def test_plans_that_may_offload_are_never_worse_than_those_that_may_not(
    leads: int, slowness: int
) -> None:
    rates = Slow(1e9, to_host=2e9 / slowness, to_device=2e9 / slowness)
    at_home, away = (Chooser(profile(leads), rates, offload=may) for may in (False, True))
    least = at_home.least.peak
    assert away.least.peak <= least
    for step in range(41):
        budget = least + step * least // 80
        assert away.at(budget).price.seconds <= at_home.at(budget).price.seconds, budget


def test_nothing_is_recomputed_without_a_limit_or_with_a_wide_one() -> None:
    kept = chooser("none").at(None)
    for chosen in (chooser().at(None), chooser().at(2 * kept.peak)):
        assert chosen.price.recomputed_flops == 0
        assert chosen.price.offload_sampling + chosen.price.offload_transformer == 0


def test_a_plan_s_owners_add_up_to_its_peak() -> None:
    chosen = choose(profile(), RATES, budgets("best", True)[4])
    assert sum(chosen.owners.values()) == chosen.peak
    assert list(chosen.owners.values()) == sorted(chosen.owners.values(), reverse=True)
    assert {"parameters", "optimizer"} <= set(chosen.owners)
    parameters = chosen.owners["parameters"]
    assert chosen.owners["optimizer"] >= 2 * parameters
    assert chosen.base >= 3 * parameters
    assert "lead" in chosen.at_peak or "update" in chosen.at_peak


def test_full_and_none_are_one_plan_each() -> None:
    costs = chooser().costs
    full, none = chooser("full").at(None), chooser("none").at(None)
    assert full.plan == plain_plan(costs)
    assert none.plan == Plan(((Segment(0, len(costs.units), "keep"),),) * 3)
    assert full.price.extra_compute == 0 > none.price.extra_compute
    assert full.peak < none.peak
    assert chooser("full").at(full.peak).plan == full.plan
    message = f"the plan of memory.mode=none takes {size(none.peak)}"
    with pytest.raises(ValueError, match=message):
        chooser("none").at(none.peak - 1)


@pytest.mark.parametrize("mode", ["best", "paper"])
def test_a_budget_that_cannot_be_met_is_refused_with_the_least_its_price_and_ways_out(
    mode: Mode,
) -> None:
    least = chooser(mode, False).least
    assert chooser(mode, False).at(least.peak).peak == least.peak
    with pytest.raises(ValueError, match="cannot be met") as refused:
        chooser(mode, False).at(least.peak - 1)
    told = str(refused.value)
    assert f"found for is {size(least.peak)}, with" in told
    assert f"{100 * least.price.extra_compute:+.1f} % of compute" in told
    assert f"Give {size(least.peak)} or more" in told
    for way in ("mesh.window", "train.batch", "fewer leads than 3", "memory.offload=true"):
        assert way in told
    assert ("memory.mode=best" in told) == (mode == "paper")


def test_where_weights_are_what_does_not_fit_sharing_them_is_named_first() -> None:
    wide = override(
        recipe("demo"),
        ["data.store=", "data.grid=16,32", "data.prognostic=u,v", "model.width=256",
         "model.window=2,4", "train.batch=1"],
    )  # fmt: skip
    heavy = Chooser(foresee(wide, shapes_of_config(wide)), Slow())
    with pytest.raises(ValueError, match=r"what else helps: ranks that share the weights \("):
        heavy.at(1000)


def test_the_example_in_the_documentation_adds_up() -> None:
    settings = [
        "data.store=", "data.grid=16,32", "data.prognostic=u,v", "model.width=16", "model.depth=2",
        "model.heads=2", "model.window=2,4", "model.norm_groups=4", "train.batch=1",
        "train.ema_decay=0",
    ]  # fmt: skip
    demo = override(recipe("demo"), settings)
    traced = foresee(demo, shapes_of_config(demo), on="cuda")
    parameters, field, patches, tokens = 19_692, 2 * 16 * 32 * 4, 8 * 16 * 16 * 4, 4 * 8 * 16 * 4
    base = 4 * parameters + (8 * parameters + 58 * 4) + 7_476
    boundaries = field + 5 * tokens + 3 * patches + field
    chosen = Chooser(traced, RATES, mode="full").at(None)
    (turn,) = (row for what, _, row in chosen.timeline.marks if what == "backward")
    assert chosen.timeline.levels[turn].sum() == base + field // 2 + boundaries == 289_068
    gradients = 4 * (parameters - (2 * 4 * 16 + 16))
    assert chosen.owners["gradients"] == gradients
    assert chosen.peak == base + gradients + field + 2108 + 13_888 + 11_840 == 354_136


def test_later_micro_batches_find_the_gradients_of_earlier_ones() -> None:
    once, twice = (
        Chooser(foresee(config(1, accumulation=count), SHAPES), RATES, mode="full").at(None)
        for count in (1, 2)
    )
    # 4 bytes for each parameter, held during the whole step.
    assert twice.base - once.base == once.owners["parameters"]


def test_the_heaviest_rank_has_most_windows_and_then_most_rows() -> None:
    def heaviest(ranks: int, lat: int) -> int:
        there = config(1)
        mesh = MeshConfig(window=ranks, data=1)
        one = Config(model=there.model, train=there.train, mesh=mesh)
        shapes = Shapes(**{**SHAPES.__dict__, "grid": (lat, 64)})
        return heaviest_rank(one, shapes, ranks)

    assert heaviest(1, 32) == 0
    # Two rows of four windows, three ranks: 2, 3 and 3 windows.
    assert heaviest(3, 32) == 1
    # As many windows and rows on both: neither has more neighbours.
    assert heaviest(2, 32) == 0
    # Four rows of windows, four ranks: those in the middle have two neighbours.
    assert heaviest(4, 64) == 1
