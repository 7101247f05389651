"""Which split of ranks into window x sequence is fastest: a few real steps of each (TERRA, Alg. 1).

Windows are shared out whole as long as there are enough of them; few large ones are better cut,
at the price of an exchange around attention. What that costs is the machine's to say.
"""

import gc
import logging
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graticule.config import Config
from graticule.mesh import Mesh
from graticule.parallel.launch import mesh_of
from graticule.parallel.talk import everyone
from graticule.train.run import Run
from graticule.train.task import Task

STEPS, WARM_UP = 3, 1
"""Of each candidate: those that are timed, and those before them."""
_log = logging.getLogger(__name__)


def candidates(config: Config) -> list[Config]:
    """The splits of mesh.window ranks that the model allows, those with fewer sequence ranks first;
    of a configuration that says mesh.sequence itself alone.

    ValueError where the heads allow none.
    """
    mesh = config.mesh
    if mesh.sequence:
        return [config]
    heads = config.swin.heads
    found = [
        replace(config, mesh=replace(mesh, window=mesh.window // s, sequence=s))
        for s in range(1, mesh.window + 1)
        if mesh.window % s == 0 and heads % (s * mesh.tensor) == 0
    ]
    if not found:
        raise ValueError(
            f"model.heads={heads} does not divide by mesh.tensor={mesh.tensor}: no split of"
            f" mesh.window={mesh.window} will do"
        )
    return found


def fastest(config: Config, size: int, device: torch.device) -> tuple[Config, list[dict[str, Any]]]:
    """`config` with the split that took the least time a step, and what each took.

    size: processes. All of them call it together, and agree: a step is as long as its slowest
    rank. Nothing is written and nothing kept of these steps.
    """
    tried: list[dict[str, Any]] = []
    options = candidates(config)
    for option in options:
        mesh = Mesh(mesh_of(option.mesh, size), device=device.type)
        run = Run(Task.of(option, device, mesh), None)
        lines = run.rehearse(WARM_UP + STEPS)[WARM_UP:]
        # Waiting for data says nothing about the split.
        own = [line["seconds"] * (1 - line["data_wait_share"]) for line in lines]
        steps = [max(ranks) for ranks in zip(*everyone().gather(own), strict=True)]
        tried.append(
            {
                "window": option.mesh.window,
                "sequence": option.mesh.sequence,
                "seconds_a_step": statistics.median(steps),
            }
        )
        del run
        gc.collect()  # sharded modules refer to themselves: two models at once may be too many
    best = everyone().first(lambda: min(range(len(tried)), key=lambda i: _seconds(tried[i])))
    _log.info(
        "window x sequence: %s; %d x %d is used",
        ", ".join(f"{t['window']} x {t['sequence']} {_seconds(t):.3g} s" for t in tried),
        tried[best]["window"], tried[best]["sequence"],
    )  # fmt: skip
    return options[best], tried


def _seconds(tried: Mapping[str, Any]) -> float:
    return float(tried["seconds_a_step"])
