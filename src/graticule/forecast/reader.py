"""Reading a forecast file back: complete ones only, channels in the order they were written."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import cftime
import numpy as np
import xarray as xr

from graticule.data.times import UNITS
from graticule.forecast.formats import NEVER_WRITTEN
from graticule.forecast.levels import layouts
from graticule.forecast.writer import FORMAT
from graticule.grid import Grid
from graticule.variables import Channels


class Forecast:
    """A complete forecast opened for reading; made by `open_forecast`.

    init_times: cftime dates. valid_times: (init, lead) cftime dates; lead k, at position k - 1,
    is k model steps. lead_seconds: (lead,), nominal where `regular` is false.
    attributes: what the writer was told, and what it added.
    num_members: of an ensemble, whose fields have a dim `member`; none: they have not.
    """

    def __init__(self, path: Path, data: xr.Dataset) -> None:
        self.path = path
        self._data = data
        self.attributes: dict[str, Any] = {
            key: value.item() if isinstance(value, np.generic) else value
            for key, value in data.attrs.items()
        }
        self.channels = Channels.from_list(json.loads(self.attributes["channels"]))
        self._layouts = layouts(self.channels)
        self.num_members = int(data.sizes["member"]) if "member" in data.sizes else None
        names = ["init_time", "lead_time", "valid_time", "lat", "lon"]
        read = {name: np.asarray(data[name].values) for name in names}
        for name, values in read.items():
            lost = values == NEVER_WRITTEN if values.dtype.kind == "i" else np.isnan(values)
            if lost.any():
                raise ValueError(f"{path}: {name} is lost (no chunk file); forecast again")
        self.grid = Grid(read["lat"], read["lon"])
        clock = data["init_time"].attrs
        self.init_times: list[cftime.datetime] = list(_dates(read["init_time"], clock))
        self.valid_times = _dates(read["valid_time"], data["valid_time"].attrs)
        lead = data["lead_time"].attrs
        self.lead_seconds = read["lead_time"] * (3600 if lead["units"] == "hours" else 1)
        self.regular = "comment" not in lead
        self.calendar: str = clock["calendar"]

    @property
    def num_leads(self) -> int:
        return int(self.valid_times.shape[1])

    @property
    def variables(self) -> list[tuple[int, ...]]:
        """Positions of the channels of each variable: what is read of one is read of all."""
        return [layout.positions for layout in self._layouts]

    def read(
        self,
        init: int,
        lead: int,
        member: int | None = None,
        *,
        channels: Sequence[int] | None = None,
    ) -> np.ndarray:
        """(channel, lat, lon) float32 in the channels' units, NaN on land.

        lead: position from 0, one model step. member: its position; none: the forecast itself, of
        an ensemble the mean over its members. channels: positions; none: all.
        ValueError where a chunk is lost or torn.
        """
        if member is None and self.num_members is not None:
            total = np.zeros((len(self.channels if channels is None else channels),
                              *self.grid.shape))  # fmt: skip
            for each in range(self.num_members):
                total += self.read(init, lead, each, channels=channels)
            return (total / self.num_members).astype(np.float32)
        inits, leads = self.valid_times.shape
        if not (0 <= init < inits and 0 <= lead < leads):
            raise ValueError(f"init {init}, lead {lead} lies outside {inits} x {leads}")
        at = {"init_time": init, "lead_time": lead}
        where = f"init_time {self.init_times[init]}, lead {lead + 1}"
        if member is not None:
            if not 0 <= member < (self.num_members or 0):
                raise ValueError(f"member {member} lies outside {self.num_members or 0} members")
            at["member"] = member
            where += f", member {member}"
        wanted = list(range(len(self.channels)) if channels is None else channels)
        out = np.empty((len(wanted), *self.grid.shape), np.float32)
        for layout in self._layouts:
            places = [i for i, position in enumerate(wanted) if position in layout.positions]
            if not places:
                continue
            try:
                values = self._data[layout.variable].isel(at).values
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"{self.path}: cannot read {layout.variable} at {where}: {error}"
                ) from error
            if np.isinf(values).any():
                raise ValueError(
                    f"{self.path}: {layout.variable} at {where} is lost (no chunk file);"
                    " forecast again"
                )
            levels = [layout.positions.index(wanted[i]) for i in places]
            out[places] = values[levels] if layout.dim else values
        return out

    def close(self) -> None:
        self._data.close()

    def __enter__(self) -> "Forecast":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def is_complete(path: Path) -> bool:
    """Whether a Zarr folder says that it is a complete forecast."""
    try:
        attributes = json.loads((path / "zarr.json").read_text())["attributes"]
        return bool(attributes["format"] == FORMAT and int(attributes["complete"]) == 1)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_forecast(path: str | Path) -> Forecast:
    """The forecast at `path`, Zarr or netCDF; ValueError where it is none or incomplete."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no forecast there; make one with `graticule forecast`")
    if (path / "config.json").is_file() or (path / "report.html").is_file():
        there = sorted(path.glob("forecast*.zarr")) + sorted(path.glob("*/forecast*.zarr"))
        raise ValueError(
            f"{path} is a run's folder: name a forecast"
            + (f", such as {there[0]}" if there else ", which `graticule forecast` makes of a run")
        )
    incomplete = (
        f"{path} is incomplete: the command that wrote it did not finish. Only forecasts with all"
        " leads are read: run that command again with --resume (a netCDF file has to be deleted and"
        " made again)"
    )
    try:
        with warnings.catch_warnings():
            # A Zarr folder without consolidated metadata was left before its description was done.
            warnings.simplefilter("ignore", RuntimeWarning)
            data = xr.open_dataset(
                path,
                engine="zarr" if path.is_dir() else "netcdf4",
                decode_times=False,
                mask_and_scale=False,
            )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no forecast, or incomplete: {error}") from error
    try:
        if data.attrs.get("format") != FORMAT:
            raise ValueError(f"{path} has format {data.attrs.get('format')!r}, not {FORMAT!r}")
        if int(data.attrs.get("complete", 0)) != 1:
            raise ValueError(incomplete)
        return Forecast(path, data)
    except BaseException:
        data.close()
        raise


def _dates(seconds: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    if attributes["units"] != UNITS:
        raise ValueError(f"times in {attributes['units']!r}, not {UNITS!r}")
    return np.asarray(
        cftime.num2date(seconds, UNITS, attributes["calendar"], has_year_zero=True), dtype=object
    )
