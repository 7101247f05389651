"""Layers over stripes against the same layers over the whole field, in float64.

One table. Of each row the output, the gradient of the input and those of the weights are compared,
and the bytes that left a rank with what its peers' outputs read of its points.
"""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from graticule.mesh import Cut, Stripes
from graticule.model.layers import Conv, Layer, TransposedConv
from graticule.model.norms import FieldGroupNorm
from graticule.model.pad import ConvPad, Crop, TransposedPad
from graticule.model.resample import ConvNormAct, Down, Up
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks
from graticule.parallel.space import stripe

TOLERANCE = 1e-12
FEATURES = 4
METHODS: dict[int, Any] = {2: "all_to_all", 3: "p2p", 4: "all_to_all"}
"""By number of ranks."""


@dataclass(frozen=True)
class Case:
    """A layer and the field that goes into it.

    cut: how the ranks share it: `even`, `ragged` (a row each, the rest to the last), `hollow` (all
    on rank 1), `late` (all but a row on rank 0).
    memory: of the input: `contiguous`, `channels_last`, or `sliced` (a view into a larger field).
    """

    layer: str
    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    boundary: Any = "globe"
    points: tuple[int, int] = (11, 12)
    cut: str = "even"
    memory: str = "contiguous"
    dims: tuple[Any, ...] = ("lat", "lon")

    def __str__(self) -> str:
        plain = Case(self.layer)
        told = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return " ".join([self.layer, *told]).replace(" ", "-")


CUTS = ("even", "ragged", "hollow", "late")
KERNELS = [
    Case("conv", kernel=kernel, stride=stride, dilation=dilation, cut=CUTS[number % 4],
         dims=(("lat",), ("lon",))[number // 4 % 2])
    for number, (kernel, stride, dilation) in enumerate(
        itertools.product(range(1, 8), (1, 2, 3), (1, 2, 3))
    )
]  # fmt: skip
CASES = [
    *KERNELS,
    *(Case("conv", kernel=k, stride=s, cut=c, points=(12, 12))
      for k, s in ((3, 1), (3, 2), (5, 3)) for c in CUTS),
    *(Case("conv", kernel=k, stride=s, boundary="paper", points=(7, 13), cut=c)
      for (k, s), c in zip(((3, 1), (4, 2), (5, 3), (7, 1)), CUTS, strict=True)),
    *(Case("conv", groups=groups, kernel=k, cut=c)
      for groups, k, c in ((4, 3, "even"), (4, 7, "ragged"), (2, 5, "late"), (2, 3, "hollow"))),
    *(Case("conv", kernel=k, stride=s, memory=memory, cut=c)
      for memory, k, s, c in (("channels_last", 3, 1, "even"), ("channels_last", 5, 2, "ragged"),
                              ("sliced", 3, 1, "even"), ("sliced", 7, 3, "late"))),
    *(Case("conv", kernel=7, points=points, cut=c)
      for points in ((2, 4), (1, 3), (3, 3)) for c in ("even", "hollow")),
    *(Case("transposed", kernel=k, stride=2, cut=c) for k in (2, 4) for c in CUTS),
    *(Case("transposed", kernel=k, stride=s, boundary=boundary, points=(5, 6), memory=memory)
      for k, s, boundary, memory in ((2, 2, "paper", "channels_last"), (4, 2, "paper", "sliced"),
                                     (3, 2, "globe", "contiguous"), (3, 1, "paper", "sliced"),
                                     (7, 3, "globe", "channels_last"), (5, 2, "paper", "sliced"))),
    *(Case("norm", groups=groups, cut=c, memory=memory)
      for groups, c, memory in ((1, "even", "sliced"), (2, "ragged", "channels_last"),
                                (4, "hollow", "contiguous"), (2, "late", "contiguous"))),
    *(Case("block", groups=2, boundary=boundary, cut=c)
      for boundary in ("globe", "paper") for c in CUTS),
    *(Case("sampling", groups=2, stride=2, boundary=boundary, points=points)
      for boundary, points in (("globe", (11, 12)), ("paper", (12, 14)), ("globe", (3, 4)),
                               ("paper", (2, 13)), ("globe", (1, 2)))),
]  # fmt: skip


def build(case: Case) -> nn.Module:
    """The serial layer, with weights of its own."""
    f, k, s, points = FEATURES, case.kernel, case.stride, case.points
    if case.layer == "conv":
        pad = ConvPad(case.boundary, points, kernel=k, stride=s, dilation=case.dilation)
        conv = Conv(f, f, kernel=k, stride=s, dilation=case.dilation, groups=case.groups)
        model = nn.Sequential(pad, conv)
    elif case.layer == "transposed":
        around = TransposedPad(case.boundary, points, kernel=k, stride=s)
        # One point less than there could be, as over an odd number of fine ones.
        fine = s * points[0] - s // 2, s * points[1]
        conv = TransposedConv(f, f, kernel=k, stride=s)
        model = nn.Sequential(around, conv, Crop(fine, surplus=around.surplus))
    elif case.layer == "norm":
        model = nn.Sequential(FieldGroupNorm(case.groups, f))
    elif case.layer == "block":
        model = nn.Sequential(
            *(ConvNormAct(f, case.groups, case.boundary, points) for _ in range(2))
        )
    else:
        model = nn.Sequential(
            Down(f, s, case.groups, case.boundary, points),
            Up(f, s, case.groups, case.boundary, points),
        )
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, Layer):
            module.reset(generator)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.double()


def cut_of(case: Case, size: int, ranks: int) -> Cut:
    if case.cut == "even":
        return Cut.even(size, ranks)
    if case.cut == "hollow":
        return Cut((0, 0, *[size] * (ranks - 1)))
    if case.cut == "late":
        return Cut((0, *[size - 1] * (ranks - 1), size))
    return Cut((*(min(rank, size) for rank in range(ranks)), size))


def stripes_of(case: Case, dim: Any, ranks: int, index: int, out: tuple[int, int]) -> Stripes:
    """By hand for a single layer, as the models do it for the sampling modules."""
    along = 0 if dim == "lat" else 1
    if case.layer == "sampling":
        coarse = tuple(-(-size // 2) for size in case.points)
        scales = {1: case.points, 2: (coarse[0], coarse[1])}
        return Stripes.of(scales, grid=case.points, start=(0, 0), dim=dim, ranks=ranks, index=index)
    cut = cut_of(case, case.points[along], ranks)
    after = cut
    if case.layer == "conv":
        after = cut.strided(case.stride)
    elif case.layer == "transposed":
        after = cut.finer(case.stride, out[along])
    return Stripes(dim=dim, index=index, cuts={cut.size: cut, out[along]: after}, grid=cut)


def part(x: Tensor, cut: Cut, dim: Any, index: int) -> Tensor:
    here = cut.of(index)
    return x[..., here, :] if dim == "lat" else x[..., here]


def laid_out(x: Tensor, memory: str) -> Tensor:
    """The same values in another order of memory."""
    if memory == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    return x if memory == "sliced" else x.contiguous()


@cache
def serial(case: Case) -> tuple[Tensor, ...]:
    """Input, output, gradient of the output, of the input and of the weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, FEATURES, *case.points, generator=generator).double().requires_grad_()
    model = build(case)
    out = model(x)
    grad = torch.randn(out.shape, generator=generator).double()
    grads = torch.autograd.grad(out, [x, *model.parameters()], grad)
    return x.detach(), out.detach(), grad, *grads


def compared(case: Case, dim: Any, link: Link) -> dict[str, float]:
    """The differences of one case, by the rule of the whole suite, and surplus bytes."""
    x, want, grad, *want_grads = serial(case)
    model = build(case)
    out = (want.shape[-2], want.shape[-1])
    stripes = stripes_of(case, dim, link.size, link.rank, out)
    names = list(model.state_dict())
    stripe(model, stripes, link)
    assert list(model.state_dict()) == names
    before, after = stripes.at(case.points), stripes.at(out)
    ours = laid_out(part(x, before, dim, link.rank), case.memory).requires_grad_()
    link.sent.clear()
    got = model(ours)
    got_grads = list(
        torch.autograd.grad(got, [ours, *model.parameters()], part(grad, after, dim, link.rank))
    )
    sent = link.sent["halo"]
    together = torch.cat([g.flatten() for g in got_grads[1:]])
    dist.all_reduce(together)
    sums = together.split([g.numel() for g in got_grads[1:]])
    got_grads[1:] = [g.view_as(w) for g, w in zip(sums, want_grads[1:], strict=True)]
    largest = max(float(g.abs().max()) for g in want_grads)
    pairs = {
        "output": (got, part(want, after, dim, link.rank)),
        "input": (got_grads[0], part(want_grads[0], before, dim, link.rank)),
    } | {
        name: (got_grads[number + 1], want_grads[number + 1])
        for number, (name, _) in enumerate(model.named_parameters())
    }
    found = {name: difference(a, b, largest) for name, (a, b) in pairs.items()}
    if case.layer in ("conv", "transposed"):
        across = case.points[1 if dim == "lat" else 0]
        values = 2 * FEATURES * across * read_by_others(case, dim, before, after, link.rank)
        returned = 2 * FEATURES * across * reads_of_others(case, dim, before, after, link.rank)
        found["bytes"] = abs(sent - 8 * (values + returned))
    return found


def difference(a: Tensor, b: Tensor, largest: float) -> float:
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape, (a.shape, b.shape)
    if not b.numel():
        return 0.0
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest)


def inputs_of(case: Case, dim: Any, output: int, size: int) -> set[int]:
    """The points that an output reads, from the definition."""
    k, s, d = case.kernel, case.stride, case.dilation
    if case.layer == "conv":
        points = {s * output - d * (k - 1) // 2 + d * tap for tap in range(k)}
    else:
        start = (k - s + 1) // 2
        points = {i for i in range(-k, size + k) if 0 <= output + start - s * i < k}
    if dim == "lon" and case.boundary == "globe":
        return {point % size for point in points}
    return {point for point in points if 0 <= point < size}


def wanted(case: Case, dim: Any, before: Cut, after: Cut, rank: int) -> set[int]:
    """The points of others that a rank's outputs read."""
    outputs = list(range(*after.of(rank).indices(after.size)))
    if case.layer == "transposed" and before.length(rank):
        # All outputs of its inputs are made; a surplus one at the end is dropped after that.
        outputs = list(
            range(case.stride * before.bounds[rank], case.stride * before.bounds[rank + 1])
        )
    found = set().union(*(inputs_of(case, dim, output, before.size) for output in outputs))
    return found - set(range(*before.of(rank).indices(before.size)))


def read_by_others(case: Case, dim: Any, before: Cut, after: Cut, rank: int) -> int:
    mine = set(range(*before.of(rank).indices(before.size)))
    peers = (peer for peer in range(before.ranks) if peer != rank)
    return sum(len(mine & wanted(case, dim, before, after, peer)) for peer in peers)


def reads_of_others(case: Case, dim: Any, before: Cut, after: Cut, rank: int) -> int:
    return len(wanted(case, dim, before, after, rank))


def run_all(cases: list[Case], method: Any) -> list[dict[str, float]]:
    """Of each case the largest differences over its dims."""
    link = Link(dist.group.WORLD, method)
    results = []
    for case in cases:
        found: dict[str, float] = {}
        for dim in case.dims:
            for name, value in compared(case, dim, link).items():
                found[name] = max(found.get(name, 0.0), value)
        results.append(found)
    return results


Found = dict[tuple[int, str], list[list[dict[str, float]]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """By ranks and method, what each rank found of each case."""
    # Before the ranks are forked, which inherit it.
    for case in CASES:
        serial(case)
    results: Found = {}
    for ranks, method in METHODS.items():
        with LocalRanks(ranks) as pool:
            results[ranks, method] = pool.run(run_all, CASES, method)
    return results


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_a_layer_over_stripes_is_the_layer_over_the_field(found: Found, number: int) -> None:
    for (ranks, method), results in found.items():
        for rank, result in enumerate(results):
            wrong = {name: value for name, value in result[number].items() if value > TOLERANCE}
            assert not wrong, f"{CASES[number]} over {ranks} ranks ({method}), rank {rank}: {wrong}"


def test_eight_rows_on_eight_ranks_take_a_kernel_of_five() -> None:
    cases = [
        Case("conv", kernel=5, points=(8, 8)),
        Case("block", groups=2, points=(8, 8)),
        Case("conv", kernel=7, dilation=2, points=(8, 12)),
    ]
    for case in cases:
        serial(case)
    with LocalRanks(8) as pool:
        for result in itertools.chain.from_iterable(pool.run(run_all, cases, "all_to_all")):
            assert max(result.values()) <= TOLERANCE, result
