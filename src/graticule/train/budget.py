"""The memory plan of a run: made from its configuration alone, stored with it, kept to.

plan.json in the run's folder holds the plan, what it was made for, and what it was said to take.
A run that goes on with the same model, mesh and memory settings uses it again; one that goes on
with others is planned anew: gradients do not depend on it.
"""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graticule.assemble import Shapes, shapes_of_config
from graticule.cluster.devices import Device, device, device_names
from graticule.config import Config, fingerprint
from graticule.data.processes import child_processes
from graticule.data.store import Store, write_json
from graticule.memory.apply import Memory
from graticule.memory.choose import Chooser
from graticule.memory.offload import Host
from graticule.memory.plan import Plan
from graticule.memory.search import size
from graticule.train.foresee import foresee

PLAN = "plan.json"
TILES = 8
"""Row tiles that a plan may have: up-sampling then holds 3.7 fields of its size instead of 9.3."""
_UNKNOWN_GPU = "h100-80"
_log = logging.getLogger(__name__)


def chooser_of(
    config: Config, shapes: Shapes, rates: Device, *, ranks: int, rank: int | None = None
) -> Chooser:
    """What a training step of a rank holds under any plan of `config.memory.mode`.

    rates: of the device; `cpu` or another one decides which kernels are foreseen.
    rank: None: the heaviest, for whose plan all ranks have room.
    """
    on = "cpu" if rates.name == "cpu" else "cuda"
    stored = torch.int16
    if config.data.store and Path(config.data.store).exists():
        stored = torch.float32 if Store(config.data.store).packing.scale is None else stored
    memory = config.memory
    tiles = TILES if memory.mode == "best" else 1
    profile = foresee(
        config, shapes, ranks=ranks, rank=rank, on=on, stored=stored, tiles=tiles,
        simple=memory.mode == "simple",
    )  # fmt: skip
    # What waits in the memory of the CPU that computes has not left the device.
    away = on != "cpu" or bool(memory.folder)
    return Chooser(profile, rates, mode=memory.mode, offload=memory.offload and away)


def planned(config: Config, out: Path, kind: str, ranks: int) -> dict[str, Any] | None:
    """What plan.json of a run in `out` holds; None where the configuration asks for no plan.

    kind: name of the device that each rank has. ValueError where no plan meets the budget.
    """
    if not (config.memory.budget or config.memory.mode in ("paper", "full", "simple")):
        return None
    wanted = _made_for(config, kind, ranks)
    try:
        before = json.loads((out / PLAN).read_text())
        if before["made_for"] == wanted:
            Plan.from_dict(before["plan"])
            return before
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("%s is damaged (%s): planning anew", out / PLAN, error)
    if dist.is_initialized():
        # Foreseeing takes a process group that sends nothing, in the place of the real one.
        with child_processes(1) as submit:
            told = submit(_plan, config, kind, ranks).result()
    else:
        told = _plan(config, kind, ranks)
    return {"made_for": wanted, **told}


def _plan(config: Config, kind: str, ranks: int) -> dict[str, Any]:
    chooser = chooser_of(config, shapes_of_config(config), device(kind), ranks=ranks)
    chosen = chooser.at(config.memory.budget_bytes)
    words = chosen.plan.in_words(chosen.units)
    return {"device": kind, "ranks": ranks, **chosen.to_dict(), "words": words.split("\n")}


def _made_for(config: Config, kind: str, ranks: int) -> str:
    """Of what a plan depends on."""
    values = config.to_dict()
    steps = ("batch", "accumulation", "leads", "detach_every", "loss", "gradient_loss",
             "denominator", "area_weighted", "ema_decay", "precision")  # fmt: skip
    parts = {section: values[section] for section in ("data", "model", "mesh", "memory")}
    train = {name: values["train"][name] for name in steps}
    return fingerprint([parts, train, kind, ranks, torch.__version__])


def say(told: dict[str, Any]) -> str:
    """A plan in one line."""
    limit = f" of a budget of {size(told['budget'])}" if told["budget"] else ""
    return (
        f"memory plan ({told['mode']}): {size(told['peak'])}{limit} at the peak, extra compute"
        f" {100 * told['extra_compute']:+.1f} %, {size(sum(told['offload'].values()))} a step to"
        f" the host; {'; '.join(told['words'])}"
    )


def kind_of_device(here: torch.device) -> str:
    """The name in the device file of what this process computes on; a GPU that is not there is
    taken for an H100: only predicted times depend on it."""
    if here.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(here).lower().replace(" ", "")
    # Longest first: a GH200 is no H200.
    for known in sorted(device_names(), key=len, reverse=True):
        if known.partition("-")[0] in name:
            return known
    _log.info("%s is not in the device file: its rates are taken for those of %s", name,
              _UNKNOWN_GPU)  # fmt: skip
    return _UNKNOWN_GPU


def store_plan(out: Path, told: dict[str, Any] | None) -> None:
    """Write plan.json, or take away that of an earlier session."""
    if told is None:
        (out / PLAN).unlink(missing_ok=True)
    else:
        write_json(out / PLAN, told)


@contextmanager
def memory_of(told: dict[str, Any] | None, config: Config, here: torch.device) -> Iterator[Memory]:
    """What a run's steps do with their memory; boundaries on the host go with this block."""
    if told is None:
        yield Memory()
        return
    plan = Plan.from_dict(told["plan"])
    if not any(segment.action == "offload" for lead in plan.leads for segment in lead):
        yield Memory(plan)
        return
    folder = Path(config.memory.folder) if config.memory.folder else None
    with Host(here, folder=folder) as host:
        yield Memory(plan, host)


def widest(
    config: Config,
    shapes: Shapes,
    rates: Device,
    *,
    ranks: int,
    budget: int,
    closeness: float = 1.05,
) -> tuple[Config, Chooser]:
    """The largest model that some plan fits into `budget` bytes of each rank: `config` with another
    model.width, heads of the size that it has, and what its steps hold.

    By doubling, then bisection until the narrowest that is too wide is within `closeness`.
    ValueError where not even the narrowest one fits.
    """
    model, mesh = config.swin, config.mesh
    head = model.width // model.heads
    # Heads are shared among sequence x tensor ranks; norms have groups.
    unit = math.lcm(head * (mesh.sequence or 1) * mesh.tensor, model.norm_groups)

    def wide(count: int) -> Config:
        return replace(config, model=replace(model, width=count * unit, heads=count * unit // head))

    tried: dict[int, Chooser] = {}

    def fits(count: int) -> bool:
        tried[count] = chooser_of(wide(count), shapes, rates, ranks=ranks)
        return tried[count].least.peak <= budget

    low, high = 0, max(model.width // unit, 1)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1 and high > closeness * low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise ValueError(
            f"a budget of {size(budget)} has no room for a model of width {unit}, whose steps hold"
            f" {size(tried[1].least.peak)} at least; give more, or more ranks for a sample"
            " (mesh.window)"
        )
    return wide(low), tried[low]
