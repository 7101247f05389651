"""Long forecasts: bounded memory, and going on after a kill to the bits of one that never stopped."""

import json
import multiprocessing
import os
import shutil
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from graticule.config import DataConfig
from graticule.data.normalise import Normaliser
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.forecast.restart import FOLDER, Kept, Record, kept
from graticule.forecast.run import forecast
from graticule.forecast.schedule import batches, turns
from graticule.forecast.writer import ForecastWriter
from graticule.memory.trace import trace_memory
from graticule.mesh import Cut, Mesh, Stripes
from graticule.parallel.local import LocalRanks, RankError
from small_store import write_store

CONFIG = DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=(-1, 0))
STARTS, LEADS, EVERY = (1, 2, 3, 4, 5), 8, 3


class Swirl(nn.Module):
    """Chaotic at each grid point alone: right on any stripe, and a last bit grows."""

    def forward(self, x: Tensor) -> Tensor:
        """Channels: two states of two, two forcings, a static -> two outputs of two and a
        diagnostic."""
        before, state, given, fixed = x[:, :2], x[:, 2:4], x[:, 4:6], x[:, 6:7]
        first = 1.7 * torch.sin(2.3 * state + 0.1 * given[:, :1]) - 0.2 * before
        second = 1.7 * torch.sin(2.3 * first + 0.1 * given[:, 1:]) + 0.1 * fixed
        return torch.cat([first, first[:, :1], second, second[:, 1:]], dim=1)


class Killed(Swirl):
    """The process dies in its `call`-th call (on the last rank, if there are several)."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if self.calls == self.call and last:
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
    stripes: Stripes | None = None, **given: Any,
) -> Any:  # fmt: skip
    opened = Store(store)
    part = {"rows": stripes.rows, "columns": stripes.columns} if stripes else {}
    return forecast(
        model or Swirl(), SampleSource(opened, CONFIG, **part), Statistics.load(opened), out,
        mesh=mesh, stripes=stripes,
        **{"starts": STARTS, "leads": LEADS, "attributes": {"run": "abc"}, "batch": 2,
           "restart_every": EVERY, **given},
    )  # fmt: skip


def on_ranks(
    sizes: dict[str, int], bounds: tuple[int, ...], dim: Any, store: str, out: Path,
    model: nn.Module | None = None, given: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """What a rank raised."""
    mesh = Mesh(sizes)
    stripes = None
    if bounds:
        stripes = Stripes(dim=dim, index=mesh.sample_index, cuts={}, grid=Cut(bounds))
    try:
        run(store, out, model, mesh, stripes, **given or {})
    except ValueError as error:
        return str(error)
    return ""


def killed(
    call: int, store: Store, out: Path, layout: Any = ({"data": 1}, (), "lat"), **given: Any
) -> None:
    if layout[0] == {"data": 1}:
        child = multiprocessing.get_context("fork").Process(
            target=run, args=(str(store.path), out, Killed(call)), kwargs=given
        )
        child.start()
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
    else:
        with LocalRanks(2, timeout_seconds=30) as ranks, pytest.raises(RankError):
            ranks.run(on_ranks, *layout, str(store.path), out, Killed(call))
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(out)


def content(path: Path) -> tuple[np.ndarray, dict[str, Any], list[Any]]:
    with open_forecast(path) as opened:
        inits, leads = opened.valid_times.shape
        fields = np.stack([[opened.read(i, k) for k in range(leads)] for i in range(inits)])
        return fields, opened.attributes, [*opened.init_times, *opened.valid_times.flat]


def assert_same(path: Path, expected: Path) -> None:
    ours, theirs = content(path), content(expected)
    assert ours[1:] == theirs[1:]
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert np.nanstd(ours[0][:, -1]) > 0.3  # it has not died down


@pytest.fixture(scope="module")
def whole(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never stopped, by one process."""
    path = tmp_path_factory.mktemp("whole") / "f.zarr"
    run(str(store.path), path)
    return path


# After a kill


@pytest.mark.parametrize("call", [1, 3, 6, 9, 15, 17, 24])
def test_a_killed_forecast_goes_on_to_the_bits_of_one_that_never_stopped(
    store: Store, whole: Path, tmp_path: Path, call: int
) -> None:
    out = tmp_path / "f.zarr"
    killed(call, store, out)
    heard: list[int] = []

    class Counts(Swirl):
        def forward(self, x: Tensor) -> Tensor:
            heard.append(len(x))
            return super().forward(x)

    calls: list[tuple[int, int]] = []
    timing = run(str(store.path), out, Counts(), resume=True,
                 progress=lambda *done: calls.append(done))  # fmt: skip
    # Of batches of 2, 2 and 1 with 8 leads each: from the last third lead, or from the last one.
    batch, lead = divmod(call - 1, LEADS)
    there = lead // EVERY * EVERY
    sizes = [n for n in (2, 2, 1) for _ in range(LEADS)]
    assert heard == sizes[batch * LEADS + there :]
    assert calls[-1] == (5 * LEADS, 5 * LEADS)
    assert calls[0][0] == sum(sizes) - sum(heard) + heard[0]
    assert timing.simulated_years == pytest.approx(sum(heard) * 2 / 365.25)
    assert_same(out, whole)
    assert not (out / FOLDER).exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({"data": 2}, (), "lat"), ({"data": 1}, (), "lat")),
        (({"data": 1}, (), "lat"), ({"data": 2}, (), "lat")),
        (({"window": 2}, (0, 3, 8), "lat"), ({"data": 1}, (), "lat")),
        (({"data": 1}, (), "lat"), ({"window": 2}, (0, 5, 16), "lon")),
        (({"window": 2}, (0, 0, 8), "lat"), ({"data": 2}, (), "lat")),
    ],
    ids=lambda layout: "-".join(f"{key}{n}" for key, n in layout[0].items()),
)
def test_a_forecast_killed_on_one_layout_goes_on_on_another(
    store: Store, whole: Path, tmp_path: Path, two: LocalRanks, before: Any, after: Any
) -> None:
    out = tmp_path / "f.zarr"
    killed(13, store, out, before)
    there = {place: record.lead for place, record in kept(out).items()}
    assert set(there.values()) > {LEADS}  # some have all leads, some a part of them
    if after[0] == {"data": 1}:
        run(str(store.path), out, resume=True)
    else:
        given = {"resume": True}
        assert two.run(on_ranks, *after, str(store.path), out, None, given) == ["", ""]
    assert_same(out, whole)


def test_a_forecast_killed_again_and_again_comes_to_its_end(
    store: Store, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.zarr"
    for number, call in enumerate((5, 4, 8)):
        killed(call, store, out, resume=number > 0)
    assert {place: record.lead for place, record in kept(out).items()} == {0: 8, 1: 8, 2: 3, 3: 3}
    run(str(store.path), out, resume=True)
    assert_same(out, whole)


def test_what_a_record_holds_is_what_the_next_lead_is_given_not_what_the_file_says(
    store: Store, tmp_path: Path
) -> None:
    out, given = tmp_path / "f.zarr", list[Tensor]()

    class Stops(Swirl):
        def forward(self, x: Tensor) -> Tensor:
            given.append(x[:, :4].clone())
            if len(given) == 5:
                raise ValueError("enough")
            return super().forward(x)

    with pytest.raises(ValueError, match="enough"):
        run(str(store.path), out, Stops(), starts=[4])
    (record,) = [path for path in (out / FOLDER).iterdir() if not path.name.startswith(".")]
    assert record.name == "starts-00000-00000.lead-00003"
    states = load_file(record / "00000.safetensors")["states"]
    assert states.shape == (2, 2, 8, 16)
    assert torch.equal(states.flatten(0, 1), given[3][0])
    # Through units and back they would be others: the reason for a record.
    source = SampleSource(store, CONFIG)
    normaliser = Normaliser(store, source.prognostic, Statistics.load(store))
    back = normaliser.normalise(normaliser.denormalise(states)) if hasattr(
        normaliser, "normalise") else None  # fmt: skip
    assert back is None or not torch.equal(back, states)


def test_to_resume_nothing_begins_and_to_resume_a_whole_forecast_leaves_it_alone(
    store: Store, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.zarr"
    run(str(store.path), out, resume=True)
    assert_same(out, whole)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("c/*/*/*") if path.is_file()}
    timing = run(str(store.path), out, Killed(1), resume=True)
    assert timing.simulated_years == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert_same(out, whole)
    with pytest.raises(ValueError, match="not overwritten; name another path, or, where"):
        run(str(store.path), out)


# What is refused


@pytest.fixture
def stopped(store: Store, tmp_path: Path) -> Path:
    class Stops(Swirl):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 6:
                raise ValueError("enough")
            return super().forward(x)

    with pytest.raises(ValueError, match="enough"):
        run(str(store.path), tmp_path / "f.zarr", Stops())
    return tmp_path / "f.zarr"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"attributes": {"run": "xyz"}}, "another forecast .* run abc there, xyz here"),
        ({"attributes": {}}, "run abc there, None here"),
        ({"starts": (1, 2, 3, 4, 6)}, "another init_time; another valid_time"),
        ({"leads": LEADS + 1}, "another valid_time. Ask for what it was begun as"),
    ],
)
def test_another_forecast_does_not_go_on_with_it(
    store: Store, stopped: Path, other: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(str(store.path), stopped, resume=True, **other)
    run(str(store.path), stopped, resume=True)


def test_a_record_that_is_not_as_it_was_written_is_refused_by_name(
    store: Store, stopped: Path, two: LocalRanks
) -> None:
    (record,) = (stopped / FOLDER).glob("starts-*")
    path = record / "00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    given = {"resume": True}
    message = f"{path}: a forecast cannot go on from it: it has another SHA-256"
    with pytest.raises(ValueError, match=message):
        run(str(store.path), stopped, **given)
    told = two.run(on_ranks, {"data": 2}, (), "lat", str(store.path), stopped, None, given)
    assert len(set(told)) == 1
    assert message in told[0]
    (record / "complete.json").write_text("{}")
    with pytest.raises(ValueError, match="is not what was written .* forecast again"):
        run(str(store.path), stopped, **given)


def test_a_lead_whose_chunk_is_gone_is_refused_by_name(store: Store, stopped: Path) -> None:
    shutil.rmtree(stopped / "salinity/c/1/4")
    with pytest.raises(ValueError, match=r"salinity of init_time 2003-02-23 .*, lead 5 is lost"):
        run(str(store.path), stopped, resume=True)


def test_netcdf_is_not_resumed(store: Store, tmp_path: Path) -> None:
    run(str(store.path), tmp_path / "f.nc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.nc", "f.timing.jsonl"]
    with pytest.raises(ValueError, match="only a Zarr forecast can be resumed"):
        run(str(store.path), tmp_path / "f.nc", resume=True)


def test_a_record_that_was_being_written_counts_for_nothing(tmp_path: Path) -> None:
    states = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    for lead in (3, 6):
        record = Record(tmp_path, (0, 1), lead)
        for place in (0, 1):
            record.put(place, states + lead)
        if lead == 3:
            record.seal()
    found = kept(tmp_path)
    assert {place: record.lead for place, record in found.items()} == {0: 3, 1: 3}
    part = found[1].states(range(1, 3), range(4))
    assert torch.equal(part, torch.from_numpy(states + 3)[:, :, 1:3])
    record.seal()
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [
        "starts-00000-00001.lead-00006"
    ]
    assert kept(tmp_path)[0].lead == 6
    assert kept(tmp_path / "elsewhere") == {}
    assert Kept(8).path is None


# Order


def test_batches_that_are_left_are_those_of_a_forecast_that_never_stopped() -> None:
    own = range(7)
    every = batches(own, {}, 9, 3)
    assert every == [((0, 1, 2), 0), ((3, 4, 5), 0), ((6,), 0)]
    done = {0: 9, 1: 9, 2: 9}
    assert batches(own, done, 9, 3) == every[1:]
    assert batches(own, {**done, 3: 4, 4: 4, 5: 4}, 9, 3) == [((3, 4, 5), 4), ((6,), 0)]
    # What another layout left has its own.
    assert batches(own, {0: 9, 1: 3, 2: 3, 3: 9, 4: 3}, 9, 3) == [((1, 2, 4), 3), ((5, 6), 0)]


def test_a_turn_lasts_until_the_last_of_its_ranks_is_done() -> None:
    first, second = turns(Cut.even(5, 2), {0: 6, 2: 1, 3: 1}, 8, 2)
    assert first.batches == (((0,), 6), ((2, 3), 1))
    assert second.batches == (((1,), 0), ((4,), 0))
    assert (first.steps, second.steps) == (7, 8)
    assert first.at(2) == {0: 8, 2: 3, 3: 3}
    assert first.at(3) == {2: 4, 3: 4}


# Memory


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Without forcing: a forecast may go on for ever."""
    store = write_store(tmp_path_factory.mktemp("data") / "bare", forcing=(), land=True)
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.99 * x.roll(1, -1) + 0.01


def test_a_rollout_holds_no_more_after_hundreds_of_leads_than_after_a_few(
    bare: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SampleSource(bare, DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2)))
    model, alive, most = Turns(), list[Any](), [0]
    write = ForecastWriter.write

    def counted(self: ForecastWriter, init: int, lead: int, fields: np.ndarray) -> None:
        alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(fields)]
        most[0] = max(most[0], len(alive))
        write(self, init, lead, fields)

    monkeypatch.setattr(ForecastWriter, "write", counted)

    def peak(leads: int) -> int:
        out = tmp_path / f"{leads}.zarr"
        _, trace = trace_memory(
            lambda: forecast(
                model, source, Statistics.load(bare), out, starts=[4, 5], leads=leads,
                attributes={}, restart_every=10,
            ),
            lambda: {"parameters": model.parameters()},
        )  # fmt: skip
        with open_forecast(out) as opened:
            assert opened.num_leads == 2 * leads
            assert np.isfinite(opened.read(1, 2 * leads - 1)).any()
        return trace.peak_bytes

    few = peak(4)
    assert peak(100) == few
    # States, a prediction and what is on its way to the file: not more than six leads' fields.
    assert few < 6 * (2 * 2 * 2 * 8 * 16 * 4) + 20_000
    assert most[0] <= 2  # one being written, one that the next takes the place of


# What is told


def test_where_time_went_is_told_and_kept_beside_the_forecast(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "f.zarr"
    timing = run(str(store.path), out, log_every=3)
    (line,) = [json.loads(text) for text in (tmp_path / "f.timing.jsonl").read_text().splitlines()]
    assert line["seconds"] == timing.seconds
    assert line["simulated_years_per_day"] == timing.simulated_years_per_day
    assert (line["log_every"], line["leads_before"]) == (3, 0)
    parts = line["parts"]
    assert list(parts) == ["read", "compute", "copy", "write", "restart", "log", "other"]
    assert all(part["seconds"] > 0 for part in parts.values())
    assert sum(part["seconds"] for part in parts.values()) == pytest.approx(timing.seconds)
    run(str(store.path), tmp_path / "bare.zarr", restart_every=0)
    (line,) = [json.loads(t) for t in (tmp_path / "bare.timing.jsonl").read_text().splitlines()]
    assert line["parts"]["restart"]["seconds"] < 0.1 * parts["restart"]["seconds"]


@pytest.mark.parametrize("data", [1, 2])
def test_every_nth_lead_and_the_last_are_logged_with_what_the_file_says(
    store: Store, tmp_path: Path, two: LocalRanks, data: int
) -> None:
    out = tmp_path / "f.zarr"
    if data == 1:
        run(str(store.path), out, log_every=3)
    else:
        given = {"log_every": 3}
        assert two.run(on_ranks, {"data": 2}, (), "lat", str(store.path), out, None, given) == [
            "", ""
        ]  # fmt: skip
    from graticule.forecast.log import read_log

    lines = read_log(tmp_path / "f.log.jsonl")
    assert len(lines) == len(STARTS) * 3
    area = np.broadcast_to(store.grid.cell_area, store.grid.shape)
    with open_forecast(out) as opened:
        dates = [str(date) for date in opened.init_times]
        for line in lines:
            init, lead = dates.index(line["init_time"]), line["lead"]
            assert lead in (6, 12, 16)
            assert line["valid_time"] == str(opened.valid_times[init, lead - 1])
            field = opened.read(init, lead - 1)[0].astype(np.float64)
            wet = np.isfinite(field)
            assert not wet.all()
            mean = (field * area)[wet].sum() / area[wet].sum()
            assert line["mean"]["temperature"] == pytest.approx(mean, rel=1e-9)
            assert line["least"]["temperature"] == field[wet].min()
            assert line["greatest"]["temperature"] == field[wet].max()
