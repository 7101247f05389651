"""Metadata as files write it: axes, grids, fills, times and units."""

import numpy as np
import pytest
import xarray as xr

from graticule.data import cf, units
from graticule.data.times import date_of


@pytest.mark.parametrize(
    ("name", "attributes", "axis"),
    [
        ("YAXLEVITR", {"units": "degrees_north"}, "lat"),
        ("lat", None, "lat"),
        ("FNOCX", {"units": "degrees_east"}, "lon"),
        ("longitude", {}, "lon"),
        ("TIME", {"units": "hour since 0000-01-01 00:00:00"}, "time"),
        ("valid_time", None, "time"),
        ("ZAXLEVITR", {"units": "METERS", "positive": "down"}, "level"),
        ("pressure_level", {"units": "hPa"}, "level"),
        ("level", {}, "level"),
        ("expver", {}, "expver"),
        ("number", {"units": "1"}, None),
        ("rlat", {"standard_name": "grid_latitude", "units": "degrees", "axis": "Y"}, None),
        ("y", {"standard_name": "projection_y_coordinate", "units": "m", "axis": "Y"}, None),
        ("y", None, None),
    ],
)
def test_axis_is_known_by_attributes_or_name(name, attributes, axis):
    assert cf.axis_of(name, attributes) == axis


@pytest.mark.parametrize(
    ("lon", "expected"),
    [
        ([-180, -90, 0, 90], [0, 90, 180, 270]),
        ([0, 90, 180, 270, 360], [0, 90, 180, 270]),
        ([-180, -90, 0, 90, 180], [0, 90, 180, 270]),
        ([-300, -210, -120, -30], [60, 150, 240, 330]),
        ([340, 350, 0, 10], [340, 350, 360, 370]),
        ([10, 0, -10], [350, 360, 370]),
        ([0, 1], [0, 1]),
        ([-1, 0], [359, 360]),
        ([-1e-6, 90, 180, 270], [0, 90, 180, 270]),
        ([359.99999, 90, 180, 270], [0, 90, 180, 270]),
        ([370], [10]),
    ],
)
def test_longitudes_are_turned_to_ascend_from_0_to_360(lon, expected):
    _, got, _, order, repeats = cf.horizontal_order(np.array([0.0]), np.array(lon, float))
    np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_allclose((np.array(lon, float)[order] - got + 180) % 360, 180, atol=2e-5)
    assert len(repeats) == len(lon) - len(expected)


def test_pole_row_beyond_the_pole_by_rounding_is_the_pole():
    lat, _, order, _, _ = cf.horizontal_order(np.array([-90.00001, 0, 90.00001]), np.array([0.0]))
    assert lat.tolist() == [90, 0, -90]
    assert order.tolist() == [2, 1, 0]


def test_fills_of_real_files_are_found():
    for text in (-1e34, 1e34, -99.9, -1e10, 1e20):
        raw = np.array([text, 1.0], np.float32)
        for key in ("_FillValue", "missing_value"):
            decoded = cf.decode(raw, {key: text})  # a double attribute of a float variable
            np.testing.assert_array_equal(decoded, np.array([np.nan, 1], np.float32))
    unwritten = np.array([9.969209968386869e36, 1], np.float32)
    np.testing.assert_array_equal(cf.decode(unwritten, {}), [np.nan, 1])


def test_decoding_masks_before_it_scales():
    raw = np.array([-32768, -32767, 0, 1000], np.int16)
    attributes = {"scale_factor": 0.001, "add_offset": 10.0, "_FillValue": np.int16(-32768),
                  "missing_value": np.int16(-32767)}  # fmt: skip
    np.testing.assert_array_equal(cf.decode(raw, attributes), [np.nan, np.nan, 10.0, 11.0])
    np.testing.assert_array_equal(
        cf.decode(raw, attributes, 2.0, 1.0), [np.nan, np.nan, 21.0, 23.0]
    )
    assert cf.decode(np.ones(2, np.float32), {}).dtype == np.float32


def test_fill_that_the_type_cannot_hold_is_ignored():
    raw = np.array([0, 1], np.int16)
    for fill in (np.nan, 1e20, 0.5, -1e34):
        np.testing.assert_array_equal(cf.decode(raw, {"missing_value": fill}), [0, 1])


@pytest.mark.parametrize(
    ("value", "text", "calendar", "date"),
    [
        (366.0, "hour since 0000-01-01 00:00:00", "", "0000-01-16 06:00:00"),
        (0, "days since 1-1-1 00:00:0.0", "standard", "0001-01-01 00:00:00"),
        (318096.0, "hours since 1970-01-01 00:00:00", "gregorian", "2006-04-16 00:00:00"),
        (17598.0, "hour since 1980-01-14 14:00:00", "", "1982-01-16 20:00:00"),
        (59, "days since 2004-01-01", "noleap", "2004-03-01 00:00:00"),
        (59, "days since 2004-01-01", "360_day", "2004-02-30 00:00:00"),
        (1, "hours since 2000-01-01 00:00:00 +01:00", "", "2000-01-01 00:00:00"),
        (1, "hours since 2000-01-01T00:00:00Z", "", "2000-01-01 01:00:00"),
        (14, "months since 1999-01-15", "", "2000-03-15 00:00:00"),
        (1, "months since 2001-01-31", "", "2001-02-28 00:00:00"),
        (2.0, "years since 2000-02-01", "", "2002-02-01 00:00:00"),
        (10**18, "nanoseconds since 1970-01-01", "proleptic_gregorian", "2001-09-09 01:46:40"),
        (738000, "days since 0000-01-01", "noleap", "2021-12-02 00:00:00"),
    ],
)
def test_times_decode_to_their_dates(value, text, calendar, date):
    seconds, kind = cf.decode_time(np.array([value]), text, calendar)
    assert seconds.dtype == np.int64
    assert str(date_of(int(seconds[0]), kind)) == date


def test_modern_dates_counted_from_year_0_keep_the_mixed_calendar():
    # 2000-01-01 is 730487 days after 0000-01-01 of the mixed calendar, by Julian day numbers.
    seconds, calendar = cf.decode_time(np.array([730487]), "days since 0000-01-01", "standard")
    assert calendar == "standard"
    assert str(date_of(int(seconds[0]), calendar)) == "2000-01-01 00:00:00"


@pytest.mark.parametrize(
    ("value", "text", "calendar", "message"),
    [
        (0.5, "months since 2000-01-01", "", "name no exact date"),
        (20000101.0, "day as %Y%m%d.%f", "", "are not understood"),
        (0, "fortnights since 2000-01-01", "", "is none of s, sec"),
        (0, "days since 2000-01-01", "lunar", "calendar 'lunar' is none of"),
        ([], "days since 2000-01-01", "", "the time axis is empty"),
        (np.nan, "days since 2000-01-01", "", "1 of 1 times are NaN"),
    ],
)
def test_times_without_a_clear_meaning_are_refused(value, text, calendar, message):
    with pytest.raises(ValueError, match=message):
        cf.decode_time(np.ravel(value), text, calendar)


def test_gregorian_calendars_join_only_since_1582():
    both = ["standard", "proleptic_gregorian"]
    assert cf.common_calendar(both, 0) == "standard"
    with pytest.raises(ValueError, match="different calendars"):
        cf.common_calendar(both, -12219292801)


def test_kind_of_grid_is_named():
    lat = xr.Variable(("y", "x"), np.zeros((2, 3)))
    field = xr.Variable(("time", "y", "x"), np.zeros((1, 2, 3)))
    for names in (("nav_lat", "nav_lon"), ("TLAT", "TLONG"), ("geolat_t", "geolon_t")):
        kind = cf.foreign_grid(field, dict(zip(names, (lat, lat), strict=True)))
        assert kind == f"curvilinear grid ({names[0]}, {names[1]} over y x x)"
    assert cf.foreign_grid(field, {}) is None
    mesh = xr.Variable(("face",), np.zeros(4), {"mesh": "topology", "location": "face"})
    assert "unstructured grid" in (cf.foreign_grid(mesh, {}) or "")


@pytest.mark.parametrize(
    ("texts", "unit"),
    [
        ("Deg C|DEG C|degC|degree_C|celsius|Degrees Celsius", "degC"),
        ("K|kelvin|Kelvin|degrees_K", "K"),
        ("PPT|psu|PSU|1e-3|0.001", "1e-3"),
        ("M/S|m s**-1|m/s|m s-1|m s^-1|m.s-1|meters/sec", "m s-1"),
        ("MB|hPa|millibars|mbar", "hPa"),
        ("G/KG|g kg**-1", "g kg-1"),
        ("METERS|m|meter", "m"),
        ("m**2 s**-2|m2/s2", "m2 s-2"),
        ("furlongs", "furlongs"),
        (" odd unit ", "odd unit"),
    ],
)
def test_spellings_of_a_unit_become_one(texts, unit):
    assert {units.canonical(text) for text in texts.split("|")} == {unit}
    assert units.is_known(unit) == (unit not in ("furlongs", "odd unit"))


@pytest.mark.parametrize(
    ("source", "target", "value", "expected"),
    [
        ("K", "degC", 293.15, 20.0),
        ("degC", "K", 20.0, 293.15),
        ("degF", "degC", 212.0, 100.0),
        ("hPa", "Pa", 1013.25, 101325.0),
        ("kt", "m s-1", 1.0, 1852 / 3600),
        ("%", "1", 50.0, 0.5),
        ("g kg-1", "kg kg-1", 8.0, 0.008),
    ],
)
def test_units_convert_linearly(source, target, value, expected):
    factor, offset = units.conversion(source, target)
    assert factor * value + offset == pytest.approx(expected, rel=1e-12)


def test_units_of_different_things_do_not_convert():
    assert units.conversion("degC", "m") is None
    assert units.conversion("furlongs", "m") is None
    assert units.conversion("furlongs", "furlongs") == (1.0, 0.0)


@pytest.mark.parametrize(
    ("unit", "names", "expected"),
    [
        ("K", ("t2m", "", "2 metre temperature"), (150, 350)),
        ("degC", ("AIRT", "", "AIR TEMPERATURE"), (-100, 100)),
        ("degC", ("thetao", "sea_water_potential_temperature"), (-5, 50)),
        ("K", ("analysed_sst", "sea_surface_foundation_temperature"), (268.15, 323.15)),
        ("1e-3", ("so", "sea_water_salinity"), (0, 50)),
        ("m s-1", ("u10",), (-150, 150)),
        ("hPa", ("SLP", "", "SEA LEVEL PRESSURE"), (0, 1200)),
        ("K", ("sst_anomaly",), (None, None)),
        ("m2 s-2", ("z", "geopotential"), (None, None)),
        ("N m-2", ("taux", "", "wind stress"), (None, None)),
        ("furlongs", ("x",), (None, None)),
    ],
)
def test_bounds_follow_quantity_and_unit(unit, names, expected):
    assert units.bounds(unit, *names) == expected


def test_two_dimensional_positions_of_a_regular_grid_are_straightened():
    lat, lon = np.array([10.0, 3.0, -40.0]), np.array([350.0, 355.0, 0.0, 5.0])
    rows, columns = np.meshgrid(lat, lon, indexing="ij")
    for dim, pair in ((0, (rows, columns)), (1, (rows.T, columns.T))):
        found = cf.straightened(*pair)
        assert found is not None
        assert found[0] == dim
        np.testing.assert_array_equal(found[1], lat)
        np.testing.assert_array_equal(found[2], lon)
    # Rounding, and the same meridian written as 360 or 0, are no curve.
    noisy = columns + np.array([[0.0], [5e-5], [360.0]])
    assert cf.straightened(rows, noisy) is not None
    assert cf.straightened(rows + 0.01 * columns, columns) is None
    assert cf.straightened(rows, columns + 0.01 * rows) is None
    assert cf.straightened(np.where(rows == 3, np.nan, rows), columns) is None
