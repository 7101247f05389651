"""Sharded or replicated: the same first values, gradients, norm, steps and averages as one rank."""

import pytest
import torch
from torch import Tensor, nn

from graticule.config import MeshConfig, TrainConfig
from graticule.mesh import Mesh
from graticule.model.layers import Layer, Linear
from graticule.parallel import data
from graticule.parallel.box import box_of
from graticule.parallel.data import SharedWeights, local, shard_weights
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks
from graticule.parallel.materialise import allocate, draw_weights, materialise
from graticule.parallel.tensor import split_parameter
from graticule.train.optimizer import (
    Average,
    empty_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
)
from small_stack import (
    Layout,
    assert_same_as_one_process,
    backward,
    build,
    difference,
    fields,
    outcome,
    take_steps,
    weights,
    whole,
)

SHARDED = {"weights": "sharded"}
DATA, TENSOR = {"data": 2}, {"tensor": 2}
BOTH = {"data": 2, "tensor": 2}
WIDE = {"data": 4}


# Parity with one process


def test_replicated_weights_are_as_one_process(two: LocalRanks) -> None:
    layout = Layout(sizes=DATA)
    assert_same_as_one_process(two.run(outcome, layout), layout, 1e-12)


@pytest.mark.parametrize(
    ("layout", "units"),
    [
        (Layout(sizes=WIDE, weights=SHARDED, samples=5, steps=1), 5),
        (Layout(sizes=BOTH, weights=SHARDED), 5),
        (Layout(sizes=BOTH, weights={**SHARDED, "shard_unit": "model"}, steps=0), 1),
        # Nobody shares a part of a block: embedding and recovery alone are sharded.
        (Layout(sizes={"tensor": 4}, weights=SHARDED, steps=0), 3),
    ],
    ids=["FSDP 4", "FSDP 2 x TP 2", "whole model", "TP 4"],
)
def test_sharded_weights_are_as_one_process(four: LocalRanks, layout: Layout, units: int) -> None:
    parts = four.run(outcome, layout)
    assert [part.units for part in parts] == [units] * 4
    assert_same_as_one_process(parts, layout, 1e-12)


def test_gathered_weights_may_stay_and_backward_passes_add_up(two: LocalRanks) -> None:
    layout = Layout(sizes=DATA, weights={**SHARDED, "reshard": False}, samples=4, parts=2, steps=0)
    assert_same_as_one_process(two.run(outcome, layout), layout, 1e-12)


@pytest.mark.parametrize("recompute", ["block", "segment"])
def test_three_leads_with_recomputed_blocks_are_as_one_process(
    two: LocalRanks, recompute: str
) -> None:
    layout = Layout(sizes=DATA, weights=SHARDED, leads=3, recompute=recompute, steps=0)
    assert_same_as_one_process(two.run(outcome, layout), layout, 1e-12)


def test_a_rank_without_tokens_takes_part(four: LocalRanks) -> None:
    layout = Layout(
        sizes={"window": 2, "tensor": 2}, weights=SHARDED, leads=2, recompute="block", steps=0
    )
    assert_same_as_one_process(four.run(outcome, layout), layout, 1e-12)


# Narrow types


def _types(layout: Layout) -> tuple[set, list]:
    mesh = Mesh(layout.sizes)
    model = build(layout, mesh)
    seen = []
    model.embed.register_forward_pre_hook(
        lambda embed, given: seen.append((given[0].dtype, embed.weight.dtype))
    )
    model.compute = torch.float32  # so that the embedding is given float32
    backward(model, layout, *fields(layout, mesh))
    return {parameter.grad.dtype for parameter in model.parameters()}, seen


@pytest.mark.parametrize(
    ("dtype", "gather"), [(torch.bfloat16, "compute"), (torch.float16, "fp32")], ids=str
)
def test_sixteen_bit_gradients_are_summed_in_float32(
    two: LocalRanks, dtype: torch.dtype, gather: str
) -> None:
    layout = Layout(
        sizes=DATA,
        weights={**SHARDED, "gather": gather},
        dtype=torch.float32,
        compute=dtype,
        steps=0,
    )
    serial = outcome(layout.serial)
    largest = max(float(g.abs().max()) for g in serial.gradients.values())
    for part in two.run(outcome, layout):
        for name, value in serial.gradients.items():
            assert part.gradients[name].dtype is torch.float32
            error = float((part.gradients[name] - value).abs().max())
            assert error < 4 * torch.finfo(dtype).eps * largest, name


def test_what_a_unit_is_given_is_not_cast(two: LocalRanks) -> None:
    layout = Layout(sizes=DATA, weights=SHARDED, dtype=torch.float32, compute=torch.bfloat16)
    for gradients, seen in two.run(_types, layout):
        assert gradients == {torch.float32}
        assert seen == [(torch.float32, torch.bfloat16)]


# The norm: a replicated gradient [3] and a sharded one [4, 0]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))
        self.split = nn.Parameter(torch.zeros(2))


LAYOUTS = [
    ({}, {}),
    (TENSOR, {}),
    (DATA, {}),
    (DATA, SHARDED),
    (BOTH, {}),
    (BOTH, SHARDED),
]


def _norm(sizes: dict, settings: dict, spoiled: int = -1) -> tuple:
    mesh = Mesh(sizes)
    model = Two()
    if mesh.sizes["tensor"] > 1:
        split_parameter(model, "split", 0, mesh.device_meshes[1]["tensor"])
    # The gain is used on the tensor axis's ranks alike: like a norm inside a block.
    shard_weights(model, mesh, MeshConfig(**settings), torch.float32)
    for name, full in (("gain", [3.0]), ("split", [4.0, 0.0])):
        parameter = getattr(model, name)
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(torch.tensor(full)[box_of(parameter).slices])
    if mesh.rank == spoiled:
        for parameter in model.parameters():
            local(parameter.grad).fill_(torch.nan)
    shared = SharedWeights(model, mesh)
    sums = torch.tensor([1.0, mesh.rank], dtype=torch.float64)
    totals, norm = shared.total(sums)
    shared.scale_(1.0 / 5.0)
    return totals.tolist(), norm.dtype, float(norm), whole(model.gain.grad), whole(model.split.grad)


@pytest.mark.parametrize(("sizes", "settings"), LAYOUTS)
def test_the_norm_counts_each_parameter_once(
    two: LocalRanks, four: LocalRanks, sizes: dict, settings: dict
) -> None:
    ranks = {0: None, 1: two, 2: four}[len(sizes)]
    results = ranks.run(_norm, sizes, settings) if ranks else [_norm(sizes, settings)]
    count = len(results)
    for totals, dtype, norm, gain, split in results:
        assert totals == [count, count * (count - 1) / 2]
        assert dtype is torch.float64
        assert norm == pytest.approx(5.0, rel=1e-15)
        torch.testing.assert_close(gain, torch.tensor([0.6]))
        torch.testing.assert_close(split, torch.tensor([0.8, 0.0]))


@pytest.mark.parametrize(("sizes", "settings"), [(BOTH, {}), (BOTH, SHARDED)])
def test_nan_on_one_rank_is_nan_on_all(four: LocalRanks, sizes: dict, settings: dict) -> None:
    norms = [result[2] for result in four.run(_norm, sizes, settings, 1)]
    assert all(norm != norm for norm in norms), norms


# Gradients that are not there, and how they travel


class Sparse(nn.Module):
    """`odd` is used on odd ranks alone, `never` on none; `fixed` is not learned."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(2, 2))
        self.large = nn.Parameter(torch.ones(6, 2))
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)


def _sparse(bucket_bytes: int) -> tuple:
    mesh = Mesh(DATA)
    model = Sparse()
    shared = SharedWeights(model, mesh)
    model.large.grad = torch.arange(12.0).view(2, 6).t() * (mesh.rank + 1)  # not contiguous
    if mesh.rank % 2:
        model.odd.grad = torch.tensor([1.0, 2.0, 3.0])
    calls = []
    plain = Link.sum_later
    Link.sum_later = lambda link, x, what: (calls.append(x.numel()), plain(link, x, what))[1]
    usual, data.BUCKET_BYTES = data.BUCKET_BYTES, bucket_bytes
    try:
        shared.reduce()
    finally:
        Link.sum_later, data.BUCKET_BYTES = plain, usual
    sent = shared.links[()].sent["gradients"]
    return model.odd.grad, model.never.grad, model.large.grad, model.fixed.grad, calls, sent


@pytest.mark.parametrize(
    ("bucket_bytes", "calls"), [(1 << 20, [19]), (48, [7, 12]), (4, [3, 4, 12])]
)
def test_missing_gradients_are_zeros_and_buckets_are_bounded(
    two: LocalRanks, bucket_bytes: int, calls: list[int]
) -> None:
    for odd, never, large, fixed, numbers, sent in two.run(_sparse, bucket_bytes):
        assert odd.tolist() == [1.0, 2.0, 3.0]
        assert never.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert torch.equal(large, 3 * torch.arange(12.0).view(2, 6).t())
        assert fixed is None
        assert numbers == calls
        assert sent == 19 * 4


def test_one_process_sums_nothing_and_treats_missing_gradients_alike() -> None:
    model = Sparse()
    shared = SharedWeights(model, Mesh())
    model.odd.grad = torch.tensor([3.0, 0.0, 4.0])
    shared.reduce()
    assert model.odd.grad.tolist() == [3.0, 0.0, 4.0]
    assert not model.never.grad.any()
    sums, norm = shared.total(torch.tensor([2.0], dtype=torch.float64))
    assert (sums.tolist(), float(norm)) == ([2.0], 5.0)


def _validated(reshard: bool) -> tuple[bool, bool]:
    mesh = Mesh(DATA)
    layout = Layout(sizes=DATA, weights={**SHARDED, "reshard": reshard})
    model = build(layout, mesh)
    before = list(model.parameters())
    with torch.no_grad():
        model(fields(layout, mesh)[0].flatten(0, 1))
    after = list(model.parameters())
    return all(a is b for a, b in zip(before, after, strict=True)), len(before) == len(after)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_pass_without_gradients_leaves_the_parameters_in_place(
    two: LocalRanks, reshard: bool
) -> None:
    assert two.run(_validated, reshard) == [(True, True)] * 2


# Ranks do not drift apart


def _drifted(layout: Layout) -> dict[str, Tensor]:
    mesh = Mesh(layout.sizes)
    model = build(layout, mesh)
    optimizer = make_optimizer(model, TrainConfig(learning_rate=1e-2))
    take_steps(model, SharedWeights(model, mesh), optimizer, layout, mesh, 10)
    return weights(model)


def test_after_ten_steps_the_ranks_hold_the_same_bits(four: LocalRanks) -> None:
    layout = Layout(sizes=BOTH, weights=SHARDED, dtype=torch.float32, compute=torch.float32)
    first, *others = four.run(_drifted, layout)
    for other in others:
        for name, value in first.items():
            assert float((value - other[name]).abs().max()) == 0.0, name


# First values


def _drawn(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = build(layout, Mesh(layout.sizes), seed=0)
    return weights(model), dict(model.named_buffers())


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [*LAYOUTS[1:], (WIDE, {}), (WIDE, SHARDED), ({"tensor": 4}, SHARDED)],
    ids=str,
)
def test_first_values_have_the_same_bits_in_every_layout(
    two: LocalRanks, four: LocalRanks, sizes: dict, settings: dict
) -> None:
    plain = Layout(dtype=torch.float32, compute=torch.float32)
    serial, buffers = _drawn(plain)
    layout = Layout(sizes=sizes, weights=settings, dtype=plain.dtype, compute=plain.compute)
    ranks = two if sizes in (DATA, TENSOR) else four
    for values, others in ranks.run(_drawn, layout):
        assert list(values) == list(serial)
        for name, value in serial.items():
            assert torch.equal(values[name], value), name
        for name, buffer in buffers.items():
            assert torch.equal(others[name], buffer), name


def test_first_values_depend_on_seed_and_name_alone() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Linear(3, 4), Linear(3, 4)

    with torch.device("meta"):
        one, other = Pair(), Pair()
    materialise(one, 1, "cpu")
    allocate(other, "cpu")
    torch.manual_seed(99)
    draw_weights(other, 1)
    assert torch.equal(one.a.weight, other.a.weight)
    assert not torch.equal(one.a.weight, one.b.weight)
    draw_weights(other, 2)
    assert not torch.equal(one.a.weight, other.a.weight)
    assert one.a.weight.requires_grad
    # As the layer itself draws, from the same generator.
    assert float(one.a.weight.detach().abs().max()) <= 2 * one.a.std
    assert not one.a.bias.any()


def test_a_layer_that_fails_to_draw_keeps_its_own_parameters() -> None:
    class Broken(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def reset(self, generator: torch.Generator) -> None:
            raise ValueError("no such distribution")

    layer = Broken()
    own = layer.weight
    with pytest.raises(ValueError, match="no such"):
        draw_weights(layer, 0)
    assert layer.weight is own


# The optimizer's state and the average, sharded


def _average_and_state(layout: Layout) -> tuple[dict, dict, dict, bool]:
    mesh = Mesh(layout.sizes)
    model = build(layout, mesh)
    shared = SharedWeights(model, mesh)
    config = TrainConfig(learning_rate=1e-2)
    optimizer = make_optimizer(model, config)
    average = Average(model, decay=0.9)
    for step in (1, 2):
        take_steps(model, shared, optimizer, layout, mesh, 1)
        average.update(model, step)
    state = {name: value.clone() for name, value in optimizer_tensors(optimizer, model).items()}
    # A twin goes on from what was saved.
    twin = build(layout, mesh)
    twin.load_state_dict(model.state_dict())
    other = make_optimizer(twin, config)
    empty = empty_optimizer_tensors(twin, state)
    fits = all(
        empty[name].shape == value.shape
        and getattr(empty[name], "placements", None) == getattr(value, "placements", None)
        for name, value in state.items()
    )
    for name, value in state.items():
        local(empty[name]).copy_(local(value))
    restore_optimizer(other, twin, empty)
    take_steps(model, shared, optimizer, layout, mesh, 1)
    take_steps(twin, SharedWeights(twin, mesh), other, layout, mesh, 1)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        fits = fits and torch.equal(local(a), local(b))
    averages = {name: whole(value) for name, value in average.tensors.items()}
    return averages, {name: whole(value) for name, value in state.items()}, weights(model), fits


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), SHARDED], ids=["replicated", "sharded"]
)
def test_average_and_optimizer_state_are_those_of_one_process(
    four: LocalRanks, settings: dict
) -> None:
    layout = Layout(sizes=BOTH, weights=settings)
    wanted = _average_and_state(layout.serial)
    assert wanted[3]
    for result in four.run(_average_and_state, layout):
        assert result[3]
        for ours, theirs in zip(result[:3], wanted[:3], strict=True):
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                assert ours[name].shape == value.shape
                assert difference(ours[name], value, 1.0) < 1e-12, name


def _one_step_of(learning_rate: float) -> tuple[int, list[int]]:
    mesh = Mesh(BOTH)
    model = build(Layout(sizes=BOTH, weights=SHARDED), mesh)
    groups = make_optimizer(model, TrainConfig(learning_rate=learning_rate)).param_groups
    return sum(len(group["params"]) for group in groups), [
        len({p.device_mesh for p in group["params"]}) for group in groups
    ]


def test_a_group_of_the_optimizer_lies_on_one_device_mesh(four: LocalRanks) -> None:
    count = len(list(build(Layout(), Mesh()).parameters()))
    for total, meshes in four.run(_one_step_of, 1e-3):
        assert total == count
        # Decayed or not, on all ranks, on the weights axis, or on weights x tensor: no vector of
        # a block is cut twice but the columns' biases.
        assert meshes == [1] * len(meshes)
        assert len(meshes) == 5
