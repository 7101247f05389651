"""BEAST against one written by hand in plain torch, its noise, its published size, its refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from graticule.assemble import Shapes, build_model, describe, shapes_of_config
from graticule.config import BayesConfig, BeastConfig, Config, MeshConfig, from_dict, override
from graticule.model.beast import Beast
from graticule.model.draws import Draw, drawing, noise
from graticule.model.layers import Layer
from graticule.model.nice import Nice, conditioned
from graticule.model.windows import Attend
from graticule.recipes import recipe

# 13 rows make 7 patches, and these 4 of the inner stage: each rounded up.
SETTINGS: dict[str, Any] = {
    "grid": (13, 48), "in_channels": 7, "out_channels": 8, "states": (3, 6), "num_outputs": 2,
    "width": 8, "depth": 2, "inner_depth": 2, "heads": 2, "inner_heads": 4, "window": (4, 6),
    "inner_window": (4, 4), "norm_groups": 2, "num_noise": 5, "noise_key": 77,
}  # fmt: skip
DRAW = Draw(step=1, member=3, items=(4, 8))


def small(**settings: Any) -> Beast:
    """With weights of some size in all places, in float64."""
    model = Beast(**{**SETTINGS, "compute_dtype": torch.float64, **settings})
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, Layer):
            module.reset(generator)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.double()


def field(grid: tuple[int, int] = (13, 48), batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, 7, *grid, generator=generator).double()


# By hand


def together(
    tokens: tuple[int, int], window: tuple[int, int], shifted: bool
) -> Tensor:  # (token, token)
    """Who attends to whom. Rows do not go round, so the poles never meet; columns do."""
    rows, columns = tokens
    down = window[0] // 2 if shifted and window[0] < rows else 0
    right = window[1] // 2 if shifted else 0
    which = [
        ((row - down) // window[0], (column - right) % columns // window[1])
        for row in range(rows)
        for column in range(columns)
    ]
    return torch.tensor([[a == b for b in which] for a in which])


def block_by_hand(
    x: Tensor, at: str, w: dict[str, Tensor], *, heads: int, groups: int, mask: Tensor, e: Tensor
) -> Tensor:
    """x: (batch, token, width)."""
    width = x.shape[-1]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{at}.{name}.weight"], w[f"{at}.{name}.bias"])

    def told(norm: int) -> list[Tensor]:
        last = w[f"{at}.nice.second.bias"][norm]
        if f"{at}.nice.first.weight" in w:
            hidden = F.gelu(linear(e, "nice.first")).chunk(2, -1)[norm]
            last = torch.einsum("pfh,bh->bpf", w[f"{at}.nice.second.weight"][norm], hidden) + last
        return [part[:, None] for part in last.expand(len(x), -1, -1).unbind(1)]

    def normed(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        split = x.unflatten(-1, (groups, -1))
        centred = split - split.mean(-1, keepdim=True)
        unit = centred / (split.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return unit.flatten(-2) * (1 + scale) + offset

    scale, offset, *gate = told(0)
    y = normed(x, scale, offset)
    q, k, v = (
        linear(y, f"attention.{name}").unflatten(-1, (heads, -1)).transpose(1, 2) for name in "qkv"
    )
    scores = (q @ k.transpose(-1, -2)) / (width // heads) ** 0.5
    y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    y = linear(y.transpose(1, 2).flatten(-2), "attention.proj")
    x = x + (y * (1 + gate[0]) if gate else y)
    scale, offset, *gate = told(1)
    y = linear(F.gelu(linear(normed(x, scale, offset), "mlp.fc1")), "mlp.fc2")
    return x + (y * (1 + gate[0]) if gate else y)


def by_hand(x: Tensor, model: Beast, draw: Draw, **settings: Any) -> Tensor:
    s = {**SETTINGS, "gated": True, **settings}
    w = dict(model.named_parameters())
    e = noise(s["noise_key"], draw, s["num_noise"], "cpu").double() if s["num_noise"] else x[:0]
    rows, columns = s["grid"]
    high = -(-rows // 2)
    given = x
    x = F.pad(x, (0, 0, 0, 2 * high - rows))
    # A patch's values in the order (row, column, channel).
    kernel = w["embed.linear.weight"].view(s["width"], 2, 2, s["in_channels"]).permute(0, 3, 1, 2)
    x = F.conv2d(x, kernel, w["embed.linear.bias"], stride=2)

    def stage(x: Tensor, name: str, depth: int, heads: int, window: tuple[int, int]) -> Tensor:
        shape = x.shape
        x = x.flatten(2).transpose(1, 2)
        for n in range(depth):
            mask = together((shape[2], shape[3]), window, bool(n % 2))
            x = block_by_hand(
                x, f"{name}.blocks.{n}", w, heads=heads, groups=s["norm_groups"], mask=mask, e=e
            )
        return x.transpose(1, 2).reshape(shape)

    x = stage(x, "first", s["depth"], s["heads"], s["window"])
    x = F.conv2d(F.pad(x, (0, 0, 0, high % 2)), w["down.weight"], w["down.bias"], stride=2)
    x = stage(x, "inner", s["inner_depth"], s["inner_heads"], s["inner_window"])
    x = F.conv_transpose2d(x, w["up.weight"], w["up.bias"], stride=2)[:, :, :high]
    x = F.conv2d(F.gelu(x), w["mix.weight"], w["mix.bias"])
    x = stage(x, "second", s["depth"], s["heads"], s["window"])
    back = w["recover.linear.weight"].view(2, 2, s["out_channels"], s["width"])
    x = F.conv_transpose2d(x, back.permute(3, 2, 0, 1), stride=2)
    bias = w["recover.linear.bias"].view(2, 2, -1).permute(2, 0, 1)
    x = (x + bias.repeat(1, high, columns // 2))[:, :, :rows].unflatten(1, (2, 4))
    state = F.pad(given[:, 3:6], (0, 0, 0, 0, 0, 1))  # the fourth channel is diagnostic
    return (x + state[:, None]).flatten(1, 2)


CASES: list[dict[str, Any]] = [
    {},
    {"gated": False},
    {"num_noise": 0},
    {"nice_hidden": 3, "mlp_ratio": 2, "norm_groups": 1},
    {"depth": 3, "inner_depth": 1, "window": (2, 12), "inner_window": (3, 6)},
    # Windows of all rows, and of all there is.
    {"window": (7, 6), "inner_window": (4, 12)},
    {"grid": (16, 24), "window": (8, 12), "inner_window": (2, 2)},
    {"grid": (2, 24), "window": (1, 4), "inner_window": (1, 3), "inner_depth": 3},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_network_is_the_one_written_by_hand(case: dict[str, Any]) -> None:
    model, x = small(**case), field(case.get("grid", (13, 48))).requires_grad_()
    weights = dict(model.named_parameters())
    ours, theirs = model(x, draw=DRAW), by_hand(x, model, DRAW, **case)
    assert ours.shape == theirs.shape == (2, 8, *case.get("grid", (13, 48)))
    assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3)).double()
    found = torch.autograd.grad(ours, [x, *weights.values()], grad)
    wanted = torch.autograd.grad(theirs, [x, *weights.values()], grad)
    largest = max(float(g.abs().max()) for g in wanted)
    for name, a, b in zip(["x", *weights], found, wanted, strict=True):
        difference = (a - b).abs().max() / max(float(b.abs().max()), 1e-3 * largest)
        assert difference < 1e-11, (name, float(difference))


# The globe


@pytest.mark.parametrize("columns", [12, 24, 5])
def test_turning_the_input_by_whole_windows_turns_the_output(columns: int) -> None:
    settings = {"window": (4, 6), "inner_window": (4, 3)}
    model, x = small(**settings), field()
    turned, whole = model(x.roll(columns, -1), draw=DRAW), model(x, draw=DRAW).roll(columns, -1)
    difference = (turned - whole).abs().max() / whole.abs().max()
    if columns % 12 == 0:  # 6 patches, 3 of the inner tokens
        assert difference < 1e-12
    else:
        assert difference > 1e-3


def test_noise_has_no_extent_in_space() -> None:
    """Of a field that is the same at all longitudes, so is a member."""
    model = small()
    x = field()[..., :1].expand(-1, -1, -1, 48)
    one, other = model(x, draw=DRAW), model(x, draw=replace(DRAW, member=5))
    patches = one.unflatten(-1, (12, 4))  # the inner stage's
    assert (patches - patches[..., :1, :]).abs().max() < 1e-12 * one.abs().max()
    assert (one - other).abs().max() > 1e-2 * one.abs().max()


def test_drawn_weights_have_no_extent_in_space_either() -> None:
    """Trap 10: of noise by row or point, fields that are the same at all longitudes would not
    stay so; nor is there any in a zero input, whose gradient is finite."""
    config = Config(
        model=BeastConfig(**{**MINI, "nice_noise": 0}),
        bayes=BayesConfig(weights=True, members=2, likelihood="crps", initial_sigma=1.0),
    )
    model = build_model(config, SHAPES, dtype=torch.float64)
    x = torch.randn(2, 7, 21, 1, generator=torch.Generator().manual_seed(0)).double()
    x = x.expand(-1, -1, -1, 48)
    one, other = model(x, draw=DRAW), model(x, draw=replace(DRAW, member=5))
    patches = one.unflatten(-1, (12, 4))
    assert (patches - patches[..., :1, :]).abs().max() < 1e-11 * one.abs().max()
    assert (one - other).abs().max() > 1e-2 * one.abs().max()
    model(torch.zeros_like(x), draw=DRAW).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), name


def test_groups_of_norms_are_the_configurations_on_every_mesh() -> None:
    """Trap 15: groups that followed the number of ranks would be another model."""
    x = torch.randn(2, 7, 21, 48, generator=torch.Generator().manual_seed(0)).double()
    said = {}
    for groups in (2, 4, 8):
        config = Config(model=BeastConfig(**{**MINI, "norm_groups": groups, "nice_noise": 0}))
        for tensor in (1, 2, 4):
            laid = replace(config, mesh=MeshConfig(tensor=tensor))
            model = build_model(laid, SHAPES, dtype=torch.float64)
            blocks = [b for stage in model.stages.values() for b in stage.blocks]  # type: ignore
            assert {block.groups for block in blocks} == {groups}
        said[groups] = model(x)
    for a, b in ((2, 4), (4, 8)):
        assert (said[a] - said[b]).abs().max() > 1e-6 * said[a].abs().max()


def test_windows_that_span_all_latitudes_are_not_shifted_along_them() -> None:
    model = small(window=(7, 6), inner_window=(4, 12))
    assert model.first.grid.offset == model.second.grid.offset == (0, 3)
    assert model.inner.grid.offset == (0, 0)
    assert all(mask is None for stage in model.stages.values() for mask in stage.mask.masks())
    assert all(m is None for stage in model.stages.values() for m in stage.shifted_mask.masks())
    assert small().first.grid.offset == (2, 3)


# Noise


def test_noise_is_a_samples_own_wherever_in_a_batch_it_is() -> None:
    """Trap 7: keyed by item, so that a micro-batch does not change it."""
    model, x = small(), field()
    both = model(x, draw=DRAW)
    for n, item in enumerate(DRAW.items):
        alone = model(x[n : n + 1], draw=replace(DRAW, items=(item,)))
        assert (alone - both[n]).abs().max() < 1e-12 * both.abs().max()
    swapped = model(x.flip(0), draw=replace(DRAW, items=DRAW.items[::-1])).flip(0)
    assert (swapped - both).abs().max() < 1e-12 * both.abs().max()
    for change in ({"lead": 2}, {"step": 2}, {"member": 4}, {"items": (5, 9)}):
        other = model(x, draw=replace(DRAW, **change))  # type: ignore[arg-type]
        assert (other - both).abs().amax((1, 2, 3)).min() > 1e-2 * both.abs().max(), change


def test_a_new_model_does_not_hear_the_noise_and_learns_to() -> None:
    model = build_model(Config(model=BeastConfig(**MINI)), SHAPES)
    x = torch.randn(2, 7, 21, 48, generator=torch.Generator().manual_seed(0))
    one, other = (model(x, draw=replace(DRAW, member=member)) for member in (0, 1))
    assert torch.equal(one, other)
    assert (one[:, :3] - x[:, 3:6]).abs().max() < 0.1  # and is close to persistence
    (one.square().sum() + other.sin().sum()).backward()
    nices = [module for module in model.modules() if isinstance(module, Nice)]
    assert len(nices) == 6
    for nice in nices:
        assert nice.second.weight.grad.abs().max() > 0  # type: ignore[union-attr]
        assert float(nice.first.weight.detach().std()) == pytest.approx(0.88 / 8**0.5, rel=0.2)


def test_all_norms_hear_one_noise_and_each_has_its_own_weights() -> None:
    model = small()
    first, second = model.first.blocks[0].nice, model.second.blocks[1].nice
    assert first.key == second.key == 77
    with drawing(DRAW):
        a, b = first(2), second(2)
    assert a.shape == b.shape == (2, 2, 3, 8)  # norm, sample, part, feature
    assert (a - b).abs().max() > 0.01
    assert (a[0] - a[1]).abs().max() > 0.01
    second.load_state_dict(first.state_dict())
    with drawing(DRAW):
        assert torch.equal(second(2), a)


def test_a_batch_needs_an_item_for_each_sample() -> None:
    message = r"a batch of 2 samples was called with a draw of 1 items: .*Draw\.items"
    with pytest.raises(ValueError, match=message):
        small()(field(), draw=replace(DRAW, items=(1,)))
    with pytest.raises(ValueError, match=r"nobody said which draw"):
        small()(field())
    assert small(num_noise=0)(field()).isfinite().all()  # needs none


# The conditioned norm


def reference(x: Tensor, scale: Tensor, offset: Tensor, groups: int) -> Tensor:
    y = F.group_norm(x.flatten(0, 1), groups, eps=1e-5).view(len(scale), -1, x.shape[-1])
    return (y * (1 + scale[:, None]) + offset[:, None]).view(x.shape)


@pytest.mark.parametrize(
    ("groups", "dtype"),
    # Of groups of two features bfloat16 has no gradient to speak of.
    [(1, torch.float64), (2, torch.float64), (8, torch.float64), (1, torch.bfloat16),
     (2, torch.bfloat16)],
)  # fmt: skip
def test_a_conditioned_norm_is_a_group_norm_of_each_token(groups: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 5, 16), (3, 16), (3, 16)  # two windows a sample
    operands = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grad = torch.randn(6, 5, 16, generator=generator).to(dtype)
    ours = [each.clone().requires_grad_() for each in operands]
    exact = [each.double().requires_grad_() for each in operands]
    y, wide = conditioned(*ours, groups, 1e-5), reference(*exact, groups)  # type: ignore[arg-type]
    y.backward(grad)
    wide.backward(grad.double())
    digits = 1e-12 if dtype == torch.float64 else 0.03
    assert y.dtype == dtype
    for a, b in [(y, wide), *((p.grad, q.grad) for p, q in zip(ours, exact, strict=True))]:
        assert a is not None
        assert b is not None
        assert (a - b).abs().max() < digits * b.abs().max()


def test_of_activations_a_conditioned_norm_keeps_its_input_alone() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(6, 50, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        conditioned(x, torch.zeros(3, 16), torch.zeros(3, 16), 2, 1e-5)
    assert [t.data_ptr() for t in kept if t.numel() >= x.numel()] == [x.data_ptr()]


# Units, precision


def test_units_are_the_blocks_and_what_is_between_them() -> None:
    model, x = small(), field()
    units = model.units()
    assert [u.name for u in units] == [
        "embed", "first.0", "first.1", "down", "inner.0", "inner.1", "up", "second.0", "second.1",
        "recover",
    ]  # fmt: skip
    state: tuple[Tensor, ...] = (x,)
    sizes = []
    with drawing(DRAW):
        for unit in units:
            state = unit.run(*state)
            sizes.append(tuple(state[0].shape[1:]))
    assert sizes == [
        (8, 7, 24), (24, 8), (8, 7, 24), (16, 4, 12), (16, 16), (16, 4, 12), (8, 7, 24), (24, 8),
        (8, 7, 24), (8, 13, 48),
    ]  # fmt: skip
    assert torch.equal(state[0], model(x, draw=DRAW, added=False))
    assert model.scales == {1: (14, 48), 2: (7, 24), 4: (4, 12)}


def test_activations_are_of_the_type_that_is_computed_in() -> None:
    model = small(compute_dtype=torch.bfloat16).float()
    seen = set()
    for module in model.modules():
        if isinstance(module, (Attend, torch.nn.ModuleList)):
            continue
        if type(module).__name__ in ("BeastBlock", "Conv", "PatchRecovery"):
            module.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    said = model(field().float(), draw=DRAW)
    assert seen == {torch.bfloat16}
    assert said.dtype == torch.float32
    exact = small()(field(), draw=DRAW)
    assert 0 < (said - exact).abs().max() < 0.1 * exact.abs().max()


# Published numbers


PUBLISHED = [
    # recipe, step TFLOP, parameters in billions by the facts' reading, heads' features
    ("beast-2.4b", "3557.90", 2.370, 128),
    ("beast-1.1b", "2238.21", 1.056, 128),
    ("beast-0.7b", "207.49", 0.644, 64),
]


@pytest.mark.parametrize(("name", "tflop", "billions", "head"), PUBLISHED)
def test_published_models_have_the_published_size(
    name: str, tflop: str, billions: float, head: int
) -> None:
    config = recipe(name)
    model = config.model
    assert isinstance(model, BeastConfig)
    info = describe(config, shapes_of_config(config))
    assert f"{info['step_flops'] / 1e12:.2f}" == tflop
    assert f"{info['parameters'] / 1e9:.3f}" == f"{billions:.3f}"
    assert (info["in_channels"], info["out_channels"]) == (171, 168)
    assert model.width // model.heads == 2 * model.width // model.inner_heads == head
    of = info["parameters_of"]
    assert of["means"] == of["deviations"]
    assert sum(of.values()) == info["parameters"]
    # 12 D^2 a block in two copies, 6 D^2 that make its noise heard; 17 C^2 between the stages.
    c, blocks = model.width, 2 * model.depth + 4 * model.inner_depth
    squares = (12 + 6) * blocks + 2 * 17
    assert info["parameters"] == pytest.approx(squares * c**2, rel=0.01)
    embedding = 2 * 360 * 720 * 4 * (171 + 168) * c
    assert info["forward_flops_embedding"] == embedding
    assert info["forward_flops_noise"] < 1e-4 * info["forward_flops"]
    attention = 0
    for stage in info["stages"]:
        tokens = stage["grid"][0] * stage["grid"][1]
        window = stage["window"][0] * stage["window"][1]
        assert stage["windows"] * window == tokens
        attention += 4 * tokens * window * stage["features"] * stage["blocks"]
    assert info["forward_flops_attention"] == attention


def test_the_recipes_take_two_times_twelve_hours_apart_and_give_two() -> None:
    for name in ("beast-2.4b", "beast-1.1b", "beast-0.7b", "beast-mini", "beast-demo"):
        config = recipe(name)
        assert (config.data.input_offsets, config.data.output_offsets) == ((-1, 0), (1, 2))
        assert config.bayes.weights
        assert config.bayes.members >= 2
    assert recipe("beast-2.4b").data.stride == 12  # of hours
    assert recipe("beast-demo").data.stride == 2  # of six hours
    assert len(set(recipe("beast-0.7b").data.prognostic)) == 84


@pytest.mark.parametrize("weights", ["true", "false"])
def test_counted_flops_are_pytorchs_own_with_three_times_as_many_in_a_step(weights: str) -> None:
    config = override(recipe("beast-mini"), [f"bayes.weights={weights}", "train.leads=1"])
    shapes = shapes_of_config(config)
    info = describe(config, shapes)
    model = build_model(config, shapes)
    for module in model.modules():
        if isinstance(module, Attend):
            module.forward = lambda q, k, v, *_: (q + k + v).flatten(2)  # type: ignore[assignment]
    x = torch.randn(1, shapes.in_channels, *shapes.grid, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = model(x, draw=Draw(step=0, member=0, items=(0,)))
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    noise_flops = info["forward_flops_noise"]
    assert forward.get_total_flops() == info["forward_flops_dense"] + noise_flops
    # The noise itself has no gradient.
    first = sum(
        2 * m.first.weight.numel() for m in model.modules() if isinstance(m, Nice)
    )  # fmt: skip
    assert backward.get_total_flops() == 2 * info["forward_flops_dense"] + 2 * noise_flops - first
    assert info["step_flops"] == 3 * info["forward_flops_dense"] + (
        7 * info["forward_flops_attention"] // 2
    )


# What is refused


MINI: dict[str, Any] = {
    "width": 16, "depth": 2, "inner_depth": 2, "heads": 2, "inner_heads": 4, "window": (4, 6),
    "inner_window": (6, 4), "norm_groups": 4, "nice_noise": 8,
}  # fmt: skip
SHAPES = Shapes(
    grid=(21, 48), num_prognostic=3, num_predicted=3, num_forcing=0, num_static=1, num_inputs=2,
    num_outputs=2, num_forcings=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": (13, 46)}, r"lon=46 is not a multiple of 4, .* Take 44 or 48 longitudes"),
        ({"window": (4, 5)}, r"lon=48 makes 24 token columns of 2 points, which windows 5 wide do"
                             r" not divide.*Widths of model\.window that do: 1, 2, 3, 4, 6, 8, 12"),
        ({"inner_window": (4, 5)}, r"12 token columns of 4 points.*model\.inner_window that do: 1"),
        ({"grid": (1442, 1440), "window": (360, 180), "inner_window": (19, 30)},
         r"model\.window=\(360, 180\): 64800 tokens need a mask of 15\.6 GiB, since 721 token rows"
         r" are not those of one window: take windows 721 high"),
    ],
)  # fmt: skip
def test_a_grid_that_windows_do_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        Beast(**{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.heads=3"], r"model\.heads=3 must divide 16 features"),
        (["model.inner_heads=5"], r"model\.inner_heads=5 must divide 32 features"),
        (["model.norm_groups=3"], r"width=16 is not a multiple of model\.norm_groups=3"),
        (["model.window=0,4"], r"model\.window=\(0, 4\) must be at least 1 each way"),
        (["model.nice_noise=1025"], r"model\.nice_noise=1025 must be 0 \(none\) to 1024"),
        (["model.nice_hidden=-1"], r"model\.nice_hidden=-1 must not be negative"),
        (["model.depth=0"], r"model\.depth=0 must be at least 1"),
        (["model.sampling=2"], r"model\.sampling: it is one of the family swin, and this is of"),
        (["bayes.likelihood=none"], r"bayes\.members=4 are scored together"),
        (["bayes.members=1"], r"bayes\.likelihood=moments takes the variance .* has none"),
    ],
)
def test_settings_that_a_beast_cannot_have_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(recipe("beast-mini"), settings)


def test_one_number_is_a_square_window() -> None:
    config = override(recipe("beast-mini"), ["model.window=3", "model.inner_window=2"])
    assert isinstance(config.model, BeastConfig)
    assert config.model.window_shape == (3, 3)
    assert config.model.inner_window_shape == (2, 2)
    assert from_dict(config.to_dict()) == config


def test_the_precision_of_another_paper_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision=paper is how TERRA was trained.*BEAST is"):
        build_model(override(recipe("beast-mini"), ["train.precision=paper"]), SHAPES)
