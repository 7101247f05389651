"""Files in all the ways they come must read back from the store as what they say they are."""

import hashlib
import logging
import shutil
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr

from graticule.data.ingest import ingest
from graticule.data.store import LAND, Store
from tiny import DEPTHS, tiny_dataset, write_netcdf

DATA = Path(__file__).parent / "data"
SEA = ("thetao", "so", "zos")


def all_fields(store: Store) -> np.ndarray:
    return np.stack([store.read(t) for t in range(len(store.times))])


def tiny_store(tmp_path: Path, name: str = "plain", **kinds) -> Store:
    file = write_netcdf(tiny_dataset(**kinds), tmp_path / f"{name}.nc")
    return ingest([file], tmp_path / name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Store:
    """The tiny planet of 20 days as it is."""
    return tiny_store(tmp_path_factory.mktemp("plain"))


# Orientation and origin.


def test_store_holds_what_the_file_holds_by_coordinate(plain):
    dataset, store = tiny_dataset(), plain
    assert store.channels.names == (
        "thetao@0.5", "thetao@9.5", "so@0.5", "so@9.5", "zos", "u10", "v10"
    )  # fmt: skip
    assert store.statics.names == ("mask",)
    assert store.channels[0].level_units == "m"
    assert store.channels[0].units == "degC"
    assert len(store.times) == 20
    assert store.times.step_seconds == 86400
    np.testing.assert_array_equal(store.grid.lat, dataset.lat.values[::-1])
    np.testing.assert_array_equal(store.grid.lon, dataset.lon.values)
    for time in (0, 7, 19):
        fields = store.read(time)
        for level, depth in enumerate(DEPTHS):
            expected = dataset.so.isel(time=time, depth=level).values[::-1]
            channel = store.channels.index(f"so@{depth:g}")
            np.testing.assert_array_equal(fields[channel], expected)
        np.testing.assert_array_equal(fields[5], dataset.u10.isel(time=time).values[::-1])
    np.testing.assert_array_equal(store.read_statics(["mask"])[0], dataset.mask.values[::-1])
    assert store.missing.sum() == 0
    np.testing.assert_array_equal(store.wet[0], np.isfinite(dataset.mask.values[::-1]))


def test_latitude_either_way_per_variable_and_per_file_gives_equal_tensors(tmp_path):
    dataset = tiny_dataset(days=4)
    for name in (*SEA, "u10", "v10"):
        values = np.broadcast_to(dataset.lat, dataset[name].transpose(..., "lon", "lat").shape)
        dataset[name] = (dataset[name].transpose(..., "lon", "lat").dims,
                         values.astype(np.float32), dataset[name].attrs)  # fmt: skip
        dataset[name] = dataset[name].transpose(..., "lat", "lon")
    ascending = ingest([write_netcdf(dataset, tmp_path / "up.nc")], tmp_path / "up")
    descending = dataset.isel(lat=slice(None, None, -1))
    mixed = ingest(
        [
            write_netcdf(descending[["thetao", "zos", "mask"]], tmp_path / "a.nc"),
            write_netcdf(dataset[["so"]], tmp_path / "b.nc"),
            write_netcdf(descending[["u10", "v10"]], tmp_path / "c.nc"),
        ],
        tmp_path / "mixed",
        variables=["thetao", "so", "zos", "u10", "v10", "mask"],
    )
    np.testing.assert_array_equal(all_fields(ascending), all_fields(mixed))
    north = int(np.flatnonzero(mixed.grid.lat == 60.0)[0])
    assert (mixed.read(3)[:, north] == 60.0).all()


@pytest.mark.parametrize("origin", [-180.0, -300.0, 20.0, 75.0, 360.0])
def test_any_longitude_origin_gives_equal_tensors(tmp_path, origin):
    stores = []
    for name, start in (("plain", 0.0), ("turned", origin)):
        dataset = tiny_dataset(lon_origin=start, days=2)
        dataset = dataset.assign(
            u10=dataset.u10.copy(data=np.broadcast_to(np.mod(dataset.lon, 360), (2, 17, 24)).astype(
                np.float32))
        )  # fmt: skip
        stores.append(ingest([write_netcdf(dataset, tmp_path / f"{name}.nc")], tmp_path / name))
    expected, got = stores
    shift = origin % 15
    np.testing.assert_allclose(got.grid.lon, expected.grid.lon + shift)
    column = int(np.flatnonzero(np.isclose(got.grid.lon, 210.0 + shift))[0])
    assert (got.read(0)[5, :, column] == np.float32(210.0 + shift)).all()
    if shift == 0:
        np.testing.assert_array_equal(all_fields(got), all_fields(expected))
        np.testing.assert_array_equal(got.read_statics(["mask"]), expected.read_statics(["mask"]))


def test_longitudes_from_20_5_to_379_5_begin_at_half_a_degree(tmp_path):
    lon = np.arange(20.5, 380)
    values = np.broadcast_to(np.mod(lon, 360), (2, 3, 360)).astype(np.float32)
    dataset = xr.Dataset(
        {"u": (("time", "lat", "lon"), values, {"units": "m/s"})},
        {"time": ("time", [0, 1], {"units": "days since 2000-01-01"}),
         "lat": ("lat", [10.0, 0, -10], {"units": "degrees_north"}),
         "lon": ("lon", lon, {"units": "degrees_east"})},
    )  # fmt: skip
    store = ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "out")
    np.testing.assert_array_equal(store.grid.lon, np.arange(0.5, 360))
    np.testing.assert_array_equal(store.read(1)[0, 0], np.arange(0.5, 360, dtype=np.float32))
    assert store.grid.periodic


def test_box_across_longitude_origins_has_the_same_columns(tmp_path):
    turned = tiny_store(tmp_path, "turned", lon_origin=-300.0, days=2)
    box = turned.grid.region(100, 140, -60, 60)
    assert turned.grid.lon[box.any(0)].tolist() == [105, 120, 135]


def test_region_across_greenwich_stays_in_one_piece(tmp_path):
    dataset = tiny_dataset(lon_origin=-180.0, days=2).sel(lon=slice(-30, 45))
    store = ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "out")
    assert store.grid.lon.tolist() == [330, 345, 360, 375, 390, 405]
    np.testing.assert_array_equal(store.read(0)[5], dataset.u10.values[0, ::-1])


def test_repeated_cyclic_column_is_dropped(tmp_path, caplog):
    dataset = tiny_dataset(days=2)
    closed = xr.concat([dataset, dataset.isel(lon=[0]).assign_coords(lon=[360.0])], "lon",
                       data_vars="minimal", coords="minimal", compat="override",
                       join="outer")  # fmt: skip
    closed.lon.attrs["units"] = "degrees_east"
    store = ingest([write_netcdf(closed, tmp_path / "a.nc")], tmp_path / "out")
    assert store.grid.lon.tolist() == dataset.lon.values.tolist()
    np.testing.assert_array_equal(store.read(1)[5], dataset.u10.values[1, ::-1])
    assert "repeated meridian" not in caplog.text
    closed["u10"][1, 0, -1] += 1
    ingest([write_netcdf(closed, tmp_path / "b.nc")], tmp_path / "other")
    assert "repeated meridian" in caplog.text


def test_axes_are_found_by_attributes_whatever_their_names_and_order(tmp_path):
    dataset = tiny_dataset(days=3)
    plain = ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "a")
    odd = dataset.rename(lat="north", lon="east", depth="down", time="when")
    odd = odd.transpose("east", "down", "north", "when")
    odd.north.attrs = {"standard_name": "latitude"}
    odd.east.attrs = {"axis": "X", "units": "degrees"}
    store = ingest([write_netcdf(odd, tmp_path / "b.nc")], tmp_path / "b")
    np.testing.assert_array_equal(all_fields(store), all_fields(plain))
    bare = dataset.copy()
    for name in ("lat", "lon", "depth"):
        bare[name].attrs = {}
    store = ingest([write_netcdf(bare, tmp_path / "c.nc")], tmp_path / "c")
    np.testing.assert_array_equal(all_fields(store), all_fields(plain))


# Joining.


def one_day(path: Path, day: int, lat: np.ndarray, dtype: type) -> Path:
    values = np.full((1, lat.size, 4), day, np.float32)
    return write_netcdf(
        xr.Dataset(
            {"u": (("time", "lat", "lon"), values, {"units": "m/s"})},
            {"time": ("time", [day], {"units": "days since 2000-01-01"}),
             "lat": ("lat", lat.astype(dtype), {"units": "degrees_north"}),
             "lon": ("lon", [0.0, 90, 180, 270], {"units": "degrees_east"})},
        ),
        path,
    )  # fmt: skip


def test_coordinates_that_differ_by_rounding_join(tmp_path):
    lat = -80 + np.arange(12) / 12
    assert (lat.astype(np.float32) != lat).sum() == 8
    files = [one_day(tmp_path / "a.nc", 0, lat, np.float32),
             one_day(tmp_path / "b.nc", 1, lat, np.float64)]  # fmt: skip
    store = ingest(files, tmp_path / "out")
    assert store.grid.shape == (12, 4)
    assert np.isfinite(all_fields(store)).all()
    assert all_fields(store)[:, 0, 0, 0].tolist() == [0, 1]


def test_shifted_coordinates_are_an_error_with_the_largest_difference(tmp_path):
    lat = -80 + np.arange(12) / 12
    files = [one_day(tmp_path / "a.nc", 0, lat, np.float64),
             one_day(tmp_path / "b.nc", 1, lat + 0.01, np.float64)]  # fmt: skip
    with pytest.raises(ValueError, match=r"b\.nc.*a\.nc differ by up to 0\.01 degrees"):
        ingest(files, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    files[1] = one_day(tmp_path / "c.nc", 1, lat[1:], np.float64)
    with pytest.raises(ValueError, match=r"are 11 x 4 and 12 x 4"):
        ingest(files, tmp_path / "out")


def test_files_of_single_levels_make_the_levels_of_one_variable(tmp_path):
    dataset = tiny_dataset(days=3)
    together = ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "a",
                      variables=["thetao"])  # fmt: skip
    files = [write_netcdf(dataset.isel(depth=[k]), tmp_path / f"{k}.nc") for k in range(2)]
    apart = ingest(files, tmp_path / "b", variables=["thetao"])
    assert apart.channels.names == together.channels.names
    np.testing.assert_array_equal(all_fields(apart), all_fields(together))


def test_levels_can_be_chosen_by_channel_name(tmp_path):
    file = write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc")
    store = ingest([file], tmp_path / "a", variables=["zos", "thetao@9.5"])
    assert store.channels.names == ("zos", "thetao@9.5")
    with pytest.raises(ValueError, match="no channel thetao@5"):
        ingest([file], tmp_path / "b", variables=["thetao@5"])


def test_unknown_variable_role_and_unit_are_refused_by_name(tmp_path):
    file = write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc")
    with pytest.raises(ValueError, match="no variable theta in the sources"):
        ingest([file], tmp_path / "o", variables=["theta", "so"])
    with pytest.raises(ValueError, match=r"roles: no variable u100 .* thetao, so, zos"):
        ingest([file], tmp_path / "o", roles={"u100": "forcing"})
    with pytest.raises(ValueError, match=r"thetao is in 'degC', which does not convert to 'm'"):
        ingest([file], tmp_path / "o", units={"thetao": "m"})
    with pytest.raises(ValueError, match="mask has no time and cannot be forcing"):
        ingest([file], tmp_path / "o", roles={"mask": "forcing"})


def test_roles_reach_the_channels(tmp_path):
    file = write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc")
    store = ingest([file], tmp_path / "o", roles={"u10": "forcing", "zos": "diagnostic"})
    roles = [channel.role for channel in store.channels]
    assert roles == ["prognostic"] * 4 + ["diagnostic", "forcing", "prognostic"]
    assert store.statics[0].role == "static"


def test_static_with_and_without_a_single_time_is_the_same(tmp_path, plain, caplog):
    dataset = tiny_dataset(days=4)
    timed = dataset.drop_vars("mask")
    mask = dataset[["mask"]].expand_dims(time=[3])
    mask.time.attrs = dict(dataset.time.attrs)
    dateless = mask.drop_vars("time")
    for name, form in (("dated", mask), ("dateless", dateless)):
        files = [write_netcdf(timed, tmp_path / "t.nc"),
                 write_netcdf(form, tmp_path / f"{name}.nc")]  # fmt: skip
        store = ingest(files, tmp_path / name)
        assert store.channels.names == plain.channels.names
        np.testing.assert_array_equal(store.read_statics(["mask"]), plain.read_statics(["mask"]))
    assert "mask has a single time where others have many" in caplog.text


def test_static_that_changes_is_refused(tmp_path):
    dataset = tiny_dataset(days=2)
    other = dataset.copy(deep=True)
    other["mask"][3, 3] = 7
    other = other.assign_coords(time=("time", [2, 3], dataset.time.attrs))
    files = [write_netcdf(dataset, tmp_path / "a.nc"), write_netcdf(other, tmp_path / "b.nc")]
    with pytest.raises(ValueError, match=r"static mask is not one field: b\.nc: mask occurs twice"):
        ingest(files, tmp_path / "o")
    with pytest.raises(ValueError, match=r"static u10 is not one field.*2003-02-21"):
        ingest(files[:1], tmp_path / "o", roles={"u10": "static"})


# Fills and packing.


def test_both_fills_of_a_packed_variable_are_missing(tmp_path):
    raw = np.array([-32768, -32767, 0, 1000], np.int16).reshape(1, 1, 4)
    raw = np.concatenate([raw, np.zeros_like(raw)])
    attributes = {"scale_factor": 0.001, "add_offset": 10.0, "_FillValue": np.int16(-32768),
                  "missing_value": np.int16(-32767), "units": "degC"}  # fmt: skip
    file = write_netcdf(
        xr.Dataset(
            {"t": (("time", "lat", "lon"), raw, attributes)},
            {"time": ("time", [0, 1], {"units": "days since 2000-01-01"}),
             "lat": ("lat", [0.0]), "lon": ("lon", [0.0, 1, 2, 3])},
        ),
        tmp_path / "a.nc",
    )  # fmt: skip
    store = ingest([file], tmp_path / "out")
    np.testing.assert_array_equal(store.read(0)[0, 0], [np.nan, np.nan, 10.0, 11.0])
    np.testing.assert_array_equal(store.read(1)[0, 0], [10.0, 10.0, 10.0, 10.0])


def packed_file(path: Path, dtype: type = np.int16, scale: float = 0.01, low: int = -900) -> Path:
    raw = np.arange(low, low + 2 * 17 * 24, dtype=dtype).reshape(2, 17, 24)
    dataset = tiny_dataset(days=2)[["u10"]]
    attributes = {"units": "m/s", "scale_factor": scale, "add_offset": 1.5}
    dataset["u10"] = (dataset.u10.dims, raw, {**attributes, "_FillValue": dtype(-32767)})
    return write_netcdf(dataset, path)


def test_own_packing_is_kept_so_that_repacking_adds_no_error(tmp_path):
    store = ingest([packed_file(tmp_path / "a.nc")], tmp_path / "out", packing="int16")
    assert store.packing.scale.tolist() == [0.01]
    assert store.packing.offset.tolist() == [1.5]
    expected = np.arange(-900, -900 + 408, dtype=np.int16).reshape(17, 24)[::-1]
    np.testing.assert_array_equal(store.read_stored(0)[0], expected)


def test_own_packing_that_meets_the_stores_codes_is_replaced(tmp_path):
    file = packed_file(tmp_path / "a.nc", low=-32768)
    with netCDF4.Dataset(file) as dataset:
        dataset.set_auto_maskandscale(False)
        assert dataset["u10"][0, 0, 0] == -32768  # a value here, the store's code for land
    store = ingest([file], tmp_path / "out", packing="int16")
    assert store.packing.scale[0] != 0.01
    assert store.read(0)[0, -1, 0] == pytest.approx(-32768 * 0.01 + 1.5, abs=1e-3)
    assert (store.read_stored(0) == LAND).sum() == 1  # raw -32767 is the file's fill


def test_files_with_different_packing_share_a_range(tmp_path):
    first = packed_file(tmp_path / "a.nc")
    later = tiny_dataset(days=4)[["u10"]].isel(time=slice(2, 4))
    store = ingest([first, write_netcdf(later, tmp_path / "b.nc")], tmp_path / "o", packing="int16")
    assert store.packing.scale[0] != 0.01
    np.testing.assert_allclose(store.read(2)[0], later.u10.values[0, ::-1],
                               atol=store.packing.scale[0])  # fmt: skip


def test_unsigned_bytes_are_read_unsigned(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w", format="NETCDF3_CLASSIC") as file:
        for name, size in (("time", 2), ("lat", 2), ("lon", 2)):
            file.createDimension(name, size)
            file.createVariable(name, "f8", (name,))[:] = [0, 1]
        file["time"].units = "days since 2000-01-01"
        variable = file.createVariable("ice", "i1", ("time", "lat", "lon"), fill_value=-1)
        variable.set_auto_maskandscale(False)
        variable._Unsigned = "true"
        variable.scale_factor, variable.units = 0.5, "%"
        variable[:] = np.array([0, 100, 200, 255], np.uint8).view(np.int8).reshape(1, 2, 2)
    store = ingest([tmp_path / "a.nc"], tmp_path / "out")
    np.testing.assert_array_equal(store.read(0)[0], [[100, np.nan], [0, 50]])


def test_int16_store_agrees_to_half_a_code(tmp_path):
    dataset = tiny_dataset(days=5)
    file = write_netcdf(dataset, tmp_path / "a.nc")
    calls = []
    store = ingest([file], tmp_path / "o", packing="int16",
                   progress=lambda done, total: calls.append((done, total)))  # fmt: skip
    assert calls == [(i, 10) for i in range(1, 11)]
    exact = ingest([file], tmp_path / "f")
    error = np.abs(all_fields(store) - all_fields(exact))
    np.testing.assert_array_equal(np.isnan(all_fields(store)), np.isnan(all_fields(exact)))
    assert (np.nanmax(error, axis=(0, 2, 3)) <= 0.51 * store.packing.scale + 1e-6).all()


# Time.


def test_overlapping_files_merge_with_a_warning(tmp_path, plain, caplog):
    dataset = tiny_dataset()
    files = [write_netcdf(dataset.isel(time=slice(9, 20)), tmp_path / "b.nc"),
             write_netcdf(dataset.isel(time=slice(0, 10)), tmp_path / "a.nc")]  # fmt: skip
    store = ingest(files, tmp_path / "out")
    assert len(store.times) == 20
    assert "thetao: 1 dates occur more than once, the first is 2003-03-01" in caplog.text
    np.testing.assert_array_equal(all_fields(store), all_fields(plain))


def test_overlap_that_differs_is_an_error_with_date_and_variable(tmp_path):
    dataset = tiny_dataset()
    other = dataset.isel(time=slice(9, 20)).copy(deep=True)
    other["so"][0, 1, 3, 3] += 0.5
    files = [write_netcdf(dataset.isel(time=slice(0, 10)), tmp_path / "a.nc"),
             write_netcdf(other, tmp_path / "b.nc")]  # fmt: skip
    with pytest.raises(ValueError, match=r"so at 2003-03-01.*different values \(in a\.nc and b"):
        ingest(files, tmp_path / "out")
    with pytest.raises(ValueError, match="out is incomplete"):
        Store(tmp_path / "out")


def test_times_out_of_order_are_sorted(tmp_path, plain):
    order = [3, 0, 5, 1, 4, 2]
    file = write_netcdf(tiny_dataset().isel(time=order), tmp_path / "a.nc")
    store = ingest([file], tmp_path / "out")
    np.testing.assert_array_equal(all_fields(store), all_fields(plain)[:6])


def test_noleap_calendar_has_no_29_february_and_no_gap(tmp_path):
    store = tiny_store(tmp_path, days=9, start=(2004, 2, 25), calendar="noleap")
    assert [f"{date.month}-{date.day}" for date in store.times.dates] == [
        "2-25", "2-26", "2-27", "2-28", "3-1", "3-2", "3-3", "3-4", "3-5"
    ]  # fmt: skip
    assert store.times.segments.max() == 0
    with pytest.raises(ValueError, match="not in the noleap calendar"):
        store.times.find("2004-02-29")


def test_360_day_calendar_keeps_its_30_february(tmp_path):
    store = tiny_store(tmp_path, days=3, start=(2004, 2, 29), calendar="360_day")
    assert str(store.times.date(1)) == "2004-02-30 00:00:00"


def test_files_of_different_calendars_are_refused(tmp_path):
    files = [write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc"),
             write_netcdf(tiny_dataset(days=2, start=(2003, 3, 1), calendar="noleap"),
                          tmp_path / "b.nc")]  # fmt: skip
    with pytest.raises(ValueError, match="different calendars: noleap, standard"):
        ingest(files, tmp_path / "out")


def test_dates_missing_from_one_variable_stay_holes(tmp_path, caplog):
    dataset = tiny_dataset()
    dataset["so"][8] = np.nan
    store = ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "out")
    assert np.argwhere(store.missing).tolist() == [[8, 2], [8, 3]]
    assert "so@0.5: 1 dates have missing values (1 of them no value at all)" in caplog.text
    assert "2003-02-28" in caplog.text
    files = [write_netcdf(dataset.drop_vars("so"), tmp_path / "b.nc"),
             write_netcdf(dataset[["so"]].isel(time=[0, 1, 3]), tmp_path / "c.nc")]  # fmt: skip
    store = ingest(files, tmp_path / "other")
    at = store.channels.index("so@0.5")
    assert np.flatnonzero(store.missing[:, at]).tolist() == [2, *range(4, 20)]


def test_variables_that_share_no_time_are_refused(tmp_path):
    dataset = tiny_dataset(days=4)
    noon = dataset[["u10"]].assign_coords(
        time=("time", np.arange(4) + 0.5, {"units": "days since 2003-02-20"})
    )
    files = [write_netcdf(dataset[["zos"]], tmp_path / "a.nc"),
             write_netcdf(noon, tmp_path / "b.nc")]  # fmt: skip
    with pytest.raises(ValueError, match=r"zos .*u10 .*12:00.* have no time in common"):
        ingest(files, tmp_path / "out")


def test_split_without_times_is_refused_before_anything_is_written(tmp_path):
    file = write_netcdf(tiny_dataset(days=10), tmp_path / "a.nc")
    with pytest.raises(ValueError, match="range 1999 holds no time"):
        ingest([file], tmp_path / "out", splits={"train": ["1999"]})
    assert not (tmp_path / "out").exists()
    store = ingest([file], tmp_path / "out", splits={"train": ["2003-02"], "test": ["2003-03"]})
    assert store.splits == {"train": ["2003-02"], "test": ["2003-03"]}


# expver.


def with_expver(dataset: xr.Dataset) -> xr.Dataset:
    first = dataset.u10.where(np.arange(20)[:, None, None] < 10)
    last = dataset.u10.where(np.arange(20)[:, None, None] >= 10)
    both = xr.concat([first, last], xr.Variable("expver", [1, 5])).transpose("time", "expver", ...)
    return dataset.drop_vars("u10").assign(u10=both.assign_attrs(dataset.u10.attrs))


def test_expver_slices_merge_to_one_field(tmp_path, plain):
    dataset = with_expver(tiny_dataset())
    assert dataset.u10.shape == (20, 2, 17, 24)
    store = ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "out")
    channel = store.channels.index("u10")
    assert np.isfinite(all_fields(store)[:, channel]).all()
    for time in range(20):
        np.testing.assert_array_equal(store.read(time, [channel])[0], plain.read(time, [5])[0])


def test_expver_slices_that_both_have_data_are_an_error(tmp_path):
    dataset = with_expver(tiny_dataset())
    dataset["u10"][12, 0] = 3.0
    file = write_netcdf(dataset, tmp_path / "a.nc")
    with pytest.raises(ValueError, match=r"u10 at 2003-03-04.*two slices of expver"):
        ingest([file], tmp_path / "out")


def test_dimension_without_a_meaning_is_refused_by_name(tmp_path):
    dataset = tiny_dataset(days=2)
    dataset["u10"] = dataset.u10.expand_dims(number=3)
    with pytest.raises(ValueError, match=r"u10: dimension number \(size 3\) is neither time"):
        ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "out")
    single = dataset.isel(number=slice(0, 1))
    store = ingest([write_netcdf(single, tmp_path / "b.nc")], tmp_path / "out")
    assert "u10" in store.channels.names


# Units.


def test_kelvin_becomes_celsius_only_when_asked(tmp_path):
    dataset = tiny_dataset(days=2)
    dataset["thetao"] = dataset.thetao.copy(data=dataset.thetao.values + np.float32(273.15))
    dataset.thetao.attrs["units"] = "K"
    file = write_netcdf(dataset, tmp_path / "a.nc")
    kept = ingest([file], tmp_path / "k")
    assert kept.channels[0].units == "K"
    assert np.nanmax(kept.read(0)[0]) > 290
    asked = ingest([file], tmp_path / "c", units={"thetao": "celsius"})
    assert (asked.channels[0].units, asked.channels[2].units) == ("degC", "1e-3")
    np.testing.assert_allclose(asked.read(0)[0], tiny_dataset(days=2).thetao.values[0, 0, ::-1],
                               atol=4e-5)  # fmt: skip


def test_celsius_values_called_kelvin_are_warned_about(tmp_path, caplog):
    dataset = tiny_dataset(days=2)
    dataset.thetao.attrs["units"] = "K"
    ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "k")
    assert "thetao@0.5 holds" in caplog.text
    assert "K on 2003-02-20 00:00:00, outside 268.15 to 323.15" in caplog.text


def test_files_that_disagree_about_units_are_refused(tmp_path):
    dataset = tiny_dataset(days=4)
    kelvin = dataset.isel(time=slice(2, 4)).copy(deep=True)
    kelvin.thetao.attrs["units"] = "K"
    files = [write_netcdf(dataset.isel(time=slice(0, 2)), tmp_path / "a.nc"),
             write_netcdf(kelvin, tmp_path / "b.nc")]  # fmt: skip
    with pytest.raises(ValueError, match=r"thetao has units 'degC' in a\.nc and 'K' in b\.nc"):
        ingest(files, tmp_path / "out")


def test_unknown_units_are_kept_with_a_warning(tmp_path, caplog):
    dataset = tiny_dataset(days=2)
    dataset.zos.attrs["units"] = "furlongs"
    store = ingest([write_netcdf(dataset, tmp_path / "a.nc")], tmp_path / "out")
    assert store.channels[4].units == "furlongs"
    assert "zos: unit 'furlongs' is not known and kept as it is" in caplog.text


# Zarr.


def write_zarr(dataset: xr.Dataset, path: Path, zarr_format: int) -> Path:
    encoding = {name: {"chunks": (5, 1, 17, 24)} for name in ("thetao", "so")}
    dataset.to_zarr(path, zarr_format=zarr_format, consolidated=False, encoding=encoding)
    return path


@pytest.mark.parametrize(("zarr_format", "chunk"), [(2, "thetao/1.0.0.0"), (3, "thetao/c/1/0/0/0")])
def test_lost_zarr_chunk_is_an_error_with_variable_and_dates(
    tmp_path, plain, caplog, zarr_format, chunk
):
    source = write_zarr(tiny_dataset(days=10), tmp_path / "tiny.zarr", zarr_format)
    names = ["thetao", "so", "zos", "u10", "v10"]
    whole = ingest([source], tmp_path / "whole", variables=names)
    np.testing.assert_array_equal(all_fields(whole), all_fields(plain)[:10])
    (source / chunk).unlink()
    with pytest.raises(ValueError, match=r"thetao lacks 1 of 4 chunks, from 2003-02-25 .*to"
                       r" 2003-03-01 .*allow_missing_chunks"):  # fmt: skip
        ingest([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    dataset = ingest([source], tmp_path / "out", variables=["so"])
    assert dataset.missing.sum() == 0
    allowed = ingest([source], tmp_path / "allowed", allow_missing_chunks=True)
    assert "taken as fill values" in caplog.text
    if zarr_format == 2:  # its fill value is NaN; the holes are then recorded
        lost = allowed.missing[:, allowed.channels.index("thetao@0.5")]
        assert np.flatnonzero(lost).tolist() == [5, 6, 7, 8, 9]


def test_sharded_zarr_reads_and_a_lost_shard_is_an_error(tmp_path):
    source = tmp_path / "a.zarr"
    dataset = tiny_dataset()[["u10", "zos"]]
    dataset.to_zarr(source, zarr_format=3, consolidated=False,
                    encoding={"u10": {"chunks": (1, 17, 24), "shards": (10, 17, 24)}})  # fmt: skip
    assert zarr.open_array(str(source), path="u10").shards == (10, 17, 24)
    store = ingest([source], tmp_path / "out", variables=["u10"])
    np.testing.assert_array_equal(store.read(13)[0], dataset.u10.values[13, ::-1])
    (source / "u10" / "c" / "1" / "0" / "0").unlink()
    with pytest.raises(ValueError, match="u10 lacks 1 of 2 chunks, from 2003-03-02"):
        ingest([source], tmp_path / "other", variables=["u10"])


def test_torn_zarr_chunk_is_an_error_with_variable_and_date(tmp_path):
    source = write_zarr(tiny_dataset(), tmp_path / "tiny.zarr", 3)
    chunk = source / "thetao" / "c" / "2" / "1" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"2003-03-02.*thetao.*cannot be read"):
        ingest([source], tmp_path / "out")
    with pytest.raises(ValueError, match="out is incomplete"):
        Store(tmp_path / "out")


# Refusals and safety.


def test_rotated_projected_and_unstructured_grids_are_refused_in_one_line(tmp_path):
    values = np.zeros((2, 3, 4), np.float32)
    time = ("time", [0, 1], {"units": "days since 2000-01-01"})
    rotated = xr.Dataset(
        {"t": (("time", "rlat", "rlon"), values, {"grid_mapping": "pole"}),
         "pole": ((), 0, {"grid_mapping_name": "rotated_latitude_longitude"})},
        {"time": time, "rlat": ("rlat", [0.0, 1, 2], {"standard_name": "grid_latitude"}),
         "rlon": ("rlon", [0.0, 1, 2, 3], {"standard_name": "grid_longitude"})},
    )  # fmt: skip
    projected = xr.Dataset(
        {"t": (("time", "y", "x"), values)},
        {"time": time, "y": ("y", [0.0, 1, 2], {"standard_name": "projection_y_coordinate"}),
         "x": ("x", [0.0, 1, 2, 3], {"standard_name": "projection_x_coordinate"})},
    )  # fmt: skip
    unstructured = xr.Dataset(
        {"t": (("time", "ncells"), values[:, 0], {"coordinates": "clat clon"})},
        {"time": time, "clat": ("ncells", [0.0, 1, 2, 3], {"standard_name": "latitude"}),
         "clon": ("ncells", [0.0, 1, 2, 3], {"standard_name": "longitude"})},
    )  # fmt: skip
    kinds = {"rotated": rotated, "projected": projected, "unstructured": unstructured}
    for kind, dataset in kinds.items():
        file = write_netcdf(dataset, tmp_path / f"{kind}.nc")
        with pytest.raises(ValueError, match=rf"t is on a {kind}|an {kind}") as caught:
            ingest([file], tmp_path / "out")
        assert "xESMF" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_output_in_a_source_or_over_something_is_refused_and_the_source_stays(tmp_path):
    source = write_zarr(tiny_dataset(days=5), tmp_path / "tiny.zarr", 3)
    before = digest(source)
    for out in (source, source / "store", tmp_path):
        with pytest.raises(ValueError, match=r"lies in or around the source|exists already"):
            ingest([source], out)
    file = write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc")
    with pytest.raises(ValueError, match="lies in or around the source"):
        ingest([file], file)
    (tmp_path / "link").symlink_to(source, target_is_directory=True)
    with pytest.raises(ValueError, match="lies in or around the source"):
        ingest([source], tmp_path / "link" / "store")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        ingest([file], tmp_path / "full")
    assert (tmp_path / "full" / "note").read_text() == "mine"
    assert digest(source) == before


def digest(folder: Path) -> str:
    parts = [f"{p.relative_to(folder)}{p.read_bytes().hex()}" for p in sorted(folder.rglob("*"))
             if p.is_file()]  # fmt: skip
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def test_failure_before_any_step_removes_what_this_call_made_and_nothing_else(tmp_path):
    dataset = tiny_dataset(days=4)
    dataset["u10"][0, 2, 2] = np.inf
    file = write_netcdf(dataset, tmp_path / "a.nc")
    with pytest.raises(ValueError, match=r"2003-02-20.*u10 holds an infinite value"):
        ingest([file], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="u10 holds infinite values"):
        ingest([file], tmp_path / "empty", packing="int16")
    with pytest.raises(ValueError, match="infinite"):
        ingest([file], tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_variable_without_any_value_is_refused(tmp_path):
    dataset = tiny_dataset(days=2)
    dataset["zos"][:] = np.nan
    file = write_netcdf(dataset, tmp_path / "a.nc")
    for packing in ("float32", "int16"):
        with pytest.raises(ValueError, match="zos holds no value at any time"):
            ingest([file], tmp_path / packing, packing=packing)
    assert not (tmp_path / "int16").exists()


def test_what_is_no_gridded_file_is_refused_with_the_reason(tmp_path):
    (tmp_path / "text.nc").write_text("no data")
    (tmp_path / "folder").mkdir()
    cases = {"text.nc": "neither NetCDF nor Zarr", "folder": "no Zarr group", "no.nc": "not exist"}
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            ingest([tmp_path / name], tmp_path / "out")
    with pytest.raises(ValueError, match="no source files"):
        ingest([], tmp_path / "out")
    file = write_netcdf(tiny_dataset(days=2)[["mask"]], tmp_path / "m.nc")
    with pytest.raises(ValueError, match="none of mask has dates"):
        ingest([file], tmp_path / "out")


def test_provenance_names_files_and_arguments_but_no_place(tmp_path):
    file = write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc")
    store = ingest([file], tmp_path / "out", units={"zos": "cm"})
    provenance = store.attributes["provenance"]
    assert provenance["sources"] == [{
        "name": "a.nc", "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }]  # fmt: skip
    assert provenance["units"] == {"zos": "cm"}
    assert {"graticule", "zarr", "xarray"} <= set(provenance["versions"])
    assert str(tmp_path) not in str(provenance)


def test_two_ingests_of_the_same_files_have_the_same_fingerprint(tmp_path):
    file = write_netcdf(tiny_dataset(days=2), tmp_path / "a.nc")
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")
    first = ingest([file], tmp_path / "a")
    second = ingest([tmp_path.parent / f"{tmp_path.name}-copy" / "a.nc"], tmp_path / "b")
    assert first.fingerprint == second.fingerprint


# Real files.


def test_real_monthly_winds(tmp_path):
    store = ingest([DATA / "navy_winds_6_months.nc"], tmp_path / "out", packing="int16")
    assert store.channels.names == ("UWND", "VWND")
    assert store.channels[0].units == "m s-1"
    assert store.times.nominal_step_seconds / 86400 == pytest.approx(30.437, abs=1e-3)
    assert store.times.segments.max() == 0
    assert str(store.times.date(0)) == "1982-01-16 20:00:00"
    assert store.grid.lon[0] == 0
    with netCDF4.Dataset(DATA / "navy_winds_6_months.nc") as file:
        column = int(np.flatnonzero(file["FNOCX"][:] == 360.0)[0])
        expected = file["UWND"][2, ::-1, column].filled(np.nan)
    np.testing.assert_allclose(store.read(2)[0, :, 0], expected, atol=store.packing.scale[0])


def test_real_climatology_without_time_and_with_levels(tmp_path, caplog):
    source = DATA / "levitus_3_levels.nc"
    with pytest.raises(ValueError, match="none of TEMP, SALT has dates"):
        ingest([source], tmp_path / "out")
    store = ingest([source], tmp_path / "out", time="2000-01-01")
    assert store.channels.names == (
        "TEMP@0", "TEMP@200", "TEMP@2000", "SALT@0", "SALT@200", "SALT@2000"
    )  # fmt: skip
    assert [c.units for c in store.channels] == ["degC"] * 3 + ["1e-3"] * 3
    assert store.grid.lon[[0, -1]].tolist() == [0.5, 359.5]
    assert len(store.times) == 1
    fields = store.read(0)
    assert -3 < np.nanmin(fields[0]) < np.nanmax(fields[0]) < 32
    assert 0 < np.nanmin(fields[3]) < np.nanmax(fields[3]) < 45
    assert store.wet[0].sum() > store.wet[2].sum() > 0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_real_climatology_in_year_0(tmp_path):
    store = ingest([DATA / "coads_3_months.nc"], tmp_path / "out")
    assert [str(date) for date in store.times.dates] == [
        "0000-01-16 06:00:00", "0000-02-15 16:29:06", "0000-03-17 02:58:12"
    ]  # fmt: skip
    assert store.times.segments.max() == 0
    assert [c.units for c in store.channels] == ["degC", "hPa"]
    assert np.nanmax(store.read(0)[0]) < 40


def test_real_relief_has_its_repeated_column_dropped(tmp_path, caplog):
    store = ingest([DATA / "etopo20_30_rows.nc"], tmp_path / "out", time="2000-01-01")
    assert store.grid.shape == (30, 1080)
    assert store.grid.lon[0] == pytest.approx(0.16663, abs=1e-4)
    assert "repeated meridian" not in caplog.text
    with netCDF4.Dataset(DATA / "etopo20_30_rows.nc") as file:
        expected = file["ROSE"][::-1, 0].filled(np.nan)
    column = int(np.abs(store.grid.lon - 20.1666667).argmin())
    np.testing.assert_array_equal(store.read(0)[0, :, column], expected)


def test_real_tropical_band_with_grid_mapping(tmp_path):
    store = ingest([DATA / "ostia_3_months.nc"], tmp_path / "out",
                   units={"surface_temperature": "degC"})  # fmt: skip
    assert store.grid.shape == (18, 432)
    assert store.grid.periodic
    assert 15 < np.nanmin(store.read(0)) < np.nanmax(store.read(0)) < 35


def test_real_tripolar_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tos is on a curvilinear grid \(nav_lat, nav_lon over y"):
        ingest([DATA / "nemo_corner.nc"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
