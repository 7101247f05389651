"""Composed timelines against traces of steps that ran: plans, leads, ranks, offloading."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from graticule.assemble import Shapes, assemble
from graticule.config import Config, SwinConfig, TrainConfig
from graticule.memory.apply import Memory
from graticule.memory.costs import ProfileCosts
from graticule.memory.offload import Host
from graticule.memory.plan import Action, LeadPlan, Plan, Segment, peak_of
from graticule.memory.profile import profile_step
from graticule.memory.trace import trace_memory
from graticule.mesh import Mesh
from graticule.parallel.launch import laid_out, mesh_of
from graticule.train.foresee import Rehearsal, foresee
from pools import Pools

SHAPES = Shapes(
    grid=(36, 32), num_prognostic=3, num_predicted=4, num_forcing=1, num_static=1, num_inputs=1,
    num_outputs=1, num_forcings=1,
)  # fmt: skip
NUM_UNITS = 9


def config_of(leads: int, layout: str = "") -> Config:
    config = Config(
        model=SwinConfig(patch=2, width=32, depth=2, heads=4, window=4, norm_groups=4),
        train=TrainConfig(batch=1, leads=leads),
    )
    return laid_out(config, layout) if layout else config


def random_lead(draw: random.Random, actions: Sequence[Action]) -> LeadPlan:
    cuts = sorted(draw.sample(range(1, NUM_UNITS), draw.randint(0, 6)))
    ends = [0, *cuts, NUM_UNITS]
    return tuple(Segment(first, last, draw.choice(actions)) for first, last in pairwise(ends))


def plans_of(leads: int, seed: int, num: int, actions: Sequence[Action]) -> list[Plan]:
    """Half of them lead-wise."""
    draw = random.Random(seed)
    return [
        Plan(tuple(random_lead(draw, actions) for _ in range(leads)), lead_wise=bool(number % 2))
        for number in range(num)
    ]


def whole(action: Action, leads: int, *, lead_wise: bool = False) -> Plan:
    """Every unit by itself."""
    lead = tuple(Segment(unit, unit + 1, action) for unit in range(NUM_UNITS))
    return Plan((lead,) * leads, lead_wise=lead_wise)


def job_of(config: Config, ranks: int = 1) -> Rehearsal:
    running = assemble(config, SHAPES, Mesh(mesh_of(config.mesh, ranks)))
    job = Rehearsal(config, SHAPES, running, "cpu", "stored", torch.int16)
    job.step(config.train.leads, Memory())()  # gradients and caches are there afterwards
    return job


@pytest.mark.parametrize("leads", [1, 2, 3, 5])
def test_a_composed_timeline_has_the_peak_of_the_step_it_stands_for(leads: int) -> None:
    job = job_of(config_of(leads))
    profile = profile_step(job, leads)
    assert profile.units == (
        "embed", "down.0", "down.1", "blocks.0", "blocks.1", "up", "up.0", "up.1", "recover",
    )  # fmt: skip
    for plan in plans_of(leads, leads, 10, ("keep", "recompute", "recompute", "offload")):
        with Host("cpu") as host:
            step = job.step(leads, Memory(plan, host))
            _, trace = trace_memory(step, job.owned, elsewhere=host.owned)
        composed = profile.timeline(plan)
        assert composed.peak_bytes == pytest.approx(trace.peak_bytes, rel=5e-4), plan
        assert composed.levels[-1].sum() == pytest.approx(trace.alive[-1].sum(), abs=64), plan


@pytest.mark.parametrize("leads", [1, 3])
def test_the_costs_of_segments_add_up_to_the_composed_peak(leads: int) -> None:
    profile = profile_step(job_of(config_of(leads)), leads)
    costs = ProfileCosts(profile)
    for plan in plans_of(leads, 7, 20, ("keep", "recompute")):
        composed, added = profile.timeline(plan).peak_bytes, peak_of(costs, plan).bytes
        # A state that two segments share may count twice; lead-wise, the fullest lead stands for
        # all.
        assert 0.97 * composed <= added <= 1.06 * composed, plan


def test_a_segments_flops_leave_out_what_comes_after_its_last_saved_tensor() -> None:
    profile = profile_step(job_of(config_of(1)), 1)
    flops, tails = dict(zip(profile.units, profile.flops, strict=True)), profile.tail_flops
    by_name = dict(zip(profile.units, tails, strict=True))
    # The strided convolution is all that embed ends with: 2 x 9 x 32 x 32 a token of 9 x 8.
    assert by_name["embed"] == 2 * 9 * 32 * 32 * 9 * 8
    assert by_name["up"] == flops["up"] == 2 * 4 * 32 * 32 * 9 * 8
    assert by_name["recover"] == flops["recover"]
    assert by_name["up.0"] == 0
    # Of a block, the second linear layer of its MLP: 2 x 4 x 32 x 32 a token slot of 12 x 8.
    assert by_name["blocks.0"] == 2 * 4 * 32 * 32 * 12 * 8


def measured(config: Config, ranks: int, plans: list[Plan]) -> list[int]:
    """On a rank: the peak of a step of each plan."""
    torch.manual_seed(0)
    job = job_of(config, ranks)
    return [
        trace_memory(job.step(config.train.leads, Memory(plan)), job.owned)[1].peak_bytes
        for plan in plans
    ]


@pytest.mark.parametrize(
    ("layout", "ranks", "leads"),
    [
        ("", 1, 1),
        ("window=4", 4, 1),
        pytest.param("", 1, 6, marks=pytest.mark.slow),
        pytest.param("window=2", 2, 3, marks=pytest.mark.slow),
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


def test_lead_wise_the_peak_grows_by_one_field_a_lead() -> None:
    peaks = []
    for leads in (4, 5, 8):
        profile = foresee(config_of(leads), SHAPES, on="cpu")
        peaks.append(profile.timeline(whole("recompute", leads, lead_wise=True)).peak_bytes)
    field = 4 * 36 * 32 * 4  # what the network says in one lead, float32
    given = 2 * 36 * 32  # int16 forcing, which a CPU's step keeps where it was read
    grows = [second - first for first, second in pairwise(peaks)]
    assert grows[1] == 3 * grows[0]
    assert field <= grows[0] <= field + 5 * given
