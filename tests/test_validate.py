"""Validation by rollout: its numbers, what it remembers, and that training does not notice."""

import dataclasses
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from children import started_by_slurm
from graticule.cli import main
from graticule.config import Config
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.parallel.local import LocalRanks
from graticule.tasks import validate_run
from graticule.train import checkpoint, train, validate
from graticule.train.progress import read_lines
from graticule.train.task import Task
from graticule.train.validate import Wanted, best, read_validation
from small_store import write_store
from test_trainer import config_of, numbers, with_statistics

SPLITS = {"train": ["2003-02-21/2003-03-04"], "validation": ["2003-03-05/2003-03-16"]}
DATA = {"diagnostic": ("salinity",), "prognostic": ("temperature",)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("data") / "store"
    return with_statistics(write_store(path, land=True, splits=SPLITS, static=("depth",)))


def small(store: Store, **settings: Any) -> Config:
    given = {"steps": 6, "batch": 2, "checkpoint_every": 2, "keep_checkpoints": 9, **settings}
    return config_of(store, data=DATA, ema_decay=0.9, **given)


@pytest.fixture(scope="module")
def trained(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(small(store), run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def validated(run: Path, leads: tuple[int, ...] = (1, 3), **more: Any) -> dict[str, Any]:
    return validate_run(run, leads=leads, device="cpu", **more)


# The numbers


def test_rmse_and_persistence_are_those_of_a_forecast(
    store: Store, run: Path, tmp_path: Path
) -> None:
    result = validated(run, starts=4)
    (line,) = [r for r in result["added"] if (r["step"], r["leads"]) == (6, 3)]
    task = Task.of(small(store), torch.device("cpu"))
    checkpoint.load_weights(run, task.model, task.source.channel_names)
    starts = task.source.starts("validation", 3)
    assert len(starts) == 9
    starts = starts[[0, 3, 5, 8]]  # evenly spaced, the first and the last among them
    path = tmp_path / "f.zarr"
    forecast(
        task.model, task.source, task.statistics, path, starts=starts.tolist(), leads=3,
        attributes={},
    )  # fmt: skip
    area = store.grid.cell_area
    with open_forecast(path) as opened:
        for channel, name in enumerate(("temperature", "salinity")):
            squares, known, weight = 0.0, 0.0, 0.0
            for place, start in enumerate(starts):
                ours = opened.read(place, 2)[channel]
                truth, first = (store.read(time)[channel] for time in (start + 3, start))
                wet = np.isfinite(truth)
                squares += (area * (ours - truth) ** 2)[wet].sum()
                known += (area * (first - truth) ** 2)[wet].sum()
                weight += area[wet].sum()
            assert line["rmse"][name] == pytest.approx(np.sqrt(squares / weight), rel=1e-5)
            if name == "temperature":
                assert line["ratio"][name] == pytest.approx(np.sqrt(squares / known), rel=1e-5)
    assert line["ratio"]["salinity"] is None  # diagnostic: there is no state to persist
    assert line["mean_ratio"] == line["ratio"]["temperature"]
    assert line["lead_hours"] == 72
    assert line["starts"] == 4
    assert line["weights"] == "moving average"


def test_the_loss_is_the_mean_over_the_leads_of_the_objective(store: Store, run: Path) -> None:
    lines = {(r["step"], r["leads"]): r for r in validated(run, (1, 3), starts=64)["added"]}
    config = small(store, leads=3)
    task = Task.of(config, torch.device("cpu"))
    checkpoint.load_weights(run, task.model, task.source.channel_names)
    # All windows of three leads, as the validation loss of a training over three leads has them.
    assert lines[6, 3]["loss"] == pytest.approx(task.validation_loss() / 3, rel=1e-6)
    assert lines[6, 1]["loss"] < lines[6, 3]["loss"]
    assert lines[6, 1]["starts"] == lines[6, 3]["starts"] == 9


def test_the_best_is_the_earliest_of_least_loss_and_was_finite() -> None:
    lines = [{"step": 3, "leads": 3, "loss": 0.5}, {"step": 2, "leads": 3, "loss": 0.5},
             {"step": 1, "leads": 3, "loss": None}, {"step": 4, "leads": 1, "loss": None},
             {"step": 4, "leads": 3, "loss": 0.7}]  # fmt: skip
    assert best(lines) == {3: lines[1]}


def test_weights_that_are_not_finite_do_not_end_a_validation(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = checkpoint.load_weights

    def damaged(path: Path, model: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(path, model, *args, **kwargs)
        if loaded.step == 2:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        return loaded

    monkeypatch.setattr(validate.checkpoint, "load_weights", damaged)
    assert main(["validate", str(run), "--leads", "1,3", "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["loss"] is None for r in result["added"]] == [True, True, False, False, False, False]
    assert result["added"][0]["rmse"] == {"temperature": None, "salinity": None}
    assert all(line["step"] > 2 for line in result["best"])


# What it remembers


def test_what_is_done_is_not_done_again(run: Path, store: Store) -> None:
    first = validated(run, starts=3)
    assert [(r["step"], r["leads"]) for r in first["added"]] == [
        (2, 1), (2, 3), (4, 1), (4, 3), (6, 1), (6, 3)
    ]  # fmt: skip
    assert read_validation(run) == first["added"]
    again = validated(run, starts=3)
    assert again["added"] == []
    assert again["best"] == first["best"]
    # Another horizon, or other starts, are another question.
    assert len(validated(run, (1, 2), starts=3)["added"]) == 6
    assert len(validated(run, (1,), starts=2)["added"]) == 3
    train(dataclasses.replace(small(store), train=dataclasses.replace(
        small(store).train, steps=8)), run, resume=True)  # fmt: skip
    more = validated(run, starts=3)
    assert [r["checkpoint"] for r in more["added"]] == ["step-00000008"] * 2


def test_the_last_weights_are_another_question_than_the_average(run: Path) -> None:
    average = validated(run, starts=3)["added"]
    last = validated(run, starts=3, settings=["forecast.weights=last"])
    assert [r["weights"] for r in last["added"]] == ["last"] * 6
    assert last["added"][0]["loss"] != average[0]["loss"]
    losses = [r["loss"] for r in last["added"] if r["leads"] == 3]
    assert [r["loss"] for r in last["best"] if r["leads"] == 3] == [min(losses)]


def test_half_a_line_is_dropped_and_its_checkpoint_done_again(run: Path) -> None:
    expected = validated(run, starts=3)["added"]
    path = run / validate.FILE
    path.write_text(path.read_text()[:-40])
    assert [(r["step"], r["leads"]) for r in read_validation(run)][-1] == (6, 1)
    again = validated(run, starts=3)["added"]
    assert [(r["step"], r["leads"]) for r in again] == [(6, 1), (6, 3)]
    lines = read_lines(path)
    assert [line["loss"] for line in lines[:5]] == [line["loss"] for line in expected[:5]]


def test_the_best_checkpoint_is_named_and_said_to_be_gone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(run), "--leads", "3", "--starts", "3", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "best at 3 model steps (3 d): step-0000000" in told
    assert "of persistence's RMSE" in told
    named = told.split(": ")[1].split(",")[0]
    shutil.rmtree(run / "checkpoints" / named)
    assert main(["validate", str(run), "--leads", "3", "--starts", "3", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert f"{named}, mean loss of a step" in told
    assert "(removed: train.keep_checkpoints)" in told


def test_two_validations_do_not_write_to_one_file(run: Path) -> None:
    with validate._appended(run, True), pytest.raises(ValueError, match="another validation"):
        validated(run)


# Beside a training


def test_it_follows_a_training_to_its_last_step(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "LOOK_EVERY", 0.02)
    monkeypatch.setattr(validate, "LOOK_FOR", 0.1)
    run, seen = tmp_path / "run", threading.Event()

    def wait(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == 3:  # nothing goes on before the first checkpoint is validated
            assert seen.wait(60)

    def follow() -> None:
        while not (run / "run.json").is_file():
            time.sleep(0.02)
        result.append(validated(run, starts=2, follow=True, told=lambda line: seen.set()))

    result: list[dict[str, Any]] = []
    follower = threading.Thread(target=follow)
    follower.start()
    train(small(store), run, progress=wait)
    follower.join(60)
    assert [r["step"] for r in result[0]["added"]] == [2, 2, 4, 4, 6, 6]
    train(small(store), tmp_path / "alone")
    assert numbers(run) == numbers(tmp_path / "alone")


def test_a_checkpoint_that_goes_meanwhile_is_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = checkpoint.find

    def rotates(path: Path) -> Path:
        if Path(path).name == "step-00000002":
            shutil.rmtree(path)
        return find(path)

    monkeypatch.setattr(checkpoint, "find", rotates)
    result = validated(run, starts=2)
    assert [r["step"] for r in result["added"]] == [4, 4, 6, 6]
    assert "step-00000002 was removed before it was read" in caplog.text


def test_a_damaged_checkpoint_that_stays_is_an_error(run: Path) -> None:
    (file,) = (run / "checkpoints" / "step-00000004" / "average").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    with pytest.raises(ValueError, match="is damaged"):
        validated(run, starts=2)
    assert [r["step"] for r in read_validation(run)] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--leads", "99"], "the validation split has 12 times but no unbroken window"),
        (["--leads", "x"], "--leads x: write numbers of leads"),
        (["--leads", "0"], "name one horizon at least, each of at least 1 lead"),
        (["--starts", "0"], "at least 1 start"),
        (["--set", "train.steps=3"], "a finished run keeps its configuration"),
        (["--set", "mesh.window=2"], "mesh.window=2 is 2 processes, and 1 was started"),
    ],
)
def test_what_cannot_be_validated_is_told(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(run), "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["validate", str(run / "nothing"), "--device", "cpu"]) == 2
    assert "holds no run" in capsys.readouterr().err


# On several processes


def _validated(run: Path, settings: list[str]) -> list[dict[str, Any]]:
    return validated(run, starts=5, settings=settings)["added"]


@pytest.mark.parametrize(
    "settings", [[], ["mesh.window=2"], ["mesh.window=2", "mesh.stripe_dim=lon"],
                 ["mesh.weights=sharded"]]
)  # fmt: skip
def test_two_ranks_find_the_numbers_of_one_process(
    two: LocalRanks, run: Path, trained: Path, tmp_path: Path, settings: list[str]
) -> None:
    shutil.copytree(trained, tmp_path / "other")
    alone = _validated(tmp_path / "other", [])
    first, second = two.run(_validated, run, settings)
    for line, same, other in zip(first, second, alone, strict=True):
        assert {**line, "seconds": 0} == {**same, "seconds": 0}
        for key in ("loss", "mean_ratio"):
            assert line[key] == pytest.approx(other[key], rel=2e-5)
        assert line["rmse"] == pytest.approx(other["rmse"], rel=2e-5)
        assert line["starts"] == other["starts"] == 5
    assert [line["loss"] for line in read_validation(run)] == [line["loss"] for line in first]


def test_the_command_speaks_once_for_two_processes(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["validate", str(run), "--leads", "2", "--starts", "3", "--device", "cpu", "--json"]
    codes = started_by_slurm(2, lambda rank: sys.exit(main(line)))
    out, err = capfd.readouterr()
    assert codes == [0, 0], err
    assert [r["step"] for r in json.loads(out)["added"]] == [2, 4, 6]
    assert sum("loss" in told for told in err.splitlines()) == 3


def test_horizons_are_sorted_and_each_is_there_once() -> None:
    assert Wanted(leads=(20, 5, 5)).leads == (5, 20)
