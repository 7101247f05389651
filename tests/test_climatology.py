"""The climatology: groups by month and day, training times only, lazily."""

from collections.abc import Callable
from pathlib import Path

import cftime
import numpy as np
import pytest

from graticule.data.store import Store
from graticule.data.times import TimeAxis, seconds_of
from graticule.data.writer import StoreWriter
from graticule.evaluate import Climatology
from graticule.grid import Grid
from graticule.variables import Channel, Channels

GRID = Grid(np.array([30.0, 0.0, -30.0]), np.array([0.0, 120.0, 240.0]))


def make_store(
    path: Path,
    dates: list[cftime.datetime],
    field: Callable[[cftime.datetime], np.ndarray | float],
) -> Store:
    """Two channels: `a` as given, `b` its negative; the first column of `b` is land."""
    channels = Channels([Channel(variable=v, units="K", role="prognostic") for v in "ab"])
    seconds = np.array([seconds_of(date) for date in dates])
    times = TimeAxis.from_seconds(seconds, dates[0].calendar)
    writer = StoreWriter(path, channels=channels, grid=GRID, times=times)
    for i, date in enumerate(dates):
        plane = np.broadcast_to(np.float32(field(date)), GRID.shape)
        both = np.stack([plane, -plane])
        both[1, :, 0] = np.nan
        writer.write(i, both)
    return writer.finish()


def days(first: str, last: str, calendar: str = "standard") -> list[cftime.datetime]:
    ends = [
        cftime.datetime(*map(int, text.split("-")), calendar=calendar, has_year_zero=True)
        for text in (first, last)
    ]
    units = "days since 2000-01-01"
    low, high = (int(cftime.date2num(end, units, calendar, has_year_zero=True)) for end in ends)
    return list(cftime.num2date(range(low, high + 1), units, calendar, has_year_zero=True))


def month_day(date: cftime.datetime) -> float:
    return 100 * date.month + date.day


@pytest.fixture(scope="module")
def two_years(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """100 * month + day for 2003 and 2004, around the leap day and at the year's end."""
    dates = [
        date
        for year in (2003, 2004)
        for date in [*days(f"{year}-2-20", f"{year}-3-10"), *days(f"{year}-12-25", f"{year}-12-31")]
    ]
    return make_store(tmp_path_factory.mktemp("c") / "store", dates, month_day)


def test_no_day_shifts_after_29_february(two_years: Store) -> None:
    usual = Climatology(two_years, np.arange(len(two_years.times)), "month-day")
    checked = 0
    for i, date in enumerate(two_years.times.dates):
        if date.year == 2004:
            np.testing.assert_array_equal(
                two_years.read(i) - usual.mean(date), np.where(two_years.wet, 0.0, np.nan)
            )
            checked += 1
    assert checked == 20 + 7
    leap = usual.times_of(cftime.datetime(2004, 2, 29, calendar="standard"))
    assert [str(two_years.times.date(time))[:10] for time in leap] == ["2004-02-29"]


def test_mean_is_over_training_times_only(tmp_path: Path) -> None:
    dates = [date for y in (2001, 2002, 2003, 2004) for date in days(f"{y}-7-1", f"{y}-7-3")]
    store = make_store(tmp_path / "s", dates, lambda d: 1000.0 if d.year == 2004 else d.year - 2000)
    train = np.flatnonzero(store.times.within(["2001/2003"]))
    for grouping in ("month-day", "month", "all"):
        mean = Climatology(store, train, grouping).mean(dates[-1])
        np.testing.assert_array_equal(mean[0], np.full(GRID.shape, 2.0))
        assert np.isnan(mean[1, :, 0]).all()
        np.testing.assert_array_equal(mean[1, :, 1:], np.full((3, 2), -2.0))


def test_months_average_their_own_days(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", days("2003-1-30", "2003-2-2"), month_day)
    usual = Climatology(store, range(4), "month", channels=[0])
    assert usual.mean(store.times.date(0))[0, 0, 0] == (130 + 131) / 2
    assert usual.mean(store.times.date(3))[0, 0, 0] == (201 + 202) / 2
    whole = Climatology(store, range(4), "all", channels=[1]).mean(store.times.date(0))
    assert whole.shape == (1, 3, 3)
    assert whole[0, 0, 1] == -(130 + 131 + 201 + 202) / 4


def test_a_hole_leaves_the_mean_of_what_there_is(tmp_path: Path) -> None:
    def with_hole(date: cftime.datetime) -> np.ndarray:
        field = np.full(GRID.shape, float(date.year))
        field[0, 1] = np.nan if date.year == 2002 else field[0, 1]
        field[0, 2] = np.nan
        field[0, 2] = 7.0 if date.year == 2003 else np.nan
        return field

    dates = [date for y in (2001, 2002, 2003) for date in days(f"{y}-7-1", f"{y}-7-2")]
    store = make_store(tmp_path / "s", dates, with_hole)
    mean = Climatology(store, range(6), "month-day").mean(dates[0])[0]
    assert mean[0].tolist() == [2002.0, 2002.0, 7.0]
    mean = Climatology(store, range(4), "month-day").mean(dates[0])[0]
    assert mean[0, 1] == 2001.0
    assert np.isnan(mean[0, 2])


def test_float32_sums_would_drift_and_these_do_not(tmp_path: Path) -> None:
    # 1 + 2^24 is 2^24 in float32.
    store = make_store(
        tmp_path / "s", days("2003-7-1", "2003-7-4"), lambda d: 2.0**24 if d.day == 1 else 1.0
    )
    mean = Climatology(store, range(4), "all").mean(store.times.date(0))
    assert mean[0, 0, 0] == np.float32((2.0**24 + 3) / 4)
    assert mean[0, 0, 0] != np.float32(2.0**24 / 4)


def test_a_date_without_training_time_names_the_coarser_grouping(two_years: Store) -> None:
    leap = cftime.datetime(2004, 2, 29, calendar="standard")
    in_2003 = np.flatnonzero(two_years.times.within(["2003"]))
    with pytest.raises(ValueError, match=r"no training time on 29 February, so 2004-02-29.*"
                                         r"evaluate\.climatology=month"):  # fmt: skip
        Climatology(two_years, in_2003, "month-day").mean(leap)
    june = cftime.datetime(2004, 6, 1, calendar="standard")
    with pytest.raises(ValueError, match=r"no training time on June.*climatology=all"):
        Climatology(two_years, in_2003, "month").mean(june)
    assert Climatology(two_years, in_2003, "all").mean(june).shape == (2, 3, 3)


def test_groups_are_read_when_asked_for_and_dropped_when_many(two_years: Store) -> None:
    reads: list[int] = []

    class Counting(Store):
        def read(self, time, channels=None, rows=slice(None)):  # type: ignore[no-untyped-def]
            reads.append(time)
            return super().read(time, channels, rows)

    store = Counting(two_years.path)
    usual = Climatology(store, np.arange(len(store.times)), "month-day", keep=2)
    assert reads == []
    first, second, third = (store.times.date(i) for i in (0, 1, 2))
    usual.mean(first)
    assert [store.times.date(i).day for i in reads] == [first.day] * 2
    usual.mean(second)
    usual.mean(first)
    assert len(reads) == 4  # kept
    usual.mean(third)
    assert len(reads) == 6
    usual.mean(first)
    assert len(reads) == 6  # used last, so not the one that was dropped
    usual.mean(second)
    assert len(reads) == 8


def test_wrong_arguments_are_refused(two_years: Store) -> None:
    with pytest.raises(ValueError, match="climatology='day' is none of all, month"):
        Climatology(two_years, [0], "day")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one training time"):
        Climatology(two_years, [], "all")
