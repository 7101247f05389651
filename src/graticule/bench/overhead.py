"""`graticule bench overhead`: what a layout costs on top of one process's work.

The CPU-seconds of all ranks for one global step, over those of one process for the same step;
ranks run side by side on the cores there are, one thread each. Waiting costs no CPU: what is
counted is halo rows computed twice, packing, copies, sums and smaller matrix products.
"""

import statistics
import time
from collections.abc import Callable

from graticule.assemble import assemble
from graticule.bench.rows import Row, Setting
from graticule.bench.step import step_of, workload
from graticule.config import Config
from graticule.mesh import Mesh
from graticule.parallel.launch import laid_out, mesh_of
from graticule.parallel.local import LocalRanks

TITLE = (
    "CPU-seconds of four processes for one training step (the model of bench step, fp32, one"
    " thread each) against one process's"
)
LAYOUTS = {
    "Topo(4,1)": "window=4",
    "Topo(2,1,2)": "window=2,sequence=2",
    "Topo(2,1,1,2)": "window=2,tensor=2",
    "fsdp=4": "window=4,weights=sharded",
}
GOALS = {"Topo(4,1)": 1.10}
REPEATS, STEPS = 7, 2

_steps: dict[str, Callable[[], object]] = {}
"""In a rank: the step of each layout, made once."""


def rows(setting: Setting) -> list[Row]:
    """A row a layout, medians of rounds in each of which every layout and one process have their
    turn, so that all meet the same machine."""
    config, _ = workload("fp32")
    configs = {what: laid_out(config, layout) for what, layout in LAYOUTS.items()}
    alone: list[float] = []
    together: dict[str, list[float]] = {what: [] for what in LAYOUTS}
    with LocalRanks(1, timeout_seconds=600) as one, LocalRanks(4, timeout_seconds=600) as four:
        for repeat in range(REPEATS + 1):
            serial = sum(one.run(cpu_seconds, "alone", config, 1))
            layouts = {
                what: sum(four.run(cpu_seconds, what, there, 4)) for what, there in configs.items()
            }
            if repeat:  # the first round warms up
                alone.append(serial)
                for what, seconds in layouts.items():
                    together[what].append(seconds)
                setting.say(f"{repeat} of {REPEATS}")
    return [
        Row(
            what=what,
            ours=statistics.median(seconds),
            against=statistics.median(alone),
            goal=GOALS.get(what),
            unit="CPU-s a step",
            note=f"{LAYOUTS[what]}; medians of {REPEATS}",
            at_most=True,
        )
        for what, seconds in together.items()
    ]


def cpu_seconds(what: str, config: Config, ranks: int) -> float:
    """On a rank: its CPU-seconds of one step, mean of `STEPS`."""
    if what not in _steps:
        _, shapes = workload("fp32")
        _steps[what] = step_of(config, assemble(config, shapes, Mesh(mesh_of(config.mesh, ranks))))
    began = time.process_time()
    for _ in range(STEPS):
        _steps[what]()
    return (time.process_time() - began) / STEPS
