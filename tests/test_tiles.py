"""Sampling modules tile by tile: the numbers of the plain modules, in less memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # asked for by each rank's first gradient: once, here
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from graticule.memory.trace import trace_memory
from graticule.mesh import Cut, Stripes
from graticule.model.layers import Layer
from graticule.model.resample import Down, Up
from graticule.model.row_norms import Moments
from graticule.model.tiles import tiled_body
from graticule.parallel.exchange import Link
from graticule.parallel.space import stripe

KINDS = {"down": Down, "up": Up}


def drawn(kind: str, boundary: Any, points: tuple[int, int], stride: int = 2, width: int = 4,
          groups: int = 2) -> Any:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    module = KINDS[kind](width, stride, groups, boundary, points)
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.reset(generator)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.double()


def fields(kind: str, points: tuple[int, int], stride: int, width: int = 4, batch: int = 2) -> Any:
    """An input, and a gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    coarse = -(-points[0] // stride), -(-points[1] // stride)
    sides = (points, coarse) if kind == "down" else (coarse, points)
    # Far from zero, and different from sample to sample.
    x, grad = (torch.randn(batch, width, *s, generator=generator).double() for s in sides)
    x += torch.arange(1.0, batch + 1).view(-1, 1, 1, 1)
    return x.requires_grad_(), grad


def results(call: Callable[[Tensor], Tensor], module: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, the gradient of x and of each parameter."""
    out = call(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], grad)]


def gap(got: list[Tensor], want: list[Tensor]) -> float:
    floor = 1e-3 * max(float(g.abs().max()) for g in want[1:] if g.numel())
    worst = 0.0
    for mine, whole in zip(got, want, strict=True):
        assert mine.shape == whole.shape
        if whole.numel():
            scale = max(float(whole.abs().max()), floor)
            worst = max(worst, float((mine - whole).abs().max()) / scale)
    return worst


# The plain module's numbers


@pytest.mark.parametrize("tiles", [1, 2, 3, 50])
@pytest.mark.parametrize("boundary", ["globe", "paper"])
@pytest.mark.parametrize("kind", ["down", "up"])
def test_output_and_gradients_are_those_of_the_module(kind: str, boundary: Any, tiles: int) -> None:
    for points, stride in [((7, 12), 2), ((8, 6), 2), ((1, 4), 2), ((2, 2), 2), ((8, 9), 3)]:
        module = drawn(kind, boundary, points, stride)
        x, grad = fields(kind, points, stride)
        want = results(module, module, x, grad)
        assert gap(results(lambda x: tiled_body(module, x, tiles), module, x, grad), want) < 1e-12  # noqa: B023


@given(
    kind=st.sampled_from(["down", "up"]),
    boundary=st.sampled_from(["globe", "paper"]),
    rows=st.integers(1, 11),
    # A norm of a single value is refused by torch.
    columns=st.integers(2, 6),
    odd=st.integers(0, 2),
    stride=st.integers(2, 4),
    channels=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    batch=st.integers(1, 3),
    tiles=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_any_field_in_any_tiles(
    kind: str, boundary: Any, rows: int, columns: int, odd: int, stride: int,
    channels: tuple[int, int], batch: int, tiles: int,
) -> None:  # fmt: skip
    # A circle has whole strides.
    points = rows, columns * stride + (odd % stride if boundary == "paper" else 0)
    width, groups = channels
    module = drawn(kind, boundary, points, stride, width, groups)
    x, grad = fields(kind, points, stride, width, batch)
    want = results(module, module, x, grad)
    # Where a norm has a single value, or equal ones, gradients are differences of nothing.
    assert gap(results(lambda x: tiled_body(module, x, tiles), module, x, grad), want) < 1e-10


@pytest.mark.parametrize("kind", ["down", "up"])
def test_gradients_land_in_grad_and_nothing_given_is_written_over(kind: str) -> None:
    module, plain = (drawn(kind, "globe", (6, 8)).float() for _ in range(2))
    x, grad = fields(kind, (6, 8), 2)
    x, grad = x.detach().float(), grad.float()
    # As they come from tokens: features last.
    x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    before = x.clone(), grad.clone()
    tiled_body(module, x, 2).backward(grad)
    plain(x).backward(grad)
    assert x.grad is None
    assert torch.equal(x, before[0])
    assert torch.equal(grad, before[1])
    for mine, whole in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == torch.float32
        assert torch.allclose(mine.grad, whole.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["down", "up"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_exact_as_in_the_module(kind: str, dtype: torch.dtype) -> None:
    exact = drawn(kind, "globe", (16, 24), width=8)
    module = drawn(kind, "globe", (16, 24), width=8).float()
    x, grad = (t.detach().to(dtype) for t in fields(kind, (16, 24), 2, width=8))
    found = []
    for model, call, wide in (
        (exact, exact, torch.float64),
        (module, module, dtype),
        (module, lambda x: tiled_body(module, x, 3), dtype),
    ):
        found.append(results(call, model, x.to(wide).requires_grad_(), grad.to(wide)))
    names = ["out", "x", *(name for name, _ in module.named_parameters())]
    # Of a vector of eight sums that nearly cancel the error is luck: those of all are compared.
    errors: dict[str, list[tuple[float, float]]] = {}
    for name, want, theirs, mine in zip(names, *found, strict=True):
        assert mine.dtype == (torch.float32 if name not in ("out", "x") else dtype)
        size = float(want.norm())
        each = float((mine - want).norm()) / size, float((theirs - want).norm()) / size
        errors.setdefault(name if want.dim() > 1 else "vectors", []).append(each)
    assert len(errors["vectors"]) == 7
    for name, several in errors.items():
        ours, module_s = (sum(e**2 for e in each) ** 0.5 for each in zip(*several, strict=True))
        assert ours < 1.3 * module_s + torch.finfo(dtype).eps / 4, (name, ours, module_s)


def test_moments_of_tiles_are_those_of_all_values() -> None:
    x = torch.randn(2, 4, 9, 5, generator=torch.Generator().manual_seed(3)) + 1000
    moments = Moments(2, x)
    for first, last in ((0, 1), (1, 7), (7, 9)):
        moments.add(x[:, :, first:last])
    count, mean, squares = moments._all
    values = x.double().view(2, 2, -1)
    assert count.tolist() == [[90, 90], [90, 90]]
    assert torch.allclose(mean, values.mean(2), rtol=1e-7)
    assert torch.allclose(squares / count, values.var(2, correction=0), rtol=1e-3)


# What it costs


class Given(torch.autograd.Function):
    """A loss with a given gradient, which keeps nothing of what it is the loss of."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def _call(module: Any, tiles: int) -> Callable[[Tensor], Tensor]:
    """tiles: 0: the module, computed again as a checkpoint."""
    if tiles:
        return lambda x: tiled_body(module, x, tiles)
    return lambda x: checkpoint(module, x, use_reentrant=False)


def _peak(kind: str, tiles: int) -> float:
    """Of the backward pass, in patch grids."""
    points, width = (64, 96), 16
    module = drawn(kind, "globe", points, 2, width).float()
    x, grad = (t.detach().float() for t in fields(kind, points, 2, width, batch=1))
    x.requires_grad_()
    losses = [Given.apply(_call(module, tiles)(x), grad)]
    trace = trace_memory(
        lambda: losses.pop().backward(),
        lambda: {"parameters": list(module.parameters()), "fields": [x, grad]},
    )[1]
    at_peak = trace.at(trace.peak)
    weights = at_peak["parameters"] + at_peak["gradients"]
    return (trace.peak_bytes - weights) / (points[0] * points[1] * width * 4)


@pytest.mark.parametrize("tiles", [8, 16])
@pytest.mark.parametrize(
    ("kind", "plain", "whole", "few"),
    # Up, whole: d out, c1, c2 and a quarter, x. Down, whole: x, dx and two quarters, d out and dy.
    [("up", 8.3, 3.25, 4), ("down", 4.0, 2.5, 2)],
)
def test_the_peak_is_three_patch_grids_and_some_tiles(
    kind: str, plain: float, whole: float, few: int, tiles: int
) -> None:
    padded = (64 / tiles + 2) * 98 / (64 * 96)
    assert _peak(kind, 0) > plain
    # And sums of gradients of weights, a tenth in a field as small as this.
    assert _peak(kind, tiles) < whole + few * padded + 0.1


@pytest.mark.parametrize("kind", ["down", "up"])
def test_of_activations_only_the_input_is_kept(kind: str) -> None:
    module = drawn(kind, "globe", (16, 16))
    x, _ = fields(kind, (16, 16), 2)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        tiled_body(module, x, 2)
    assert [t.data_ptr() for t in kept if t.dim() == 4 and t.shape[0] == 2] == [x.data_ptr()]
    assert sum(t.numel() for t in kept if t.dim() < 4) < 100


def _work(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    *rest: Any, out_shape: Any, **others: Any,
) -> int:  # fmt: skip
    """Of a convolution by what comes out of it: torch counts what a transposed one reads, also
    where most of that is cropped."""
    taps = math.prod(weight[2:]) // (math.prod(stride) if transposed else 1)
    return 2 * math.prod(out_shape) * x[1] * taps


@pytest.mark.parametrize(
    ("kind", "extra"),
    # In units of a convolution of the body. Up: 19 ninths forward and again, 38 backward, and two
    # more transposed convolutions of a ninth; where tiles do not begin with a coarse row, one row
    # of it twice.
    [("down", 0.0), ("up", 2 / 76)],
)
def test_convolutions_work_as_those_of_a_checkpoint(kind: str, extra: float) -> None:
    work = []
    for tiles in (0, 4):
        module = drawn(kind, "globe", (64, 64), width=8)
        x, grad = fields(kind, (64, 64), 2, width=8)
        mapping = {torch.ops.aten.convolution: _work}
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            _call(module, tiles)(x).backward(grad)
        work.append(counter.get_total_flops())
    assert work[0] * (1 + extra) <= work[1] < work[0] * (1.001 + extra * 1.3)


# Stripes


def _striped(
    kind: str, boundary: Any, points: tuple[int, int], dim: Any, bounds: tuple[int, ...], tiles: int
) -> tuple[float, bool, dict[str, int], dict[str, int]]:
    """The gap to the whole field's numbers; whether all gradients arrived; bytes that were sent by
    the plain module in stripes (forward, again, backward), and by tiles.

    bounds: of the patch grid for `down`, of the coarse grid for `up`.
    """
    link = Link(dist.group.WORLD)
    serial, module = (drawn(kind, boundary, points) for _ in range(2))
    x, grad = fields(kind, points, 2)
    want = results(serial, serial, x, grad)
    along = 2 if dim == "lat" else 3
    given, made = Cut(bounds), Cut(bounds)
    made = given.strided(2) if kind == "down" else given.finer(2, points[along - 2])
    fine = given if kind == "down" else made
    cuts = {x.shape[along]: given, grad.shape[along]: made}
    stripe(module, Stripes(dim=dim, index=link.rank, cuts=cuts, grid=fine), link)

    def ours(t: Tensor, cut: Cut) -> Tensor:
        here = cut.of(link.rank)
        return t.detach().narrow(along, here.start, here.stop - here.start)

    part = ours(x, given).requires_grad_()
    d = ours(grad, made)
    plain = module(part)
    torch.autograd.grad(plain, [part, *module.parameters()], d)
    sent = dict(link.sent)
    link.sent.clear()
    out = tiled_body(module, part, tiles)
    out.backward(d)
    assert part.grad is not None
    found = [out.detach(), part.grad]
    arrived = all(p.grad is not None for p in module.parameters())
    for parameter in module.parameters():
        total = parameter.grad.clone()
        dist.all_reduce(total)
        found.append(total)
    wanted = [ours(want[0], made), ours(want[1], given), *want[2:]]
    return gap(found, wanted), arrived, sent, dict(link.sent)


CUTS = [
    ("down", "globe", (9, 8), "lat", (0, 4, 9)),
    ("down", "globe", (9, 8), "lat", (0, 0, 8, 9)),
    # The second rank has a row and no output.
    ("down", "paper", (7, 6), "lat", (0, 3, 4, 7)),
    ("down", "globe", (6, 12), "lon", (0, 4, 12)),
    ("down", "globe", (6, 12), "lon", (0, 0, 6, 12)),
    ("up", "globe", (9, 8), "lat", (0, 2, 5)),
    ("up", "globe", (3, 8), "lat", (0, 0, 1, 2)),
    ("up", "paper", (7, 6), "lat", (0, 3, 3, 4)),
    ("up", "globe", (6, 12), "lon", (0, 1, 6)),
    ("up", "paper", (5, 11), "lon", (0, 2, 2, 6)),
]


@pytest.mark.parametrize("case", CUTS, ids=lambda case: "-".join(map(str, case)))
def test_stripes_in_tiles_are_the_whole_field(pools: Any, case: Any) -> None:
    pool = pools[len(case[-1]) - 1]
    for tiles in (1, 3):
        for worst, arrived, _, _ in pool.run(_striped, *case, tiles):
            assert arrived
            assert worst < 1e-12


@pytest.mark.parametrize("kind", ["down", "up"])
def test_tiles_send_no_more_for_being_many(three: Any, kind: str) -> None:
    bounds = (0, 8, 16, 24) if kind == "down" else (0, 4, 8, 12)
    case = kind, "globe", (24, 8), "lat", bounds
    few, many = (three.run(_striped, *case, tiles) for tiles in (1, 8))
    for (_, _, plain, once), (_, _, _, sent) in zip(few, many, strict=True):
        assert once == sent
        # Statistics are kept: norms talk as often as in one forward and one backward pass.
        assert sent["norm"] == plain["norm"]
