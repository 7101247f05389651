"""The time axis: calendars, steps, gaps, names of dates, ranges and windows."""

from collections.abc import Sequence

import cftime
import numpy as np
import pytest

from graticule.data.times import CALENDARS, TimeAxis, date_of, lead_in_words, seconds_of

HOUR, DAY = 3600, 86400


def stamp(*parts: int, calendar: str = "standard") -> int:
    return seconds_of(cftime.datetime(*parts, calendar=calendar, has_year_zero=True))


def axis_of(dates: Sequence[tuple[int, ...]], calendar: str = "standard") -> TimeAxis:
    seconds = np.array([stamp(*date, calendar=calendar) for date in dates])
    return TimeAxis.from_seconds(seconds, calendar)


def daily(
    first: tuple[int, ...], num: int, calendar: str = "standard", without: Sequence[int] = ()
) -> TimeAxis:
    start = stamp(*first, calendar=calendar)
    return TimeAxis(start + DAY * np.delete(np.arange(num), list(without)), calendar, DAY)


def texts(axis: TimeAxis, inside: np.ndarray) -> list[str]:
    return [date.isoformat()[:16] for date in axis.dates[inside]]


# Steps and gaps


@pytest.mark.parametrize("step", [600, HOUR, 6 * HOUR, DAY, 5 * DAY, 7 * DAY, 28 * DAY])
def test_a_regular_step_is_found_whatever_the_gaps(step: int) -> None:
    seconds = stamp(2003, 2, 20) + step * np.array([0, 1, 2, 5, 6, 7, 8, 20])
    axis = TimeAxis.from_seconds(seconds, "standard")
    assert axis.step_seconds == step
    assert axis.segments.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert axis.nominal_step_seconds == step


MONTHLY = {
    "first of the month": [(2003, 11, 1), (2003, 12, 1), (2004, 1, 1), (2004, 2, 1), (2004, 3, 1)],
    "middle of the month": [(2003, 11, 16), (2003, 12, 16, 12), (2004, 1, 16, 12),
                            (2004, 2, 15, 12), (2004, 3, 16, 12)],
    "end of the month": [(2003, 11, 30), (2003, 12, 31), (2004, 1, 31), (2004, 2, 29),
                         (2004, 3, 31)],
    "equal steps from March to July": [(2003, 3, 16, 12), (2003, 4, 16), (2003, 5, 16, 12),
                                       (2003, 6, 16), (2003, 7, 16, 12)],
    "two months": [(2003, 12, 1), (2004, 1, 1)],
    "three equal months": [(2003, 12, 1), (2004, 1, 1), (2004, 2, 1)],
}  # fmt: skip


@pytest.mark.parametrize("dates", MONTHLY.values(), ids=MONTHLY.keys())
def test_months_are_one_step_each_across_the_end_of_a_year(dates: list) -> None:
    axis = axis_of(dates)
    assert axis.step_seconds is None
    assert axis.segments.tolist() == [0] * len(dates)
    assert axis.nominal_step_seconds == 30.436875 * DAY


def test_a_missing_month_is_a_gap() -> None:
    axis = axis_of([(2003, 10, 16), (2003, 11, 16), (2004, 1, 16), (2004, 2, 15), (2004, 3, 16)])
    assert axis.step_seconds is None
    assert axis.segments.tolist() == [0, 0, 1, 1, 1]


def test_summers_alone_are_monthly_with_a_gap_every_year() -> None:
    axis = axis_of([(year, month, 1) for year in (2001, 2002) for month in (6, 7, 8)])
    assert axis.step_seconds is None
    assert axis.segments.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_twelfth_of_a_year_is_a_month() -> None:
    seconds = 380059200 + 2629800 * np.arange(24)  # 1982-01-16 20:00, 30.4375 days
    axis = TimeAxis.from_seconds(seconds, "standard")
    assert axis.step_seconds is None
    assert axis.segments.tolist() == [0] * 24


@pytest.mark.parametrize("first", [(2003, 1, 1), (2003, 2, 15)])
def test_thirty_days_are_a_step_and_no_month(first: tuple[int, int, int]) -> None:
    axis = TimeAxis.from_seconds(stamp(*first) + 30 * DAY * np.arange(9), "standard")
    assert axis.step_seconds == 30 * DAY
    assert axis.segments.tolist() == [0] * 9


def test_equal_months_of_winters_alone_keep_their_day_and_are_months() -> None:
    axis = axis_of([(2000 + w + (m < 12), m, 1) for w in range(3) for m in (12, 1, 2)])
    assert axis.step_seconds is None
    assert axis.segments.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_in_the_360_day_calendar_thirty_days_are_a_month() -> None:
    axis = axis_of([(2003, month, 16) for month in range(1, 13)], "360_day")
    assert axis.step_seconds is None
    assert axis.advanced(11, 2).isoformat() == "2004-02-16T00:00:00"


def test_one_time_alone_has_no_step() -> None:
    with pytest.raises(ValueError, match="one time alone has no step; give at least two"):
        TimeAxis.from_seconds(np.array([0]), "standard")


@pytest.mark.parametrize(("days", "places"), [([0, 1, 1, 2], 1), ([0, 2, 1, 0], 2)])
def test_repeated_and_unsorted_times_are_refused_with_their_dates(days: list, places: int) -> None:
    message = rf"times must increase: 2003-01-0\d 00:00:00 follows 2003-01-0\d .*{places} such"
    with pytest.raises(ValueError, match=message):
        TimeAxis(stamp(2003, 1, 1) + DAY * np.array(days), "standard", DAY)


def test_an_unknown_calendar_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"calendar 'mayan' is none of standard, gregorian, .*360"):
        TimeAxis(np.array([0, DAY]), "mayan", DAY)


# Calendars


@pytest.mark.parametrize("calendar", CALENDARS)
@pytest.mark.parametrize("parts", [(1, 1, 1), (1582, 10, 4), (1850, 6, 30, 18), (1969, 12, 30, 23),
                                   (2004, 2, 28), (9999, 12, 30, 23, 59, 59)])  # fmt: skip
def test_dates_round_trip_to_the_second(calendar: str, parts: tuple[int, ...]) -> None:
    seconds = stamp(*parts, calendar=calendar)
    back = date_of(seconds, calendar)
    expected = (*parts, *[0] * (6 - len(parts)))
    assert (back.year, back.month, back.day, back.hour, back.minute, back.second) == expected
    assert seconds_of(back) == seconds


def test_noleap_days_run_from_28_february_to_1_march_without_a_gap() -> None:
    axis = axis_of([(2004, 2, day) for day in range(25, 29)] + [(2004, 3, d) for d in range(1, 6)],
                   "noleap")  # fmt: skip
    assert len(axis) == 9
    assert axis.step_seconds == DAY
    assert axis.segments.tolist() == [0] * 9
    with pytest.raises(ValueError, match="2004-02-29 is not in the noleap calendar"):
        axis.find("2004-02-29")
    assert axis.date(axis.find("2004-02-28") + 1).isoformat() == "2004-03-01T00:00:00"


@pytest.mark.parametrize(
    ("text", "calendar"),
    [
        ("2004-02-29", "365_day"),
        ("2003-02-29", "standard"),
        ("1900-02-29", "proleptic_gregorian"),
        ("2004-02-30", "366_day"),
        ("2004-02-31", "360_day"),
        ("1582-10-10", "standard"),
        ("2003-13", "standard"),
        ("2003-00", "standard"),
        ("2003-12-31T24:00", "standard"),
        ("2003-12-31T23:59:60", "standard"),
        ("0000", "standard"),
        ("-0001-01-01", "julian"),
    ],
)
def test_a_date_outside_its_calendar_is_refused(text: str, calendar: str) -> None:
    axis = daily((1, 1, 2), 3, calendar)
    with pytest.raises(ValueError, match=f"{text} is not in the {calendar} calendar"):
        axis.find(text)


@pytest.mark.parametrize(
    ("text", "calendar"),
    [("2004-02-30", "360_day"), ("2003-02-29", "all_leap"), ("1900-02-29", "julian"),
     ("2004-02-29", "standard"), ("0000-02-29", "proleptic_gregorian"), ("0000-01-01", "noleap"),
     ("-0004-02-28", "noleap")],
)  # fmt: skip
def test_a_date_that_only_some_calendars_have_is_found_there(text: str, calendar: str) -> None:
    sign, year, month, day = 1, *(int(part) for part in text.lstrip("-").split("-"))
    sign = -1 if text.startswith("-") else 1
    axis = daily((sign * year, month, day), 3, calendar)
    assert axis.find(text) == 0


def test_there_are_no_leap_seconds() -> None:
    assert stamp(2017, 1, 1) - stamp(2016, 12, 31) == DAY


def test_a_range_over_the_calendar_reform_ends_with_october() -> None:
    axis = daily((1582, 9, 30), 40)
    assert texts(axis, axis.within(["1582-10"]))[-1] == "1582-10-31T00:00"
    assert axis.within(["1582-10"]).sum() == 21


# Names of dates


def test_a_day_names_its_only_time_whatever_the_hour() -> None:
    axis = TimeAxis(stamp(2003, 2, 20, 12) + DAY * np.arange(5), "standard", DAY)
    assert axis.find("2003-02-22") == 2
    assert axis.find(" 2003-02-22 ") == 2
    assert axis.find("2003-02-22T12:00") == 2
    assert axis.find("2003-02-22 12:00:00") == 2
    assert axis.find("2003-02-22T12Z") == 2
    assert axis.find("2003-02-22T12:00:00.000000000") == 2
    assert axis.find("2003-2-22") == 2


@pytest.mark.parametrize("text", ["2003-02-21", "  2003-02-21  ", "2003-02", "2003"])
def test_a_day_of_several_times_needs_its_hour(text: str) -> None:
    axis = TimeAxis(stamp(2003, 2, 20) + 6 * HOUR * np.arange(12), "standard", 6 * HOUR)
    number = 4 if "-21" in text else 12
    with pytest.raises(ValueError, match=rf"{text} stands for {number} times, 2003-02-2\d 00:00:00"
                                         r" to 2003-02-2\d 18:00:00; name the hour"):  # fmt: skip
        axis.find(text)
    assert axis.find("2003-02-21T06") == 5
    assert axis.find("2003-02-21T00") == 4


def test_an_hour_of_several_times_names_the_one_at_its_start() -> None:
    axis = TimeAxis(stamp(2003, 2, 20) + 600 * np.arange(30), "standard", 600)
    assert axis.find("2003-02-20T01") == 6
    assert axis.find("2003-02-20T01:10") == 7
    late = TimeAxis(stamp(2003, 2, 20, 0, 5) + 600 * np.arange(30), "standard", 600)
    with pytest.raises(ValueError, match="stands for 6 times"):
        late.find("2003-02-20T01")


def test_a_month_names_its_only_time() -> None:
    axis = axis_of(MONTHLY["middle of the month"])
    assert axis.find("2004-02") == 3
    with pytest.raises(ValueError, match="2003 stands for 2 times"):
        axis.find("2003")


def test_a_time_that_is_not_there_is_an_error_with_the_ends_of_the_store() -> None:
    axis = daily((2003, 2, 20), 20, without=[8])
    for text in ("2003-02-28", "2002", "2003-02-21T06:00"):
        with pytest.raises(ValueError, match=f"no time {text} in the store, which runs from"
                                             " 2003-02-20 00:00:00 to 2003-03-11"):  # fmt: skip
            axis.find(text)
    for text, near in (
        ("2003-02-28", "are 2003-02-27 00:00:00 and 2003-03-01 00:00:00"),
        ("2002", "is 2003-02-20 00:00:00"),
        ("2003-02-21T06:00", "are 2003-02-21 00:00:00 and 2003-02-22 00:00:00"),
        ("2004", "is 2003-03-11 00:00:00"),
    ):
        with pytest.raises(ValueError, match=f"the nearest {near}$"):
            axis.find(text)


@pytest.mark.parametrize(
    ("hours", "told"),
    [(6, "6 h"), (23.5, "23.5 h"), (24, "1 d"), (60, "2.5 d"), (720, "30 d"), (0, "0 h"),
     (730.485, "1 month"), (3 * 730.485, "3 months"), (1.5 * 730.485, "45.66 d"),
     (487 * 24, "487 d"), (1461 * 24, "1461 d")],
)  # fmt: skip
def test_a_lead_is_told_in_hours_days_or_mean_months(hours: float, told: str) -> None:
    assert lead_in_words(hours) == told


@pytest.mark.parametrize("text", ["", "yesterday", "20030228", "2003-", "2003-02-28T", "28.2.2003",
                                  "2003-02T06", "2003-02-28T06::30", "2003-02-28T06:00+01:00",
                                  "2003-02-28-05", "2_003", "2003/2004",
                                  "99999999999"])  # fmt: skip
def test_a_text_that_is_no_date_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is no date: write 2003, 2003-02, 2003-02-28 or"):
        daily((2003, 2, 20), 3).find(text)


# Ranges


@pytest.mark.parametrize(
    ("text", "first", "last", "num"),
    [
        ("2003", "2003-01-01T00:00", "2003-12-31T18:00", 365 * 4),
        ("2002/2002-02", "2002-01-01T00:00", "2002-02-28T18:00", 59 * 4),
        ("2003-12-31/2004", "2003-12-31T00:00", "2004-01-31T18:00", 32 * 4),
        ("2003-12-31T06/2003-12-31T18", "2003-12-31T06:00", "2003-12-31T18:00", 3),
        ("2003-12-31T06:00:01/2003-12-31T17:59:59", "2003-12-31T12:00", "2003-12-31T12:00", 1),
        ("1900/2100", "2002-01-01T00:00", "2004-01-31T18:00", 761 * 4),
    ],
)
def test_a_range_is_as_wide_as_it_is_written(text: str, first: str, last: str, num: int) -> None:
    axis = TimeAxis(stamp(2002, 1, 1) + 6 * HOUR * np.arange(761 * 4), "standard", 6 * HOUR)
    found = texts(axis, axis.within([text]))
    assert (found[0], found[-1], len(found)) == (first, last, num)


def test_several_ranges_are_joined_and_none_is_empty() -> None:
    axis = daily((2003, 2, 20), 20)
    inside = axis.within(["2003-02-21/2003-02-22", "2003-02-22/2003-02-23", "2003-03-01"])
    assert np.flatnonzero(inside).tolist() == [1, 2, 3, 9]
    assert not axis.within([]).any()


def test_february_ends_in_each_calendar_where_it_ends_there() -> None:
    for calendar, last in [("standard", 29), ("noleap", 28), ("360_day", 30), ("all_leap", 29)]:
        axis = daily((2004, 2, 1), 40, calendar)
        assert axis.within(["2004-02"]).sum() == last


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2003-03/2003-02", "range 2003-03/2003-02 ends before it begins"),
        ("1999", "range 1999 holds no time of the store, which runs from 2003-02-20 00:00:00 to"
                 " 2003-03-11 00:00:00"),
        ("2003-02-20/", "'' is no date"),
        ("2003/2004/2005", "'2004/2005' is no date"),
        ("2003-02-30/2003-03", "2003-02-30 is not in the standard calendar"),
    ],
)  # fmt: skip
def test_a_range_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        daily((2003, 2, 20), 20).within(["2003-02", text])


# Steps ahead and windows


def test_a_step_ahead_is_the_time_of_the_axis_where_it_has_one() -> None:
    axis = axis_of(MONTHLY["middle of the month"])
    for index in range(5):
        for there in range(5):
            assert axis.advanced(index, there - index) == axis.date(there)


def test_a_step_before_the_first_month_is_not_the_last_one() -> None:
    axis = axis_of(MONTHLY["first of the month"])
    assert axis.advanced(0, -1).isoformat() == "2003-10-01T00:00:00"
    assert axis.advanced(1, -14).isoformat() == "2002-10-01T00:00:00"


def test_a_step_beyond_the_last_month_stays_within_its_month() -> None:
    axis = axis_of([(2003, 11, 30), (2003, 12, 31)])
    assert axis.advanced(1, 1).isoformat() == "2004-01-31T00:00:00"
    assert axis.advanced(1, 2).isoformat() == "2004-02-29T00:00:00"
    assert axis.advanced(1, 14).isoformat() == "2005-02-28T00:00:00"


def test_a_step_over_a_gap_counts_the_months_that_are_not_there() -> None:
    axis = axis_of([(2003, 10, 1), (2003, 11, 1), (2004, 1, 1), (2004, 2, 1)])
    assert axis.advanced(1, 1).isoformat() == "2003-12-01T00:00:00"
    assert axis.advanced(1, 2).isoformat() == "2004-01-01T00:00:00"


def test_regular_steps_ahead_ignore_gaps_and_follow_the_calendar() -> None:
    axis = daily((2004, 2, 27), 5, "noleap", without=[2])
    assert axis.advanced(0, 2).isoformat() == "2004-03-01T00:00:00"
    assert axis.advanced(3, 400).isoformat() == "2005-04-07T00:00:00"
    assert axis.advanced(0, -1).isoformat() == "2004-02-26T00:00:00"


def test_windows_never_cross_a_gap() -> None:
    axis = daily((2003, 2, 20), 20, without=[8])
    everything = np.ones(19, dtype=bool)
    starts = axis.windows((0, 1, 2, 3), everything)
    assert starts.tolist() == [*range(5), *range(8, 16)]  # 5 and 8 windows
    two_ranges = daily((2003, 2, 20), 40, without=range(10, 30))
    assert len(two_ranges.windows((0, 1, 2, 3), np.ones(20, dtype=bool))) == 14


def test_every_time_of_a_window_must_be_allowed_and_the_last_window_counts() -> None:
    axis = daily((2003, 2, 20), 10)
    assert axis.windows((0, 1, 2, 3), np.ones(10, dtype=bool)).tolist() == list(range(7))
    allowed = axis.within(["2003-02-22/2003-02-26"])  # 2 to 6
    assert axis.windows((0, 1), allowed).tolist() == [2, 3, 4, 5]
    assert axis.windows((-1, 0, 1), allowed).tolist() == [3, 4, 5]
    assert axis.windows((0, 12), allowed).tolist() == []


def test_an_initial_time_that_is_not_read_need_not_be_allowed() -> None:
    axis = daily((2003, 2, 20), 10)
    allowed = axis.within(["2003-02-22/2003-02-26"])
    assert axis.windows((1,), allowed).tolist() == [1, 2, 3, 4, 5]
    assert axis.windows((-2, 2), allowed).tolist() == [4]


def test_windows_with_a_stride_are_those_counted_one_by_one() -> None:
    draw = np.random.default_rng(0)
    axis = daily((2003, 2, 20), 60, without=sorted(draw.choice(60, 9, replace=False)))
    allowed = draw.random(len(axis)) < 0.8
    kept = {int(s): i for i, s in enumerate(axis.seconds)}
    for offsets in [(0, 3), (-2, 0, 2), (-1, 0, 1, 2), (4,)]:
        expected = []
        for index, second in enumerate(axis.seconds):
            low, high = min(0, *offsets), max(0, *offsets)
            whole = [int(second) + DAY * k in kept for k in range(low, high + 1)]
            if all(whole) and all(allowed[kept[int(second) + DAY * k]] for k in offsets):
                expected.append(index)
        assert axis.windows(offsets, allowed).tolist() == expected


def test_splits_that_share_a_time_are_refused_with_its_date():
    axis = TimeAxis(86400 * np.arange(10), "standard", 86400)
    axis.check_splits({"train": ["1970-01-01/1970-01-05"], "test": ["1970-01-06/1970-01-07"]})
    with pytest.raises(ValueError, match=r"test shares 2 times .* 1970-01-04 .*do not overlap"):
        axis.check_splits({"train": ["1970-01-01/1970-01-05"], "test": ["1970-01-04/1970-01-07"]})


def five_days(years: range) -> np.ndarray:
    """Seconds of the same 73 dates in each julian year."""
    dates = cftime.num2date(5 * np.arange(73), "days since 1959-01-03 12:00:00", "noleap")
    return np.array([seconds_of(cftime.datetime(y, d.month, d.day, 12, calendar="julian"))
                     for y in years for d in dates])  # fmt: skip


def test_a_step_that_29_february_makes_a_day_longer_is_no_gap() -> None:
    axis = TimeAxis.from_seconds(five_days(range(1958, 1967)), "julian")
    assert axis.step_seconds == 5 * DAY
    assert sorted(set(np.diff(axis.seconds))) == [5 * DAY, 6 * DAY]
    assert axis.segments.max() == 0
    assert not axis.regular
    before = axis.find("1960-02-27")
    assert str(axis.advanced(before, 1)) == "1960-03-04 12:00:00"
    last = len(axis) - 1
    # Beyond the axis the dates stay those of every year: 1968 is a leap year.
    assert [str(axis.advanced(last, 73 * n + 12)) for n in (0, 1, 2)] == [
        "1967-02-27 12:00:00", "1968-02-27 12:00:00", "1969-02-27 12:00:00",
    ]  # fmt: skip
    assert str(axis.advanced(last, 73 + 13)) == "1968-03-04 12:00:00"
    lost = TimeAxis.from_seconds(np.delete(axis.seconds, before), "julian")
    assert lost.segments.max() == 1


@pytest.mark.parametrize(
    ("days", "step"),
    [([0, 1, 3, 4, 5], 1), ([0, 5, 10, 16, 21], 5), ([0, 5, 10, 20, 25], 5)],
)
def test_a_longer_step_without_a_leap_day_in_it_is_a_gap(days: list[int], step: int) -> None:
    # From 2004-02-27 on two days over 29 February are a missing day; in 2003 there is none.
    for year in (2003, 2004):
        start = seconds_of(cftime.datetime(year, 3 if step > 1 else 2, 27 if step == 1 else 5))
        axis = TimeAxis(start + DAY * np.array(days), "standard", step * DAY)
        assert axis.segments.max() == 1
        assert axis.regular
