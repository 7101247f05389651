"""Weights as distributions: their draws, gradients and prior, and what could be silently wrong."""

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graticule.assemble import Shapes, build_model
from graticule.config import BayesConfig, BeastConfig, Config, SwinConfig, TrainConfig, UNetConfig
from graticule.model import draws, elementary
from graticule.model.bayes import (
    Posterior,
    Prior,
    deviation,
    keep_start,
    make_bayesian,
    rho_of,
    slope,
    unchanged,
    weights_of,
)
from graticule.model.draws import Draw, drawing, noise, normal, philox
from graticule.model.family import Model
from graticule.model.layers import Conv, Layer, LayerNorm, Linear, TransposedConv
from graticule.model.units import State, Unit, straight
from graticule.train import prior as priors
from graticule.train.optimizer import make_optimizer
from graticule.train.prior import Pull, kl_scale, posterior_sums, summary

KEY = 0x0123456789ABCDEF
MAPS = ("softplus", "exp")
DRAW = Draw(step=3, member=2, items=(5, 9))


# Elementary functions


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_elementary_functions_are_right_to_rounding(dtype: torch.dtype, digits: float) -> None:
    x = torch.linspace(-30, 30, 20_011, dtype=torch.float64).to(dtype)
    wide = x.double()
    e = wide.exp()
    for ours, exact in [
        (elementary.exp(x), e),
        (elementary.softplus(x), torch.where(wide < 0, torch.log1p(e), wide + torch.log1p(1 / e))),
        (elementary.sigmoid(x), 1 / (1 + 1 / e)),
    ]:
        assert ours.dtype == dtype
        assert ((ours.double() - exact) / exact).abs().max() < digits * 3
    u = torch.cat([e.clamp(1e-8, 1.5), 1 - torch.logspace(-6, -1, 1001, dtype=torch.float64)])
    u = u.to(dtype)
    error = (elementary.log(u).double() - u.double().log()).abs()
    assert (error <= digits * u.double().log().abs() + 1e-30).all()
    cosine, sine = elementary.rotation(torch.linspace(-0.5, 0.5, 1001))
    angle = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64) * math.pi / 2
    assert (cosine - angle.cos()).abs().max() < 2e-7
    assert (sine - angle.sin()).abs().max() < 2e-7


@pytest.mark.parametrize("x", [-1e30, -200.0, 200.0, 1e30])
def test_a_deviation_of_any_rho_is_finite_and_not_negative(x: float) -> None:
    for value in deviation(torch.tensor([x]), "softplus"), slope(torch.tensor([x]), "softplus"):
        assert value.isfinite().all()
        assert value >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_numbers_result_does_not_depend_on_where_in_a_tensor_it_stands(
    dtype: torch.dtype,
) -> None:
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0)).to(dtype) * 4
    for function in (elementary.exp, elementary.softplus, elementary.sigmoid):
        whole = function(x)
        for start, stop in ((0, 1), (3, 20), (5, 998), (997, 1003)):
            assert torch.equal(function(x[start:stop].clone()), whole[start:stop])
    assert torch.equal(elementary.log(x.abs())[7:12], elementary.log(x.abs()[7:12].clone()))


# Draws


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_counters_give_the_published_words(key: int, counter: tuple[int, ...], answer: str) -> None:
    """Of Random123's known answers for philox4x32-10."""
    high = counter[1] - 2**32 if counter[1] >= 2**31 else counter[1]  # of a signed block number
    block = torch.tensor([(high << 32) | counter[0]])
    even, odd = philox(key, (counter[2], counter[3]), block)
    words = even[0], odd[0], even[1], odd[1]
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_draws_are_normal_and_independent() -> None:
    x = normal(KEY, (1, 0), (400_000,)).double()
    n = x.numel()
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    ordered = x.sort().values
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (torch.special.ndtr(ordered) - steps).abs().max() < 1.95 / math.sqrt(n)  # p = 0.001
    assert 4.2 < x.abs().max() < 6.7
    others = [
        normal(KEY, (1, 1), (n,)), normal(KEY, (2, 0), (n,)), normal(KEY + 1, (1, 0), (n,)),
        x.roll(1), x.roll(2), x.roll(4),
    ]  # fmt: skip
    for other in others:
        assert abs((x * other.double()).mean()) < 4 / math.sqrt(n)
    # The two of a pair do not know each other's size.
    squares = x.view(-1, 2).square() - 1
    assert abs((squares[:, 0] * squares[:, 1]).mean()) < 4 * 2 / math.sqrt(n / 2)


BOXES: list[tuple[tuple[int, ...], tuple[slice, ...]]] = [
    ((37,), (slice(5, 30),)),
    ((6, 7), (slice(2, 5), slice(None))),
    ((6, 7), (slice(None), slice(3, 6))),
    ((6, 8), (slice(1, 4), slice(1, 8))),
    ((5, 3, 4, 2), (slice(1, 3), slice(0, 2), slice(1, 4), slice(None))),
    ((5, 3, 4, 2), (slice(None), slice(1, 3), slice(None), slice(None))),
    ((5, 3, 4, 2), (slice(2, 2), slice(1, 3), slice(None), slice(None))),
    ((), ()),
]


@pytest.mark.parametrize(("shape", "box"), BOXES, ids=str)
def test_a_part_of_a_draw_is_that_part_of_the_whole(
    shape: tuple[int, ...], box: tuple[slice, ...]
) -> None:
    """Trap 1: ranks that share a member's weights draw their parts of one tensor."""
    whole = normal(KEY, DRAW.words, shape)
    assert whole.shape == shape
    assert torch.equal(normal(KEY, DRAW.words, shape, box), whole[box])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_shards_put_together_are_the_whole_draw_bit_for_bit(
    dim: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 1, over more numbers than are made at once."""
    monkeypatch.setattr(draws, "_CHUNK", {"cpu": 2**10})
    shape = [50, 21, 37]
    whole = normal(KEY, (7, 1), shape)
    monkeypatch.undo()
    assert torch.equal(normal(KEY, (7, 1), shape), whole)
    parts = []
    for rank in range(ranks):
        box = [slice(None)] * 3
        box[dim] = slice(rank * shape[dim] // ranks, (rank + 1) * shape[dim] // ranks)
        parts.append(normal(KEY, (7, 1), shape, box))
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("kept", [0, 2**23])
def test_draws_of_many_small_tensors_at_once_are_those_of_each(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "_CHUNK", {"cpu": 2**4})  # parts that end within a tensor
    monkeypatch.setattr(draws, "_POOLED", kept)
    pool, device = draws.Pool(), torch.device("cpu")
    shapes = {KEY: (5, 7), KEY + 2**40: (3,), 3: (4, 4), 4: ()}
    for key, shape in shapes.items():
        assert pool.takes(key, shape)
    assert not pool.takes(7, (2**9, 2**8))
    for words in ((3, 2), (3, 1), (4, 2), (3, 2)):
        for key, shape in shapes.items():
            ours = pool.normal(key, words, shape, device)
            assert torch.equal(ours, normal(key, words, shape))


def test_far_indices_have_draws_of_their_own() -> None:
    far = normal(KEY, (0, 0), (2**36, 2), (slice(2**35, 2**35 + 3), slice(None)))
    assert not torch.equal(far, normal(KEY, (0, 0), (3, 2)))


def test_noise_belongs_to_an_item_a_member_a_step_and_a_lead() -> None:
    both = noise(KEY, DRAW, 32, "cpu")
    assert both.shape == (2, 32)
    alone = noise(KEY, Draw(step=3, member=2, items=(9,)), 32, "cpu")
    assert torch.equal(alone[0], both[1])
    for change in ({"step": 4}, {"member": 3}, {"lead": 2}, {"items": (6, 10)}):
        other = noise(KEY, Draw(**{**vars(DRAW), **change}), 32, "cpu")  # type: ignore[arg-type]
        assert (other - both).abs().max() > 0.5


@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"member": 2**32}, {"lead": 2**24}, {"items": (0, -1)}]
)
def test_a_draw_that_has_no_counter_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"of a draw must be at least 0 and below \d+"):
        Draw(**{"step": 0, "member": 0, **wrong})


# Conversion


SHAPES = Shapes(
    grid=(21, 48), num_prognostic=2, num_predicted=2, num_forcing=0, num_static=1, num_inputs=2,
    num_outputs=2, num_forcings=1,
)  # fmt: skip
MODELS: dict[str, Any] = {
    "swin": SwinConfig(
        patch=2, sampling=2, width=16, depth=2, heads=2, window=(3, 4), norm_groups=4
    ),
    "unet": UNetConfig(
        widths=(6, 8), dilations=(1, 2, 2, 1, 1), norm="group", norm_groups=2, position_features=2
    ),
    "beast": BeastConfig(
        width=16, depth=2, inner_depth=2, heads=2, inner_heads=4, window=(4, 6),
        inner_window=(6, 4), norm_groups=4, nice_noise=8,
    ),
}  # fmt: skip
ON = BayesConfig(weights=True, members=2, likelihood="crps")


def built(family: str, on: BayesConfig | None = ON, dtype: torch.dtype = torch.float32) -> Model:
    """With something in all places that start at 0."""
    config = Config(model=MODELS[family], bayes=on or BayesConfig())
    model = build_model(config, SHAPES, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith(("second.weight", "second.bias", "recover.linear.weight")):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def field(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, SHAPES.in_channels, *SHAPES.grid, generator=generator).to(dtype)


@pytest.mark.parametrize("family", MODELS)
def test_means_keep_their_names_and_values_and_norms_stay_numbers(family: str) -> None:
    plain, ours = built(family, None), built(family)
    names, known = dict(plain.named_parameters()), dict(ours.named_parameters())
    assert set(names) <= set(known)
    for name, value in names.items():
        assert torch.equal(known[name], value), name
    rho = {name for name in known if name.endswith("_rho")}
    assert set(known) == set(names) | rho
    assert {name.removesuffix("_rho") for name in rho} == {w.name for w in weights_of(ours)}
    stay = {name for name in names if f"{name}_rho" not in rho}
    assert all(".norm" in name or ".nice." in name for name in stay), stay
    assert not any(".norm" in name or ".nice." in name for name in rho)
    # Whatever else owns parameters is a distribution too.
    for owner in ("bias_table", "positions.weight"):
        assert any(owner in name for name in rho) == any(owner in name for name in names)
    assert all(known[name].dtype == torch.float32 for name in rho)


@pytest.mark.parametrize("sigma_map", MAPS)
def test_deviations_start_in_proportion_to_the_usual_initial_weights(sigma_map: Any) -> None:
    layers = nn.ModuleDict({
        "linear": Linear(12, 4), "conv": Conv(8, 6, kernel=3, groups=2),
        "transposed": TransposedConv(5, 3, stride=2), "wide": TransposedConv(5, 3, stride=2,
                                                                             kernel=4),
        "norm": LayerNorm(4),
    })  # fmt: skip
    make_bayesian(layers, key=len, sigma_map=sigma_map, initial_sigma=0.1)
    sources = {"linear": 12, "conv": 36, "transposed": 5, "wide": 20}
    for weight in weights_of(layers):
        n = sources.pop(weight.name.split(".")[0], 0) or weight.posterior.num_sources
        assert weight.posterior.num_sources == n
        s = deviation(weight.rho.detach(), sigma_map)
        assert s.unique().tolist() == pytest.approx([0.1 / math.sqrt(3 * n)], rel=1e-5)
    assert not sources
    assert rho_of(1e-12, "softplus") == pytest.approx(math.log(1e-12))


@pytest.mark.parametrize("sigma_map", MAPS)
def test_a_drawn_weight_is_its_mean_plus_its_deviation_times_its_draw(sigma_map: Any) -> None:
    layer = Linear(7, 5)
    make_bayesian(layer, key=lambda name: KEY + len(name), sigma_map=sigma_map)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    with drawing(DRAW):
        weight, bias = layer.weights(torch.float32)
    eps = normal(KEY + len(".weight"), (3, 2), (5, 7))
    rho = layer.get_parameter("weight_rho").detach().double()
    s = rho.exp() if sigma_map == "exp" else torch.nn.functional.softplus(rho)
    exact = layer.weight.detach().double() + s * eps
    assert (weight - exact).abs().max() < 1e-6
    grads = torch.randn(5, 7, generator=generator), torch.randn(5, generator=generator)
    torch.autograd.backward((weight, bias), grads)
    assert torch.equal(layer.weight.grad, grads[0])  # type: ignore[arg-type]
    inner = rho.exp() if sigma_map == "exp" else rho.sigmoid()
    found = layer.get_parameter("weight_rho").grad
    assert found is not None
    wanted = grads[0] * eps * inner
    assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_a_shards_weights_are_that_part_of_the_whole_weights_bit_for_bit() -> None:
    """Trap 1: not the draws alone, s (mu, rho) too."""
    whole = Linear(33, 21)
    make_bayesian(whole, key=lambda name: KEY)
    generator = torch.Generator().manual_seed(0)
    whole.weight.data = torch.randn(21, 33, generator=generator)
    whole.get_parameter("weight_rho").data = torch.randn(21, 33, generator=generator)
    with drawing(DRAW):
        expected = whole.value("weight", torch.float32)
    for box in ((slice(4, 9), slice(None)), (slice(None), slice(11, 22))):
        part = copy.deepcopy(whole)
        assert isinstance(part.sample, Posterior)
        part.sample.boxes = {"weight": box}
        for leaf in ("weight", "weight_rho"):
            setattr(part, leaf, nn.Parameter(getattr(whole, leaf)[box].clone()))
        with drawing(DRAW):
            assert torch.equal(part.value("weight", torch.float32), expected[box])


def test_weights_are_drawn_in_float32_and_rounded_once() -> None:
    """Trap 11: a bfloat16 rho would move in steps of 1.6 %, and sums of rounded parts lose more."""
    layer = Linear(64, 64)
    make_bayesian(layer, key=lambda name: KEY, initial_sigma=0.1)
    layer.reset(torch.Generator().manual_seed(0))
    with drawing(DRAW):
        wide, narrow = layer.value("weight", torch.float32), layer.value("weight", torch.bfloat16)
    assert torch.equal(narrow, wide.to(torch.bfloat16))
    assert layer.get_parameter("weight_rho").dtype == torch.float32
    narrow.sum().backward()
    assert layer.get_parameter("weight_rho").grad.dtype == torch.float32  # type: ignore[union-attr]


# Members


@pytest.mark.parametrize("family", MODELS)
def test_a_member_is_a_function_of_its_key_alone(family: str) -> None:
    """Traps 1, 16: whatever ran before, and in a model that was written and read again."""
    model, x = built(family), field()
    with torch.no_grad():
        first = model(x, draw=DRAW)
        other = model(x, draw=Draw(step=3, member=4, items=(5, 9)))
        assert torch.equal(model(x, draw=DRAW), first)
        assert (other - first).abs().max() > 1e-4
        again = built(family)
        for parameter in again.parameters():
            parameter.zero_()
        again.load_state_dict(copy.deepcopy(model.state_dict()))
        assert torch.equal(again(x, draw=DRAW), first)


@pytest.mark.parametrize("family", ["swin", "unet"])
def test_one_draw_of_weights_holds_for_all_items_and_leads(family: str) -> None:
    """Trap 7: a member's weights are one sample over a rollout and whatever micro-batch."""
    model, x = built(family), field()
    with torch.no_grad():
        first = model(x, draw=DRAW)
        assert torch.equal(model(x, draw=Draw(step=3, member=2, items=(1, 2), lead=4)), first)
        assert (model(x, draw=Draw(step=4, member=2)) - first).abs().max() > 1e-4


def test_points_with_equal_inputs_have_equal_outputs() -> None:
    """Trap 10: noise by row or point would make fields that no weights make."""
    layer = Linear(6, 4)
    make_bayesian(layer, key=lambda name: KEY, initial_sigma=3.0)
    layer.reset(torch.Generator().manual_seed(0))
    x = torch.ones(4, 6)
    with drawing(DRAW):
        y = layer(x)
        zero = layer(torch.zeros(4, 6, requires_grad=True))
    assert (y - y[:1]).abs().max() < 1e-6  # whatever order a product adds in
    assert (y - nn.functional.linear(x, layer.weight, layer.bias)).abs().min() > 1e-2
    zero.sum().backward()  # of an input of 0, where a standard deviation has no gradient
    assert layer.get_parameter("weight_rho").grad.isfinite().all()  # type: ignore[union-attr]


def recomputed(units: Sequence[Unit], state: State) -> State:
    for unit in units:
        state = checkpoint(unit.run, *state, use_reentrant=False, preserve_rng_state=False)
    return state


@pytest.mark.parametrize("family", MODELS)
def test_gradients_of_recomputed_units_are_those_of_kept_ones_bit_for_bit(family: str) -> None:
    """Trap 7: each unit computes again what it was bound to, though another member, item and lead
    ran in between, and before the backward pass another draw is the newest."""
    grads: dict[str, list[Tensor]] = {}
    for name, run in (("kept", straight), ("recomputed", recomputed)):
        model, x = built(family), field().requires_grad_()
        x2 = field()
        one = model(x, run, draw=DRAW)
        two = model(x2, run, draw=Draw(step=3, member=7, items=(1, 0), lead=2))
        torch.manual_seed(len(name))  # no generator has a say
        (one.square().sum() + two.sin().sum()).backward()
        parameters = [p.grad for p in model.parameters()]
        assert x.grad is not None
        assert all(g is not None for g in parameters)
        grads[name] = [x.grad, *parameters]  # type: ignore[list-item]
    names = ["input", *(n for n, _ in built(family).named_parameters())]
    for name, a, b in zip(names, grads["kept"], grads["recomputed"], strict=True):
        assert torch.equal(a, b), name
        assert a.abs().max() > 0 or "bias" in name, name


@pytest.mark.parametrize("sigma_map", MAPS)
def test_deviations_that_are_made_once_change_no_bit(sigma_map: Any) -> None:
    """Of a layer's output, gradients and KL; and a deviation that changed is made anew."""
    found: list[list[Tensor]] = []
    for once in (False, True):
        layer = Linear(50, 7)  # sizes that end within a vector register
        make_bayesian(layer, key=len, sigma_map=sigma_map)
        generator = torch.Generator().manual_seed(4)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        pull, x = Pull(layer), torch.randn(3, 50, generator=generator)
        told: list[Tensor] = []
        for _ in range(2):
            pull.begin([])
            for parameter in layer.parameters():
                parameter.grad = None
            with unchanged(layer) if once else nullcontext(), drawing(DRAW):
                assert bool(layer.sample.spreads) == once  # type: ignore[union-attr]
                out = layer(x)
                out.square().sum().backward()
                for parameter in layer.parameters():
                    pull.take(parameter, 0.1)
            told += [out, pull.sums, *(p.grad for p in layer.parameters() if p.grad is not None)]
            with torch.no_grad():
                layer.weight_rho += 0.1
        assert not layer.sample.spreads  # type: ignore[union-attr]
        assert len(told) == 2 * (2 + 4)
        assert not torch.equal(told[0], told[6])
        found.append(told)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_rollouts_gradient_goes_through_one_draw_of_weights() -> None:
    """Two leads: d/d mu by finite differences of the whole, in float64."""
    model, x = built("swin", dtype=torch.float64), field(torch.float64)

    def rolled() -> Tensor:
        state = x
        for lead in (1, 2):
            out = model(state, draw=Draw(step=0, member=1, items=(0, 1), lead=lead))
            state = torch.cat([out, x[:, 4:]], 1)
        return out.square().sum()

    rolled().backward()
    rho = model.get_parameter("blocks.1.mlp.fc1.weight_rho")
    mean = model.get_parameter("blocks.1.mlp.fc1.weight")
    for parameter in (rho, mean):
        assert parameter.grad is not None
        step = torch.zeros_like(parameter)
        step[3, 4] = 1e-4
        with torch.no_grad():
            parameter += step
            above = rolled()
            parameter -= 2 * step
            below = rolled()
            parameter += step
        slope_here = float(parameter.grad[3, 4])
        assert float(above - below) / 2e-4 == pytest.approx(slope_here, rel=1e-5)


def test_without_a_draw_a_model_that_is_drawn_is_refused() -> None:
    for model in (built("swin"), built("beast", None)):
        with pytest.raises(ValueError, match=r"nobody said which draw: call it with draw=Draw\("):
            model(field())


# The prior


def kl(model: nn.Module) -> float:
    return float(posterior_sums(model)[0])


@pytest.mark.parametrize("sigma_map", MAPS)
@pytest.mark.parametrize("kind", ["standard", "scaled", "start"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kl_and_its_gradient_are_exact(
    sigma_map: Any, kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priors, "_PART", 100)  # several parts of a weight
    layer = Linear(40, 10).to(dtype)
    make_bayesian(layer, key=len, sigma_map=sigma_map, prior=Prior(kind=kind, sigma=0.7))
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    if kind == "start":
        keep_start(layer)
        assert set(layer.state_dict()) >= {"weight_start", "bias_start"}
        for name, parameter in layer.named_parameters():
            if not name.endswith("_rho"):
                parameter.data += 0.3
    pull = Pull(layer)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
        pull.take(parameter, 0.5)
        assert parameter.grad is not None
        parameter.grad.sub_(1).mul_(2)
    ours = pull.sums[0]
    assert ours.dtype == torch.float64
    total = torch.zeros((), dtype=torch.float64)
    leaves = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    for leaf in ("weight", "bias"):
        rho = leaves[f"{leaf}_rho"]
        s = rho.exp() if sigma_map == "exp" else torch.nn.functional.softplus(rho)
        middle = getattr(layer, f"{leaf}_start", torch.zeros_like(leaves[leaf])).double()
        p = 0.7 / math.sqrt(3 * 40) if kind == "scaled" else 0.7
        q = torch.distributions.Normal(leaves[leaf], s)
        total = total + torch.distributions.kl_divergence(
            q, torch.distributions.Normal(middle, p)
        ).sum()  # fmt: skip
    total.backward()
    digits = 1e-6 if dtype == torch.float32 else 1e-13
    assert float(ours) == pytest.approx(float(total.detach()), rel=digits)
    for name, parameter in layer.named_parameters():
        wanted = leaves[name].grad
        assert parameter.grad is not None
        assert wanted is not None
        assert (parameter.grad - wanted).abs().max() < 10 * digits * wanted.abs().max(), name


def mixed(share: float, narrow: float, mean: float = 0.3, sigma: float = 0.4) -> tuple[Linear, Any]:
    """A layer of many weights alike, and (KL, its gradients by mean and rho) of one of them."""
    layer = Linear(100, 100)
    prior = Prior(kind="mixture", sigma=0.7, narrow=narrow, share=share)
    make_bayesian(layer, key=lambda name: KEY + len(name), prior=prior)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(rho_of(sigma, "softplus") if name.endswith("_rho") else mean)
    # By quadrature, in float64.
    values = torch.tensor([mean, rho_of(sigma, "softplus")], dtype=torch.float64).requires_grad_()
    m, s = values[0], nn.functional.softplus(values[1])
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    of_z = torch.distributions.Normal(0.0, 1.0).log_prob(z).exp() * (z[1] - z[0])
    w = m + s * z
    shares = torch.tensor([share, 1 - share], dtype=torch.float64)
    normals = torch.distributions.Normal(0.0, torch.tensor([0.7, narrow], dtype=torch.float64))
    log_p = (normals.log_prob(w[:, None]) + shares.log()).logsumexp(-1)
    kl = (of_z * (torch.distributions.Normal(m, s).log_prob(w) - log_p)).sum()
    return layer, (float(kl.detach()), *torch.autograd.grad(kl, values)[0].tolist())


@pytest.mark.parametrize(("share", "narrow"), [(0.5, 0.1), (0.9, 0.3), (0.25, 0.7 - 1e-12)])
def test_the_kl_to_a_mixture_is_exact_in_expectation(share: float, narrow: float) -> None:
    """Of 10,100 weights alike and 20 members, within four standard errors."""
    layer, wanted = mixed(share, narrow)
    members = [(5, member) for member in range(20)]
    pull = Pull(layer)
    found: list[list[float]] = []
    for words in members:
        pull.begin([words])
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
            pull.take(parameter, 1.0)
        of = (layer.weight.grad, layer.get_parameter("weight_rho").grad)
        found.append([float(pull.sums[0]) / 10_100, *(float(g.mean()) for g in of)])  # type: ignore
    each = torch.tensor(found, dtype=torch.float64)
    errors = each.std(0) / len(members) ** 0.5
    for value, error, exact in zip(each.mean(0), errors, wanted, strict=True):
        assert abs(float(value) - exact) < 4 * float(error) + 1e-6
        assert 0 < error < 0.02
    # All members at once: their mean.
    pull.begin(members)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
        pull.take(parameter, 1.0)
    assert float(pull.sums[0]) / 10_100 == pytest.approx(float(each[:, 0].mean()), rel=1e-5)
    assert float(layer.weight.grad.mean()) == pytest.approx(float(each[:, 1].mean()), rel=1e-4)  # type: ignore


def test_a_mixture_of_equal_deviations_is_the_standard_prior() -> None:
    """The closed form: KL and gradients of one Gaussian, to the noise of the draws."""
    layer, _ = mixed(0.25, 0.7 - 1e-12)
    same = copy.deepcopy(layer)
    for module in (same,):
        assert isinstance(module.sample, Posterior)
        module.sample.prior = Prior(kind="standard", sigma=0.7)
    sums, gradients = [], []
    for each in (layer, same):
        pull = Pull(each)
        pull.begin([(3, member) for member in range(40)])
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
            pull.take(parameter, 1.0)
        sums.append(pull.sums)
        gradients.append([float(p.grad.mean()) for p in each.parameters()])  # type: ignore
    # w / sigma^2 of 40 draws: of each gradient by a mean the deviation is s / sigma^2 / sqrt(40).
    assert float(sums[0][0]) == pytest.approx(float(sums[1][0]), rel=0.02)
    assert sums[0][1:].tolist() == pytest.approx(sums[1][1:].tolist())
    assert gradients[0] == pytest.approx(gradients[1], abs=0.03)
    noise_of_one = (layer.weight.grad - same.weight.grad).std()  # type: ignore[operator]
    assert float(noise_of_one) == pytest.approx(0.4 / 0.7**2 / 40**0.5, rel=0.05)


def test_the_kl_counts_each_weight_once_whatever_is_drawn() -> None:
    """Trap 2: of parts the sum; of members, micro-batches and copies one."""
    model = built("swin")
    whole = kl(model)
    with torch.no_grad():
        model(field(), draw=DRAW)
    assert kl(model) == whole
    parts = sum(
        kl(layer) for layer in model.modules()
        if isinstance(layer, Layer) and isinstance(layer.sample, Posterior)
        and not any(isinstance(child, Layer) for child in layer.children())
    )  # fmt: skip
    assert parts == pytest.approx(whole, rel=1e-13)
    layer = next(m for m in model.modules() if isinstance(m, Linear))
    halves = 0.0
    for rows in (slice(0, 5), slice(5, None)):
        part = copy.deepcopy(layer)
        for name, parameter in list(part.named_parameters()):
            setattr(part, name, nn.Parameter(parameter.detach()[rows]))
        halves += kl(part)
    assert halves == pytest.approx(kl(layer), rel=1e-13)


def test_many_small_terms_are_added_in_float64() -> None:
    layer = Linear(2000, 1000)
    make_bayesian(layer, key=len, prior=Prior(sigma=1.0))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1e-3)
        for leaf in ("weight_rho", "bias_rho"):
            layer.get_parameter(leaf).fill_(rho_of(1.001, "softplus"))
    s = float(deviation(layer.get_parameter("bias_rho").detach()[:1], "softplus"))
    mean = float(torch.tensor(1e-3))
    each = (s**2 + mean**2 - 1 - 2 * math.log(s)) / 2
    assert kl(layer) == pytest.approx(2_001_000 * each, rel=2e-2)
    assert each == pytest.approx(1.5e-6, rel=0.01)  # where a difference of terms near 1/2 is noise


def test_a_prior_around_the_start_needs_one() -> None:
    layer = Linear(3, 2)
    make_bayesian(layer, key=len, prior=Prior(kind="start"))
    with pytest.raises(ValueError, match=r"weight has none: call keep_start once they are loaded"):
        kl(layer)
    with pytest.raises(ValueError, match=r"no weight of this model is a distribution"):
        kl(Linear(3, 2))
    keep_start(layer)
    other = Linear(3, 2)
    make_bayesian(other, key=len, prior=Prior(kind="start"))
    keep_start(other)
    other.load_state_dict(layer.state_dict())
    assert kl(other) == kl(layer)


def test_the_kl_is_divided_by_training_samples_and_output_values() -> None:
    """Trap 17, with the numbers of the paper: 40 years of hours, 168 channels at 1/4 degree."""
    assert 1 / kl_scale(1.0, 359_340, 168 * 720 * 1440) == pytest.approx(6.26e13, rel=1e-3)
    assert kl_scale(0.1, 10, 4) == pytest.approx(0.1 / 40)
    # Full batch and halves of it have the same prior: N counts items, not steps nor members.
    model = built("swin")
    scale, nll = kl_scale(1.0, 8, 100.0), torch.linspace(1, 2, 8, dtype=torch.float64)
    prior = scale * kl(model)
    losses = [float(part.mean()) / 100 + prior for part in (nll, nll[:4], nll[4:])]
    assert losses[0] == pytest.approx((losses[1] + losses[2]) / 2, rel=1e-12)
    with pytest.raises(ValueError, match="the prior of 0 training samples"):
        kl_scale(1.0, 0, 5.0)


# Optimizer and log


def test_weight_decay_leaves_deviations_and_means_to_the_prior() -> None:
    """Trap 8: decay would take rho to 0, and deviations to 0.69."""
    model = built("beast")
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed = {names[p] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed
    assert all(".nice." in name and name.endswith("weight") for name in decayed), decayed
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(names)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in decayed), name


@pytest.mark.parametrize(("s", "lost"), [(3e-5, True), (5e-5, False)])
def test_noise_below_half_a_bfloat16_spacing_is_told_as_lost(s: float, lost: bool) -> None:
    """Trap 11: 0.02 has a spacing of 1.2e-4, and s / 0.02 is compared with 2^-9."""
    layer = Linear(100, 100)
    make_bayesian(layer, key=lambda name: KEY + len(name))
    with torch.no_grad():
        layer.weight.fill_(0.02)
        layer.bias.zero_()
        for leaf in ("weight_rho", "bias_rho"):
            layer.get_parameter(leaf).fill_(rho_of(s, "softplus"))
    told = summary(posterior_sums(layer).tolist(), 0.5)
    assert told["noise_lost"] == pytest.approx(10_000 / 10_100 if lost else 0)
    assert told["signal_to_noise"] == pytest.approx(
        math.sqrt(10_000 * 0.02**2 / (10_100 * s**2)), rel=1e-4
    )
    assert told["kl"] == pytest.approx(kl(layer))
    assert told["kl_per_weight"] == pytest.approx(told["kl"] / 10_100)
    assert told["kl_loss"] == 0.5 * told["kl"]
    with drawing(DRAW), torch.no_grad():
        drawn = layer.value("weight", torch.bfloat16)
    moved = float((drawn != torch.tensor(0.02).to(torch.bfloat16)).float().mean())
    assert moved < 0.1 if lost else moved > 0.15


def test_sums_of_parts_add_up() -> None:
    model = built("unet")
    whole = posterior_sums(model)
    parts = [posterior_sums(block) for _, block in model.blocks]  # type: ignore[attr-defined]
    others = [model.positions, model.last]
    parts += [posterior_sums(m) for m in others]  # type: ignore[arg-type]
    assert torch.allclose(sum(parts), whole, rtol=1e-13)  # type: ignore[arg-type]
    assert whole[1] == sum(w.mean.numel() for w in weights_of(model))


def test_the_loss_is_least_at_the_exact_posterior() -> None:
    """Of y = w x + noise, whose posterior is known: factors of the KL and of draws are right."""
    generator = torch.Generator().manual_seed(5)
    n, noise_sigma, w, members = 40, 0.5, 0.8, 20_000
    x = torch.randn(n, 1, generator=generator)
    y = w * x + noise_sigma * torch.randn(n, 1, generator=generator)
    precision = 1 + float(x.square().sum()) / noise_sigma**2
    mean, sigma = float((x * y).sum()) / noise_sigma**2 / precision, precision**-0.5
    # Each output's weight is a member's.
    layer = Linear(1, members)
    make_bayesian(layer, key=lambda name: KEY + len(name))

    def scores(mean: float, sigma: float) -> list[float]:
        """Mean gradients of mu and rho, in their standard errors."""
        rho = layer.get_parameter("weight_rho")
        layer.weight.data.fill_(mean)
        rho.data.fill_(rho_of(sigma, "softplus"))
        layer.zero_grad()
        with drawing(Draw(step=0, member=0)):
            weight = layer.value("weight", torch.float32)
        nll = ((x * weight.T - y).square() / (2 * noise_sigma**2)).mean(0).sum()
        nll.backward()
        pull = Pull(layer)
        for parameter in (layer.weight, rho):
            pull.take(parameter, kl_scale(1.0, n, 1))
        found = [layer.weight.grad, rho.grad]
        return [float(g.mean() / g.std() * members**0.5) for g in found]  # type: ignore[union-attr]

    assert max(map(abs, scores(mean, sigma))) < 3
    assert scores(mean + 0.1 * sigma, sigma)[0] > 5
    assert scores(mean, 1.1 * sigma)[1] > 5
    assert scores(mean, 0.9 * sigma)[1] < -5


# Configuration


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"likelihood": "moments"}, r"bayes\.members=1 has none: take bayes\.members=2 or more"),
        ({"likelihood": "crps"}, r"takes two, and bayes\.members=1: take bayes\.members=2"),
        ({"members": 3}, r"bayes\.members=3 are scored together: choose bayes\.likelihood=moments"),
        ({"weights": True}, r"bayes\.weights=true needs bayes\.likelihood=moments, gaussian or"),
        ({"members": 0}, r"bayes\.members=0 must be at least 1"),
        ({"floor": 0.0}, r"bayes\.floor=0\.0 must be above 0"),
        ({"prior_sigma": -1.0}, r"bayes\.prior_sigma=-1\.0 must be above 0"),
        ({"initial_sigma": 0.0}, r"bayes\.initial_sigma=0\.0 must be above 0"),
        (
            {"prior": "mixture", "narrow_sigma": 1.0},
            r"narrow_sigma=1\.0 is not below bayes\.prior_sigma=1\.0: take a narrower one, or",
        ),
        ({"mixture_share": 1.0}, r"bayes\.mixture_share=1\.0 must lie between 0 and 1"),
        ({"cold": -0.1}, r"bayes\.cold=-0\.1 must not be negative"),
        ({"alpha": 1.5}, r"bayes\.alpha=1\.5 must be 0 to 1"),
    ],
)
def test_what_has_no_score_is_refused_with_the_way_out(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BayesConfig(**values)


def test_of_one_member_two_scores_are_left() -> None:
    BayesConfig(weights=True, likelihood="gaussian")
    BayesConfig(weights=True, likelihood="crps", alpha=0.0)
    assert not BayesConfig().draws
    assert partial(BayesConfig, likelihood="gaussian")().draws
