"""The time axis of a store: dates in any CF calendar, the step, gaps, ranges and windows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import cftime
import numpy as np

UNITS = "seconds since 1970-01-01 00:00:00"
CALENDARS = (
    "standard", "gregorian", "proleptic_gregorian", "julian", "noleap", "365_day", "all_leap",
    "366_day", "360_day",
)  # fmt: skip
MEAN_MONTH_SECONDS = 30.436875 * 86400
_CLOCK = r"(\d{1,2})(?::(\d{1,2})(?::(\d{1,2})(?:\.0*)?)?)?Z?"
_DATE = re.compile(rf"(-?\d{{1,6}})(?:-(\d{{1,2}})(?:-(\d{{1,2}})(?:[T ]{_CLOCK})?)?)?")


def whole_months(hours: Sequence[float]) -> bool:
    """Whether these are all so many mean months, to the second: 487 days are nearly 16."""
    seconds = 3600 * np.asarray(hours, dtype=np.float64)
    months = (seconds / MEAN_MONTH_SECONDS).round()
    return bool((np.abs(seconds - months * MEAN_MONTH_SECONDS) < 1).all())


def lead_in_words(hours: float) -> str:
    """`6 h`, `2.5 d` or `1 month`."""
    if hours > 0 and whole_months([hours]):
        months = round(hours * 3600 / MEAN_MONTH_SECONDS)
        return f"{months} month{'s' * (months > 1)}"
    return f"{hours / 24:.4g} d" if hours >= 24 else f"{hours:.4g} h"


@dataclass(frozen=True, eq=False)
class TimeAxis:
    """Strictly increasing times, int64 seconds since 1970 in `calendar` (year 0 exists).

    step_seconds: the regular step, or None where it is one calendar month. Times may have gaps;
    windows never cross one.
    """

    seconds: np.ndarray
    calendar: str
    step_seconds: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", np.asarray(self.seconds, dtype=np.int64))
        if self.calendar not in CALENDARS:
            raise ValueError(f"calendar {self.calendar!r} is none of {', '.join(CALENDARS)}")
        wrong = np.flatnonzero(np.diff(self.seconds) <= 0)
        if wrong.size:
            first, second = self.date(int(wrong[0])), self.date(int(wrong[0]) + 1)
            raise ValueError(
                f"times must increase: {second} follows {first}"
                f" ({wrong.size} such places); sort and remove duplicates first"
            )

    @classmethod
    def from_seconds(cls, seconds: np.ndarray, calendar: str) -> "TimeAxis":
        """An axis whose step is found: the commonest difference, or the month."""
        seconds = np.asarray(seconds, dtype=np.int64)
        axis = cls(seconds, calendar, None)
        if seconds.size < 2:
            raise ValueError("one time alone has no step; give at least two")
        differences = np.diff(seconds)
        months = np.diff(axis._month_numbers)
        days = differences / 86400
        monthly = days.min() >= 27 and np.median(days) <= 32 and np.median(months) == 1
        if monthly and months.min() > 0:
            # Every 30 days is no month: the day drifts. A twelfth of a year (some files' month)
            # drifts too, but stays in its month; in the 360_day calendar 30 days keep the day.
            unbroken = differences[days <= 32]
            even = unbroken.size > 2 and np.ptp(unbroken) == 0
            twelfth = abs(unbroken[0] - MEAN_MONTH_SECONDS) < 0.1 * 86400
            if not even or twelfth or len({date.day for date in axis.dates}) == 1:
                return axis
        values, counts = np.unique(differences, return_counts=True)
        return cls(seconds, calendar, int(values[counts.argmax()]))

    def __len__(self) -> int:
        return int(self.seconds.size)

    def date(self, index: int) -> cftime.datetime:
        return date_of(int(self.seconds[index]), self.calendar)

    @cached_property
    def dates(self) -> np.ndarray:
        """(time,) cftime.datetime objects."""
        return cftime.num2date(self.seconds, UNITS, self.calendar, has_year_zero=True)

    @cached_property
    def _month_numbers(self) -> np.ndarray:
        return np.array([date.year * 12 + date.month - 1 for date in self.dates], dtype=np.int64)

    @cached_property
    def segments(self) -> np.ndarray:
        """(time,) int: the number of the unbroken run of steps that each time belongs to."""
        if self.step_seconds is None:
            joined = np.diff(self._month_numbers) == 1
        else:
            joined = np.diff(self.seconds) == self.step_seconds
            for before in np.flatnonzero(np.diff(self.seconds) == self.step_seconds + 86400):
                joined[before] = self._is_leap_step(self.date(int(before)))
        return np.concatenate([[0], np.cumsum(~joined)]).astype(np.int64)

    def _is_leap_step(self, date: cftime.datetime) -> bool:
        """Whether the step from `date` is the one that 29 February makes a day longer.

        Five-day means at the same 73 dates of every year have such a step in leap years. Of daily
        data it would be a missing day.
        """
        step = self.step_seconds
        if step is None or step < 2 * 86400 or step % 86400 or not _has_leap_day(date):
            return False
        leap = date.replace(month=2, day=29, hour=0, minute=0, second=0, microsecond=0)
        return seconds_of(date) < seconds_of(leap) + 86400 <= seconds_of(date) + step + 86400

    @property
    def nominal_step_seconds(self) -> float:
        """The step; of a monthly axis, the mean month's 30.436875 days."""
        return MEAN_MONTH_SECONDS if self.step_seconds is None else float(self.step_seconds)

    def advanced(self, index: int, steps: int) -> cftime.datetime:
        """The date `steps` steps after time `index`, whether or not the axis reaches it."""
        there = index + steps
        if 0 <= there < len(self) and self.segments[there] == self.segments[index]:
            return self.date(there)
        if self.step_seconds is not None:
            return self._regularly_advanced(index, steps)
        date = self.date(index)
        month = date.year * 12 + date.month - 1 + steps
        first = date.replace(day=1, year=month // 12, month=month % 12 + 1)
        return first.replace(day=min(date.day, first.daysinmonth))

    def _regularly_advanced(self, index: int, steps: int) -> cftime.datetime:
        seconds = int(self.seconds[index]) + steps * self.step_seconds  # type: ignore[operator]
        if steps <= 0 or self.regular:
            return date_of(seconds, self.calendar)
        date = self.date(index)
        for _ in range(steps):
            step = self.step_seconds + 86400 * self._is_leap_step(date)  # type: ignore[operator]
            date = date_of(seconds_of(date) + step, self.calendar)
        return date

    @cached_property
    def regular(self) -> bool:
        """Whether every step is equally long: not of months, nor of an axis with the same dates in
        every year, where 29 February lengthens a step."""
        if self.step_seconds is None:
            return False
        longer = np.diff(self.seconds) == self.step_seconds + 86400
        return not (longer & (np.diff(self.segments) == 0)).any()

    def find(self, text: str) -> int:
        """Index of the time that `text` (ISO 8601) names; a whole day names its only time.

        ValueError if there is none, several, or the date does not exist in the calendar.
        """
        first, last = _bounds(text, self.calendar)
        inside = np.flatnonzero((self.seconds >= first) & (self.seconds <= last))
        if inside.size == 0:
            after = int(np.searchsorted(self.seconds, first))
            near = [self.date(i) for i in (after - 1, after) if 0 <= i < len(self)]
            raise ValueError(
                f"no time {text} in the store, which runs from {self.date(0)} to"
                f" {self.date(len(self) - 1)}; the nearest {'are' if len(near) > 1 else 'is'}"
                f" {' and '.join(map(str, near))}"
            )
        exact = np.flatnonzero(self.seconds == first)
        names_hour = len(text.strip().replace("T", " ").split()) == 2
        if inside.size > 1 and (exact.size == 0 or not names_hour):
            raise ValueError(
                f"{text} stands for {inside.size} times, {self.date(int(inside[0]))} to"
                f" {self.date(int(inside[-1]))}; name the hour too"
            )
        return int(exact[0]) if exact.size else int(inside[0])

    def within(self, ranges: Sequence[str]) -> np.ndarray:
        """(time,) bool: inside one of the `first/last` ranges, both ends included.

        An end is as wide as it is written: `1982/1983-06` ends with the last second of June.
        """
        inside = np.zeros(len(self), dtype=bool)
        for text in ranges:
            first, slash, last = text.partition("/")
            if not slash:
                last = first
            low, high = _bounds(first, self.calendar)[0], _bounds(last, self.calendar)[1]
            if low > high:
                raise ValueError(f"range {text} ends before it begins")
            found = (self.seconds >= low) & (self.seconds <= high)
            if not found.any():
                raise ValueError(
                    f"range {text} holds no time of the store, which runs from {self.date(0)} to"
                    f" {self.date(len(self) - 1)}. Name another, or another store, if this is not"
                    " the one that the range was meant for"
                )
            inside |= found
        return inside

    def check_splits(self, splits: Mapping[str, Sequence[str]]) -> None:
        """ValueError unless every range holds a time and no time is in two splits."""
        taken = np.zeros(len(self), dtype=bool)
        for split, ranges in splits.items():
            inside = self.within(ranges)
            shared = np.flatnonzero(taken & inside)
            if shared.size:
                raise ValueError(
                    f"{split} shares {shared.size} times with another split, the first is"
                    f" {self.date(int(shared[0]))}; give ranges that do not overlap"
                )
            taken |= inside

    def windows(self, offsets: Sequence[int], allowed: np.ndarray) -> np.ndarray:
        """Indices i such that every i + offset lies in i's unbroken segment and is `allowed`.

        offsets: in steps. allowed: (time,) bool. The last window counts.
        """
        starts = np.arange(len(self))
        good = np.ones(len(self), dtype=bool)
        for offset in sorted({0, *offsets}):
            index = starts + offset
            here = (index >= 0) & (index < len(self))
            index = np.where(here, index, 0)
            good &= here & (self.segments[index] == self.segments)
            if offset in offsets:
                good &= allowed[index]
        return starts[good]


def _has_leap_day(date: cftime.datetime) -> bool:
    return bool(date.replace(day=1, month=2).daysinmonth == 29) and date.calendar != "360_day"


def date_of(seconds: int, calendar: str) -> cftime.datetime:
    """The date of `seconds` since 1970 in `calendar`."""
    return cftime.num2date(seconds, UNITS, calendar, has_year_zero=True)


def seconds_of(date: cftime.datetime) -> int:
    """Seconds since 1970, in the date's own calendar, to the nearest second."""
    return round(float(cftime.date2num(date, UNITS, date.calendar, has_year_zero=True)))


def _bounds(text: str, calendar: str) -> tuple[int, int]:
    """First and last second of the period that an ISO 8601 text names."""
    match = _DATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no date: write 2003, 2003-02, 2003-02-28 or 2003-02-28T06:00"
        )
    numbers = [int(part) for part in match.groups() if part is not None]
    year = numbers[0]
    full = [*numbers, *[1, 1, 0, 0, 0][len(numbers) - 1 :]]
    try:
        # CF: these calendars have no year 0 and none before it.
        if year < 1 and calendar in ("standard", "gregorian", "julian"):
            raise ValueError(text)
        first = cftime.datetime(*full, calendar=calendar, has_year_zero=True)
    except ValueError:
        raise ValueError(f"{text} is not in the {calendar} calendar") from None
    start = seconds_of(first)
    if len(numbers) == 1:
        return start, seconds_of(first.replace(year=year + 1)) - 1
    if len(numbers) == 2:
        # Not the length of the month: October 1582 has 21 days.
        following = divmod(12 * year + first.month, 12)
        return start, seconds_of(first.replace(year=following[0], month=following[1] + 1)) - 1
    return start, start + (86400, 3600, 60, 1)[len(numbers) - 3] - 1
