"""The arguments of every command, and help that opens with examples."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import graticule
from graticule.cli import commands
from graticule.cli import data as fields
from graticule.cli.info import run_info
from graticule.cli.plan import run_plan

Command = Callable[[argparse.Namespace], Any]


class Parser(argparse.ArgumentParser):
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


def build_parser() -> Parser:
    parser = Parser(prog="graticule", description=graticule.__doc__)
    parser.examples = (
        "graticule demo",
        "graticule info wenhai-medium --json",
        "graticule train demo --set train.steps=100 --out runs/first",
    )
    parser.add_argument("--version", action="version", version=graticule.__version__)
    top = parser.add_subparsers(dest="command", required=True, metavar="COMMAND",
                                     parser_class=Parser)  # fmt: skip

    def add(
        group: Any, name: str, run: Command, summary: str, examples: Sequence[str],
        *, sets: bool = False,
    ) -> Parser:  # fmt: skip
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
        top, "demo", commands.run_demo,
        "The whole path on the demo planet: data, training, fine-tuning, forecast, scores.",
        ("graticule demo", "graticule demo --out runs/longer --set train.steps=2000",
         "graticule demo --json"), sets=True,
    )  # fmt: skip
    demo.add_argument("--out", default="runs/demo", help="folder of the runs and results")
    demo.add_argument("--data", default="data/planet.zarr", help="the planet's store")

    data = top.add_parser("data", help="Make, check and describe stores of fields.")
    data.examples = (
        "graticule data demo",
        "graticule data ingest winds.nc --out data/winds.zarr --train 1982/1989",
        "graticule data check data/planet.zarr",
    )
    kinds = data.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=Parser)
    planet = add(
        kinds, "demo", fields.run_data_demo,
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

    ocean = add(
        kinds, "ocean", fields.run_data_ocean,
        "Simulate the forced ocean (tracers in a known flow) into a store.",
        ("graticule data ocean", "graticule data ocean --calendar julian --years 20",
         "graticule data ocean --lat 24 --lon 48 --years 3 --out data/small-ocean.zarr"),
    )  # fmt: skip
    ocean.add_argument("--out", default="data/ocean.zarr", help="the store; never overwritten")
    ocean.add_argument("--years", type=int, default=10, help="of 73 five-day steps")
    ocean.add_argument("--test-years", type=int, default=1, metavar="N",
                       help="of them, the last, for long forecasts (default 1)")  # fmt: skip
    ocean.add_argument("--calendar", choices=("noleap", "julian"), default="noleap",
                       help="julian: one six-day step in leap years")  # fmt: skip
    ocean.add_argument("--lat", type=int, default=48)
    ocean.add_argument("--lon", type=int, default=96)
    ocean.add_argument("--max-speed", type=float, default=1.0, metavar="M/S", help="of the flow")
    ocean.add_argument("--dt-seconds", type=float, default=43200, metavar="SECONDS",
                       help="step of the scheme; must divide a day")  # fmt: skip
    ocean.add_argument("--seed", type=int, default=0)
    ocean.add_argument("--workers", type=int, help="processes (default: one a core)")

    ingest = add(
        kinds, "ingest", fields.run_data_ingest,
        "Bring NetCDF or Zarr fields on a latitude-longitude grid into a store.",
        ("graticule data ingest monthly_navy_winds.cdf --out data/winds.zarr --variables"
         " UWND,VWND --train 1982/1989 --validation 1990 --test 1991/1992",
         "graticule data ingest levitus_climatology.cdf --out data/levitus.zarr --time 1994-01-01",
         "graticule data ingest glorys/*.nc --out data/glorys.zarr --levels wenhai-small"
         " --workers 8 --train 1993/2018",
         "graticule data ingest era5.zarr --out data/era5.zarr --drop-south-pole"
         " --part $SLURM_ARRAY_TASK_ID/32"),
    )  # fmt: skip
    ingest.add_argument("sources", nargs="+", metavar="FILE")
    ingest.add_argument(
        "--out", required=True, help="the store to write or, by the same command, to go on with"
    )
    ingest.add_argument(
        "--source", choices=("auto", "glorys12", "era5", "om4", "cf"), default="auto",
        help="what the files are (default: recognised)",
    )  # fmt: skip
    ingest.add_argument(
        "--variables", help="names to take, in order: a,b@level,c (default: the source's)"
    )
    ingest.add_argument(
        "--levels", help="a,b,c (to 1 %%), all, or those of a recipe (default: the source's)"
    )
    for role in ("forcing", "static", "diagnostic"):
        ingest.add_argument(f"--{role}", help=f"variables that are {role}: a,b")
    ingest.add_argument("--units", action="append", default=[], metavar="VARIABLE=UNITS",
                        help="convert a variable, for instance thetao=degC")  # fmt: skip
    ingest.add_argument(
        "--packing", choices=("source", "float32", "int16"), default="source",
        help="source (default): the files' own int16 as they are, float32 where there are others;"
        " int16: others are rounded over their range, for which all is read twice",
    )  # fmt: skip
    ingest.add_argument(
        "--chunk", metavar="CHANNELS,ROWS[,COLUMNS]",
        help="what is read together (default: all channels and columns of 32 rows); cut columns for"
        " stripes of longitudes, channels for mesh.tensor of BEAST",
    )  # fmt: skip
    ingest.add_argument("--time", help="the date of fields without one")
    ingest.add_argument("--drop-south-pole", action="store_true",
                        help="leave the row at 90 S out: 721 rows become 720")  # fmt: skip
    ingest.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    ingest.add_argument(
        "--part", metavar="I/N", help="write part I (1 to N) of the times; the last to end finishes"
    )
    ingest.add_argument("--allow-missing-chunks", action="store_true",
                        help="take absent chunks of a Zarr source for fill values")  # fmt: skip
    for split in ("train", "validation", "test"):
        ingest.add_argument(f"--{split}", metavar="FIRST/LAST", help=f"times of the {split} split")

    check = add(
        kinds, "check", fields.run_data_check,
        "Check times, gaps, holes, ranges, lost chunks and statistics; exit code 1 on errors.",
        ("graticule data check data/planet.zarr", "graticule data check data/winds.zarr --json",
         "graticule data check data/ocean.zarr --policy gap=error,hole=error"),
    )  # fmt: skip
    check.add_argument("store")
    check.add_argument(
        "--policy", metavar="FAULT=POLICY[,...]",
        help="error or drop-window, for gap and hole (default: drop-window)",
    )  # fmt: skip
    stats = add(
        kinds, "stats", fields.run_data_stats,
        "Compute means and standard deviations over the training times.",
        ("graticule data stats data/planet.zarr",
         "graticule data stats data/winds.zarr --train 1982/1989"),
    )  # fmt: skip
    stats.add_argument("store")
    stats.add_argument("--train", metavar="FIRST/LAST[,FIRST/LAST]",
                       help="default: the store's train split")  # fmt: skip

    info = add(
        top, "info", run_info,
        "Parameters, tokens, padded shape and FLOPs; allocates nothing. Without a recipe: all"
        " recipes.",
        ("graticule info", "graticule info demo",
         "graticule info wenhai-medium --json",
         "graticule info wenhai-small-globe --set model.window=8,12"), sets=True,
    )  # fmt: skip
    info.add_argument("recipe", metavar="RECIPE", nargs="?",
                      help="a name, or a run's config.json; none: all there are")  # fmt: skip

    plan = add(
        top, "plan", run_plan,
        "What a training step will hold and the plan that keeps it within a budget; needs no"
        " accelerator and no other process.",
        ("graticule plan demo-finetune --device cpu --budget 30MiB",
         "graticule plan wenhai-small --set mesh.window=2 --set train.leads=10 --device h100-80"
         " --out plans/small",
         "graticule plan samudra-quarter-degree --device a100-80 --devices 1,2,4,8",
         "graticule plan wenhai-small --set train.leads=10 --fit width --devices 1,2,4,8 --json"),
        sets=True,
    )  # fmt: skip
    plan.add_argument("recipe", metavar="RECIPE", help="a name, or a run's config.json")
    plan.add_argument("--ranks", type=int, metavar="N",
                      help="processes in all (default: mesh.* with one data rank)")  # fmt: skip
    plan.add_argument("--device", default="h100-80", metavar="NAME",
                      help="whose memory and rates (default h100-80); cpu is measured")  # fmt: skip
    plan.add_argument("--budget", metavar="SIZE",
                      help="such as 40GiB (default: 0.87 of the device's memory)")  # fmt: skip
    plan.add_argument("--mode", choices=("best", "paper", "full", "simple", "none"),
                      help="as memory.mode")  # fmt: skip
    plan.add_argument("--no-offload", action="store_true", help="no boundaries on the host")
    plan.add_argument("--fit", choices=("width",),
                      help="the largest model.width that fits, heads in proportion")  # fmt: skip
    plan.add_argument("--devices", metavar="N,N,...",
                      help="a table: what each number of devices needs, in its best layout; with"
                      " --fit: what fits where all share a sample")  # fmt: skip
    plan.add_argument("--out", metavar="FOLDER", help="for plan.json and a picture of the step")

    train = add(
        top, "train", commands.run_train, "Train or fine-tune.",
        ("graticule train demo --out runs/first",
         "graticule train demo --out runs/first --resume --set train.steps=400",
         "graticule train demo-finetune --set train.start_from=runs/first --out runs/tuned",
         "graticule train demo --profile 5 --set train.steps=12 --out runs/profiled"),
        sets=True,
    )  # fmt: skip
    train.epilog = (
        "On several processes: torchrun --nproc-per-node 4 -m graticule train ..., or"
        " srun --ntasks 4 graticule train ...; mesh.* says how they share the work."
    )
    train.add_argument("recipe", metavar="RECIPE", help="a name, or a run's config.json")
    train.add_argument("--out", help="folder of the run (default runs/RECIPE)")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument("--device", help="of torch (default: a GPU if there is one)")
    train.add_argument("--budget", metavar="SIZE",
                       help="of a step's memory, such as 40GiB; as memory.budget")  # fmt: skip
    train.add_argument("--profile", type=int, metavar="N",
                       help="show where the time and memory of N steps went")  # fmt: skip

    adopt = add(
        top, "adopt", commands.run_adopt,
        "Make a run of published Samudra weights, for forecasts and to train on.",
        ("graticule adopt samudra ema_ckpt.pt --set data.store=data/om4.zarr --out runs/published",
         "graticule adopt samudra-1 weights.safetensors --set data.store=data/om4.zarr",
         "graticule adopt samudra ckpt.pt --set model.norm=instance --out runs/fine"),
        sets=True,
    )  # fmt: skip
    adopt.add_argument("recipe", metavar="RECIPE", help="a name, or a run's config.json")
    adopt.add_argument("file", metavar="FILE", help=".safetensors, or a checkpoint of torch")
    adopt.add_argument("--out", help="folder of the run (default runs/RECIPE)")

    validate = add(
        top, "validate", commands.run_validate,
        "Roll a run's checkpoints out over its validation split, apart from training.",
        ("graticule validate runs/first --leads 5,20",
         "graticule validate runs/first --follow --device cpu",
         "graticule validate runs/first --starts 64 --json"),
        sets=True,
    )  # fmt: skip
    validate.epilog = (
        "Lines go to RUN/validation.jsonl: by horizon the loss, RMSE by channel, and its ratio to"
        " persistence. On several processes as train."
    )
    validate.add_argument("run_folder", metavar="RUN", help="a run's folder")
    validate.add_argument("--leads", metavar="N,N,...",
                          help="horizons, in model steps (default: train.leads and"
                          " forecast.leads)")  # fmt: skip
    validate.add_argument("--starts", type=int, default=16, metavar="N",
                          help="initial times at most, evenly spaced (default 16)")  # fmt: skip
    validate.add_argument("--follow", action="store_true",
                          help="wait for checkpoints until the run's last step")  # fmt: skip
    validate.add_argument("--device", help="of torch (default: a GPU if there is one)")

    forecast = add(
        top, "forecast", commands.run_forecast, "Forecast from initial times of the run's store.",
        ("graticule forecast runs/first", "graticule forecast runs/first --start 2001-12-10T06:00"
         " --set forecast.leads=20 --out runs/one.nc",
         "graticule forecast runs/first --set forecast.split=validation --out runs/val.zarr",
         "graticule forecast runs/first --set forecast.leads=700 --out runs/long.zarr --resume",
         "graticule forecast runs/ensemble --members 32"),
        sets=True,
    )  # fmt: skip
    forecast.add_argument("run_folder", metavar="RUN", help="a run, or one of its checkpoints")
    forecast.add_argument("--start", action="append", default=[], metavar="DATE",
                          help="an initial time; may be repeated (default: the split)")  # fmt: skip
    forecast.add_argument("--members", type=int, metavar="N",
                          help="of an ensemble, where weights or norms' noise are drawn (default:"
                          " bayes.members); shared among processes as initial times are, and member"
                          " 0, 1, ... the same however many there are")  # fmt: skip
    forecast.add_argument("--out", help=".zarr or .nc (default RUN/forecast.zarr)")
    forecast.add_argument("--resume", action="store_true",
                          help="go on with one that was stopped (Zarr), on any layout")  # fmt: skip
    forecast.add_argument("--device", help="of torch (default: a GPU if there is one)")

    evaluate = add(
        top, "evaluate", commands.run_evaluate,
        "Score a forecast beside persistence and climatology: table, CSV and JSON.",
        ("graticule evaluate runs/first/forecast.zarr",
         "graticule evaluate runs/first/forecast.zarr --force --set"
         " evaluate.region=170,-170,-30,30",
         "graticule evaluate runs/one.nc --store data/planet.zarr --out runs/one.scores",
         "graticule evaluate runs/many.zarr --set 'evaluate.thresholds=u>10,h<900'"),
        sets=True,
    )  # fmt: skip
    evaluate.add_argument("forecast", metavar="FORECAST")
    evaluate.add_argument(
        "--store", help="the truth (default: the store the forecast started from)"
    )
    evaluate.add_argument("--out", help="name of the .csv and .json (default FORECAST.scores)")
    evaluate.add_argument("--force", action="store_true", help="write over earlier scores")

    report = add(
        top, "report", commands.run_report,
        "One HTML file on a run: what ran, losses, scores, spectra, maps, time, memory.",
        ("graticule report runs/first", "graticule report runs/tuned --compare"
         " pretrained=runs/first --out tuned.html",
         "graticule report runs/first --channel u,h --init 2001-12-10T06"),
    )  # fmt: skip
    report.add_argument("run_folder", metavar="RUN",
                        help="a run's folder, or one with a report.json")  # fmt: skip
    report.add_argument("--out", metavar="FILE", help="default RUN/report.html")
    report.add_argument("--forecast", metavar="PATH", help="default RUN/forecast.zarr")
    report.add_argument("--store", help="the truth, if it is no longer where it was")
    report.add_argument("--compare", action="append", default=[], metavar="LABEL=RUN",
                        help="another run's scores beside this one's; may be repeated")  # fmt: skip
    report.add_argument("--channel", metavar="A,B",
                        help="channels with maps and spectra (default: four at most)")  # fmt: skip
    report.add_argument("--init", metavar="DATE", help="initial time of the maps (default: first)")
    report.add_argument("--force", action="store_true",
                        help="score again, in place of the scores that are there")  # fmt: skip

    verify = add(
        top, "verify", commands.run_verify,
        "Whether a recipe's model gives the same numbers on every layout: each runs in float64 on"
        " local processes and is compared with one process.",
        ("graticule verify demo", "graticule verify wenhai-small --json",
         'graticule verify demo --layouts "window=4" "window=2,sequence=2,weights=sharded"'),
        sets=True,
    )  # fmt: skip
    verify.add_argument("recipe", metavar="RECIPE", help="a name, or a run's config.json")
    verify.add_argument("--layouts", nargs="+", default=[], metavar="KEY=VALUE,...",
                        help="keys of the mesh section; default: of all kinds")  # fmt: skip
    verify.add_argument("--full", action="store_true",
                        help="the recipe's own size instead of a reduced one")  # fmt: skip

    bench = add(
        top, "bench", commands.run_bench, "Measure: ours and a named baseline from one run.",
        ("graticule bench step --json", "graticule bench loader",
         "graticule bench skill --seeds 3 --out runs/bench-skill"),
    )  # fmt: skip
    bench.add_argument("name", metavar="NAME")
    bench.add_argument("--out", help="folder for what a bench makes; one that trains goes on there")
    bench.add_argument("--seeds", type=int, default=1, help="how many seeds a bench trains with")
    bench.add_argument("--seed", type=int, help="only this one seed")
    return parser
