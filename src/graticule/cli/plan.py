"""`graticule plan`: what a training step will hold, from a laptop."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graticule.cli.output import print_result

if TYPE_CHECKING:
    from graticule.assemble import Shapes
    from graticule.cluster.devices import Device
    from graticule.config import Config
    from graticule.memory.choose import Chooser, Chosen

GIB = 2**30


def run_plan(options: argparse.Namespace) -> int:
    """What each owner holds at the peak of a step, and the plan that keeps it within a budget."""
    from graticule.cluster.devices import device

    rates = device(options.device)
    config = _settled(options)
    if (options.fit or options.devices) and options.out:
        raise ValueError("--fit and --devices print a table and write nothing: leave --out away")
    if options.devices and options.ranks:
        raise ValueError("--devices tries numbers of processes, --ranks says one: leave one away")
    if options.fit:
        return _fit(options, config, rates)
    if options.devices:
        return _each(options, config, rates)
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
        "leads": config.train.leads, "samples": config.train.batch,
        "accumulation": config.train.accumulation, "precision": config.train.precision,
        "members": config.bayes.members, "budget_gib": budget / GIB, "feasible": refused is None,
        "cpu_seconds": time.process_time() - began,
    }  # fmt: skip
    values = {**about, **_values(chosen, config)}
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


def _values(chosen: "Chosen", config: "Config") -> dict[str, Any]:
    price, least = chosen.price, chosen.least
    away = {"sampling": price.offload_sampling, "transformer": price.offload_transformer}
    if config.model.family != "swin":  # has no such parts
        away = {"boundaries": sum(away.values())}
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
        "offload_gib": {name: num_bytes / GIB for name, num_bytes in away.items()},
        "least_budget_gib": least.peak / GIB,
        "least_budget_extra_compute": least.price.extra_compute,
        "plan": chosen.plan.to_dict(),
        "words": chosen.plan.in_words(chosen.units).split("\n"),
    }


def _words(values: dict[str, Any], chosen: "Chosen", rates: "Device") -> str:
    width = max(len(name) for name in values["owners_gib"])
    away = [
        f"{'Transformer' if name == 'transformer' else name} {_gib(int(held * GIB))}"
        for name, held in values["offload_gib"].items()
    ]
    lines = [
        f"{values['recipe']}: rank {values['rank']} (the heaviest) of {values['ranks']},"
        f" {values['leads']} lead{'s' * (values['leads'] > 1)}, {rates.name}",
        f"train.batch={values['samples']} x accumulation {values['accumulation']},"
        f" {values['members']} member{'s' * (values['members'] > 1)}, {values['precision']}",
        f"peak {_gib(chosen.peak)} of a budget of {_gib(int(values['budget_gib'] * GIB))}, in the"
        f" {values['peak_at']}:",
        *(f"  {name:{width}} {_gib(held):>11}" for name, held in chosen.owners.items()),
        f"there before the model's first unit runs: {_gib(chosen.base)} (the base)",
        f"plan ({values['mode']}):",
        *(f"  {line}" for line in values["words"]),
        f"extra compute {100 * values['extra_compute']:+.1f} % of a step that recomputes each unit"
        f" by itself; {values['extra_seconds']:.3g} s a step for recomputing and copies, of which"
        f" {values['waiting_seconds']:.3g} s waiting",
        f"to the host and back: {', '.join(away)}",
        f"least budget in this mode: {_gib(chosen.least.peak)}, at"
        f" {100 * values['least_budget_extra_compute']:+.1f} % of compute",
        f"planned in {values['cpu_seconds']:.1f} CPU-seconds",
    ]
    return "\n".join(lines)


def _fit(options: argparse.Namespace, config: "Config", rates: "Device") -> int:
    """The widest model that fits each number of devices, one sample on all of them."""
    from graticule.assemble import describe, shapes_of_config
    from graticule.train.budget import widest

    shapes, budget = shapes_of_config(config), _budget(config, rates)
    rows = []
    for devices in _numbers(options.devices) or [options.ranks or 1]:
        began = time.process_time()
        there = _shared_by(config, devices, data=1)
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


def _each(options: argparse.Namespace, config: "Config", rates: "Device") -> int:
    """What each number of devices needs, in the layout that serves it best."""
    from graticule.assemble import shapes_of_config

    shapes, budget = shapes_of_config(config), _budget(config, rates)
    rows = []
    for devices in _numbers(options.devices):
        began = time.process_time()
        tried = [
            _need(there, shapes, rates, devices, budget)
            for data in range(1, min(devices, config.train.batch) + 1)
            if devices % data == 0 and (devices // data) % _share(config) == 0
            for there in [_shared_by(config, devices, data=data)]
        ]
        tried = tried or [_need(_shared_by(config, devices, 1), shapes, rates, devices, budget)]
        best = min(tried, key=worth)
        rows.append({"devices": devices, **best, "cpu_seconds": time.process_time() - began})
    values = {"recipe": config.name, "device": rates.name, "budget_gib": budget / GIB, "rows": rows}

    def text() -> str:
        lines = [
            f"{config.name}, {config.train.leads} leads, batch {config.train.batch}, on"
            f" {rates.name} with {_gib(budget)} a device (mode {config.memory.mode}); what the"
            " heaviest holds:",
            f"{'devices':>7}  {'layout':18} {'peak':>10}  extra compute  {'least':>10}"
            "  extra compute",
        ]
        for row in rows:
            least = _held(row["least_gib"], row["least_extra_compute"])
            best = f"{'none fits':>10}  {'':13}"
            if row["feasible"]:
                best = _held(row["peak_gib"], row["extra_compute"])
            lines.append(f"{row['devices']:7}  {row['layout']:18} {best}  {least}")
        return "\n".join(lines)

    print_result(options, values, text)
    return 0


def _held(gib: float, extra_compute: float) -> str:
    return f"{_gib(round(gib * GIB)):>10}  {100 * extra_compute:+11.1f} %"


def _need(
    config: "Config", shapes: "Shapes", rates: "Device", devices: int, budget: int
) -> dict[str, Any]:
    """What the heaviest of so many devices holds in one layout."""
    from graticule.train.budget import chooser_of

    chooser = chooser_of(config, shapes, rates, ranks=devices)
    least, mesh = chooser.least, config.mesh
    sizes = {axis: getattr(mesh, axis) for axis in ("data", "window", "sequence", "tensor")}
    found: dict[str, Any] = {
        "layout": " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "alone",
        "mesh": sizes, "feasible": least.peak <= budget, "least_gib": least.peak / GIB,
        "least_extra_compute": least.price.extra_compute, "peak_gib": None, "extra_compute": None,
        "extra_seconds": None,
    }  # fmt: skip
    if found["feasible"]:
        chosen = chooser.at(budget)
        found |= {
            "peak_gib": chosen.peak / GIB, "extra_compute": chosen.price.extra_compute,
            "extra_seconds": chosen.price.seconds,
        }  # fmt: skip
    return found


def worth(row: dict[str, Any]) -> tuple[Any, ...]:
    """What fits comes first, then what recomputes least, then what exchanges least in a sample."""
    if not row["feasible"]:
        return True, row["least_gib"]
    return False, row["extra_seconds"], -row["mesh"]["data"]


def _share(config: "Config") -> int:
    return (config.mesh.sequence or 1) * config.mesh.tensor


def _shared_by(config: "Config", devices: int, data: int) -> "Config":
    """The configuration on so many devices, `data` samples side by side, each in stripes."""
    share = _share(config)
    if devices % (data * share):
        raise ValueError(
            f"--devices {devices}: mesh.sequence x mesh.tensor = {share} ranks share each"
            " window; name multiples of that"
        )
    mesh = replace(config.mesh, data=data, window=devices // (data * share), fixed_windows=None)
    return replace(config, mesh=mesh)


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
