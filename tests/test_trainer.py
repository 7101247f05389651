"""Whole runs on a small planet: the same numbers after every kind of interruption."""

import dataclasses
import itertools
import json
import logging
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from children import in_a_child
from graticule.config import Config, DataConfig, SwinConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.grid import Grid
from graticule.train import Stopped, checkpoint, train
from graticule.train.folder import held
from graticule.train.optimizer import Schedule
from graticule.train.progress import read_metrics
from graticule.train.task import Task
from small_store import small_grid, write_store


def with_statistics(store: Store) -> Store:
    source = SampleSource(store, DataConfig())
    compute(store, source.times("train")).save(store)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return with_statistics(write_store(tmp_path_factory.mktemp("data") / "store", packed=True))


def config_of(store: Store, *, data: dict[str, Any] | None = None, **settings: Any) -> Config:
    given = {
        "steps": 10, "batch": 1, "learning_rate": 3e-3, "warmup_steps": 4, "checkpoint_every": 5,
        **settings,
    }  # fmt: skip
    return Config(
        name="small",
        data=DataConfig(store=str(store.path), **(data or {})),
        model=SwinConfig(patch=2, window=(2, 4), width=16, depth=1, heads=2, norm_groups=4),
        train=TrainConfig(**given),
    )


def all_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by group and name."""
    found = {}
    for group in checkpoint.groups(path):
        into = {
            name: torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in checkpoint.saved_names(path, group).items()
        }
        checkpoint.load_tensors(path, group, into)
        found |= {f"{group}/{name}": value for name, value in into.items()}
    return found


NUMBERS = ("step", "loss", "lead_losses", "gradient_norm", "learning_rate", "validation_loss")


def numbers(run: Path) -> list[dict[str, Any]]:
    """What of a run's metrics does not depend on the clock."""
    return [{k: line[k] for k in NUMBERS if k in line} for line in read_metrics(run)]


def said(caplog: pytest.LogCaptureFixture) -> str:
    """What this package logged."""
    own = [r for r in caplog.records if r.name.startswith("graticule")]
    return "\n".join(record.getMessage() for record in own)


HARD = {
    "accumulation": 2, "leads": 2, "roll_longitude": True, "ema_decay": 0.99, "clip_norm": 0.5,
    "steps": 10, "keep_checkpoints": 3,
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_steps_are_five_and_five_bit_for_bit(
    store: Store, tmp_path: Path, precision: str
) -> None:
    config = config_of(store, **HARD, precision=precision)
    whole = train(config, tmp_path / "whole")

    # Stopped after step 5, as a batch system stops a job.
    def stop(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM: stopped after step 5") as stopped:
        train(config, tmp_path / "parts", progress=stop)
    assert stopped.value.checkpoint.name == "step-00000005"
    parts = train(config, tmp_path / "parts", resume=True)

    # Killed in step 8, without a word: steps 6 and 7 are taken again.
    def die(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    status = in_a_child(lambda: train(config, tmp_path / "killed", progress=die) and None)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [line["step"] for line in read_metrics(tmp_path / "killed")] == list(range(1, 9))
    killed = train(config, tmp_path / "killed", resume=True)

    expected = all_tensors(whole)
    groups = {name.split("/")[0] for name in expected}
    assert groups == {"model", "average", "optimizer"}
    for other in (parts, killed):
        found = all_tensors(other)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert numbers(other.parents[1]) == numbers(tmp_path / "whole")
    steps = [line["step"] for line in numbers(tmp_path / "killed")]
    assert steps == list(range(1, 11))
    assert len(numbers(tmp_path / "whole")[0]["lead_losses"]) == 2


def test_training_lowers_the_loss_and_says_what_it_did(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[int, int]] = []
    config = config_of(store, steps=30, leads=2, checkpoint_every=15, validate_every=15)
    with caplog.at_level(logging.INFO):
        last = train(config, tmp_path / "run", progress=lambda s, n, _: calls.append((s, n)))
    assert last == tmp_path / "run" / "checkpoints" / "step-00000030"
    assert calls == [(step, 30) for step in range(1, 31)]
    assert "rollout gradient: full over 2 leads" in said(caplog)
    lines = read_metrics(tmp_path / "run")
    losses = [line["loss"] for line in lines]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    for line in lines:
        assert line["loss"] == pytest.approx(sum(line["lead_losses"]))
        assert 0 <= line["data_wait_share"] <= 1
        assert line["memory_gib"] > 0
        # 2 leads x 1 time x 2 channels x 8 x 16 cells a sample.
        assert line["cells_per_s"] == pytest.approx(512 * line["samples_per_s"])
    assert [line["step"] for line in lines if "validation_loss" in line] == [15, 30]
    assert lines[29]["validation_loss"] < lines[14]["validation_loss"]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["channels"]["prognostic"] == ["temperature", "salinity"]
    assert run["fingerprints"]["config"] == config.fingerprint
    assert run["fingerprints"]["store"] == store.fingerprint
    assert run["detach_every"] == 0
    assert run["sessions"][0]["versions"]["torch"] == torch.__version__
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == config.to_dict()
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


def test_the_optimizers_rate_is_the_schedules_at_every_step_also_after_a_resume(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []
    plain = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        (rate,) = {group["lr"] for group in self.param_groups}
        used.append(rate)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    config = config_of(store)

    def stop(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="SIGINT: stopped after step 5"):
        train(config, tmp_path / "run", progress=stop)
    train(config, tmp_path / "run", resume=True)
    expected = [Schedule(config.train).rate(step) for step in range(1, 11)]
    assert used == expected
    assert [line["learning_rate"] for line in read_metrics(tmp_path / "run")] == expected


def test_signals_act_as_before_once_the_run_is_over(store: Store, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(config_of(store, steps=1), tmp_path / "run")
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == before


@pytest.mark.parametrize(("one_wish", "kind"), [(60.0, Stopped), (0.0, KeyboardInterrupt)])
def test_a_second_signal_acts_at_once_unless_it_is_an_echo_of_the_first(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_wish: float,
    kind: type[BaseException],
) -> None:
    monkeypatch.setattr("graticule.train.trainer.ONE_WISH", one_wish)

    def stop(step: int, steps: int, metrics: dict[str, Any]) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        train(config_of(store), tmp_path / "run", progress=stop)
    assert type(caught.value) is kind
    assert len(checkpoint.complete(tmp_path / "run")) == (kind is Stopped)


def test_accumulation_is_a_larger_batch(store: Store, tmp_path: Path) -> None:
    # To rounding: the sums over samples are grouped in another way.
    runs = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        config = config_of(store, steps=3, batch=batch, accumulation=accumulation)
        run = tmp_path / f"{batch}"
        train(config, run)
        runs.append([line["loss"] for line in numbers(run)])
    np.testing.assert_allclose(runs[1], runs[0], rtol=2e-5)
    np.testing.assert_allclose(runs[2], runs[0], rtol=2e-5)


def test_the_validation_loss_counts_every_sample_once_whatever_the_batch(store: Store) -> None:
    task = Task.of(config_of(store, batch=1, steps=1), torch.device("cpu"))
    assert task.validation_starts is not None
    assert len(task.validation_starts) == 3
    reference = task.validation_loss()
    for batch in (2, 3, 5):
        other = Task.of(config_of(store, batch=batch, steps=1), torch.device("cpu"))
        assert other.validation_loss() == pytest.approx(reference, rel=1e-6)
    singles = []
    starts = task.validation_starts
    for one in starts:
        single = dataclasses.replace(task, validation_starts=np.array([one]))
        singles.append(single.validation_loss())
    assert reference == pytest.approx(np.mean(singles), rel=1e-9)


def test_validating_does_not_change_training(store: Store, tmp_path: Path) -> None:
    train(config_of(store, steps=4), tmp_path / "without")
    train(config_of(store, steps=4, validate_every=1), tmp_path / "with")
    for a, b in zip(numbers(tmp_path / "without"), numbers(tmp_path / "with"), strict=True):
        assert a["loss"] == b["loss"]
        assert "validation_loss" in b


def test_detached_training_differs_from_full_and_says_so(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for every in (0, 1, 2):
            train(config_of(store, steps=1, leads=3, detach_every=every), tmp_path / f"{every}")
    assert "rollout gradient: full over 3 leads" in said(caplog)
    assert "rollout gradient: over 1 lead at a time of 3 leads" in said(caplog)
    assert "rollout gradient: over 2 leads at a time of 3 leads" in said(caplog)
    lines = [numbers(tmp_path / f"{every}")[0] for every in (0, 1, 2)]
    for one, other in itertools.combinations(lines, 2):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["gradient_norm"] != pytest.approx(other["gradient_norm"], rel=1e-4)


def test_float16_writes_its_loss_scale_and_resumes_with_it(store: Store, tmp_path: Path) -> None:
    config = config_of(store, steps=4, checkpoint_every=2, precision="fp16")

    def stop(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(config, tmp_path / "run", progress=stop)
    state = checkpoint.read_state(checkpoint.find(tmp_path / "run"))
    assert state["loss_scale"]["good_steps"] + sum(
        line["skipped"] for line in read_metrics(tmp_path / "run")
    ) in (1, 2)
    train(config, tmp_path / "run", resume=True)
    train(config, tmp_path / "whole")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    states = [checkpoint.read_state(checkpoint.find(tmp_path / run)) for run in ("run", "whole")]
    assert states[0]["loss_scale"] == states[1]["loss_scale"]
    assert all(line["loss_scale"] > 0 for line in read_metrics(tmp_path / "run"))


def test_land_and_statics_train(tmp_path: Path) -> None:
    store = with_statistics(write_store(tmp_path / "ocean", land=True, static=("depth",)))
    config = config_of(store, steps=3, data={"input_offsets": (-1, 0), "output_offsets": (1, 2)})
    train(config, tmp_path / "run")
    assert all(np.isfinite(line["loss"]) for line in numbers(tmp_path / "run"))


@pytest.mark.parametrize(
    ("planet", "reason"),
    [
        ({"land": True}, "temperature has land"),
        ({"static": ("depth",)}, r"statics \(depth\) stay where they are"),
        (
            {"grid": Grid(small_grid().lat, np.arange(16) * 10.0)},
            r"does not close round the globe \(lon 0.0 to 150.0\)",
        ),
    ],
)
def test_rolling_longitude_is_refused_where_it_is_no_symmetry(
    tmp_path: Path, planet: dict[str, Any], reason: str
) -> None:
    store = with_statistics(write_store(tmp_path / "store", **planet))
    config = config_of(store, roll_longitude=True)
    with pytest.raises(ValueError, match=f"roll_longitude=true is not right here: .*{reason}"):
        train(config, tmp_path / "run")


def test_fine_tuning_starts_from_the_average_with_a_new_count(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = train(config_of(store, steps=6, ema_decay=0.9), tmp_path / "pretraining")
    averaged = {
        name.removeprefix("average/"): value
        for name, value in all_tensors(before).items()
        if name.startswith("average/")
    }
    config = config_of(
        store, steps=2, leads=2, schedule="constant", learning_rate=0.0, weight_decay=0.0,
        start_from=str(tmp_path / "pretraining"),
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        after = train(config, tmp_path / "tuned")
    assert "starting from the averaged weights" in said(caplog)
    found = all_tensors(after)
    for name, value in averaged.items():
        assert torch.equal(found[f"model/{name}"], value)
    assert after.name == "step-00000002"


def test_fine_tuning_refuses_another_order_of_channels(store: Store, tmp_path: Path) -> None:
    train(config_of(store, steps=1), tmp_path / "pretraining")
    swapped = {"prognostic": ("salinity", "temperature")}
    config = config_of(store, data=swapped, start_from=str(tmp_path / "pretraining"))
    with pytest.raises(ValueError, match="prognostic channels differ") as caught:
        train(config, tmp_path / "tuned")
    assert "has temperature, salinity" in str(caught.value)
    assert "the data has salinity, temperature" in str(caught.value)


def test_a_run_is_not_overwritten(store: Store, tmp_path: Path) -> None:
    train(config_of(store, steps=1), tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=r"exists already and is not overwritten.*--resume"):
        train(config_of(store, steps=1), tmp_path / "run")
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_resuming_nothing_is_an_error(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(ValueError, match="holds no run to resume"):
            train(config_of(store), tmp_path / name, resume=True)
    assert list((tmp_path / "empty").iterdir()) == []
    assert not (tmp_path / "absent").exists()


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(store, steps=3)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:2]))
    train(config, tmp_path / "run", resume=True)
    assert "stopped at step 2, before its first checkpoint" in said(caplog)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_a_checkpoint_that_is_gone_is_an_error_and_no_fresh_start(
    store: Store, tmp_path: Path
) -> None:
    train(config_of(store, steps=1), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        train(config_of(store, steps=1), tmp_path / "run", resume=True)


def test_a_resumed_run_keeps_its_configuration(store: Store, tmp_path: Path) -> None:
    train(config_of(store, steps=1), tmp_path / "run")
    other = config_of(store, steps=1, batch=3, data={"prognostic": ("salinity", "temperature")})
    with pytest.raises(ValueError, match="was started with another configuration") as caught:
        train(other, tmp_path / "run", resume=True)
    assert "train.batch: 1 in the run, now 3" in str(caught.value)
    assert "data.prognostic: [] in the run, now ['salinity', 'temperature']" in str(caught.value)


def test_a_resumed_run_may_grow_and_says_what_that_does_to_the_schedule(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(config_of(store, steps=2), tmp_path / "run")
    longer = config_of(store, steps=4, keep_checkpoints=1, validate_every=1)
    with caplog.at_level(logging.WARNING):
        last = train(longer, tmp_path / "run", resume=True)
    assert "train.steps was 2 and is 4" in said(caplog)
    assert last.name == "step-00000004"
    assert [line["step"] for line in numbers(tmp_path / "run")] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["steps"] == 4
    sessions = json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]
    assert [session["after_step"] for session in sessions] == [0, 2]


def test_resuming_a_finished_run_changes_nothing(store: Store, tmp_path: Path) -> None:
    last = train(config_of(store, steps=2), tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert train(config_of(store, steps=2), tmp_path / "run", resume=True) == last
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("planet", "message"),
    [
        ({"prognostic": ("salinity", "temperature")}, "prognostic channels differ .*another order"),
        ({"packed": True}, "the store changed since"),
    ],
)
def test_a_resumed_run_refuses_a_store_that_changed(
    tmp_path: Path, planet: dict[str, Any], message: str
) -> None:
    store = with_statistics(write_store(tmp_path / "store"))
    config = config_of(store, steps=2)
    train(config_of(store, steps=1), tmp_path / "run")
    shutil.rmtree(store.path)
    with_statistics(write_store(tmp_path / "store", **planet))
    with pytest.raises(ValueError, match=message):
        train(config, tmp_path / "run", resume=True)


def test_statistics_of_other_times_are_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    compute(store, np.arange(24)).save(store)
    with pytest.raises(ValueError, match=r"the statistics of .* come from 24 times"):
        train(config_of(store), tmp_path / "run")


def test_a_folder_that_cannot_be_written_is_refused_before_any_data_is_read(tmp_path: Path) -> None:
    missing = Config(data=DataConfig(store=str(tmp_path / "no-such-store")))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match=r"output folder .*file/run is not writable.*--out"):
        train(missing, blocked / "run")

    # Permissions bind everyone but root, so that root tries as somebody else.
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o555)

        def try_it() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            with pytest.raises(ValueError, match=r"is not writable: .*Permission denied"):
                train(missing, folder)

        assert in_a_child(try_it) == 0
    finally:
        folder.chmod(0o755)
        folder.rmdir()


def test_no_store_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set data\.store=PATH"):
        train(Config(), tmp_path / "run")


def test_a_run_that_is_refused_leaves_no_folder_and_can_be_tried_again(
    store: Store, tmp_path: Path
) -> None:
    absent = Config(data=DataConfig(store=str(tmp_path / "absent")))
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "runs" / "new" / "run", tmp_path / "there", tmp_path / "there" / "run"):
        with pytest.raises(ValueError, match="is no store"):
            train(absent, out)
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "what was there stays"
    assert list((tmp_path / "there").iterdir()) == []
    with pytest.raises(ValueError, match="window"):
        train(config_of(store, leads=300), tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()
    train(config_of(store, steps=1), tmp_path / "runs" / "run")


def test_validation_that_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", splits={"train": ["2003-02-21/2003-03-10"]})
    with_statistics(store)
    with pytest.raises(ValueError, match=r"data\.validation is empty"):
        train(config_of(store, validate_every=5), tmp_path / "run")
    train(config_of(store, steps=1), tmp_path / "run")
    assert "validation_loss" not in read_metrics(tmp_path / "run")[0]


def test_a_lost_file_stops_the_run_with_its_date(tmp_path: Path) -> None:
    store = with_statistics(write_store(tmp_path / "store"))
    store.shard_path(7).unlink()
    with pytest.raises(ValueError, match=r"2003-02-28 .*was never written or is lost"):
        train(config_of(store, steps=40), tmp_path / "run")


def test_half_a_line_of_metrics_is_dropped_on_resume(store: Store, tmp_path: Path) -> None:
    train(config_of(store, steps=2), tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 0.')
    assert len(read_metrics(tmp_path / "run")) == 2
    train(config_of(store, steps=3), tmp_path / "run", resume=True)
    assert [line["step"] for line in numbers(tmp_path / "run")] == [1, 2, 3]


def test_tensorboard_that_is_not_installed_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'graticule\[tensorboard\]'"):
        train(config_of(store, tensorboard=True), tmp_path / "run")


@pytest.fixture(scope="module")
def five_steps(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("five") / "run"
    train(config_of(store, steps=5), run)
    return run


LAST = "checkpoints/step-00000005"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"", r"config\.json is damaged: Expecting value"),
        ("config.json", b'{"name": "sm', r"config\.json is damaged: Unterminated"),
        ("config.json", b"\xff\xfe", r"config\.json is damaged: .*can't decode"),
        ("config.json", b"[]", r"config\.json is damaged: it holds \[\], not a table"),
        ("run.json", b"{", r"run\.json is damaged"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', r"line 2 is not the JSON of a step"),
        ("metrics.jsonl", b'5\n{"step": 3}\n', r"line 1 is not the JSON of a step"),
        (f"{LAST}/complete.json", b"", r"step-00000005 is damaged: complete\.json is not what"),
        (f"{LAST}/complete.json", b"{}", r"step-00000005 is damaged: complete\.json is not what"),
        (f"{LAST}/complete.json", b'{"files": 5}', r"damaged: complete\.json is not what"),
        (f"{LAST}/state.json", b"{", r"damaged: state\.json has 1 bytes"),
        (f"{LAST}/optimizer/model.safetensors", b"{", r"damaged: .*optimizer/.*was not there"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    store: Store, five_steps: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(five_steps, run)
    (run / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        train(config_of(store), run, resume=True)


def test_bytes_that_are_no_text_at_the_end_of_the_metrics_are_dropped(
    store: Store, five_steps: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(five_steps, run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\xff\0")
    train(config_of(store, steps=6), run, resume=True)
    assert [line["step"] for line in numbers(run)] == [1, 2, 3, 4, 5, 6]


class Trap:
    """Raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("place", [".metadata", "model/.metadata", "optimizer/.metadata"])
def test_a_pickle_planted_in_a_checkpoint_is_never_opened(
    store: Store, five_steps: Path, tmp_path: Path, place: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(five_steps, run)
    (run / LAST / place).write_bytes(pickle.dumps(Trap()))
    if place == ".metadata":
        train(config_of(store), run, resume=True)  # nobody looks there
        return
    with pytest.raises(ValueError, match=rf"is damaged: {place} was not there when it was written"):
        train(config_of(store), run, resume=True)


def test_two_processes_do_not_train_in_one_folder(
    store: Store, five_steps: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(five_steps, run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with held(run), pytest.raises(ValueError, match=r"another process trains in .*/run now"):
        train(config_of(store), run, resume=True)
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with held(tmp_path), pytest.raises(ValueError, match="another process trains"), held(tmp_path):
        pass
    train(config_of(store, steps=6), run, resume=True)


def test_a_killed_process_holds_its_folder_no_longer(tmp_path: Path) -> None:
    def die() -> None:
        with held(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(die) == signal.SIGKILL
    with held(tmp_path):
        pass


@pytest.mark.parametrize(("limit", "file"), [(100, r"config\.json"), (6000, r"metrics\.jsonl")])
def test_a_full_disk_names_the_file_it_refused(
    store: Store, tmp_path: Path, limit: int, file: str
) -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        config = config_of(store, steps=100, checkpoint_every=100)
        with pytest.raises(ValueError, match=rf"cannot write .*{file}: .*File too large"):
            train(config, tmp_path / "run")

    assert in_a_child(fill) == 0
    assert not list((tmp_path / "run").glob(".*"))


def test_fine_tuning_another_model_says_first_what_differs(
    store: Store, five_steps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(store, steps=1, start_from=str(five_steps))
    wide = dataclasses.replace(config, model=dataclasses.replace(config.model, width=32))
    with pytest.raises(ValueError, match=r"model\.width is 16 there and 32 here") as caught:
        train(wide, tmp_path / "wide")
    assert "blocks.0.mlp.fc1.weight: checkpoint (64, 16) float32" in str(caught.value)
    grouped = dataclasses.replace(config, model=dataclasses.replace(config.model, norm_groups=2))
    with caplog.at_level(logging.WARNING):
        train(grouped, tmp_path / "grouped")
    assert "another model: model.norm_groups is 4 there and 2 here" in said(caplog)


def test_energy_is_told_of_each_step_where_it_is_counted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([1.0, 3.5, 4.0, None, 7.0, 9.0])  # before and after each step
    monkeypatch.setattr(
        "graticule.train.run.EnergyMeter", lambda device: SimpleNamespace(joules=readings.__next__)
    )
    train(config_of(store, steps=3), tmp_path / "run")
    told = [line.get("joules") for line in read_metrics(tmp_path / "run")]
    assert told == [2.5, None, 2.0]
