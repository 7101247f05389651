"""What stands in for the modules that read other grid points, on ranks of this machine."""

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # asked for by each rank's first gradient: once, here
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.mesh import Cut, Stripes
from graticule.model.layers import Conv, Layer, LayerNorm, Linear, PatchEmbedding, PatchRecovery
from graticule.model.layers import TransposedConv as Transposed
from graticule.model.norms import FieldGroupNorm, merge
from graticule.model.pad import ConvPad, Crop, Pad, TransposedPad
from graticule.model.resample import ConvNormAct
from graticule.model.swin import Swin
from graticule.parallel.exchange import Link
from graticule.parallel.halo import StripedConvPad, StripedTransposedPad, halos_of
from graticule.parallel.local import LocalRanks
from graticule.parallel.norms import StripedGroupNorm
from graticule.parallel.space import specialise, stripe

ROWS = 11


def drawn(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, Layer):
            module.reset(generator)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.double()


def stripes_of(size: int, ranks: int, index: int = 0, dim: Any = "lat") -> Stripes:
    cut = Cut.even(size, ranks)
    return Stripes(dim=dim, index=index, cuts={size: cut}, grid=cut)


# Halos


def convolved(kernel: int, stride: int, dilation: int) -> Pad:
    return ConvPad("globe", (ROWS, 12), kernel=kernel, stride=stride, dilation=dilation)


PADS = [(3, 1, 1), (3, 2, 1), (7, 1, 2), (2, 1, 1), (1, 3, 1)]
HOLLOW = (0, 0, 4, 11), (0, 1, 2, 11), (0, 4, 8, 11)


def _adjoint(method: Any) -> list[tuple[float, float]]:
    """<A x, y> and <x, A' y> of pads along both dims, over all ranks."""
    link = Link(dist.group.WORLD, method)
    generator = torch.Generator().manual_seed(link.rank)
    found = []
    pads: list[Pad] = [convolved(*numbers) for numbers in PADS]
    pads += [TransposedPad("globe", (ROWS, 12), kernel=k, stride=2) for k in (3, 4, 7)]
    for pad in pads:
        for dim, bounds in [(-2, bounds) for bounds in HOLLOW] + [(-1, (0, 5, 5, 12))]:
            cuts, indices = [Cut((0, n)) for n in pad.points], [0, 0]
            cuts[dim], indices[dim] = Cut(bounds), link.rank
            halos = halos_of(pad, (cuts[0], cuts[1]), (indices[0], indices[1]))
            ours = ConvPad("globe", (ROWS, 12), kernel=1)
            specialise(ours, StripedConvPad, halos=halos, dim=dim, link=link)
            shape = 2, 3, halos[0].held, halos[1].held
            x = torch.randn(shape, generator=generator).double().requires_grad_()
            out = ours(x)
            y = torch.randn(out.shape, generator=generator).double()
            kept = y.clone()
            (back,) = torch.autograd.grad(out, x, y)
            assert torch.equal(kept, y)
            both = torch.stack([(out * y).sum(), (x * back).sum()]).detach()
            dist.all_reduce(both)
            found.append((float(both[0]), float(both[1])))
    return found


@pytest.mark.parametrize("method", ["all_to_all", "p2p"])
def test_the_gradient_of_an_exchange_is_its_adjoint(three: LocalRanks, method: str) -> None:
    for forward, back in three.run(_adjoint, method)[0]:
        assert forward == pytest.approx(back, rel=1e-12, abs=1e-10)
        assert forward != 0


def _bytes(numbers: tuple[int, int, int], rows: int) -> tuple[int, int]:
    """What a rank sends in the forward and in the backward pass."""
    link = Link(dist.group.WORLD)
    kernel, stride, dilation = numbers
    pad = ConvPad("globe", (rows, 12), kernel=kernel, stride=stride, dilation=dilation)
    stripes = stripes_of(rows, 3, link.rank)
    stripe(pad, stripes, link)
    x = torch.randn(2, 5, stripes.grid.length(link.rank), 12).requires_grad_()
    out = pad(x)
    there = link.sent["halo"]
    out.sum().backward()
    return there, link.sent["halo"] - there


@pytest.mark.parametrize(
    ("numbers", "rows", "there", "back"),
    [
        ((3, 1, 1), 12, (1, 2, 1), (1, 2, 1)),
        # One row from above and none from below.
        ((3, 2, 1), 12, (1, 1, 0), (0, 1, 1)),
        ((7, 1, 1), 12, (3, 6, 3), (3, 6, 3)),
        ((5, 3, 1), 9, (2, 2, 0), (0, 2, 2)),
        # Two taps, six rows apart: the rows between them stay at home.
        ((2, 4, 6), 12, (1, 1, 0), (0, 1, 1)),
        ((1, 2, 1), 12, (0, 0, 0), (0, 0, 0)),
        ((2, 2, 1), 12, (0, 0, 0), (0, 0, 0)),
        # Stripes of one row: two hops.
        ((5, 1, 1), 3, (2, 2, 2), (2, 2, 2)),
    ],
)
def test_what_is_read_travels_and_nothing_else(three, numbers, rows, there, back) -> None:
    row = 2 * 5 * 12 * 4
    assert three.run(_bytes, numbers, rows) == [
        (row * a, row * b) for a, b in zip(there, back, strict=True)
    ]


def _rows_of_ones() -> list[list[float]]:
    """The padded rows of a stripe of ones, and the gradient that comes back of ones."""
    link = Link(dist.group.WORLD)
    pad = ConvPad("globe", (6, 4), kernel=3)
    stripe(pad, stripes_of(6, 3, link.rank), link)
    x = torch.ones(1, 1, 2, 4, requires_grad=True)
    out = pad(x)
    out.sum().backward()
    assert x.grad is not None
    return [out[0, 0, :, 1].tolist(), x.grad[0, 0, :, 1].tolist()]


def test_rows_beyond_the_poles_are_zero_and_their_gradient_goes_nowhere(three) -> None:
    assert three.run(_rows_of_ones) == [
        [[0, 1, 1, 1], [1, 2]],
        [[1, 1, 1, 1], [2, 2]],
        [[1, 1, 1, 0], [2, 1]],
    ]


def _circle() -> list[float]:
    """What the rank of columns 0 and 1 of a circle of four borrows for a kernel of seven."""
    link = Link(dist.group.WORLD)
    pad = ConvPad("globe", (1, 4), kernel=7)
    stripe(pad, stripes_of(4, 2, link.rank, "lon"), link)
    x = torch.arange(4.0).view(1, 1, 1, 4)[..., 2 * link.rank : 2 * link.rank + 2]
    out = pad(x)
    assert link.sent["halo"] == 2 * 4, link.sent
    return out[0, 0, 3].tolist()


def test_a_column_that_is_read_on_both_sides_travels_once(two: LocalRanks) -> None:
    assert two.run(_circle) == [[1, 2, 3, 0, 1, 2, 3, 0], [3, 0, 1, 2, 3, 0, 1, 2]]


@pytest.mark.parametrize("boundary", ["globe", "paper"])
def test_one_rank_pads_as_without_stripes_bit_for_bit(boundary: Any) -> None:
    for kernel, stride, dilation in [*PADS, (7, 3, 3)]:
        serial = ConvPad(boundary, (ROWS, 12), kernel=kernel, stride=stride, dilation=dilation)
        x = torch.randn(2, 3, ROWS, 12, requires_grad=True)
        want = serial(x)
        (back,) = torch.autograd.grad(want, x, torch.ones_like(want))
        halos = halos_of(serial, (Cut((0, ROWS)), Cut((0, 12))), (0, 0))
        for dim in (-2, -1):
            ours = ConvPad(boundary, (ROWS, 12), kernel=kernel, stride=stride, dilation=dilation)
            specialise(ours, StripedConvPad, halos=halos, dim=dim, link=Link())
            got = ours(x)
            assert torch.equal(got, want[..., : got.shape[2], : got.shape[3]])
            (again,) = torch.autograd.grad(got, x, torch.ones_like(got))
            assert torch.equal(again, back) or stride > kernel


def test_a_domain_of_one_rank_is_the_model_itself() -> None:
    model = drawn(nn.Sequential(ConvPad("globe", (ROWS, 12), kernel=3), nn.BatchNorm2d(3)))
    kinds = [type(module) for module in model.modules()]
    stripe(model, stripes_of(ROWS, 1), Link())
    assert [type(module) for module in model.modules()] == kinds


def test_a_transposed_convolution_of_kernel_4_is_torchs_with_padding_1() -> None:
    pad = TransposedPad("paper", (5, 6), kernel=4, stride=2)
    conv = Transposed(3, 2, kernel=4, stride=2)
    model = drawn(nn.Sequential(pad, conv, Crop((10, 12), surplus=pad.surplus)))
    x = torch.randn(2, 3, 5, 6).double()
    want = F.conv_transpose2d(x, conv.weight, conv.bias, stride=2, padding=1)
    assert torch.allclose(model(x), want, rtol=1e-12, atol=1e-14)
    # On a globe it commutes with turning the circle.
    around = TransposedPad("globe", (5, 6), kernel=4, stride=2)
    model[0] = around
    assert torch.allclose(model(x.roll(1, -1)), model(x).roll(2, -1), rtol=1e-12, atol=1e-14)


def test_a_transposed_convolution_that_leaves_holes_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel 2 and stride 3 leaves holes"):
        TransposedPad("globe", (5, 6), kernel=2, stride=3)


# Norms


def _rows_0_to_3() -> list[float]:
    link = Link(dist.group.WORLD)
    norm = drawn(FieldGroupNorm(1, 1)).float()
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    stripe(norm, stripes_of(4, 2, link.rank), link)
    x = torch.arange(4.0)[2 * link.rank :][:2].view(1, 1, 2, 1)
    return norm(x).flatten().tolist()


def test_rows_0_to_3_on_two_ranks_are_normed_as_one_field(two: LocalRanks) -> None:
    normed = torch.tensor([-1.34164, -0.44721, 0.44721, 1.34164])
    got = torch.tensor([*chain.from_iterable(two.run(_rows_0_to_3))])
    assert torch.allclose(got, F.silu(normed), atol=1e-5)


def _statistics(offset: float) -> tuple[float, list[Tensor], dict[str, int]]:
    """The error of float32 norms of a field far from zero, and numbers that must be the same on
    all ranks: outputs and gradients of stripes of the same values."""
    link = Link(dist.group.WORLD)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 4, 30, 8, generator=generator) + offset
    norm = drawn(FieldGroupNorm(2, 4)).float()
    want = F.silu(F.group_norm(x.double(), 2, norm.weight.double(), norm.bias.double()))
    stripe(norm, stripes_of(30, 3, link.rank), link)
    here = slice(10 * link.rank, 10 * link.rank + 10)
    error = float((norm(x[:, :, here]) - want[:, :, here]).detach().abs().max())
    link.sent.clear()
    alike = x[:, :, :10].clone().requires_grad_()
    out = norm(alike)
    grads = torch.autograd.grad(out, [alike, norm.weight, norm.bias], torch.ones_like(out))
    return error, [out.detach(), *grads], dict(link.sent)


def test_norms_are_stable_and_the_same_bits_on_all_ranks(three: LocalRanks) -> None:
    results = three.run(_statistics, 1000.0)
    for error, tensors, sent in results:
        # A thousand standard deviations from zero: float32 holds 1e-4 of one.
        assert error < 2e-3
        assert all(map(torch.equal, tensors, results[0][1]))
        # Three numbers for each sample and group to two others; then two.
        assert sent == {"norm": 2 * (3 + 2) * 4 * 8}


def test_merged_statistics_are_those_of_all_values() -> None:
    x = torch.randn(12).double() + 50
    parts = [x[:5], x[5:5], x[5:6], x[6:]]
    each = [[float(p.numel()), float(p.mean()) if len(p) else 0.0,
             float(((p - p.mean()) ** 2).sum()) if len(p) else 0.0] for p in parts]  # fmt: skip
    count, mean, squares = merge(torch.tensor(each, dtype=torch.float64))
    assert (count, mean) == (12, pytest.approx(float(x.mean())))
    assert float(squares / 12) == pytest.approx(float(x.var(correction=0)))


@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_keeps_its_input_and_no_copy_of_it(dtype: torch.dtype, striped: bool) -> None:
    norm = drawn(FieldGroupNorm(2, 4)).float()
    if striped:
        specialise(norm, StripedGroupNorm, link=Link())
    x = torch.randn(2, 4, 16, 16).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    fields = [t for t in kept if t.numel() == x.numel()]
    assert [t.data_ptr() for t in fields] == [x.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_whole_fields_norm_is_torchs_to_the_bit(dtype: torch.dtype) -> None:
    norm = drawn(FieldGroupNorm(2, 8)).to(torch.promote_types(dtype, torch.float32))
    x, grad = torch.randn(2, 2, 8, 9, 6).to(dtype)
    x.requires_grad_()
    wanted = [x, *norm.parameters()]
    theirs = F.silu(F.group_norm(x, 2, *norm.weights(dtype), norm.eps))
    assert torch.equal(norm(x), theirs)
    pairs = zip(*(torch.autograd.grad(out, wanted, grad) for out in (norm(x), theirs)), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_a_norm_in_16_bits_is_as_exact_as_torchs() -> None:
    serial, ours = (drawn(FieldGroupNorm(2, 8)).float() for _ in range(2))
    specialise(ours, StripedGroupNorm, link=Link())
    exact = drawn(FieldGroupNorm(2, 8))
    # Of result, input's, scale's and offset's gradients: (theirs, mine), squares of errors.
    squares = torch.zeros(4, 2, dtype=torch.float64)
    for _ in range(8):  # a weight's gradient is eight numbers, each rounded by luck
        x, grad = torch.randn(2, 2, 8, 16, 24).bfloat16()
        found = []
        for norm, kind in ((exact, torch.float64), (serial, x.dtype), (ours, x.dtype)):
            y = x.to(kind).requires_grad_()
            out = norm(y)
            grads = torch.autograd.grad(out, [y, *norm.parameters()], grad.to(kind))
            found.append([out.detach(), *grads])
        for place, (want, *others) in enumerate(zip(*found, strict=True)):
            squares[place] += torch.stack([(other - want).square().mean() for other in others])
    theirs, mine = squares.sqrt().T
    assert (mine <= 1.05 * theirs).all(), (theirs, mine)


# Empty stripes


def _empty() -> list[Any]:
    """A rank without rows among three: shapes, and the parameters whose gradients arrived."""
    link = Link(dist.group.WORLD)
    cut = Cut((0, 0, 1, 1))
    fine = Cut((0, 0, 4, 4))
    stripes = Stripes(dim="lat", index=link.rank, cuts={1: cut, 2: Cut((0, 0, 2, 2)), 4: fine},
                      grid=fine)  # fmt: skip
    around = TransposedPad("globe", (1, 4), kernel=4, stride=2)
    model = drawn(
        nn.Sequential(
            PatchEmbedding(2, 4, 4),
            ConvPad("globe", (1, 4), kernel=3),
            Conv(4, 4, kernel=3),
            ConvNormAct(4, 2, "globe", (1, 4)),
            around,
            Transposed(4, 4, kernel=4, stride=2),
            Crop((2, 8), surplus=around.surplus),
            Transposed(4, 4, stride=2),
            Crop((4, 16)),
            PatchRecovery(4, 2, 1),
            nn.SiLU(),
        )
    )
    stripe(model, stripes, link)
    arrived = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: arrived.append((name, float(p.grad.abs().sum())))
        )
    x = torch.randn(2, 2, fine.length(link.rank), 16).double().requires_grad_()
    out = model(x)
    (out**2).sum().backward()
    assert x.grad is not None
    names = {name for name, _ in model.named_parameters()}
    whole = {name for name, _ in arrived} == names
    return [tuple(out.shape), tuple(x.grad.shape), whole, max(value for _, value in arrived)]


def test_an_empty_stripe_yields_no_rows_and_zero_gradients_that_arrive(three) -> None:
    first, second, third = three.run(_empty)
    assert first == third == [(2, 2, 0, 16), (2, 2, 0, 16), True, 0.0]
    assert second[:3] == [(2, 2, 4, 16), (2, 2, 4, 16), True]
    assert second[3] > 0


@pytest.mark.parametrize("layer", [Linear(4, 3), LayerNorm(4), nn.GELU()])
def test_layers_of_one_token_take_none(layer: nn.Module) -> None:
    x = torch.zeros(2, 0, 4, requires_grad=True)
    out = drawn(layer).float()(x)
    out.sum().backward()
    assert out.shape[:2] == (2, 0)
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


# A whole model, but for its windows


def _without_windows(settings: dict[str, Any], dim: Any) -> float:
    link = Link(dist.group.WORLD)
    serial, model = (drawn(Swin(**settings)) for _ in range(2))
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, settings["in_channels"], *settings["grid"], generator=generator).double()

    def through(swin: Any, x: Tensor) -> Tensor:
        return swin.pad.crop(swin.recover(swin.up(swin.down(swin.embed(swin.pad(x))))))

    assert isinstance(model, Swin)
    start = (model.pad.north, model.pad.west)
    stripes = Stripes.of(model.scales, grid=settings["grid"], start=start, dim=dim,
                         ranks=link.size, index=link.rank)  # fmt: skip
    stripe(model, stripes, link)
    x.requires_grad_()
    want = through(serial, x)
    grad = torch.randn(want.shape, generator=generator).double()
    used = [name for name, _ in serial.named_parameters() if "blocks" not in name]
    get = serial.get_parameter
    want_grads = torch.autograd.grad(want, [x, *map(get, used)], grad)
    rows, columns = stripes.rows, stripes.columns
    ours = x.detach()[:, :, rows, columns].requires_grad_()
    got = through(model, ours)
    got_grads = torch.autograd.grad(
        got, [ours, *map(model.get_parameter, used)], grad[:, :, rows, columns]
    )
    pairs = [(got, want[:, :, rows, columns]), (got_grads[0], want_grads[0][:, :, rows, columns])]
    for mine, whole in zip(got_grads[1:], want_grads[1:], strict=True):
        dist.all_reduce(mine)
        pairs.append((mine, whole))
    floor = 1e-3 * max(float(g.abs().max()) for g in want_grads)
    worst = 0.0
    for mine, whole in pairs:
        assert mine.shape == whole.shape
        if whole.numel():
            gap = float((mine - whole).detach().abs().max())
            worst = max(worst, gap / max(float(whole.detach().abs().max()), floor))
    return worst


SWIN: dict[str, Any] = {"in_channels": 2, "out_channels": 2, "states": (0, 2), "patch": 2,
        "sampling": 2, "width": 8, "depth": 1, "heads": 2, "norm_groups": 2}  # fmt: skip


@pytest.mark.parametrize("dim", ["lat", "lon"])
@pytest.mark.parametrize(
    "case",
    [
        {"grid": (9, 16), "window": (2, 2), "boundary": "globe"},
        {"grid": (13, 18), "window": (2, 3), "boundary": "paper"},
        {"grid": (9, 16), "window": (2, 2), "boundary": "paper", "padded_shape": (32, 48)},
        {"grid": (5, 8), "window": (2, 2), "boundary": "globe", "sampling": 1},
    ],
    ids=["globe", "paper", "mostly padding", "no sampling"],
)
def test_sampling_modules_and_field_pads_over_stripes(three, case, dim) -> None:
    assert max(three.run(_without_windows, {**SWIN, **case}, dim)) < 1e-12


# What is refused


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, -2)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (nn.Conv2d(2, 2, 3, padding=1), "Conv2d.*ConvPad and layers.Conv"),
        (nn.ConvTranspose2d(2, 2, 2), "ConvTranspose2d.*TransposedPad, layers.TransposedConv"),
        (nn.BatchNorm2d(2), "BatchNorm2d.*a norm of model.norms"),
        (nn.GroupNorm(1, 2), "GroupNorm.*a norm of model.norms"),
        (nn.InstanceNorm2d(2), "InstanceNorm2d.*a norm of model.norms"),
        (nn.Upsample(scale_factor=2), "Upsample.*TransposedConv"),
        (nn.AvgPool2d(2), "AvgPool2d.*pooling.Pool there, or a ConvPad"),
        (nn.ZeroPad2d(1), "ZeroPad2d.*ConvPad or TransposedPad"),
        (nn.Dropout(), "Dropout.*leave it out"),
        (Rolled(), "Rolled.*parallel.space.ONE_TOKEN"),
        (Conv(2, 2, kernel=3), "Conv of kernel 3.*put a ConvPad of the same numbers right before"),
        (Transposed(2, 2, kernel=4, stride=2), "put a TransposedPad of the same numbers"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("dim", ["lat", "lon"])
def test_what_might_be_wrong_under_a_split_is_refused_with_a_way_out(module, told, dim) -> None:
    pad = ConvPad("globe", (8, 8), kernel=5)
    model = nn.Sequential(nn.Identity(), nn.Sequential(pad, module))
    link = Link()
    link.size, link.rank = 2, 1
    with pytest.raises(ValueError, match=rf"^1\.1: {dim} is split over 2 ranks, and .*{told}"):
        stripe(model, stripes_of(8, 2, 1, dim), link)
    assert type(pad) is ConvPad


def test_a_scale_without_stripes_and_outputs_of_another_owner_are_refused() -> None:
    link = Link()
    link.size, link.rank = 2, 0
    with pytest.raises(ValueError, match=r"1: a field of 8 x 4 .* along lat; .* are 6 points"):
        stripe(nn.Sequential(nn.Identity(), Crop((8, 4))), stripes_of(6, 2), link)
    cuts = {6: Cut((0, 4, 6)), 3: Cut((0, 1, 3))}
    stripes = Stripes(dim="lat", index=0, cuts=cuts, grid=cuts[6])
    with pytest.raises(ValueError, match=r"3 outputs begin at \(0, 1\), .* give \(0, 2\)"):
        stripe(ConvPad("globe", (6, 4), kernel=3, stride=2), stripes, link)


def test_a_substitute_is_what_it_stands_for() -> None:
    pad = TransposedPad("globe", (4, 4), kernel=4, stride=2)
    link = Link()
    link.size = 2
    stripe(pad, stripes_of(4, 2), link)
    assert isinstance(pad, StripedTransposedPad)
    assert isinstance(pad, TransposedPad)
    with pytest.raises(AssertionError):
        specialise(nn.Identity(), StripedConvPad)
