"""Processes of one run: who was started by what, how they meet, and that they end together."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from children import started_by_slurm
from graticule.config import MeshConfig
from graticule.parallel import launch, watch
from graticule.parallel.launch import (
    Launch,
    device_of,
    first_host,
    launched,
    mesh_of,
    processes,
)
from graticule.parallel.watch import Agreed, RankFailed

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node3", "MASTER_PORT": "29500",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "4242", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[007-010]",
}  # fmt: skip
"""What a batch script sees, which is no step."""
STEP = BATCH | {
    "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "gpu[008-009]",
}  # fmt: skip


# What the environment says


def test_without_a_launcher_a_process_is_alone() -> None:
    assert launched({}) == Launch(by="", rank=0, size=1, local_rank=0)
    assert launched({"LOCAL_RANK": "3", "WORLD_SIZE": "4"}) == Launch()


def test_torchrun_says_rank_size_and_place() -> None:
    assert launched(TORCHRUN) == Launch(
        by="torchrun", rank=5, size=8, local_rank=1, address="node3", port=29500
    )
    # torchrun inside a Slurm job: the step is torchrun's own.
    assert launched(STEP | TORCHRUN).by == "torchrun"


def test_a_slurm_step_meets_on_its_own_first_machine_at_a_port_of_its_own() -> None:
    found = launched(STEP)
    assert (found.by, found.rank, found.size, found.local_rank) == ("Slurm", 6, 8, 2)
    assert found.address == "gpu008"
    assert 10000 <= found.port < 30000
    assert launched(STEP | {"SLURM_PROCID": "0"}).port == found.port
    others = [{"SLURM_STEP_ID": "4"}, {"SLURM_JOB_ID": "4243"}]
    assert len({found.port, *(launched(STEP | other).port for other in others)}) == 3
    named = launched(STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "5000"})
    assert (named.address, named.port) == ("head", 5000)
    without = {key: value for key, value in STEP.items() if key != "SLURM_STEP_NODELIST"}
    assert launched(without).address == "gpu007"


def test_a_batch_script_and_a_shell_of_an_allocation_wait_for_nobody() -> None:
    assert launched(BATCH).size == 1
    assert launched({k: v for k, v in BATCH.items() if k != "SLURM_PROCID"}).size == 1
    # srun --pty bash in an allocation of 8 tasks: a step with one.
    assert launched(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).size == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not: start with torchrun"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x' in the environment is no number"),
        (TORCHRUN | {"RANK": "8"}, "torchrun says that this is process 8 of 8: ranks count from 0"),
        (STEP | {"SLURM_LOCALID": ""}, "SLURM_LOCALID='' in the environment is no number"),
        (STEP | {"SLURM_STEP_NODELIST": "gpu[08"}, "'gpu.08' does not say where rank 0 runs; set"),
    ],
)
def test_an_environment_that_contradicts_itself_is_told(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launched(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[001-004]", "gpu001"),
        ("gpu[007,009-012]", "gpu007"),
        ("gpu[3-4,9],cpu[1-2]", "gpu3"),
        ("cpu-a,gpu[3-4]", "cpu-a"),
        ("rack[2-3]n[05-07]", "rack2n05"),
        ("n[1-2]-ib0.cluster", "n1-ib0.cluster"),
        ("nid000123", "nid000123"),
    ],
)
def test_the_first_machine_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "gpu[", "gpu[a-b]", "[", "gpu[1-2", ",gpu1", "gpu1;2 x"])
def test_what_is_no_list_of_machines_is_told(nodes: str) -> None:
    with pytest.raises(ValueError, match="does not say where rank 0 runs; set MASTER_ADDR"):
        first_host(nodes)


# The mesh that so many processes make


def sizes_of(size: int, **keys: Any) -> tuple[int, ...]:
    sizes = mesh_of(MeshConfig(**keys), size)
    assert list(sizes) == ["data", "member", "window", "sequence", "tensor"]
    return tuple(sizes.values())


def test_data_is_what_the_other_axes_leave() -> None:
    assert sizes_of(1) == (1, 1, 1, 1, 1)
    assert sizes_of(8) == (8, 1, 1, 1, 1)
    assert sizes_of(8, window=2, tensor=2) == (2, 1, 2, 1, 2)
    assert sizes_of(8, window=4, sequence=2) == (1, 1, 4, 2, 1)
    assert sizes_of(6, data=3, sequence=2) == (3, 1, 1, 2, 1)


@pytest.mark.parametrize(
    ("size", "keys", "message"),
    [
        (1, {"window": 4},
         r"mesh.window=4 is 4 processes, and 1 was started: torchrun --nproc-per-node 4"
         r" -m graticule \.\.\., or srun --ntasks 4 graticule"),
        (6, {"window": 2, "tensor": 2},
         r"6 processes were started, and mesh.window=2 x mesh.tensor=2: 4 share each sample,"
         r" which leaves 2 over; start 4 or 8, or change mesh"),
        (6, {"window": 4, "tensor": 2}, "mesh.window=4 x mesh.tensor=2 is 8 processes, and 6 were"),
        (4, {"data": 2}, "mesh.data=2 is 2 processes, and 4 were started"),
        (4, {"data": 1}, "mesh.data=1 is 1 process, and 4 were started"),
        (2, {"data": 2, "window": 2}, "mesh.data=2 x mesh.window=2 is 4 processes, and 2 were"),
        (4, {"window": 4, "sequence": 0}, "mesh.sequence=0 leaves the split of mesh.window open"),
    ],
)  # fmt: skip
def test_processes_that_do_not_make_the_mesh_are_told_with_a_way_out(
    size: int, keys: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_of(MeshConfig(**keys), size)


# Devices


def test_a_device_that_cannot_be_used_is_told() -> None:
    assert device_of("cpu", 3, 4) == torch.device("cpu")
    for name in ("gpu0", "meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"--device {name} cannot be used here: "):
            device_of(name)


def test_each_process_of_a_machine_has_the_gpu_of_its_number() -> None:
    cuda = torch.device("cuda")
    assert [launch._gpu(cuda, rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert launch._gpu(cuda, 3, 1) == 0  # the launcher shows it its own alone
    with pytest.raises(ValueError, match="process 4 of this machine finds 4 GPUs: start 4"):
        launch._gpu(cuda, 4, 4)
    with pytest.raises(ValueError, match="--device cuda:1 names one GPU for several processes"):
        launch._gpu(torch.device("cuda:1"), 0, 4)


# Together


def test_a_process_that_is_alone_starts_no_group() -> None:
    with processes("cpu") as here:
        assert (here.rank, here.size, here.device) == (0, 1, torch.device("cpu"))
        assert (here.speaks, here.blame) == (True, "")
        assert not dist.is_initialized()


def told(folder: Path) -> list[str]:
    """What each rank wrote, in order of rank."""
    return [path.read_text() for path in sorted(folder.iterdir())]


def write(folder: Path, rank: int, *words: Any) -> None:
    (folder / f"rank-{rank}").write_text(" ".join(map(str, words)))


def test_the_tasks_of_a_step_meet_and_part(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with processes("cpu") as here, processes("cpu") as again:
            total = torch.tensor(float(rank))
            dist.all_reduce(total)
            write(tmp_path, rank, here.rank, here.size, again.size, here.speaks, total.item())
        assert not dist.is_initialized()

    assert started_by_slurm(3, work) == [0, 0, 0]
    assert told(tmp_path) == ["0 3 3 True 3.0", "1 3 3 False 3.0", "2 3 3 False 3.0"]


def test_processes_may_meet_again_and_again(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for number in range(4):
            with processes("cpu"):
                total = torch.tensor(float(number + rank))
                dist.all_reduce(total)
                assert total.item() == 2 * number + 1
                if number == 2 and rank == 0:
                    time.sleep(0.5)

    assert started_by_slurm(2, work) == [0, 0]


class End(Agreed, KeyboardInterrupt):
    """What all raise alike."""


def test_what_all_raise_alike_is_no_failure(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with pytest.raises(End), processes("cpu") as here:
            raise End
        write(tmp_path, rank, here.speaks, repr(here.blame))

    assert started_by_slurm(2, work) == [0, 0]
    assert told(tmp_path) == ["True ''", "False ''"]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_rank_that_fails_says_so_and_the_others_end_with_it(
    failing: int, tmp_path: Path
) -> None:
    def work(rank: int) -> None:
        try:
            with processes("cpu") as here:
                if rank == failing:
                    raise ValueError("thetao.nc is torn")
                dist.all_reduce(torch.zeros(1))
        except ValueError as error:
            write(tmp_path, rank, here.speaks, here.blame, error)
        except RankFailed as error:
            write(tmp_path, rank, error.told, error.stopped, error)

    began = time.monotonic()
    assert started_by_slurm(3, work) == [0, 0, 0]
    assert time.monotonic() - began < 30
    for rank, text in enumerate(told(tmp_path)):
        if rank == failing:
            assert text == f"True rank {rank}:  thetao.nc is torn"
        else:
            first = f"rank {failing} failed first: ValueError: thetao.nc is torn"
            assert text == f"True False {first}"


def test_what_all_have_done_wrong_is_nobodys_in_particular_and_told_once(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        try:
            with processes("cpu") as here:
                raise ValueError("unknown key")
        except ValueError:
            write(tmp_path, rank, "speaks", repr(here.blame))
        except RankFailed:
            write(tmp_path, rank, "silent")

    assert started_by_slurm(3, work) == [0, 0, 0]
    assert sorted(told(tmp_path)) == ["silent", "silent", "speaks ''"]


def test_a_rank_that_hears_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE", 2.0)
    monkeypatch.setattr(watch, "ALIKE", 0.2)

    def work(rank: int) -> None:
        with processes("cpu"):
            if rank == 1:
                raise ValueError("thetao.nc is torn")
            time.sleep(600)  # as one that waits for a GPU does

    assert started_by_slurm(2, work) == [1, 99]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(killed: int, tmp_path: Path) -> None:
    def together(rank: int) -> None:
        with processes("cpu"):
            dist.all_reduce(torch.zeros(1))
            if rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.zeros(1))

    def work(rank: int) -> None:
        with pytest.raises(RankFailed, match="ended without a word") as caught:
            together(rank)
        assert not caught.value.told

    codes = started_by_slurm(2, work)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 0


def test_a_port_that_another_program_has_is_told(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        import socket

        with socket.socket() as other:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            other.listen()
            os.environ["SLURM_STEP_NUM_TASKS"] = "2"
            message = r"process 0 of 2, started by Slurm, did not meet"
            with pytest.raises(ValueError, match=message), processes("cpu"):
                pass

    assert started_by_slurm(1, work) == [0]
