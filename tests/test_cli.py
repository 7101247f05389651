"""The command line: what it prints where, its exit codes, and whole runs through `main`."""

import argparse
import csv
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from children import in_a_child
from graticule import cli
from graticule.bench import BENCHES
from graticule.cli import commands, main, output, parser
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.recipes import RECIPES
from graticule.train.progress import read_metrics
from small_store import write_store

SMALL = [
    "data.grid=none",
    "data.prognostic=",
    "model.patch=2", "model.window=2,4", "model.width=16", "model.depth=1", "model.heads=2",
    "model.norm_groups=4", "train.steps=2", "train.batch=2", "train.warmup_steps=0",
    "train.roll_longitude=false", "evaluate.climatology=all", "forecast.leads=2",
]  # fmt: skip


def sets(*settings: str) -> list[str]:
    return [part for setting in (*SMALL, *settings) for part in ("--set", setting)]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from stores and runs that lie where the tests are started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """24 days of two prognostic channels and a forcing, with statistics."""
    made = write_store(tmp_path_factory.mktemp("data") / "store")
    compute(made, np.arange(16)).save(made)
    return made


@pytest.fixture(scope="module")
def trained(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", "demo", "--out", str(out), *sets(f"data.store={store.path}")]) == 0
    return out


@pytest.fixture(scope="module")
def forecast(trained: Path) -> Path:
    out = trained.parent / "f.zarr"
    assert main(["forecast", str(trained), "--out", str(out)]) == 0
    return out


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error that comes with exit code 2."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith(("INFO", "WARNING"))]
    assert len(lines) == 1, err
    assert "error: " in lines[0]
    return lines[0]


# Help


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


COMMANDS = {p.prog: p for p in parsers(cli.build_parser())}


def test_every_command_is_there() -> None:
    assert set(COMMANDS) == {
        "graticule",
        "graticule data",
        *(f"graticule data {kind}" for kind in ("demo", "ocean", "ingest", "check", "stats")),
        *(
            f"graticule {name}"
            for name in (
                "demo",
                "info",
                "plan",
                "train",
                "validate",
                "adopt",
                "forecast",
                "evaluate",
                "report",
                "verify",
                "bench",
            )
        ),
    }


@pytest.mark.parametrize("prog", COMMANDS)
def test_help_opens_with_examples_that_run(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*prog.split()[1:], "--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Examples:"
    shown = lines[1 : lines.index("")]
    assert len(shown) >= 2
    for example in shown:
        words = shlex.split(example)
        assert " ".join(words).startswith(prog)
        options = cli.build_parser().parse_args(words[1:])
        assert callable(options.run)
        if hasattr(options, "recipe"):
            assert options.recipe in {None, *RECIPES}
        if options.command == "bench":
            assert options.name in BENCHES
        # Settings of the examples are keys that exist, with values that they hold.
        if getattr(options, "set", []):
            from graticule.config import override
            from graticule.recipes import recipe

            override(recipe(getattr(options, "recipe", None) or "demo"), options.set)


def test_examples_of_info_run_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    for example in COMMANDS["graticule info"].examples:  # type: ignore[attr-defined]
        assert main(shlex.split(example)[1:]) == 0
        assert "parameters" in capsys.readouterr().out


# Memory plans


KEYS = {
    "peak_gib", "peak_owner", "base_gib", "extra_compute", "offload_gib", "mode", "leads",
    "feasible", "least_budget_gib", "cpu_seconds",
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    command = ["plan", "demo", "--json", *sets("data.grid=16,32", "data.prognostic=u,v,h")]
    assert main([*command, "--set", "train.leads=2", "--set", "data.store=", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_needs_no_store_and_says_where_each_gib_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "--out", str(tmp_path / "plan"))
    assert set(found) >= KEYS
    assert found["feasible"] is True
    assert (found["leads"], found["mode"]) == (2, "best")
    assert set(found["offload_gib"]) == {"sampling", "transformer"}
    assert found["peak_gib"] == pytest.approx(sum(found["owners_gib"].values()))
    assert found["peak_owner"] == max(found["owners_gib"], key=found["owners_gib"].get)
    assert found["base_gib"] < found["least_budget_gib"] <= found["peak_gib"]
    # Without a budget: 0.87 of the device's memory.
    assert found["budget_gib"] == pytest.approx(0.87 * 85_520_809_984 / 2**30)
    picture = (tmp_path / "plan" / "memory-plan.svg").read_text()
    assert ">forward<" in picture
    assert ">backward<" in picture
    stored = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert stored["peak"] / 2**30 == found["peak_gib"]
    assert stored["plan"] == found["plan"]


@pytest.mark.slow
def test_a_plan_keeps_to_its_budget_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    least = planned(capsys, "--no-offload")["least_budget_gib"]
    budget = 1.3 * least * 2**30
    found = planned(capsys, "--no-offload", "--budget", f"{budget:.0f}B")
    assert found["peak_gib"] * 2**30 <= budget
    assert found["offload_gib"] == {"sampling": 0, "transformer": 0}
    paper = planned(capsys, "--no-offload", "--mode", "paper")
    assert paper["mode"] == "paper"
    assert paper["least_budget_gib"] >= least


def test_a_budget_that_cannot_be_met_is_refused_with_json_or_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", "demo", *sets("data.grid=16,32", "data.prognostic=u,v,h", "data.store=")]
    told = refused([*command, "--budget", "100KiB"], capsys)
    assert "a budget of 102400 bytes cannot be met: the least that a plan was found for" in told
    assert main([*command, "--budget", "100KiB", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"] is False
    assert found["peak_gib"] == found["least_budget_gib"] > found["budget_gib"]


UNET = ("samudra-mini", "--set", "model.widths=4,6", "--set", "model.dilations=1,2,2,2,2", "--set",
        "train.leads=1", "--set", "data.grid=16,32")  # fmt: skip


@pytest.mark.slow
def test_each_number_of_devices_is_told_a_layout_and_what_it_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    one = ("--set", "train.batch=1", "--mode", "none")
    assert main(["plan", *UNET, *one, "--json", "--devices", "1,2"]) == 0
    alone, two = json.loads(capsys.readouterr().out)["rows"]
    assert (alone["devices"], alone["layout"]) == (1, "alone")
    assert (two["devices"], two["layout"]) == (2, "window=2"), "of one sample they share the field"
    assert two["peak_gib"] < alone["peak_gib"]
    single = ["plan", *UNET, *one, "--ranks", "2", "--set", "mesh.window=2"]
    assert main([*single, "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert named["offload_gib"] == {"boundaries": 0}, "a U-Net has no Transformer"
    for key in ("peak_gib", "extra_compute"):
        assert two[key] == named[key]
    assert two["least_gib"] == named["least_budget_gib"]
    # What does not fit says what it needs.
    assert main(["plan", *UNET, *one, "--devices", "1", "--budget", "10KiB"]) == 0
    text = capsys.readouterr().out
    assert "none fits" in text
    assert f"{alone['least_gib'] * 1024:.2f} MiB" in text


def test_of_layouts_the_one_that_fits_and_recomputes_and_exchanges_least_is_taken() -> None:
    from graticule.cli.plan import worth

    def row(least: float, seconds: float | None, data: int) -> dict[str, Any]:
        feasible = seconds is not None
        return {"feasible": feasible, "least_gib": least, "extra_seconds": seconds,
                "mesh": {"data": data}}  # fmt: skip

    rows = [row(9, None, 1), row(8, None, 2), row(7, 0.2, 1), row(6, 0.1, 1), row(6, 0.1, 2)]
    assert min(rows, key=worth) is rows[4]
    assert min(rows[:4], key=worth) is rows[3]
    assert min(rows[:2], key=worth) is rows[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "1", "--ranks", "2"], "--ranks says one: leave one away"),
        (["--devices", "1", "--out", "plans"], "write nothing: leave --out away"),
        (["--devices", "3", "--set", "mesh.tensor=2"], "2 ranks share each"),
        (["--devices", "1,zero"], "write numbers, such as 1,2,4,8"),
    ],
)
def test_devices_that_make_no_table_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(["plan", *UNET, *arguments], capsys)


@pytest.mark.slow
def test_the_widest_model_fits_and_a_wider_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = ("--set", "train.leads=1", "--budget", "900KiB")
    row = planned(capsys, "--fit", "width", "--devices", "1", *one)["rows"][0]
    assert row["least_gib"] <= 900 / 2**20
    # Heads as wide as the recipe's.
    assert row["width"] == 8 * row["heads"]
    wider = ("--set", f"model.width={row['width'] + 8}", "--set", f"model.heads={row['heads'] + 1}")
    command = ["plan", "demo", *sets("data.grid=16,32", "data.prognostic=u,v,h", "data.store=")]
    assert "cannot be met" in refused([*command, *one, *wider], capsys)


def test_a_budget_changes_no_number_of_a_training_and_its_plan_is_stored(
    store: Store, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "planned"
    settings = sets(f"data.store={store.path}", "train.leads=2")
    assert main(["train", "demo", "--out", str(tmp_path / "free"), *settings]) == 0
    assert not (tmp_path / "free" / "plan.json").exists()
    capsys.readouterr()
    assert main(["plan", "demo", *settings, "--device", "cpu", "--json"]) == 0
    least = json.loads(capsys.readouterr().out)["least_budget_gib"]
    budget = f"{1.02 * least * 2**30:.0f}B"
    assert main(["train", "demo", "--out", str(out), "--budget", budget, *settings]) == 0
    told = json.loads((out / "plan.json").read_text())
    assert told["budget"] == int(budget[:-1]) >= told["peak"]
    actions = {s[2] for lead in told["plan"]["leads"] for s in lead["segments"]}
    assert actions - {"keep"}
    free, planned = read_metrics(tmp_path / "free"), read_metrics(out)
    for key in ("loss", "lead_losses", "gradient_norm"):
        assert [line[key] for line in planned] == [line[key] for line in free]
    # Stored settings hold when it goes on; its plan is used again as it is.
    (out / "plan.json").write_text(json.dumps({**told, "words": ["as it was"]}))
    resume = ["train", "demo", "--out", str(out), "--resume"]
    assert main([*resume, "--set", "train.steps=3"]) == 0
    again = json.loads((out / "plan.json").read_text())
    assert again == {**told, "words": ["as it was"]}
    # Another budget: another plan.
    assert main([*resume, "--set", "train.steps=4", "--set", "memory.budget=1GiB"]) == 0
    wide = json.loads((out / "plan.json").read_text())
    assert wide["budget"] == 2**30
    assert wide["peak"] > told["budget"]


def test_what_a_training_moves_to_a_disk_changes_no_number(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = sets(f"data.store={store.path}", "train.leads=2", "memory.mode=paper")
    (tmp_path / "away").mkdir()
    away = sets(f"memory.folder={tmp_path / 'away'}")
    least = []
    for more in ([], away):
        assert main(["plan", "demo", *settings, *more, "--device", "cpu", "--json"]) == 0
        least.append(json.loads(capsys.readouterr().out)["least_budget_gib"])
    assert least[1] < least[0], "in a CPU's own memory nothing is away"
    budget = ["--budget", f"{least[1] * 2**30:.0f}B"]
    assert main(["train", "demo", "--out", str(tmp_path / "a"), *settings, *away, *budget]) == 0
    assert main(["train", "demo", "--out", str(tmp_path / "b"), *settings]) == 0
    told = [json.loads((tmp_path / run / "plan.json").read_text()) for run in "ab"]
    moved = [sum(each["offload"].values()) > 0 for each in told]
    assert moved == [True, False]
    moved, kept = (read_metrics(tmp_path / run) for run in "ab")
    for key in ("loss", "lead_losses", "gradient_norm"):
        assert [line[key] for line in moved] == [line[key] for line in kept]


def test_a_training_that_cannot_keep_to_its_budget_never_starts(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "refused"
    command = ["train", "demo", "--out", str(out), *sets(f"data.store={store.path}")]
    told = refused([*command, "--budget", "10KiB"], capsys)
    assert "cannot be met" in told
    assert not out.exists()
    assert "write a size above 0" in refused([*command, "--budget", "tiny"], capsys)


# One line and exit code 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["trian", "demo"], "invalid choice: 'trian'"),
        (["train"], "required: RECIPE"),
        (["train", "demo", "--se", "train.steps=2"], "unrecognized arguments: --se"),
        (["train", "dem"], "no recipe 'dem'; did you mean demo"),
        (["train", "demo", "--set", "train.stepz=2"], "did you mean train.steps?"),
        (["train", "demo", "--set", "trian.steps=2"], "did you mean train"),
        (["train", "demo", "--set", "train.steps"], "write section.key=value"),
        (["train", "demo", "--set", "train.steps=many"], "train.steps='many'"),
        (["train", "demo", "--set", "train.steps=0"], "train.steps=0 must be at least 1"),
        (["train", "demo", "--set", "mesh.window=2"], "2 processes, and 1 was started: torchrun"),
        (["info", "demo", "--set", "data.grid=none"], "data/planet.zarr is no store"),
        (
            ["info", "demo", "--set", "data.store=", "--set", "data.grid=none"],
            "set data.store=PATH, or data.grid=LAT,LON",
        ),
        (["data", "check", "none.zarr"], "none.zarr is no store"),
        (["data", "stats", "none.zarr"], "none.zarr is no store"),
        (["data", "demo", "--lat", "8"], "need at least 16 latitudes"),
        (["data", "demo", "--runs", "2"], "train, validation and test need one each"),
        (["data", "demo", "--runs", "two"], "invalid int value: 'two'"),
        (["data", "demo", "--dt-seconds", "1000"], "Take dt_seconds=372.414 or less"),
        (["data", "ingest", "none.nc", "--out", "x"], "none.nc"),
        (["data", "ingest", "n.nc", "--out", "x", "--units", "a"], "write VARIABLE=UNITS"),
        (["data", "ingest", "n.nc", "--out", "x", "--chunk", "3"], "write CHANNELS,ROWS"),
        (["forecast", "none"], "none holds no complete checkpoint"),
        (["evaluate", "none.zarr"], "none.zarr: no forecast there"),
        (
            ["bench", "stp"],
            "no bench 'stp'; there are beast-comm, consistency, ensembles, loader, memory-best,",
        ),
        (["demo", "--set", "train.stepz=2"], "did you mean train.steps?"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(arguments, capsys)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("name", ["gpu0", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = str(tmp_path / "out.zarr")
    for command in (["forecast", str(trained)], ["train", str(trained / "config.json")]):
        line = refused([*command, "--out", out, "--device", name], capsys)
        assert f"--device {name} cannot be used here: " in line
    assert not (tmp_path / "out.zarr").exists()


def test_a_corrupt_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train": {"steps": 4}')
    assert f"{path} is no configuration: Expecting" in refused(["train", str(path)], capsys)
    path.write_text('{"train": {"detach_evry": 4}}')
    assert "did you mean train.detach_every" in refused(["info", str(path)], capsys)


def test_a_message_of_several_lines_becomes_one(
    trained: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["train", "demo", "--resume", "--out", str(trained)]
    line = refused([*again, *sets(f"data.store={store.path}", "train.seed=4")], capsys)
    assert "train.seed: 0 in the run, now 4" in line
    assert "start a new run with train.start_from" in line


def test_a_resumed_run_keeps_what_was_set_at_its_start(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train = ["train", "demo", "--out", str(out)]
    assert main([*train, *sets(f"data.store={store.path}", "train.steps=3")]) == 0
    assert main([*train, "--resume", "--set", "train.steps=4"]) == 0
    settings = json.loads((out / "config.json").read_text())
    assert settings["train"]["steps"] == 4
    assert settings["model"]["width"] == 16
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4]
    capsys.readouterr()
    line = refused(["train", "winds", "--resume", "--out", str(out)], capsys)
    assert "is a run of demo, not of winds" in line


def test_a_resume_without_a_run_does_not_start_one(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        out = str(tmp_path / name)
        line = refused(
            ["train", "demo", "--resume", "--out", out, *sets(f"data.store={store.path}")], capsys
        )
        assert "holds no run to resume" in line
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_what_is_there_is_not_overwritten(
    trained: Path, store: Store, forecast: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    where = sets(f"data.store={store.path}")
    assert "exists already" in refused(["train", "demo", "--out", str(trained), *where], capsys)
    assert "exists already" in refused(["data", "demo", "--out", str(store.path)], capsys)
    line = refused(["forecast", str(trained), "--out", str(forecast)], capsys)
    assert "exists already and is not overwritten" in line
    line = refused(["forecast", str(trained), "--out", f"{store.path}/f.zarr"], capsys)
    assert "which the forecast is made from" in line
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


@pytest.mark.parametrize(
    ("date", "message"),
    [
        (
            "2003-04-01",
            "no time 2003-04-01 in the store, which runs from 2003-02-21 00:00:00 to"
            " 2003-03-16 00:00:00; the nearest is 2003-03-16 00:00:00",
        ),
        ("2003-02-29", "2003-02-29 is not in the standard calendar"),
        ("2003-03", "2003-03 stands for 16 times"),
        ("soon", "'soon' is no date: write 2003"),
        ("2003-03-16", "over 2 leads needs the forcing of 2003-03-17 00:00:00"),
    ],
)
def test_a_start_that_cannot_be_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], date: str, message: str
) -> None:
    out = tmp_path / "f.zarr"
    line = refused(["forecast", str(trained), "--start", date, "--out", str(out)], capsys)
    assert message in line
    assert not out.exists()


def test_a_forecast_says_which_weights_it_has_and_scores_whose_store_they_are_of(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.zarr"
    command = ["forecast", str(trained), "--start", "2003-02-25", "--out", str(out)]
    assert main([*command, "--set", "forecast.weights=last"]) == 0
    told = capsys.readouterr().err
    assert "with the last weights of" in told
    assert "step-00000002, step 2 of 2" in told
    other = write_store(tmp_path / "other", land=True)
    compute(other, np.arange(16)).save(other)
    assert main(["evaluate", str(out)]) == 0
    assert "another store" not in capsys.readouterr().err
    assert main(["evaluate", str(out), "--store", str(other.path), "--force"]) == 0
    assert f"{out} started from another store (fingerprint " in capsys.readouterr().err


def test_a_run_s_folder_is_no_forecast(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs"
    run.mkdir()
    shutil.copy(trained / "config.json", run)
    told = refused(["evaluate", str(run)], capsys)
    assert f"{run} is a run's folder: name a forecast, which `graticule forecast` makes" in told
    # Those of a folder of runs, as the demo's, lie one level down.
    for there in (run / "fine" / "forecast.zarr", run / "forecast-step-00000002.zarr"):
        there.mkdir(parents=True)
        told = refused(["evaluate", str(run)], capsys)
        assert f"{run} is a run's folder: name a forecast, such as {there}" in told


def test_info_without_a_recipe_tells_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines() if line[0] != " "] == [*RECIPES]
    assert max(map(len, told.splitlines())) <= 100
    assert main(["info", "--json"]) == 0
    assert all(json.loads(capsys.readouterr().out).values())


def test_losses_of_other_numbers_of_leads_are_told_apart(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = sets(
        f"data.store={store.path}", "train.leads=2", "train.leads_from=[[1,1],[9,2]]",
        "train.validate_every=2",
    )  # fmt: skip
    assert main(["train", "demo", "--out", str(tmp_path / "run"), *settings]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"loss 0\.\d+ over 1 lead, validation loss \d\.\d+ over 2 leads$", told.strip()
    )


def test_going_on_with_fewer_steps_than_there_are_changes_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = (run / "config.json").read_text()
    command = ["train", "demo", "--out", str(run), "--resume", "--set", "train.steps=1"]
    assert main(command) == 0
    told = capsys.readouterr().err
    assert f"train.steps=1, and {run} has 2 already: nothing is trained, and its" in told
    assert "cosine" not in told
    assert (run / "config.json").read_text() == before


def test_a_folder_that_may_not_be_written_to_is_named(
    trained: Path, store: Store, forecast: Path
) -> None:
    # Without the rights of root, which may write anywhere. A child without them may not be able
    # to read the interpreter's own files either: import what it needs before.
    importlib.import_module("concurrent.futures.process")
    importlib.import_module("graticule.demo")
    closed = trained.parent / "closed"
    closed.mkdir(mode=0o555)
    said = trained.parent / "said"
    said.mkdir()
    said.chmod(0o777)
    commands = {
        "train": ["train", "demo", "--out", f"{closed}/run", *sets(f"data.store={store.path}")],
        "forecast": ["forecast", str(trained), "--out", f"{closed}/f.zarr"],
        "evaluate": ["evaluate", str(forecast), "--out", f"{closed}/scores"],
        "demo": ["data", "demo", "--lat", "24", "--lon", "48", "--out", f"{closed}/planet.zarr"],
        "demo all": ["demo", "--out", f"{closed}/runs", "--data", str(store.path)],
    }
    for folder in [trained, *trained.parents][: len(trained.parents) - 1]:
        folder.chmod(0o755)
    for folder in [store.path, *store.path.parents][: len(store.path.parents) - 1]:
        folder.chmod(0o755)

    def work() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        for name, command in commands.items():
            with (said / name).open("w") as sys.stderr:
                code = main(command)
            (said / f"{name}.code").write_text(str(code))

    assert in_a_child(work) == 0
    for name in commands:
        lines = (said / name).read_text().splitlines()
        errors = [line for line in lines if line.startswith("graticule: error: ")]
        assert (said / f"{name}.code").read_text() == "2", lines
        assert len(errors) == 1, lines
        assert str(closed) in errors[0]
        assert "denied" in errors[0]


# Output


def test_json_is_all_that_standard_output_holds(
    trained: Path, store: Store, forecast: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ["--set", "data.grid=48,96", "--set", "data.prognostic=u,v,h"]
    wanted = {
        "data check": (["data", "check", str(store.path)], "findings"),
        "data stats": (["data", "stats", str(store.path)], "channels"),
        "info": (["info", "demo", *known], "parameters"),
        "train": (["train", "demo", "--out", str(tmp_path / "run"),
                   *sets(f"data.store={store.path}")], "checkpoint"),
        "forecast": (["forecast", str(trained), "--out", str(tmp_path / "f.nc")],
                     "simulated_years_per_day"),
        "evaluate": (["evaluate", str(forecast), "--out", str(tmp_path / "s")], "rows"),
    }  # fmt: skip
    capsys.readouterr()
    for arguments, key in wanted.values():
        assert main([*arguments, "--json"]) == 0
        out, _ = capsys.readouterr()
        values = json.loads(out)
        assert key in values, list(values)


def test_a_forecast_says_its_simulated_years_per_day(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "f.zarr")
    starts = ["--start", "2003-03-02", "--start", "2003-02-25"]
    assert main(["forecast", str(trained), "--out", out, *starts]) == 0
    said = capsys.readouterr().out
    first, rate, forecasts, parts = said.splitlines()[-4:]
    assert first == f"{out}: 2 starts x 2 model steps"
    assert " simulated years per day: " in rate
    assert " forecast/s (a forecast is an initial time that goes on by a model step)" in forecasts
    assert "compute " in parts
    assert main(["forecast", str(trained), "--out", out, *starts, "--resume"]) == 0
    assert capsys.readouterr().out.endswith("it was complete already: nothing was computed\n")
    with open_forecast(out) as written:
        assert [f"{date:%m-%d}" for date in written.init_times] == ["02-25", "03-02"]


def test_members_of_a_run_that_draws_nothing_are_refused_with_the_reason(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.zarr"
    line = refused(["forecast", str(trained), "--members", "4", "--out", str(out)], capsys)
    assert "4 members of this model would be one forecast, 4 times: nothing tells them" in line
    assert "bayes.weights=false" in line
    assert "forecast without members" in line
    line = refused(["forecast", str(trained), "--members", "0", "--out", str(out)], capsys)
    assert "members=0 of a forecast must be at least 1" in line
    assert not out.exists()


def test_scores_are_a_table_a_csv_and_a_json_that_only_force_replaces(
    forecast: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(forecast)]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:2] == ["RMSE", "units"]
    assert "temperature" in table
    files = [forecast.with_name(f"f.scores{suffix}") for suffix in (".csv", ".json")]
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    written = json.loads(files[1].read_text())
    assert len(written["rows"]) == len(rows) == 3 * 3 * 2  # sources, channels and mean, leads
    assert written["region"] is None

    line = refused(["evaluate", str(forecast)], capsys)
    assert f"{files[0]} exists already" in line
    files[0].unlink()
    assert str(files[1]) in refused(["evaluate", str(forecast)], capsys)
    assert not files[0].exists()

    # A region over the dateline, from 150 E to 150 W.
    region = ["--set", "evaluate.region=150,-150,-40,40", "--force"]
    assert main(["evaluate", str(forecast), *region]) == 0
    assert "region 150, -150, -40, 40" in capsys.readouterr().out
    part = json.loads(files[1].read_text())
    assert part["region"] == [150, -150, -40, 40]
    whole_cells, part_cells = ({row["cells"] for row in w["rows"] if row["cells"]}
                               for w in (written, part))  # fmt: skip
    # 3 of 16 columns (157.5, 180 and 202.5 E), 4 of 8 rows (11.25 and 33.75, N and S).
    assert part_cells == {cells * 12 // 128 for cells in whole_cells}

    files[1].write_text("{}")
    assert main(["evaluate", str(forecast), "--force"]) == 2
    assert f"{files[1]} is no file of scores" in capsys.readouterr().err.splitlines()[-1]
    assert files[1].read_text() == "{}"


def test_a_check_that_fails_gives_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_store(tmp_path / "store")
    whole.shard_path(3).unlink()
    assert main(["data", "check", str(tmp_path / "store")]) == 1
    assert "2003-02-24" in capsys.readouterr().out


def test_a_reader_who_has_enough_is_no_error(store: Store) -> None:
    command = [sys.executable, "-m", "graticule", "data", "stats", str(store.path), "--json"]
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert process.returncode == 0
    assert "Error" not in process.stderr


# Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_exits_with_130_and_is_resumed(
    store: Store, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    class Struck(output.Bar):
        def __call__(self, done: int, total: int, metrics: dict[str, Any] | None = None) -> None:
            super().__call__(done, total, metrics)
            if done == 3:
                os.kill(os.getpid(), number)

    run = tmp_path / "run"
    command = ["train", "demo", "--out", str(run), *sets(f"data.store={store.path}")]
    with monkeypatch.context() as patch:
        patch.setattr(commands, "Bar", Struck)
        assert main([*command, "--set", "train.steps=9"]) == 130
    assert f"graticule: {number.name}: stopped after step 3, saved" in capsys.readouterr().err
    assert main([*command, "--set", "train.steps=9", "--resume"]) == 0
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 10))


def test_sigterm_elsewhere_is_130_too_and_the_handler_is_put_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def struck(options: argparse.Namespace) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(parser, "run_info", struck)
    assert main(["info", "demo"]) == 130
    assert capsys.readouterr().err == "graticule: SIGTERM: stopped\n"
    assert signal.getsignal(signal.SIGTERM) is before

    def interrupted(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(parser, "run_info", interrupted)
    assert main(["info", "demo"]) == 130
    assert capsys.readouterr().err == "graticule: interrupted\n"


# Whole runs


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """60 days with land, a forcing, a diagnostic and a static, packed."""
    splits = {
        "train": ["2003-02-21/2003-03-22"],
        "validation": ["2003-03-23/2003-04-06"],
        "test": ["2003-04-07/2003-04-21"],
    }
    made = write_store(
        tmp_path_factory.mktemp("data") / "rich", days=range(60), land=True, packed=True,
        diagnostic=("rain",), static=("depth",), splits=splits,
    )  # fmt: skip
    compute(made, np.arange(30)).save(made)
    return made


@pytest.mark.parametrize(
    "settings",
    [
        ["data.input_offsets=-1,0"],
        ["data.input_offsets=-1,0", "data.output_offsets=1,2", "train.leads=2"],
        ["data.stride=2", "data.forcing_offsets=0,1", "train.detach_every=1",
         "train.leads=2"],
        ["data.input_offsets=-1,0", "data.output_offsets=1,2", "data.stride=2",
         "data.forcing=wind,salinity", "data.prognostic=temperature", "train.precision=bf16"],
        ["data.prognostic=salinity,temperature", "data.forcing=wind", "train.loss=mse",
         "model.boundary=paper", "train.accumulation=2", "train.ema_decay=0.9"],
    ],
    ids=["history", "two-outputs", "stride", "all", "turned-round"],
)  # fmt: skip
def test_a_configuration_trains_forecasts_and_scores(
    rich: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "f.zarr"
    where = sets(f"data.store={rich.path}", *settings)
    assert main(["train", "demo", "--out", str(run), *where]) == 0
    assert main(["forecast", str(run), "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    given = dict(setting.split("=") for setting in settings)
    outputs = 2 if "data.output_offsets" in given else 1
    days = int(given.get("data.stride", 1))
    prognostic = given.get("data.prognostic", "temperature,salinity").split(",")
    model = [row for row in scores["rows"] if row["source"] == "model"]
    channels = [*prognostic, "rain"]
    assert {row["channel"] for row in model} == {*channels, "normalised"}
    assert {row["lead"] for row in model} == set(range(1, 2 * outputs + 1))
    assert all(row["lead_hours"] == 24 * days * row["lead"] for row in model)
    assert all(np.isfinite(row["rmse"]) for row in scores["rows"])
    assert scores["skipped"] == 0
    with open_forecast(out) as written:
        assert list(written.channels.names) == channels
        last = written.read(0, written.num_leads - 1)
        positions = [rich.channels.index(name) for name in channels]
        np.testing.assert_array_equal(np.isfinite(last), rich.wet[positions])
    # Two steps of training have not made it worse than persistence by much.
    persistence = {(row["channel"], row["lead"]): row["rmse"]
                   for row in scores["rows"] if row["source"] == "persistence"}  # fmt: skip
    for row in model:
        if row["channel"] in prognostic:
            assert row["rmse"] < 1.3 * persistence[row["channel"], row["lead"]] + 0.5


def test_the_demo_prints_its_summary_as_json_or_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def run_demo(out: Path, data: Path, **given: Any) -> dict[str, Any]:
        seen.append((out, data, given["settings"]))
        with given["bar"]("title", "steps") as advance:
            advance(1, 2, {"loss": 0.5})
        given["say"]("planet: begins")
        return {"leads": [1], "text": "a table"}

    monkeypatch.setattr("graticule.demo.run_demo", run_demo)
    assert main(["demo", "--set", "train.steps=3", "--data", "d", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"leads": [1]}
    assert "planet: begins" in err
    assert "title" in err
    assert main(["demo"]) == 0
    assert capsys.readouterr().out == "a table\n"
    assert seen[0] == (Path("runs/demo"), Path("d"), ["train.steps=3"])
