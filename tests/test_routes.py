"""Windows over several ranks: routes are exact and adjoint, attention is that of one rank."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from graticule.keyed import keyed_seed
from graticule.mesh import SAMPLE, Cut, Mesh, Stripes
from graticule.model.layers import Layer
from graticule.model.swin import SwinBlock
from graticule.model.windows import Enter, Leave, Shift, WindowGrid, WindowMask
from graticule.parallel.exchange import Link
from graticule.parallel.layouts import (
    Layout,
    StripeLayout,
    Topology,
    WindowLayout,
    plan_route,
)
from graticule.parallel.routes import Route, route_windows

GLOBE = WindowGrid((7, 12), (8, 12), (4, 3), "globe")
PAPER = WindowGrid((9, 10), (9, 10), (3, 5), "paper")
TWO_WINDOWS = WindowGrid((3, 6), (3, 6), (3, 3), "globe")
ALL_PADDING = WindowGrid((3, 8), (8, 8), (4, 2), "globe")
WIDTH, HEADS, BATCH = 24, 12, 2


def noise(*shape: int, key: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(keyed_seed(7, "test", key))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# Routes


@dataclass(frozen=True)
class Way:
    """A route between two layouts of a grid. kind: enter or shift."""

    grid: WindowGrid
    topology: Topology
    kind: str
    dim: str = "lat"
    method: str = "all_to_all"

    def layouts(self) -> tuple[Layout, Layout]:
        regular = WindowLayout(self.grid, self.topology)
        if self.kind == "shift":
            return regular, WindowLayout(self.grid, self.topology, shifted=True)
        size = self.grid.tokens[0 if self.dim == "lat" else 1]
        cut = Cut.even(size, self.topology.ranks)
        return StripeLayout(self.grid.tokens, cut, self.dim), regular  # type: ignore[arg-type]

    def route(self) -> Route:
        link = Link(dist.group.WORLD, self.method)  # type: ignore[arg-type]
        return Route(plan_route(*self.layouts(), link.rank), link, self.kind)

    def __str__(self) -> str:
        return f"{self.kind}-{self.dim}-{told(self.grid, self.topology)}-{self.method}"


def told(grid: WindowGrid, topology: Topology) -> str:
    window, fixed = "x".join(map(str, grid.window)), "-fixed" if topology.fixed else ""
    ranks = "x".join(map(str, (topology.window, topology.sequence, topology.tensor)))
    return f"{grid.boundary}-{grid.num_windows}x{window}-{ranks}{fixed}"


WAYS = [
    Way(GLOBE, Topology(2), "enter"),
    Way(GLOBE, Topology(1, 2), "enter", "lon"),
    Way(PAPER, Topology(1, 1, 2), "shift"),
    Way(PAPER, Topology(3), "enter", "lon", "p2p"),
    Way(GLOBE, Topology(1, 3), "shift", method="p2p"),
    Way(TWO_WINDOWS, Topology(3), "enter"),
    Way(TWO_WINDOWS, Topology(4), "shift"),
    Way(TWO_WINDOWS, Topology(4), "enter"),  # no row for one of the ranks, no window for two
    Way(GLOBE, Topology(4, fixed=(2, 2)), "shift"),
    Way(PAPER, Topology(4, fixed=(2, 2)), "enter", "lon"),
    Way(PAPER, Topology(2, 1, 2), "enter"),
    Way(ALL_PADDING, Topology(1, 2, 2), "shift"),
]


def _held(layout: Layout, values: Tensor, rank: int) -> Tensor:
    """(batch, token, feature) -> (batch, slot, feature) of a rank, zero where no token is."""
    tokens = torch.from_numpy(layout.tokens(rank))
    return values[:, tokens.clamp(min=0)] * (tokens >= 0)[:, None]


def _there_and_back(way: Way) -> list[bool]:
    route, (source, target) = way.route(), way.layouts()
    rank, tokens = route.link.rank, way.grid.tokens[0] * way.grid.tokens[1]
    same = []
    for batch, dtype in ((1, torch.float64), (3, torch.float32), (2, torch.bfloat16),
                         (2, torch.float16)):  # fmt: skip
        values = noise(batch, tokens, 5).to(dtype)
        ours, theirs = _held(source, values, rank), _held(target, values, rank)
        # The same numbers in another order in memory.
        strided = ours.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        before = strided.clone()
        there = route(strided)
        same += [torch.equal(there, theirs), torch.equal(route.back(there), ours)]
        same.append(torch.equal(strided, before) and there.dtype == dtype)
    return same


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_route_brings_each_token_to_its_slot_and_back_in_every_type(pools, way):
    for same in pools[way.topology.ranks].run(_there_and_back, way):
        assert all(same), same


def _products(way: Way) -> list[float]:
    """Our parts of <Ax, y> and <x, A'y>, of a route and of its inverse, by autograd."""
    route = way.route()
    slots, products = route.plan.slots, []
    for go, (given, got) in ((route.forward, slots), (route.back, slots[::-1])):
        # Anything, also in the slots that hold no token.
        x = noise(BATCH, given, 3, key=route.link.rank).requires_grad_()
        y = noise(BATCH, got, 3, key=route.link.rank + 10)
        moved = go(x)
        moved.backward(y)
        products += [float((moved.detach() * y).sum()), float((x.detach() * x.grad).sum())]
    return products


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_gradient_of_a_route_is_its_adjoint(pools, way):
    parts = pools[way.topology.ranks].run(_products, way)
    there, there_back, back, back_there = (sum(numbers) for numbers in zip(*parts, strict=True))
    assert there == pytest.approx(there_back, rel=1e-12)
    assert back == pytest.approx(back_there, rel=1e-12)


def _bytes(way: Way) -> list[int]:
    route = way.route()
    x = torch.zeros(BATCH, route.plan.slots[0], 5, dtype=torch.bfloat16, requires_grad=True)
    out = route(x)
    there = route.link.sent[way.kind]
    out.backward(torch.ones_like(out))
    return [there, route.link.sent[way.kind] - there]


def test_a_shift_sends_half_a_window_row_there_and_gets_it_back_in_the_backward_pass(pools):
    # Three ranks of one row of 2 windows of 4 x 6 each: 2 rows of 12 tokens go over.
    grid = WindowGrid((12, 12), (12, 12), (4, 6), "globe")
    sent = pools[3].run(_bytes, Way(grid, Topology(3), "shift"))
    assert sent == [[BATCH * 2 * 12 * 5 * 2] * 2] * 3


def test_bytes_are_those_of_the_tokens_that_change_their_owner(pools):
    for way in (WAYS[0], WAYS[6], WAYS[8]):
        plans = [plan_route(*way.layouts(), rank) for rank in range(way.topology.ranks)]
        want = [[BATCH * 5 * 2 * sum(n) for n in (p.send, p.receive)] for p in plans]
        assert pools[way.topology.ranks].run(_bytes, way) == want


def test_stripes_that_are_windows_are_passed_on_as_they_are():
    stripe = StripeLayout((4, 6), Cut((0, 4)), "lat")
    whole = WindowLayout(WindowGrid((4, 6), (4, 6), (2, 6), "globe"), Topology())
    route = Route(plan_route(stripe, whole, 0), Link(), "enter")
    x = noise(2, 24, 3)
    assert route(x) is x
    assert route.back(x) is x


def test_a_gradient_of_the_gradient_of_a_route_exists():
    pair = [WindowLayout(TWO_WINDOWS, Topology(), shifted) for shifted in (False, True)]
    route = Route(plan_route(*pair, 0), Link(), "shift")
    assert torch.autograd.gradgradcheck(route, noise(2, 18, 1).requires_grad_())


def test_the_indices_of_a_route_move_with_the_model_and_are_in_no_checkpoint():
    pair = [WindowLayout(GLOBE, Topology(), shifted) for shifted in (False, True)]
    route = Route(plan_route(*pair, 0), Link(), "shift")
    assert not route.state_dict()
    assert {buffer.device.type for buffer in route.to("meta").buffers()} == {"meta"}


# Attention


class Stack(nn.Module):
    """What is between the sampling modules of a Swin model."""

    def __init__(self, grid: WindowGrid, depth: int) -> None:
        super().__init__()
        self.enter, self.leave = Enter(grid), Leave(grid)
        self.mask, self.shifted_mask = (WindowMask(grid, shifted) for shifted in (False, True))
        self.blocks = nn.ModuleList(
            SwinBlock(WIDTH, HEADS, 2, grid, bias_table=True, shifted=bool(number % 2))
            for number in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x, self.shifted_mask if number % 2 else self.mask)
        return self.leave(x)


def stack(grid: WindowGrid, depth: int = 3) -> Stack:
    model = Stack(grid, depth).double()
    for number, layer in enumerate(m for m in model.modules() if isinstance(m, Layer)):
        layer.reset(torch.Generator().manual_seed(number))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            # Biases of zero would hide that padding is left out.
            parameter += 0.2 * noise(*parameter.shape, key=number)
    return model


@dataclass(frozen=True)
class Case:
    grid: WindowGrid
    topology: Topology
    dim: str = "lat"
    method: str = "all_to_all"

    def __str__(self) -> str:
        return f"{self.dim}-{told(self.grid, self.topology)}-{self.method}"

    def stripes(self, index: int) -> Stripes:
        tokens = self.grid.tokens
        return Stripes.of(
            {1: tokens}, grid=tokens, start=(0, 0), dim=self.dim,  # type: ignore[arg-type]
            ranks=self.topology.ranks, index=index,
        )  # fmt: skip


CASES = [
    Case(GLOBE, Topology(2)),
    Case(GLOBE, Topology(1, 2), "lon"),
    Case(PAPER, Topology(2), "lon", "p2p"),
    Case(PAPER, Topology(1, 2)),  # 15 tokens on two ranks
    Case(GLOBE, Topology(3), "lon"),
    Case(PAPER, Topology(3)),
    Case(TWO_WINDOWS, Topology(3)),
    Case(PAPER, Topology(1, 3), method="p2p"),
    Case(GLOBE, Topology(4)),
    Case(PAPER, Topology(4), "lon"),
    Case(GLOBE, Topology(4, fixed=(2, 2))),
    Case(PAPER, Topology(4, fixed=(2, 2)), "lon"),  # a grid of 3 x 2 windows, filled up
    Case(GLOBE, Topology(2, 2)),
    Case(PAPER, Topology(2, 2, fixed=(1, 2)), "lon"),
    Case(TWO_WINDOWS, Topology(4)),  # two ranks without windows, one of them without a row
    Case(WindowGrid((2, 2), (2, 2), (2, 2), "globe"), Topology(2, 2)),  # the same with a partner
    Case(TWO_WINDOWS, Topology(1, 4)),  # 9 tokens on four ranks: nothing for the last one
    Case(ALL_PADDING, Topology(4)),  # windows without a token
]

Result = tuple[Tensor, Tensor, dict[str, Tensor]]


def _run(model: nn.Module, x: Tensor, weight: Tensor) -> Result:
    """(output, input gradient, weight gradients) of the loss <output, weight>."""
    x = x.clone().requires_grad_()
    out = model(x)
    (out * weight).sum().backward()
    # A gradient of None would not take part where ranks add theirs up.
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return out.detach(), x.grad, grads


def _inputs(grid: WindowGrid) -> tuple[Tensor, Tensor]:
    return noise(BATCH, WIDTH, *grid.tokens, key=1), noise(BATCH, WIDTH, *grid.tokens, key=2)


def _shared(case: Case) -> Result:
    topology = case.topology
    mesh = Mesh({"window": topology.window, "sequence": topology.sequence})
    stripes, model = case.stripes(mesh.sample_index), stack(case.grid)
    names = list(model.state_dict())
    links = [
        Link(mesh.group(*axes), case.method)  # type: ignore[arg-type]
        for axes in (SAMPLE, ("sequence",))
    ]
    route_windows(model, topology, stripes, *links)
    assert list(model.state_dict()) == names
    x, weight = (t[..., stripes.rows, stripes.columns] for t in _inputs(case.grid))
    return _run(model, x, weight)


def compare(got: Result, want: Result) -> None:
    assert got[2].keys() == want[2].keys()
    largest = max(float(grad.abs().max()) for grad in (want[1], *want[2].values()))
    for name, ours, theirs in [
        ("output", got[0], want[0]),
        ("input", got[1], want[1]),
        *((name, got[2][name], grad) for name, grad in want[2].items()),
    ]:
        assert ours.shape == theirs.shape, name
        scale = max(float(theirs.abs().max()), 1e-3 * largest)
        difference = float((ours - theirs).abs().max()) / scale
        assert difference <= 1e-12, (name, difference)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_ranks_is_attention_on_one(pools, case):
    parts = pools[case.topology.ranks].run(_shared, case)
    dim = -2 if case.dim == "lat" else -1
    output, gradient = (torch.cat([part[i] for part in parts], dim) for i in (0, 1))
    assert all(part[2].keys() == parts[0][2].keys() for part in parts)
    sums: dict[str, Any] = {name: sum(part[2][name] for part in parts) for name in parts[0][2]}
    compare((output, gradient, sums), _run(stack(case.grid), *_inputs(case.grid)))


@pytest.mark.parametrize("grid", [GLOBE, PAPER, ALL_PADDING])
def test_one_rank_computes_what_the_serial_model_does(grid):
    model, serial = stack(grid), stack(grid)
    route_windows(model, Topology(), Case(grid, Topology()).stripes(0), Link(), Link())
    assert not any(type(module) is Shift for module in model.modules())
    compare(*(_run(m, *_inputs(grid)) for m in (model, serial)))


def test_heads_that_the_ranks_cannot_share_are_refused_with_what_would_do():
    model, topology = stack(GLOBE, 1), Topology(1, 5)
    link = Link()
    link.size = 5
    with pytest.raises(
        ValueError, match=r"blocks\.0\.attention: 12 heads .* sequence 5 x tensor 1 = 5 ranks.*"
        r" would do: 1, 2, 3, 4, 6, 12; or set model\.heads to a multiple of 5$",
    ):  # fmt: skip
        route_windows(model, topology, Case(GLOBE, topology).stripes(0), link, link)


def test_only_masks_of_windows_that_are_here_are_kept():
    # Three windows in each of two rows: the seam is in the second.
    grid = WindowGrid((6, 12), (6, 12), (3, 4), "globe")
    topology = Topology(4)
    layout = WindowLayout(grid, topology, shifted=True)
    masks = [WindowMask(grid, True, layout.regions(rank)) for rank in range(4)]
    assert [layout.windows(rank).tolist() for rank in range(4)] == [[0], [1, 2], [3], [4, 5]]
    assert [[m is None for m in mask.masks()] for mask in masks] == [[True]] * 2 + [[False]] * 2
    fixed = WindowLayout(grid, Topology(4, fixed=(4, 1)), shifted=True)
    assert fixed.windows(3).tolist() == [-1] * 3
    assert WindowMask(grid, True, fixed.regions(3)).masks() == [None]
    none = WindowMask(grid, True, WindowLayout(grid, Topology(7)).regions(0))
    assert (none.windows, none.masks()) == ([], [])
