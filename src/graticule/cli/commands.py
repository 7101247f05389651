"""What each command does: arguments to a call of the library, its result to `output`."""

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from graticule.cli.output import Bar, names_of, print_result, say


def run_demo(options: argparse.Namespace) -> int:
    from graticule.demo import run_demo

    try:
        summary = run_demo(
            Path(options.out), Path(options.data), settings=options.set, bar=Bar, say=say
        )
    except KeyboardInterrupt as stop:
        told, *_ = str(stop).partition("; --resume")
        raise KeyboardInterrupt(
            f"{told or 'stopped'}; the same command goes on from there"
        ) from stop
    text = summary.pop("text")
    print_result(options, summary, lambda: text)
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
            _print_run(options, out, last, config.train.leads)
    return 0


def _print_run(options: argparse.Namespace, out: Path, last: Path, leads: int) -> None:
    """leads: of a validation loss."""
    from graticule.train.profile import describe, read_profile
    from graticule.train.progress import read_metrics

    # A finished run that is resumed has nothing to add; its lines may even be gone.
    line = (read_metrics(out) or [{}])[-1]
    values = {"run": str(out), "checkpoint": str(last), **line}
    of = {"loss": len(line.get("lead_losses", [0])), "validation_loss": leads}
    told = ", ".join(
        f"{name.replace('_', ' ')} {line[name]:.5f}"
        + f" over {number} lead{'s' * (number > 1)}" * (len({*of.values()}) > 1)
        for name, number in of.items()
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
    from graticule.data.times import lead_in_words

    steps = f"{line['leads']} model step{'s' * (line['leads'] > 1)}"
    told = f"{steps} ({lead_in_words(line['lead_hours'])}): {line['checkpoint']}"
    if line["loss"] is None:
        return f"{told}, the rollout is not finite"
    ratio = line["mean_ratio"]
    ratio = "" if ratio is None else f", {ratio:.3f} of persistence's RMSE"
    return f"{told}, mean loss of a step {line['loss']:.5f}{ratio}"


def _leads(text: str | None) -> list[int]:
    try:
        return [int(part) for part in names_of(text)]
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
            members=options.members,
            progress=bar,
        )
    if not here.speaks:
        return 0
    record_stage(Path(result["forecast"]).parent, "forecast", result["seconds"])
    members = "" if result["members"] is None else f"{result['members']} members x "
    times = result["times_of_a_step"]
    print_result(
        options,
        result,
        lambda: (
            f"{result['forecast']}: {members}{result['num_starts']}"
            f" start{'s' * (result['num_starts'] > 1)} x {result['leads']} model"
            f" step{'s' * (result['leads'] > 1)}"
            f"{f' of {times} times each' * (times > 1)}\n{told(result)}"
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
        channels=names_of(options.channel),
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
    from graticule.verify import QUANTITIES, tolerance_of, verify

    config = _config(options)
    with Bar("verifying", "layouts") as bar:
        size, verdicts = verify(config, options.layouts, full=options.full, progress=bar)
    tolerance = tolerance_of(config)
    # What nobody asked for and the model cannot do is told, and is no failure.
    asked = [v for v in verdicts if options.layouts or not v.refused]
    passed = bool(asked) and all(verdict.passed for verdict in asked)
    values = {
        "recipe": config.name, "size": size, "full": options.full,
        "tolerance": tolerance, "passed": passed,
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
    told = [f"{failed} of {len(verdicts)} layouts differ by more than {tolerance:g}"] * bool(failed)
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


def _resumed(out: Path, asked: Any, settings: list[str]) -> Any:
    """The run's own configuration with `settings` on top: what was set at its start stays set."""
    from graticule.config import override
    from graticule.recipes import recipe

    own = recipe(str(out / "config.json"))
    if own.name != asked.name:
        raise ValueError(f"{out} is a run of {own.name}, not of {asked.name}; name that recipe")
    return override(own, settings)
