"""netCDF files of scores: written whole or not at all, replaced only where they are ours."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xarray as xr


def save_netcdf(
    path: str | Path,
    make: Callable[[], tuple[xr.Dataset, dict[str, Any]]],
    *,
    format: str,
    what: str,
    force: bool = False,
) -> None:
    """Write netCDF-4. make: the data set and its encoding.

    An existing file is refused; with `force` it is replaced if its attribute `format` is this.
    what: the kind of file in words.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        if not force:
            raise ValueError(f"{path} exists already and is not overwritten; name another path")
        if not path.is_file() or format_of(path) != format:
            raise ValueError(f"{path} is no file of {what}, so it is not replaced")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data, encoding = make()
        data.to_netcdf(part, engine="netcdf4", format="NETCDF4", encoding=encoding)
        os.replace(part, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def format_of(path: Path) -> str | None:
    """The `format` of a netCDF file; none of any other file."""
    try:
        with xr.open_dataset(path, engine="netcdf4", decode_times=False) as data:
            return data.attrs.get("format")
    except (OSError, RuntimeError, ValueError, KeyError):
        return None
