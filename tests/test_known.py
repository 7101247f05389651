"""Sources that are recognised must go in as they are: their variables, levels, masks, calendars
and their own numbers."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from graticule.cli import main
from graticule.data.check import check
from graticule.data.ingest import ingest
from graticule.data.known import (
    ERA5_LEVELS_HPA,
    GLORYS12_DEPTHS_M,
    OM4_LEVELS_M,
    WENHAI_DEPTHS_M,
    default_variables,
    recognise,
)
from graticule.data.known import SOURCES as KINDS
from graticule.data.samples import SampleSource
from graticule.data.shardfile import LAND
from graticule.data.store import Store
from graticule.recipes import recipe
from source_files import (
    GLORYS12_FILL,
    GLORYS12_PACKING,
    era5_dataset,
    glorys12_raw,
    om4_dataset,
    om4_dates,
    write_glorys12,
    write_zarr2,
)
from tiny import tiny_dataset, write_netcdf


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "graticule")
    return caplog


# Recognition


def test_each_source_is_recognised_by_its_names_and_anything_else_is_cf() -> None:
    ocean = {"thetao": ("time", "depth", "latitude", "longitude"), "depth": ("depth",)}
    cases: list[tuple[dict[str, tuple[str, ...]], list[str], str, str, str]] = [
        (ocean, [], "MERCATOR GLORYS12V1", "glorys12", "Mercator"),
        (ocean, ["thetao"], "", "glorys12", "packed"),
        (ocean, [], "", "cf", "attributes"),
        ({"thetao": ("time", "depth", "y", "x")}, ["thetao"], "GLORYS", "cf", "attributes"),
        ({"thetao_0": ("time", "y", "x")}, [], "", "om4", "one array a level"),
        ({"thetao": ("time", "lev", "y", "x"), "mask": ("lev", "y", "x")}, [], "", "om4", "lev"),
        ({"mask_0": ("y", "x")}, [], "", "cf", "attributes"),
        ({"2m_temperature": ("time",)}, [], "", "era5", "WeatherBench"),
        ({"geopotential": (), "temperature": ()}, [], "", "era5", "geopotential"),
        ({"temperature": ("time", "lat", "lon")}, [], "", "cf", "attributes"),
    ]
    for variables, packed, about, kind, why in cases:
        found, reason = recognise(variables, packed, about)
        assert (found, why in reason) == (kind, True), (variables, reason)


def test_defaults_of_a_source_that_are_not_there_are_an_error_with_what_is() -> None:
    with pytest.raises(ValueError, match=r"none of the variables of om4 .* hold t2m; .*source cf"):
        default_variables(KINDS["om4"], ["t2m"])
    assert default_variables(KINDS["cf"], ["t2m"]) is None


def test_an_unknown_source_is_refused(tmp_path: Path) -> None:
    file = write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc")
    with pytest.raises(ValueError, match="source 'glory' is none of auto, glorys12, era5, om4, cf"):
        ingest([file], tmp_path / "out", source="glory")


# GLORYS12


def test_glorys12_makes_the_93_channels_of_the_recipe_and_keeps_its_own_numbers(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    files = [
        write_glorys12(tmp_path / "a.nc", [0, 1]),
        write_glorys12(tmp_path / "b.nc", [2], descending=True, lat_type=np.float64),
    ]
    store = ingest(files, tmp_path / "store")
    assert store.channels.names == tuple(recipe("wenhai-small").data.prognostic)
    assert len(store.channels) == 93
    assert "source: glorys12, recognised by thetao, so, uo, vo, zos of a" in told.text
    assert "left out: mlotst" in told.text
    assert "thetao: 23 of 50 levels are taken" in told.text
    assert "scale and offset of the source are kept: thetao, so, uo, vo, zos" in told.text
    assert store.packing.scale is not None
    assert store.packing.offset is not None
    lat, lon = store.grid.lat, (store.grid.lon + 180) % 360 - 180
    np.testing.assert_allclose(lat, np.linspace(90, -80, 11), atol=1e-4)
    assert store.grid.lon[0] == 0
    depths = [round(depth, 2) for depth in GLORYS12_DEPTHS_M]
    for number, channel in enumerate(store.channels):
        scale, offset = GLORYS12_PACKING[channel.variable][:2]
        assert (store.packing.scale[number], store.packing.offset[number]) == (scale, offset)
        level = 0 if channel.level is None else depths.index(round(channel.level, 2))
        for time, day in enumerate((0, 1, 2)):
            raw = glorys12_raw(channel.variable, day, level, np.linspace(90, -80, 11), lon)
            expected = np.where(raw == GLORYS12_FILL, LAND, raw)
            np.testing.assert_array_equal(store.read_stored(time, [number])[0], expected)
    assert [str(date) for date in store.times.dates] == [
        "2020-01-01 00:00:00", "2020-01-02 00:00:00", "2020-01-03 00:00:00",
    ]  # fmt: skip
    assert store.missing.sum() == 0
    assert not [r for r in told.records if r.levelno >= logging.WARNING]


def test_levels_are_those_nearest_to_the_numbers_asked_for(tmp_path: Path) -> None:
    file = write_glorys12(tmp_path / "a.nc", [0, 1])
    store = ingest([file], tmp_path / "some", variables=["thetao", "zos"], levels=[92.32, 0.49])
    assert store.channels.names == ("thetao@92.3261", "thetao@0.494025", "zos")
    everything = ingest([file], tmp_path / "all", variables=["thetao", "zos"], levels="all")
    assert len(everything.channels) == 50 + 1
    with pytest.raises(ValueError, match=r"thetao has no level 6 \(nor one within 1%\); there are"):
        ingest([file], tmp_path / "none", levels=[6.0])
    exact = ingest([file], tmp_path / "exact", variables=["so@5727.92"])
    assert exact.channels.names == ("so@5727.92",)


def test_levels_of_a_recipe_are_an_argument(tmp_path: Path) -> None:
    file = write_glorys12(tmp_path / "a.nc", [0, 1])
    command = ["data", "ingest", str(file), "--variables", "thetao", "--source", "cf"]
    assert main([*command, "--levels", "wenhai-small", "--out", str(tmp_path / "a")]) == 0
    assert [round(c.level or 0, 2) for c in Store(tmp_path / "a").channels] == [
        round(depth, 2) for depth in WENHAI_DEPTHS_M
    ]
    assert main([*command, "--levels", "100.0,x", "--out", str(tmp_path / "b")]) == 2
    assert main([*command, "--levels", "demo", "--out", str(tmp_path / "b")]) == 2
    assert not (tmp_path / "b").exists()


def test_kept_numbers_convert_by_scale_and_offset_alone(tmp_path: Path) -> None:
    file = write_glorys12(tmp_path / "a.nc", [0, 1])
    options: Any = {"variables": ["thetao"], "levels": [0.49]}
    celsius = ingest([file], tmp_path / "c", **options)
    kelvin = ingest([file], tmp_path / "k", units={"thetao": "K"}, **options)
    np.testing.assert_array_equal(celsius.read_stored(1), kelvin.read_stored(1))
    np.testing.assert_allclose(kelvin.read(1), celsius.read(1) + 273.15, rtol=1e-6)


def test_packed_beside_float32_is_told_and_kept_where_asked(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    ocean = write_glorys12(tmp_path / "a.nc", [0, 1])
    with xr.open_dataset(ocean, decode_cf=False) as dataset:
        wind = dataset[["zos"]].rename(zos="wind")
        wind["wind"] = (wind.wind.dims, np.linspace(-9, 9, 2 * 198).reshape(2, 11, 18),
                        {"units": "m s-1"})  # fmt: skip
        wind = write_netcdf(wind.load(), tmp_path / "wind.nc")
    options: Any = {"variables": ["zos", "wind"], "source": "cf"}
    plain = ingest([ocean, wind], tmp_path / "plain", **options)
    assert plain.packing.scale is None
    assert "stored as float32, which moves a value by up to 6e-8" in told.text
    assert "wind is float64 in wind.nc. --packing int16 keeps the numbers of zos" in told.text
    mixed = ingest([ocean, wind], tmp_path / "mixed", packing="int16", **options)
    assert mixed.packing.scale is not None
    assert mixed.packing.scale[0] == GLORYS12_PACKING["zos"][0]
    assert "wind: rounded to int16, by up to 0.00014 m s-1" in told.text
    np.testing.assert_allclose(mixed.read(0)[1], plain.read(0)[1], atol=0.000138)
    np.testing.assert_array_equal(mixed.read(0)[0], plain.read(0)[0])


def test_a_kept_number_that_is_a_code_of_the_store_is_an_error_with_the_way_out(
    tmp_path: Path,
) -> None:
    file = write_glorys12(tmp_path / "a.nc", [0, 1])
    with xr.open_dataset(file, decode_cf=False) as dataset:
        dataset = dataset[["zos"]].load()
    dataset.zos.attrs["_FillValue"] = np.int16(32767)  # -32767 now is a value
    other = write_netcdf(dataset, tmp_path / "b.nc")
    with pytest.raises(ValueError, match=r"zos at 2020-01-01.* stored number -32767 .*--packing"):
        ingest([other], tmp_path / "out")
    store = ingest([other], tmp_path / "out", packing="float32")
    assert store.read(0).min() == pytest.approx(-32767 * GLORYS12_PACKING["zos"][0])


# ERA5


@pytest.fixture(scope="module")
def era5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_zarr2(era5_dataset(), tmp_path_factory.mktemp("era5") / "era5.zarr")


def test_era5_makes_84_channels_and_three_statics(
    era5: Path, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    store = ingest([era5], tmp_path / "store")
    assert "source: era5, recognised by WeatherBench 2's names" in told.text
    assert "left out: wind_speed" in told.text
    assert len(store.channels) == 84
    assert store.channels.names[:7] == (
        "10m_u_component_of_wind", "10m_v_component_of_wind", "mean_sea_level_pressure",
        "2m_temperature", "sea_surface_temperature", "total_precipitation_6hr", "geopotential@50",
    )  # fmt: skip
    assert {c.level_units for c in store.channels if c.level is not None} == {"hPa"}
    assert [c.level for c in store.channels if c.variable == "vertical_velocity"] == list(
        ERA5_LEVELS_HPA
    )
    assert store.statics.names == ("soil_type", "geopotential_at_surface", "land_sea_mask")
    assert [store.channels[store.channels.index(name)].units for name in (
        "geopotential@500", "specific_humidity@50", "vertical_velocity@1000",
    )] == ["m2 s-2", "kg kg-1", "Pa s-1"]  # fmt: skip
    assert store.grid.shape == (13, 24)
    assert store.times.step_seconds == 6 * 3600
    dataset = era5_dataset()
    channel = store.channels.index("temperature@500")
    np.testing.assert_array_equal(
        store.read(2, [channel])[0], dataset.temperature.sel(level=500).values[2]
    )
    np.testing.assert_array_equal(
        store.read_statics(["land_sea_mask"])[0], dataset.land_sea_mask.values
    )
    # No rain is 0, not missing: Zarr v2's fill value is 0 where nobody chose one.
    rain = store.channels.index("total_precipitation_6hr")
    np.testing.assert_array_equal(store.read(0, [rain])[0], dataset.total_precipitation_6hr[0])
    assert store.missing.sum() == 0
    assert store.wet[store.channels.index("sea_surface_temperature")].mean() < 1
    assert [f.kind for f in check(store).findings if f.severity == "error"] == []


def test_a_zero_that_zarr_2_fills_with_is_a_value_and_a_chosen_one_is_missing(
    tmp_path: Path,
) -> None:
    import zarr

    dataset = era5_dataset()[["total_precipitation_6hr"]]
    for name in ("default", "chosen"):
        path = write_zarr2(dataset, tmp_path / name)
        array = zarr.open_group(str(path), mode="r+").create_array(
            "rain", shape=(3, 13, 24), dtype="f4", fill_value=0.0, chunks=(3, 13, 24)
        )
        array[:] = dataset.total_precipitation_6hr.values
        array.attrs["_ARRAY_DIMENSIONS"] = ["time", "latitude", "longitude"]
        if name == "chosen":
            array.attrs["_FillValue"] = 0.0
        store = ingest([path], tmp_path / f"{name}.store", variables=["rain"])
        assert store.wet.all() == (name == "default")


def test_721_rows_become_720_without_the_south_pole(era5: Path, tmp_path: Path) -> None:
    taken: Any = {"variables": ["2m_temperature", "temperature@500", "land_sea_mask"]}
    whole = ingest([era5], tmp_path / "whole", **taken)
    short = ingest([era5], tmp_path / "short", drop_south_pole=True, **taken)
    assert short.grid.shape == (12, 24)
    assert short.grid.lat.tolist() == whole.grid.lat.tolist()[:-1]
    np.testing.assert_array_equal(short.read(1), whole.read(1)[:, :-1])
    names = ["land_sea_mask"]
    np.testing.assert_array_equal(short.read_statics(names), whole.read_statics(names)[:, :-1])
    # South to north in the file.
    upward = write_zarr2(era5_dataset().isel(latitude=slice(None, None, -1)), tmp_path / "up.zarr")
    np.testing.assert_array_equal(
        ingest([upward], tmp_path / "up", drop_south_pole=True, **taken).read(1), short.read(1)
    )
    already = write_zarr2(era5_dataset(rows=12), tmp_path / "720.zarr")
    same = ingest([already], tmp_path / "same", **taken)
    np.testing.assert_array_equal(same.read(1), short.read(1))
    with pytest.raises(ValueError, match=r"the last row of .* is at -75, not at the south pole"):
        ingest([already], tmp_path / "none", drop_south_pole=True, **taken)


def test_37_levels_are_cut_to_the_13_and_all_are_taken_if_asked(tmp_path: Path) -> None:
    dataset = era5_dataset()[["temperature", "geopotential"]]
    more = xr.concat([dataset, dataset.isel(level=[0]).assign_coords(level=[875])], "level")
    path = write_zarr2(more.transpose("time", "level", "latitude", "longitude"), tmp_path / "a")
    assert len(ingest([path], tmp_path / "some").channels) == 26
    assert len(ingest([path], tmp_path / "all", levels="all").channels) == 28


# OM4


DATES = om4_dates()[60:140]  # over 29 February 1960


@pytest.mark.parametrize("compact", [False, True])
def test_om4_has_its_levels_masks_and_gaussian_rows(compact: bool, tmp_path: Path) -> None:
    source = write_zarr2(om4_dataset(DATES[:3], compact=compact, land=0.0), tmp_path / "OM4.zarr")
    store = ingest([source], tmp_path / "store")
    prognostic = [c for c in store.channels if c.role == "prognostic"]
    assert len(prognostic) == 77
    assert [c.name for c in store.channels if c.role == "forcing"] == [
        "tauuo", "tauvo", "hfds", "hfds_anomalies",
    ]  # fmt: skip
    assert store.channels.names[:2] == ("uo@2.5", "uo@10")
    assert [c.level for c in store.channels if c.variable == "so"] == list(OM4_LEVELS_M)
    assert {c.units for c in store.channels if c.variable == "thetao"} == {"degC"}
    gauss = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(8)[0]))
    np.testing.assert_allclose(store.grid.lat, gauss[::-1], atol=1e-12)
    assert store.grid.lon.tolist() == [15 + 30.0 * i for i in range(12)]
    # Land is 0 in this file and lies where each level's own mask says.
    plain = om4_dataset(DATES[:3], land=np.nan)
    for level in (0, 7, 18):
        channel = store.channels.index(f"thetao@{OM4_LEVELS_M[level]:g}")
        np.testing.assert_array_equal(
            store.read(1, [channel])[0], plain[f"thetao_{level}"].values[1, ::-1]
        )
        np.testing.assert_array_equal(store.wet[channel], plain[f"mask_{level}"].values[::-1])
    surface = store.channels.index("hfds")
    np.testing.assert_array_equal(store.wet[surface], plain.mask_0.values[::-1])


def test_om4s_73_dates_a_year_are_one_run_over_a_leap_day(tmp_path: Path) -> None:
    dataset = om4_dataset(DATES)[["zos"]].assign_coords(om4_dataset(DATES).coords)
    source = write_zarr2(dataset, tmp_path / "OM4.zarr")
    store = ingest([source], tmp_path / "store", source="om4", splits={"train": ["1959/1960"]})
    assert store.times.calendar == "julian"
    assert store.times.step_seconds == 5 * 86400
    assert np.diff(store.times.seconds).max() == 6 * 86400
    assert store.times.segments.max() == 0
    assert not store.times.regular
    from graticule.config import DataConfig

    config = DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=(-1, 0))
    # T - N * out - (in - 1) windows of 4 steps.
    assert len(SampleSource(store, config).starts("train", leads=4)) == 80 - 4 * 2 - 1
    assert [f.kind for f in check(store).findings if f.kind == "gap"] == []


def test_positions_of_two_dimensions_that_are_no_regular_grid_are_refused(tmp_path: Path) -> None:
    dataset = om4_dataset(DATES[:2], compact=True)[["zos", "lat", "lon"]]
    dataset["lat"] = (("y", "x"), dataset.lat.values + 0.1 * np.arange(12)[None])
    source = write_zarr2(dataset, tmp_path / "OM4.zarr")
    with pytest.raises(ValueError, match=r"on a curvilinear grid \(lat, lon over y x x\).*xESMF"):
        ingest([source], tmp_path / "store")
