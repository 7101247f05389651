"""`graticule bench step`: one training step against the machine's own matrix product."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graticule.assemble import PRECISIONS, Running, Shapes, assemble, describe
from graticule.bench.rows import Row, Setting
from graticule.config import Config, SwinConfig, TrainConfig
from graticule.mesh import Mesh
from graticule.model.layers import dense
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.optimizer import make_optimizer
from graticule.train.step import training_step

TITLE = (
    "model FLOP/s of a training step (128 x 256, 23 channels, patch 2, width 256, 4 blocks,"
    " window 8) against a 4096^3 matrix product of the same dtype and threads"
)
GOALS = {"fp32": 0.75, "bf16": 0.40}
SIDE = 4096
REPEATS = 7
LONG_SECONDS = 20.0
"""A matrix product slower than this is timed twice only."""
GRID, CHANNELS = (128, 256), 23


def rows(setting: Setting) -> list[Row]:
    """One row per precision. FLOPs are the model's (2 per multiply-add, forward and gradients),
    whatever the kernels do; medians of runs in turn, so that both meet the same machine."""
    return [_row(precision, setting.say) for precision in GOALS]


def _row(precision: str, say: Callable[[str], None]) -> Row:
    step, flops = _training_step(precision)
    product = _product(PRECISIONS[precision].compute)
    say(f"{precision}: warming up")
    step()
    first = _seconds(product)
    repeats = REPEATS if first < LONG_SECONDS else 2
    ours, against = [], []
    for repeat in range(repeats):
        ours.append(_seconds(step))
        against.append(_seconds(product))
        say(f"{precision}: {repeat + 1} of {repeats}")
    return Row(
        what=precision,
        ours=flops / statistics.median(ours) / 1e9,
        against=2 * SIDE**3 / statistics.median(against) / 1e9,
        goal=GOALS[precision],
        unit="GFLOP/s",
        note=_note(precision, repeats),
    )


def _note(precision: str, repeats: int) -> str:
    note = f"medians of {repeats}"
    widened = dense(lambda x: torch.tensor(x.dtype is torch.float32, dtype=x.dtype),
                    torch.zeros(1, dtype=PRECISIONS[precision].compute)).item()  # fmt: skip
    if widened and precision != "fp32":
        note += (
            "; this CPU has no 16-bit matrix kernels: the model widens its rounded operands to"
            " float32, the plain product runs PyTorch's own loops, so the ratio says little of"
            " CPUs that have them"
        )
    return note


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _product(dtype: torch.dtype) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, generator=generator).to(dtype) for _ in range(2))
    # b transposed: the layout of a linear layer, the faster one for 16-bit types.
    return lambda: torch.nn.functional.linear(a, b)


@dataclass
class _Noise:
    """One sample of noise as input and label, as one rank holds it."""

    inputs: Tensor
    label: Tensor
    keys: list[int]
    init_times = ("noise",)

    def lead(self) -> tuple[Tensor, Tensor]:
        return self.label[:, :, :0], self.label


def workload(precision: str) -> tuple[Config, Shapes]:
    """The model that is benched, and its fields."""
    config = Config(
        model=SwinConfig(patch=2, width=256, depth=4, heads=8, window=8),
        train=TrainConfig(batch=1, precision=precision),  # type: ignore[arg-type]
    )
    shapes = Shapes(
        grid=GRID, num_prognostic=CHANNELS, num_predicted=CHANNELS, num_forcing=0, num_static=0,
        num_inputs=1, num_outputs=1, num_forcings=1,
    )  # fmt: skip
    return config, shapes


def step_of(config: Config, running: Running) -> Callable[[], Any]:
    """One whole optimizer step on one sample, which all ranks of `running` share."""
    here = (..., running.stripes.rows, running.stripes.columns)
    optimizer = make_optimizer(running.model, config.train)
    generator = torch.Generator().manual_seed(1)
    fields = [torch.randn(1, 1, CHANNELS, *GRID, generator=generator)[here] for _ in range(2)]
    batch = _Noise(fields[0].contiguous(), fields[1].contiguous(), [0])
    whole = LossWeights.of(torch.ones(CHANNELS, *GRID, dtype=torch.bool).numpy())
    objective = Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.zeros(0, *GRID)[here],
        weights=LossWeights(whole.cell[here], whole.wet[here], whole.total), kind="mae", leads=1,
        num_prognostic=CHANNELS,
    )  # fmt: skip
    numbers = itertools.count(1)

    def step() -> Any:
        return training_step(
            running.model, objective, [batch], optimizer=optimizer, step=next(numbers), samples=1,
            learning_rate=1e-4, clip_norm=1.0, shared=running.shared,
        )  # fmt: skip

    return step


def _training_step(precision: str) -> tuple[Callable[[], Any], float]:
    """(one whole optimizer step, its model FLOPs)."""
    config, shapes = workload(precision)
    running = assemble(config, shapes, Mesh())
    return step_of(config, running), describe(config, shapes)["step_flops"]
