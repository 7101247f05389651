"""Ranks on this machine: they answer together, fail together and end together."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from graticule.mesh import AXES, SAMPLE, WEIGHTS, Mesh
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks, RankError
from graticule.train.foresee import fake_ranks


def _sum_of_ranks() -> float:
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    return float(x)


def _fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("thetao.nc is torn")
    dist.barrier()


def _hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def _ends_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def test_ranks_run_a_function_together_and_again():
    with LocalRanks(3) as ranks:
        assert ranks.run(_sum_of_ranks) == [3.0] * 3
        assert ranks.run(_sum_of_ranks) == [3.0] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_that_failed_is_named_and_the_pool_starts_anew(rank):
    with LocalRanks(3) as ranks:
        with pytest.raises(RankError, match=f"rank {rank}: [^$]*thetao.nc is torn"):
            ranks.run(_fails_on, rank)
        assert ranks.run(_sum_of_ranks) == [3.0] * 3


def test_a_rank_that_ends_is_named():
    with LocalRanks(2) as ranks, pytest.raises(RankError, match="rank 1: ended without a word"):
        ranks.run(_ends_on, 1)


def _tensors() -> list[torch.Tensor]:
    return [torch.full((1000,), float(dist.get_rank())) for _ in range(3)]


def test_tensors_come_back_also_where_torch_shares_memory_between_processes():
    import torch.multiprocessing  # noqa: F401  it changes how multiprocessing pickles tensors

    with LocalRanks(2) as ranks:
        first, second = ranks.run(_tensors)
    assert [float(x.sum()) for x in (*first, *second)] == [0.0] * 3 + [1000.0] * 3


def test_a_rank_that_hangs_ends_all_in_time():
    with LocalRanks(2, timeout_seconds=2) as ranks:
        began = time.monotonic()
        with pytest.raises(RankError):
            ranks.run(_hangs_on, 1)
        assert time.monotonic() - began < 20
        assert ranks.run(_sum_of_ranks) == [1.0] * 2


def _mesh_places(sizes: dict[str, int]) -> tuple[dict[str, int], int, list[list[int]]]:
    mesh = Mesh(sizes)
    groups = [mesh.group(*axes) for axes in ((), ("sequence",), ("tensor",), SAMPLE, WEIGHTS)]
    members = [[mesh.rank] if g is None else dist.get_process_group_ranks(g) for g in groups]
    return {axis: mesh.index(axis) for axis in AXES}, mesh.sample_index, members


def test_ranks_are_numbered_with_tensor_fastest_and_know_their_groups():
    with LocalRanks(8) as ranks:
        places = ranks.run(_mesh_places, {"data": 2, "sequence": 2, "tensor": 2})
    place, sample, members = places[6]
    assert place == {"data": 1, "member": 0, "window": 0, "sequence": 1, "tensor": 0}
    assert sample == 2
    assert members == [[*range(8)], [4, 6], [6, 7], [4, 5, 6, 7], [0, 2, 4, 6]]


def _places_of_copies() -> tuple[int, list[int]]:
    """Of a sharded tensor and of what is made of it."""
    mesh, _ = Mesh({"data": 2}).device_meshes
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    copies = (x.clone(), x.detach(), torch.zeros_like(x), 2 * x)
    return x.device_mesh.get_coordinate()[0], [y.device_mesh.get_coordinate()[0] for y in copies]


def test_copies_of_sharded_tensors_are_where_this_rank_is_whoever_it_was_before():
    for rank in (1, 0):
        with fake_ranks(rank, 2):
            assert _places_of_copies() == (rank, [rank] * 4)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    assert _places_of_copies() == (1, [1] * 4)
    dist.destroy_process_group()
    with LocalRanks(2) as ranks:
        assert ranks.run(_places_of_copies) == [(0, [0] * 4), (1, [1] * 4)]


def test_a_mesh_of_another_size_than_the_processes_is_refused():
    with pytest.raises(ValueError, match=r"window 3 x .* = 3 processes and 1 were started"):
        Mesh({"window": 3})


def _exchanged(method: str) -> list[float]:
    link = Link(dist.group.WORLD, method)  # type: ignore[arg-type]
    ours = link.rank
    # Rank r has r + peer numbers for each peer, r x 10 + peer all of them.
    send = [0 if peer == ours else ours + peer for peer in range(3)]
    packed = torch.cat([torch.full((n,), 10.0 * ours + p) for p, n in enumerate(send)])
    return link.exchange(packed, send, send, "test").tolist()


@pytest.mark.parametrize("method", ["all_to_all", "p2p"])
def test_each_rank_receives_what_was_for_it_in_order_of_rank(method):
    with LocalRanks(3) as ranks:
        got = ranks.run(_exchanged, method)
    assert got == [[10] + [20] * 2, [1] + [21] * 3, [2] * 2 + [12] * 3]


def _collected() -> tuple[list, list, list, dict]:
    link = Link(dist.group.WORLD)
    x = torch.arange(2.0) + 10 * link.rank
    parts = torch.stack([x, -x])
    return (
        link.gather(x, "g").tolist(),
        link.scatter_sum(parts, "s").tolist(),
        link.sum(x.clone(), "a").tolist(),
        dict(link.sent),
    )


def test_gather_scatter_sum_and_sum_are_what_they_say_and_count_their_bytes():
    with LocalRanks(2) as ranks:
        for rank, (gathered, scattered, summed, sent) in enumerate(ranks.run(_collected)):
            assert gathered == [[0, 1], [10, 11]]
            assert scattered == ([10, 12] if rank == 0 else [-10, -12])
            assert summed == [10, 12]
            assert sent == {"g": 8, "s": 8, "a": 8}


def _sums(count: int) -> list[torch.Tensor]:
    link = Link(dist.group.WORLD)
    ours = torch.randn(count, generator=torch.Generator().manual_seed(link.rank))
    return [ours.clone(), link.sum(ours, "a")]


@pytest.mark.parametrize("count", [1, 7, 4096, 4097])
def test_few_and_many_numbers_have_the_same_sum_on_all_ranks(count: int):
    with LocalRanks(3) as ranks:
        each = ranks.run(_sums, count)
    want = sum(ours.double() for ours, _ in each)
    assert all(torch.equal(got, each[0][1]) for _, got in each)
    assert torch.allclose(each[0][1].double(), want, atol=1e-6)
