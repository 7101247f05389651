"""`graticule bench memory-paper`: TERRA's published memory figures, from a trace of our own step.

TERRA (arXiv 2608.15211), section VII.E: the small model over ten leads on 8 GPUs, in precision
`paper`. Four configurations, of patch p and DMP, the ranks that share a sample. One rank's step is
traced on tensors without values and composed under each plan; nothing is fitted. Units are GiB,
which the paper prints as GB. Rows, published against ours:

- fig13: peak of one t_seg for all leads, D0 and U0, no buffering, no offload
- plan: peak of Eq. 5's plan, which must not be higher
- buffer: fields that input buffering saves at that plan's peak
- fig14: peak of a plan that has no more than the paper reached with each budget, input buffering
  on: of Algorithm 2; of ours, mode best, where no plan of Algorithm 2 does when its boundaries are
  fetched ahead. Asked for the budget itself it fills more of it: the note has that peak
- table6: bytes that go to the host under the published choices (units, t_seg, and how many
  boundaries, first in, first out), from the traced sizes of what enters the units

Assumed, since the paper does not say: all runs have 2304 x 4352 points, what its configurations of
two ranks and more are padded to. Weights, gradients and AdamW's state are sharded over the 8 ranks,
gathered in float32 as one unit, as the released configurations of this model have it. Attention
is plain, with mask and relative position bias (no fused kernel takes them there). Fields come
normalised, in float16. Peaks are of rank 0, whose figures the released program writes down. The
paper's figures are of PyTorch's CUDA allocator, which rounds sizes up,
and include scratch of kernels; ours are of live tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal

from graticule.assemble import Shapes
from graticule.bench.rows import Row, Setting
from graticule.cluster.devices import device
from graticule.config import Config, MeshConfig, SwinConfig, TrainConfig
from graticule.memory.choose import Mode, choose
from graticule.memory.costs import ProfileCosts
from graticule.memory.plan import Plan
from graticule.memory.profile import Profile
from graticule.memory.published import (
    Template,
    checkpoint_plan,
    lead_of,
    offloading,
)
from graticule.train.foresee import foresee
from graticule.train.rehearsal import DataPath

TITLE = (
    "memory of TERRA's small model over ten leads, traced and planned here, against the published"
    " Fig. 13, Fig. 14 and Table VI"
)
GIB = 2**30
RANKS, LEADS = 8, 10
MODEL = SwinConfig(patch=4, width=1024, depth=10, heads=8, window=8, boundary="paper")
GRID, CHANNELS = (2304, 4352), 93


@dataclass(frozen=True)
class Budget:
    """A column of Fig. 14 and a row of Table VI. gib: what was allowed. peak: what was reached.

    template: the units; boundaries: how many went to the host. sampling, transformer: GiB of them.
    """

    gib: float
    peak: float
    template: Template
    boundaries: int
    sampling: float
    transformer: float


@dataclass(frozen=True)
class Published:
    """One configuration. stripes: DMP. uniform: peak by t_seg. planned: peak of Eq. 5's plan."""

    patch: int
    stripes: int
    uniform: dict[int, float]
    planned: float
    budgets: tuple[Budget, Budget]
    note: str = ""

    def __str__(self) -> str:
        return f"p{self.patch}-dmp{self.stripes}"


PUBLISHED = (
    Published(
        2, 4, {1: 105.2, 3: 69.3, 5: 69.9}, 60.3,
        (Budget(40, 39.1, (0, 4, 0), 47, 9.7, 16.7), Budget(30, 29.1, (1, 2, 1), 116, 72.5, 29.9)),
    ),
    Published(
        2, 8, {1: 52.9, 3: 35.0, 5: 35.5}, 30.5,
        (Budget(20, 18.8, (0, 3, 0), 50, 4.3, 9.9), Budget(16, 14.8, (1, 2, 1), 116, 36.2, 14.9)),
    ),
    Published(
        4, 1, {5: 124.0}, 114.0,
        (Budget(80, 74.9, (0, 5, 0), 37, 22.8, 10.8), Budget(65, 61.1, (0, 2, 0), 65, 22.8, 27.5)),
        "t_seg 1 and 3 ran out of memory",
    ),
    Published(
        4, 2, {1: 79.9, 3: 62.0, 5: 62.6}, 57.3,
        (Budget(40, 38.9, (0, 5, 0), 36, 10.5, 5.4), Budget(30, 30.5, (1, 2, 1), 116, 42.8, 14.9)),
    ),
)  # fmt: skip


def rows(setting: Setting) -> list[Row]:
    result: list[Row] = []
    for case in PUBLISHED:
        setting.say(f"tracing {case}: all fields on the device")
        resident = profile_of(case, "resident")
        setting.say(f"tracing {case}: input buffering")
        buffered = profile_of(case, "buffered")
        result += rows_of(case, resident, buffered)
    return result


def profile_of(case: Published, data: DataPath) -> Profile:
    """Of rank 0."""
    data_ranks = RANKS // case.stripes
    config = Config(
        model=replace(MODEL, patch=case.patch),
        mesh=MeshConfig(
            data=data_ranks, window=case.stripes, weights="sharded", shard_unit="model",
            gather="fp32",
        ),
        train=TrainConfig(batch=data_ranks, leads=LEADS, precision="paper", area_weighted=False),
    )  # fmt: skip
    shapes = Shapes(
        grid=GRID, num_prognostic=CHANNELS, num_predicted=CHANNELS, num_forcing=0, num_static=0,
        num_inputs=1, num_outputs=1, num_forcings=1,
    )  # fmt: skip
    return foresee(config, shapes, ranks=RANKS, rank=0, on="cuda", data=data)


def rows_of(case: Published, resident: Profile, buffered: Profile) -> Iterator[Row]:
    for size, peak in case.uniform.items():
        plan = Plan((lead_of(resident.units, (0, size, 0)),) * LEADS)
        yield Row(
            what=f"fig13-{case}-tseg{size}", ours=peak_gib(resident, plan), against=peak,
            goal=1.0, within=0.02, unit="GiB", note=told(resident, plan, case.note),
        )  # fmt: skip
    plan = checkpoint_plan(ProfileCosts(resident))
    yield Row(
        what=f"plan-{case}", ours=peak_gib(resident, plan), against=case.planned, goal=1.01,
        at_most=True, unit="GiB", note=told(resident, plan, plan.in_words(resident.units)),
    )  # fmt: skip
    saved = resident.timeline(plan).peak_bytes - buffered.timeline(plan).peak_bytes
    yield Row(
        what=f"buffer-{case}", ours=saved / field_bytes(case), against=LEADS - 1, goal=1.0,
        within=0.0, unit="fields", note=f"a field has {field_bytes(case) / GIB:.3f} GiB on a rank",
    )  # fmt: skip
    for budget in case.budgets:
        name = f"{case}-{budget.gib:g}"
        filling = planned(buffered, int(budget.gib * GIB))
        filled = peak_gib(buffered, filling[1])
        try:
            mode, plan = planned(buffered, int(min(budget.gib, budget.peak) * GIB))
        except ValueError:  # nothing comes to so little
            mode, plan = filling
        yield Row(
            what=f"fig14-{name}", ours=peak_gib(buffered, plan), against=budget.peak,
            goal=min(1.05, budget.gib / budget.peak), at_most=True, unit="GiB",
            note=told(
                buffered, plan, f"mode {mode}", f"for {budget.gib:g} GiB: {filled:.2f}",
                plan.in_words(buffered.units),
            ),
        )  # fmt: skip
        plan = offloading(ProfileCosts(buffered), budget.template, budget.boundaries)
        found = zip(
            ("sampling", "transformer"), volumes(buffered, plan),
            (budget.sampling, budget.transformer), strict=True,
        )  # fmt: skip
        for part, volume, published in found:
            yield Row(
                what=f"table6-{name}-{part}", ours=printed(volume), against=published, goal=1.0,
                within=0.0, unit="GiB", note=f"{volume / GIB:.3f}",
            )  # fmt: skip


def planned(profile: Profile, budget: int) -> tuple[Mode, Plan]:
    """Algorithm 2's plan or, where none of its plans meets the budget when it runs, ours."""
    mode: Mode
    for mode in ("paper", "best"):
        try:
            return mode, choose(profile, device("h200"), budget, mode=mode).plan
        except ValueError as error:
            refused = error
    raise refused


def peak_gib(profile: Profile, plan: Plan) -> float:
    return profile.timeline(plan).peak_bytes / GIB


def field_bytes(case: Published) -> int:
    """A rank's part of a float16 field."""
    return 2 * CHANNELS * GRID[0] * GRID[1] // case.stripes


def volumes(profile: Profile, plan: Plan) -> tuple[int, int]:
    """Bytes that go to the host: what enters sampling units, and what enters the Transformer's. A
    tensor that enters two units of a lead goes once."""
    moved = [0, 0]
    for number, lead in enumerate(plan.leads, 1):
        traced = profile.keep.lead(number, len(plan.leads))
        gone: set[int] = set()
        for segment in lead:
            if segment.action == "offload":
                state = profile.keep.states[traced, segment.first]
                blocks = profile.units[segment.first].startswith("blocks.")
                moved[blocks] += sum(size for key, size in state.items() if key not in gone)
                gone.update(state)
    return moved[0], moved[1]


def printed(volume: int) -> float:
    """GiB with the one digit of Table VI. Of two digits first: its 22.8 is 22.748, twice."""
    value = Decimal(volume) / GIB
    for digits in ("0.01", "0.1"):
        value = value.quantize(Decimal(digits), ROUND_HALF_UP)
    return float(value)


def told(profile: Profile, plan: Plan, *more: str) -> str:
    """Where the peak is and what fills it."""
    timeline = profile.timeline(plan)
    what, lead = timeline.at_peak
    held = timeline.owners_at_peak.items()
    sizes = ", ".join(f"{owner} {size / GIB:.2f}" for owner, size in held if size >= GIB / 200)
    return "; ".join([f"in the {what} pass of lead {lead}: {sizes}", *filter(None, more)])
