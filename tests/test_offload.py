"""Offloaded boundaries: the same bits in every step, nothing left behind, and errors that tell."""

import gc
import os
import resource
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graticule.memory import carrier as carrier_module
from graticule.memory import trace_memory
from graticule.memory.offload import Host
from graticule.parallel.local import LocalRanks, RankError

LEADS, UNITS, ROWS, WIDTH = 3, 4, 6, 32
FIELD = ROWS * WIDTH * 4


class Unit(nn.Module):
    """Mixes a tensor and, where there are two, another one; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        mixed = self.second(nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.2))
        return nn.functional.layer_norm(x + (mixed if skip is None else mixed * skip), (WIDTH,))


def chain(device: str = "cpu") -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(Unit() for _ in range(UNITS)).to(device)


def rollout(units: nn.ModuleList, x: Tensor, host: Host | None = None) -> list[Tensor]:
    """Losses of the leads. The last unit of a lead takes the lead's input too, and what leaves the
    first unit is a slice of a wider tensor, off the alignment of a vector."""
    losses = []
    target = torch.linspace(-1, 1, WIDTH, device=x.device)
    for lead in range(1, LEADS + 1):
        start = x
        for index, unit in enumerate(units):
            inputs = (x, start) if index == UNITS - 1 else (x,)
            away = host.boundary(*inputs, lead=lead) if host else None
            with away or nullcontext():
                x = checkpoint(unit, *inputs, use_reentrant=False)
            if index == 0:
                x = torch.cat([x[:, :1], x], dim=1)[:, 1:]
        losses.append((x * target).square().mean())
    return losses


def sent(host: Host, x: Tensor) -> Tensor:
    """exp(x), of which the boundary is away."""
    with host.boundary(x):
        return checkpoint(torch.exp, x, use_reentrant=False)


def steps(
    units: nn.ModuleList, host: Host | None, count: int, *, device: str = "cpu", cut: bool = False
) -> list[list[Tensor]]:
    """Loss, gradient of the input and of the parameters, at each of `count` optimizer steps."""
    results = []
    optimizer = torch.optim.SGD(units.parameters(), lr=0.1)
    for step in range(count):
        torch.manual_seed(10 + step)
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        optimizer.zero_grad()
        losses = rollout(units, x * 2, host)
        if cut:  # a backward pass for each lead, last one first
            for lead in reversed(range(LEADS)):
                if host:
                    host.flush()
                    host.prefetch(lead + 1)
                losses[lead].backward(retain_graph=lead > 0)
        else:
            torch.stack(losses).sum().backward()
        gradients = [p.grad.clone() for p in units.parameters()]
        results.append([torch.stack(losses).detach(), x.grad.clone(), *gradients])
        optimizer.step()
    return results


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert b.isfinite().all()
            assert torch.equal(a, b), f"step {step}, tensor {number}: {(a - b).abs().max()}"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled(host: Host) -> Host:
    """All parts are gone, without a garbage collector's help, and what they held is free again."""
    host.flush()
    assert not host._away
    assert not host._copies
    assert host._bytes == 0
    return host


@pytest.mark.parametrize("buffers", [0, 1, 2])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_losses_and_gradients_are_bitwise_the_same_from_the_first_step_on(
    place: str, buffers: int, tmp_path: Path
) -> None:
    expected = steps(chain(), None, 3)
    assert not torch.equal(expected[0][0], expected[1][0])
    with Host("cpu", folder=tmp_path if place == "disk" else None, buffers=buffers) as host:
        assert_equal(steps(chain(), host, 3), expected)
        settled(host)
        told = host.report()
    # UNITS boundaries a lead, and the lead's input a second time, which is sent once.
    assert told.num_packed == told.num_unpacked == 3 * LEADS * (UNITS + 1)
    assert told.sent_bytes >= 3 * LEADS * UNITS * FIELD
    assert (told.disk_bytes > 0) == (place == "disk")
    assert told.waited_seconds > 0 or place == "memory"


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_backward_pass_for_each_lead_gives_the_same_bits(place: str, tmp_path: Path) -> None:
    expected = steps(chain(), None, 2, cut=True)
    with Host("cpu", folder=tmp_path if place == "disk" else None) as host:
        assert_equal(steps(chain(), host, 2, cut=True), expected)
        settled(host)


def test_the_second_step_takes_no_new_buffers() -> None:
    with Host("cpu") as host:
        units = chain()
        steps(units, host, 1)
        first = host.report()
        steps(units, host, 2)
        told = host.report()
    assert first.num_buffers == LEADS * UNITS
    assert (told.num_buffers, told.buffer_bytes) == (first.num_buffers, first.buffer_bytes)
    assert told.peak_bytes == first.peak_bytes == first.sent_bytes


def test_the_second_step_takes_no_more_of_the_disk(tmp_path: Path) -> None:
    with Host("cpu", folder=tmp_path, buffers=2) as host:
        units = chain()
        steps(units, host, 1)
        first = host.report()
        steps(units, host, 2)
        told = host.report()
    assert told.disk_bytes == first.disk_bytes == first.sent_bytes
    # Host memory only for what is being written.
    assert told.num_buffers <= 2


def test_only_the_inputs_leave() -> None:
    unit, mask = Unit(), torch.ones(ROWS, WIDTH)
    x = torch.ones(ROWS, WIDTH, requires_grad=True) * 1
    with Host("cpu") as host:
        with host.boundary(x):
            y = checkpoint(unit, x, mask, use_reentrant=False)
            z = y * unit.first.weight[:ROWS]  # saves its two factors
        assert host.report().num_packed == 1
        assert host.report().sent_bytes == FIELD
        z.sum().backward()
        assert host.report().num_unpacked == 1


def test_a_tensor_without_a_gradient_leaves_and_comes_back() -> None:
    unit, skip = Unit(), torch.rand(ROWS, WIDTH)
    x = torch.rand(ROWS, WIDTH, requires_grad=True)

    def gradient(host: Host | None) -> Tensor:
        torch.manual_seed(3)
        with host.boundary(x, skip) if host else nullcontext():
            y = checkpoint(unit, x, skip, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)[0]

    with Host("cpu") as host:
        assert torch.equal(gradient(host), gradient(None))
        assert host.report().num_packed == 2


def test_an_empty_tensor_stays() -> None:
    x, empty = torch.rand(ROWS, WIDTH, requires_grad=True), torch.rand(0, WIDTH)
    seen: list[Tensor] = []

    def unit(x: Tensor, empty: Tensor) -> Tensor:
        seen.append(empty)
        return torch.cat([x.exp(), empty])

    with Host("cpu") as host:
        with host.boundary(x, empty):
            y = checkpoint(unit, x, empty, use_reentrant=False)
        y.sum().backward()
        assert host.report().num_packed == 1
    assert seen[1].shape == (0, WIDTH)
    assert torch.equal(x.grad, x.exp())


def test_tensors_of_one_storage_are_sent_once_and_counted() -> None:
    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    seen: list[Tensor] = []

    def unit(*tensors: Tensor) -> Tensor:
        seen[:] = tensors
        return sum(tensor.exp().sum() for tensor in tensors)

    with Host("cpu") as host:
        inputs = x, x.t(), x[2:4], x.view(-1)
        with host.boundary(*inputs):
            first = checkpoint(unit, *inputs, use_reentrant=False)
        with host.boundary(x):
            second = checkpoint(unit, x, use_reentrant=False)
        assert host.report().num_packed == 5
        assert host.report().sent_bytes == FIELD
        del first, inputs
        assert host._bytes == FIELD, "the second unit still needs it"
        second.backward()
        del second
        with torch.no_grad():
            x += 1
        inputs = x, x.t()
        with host.boundary(*inputs):
            third = checkpoint(unit, *inputs, use_reentrant=False)
        assert host.report().sent_bytes == 2 * FIELD, "what was written to is another tensor"
        third.backward()
        # What shared memory before shares it again.
        assert seen[0].untyped_storage()._cdata == seen[1].untyped_storage()._cdata
        seen.clear()
        del third, inputs
        settled(host)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype that is a view: cut, permuted, widened, with steps."""
    dtype = draw(st.sampled_from([
        torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int16,
        torch.bool, torch.uint8,
    ]))  # fmt: skip
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        begin = draw(st.integers(0, size - 1))
        tensor = tensor.narrow(dim, begin, draw(st.integers(1, size - begin)))
    if tensor.dim():
        order = draw(st.permutations(range(tensor.dim())))
        tensor = tensor.permute(order)[:: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor.conj() if dtype.is_complex and draw(st.booleans()) else tensor


@settings(max_examples=50, deadline=None)
@given(tensors=st.lists(views(), min_size=1, max_size=3), disk=st.booleans())
def test_any_tensor_comes_back_as_it_was(
    tensors: list[Tensor], disk: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    anchor = torch.ones(1, requires_grad=True)
    calls: list[tuple[Tensor, ...]] = []

    def unit(anchor: Tensor, *tensors: Tensor) -> Tensor:
        calls.append(tensors)
        return anchor.exp()

    folder = tmp_path_factory.getbasetemp() if disk else None
    with Host("cpu", folder=folder) as host:
        with host.boundary(*tensors):
            y = checkpoint(unit, anchor, *tensors, use_reentrant=False)
        y.sum().backward()
        assert host.report().num_unpacked == len(tensors)
    for sent, back in zip(tensors, calls[1], strict=True):
        assert (back.dtype, back.device, back.shape) == (sent.dtype, sent.device, sent.shape)
        assert torch.equal(back, sent)
        if not sent.is_conj():
            assert back.stride() == sent.stride()
            assert back.data_ptr() % 64 == sent.storage_offset() * sent.itemsize % 64
        assert back.untyped_storage()._cdata != sent.untyped_storage()._cdata


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_graph_that_is_retained_can_be_differentiated_again(place: str, tmp_path: Path) -> None:
    units, x = chain(), torch.rand(ROWS, WIDTH, requires_grad=True)
    with Host("cpu", folder=tmp_path if place == "disk" else None) as host:
        loss = torch.stack(rollout(units, x, host)).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], first)
        assert torch.equal(torch.autograd.grad(loss, x)[0], first)
        assert host.report().num_unpacked == 3 * host.report().num_packed
        del loss
        settled(host)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_graph_that_is_dropped_frees_its_buffers(place: str, tmp_path: Path) -> None:
    units = chain()
    with Host("cpu", folder=tmp_path if place == "disk" else None) as host:
        for _ in range(2):
            losses = rollout(units, torch.rand(ROWS, WIDTH, requires_grad=True), host)
            assert host._bytes > 0
            del losses
            settled(host)
            assert not host._leaving
        assert host.report().num_buffers <= LEADS * UNITS + 1
        assert host.report().num_unpacked == 0
        with pytest.raises(ZeroDivisionError):
            _ = rollout(units, torch.rand(ROWS, WIDTH, requires_grad=True), host), 1 / 0
        settled(host)


def test_a_boundary_that_was_fetched_ahead_and_is_not_needed_is_let_go(tmp_path: Path) -> None:
    units = chain()
    with Host("cpu", folder=tmp_path) as host:
        losses = rollout(units, torch.rand(ROWS, WIDTH, requires_grad=True), host)
        host.prefetch(LEADS)
        assert host._ahead is not None
        host.prefetch(1)
        assert host._ahead.lead == 1
        del losses
        settled(host)
        assert host._ahead is None


def test_without_gradients_nothing_leaves() -> None:
    with Host("cpu") as host, torch.no_grad():
        rollout(chain(), torch.rand(ROWS, WIDTH), host)
        assert host.report().num_packed == 0


def held_after(host: Host, lead: int) -> list[int]:
    """Bytes fetched ahead at each call of a unit in the backward pass of one lead."""
    ahead: list[int] = []

    def unit(x: Tensor) -> Tensor:
        fetched = host._ahead.fetched.values() if host._ahead else ()
        ahead.append(sum(fetch.memory.nbytes for fetch in fetched))
        return x.exp()

    xs = [torch.rand(10 * (n + 1), requires_grad=True) for n in range(4)]
    losses = []
    for n, x in enumerate(xs):
        with host.boundary(x, lead=n // 2):
            losses.append(checkpoint(unit, x, use_reentrant=False).sum())
    ahead.clear()
    (losses[2 * lead] + 0 * losses[2 * lead + 1]).backward()
    return ahead


def test_one_boundary_of_the_same_lead_is_fetched_ahead() -> None:
    with Host("cpu") as host:
        # Lead 1 has boundaries of 120 and 160 bytes: while the later one is recomputed, the one
        # before it is there; before that one there is only another lead's.
        assert held_after(host, 1) == [120, 0]
    with Host("cpu", buffers=0) as host:
        assert held_after(host, 1) == [0, 0]


def test_what_someone_else_holds_is_reported_as_sent_in_vain() -> None:
    units, kept = chain(), []
    with Host("cpu", buffers=1) as host:
        x = torch.rand(ROWS, WIDTH, requires_grad=True)
        torch.stack(rollout(units, x * 1, host)).sum().backward()
        assert host.report().in_vain_bytes == 0
        y = x * 1
        kept.append(y)
        with host.boundary(y):
            z = checkpoint(units[0], y, use_reentrant=False)
        z.sum().backward()
        assert host.report().in_vain_bytes == FIELD


def test_a_tensor_is_held_no_longer_than_two_more_boundaries() -> None:
    alive: list[int] = []
    storages: list[weakref.ref] = []
    with Host("cpu", buffers=2) as host:
        x = torch.zeros(10, requires_grad=True)
        for _ in range(6):
            x = x + 0
            storages.append(weakref.ref(x.untyped_storage()))
            x = sent(host, x)
            alive.append(sum(storage() is not None for storage in storages))
        assert alive == [1, 2, 2, 2, 2, 2]
        host.flush()
        assert not any(storage() for storage in storages)
        x.sum().backward()


def test_a_boundary_that_is_changed_on_its_way_out_is_refused() -> None:
    with Host("cpu") as host:
        x = torch.rand(ROWS, WIDTH, requires_grad=True) * 1
        with host.boundary(x):
            y = checkpoint(Unit(), x, use_reentrant=False)
        x.detach().add_(1)
        with pytest.raises(ValueError, match="768 bytes was changed in place 1 times on its way"):
            y.sum().backward()


def test_inputs_that_cannot_leave_are_refused() -> None:
    with (
        Host("meta") as host,
        pytest.raises(ValueError, match=r"shape \(3,\) is on cpu, this Host is for meta"),
        host.boundary(torch.ones(3)),
    ):
        pass
    with (
        Host("cpu") as host,
        pytest.raises(ValueError, match=r"of type Tensor \(torch.sparse_coo\) cannot leave"),
        host.boundary(torch.ones(3).to_sparse()),
    ):
        pass
    with Host("cpu") as host, FakeTensorMode():
        x = torch.rand(ROWS, WIDTH, requires_grad=True)
        with pytest.raises(ValueError, match="for real tensors or for fake ones"):
            sent(host, x)
    with pytest.raises(ValueError, match="buffers=-1 must be at least 0"):
        Host("cpu", buffers=-1)


def test_a_host_that_is_closed_says_so(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with Host("cpu", folder=folder) as host:
            losses = rollout(chain(), torch.rand(ROWS, WIDTH, requires_grad=True), host)
        host.close()
        assert host.owned() == []
        assert host.report().num_packed == LEADS * (UNITS + 1)
        with pytest.raises(ValueError, match="this Host is closed: its boundaries are gone"):
            losses[0].backward()
        with pytest.raises(ValueError, match="this Host is closed"):
            rollout(chain(), torch.rand(ROWS, WIDTH, requires_grad=True), host)


# The disk.


def test_the_folder_shows_nothing_and_keeps_nothing(tmp_path: Path) -> None:
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    with Host("cpu", folder=tmp_path) as host:
        losses = rollout(chain(), torch.rand(ROWS, WIDTH, requires_grad=True), host)
        assert host.report().disk_bytes > 0
        assert list(tmp_path.iterdir()) == []
        del losses
    assert (descriptors(), threading.active_count()) == (before, threads)
    with pytest.raises(ZeroDivisionError), Host("cpu", folder=tmp_path) as host:
        _ = rollout(chain(), torch.rand(ROWS, WIDTH, requires_grad=True), host), 1 / 0
    assert list(tmp_path.iterdir()) == []
    # One that nobody closes is gone with its last reference.
    host = Host("cpu", folder=tmp_path)
    steps(chain(), host, 1)
    del host
    gc.collect()
    assert descriptors() == before


def killed_with_boundaries_in(folder: Path) -> None:
    host = Host("cpu", folder=folder)
    rollout(chain(), torch.rand(ROWS, WIDTH, requires_grad=True), host)
    host.flush()
    (folder / "seen").write_text(str(host.report().disk_bytes))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    with LocalRanks(1) as one, pytest.raises(RankError, match="by SIGKILL"):
        one.run(killed_with_boundaries_in, tmp_path)
    assert int((tmp_path / "seen").read_text()) >= LEADS * UNITS * FIELD
    assert [file.name for file in tmp_path.iterdir()] == ["seen"]


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ValueError, match=rf"no boundary can be written to the folder {folder}"):
            Host("cpu", folder=folder)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_without_room_ends_the_step_with_the_bytes_and_the_way_out(tmp_path: Path) -> None:
    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    with Host("cpu", folder=tmp_path) as host:
        # Of a limit that the system keeps: room for two boundaries of 768 bytes.
        with largest_file(2 * FIELD + 100), pytest.raises(ValueError, match="do not fit") as error:
            rollout(chain(), x, host)
        assert f"{FIELD} bytes of a boundary do not fit into the folder {tmp_path} beside" in str(
            error.value
        )
        assert "Errno 27" in str(error.value)
        assert "name a folder on a larger disk" in str(error.value)
        del error
        settled(host)
        steps(chain(), host, 1)  # with room it goes on


@pytest.mark.parametrize("buffers", [0, 2])
def test_a_write_that_fails_is_raised_in_the_step(
    buffers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    told = pytest.raises(ValueError, match=r"768 bytes of a boundary do not fit .* No space left")
    with Host("cpu", folder=tmp_path, buffers=buffers) as host, told:
        rollout(chain(), x, host)
    # Also where nothing looks at the only boundary's failure before it is needed.
    with Host("cpu", folder=tmp_path, buffers=buffers) as host, told:
        sent(host, x).sum().backward()


def test_a_file_that_cannot_be_read_ends_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(ROWS, WIDTH, requires_grad=True)
    with Host("cpu", folder=tmp_path) as host:
        losses = rollout(chain(), x, host)
        host.flush()
        os.ftruncate(host._carrier.disk._file, 100)
        with pytest.raises(ValueError, match=r"768 bytes .* do not come back .* the file ends at"):
            losses[-1].backward()

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with Host("cpu", folder=tmp_path) as host:
        losses = rollout(chain(), x, host)
        with pytest.raises(ValueError, match=f"from the folder {tmp_path}: .*Input/output error"):
            losses[-1].backward()


def test_host_memory_without_room_is_an_error() -> None:
    x = torch.ones(ROWS, requires_grad=True)
    with Host("cpu") as host:
        with pytest.raises(ValueError, match="host memory has no 4,611,686,018,427,387,904 bytes"):
            host._carrier._buffer(2**62)
        sent(host, x).sum().backward()


# With others.


def test_a_trace_tells_host_buffers_from_the_devices_memory() -> None:
    def peak(host: Host | None) -> tuple[int, int]:
        units = chain()
        x = torch.rand(ROWS, WIDTH, requires_grad=True)

        def step() -> None:
            torch.stack(rollout(units, x * 1, host)).sum().backward()

        def owned() -> dict[str, list[Tensor]]:
            return {"parameters": list(units.parameters()), "host": host.owned() if host else []}

        found = trace_memory(step, owned)[1]
        column = found.owners.index("host")
        device = found.alive.sum(1) - found.alive[:, column]
        return int(device.max()), int(found.alive[:, column].max())

    plain, none = peak(None)
    with Host("cpu", buffers=1) as host:
        cheap, buffers = peak(host)
    assert none == 0
    assert buffers == host.report().buffer_bytes >= LEADS * UNITS * FIELD
    # All boundaries but a few are away at the peak.
    assert plain - cheap >= (LEADS * UNITS - 6) * FIELD


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_fake_tensors_come_and_go_at_the_same_points(
    place: str, device: str, tmp_path: Path
) -> None:
    def unit(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.gelu(x @ weight)

    def levels(device: str, host: Host | None) -> list[int]:
        weights = [torch.empty(WIDTH, WIDTH, device=device, requires_grad=True)] * UNITS
        x = torch.empty(ROWS, WIDTH, device=device, requires_grad=True)

        def step() -> None:
            y = x * 1
            for _ in range(LEADS):
                for weight in weights:
                    with host.boundary(y) if host else nullcontext():
                        y = checkpoint(
                            unit, y, weight, use_reentrant=False, preserve_rng_state=False
                        )
            y.backward(torch.empty_like(y))

        found = trace_memory(step, lambda: {"host": host.owned() if host else []}, device=device)[1]
        return (found.alive.sum(1) - found.alive[:, found.owners.index("host")]).tolist()

    folder = tmp_path if place == "disk" else None
    with Host("cpu") as host:
        real = levels("cpu", host)
    threads = threading.active_count()
    mode = nullcontext() if device == "meta" else FakeTensorMode()
    with mode, Host(device, folder=folder) as host:
        fake = levels(device, host)
        assert host.report().num_packed == host.report().num_unpacked == LEADS * UNITS
        assert host.report().disk_bytes == 0
    assert threading.active_count() == threads
    assert max(fake) == max(real)
    with FakeTensorMode() if device != "meta" else nullcontext():
        assert max(fake) < max(levels(device, None))


def sharded_steps(offload: bool) -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    units = chain()
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    rank = torch.distributed.get_rank()
    with Host("cpu") as host:
        results = []
        for step in range(2):
            torch.manual_seed(10 * rank + step)
            x = torch.randn(ROWS + rank, WIDTH, requires_grad=True)
            torch.stack(rollout(units, x * 1, host if offload else None)).sum().backward()
            shards = [p.grad.to_local().clone() for p in units.parameters()]
            results.append([x.grad.clone(), *shards])
        assert host.report().num_unpacked == (2 * LEADS * (UNITS + 1) if offload else 0)
        settled(host)
    return results


def test_sharded_weights_get_the_same_gradients(two: LocalRanks) -> None:
    for ours, theirs in zip(two.run(sharded_steps, True), two.run(sharded_steps, False),
                            strict=True):  # fmt: skip
        assert_equal(ours, theirs)


# Streams, without a GPU: copies run as late as the waits allow, in memory that may be gone by then.


class Latest:
    """Stands for `torch.cuda` in the carrier, with CPU tensors.

    What is given to a side stream runs when something waits for it and not before; the computing
    stream, which is PyTorch itself, is never late. A copy refers to no memory: whoever starts one
    must hold on to it. `early`: which queries find a copy done, which has it done then.
    """

    def __init__(self, early: Callable[[], bool]) -> None:
        self.early, self.lock = early, threading.RLock()
        self.current: Any = SimpleNamespace(record_event=self._of_computing)
        self.num_late = 0

        outer = self

        class Event:
            def __init__(self, stream: Any = None, enable_timing: bool = False) -> None:
                self.stream, self.over = stream, stream is None

            def record(self, stream: Any) -> None:
                assert stream is outer.current

            def query(self) -> bool:
                with outer.lock:
                    if not self.over and outer.early():
                        self.synchronize()
                    return self.over

            def synchronize(self) -> None:
                with outer.lock:
                    while not self.over:
                        self.stream.queue.popleft()()

            def elapsed_time(self, _: Any) -> float:
                return 0.0

        class Stream:
            def __init__(self, _: Any = None) -> None:
                self.queue: deque[Callable[[], None]] = deque()

            def wait_event(self, event: Event) -> None:
                with outer.lock:
                    self.queue.append(event.synchronize)

            def record_event(self) -> Event:
                with outer.lock:
                    event = Event(self)
                    self.queue.append(lambda: setattr(event, "over", True))
                    return event

            def synchronize(self) -> None:
                self.record_event().synchronize()

        self.Event, self.Stream = Event, Stream
        self.current.wait_event = lambda event: event.synchronize()

    def _of_computing(self) -> Any:
        return self.Event()

    def current_stream(self, _: Any) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        outer = self

        class Later(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func is not torch.ops.aten.copy_.default:
                    return func(*args, **(kwargs or {}))
                assert args[2], "copies beside the computation do not block"
                places = [_Place(tensor) for tensor in args[:2]]

                def copy() -> None:
                    outer.num_late += 1
                    target, source = (place.tensor() for place in places)
                    target.copy_(source)

                with outer.lock:
                    stream.queue.append(copy)
                return args[0]

        with Later():
            yield


class _Place:
    """Where a tensor's bytes are, keeping nothing alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = weakref.ref(tensor.untyped_storage())
        self.at = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        storage = self.storage()
        assert storage is not None, "memory was let go while a copy needed it"
        return torch.empty(0, dtype=torch.uint8).set_(storage, *self.at)


def on_streams(folder: Path | None, buffers: int, monkeypatch: pytest.MonkeyPatch,
               early: Callable[[], bool] = lambda: False) -> tuple[Host, Latest]:  # fmt: skip
    latest = Latest(early)
    monkeypatch.setattr(carrier_module, "cuda", latest)
    host = Host("cpu", folder=folder, buffers=buffers)
    host._carrier.lanes = carrier_module._Lanes(torch.device("cpu"))
    return host, latest


@pytest.mark.parametrize("buffers", [0, 2])
@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("early", ["never", "sometimes"])
def test_copies_as_late_as_the_waits_allow_give_the_same_bits(
    early: str, place: str, buffers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter(range(10**9))
    answers = {"never": lambda: False, "sometimes": lambda: next(draws) % 3 == 0}
    expected = steps(chain(), None, 2)
    host, latest = on_streams(
        tmp_path if place == "disk" else None, buffers, monkeypatch, answers[early]
    )
    with host:
        assert_equal(steps(chain(), host, 1), expected[:1])
        first = host.report()
        assert_equal(steps(chain(), host, 2), expected)
        # Buffers are used again while copies to and from them may still be on their way.
        if place == "memory":
            assert host.report().num_buffers == first.num_buffers
        losses = rollout(chain(), torch.rand(ROWS, WIDTH, requires_grad=True), host)
        host.prefetch(LEADS)
        del losses
        settled(host)
    assert latest.num_late >= 3 * 2 * LEADS * UNITS


@pytest.mark.parametrize("missing", ["wait", "hold"])
def test_a_wait_that_is_missing_would_be_found(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(chain(), None, 1)
    host, _ = on_streams(None, 2, monkeypatch)
    if missing == "wait":
        monkeypatch.setattr(host._carrier.lanes, "wait", lambda event: None)
    else:
        monkeypatch.setattr(host, "_leaving", deque(maxlen=0))
    with pytest.raises(AssertionError, match=r"step 0, tensor|memory was let go"):
        assert_equal(steps(chain(), host, 1), expected)


# On a GPU.


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("buffers", [0, 1, 2, 5])
    @pytest.mark.parametrize("place", ["memory", "disk"])
    def test_gradients_are_bitwise_the_same_in_six_steps(
        self, place: str, buffers: int, tmp_path: Path
    ) -> None:
        expected = steps(chain("cuda"), None, 6, device="cuda")
        folder = tmp_path if place == "disk" else None
        with Host("cuda", folder=folder, buffers=buffers) as host:
            assert_equal(steps(chain("cuda"), host, 6, device="cuda"), expected)
            settled(host)
            told = host.report()
            assert all(buffer.is_pinned() for buffer in host.owned())
        assert told.num_packed == told.num_unpacked == 6 * LEADS * (UNITS + 1)
        if place == "memory":
            assert told.num_buffers == LEADS * UNITS
        assert list(tmp_path.iterdir()) == []

    def test_boundaries_leave_the_devices_memory(self) -> None:
        size = 64 * 2**20

        def left_after_forward(host: Host | None) -> int:
            x = torch.zeros(size // 4, device="cuda", requires_grad=True)
            before = torch.cuda.memory_allocated()
            y = x
            for _ in range(8):
                with host.boundary(y) if host else nullcontext():
                    y = checkpoint(torch.exp, y, use_reentrant=False)
                y = y * 0.5
            if host:
                host.flush()
            left = torch.cuda.memory_allocated() - before
            y.sum().backward()
            return left

        plain = left_after_forward(None)
        with Host("cuda") as host:
            away = left_after_forward(host)
            # The first boundary is the input, which stays.
            assert host.report().in_vain_bytes == size
        assert plain - away == 7 * size

    def test_copies_run_beside_the_computation(self) -> None:
        a = torch.rand(8192, 8192, device="cuda")
        x = torch.rand(4096, 8192, device="cuda", requires_grad=True)

        def unit(x: Tensor) -> Tensor:
            for _ in range(12):
                x = torch.tanh(x @ a)
            return x

        def waited(buffers: int) -> float:
            with Host("cuda", buffers=buffers) as host:
                for _ in range(3):
                    y = x
                    for _ in range(4):
                        with host.boundary(y):
                            y = checkpoint(unit, y, use_reentrant=False)
                        y = y * 1
                    y.sum().backward()
                return host.report().waited_seconds

        waited(2)  # pinned memory and kernels are there now
        assert waited(2) < 0.7 * waited(0)
