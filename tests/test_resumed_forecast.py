"""Going on with a forecast after a kill: to the very bits of one that never stopped."""

import multiprocessing
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from graticule.data.normalise import Normaliser
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.forecast.clock import told
from graticule.forecast.reader import open_forecast
from graticule.forecast.restart import FOLDER, Kept, Record, kept
from graticule.parallel.local import LocalRanks, RankError
from swirl_case import CONFIG, EVERY, LEADS, Killed, Swirl, on_ranks, run, swirl_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return swirl_store(tmp_path_factory.mktemp("data") / "store")


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


@pytest.mark.parametrize("call", [1, 4, 12])
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
    # Of batches of 2, 2 and 1 with 4 leads each: from the third lead on, or from the first.
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
    killed(8, store, out, before)
    there = {place: record.lead for place, record in kept(out).items()}
    assert set(there.values()) > {LEADS}  # some have all leads, some a part of them
    if after[0] == {"data": 1}:
        run(str(store.path), out, resume=True)
    else:
        given = {"resume": True}
        assert two.run(on_ranks, *after, str(store.path), out, None, given) == ["", ""]
    assert_same(out, whole)


class Weighted(Swirl):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.repeat(2, 1, 1)


def _sharded(store: str, out: Path) -> str:
    model = Weighted()
    fully_shard(model)
    return on_ranks({"data": 3}, (), "lat", store, out, model, {"resume": True})


def test_sharded_weights_are_gathered_by_ranks_that_have_fewer_leads_left(
    store: Store, whole: Path, tmp_path: Path, three: LocalRanks
) -> None:
    out = tmp_path / "f.zarr"
    killed(8, store, out)  # 4, 4, 3, 3 and 0 leads are there, of ranks with 1, 2 and 2 starts
    assert three.run(_sharded, str(store.path), out) == [""] * 3
    assert_same(out, whole)


def test_a_forecast_killed_again_and_again_comes_to_its_end(
    store: Store, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.zarr"
    for number, call in enumerate((4, 3, 4)):
        killed(call, store, out, resume=number > 0)
    assert {place: record.lead for place, record in kept(out).items()} == {0: 4, 1: 4, 2: 3, 3: 3}
    run(str(store.path), out, resume=True)
    assert_same(out, whole)


def test_what_a_record_holds_is_what_the_next_lead_is_given_not_what_the_file_says(
    store: Store, tmp_path: Path
) -> None:
    out, given = tmp_path / "f.zarr", list[Tensor]()

    class Stops(Swirl):
        def forward(self, x: Tensor) -> Tensor:
            given.append(x[:, :4].clone())
            if len(given) == 4:
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
    units = torch.stack([normaliser.denormalise(state) for state in states]).double()
    back = ((units - normaliser.mean) / normaliser.std).nan_to_num(0.0).float()
    assert torch.allclose(back, states, atol=1e-5)
    assert not torch.equal(back, states)


def test_to_resume_nothing_begins_and_to_resume_a_whole_forecast_leaves_it_alone(
    store: Store, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.zarr"
    run(str(store.path), out, resume=True)
    assert_same(out, whole)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("c/*/*/*") if path.is_file()}
    timing = run(str(store.path), out, Killed(1), resume=True)
    assert timing.simulated_years == 0
    assert told(timing.to_dict()) == "it was complete already: nothing was computed"
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
            if self.calls == 4:
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
    *rest, last = path.read_bytes()
    path.write_bytes(bytes([*rest, last ^ 1]))
    given = {"resume": True}
    message = f"{path}: a forecast cannot go on from it: it has another SHA-256"
    with pytest.raises(ValueError, match=message):
        run(str(store.path), stopped, **given)
    told = two.run(on_ranks, {"data": 2}, (), "lat", str(store.path), stopped, None, given)
    assert len(set(told)) == 1
    assert message in told[0]
    (record / "complete.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not what was written .* forecast again"):
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
