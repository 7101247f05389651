"""Forecasts of an ensemble: what a member depends on, who computes it, what a kill leaves of it."""

import json
import multiprocessing
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from graticule.config import Config
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.forecast.clock import Timing, told
from graticule.forecast.log import read_log
from graticule.forecast.predict import Predictor
from graticule.forecast.reader import open_forecast
from graticule.forecast.restart import FOLDER, kept
from graticule.forecast.rollout import member_turns
from graticule.forecast.schedule import Places, shared_out, shares, turns
from graticule.mesh import Cut, Stripes
from graticule.model.bayes import Posterior
from graticule.model.draws import Draw
from graticule.parallel.local import LocalRanks, RankError
from graticule.tasks import evaluate_forecast
from member_case import CONFIG, EVERY, LEADS, STARTS, Killed, Points, beast, fields, on_ranks, run
from small_store import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = write_store(tmp_path_factory.mktemp("data") / "store", land=True, static=("depth",),
                        diagnostic=("flux",))  # fmt: skip
    compute(store, SampleSource(store, CONFIG).times("train")).save(store)
    return store


@pytest.fixture(scope="module")
def alone(store: Store, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Three members, never stopped, by one process."""
    path = tmp_path_factory.mktemp("alone") / "f.nc"
    run(str(store.path), path)
    return fields(path)


def spread(values: np.ndarray) -> float:
    """Least over initial times and leads of the greatest deviation over members anywhere."""
    return float(np.nan_to_num(values).std(axis=1).max((-1, -2, -3)).min())


class Persists(nn.Module):
    """Nothing is drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 2:4]


# What a member depends on


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_the_first_two_of_four_members_are_those_of_two(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    for members in (2, 4):
        run(str(store.path), tmp_path / f"{members}.{suffix}", members=members)
    two, four = (fields(tmp_path / f"{members}.{suffix}") for members in (2, 4))
    np.testing.assert_array_equal(two, four[:, :2])
    for first in range(4):
        for second in range(first):
            assert spread(four[:, [second, first]]) > 0.1


def test_a_member_does_not_depend_on_what_else_is_forecast(
    store: Store, alone: np.ndarray, tmp_path: Path
) -> None:
    for number, given in enumerate(
        [{"batch": 1}, {"batch": 3}, {"starts": [2, 3], "leads": 2, "members": 2}]
    ):
        run(str(store.path), tmp_path / f"{number}.nc", **given)
    for number in (0, 1):
        np.testing.assert_array_equal(fields(tmp_path / f"{number}.nc"), alone)
    np.testing.assert_array_equal(fields(tmp_path / "2.nc"), alone[1:, :2, :2])


def test_of_beast_too_a_member_is_the_same_in_a_larger_ensemble(
    store: Store, tmp_path: Path
) -> None:
    source = SampleSource(store, CONFIG)
    given: dict[str, Any] = {"starts": [1, 2], "leads": 2}
    for name, more in (("2", {"members": 2}), ("3", {}), ("1", {"batch": 1, "members": 1})):
        run(str(store.path), tmp_path / f"{name}.nc", beast(source), **given, **more)
    two, three, one = (fields(tmp_path / f"{name}.nc") for name in "231")
    np.testing.assert_array_equal(two, three[:, :2])
    # Products of another number of rows are added in another order.
    np.testing.assert_allclose(one, two[:, :1], rtol=1e-5, atol=1e-5)
    assert spread(three) > 0.1


def test_weights_are_one_draw_over_all_leads_and_noise_is_a_new_one(
    store: Store, tmp_path: Path
) -> None:
    model = Points()
    run(str(store.path), tmp_path / "f.nc", model, members=2)
    expected = [
        Draw(step=0, member=member, items=items, lead=lead)
        for member in (0, 1)
        for items in ((1, 2), (3,))
        for lead in range(1, LEADS + 1)
    ]
    assert model.heard == expected


def test_a_members_weights_are_drawn_once_and_let_go(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, int]] = []

    noise = Posterior.noise

    def counted(self: Posterior, leaf: str, words: tuple[int, int], *rest: Any) -> Tensor:
        drawn.append(words)
        return noise(self, leaf, words, *rest)

    monkeypatch.setattr(Posterior, "noise", counted)
    model = Points()
    run(str(store.path), tmp_path / "f.nc", model, members=2)
    assert drawn == [(0, 0)] * 2 + [(0, 1)] * 2  # weight and bias
    assert model.weights.sample.kept is None
    # What was kept is what is drawn anew.
    monkeypatch.setattr(Predictor, "keeping", lambda self: nullcontext())
    run(str(store.path), tmp_path / "g.nc", model, members=2)
    assert len(drawn) == 4 + 2 * 2 * 2 * LEADS
    np.testing.assert_array_equal(fields(tmp_path / "g.nc"), fields(tmp_path / "f.nc"))


@pytest.mark.parametrize("kind", ["weights", "noise"])
def test_members_differ_by_their_weights_alone_or_their_noise_alone(
    store: Store, tmp_path: Path, kind: str
) -> None:
    source = SampleSource(store, CONFIG)
    model = beast(source, weights=kind == "weights", num_noise=8 if kind == "noise" else 0)
    run(str(store.path), tmp_path / "f.nc", model, starts=[1], leads=2, members=2)
    assert spread(fields(tmp_path / "f.nc")) > 0.01
    # Of one input, at two leads: the weights are the same, the noise is not.
    x = torch.randn(1, 5, 8, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        first, second = (
            model(x, draw=Draw(step=0, member=1, items=(1,), lead=lead)) for lead in (1, 2)
        )
    assert torch.equal(first, second) == (kind == "weights")


class Ramp(nn.Module):
    """Nothing is drawn, and a longitude is told from another."""

    def __init__(self, turn: int = 0) -> None:
        super().__init__()
        self.ramp = torch.linspace(0.5, 1.5, 16).roll(turn)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 2:4] * self.ramp


def test_members_of_a_run_on_turned_samples_are_turned_as_in_training(
    store: Store, tmp_path: Path
) -> None:
    starts = (1, 3)
    run(str(store.path), tmp_path / "f.nc", Ramp(), starts=starts, leads=2, members=3, roll_seed=7)
    found = fields(tmp_path / "f.nc")
    assert spread(found) > 0.01
    for number, member in ((0, 0), (1, 2)):
        (by,) = member_turns(7, [starts[number]], member, 16)
        path = tmp_path / f"{number}.nc"
        given = {"starts": starts[number : number + 1], "leads": 2, "members": None}
        run(str(store.path), path, Ramp(-by), **given)
        with xr.open_dataset(path) as alone:
            for channel, name in enumerate(("temperature", "salinity")):
                assert np.array_equal(
                    alone[name].values[0], found[number, member, :, channel], equal_nan=True
                )


def test_what_knows_no_longitude_is_the_same_turned(store: Store, tmp_path: Path) -> None:
    run(str(store.path), tmp_path / "still.nc", starts=[1], leads=1, members=2)
    run(str(store.path), tmp_path / "turned.nc", starts=[1], leads=1, members=2, roll_seed=7)
    still, turned = fields(tmp_path / "still.nc"), fields(tmp_path / "turned.nc")
    assert np.allclose(still, turned, rtol=1e-5, atol=1e-5, equal_nan=True)


# What is refused


def test_members_that_are_turned_need_whole_circles(store: Store, tmp_path: Path) -> None:
    stripes = Stripes(dim="lon", index=0, cuts={}, grid=Cut((0, 8, 16)))
    with pytest.raises(ValueError, match=r"a rank 8 of 16 columns: set mesh.stripe_dim=lat"):
        run(str(store.path), tmp_path / "f.zarr", stripes=stripes, roll_seed=7)


def test_members_of_a_model_that_draws_nothing_are_refused_with_the_reason(
    store: Store, tmp_path: Path
) -> None:
    for members in (4, 1):
        with pytest.raises(ValueError, match=r"nothing tells them apart, since its weights are"):
            run(str(store.path), tmp_path / "f.zarr", Persists(), members=members)
    with pytest.raises(ValueError, match=r"say how many \(members=1 or more\)"):
        run(str(store.path), tmp_path / "f.zarr", members=None)
    with pytest.raises(ValueError, match=r"members=0 of a forecast must be at least 1"):
        run(str(store.path), tmp_path / "f.zarr", members=0)
    source = SampleSource(store, CONFIG)
    with pytest.raises(ValueError, match="nothing tells them apart"):
        run(str(store.path), tmp_path / "f.zarr", beast(source, weights=False, num_noise=0))
    assert not (tmp_path / "f.zarr").exists()


class Diverges(Points):
    """From a lead of one initial time and member on."""

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        out = super().forward(x, draw)
        assert draw is not None
        if (draw.member, draw.lead) == (1, 2) and 3 in draw.items:
            out[draw.items.index(3)] = torch.nan
        return out


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_member_that_diverges_is_named(
    store: Store, tmp_path: Path, three: LocalRanks, ranks: int
) -> None:
    out = tmp_path / "f.zarr"
    message = "member 1 of the forecast from 2003-02-24 00:00:00 is not finite at lead 2: the model"
    if ranks == 1:
        with pytest.raises(ValueError, match=message):
            run(str(store.path), out, Diverges())
    else:
        told = three.run(on_ranks, {"member": 3}, (), str(store.path), out, Diverges())
        assert len(set(told)) == 1
        assert message in told[0]
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(out)


# Who computes what


def test_places_are_shared_by_initial_time_and_by_member() -> None:
    places = Places(3, 4)
    assert len(places) == 12
    assert [(places.start(n), places.member(n)) for n in (0, 2, 3, 11)] == [
        (0, 0), (2, 0), (0, 1), (2, 3)
    ]  # fmt: skip
    own = places.of(slice(1, 3), slice(2, 4))
    assert own == [range(7, 9), range(10, 12)]
    assert (len(Places(3)), Places(3).member(2), Places(3).of(slice(0, 2), slice(0, 1))) == (
        3, None, [range(2)]
    )  # fmt: skip
    # Side by side are initial times of one member, whatever a batch could hold.
    (first, second) = turns([own], {}, 5, 8)
    assert first.batches == (((7, 8), 0),)
    assert second.batches == (((10, 11), 0),)


@pytest.mark.parametrize(
    ("ranks", "starts", "members", "expected"),
    [
        (1, 5, 4, (1, 1)),
        (4, 1, 32, (1, 4)),
        (4, 8, 1, (4, 1)),
        (4, 2, 2, (2, 2)),
        (4, 8, 8, (1, 4)),  # the fewest draws of weights
        (6, 3, 4, (3, 2)),
        (7, 1, 1, (7, 1)),
        (7, 2, 7, (1, 7)),
    ],
)
def test_ranks_that_are_left_over_are_shared_out_so_that_the_last_is_done_soonest(
    ranks: int, starts: int, members: int, expected: tuple[int, int]
) -> None:
    assert tuple(shared_out(ranks, starts, members).values()) == expected


def test_every_place_is_one_ranks() -> None:
    by_rank = shares(Places(5, 3), {"data": 2, "member": 2})
    assert by_rank == [
        [range(0, 2)],
        [range(5, 7), range(10, 12)],
        [range(2, 5)],
        [range(7, 10), range(12, 15)],
    ]


@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ({"member": 2}, ()),
        ({"member": 3}, ()),
        ({"data": 2}, ()),
        ({"data": 2, "member": 2}, ()),
        ({"member": 4}, ()),  # more than there are
        ({"member": 2, "window": 2}, (0, 3, 8)),
        ({"data": 2, "window": 2}, (0, 8, 8)),
    ],
    ids=str,
)
def test_on_several_ranks_each_member_is_what_it_is_on_one(
    store: Store, alone: np.ndarray, tmp_path: Path, request: pytest.FixtureRequest,
    sizes: dict[str, int], bounds: tuple[int, ...],
) -> None:  # fmt: skip
    names = {2: "two", 3: "three", 4: "four"}
    ranks = request.getfixturevalue(names[int(np.prod(list(sizes.values())))])
    out = tmp_path / "f.zarr"
    given = {"log_every": 2}
    assert set(ranks.run(on_ranks, sizes, bounds, str(store.path), out, None, given)) == {""}
    np.testing.assert_array_equal(fields(out), alone)
    lines = read_log(tmp_path / "f.log.jsonl")
    assert len(lines) == len(STARTS) * 3 * 2
    for line, (init, member, lead) in zip(lines, np.ndindex(len(STARTS), 3, 2), strict=True):
        assert (line["member"], line["lead"]) == (member, (2, 3)[lead])
        values = alone[init, member, line["lead"] - 1, 1]
        assert line["greatest"]["salinity"] == values.max()


def _beast_on_ranks(sizes: dict[str, int], store: str, out: Path) -> str:
    model = beast(SampleSource(Store(store), CONFIG))
    return on_ranks(sizes, (), store, out, model, {"starts": [1, 2], "leads": 2})


def test_of_beast_too_members_on_several_ranks_are_those_of_one(
    store: Store, tmp_path: Path, two: LocalRanks
) -> None:
    run(str(store.path), tmp_path / "one.zarr", beast(SampleSource(store, CONFIG)),
        starts=[1, 2], leads=2)  # fmt: skip
    told = two.run(_beast_on_ranks, {"member": 2}, str(store.path), tmp_path / "two.zarr")
    assert told == ["", ""]
    np.testing.assert_array_equal(fields(tmp_path / "two.zarr"), fields(tmp_path / "one.zarr"))


def _sharded(sizes: dict[str, int], store: str, out: Path) -> str:
    model = Points()
    fully_shard(model)
    return on_ranks(sizes, (), store, out, model, {"members": 2})


def test_sharded_weights_are_gathered_by_ranks_that_have_no_members_too(
    store: Store, alone: np.ndarray, tmp_path: Path, three: LocalRanks
) -> None:
    told = three.run(_sharded, {"member": 3}, str(store.path), tmp_path / "f.zarr")
    assert told == [""] * 3
    np.testing.assert_array_equal(fields(tmp_path / "f.zarr"), alone[:, :2])


def test_a_netcdf_file_has_one_writer_of_all_members(
    store: Store, alone: np.ndarray, tmp_path: Path, two: LocalRanks
) -> None:
    told = two.run(on_ranks, {"member": 2}, (), str(store.path), tmp_path / "f.nc")
    assert "only one process can write a netCDF file" in told[0]
    assert len(set(told)) == 1
    told = two.run(on_ranks, {"window": 2}, (0, 5, 8), str(store.path), tmp_path / "g.nc")
    assert told == ["", ""]
    np.testing.assert_array_equal(fields(tmp_path / "g.nc"), alone)


# After a kill


def killed(call: int, store: Store, out: Path, sizes: dict[str, int]) -> None:
    if not sizes:
        child = multiprocessing.get_context("fork").Process(
            target=run, args=(str(store.path), out, Killed(call)), kwargs={"restart_every": EVERY}
        )
        child.start()
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
    else:
        with LocalRanks(2, timeout_seconds=30) as ranks, pytest.raises(RankError):
            ranks.run(
                on_ranks, sizes, (), str(store.path), out, Killed(call), {"restart_every": EVERY}
            )
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(out)


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [({}, 2, {}), ({}, 12, {}), ({}, 9, {"member": 2}), ({"member": 2}, 6, {}),
     ({"data": 2}, 6, {"member": 2})],
    ids=str,
)  # fmt: skip
def test_a_killed_ensemble_goes_on_to_the_bits_of_one_that_never_stopped(
    store: Store, alone: np.ndarray, tmp_path: Path, two: LocalRanks,
    before: dict[str, int], call: int, after: dict[str, int],
) -> None:  # fmt: skip
    out = tmp_path / "f.zarr"
    killed(call, store, out, before)
    there = {place: record.lead for place, record in kept(out).items()}
    if not before:  # batches of 2 and 1 initial times, each member's 3 leads
        first, second = EVERY, LEADS
        assert (
            there
            == {
                2: {},
                9: {0: second, 1: second, 2: second, 3: first, 4: first},
                12: {0: second, 1: second, 2: second, 3: second, 4: second, 5: first},
            }[call]
        )
    model = Points()
    if after:
        given = {"resume": True}
        told = two.run(on_ranks, after, (), str(store.path), out, None, given)
        assert told == ["", ""]
    else:
        timing = run(str(store.path), out, model, resume=True)
        assert timing.steps == 3 * len(STARTS) * LEADS - sum(there.values())
        assert sum(len(draw.items) for draw in model.heard) == timing.steps
    np.testing.assert_array_equal(fields(out), alone)
    assert not (out / FOLDER).exists()


def test_members_that_are_complete_stay_as_they_are(
    store: Store, alone: np.ndarray, tmp_path: Path
) -> None:
    out = tmp_path / "f.zarr"
    killed(9, store, out, {})
    chunks = [p for p in (out / "salinity/c").rglob("*") if p.is_file() and p.parts[-4] == "0"]
    assert len(chunks) == len(STARTS) * LEADS  # member 0's
    before = {path: path.stat().st_mtime_ns for path in chunks}
    run(str(store.path), out, resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    timing = run(str(store.path), out, Killed(1), resume=True)
    assert (timing.steps, timing.forecasts_per_second) == (0, 0)
    np.testing.assert_array_equal(fields(out), alone)


def test_more_or_fewer_members_than_the_file_has_are_refused_with_what_to_do(
    store: Store, tmp_path: Path
) -> None:
    run(str(store.path), tmp_path / "f.zarr", starts=[1], leads=1)
    for members, least in ((4, 3), (2, 2)):
        with pytest.raises(
            ValueError,
            match=rf"is another forecast .*: 3 members there, {members} here\. Ask for what it was"
            rf" begun as, or name another path: its first {least} members will be the same there",
        ):
            run(str(store.path), tmp_path / "f.zarr", starts=[1], leads=1, members=members,
                resume=True)  # fmt: skip
    with pytest.raises(ValueError, match="3 members there, none here"):
        run(str(store.path), tmp_path / "f.zarr", Persists(), starts=[1], leads=1, members=None,
            resume=True)  # fmt: skip
    run(str(store.path), tmp_path / "g.zarr", Persists(), starts=[1], leads=1, members=None)
    with pytest.raises(ValueError, match="no members there, 3 here"):
        run(str(store.path), tmp_path / "g.zarr", starts=[1], leads=1, resume=True)


def test_a_lost_lead_of_a_member_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "f.zarr"
    killed(9, store, out, {})
    shutil.rmtree(out / "salinity/c/2/0/2")
    with pytest.raises(ValueError, match=r"salinity of init_time 2003-02-24 .*, member 0, lead 3"):
        run(str(store.path), out, resume=True)


# The file


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_the_file_has_a_dim_of_members_and_a_chunk_of_one(
    store: Store, alone: np.ndarray, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / f"f.{suffix}"
    run(str(store.path), out)
    engine = "zarr" if suffix == "zarr" else "netcdf4"
    with xr.open_dataset(out, engine=engine) as data:
        assert data["salinity"].dims == ("init_time", "member", "lead_time", "lat", "lon")
        assert data["valid_time"].dims == ("init_time", "lead_time")
        assert data["member"].values.tolist() == [0, 1, 2]
        assert data["member"].attrs["standard_name"] == "realization"
        np.testing.assert_array_equal(data["salinity"].values, alone[:, :, :, 1])
        if suffix == "nc":
            assert data["salinity"].encoding["chunksizes"] == (1, 1, 1, 8, 16)
    if suffix == "zarr":
        written: Any = zarr.open_group(out, mode="r")
        assert written["salinity"].chunks == (1, 1, 1, 8, 16)
    with open_forecast(out) as opened:
        mean = opened.read(1, 2)[:2]
        np.testing.assert_allclose(mean, alone[1, :, 2].mean(0), rtol=1e-6, atol=1e-6)


def test_a_lead_is_in_the_file_before_the_next_is_computed(store: Store, tmp_path: Path) -> None:
    out, seen = tmp_path / "f.zarr", list[int]()

    class Looks(Points):
        def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
            chunks = [p for p in (out / "salinity/c").rglob("*") if p.is_file()]
            seen.append(len(chunks))
            return super().forward(x, draw)

    run(str(store.path), out, Looks(), members=2)
    sizes = [n for _ in range(2) for n in (2, 1) for _ in range(LEADS)]
    assert seen == [n for n in np.cumsum([0, *sizes[:-1]])]


def test_one_member_is_an_ensemble_too(store: Store, alone: np.ndarray, tmp_path: Path) -> None:
    run(str(store.path), tmp_path / "f.nc", members=1)
    np.testing.assert_array_equal(fields(tmp_path / "f.nc"), alone[:, :1])


def test_its_scores_are_those_of_an_ensemble(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "f.nc"
    config = Config(data=CONFIG)
    attributes = {"config": json.dumps(config.to_dict())}
    run(str(store.path), out, attributes=attributes)
    scores = evaluate_forecast(out, store=str(store.path), settings=["evaluate.climatology=all"])
    assert scores.ensemble is not None
    assert scores.ensemble.num_members == 3
    assert np.isfinite(scores.ensemble.crps("fair")).all()
    assert (scores.ensemble.spread() > 0.1).any()


# How fast


def test_forecasts_and_samples_a_second_are_told(store: Store, tmp_path: Path) -> None:
    timing = run(str(store.path), tmp_path / "f.zarr", forward_flops=2e6)
    (text,) = (tmp_path / "f.timing.jsonl").read_text().splitlines()
    line = json.loads(text)
    steps = len(STARTS) * LEADS * 3
    assert (line["steps"], line["members"], line["leads_before"]) == (steps, 3, 0)
    assert line["samples_per_second"] == pytest.approx(steps / timing.seconds)
    assert line["forecasts_per_second"] == pytest.approx(steps / 3 / timing.seconds)
    assert line["flops_per_second"] == pytest.approx(2e6 * steps / timing.seconds)
    assert line["simulated_years"] == pytest.approx(steps / 365.25)
    made = Timing(
        simulated_years=2.0, steps=120, members=4, forward_flops=5e12,
        parts={"compute": 6.0, "write": 4.0}, cpu_parts={"compute": 6.0, "write": 4.0},
    )  # fmt: skip
    assert told(made.to_dict()).splitlines()[1] == (
        "3 forecast/s of 4 members, 12 sample/s (a forecast is an initial time that goes on by a"
        " model step); 60 TFLOP/s sustained, 100 TFLOP/s while computing"
    )
    assert line["joules"] is None, "nothing counts them on a CPU"
    counted = told(replace(made, joules=1500.0).to_dict()).splitlines()[1]
    assert counted.endswith("100 TFLOP/s while computing; 1.5 kJ")
