"""Small files in the exact form of known sources: GLORYS12, ERA5 as WeatherBench 2 keeps it, OM4
as Samudra does. Sizes are small and odd; names, types, packing, calendars and masks are theirs."""

from pathlib import Path

import cftime
import netCDF4
import numpy as np
import xarray as xr

from graticule.data.known import ERA5_LEVELS_HPA, GLORYS12_DEPTHS_M, OM4_LEVELS_M

# Of cmems_mod_glo_phy_my_0.083deg_P1D-m: (scale_factor, add_offset, units, standard_name).
GLORYS12_PACKING = {
    "thetao": (0.000732444226741791, 21.0, "degrees_C", "sea_water_potential_temperature"),
    "so": (0.00152592547237873, -0.00152592547237873, "1e-3", "sea_water_salinity"),
    "uo": (0.000610370188951492, 0.0, "m s-1", "eastward_sea_water_velocity"),
    "vo": (0.000610370188951492, 0.0, "m s-1", "northward_sea_water_velocity"),
    "zos": (0.000305185094475746, 0.0, "m", "sea_surface_height_above_geoid"),
}
GLORYS12_FILL = -32767


def glorys12_raw(name: str, day: int, level: int, lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
    """(lat, lon) int16 as the file stores them, by place; the deeper, the more land."""
    base = {"thetao": -9000, "so": 22900, "uo": 0, "vo": 100, "zos": 0}[name]
    raw = base + 20 * day - 7 * level + 50 * np.rint(lat)[:, None] / 10 + np.rint(lon)[None] % 31
    land = np.abs(lat)[:, None] + np.abs(lon)[None] / 3 < 10 + level
    return np.where(land, GLORYS12_FILL, raw).astype(np.int16)


def write_glorys12(
    path: Path, days: list[int], *, descending: bool = False, lat_type: type = np.float32
) -> Path:
    """Days since 2020-01-01, 11 x 18 points, all 50 depths, mlotst beside them."""
    lat = np.linspace(-80, 90, 11)[:: -1 if descending else 1]
    lon = -180 + 20.0 * np.arange(18)
    with netCDF4.Dataset(path, "w") as file:
        file.title = "daily mean fields from Global Ocean Physics Analysis and Forecast"
        file.source = "MERCATOR GLORYS12V1"
        file.createDimension("time", None)
        for name, values, kind, attributes in (
            ("depth", GLORYS12_DEPTHS_M, "f4", {"units": "m", "positive": "down", "axis": "Z"}),
            ("latitude", lat, np.dtype(lat_type).str[1:], {"units": "degrees_north"}),
            ("longitude", lon, "f4", {"units": "degrees_east"}),
        ):
            file.createDimension(name, len(values))
            file.createVariable(name, kind, (name,))[:] = values
            file[name].setncatts({"standard_name": name, **attributes})
        time = file.createVariable("time", "f4", ("time",))
        time.setncatts({"units": "hours since 1950-01-01", "calendar": "gregorian"})
        time[:] = 613608 + 24 * np.array(days)
        for name, (scale, offset, units, standard) in GLORYS12_PACKING.items():
            levels = 1 if name == "zos" else 50
            dims = ("time", *([] if name == "zos" else ["depth"]), "latitude", "longitude")
            chunks = (1, *([] if name == "zos" else [7]), 11, 9)
            variable = file.createVariable(name, "i2", dims, fill_value=GLORYS12_FILL, zlib=True,
                                           chunksizes=chunks)  # fmt: skip
            variable.set_auto_maskandscale(False)
            variable.setncatts({"units": units, "standard_name": standard,
                                "scale_factor": scale, "add_offset": offset})  # fmt: skip
            raw = np.array([[glorys12_raw(name, day, level, lat, lon) for level in range(levels)]
                            for day in days])  # fmt: skip
            variable[:] = raw if levels > 1 else raw[:, 0]
        mixed = file.createVariable("mlotst", "i2", ("time", "latitude", "longitude"))
        mixed.setncatts({"units": "m", "scale_factor": 0.152592554688454})
        mixed[:] = 70
    return path


ERA5_UNITS = {
    "10m_u_component_of_wind": "m s**-1", "10m_v_component_of_wind": "m s**-1",
    "mean_sea_level_pressure": "Pa", "2m_temperature": "K", "sea_surface_temperature": "K",
    "total_precipitation_6hr": "m", "geopotential": "m**2 s**-2",
    "specific_humidity": "kg kg**-1", "temperature": "K", "u_component_of_wind": "m s**-1",
    "v_component_of_wind": "m s**-1", "vertical_velocity": "Pa s**-1",
}  # fmt: skip
_ERA5_BASE = {"mean_sea_level_pressure": 1e5, "2m_temperature": 280.0, "temperature": 250.0,
              "sea_surface_temperature": 285.0, "geopotential": 5e4}  # fmt: skip


def era5_dataset(times: int = 3, rows: int = 13) -> xr.Dataset:
    """rows: from pole to pole if 13; 12 end one row before the south pole. 15 degrees apart."""
    lat, lon = 90 - 15.0 * np.arange(rows), 15.0 * np.arange(24)
    lam, phi = np.deg2rad(lon)[None], np.deg2rad(lat)[:, None]
    dims = ("time", "latitude", "longitude")
    variables: dict = {}
    for number, (name, units) in enumerate(ERA5_UNITS.items()):
        levels = 1 if number < 6 else 13
        size = {"specific_humidity": 1e-3, "total_precipitation_6hr": 1e-3}.get(name, 1.0)
        wave = np.array([[np.sin(lam + number + 0.1 * t) * np.cos(phi) + 0.01 * k
                          for k in range(levels)] for t in range(times)])  # fmt: skip
        values = (_ERA5_BASE.get(name, 0.0) + size * wave).astype(np.float32)
        if name == "total_precipitation_6hr":
            values = np.maximum(values, 0)
        if name == "sea_surface_temperature":
            values[..., 5:9] = np.nan
        variables[name] = (
            (dims, values[:, 0], {"units": units}) if levels == 1
            else (("time", "level", *dims[1:]), values, {"units": units})
        )  # fmt: skip
    flat = np.broadcast_to(np.cos(phi) * np.cos(lam), (rows, 24)).astype(np.float32)
    variables |= {
        "soil_type": (dims[1:], np.rint(3 + 3 * flat), {"units": "~"}),
        "geopotential_at_surface": (dims[1:], 1e3 * np.abs(flat), {"units": "m**2 s**-2"}),
        "land_sea_mask": (dims[1:], (flat > 0).astype(np.float32), {"units": "(0 - 1)"}),
        "wind_speed": (("time", "level", *dims[1:]), variables["temperature"][1],
                       {"units": "m s**-1"}),
    }  # fmt: skip
    return xr.Dataset(
        variables,
        {"time": ("time", 6 * np.arange(times),
                  {"units": "hours since 1959-01-01", "calendar": "proleptic_gregorian"}),
         "level": ("level", np.array(ERA5_LEVELS_HPA)),
         "latitude": ("latitude", lat.astype(np.float32)),
         "longitude": ("longitude", lon.astype(np.float32))},
    )  # fmt: skip


def write_zarr2(dataset: xr.Dataset, path: Path) -> Path:
    dataset.to_zarr(path, zarr_format=2, consolidated=False)
    return path


def om4_dates(first_year: int = 1959, years: int = 2) -> list[cftime.datetime]:
    """73 dates a year, the same in every year, 12:00 in the julian calendar."""
    plain = [cftime.datetime(1959, 1, 3, 12, calendar="noleap")]
    plain = cftime.num2date(5 * np.arange(73), "days since 1959-01-03 12:00:00", "noleap")
    return [cftime.datetime(year, date.month, date.day, 12, calendar="julian")
            for year in range(first_year, first_year + years) for date in plain]  # fmt: skip


def om4_dataset(
    dates: list[cftime.datetime], *, compact: bool = False, land: float = np.nan
) -> xr.Dataset:
    """8 Gaussian rows x 12 columns, 19 levels; land of value `land` grows with depth.

    One array a level and mask, or, `compact`, a lev dimension.
    """
    lat = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(8)[0]))
    lon = 15 + 30.0 * np.arange(12)
    number = np.arange(len(dates), dtype=np.float32)[:, None, None]
    masks = np.array([np.abs(lat)[:, None] + lon[None] / 30 > 3 + k / 3 for k in range(19)])

    def field(offset: float, level: int) -> np.ndarray:
        values = offset + 0.01 * level + 0.001 * number + 0.01 * np.deg2rad(lat)[:, None]
        values = values + 0.001 * lon
        return np.where(masks[level], values, land).astype(np.float32)

    offsets = {"thetao": 10.0, "so": 34.0, "uo": 0.1, "vo": 0.2}
    dims = ("time", "y", "x")
    variables: dict = {}
    for name, offset in offsets.items():
        levels = [field(offset, k) for k in range(19)]
        if compact:
            variables[name] = (("time", "lev", "y", "x"), np.stack(levels, 1))
        else:
            variables |= {f"{name}_{k}": (dims, values) for k, values in enumerate(levels)}
    variables |= {"zos": (dims, field(0.3, 0))}
    for name in ("tauuo", "tauvo", "hfds", "hfds_anomalies"):
        variables[name] = (dims, field(0.05, 0))
    if compact:
        variables["mask"] = (("lev", "y", "x"), masks)
    else:
        variables |= {f"mask_{k}": (("y", "x"), mask) for k, mask in enumerate(masks)}
    variables |= {
        "areacello": (("y", "x"), np.ones((8, 12))), "dz": (("lev",), np.arange(19.0)),
        "lat_b": (("y_b", "x_b"), np.zeros((9, 13))), "lon_b": (("y_b", "x_b"), np.zeros((9, 13))),
    }  # fmt: skip
    days = cftime.date2num(dates, "days since 1958-01-01 00:00:00", "julian")
    return xr.Dataset(
        variables,
        {"time": ("time", np.asarray(days, float),
                  {"units": "days since 1958-01-01 00:00:00", "calendar": "julian"}),
         "lev": ("lev", np.array(OM4_LEVELS_M, float)),
         "y": ("y", np.arange(8)), "x": ("x", np.arange(12)),
         "lat": (("y", "x"), np.broadcast_to(lat[:, None], (8, 12)).copy()),
         "lon": (("y", "x"), np.broadcast_to(lon[None], (8, 12)).copy())},
    )  # fmt: skip
