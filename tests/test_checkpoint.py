"""Checkpoints: complete or not there, verified, never pickled, never half removed."""

import json
import logging
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from children import in_a_child
from graticule.train import checkpoint, seal
from graticule.train import tensors as storage

CHANNELS = {"prognostic": ["thetao@5", "so@5"], "forcing": ["uo"], "static": []}


def tensors(value: float = 0.0) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4, 3, generator=generator) + value
    return {
        "model": {"layer.weight": weight, "layer.bias": torch.full((4,), float(value))},
        "optimizer": {"exp_avg.layer.weight": weight * 2, "step.layer.weight": torch.tensor(5.0)},
    }


def save(run: Path, step: int, *, keep: int = 9, **groups: Any) -> Path:
    state = {"channels": CHANNELS, "next_sample": 8 * step}
    return checkpoint.save(run, step, {**tensors(step), **groups}, state, keep=keep)


def said(caplog: pytest.LogCaptureFixture) -> str:
    """What this package logged."""
    own = [r for r in caplog.records if r.name.startswith("graticule")]
    return "\n".join(record.getMessage() for record in own)


class Layer(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 4)


def test_a_checkpoint_gives_back_what_was_saved(tmp_path: Path) -> None:
    kinds = {
        "scalar": torch.tensor(7), "half": torch.randn(3).half(), "empty": torch.zeros(0, 2),
        "slanted": torch.randn(3, 5).t(), "bfloat": torch.randn(2, 2).bfloat16(),
    }  # fmt: skip
    path = save(tmp_path, 5, kinds=kinds)
    assert path == tmp_path / "checkpoints" / "step-00000005"
    for group, named in {**tensors(5), "kinds": kinds}.items():
        into = {name: torch.zeros_like(value) for name, value in named.items()}
        checkpoint.load_tensors(path, group, into)
        for name, value in named.items():
            assert torch.equal(into[name], value), name
    state = checkpoint.read_state(path)
    assert state["step"] == 5
    assert state["channels"] == CHANNELS
    assert checkpoint.groups(path) == ["kinds", "model", "optimizer"]


def test_any_safetensors_reader_opens_the_weights_by_the_models_own_names(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (file,) = (path / "model").glob("*.safetensors")
    plain = load_file(file)
    assert set(plain) == {"layer.weight", "layer.bias"}
    assert torch.equal(plain["layer.weight"], tensors(1)["model"]["layer.weight"])


def test_the_last_ones_are_kept_and_the_others_removed(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000015", "step-00000020"]


def test_nothing_pickled_is_written_or_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert all(name.endswith((".json", ".safetensors")) for name in files), files
    # A planted one, as torch's default reader would open it.
    (path / ".metadata").write_bytes(pickle.dumps({"planted": True}))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle was opened")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    checkpoint.load_weights(tmp_path, Layer(), CHANNELS)
    (path / "model" / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model/\.metadata was not there when it was written"):
        checkpoint.load_weights(tmp_path, Layer(), CHANNELS)


KILLS = ("after one group", "before the seal", "before the rename", "after the rename")


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_during_a_save_leaves_the_checkpoint_before_it(
    tmp_path: Path, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 5)

    def kill(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die() -> None:
        if moment == "after one group":
            create = storage._File.__init__

            def once(self: Any, path: Path, entries: Any) -> None:
                if path.parent.name == "optimizer":
                    kill()
                create(self, path, entries)

            storage._File.__init__ = once
        elif moment == "before the seal":
            seal.write = kill
        elif moment == "before the rename":
            checkpoint.os.rename = kill
        else:
            seal.sync = lambda path: kill() if path.name == "checkpoints" else None
        save(tmp_path, 10)

    assert os.WTERMSIG(in_a_child(save_and_die)) == signal.SIGKILL
    with caplog.at_level(logging.WARNING):
        found = checkpoint.find(tmp_path)
    if moment == "after the rename":
        assert found.name == "step-00000010"
        assert not said(caplog)
    else:
        assert found.name == "step-00000005"
        assert "step 10 is incomplete" in said(caplog)
        assert "step 5 is the last whole one" in said(caplog)
    step = checkpoint.step_of(found)
    loaded = checkpoint.load_weights(tmp_path, Layer(), CHANNELS)
    assert loaded.step == step
    # The next save of that step works and clears what was left.
    if step == 5:
        save(tmp_path, 10)
    caplog.clear()
    assert checkpoint.find(tmp_path).name == "step-00000010"
    assert checkpoint.incomplete(tmp_path) == []
    assert not said(caplog)


def test_a_folder_copied_halfway_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 5)
    half = save(tmp_path, 10)
    (half / checkpoint.COMPLETE).unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.find(tmp_path).name == "step-00000005"
    assert "step 10 is incomplete" in said(caplog)
    assert save(tmp_path, 10) == half
    assert checkpoint.find(tmp_path) == half


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 5)
    big = {"big": torch.randn(300_000)}

    def save_beyond_the_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        with pytest.raises(ValueError, match="cannot write checkpoint") as caught:
            save(tmp_path, 10, average=big)
        assert "File too large" in str(caught.value)
        assert f"the last whole one is {tmp_path / 'checkpoints' / 'step-00000005'}" in str(
            caught.value
        )

    assert in_a_child(save_beyond_the_limit) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert checkpoint.load_weights(tmp_path, Layer(), CHANNELS).step == 5


def test_no_space_while_sealing_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seal, "sync", full)
    with pytest.raises(ValueError, match=r"No space left on device; the last whole one is none"):
        save(tmp_path, 1)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "add", "state"])
def test_a_damaged_file_is_named_and_not_loaded(tmp_path: Path, harm: str) -> None:
    path = save(tmp_path, 1)
    (file,) = (path / "model").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
        message = f"{file.name} has another SHA-256"
    elif harm == "cut":
        file.write_bytes(content[:-4])
        message = f"{file.name} has {len(content) - 4} bytes, not {len(content)}"
    elif harm == "remove":
        file.unlink()
        message = f"{file.name} is missing"
    elif harm == "add":
        shutil.copy(file, file.with_name("more.safetensors"))
        message = "more.safetensors was not there"
    else:
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**state, "step": 2}))
        message = "state.json has"
    model = Layer()
    before = model.layer.weight.clone()
    with pytest.raises(ValueError, match="is damaged") as caught:
        checkpoint.load_weights(tmp_path, model, CHANNELS)
    assert message in str(caught.value)
    assert torch.equal(model.layer.weight, before)


def test_no_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no complete checkpoint; name a run's folder"):
        checkpoint.find(tmp_path)
    (tmp_path / "checkpoints" / ".step-00000003.part").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no complete checkpoint; step 3 is incomplete"):
        checkpoint.find(tmp_path)


def test_the_average_is_preferred_where_there_is_one(tmp_path: Path) -> None:
    mean = {name: value + 100 for name, value in tensors(5)["model"].items()}
    path = save(tmp_path, 5, average=mean)
    model = Layer()
    loaded = checkpoint.load_weights(tmp_path, model, CHANNELS)
    assert loaded.averaged
    assert torch.equal(model.layer.bias, mean["layer.bias"])
    loaded = checkpoint.load_weights(path, model, CHANNELS, prefer_average=False)
    assert not loaded.averaged
    assert torch.equal(model.layer.bias, torch.full((4,), 5.0))
    assert (loaded.checkpoint, loaded.step) == (path, 5)
    save(tmp_path, 6)
    assert not checkpoint.load_weights(tmp_path, model, CHANNELS).averaged


def test_another_shape_or_name_is_an_error_that_lists_both_sides(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="1 of 2 tensors differ") as caught:
        checkpoint.load_weights(tmp_path, Layer(width=5), CHANNELS)
    assert "layer.weight: checkpoint (4, 3) float32, model (4, 5) float32" in str(caught.value)
    other = nn.Module()
    other.head = nn.Linear(3, 4, bias=False)
    with pytest.raises(ValueError, match="3 of 3 tensors differ") as caught:
        checkpoint.load_weights(tmp_path, other, CHANNELS)
    assert "head.weight: checkpoint has none, model (4, 3) float32" in str(caught.value)
    assert "layer.bias: checkpoint (4,) float32, model has none" in str(caught.value)
    with pytest.raises(ValueError, match=r"layer.bias: checkpoint \(4,\) float32, model .*float64"):
        checkpoint.load_weights(tmp_path, Layer().double(), CHANNELS)


def test_another_order_of_channels_is_an_error_that_prints_both(tmp_path: Path) -> None:
    save(tmp_path, 1)
    swapped = {**CHANNELS, "prognostic": ["so@5", "thetao@5"]}
    model = Layer()
    before = model.layer.weight.clone()
    with pytest.raises(
        ValueError, match=r"prognostic channels differ .*in another order"
    ) as caught:
        checkpoint.load_weights(tmp_path, model, swapped)
    assert "has thetao@5, so@5" in str(caught.value)
    assert "the data has so@5, thetao@5" in str(caught.value)
    assert torch.equal(model.layer.weight, before)
    with pytest.raises(ValueError, match="forcing channels differ:") as caught:
        checkpoint.load_weights(tmp_path, model, {**CHANNELS, "forcing": ["uo", "vo"]})
    assert "in another order" not in str(caught.value)
