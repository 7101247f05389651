"""Composed timelines against traces of steps that ran: plans, leads, ranks, offloading."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from graticule.assemble import Shapes, assemble
from graticule.cluster.devices import device
from graticule.config import Config, SwinConfig, TrainConfig, UNetConfig, override
from graticule.memory.apply import Memory
from graticule.memory.choose import Chooser
from graticule.memory.costs import ProfileCosts
from graticule.memory.offload import Host
from graticule.memory.plan import Action, LeadPlan, Plan, Segment, peak_of
from graticule.memory.profile import profile_step
from graticule.memory.trace import trace_memory
from graticule.mesh import Mesh
from graticule.parallel.launch import laid_out, mesh_of
from graticule.train.foresee import foresee
from graticule.train.rehearsal import Rehearsal, leads_together
from peaks import measured_peaks
from pools import Pools

SHAPES = Shapes(
    grid=(36, 32), num_prognostic=3, num_predicted=4, num_forcing=1, num_static=1, num_inputs=1,
    num_outputs=1, num_forcings=1,
)  # fmt: skip
NUM_UNITS, UP = 9, 5
UNET = UNetConfig(widths=(6, 8), factor=2, dilations=(1, 2, 1, 2, 1))


def config_of(leads: int, layout: str = "") -> Config:
    config = Config(
        model=SwinConfig(patch=2, width=32, depth=2, heads=4, window=4, norm_groups=4),
        train=TrainConfig(batch=1, leads=leads),
    )
    return laid_out(config, layout) if layout else config


def random_lead(draw: random.Random, actions: Sequence[Action], num_units: int) -> LeadPlan:
    cuts = sorted(draw.sample(range(1, num_units), draw.randint(0, min(6, num_units - 1))))
    ends = [0, *cuts, num_units]
    return tuple(Segment(first, last, draw.choice(actions)) for first, last in pairwise(ends))


def with_tiles(lead: LeadPlan, action: Action, tiles: int) -> LeadPlan:
    """The same, but for up-sampling, which is in row tiles."""
    before = [s for s in lead if s.first < UP]
    before[-1] = Segment(before[-1].first, UP, before[-1].action)
    after = [s for s in lead if s.last > UP + 3] or [Segment(UP + 3, NUM_UNITS, "keep")]
    after[0] = Segment(UP + 3, after[0].last, after[0].action)
    return (*before, Segment(UP, UP + 3, action, tiles), *after)


def plans_of(
    leads: int, seed: int, num: int, actions: Sequence[Action], num_units: int = NUM_UNITS
) -> list[Plan]:
    """Half of them lead-wise."""
    draw = random.Random(seed)
    return [
        Plan(
            tuple(random_lead(draw, actions, num_units) for _ in range(leads)),
            lead_wise=bool(number % 2),
        )
        for number in range(num)
    ]


def whole(
    action: Action, leads: int, *, lead_wise: bool = False, num_units: int = NUM_UNITS
) -> Plan:
    """Every unit by itself."""
    lead = tuple(Segment(unit, unit + 1, action) for unit in range(num_units))
    return Plan((lead,) * leads, lead_wise=lead_wise)


def job_of(config: Config, ranks: int = 1, shapes: Shapes = SHAPES) -> Rehearsal:
    running = assemble(config, shapes, Mesh(mesh_of(config.mesh, ranks)))
    job = Rehearsal(config, running, "cpu", "stored", torch.int16)
    job.step(config.train.leads, Memory())()  # gradients and caches are there afterwards
    return job


@pytest.mark.parametrize(
    "leads",
    [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
)
def test_a_composed_timeline_has_the_peak_of_the_step_it_stands_for(leads: int) -> None:
    job = job_of(config_of(leads))
    profile = profile_step(job, leads, tiles=3)
    assert profile.units == (
        "embed", "down.0", "down.1", "blocks.0", "blocks.1", "up", "up.0", "up.1", "recover",
    )  # fmt: skip
    plans = plans_of(leads, leads, 4, ("keep", "recompute", "recompute", "offload"))
    tiled: tuple[Action, ...] = ("recompute", "offload", "offload", "recompute")
    for plan, action in zip(plans[:4], tiled, strict=True):
        changed = tuple(with_tiles(lead, action, 3) for lead in plan.leads)
        plans.append(Plan(changed, lead_wise=plan.lead_wise))
    for plan in plans:
        with Host("cpu") as host:
            step = job.step(leads, Memory(plan, host))
            _, trace = trace_memory(step, job.owned, elsewhere=host.owned)
        composed = profile.timeline(plan)
        assert composed.peak_bytes == pytest.approx(trace.peak_bytes, rel=5e-4), plan
        assert composed.levels[-1].sum() == pytest.approx(trace.alive[-1].sum(), abs=64), plan


@pytest.mark.parametrize("leads", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_unets_skips_are_held_by_every_segment_that_they_pass_through(leads: int) -> None:
    config = replace(config_of(leads), model=UNET)
    job = job_of(config, shapes=replace(SHAPES, grid=(13, 32)))
    profile = profile_step(job, leads, simple=True)
    assert profile.units == ("down.0", "down.1", "bottom", "up.0", "up.1", "last")
    actions: tuple[Action, ...] = ("keep", "recompute", "offload", "simple")
    plans = plans_of(leads, leads, 6, actions, num_units=6)
    plans += [whole(action, leads, num_units=6) for action in actions]
    for plan in plans:
        with Host("cpu") as host:
            step = job.step(leads, Memory(plan, host))
            _, trace = trace_memory(step, job.owned, elsewhere=host.owned)
        composed = profile.timeline(plan)
        assert composed.peak_bytes == pytest.approx(trace.peak_bytes, rel=5e-4), plan
        assert composed.levels[-1].sum() == pytest.approx(trace.alive[-1].sum(), abs=64), plan


@pytest.mark.parametrize("leads", [1, 3])
def test_the_modes_by_name_hold_what_they_are_said_to_and_less_from_one_to_the_next(
    leads: int,
) -> None:
    job = job_of(config_of(leads))
    profile = profile_step(job, leads, simple=True)
    peaks = {}
    for mode, action in {"none": "keep", "simple": "simple", "full": "recompute"}.items():
        chosen = Chooser(profile, device("cpu"), mode=mode).at(None)  # type: ignore[arg-type]
        assert {s.action for lead in chosen.plan.leads for s in lead} == {action}
        _, trace = trace_memory(job.step(leads, Memory(chosen.plan)), job.owned)
        assert chosen.peak == pytest.approx(trace.peak_bytes, rel=5e-4), mode
        added = peak_of(ProfileCosts(profile), chosen.plan).bytes
        assert 0.97 * chosen.peak <= added <= 1.06 * chosen.peak, mode
        peaks[mode] = chosen.peak
        if mode == "simple":  # nothing that is counted is computed again
            assert chosen.price.recomputed_flops == 0
    assert peaks["full"] < peaks["simple"] < peaks["none"]


@pytest.mark.parametrize("leads", [1, 3])
def test_the_costs_of_segments_add_up_to_the_composed_peak(leads: int) -> None:
    profile = profile_step(job_of(config_of(leads)), leads, tiles=3)
    costs = ProfileCosts(profile)
    plans = plans_of(leads, 7, 20, ("keep", "recompute"))
    plans += [
        Plan(tuple(with_tiles(lead, "recompute", 3) for lead in plan.leads), plan.lead_wise)
        for plan in plans[:8]
    ]
    for plan in plans:
        composed, added = profile.timeline(plan).peak_bytes, peak_of(costs, plan).bytes
        # A state that two segments share may count twice; lead-wise, the fullest lead stands for
        # all.
        assert 0.97 * composed <= added <= 1.06 * composed, plan


def test_a_segments_flops_leave_out_what_comes_after_its_last_saved_tensor() -> None:
    profile = profile_step(job_of(config_of(1)), 1, tiles=3)
    flops, tails = dict(zip(profile.units, profile.flops, strict=True)), profile.tail_flops
    by_name = dict(zip(profile.units, tails, strict=True))
    # The strided convolution is all that embed ends with: 2 x 9 x 32 x 32 a token of 9 x 8.
    assert by_name["embed"] == 2 * 9 * 32 * 32 * 9 * 8
    assert by_name["up"] == flops["up"] == 2 * 4 * 32 * 32 * 9 * 8
    assert by_name["recover"] == flops["recover"]
    assert by_name["up.0"] == 0
    # A tile's convolutions read rows that its neighbours read too.
    again = ProfileCosts(profile).segment("only", Segment(UP, UP + 3, "recompute", 3))
    whole = sum(flops[name] for name in ("up", "up.0", "up.1"))
    assert whole < again.recompute_flops < 2 * whole
    # Of a block, the second linear layer of its MLP: 2 x 4 x 32 x 32 a token slot of 12 x 8.
    assert by_name["blocks.0"] == 2 * 4 * 32 * 32 * 12 * 8


def measured(config: Config, ranks: int, plans: list[Plan]) -> list[int]:
    """On a rank: the peak of a step of each plan."""
    torch.manual_seed(0)
    return measured_peaks(job_of(config, ranks), plans)


@pytest.mark.parametrize(
    ("layout", "ranks", "leads"),
    [
        ("", 1, 1),
        ("window=4", 4, 1),
        pytest.param("", 1, 6, marks=pytest.mark.slow),
        ("window=2,weights=sharded", 2, 1),
        pytest.param("window=2", 2, 3, marks=pytest.mark.slow),
        pytest.param("window=2,weights=sharded", 2, 3, marks=pytest.mark.slow),
        pytest.param("window=2,weights=sharded", 2, 6, marks=pytest.mark.slow),
        pytest.param("data=2,window=2,weights=sharded", 4, 3, marks=pytest.mark.slow),
    ],
)
def test_what_is_foreseen_on_fake_tensors_is_measured_within_one_percent(
    pools: Pools, layout: str, ranks: int, leads: int
) -> None:
    config = config_of(leads, layout)
    plans = [whole("recompute", leads), whole("recompute", leads, lead_wise=True)]
    plans += plans_of(leads, ranks + leads, 4, ("keep", "recompute"))
    peaks = pools[ranks].run(measured, config, ranks, plans)
    for rank in {0, ranks - 1}:
        profile = foresee(config, SHAPES, ranks=ranks, rank=rank, on="cpu")
        for plan, peak in zip(plans, peaks[rank], strict=True):
            assert profile.timeline(plan).peak_bytes == pytest.approx(peak, rel=0.01), (rank, plan)


@pytest.mark.slow
def test_units_without_sharded_weights_are_passed_over_when_weights_are_asked_for(
    pools: Pools,
) -> None:
    """Two tensor ranks share nothing of a block: each has its own half. What comes before the
    blocks is asked for by what comes after them, also in the middle of a segment."""
    config = config_of(2, "tensor=2,weights=sharded")
    lead = (Segment(0, 3, "keep"), Segment(3, 8, "recompute"), Segment(8, 9, "keep"))
    plan = Plan((lead, lead), lead_wise=True)
    (peak,), _ = pools[2].run(measured, config, 2, [plan])
    profile = foresee(config, SHAPES, ranks=2, rank=0, on="cpu")
    assert profile.timeline(plan).peak_bytes == pytest.approx(peak, rel=0.01)


def test_weights_that_stay_whole_are_refused() -> None:
    config = config_of(1, "window=2,weights=sharded,reshard=false")
    with pytest.raises(ValueError, match=r"mesh\.reshard=false is not planned.*mesh\.reshard=true"):
        foresee(config, SHAPES, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks", "settings"),
    [
        ("window=3", 3, ["model.boundary=paper", "model.padded_shape=48,48"]),
        pytest.param("window=4", 4, [], marks=pytest.mark.slow),
        pytest.param(
            "window=4,stripe_dim=lon",
            4,
            ["model.boundary=paper", "model.padded_shape=48,48"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "window=2,sequence=2", 4, ["model.padded_shape=64,32"], marks=pytest.mark.slow
        ),
    ],
)
def test_the_heaviest_rank_holds_most(layout: str, ranks: int, settings: list[str]) -> None:
    config = override(config_of(1, layout), settings)

    def peak(rank: int | None) -> int:
        profile = foresee(config, SHAPES, ranks=ranks, rank=rank, on="cuda")
        timeline = profile.timeline(whole("recompute", 1))
        (update,) = (row for what, _, row in timeline.marks if what == "end")
        held = timeline.levels.sum(1)[:update]
        return int(held.max() - held[0])

    # The numbers of windows, of no size elsewhere, are not beside so small a model's activations.
    assert peak(None) >= 0.98 * max(peak(rank) for rank in range(ranks))


def test_lead_wise_the_peak_grows_by_one_field_a_lead() -> None:
    peaks = []
    traced = profile_step(job_of(config_of(4)), 4)
    for leads in (4, 5, 8):
        profile = replace(traced, leads=leads)  # of three leads, however many there are
        peaks.append(profile.timeline(whole("recompute", leads, lead_wise=True)).peak_bytes)
    field = 4 * 36 * 32 * 4  # what the network says in one lead, float32
    given = 2 * 36 * 32  # int16 forcing, which a CPU's step keeps where it was read
    grows = [second - first for first, second in pairwise(peaks)]
    assert grows[1] == 3 * grows[0]
    assert field <= grows[0] <= field + 5 * given


@pytest.mark.parametrize("every", [1, 2])
def test_where_no_gradient_is_handed_on_a_plan_is_of_a_group_of_leads(every: int) -> None:
    config = config_of(3 * every)
    detached = replace(config, train=replace(config.train, detach_every=every))
    assert leads_together(detached) == every
    profile = profile_step(job_of(detached), every)
    job = job_of(config)
    job.objective = replace(job.objective, detach_every=every)
    for plan in [whole("keep", every), *plans_of(every, 3, 3, ("keep", "recompute"))]:
        if every == 1 and plan.lead_wise:
            continue
        _, trace = trace_memory(job.step(3 * every, Memory(plan)), job.owned)
        assert profile.timeline(plan).peak_bytes == pytest.approx(trace.peak_bytes, rel=0.005), plan
