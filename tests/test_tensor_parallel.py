"""Attention and MLP with their weights cut over ranks compute what one process computes."""

import pytest
import torch
import torch.distributed as dist

from graticule.mesh import Mesh
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks, RankError
from graticule.parallel.tensor import _Gather, _ScatterSum, split_tensors
from small_stack import Layout, assert_same_as_one_process, build, outcome


@pytest.mark.parametrize(
    "layout",
    [
        Layout(sizes={"tensor": 2}),
        Layout(sizes={"tensor": 2}, leads=2, parts=2, samples=4, steps=0),
    ],
    ids=["one use", "two uses, two backward passes"],
)
def test_two_ranks_that_share_the_weights_are_as_one(two: LocalRanks, layout: Layout) -> None:
    assert_same_as_one_process(two.run(outcome, layout), layout, 1e-12)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 4}, {"data": 2, "tensor": 2}, {"window": 2, "tensor": 2}], ids=str
)
def test_four_ranks_are_as_one(four: LocalRanks, sizes: dict[str, int]) -> None:
    layout = Layout(sizes=sizes, steps=2 if sizes == {"tensor": 4} else 0)
    assert_same_as_one_process(four.run(outcome, layout), layout, 1e-12)


def _parameters() -> tuple[dict, dict, int]:
    mesh = Mesh({"tensor": 2})
    model = build(Layout(), mesh)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    local = {
        name: tuple(p.to_local().shape) for name, p in model.named_parameters()
        if hasattr(p, "to_local")
    }  # fmt: skip
    return shapes, local, model.blocks[0].attention.heads


def test_parameters_keep_their_names_and_logical_shapes(two: LocalRanks) -> None:
    serial = build(Layout(), Mesh())
    for shapes, local, heads in two.run(_parameters):
        assert shapes == {name: tuple(p.shape) for name, p in serial.named_parameters()}
        assert heads == 2
        block = {name[9:]: shape for name, shape in local.items() if name.startswith("blocks.1")}
        half = dict.fromkeys(("q", "k", "v"), (4, 8))
        assert block == {
            **{f"attention.{name}.weight": shape for name, shape in half.items()},
            **{f"attention.{name}.bias": (4,) for name in half},
            "attention.proj.weight": (8, 4),
            "attention.bias.bias_table": (21, 2),
            "mlp.fc1.weight": (8, 8),
            "mlp.fc1.bias": (8,),
            "mlp.fc2.weight": (8, 8),
        }


def _bytes() -> dict[str, int]:
    mesh = Mesh({"tensor": 2})
    torch.manual_seed(0)
    model = build(Layout(), Mesh({"tensor": 2}))
    link = model.blocks[0].mlp.link
    before = link.sent["tensor"]
    x = torch.randn(4, 4, 8, dtype=torch.float64, requires_grad=True)
    model.blocks[0].mlp(x).sum().backward()
    assert mesh.size == 2
    return {"sent": link.sent["tensor"] - before, "tokens": x.numel() * 8}


def test_a_module_gathers_and_scatters_once_each_way(two: LocalRanks) -> None:
    # Gather and scatter in the forward pass, and again in the backward pass.
    for counted in two.run(_bytes):
        assert counted["sent"] == 4 * counted["tokens"]


def _adjoint(shape: tuple[int, ...]) -> tuple[float, float, float]:
    link = Link(dist.group.WORLD)
    generator = torch.Generator().manual_seed(link.rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    wide = (shape[0], 2 * shape[1], shape[2])
    y = torch.randn(wide, generator=generator, dtype=torch.float64, requires_grad=True)
    gathered, scattered = _Gather.apply(x, link), _ScatterSum.apply(y, link)
    assert gathered.shape == wide
    assert scattered.shape == shape
    gathered.backward(y.detach())
    scattered.backward(x.detach())
    assert torch.equal(x.grad, scattered)
    assert torch.equal(y.grad, gathered)
    products = torch.stack(
        [(gathered * y).sum(), (x * scattered).sum(), y.detach().square().sum()]
    ).detach()
    dist.all_reduce(products)
    return tuple(products.tolist())


@pytest.mark.parametrize("shape", [(3, 2, 5), (0, 2, 5), (3, 0, 5)])
def test_gather_and_scatter_are_adjoint(two: LocalRanks, shape: tuple[int, ...]) -> None:
    for ax_y, x_ay, size in two.run(_adjoint, shape):
        assert abs(ax_y - x_ay) <= 1e-14 * size


def _split_six_heads() -> None:
    mesh = Mesh({"tensor": 4})
    with torch.device("meta"):
        from graticule.model.swin import WindowAttention
        from small_stack import GRID

        model = torch.nn.Sequential(WindowAttention(12, 6, GRID, bias_table=False))
    split_tensors(model, mesh)


def _split_nine_features() -> None:
    mesh = Mesh({"tensor": 2})
    from graticule.model.layers import Mlp

    with torch.device("meta"):
        split_tensors(torch.nn.Sequential(Mlp(3, 3)), mesh)


def test_heads_that_do_not_divide_are_refused_with_what_would_do(four: LocalRanks) -> None:
    wanted = (
        r"0: 6 heads cannot be cut into mesh.tensor=4 equal parts. Use mesh.tensor=1, 2, 3 or 6, or"
        r" model.heads for a multiple of 4 such as 8"
    )
    with pytest.raises(RankError, match=wanted):
        four.run(_split_six_heads)


def test_hidden_features_that_do_not_divide_are_refused(two: LocalRanks) -> None:
    wanted = r"0: 9 hidden features cannot be cut .* mesh.tensor=1, 3 or 9, .* such as 10"
    with pytest.raises(RankError, match=wanted):
        two.run(_split_nine_features)


def test_one_rank_keeps_the_serial_modules() -> None:
    from graticule.model.swin import WindowAttention

    model = build(Layout(), Mesh())
    assert type(model.blocks[0].attention) is WindowAttention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_gradients_are_those_of_one_process_to_rounding(
    two: LocalRanks, dtype: torch.dtype
) -> None:
    layout = Layout(sizes={"tensor": 2}, dtype=torch.float32, compute=dtype, steps=0)
    serial = outcome(layout.serial)
    largest = max(float(g.abs().max()) for g in serial.gradients.values())
    # A few units of the last place; bfloat16 has 8 bits, float16 11.
    bound = 4 * float(torch.finfo(dtype).eps)
    for part in two.run(outcome, layout):
        for name, value in serial.gradients.items():
            assert float((part.gradients[name] - value).abs().max()) < bound * largest, name
