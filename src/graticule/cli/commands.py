"""What each command does: arguments to a call of the library, its result to `output`."""

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from graticule.cli.output import Bar, by, print_result, print_store, say


def run_demo(options: argparse.Namespace) -> int:
    from graticule.demo import run_demo

    summary = run_demo(
        Path(options.out), Path(options.data), settings=options.set, bar=Bar, say=say
    )
    text = summary.pop("text")
    print_result(options, summary, lambda: text)
    return 0


def run_data_demo(options: argparse.Namespace) -> int:
    from graticule.data.demo import write_demo_store
    from graticule.data.planet import Planet

    planet = Planet(
        num_runs=options.runs, samples_per_run=options.samples, seed=options.seed,
        num_lat=options.lat, num_lon=options.lon, dt_seconds=options.dt_seconds,
    )  # fmt: skip
    out = options.out or ("data/planet-coast.zarr" if options.coast else "data/planet.zarr")
    with Bar("simulating", "samples") as bar:
        store = write_demo_store(
            out, planet, coast=options.coast, workers=options.workers, progress=bar
        )
    print_store(options, store)
    return 0


def run_data_ocean(options: argparse.Namespace) -> int:
    from graticule.data.basin import Ocean
    from graticule.data.demo import write_ocean_store

    ocean = Ocean(
        num_lat=options.lat, num_lon=options.lon, num_years=options.years, seed=options.seed,
        calendar=options.calendar, max_speed=options.max_speed, dt_seconds=options.dt_seconds,
    )  # fmt: skip
    with Bar("simulating", "dates") as bar:
        store = write_ocean_store(options.out, ocean, workers=options.workers, progress=bar)
    print_store(options, store)
    return 0


def run_data_ingest(options: argparse.Namespace) -> int:
    from graticule.data.ingest import ingest

    roles: dict[str, Any] = {}
    for role in ("forcing", "static", "diagnostic"):
        roles |= {name: role for name in _names(getattr(options, role))}
    splits = {
        split: _names(getattr(options, split))
        for split in ("train", "validation", "test")
        if getattr(options, split)
    }
    with Bar("ingesting", "steps") as bar:
        store = ingest(
            [Path(source) for source in options.sources],
            Path(options.out),
            source=options.source,
            variables=_names(options.variables) or None,
            levels=_levels(options.levels),
            roles=roles,
            units=dict(_pair(unit) for unit in options.units),
            packing=options.packing,
            inner_chunk=_chunk(options.chunk),
            splits=splits,
            time=options.time,
            drop_south_pole=options.drop_south_pole,
            allow_missing_chunks=options.allow_missing_chunks,
            workers=options.workers,
            part=_part(options.part),
            progress=bar,
        )
    if store is None:
        print_result(
            options, {"store": options.out, "part": options.part, "complete": False},
            lambda: f"{options.out}: part {options.part} is written, others are not yet",
        )  # fmt: skip
        return 0
    print_store(options, store)
    return 0


def run_data_check(options: argparse.Namespace) -> int:
    from graticule.data.check import check
    from graticule.data.store import Store

    policies: Any = dict(_pair(pair, "--policy") for pair in _names(options.policy))
    with Bar("checking", "times") as bar:
        report = check(Store(options.store), policies=policies, progress=bar)
    print_result(options, report.to_json(), lambda: "\n".join(report.lines()))
    return 0 if report.ok else 1


def run_data_stats(options: argparse.Namespace) -> int:
    from graticule.data.statistics import compute
    from graticule.data.store import Store

    store = Store(options.store)
    ranges = _names(options.train) or store.splits.get("train")
    if not ranges:
        raise ValueError(f"{store.path} declares no train split: give --train first/last")
    with Bar("statistics", "times") as bar:
        found = compute(store, store.times.within(ranges).nonzero()[0], bar)
    found.save(store)
    rows = {
        name: {"mean": mean, "std": std, "tendency_std": tendency, "count": int(count)}
        for name, mean, std, tendency, count in zip(
            found.names, found.mean.tolist(), found.std.tolist(), found.tendency_std.tolist(),
            found.count, strict=True,
        )
    }  # fmt: skip
    head = f"{found.num_times} times, {found.first} to {found.last}"
    lines = [f"{name:24} mean {row['mean']:12.5g}   std {row['std']:12.5g}"
             f"   step std {row['tendency_std']:12.5g}" for name, row in rows.items()]  # fmt: skip
    values = {
        "first": found.first, "last": found.last, "num_times": found.num_times, "channels": rows,
    }  # fmt: skip
    print_result(options, values, lambda: "\n".join([head, *lines]))
    return 0


def run_info(options: argparse.Namespace) -> int:
    from graticule.assemble import describe, shapes_of_config

    config = _config(options)
    info = describe(config, shapes_of_config(config))
    channels = f"{info['in_channels']} channels in, {info['out_channels']} out"
    if info["family"] == "swin":
        shape = [
            f"grid {by(info['grid'])}, padded {by(info['padded_shape'])}, {info['tokens']:,} tokens"
            f" in {info['windows']:,} windows, {channels}"
        ]
    elif info["family"] == "beast":
        shape = [f"grid {by(info['grid'])}, {channels}, {config.model.words}"]
        for stage in info["stages"]:
            shape.append(
                f"  {stage['name']:8} {by(stage['grid']):>12} tokens of {stage['features']:5}"
                f" features, {stage['blocks']} blocks, {stage['windows']} windows of"
                f" {by(stage['window'])}   {stage['parameters']:>13,}"
            )
        of = info["parameters_of"]
        shape.append(
            f"  of the parameters {of['means']:,} are means, {of['deviations']:,} deviations,"
            f" {of['others']:,} plain numbers"
        )
    else:
        shape = [f"grid {by(info['grid'])}, {channels}, {config.model.words}"]
        for stage in info["stages"]:
            features = " -> ".join(map(str, stage["features"]))
            shape.append(
                f"  {stage['name']:8} {by(stage['grid']):>12}   {features:>18}   dilation"
                f" {stage['dilation']:2}   {stage['parameters']:>12,}"
            )
        shape += [info["seam"]] if info["seam"] else []
    parts = "convolutions"
    if info["family"] != "unet":
        parts = (
            f"linears and convolutions {_flop(info['forward_flops_dense'])}, attention"
            f" {_flop(info['forward_flops_attention'])}"
        )
    if info["family"] == "beast":
        parts += (
            f"; of the linears embedding and recovery {_flop(info['forward_flops_embedding'])};"
            f" not counted: the norms' noise {_flop(info['forward_flops_noise'])}"
        )
    text = [
        f"{info['recipe']}: {info['parameters']:,} parameters",
        *shape,
        f"forward {_flop(info['forward_flops'])} (2 per multiply-add): {parts}",
        f"training step, {info['leads']} lead(s): {_flop(info['step_flops'])} a sample",
    ]
    print_result(options, info, lambda: "\n".join(text))
    return 0


def run_adopt(options: argparse.Namespace) -> int:
    from graticule.train.published import adopt

    config = _config(options)
    out = Path(options.out or f"runs/{config.name}")
    path = adopt(config, options.file, out)
    print_result(
        options,
        {"run": str(out), "checkpoint": str(path)},
        lambda: f"{out}: a run at step 0 with the weights of {options.file}",
    )
    return 0


def run_train(options: argparse.Namespace) -> int:
    # A second of imports, for which no process that has met the others should wait.
    from graticule.parallel.launch import processes
    from graticule.tasks import record_stage
    from graticule.train.trainer import Stopped, train

    if options.budget:
        options.set.append(f"memory.budget={options.budget}")
    with processes(options.device) as options.here:
        config, first = _config(options), options.here.speaks
        out = Path(options.out or f"runs/{config.name}")
        if options.resume and (out / "config.json").is_file():
            config = _resumed(out, config, options.set)
        with Bar(f"training {config.name}", "steps") if first else nullcontext() as bar:
            began = time.perf_counter()
            try:
                last = train(
                    config, out, resume=options.resume, device=options.device, progress=bar,
                    profile=options.profile,
                )  # fmt: skip
            except Stopped:
                if first:
                    record_stage(out, "train", time.perf_counter() - began)
                raise
        if first:
            record_stage(out, "train", time.perf_counter() - began)
            _print_run(options, out, last)
    return 0


def _print_run(options: argparse.Namespace, out: Path, last: Path) -> None:
    from graticule.train.profile import describe, read_profile
    from graticule.train.progress import read_metrics

    # A finished run that is resumed has nothing to add; its lines may even be gone.
    line = (read_metrics(out) or [{}])[-1]
    values = {"run": str(out), "checkpoint": str(last), **line}
    told = ", ".join(
        f"{name.replace('_', ' ')} {line[name]:.5f}"
        for name in ("loss", "validation_loss")
        if name in line
    )
    text = f"{last}: {told or 'done'}"
    if options.profile is not None:
        values["profile"] = read_profile(out)
        text = f"{describe(values['profile'])}\n\n{text}"
    print_result(options, values, lambda: text)


def run_validate(options: argparse.Namespace) -> int:
    from graticule.parallel.launch import processes

    with processes(options.device) as options.here:
        return _validate(options)


def _validate(options: argparse.Namespace) -> int:
    from graticule.tasks import validate_run

    here = options.here
    with Bar("validating", "leads") if here.speaks else nullcontext() as bar:
        result = validate_run(
            Path(options.run_folder),
            leads=_leads(options.leads),
            starts=options.starts,
            follow=options.follow,
            settings=options.set,
            device=str(here.device),
            progress=bar,
            told=lambda line: say(_validated(line)),
        )
    if not here.speaks:
        return 0
    lines = [
        f"best at {_validated(line)}{'' if line['there'] else ' (removed: train.keep_checkpoints)'}"
        for line in result["best"]
    ]
    lines = lines or ["no rollout was finite: there is no best checkpoint"]
    print_result(options, result, lambda: "\n".join(lines))
    return 0


def _validated(line: dict[str, Any]) -> str:
    told = f"{line['leads']} leads ({line['lead_hours']:g} h): {line['checkpoint']}"
    if line["loss"] is None:
        return f"{told}, the rollout is not finite"
    ratio = line["mean_ratio"]
    ratio = "" if ratio is None else f", {ratio:.3f} of persistence's RMSE"
    return f"{told}, loss {line['loss']:.5f}{ratio}"


def _leads(text: str | None) -> list[int]:
    try:
        return [int(part) for part in _names(text)]
    except ValueError:
        raise ValueError(f"--leads {text}: write numbers of leads, for instance 5,20") from None


def run_forecast(options: argparse.Namespace) -> int:
    from graticule.parallel.launch import processes

    with processes(options.device) as options.here:
        return _forecast(options)


def _forecast(options: argparse.Namespace) -> int:
    from graticule.forecast.clock import told
    from graticule.tasks import forecast_from_run, record_stage

    here = options.here
    with Bar("forecasting", "leads") if here.speaks else nullcontext() as bar:
        result = forecast_from_run(
            Path(options.run_folder),
            Path(options.out) if options.out else None,
            starts=options.start,
            settings=options.set,
            device=str(here.device),
            resume=options.resume,
            progress=bar,
        )
    if not here.speaks:
        return 0
    record_stage(Path(result["forecast"]).parent, "forecast", result["seconds"])
    print_result(
        options,
        result,
        lambda: (
            f"{result['forecast']}: {result['num_starts']} starts x {result['leads']} leads\n"
            f"{told(result)}"
        ),
    )
    return 0


def run_evaluate(options: argparse.Namespace) -> int:
    from graticule.parallel.launch import processes

    with processes("cpu") as options.here:
        return _evaluate(options)


def _evaluate(options: argparse.Namespace) -> int:
    from graticule.parallel.talk import everyone
    from graticule.tasks import evaluate_forecast, record_stage

    if not Path(options.forecast).exists():
        raise ValueError(f"{options.forecast}: no forecast there; graticule forecast RUN makes one")
    base = Path(options.out or Path(options.forecast).with_suffix(".scores"))
    csv, json = (base.with_name(base.name + suffix) for suffix in (".csv", ".json"))
    spectra = base.with_name(base.name.removesuffix(".scores") + ".spectra.nc")
    ocean = base.with_name(base.name.removesuffix(".scores") + ".ocean.nc")
    ensemble = base.with_name(base.name.removesuffix(".scores") + ".ensemble.nc")
    if not os.access(base.parent, os.W_OK):
        raise ValueError(
            f"{base.parent} permission denied, or no such folder; name another with --out"
        )
    for path in (csv, json, spectra, ocean, ensemble):
        if path.exists() and not options.force:  # before hours of reading
            raise ValueError(f"{path} exists already: name others with --out, or give --force")
    began = time.perf_counter()
    with Bar("scoring", "fields") if options.here.speaks else nullcontext() as bar:
        scores = evaluate_forecast(
            Path(options.forecast), store=options.store, settings=options.set, progress=bar
        )

    def write() -> None:
        scores.write_csv(csv, force=options.force)
        scores.write_json(json, force=options.force)
        scores.write_spectra(spectra, force=options.force)
        if scores.ocean is not None:
            scores.write_ocean(ocean, force=options.force)
        if scores.ensemble is not None:
            scores.write_ensemble(ensemble, force=options.force)

    everyone().first(write)
    if options.here.speaks:
        record_stage(base.parent, "evaluate", time.perf_counter() - began)
        print_result(options, scores.to_dict(), scores.table)
    return 0


def run_report(options: argparse.Namespace) -> int:
    from graticule.parallel.launch import processes
    from graticule.parallel.talk import everyone

    with processes("cpu") as options.here:
        return everyone().first(lambda: _report(options))  # the others wait


def _report(options: argparse.Namespace) -> int:
    from graticule.tasks import report_run

    result = report_run(
        Path(options.run_folder),
        Path(options.out) if options.out else None,
        forecast_path=Path(options.forecast) if options.forecast else None,
        store=options.store,
        compare=options.compare,
        channels=_names(options.channel),
        init=options.init,
        force=options.force,
        bar=Bar,
    )
    text = [
        f"{result['report']}: {len(result['sections'])} sections, {len(result['pictures'])}"
        f" pictures, {result['bytes'] / 1e6:.1f} MB",
        *(f"  {warning}" for warning in result["warnings"]),
    ]
    print_result(options, result, lambda: "\n".join(text))
    return 0


def run_verify(options: argparse.Namespace) -> int:
    from graticule.verify import QUANTITIES, TOLERANCE, verify

    config = _config(options)
    with Bar("verifying", "layouts") as bar:
        size, verdicts = verify(config, options.layouts, full=options.full, progress=bar)
    # What nobody asked for and the model cannot do is told, and is no failure.
    asked = [v for v in verdicts if options.layouts or not v.refused]
    passed = bool(asked) and all(verdict.passed for verdict in asked)
    values = {
        "recipe": config.name, "size": size, "full": options.full,
        "tolerance": TOLERANCE, "passed": passed,
        "layouts": [verdict.to_dict() for verdict in verdicts],
    }  # fmt: skip
    width = max(len(verdict.layout) for verdict in verdicts)
    head = "  ".join([" " * width, *(f"{name.replace('_', ' '):>16}" for name in QUANTITIES)])
    lines = [f"{config.name}: {size}, float64, largest difference from one process", head]
    for verdict in verdicts:
        if verdict.refused:
            lines.append(f"{verdict.layout:{width}}  refused: {verdict.refused}")
            continue
        sent = ", ".join(f"{what} {_bytes(n)}" for what, n in sorted(verdict.bytes_sent.items()))
        found = "  ".join(f"{verdict.differences[name]:16.1e}" for name in QUANTITIES)
        lines.append(
            f"{verdict.layout:{width}}  {found}  {'pass' if verdict.passed else 'FAIL'}\n"
            f"{'':{width}}  sent in a step: {sent or 'nothing'}"
            + ("; weights and gradients by FSDP, not counted" if verdict.sharded else "")
        )
    failed = sum(not verdict.passed and not verdict.refused for verdict in verdicts)
    refused = sum(bool(verdict.refused) for verdict in verdicts)
    told = [f"{failed} of {len(verdicts)} layouts differ by more than {TOLERANCE:g}"] * bool(failed)
    told += [f"{refused} of {len(verdicts)} layouts are refused"] * bool(refused)
    if not failed:
        told = [f"all {len(verdicts) - refused} others pass" if refused else "all pass", *told]
    lines.append("; ".join(told))
    print_result(options, values, lambda: "\n".join(lines))
    return 0 if passed else 1


def run_bench(options: argparse.Namespace) -> int:
    from graticule.bench import Setting, run

    setting = Setting(
        say=say,
        bar=Bar,
        out=Path(options.out) if options.out else None,
        seeds=tuple(range(options.seeds)) if options.seed is None else (options.seed,),
    )
    result = run(options.name, setting)
    lines = [
        f"{row['what']:12} {_measured(row)}\n             {row['note']}" for row in result["rows"]
    ]
    print_result(options, result, lambda: "\n".join(lines))
    return 0


def _measured(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return "not measured"
    return (
        f"ours {row['ours']:10.4g}  against {row['against']:10.4g} {row['unit']}"
        f"  ratio {row['ratio']:.3f}  {_goal(row)}"
    )


def _goal(row: dict[str, Any]) -> str:
    if row["goal"] is None:
        return "no goal"
    sign, verdict = "<=" if row["at_most"] else ">=", "holds" if row["holds"] else "missed"
    if row["within"] is not None:
        return f"goal {row['goal']:g} +- {row['within']:g}  {verdict}"
    return f"goal {sign} {row['goal']:g}  {verdict}"


def _config(options: argparse.Namespace) -> Any:
    from graticule.config import override
    from graticule.recipes import recipe

    return override(recipe(options.recipe), options.set)


def _bytes(number: int) -> str:
    return f"{number / 2**20:.2f} MiB" if number >= 2**17 else f"{number / 2**10:.1f} KiB"


def _flop(number: float) -> str:
    return f"{number / 1e12:,.2f} TFLOP" if number >= 1e11 else f"{number / 1e9:,.3f} GFLOP"


def _resumed(out: Path, asked: Any, settings: list[str]) -> Any:
    """The run's own configuration with `settings` on top: what was set at its start stays set."""
    from graticule.config import override
    from graticule.recipes import recipe

    own = recipe(str(out / "config.json"))
    if own.name != asked.name:
        raise ValueError(f"{out} is a run of {own.name}, not of {asked.name}; name that recipe")
    return override(own, settings)


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _pair(text: str, option: str = "--units") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        what = "VARIABLE=UNITS" if option == "--units" else "FAULT=POLICY"
        raise ValueError(f"{option} {text}: write {what}")
    return name, value


def _levels(text: str | None) -> list[float] | Literal["all"] | None:
    """Numbers, `all`, or the levels of a recipe's channels."""
    from graticule.recipes import RECIPES, recipe

    if text is None or text == "all":
        return text  # type: ignore[return-value]
    if text in RECIPES or text.endswith(".json"):
        data = recipe(text).data
        channels = (*data.prognostic, *data.diagnostic, *data.forcing)
        levels = [float(name.split("@")[1]) for name in channels if "@" in name]
        if not levels:
            raise ValueError(f"--levels {text}: no channel of this recipe has a level")
        return list(dict.fromkeys(levels))
    try:
        return [float(part) for part in _names(text)]
    except ValueError:
        raise ValueError(
            f"--levels {text}: write numbers a,b,c, `all`, or a recipe ({', '.join(RECIPES)})"
        ) from None


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit()):
        raise ValueError(f"--part {text}: write I/N, for instance 1/32")
    return int(part), int(parts)


def _chunk(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        channels, rows = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--chunk {text}: write CHANNELS,ROWS, for instance 93,32") from None
    if channels < 1 or rows < 1:
        raise ValueError(f"--chunk {text}: both must be at least 1")
    return channels, rows
