"""Faults of models spread over ranks, each through the whole assembled model.

`test_cases.HELD` names what holds each kind; here is what modules alone cannot show.
"""

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graticule.assemble import Shapes, assemble, build_model
from graticule.cli import main
from graticule.config import Config, DataConfig, MeshConfig, SwinConfig, TrainConfig
from graticule.data.loader import Order
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.mesh import SAMPLE, Mesh
from graticule.model.bayes import weights_of
from graticule.model.draws import Draw, drawing, noise
from graticule.parallel.box import box_of
from graticule.parallel.data import local
from graticule.parallel.exchange import Link
from graticule.parallel.launch import laid_out, mesh_of
from graticule.parallel.layouts import Topology
from graticule.parallel.local import LocalRanks
from graticule.parallel.routes import route_windows
from graticule.recipes import recipe
from graticule.train.run import Run
from graticule.train.task import Task
from graticule.verify import Results, measure
from pools import Pools
from small_store import write_store

CPU = torch.device("cpu")
MODEL: dict[str, Any] = {"patch": 2, "width": 8, "depth": 2, "heads": 4, "norm_groups": 2}


def shapes_for(grid: tuple[int, int]) -> Shapes:
    return Shapes(
        grid=grid, num_prognostic=2, num_predicted=2, num_forcing=1, num_static=0, num_inputs=1,
        num_outputs=1, num_forcings=1,
    )  # fmt: skip


def field(grid: tuple[int, int], channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, channels, *grid, generator=generator, dtype=torch.float64)


# A domain of one rank


def _alone(config: Config, routed: bool) -> list[Tensor]:
    """Output and gradients; the group of these processes has one."""
    model, shapes = config.model, shapes_for((24, 24))
    mesh = Mesh(mesh_of(config.mesh, dist.get_world_size()))
    running = assemble(config, shapes, mesh, dtype=torch.float64)
    assert model.heads == 4
    assert (running.stripes.rows, running.stripes.columns) == (slice(0, 24), slice(None))
    if routed:
        link = Link(dist.group.WORLD)
        route_windows(running.model, Topology(), running.stripes, link, link)
    out = running.model(field((24, 24)))
    out.backward(field((24, 24), 2, seed=1))
    running.shared.reduce()
    return [out.detach(), *(parameter.grad for parameter in running.model.parameters())]


@pytest.mark.parametrize("routed", [False, True])
def test_a_domain_of_one_rank_named_outright_gives_the_bits_of_one_process(
    routed: bool, pools: Pools
) -> None:
    ones = MeshConfig(data=1, member=1, window=1, sequence=1, tensor=1)
    config = Config(model=SwinConfig(window=(2, 2), **MODEL), mesh=ones)
    serial = build_model(config, shapes_for((24, 24)), dtype=torch.float64)
    out = serial(field((24, 24)))
    out.backward(field((24, 24), 2, seed=1))
    ((ours, *gradients),) = pools[1].run(_alone, config, routed)
    # Routed, tokens are added up in the order of their slots.
    tolerance = 1e-12 if routed else 0.0
    torch.testing.assert_close(ours, out.detach(), rtol=tolerance, atol=tolerance)
    for parameter, gradient in zip(serial.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=tolerance, atol=tolerance)


# A grid that nothing divides


@pytest.mark.parametrize(
    ("boundary", "sampling", "padded"),
    [("globe", 1, [24, 24]), ("paper", 1, [24, 24]), ("paper", 2, [32, 32])],
)
def test_17_x_24_points_over_three_ranks_come_back_as_17_x_24(
    boundary: Any, sampling: int, padded: list[int], pools: Pools, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shapes = shapes_for((17, 24))
    config = Config(
        data=DataConfig(grid=(17, 24), prognostic=("thetao", "so"), forcing=("u10",)),
        model=SwinConfig(window=4, boundary=boundary, sampling=sampling, **MODEL),
    )
    serial = Results.joined([measure(config, shapes, torch.float64, 1)], shapes)
    assert serial.output.shape == (1, 2, 1, 2, 17, 24)
    for layout in ("window=3", "window=3,stripe_dim=lon"):
        parts = pools[3].run(measure, laid_out(config, layout), shapes, torch.float64, 1)
        results = Results.joined(parts, shapes)
        assert results.output.shape == (1, 2, 1, 2, 17, 24)
        found = results.differences(serial)
        assert max(found.values()) <= 1e-12, found
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(config.to_dict()))
    assert main(["info", str(recipe), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["grid"], told["padded_shape"]) == ([17, 24], padded)
    assert main(["info", str(recipe)]) == 0
    assert f"grid 17 x 24, padded {padded[0]} x {padded[1]}," in capsys.readouterr().out


# Fields in another order of memory


def _in_every_memory(config: Config) -> dict[str, float]:
    """The largest difference from what contiguous fields give, of outputs and of gradients."""
    mesh = Mesh(mesh_of(config.mesh, 2))
    running = assemble(config, shapes_for((9, 16)), mesh, dtype=torch.float64)
    rows = running.stripes.rows

    def strided(x: Tensor, memory: str) -> Tensor:
        if memory == "channels last":
            return x.contiguous(memory_format=torch.channels_last)
        if memory == "transposed":
            return x.transpose(-2, -1).contiguous().transpose(-2, -1)
        return torch.stack([x, x + 1], -1)[..., 0] if memory == "every other" else x.contiguous()

    expected: list[Tensor] = []
    found = {}
    for memory in ("contiguous", "channels last", "transposed", "every other"):
        x = strided(field((9, 16))[..., rows, :], memory).requires_grad_()
        grad = strided(field((9, 16), 2, seed=1)[..., rows, :], memory)
        assert x.is_contiguous() == grad.is_contiguous() == (memory == "contiguous")
        running.model.zero_grad()
        out = running.model(x)
        out.backward(grad)
        assert x.grad is not None
        got = [out.detach(), x.grad, *(p.grad for p in running.model.parameters())]
        expected = expected or [value.clone() for value in got]
        scale = max(float(value.abs().max()) for value in expected)
        found[memory] = max(
            float((a - b).abs().max()) / scale for a, b in zip(got, expected, strict=True)
        )
    return found


@pytest.mark.parametrize("layout", ["window=2", "sequence=2", "tensor=2"])
def test_fields_in_any_order_of_memory_travel_as_contiguous_ones(
    layout: str, two: LocalRanks
) -> None:
    config = laid_out(Config(model=SwinConfig(window=(2, 2), sampling=2, **MODEL)), layout)
    for found in two.run(_in_every_memory, config):
        assert len(found) == 4
        assert max(found.values()) <= 1e-12, found


# Who has which sample, and what is drawn at random


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """No land, so that samples may be turned."""
    store = write_store(tmp_path_factory.mktemp("data") / "store")
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def config_of(store: Store, layout: str = "", **settings: Any) -> Config:
    config = Config(
        data=DataConfig(store=str(store.path)),
        model=SwinConfig(window=(2, 4), sampling=1, **MODEL),
        train=TrainConfig(**{"batch": 2, "steps": 10, "warmup_steps": 0, **settings}),
    )
    return laid_out(config, layout) if layout else config


Taken = list[tuple[int, int, np.ndarray]]


def _taken(config: Config) -> tuple[int, range, Taken]:
    """(group of samples, rows, (key, start, inputs) of each sample) of a rank."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh(mesh_of(config.mesh, size))
    task = Task.of(config, CPU, mesh)
    loader = task.loader(Order(task.train_starts, seed=0), range(8))
    samples: Taken = []
    with closing(iter(loader)) as batches:
        for batch in batches:
            inputs = task.objective.inputs(batch.inputs).numpy()
            samples += zip(batch.keys, batch.starts, inputs.copy(), strict=True)
            batch.lead()
    return mesh.index("data"), task.source.rows, samples


def test_ranks_of_a_sample_draw_the_same_turn_and_groups_take_other_samples(
    store: Store, four: LocalRanks
) -> None:
    plain = {start: inputs for _, start, inputs in _taken(config_of(store))[2]}
    answers = four.run(_taken, config_of(store, "data=2,window=2", roll_longitude=True))
    numbers: dict[int, list[list[tuple[int, int]]]] = {0: [], 1: []}
    turns: dict[int, list[list[int]]] = {0: [], 1: []}
    for group, rows, samples in answers:
        numbers[group].append([(key, start) for key, start, _ in samples])
        found = []
        for _, start, inputs in samples:
            still = plain[start][..., rows.start : rows.stop, :]
            fits = [k for k in range(16) if np.array_equal(np.roll(still, k, -1), inputs)]
            assert len(fits) == 1
            found += fits
        turns[group].append(found)
    for group in (0, 1):
        assert numbers[group][0] == numbers[group][1]
        assert turns[group][0] == turns[group][1]
    first, second = (dict(numbers[group][0]) for group in (0, 1))
    assert sorted([*first, *second]) == list(range(8))
    assert not set(first.values()) & set(second.values())
    assert turns[0][0] != turns[1][0]
    assert len({*turns[0][0], *turns[1][0]}) > 3


@dataclass
class Wired:
    """What a rank is given and draws. noise: by (item, member). weights: by member and name, the
    part that is here and where that is."""

    group: int
    keys: list[int]
    noise: dict[tuple[int, int], Tensor]
    weights: dict[tuple[int, str], tuple[tuple[slice, ...], Tensor]]


def _wired(config: Config) -> Wired:
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh(mesh_of(config.mesh, size))
    task = Task.of(config, CPU, mesh)
    assert task.ensemble is not None
    found = Wired(mesh.index("data"), [], {}, {})
    with closing(iter(task.loader(Order(task.train_starts, seed=0), range(4)))) as batches:
        for batch in batches:
            found.keys += batch.keys
            batch.lead()
    nice = task.model.get_submodule("first.blocks.0.nice")
    for member in task.ensemble.own:
        draw = Draw(step=3, member=member, items=tuple(found.keys))
        drawn = noise(nice.key, draw, 8, "cpu")  # type: ignore[arg-type]
        found.noise |= {(key, member): row for key, row in zip(found.keys, drawn, strict=True)}
        with drawing(draw), torch.no_grad():
            for weight in weights_of(task.model):
                leaf = weight.name.rpartition(".")[2]
                box = weight.posterior.boxes.get(leaf, (slice(None),) * weight.mean.dim())
                value = weight.layer.value(leaf, torch.float32)
                found.weights[member, weight.name] = box, value
    return found


@pytest.mark.parametrize("layout", ["data=2,member=2", "window=2,tensor=2"])
def test_ranks_of_a_member_draw_alike_and_members_and_items_differ(
    layout: str, tmp_path: Path, four: LocalRanks
) -> None:
    store = write_store(tmp_path / "store")
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    mini = recipe("beast-mini")
    config = replace(
        config_of(store), data=DataConfig(store=str(store.path), input_offsets=(-1, 0)),
        model=replace(mini.model, window=(4, 4), inner_window=(2, 4), nice_noise=8),
        bayes=replace(mini.bayes, members=2),
    )  # fmt: skip
    alone = _wired(config)
    ranks = four.run(_wired, laid_out(config, layout))
    # Samples: one list for all ranks of a group, which members share; groups have others.
    lists = {group: {tuple(r.keys) for r in ranks if r.group == group} for group in (0, 1)}
    if "data" in layout:
        assert [len(lists[group]) for group in (0, 1)] == [1, 1]
        (first,), (second,) = lists[0], lists[1]
        assert sorted([*first, *second]) == list(range(4))
    else:
        assert lists[0] == {tuple(range(4))}
    # Each draw is that of one process, whoever makes it, and is made by all of its ranks.
    seen = []
    for rank in ranks:
        for key, row in rank.noise.items():
            assert torch.equal(row, alone.noise[key])
            seen.append(key)
        for name, (box, value) in rank.weights.items():
            assert torch.equal(value, alone.weights[name][1][box]), name
    times = {seen.count(key) for key in alone.noise}
    assert times == ({1} if "data" in layout else {4})
    # No two of them are alike.
    sums = {float(row.double().sum()) for row in alone.noise.values()}
    assert len(sums) == len(alone.noise) == 8
    for (member, name), (_, value) in alone.weights.items():
        if member:
            assert not (value == alone.weights[0, name][1]).any(), name


def test_a_model_draws_nothing_while_it_computes() -> None:
    config = Config(model=SwinConfig(window=(2, 2), sampling=2, **MODEL))
    model = build_model(config, shapes_for((24, 24)), dtype=torch.float64)
    assert not [m for m in model.modules() if "drop" in type(m).__name__.lower()]
    before = torch.get_rng_state()
    assert torch.equal(model.train()(field((24, 24))), model.eval()(field((24, 24))))
    assert torch.equal(torch.get_rng_state(), before)


# Ranks do not drift apart


def _trained(config: Config) -> dict[str, tuple[Any, np.ndarray, np.ndarray]]:
    """After ten steps: (where in the whole, the first values, the last ones) of parameters."""
    mesh = Mesh(mesh_of(config.mesh, dist.get_world_size()))
    assert all(mesh.sizes[axis] == 2 for axis in SAMPLE)
    run = Run(Task.of(config, CPU, mesh), None)
    parameters = dict(run.task.model.named_parameters())
    first = {name: local(p).detach().numpy().copy() for name, p in parameters.items()}
    run.rehearse(10)
    found = {}
    for name, parameter in parameters.items():
        box = box_of(parameter)
        place = None if box is None else [(s.start, s.stop) for s in box.slices]
        found[name] = place, first[name], local(parameter).detach().numpy()
    return found


def test_after_ten_steps_on_stripes_sequences_and_tensors_no_rank_has_drifted(
    store: Store, pools: Pools
) -> None:
    config = config_of(store, "window=2,sequence=2,tensor=2", learning_rate=1e-2)
    ranks = pools[8].run(_trained, config)
    alike = 0
    for name, (place, before, after) in ranks[0].items():
        assert not np.array_equal(before, after), name
        same = [rank[name][2] for rank in ranks if rank[name][0] == place]
        assert len(same) in (4, 8), "on all, or on all that hold this half of the features"
        alike += len(same) == 8
        assert max(float(np.abs(other - after).max()) for other in same) == 0.0, name
        for other in ranks:
            place, _, mine = other[name]
            partner = next(r[name][2] for r in ranks if r[name][0] == place)
            np.testing.assert_array_equal(mine, partner, err_msg=name)
    norms = [name for name in ranks[0] if "norm" in name]
    assert len(norms) >= 8
    assert all(ranks[0][name][0] == ranks[7][name][0] for name in norms)
    assert alike > len(norms)
