"""The water column: kinds of channels, layers around levels, and ranges that these fill."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.data.basin import LEVELS, THICKNESS
from graticule.data.store import Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.evaluate import Column
from graticule.evaluate.area import cell_area_of
from graticule.evaluate.depths import in_celsius, kind_of, layer_edges
from graticule.grid import Grid
from graticule.variables import Channel, Channels

OM4 = (2.5, 10, 22.5, 40, 65, 105, 165, 250, 375, 550, 775, 1050, 1400, 1850, 2400, 3100, 4000,
       5000, 6000)  # fmt: skip
OM4_THICKNESS = (5, 10, 15, 20, 30, 50, 70, 100, 150, 200, 250, 300, 400, 500, 600, 800, 1000,
                 1000, 1000)  # fmt: skip


def channel(variable: str, level: float | None = None, **more: Any) -> Channel:
    units = {"thetao": "degC", "so": "1e-3", "zos": "m"}.get(variable, "m s-1")
    given = {"units": units, "level_units": "" if level is None else "m", **more}
    return Channel(variable=variable, role="prognostic", level=level, **given)


def column_of(channels: list[Channel], truth: list[Channel] | None = None) -> Column:
    found = Column.of(Channels(channels), Channels(channels if truth is None else truth))
    assert found is not None
    return found


def test_levels_in_the_middle_of_layers_give_the_layers_of_om4_and_of_the_generated_ocean() -> None:
    np.testing.assert_allclose(np.diff(layer_edges(OM4)), OM4_THICKNESS)
    np.testing.assert_allclose(np.diff(layer_edges(LEVELS)), THICKNESS)
    assert layer_edges(OM4)[0] == 0


def test_levels_that_are_no_middles_have_edges_half_way() -> None:
    # Middles would need layers of 10, 30 and -10 m.
    np.testing.assert_allclose(layer_edges([5, 25, 35]), [0, 15, 30, 40])
    np.testing.assert_allclose(layer_edges([10]), [0, 20])
    # 2 m beside 96 m: no column has such layers.
    np.testing.assert_allclose(layer_edges([1, 50]), [0, 25.5, 74.5])


def test_ranges_are_those_that_layers_fill_and_all_of_them_together() -> None:
    full = column_of([channel("thetao", level) for level in OM4])
    ranges = full.ranges(full.levels_of("temperature"))
    assert [found.name for found in ranges] == [
        "0-300 m", "0-700 m", "700-2000 m", "2000-6500 m", "0-6500 m",
    ]  # fmt: skip
    assert [found.metres.sum() for found in ranges] == [300, 700, 1300, 4500, 6500]
    # Layers 450 to 650 and 650 to 900 m: 50 m of the second one lie above 700 m.
    np.testing.assert_allclose(ranges[1].metres[9:11], [200, 50])
    np.testing.assert_allclose(ranges[2].metres[10:14], [200, 300, 400, 400])
    shallow = column_of([channel("thetao", level) for level in LEVELS])
    assert [found.name for found in shallow.ranges([0, 1, 2, 3])] == ["0-300 m", "0-350 m"]
    np.testing.assert_allclose(shallow.ranges([0, 1, 2, 3])[0].metres, [30, 40, 80, 150])


def test_a_level_that_the_forecast_lacks_is_a_gap_and_no_thicker_neighbour() -> None:
    truth = [channel("thetao", level) for level in LEVELS]
    column = column_of([truth[0], truth[1], truth[3]], truth)
    np.testing.assert_allclose(column.bottom - column.top, [30, 40, 200])
    assert column.top.tolist() == [0, 30, 150]
    (everything,) = column.ranges(column.levels_of("temperature"))
    assert everything.metres.sum() == 270
    assert everything.name == "0-350 m"


def test_channels_are_sorted_from_the_surface_down_and_found_by_kind() -> None:
    channels = [
        channel("vo", 50), channel("thetao", 50), channel("uo", 15), channel("thetao", 15),
        channel("uo", 50), channel("zos"), channel("salt", 15, standard_name="sea_water_salinity",
                                                   units="1e-3"),
    ]  # fmt: skip
    column = column_of(channels)
    assert column.profiles == {"vo": [0], "thetao": [3, 1], "uo": [2, 4], "salt": [6]}
    assert column.levels_of("temperature") == [3, 1]
    assert column.levels_of("salinity") == [6]
    assert column.currents == [(4, 0)]
    assert column.surface == [3, 5, 6]
    assert np.isnan(column.top[5])
    assert kind_of(channel("temp", standard_name="air_temperature")) == ""


def test_heights_below_the_surface_are_depths() -> None:
    column = column_of([channel("thetao", -50), channel("thetao", -15)])
    assert column.profiles == {"thetao": [1, 0]}
    assert column.bottom.tolist() == [70, 30]


@pytest.mark.parametrize(
    "channels",
    [
        [channel("zos"), channel("thetao")],
        [channel("thetao", 850, level_units="hPa")],
        [channel("wind", 10)],
    ],
    ids=["no levels", "pressure", "no ocean"],
)
def test_without_levels_of_an_ocean_there_is_no_column(channels: list[Channel]) -> None:
    assert Column.of(Channels(channels), Channels(channels)) is None


def test_temperatures_in_kelvin_are_told_in_celsius() -> None:
    factor, offset = in_celsius("K")
    assert factor * 300 + offset == pytest.approx(26.85, abs=1e-12)
    with pytest.raises(ValueError, match="in 'm' is in no unit that is known"):
        in_celsius("m")


# Areas


def store_with(path: Path, statics: Channels | None, fields: np.ndarray | None) -> Store:
    grid = Grid(np.array([60.0, 0.0, -60.0]), np.array([0.0, 120.0, 240.0]))
    writer = StoreWriter(
        path, channels=Channels([channel("zos")]), grid=grid,
        times=TimeAxis(np.array([0, 86400]), "julian", 86400), statics=statics,
        static_fields=fields,
    )  # fmt: skip
    for time in range(2):
        values = np.full((1, 3, 3), float(time))
        values[0, 0, 0] = np.nan
        writer.write(time, values)
    return writer.finish()


def test_cells_have_the_areas_that_the_store_holds_else_those_of_the_sphere(tmp_path: Path) -> None:
    plain = store_with(tmp_path / "a", None, None)
    area, told = cell_area_of(plain)
    np.testing.assert_array_equal(area, plain.grid.cell_area)
    assert told.startswith("exact areas on the sphere")
    fields = np.arange(9.0).reshape(1, 3, 3)  # the first cell is land and has none
    for units, factor in (("m2", 1.0), ("km2", 1e6)):
        statics = Channels([Channel(variable="areacello", units=units, role="static")])
        area, told = cell_area_of(store_with(tmp_path / units, statics, fields))
        np.testing.assert_array_equal(area, factor * fields[0])
        assert told == "areacello of the store"


def test_areas_of_other_units_or_of_none_at_sea_are_refused(tmp_path: Path) -> None:
    fields = np.ones((1, 3, 3))
    named = {"variable": "a", "standard_name": "cell_area", "role": "static"}
    statics = Channels([Channel(units="degree", **named)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a is in 'degree', cell areas are in m2"):
        cell_area_of(store_with(tmp_path / "units", statics, fields))
    fields[0, 2, 1] = 0
    statics = Channels([Channel(units="m2", **named)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a is 0 at row 2, column 1, which is sea, as in 1 cells"):
        cell_area_of(store_with(tmp_path / "zero", statics, fields))
