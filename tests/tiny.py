"""A small planet of plain numbers that tests write to files in as many ways as files come."""

from pathlib import Path

import cftime
import numpy as np
import xarray as xr

DEPTHS = (0.5, 9.5)


def tiny_dataset(
    *,
    days: int = 20,
    start: tuple[int, int, int] = (2003, 2, 20),
    calendar: str = "standard",
    descending: bool = False,
    lon_origin: float = 0.0,
) -> xr.Dataset:
    """17 x 24 points (7.5 degrees from 60 S, 15 degrees from `lon_origin`), daily.

    thetao and so on two depths and zos with about a quarter land (NaN), u10 and v10 everywhere,
    mask 1 at sea and NaN on land. Longitudes are `lon_origin` to `lon_origin` + 345 and each value
    belongs to its place on the globe, whatever the origin.
    """
    lat = -60 + 7.5 * np.arange(17)
    lon = lon_origin + 15.0 * np.arange(24)
    phi, lam = np.deg2rad(lat)[:, None], np.deg2rad(np.mod(lon, 360))[None, :]
    land = np.cos(2 * lam + 0.7) * np.cos(phi) + 0.3 * np.sin(3 * lam + phi) > 0.5
    day = np.arange(days, dtype=float)[:, None, None]
    wave = np.sin(lam + 2 * phi - 0.3 * day)
    sea = np.where(land, np.nan, 1.0)
    depth = np.array([0.0, 1.0])[None, :, None, None]
    thetao = (25 * np.cos(phi) ** 2 + wave)[:, None] * (1 - 0.2 * depth) * sea
    so = (35 + 0.5 * np.cos(2 * phi) + 0.2 * wave)[:, None] * (1 + 0.01 * depth) * sea
    fields = {
        "thetao": (thetao, "degC", "sea_water_potential_temperature"),
        "so": (so, "1e-3", "sea_water_salinity"),
        "zos": (0.5 * wave * np.sin(phi) * sea, "m", "sea_surface_height_above_geoid"),
        "u10": (8 * np.cos(3 * phi) * np.cos(0.2 * day) + wave, "m s-1", "eastward_wind"),
        "v10": (3 * np.sin(2 * lam + 0.1 * day) * np.cos(phi), "m s-1", "northward_wind"),
    }
    reference = cftime.datetime(*start, calendar=calendar, has_year_zero=True)
    dataset = xr.Dataset(
        {
            name: (
                ("time", "depth", "lat", "lon") if values.ndim == 4 else ("time", "lat", "lon"),
                values.astype(np.float32),
                {"units": units, "standard_name": standard},
            )
            for name, (values, units, standard) in fields.items()
        }
        | {"mask": (("lat", "lon"), sea.astype(np.float32), {"units": "1"})},
        coords={
            "time": (
                "time",
                np.arange(days, dtype=np.int64),
                {"units": f"days since {reference.isoformat(' ')}", "calendar": calendar},
            ),
            "depth": ("depth", np.array(DEPTHS), {"units": "m", "positive": "down"}),
            "lat": ("lat", lat, {"units": "degrees_north"}),
            "lon": ("lon", lon, {"units": "degrees_east"}),
        },
    )
    return dataset.isel(lat=slice(None, None, -1)) if descending else dataset


def write_netcdf(dataset: xr.Dataset, path: Path, **encoding: dict) -> Path:
    """Write values and attributes to a file as they are."""
    dataset = dataset.copy()  # attributes of the copy are its own
    plain = {
        name: {"_FillValue": variable.attrs.pop("_FillValue", None)}
        for name, variable in dataset.variables.items()
    }
    dataset.to_netcdf(path, engine="netcdf4", encoding={**plain, **encoding})
    return path
