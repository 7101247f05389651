"""The file of an ocean's scores: netCDF with what they say, and the sums that they come from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from graticule import __version__
from graticule.data.times import UNITS
from graticule.evaluate.depths import Column
from graticule.evaluate.files import format_of, save_netcdf
from graticule.evaluate.ocean import DENSITY, HEAT_CAPACITY, MEANS_OF, SOURCES, OceanScores
from graticule.evaluate.ocean_sums import EXTREMES_OF, MAPPED, QUANTITIES, OceanSums
from graticule.grid import Grid
from graticule.variables import Channels

FORMAT = "graticule ocean scores 1"
_PAIR = ("init_time", "lead", "channel")


def save_ocean(scores: OceanScores, path: str | Path, *, force: bool = False) -> None:
    """Write netCDF-4 by CF-1.11, whole or not at all.

    An existing file is refused; with `force` it is replaced if it is a file of ocean scores.
    """
    save_netcdf(
        path, lambda: _encoded(scores), format=FORMAT, what="ocean scores", force=force
    )  # fmt: skip


def load_ocean(path: str | Path) -> OceanScores:
    """The scores at `path`; ValueError where it is no file of ocean scores."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no ocean scores there; `graticule evaluate` writes them")
    if format_of(path) != FORMAT:
        raise ValueError(f"{path} is no file of ocean scores (format {FORMAT!r})")
    with xr.open_dataset(path, engine="netcdf4", decode_times=False) as data:
        attributes = dict(data.attrs)
        channels = Channels.from_list(json.loads(attributes.pop("channels")))
        for key in ("Conventions", "source", "format"):
            del attributes[key]
        read = {name: data[name].values for name in data.variables}
        return OceanScores(
            column=Column(channels=channels, top=read["layer_top"], bottom=read["layer_bottom"]),
            sums=OceanSums(
                names=channels.names,
                origin=read["origin"],
                mapped=tuple(int(i) for i in read["mapped_channel"]),
                values=read["sums"],
                low=read["low"],
                high=read["high"],
                maps=read["map_sums"],
                trained=read["trained_range"],
            ),
            grid=Grid(read["lat"], read["lon"]),
            init_seconds=read["init_time"],
            valid_seconds=read["valid_time"],
            calendar=str(data["init_time"].attrs["calendar"]),
            climatology=attributes.pop("climatology"),
            area=attributes.pop("cell_area"),
            attributes=attributes,
        )


def _encoded(scores: OceanScores) -> tuple[xr.Dataset, dict[str, Any]]:
    data = xr.Dataset(
        {**_told(scores), **_sums(scores.sums)},
        coords=_coordinates(scores),
        attrs={
            "Conventions": "CF-1.11", "title": "scores of an ocean by depth",
            **{key: value if isinstance(value, str | int | float) and not isinstance(value, bool)
               else json.dumps(value) for key, value in scores.attributes.items()},
            "source": f"graticule {__version__}", "format": FORMAT,
            "climatology": scores.climatology, "cell_area": scores.area,
            "channels": json.dumps(scores.column.channels.to_list()),
        },
    )  # fmt: skip
    return data, {str(name): {"_FillValue": None} for name in data.variables}


def _coordinates(scores: OceanScores) -> dict[str, Any]:
    clock = {"units": UNITS, "calendar": scores.calendar}
    column = scores.column
    down = {"units": "m", "positive": "down"}
    return {
        "init_time": ("init_time", scores.init_seconds,
                      {"standard_name": "forecast_reference_time", **clock}),
        "valid_time": (("init_time", "lead"), scores.valid_seconds,
                       {"standard_name": "time", **clock}),
        "lead": ("lead", np.arange(1, scores.valid_seconds.shape[1] + 1),
                 {"long_name": "lead in output times", "units": "1"}),
        "elapsed": ("lead", scores.elapsed_days,
                    {"long_name": "real days since the initial time, mean over initial times",
                     "units": "days"}),
        "channel": ("channel", np.array(scores.names, object),
                    {"long_name": "channel: variable, or variable@level"}),
        "depth": ("channel", column.depth, {"standard_name": "depth", **down}),
        "layer_top": ("channel", column.top, {"long_name": "upper edge of the layer", **down}),
        "layer_bottom": ("channel", column.bottom, {"long_name": "lower edge", **down}),
        "lat": ("lat", scores.grid.lat, {"units": "degrees_north"}),
        "lon": ("lon", scores.grid.lon, {"units": "degrees_east"}),
        "reference": ("reference", np.array(SOURCES, object), {"long_name": "whose error"}),
        "mean_of": ("mean_of", np.array(MEANS_OF, object), {"long_name": "whose mean"}),
        "extreme_of": ("extreme_of", np.array(EXTREMES_OF, object), {"long_name": "whose values"}),
        "quantity": ("quantity", np.array(QUANTITIES, object), {"long_name": "what is summed"}),
        "map_quantity": ("map_quantity", np.array(MAPPED, object), {"long_name": "of each cell"}),
    }  # fmt: skip


def _told(scores: OceanScores) -> dict[str, Any]:
    """What is read off the sums, for those who open the file."""
    units = "units of the channel"
    found: dict[str, Any] = {
        "rmse": (("reference", "lead", "channel"),
                 np.stack([scores.rmse(source) for source in SOURCES]),
                 {"long_name": f"root mean square error by area, mean over times ({units})"}),
        "r2": (("lead", "channel"), scores.r2(),
               {"long_name": "1 - squared error / variance of the truth", "units": "1",
                "comment": "not a number where the truth does not vary"}),
        "r2_climatology": (("lead", "channel"), scores.r2("climatology"),
                           {"long_name": "1 - squared error / that of the climatology",
                            "units": "1"}),
        "area_mean": (("mean_of", *_PAIR), np.stack([scores.mean(name) for name in MEANS_OF]),
                      {"long_name": f"mean over the sea of the level ({units})"}),
        "beyond": (("lead", "channel"), scores.beyond(),
                   {"long_name": "how far the forecast leaves the range of training values",
                    "units": "1"}),
    }  # fmt: skip
    for kind, name in (("temperature", "heat_content"), ("salinity", "salt_content")):
        try:
            contents = scores.content(kind)
        except ValueError:  # no such variable, or in units of another kind
            continue
        dim = f"{name}_range"
        found[dim] = (dim, np.array([c.range.name for c in contents], object), {})
        found[name] = (
            ("extreme_of", dim, "init_time", "lead"),
            np.stack([[c.model for c in contents], [c.truth for c in contents]]),
            {"units": contents[0].units, "density": DENSITY, "heat_capacity": HEAT_CAPACITY},
        )
    if scores.column.currents:
        east = [pair[0] for pair in scores.column.currents]
        found["kinetic_energy_depth"] = ("current", scores.column.depth[east], {"units": "m"})
        found["kinetic_energy"] = (
            ("extreme_of", "init_time", "lead", "current"),
            np.stack([scores.kinetic_energy(source) for source in EXTREMES_OF]),
            {"long_name": "mean of (u2 + v2) / 2", "units": "m2 s-2"},
        )
    return found


def _sums(sums: OceanSums) -> dict[str, Any]:
    return {
        "sums": (("quantity", *_PAIR), sums.values, {"long_name": "sums by area", "units": "m2"}),
        "origin": ("channel", sums.origin, {"long_name": "taken off before summing"}),
        "low": (("extreme_of", *_PAIR), sums.low, {"long_name": "least value"}),
        "high": (("extreme_of", *_PAIR), sums.high, {"long_name": "largest value"}),
        "trained_range": (("bound", "channel"), sums.trained,
                          {"long_name": "least and largest value of the training times"}),
        "mapped_channel": ("map", np.array(sums.mapped, np.int64),
                           {"long_name": "position of the channel of a map"}),
        "map_sums": (("map", "map_quantity", "lat", "lon"), sums.maps,
                     {"long_name": "sums over all pairs"}),
    }  # fmt: skip
