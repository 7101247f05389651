"""The Wenhai model: what its boundary promises, what it costs, how many numbers it learns."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from graticule.assemble import Shapes, build_model, describe, shapes_of_config
from graticule.config import Config, SwinConfig, override
from graticule.model.layers import Linear
from graticule.model.swin import Swin, smallest_padded_shape
from graticule.parallel.materialise import draw_weights
from graticule.recipes import recipe
from small_store import write_store

PLAIN = Shapes(
    grid=(16, 16), num_prognostic=3, num_predicted=3, num_forcing=0, num_static=0,
    num_inputs=1, num_outputs=1, num_forcings=1,
)  # fmt: skip


def small(boundary="globe", grid=(17, 24), **settings):
    """A float64 model with weights large enough that every path shows in its output."""
    options = dict(
        grid=grid, in_channels=3, out_channels=2, states=(0, 2), patch=1, sampling=2, width=8,
        depth=2, heads=2, window=(4, 3), norm_groups=2, boundary=boundary,
        compute_dtype=torch.float64,
    )  # fmt: skip
    model = Swin(**{**options, **settings}).double()
    draw_weights(model, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.2 * noise)
    return model


def field(grid=(17, 24), channels=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, channels, *grid, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ((17, 24), {}),
        ((16, 24), {}),
        ((17, 24), {"padded_shape": (32, 24)}),
        ((19, 36), {"patch": 2, "window": (3, 3)}),
        ((15, 30), {"sampling": 1, "window": (4, 5), "patch": 2}),
    ],
)
def test_rolling_the_input_in_longitude_rolls_the_output(grid, settings):
    model, x = small(grid=grid, **settings), field(grid)
    unit = (
        settings.get("patch", 1) * settings.get("sampling", 2) * settings.get("window", (4, 3))[1]
    )
    want, scale = model(x), model(x).abs().max()
    for turns in (1, 3):
        turned = model(torch.roll(x, turns * unit, dims=-1))
        assert (turned - torch.roll(want, turns * unit, dims=-1)).abs().max() <= 1e-12 * scale


def test_the_published_boundary_does_not_commute_with_longitude():
    model, x = small("paper"), field()
    turned = model(torch.roll(x, 6, dims=-1))
    assert (turned - torch.roll(model(x), 6, dims=-1)).abs().max() > 1e-3


@pytest.mark.parametrize("grid", [(17, 24), (16, 24), (9, 24)])
def test_what_is_written_into_padding_slots_changes_nothing_and_gets_no_gradient(grid):
    model, x = small(grid=grid, padded_shape=(32, 24)), field(grid)
    want = model(x)
    rows = model.windows.tokens[0]
    pad = torch.from_numpy(model.windows.regions(shifted=False) < 0)
    assert pad.any()
    assert pad.sum() == (model.windows.padded[0] - rows) * model.windows.tokens[1]
    injected = torch.full((1, *pad.shape, 1), 1e6, dtype=torch.float64, requires_grad=True)

    def inject(module, args, windows):
        shape = windows.shape
        mask = pad[None, :, :, None]
        filled = torch.where(mask, injected, windows.view(-1, *pad.shape, shape[-1]))
        return filled.reshape(shape)

    handle = model.enter.register_forward_hook(inject)
    got = model(x)
    handle.remove()
    assert torch.equal(got, want)
    got.square().sum().backward()
    assert torch.equal(injected.grad, torch.zeros_like(injected))


def test_rows_that_fill_the_last_patch_are_zero_and_stay_outside_the_output():
    model, x = small(grid=(17, 24), patch=2, window=(3, 3)), field((17, 24))
    padded = model.pad(x)
    assert padded.shape[-2:] == (18, 24)
    assert torch.equal(padded[..., 17:, :], torch.zeros(2, 3, 1, 24, dtype=torch.float64))
    assert model(x).shape == (2, 2, 17, 24)


def test_poles_do_not_leak_into_each_other():
    # Without sampling only attention moves anything. In the shifted windows row 0 shares a window
    # with rows 12-15 of the other pole and with rows 1-3; the regular ones join rows 0-7.
    model = small(grid=(16, 24), sampling=1, depth=2, window=(8, 6))
    x = field((16, 24)).requires_grad_()
    model(x)[..., 0, :].square().sum().backward()
    assert x.grad[..., :8, :].abs().amax(dim=(0, 1, 3)).min() > 0
    assert x.grad[..., 8:, :].abs().max() == 0


def test_published_windows_mask_four_walls_with_minus_one_hundred():
    mask = small("paper", grid=(16, 24)).shifted_mask
    values = {float(v) for m in mask.masks() if m is not None for v in m.unique()}
    assert values == {0.0, -100.0}
    assert len(mask.windows) == 4  # inside, last row, last column, corner


def test_padding_counts_in_the_published_norms_but_not_on_a_globe():
    x = field((15, 24))
    for boundary, counts in (("paper", True), ("globe", False)):
        models = [small(boundary, (15, 24), padded_shape=shape) for shape in ((16, 24), (32, 24))]
        same = torch.allclose(models[0](x), models[1](x), rtol=0, atol=1e-12)
        assert same != counts


def test_a_width_that_windows_do_not_divide_is_refused_with_the_widths_that_do():
    config = override(recipe("wenhai-small-globe"), ["model.window=8"])
    with pytest.raises(ValueError, match=r"540 token columns.*9, 10, 12, 15, 18, 20"):
        describe(config, shapes_of_config(config))


def test_a_width_that_patches_do_not_divide_is_refused_with_the_patches_that_do():
    with pytest.raises(ValueError, match="Patches that fit: 1, 2, 3, 5"):
        small(grid=(16, 30), patch=4, sampling=1)


@pytest.mark.parametrize("shape", [(20, 24), (16, 48), (8, 24)])
def test_an_illegal_padded_shape_is_refused_with_the_smallest_legal_one(shape):
    with pytest.raises(ValueError, match="padded_shape"):
        small(grid=(16, 24), padded_shape=shape)


def test_the_smallest_padded_shape_is_whole_windows_and_a_whole_circle():
    assert smallest_padded_shape((2041, 4320), 4, 2, (8, 8), "paper") == (2048, 4352)
    assert smallest_padded_shape((2041, 4320), 4, 2, (8, 9), "globe") == (2048, 4320)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("wenhai-small", 180_424_736),
        ("wenhai-medium", 2_848_206_608),
        ("wenhai-large", 11_369_506_896),
    ],
)
def test_parameters_are_those_of_the_published_models(name, parameters):
    config = recipe(name)
    assert describe(config, shapes_of_config(config))["parameters"] == parameters


@pytest.mark.parametrize(
    ("settings", "tflop"), [([], 1057.10), (["model.padded_shape=2304,4352"], 1189.24)]
)
def test_forward_flops_of_the_medium_model(settings, tflop):
    config = override(recipe("wenhai-medium"), settings)
    info = describe(config, shapes_of_config(config))
    assert round(info["forward_flops"] / 1e12, 2) == tflop
    assert info["forward_flops"] == info["forward_flops_dense"] + info["forward_flops_attention"]


def test_dense_flops_equal_a_hand_count_and_pytorchs_counter_on_real_tensors():
    model_config = SwinConfig(
        patch=2, width=8, depth=2, heads=2, window=4, norm_groups=2, boundary="paper"
    )
    info = describe(Config(model=model_config), PLAIN)
    d, tokens, coarse = 8, 64, 16
    patch = 2 * tokens * (3 * 4) * d * 2
    down = 2 * coarse * 9 * d * d * 3
    up = 2 * coarse * 4 * d * d + 2 * tokens * 9 * d * d * 2
    blocks = 2 * (2 * coarse * 12 * d * d)
    assert info["forward_flops_dense"] == patch + down + up + blocks
    assert info["forward_flops_attention"] == 2 * (4 * coarse * 16 * d)
    assert info["step_flops"] == 3 * info["forward_flops_dense"] + 3.5 * (2 * 4 * coarse * 16 * d)

    model = build_model(Config(model=model_config), PLAIN)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 16, 16))
    counts = counter.get_flop_counts()["Global"]
    dense = sum(n for op, n in counts.items() if "bmm" not in str(op) and "scaled" not in str(op))
    assert dense == info["forward_flops_dense"]


def test_initial_weights_depend_on_the_seed_and_the_name_alone():
    config = Config(model=SwinConfig(patch=2, width=8, depth=2, heads=2, window=4, norm_groups=2))
    one = build_model(config, PLAIN).state_dict()
    deeper = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=4))
    two = build_model(deeper, PLAIN).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = build_model(override(config, ["train.seed=1"]), PLAIN).state_dict()
    assert not torch.equal(one["blocks.0.mlp.fc1.weight"], other["blocks.0.mlp.fc1.weight"])
    assert not torch.equal(one["blocks.0.mlp.fc1.weight"], one["blocks.1.mlp.fc1.weight"])


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.03), ("fp16", 0.004)])
def test_low_precision_follows_the_float32_model(precision, tolerance):
    shapes = Shapes(
        grid=(16, 16), num_prognostic=3, num_predicted=4, num_forcing=1, num_static=2,
        num_inputs=2, num_outputs=2, num_forcings=1,
    )  # fmt: skip
    config = Config(model=SwinConfig(patch=2, width=16, depth=2, heads=2, window=4, norm_groups=4))
    x = field((16, 16), shapes.in_channels).float()
    changes = {}
    for name in ("fp32", precision):
        model = build_model(override(config, [f"train.precision={name}"]), shapes)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        model.recover.linear.weight.data.mul_(500)  # a change far larger than the state
        out = model(x)
        assert out.dtype == torch.float32
        model.recover.linear.weight.data.zero_()
        changes[name] = out - model(x)
    # Some eight roundings in a row, each of up to 2^-9 (bf16) or 2^-12: 1.1 % and 0.16 % seen.
    scale = changes["fp32"].abs().max()
    assert scale > 5
    assert 0 < (changes[precision] - changes["fp32"]).abs().max() < tolerance * scale


def test_diagnostic_channels_are_not_added_to_a_state():
    model = small(out_channels=6, states=(1, 3), num_outputs=2, grid=(16, 24))
    x = field((16, 24))
    with torch.no_grad():
        model.recover.linear.weight.zero_()
        model.recover.linear.bias.zero_()
    out = model(x).unflatten(1, (2, 3))
    assert torch.equal(out[:, :, :2], x[:, None, 1:3].expand(-1, 2, -1, -1, -1))
    assert torch.equal(out[:, :, 2], torch.zeros_like(out[:, :, 2]))


def test_weights_are_drawn_on_the_cpu_for_every_device(monkeypatch):
    # Another device's generator draws other numbers. `meta` stands for one: nothing can be drawn.
    config = Config(model=SwinConfig(patch=2, width=8, depth=1, heads=2, window=4, norm_groups=2))
    drawn = []
    plain = Linear.reset

    def reset(layer, generator):
        plain(layer, generator)
        drawn.append(layer.weight.detach().clone())

    monkeypatch.setattr(Linear, "reset", reset)
    draw_weights(build_model(config, PLAIN, device="meta"), config.train.seed)
    elsewhere, drawn = drawn, []
    model = build_model(config, PLAIN)
    layers = [layer.weight for layer in model.modules() if isinstance(layer, Linear)]
    assert len(elsewhere) == len(layers) == 8
    assert all(torch.equal(ours, here) for ours, here in zip(elsewhere, layers, strict=True))


def test_shapes_are_those_of_the_store_where_one_is_named(tmp_path):
    write_store(tmp_path / "store", static=("relief",))
    named = ["data.grid=8,16", "data.prognostic=temperature,salinity"]
    alone = shapes_of_config(override(Config(), named))
    assert (alone.in_channels, alone.out_channels) == (2, 2)
    # The store has a forcing and a static that training would use.
    with_store = shapes_of_config(override(Config(), [*named, f"data.store={tmp_path / 'store'}"]))
    assert (with_store.in_channels, with_store.out_channels) == (4, 2)
