"""Samples and batches: which there are, in which order, and what happens when reading fails."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from graticule.config import DataConfig
from graticule.data.loader import Loader, Order
from graticule.data.samples import SampleSource, SampleSpec
from graticule.data.shards import Shards
from graticule.data.store import Store
from small_store import field, small_grid, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("data") / "store")


def source_of(store: Store, **settings: object) -> SampleSource:
    return SampleSource(store, DataConfig(store=str(store.path), **settings))  # type: ignore[arg-type]


def read(source: SampleSource, order: Order, numbers: range, batch: int, leads: int = 1,
         roll_seed: int | None = None) -> list[tuple[int, int, torch.Tensor]]:  # fmt: skip
    """(number, start, [inputs, forcing and labels of each lead]) of every sample."""
    loader = Loader(source, order, numbers, batch=batch, leads=leads, roll_seed=roll_seed)
    taken = []
    with closing(iter(loader)) as batches:
        for one in batches:
            parts = [one.inputs]
            for _ in range(leads):
                parts += one.lead()
            planes = torch.cat([part.flatten(1, 2) for part in parts], dim=1)
            taken += list(zip(one.keys, one.starts, planes, strict=True))
    return taken


def test_a_window_never_crosses_a_missing_day(tmp_path: Path) -> None:
    days = [day for day in range(20) if day != 8]
    splits = {"train": ["2003-02-21/2003-03-12"]}
    source = source_of(write_store(tmp_path / "gap", days=days, splits=splits))
    starts = source.starts("train", leads=3)
    assert len(starts) == 13
    assert [days[start] for start in starts] == [0, 1, 2, 3, 4, *range(9, 17)]


def test_two_ranges_far_apart_give_their_own_windows(tmp_path: Path) -> None:
    days = [*range(10), *range(400, 410)]
    splits = {"train": ["2003-02-21/2003-03-02", "2004-03-27/2004-04-05"]}
    source = source_of(write_store(tmp_path / "years", days=days, splits=splits))
    assert len(source.starts("train", leads=3)) == 14


def test_two_ranges_side_by_side_are_one(tmp_path: Path) -> None:
    source = source_of(
        write_store(tmp_path / "joined", days=range(20), splits={}),
        train=("2003-02-21/2003-03-02", "2003-03-03/2003-03-12"),
    )
    assert len(source.starts("train", leads=3)) == 17


def test_windows_stay_inside_their_split_with_history_and_stride(store: Store) -> None:
    source = source_of(store, input_offsets=(-1, 0), output_offsets=(1, 2), stride=2)
    # Days 0 to 15: history reaches 2 back, one lead 4 ahead.
    assert list(source.starts("train", leads=1)) == list(range(2, 12))
    assert source.spec == SampleSpec(inputs=(-2, 0), outputs=(2, 4), forcings=(0,))
    assert source.spec.label_offsets(2) == (6, 8)
    assert source.spec.given_offsets(2) == (4,)


def test_splits_that_share_a_time_are_refused(store: Store) -> None:
    source = source_of(store, train=("2003-02-21/2003-03-09",), validation=("2003-03-09",))
    with pytest.raises(ValueError, match=r"validation shares 1 times .* 2003-03-09"):
        source.starts("train", leads=1)


def test_no_sample_of_one_split_touches_another(store: Store) -> None:
    source = source_of(store, input_offsets=(-1, 0))
    touched = {}
    for split in ("train", "validation", "test"):
        starts = source.starts(split, leads=2)
        touched[split] = {int(start + offset) for start in starts for offset in (-1, 0, 1, 2)}
    assert not touched["train"] & touched["validation"]
    assert not touched["validation"] & touched["test"]
    assert touched["train"] == set(range(16))


def test_a_split_too_short_for_the_rollout_says_so(store: Store) -> None:
    with pytest.raises(ValueError, match=r"validation split has 4 times .* 5 steps \(4 leads\)"):
        source_of(store).starts("validation", leads=4)


def test_a_hole_at_sea_is_an_error_that_names_it(tmp_path: Path) -> None:
    source = source_of(write_store(tmp_path / "hole", hole=("temperature", 8)))
    with pytest.raises(ValueError, match=r"temperature at 2003-03-01 .*\(1 cells\).*drop-window"):
        source.starts("train", leads=1)


def test_a_hole_drops_the_windows_that_touch_it(tmp_path: Path) -> None:
    store = write_store(tmp_path / "hole", hole=("temperature", 8))
    source = source_of(store, holes="drop-window")
    assert list(source.starts("train", leads=2)) == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13]


def test_a_hole_in_a_channel_that_is_not_used_does_not_matter(tmp_path: Path) -> None:
    store = write_store(tmp_path / "hole", hole=("temperature", 8))
    source = source_of(store, prognostic=("salinity",))
    assert len(source.starts("train", leads=1)) == 15


def test_the_configuration_gives_roles_and_the_store_fills_the_rest(tmp_path: Path) -> None:
    store = write_store(tmp_path / "roles", diagnostic=("rain",))
    source = source_of(store, prognostic=("rain",), forcing=("temperature",))
    assert source.channel_names == {
        "prognostic": ["rain"], "diagnostic": [], "forcing": ["temperature"], "static": [],
    }  # fmt: skip


def test_one_channel_in_two_roles_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"prognostic and data\.forcing both name salinity"):
        source_of(store, prognostic=("salinity",), forcing=("salinity", "wind"))


def test_samples_hold_the_fields_of_their_times(store: Store) -> None:
    source = source_of(store, input_offsets=(-1, 0), forcing_offsets=(0, 1))
    sample = source.sample(5)
    grid = small_grid()
    assert str(sample.init_time) == "2003-02-26 00:00:00"

    def expected(days: tuple[int, ...], channels: tuple[int, ...]) -> np.ndarray:
        planes = [[field(c, day, grid) for c in channels] for day in days]
        return np.array(planes, dtype=np.float32)

    np.testing.assert_array_equal(sample.inputs(), expected((4, 5), (0, 1)))
    np.testing.assert_array_equal(sample.labels(3), expected((8,), (0, 1)))
    np.testing.assert_array_equal(sample.forcing(3), expected((7, 8), (2,)))


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 10])
def test_every_window_comes_once_whatever_the_batch(store: Store, batch: int) -> None:
    source = source_of(store, train=("2003-02-21/2003-03-02",))
    starts = source.starts("train", leads=3)
    assert len(starts) == 7
    loader = Loader(source, Order(starts, None), range(7), batch=batch, leads=3)
    taken = read(source, Order(starts, None), range(7), batch, leads=3)
    assert [start for _, start, _ in taken] == list(range(7))
    for _, start, planes in taken:
        # Inputs, then forcing and labels of each lead.
        expected = [store.read(start, [0, 1])]
        for lead in range(3):
            expected += [store.read(start + lead, [2]), store.read(start + lead + 1, [0, 1])]
        np.testing.assert_array_equal(planes, np.concatenate(expected))
    assert len(loader) == -(-7 // batch)


def test_each_epoch_is_another_permutation_of_all_starts() -> None:
    starts = np.arange(100, 130)
    order = Order(starts, seed=3)
    epochs = [[order.start(30 * epoch + i) for i in range(30)] for epoch in range(3)]
    assert all(sorted(epoch) == list(starts) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [Order(starts, seed=3).start(i) for i in range(30)] == epochs[0]
    assert [Order(starts, seed=4).start(i) for i in range(30)] != epochs[0]


def test_ten_batches_are_five_and_five(store: Store) -> None:
    source = source_of(store)
    order = Order(source.starts("train", leads=2), seed=1)
    whole = read(source, order, range(20), batch=2, leads=2, roll_seed=5)
    halves = [read(source, order, part, batch=2, leads=2, roll_seed=5)
              for part in (range(10), range(10, 20))]  # fmt: skip
    joined = halves[0] + halves[1]
    assert [number for number, _, _ in joined] == list(range(20))
    for (n, start, planes), (m, other_start, other_planes) in zip(whole, joined, strict=True):
        assert (n, start) == (m, other_start)
        assert torch.equal(planes, other_planes)


def test_what_was_read_ahead_is_not_counted_as_taken(store: Store) -> None:
    source = source_of(store)
    order = Order(source.starts("train", leads=1), seed=1)
    loader = Loader(source, order, range(8), batch=2, leads=1, ahead=8)
    with closing(iter(loader)) as batches:
        first = next(batches)
        first.lead()
    after = read(source, order, range(2, 8), batch=2)
    whole = read(source, order, range(8), batch=2)
    assert first.keys == [0, 1]
    assert [start for _, start, _ in after] == [start for _, start, _ in whole][2:]


def test_a_roll_turns_all_planes_of_a_sample_alike_and_samples_apart(store: Store) -> None:
    source = source_of(store)
    order = Order(source.starts("train", leads=1), seed=None)
    still = read(source, order, range(8), batch=4)
    turned = read(source, order, range(8), batch=4, roll_seed=0)
    shifts = []
    for (_, _, plain), (_, _, rolled) in zip(still, turned, strict=True):
        fits = [k for k in range(16) if torch.equal(torch.roll(plain, k, dims=-1), rolled)]
        assert len(fits) == 1
        shifts += fits
    assert len(set(shifts)) > 3


def test_a_readers_error_reaches_the_caller_every_time_it_asks(tmp_path: Path) -> None:
    broken = write_store(tmp_path / "broken")
    broken.shard_path(3).unlink()
    loader = Loader(source_of(broken), Order(np.arange(10), None), range(10), batch=1, leads=1)
    reached = []
    with closing(iter(loader)) as batches:
        for batch in batches:
            reached.append(batch.starts[0])
            if batch.starts[0] < 2:
                batch.lead()
                continue
            for _ in range(2):
                with pytest.raises(ValueError, match=r"2003-02-24 .*was never written or is lost"):
                    batch.lead()
            break
    assert reached == [0, 1, 2]


def test_leads_left_untaken_are_an_error_and_not_the_next_batchs(store: Store) -> None:
    loader = Loader(source_of(store), Order(np.arange(8), None), range(8), batch=2, leads=2)
    with closing(iter(loader)) as batches:
        next(batches).lead()
        with pytest.raises(AssertionError, match=r"batch \[0, 1\]: 1 leads were not taken"):
            next(batches)


def test_more_leads_than_announced_are_an_error(store: Store) -> None:
    loader = Loader(source_of(store), Order(np.arange(8), None), range(8), batch=2, leads=1)
    with closing(iter(loader)) as batches:
        batch = next(batches)
        batch.lead()
        with pytest.raises(AssertionError, match="taken already"):
            batch.lead()


def test_batches_name_their_dates_and_count_the_wait(store: Store) -> None:
    loader = Loader(source_of(store), Order(np.arange(8), None), range(2), batch=2, leads=1)
    with closing(iter(loader)) as batches:
        batch = next(batches)
        batch.lead()
    assert [f"{date:%m-%d}" for date in batch.init_times] == ["02-21", "02-22"]
    assert loader.waited > 0


def test_a_grid_other_than_the_configurations_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"data.grid=\(8, 15\) but .* is \(8, 16\)"):
        SampleSource(store, replace(DataConfig(), grid=(8, 15)))


# Memory that is used again

TWO = {"input_offsets": (-1, 0), "output_offsets": (1, 2), "forcing_offsets": (-1, 0)}


def expected(source: SampleSource, start: int, leads: int) -> list[np.ndarray]:
    """Inputs, then forcing and labels of each lead, read one by one."""
    sample = source.sample(start)
    parts = [sample.inputs()]
    for lead in range(1, leads + 1):
        parts += [sample.forcing(lead), sample.labels(lead)]
    return parts


def deliveries(
    loader: Loader, pause: float = 0.0
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """(starts, tensors) of every delivery, taken slowly."""
    with closing(iter(loader)) as batches:
        for batch in batches:
            yield batch.starts, [batch.inputs]
            for _ in range(loader.leads):
                time.sleep(pause)
                yield batch.starts, list(batch.lead())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("keep", [1, 7, 1000])
def test_what_a_slow_consumer_holds_is_never_written_over(
    store: Store, keep: int, threads: int
) -> None:
    source = source_of(store, **TWO)
    order = Order(source.starts("train", leads=3), seed=2)
    loader = Loader(source, order, range(9), batch=2, leads=3, threads=threads)
    held: list[tuple[list[np.ndarray], list[torch.Tensor]]] = []
    number = 0
    for starts, tensors in deliveries(loader, pause=0.002):
        lead = number % 4
        number += 1
        each = [expected(source, start, 3) for start in starts]
        parts = [0] if lead == 0 else [2 * lead - 1, 2 * lead]
        want = [np.stack([one[part] for one in each]) for part in parts]
        # Views of it, in the end, as a graph would keep them.
        held.append((want, [tensor[:, -1:, :] if keep == 7 else tensor for tensor in tensors]))
        held = held[-keep:]
        del tensors
        for wanted, kept in held:
            for one, other in zip(wanted, kept, strict=True):
                np.testing.assert_array_equal(other, one[:, -1:] if keep == 7 else one)
    assert number == 4 * 5


@pytest.mark.parametrize("forcing", [True, False])
def test_memory_has_the_same_bound_for_one_lead_and_for_forty(
    tmp_path: Path, forcing: bool
) -> None:
    settings = {} if forcing else {"forcing": ()}
    names: dict = {} if forcing else {"forcing": ()}
    long = write_store(tmp_path / "long", days=range(64), splits={"train": ["2003/2004"]}, **names)
    source = source_of(long, **settings)
    for leads in (1, 40):
        order = Order(source.starts("train", leads=leads), seed=0)
        numbers = range(2 * 80 // leads)
        loader = Loader(source, order, numbers, batch=2, leads=leads, ahead=3)
        largest = 0
        for _, tensors in deliveries(loader, pause=0.01):
            largest = max(largest, sum(tensor.nbytes for tensor in tensors))
            del tensors
        # `ahead` ready, one being read, one begun, two held, one on its way from hand to hand.
        assert 0 < loader.pool.allocated_bytes <= (3 + 5) * largest


def test_memory_has_a_bound_however_many_steps_are_taken(store: Store) -> None:
    source = source_of(store)
    order = Order(source.starts("train", leads=2), seed=0)
    loader = Loader(source, order, range(2 * 300), batch=2, leads=2)
    count = 0
    for _, tensors in deliveries(loader):
        del tensors
        count += 1
    assert count == 3 * 300
    # Two deliveries ready, one being read, one begun, two held, one on its way from hand to hand:
    # of 900, so that whatever is not given back shows.
    planes = 2 * (2 + 1) * 8 * 16 * 4
    assert loader.pool.allocated_bytes <= 7 * planes


@pytest.mark.parametrize("threads", [1, 4])
def test_buffers_of_200_batches_are_those_of_the_first_few(store: Store, threads: int) -> None:
    source = source_of(store)
    order = Order(source.starts("train", leads=2), seed=0)
    loader = Loader(source, order, range(0), batch=3, leads=2, threads=threads)
    buffers: set[int] = set()
    batches = 0
    # Twenty epochs, the last batch of each with one sample instead of three.
    for epoch in range(20):
        loader.numbers = range(28 * epoch, 28 * (epoch + 1))
        for _, tensors in deliveries(loader):
            buffers |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
            del tensors
        batches += len(loader)
    assert batches == 200
    # As many as deliveries can be alive at once: two ready, one being read, one begun, two held,
    # one on its way from hand to hand.
    assert len(buffers) <= 7
    assert loader.pool.allocated_bytes == len(buffers) * loader.block_bytes


# Each byte once


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of each inner chunk that is read, as it is read."""
    times: list[int] = []
    original = Shards._chunk
    monkeypatch.setattr(
        Shards, "_chunk",
        lambda self, file, place, *more: (
            times.append(place[0]), original(self, file, place, *more)
        ),
    )  # fmt: skip
    return times


def test_planes_that_deliveries_share_are_read_once(store: Store, chunks_read: list[int]) -> None:
    source = source_of(store, **TWO)
    order = Order(source.starts("train", leads=4), seed=1)
    loader = Loader(source, order, range(1), batch=1, leads=4)
    planes = sum(t[:, :, 0].numel() // (8 * 16) for _, ts in deliveries(loader) for t in ts)
    start = order.start(0)
    # Two states in, eight out, forcing at eight of these ten: ten times, one chunk each.
    assert chunks_read == list(range(start - 1, start + 9))
    assert planes == 2 + 4 * (2 + 2)


def test_samples_side_by_side_read_a_time_they_share_once(
    store: Store, chunks_read: list[int]
) -> None:
    source = source_of(store)
    loader = Loader(source, Order(np.arange(16), None), range(8), batch=8, leads=2)
    for starts, tensors in deliveries(loader):
        assert starts == list(range(8))
        assert len(tensors[0]) == 8
    # States 0 to 7 serve the inputs and, but for 8, the first lead; of the second lead's 1 to 9,
    # 8 is at hand. One sample alone would read 5 times five, eight of them 40.
    assert chunks_read[:9] == list(range(9))
    assert sorted(chunks_read[9:]) == [1, 2, 3, 4, 5, 6, 7, 9]


@pytest.mark.parametrize("part", [(slice(2, 5), slice(None)), (slice(None), slice(3, 9)),
                                  (slice(7, 8), slice(0, 16))])  # fmt: skip
def test_a_stripe_is_that_part_of_the_whole(store: Store, part: tuple[slice, slice]) -> None:
    rows, columns = part
    whole = source_of(store, **TWO)
    stripe = SampleSource(store, whole.config, rows=rows, columns=columns)
    assert stripe.shape == np.empty((8, 16))[part].shape
    order = Order(whole.starts("train", leads=2), seed=1)
    loaders = [Loader(s, order, range(6), batch=2, leads=2) for s in (whole, stripe)]
    for (_, all_of), (_, some) in zip(*(deliveries(one) for one in loaders), strict=True):
        for one, other in zip(all_of, some, strict=True):
            assert torch.equal(one[..., rows, columns], other)


def test_a_part_of_the_longitudes_cannot_be_turned(store: Store) -> None:
    source = SampleSource(store, DataConfig(), columns=slice(0, 8))
    with pytest.raises(ValueError, match=r"columns 0 to 8 of 16 .*train.roll_longitude=false"):
        Loader(source, Order(np.arange(4), None), range(4), batch=2, leads=1, roll_seed=0)


# Ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 20), (7, 24)])
def test_ranks_share_the_batches_of_one_process(
    store: Store, ranks: int, first: int, last: int
) -> None:
    source = source_of(store)
    order = Order(source.starts("train", leads=2), seed=1)

    def batches(rank: int, of: int) -> list[list[tuple[int, torch.Tensor]]]:
        loader = Loader(source, order, range(first, last), batch=4, leads=2, roll_seed=3,
                        rank=rank, ranks=of)  # fmt: skip
        taken = []
        with closing(iter(loader)) as stream:
            for batch in stream:
                parts = [batch.inputs, *batch.lead(), *batch.lead()]
                planes = torch.cat([part.flatten(1, 2) for part in parts], dim=1).clone()
                taken.append(list(zip(batch.keys, planes, strict=True)))
        assert len(taken) == len(loader)
        return taken

    whole = batches(0, 1)
    shares = [batches(rank, ranks) for rank in range(ranks)]
    for number, batch in enumerate(whole):
        joined = sorted((pair for share in shares for pair in share[number]), key=lambda p: p[0])
        assert [key for key, _ in joined] == [key for key, _ in batch]
        for (_, ours), (_, theirs) in zip(joined, batch, strict=True):
            assert torch.equal(ours, theirs)
        sizes = [len(share[number]) for share in shares]
        assert max(sizes) - min(sizes) <= 1
    assert [key for batch in whole for key, _ in batch] == list(range(first, last))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, np.ndarray]:
    """Twelve days of 2 x 4 cells, and their numbers, (time, channel, lat, lon)."""
    store = write_store(tmp_path_factory.mktemp("short") / "store", days=range(12), splits={},
                        grid=small_grid(2, 4))  # fmt: skip
    return store, np.stack([store.read_stored(time) for time in range(12)])


@pytest.mark.parametrize("leads", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 4])
def test_every_sample_comes_once_for_any_number_of_samples_batch_and_ranks(
    short: tuple[Store, np.ndarray], threads: int, leads: int
) -> None:
    store, fields = short
    for samples in range(1, 10):
        last_day = f"{store.times.date(samples + leads - 1):%Y-%m-%d}"
        source = source_of(store, train=(f"2003-02-21/{last_day}",))
        starts = source.starts("train", leads=leads)
        # The last window, too: its last label is the last day.
        assert starts.tolist() == list(range(samples))
        order = Order(starts, seed=samples)
        for batch, ranks in ((b, r) for b in range(1, 5) for r in range(1, b + 1)):
            case = f"{samples} samples, batch {batch}, {ranks} ranks"
            epoch = range(samples, 2 * samples)
            keys: list[int] = []
            taken: list[int] = []
            for rank in range(ranks):
                loader = Loader(source, order, epoch, batch=batch, leads=leads, threads=threads,
                                rank=rank, ranks=ranks)  # fmt: skip
                number = 0
                with closing(iter(loader)) as batches:
                    for one in batches:
                        number += 1
                        keys += one.keys
                        taken += one.starts
                        parts = [one.inputs, *(part for _ in range(leads) for part in one.lead())]
                        for position, start in enumerate(one.starts):
                            given = [fields[[start], :2]]
                            for now in range(start, start + leads):
                                given += [fields[[now], 2:], fields[[now + 1], :2]]
                            for ours, theirs in zip(parts, given, strict=True):
                                assert np.array_equal(ours[position].numpy(), theirs), case
                # As many steps on each rank, or the others wait for it for ever.
                assert number == -(-samples // batch), case
            assert sorted(keys) == list(epoch), case
            assert sorted(taken) == list(range(samples)), case


def test_fewer_samples_than_ranks_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"batch of 2 samples leaves 1 of 3 ranks .* to 3 or more"):
        Loader(source_of(store), Order(np.arange(9), None), range(9), batch=2, leads=1, ranks=3)


# Threads


@pytest.mark.parametrize("threads", [1, 3])
def test_no_thread_is_left_behind(tmp_path: Path, threads: int) -> None:
    broken = write_store(tmp_path / "broken")
    broken.shard_path(6).unlink()
    source = source_of(broken)
    before = set(threading.enumerate())

    def loader(numbers: range) -> Loader:
        order = Order(np.arange(12), None)
        return Loader(source, order, numbers, batch=1, leads=1, threads=threads)

    for _ in deliveries(loader(range(4))):
        pass
    assert set(threading.enumerate()) == before, "after the last batch"
    stopped = deliveries(loader(range(4)))
    next(stopped)
    stopped.close()
    assert set(threading.enumerate()) == before, "after a caller that took one delivery"
    with pytest.raises(ValueError, match=r"temperature at 2003-02-27 .*fields/c/6/0/0/0"):
        for _ in deliveries(loader(range(12))):
            pass
    assert set(threading.enumerate()) == before, "after an error"


def test_an_interrupt_while_waiting_ends_at_once(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    code = textwrap.dedent(f"""
        import signal, threading, time
        from contextlib import closing
        import numpy as np
        from graticule.config import DataConfig
        from graticule.data import shards
        from graticule.data.loader import Loader, Order
        from graticule.data.samples import SampleSource
        from graticule.data.store import Store
        signal.signal(signal.SIGINT, signal.default_int_handler)
        source = SampleSource(Store({str(store.path)!r}), DataConfig())
        slow = shards.Shards._pread
        def pread(*given):
            time.sleep(0.3)  # a file system that answers late
            slow(*given)
        shards.Shards._pread = pread
        loader = Loader(source, Order(np.arange(12), None), range(4), batch=4, leads=1)
        threading.Timer(0.0, print, ["waiting"], {{"flush": True}}).start()
        try:
            with closing(iter(loader)) as batches:
                next(batches)
        except KeyboardInterrupt:
            print("interrupted", [t.name for t in threading.enumerate() if "grat" in t.name])
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted []\n"
        # Eight reads of 0.3 s are still to do; one of them is waited for.
        assert time.perf_counter() - began < 1.8
        assert process.wait() == 0
    finally:
        process.kill()
        process.communicate()


def begun_in_turn(store: Store, waves: int, steps: int = 12) -> tuple[np.ndarray, list]:
    """(step, rank) seconds at which 3 ranks that train in step began to read, and their fields."""
    together, origin = threading.Barrier(3), time.perf_counter()
    began: list[list[float]] = [[], [], []]
    fields: list[list[torch.Tensor]] = [[], [], []]
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        source = source_of(store)
        read_into = source.store.read_into

        def slowly(*arguments: object) -> None:
            began[number].append(time.perf_counter() - origin)
            time.sleep(0.02)
            read_into(*arguments)  # type: ignore[arg-type]

        own = Store(store.path)
        own.read_into = slowly  # type: ignore[method-assign]
        source.store = own
        order = Order(source.starts("train", leads=1), seed=1)
        loader = Loader(source, order, range(3 * steps), batch=3, leads=1, rank=number, ranks=3,
                        ahead=2, waves=waves)  # fmt: skip
        try:
            with closing(iter(loader)) as batches:
                for batch in batches:
                    fields[number] += [batch.inputs.clone(), *map(torch.clone, batch.lead())]
                    time.sleep(0.2)  # computes
                    together.wait(30)
        except BaseException as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # Two deliveries a step, read in a row; the first ones fill the queue.
    return np.array([times[3 : 3 + 2 * (steps - 2) : 2] for times in began]).T, fields


def test_ranks_read_in_waves_and_get_the_same_numbers(store: Store) -> None:
    at_once, fields = begun_in_turn(store, waves=1)
    in_turn, same = begun_in_turn(store, waves=3)
    for ours, theirs in zip(chain(*same), chain(*fields), strict=True):
        assert torch.equal(ours, theirs)
    gaps = [np.median(np.diff(began, axis=1), axis=0) for began in (at_once, in_turn)]
    assert (np.abs(gaps[0]) < 0.015).all(), gaps
    assert (gaps[1] > 0.015).all(), "a turn is at least the 0.02 s that a read takes"


def test_closing_a_loader_does_not_wait_for_its_turn(store: Store) -> None:
    source = source_of(store)
    order = Order(source.starts("train", leads=1), seed=1)
    loader = Loader(source, order, range(8), batch=2, leads=1, rank=1, ranks=2, waves=2)
    batches = iter(loader)
    next(batches).lead()
    waiting = next(t for t in threading.enumerate() if t.name == "graticule-loader")
    began = time.perf_counter()
    batches.close()
    assert time.perf_counter() - began < 1.0
    assert not waiting.is_alive()
