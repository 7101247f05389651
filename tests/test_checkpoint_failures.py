"""Ranks that save fail together, are killed at any moment, and write while they train."""

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from graticule.parallel.data import local
from graticule.parallel.local import LocalRanks, RankError
from graticule.train import checkpoint, seal
from graticule.train import tensors as storage
from laid_out import in_layout, mesh_of, save_in, shard, wrong_in
from pools import Pools


def refusal(function: Any, *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is what tests look at)
        function(*arguments)
    return str(caught.value)


def load_refused(path: Path, layout: str) -> tuple[str, bool]:
    into = {n: torch.zeros_like(v) for n, v in in_layout(layout)["model"].items()}
    text = refusal(checkpoint.load_tensors, path, "model", into)
    return text, not any(local(value).detach().any() for value in into.values())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_byte_in_one_ranks_file_is_found_by_all(
    number: int, pools: Pools, tmp_path: Path
) -> None:
    path = pools[3].run(save_in, tmp_path, "fsdp 3")[0]
    file = sorted((path / "model").glob("*.safetensors"))[number]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for size in (2, 4):
        results = pools[size].run(load_refused, path, f"fsdp {size}")
        assert len(set(results)) == 1
        text, untouched = results[0]
        assert f"is damaged: model/{file.name} has another SHA-256 than" in text
        assert untouched


def save_limited(run: Path, rank: int, background: bool) -> str:
    """Save where one rank's files may not grow."""
    tensors = {"model": {"big": shard(torch.arange(9e4).reshape(9, -1), mesh_of(3), (Shard(0),)),
                         "other": torch.arange(8e4), "third": torch.arange(7e4)}}  # fmt: skip
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, former[1]))
    saver = checkpoint.Saver(run, keep=9, background=background)
    try:
        if not background:
            return refusal(saver.save, 10, tensors, {})
        saver.save(10, tensors, {})
        return refusal(saver.wait)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_write_is_named_on_all_and_the_former_checkpoint_stays(
    rank: int, background: bool, pools: Pools, tmp_path: Path
) -> None:
    former = pools[3].run(save_in, tmp_path, "fsdp 3")[0]
    text, *others = pools[3].run(save_limited, tmp_path, rank, background)
    assert others == [text] * 2
    assert f"step-00000010: rank {rank}: [Errno 27] File too large" in text
    assert f"the last whole one is {former}" in text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [former.name]
    assert pools[3].run(wrong_in, former, "fsdp 3") == [[]] * 3
    assert pools[3].run(save_in, tmp_path, "fsdp 3", 10)[0].name == "step-00000010"


def save_refused(run: Path, layout: str) -> str:
    return refusal(save_in, run, layout)


def test_a_folder_that_cannot_be_made_is_told_on_all(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    text, other = pools[2].run(save_refused, tmp_path, "fsdp 2")
    assert text == other
    assert "cannot write checkpoint" in text
    assert "the last whole one is none. Make room or access (all ranks write into" in text


def save_wrong(run: Path, kind: str) -> str:
    rank = dist.get_rank()
    tensors: dict[str, Tensor] = {"a": torch.ones(2)}
    if kind == "sum":
        tensors["a"] = DTensor.from_local(torch.ones(2), mesh_of(2), (Partial(),), run_check=False)
    elif kind == "name" and rank == 1:
        tensors["b"] = torch.ones(2, 3)
    elif kind == "shape":
        tensors["a"] = torch.ones(2 + rank)
    elif kind == "strided":
        # As torch's own arithmetic has it; FSDP over tensor parallelism has (4 rows, 3 rows) / 3.
        placements = (_StridedShard(0, split_factor=3), Shard(0))
        local = torch.ones(3 if rank == 0 else 2, 2)
        tensors["a"] = DTensor.from_local(
            local, mesh_of(2, 1), placements, run_check=False, shape=(5, 2), stride=(2, 1)
        )
    return refusal(lambda: checkpoint.save(run, 1, {"model": tensors}, {}, keep=1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sum", "ranks 0, 1: model a: .*holds no part of the tensor; reduce it"),
        ("name", r"1 differ between ranks, model b: rank 0 has none, rank 1 has \(2, 3\) float32"),
        ("shape", r"model a: rank 0 has \(2,\) float32, rank 1 has \(3,\) float32"),
        ("strided", "leaves every rank several parts"),
    ],
)
def test_tensors_that_make_no_whole_ones_are_refused_on_all(
    kind: str, message: str, pools: Pools, tmp_path: Path
) -> None:
    text, other = pools[2].run(save_wrong, tmp_path, kind)
    assert text == other
    with pytest.raises(ValueError, match=message):
        raise ValueError(text)
    assert not (tmp_path / "checkpoints").exists()


# Kills


MOMENTS = ["in a file", "before the seal", "before the rename", "after the rename"]


def save_and_die(run: Path, layout: str, moment: str, background: bool) -> None:
    def kill(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "in a file" and dist.get_rank() == 1:
        storage._File.finish = kill  # type: ignore[method-assign]
    elif moment == "before the seal":
        seal.write = kill
    elif moment == "before the rename":
        os.rename = kill
    elif moment == "after the rename":
        sync = seal.sync
        seal.sync = lambda path: kill() if path.name == "checkpoints" else sync(path)
    save_in(run, layout, 10, background)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_ranks_leave_the_checkpoint_before(
    moment: str, background: bool, tmp_path: Path
) -> None:
    with LocalRanks(2, timeout_seconds=30) as ranks:
        former = ranks.run(save_in, tmp_path, "fsdp 2")[0]
        with pytest.raises(RankError):
            ranks.run(save_and_die, tmp_path, "fsdp 2", moment, background)
        found = checkpoint.find(tmp_path)
        assert found.name == ("step-00000010" if moment == "after the rename" else former.name)
        assert wrong_in(former, "serial") == []
        # The next save of that step works and clears what was left.
        if found == former:
            ranks.run(save_in, tmp_path, "fsdp 2", 10)
    assert checkpoint.find(tmp_path).name == "step-00000010"
    assert checkpoint.incomplete(tmp_path) == []


# In the background


def train_meanwhile(run: Path, layout: str) -> tuple[list[bool], list[str]]:
    """Change the tensors and talk with the others while a thread waits to write them."""
    go_on, write = threading.Event(), storage.write

    def held_up(*arguments: Any) -> Any:
        go_on.wait()
        return write(*arguments)

    storage.write = held_up
    try:
        saver = checkpoint.Saver(run, keep=9, background=True)
        tensors = in_layout(layout)
        path = saver.save(5, tensors, {"next_sample": 40})
        there = []
        for step in range(6):
            for named in tensors.values():
                for value in named.values():
                    local(value).detach().fill_(-1)
            total = torch.tensor(float(dist.get_rank() + step))
            if step == 3 and dist.get_rank() == 1:
                go_on.set()  # the others' threads wait for theirs
            if step == 4:
                go_on.set()
            dist.all_reduce(total)
            size = dist.get_world_size()
            assert total == size * (size - 1) / 2 + size * step
            saver.check()
            there.append(path.exists())
            dist.barrier()
        saver.save(6, in_layout(layout), {"next_sample": 40})
        assert path.exists(), "a save waits for the one before it"
        saver.close()
        saver.check()
        return there, [found.name for found in checkpoint.complete(run)]
    finally:
        storage.write = write


def test_a_save_in_the_background_holds_what_was_there_when_it_began(
    pools: Pools, tmp_path: Path
) -> None:
    for there, names in pools[2].run(train_meanwhile, tmp_path, "fsdp 2"):
        assert there[:4] == [False] * 4
        assert names == ["step-00000005", "step-00000006"]
    for step in (5, 6):
        path = tmp_path / "checkpoints" / f"step-{step:08d}"
        assert pools[4].run(wrong_in, path, "fsdp x tensor") == [[]] * 4


def fail_meanwhile(run: Path, how: str) -> tuple[int, str]:
    """At which step all learn of it."""
    finish = storage._File.finish

    def fail(file: Any) -> Any:
        time.sleep(0.2)
        if how == "mistake" and dist.get_rank() == 1:
            raise AssertionError("a mistake of ours")
        raise OSError(28, "No space left on device")

    storage._File.finish = fail  # type: ignore[method-assign]
    try:
        saver = checkpoint.Saver(run, keep=9, background=True)
        saver.save(5, in_layout("fsdp 2"), {})
        for step in range(1000):
            dist.barrier()
            try:
                saver.check()
            except ValueError as error:
                saver.close()
                return step, str(error)
            time.sleep(0.01 * (1 + dist.get_rank()))
        return -1, ""
    finally:
        storage._File.finish = finish  # type: ignore[method-assign]


def test_an_error_in_the_background_is_raised_on_all_ranks_at_the_same_step(
    pools: Pools, tmp_path: Path
) -> None:
    (first, text), (second, other) = pools[2].run(fail_meanwhile, tmp_path, "disk")
    assert 0 < first == second
    assert text == other
    assert "cannot write checkpoint" in text
    assert "step-00000005: ranks 0, 1: [Errno 28] No space left on device; the last" in text
    (first, text), (second, other) = pools[2].run(fail_meanwhile, tmp_path, "mistake")
    assert 0 < first == second
    assert "rank 0: [Errno 28] No space left on device; rank 1: AssertionError: a mist" in text
    assert text == other
    assert list((tmp_path / "checkpoints").iterdir()) == []


def fall_meanwhile(run: Path) -> str:
    """A rank's thread ends while the others wait for it in an exchange."""
    checkpoint._GRACE_SECONDS = 1
    if dist.get_rank() == 1:
        storage._delivered = lambda *arguments: [][0]
    saver = checkpoint.Saver(run, keep=9, background=True)
    saver.save(5, in_layout("fsdp 2"), {})
    began = time.monotonic()
    while time.monotonic() < began + 30:
        try:
            saver.check()
        except (ValueError, IndexError) as error:
            saver.close()
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_thread_that_falls_is_told_to_ranks_whose_threads_wait_for_it(tmp_path: Path) -> None:
    with LocalRanks(2) as ranks:
        text, other = ranks.run(fall_meanwhile, tmp_path)
    assert other == "IndexError: list index out of range"
    assert f"cannot write step-00000005 of {tmp_path}: another rank failed" in text


def test_one_process_saves_in_the_background_too(tmp_path: Path) -> None:
    saver = checkpoint.Saver(tmp_path, keep=1, background=True)
    for step in (4, 5):
        tensors = in_layout("serial")
        path = saver.save(step, tensors, {"next_sample": 8 * step})
        tensors["model"]["kernel"].zero_()
        while saver._thread is not None:
            saver.check()
    assert checkpoint.complete(tmp_path) == [path]
    assert wrong_in(path, "serial") == []
    (tmp_path / "checkpoints" / ".step-00000006.part").write_text("in the way")
    saver.save(6, in_layout("serial"), {})
    with pytest.raises(ValueError, match=r"cannot write checkpoint .*step-00000006: .*Not a dir"):
        saver.close()
    saver.close()


# Who sees what


def found_by(runs: list[Path]) -> tuple[Path, dict[str, Any], list[str]]:
    path = checkpoint.find(runs[dist.get_rank()])
    return path, checkpoint.read_state(path), checkpoint.groups(path)


def not_found_by(runs: list[Path]) -> str:
    return refusal(checkpoint.find, runs[dist.get_rank()])


def test_all_ranks_go_by_what_rank_0_sees(pools: Pools, tmp_path: Path) -> None:
    ours, old = tmp_path / "ours", tmp_path / "old"
    save_in(old, "serial", 4)
    save_in(ours, "serial", 5)
    results = pools[2].run(found_by, [ours, old])
    assert [path for path, _, _ in results] == [ours / "checkpoints" / "step-00000005"] * 2
    assert all(state["step"] == 5 for _, state, _ in results)
    assert all(groups == ["model", "optimizer"] for _, _, groups in results)
    texts = pools[2].run(not_found_by, [tmp_path / "none", old])
    assert len(set(texts)) == 1
    assert "holds no complete checkpoint" in texts[0]
