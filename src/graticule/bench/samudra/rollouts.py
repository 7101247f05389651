"""The acts on rollouts: logging less, and validation apart from training."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graticule.bench.om4 import STATES
from graticule.bench.rows import Row
from graticule.bench.samudra.size import PUBLISHED, Size
from graticule.config import Config
from graticule.forecast.run import forecast
from graticule.train.task import Task


def rollout_rows(
    folder: Path, config: Config, size: Size, found: list[Row], say: Callable[[str], None]
) -> list[Row]:
    """A year's forecast that logs every lead, every tenth, and none; and what a rollout among the
    training steps would cost those."""
    task = Task.of(config, torch.device("cpu"))
    store = task.source.store
    start = int(task.source.times("test")[STATES - 1])
    leads = min(size.leads, (len(store.times) - start - 1) // STATES)
    timings: dict[int, list[Any]] = {1: [], size.log_every: [], 0: []}
    for repeat in range(size.repeats + 1):
        for every, timed in timings.items():
            timing = forecast(
                task.model, task.source, task.statistics, folder / f"{repeat}-{every}.zarr",
                starts=[start], leads=leads, attributes={}, log_every=every,
            )  # fmt: skip
            if repeat:
                timed.append(timing)
        say(f"rollouts: {repeat} of {size.repeats}")
    task.model.train()

    def rate(every: int) -> float:
        return statistics.median(timing.simulated_years_per_day for timing in timings[every])

    def row(what: str, every: int) -> Row:
        log = [statistics.median(t.parts["log"] for t in timings[e]) for e in (every, 1)]
        cpu = [statistics.median(t.cpu_seconds for t in timings[e]) for e in (every, 1)]
        whole = statistics.median(t.seconds for t in timings[1])
        return Row(
            what, rate(every), rate(1), None, "simulated years a day",
            f"{PUBLISHED['logging']}; logging takes {log[0]:.3g} and {log[1]:.3g} s of"
            f" {whole:.3g}, CPU-seconds {cpu[0]:.3g} and {cpu[1]:.3g}; {leads} leads",
        )  # fmt: skip

    step = next(row for row in found if row.what == "training: ours / after").ours
    assert step is not None
    training = size.training_steps / step
    rollout = statistics.median(timing.seconds for timing in timings[size.log_every])
    apart = Row(
        "validation: apart / among the steps", training, training + rollout, None, "s",
        f"{PUBLISHED['apart']}; {size.training_steps} steps with and without one rollout of {leads}"
        " leads after them: measured parts, added",
    )  # fmt: skip
    return [
        row("log: every tenth / every lead", size.log_every),
        row("log: no / every lead", 0),
        apart,
    ]
