"""The memory trace: bytes computed by hand, owners, and a witness that counts in another way."""

import json
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from graticule.memory import MemoryTrace, trace_memory


def trace(step: Callable[[], Any], **owned: Iterable[Tensor]) -> MemoryTrace:
    return trace_memory(step, lambda: {name: list(tensors) for name, tensors in owned.items()})[1]


def bytes_of(found: MemoryTrace, owner: str) -> list[int]:
    """Of an owner after each event, repetitions left out."""
    values = found.alive[:, found.owners.index(owner)].tolist()
    return [b for a, b in zip([None, *values], values, strict=False) if a != b]


def totals(found: MemoryTrace) -> list[int]:
    return found.alive.sum(1).tolist()


def test_a_linear_layers_forward_and_backward_pass_byte_by_byte() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(4, 3)

    def step() -> None:
        layer(x).sum().backward()

    found = trace(step, parameters=layer.parameters())
    # Weight 24 and bias 8; input 48; output 32; loss 4; output gone; gradient of the loss 4;
    # of the weight 24, of the bias 8; the gradient of the loss and the loss gone.
    assert totals(found) == [32, 80, 112, 116, 84, 88, 112, 120, 116, 112]
    assert bytes_of(found, "parameters") == [32]
    assert bytes_of(found, "inputs") == [0, 48]
    assert bytes_of(found, "temporaries") == [0, 32, 0]
    assert bytes_of(found, "gradients") == [0, 24, 32]
    assert found.peak_bytes == 120
    assert found.at(found.peak) == {
        "parameters": 32, "gradients": 32, "inputs": 48, "activations": 8, "temporaries": 0,
    }  # fmt: skip


def test_the_peak_of_a_chain_is_where_the_hand_finds_it() -> None:
    x, w = torch.ones(8, 8), torch.ones(8, 4)

    def step() -> Tensor:
        h = x.relu().relu()
        return h @ w

    result, found = trace_memory(step, dict)
    # x 256, first relu 256, second 256: 768. The first goes; w 128 comes, then the product, 128.
    assert totals(found) == [0, 256, 512, 768, 512, 640, 768, 512]
    assert found.peak == 3
    assert found.peak_bytes == 768
    assert result.shape == (8, 4)


def test_a_tensor_that_is_let_go_early_is_gone_from_there_on() -> None:
    x = torch.ones(100)

    def step(early: bool) -> None:
        first = x + 1
        size = first.sum().item()
        if early:
            del first
        second = x + size
        del second

    assert trace(lambda: step(True)).peak_bytes == 800 + 4
    assert max(totals(trace(lambda: step(True)))[-3:]) == 800
    assert trace(lambda: step(False)).peak_bytes == 1200


def test_views_and_operations_in_place_count_once() -> None:
    x = torch.ones(10, 10)

    def step() -> None:
        y = x.view(5, 20).t()[3:]
        y.add_(1).mul_(2)
        torch.relu_(x)
        x.detach().numpy()[:] = 0

    found = trace(step)
    assert totals(found) == [0, 400]


def test_what_the_backward_pass_keeps_is_an_activation_until_it_is_released() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    x = torch.ones(2, 8)

    def step() -> None:
        h = torch.exp(a(x))  # exp keeps its result, b keeps its input: one storage of 64
        b(h).sum().backward()

    found = trace(step, parameters=[a.weight, b.weight])
    kept = bytes_of(found, "activations")
    assert kept[:3] == [0, 64, 68]  # h, and the loss
    assert kept[-1] == 0
    # The products before exp and sum are let go in the forward pass.
    assert bytes_of(found, "temporaries")[:5] == [0, 64, 0, 64, 0]


def test_a_checkpointed_unit_keeps_its_input_only() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(4))
    x = torch.ones(100, 64, requires_grad=True)

    def step(cheap: bool) -> None:
        h = x
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False) if cheap else layer(h)
        h.sum().backward()

    def most_kept(cheap: bool) -> int:
        layers.zero_grad()
        x.grad = None
        return max(bytes_of(trace(lambda: step(cheap), parameters=layers.parameters()),
                            "activations"))  # fmt: skip

    size = x.nbytes
    assert most_kept(False) == 8 * size + 8  # both tanh of four units, the loss and its gradient
    # The boundaries, of which x is an input; what is computed again belongs to the backward pass.
    assert most_kept(True) <= 4 * size + 8


def test_gradients_and_the_optimizers_state_have_their_owners_in_the_first_step() -> None:
    layer, x = nn.Linear(10, 10, bias=False), torch.ones(1, 10)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def owned() -> dict[str, list[Tensor]]:
        state = [v for values in optimizer.state.values() for v in values.values()]
        return {"parameters": [layer.weight], "optimizer": state}

    def step() -> None:
        layer(x).sum().backward()
        optimizer.step()

    _, found = trace_memory(step, owned)
    assert found.at(len(found.alive) - 1) == {
        "parameters": 400, "optimizer": 804, "gradients": 400, "inputs": 40, "activations": 0,
        "temporaries": 0,
    }  # fmt: skip
    # The next step begins with all of them, drops the gradients and makes them again.

    def again() -> None:
        optimizer.zero_grad()
        step()

    _, found = trace_memory(again, owned)
    assert found.at(0)["gradients"] == 400
    assert bytes_of(found, "gradients") == [400, 0, 400]
    assert bytes_of(found, "optimizer") == [804]


def test_gradients_let_go_within_the_step_are_gradients_all_the_same() -> None:
    layer = nn.Linear(10, 10, bias=False)

    def step() -> None:
        layer(torch.ones(1, 10)).sum().backward()
        layer.zero_grad()

    assert bytes_of(trace(step, parameters=layer.parameters()), "gradients") == [0, 400, 0]


def test_constants_that_the_step_makes_are_not_inputs() -> None:
    found = trace(lambda: torch.tensor([1.0, 2.0]) + 1)
    assert max(bytes_of(found, "inputs")) == 0
    assert found.peak_bytes == 16


def test_a_resized_storage_counts_its_new_size() -> None:
    x = torch.ones(100)

    def step() -> None:
        y = x + 1
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(40)
        out = torch.empty(0)
        torch.add(x, 1, out=out)

    assert totals(trace(step)) == [0, 400, 800, 400, 440, 440, 840, 800, 400]


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    layer = nn.Linear(3, 3)
    plain = torch.UntypedStorage.resize_

    def step() -> None:
        layer(torch.ones(1, 3)).sum().backward()
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        trace(step, parameters=layer.parameters())
    assert _get_current_dispatch_mode_stack() == []
    assert torch.UntypedStorage.resize_ is plain
    assert not any(p._post_accumulate_grad_hooks for p in layer.parameters())


def test_a_trace_keeps_nothing_alive_and_hears_no_more_of_what_dies() -> None:
    gone: list[str] = []
    result, found = trace_memory(lambda: torch.ones(10) * 2, dict)
    weakref.finalize(result.untyped_storage(), gone.append, "result")
    before = totals(found)
    del result
    assert gone == ["result"]
    assert totals(found) == before == [0, 40, 80, 40]


def test_the_timeline_keeps_the_peak_whatever_its_length() -> None:
    x = torch.ones(50)

    def step() -> None:
        tensors = []
        for n in range(100):
            tensors.append(x * n)
            if n == 70:
                tensors.clear()

    found = trace(step)
    for points in (1, 2, 7, 50, 10_000):
        line = found.timeline(points)
        assert len(line) <= points
        assert max(sum(owners.values()) for _, owners in line) == found.peak_bytes == 200 * 72
        assert [at for at, _ in line] == sorted(at for at, _ in line)
    assert len(found.timeline(10_000)) == len(found.seconds)
    assert np.all(np.diff(found.seconds) >= 0)


def test_the_allocators_own_record_agrees(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.Linear(128, 16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(300, 64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    state = [v for values in optimizer.state.values() for v in values.values()]
    before = sum(t.nbytes for t in [*model.parameters(), *state, x])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    witnessed = before + int(np.cumsum(sizes).max())
    optimizer.zero_grad()
    found = trace(step, parameters=model.parameters(), optimizer=state)
    assert found.peak_bytes == pytest.approx(witnessed, rel=1e-3)
