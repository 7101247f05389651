"""`graticule verify`: whether a recipe's model gives the same numbers on every layout.

Each layout runs in float64 on processes of this machine, which share made-up fields as they would
share real ones, and is compared with one process: predictions, the gradient of the inputs, the
gradients of the weights, their norm, and the weights after three steps of SGD. The difference of
a from b is max|a - b| / max(max|b|, floor); the floor is a thousandth of the largest gradient,
since some true gradients are zero (that of a key's bias), and only for gradients.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graticule.assemble import Running, Shapes, assemble, shapes_of_config
from graticule.config import Config, override
from graticule.forecast.rollout import rollout
from graticule.keyed import keyed
from graticule.mesh import AXES, Mesh, Stripes
from graticule.parallel.launch import laid_out, mesh_of, ranks_of
from graticule.parallel.local import LocalRanks, RankError
from graticule.train.loss import LossWeights
from graticule.train.step import Objective, training_step

LAYOUTS = (
    "data=2", "window=2", "window=3", "window=4", "window=2,stripe_dim=lon", "sequence=2",
    "tensor=2", "window=2,sequence=2", "window=2,tensor=2", "sequence=2,tensor=2",
    "window=4,fixed_windows=2x2", "window=2,weights=sharded", "window=2,tensor=2,weights=sharded",
    "data=2,window=2,weights=sharded,shard_unit=model",
)  # fmt: skip
"""What is verified when nothing else is asked for: four processes at most."""
TOLERANCE = 1e-12
STEPS, BATCH = 3, 2
QUANTITIES = ("output", "input_gradient", "weight_gradients", "gradient_norm", "parameters")
_LEARNING_RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One layout against one process. differences: by quantity. bytes_sent: by all ranks in one
    step (forward and backward), by what they were for. refused: why the model cannot be laid out
    so; it is then not compared."""

    layout: str
    ranks: int
    differences: dict[str, float]
    bytes_sent: dict[str, int]
    refused: str = ""

    @property
    def passed(self) -> bool:
        return not self.refused and all(
            difference <= TOLERANCE for difference in self.differences.values()
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
    named = {layout: laid_out(config, layout) for layout in layouts or LAYOUTS}
    with LocalRanks(1) as one:
        serial = Results.joined(one.run(measure, config, shapes), shapes)
    verdicts = []
    pools: dict[int, LocalRanks] = {}
    try:
        for number, (layout, there) in enumerate(named.items(), start=1):
            ranks = ranks_of(there)
            pool = pools.setdefault(ranks, LocalRanks(ranks, timeout_seconds=180))
            try:
                results = Results.joined(pool.run(measure, there, shapes), shapes)
                verdicts.append(
                    Verdict(
                        layout=layout,
                        ranks=ranks,
                        differences=results.differences(serial),
                        bytes_sent=dict(results.sent),
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
    return size_of(config, shapes), verdicts


def reduced(config: Config, shapes: Shapes) -> tuple[Config, Shapes]:
    """A model of the same kind that two cores compute in a second.

    At most 8 heads of 8 features, 4 blocks, windows of 8 x 8 tokens, 4 channels of each role, 2
    leads, and 3 x 4 windows less a row and a half of patches: what the grid does not fill is
    padded, as in the recipe. Patch, stride, boundary and sides of the loss stay.
    """
    model = config.model
    heads = min(model.heads, 8)
    width = min(model.width, 8 * heads)
    window = (min(model.window_shape[0], 8), min(model.window_shape[1], 8))
    unit = model.patch * model.sampling
    rows = min(shapes.grid[0], 3 * unit * window[0] - unit - model.patch // 2)
    columns = 4 * unit * window[1]
    if model.boundary == "paper":
        columns -= unit + model.patch // 2
    columns = min(shapes.grid[1], columns)
    groups = max(g for g in range(1, model.norm_groups + 1) if width % g == 0)
    small = replace(
        model, heads=heads, width=width, depth=min(model.depth, 4), window=window,
        norm_groups=groups, padded_shape=None,
    )  # fmt: skip
    train = replace(config.train, leads=min(config.train.leads, 2), batch=BATCH, accumulation=1)
    fewer = {
        name: min(getattr(shapes, name), 4)
        for name in ("num_prognostic", "num_predicted", "num_forcing", "num_static")
    }
    fewer["num_predicted"] = fewer["num_prognostic"] + min(
        shapes.num_predicted - shapes.num_prognostic, 2
    )
    return (
        replace(config, model=small, train=train),
        replace(shapes, grid=(rows, columns), **fewer),
    )


def size_of(config: Config, shapes: Shapes) -> str:
    """What ran, in a line."""
    model, train = config.model, config.train
    return (
        f"{shapes.grid[0]} x {shapes.grid[1]} points ({model.boundary}), {shapes.in_channels}"
        f" channels in, {shapes.out_channels} out, patch {model.patch}, stride {model.sampling},"
        f" width {model.width}, {model.depth} blocks, {model.heads} heads, windows"
        f" {model.window_shape[0]} x {model.window_shape[1]}, {train.leads} leads, batch {BATCH}"
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """What one rank computed: of the first micro-batch its samples, its stripe."""

    samples: slice
    rows: slice
    columns: slice
    output: np.ndarray
    input_gradient: np.ndarray
    weight_gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    gradient_norm: float
    losses: tuple[float, ...]
    sent: Counter[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class Results:
    """What a layout computed, put together."""

    output: np.ndarray
    input_gradient: np.ndarray
    weight_gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    gradient_norm: float
    sent: Counter[str]

    @classmethod
    def joined(cls, parts: Sequence[Part], shapes: Shapes) -> "Results":
        first = parts[0]
        fields: dict[str, np.ndarray] = {}
        for name in ("output", "input_gradient"):
            tail = getattr(first, name).shape[1:-2]
            # NaN where no rank says anything: no difference from it is small.
            whole = np.full((BATCH, *tail, *shapes.grid), np.nan)
            for part in parts:
                whole[part.samples][..., part.rows, part.columns] = getattr(part, name)
            fields[name] = whole
        for part in parts:
            assert part.gradient_norm == first.gradient_norm, "ranks disagree on the norm"
        return cls(
            **fields,
            weight_gradients=first.weight_gradients,
            parameters=first.parameters,
            gradient_norm=first.gradient_norm,
            sent=sum((part.sent for part in parts), Counter()),
        )

    def differences(self, serial: "Results") -> dict[str, float]:
        """By quantity, the largest of all fields or parameters."""
        floor = 1e-3 * max(np.abs(g).max() for g in serial.weight_gradients.values())
        assert self.weight_gradients.keys() == serial.weight_gradients.keys()

        def worst(name: str) -> float:
            ours, theirs = getattr(self, name), getattr(serial, name)
            return max(difference(ours[key], theirs[key], floor) for key in theirs)

        return {
            "output": difference(self.output, serial.output),
            "input_gradient": difference(self.input_gradient, serial.input_gradient),
            "weight_gradients": worst("weight_gradients"),
            "gradient_norm": abs(self.gradient_norm / serial.gradient_norm - 1),
            "parameters": worst("parameters"),
        }


def difference(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """max|a - b| / max(max|b|, floor); not a number is infinitely far from anything."""
    if a.shape != b.shape:
        return float("inf")
    if not b.size:
        return 0.0
    worst = float(np.abs(a - b).max() / max(np.abs(b).max(), floor, 1e-300))
    return worst if np.isfinite(worst) else float("inf")


@dataclass
class _Fields:
    """A batch in memory, as `training_step` takes it."""

    keys: list[int]
    inputs: Tensor
    leads: list[tuple[Tensor, Tensor]]

    @property
    def init_times(self) -> list[int]:
        return self.keys

    def lead(self) -> tuple[Tensor, Tensor]:
        return self.leads.pop(0)


def measure(
    config: Config, shapes: Shapes, dtype: torch.dtype = torch.float64, steps: int = STEPS
) -> Part:
    """On each rank: its part of everything that is compared."""
    mesh = Mesh(mesh_of(config.mesh, ranks_of(config)))
    running = assemble(config, shapes, mesh, dtype=dtype)
    stripes = running.stripes
    samples = slice(mesh.index("data"), BATCH, mesh.sizes["data"])
    objective = _objective(config, shapes, stripes, dtype)

    def batch(number: int = 0) -> _Fields:
        return _made_up(config, shapes, samples, stripes, dtype, number)

    def step(rate: float, first: _Fields) -> Any:
        optimizer = torch.optim.SGD(
            [{"params": group} for group in _by_mesh(running.model)], lr=rate
        )
        more = [batch(number) for number in range(1, config.train.accumulation)]
        return training_step(
            running.model, objective, [first, *more], optimizer=optimizer, step=1,
            samples=BATCH * config.train.accumulation, learning_rate=rate,
            clip_norm=0.0 if rate == 0.0 else 1.0, shared=running.shared,
        )  # fmt: skip

    output = _predictions(running, objective, batch())
    asked = batch()
    asked.inputs.requires_grad_()
    before = running.sent
    first = step(0.0, asked)
    sent = running.sent - before
    assert asked.inputs.grad is not None
    gradients = {
        name: _whole(parameter.grad) for name, parameter in running.model.named_parameters()
    }
    losses = [step(_LEARNING_RATE, batch()).loss for _ in range(steps)]
    return Part(
        samples=samples,
        rows=stripes.rows,
        columns=stripes.columns,
        output=output.numpy(),
        input_gradient=asked.inputs.grad.numpy(),
        weight_gradients=gradients,
        parameters={name: _whole(value) for name, value in running.model.state_dict().items()},
        gradient_norm=first.gradient_norm,
        losses=tuple(losses),
        sent=sent,
    )


def _predictions(running: Running, objective: Objective, batch: _Fields) -> Tensor:
    """(sample, lead and output offset and channel, rows, columns)."""
    with torch.no_grad():
        leads = rollout(
            running.model,
            batch.inputs,
            lambda lead: batch.lead()[0],
            objective.statics,
            objective.weights.wet,
            leads=objective.leads,
            num_prognostic=objective.num_prognostic,
        )
        return torch.cat([lead.flatten(1, 2) for lead in leads], dim=1)


def _objective(config: Config, shapes: Shapes, stripes: Stripes, dtype: torch.dtype) -> Objective:
    """With a third of the cells dry, other ones in each channel, and areas that vary."""
    draw = keyed(config.train.seed, "verify", 0)
    wet = draw.random((shapes.num_predicted, *shapes.grid)) > 1 / 3
    area = np.linspace(0.5, 2.0, shapes.grid[0])[:, None] * np.ones(shapes.grid[1])
    statics = draw.standard_normal((shapes.num_static, *shapes.grid))
    whole = LossWeights.of(wet, area if config.train.area_weighted else None)
    here = (..., stripes.rows, stripes.columns)
    return Objective(
        inputs=nn.Identity(),
        forcing=nn.Identity(),
        labels=nn.Identity(),
        statics=torch.from_numpy(statics[here]).to(dtype),
        weights=LossWeights(whole.cell[here], whole.wet[here], whole.total),
        kind=config.train.loss,
        leads=config.train.leads,
        num_prognostic=shapes.num_prognostic,
        num_outputs=shapes.num_outputs,
        detach=config.train.rollout_gradient == "detached",
    )


def _made_up(
    config: Config,
    shapes: Shapes,
    samples: slice,
    stripes: Stripes,
    dtype: torch.dtype,
    number: int,
) -> _Fields:
    """The rank's samples and stripe of fields that are the same on every layout.

    number: of the micro-batch.
    """
    draw = keyed(config.train.seed, "verify", 1, number)

    def fields(offsets: int, channels: int) -> Tensor:
        whole = draw.standard_normal((BATCH, offsets, channels, *shapes.grid))
        here = whole[samples][..., stripes.rows, stripes.columns]
        return torch.from_numpy(np.ascontiguousarray(here)).to(dtype)

    inputs = fields(shapes.num_inputs, shapes.num_prognostic)
    leads = [
        (
            fields(shapes.num_forcings, shapes.num_forcing),
            fields(shapes.num_outputs, shapes.num_predicted),
        )
        for _ in range(config.train.leads)
    ]
    return _Fields(list(range(BATCH))[samples], inputs, leads)


def _by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """torch's optimizers take parameters of one device mesh at a time."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def _whole(tensor: Tensor | None) -> np.ndarray:
    """All of a parameter, whatever part of it is here."""
    assert tensor is not None
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().numpy().copy()
