"""Forecasts with members, for tests: written as plain ones and put together along `member`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from test_evaluate import make_forecast

MemberField = Callable[[int, int, int], np.ndarray | float]


def with_members(path: Path, plain: list[Path], at: int = 2) -> Path:
    """One file of several forecasts that differ in their fields alone. at: place of the new dim."""
    opened = [
        xr.open_dataset(p, decode_times=False, mask_and_scale=False, engine="netcdf4")
        for p in plain
    ]
    first = opened[0].load()
    found = {}
    for name, variable in first.variables.items():
        if variable.ndim > 2:
            place = at if at >= 0 else variable.ndim + 1 + at
            values = np.stack([data[name].values for data in opened], axis=place)
            dims = (*variable.dims[:place], "member", *variable.dims[place:])
            found[name] = (dims, values, {k: v for k, v in variable.attrs.items()
                                          if k != "_FillValue"})  # fmt: skip
        else:
            found[name] = (variable.dims, variable.values, variable.attrs)
    data = xr.Dataset(found, attrs={**first.attrs, "complete": np.int32(1)})
    plainly = {str(n): {"_FillValue": None} for n in data.variables if data[n].ndim < 3}
    data.to_netcdf(path, engine="netcdf4", format="NETCDF4", encoding=plainly)
    for each in opened:
        each.close()
    return path


def make_ensemble(
    path: Path, field: MemberField, members: int, *, at: int = 2, **more: Any
) -> Path:
    """field: called with the initial day, the lead from 1 and the member from 0."""
    plain = [
        make_forecast(path.with_name(f"{path.stem}-{k}.nc"),
                      lambda day, lead, k=k: field(day, lead, k), **more)
        for k in range(members)
    ]  # fmt: skip
    return with_members(path, plain, at)
