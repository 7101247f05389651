"""BEAST's domain-tensor layout: channels and features that the ranks of a tensor group share."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graticule.assemble import Shapes, assemble, build_model, layout
from graticule.config import BeastConfig, Config, override
from graticule.memory.apply import Memory
from graticule.memory.plan import Plan, Segment
from graticule.mesh import Cut, Mesh, Planes
from graticule.model.draws import Draw
from graticule.parallel.data import local
from graticule.parallel.domain import Features, form_of
from graticule.parallel.exchange import Link
from graticule.parallel.launch import laid_out, mesh_of, ranks_of
from graticule.parallel.local import RankError
from graticule.recipes import recipe
from graticule.train.foresee import fake_ranks, foresee, heaviest_rank
from graticule.train.members import ensemble_of
from graticule.train.rehearsal import Rehearsal
from graticule.train.step import training_step
from graticule.verify.measure import Results, _made_up, _objective, measure
from peaks import measured_peaks
from pools import Pools

# Five states, two diagnostic channels, two forcings and a static: none divides by two and three.
SHAPES = Shapes(
    grid=(13, 24), num_prognostic=5, num_predicted=7, num_forcing=2, num_static=1, num_inputs=2,
    num_outputs=2, num_forcings=1,
)  # fmt: skip


def config_of(layout: str = "", settings: Sequence[str] = ()) -> Config:
    config = Config(
        model=BeastConfig(
            width=12, depth=2, inner_depth=1, heads=6, inner_heads=6, window=(4, 6),
            inner_window=(4, 3), norm_groups=6, nice_noise=4, nice_hidden=4,
        ),
        train=replace(recipe("beast-mini").train, leads=2, batch=2, clip_norm=0.0),
        bayes=replace(recipe("beast-mini").bayes, members=2, initial_sigma=0.5, floor=0.3),
    )  # fmt: skip
    config = override(config, list(settings))
    return laid_out(config, layout) if layout else config


# Channels


def planes_of(ranks: int, index: int = 0, **counts: int) -> Planes:
    given: dict[str, int] = {
        "prognostic": 84, "diagnostic": 0, "forcing": 0, "static": 3, "inputs": 2, "outputs": 2,
        "forcings": 0, **counts,
    }  # fmt: skip
    return Planes.of(ranks=ranks, index=index, **given)


def test_171_channels_over_two_ranks_are_86_and_85() -> None:
    planes = planes_of(2)
    assert [len(planes.given(rank)) for rank in (0, 1)] == [86, 85]
    assert [len(planes.said(rank)) for rank in (0, 1)] == [84, 84]
    # States of both times, then constants.
    assert planes.given(0).tolist() == [*range(42), *range(84, 126), 168, 169]
    assert planes.given(1).tolist() == [*range(42, 84), *range(126, 168), 170]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("diagnostic", "forcing", "static"), [(0, 0, 0), (2, 3, 1), (5, 1, 4)])
def test_each_channel_is_on_one_rank_with_its_next_state(
    ranks: int, diagnostic: int, forcing: int, static: int
) -> None:
    planes = planes_of(
        ranks, prognostic=7, diagnostic=diagnostic, forcing=forcing, static=static, forcings=2
    )
    every = range(ranks)
    for of, total in (
        (planes.known, 7), (planes.predicted, 7 + diagnostic),
        (planes.given, 14 + 2 * forcing + static), (planes.said, 2 * (7 + diagnostic)),
    ):  # fmt: skip
        together = np.concatenate([of(rank) for rank in every])
        assert sorted(together.tolist()) == list(range(total))
    for rank in every:
        states = [channel for channel in planes.given(rank).tolist() if channel < 14]
        assert {channel % 7 for channel in states} == set(planes.known(rank).tolist())
        assert planes.predicted(rank)[: len(planes.known(rank))].tolist() == [*planes.known(rank)]
    for cut in (planes.prognostic, planes.diagnostic, planes.forcing, planes.static):
        lengths = [cut.length(rank) for rank in every]
        assert max(lengths) - min(lengths) <= 1


def test_spread_channels_add_up_to_all() -> None:
    whole = torch.arange(14.0).view(2, 7)
    parts = [planes_of(3, index, prognostic=5, diagnostic=2) for index in range(3)]
    found = sum(p.spread(whole[:, p.predicted(p.index)]) for p in parts)
    assert torch.equal(torch.as_tensor(found), whole)
    known = sum(p.spread(whole[0, p.known(p.index)], known=True) for p in parts)
    assert torch.equal(torch.as_tensor(known), whole[0, :5])


def test_a_rank_without_a_state_is_refused() -> None:
    message = (
        r"3 prognostic channels cannot be shared by mesh\.tensor=4 ranks.* take mesh\.tensor=3"
    )
    with pytest.raises(ValueError, match=message):
        planes_of(4, prognostic=3)


def test_a_mirrored_cut_has_its_lengths_in_the_opposite_order() -> None:
    assert Cut((0, 1, 3, 6)).mirrored == Cut((0, 3, 5, 6))


# Features


HELD = {
    "even": [[0, 1], [2, 3]],
    "uneven": [[0, 3, 6], [1, 2, 4, 5]],
    "one has none": [[], [0, 1, 2]],
}


def _there_and_back(held: list[list[int]], tokens: int) -> dict[str, Any]:
    link = Link(dist.group.WORLD)
    features = Features(link, [np.array(each, dtype=np.int64) for each in held])
    total, ours = sum(map(len, held)), held[link.rank]
    whole = torch.randn(
        3, tokens, total, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    part = torch.randn(
        3, tokens, total, generator=torch.Generator().manual_seed(2 + link.rank),
        dtype=torch.float64,
    )  # fmt: skip
    gathered, scattered = features.gather(whole[..., ours]), features.scatter_sum(part)
    summed = part.clone()
    dist.all_reduce(summed)
    sides = torch.stack([(gathered * part).sum(), (whole[..., ours] * scattered).sum()])
    dist.all_reduce(sides)
    return {
        "whole": torch.equal(gathered, whole),
        "sum": torch.equal(scattered, summed[..., ours]),
        "adjoint": abs(float(sides[0] - sides[1])) / (float(sides.abs().max()) + 1),
        "sent": link.sent["tensor"],
        "bytes": 2 * 8 * 3 * tokens * features.slots,
    }


@pytest.mark.parametrize("tokens", [5, 0])
@pytest.mark.parametrize("kind", HELD)
def test_a_gather_and_a_sum_of_features_are_adjoint(pools: Pools, kind: str, tokens: int) -> None:
    for found in pools[2].run(_there_and_back, HELD[kind], tokens):
        assert found["whole"]
        assert found["sum"]
        assert found["adjoint"] < 1e-14
        assert found["sent"] == found["bytes"]  # one part each way, as long as the longest


def test_the_form_that_sends_less_is_taken_and_of_two_the_one_that_gathers_nothing_twice() -> None:
    assert [form_of(4, 12), form_of(4, 4), form_of(8, 4)] == ["column", "row", "row"]


def _held(layout: str, settings: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    config = config_of(layout, settings)
    running = assemble(config, SHAPES, Mesh(mesh_of(config.mesh, ranks_of(config))))
    return {name: tuple(local(p).shape) for name, p in running.model.named_parameters()}


def test_each_rank_has_its_share_of_every_weight(pools: Pools) -> None:
    model = build_model(config_of(), SHAPES, device="meta")
    whole = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for held in pools[2].run(_held, "tensor=2"):
        assert held.keys() == whole.keys()
        for name, shape in held.items():
            if "nice.first" in name or "recover.linear.bias" in name:
                assert shape == whole[name], name
            else:
                assert 2 * np.prod(shape) == np.prod(whole[name]), name
        assert held["first.blocks.0.attention.q.weight"] == (6, 12)
        assert held["first.blocks.0.attention.proj.weight"] == (12, 6)
        assert held["first.blocks.0.mlp.fc1.weight"] == (12, 6)  # as wide as it is: a row
        assert held["first.blocks.0.nice.second.weight"] == (2, 3, 6, 4)
        assert held["embed.linear.weight"] == (6, 52)
        assert held["down.weight"] == (24, 6, 2, 2)
        assert held["up.weight"] == (24, 6, 2, 2)
        assert held["recover.linear.weight"] == (56, 6)
    for held in pools[2].run(_held, "tensor=2", ["model.mlp_ratio=2"]):
        assert held["first.blocks.0.mlp.fc1.weight"] == (12, 12)  # wider: a column
        assert held["first.blocks.0.mlp.fc2.weight"] == (12, 12)


# The numbers


def _measured(layout: str, settings: Sequence[str] = (), rows: int = 13) -> Any:
    shapes = replace(SHAPES, grid=(rows, 24))
    return measure(config_of(layout, settings), shapes, torch.float64, 2, 2)


@cache
def serial(settings: tuple[str, ...] = ()) -> Results:
    return Results.joined([_measured("", settings)], SHAPES)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("tensor=2,window=2,stripe_dim=lon", ()),
        ("tensor=3", ("model.mlp_ratio=2", "bayes.likelihood=crps")),
        ("tensor=2,weights=sharded", ("bayes.likelihood=gaussian", "model.nice_gate=false")),
        pytest.param("tensor=3,weights=sharded", (), marks=pytest.mark.slow),
        pytest.param("tensor=2,window=2,weights=sharded", (), marks=pytest.mark.slow),
        pytest.param("tensor=2,member=2", ("bayes.likelihood=crps",), marks=pytest.mark.slow),
        pytest.param("tensor=2,data=2", ("train.area_weighted=true",), marks=pytest.mark.slow),
        pytest.param("tensor=2,sequence=2", ("model.heads=4", "model.inner_heads=4"),
                     marks=pytest.mark.slow),
        pytest.param("tensor=2,window=2", ("model.nice_noise=0",), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_mesh_gives_the_numbers_of_one_process(
    pools: Pools, layout: str, settings: tuple[str, ...]
) -> None:
    parts = pools[ranks_of(config_of(layout))].run(_measured, layout, settings)
    worst = Results.joined(parts, SHAPES).differences(serial(settings))
    assert max(worst.values()) < 1e-10, worst


def test_ranks_of_an_empty_stripe_share_nothing_and_take_part(pools: Pools) -> None:
    """Four rows are one of the inner stage's, which one of two stripes has."""
    rows, settings = 4, ("model.window=2,6", "model.inner_window=1,3", "bayes.likelihood=gaussian")
    shapes = replace(SHAPES, grid=(rows, 24))
    one = Results.joined([_measured("", settings, rows)], shapes)
    parts = pools[4].run(_measured, "tensor=2,window=2", settings, rows)
    assert sorted(part.rows.stop - part.rows.start for part in parts) == [0, 0, 4, 4]
    worst = Results.joined(parts, shapes).differences(one)
    assert max(worst.values()) < 1e-10, worst


def _forecasts(layout: str, narrow: bool) -> list[tuple[np.ndarray, slice, Tensor]]:
    """Of a member in 16 or 32 bits: which output channels and rows, and what they are."""
    config = config_of(layout, ["train.precision=bf16"] if narrow else [])
    running = assemble(config, SHAPES, Mesh(mesh_of(config.mesh, ranks_of(config))))
    planes, rows = running.planes, running.stripes.rows
    x = torch.randn(1, SHAPES.in_channels, *SHAPES.grid, generator=torch.Generator().manual_seed(1))
    x = x[:, planes.given(planes.index)][..., rows, :].contiguous()
    with torch.no_grad():
        out = running.model(x, draw=Draw(step=1, member=0, items=(0,)), added=False)
    return [(planes.said(planes.index), rows, out)]


@pytest.mark.parametrize("narrow", [False, True])
def test_in_fewer_bits_a_member_is_the_same_to_rounding(pools: Pools, narrow: bool) -> None:
    ((_, _, whole),) = _forecasts("", narrow)
    bound = 0.03 if narrow else 1e-5
    for rank in pools[2].run(_forecasts, "tensor=2", narrow):
        for channels, rows, out in rank:
            wanted = whole[:, channels][..., rows, :]
            assert (out - wanted).abs().max() < bound * whole.abs().max()


# Memory


def _stepped(layout: str, plans: list[Plan | None]) -> list[dict[str, Tensor]]:
    """On a rank: the gradients of a step under each plan, from the same start."""
    config, found = config_of(layout), []
    mesh = Mesh(mesh_of(config.mesh, ranks_of(config)))
    for plan in plans:
        running = assemble(config, SHAPES, mesh, dtype=torch.float64)
        aim = _objective(config, SHAPES, running, torch.float64)
        batch = _made_up(config, SHAPES, slice(0, 2), running, torch.float64, 0)
        training_step(
            running.model, aim, [batch], step=1, samples=2, learning_rate=0.0,
            optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0),
            shared=running.shared, memory=Memory(plan),
            ensemble=ensemble_of(config, mesh, running.model, aim, samples=1),
        )  # fmt: skip
        named = dict(running.model.named_parameters())
        found.append(
            {name: local(p.grad).clone() for name, p in named.items() if p.grad is not None}
        )
        assert found[-1].keys() == named.keys()
    return found


def test_what_is_computed_again_has_the_same_gradients(pools: Pools) -> None:
    half = Plan(((Segment(0, 4, "recompute"), Segment(4, NUM_UNITS, "keep")),) * 2)
    plans = [None, whole_plan("recompute", 2, NUM_UNITS), half]
    for kept, *others in pools[2].run(_stepped, "tensor=2", plans):
        for other in others:
            for name, gradient in kept.items():
                assert torch.equal(other[name], gradient), name


def whole_plan(action: Any, leads: int, num_units: int) -> Plan:
    return Plan((tuple(Segment(n, n + 1, action) for n in range(num_units)),) * leads)


NUM_UNITS = 9


def _peaks(config: Config, ranks: int, plans: list[Plan]) -> list[int]:
    """On a rank: the peak of a step of each plan."""
    torch.manual_seed(0)
    running = assemble(config, SHAPES, Mesh(mesh_of(config.mesh, ranks)))
    job = Rehearsal(config, running, "cpu", "stored", torch.int16)
    job.step(config.train.leads, Memory())()
    return measured_peaks(job, plans)


@pytest.mark.parametrize(
    ("layout", "ranks", "rank"),
    [
        ("tensor=2", 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("tensor=2", 2, 0),
                ("window=2,tensor=2,stripe_dim=lon", 4, 0),
                ("window=2,tensor=2,stripe_dim=lon", 4, 3),
            ]
        ),
    ],
)
def test_a_rank_of_a_tensor_group_is_foreseen_within_one_percent(
    pools: Pools, layout: str, ranks: int, rank: int
) -> None:
    settings = ["bayes.members=1", "bayes.likelihood=gaussian", "train.leads=1"]
    config = config_of(layout, settings)
    half = Plan(((Segment(0, 4, "recompute"), Segment(4, NUM_UNITS, "keep")),))
    (peak,) = pools[ranks].run(_peaks, config, ranks, [half])[rank]
    profile = foresee(config, SHAPES, ranks=ranks, rank=rank, on="cpu")
    assert len(profile.units) == NUM_UNITS
    assert profile.timeline(half).peak_bytes == pytest.approx(peak, rel=0.01)


def test_the_heaviest_rank_of_a_tensor_group_has_most_channels() -> None:
    config = config_of("tensor=2")
    given = [len(SHAPES.planes(2, 0).given(rank)) for rank in (0, 1)]
    assert heaviest_rank(config, SHAPES, 2) == int(np.argmax(given)) == 1
    both = laid_out(config_of(), "window=2,tensor=2,stripe_dim=lon")
    assert heaviest_rank(both, SHAPES, 4) % 2 == 1


# What is refused, and what is told


@pytest.mark.parametrize("dim", ["lat", "lon"])
def test_stripes_across_windows_that_span_the_globe_are_told(
    dim: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(f"window=2,stripe_dim={dim}", ["model.window=7,6", "model.inner_window=4,3"])
    layout._say_once.cache_clear()
    with fake_ranks(0, 2), caplog.at_level(logging.WARNING, "graticule"):
        for _ in range(2):
            assemble(config, SHAPES, Mesh(mesh_of(config.mesh, 2)))
    if dim == "lon":
        assert caplog.messages == []
        return
    outer, inner = caplog.messages
    assert "window of 7 x 6 tokens spans all of lat, which mesh.stripe_dim=lat cuts into" in outer
    assert "In lon there are 2 windows side by side: mesh.stripe_dim=lon cuts few" in outer
    assert "window of 4 x 3 tokens" in inner


def _refused(settings: list[str], layout: str) -> None:
    config = laid_out(override(config_of(), settings), layout)
    assemble(config, SHAPES, Mesh(mesh_of(config.mesh, ranks_of(config))))


@pytest.mark.parametrize(
    ("settings", "layout", "message"),
    [
        (["model.heads=3", "model.width=12"], "tensor=2",
         r"model\.heads: 3 heads cannot be shared evenly by mesh\.tensor=2 ranks.* take"
         r" mesh\.tensor of 1, 3, or model\.heads of a multiple of 2 such as 4"),
        (["model.norm_groups=3"], "tensor=2",
         r"model\.norm_groups: 3 groups of a norm cannot .* mesh\.tensor of 1, 3, or"),
        (["model.width=9", "model.heads=3", "model.norm_groups=3"], "tensor=2",
         r"model\.width: 9 features cannot .* mesh\.tensor of 1, 3, 9, or model\.width of a"
         r" multiple of 2 such as 10"),
    ],
)  # fmt: skip
def test_what_ranks_cannot_share_evenly_is_refused(
    pools: Pools, settings: list[str], layout: str, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        pools[2].run(_refused, settings, layout)
