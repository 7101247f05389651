"""What one layout saves any other loads, weights and optimizer, whole and unmixed."""

import hashlib
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from graticule.parallel import box
from graticule.parallel.data import local
from graticule.train import checkpoint, parts
from graticule.train import tensors as storage
from graticule.train.optimizer import empty_optimizer_tensors, optimizer_tensors, restore_optimizer
from laid_out import (
    LAYOUTS,
    in_layout,
    mesh_of,
    run_in,
    save_in,
    shard,
    wholes,
    wrong_in,
)
from pools import Pools


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layout_saves_every_layout_loads(layout: str, pools: Pools, tmp_path: Path) -> None:
    path, *others = run_in(pools, layout, save_in, tmp_path, layout)
    assert path == tmp_path / "checkpoints" / "step-00000005"
    assert all(other == path for other in others)
    assert checkpoint.incomplete(tmp_path) == []
    for other in LAYOUTS:
        assert run_in(pools, other, wrong_in, path, other) == [[]] * LAYOUTS[other]
    for group, named in wholes().items():
        files = sorted((path / group).glob("*.safetensors"))
        count = len(files)
        assert [f.name for f in files] == [
            f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
        ]
        found = [load_file(file) for file in files]
        assert sum(map(len, found)) == len(named)
        plain = {name: value for tensors in found for name, value in tensors.items()}
        assert all(torch.equal(plain[name], value) for name, value in named.items())


def balanced(run: Path) -> tuple[dict[str, Any], list[int]]:
    named = {f"layer{i}": torch.full((100, 10), float(i)) for i in range(8)}
    named["layer8"] = torch.arange(4000.0).reshape(400, 10)
    entries = parts.plan({"model": named}, checkpoint.everyone())
    loads = [sum(e.bytes for e in entries if e.owner == r) for r in range(dist.get_world_size())]
    held = parts.held({"model": named}, entries, dist.get_rank())
    return {key[1]: len(value) for key, value in held.items()}, loads


def test_ranks_share_what_is_replicated_equally_and_copy_their_share_only(
    pools: Pools, tmp_path: Path
) -> None:
    results = pools[3].run(balanced, tmp_path)
    names = [name for held, _ in results for name in held]
    assert sorted(names) == [f"layer{i}" for i in range(9)]
    assert all(loads == [16_000] * 3 for _, loads in results)


Spec = tuple[tuple[int, ...], str, str]
DRAWN = ["(4)", "(2, 2)", "tensor of (2, 2)", "whole"]


@st.composite
def specs(draw: Any) -> Spec:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))

    def cut() -> str:
        kind = draw(st.sampled_from(DRAWN))
        axes = 2 if kind == "(2, 2)" else 1
        dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
        return f"{kind}:{[draw(dims) for _ in range(axes)]}:{draw(st.booleans())}"

    return shape, cut(), cut()


def drawn(whole: Tensor, cut: str) -> Tensor:
    kind, dims, strided = cut.split(":")
    if kind == "whole":
        return whole.clone()
    mesh = {"(4)": lambda: mesh_of(4), "(2, 2)": lambda: mesh_of(2, 2)}.get(
        kind, lambda: mesh_of(2, 2)["tensor"]
    )()
    axes = [None if d in ("None", "") else int(d) for d in dims.strip("[]").split(", ")]
    placements: list[Any] = [Replicate() if d is None else Shard(d) for d in axes]
    if strided == "True" and len(axes) == 2 and axes[0] == axes[1] is not None:
        placements[0] = _StridedShard(axes[0], split_factor=2)
    return shard(whole, mesh, placements)


def mixed_up(run: Path, chosen: list[Spec]) -> list[Spec]:
    """Save each tensor in one layout, load it in another; which of them do not come back."""
    usual, storage._ROUND_BYTES = storage._ROUND_BYTES, 256
    saved, into, expected, end = {}, {}, {}, 1.0
    for number, (shape, first, second) in enumerate(chosen):
        whole = torch.arange(end, end + math.prod(shape)).reshape(shape)
        end += math.prod(shape)
        saved[f"{number}"] = drawn(whole, first)
        expected[f"{number}"] = drawn(whole, second)
        into[f"{number}"] = torch.full_like(expected[f"{number}"], -1)
    try:
        path = checkpoint.save(run, 1, {"model": saved}, {}, keep=1)
        checkpoint.load_tensors(path, "model", into)
    finally:
        storage._ROUND_BYTES = usual
    locals_ = {n: (local(into[n]).detach(), local(expected[n]).detach()) for n in into}
    return [chosen[int(n)] for n, (a, b) in locals_.items() if not torch.equal(a, b)]


def test_random_layouts_come_back_in_other_random_layouts(
    pools: Pools, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seen = 0

    @settings(max_examples=12, deadline=None, database=None, derandomize=True)
    @given(st.lists(specs(), min_size=20, max_size=20))
    def check(chosen: list[Spec]) -> None:
        nonlocal seen
        seen += len(chosen)
        assert pools[4].run(mixed_up, tmp_path_factory.mktemp("run"), chosen) == [[]] * 4

    check()
    assert seen >= 200


def read_by_torch(path: Path) -> list[str]:
    """As torch's distributed checkpoint reads it, into FSDP x tensor."""
    wanted = {n: v for n, v in in_layout("fsdp x tensor")["model"].items() if v.numel()}
    into = {name: torch.zeros_like(value) for name, value in wanted.items()}
    reader = HuggingFaceStorageReader(path=str(path / "model"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_load(dict(into), storage_reader=reader, no_dist=True)
    return [
        name for name in wanted
        if not torch.equal(local(into[name]).detach(), local(wanted[name]).detach())
    ]  # fmt: skip


def test_torchs_distributed_checkpoint_reads_the_files_too(pools: Pools, tmp_path: Path) -> None:
    path = pools[3].run(save_in, tmp_path, "fsdp 3")[0]
    assert pools[4].run(read_by_torch, path) == [[]] * 4


def test_uneven_parts_that_fsdp_and_torch_cut_otherwise_are_fsdps() -> None:
    """7 rows over 2 tensor ranks are 4 and 3, over 3 FSDP ranks 2, 2, 0 and 1, 1, 1; going from
    left to right torch would give the last row to the tensor rank that has none."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    rows = {}
    for weights in range(3):
        for tensor in range(2):
            size = [(2, 2, 0), (1, 1, 1)][tensor][weights]
            mesh = Mesh((3, 2), (weights, tensor))
            held = box._box_on(mesh, placements, (7, 2), (size, 2))
            rows[weights, tensor] = list(range(held.starts[0], held.starts[0] + held.sizes[0]))
    assert rows == {
        (0, 0): [0, 1], (1, 0): [2, 3], (2, 0): [], (0, 1): [4], (1, 1): [5], (2, 1): [6],
    }  # fmt: skip


class Mesh(SimpleNamespace):
    """What `box_of` asks a device mesh for, without its processes."""

    def __init__(self, shape: tuple[int, ...], place: tuple[int, ...]) -> None:
        super().__init__(shape=shape, size=lambda a: shape[a], get_coordinate=lambda: list(place))


# Real models


def build(sizes: tuple[int, int]) -> tuple[nn.Module, torch.optim.AdamW]:
    """FSDP over `sizes[0]`, tensor parallelism over `sizes[1]` ranks."""
    torch.manual_seed(sum(sizes))  # another start in each layout
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(3, 8))
    model.add_module("fc2", nn.Linear(8, 5, bias=False))
    model.add_module("norm", nn.LayerNorm(5))
    if sizes[1] > 1:
        split = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
        parallelize_module(model, mesh_of(*sizes)["tensor"], split)
    if sizes[0] > 1:
        mesh = mesh_of(*sizes)["weights"] if sizes[1] > 1 else mesh_of(sizes[0])
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def whole_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, str]:
    """Digests of the gathered weights and optimizer tensors."""
    tensors = {**model.state_dict(), **optimizer_tensors(optimizer, model)}
    digests = {}
    for name, value in tensors.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        digests[name] = hashlib.sha256(full.detach().numpy().tobytes()).hexdigest()
    return digests


def train_and_save(run: Path, sizes: tuple[int, int]) -> dict[str, str]:
    model, optimizer = build(sizes)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3).sin() + step).square().sum().backward()
        optimizer.step()
    groups = {"model": model.state_dict(), "optimizer": optimizer_tensors(optimizer, model)}
    checkpoint.save(run, 2, groups, {}, keep=1)
    return whole_state(model, optimizer)


def resumed(run: Path, sizes: tuple[int, int]) -> dict[str, str]:
    model, optimizer = build(sizes)
    path = checkpoint.find(run)
    checkpoint.load_tensors(path, "model", model.state_dict())
    state = empty_optimizer_tensors(model, checkpoint.saved_names(path, "optimizer"))
    checkpoint.load_tensors(path, "optimizer", state)
    restore_optimizer(optimizer, model, state)
    return whole_state(model, optimizer)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_weights_and_optimizer_are_the_same_when_resumed_on_one_and_on_four_ranks(
    sizes: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    """Case 42."""
    before, *others = pools[math.prod(sizes)].run(train_and_save, tmp_path, sizes)
    assert len(before) == 5 + 3 * 5
    assert all(other == before for other in others)
    assert resumed(tmp_path, (1, 1)) == before
    assert pools[4].run(resumed, tmp_path, (4, 1)) == [before] * 4
    assert pools[4].run(resumed, tmp_path, (2, 2)) == [before] * 4
