"""Forecasts of several processes: the file of one, whatever the shares, or one error."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from graticule.config import DataConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.mesh import Cut, Mesh, Stripes
from graticule.parallel.local import LocalRanks, RankError
from graticule.parallel.talk import everyone
from graticule.parallel.together import Together
from small_store import write_store

CONFIG = DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2))
TEN = tuple(range(2, 12))
LEADS = 2


class Mix(nn.Module):
    """Acts on each grid point alone, so it is right on any stripe."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.9], [0.1]]))

    def forward(self, x: Tensor) -> Tensor:
        """Channels: two states of two, forcing, static -> two outputs of two and a diagnostic."""
        kept, mixed = self.weight
        before, state, given, fixed = x[:, :2], x[:, 2:4], x[:, 4:5], x[:, 5:6]
        first = kept * state + mixed * given
        second = kept * first + mixed * (fixed - before)
        return torch.cat([first, given - state[:, :1], second, given * fixed], dim=1)


class Moves(nn.Module):
    """One state without history."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.9 * x[:, :1] + 0.1 * x[:, 1:2]


class Diverges(Mix):
    """On one rank, from its `call`-th call on."""

    def __init__(self, rank: int, call: int) -> None:
        super().__init__()
        self.rank, self.call, self.calls = rank, call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        bad = dist.get_rank() == self.rank and self.calls >= self.call
        return torch.full_like(super().forward(x), torch.nan) if bad else super().forward(x)


class Dies(Mix):
    """One process is killed in its second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = write_store(
        tmp_path_factory.mktemp("data") / "store", land=True, packed=True,
        static=("depth",), diagnostic=("flux",),
    )  # fmt: skip
    compute(store, SampleSource(store, CONFIG).times("train")).save(store)
    return store


def run(
    store: str, out: Path, model: nn.Module | None = None, mesh: Mesh | None = None,
    stripes: Stripes | None = None, config: DataConfig = CONFIG, **given: Any,
) -> None:  # fmt: skip
    opened = Store(store)
    part = {"rows": stripes.rows, "columns": stripes.columns} if stripes else {}
    forecast(
        model or Mix(),
        SampleSource(opened, config, **part),
        Statistics.load(opened),
        out,
        mesh=mesh,
        stripes=stripes,
        **{"starts": TEN, "leads": LEADS, "attributes": {"run": "abc"}, "batch": 2, **given},
    )


def on_ranks(
    sizes: dict[str, int], bounds: tuple[int, ...], dim: Any, store: str, out: Path,
    model: nn.Module | None = None, given: dict[str, Any] | None = None,
) -> tuple[str, list[tuple[int, int]]]:  # fmt: skip
    """What a rank raised, and its progress."""
    mesh = Mesh(sizes)
    stripes = None
    if bounds:
        stripes = Stripes(dim=dim, index=mesh.sample_index, cuts={}, grid=Cut(bounds))
    calls: list[tuple[int, int]] = []
    try:
        run(store, out, model, mesh, stripes,
            progress=lambda done, total: calls.append((done, total)), **given or {})  # fmt: skip
    except ValueError as error:
        return str(error), calls
    return "", calls


def content(path: Path) -> tuple[np.ndarray, dict[str, Any], list[Any]]:
    with open_forecast(path) as opened:
        inits, leads = opened.valid_times.shape
        fields = np.stack([[opened.read(i, k) for k in range(leads)] for i in range(inits)])
        return fields, opened.attributes, [*opened.init_times, *opened.valid_times.flat]


def assert_same_file(path: Path, expected: Path) -> None:
    ours, theirs = content(path), content(expected)
    assert ours[1:] == theirs[1:]
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert np.isnan(ours[0]).any()
    assert np.nanstd(ours[0]) > 1


@pytest.fixture(scope="module")
def alone(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of one process."""
    path = tmp_path_factory.mktemp("alone") / "f.zarr"
    run(str(store.path), path)
    return path


# One file


@pytest.mark.parametrize(
    ("sizes", "bounds", "dim"),
    [
        ({"data": 2}, (), "lat"),
        ({"data": 3}, (), "lat"),
        ({"window": 2}, (0, 3, 8), "lat"),
        ({"window": 2}, (0, 0, 8), "lat"),
        ({"tensor": 2}, (0, 8, 8), "lat"),
        ({"window": 3}, (0, 5, 5, 16), "lon"),
        ({"data": 2, "window": 2}, (0, 6, 8), "lat"),
        ({"data": 2, "sequence": 2}, (0, 16, 16), "lon"),
        ({"window": 2, "tensor": 2}, (0, 1, 1, 4, 8), "lat"),
    ],
    ids=str,
)
def test_the_file_of_several_processes_is_that_of_one(
    store: Store, alone: Path, tmp_path: Path, request: pytest.FixtureRequest,
    sizes: dict[str, int], bounds: tuple[int, ...], dim: str,
) -> None:  # fmt: skip
    names = {2: "two", 3: "three", 4: "four"}
    ranks = request.getfixturevalue(names[int(np.prod(list(sizes.values())))])
    out = tmp_path / "f.zarr"
    for told, calls in ranks.run(on_ranks, sizes, bounds, dim, str(store.path), out):
        assert told == ""
        done = [done for done, _ in calls]
        assert done == sorted(set(done))
        assert calls[-1] == (len(TEN) * LEADS, len(TEN) * LEADS)
    assert_same_file(out, alone)


def test_more_processes_than_starts_end_right(
    store: Store, tmp_path: Path, three: LocalRanks
) -> None:
    run(str(store.path), tmp_path / "one.zarr", starts=[5])
    out = tmp_path / "f.zarr"
    told = three.run(on_ranks, {"data": 3}, (), "lat", str(store.path), out, None, {"starts": [5]})
    assert [text for text, _ in told] == [""] * 3
    assert_same_file(out, tmp_path / "one.zarr")


def test_ten_starts_written_by_several_at_once_lose_nothing_in_twenty_repeats(
    store: Store, tmp_path: Path, two: LocalRanks, three: LocalRanks
) -> None:
    config = DataConfig(prognostic=("salinity",), without=("temperature", "flux", "depth"))
    given: dict[str, Any] = {"config": config, "leads": 1, "batch": 5}
    run(str(store.path), tmp_path / "one.zarr", Moves(), **given)
    expected = content(tmp_path / "one.zarr")[0][:, 0, 0]
    for repeat in range(20):
        ranks, size = ((two, 2), (three, 3))[repeat % 2]
        out = tmp_path / f"{repeat}.zarr"
        told = ranks.run(on_ranks, {"data": size}, (), "lat", str(store.path), out, Moves(), given)
        assert [text for text, _ in told] == [""] * size
        written: Any = zarr.open_group(out, mode="r")
        assert written.attrs["complete"] == 1
        # What is lost would be infinite.
        np.testing.assert_allclose(written["salinity"][:, 0], expected, rtol=1e-6)


def _sharded(store: str, out: Path) -> str:
    model = Mix()
    fully_shard(model)
    return on_ranks({"data": 3}, (), "lat", store, out, model, {"batch": 3})[0]


def test_sharded_weights_are_gathered_by_ranks_that_are_out_of_samples_too(
    store: Store, alone: Path, tmp_path: Path, three: LocalRanks
) -> None:
    # Shares of 3, 3 and 4 in batches of 3: the last rank has one batch more.
    out = tmp_path / "f.zarr"
    assert three.run(_sharded, str(store.path), out) == [""] * 3
    assert_same_file(out, alone)


# One error


def test_what_is_not_finite_on_one_rank_is_the_same_error_on_all(
    store: Store, tmp_path: Path, four: LocalRanks
) -> None:
    for rank, call, start, lead in ((3, 2, "2003-02-28", 2), (0, 3, "2003-02-25", 1)):
        out = tmp_path / f"{rank}.zarr"
        told = four.run(
            on_ranks, {"data": 2, "window": 2}, (0, 3, 8), "lat", str(store.path), out,
            Diverges(rank, call),
        )  # fmt: skip
        texts = {text for text, _ in told}
        assert len(texts) == 1
        assert f"the forecast from {start} 00:00:00 is not finite at lead {lead}:" in texts.pop()
        with pytest.raises(ValueError, match="is incomplete"):
            open_forecast(out)


def test_a_store_that_one_rank_cannot_read_is_the_same_error_on_all(
    store: Store, tmp_path: Path, three: LocalRanks
) -> None:
    torn = write_store(tmp_path / "torn", land=True, static=("depth",), diagnostic=("flux",))
    compute(torn, SampleSource(torn, CONFIG).times("train")).save(torn)
    path = torn.shard_path(11)  # of the last rank's starts
    path.write_bytes(path.read_bytes()[:-100])
    told = three.run(on_ranks, {"data": 3}, (), "lat", str(torn.path), tmp_path / "f.zarr")
    assert len({text for text, _ in told}) == 1
    assert str(path) in told[0][0] or "2003-03-04" in told[0][0]
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(tmp_path / "f.zarr")


def test_a_start_that_lacks_its_data_is_refused_on_all_before_the_file_is_made(
    store: Store, tmp_path: Path, two: LocalRanks
) -> None:
    told = two.run(
        on_ranks, {"data": 2}, (), "lat", str(store.path), tmp_path / "f.zarr", None,
        {"starts": [4, 22]},
    )  # fmt: skip
    assert {text for text, _ in told} == {told[0][0]}
    assert "from 2003-03-15 00:00:00 over 2 leads needs the forcing" in told[0][0]
    assert not (tmp_path / "f.zarr").exists()


def _on_a_full_disk(store: str, out: Path, rank: int) -> str:
    everyone()  # these ranks may not have met yet, which takes a file too
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        return on_ranks({"data": 3}, (), "lat", store, out)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("rank", "what"), [(0, "cannot create"), (2, "cannot write init_time 2003-03-01")]
)
def test_a_disk_that_is_full_for_one_rank_stops_all(
    store: Store, tmp_path: Path, three: LocalRanks, rank: int, what: str
) -> None:
    told = three.run(_on_a_full_disk, str(store.path), tmp_path / "f.zarr", rank)
    assert len(set(told)) == 1
    assert f"f.zarr: {what}" in told[0]
    if rank:
        with pytest.raises(ValueError, match="is incomplete"):
            open_forecast(tmp_path / "f.zarr")


def test_a_rank_that_is_killed_leaves_the_forecast_incomplete(store: Store, tmp_path: Path) -> None:
    with LocalRanks(2, timeout_seconds=20) as ranks, pytest.raises(RankError):
        ranks.run(on_ranks, {"data": 2}, (), "lat", str(store.path), tmp_path / "f.zarr", Dies())
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(tmp_path / "f.zarr")


def test_a_netcdf_file_has_one_writer(
    store: Store, alone: Path, tmp_path: Path, two: LocalRanks
) -> None:
    out = tmp_path / "f.nc"
    told = two.run(on_ranks, {"data": 2}, (), "lat", str(store.path), out)
    assert {text for text, _ in told} == {told[0][0]}
    assert "only one process can write a netCDF file" in told[0][0]
    assert "end the name with .zarr" in told[0][0]
    assert not out.exists()
    told = two.run(on_ranks, {"window": 2}, (0, 5, 8), "lat", str(store.path), out)
    assert [text for text, _ in told] == ["", ""]
    assert_same_file(out, alone)


def test_an_output_that_exists_is_refused_on_all_and_untouched(
    store: Store, alone: Path, two: LocalRanks
) -> None:
    before = content(alone)
    told = two.run(on_ranks, {"data": 2}, (), "lat", str(store.path), alone)
    assert all("exists already and is not overwritten" in text for text, _ in told)
    np.testing.assert_array_equal(content(alone)[0], before[0])


# What processes do together


def _errors(kind: int) -> str:
    together = Together()
    try:
        with together.agreed():
            if together.rank == 1:
                raise (OSError("no such file"), ZeroDivisionError("1 / 0"))[kind]
        return "nothing"
    except (ValueError, RuntimeError, OSError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"


def test_what_users_can_put_right_is_a_value_error_elsewhere_and_what_they_cannot_is_not(
    three: LocalRanks,
) -> None:
    assert three.run(_errors, 0) == [
        "ValueError: no such file", "OSError: no such file", "ValueError: no such file"
    ]  # fmt: skip
    theirs = "RuntimeError: rank 1: ZeroDivisionError: 1 / 0"
    assert three.run(_errors, 1) == [theirs, "ZeroDivisionError: 1 / 0", theirs]


def _sums() -> list[np.ndarray]:
    rank = dist.get_rank()
    arrays = [np.array([1e16, 1.0, rank]) if rank == 0 else np.array([1.0, 1.0, rank]),
              np.full((2, 0), 1.0), np.array(2**60 + rank)]  # fmt: skip
    return Together().add(arrays)


def test_sums_are_added_in_order_of_rank_and_are_the_same_on_all(three: LocalRanks) -> None:
    for floats, empty, whole in three.run(_sums):
        # 1e16 + 1 is 1e16 in float64, twice.
        assert floats.tolist() == [1e16, 3.0, 3.0]
        assert empty.shape == (2, 0)
        assert int(whole) == 3 * 2**60 + 3
