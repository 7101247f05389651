"""Whole runs on several processes: one process's numbers, whatever happens on the way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from children import started_by_slurm
from graticule.cli import main
from graticule.config import Config, DataConfig, MeshConfig, SwinConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.parallel.local import LocalRanks
from graticule.train import Stopped, checkpoint, train
from graticule.train.progress import read_metrics
from small_store import write_store

LAYOUTS: dict[str, dict[str, Any]] = {
    "window": {"window": 2},
    "data": {},
    "sharded": {"window": 2, "weights": "sharded"},
    "sequence": {"sequence": 2},
    "tensor": {"tensor": 2},
}
NUMBERS = ("loss", "gradient_norm", "validation_loss")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("data") / "store"
    store = write_store(path, packed=True, land=True, static=("depth",))
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def config_of(store: Store, mesh: dict[str, Any] | None = None, **settings: Any) -> Config:
    given = {
        "steps": 5, "batch": 3, "leads": 2, "learning_rate": 3e-3, "warmup_steps": 2,
        "schedule": "constant", "ema_decay": 0.9, "clip_norm": 0.05, **settings,
    }  # fmt: skip
    return Config(
        name="small",
        data=DataConfig(store=str(store.path)),
        model=SwinConfig(patch=2, window=(2, 4), width=16, depth=2, heads=2, norm_groups=4),
        mesh=MeshConfig(**(mesh or {})),
        train=TrainConfig(**given),
    )


@pytest.fixture(scope="module")
def alone(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps on one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(config_of(store, validate_every=2), run)
    return run


def numbers(run: Path) -> list[list[float]]:
    return [[line[key] for key in NUMBERS if key in line] for line in read_metrics(run)]


def assert_same(found: Path, expected: Path) -> None:
    lines = zip(numbers(found), numbers(expected), strict=True)
    for line, other in lines:
        assert line == pytest.approx(other, rel=1e-5)


def _train(config: Config, out: Path, resume: bool = False) -> str:
    """The last checkpoint, or what `train` refused."""
    try:
        return str(train(config, out, resume=resume))
    except ValueError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_one_process(
    name: str, two: LocalRanks, store: Store, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = config_of(store, LAYOUTS[name], validate_every=2)
    assert two.run(_train, config, run) == [str(run / "checkpoints" / "step-00000005")] * 2
    assert_same(run, alone)
    (line,) = read_metrics(run)[-1:]
    # 3 samples x 2 leads x 2 channels x 8 x 16 cells, of all ranks.
    assert line["cells_per_s"] == pytest.approx(512 * line["samples_per_s"])
    assert line["samples_per_s"] == pytest.approx(3 / line["seconds"])
    text = (run / "ranks" / "metrics-00001.jsonl").read_text()
    others = [json.loads(other) for other in text.splitlines()]
    assert [other["step"] for other in others] == [1, 2, 3, 4, 5]
    assert all(
        set(other) == {"step", "seconds", "data_wait_share", "memory_gib"} for other in others
    )
    (session,) = json.loads((run / "run.json").read_text())["sessions"]
    shared = 1 if name == "data" else 2
    assert session["processes"] == 2
    assert session["mesh"] == config.to_dict()["mesh"] | {"data": 2 // shared}
    assert session["stripes"]["dim"] == "lat"
    assert session["stripes"]["bounds"][-1] == 8
    assert len(session["stripes"]["bounds"]) == shared + 1


def test_a_run_goes_on_on_another_layout_and_on_one_process(
    two: LocalRanks, four: LocalRanks, store: Store, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    every = {"validate_every": 2, "checkpoint_every": 1}
    two.run(_train, config_of(store, {"window": 2}, steps=2, **every), run)
    more = {"tensor": 2, "weights": "sharded"}  # and two shares of the samples
    four.run(_train, config_of(store, more, steps=4, **every), run, True)
    train(config_of(store, steps=5, **every), run, resume=True)
    found, expected = read_metrics(run), read_metrics(alone)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    for line, other in zip(found, expected, strict=True):
        for key in ("loss", "gradient_norm"):
            assert line[key] == pytest.approx(other[key], rel=1e-5), line["step"]
    sessions = json.loads((run / "run.json").read_text())["sessions"]
    assert [session["after_step"] for session in sessions] == [0, 2, 4]
    assert [session["processes"] for session in sessions] == [2, 4, 1]
    assert [session["mesh"]["window"] for session in sessions] == [2, 1, 1]


def test_lines_of_steps_that_are_taken_again_are_dropped_for_every_rank(
    two: LocalRanks, store: Store, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    two.run(_train, config_of(store, {"window": 2}, steps=2, leads=1), run)
    own = run / "ranks" / "metrics-00001.jsonl"
    for path in (own, run / "metrics.jsonl", run / "ranks" / "metrics-00007.jsonl"):
        with path.open("a") as file:  # as a kill in step 4 leaves it
            file.write('{"step": 3, "seconds": 1.0}\n{"st')
    two.run(_train, config_of(store, {"window": 2}, steps=4, leads=1), run, True)
    steps = [json.loads(line)["step"] for line in own.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert (run / "ranks" / "metrics-00007.jsonl").read_text() == ""


# What rank 0 decides, all do


def test_a_folder_is_refused_by_all_with_the_same_words(
    two: LocalRanks, store: Store, alone: Path, tmp_path: Path
) -> None:
    told = two.run(_train, config_of(store), alone)
    assert told[0] == told[1]
    assert "exists already and is not overwritten; go on with --resume" in told[0]
    told = two.run(_train, config_of(store), tmp_path / "absent", True)
    assert told[0] == told[1]
    assert "holds no run to resume" in told[0]
    other = config_of(store, validate_every=2, batch=4)
    told = two.run(_train, other, alone, True)
    assert told[0] == told[1]
    assert "train.batch: 3 in the run, now 4" in told[0]
    assert "mesh.*, memory.* may change" in told[0]


def _train_as_rank(configs: list[Config], out: Path) -> str:
    return _train(configs[dist.get_rank()], out)


def test_ranks_that_were_given_different_things_do_not_begin(
    two: LocalRanks, store: Store, tmp_path: Path
) -> None:
    configs = [config_of(store), config_of(store, batch=4)]
    told = two.run(_train_as_rank, configs, tmp_path / "run")
    assert told[0] == told[1]
    assert "rank 1: another configuration" in told[0]
    assert "start all processes with the same command" in told[0]


def test_a_batch_that_leaves_a_rank_without_a_sample_is_refused(
    two: LocalRanks, store: Store, tmp_path: Path
) -> None:
    for told in two.run(_train, config_of(store, batch=1), tmp_path / "run"):
        assert "a batch of 1 samples leaves 1 of 2 ranks without any; set train.batch to 2" in told
    # Nothing was written: the folder takes the run that follows the advice.
    told = two.run(_train, config_of(store, batch=2, steps=1), tmp_path / "run")
    assert told == [str(tmp_path / "run" / "checkpoints" / "step-00000001")] * 2


# Signals


def _stopped(config: Config, out: Path, who: list[int], number: int) -> tuple[int, int, str]:
    def stop(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == 2 and dist.get_rank() in who:
            os.kill(os.getpid(), number)

    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        train(config, out, progress=stop)
    except Stopped as stopped:
        return stopped.signal_number, stopped.step, stopped.checkpoint.name
    finally:
        signal.signal(signal.SIGINT, ignored)
    raise AssertionError("not stopped")


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ([0], signal.SIGTERM),
        ([1], signal.SIGINT),
        ([0, 1], signal.SIGINT),
        *(pytest.param(*others, marks=pytest.mark.slow)
          for others in (([0], signal.SIGINT), ([1], signal.SIGTERM), ([0, 1], signal.SIGTERM))),
    ],
)  # fmt: skip
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    who: list[int], number: int, two: LocalRanks, store: Store, tmp_path: Path
) -> None:
    config = config_of(store, {"window": 2}, leads=1, steps=50)
    found = two.run(_stopped, config, tmp_path / "run", who, number)
    assert found == [(number, 3, "step-00000003")] * 2
    assert [path.name for path in checkpoint.complete(tmp_path / "run")] == ["step-00000003"]
    assert len(read_metrics(tmp_path / "run")) == 3


# The command


@pytest.fixture
def recipe(store: Store, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(config_of(store, {"window": 2}, leads=1).to_dict()))
    return path


def command(recipe: Path, *more: str) -> list[str]:
    return ["train", str(recipe), "--out", str(recipe.parent / "run"), "--device", "cpu", *more]


def lines_of(text: str) -> list[str]:
    """What was printed, without the bar's redrawn line."""
    return [line.rpartition("\r")[2] for line in text.splitlines() if line.strip()]


def test_the_command_speaks_once_for_all(
    recipe: Path, alone: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = started_by_slurm(2, lambda rank: sys.exit(main(command(recipe, "--json"))))
    out, err = capfd.readouterr()
    assert codes == [0, 0], err
    assert json.loads(out)["step"] == 5
    assert sum("rollout gradient" in line for line in err.splitlines()) == 1
    assert "rank 1" not in err


def test_a_file_that_one_rank_cannot_read_ends_all_and_is_named(
    recipe: Path, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    lost = str(store.shard_path(9))

    def work(rank: int) -> None:
        given = os.open

        def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
            if str(path) == lost:
                raise PermissionError(13, "Permission denied", lost)
            return given(path, *args, **kwargs)

        if rank == 1:
            os.open = refuse
        sys.exit(main(command(recipe, "--set", "train.steps=500")))

    began = time.monotonic()
    codes = started_by_slurm(2, work, within=60)
    assert time.monotonic() - began < 60
    err = capfd.readouterr().err
    assert codes == [2, 2], err
    (told,) = [line for line in lines_of(err) if "error: " in line.lower()]
    assert told.startswith("graticule: error: rank 1: ")
    assert lost in told
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "train.stepz=2"], "did you mean train.steps?"),
        (["--set", "mesh.window=3"], "mesh.window=3 is 3 processes, and 2 were started"),
        (["--set", "data.store=nowhere"], "nowhere is no store"),
        (["--device", "gpu0"], "--device gpu0 cannot be used here"),
        (["--resume"], "holds no run to resume"),
        (["--stes"], "unrecognized arguments: --stes"),
    ],
)
def test_what_all_have_wrong_is_told_once(
    more: list[str], message: str, recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = started_by_slurm(2, lambda rank: sys.exit(main(command(recipe, *more))))
    err = capfd.readouterr().err
    assert codes == [2, 2], err
    (told,) = [line for line in lines_of(err) if "error: " in line]
    assert message in told
    assert "rank" not in told


@pytest.mark.parametrize("who", [[1], [0, 1]])
def test_a_signal_to_the_command_is_a_checkpoint_and_130(
    who: list[int], recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = recipe.parent / "run"

    def work(rank: int) -> None:
        def later() -> None:
            while not (run / "metrics.jsonl").is_file() or len(read_metrics(run)) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        if rank in who:
            threading.Thread(target=later, daemon=True).start()
        sys.exit(main(command(recipe, "--set", "train.steps=100000")))

    codes = started_by_slurm(2, work)
    out, err = capfd.readouterr()
    assert codes == [130, 130], err
    assert out == ""
    (whole,) = checkpoint.complete(run)
    assert checkpoint.step_of(whole) == len(read_metrics(run))
    told = [line for line in lines_of(err) if "stopped after step" in line]
    assert len(told) == 1, err
    assert "SIGTERM" in told[0]
    assert "rank" not in told[0]


def test_torchrun_starts_only_what_shares_its_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"),
                        ("MASTER_PORT", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert main(["info", "demo"]) == 2
    told = capsys.readouterr().err
    assert "torchrun started 2 processes, and this command runs on one; only train" in told


def test_torchrun_trains_with_the_line_that_messages_give(
    recipe: Path, alone: Path, store: Store
) -> None:
    run = recipe.parent / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "graticule", *command(recipe, "--set", "train.steps=2", "--json")]  # fmt: skip
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["step"] == 2
    assert len((run / "ranks" / "metrics-00001.jsonl").read_text().splitlines()) == 2
    assert checkpoint.find(run).name == "step-00000002"
