"""Reading CF metadata: which dimension is which, what grid it is, fills, scales and times.

Every function takes plain names, attributes and arrays, so that real files' habits can be tried
one by one. Nothing here opens a file.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import cftime
import numpy as np
import xarray as xr

from graticule.data.times import seconds_of
from graticule.data.units import canonical, is_pressure

Axis = Literal["lat", "lon", "level", "time", "expver"]

_LEVEL_STANDARD_NAMES = ("depth", "height", "altitude", "air_pressure", "model_level_number")
_NAMES: dict[str, Axis] = {
    **dict.fromkeys(("lat", "lats", "latitude", "nlat", "yc_lat"), "lat"),
    **dict.fromkeys(("lon", "lons", "long", "longitude", "nlon"), "lon"),
    **dict.fromkeys(("time", "t", "date", "valid_time", "time_counter"), "time"),
    **dict.fromkeys(
        ("depth", "deptht", "depthu", "depthv", "depthw", "lev", "level", "levels", "plev",
         "pressure_level", "isobaricinhpa", "height", "altitude", "z", "z_t", "st_ocean"),
        "level",
    ),
    "expver": "expver",
}  # fmt: skip
# nav_lat, TLAT, TLONG, geolon_t and their like, where attributes say nothing.
_TWO_DIMENSIONAL = re.compile(r"^(?:nav_|geo|[tuvxy])?(lat|lon)(?:g|itude)?(?:_\w+)?$")
_ROTATED = ("grid_latitude", "grid_longitude")
_PROJECTED = ("projection_x_coordinate", "projection_y_coordinate")


def axis_of(name: str, attributes: Mapping[str, Any] | None) -> Axis | None:
    """What the dimension `name` runs along, by its coordinate's attributes, else by its name.

    attributes: of the coordinate variable, None where there is none. Axes of rotated and of
    projected grids are none of ours.
    """
    attributes = attributes or {}
    standard = str(attributes.get("standard_name", "")).lower()
    raw_unit = str(attributes.get("units", ""))
    unit, letter = canonical(raw_unit), str(attributes.get("axis", "")).upper()
    if standard in (*_ROTATED, *_PROJECTED):
        return None
    if standard == "latitude" or unit == "degrees_north":
        return "lat"
    if standard == "longitude" or unit == "degrees_east":
        return "lon"
    if standard == "time" or " since " in raw_unit or letter == "T":
        return "time"
    if (
        standard in _LEVEL_STANDARD_NAMES
        or "positive" in attributes
        or letter == "Z"
        or is_pressure(unit)
    ):
        return "level"
    # Letters X and Y alone also mark kilometres of a map; degrees make them ours.
    if letter == "Y" and unit == "degree":
        return "lat"
    if letter == "X" and unit == "degree":
        return "lon"
    return _NAMES.get(name.lower())


def foreign_grid(variable: xr.Variable, variables: Mapping[Any, xr.Variable]) -> str | None:
    """The kind of horizontal grid that is not latitude by longitude, in a few words; None: no
    horizontal grid is recognised.

    variables: all of the file. To be asked only of variables without `lat` and `lon` dimensions.
    """
    attributes = variable.attrs
    if "mesh" in attributes or attributes.get("CDI_grid_type") == "unstructured":
        return f"unstructured grid (over {', '.join(map(str, variable.dims[-1:]))})"
    mapping = variables.get(str(attributes.get("grid_mapping", "")).split(":")[0])
    mapping_name = "" if mapping is None else str(mapping.attrs.get("grid_mapping_name", ""))
    standards = {
        str(variables[dim].attrs.get("standard_name", "")): str(dim)
        for dim in variable.dims
        if dim in variables
    }
    dims = " x ".join(map(str, variable.dims[-2:]))
    if (
        mapping_name == "rotated_latitude_longitude"
        or set(_ROTATED) <= set(standards)
        or {"rlat", "rlon"} <= set(variable.dims)
    ):
        return f"rotated grid ({dims})"
    if set(_PROJECTED) <= set(standards) or mapping_name not in ("", "latitude_longitude"):
        return f"projected grid ({mapping_name or dims})"
    found = positions_over(variable, variables)
    if found is not None:
        lat, lon = found
        lat_dims = variables[lat].dims
        shape = "curvilinear" if len(lat_dims) > 1 else "unstructured"
        return f"{shape} grid ({lat}, {lon} over {' x '.join(map(str, lat_dims))})"
    return None


def positions_over(
    variable: xr.Variable, variables: Mapping[Any, xr.Variable]
) -> tuple[str, str] | None:
    """Names of the latitude and the longitude that `variables` give for the points of `variable`,
    over dimensions that are themselves neither."""
    found: dict[str, str] = {}
    for name, other in variables.items():
        kind = axis_of(str(name), other.attrs)
        if kind is None and (match := _TWO_DIMENSIONAL.match(str(name).lower())):
            kind = "lat" if match[1] == "lat" else "lon"
        if (
            kind in ("lat", "lon")
            and kind not in found
            and other.dims
            and set(other.dims) <= set(variable.dims)
            and other.dims != (name,)
        ):
            found[kind] = str(name)
    return (found["lat"], found["lon"]) if set(found) == {"lat", "lon"} else None


def straightened(lat: np.ndarray, lon: np.ndarray) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Latitudes (n,) and longitudes (m,) of a grid whose two-dimensional positions are a regular
    one's after all, and the dimension (0 or 1) that latitude runs along; None: it is curvilinear.

    lat, lon: (any, any) degrees of the same points. 1e-4 degrees is rounding, as between files.
    """
    if lat.ndim != 2 or lat.shape != lon.shape or not np.isfinite([lat, lon]).all():
        return None
    for dim in (0, 1):
        rows, columns = (lat, lon) if dim == 0 else (lat.T, lon.T)
        turns = (columns - columns[:1] + 180) % 360 - 180
        if np.abs(rows - rows[:, :1]).max() <= 1e-4 and np.abs(turns).max() <= 1e-4:
            return dim, rows[:, 0].copy(), columns[0].copy()
    return None


def horizontal_order(
    lat: np.ndarray, lon: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """How to turn any latitudes and longitudes north to south and east from [0, 360).

    Returns (lat, lon, lat_order, lon_order, repeats): the ordered coordinates, the source
    indices that they come from, and (n, 2) pairs of source columns (repeated, kept) that are the
    same meridian, as on a globe closed by its first column. A region across Greenwich keeps its
    columns together (350, 355, 360, 365); a globe begins at its first longitude from 0.
    """
    lat, lon = np.asarray(lat, np.float64), np.asarray(lon, np.float64)
    lat_order = np.argsort(-lat, kind="stable")
    ordered_lat = lat[lat_order]
    # Rounding may put a pole row a hair beyond the pole.
    near_pole = (np.abs(ordered_lat) > 90) & (np.abs(ordered_lat) < 90 + 1e-4)
    ordered_lat = np.where(near_pole, np.sign(ordered_lat) * 90.0, ordered_lat)

    turned = np.mod(lon, 360.0)
    # The origin, rounded to just below 0 or 360, is the origin.
    turned = np.where(turned > 360 - 1e-4, 0.0, turned)
    order = np.argsort(turned, kind="stable")
    turned = turned[order]
    if turned.size < 2:
        return ordered_lat, turned, lat_order, order, np.empty((0, 2), int)
    gaps = np.diff(np.append(turned, turned[0] + 360))
    # A hundredth of a column: axes such as 20.1666667 + 0.3333333 n drift by their rounding.
    same = gaps < 0.01 * _usual(gaps)
    repeats = []
    kept = np.ones(order.size, bool)
    for position in np.flatnonzero(same):
        following = (position + 1) % order.size
        # Of the two the column that comes first in the file stays.
        first, second = sorted((int(order[position]), int(order[following])))
        repeats.append((second, first))
        kept[position if int(order[position]) == second else following] = False
    order, turned = order[kept], turned[kept]
    gaps = np.diff(np.append(turned, turned[0] + 360))
    if gaps.max() > 1.5 * _usual(gaps):
        start = (int(gaps.argmax()) + 1) % order.size
        order = np.roll(order, -start)
        turned = np.concatenate([turned[start:], turned[:start] + 360])
    return ordered_lat, turned, lat_order, order, np.array(repeats, int).reshape(-1, 2)


def _usual(gaps: np.ndarray) -> float:
    """The median gap without the largest, which may be the rest of the globe."""
    return float(np.median(np.sort(gaps)[:-1])) if gaps.size > 1 else float(gaps[0])


def fill_values(attributes: Mapping[str, Any], dtype: np.dtype) -> np.ndarray:
    """All numbers that stand for no value, as `dtype`: `_FillValue`, each `missing_value`, and
    what NetCDF leaves in floats that nobody wrote."""
    numbers: list[Any] = []
    for key in ("_FillValue", "missing_value"):
        if key in attributes:
            numbers += list(np.ravel(attributes[key]))
    if dtype.kind == "f" and "_FillValue" not in attributes:
        numbers.append(9.969209968386869e36)
    fills = []
    for number in numbers:
        try:
            value = np.asarray(float(number))
        except (TypeError, ValueError):
            continue
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            if not np.isfinite(value):
                continue
            if dtype.kind == "u" and -(info.max + 1) // 2 <= value < 0:
                value = value + info.max + 1  # the fill of an unsigned variable written as signed
            if value != np.rint(value) or not info.min <= value <= info.max:
                continue
        with np.errstate(over="ignore"):
            fills.append(value.astype(dtype))
    return np.unique(np.array(fills, dtype))


def decode(
    raw: np.ndarray, attributes: Mapping[str, Any], factor: float = 1.0, offset: float = 0.0
) -> np.ndarray:
    """Stored numbers to values, NaN where there is none.

    Both fills count, before scale and offset; then value = raw * scale_factor + add_offset, and
    the unit conversion factor * value + offset. float32 that needs neither stays float32, all
    else is float64.
    """
    if str(attributes.get("_Unsigned", "")).lower() == "true" and raw.dtype.kind == "i":
        raw = raw.view(raw.dtype.str.replace("i", "u"))
    missing = np.isin(raw, fill_values(attributes, raw.dtype))
    scale, shift = packing_of(attributes)
    if raw.dtype == np.float32 and (scale, shift, factor, offset) == (1.0, 0.0, 1.0, 0.0):
        values = raw.astype(np.float32)
    else:
        values = raw.astype(np.float64)
        if (scale, shift) != (1.0, 0.0):
            values = values * scale + shift
        if (factor, offset) != (1.0, 0.0):
            values = values * factor + offset
    values[missing] = np.nan
    return values


def packing_of(attributes: Mapping[str, Any]) -> tuple[float, float]:
    """(scale_factor, add_offset), 1 and 0 where they are not given."""
    scale = float(np.ravel(attributes.get("scale_factor", 1.0))[0])
    return scale, float(np.ravel(attributes.get("add_offset", 0.0))[0])


_SINCE = re.compile(
    r"^\s*([A-Za-z]+)\s+since\s+([-+]?\d+)-(\d+)-(\d+)"
    r"(?:[T\s]+(\d+)(?::(\d+))?(?::(\d+(?:\.\d*)?))?)?"
    r"\s*(Z|UTC|GMT|[-+]\d{1,2}(?::?\d{2})?)?\s*$",
    re.IGNORECASE,
)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("us", "microsec", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ns", "nanosecond", "nanoseconds"), 1e-9),
}
_MONTHS = {
    **dict.fromkeys(("month", "months", "mon"), 1),
    **dict.fromkeys(("year", "years", "yr", "common_year", "common_years"), 12),
}
_CALENDARS = {"gregorian": "standard", "365_day": "noleap", "366_day": "all_leap"}
_KNOWN_CALENDARS = ("standard", "proleptic_gregorian", "julian", "noleap", "all_leap", "360_day")


def decode_time(values: np.ndarray, units: str, calendar: str = "") -> tuple[np.ndarray, str]:
    """Times to (int64 seconds since 1970, calendar), rounded to the second.

    Months and years are calendar ones and must be whole. Where the standard calendar has no
    year (before 1), dates are counted in proleptic_gregorian, which has a year 0.
    """
    calendar = (calendar or "standard").strip().lower()
    calendar = _CALENDARS.get(calendar, calendar)
    if calendar not in _KNOWN_CALENDARS:
        raise ValueError(f"calendar {calendar!r} is none of {', '.join(_KNOWN_CALENDARS)}")
    match = _SINCE.match(units)
    if match is None:
        raise ValueError(
            f"time units {units!r} are not understood: write `days since 2000-01-01 00:00:00`"
        )
    word = match[1].lower()
    if word not in _SECONDS and word not in _MONTHS:
        raise ValueError(f"time unit {match[1]!r} in {units!r} is none of {', '.join(_SECONDS)}")
    numbers = np.asarray(values)
    if numbers.size == 0:
        raise ValueError("the time axis is empty")
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise ValueError(f"{int((~np.isfinite(numbers)).sum())} of {numbers.size} times are NaN")
    year, month, day = int(match[2]), int(match[3]), int(match[4])
    clock = 3600 * int(match[5] or 0) + 60 * int(match[6] or 0) + float(match[7] or 0)
    clock -= _zone_seconds(match[8] or "")
    if word in _MONTHS:
        months = np.rint(numbers.astype(np.float64))
        if np.abs(months - numbers).max() > 1e-6:
            raise ValueError(
                f"time units {units!r} with parts of a {word.rstrip('s')} name no exact date;"
                " write the axis in days (`cdo settunits,days`)"
            )
        counts = (12 * year + month - 1 + _MONTHS[word] * months).astype(np.int64)
        calendar = _with_year_zero(calendar, int(counts.min()) // 12)
        days = np.array([_day(int(n) // 12, int(n) % 12 + 1, day, calendar) for n in counts])
        return days.astype(np.int64) + round(clock), calendar
    seconds = _exact_seconds(numbers, _SECONDS[word]) + round(clock)
    reference = _day(year, month, day, calendar)
    # 0001-01-01 of the mixed calendar.
    if year < 1 and reference + int(seconds.min()) < _day(1, 1, 1, calendar):
        calendar = _with_year_zero(calendar, year)
        reference = _day(year, month, day, calendar)
    return reference + seconds, calendar


def _exact_seconds(numbers: np.ndarray, unit_seconds: float) -> np.ndarray:
    if numbers.dtype.kind in "iu":
        if unit_seconds >= 1:
            return numbers.astype(np.int64) * int(unit_seconds)
        return numbers.astype(np.int64) // round(1 / unit_seconds)
    return np.rint(numbers.astype(np.float64) * unit_seconds).astype(np.int64)


def _with_year_zero(calendar: str, year: int) -> str:
    return "proleptic_gregorian" if calendar in ("standard", "julian") and year < 1 else calendar


def _day(year: int, month: int, day: int, calendar: str) -> int:
    """Seconds since 1970 at the start of a day; a day past the month's end is its last."""
    cycles = 0
    if calendar in ("standard", "julian") and year < 1:
        # Years of the Julian calendar repeat every four; cftime warns of those before 1.
        cycles = -((year - 1) // 4)
    try:
        first = cftime.datetime(year + 4 * cycles, month, 1, calendar=calendar, has_year_zero=True)
    except ValueError:
        raise ValueError(f"no month {month} in the {calendar} calendar") from None
    date = first.replace(day=min(day, first.daysinmonth))
    return seconds_of(date) - cycles * 1461 * 86400


def _zone_seconds(zone: str) -> int:
    if not zone or zone[0] not in "+-":
        return 0
    digits = zone[1:].replace(":", "")
    hours, minutes = (digits[:-2], digits[-2:]) if len(digits) > 2 else (digits, "0")
    return (1 if zone[0] == "+" else -1) * (3600 * int(hours) + 60 * int(minutes))


def common_calendar(calendars: Sequence[str], first_seconds: int) -> str:
    """The calendar of files together; ValueError where their dates would not mean the same.

    Mixed and proleptic Gregorian calendars agree since 1582-10-15.
    """
    kinds = sorted(set(calendars))
    if len(kinds) == 1:
        return kinds[0]
    if kinds == ["proleptic_gregorian", "standard"] and first_seconds >= -12219292800:
        return "standard"
    raise ValueError(f"the files use different calendars: {', '.join(kinds)}")
