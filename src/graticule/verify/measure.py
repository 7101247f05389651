"""What one layout computes of a recipe's model on made-up fields, put together for comparison."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graticule.assemble import Running, Shapes, assemble
from graticule.config import Config
from graticule.forecast.rollout import rollout
from graticule.keyed import keyed
from graticule.mesh import Mesh
from graticule.model.bayes import keep_start
from graticule.parallel.box import box_of
from graticule.parallel.data import local
from graticule.parallel.launch import mesh_of, ranks_of
from graticule.train.loss import LossWeights
from graticule.train.members import Ensemble, ensemble_of
from graticule.train.objective import Objective, as_stored
from graticule.train.step import training_step

STEPS, BATCH = 3, 2
QUANTITIES = (
    "output", "input_gradient", "weight_gradients", "gradient_norm", "parameters", "buffers",
)  # fmt: skip
_LEARNING_RATE = 0.05


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """What one rank computed: of the first micro-batch its members, its samples, its stripe, its
    predicted and its prognostic channels (`channels`, `known`). input_gradient: of its own members.
    """

    samples: slice
    rows: slice
    columns: slice
    members: slice
    channels: np.ndarray
    known: np.ndarray
    output: np.ndarray
    input_gradient: np.ndarray
    weight_gradients: "_Held"
    parameters: "_Held"
    buffers: "_Held"
    gradient_norm: float
    losses: tuple[float, ...]
    sent: Counter[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Held:
    """What a rank holds of named tensors. parts: where in the whole, and the numbers; of what all
    ranks hold alike only rank 0's. digest: of the bits of those, the same on all ranks."""

    shapes: dict[str, tuple[int, ...]]
    parts: dict[str, tuple[tuple[slice, ...], np.ndarray]]
    digest: str

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], rank: int) -> "_Held":
        shapes, parts, alike = {}, {}, hashlib.sha256()
        for name, tensor in tensors.items():
            ours = local(tensor).detach().numpy()
            shapes[name] = tuple(tensor.shape)
            if not hasattr(tensor, "device_mesh"):
                alike.update(ours.tobytes())
            if rank == 0 or hasattr(tensor, "device_mesh"):
                box = box_of(tensor)
                assert box is not None, name
                parts[name] = box.slices, ours.copy()
        return cls(shapes=shapes, parts=parts, digest=alike.hexdigest())

    @staticmethod
    def joined(held: Sequence["_Held"]) -> dict[str, np.ndarray]:
        """The whole tensors. Where ranks that should hold the same do not, they are NaN."""
        same = len({one.digest for one in held}) == 1
        # NaN where no rank says anything, too.
        whole = {name: np.full(shape, np.nan) for name, shape in held[0].shapes.items()}
        for one in held if same else ():
            for name, (place, numbers) in one.parts.items():
                whole[name][place] = numbers
        return whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Results:
    """What a layout computed, put together."""

    output: np.ndarray
    input_gradient: np.ndarray
    weight_gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    gradient_norm: float
    sent: Counter[str]

    @classmethod
    def joined(cls, parts: Sequence[Part], shapes: Shapes) -> "Results":
        first = parts[0]
        # NaN where no rank says anything: no difference from it is small.
        samples, members = (
            max(getattr(p, of).stop for p in parts) for of in ("samples", "members")
        )
        of_output = first.output.shape[2], shapes.num_predicted, *shapes.grid
        output = np.full((members, samples, *of_output), np.nan)
        of_input = first.input_gradient.shape[1], shapes.num_prognostic, *shapes.grid
        gradient = np.full((samples, *of_input), np.nan)
        for part in parts:
            place = part.members, part.samples, slice(None), part.channels, part.rows, part.columns
            output[place] = part.output
            here = part.samples, slice(None), part.known, part.rows, part.columns
            # Members are given the same input.
            before = gradient[here]
            gradient[here] = np.where(np.isnan(before), 0.0, before) + part.input_gradient
        fields = {"output": output, "input_gradient": gradient}
        for part in parts:
            assert part.gradient_norm == first.gradient_norm, "ranks disagree on the norm"
        return cls(
            **fields,
            weight_gradients=_Held.joined([part.weight_gradients for part in parts]),
            parameters=_Held.joined([part.parameters for part in parts]),
            buffers=_Held.joined([part.buffers for part in parts]),
            gradient_norm=first.gradient_norm,
            sent=sum((part.sent for part in parts), Counter()),
        )

    def differences(self, serial: "Results") -> dict[str, float]:
        """By quantity, the largest of all fields or parameters."""
        floor = 1e-3 * max(np.abs(g).max() for g in serial.weight_gradients.values())
        assert self.weight_gradients.keys() == serial.weight_gradients.keys()

        def worst(name: str) -> float:
            ours, theirs = getattr(self, name), getattr(serial, name)
            assert ours.keys() == theirs.keys()
            return max((difference(ours[key], theirs[key], floor) for key in theirs), default=0.0)

        return {
            "output": difference(self.output, serial.output),
            "input_gradient": difference(self.input_gradient, serial.input_gradient),
            "weight_gradients": worst("weight_gradients"),
            "gradient_norm": abs(self.gradient_norm / serial.gradient_norm - 1),
            "parameters": worst("parameters"),
            "buffers": worst("buffers"),
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
class Fields:
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
    config: Config,
    shapes: Shapes,
    dtype: torch.dtype = torch.float64,
    steps: int = STEPS,
    batch: int = BATCH,
) -> Part:
    """On each rank: its part of everything that is compared.

    batch: samples of all ranks together; none may be without one, as in training.
    """
    mesh = Mesh(mesh_of(config.mesh, ranks_of(config)))
    running = assemble(config, shapes, mesh, dtype=dtype)
    stripes, planes = running.stripes, running.planes
    samples = slice(mesh.index("data"), batch, mesh.sizes["data"])
    assert samples.start < batch, f"a batch of {batch} leaves some of mesh.data without a sample"
    objective = _objective(config, shapes, running, dtype)
    ensemble = ensemble_of(config, mesh, running.model, objective, samples=1)
    if config.bayes.weights and config.bayes.prior == "start":
        keep_start(running.model)

    def made_up(number: int = 0) -> Fields:
        return _made_up(config, shapes, samples, running, dtype, number)

    def step(rate: float, first: Fields) -> Any:
        optimizer = torch.optim.SGD(
            [{"params": group} for group in _by_mesh(running.model)], lr=rate
        )
        more = [made_up(number) for number in range(1, config.train.accumulation)]
        return training_step(
            running.model, objective, [first, *more], optimizer=optimizer, step=1,
            samples=batch * config.train.accumulation, learning_rate=rate,
            clip_norm=0.0 if rate == 0.0 else 1.0, shared=running.shared, ensemble=ensemble,
        )  # fmt: skip

    output = _predictions(running, objective, ensemble, made_up())
    asked = made_up()
    asked.inputs.requires_grad_()
    before = running.sent
    first = step(0.0, asked)
    sent = running.sent - before
    if ensemble:
        sent += ensemble.link.sent
    assert asked.inputs.grad is not None
    parameters = dict(running.model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    weight_gradients = _Held.of(gradients, mesh.rank)
    losses = [step(_LEARNING_RATE, made_up()).loss for _ in range(steps)]
    return Part(
        samples=samples,
        members=slice(ensemble.own.start, ensemble.own.stop) if ensemble else slice(0, 1),
        rows=stripes.rows,
        columns=stripes.columns,
        channels=planes.predicted(planes.index),
        known=planes.known(planes.index),
        output=output.numpy(),
        input_gradient=asked.inputs.grad.numpy(),
        weight_gradients=weight_gradients,
        parameters=_Held.of(dict(running.model.named_parameters()), mesh.rank),
        buffers=_Held.of(_state_beside_weights(running.model), mesh.rank),
        gradient_norm=first.gradient_norm,
        losses=tuple(losses),
        sent=sent,
    )


def _predictions(
    running: Running, objective: Objective, ensemble: Ensemble | None, batch: Fields
) -> Tensor:
    """(member, sample, lead and output offset, channel, rows, columns)."""
    if ensemble:
        data, all_members = list(batch.leads), []
        for member in ensemble.members(0, batch.keys, [], running.model, objective):
            fields = member.forecast(replace(batch, leads=list(data)))
            all_members.append(torch.cat([field for field, _ in fields], dim=1))
        return torch.stack(all_members)
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
        return torch.cat(list(leads), dim=1)[None]


def _objective(config: Config, shapes: Shapes, running: Running, dtype: torch.dtype) -> Objective:
    """With a third of the cells dry, other ones in each channel, and areas that vary."""
    draw = keyed(config.train.seed, "verify", 0)
    wet = draw.random((shapes.num_predicted, *shapes.grid)) > 1 / 3
    area = np.linspace(0.5, 2.0, shapes.grid[0])[:, None] * np.ones(shapes.grid[1])
    statics = draw.standard_normal((shapes.num_static, *shapes.grid))
    whole = LossWeights.of(wet, area if config.train.area_weighted else None)
    planes, here = running.planes, (..., running.stripes.rows, running.stripes.columns)
    predicted, fixed = planes.predicted(planes.index), planes.static.of(planes.index)
    return Objective(
        inputs=as_stored,
        forcing=as_stored,
        labels=as_stored,
        statics=torch.from_numpy(statics[fixed][here]).to(dtype),
        weights=LossWeights(whole.cell[predicted][here], whole.wet[predicted][here], whole.total),
        kind=config.train.loss,
        leads=config.train.leads,
        num_prognostic=running.shapes.num_prognostic,
        num_outputs=shapes.num_outputs,
        detach_every=config.train.detach_every,
        planes=planes,
    )


def _made_up(
    config: Config,
    shapes: Shapes,
    samples: slice,
    running: Running,
    dtype: torch.dtype,
    number: int,
) -> Fields:
    """The rank's samples, stripe and channels of fields that are the same on every layout.

    number: of the micro-batch.
    """
    draw, planes = keyed(config.train.seed, "verify", 1, number), running.planes
    rows, columns = running.stripes.rows, running.stripes.columns

    def fields(offsets: int, channels: int, ours: Any) -> Tensor:
        whole = draw.standard_normal((samples.stop, offsets, channels, *shapes.grid))
        here = whole[samples][:, :, ours][..., rows, columns]
        return torch.from_numpy(np.ascontiguousarray(here)).to(dtype)

    inputs = fields(shapes.num_inputs, shapes.num_prognostic, planes.known(planes.index))
    forcing, predicted = planes.forcing.of(planes.index), planes.predicted(planes.index)
    leads = [
        (
            fields(shapes.num_forcings, shapes.num_forcing, forcing),
            fields(shapes.num_outputs, shapes.num_predicted, predicted),
        )
        for _ in range(config.train.leads)
    ]
    return Fields(list(range(samples.stop))[samples], inputs, leads)


def _state_beside_weights(model: nn.Module) -> dict[str, Tensor]:
    """What training changes besides parameters: the buffers that a checkpoint holds."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: x for name, x in model.state_dict().items() if name not in parameters}


def _by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """torch's optimizers take parameters of one device mesh at a time."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())
