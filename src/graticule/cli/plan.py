"""`graticule plan`: what a training step will hold, from a laptop."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule.cli.output import print_result

if TYPE_CHECKING:
    from graticule.cluster.devices import Device
    from graticule.config import Config
    from graticule.memory.choose import Chooser, Chosen

GIB = 2**30


def run_plan(options: argparse.Namespace) -> int:
    """What each owner holds at the peak of a step, and the plan that keeps it within a budget."""
    from graticule.cluster.devices import device

    rates = device(options.device)
    config = _settled(options)
    if options.fit:
        return _fit(options, config, rates)
    if options.devices:
        raise ValueError("--devices is for --fit width; --ranks says how many processes there are")
    return _plan(options, config, rates)


def _settled(options: argparse.Namespace) -> "Config":
    """The configuration with what the options say of its memory section."""
    from graticule.config import override
    from graticule.recipes import recipe

    config = override(recipe(options.recipe), options.set)
    memory = config.memory
    memory = replace(
        memory,
        mode=options.mode or memory.mode,
        budget=options.budget or memory.budget,
        offload=memory.offload and not options.no_offload,
    )
    return replace(config, memory=memory)


def _budget(config: "Config", rates: "Device") -> int:
    return config.memory.budget_bytes or rates.usable


def _plan(options: argparse.Namespace, config: "Config", rates: "Device") -> int:
    from graticule.assemble import shapes_of_config
    from graticule.parallel.launch import ranks_of
    from graticule.report.timeline import timeline_picture
    from graticule.train.budget import chooser_of, store_plan
    from graticule.train.foresee import heaviest_rank

    began = time.process_time()
    shapes = shapes_of_config(config)
    ranks = options.ranks or ranks_of(config)
    rank = heaviest_rank(config, shapes, ranks)
    chooser = chooser_of(config, shapes, rates, ranks=ranks, rank=rank)
    budget, least = _budget(config, rates), chooser.least
    refused: ValueError | None = None
    try:
        chosen = chooser.at(budget)
    except ValueError as error:  # shown what there is all the same
        refused, chosen = error, chooser.at(least.peak)
    about = {
        "recipe": config.name, "device": rates.name, "ranks": ranks, "rank": rank,
        "leads": config.train.leads, "budget_gib": budget / GIB, "feasible": refused is None,
        "cpu_seconds": time.process_time() - began,
    }  # fmt: skip
    values = {**about, **_values(chosen)}
    if refused and not options.json:
        raise refused
    if options.out and not refused:
        store_plan(_folder(options.out), {"device": rates.name, "ranks": ranks, **chosen.to_dict()})
        title = f"{config.name} on rank {rank} of {ranks}, {config.train.leads} leads"
        timeline_picture(chosen.timeline, title=title, budget=budget).save(options.out)
    print_result(options, values, lambda: _words(values, chosen, rates))
    if refused:
        raise refused
    return 0


def _folder(out: str) -> Path:
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out} cannot be written to: {error}; name another with --out") from error
    return folder


def _values(chosen: "Chosen") -> dict[str, Any]:
    price, least = chosen.price, chosen.least
    return {
        "mode": chosen.mode,
        "peak_gib": chosen.peak / GIB,
        "peak_owner": next(iter(chosen.owners)),
        "peak_at": chosen.at_peak,
        "owners_gib": {name: held / GIB for name, held in chosen.owners.items()},
        "base_gib": chosen.base / GIB,
        "extra_compute": price.extra_compute,
        "extra_seconds": price.seconds,
        "waiting_seconds": price.waiting_seconds,
        "offload_gib": {
            "sampling": price.offload_sampling / GIB,
            "transformer": price.offload_transformer / GIB,
        },
        "least_budget_gib": least.peak / GIB,
        "least_budget_extra_compute": least.price.extra_compute,
        "plan": chosen.plan.to_dict(),
        "words": chosen.plan.in_words(chosen.units).split("\n"),
    }


def _words(values: dict[str, Any], chosen: "Chosen", rates: "Device") -> str:
    width = max(len(name) for name in values["owners_gib"])
    away = values["offload_gib"]
    lines = [
        f"{values['recipe']}: rank {values['rank']} (the heaviest) of {values['ranks']},"
        f" {values['leads']} lead{'s' * (values['leads'] > 1)}, {rates.name}",
        f"peak {_gib(chosen.peak)} of a budget of {_gib(int(values['budget_gib'] * GIB))}, in the"
        f" {values['peak_at']}:",
        *(f"  {name:{width}} {_gib(held):>11}" for name, held in chosen.owners.items()),
        f"held during the whole step: {_gib(chosen.base)}",
        f"plan ({values['mode']}):",
        *(f"  {line}" for line in values["words"]),
        f"extra compute {100 * values['extra_compute']:+.1f} % of a step that recomputes each unit"
        f" by itself; {values['extra_seconds']:.3g} s a step for recomputing and copies, of which"
        f" {values['waiting_seconds']:.3g} s waiting",
        f"to the host and back: sampling {_gib(int(away['sampling'] * GIB))}, Transformer"
        f" {_gib(int(away['transformer'] * GIB))}",
        f"least budget in this mode: {_gib(chosen.least.peak)}, at"
        f" {100 * values['least_budget_extra_compute']:+.1f} % of compute",
        f"planned in {values['cpu_seconds']:.1f} CPU-seconds",
    ]
    return "\n".join(lines)


def _fit(options: argparse.Namespace, config: "Config", rates: "Device") -> int:
    """The widest model that fits each number of devices, one sample on all of them."""
    from graticule.assemble import describe, shapes_of_config
    from graticule.train.budget import widest

    if options.out:
        raise ValueError("--fit prints a table and writes nothing: leave --out away")
    shapes, budget = shapes_of_config(config), _budget(config, rates)
    rows = []
    for devices in _numbers(options.devices) or [options.ranks or 1]:
        began = time.process_time()
        mesh = config.mesh
        share = (mesh.sequence or 1) * mesh.tensor
        if devices % share:
            raise ValueError(
                f"--devices {devices}: mesh.sequence x mesh.tensor = {share} ranks share each"
                " window; name multiples of that"
            )
        there = replace(config, mesh=replace(mesh, data=1, window=devices // share,
                                             fixed_windows=None))  # fmt: skip
        fitted, chooser = widest(there, shapes, rates, ranks=devices, budget=budget)
        rows.append(
            {
                "devices": devices,
                "width": fitted.swin.width,
                "heads": fitted.swin.heads,
                "parameters": describe(fitted, shapes)["parameters"],
                **_least(chooser),
                "cpu_seconds": time.process_time() - began,
            }
        )
    values = {"recipe": config.name, "device": rates.name, "budget_gib": budget / GIB, "rows": rows}

    def text() -> str:
        lines = [
            f"{config.name}, {config.train.leads} leads, the widest of its kind on {rates.name}"
            f" with {_gib(budget)} a device (mode {config.memory.mode}):",
            "devices   width   heads  parameters   least peak   extra compute",
        ]
        for row in rows:
            billions, extra = row["parameters"] / 1e9, 100 * row["extra_compute"]
            lines.append(
                f"{row['devices']:7}  {row['width']:6}  {row['heads']:6}  {billions:8.3f} B"
                f"   {row['least_gib']:6.2f} GiB   {extra:+11.1f} %"
            )
        return "\n".join(lines)

    print_result(options, values, text)
    return 0


def _least(chooser: "Chooser") -> dict[str, float]:
    least = chooser.least
    return {"least_gib": least.peak / GIB, "extra_compute": least.price.extra_compute}


def _numbers(text: str | None) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if any(number < 1 for number in found):
        raise ValueError(f"--devices {text}: write numbers, such as 1,2,4,8")
    return found


def _gib(num_bytes: int) -> str:
    if num_bytes >= GIB / 8:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"
