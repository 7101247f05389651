"""`train.precision=paper`: dtypes, gradients, and what each unit keeps, against the published
program's anatomy.

Of one sample f is a field in float16, a the patch grid behind the stride and b = 4 a the one before
it, of the model's width in float16. The residual stream is float32: 2 a, 2 b.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from graticule.assemble import Shapes
from graticule.config import Config, MeshConfig, SwinConfig, TrainConfig
from graticule.memory.plan import Plan, Segment
from graticule.model.layers import Conv, Linear, TransposedConv, imitating
from graticule.model.norms import FieldGroupNorm
from graticule.model.swin import Swin, SwinBlock
from graticule.model.windows import Attend
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks
from graticule.parallel.norms import StripedGroupNorm
from graticule.parallel.space import specialise, stripe
from graticule.train.foresee import foresee
from graticule.train.loss import LossWeights, loss_kind, weighted_errors
from test_space import drawn, stripes_of
from test_swin import field, small

HALF, SINGLE = torch.float16, torch.float32
GRID = (32, 48)
F16 = 2 * GRID[0] * GRID[1] * 2
"""f: two channels."""
A = 2 * 8 * GRID[0] * GRID[1] // 4
"""a: width 8, patch 1, stride 2."""
B = 4 * A


def paper(**settings: Any) -> Swin:
    options = {"boundary": "paper", "grid": GRID, "window": (4, 6), "in_channels": 2}
    options |= {"compute_dtype": HALF, "stream_dtype": SINGLE}
    return small(**(options | settings)).float()


def kept_by(run: Callable[[], Any]) -> dict[int, int]:
    """Bytes that autograd saves, by storage. Weights, their copies and statistics are small here,
    and left out."""
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.nbytes() >= F16:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with imitating("cuda"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return {key: size for key, (_, size) in kept.items()}


# Dtypes


def test_the_stream_is_float32_between_float16_fields_and_products_are_float16() -> None:
    model = paper()
    found: list[tuple[nn.Module, torch.dtype, torch.dtype]] = []

    def note(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if isinstance(args[0], Tensor):
            found.append((module, args[0].dtype, out.dtype))

    for module in model.modules():
        module.register_forward_hook(note) if not isinstance(module, nn.ModuleList) else None
    assert model(field(GRID, 2).to(HALF)).dtype is HALF

    def dtypes(*kinds: type[nn.Module]) -> set[tuple[torch.dtype, torch.dtype]]:
        return {(given, made) for module, given, made in found if isinstance(module, kinds)}

    assert dtypes(FieldGroupNorm) == {(HALF, SINGLE)}
    assert dtypes(SwinBlock) == {(SINGLE, SINGLE)}
    assert dtypes(TransposedConv) == {(SINGLE, HALF)}
    assert {made for _, made in dtypes(Linear, Conv, Attend)} == {HALF}
    assert {given for given, _ in dtypes(Linear, Conv)} == {HALF, SINGLE}
    streams = [m for m in (model.up, model.recover)]
    assert {given for module, given, _ in found if module in streams} == {SINGLE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_other_precisions_nothing_is_cast_or_kept_as_published(dtype: torch.dtype) -> None:
    model = paper(compute_dtype=dtype, stream_dtype=dtype)
    plain = small("paper", grid=GRID, window=(4, 6), in_channels=2, compute_dtype=dtype).float()
    wide = [getattr(m, name) for m in model.modules() for name in ("input_dtype", "softmax_dtype")
            if hasattr(m, name)]  # fmt: skip
    assert set(wide) == {None}
    x = field(GRID, 2).float()
    assert torch.equal(model(x), plain(x))


def test_names_and_shapes_of_parameters_are_those_of_other_precisions() -> None:
    mine, plain = paper().state_dict(), small("paper", grid=GRID, window=(4, 6), in_channels=2)
    assert {n: v.shape for n, v in mine.items()} == {
        n: v.shape for n, v in plain.state_dict().items()
    }


def test_gradients_are_those_of_float64_and_nearer_than_those_of_float16() -> None:
    def gradients(model: Swin, dtype: torch.dtype) -> Tensor:
        model(field(GRID, 2).to(dtype)).double().square().mean().backward()
        return torch.cat([p.grad.double().ravel() for p in model.parameters()])

    exact = small("paper", grid=GRID, window=(4, 6), in_channels=2)
    want = gradients(exact, torch.float64)
    ours = gradients(paper(), HALF)
    half = gradients(paper(stream_dtype=HALF), SINGLE)
    scale = want.norm()
    assert 0 < (ours - want).norm() < 5e-3 * scale
    assert (ours - want).norm() < (half - want).norm()


# What is kept


def test_group_norm_keeps_a_float32_copy_and_what_silu_takes() -> None:
    x = torch.randn(1, 8, *GRID).to(HALF).requires_grad_()
    for striped in (False, True):
        norm = drawn(FieldGroupNorm(2, 8)).float()
        norm.input_dtype = SINGLE
        if striped:
            specialise(norm, StripedGroupNorm, link=Link())
        assert sorted(kept_by(lambda norm=norm: norm(x)).values()) == [2 * B, 2 * B]
        norm.input_dtype = None
        assert sorted(kept_by(lambda norm=norm: norm(x)).values()) == [B]


def test_the_float32_norm_is_silu_of_torchs() -> None:
    x, grad = torch.randn(2, 2, 8, 9, 6)
    x = x.to(HALF).requires_grad_()
    norm = drawn(FieldGroupNorm(2, 8)).float()
    norm.input_dtype = SINGLE
    wanted = [x, *norm.parameters()]
    theirs = F.silu(F.group_norm(x.float(), 2, norm.weight, norm.bias, norm.eps))
    pairs = zip(*(torch.autograd.grad(out, wanted, grad) for out in (norm(x), theirs)), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def _published_norm(ranks: int) -> float:
    """The largest difference of output and gradients, in stripes against whole, in float64."""
    link = Link(dist.group.WORLD)
    x, grad = torch.randn(2, 2, 4, 6, 5, generator=torch.Generator().manual_seed(1)).double()
    here = stripes_of(6, ranks, link.rank).rows
    results = []
    for mine in (slice(None), here):
        norm = drawn(FieldGroupNorm(2, 4))
        norm.input_dtype = torch.float64
        if mine == here:
            stripe(norm, stripes_of(6, ranks, link.rank), link)
        given = x[:, :, mine].clone().requires_grad_()
        out = norm(given)
        grads = torch.autograd.grad(out, [given, norm.weight, norm.bias], grad[:, :, mine])
        results.append([out.detach(), *grads])
    whole, part = results
    sums = [link.sum(each.clone(), "test") for each in part[2:]]
    pairs = [(whole[0][:, :, here], part[0]), (whole[1][:, :, here], part[1]),
             *zip(whole[2:], sums, strict=True)]  # fmt: skip
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_the_published_norm_of_stripes_is_that_of_the_field(two: LocalRanks) -> None:
    assert max(two.run(_published_norm, 2)) < 1e-12


def _kept_by_unit(model: Swin) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Of each unit what it keeps, and what of its state it was given; bytes."""
    kept, given = {}, {}
    state: tuple[Tensor, ...] = (field(GRID, 2)[:1].to(HALF).requires_grad_(),)
    for unit in model.units():
        given[unit.name] = [tensor.untyped_storage().nbytes() for tensor in state]
        held = {tensor.untyped_storage().data_ptr() for tensor in state}
        made: list[tuple[Tensor, ...]] = []
        found = kept_by(lambda unit=unit, state=state, made=made: made.append(unit.run(*state)))
        kept[unit.name] = sum(size for key, size in found.items() if key not in held)
        state = made[0]
    return kept, given


def test_units_are_given_and_keep_what_the_published_boundaries_and_peaks_say() -> None:
    kept, given = _kept_by_unit(paper())
    # D0: f. D1: f + a + 2 a. Segments: 2 a. U0: 2 a. U1: 2 a + b + 2 b + 2 b.
    assert given == {
        "embed": [F16], "down.0": [A], "down.1": [2 * A, A],
        "blocks.0": [2 * A], "blocks.1": [2 * A],
        "up": [2 * A], "up.0": [B], "up.1": [2 * B, B], "recover": [2 * B],
    }  # fmt: skip
    # Padded inputs of convolutions have a row or column more on each side.
    padded = {name: 2 * 8 * (rows + 2) * (columns + 2) for name, (rows, columns) in
              {"up": GRID, "down": (GRID[0] // 2, GRID[1] // 2)}.items()}  # fmt: skip
    # U0, computed again: a + 11 b, of which 2 b are padded. (Statistics are not counted.)
    assert kept["up"] == A
    assert kept["up.0"] == kept["up.1"] == padded["up"] + 4 * B
    assert kept["recover"] == B
    assert kept["down.0"] == kept["down.1"] == padded["down"] + 4 * 2 * A // 2
    # A block: the first norm's output cast for q, for k, for v; q, k, v; probabilities in both
    # dtypes (24 tokens, 2 heads); what proj takes; the stream; the second norm's output cast; the
    # hidden features before and after GELU. The first block also the stream in windows.
    probabilities = (4 + 2) * 24 * 2 * GRID[0] * GRID[1] // 4
    assert kept["blocks.0"] == (3 + 3 + 1 + 2 + 1 + 4 + 4 + 2) * A + probabilities


@pytest.mark.slow
def test_the_traced_boundaries_are_those_too() -> None:
    shapes = Shapes(grid=GRID, num_prognostic=2, num_predicted=2, num_forcing=0, num_static=0,
                    num_inputs=1, num_outputs=1, num_forcings=1)  # fmt: skip
    config = Config(
        model=SwinConfig(patch=1, width=8, depth=2, heads=2, window=(4, 6), norm_groups=2,
                          boundary="paper"),
        mesh=MeshConfig(window=2),
        train=TrainConfig(batch=1, leads=2, precision="paper", area_weighted=False),
    )  # fmt: skip
    profile = foresee(config, shapes, ranks=2, rank=1, on="cuda", data="resident")
    states = profile.keep.states
    sizes = [sorted(states[1, cut].values()) for cut in range(len(profile.units) + 1)]
    half = [[F16], [A], [A, 2 * A], [2 * A], [2 * A], [2 * A], [B], [B, 2 * B], [2 * B], [F16]]
    assert [[2 * size for size in each] for each in sizes] == half
    plan = Plan(tuple(tuple(Segment(u, u + 1, "recompute") for u in range(9)) for _ in range(2)))
    # Input and two labels before anything else, and a mask: of two bytes and of one a value.
    base = dict(zip(profile.owners, profile.keep.base.tolist(), strict=True))
    assert base["inputs"] >= 3 * F16 // 2
    buffered = foresee(config, shapes, ranks=2, rank=1, on="cuda", data="buffered")
    theirs = dict(zip(buffered.owners, buffered.keep.base.tolist(), strict=True))
    assert base["inputs"] - theirs["inputs"] == 2 * F16 // 2
    assert profile.timeline(plan).peak_bytes - buffered.timeline(plan).peak_bytes == F16 // 2


# The loss


def test_the_published_loss_is_the_same_number_and_keeps_the_float32_difference() -> None:
    assert loss_kind(TrainConfig(precision="paper")) == "published mae"
    assert loss_kind(TrainConfig(precision="fp16")) == "mae"
    assert loss_kind(TrainConfig(precision="paper", loss="mse")) == "mse"
    wet = np.random.default_rng(1).random((2, *GRID)) > 0.3
    target = torch.randn(1, 1, 2, *GRID).to(HALF)
    target[..., ~torch.from_numpy(wet)] = torch.nan
    for area in (None, np.linspace(1, 2, GRID[0])[:, None] * np.ones(GRID[1])):
        weights = LossWeights.of(wet, area)
        predicted = torch.randn(1, 1, 2, *GRID).to(HALF).requires_grad_()
        results = []
        for kind in ("mae", "published mae"):
            error = weighted_errors(predicted, target, weights, kind).sum()
            results.append((error, *torch.autograd.grad(error, predicted)))
        assert torch.equal(results[0][1], results[1][1])
        sums = [error.item() for error, _ in results]
        assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    kept = kept_by(lambda: weighted_errors(predicted, target, weights, "published mae"))
    assert 2 * F16 in kept.values()
