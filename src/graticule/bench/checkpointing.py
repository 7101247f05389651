"""What Samudra holds of a step between its two passes, kept whole, by `simple` and recomputed.

The published model of 84 million parameters on 32 x 128 points, one sample of noise over two
leads: bytes that the forward pass leaves for the backward pass, counted by storage, and the
CPU-seconds of a whole step.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from graticule.assemble import Shapes, assemble, shapes_of_config
from graticule.bench.rows import Row
from graticule.config import Config
from graticule.memory.apply import Memory
from graticule.memory.plan import Action, Plan, Segment
from graticule.memory.trace import trace_memory
from graticule.mesh import Mesh
from graticule.recipes import recipe
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.step import training_step

GRID, LEADS = (32, 128), 2
REPEATS = 3
PUBLISHED = {
    "simple": ("published: -20 %", "published: about 25 % of time for both; 0 % elsewhere"),
    "full": ("published: -60 %; 67 % elsewhere", "published: about 25 %; 10 % elsewhere"),
}
MODES: dict[str, Action] = {"none": "keep", "simple": "simple", "full": "recompute"}


def workload() -> Config:
    """The model that is measured."""
    base = recipe("samudra")
    return replace(
        base,
        data=replace(base.data, grid=GRID),
        train=replace(base.train, batch=1, leads=LEADS, leads_from=()),
    )


class _Noise:
    """A sample of noise; its leads arrive as a loader's do."""

    init_times = ("noise",)

    def __init__(self, shapes: Shapes) -> None:
        self.keys = [0]
        generator = torch.Generator().manual_seed(1)

        def drawn(times: int, channels: int) -> Tensor:
            return torch.randn(1, times, channels, *shapes.grid, generator=generator)

        self.inputs = drawn(shapes.num_inputs, shapes.num_prognostic)
        self._leads = [
            (drawn(shapes.num_forcings, shapes.num_forcing),
             drawn(shapes.num_outputs, shapes.num_predicted))
            for _ in range(LEADS)
        ]  # fmt: skip

    def lead(self) -> tuple[Tensor, Tensor]:
        return self._leads.pop(0)


def memory_rows(say: Callable[[str], None]) -> list[Row]:
    """Held bytes and CPU-seconds of `simple` and of all units recomputed, against none."""
    config = workload()
    shapes = shapes_of_config(config)
    model = assemble(config, shapes, Mesh()).model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wet = torch.ones(shapes.num_predicted, *shapes.grid, dtype=torch.bool)
    objective = Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.zeros(0, *shapes.grid), weights=LossWeights.of(wet.numpy()), kind="mse",
        leads=LEADS, num_prognostic=shapes.num_prognostic, num_outputs=shapes.num_outputs,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    running = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def step(mode: str) -> float:
        """The loss of the same step in each mode."""
        for name, buffer in model.named_buffers():
            buffer.copy_(running[name])
        return training_step(
            model, objective, [_Noise(shapes)], optimizer=optimizer, step=1, samples=1,
            learning_rate=0.0, memory=Memory(plan_of(model, MODES[mode])),
        ).loss  # fmt: skip

    held: dict[str, int] = {}
    peaks: dict[str, int] = {}
    losses: dict[str, float] = {}
    for mode in MODES:
        model.zero_grad(set_to_none=True)
        losses[mode], trace = trace_memory(
            lambda mode=mode: step(mode),  # type: ignore[misc]
            lambda: {"parameters": model.parameters(), "buffers": model.buffers()},
        )
        backward = next(event for name, event in trace.marks if name == ("backward", True))
        before = int(trace.alive[0].sum())
        held[mode] = int(trace.alive[backward].sum()) - before
        peaks[mode] = trace.peak_bytes - before
        say(f"checkpointing, {mode}: {held[mode] / 2**20:.1f} MiB held")
    assert len(set(losses.values())) == 1, f"the losses differ: {losses}"
    cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(REPEATS):
        for mode, seconds in cpu.items():
            model.zero_grad(set_to_none=True)
            began = time.process_time()
            step(mode)
            seconds.append(time.process_time() - began)
        say(f"checkpointing: {repeat + 1} of {REPEATS}")
    size = f"{parameters:,} parameters, {GRID[0]} x {GRID[1]}, {LEADS} leads"
    found = []
    for mode, (bytes_told, time_told) in PUBLISHED.items():
        found.append(Row(
            f"held: {mode} / none", held[mode] / 2**20, held["none"] / 2**20, None, "MiB",
            f"{bytes_told}; {held[mode] / held['none'] - 1:+.1%} here, of the step's peak"
            f" {peaks[mode] / peaks['none'] - 1:+.1%}; {size}",
        ))  # fmt: skip
        ours, none = (statistics.median(cpu[m]) for m in (mode, "none"))
        found.append(Row(
            f"CPU: {mode} / none", ours, none, None, "CPU-seconds",
            f"{time_told}; {ours / none - 1:+.1%} here, the same loss; medians of {REPEATS}",
        ))  # fmt: skip
    return found


def plan_of(model: nn.Module, action: Action) -> Plan:
    """Every unit by itself, in all leads."""
    number = len(model.units())  # type: ignore[operator]
    return Plan((tuple(Segment(unit, unit + 1, action) for unit in range(number)),) * LEADS)
