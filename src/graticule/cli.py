"""The command line. Only this module draws bars and prints; everything else logs or returns."""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graticule import __version__

Command = Callable[[argparse.Namespace], Any]


class _Parser(argparse.ArgumentParser):
    """Help opens with examples that can be pasted; an unusable argument is one line."""

    examples: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An option is written out: `--se` is a typing error, not `--set`.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def format_help(self) -> str:
        shown = "\n".join(f"  {example}" for example in self.examples)
        return f"Examples:\n{shown}\n\n{super().format_help()}"

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 (a check that fails), 2 (the user can put it right) or
    130 (stopped by SIGINT or SIGTERM)."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(levelname)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("graticule").setLevel(logging.INFO)
    try:
        with _terminated():
            return options.run(options) or 0
    except BrokenPipeError:
        # Whoever read our output has enough; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        lines = (line.strip() for line in str(error).splitlines())
        print(f"graticule: error: {' '.join(lines)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"graticule: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM ends what runs in this block as Ctrl-C does: files closed, children ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("SIGTERM: stopped")

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _demo(options: argparse.Namespace) -> int:
    from graticule.demo import run_demo

    summary = run_demo(
        Path(options.out), Path(options.data), settings=options.set, bar=_Bar, say=_say
    )
    text = summary.pop("text")
    _print(options, summary, lambda: text)
    return 0


def _data_demo(options: argparse.Namespace) -> int:
    from graticule.data.demo import write_demo_store
    from graticule.data.planet import Planet

    planet = Planet(
        num_runs=options.runs, samples_per_run=options.samples, seed=options.seed,
        num_lat=options.lat, num_lon=options.lon, dt_seconds=options.dt_seconds,
    )  # fmt: skip
    out = options.out or ("data/planet-coast.zarr" if options.coast else "data/planet.zarr")
    with _Bar("simulating", "samples") as bar:
        store = write_demo_store(
            out, planet, coast=options.coast, workers=options.workers, progress=bar
        )
    _print_store(options, store)
    return 0


def _data_ingest(options: argparse.Namespace) -> int:
    from graticule.data.ingest import ingest
    from graticule.data.statistics import compute

    roles: dict[str, Any] = {}
    for role in ("forcing", "static", "diagnostic"):
        roles |= {name: role for name in _names(getattr(options, role))}
    splits = {
        split: _names(getattr(options, split))
        for split in ("train", "validation", "test")
        if getattr(options, split)
    }
    with _Bar("ingesting", "steps") as bar:
        store = ingest(
            [Path(source) for source in options.sources],
            Path(options.out),
            variables=_names(options.variables) or None,
            roles=roles,
            units=dict(_pair(unit) for unit in options.units),
            packing=options.packing,
            inner_chunk=_chunk(options.chunk),
            splits=splits,
            time=options.time,
            allow_missing_chunks=options.allow_missing_chunks,
            progress=bar,
        )
    if "train" in splits:
        with _Bar("statistics", "times") as bar:
            compute(store, store.times.within(splits["train"]).nonzero()[0], bar).save(store)
    _print_store(options, store)
    return 0


def _data_check(options: argparse.Namespace) -> int:
    from graticule.data.check import check
    from graticule.data.store import Store

    with _Bar("checking", "times") as bar:
        report = check(Store(options.store), progress=bar)
    _print(options, report.to_json(), lambda: "\n".join(report.lines()))
    return 0 if report.ok else 1


def _data_stats(options: argparse.Namespace) -> int:
    from graticule.data.statistics import compute
    from graticule.data.store import Store

    store = Store(options.store)
    ranges = _names(options.train) or store.splits.get("train")
    if not ranges:
        raise ValueError(f"{store.path} declares no train split: give --train first/last")
    with _Bar("statistics", "times") as bar:
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
    _print(options, values, lambda: "\n".join([head, *lines]))
    return 0


def _info(options: argparse.Namespace) -> int:
    from graticule.assemble import describe, shapes_of_config

    config = _config(options)
    info = describe(config, shapes_of_config(config))
    text = [
        f"{info['recipe']}: {info['parameters']:,} parameters",
        f"grid {_by(info['grid'])}, padded {_by(info['padded_shape'])}, {info['tokens']:,} tokens"
        f" in {info['windows']:,} windows, {info['in_channels']} channels in,"
        f" {info['out_channels']} out",
        f"forward {info['forward_flops'] / 1e12:,.2f} TFLOP (2 per multiply-add): linears and"
        f" convolutions {info['forward_flops_dense'] / 1e12:,.2f}, attention"
        f" {info['forward_flops_attention'] / 1e12:,.2f}",
        f"training step, {info['leads']} lead(s): {info['step_flops'] / 1e12:,.2f} TFLOP a sample",
    ]
    _print(options, info, lambda: "\n".join(text))
    return 0


def _train(options: argparse.Namespace) -> int:
    from graticule.train.progress import read_metrics
    from graticule.train.trainer import train

    config = _config(options)
    out = Path(options.out or f"runs/{config.name}")
    with _Bar(f"training {config.name}", "steps") as bar:
        device = _device(options.device)
        last = train(config, out, resume=options.resume, device=device, progress=bar)
    line = read_metrics(out)[-1]
    values = {"run": str(out), "checkpoint": str(last), **line}
    loss = f", validation {line['validation_loss']:.5f}" if "validation_loss" in line else ""
    _print(options, values, lambda: f"{last}: step {line['step']}, loss {line['loss']:.5f}{loss}")
    return 0


def _forecast(options: argparse.Namespace) -> int:
    from graticule.tasks import forecast_from_run

    with _Bar("forecasting", "leads") as bar:
        result = forecast_from_run(
            Path(options.run_folder),
            Path(options.out) if options.out else None,
            starts=options.start,
            settings=options.set,
            device=_device(options.device),
            progress=bar,
        )
    _print(
        options,
        result,
        lambda: (
            f"{result['forecast']}: {result['num_starts']} starts x {result['leads']} leads,"
            f" {result['simulated_years_per_day']:,.0f} simulated years per day"
        ),
    )
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from graticule.tasks import evaluate_forecast

    base = Path(options.out or Path(options.forecast).with_suffix(".scores"))
    csv, json = (base.with_name(base.name + suffix) for suffix in (".csv", ".json"))
    for path in (csv, json):
        if path.exists() and not options.force:  # before hours of reading
            raise ValueError(f"{path} exists already: name others with --out, or give --force")
    with _Bar("scoring", "fields") as bar:
        scores = evaluate_forecast(
            Path(options.forecast), store=options.store, settings=options.set, progress=bar
        )
    scores.write_csv(csv, force=options.force)
    scores.write_json(json, force=options.force)
    _print(options, scores.to_dict(), scores.table)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from graticule.bench import run

    result = run(options.name, _say)
    lines = [
        f"{row['what']:12} ours {row['ours']:10.4g}  against {row['against']:10.4g} {row['unit']}"
        f"  ratio {row['ratio']:.3f}  goal {row['goal']:g}  {'holds' if row['holds'] else 'missed'}"
        f"\n             {row['note']}"
        for row in result["rows"]
    ]
    _print(options, result, lambda: "\n".join(lines))
    return 0


def _config(options: argparse.Namespace) -> Any:
    from graticule.config import override
    from graticule.recipes import recipe

    return override(recipe(options.recipe), options.set)


def _device(name: str | None) -> str | None:
    """`name`, if PyTorch can compute there."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here: {reason}") from None
    return name


class _Bar:
    """A progress bar on standard error, fed with (done, total[, metrics])."""

    def __init__(self, title: str, unit: str) -> None:
        self._title, self._unit = title, unit
        self._bar: Any = None

    def __enter__(self) -> "_Bar":
        return self

    def __call__(self, done: int, total: int, metrics: dict[str, Any] | None = None) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=total, initial=done - 1 if metrics else 0, desc=self._title,
                unit=" " + self._unit, file=sys.stderr, mininterval=0.5, dynamic_ncols=True,
            )  # fmt: skip
        if metrics:
            self._bar.set_postfix(loss=f"{metrics['loss']:.4f}", refresh=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(options: argparse.Namespace, values: Any, text: Callable[[], str]) -> None:
    print(json.dumps(values, indent=1) if options.json else text(), flush=True)


def _print_store(options: argparse.Namespace, store: Any) -> None:
    values = {
        "store": str(store.path), "fingerprint": store.fingerprint, "times": len(store.times),
        "first": str(store.times.date(0)), "last": str(store.times.date(len(store.times) - 1)),
        "grid": list(store.grid.shape), "channels": list(store.channels.names),
        "statics": list(store.statics.names), "splits": store.splits,
    }  # fmt: skip
    _print(
        options, values,
        lambda: f"{store.path}: {values['times']} times from {values['first']} to"
        f" {values['last']}, {_by(values['grid'])} points, {', '.join(store.channels.names)}",
    )  # fmt: skip


def _by(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--units {text}: write VARIABLE=UNITS")
    return name, value


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


def _build_parser() -> _Parser:
    parser = _Parser(prog="graticule", description=__import__("graticule").__doc__)
    parser.examples = (
        "graticule demo",
        "graticule info wenhai-medium --json",
        "graticule train demo --set train.steps=100 --out runs/first",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND",
                                     parser_class=_Parser)  # fmt: skip

    def add(
        group: Any, name: str, run: Command, summary: str, examples: Sequence[str],
        *, sets: bool = False,
    ) -> _Parser:  # fmt: skip
        command = group.add_parser(name, help=summary, description=summary)
        command.examples = examples
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.add_argument("--verbose", action="store_true", help="log what libraries say too")
        if sets:
            command.add_argument(
                "--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                help="change one value of the configuration; may be repeated",
            )  # fmt: skip
        return command

    demo = add(
        commands, "demo", _demo,
        "The whole path on the demo planet: data, training, fine-tuning, forecast, scores.",
        ("graticule demo", "graticule demo --out runs/longer --set train.steps=2000",
         "graticule demo --json"), sets=True,
    )  # fmt: skip
    demo.add_argument("--out", default="runs/demo", help="folder of the runs and results")
    demo.add_argument("--data", default="data/planet.zarr", help="the planet's store")

    data = commands.add_parser("data", help="Make, check and describe stores of fields.")
    data.examples = (
        "graticule data demo",
        "graticule data ingest winds.nc --out data/winds.zarr --train 1982/1989",
        "graticule data check data/planet.zarr",
    )
    kinds = data.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=_Parser)
    planet = add(
        kinds, "demo", _data_demo,
        "Simulate the demo planet (spherical shallow water) into a store.",
        ("graticule data demo", "graticule data demo --coast",
         "graticule data demo --runs 6 --samples 40 --out data/small.zarr"),
    )  # fmt: skip
    planet.add_argument("--out", help="the store (default data/planet[-coast].zarr)")
    planet.add_argument("--coast", action="store_true",
                        help="keep only cells over the sea of Earth's coastline")  # fmt: skip
    planet.add_argument("--runs", type=int, default=12)
    planet.add_argument("--samples", type=int, default=84, help="six-hourly samples of a run")
    planet.add_argument("--lat", type=int, default=48)
    planet.add_argument("--lon", type=int, default=96)
    planet.add_argument("--dt-seconds", type=float, default=360, metavar="SECONDS",
                        help="solver step; a finer grid needs a shorter one")  # fmt: skip
    planet.add_argument("--seed", type=int, default=0)
    planet.add_argument("--workers", type=int, help="processes (default: one a core)")

    ingest = add(
        kinds, "ingest", _data_ingest,
        "Bring NetCDF or Zarr fields on a latitude-longitude grid into a store.",
        ("graticule data ingest monthly_navy_winds.cdf --out data/winds.zarr --variables"
         " UWND,VWND --train 1982/1989 --validation 1990 --test 1991/1992",
         "graticule data ingest levitus_climatology.cdf --out data/levitus.zarr --time 1994-01-01",
         "graticule data ingest day1.nc day2.nc --out data/ocean.zarr --packing int16"
         " --forcing u10,v10"),
    )  # fmt: skip
    ingest.add_argument("sources", nargs="+", metavar="FILE")
    ingest.add_argument("--out", required=True, help="the store to write; never overwritten")
    ingest.add_argument("--variables", help="names to take, in order: a,b,c (default: all)")
    for role in ("forcing", "static", "diagnostic"):
        ingest.add_argument(f"--{role}", help=f"variables that are {role}: a,b")
    ingest.add_argument("--units", action="append", default=[], metavar="VARIABLE=UNITS",
                        help="convert a variable, for instance thetao=degC")  # fmt: skip
    ingest.add_argument("--packing", choices=("float32", "int16"), default="float32")
    ingest.add_argument("--chunk", metavar="CHANNELS,ROWS", help="what is read together")
    ingest.add_argument("--time", help="the date of fields without one")
    ingest.add_argument("--allow-missing-chunks", action="store_true",
                        help="take absent chunks of a Zarr source for fill values")  # fmt: skip
    for split in ("train", "validation", "test"):
        ingest.add_argument(f"--{split}", metavar="FIRST/LAST", help=f"times of the {split} split")

    check = add(
        kinds, "check", _data_check,
        "Check times, gaps, holes, ranges, lost chunks and statistics; exit code 1 on errors.",
        ("graticule data check data/planet.zarr", "graticule data check data/winds.zarr --json"),
    )  # fmt: skip
    check.add_argument("store")
    stats = add(
        kinds, "stats", _data_stats,
        "Compute means and standard deviations over the training times.",
        ("graticule data stats data/planet.zarr",
         "graticule data stats data/winds.zarr --train 1982/1989"),
    )  # fmt: skip
    stats.add_argument("store")
    stats.add_argument("--train", metavar="FIRST/LAST[,FIRST/LAST]",
                       help="default: the store's train split")  # fmt: skip

    info = add(
        commands, "info", _info, "Parameters, tokens, padded shape and FLOPs; allocates nothing.",
        ("graticule info demo",
         "graticule info wenhai-medium --json",
         "graticule info wenhai-small-globe --set model.window=8,12"), sets=True,
    )  # fmt: skip
    info.add_argument("recipe", metavar="RECIPE")

    train = add(
        commands, "train", _train, "Train or fine-tune.",
        ("graticule train demo", "graticule train demo --resume --set train.steps=2000",
         "graticule train demo-finetune --set train.start_from=runs/demo --out runs/tuned"),
        sets=True,
    )  # fmt: skip
    train.add_argument("recipe", metavar="RECIPE", help="a name, or a run's config.json")
    train.add_argument("--out", help="folder of the run (default runs/RECIPE)")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument("--device", help="of torch (default: a GPU if there is one)")

    forecast = add(
        commands, "forecast", _forecast, "Forecast from initial times of the run's store.",
        ("graticule forecast runs/demo", "graticule forecast runs/demo --start 2002-03-04T06:00"
         " --set forecast.leads=20 --out runs/one.nc",
         "graticule forecast runs/demo --set forecast.split=validation --out runs/val.zarr"),
        sets=True,
    )  # fmt: skip
    forecast.add_argument("run_folder", metavar="RUN", help="a run, or one of its checkpoints")
    forecast.add_argument("--start", action="append", default=[], metavar="DATE",
                          help="an initial time; may be repeated (default: the split)")  # fmt: skip
    forecast.add_argument("--out", help=".zarr or .nc (default RUN/forecast.zarr)")
    forecast.add_argument("--device", help="of torch (default: a GPU if there is one)")

    evaluate = add(
        commands, "evaluate", _evaluate,
        "Score a forecast beside persistence and climatology: table, CSV and JSON.",
        ("graticule evaluate runs/demo/forecast.zarr",
         "graticule evaluate runs/demo/forecast.zarr --set evaluate.region=170,-170,-30,30",
         "graticule evaluate runs/one.nc --store data/planet.zarr --out runs/one.scores"),
        sets=True,
    )  # fmt: skip
    evaluate.add_argument("forecast", metavar="FORECAST")
    evaluate.add_argument("--store", help="the truth (default: the store the run was trained on)")
    evaluate.add_argument("--out", help="name of the .csv and .json (default FORECAST.scores)")
    evaluate.add_argument("--force", action="store_true", help="write over earlier scores")

    bench = add(
        commands, "bench", _bench, "Measure: ours and a named baseline from one run.",
        ("graticule bench step", "graticule bench step --json"),
    )  # fmt: skip
    bench.add_argument("name", metavar="NAME")
    return parser


if __name__ == "__main__":
    sys.exit(main())
