"""The U-Net against one written by hand in plain torch, and what it does with a turned globe."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.assemble import Shapes, assemble, build_model, describe, shapes_of_config
from graticule.config import Config, UNetConfig, from_dict, override
from graticule.mesh import Mesh
from graticule.model.layers import Layer
from graticule.model.norm_gelu import BatchNormGelu, GroupNormGelu, InstanceNormGelu
from graticule.model.pad import EdgePad
from graticule.model.pooling import Double, Fill, Pool
from graticule.model.unet import Block, UNet
from graticule.recipes import recipe

# Rows that no pooling divides; a circle that all of them do.
GRID = (13, 24)
SETTINGS: dict[str, Any] = {
    "grid": GRID, "in_channels": 5, "out_channels": 4, "states": (2, 4), "num_outputs": 2,
    "widths": (6, 10), "factor": 2, "dilations": (1, 2, 3, 2, 2),
}  # fmt: skip


def small(**settings: Any) -> UNet:
    """With weights of some size in all places, in float64."""
    model = UNet(**{**SETTINGS, "compute_dtype": torch.float64, **settings})
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, Layer):
            module.reset(generator)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.double()


def field(grid: tuple[int, int] = GRID, channels: int = 5, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, channels, *grid, generator=generator).double()


# By hand


def padded(x: Tensor, by: int) -> Tensor:
    """Round the circle first, zeros at the poles then: corners are zero."""
    return F.pad(F.pad(x, (by, by, 0, 0), mode="circular"), (0, 0, by, by))


def normed(x: Tensor, at: str, w: dict[str, Tensor], norm: str, groups: int) -> Tensor:
    if norm == "instance":
        return F.instance_norm(x)
    if norm == "group":
        return F.group_norm(x, groups, w[f"{at}.weight"], w[f"{at}.bias"])
    return F.batch_norm(x, None, None, w[f"{at}.weight"], w[f"{at}.bias"], training=True)


def block_by_hand(
    x: Tensor, at: str, w: dict[str, Tensor], dilation: int, norm: str, groups: int, most: float
) -> Tensor:
    y = x
    for n in (1, 2):
        weight, bias = w[f"{at}.conv{n}.weight"], w[f"{at}.conv{n}.bias"]
        y = F.conv2d(padded(y, dilation), weight, bias, dilation=dilation)
        y = F.gelu(normed(y, f"{at}.norm{n}", w, norm, groups)).clamp(max=most)
    y = F.conv2d(y, w[f"{at}.mix.weight"], w[f"{at}.mix.bias"])
    if f"{at}.skip.weight" in w:
        x = F.conv2d(x, w[f"{at}.skip.weight"], w[f"{at}.skip.bias"])
    return x + y


def twice_by_hand(x: Tensor, circular: bool) -> Tensor:
    if not circular:
        return F.interpolate(x, scale_factor=2, mode="bilinear")
    wide = F.pad(x, (1, 1, 0, 0), mode="circular")
    return F.interpolate(wide, scale_factor=2, mode="bilinear")[..., 2:-2]


def by_hand(x: Tensor, w: dict[str, Tensor], **settings: Any) -> Tensor:
    norm, groups = settings.get("norm", "batch"), settings.get("norm_groups", 1)
    most, circular = settings.get("most", 10.0), settings.get("upsampling") != "plain"
    dilations = settings.get("dilations", SETTINGS["dilations"])
    levels = len(dilations) // 2
    if "positions.weight" in w:
        x = torch.cat([x, w["positions.weight"].expand(len(x), -1, -1, -1)], 1)
    skips = []
    for n in range(levels):
        x = block_by_hand(x, f"down.{n}.block", w, dilations[n], norm, groups, most)
        skips.append(x)
        x = F.avg_pool2d(x, 2)
    x = block_by_hand(x, "bottom", w, dilations[levels], norm, groups, most)
    for n in range(levels):
        x, skip = twice_by_hand(x, circular), skips.pop()
        x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2])) + skip
        x = block_by_hand(x, f"up.{n}.block", w, dilations[levels + 1 + n], norm, groups, most)
    return F.conv2d(padded(x, 1), w["last.conv.weight"], w["last.conv.bias"])


CASES: list[dict[str, Any]] = [
    {},
    {"norm": "instance"},
    {"norm": "group", "norm_groups": 2, "in_channels": 6},
    {"upsampling": "plain"},
    {"position_features": 3, "factor": 3},
    # Most activations are limited; and none.
    {"most": 0.3, "norm": "instance"},
    # A circle with a seam, too: 21, 10, 5 columns.
    {"grid": (11, 21)},
    {"grid": (4, 12), "norm": "instance"},
    {"widths": (6, 10, 4), "dilations": (1, 2, 3, 2, 1, 2, 3), "grid": (9, 16)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_network_is_the_one_written_by_hand(case: dict[str, Any]) -> None:
    model = small(**case)
    x = field(case.get("grid", GRID), case.get("in_channels", 5)).requires_grad_()
    weights = dict(model.named_parameters())
    ours = model(x)
    theirs = by_hand(x, weights, **case)
    assert ours.shape == theirs.shape == (2, 4, *case.get("grid", GRID))
    assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3)).double()
    names = ["x", *weights]
    found = torch.autograd.grad(ours, [x, *weights.values()], grad)
    wanted = torch.autograd.grad(theirs, [x, *weights.values()], grad)
    largest = max(float(g.abs().max()) for g in wanted)
    for name, a, b in zip(names, found, wanted, strict=True):
        # The bias before a norm has a gradient of zero: the rounding of a sum that cancels.
        difference = (a - b).abs().max() / max(float(b.abs().max()), 1e-2 * largest)
        assert difference < 1e-11, (name, float(difference))


@pytest.mark.parametrize("norm", ["batch", "instance", "group"])
def test_a_norm_is_that_of_torch_with_its_gradients_to_the_second_digit_in_bf16(norm: str) -> None:
    kinds = {
        "batch": lambda: BatchNormGelu(4, 10.0),
        "instance": lambda: InstanceNormGelu(4, 10.0),
        "group": lambda: GroupNormGelu(2, 4, 10.0),
    }
    module = kinds[norm]()
    for parameter in module.parameters():
        parameter.data = torch.rand(4, generator=torch.Generator().manual_seed(4)) + 0.5
    w = {f"n.{name}": value for name, value in module.named_parameters()}
    x = (field(channels=4).float() * 3 + 100).to(torch.bfloat16).requires_grad_()
    exact = x.detach().double().requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    ours = module(x)
    wide = {name: value.detach().double() for name, value in w.items()}
    theirs = F.gelu(normed(exact, "n", wide, norm, 2))
    assert ours.dtype == torch.bfloat16
    assert (ours - theirs).abs().max() < 2**-8 * theirs.abs().max()
    ours.backward(grad.to(torch.bfloat16))
    theirs.backward(grad.double())
    assert x.grad is not None
    assert exact.grad is not None
    assert (x.grad - exact.grad).abs().max() < 0.02 * exact.grad.abs().max()


def test_of_activations_a_norm_keeps_its_input_alone() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = field(channels=4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = InstanceNormGelu(4, 10.0)(x)
        y, skip = Pool(GRID)(y), y
        EdgePad("globe", (6, 12))(y)
    assert [t.data_ptr() for t in kept if t.numel() >= x.numel()] == [x.data_ptr()]
    assert skip.shape == x.shape


# Turning the globe


@pytest.mark.parametrize("norm", ["batch", "instance"])
@pytest.mark.parametrize("shift", [1, 4, 16, 23])
def test_turning_the_input_by_whole_coarse_columns_turns_the_output(norm: str, shift: int) -> None:
    model, x = small(norm=norm), field()
    turned = model(x.roll(shift, -1))
    difference = (turned - model(x).roll(shift, -1)).abs().max() / turned.abs().max()
    if shift % 4 == 0:
        assert difference < 1e-13
        assert model.seam == ""
    else:  # between two coarse columns a pooled field is another one
        assert difference > 1e-3


def test_a_circle_that_a_pooling_does_not_divide_has_a_seam_and_says_so() -> None:
    model, x = small(grid=(13, 26)), field((13, 26))
    difference = (model(x.roll(4, -1)) - model(x).roll(4, -1)).abs().max()
    assert difference > 1e-3
    assert model.seam.startswith(
        "lon=26 is not a multiple of 4 (2^2 levels): level 2 has 13 columns"
    )
    assert model.seam.endswith("lon=24 or 28 would have none")


def test_the_plain_up_sampling_has_a_seam_where_the_circular_one_has_none() -> None:
    model, x = small(upsampling="plain"), field()
    assert (model(x.roll(4, -1)) - model(x).roll(4, -1)).abs().max() > 1e-3


def test_the_poles_are_walls() -> None:
    """The two ends of a column never meet: what the south has does not reach the north's rows
    before it comes through all rows between."""
    model, x = (
        small(dilations=(1, 1, 1, 1, 1), norm="instance", grid=(64, 8)).eval(),
        field((64, 8)),
    )
    for block in (block for _, block in model.blocks):
        block.norm1, block.norm2 = torch.nn.GELU(), torch.nn.GELU()  # type: ignore[assignment]
    other = x.clone()
    other[..., -1, :] += 1
    changed = (model(other) - model(x)).abs().amax((0, 1, 3)) > 0
    # 2 + 4 + 8 rows' reach down, at the bottom and up, and a little more for pooling.
    assert changed[-1]
    assert not changed[:24].any()


def test_a_seam_is_said_once_when_a_model_is_put_together(caplog: pytest.LogCaptureFixture) -> None:
    config = Config(model=UNetConfig(widths=(4,), dilations=(1, 1, 1)))
    shapes = Shapes(
        grid=(5, 13), num_prognostic=1, num_predicted=1, num_forcing=0, num_static=0, num_inputs=1,
        num_outputs=1, num_forcings=0,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "graticule"):
        for _ in range(2):
            assemble(config, shapes, Mesh())
    assert [r.message for r in caplog.records if "lon=13 is not a multiple of 2" in r.message] == [
        caplog.records[0].message
    ]


# Sampling modules


def test_pooling_leaves_out_what_makes_no_pair() -> None:
    x = torch.arange(15.0).view(1, 1, 3, 5).requires_grad_()
    y = Pool((3, 5))(x)
    assert y.tolist() == [[[[3.0, 5.0]]]]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[0, 0].tolist() == [[0.25] * 4 + [0], [0.25] * 4 + [0], [0] * 5]


def test_up_sampling_goes_round_the_circle_and_repeats_the_last_row() -> None:
    x = torch.tensor([[0.0, 4.0, 8.0], [16.0, 20.0, 24.0]]).view(1, 1, 2, 3)
    fine = Double()(EdgePad("globe", (2, 3))(x))[0, 0]
    assert fine[0].tolist() == [2.0, 1.0, 3.0, 5.0, 7.0, 6.0]
    assert fine[:, 2].tolist() == [3.0, 7.0, 15.0, 19.0]
    plain = Double()(EdgePad("paper", (2, 3))(x))[0, 0]
    assert plain[0].tolist() == [0.0, 1.0, 3.0, 5.0, 7.0, 8.0]


def test_what_was_left_out_is_filled_with_zeros() -> None:
    assert Fill((3, 3))(torch.ones(1, 1, 2, 2))[0, 0].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("boundary", ["globe", "paper"])
def test_an_edge_pad_tells_its_runs_as_it_pads(boundary: Any) -> None:
    pad, x = EdgePad(boundary, (3, 4)), field((3, 4), 1, 1)
    rows, columns = pad.runs()
    out = torch.full((1, 1, rows.size, columns.size), float("nan"), dtype=x.dtype)
    for to, source, count in rows.own:
        for at, start, length in columns.own:
            out[..., to : to + count, at : at + length] = x[
                ..., source : source + count, start : start + length
            ]
    assert torch.equal(out, pad(x))


# Published numbers

STAGES = [
    # name, grid, features, dilation, parameters of Samudra 2, of Samudra 1
    ("down.0", (180, 360), (162, 324, 280), 1, 1_555_760, 4_890_208),
    ("down.1", (90, 180), (280, 560, 380), 2, 4_556_920, 7_455_300),
    ("down.2", (45, 90), (380, 760, 480), 4, 8_350_320, 11_631_600),
    ("down.3", (22, 45), (480, 960, 520), 8, 13_197_200, 16_808_000),
    ("bottom", (11, 22), (520, 1040, 520), 8, 15_149_160, 29_450_000),
    ("up.0", (22, 45), (520, 1040, 480), 8, 15_357_600, 29_410_200),
    ("up.1", (45, 90), (480, 960, 380), 4, 12_995_320, 16_582_700),
    ("up.2", (90, 180), (380, 760, 280), 2, 8_121_920, 11_506_400),
    ("up.3", (180, 360), (280, 560, 280), 2, 4_394_040, 7_365_000),
]


def test_samudra_2_has_the_published_parameters_stage_by_stage() -> None:
    config = recipe("samudra")
    info = describe(config, shapes_of_config(config))
    assert info["parameters"] == 84_066_474
    assert (info["in_channels"], info["out_channels"]) == (162, 154)
    told = [
        (s["name"], tuple(s["grid"]), tuple(s["features"]), s["dilation"], s["parameters"])
        for s in info["stages"]
    ]
    assert told == [stage[:5] for stage in STAGES]
    assert info["parameters"] - sum(stage[4] for stage in STAGES) == 388_234  # the last one
    assert info["forward_flops"] == pytest.approx(1.47e12, rel=5e-3)
    assert "lon=352 or 368" in info["seam"]
    instance = override(config, ["model.norm=instance"])
    assert describe(instance, shapes_of_config(config))["parameters"] == 84_038_618
    three = override(config, ["data.forcing=tauuo,tauvo,hfds"])
    assert describe(three, shapes_of_config(three))["parameters"] == 84_029_994


def test_samudra_1_has_the_published_parameters_stage_by_stage() -> None:
    config = recipe("samudra-1")
    info = describe(config, shapes_of_config(config))
    assert info["parameters"] == 135_376_762
    assert [s["parameters"] for s in info["stages"]] == [stage[5] for stage in STAGES]
    assert [s["dilation"] for s in info["stages"]] == [stage[3] for stage in STAGES]


def test_samudra_at_a_quarter_degree_costs_sixteen_times_as_much_and_has_no_seam() -> None:
    config = recipe("samudra-quarter-degree")
    info = describe(config, shapes_of_config(config))
    assert info["forward_flops"] == pytest.approx(23.5e12, rel=5e-3)
    assert info["seam"] == ""
    assert (config.train.batch, config.train.leads, config.train.precision) == (1, 4, "bf16")


# Units, precision and what is refused


def test_units_are_the_blocks_and_the_last_convolution() -> None:
    model, x = small(), field()
    units = model.units()
    assert [u.name for u in units] == ["down.0", "down.1", "bottom", "up.0", "up.1", "last"]
    state: tuple[Tensor, ...] = (x,)
    sizes = []
    for unit in units:
        state = unit.run(*state)
        sizes.append([tuple(part.shape[1:]) for part in state])
    # The running tensor, then the skips that wait.
    assert sizes == [
        [(6, 6, 12), (6, 13, 24)],
        [(10, 3, 6), (6, 13, 24), (10, 6, 12)],
        [(10, 3, 6), (6, 13, 24), (10, 6, 12)],
        [(6, 6, 12), (6, 13, 24)],
        [(6, 13, 24)],
        [(4, 13, 24)],
    ]
    assert torch.equal(state[0], model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_but_the_last_convolution_computes_in_sixteen_bits(dtype: torch.dtype) -> None:
    model = small(compute_dtype=dtype).float()
    seen: dict[str, set[torch.dtype]] = {"blocks": set(), "last": set()}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda m, i, out: seen["blocks"].add(out.dtype))
        if name == "last.conv":
            module.register_forward_hook(
                lambda m, i, out: seen["last"].update((i[0].dtype, out.dtype))
            )
    said = model(field().float(), added=False)
    assert seen == {"blocks": {dtype}, "last": {torch.float32}}
    assert said.dtype == torch.float32
    exact = small()(field())
    assert 0 < (said - exact).abs().max() < 0.05 * exact.abs().max()


def config_of(*settings: str) -> Config:
    base = Config(model=UNetConfig(widths=(4, 6), dilations=(1, 2, 2, 1, 1)))
    return override(base, list(settings))


SHAPES = Shapes(
    grid=(9, 16), num_prognostic=2, num_predicted=2, num_forcing=1, num_static=0, num_inputs=2,
    num_outputs=2, num_forcings=2,
)  # fmt: skip


def test_first_values_come_from_keys_of_names_and_buffers_have_values() -> None:
    model = build_model(config_of(), SHAPES)
    assert torch.equal(model.bottom.norm1.running_var, torch.ones(12))  # type: ignore[union-attr]
    assert {n for n, _ in model.named_buffers()} <= set(model.state_dict())
    wider = build_model(config_of("model.widths=4,8"), SHAPES)
    assert torch.equal(model.state_dict()["down.0.block.conv1.weight"],
                       wider.state_dict()["down.0.block.conv1.weight"])  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((3, 16), r"lat=3 has no row left after 2 levels that halve it: take at least 4 rows"),
        ((9, 6), r"lon=6 has 1 columns at level 3, and dilation 2 of block 3 reads 2 beyond"),
    ],
)
def test_a_grid_without_room_is_refused(grid: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(grid=grid, dilations=(1, 2, 2, 1, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.dilations=1,2,4"], r"2 levels, .* 2 on the way up: 5 numbers of at least 1"),
        (["model.widths="], r"model\.widths=\(\): a number of at least 1 for each level"),
        (["model.widths=4,0"], r"model\.widths=\(4, 0\): a number"),
        (["model.factor=0"], r"model\.factor=0 must be at least 1"),
        (["model.activation_max=-1"], r"model\.activation_max=-1\.0 must be at least 0"),
        (["model.norm=layer"], r"model\.norm='layer': .*'batch', 'instance' or 'group'"),
        (["model.patch=4"], r"unknown key model\.patch: it is one of the family swin and beast, and"
                            r" this is of unet \(keys here: family, widths"),
        (["model.width=4"], r"unknown key model\.width: it is one of the family swin and beast"),
        (["model.family=swin"], r"the recipe's model is of the family unet"),
        (["model.widht=4"], r"unknown key model\.widht; did you mean model\.width"),
    ],
)  # fmt: skip
def test_settings_that_a_unet_cannot_have_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(*settings)


def test_a_key_of_the_unet_is_refused_for_a_swin_model() -> None:
    with pytest.raises(
        ValueError, match=r"model\.factor: it is one of the family unet, and this is"
    ):
        override(Config(), ["model.factor=3"])
    with pytest.raises(ValueError, match=r"model\.family='cnn': there are swin and unet and beast"):
        from_dict({"model": {"family": "cnn"}})
    with pytest.raises(ValueError, match=r"model\.widths: it is one of the family unet"):
        from_dict({"model": {"widths": [4]}})
    assert from_dict({"model": {"family": "unet", "factor": 3}}).model == UNetConfig(factor=3)


def test_the_precision_of_another_paper_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.precision=paper is how TERRA was trained"):
        build_model(config_of("train.precision=paper"), SHAPES, device="meta")


@pytest.mark.parametrize("axis", ["sequence", "tensor"])
def test_axes_of_attention_are_refused_with_the_one_to_take(axis: str) -> None:
    mesh = Mesh()
    mesh.sizes = {**mesh.sizes, axis: 2}
    message = rf"mesh\.{axis}=2 shares out attention.*mesh\.window=2 and mesh\.{axis}=1"
    with pytest.raises(ValueError, match=message):
        assemble(config_of(), SHAPES, mesh)


def test_groups_that_do_not_divide_features_are_refused() -> None:
    config = config_of("model.norm=group", "model.norm_groups=5")
    with pytest.raises(ValueError, match="12 features do not make 5 groups"):
        build_model(config, SHAPES, device="meta")
