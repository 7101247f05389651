"""The forecast file: CF-1.11 in Zarr or netCDF, streamed to disk lead by lead.

Dims are (init_time, lead_time, [level], lat, lon), of an ensemble (init_time, member, lead_time,
[level], lat, lon), members counted from 0. One variable per `Channel.variable`; its levels are
stacked, ascending, along `depth` (levels in metres, counted downwards) or `level` (any other unit);
another set of levels gets `depth_2`, `level_2`, and so on. `lead_time` is a duration and label k is
k model steps. `valid_time` (init_time, lead_time) is exact in every calendar, also where months
make the lead nominal. Land is NaN.

The attribute `complete` is 0 until every lead is on disk; `reader.open_forecast` refuses a file
that was left before. Several processes may write a Zarr file at once, each its own initial times:
a chunk holds one initial time and lead, of one member.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import cftime
import numpy as np

from graticule import __version__
from graticule.data.times import UNITS, seconds_of
from graticule.forecast.formats import At, NetcdfSink, Sink, ZarrSink
from graticule.forecast.levels import layouts, level_attributes
from graticule.forecast.schedule import Places
from graticule.grid import Grid
from graticule.variables import Channel, Channels

FORMAT = "graticule forecast 1"
LARGEST_CHUNK_BYTES = 2**30
"""Blosc stops at 2 GiB a chunk, HDF5 at 4; beyond this, a chunk holds fewer levels."""

log = logging.getLogger(__name__)


class ForecastWriter:
    """A forecast being written; use it in a `with` block.

    Leaving the block without an error closes the file and marks it complete. After an error,
    or a kill, `complete` stays 0. At no time is more than one lead held in memory.

    A Zarr forecast that was stopped is gone on with where it is told which leads are `done`.

    Of several processes the first creates the file; then the others join it, and each writes its
    `own` places; then the first closes it, told how many leads all have written. A place is the
    position of an initial time, of an ensemble as `Places` numbers them.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        channels: Channels,
        grid: Grid,
        init_times: Sequence[cftime.datetime],
        valid_times: np.ndarray,
        nominal_step_seconds: float,
        regular: bool,
        attributes: dict[str, Any],
        members: int | None = None,
        format: Literal["zarr", "netcdf"] | None = None,
        inputs: Sequence[str | Path] = (),
        own: Sequence[int] | None = None,
        joins: bool = False,
        done: Mapping[int, int] | None = None,
    ) -> None:
        """
        channels: what is predicted, in physical units, in the order of `write`.
        init_times: increasing. valid_times: (init, lead) in the same calendar; column 0 is one
        model step after the initial time.
        nominal_step_seconds: one model step; of a monthly axis the mean month's, with
        regular=False. attributes: provenance; text and numbers as they are, the rest as JSON.
        members: of an ensemble; none: a forecast without them.
        format: by default what the suffix says, `.zarr` or `.nc`.
        inputs: what the forecast is made from (store, run); the path may not lie in any of them.
        own: the places that this process writes; none: all of them.
        joins: another process has created the file, as these very arguments describe it.
        done: the file was left by a forecast that was stopped; how many leads of it, from the
        first, are to be kept, by place. ValueError where it is not the forecast that the arguments
        describe, or lacks one of these leads.
        """
        self.path = Path(path)
        self.channels, self.grid = channels, grid
        self.init_times = list(init_times)
        self._places = Places(len(self.init_times), members)
        self.num_leads = _checked_times(self.init_times, valid_times, nominal_step_seconds, regular)
        if not len(channels):
            raise ValueError(f"{self.path}: a forecast needs at least one channel")
        self._layouts = layouts(channels)
        reserved = {"Conventions", "source", "format", "complete", "channels"} & set(attributes)
        if reserved:
            raise ValueError(f"attributes {', '.join(sorted(reserved))} are the writer's own")
        chosen = format or {".zarr": "zarr", ".nc": "netcdf"}.get(self.path.suffix)
        if chosen not in ("zarr", "netcdf"):
            raise ValueError(f"{self.path}: end the name with .zarr or .nc, or give the format")
        if chosen == "netcdf" and (joins or own is not None):
            raise ValueError(
                f"{self.path}: only one process can write a netCDF file, and several would; end the"
                " name with .zarr, or let one process forecast everything (mesh.data=1)"
            )
        self._written = np.zeros((len(self._places), self.num_leads), dtype=bool)
        self._own = np.ones(len(self._places), dtype=bool)
        if own is not None:
            self._own[:] = False
            self._own[list(own)] = True
        self._closed, self._joins = False, joins
        plain = self._told(attributes)
        if joins or done is not None:
            with self._naming("write"):
                self._sink: Sink = ZarrSink(self.path, joins=True)
            if not joins:
                self._require_same(valid_times, plain)
            for place, leads in (done or {}).items():
                if self._own[place]:
                    self._keep(place, leads)
            return
        _refuse_path(self.path, inputs)
        with self._naming("create"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = ZarrSink(self.path) if chosen == "zarr" else NetcdfSink(self.path)
        try:
            with self._naming("create"):
                self._describe(valid_times, int(nominal_step_seconds), regular, plain)
        except ValueError:
            self.abandon()
            raise

    def _told(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """The attributes of the file, but for those that say how far it is."""
        plain = {key: value if isinstance(value, str | int | float) and not isinstance(value, bool)
                 else json.dumps(value) for key, value in attributes.items()}  # fmt: skip
        return {
            "Conventions": "CF-1.11", "title": "graticule forecast", **plain,
            "source": f"graticule {__version__}", "format": FORMAT,
            "channels": json.dumps(self.channels.to_list()),
        }  # fmt: skip

    def _require_same(self, valid_times: np.ndarray, plain: dict[str, Any]) -> None:
        """ValueError unless the file that is there is this forecast, not complete."""
        sink = self._sink
        assert isinstance(sink, ZarrSink)
        there = sink.attributes
        if there.get("format") != FORMAT:
            raise ValueError(
                f"{self.path} holds nothing to go on from: it was left before it was described;"
                " delete it and forecast again"
            )
        names = sorted({*plain, *there} - {"complete"})
        other = [f"{name} {_short(there.get(name))} there, {_short(plain.get(name))} here"
                 for name in names if there.get(name) != plain.get(name)]  # fmt: skip
        members, ours = len(sink.read("member")), self._places.members or 0
        way_out = "Ask for what it was begun as, or name another path"
        if members != ours:
            other.append(f"{members or 'no'} members there, {ours or 'none'} here")
            if members and ours:
                way_out += f": its first {min(members, ours)} members will be the same there"
        seconds = [[seconds_of(date) for date in row] for row in valid_times]
        wanted: dict[str, Any] = {
            "init_time": [seconds_of(date) for date in self.init_times], "valid_time": seconds,
            "lat": self.grid.lat, "lon": self.grid.lon,
        }  # fmt: skip
        other += [f"another {name}" for name, values in wanted.items()
                  if not np.array_equal(sink.read(name), values)]  # fmt: skip
        if other:
            raise ValueError(
                f"{self.path} is another forecast than this one, which cannot go on with it:"
                f" {'; '.join(other)}. {way_out}"
            )

    def _keep(self, place: int, leads: int) -> None:
        assert isinstance(self._sink, ZarrSink)
        for lead in range(leads):
            if lost := self._sink.lost(self._at(place, lead)):
                raise ValueError(
                    f"{self.path}: {lost[0]} of {self._where(place, lead)} is lost (no chunk file);"
                    " delete the forecast and make it again"
                )
        self._written[place, :leads] = True

    def _at(self, place: int, lead: int) -> At:
        member = self._places.member(place)
        start = self._places.start(place)
        return (start, lead) if member is None else (start, member, lead)

    def _where(self, place: int, lead: int) -> str:
        """In words. lead: position from 0."""
        member = self._places.member(place)
        told = "" if member is None else f", member {member}"
        return f"init_time {self.init_times[self._places.start(place)]}{told}, lead {lead + 1}"

    def _describe(
        self, valid_times: np.ndarray, step: int, regular: bool, plain: dict[str, Any]
    ) -> None:
        sink, channels = self._sink, self.channels
        clock = {"units": UNITS, "calendar": self.init_times[0].calendar}
        sink.put(
            "init_time", np.array([seconds_of(date) for date in self.init_times], np.int64),
            ("init_time",), {"standard_name": "forecast_reference_time",
                             "long_name": "initial time", **clock},
        )  # fmt: skip
        members = self._places.members
        if members is not None:
            sink.put("member", np.arange(members, dtype=np.int64), ("member",),
                     {"standard_name": "realization", "long_name": "member of the ensemble",
                      "units": "1"})  # fmt: skip
        leads = np.arange(1, self.num_leads + 1, dtype=np.int64) * step
        hours = step % 3600 == 0
        lead_attributes = {
            "standard_name": "forecast_period",
            "long_name": "lead time",
            "units": "hours" if hours else "seconds",
            # xarray makes a duration of it without being asked. Seconds, because nanoseconds
            # end after 292 years.
            "dtype": "timedelta64[s]",
        }
        if not regular:
            lead_attributes["comment"] = (
                f"nominal: multiples of {step / 86400:g} days; valid_time is exact"
            )
        sink.put("lead_time", leads // 3600 if hours else leads, ("lead_time",), lead_attributes)
        seconds = [[seconds_of(date) for date in row] for row in valid_times]
        sink.put(
            "valid_time", np.array(seconds, np.int64), ("init_time", "lead_time"),
            {"standard_name": "time", "long_name": "valid time", **clock},
        )  # fmt: skip
        for name, values, word, axis in (
            ("lat", self.grid.lat, "latitude", "Y"), ("lon", self.grid.lon, "longitude", "X"),
        ):  # fmt: skip
            units = "degrees_north" if name == "lat" else "degrees_east"
            sink.put(name, values, (name,), {"standard_name": word, "long_name": word,
                                             "units": units, "axis": axis})  # fmt: skip
        for dim, layout in {layout.dim: layout for layout in self._layouts if layout.dim}.items():
            sink.put(dim, np.array(layout.levels), (dim,), level_attributes(layout.level_units))
        height, width = self.grid.shape
        before: dict[str, int] = {
            "init_time": len(self.init_times),
            **({} if members is None else {"member": members}),
            "lead_time": self.num_leads,
        }
        for layout in self._layouts:
            first: Channel = channels[layout.positions[0]]
            named = {"long_name": first.long_name or first.variable,
                     "standard_name": first.standard_name, "units": first.units}  # fmt: skip
            per_chunk = max(1, min(len(layout.levels), LARGEST_CHUNK_BYTES // (4 * height * width)))
            level_shape = (len(layout.levels),) if layout.dim else ()
            sink.create(
                layout.variable,
                (*before.values(), *level_shape, height, width),
                (*before, *((layout.dim,) if layout.dim else ()), "lat", "lon"),
                (*[1] * len(before), *((per_chunk,) if layout.dim else ()), height, width),
                {**{key: text for key, text in named.items() if text}, "coordinates": "valid_time"},
            )
        sink.begin({**plain, "complete": 0})

    def write(self, place: int, lead_index: int, fields: np.ndarray) -> None:
        """One lead: (channel, lat, lon) float32 in physical units, NaN on land, once each.

        lead_index 0 is one model step. ValueError names the channel of an infinite value.
        """
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        expected = (len(self.channels), *self.grid.shape)
        if fields.shape != expected or fields.dtype != np.float32:
            raise ValueError(
                f"fields are {fields.dtype} {fields.shape}, the forecast wants float32 {expected}"
            )
        places, leads = self._written.shape
        if not (0 <= place < places and 0 <= lead_index < leads):
            each = "inits" if self._places.members is None else "inits and members"
            raise ValueError(
                f"init {place}, lead {lead_index} lies outside {places} {each} x {leads} leads"
            )
        where = self._where(place, lead_index)
        if not self._own[place]:
            raise ValueError(f"{self.path}: {where} is another process's to write")
        if self._written[place, lead_index]:
            raise ValueError(f"{self.path}: {where} is written already")
        for name, field in zip(self.channels.names, fields, strict=True):
            if np.isinf(field).any():
                raise ValueError(f"{name} is infinite at {where}: the forecast has blown up")
        with self._naming(f"write {where}"):
            for layout in self._layouts:
                positions = list(layout.positions)
                values = fields[positions] if layout.dim else fields[positions[0]]
                self._sink.assign(layout.variable, self._at(place, lead_index), values)
        self._written[place, lead_index] = True

    def sync(self, place: int, leads: Sequence[int]) -> None:
        """Have leads that are written on disk, which the system otherwise puts off."""
        assert isinstance(self._sink, ZarrSink)
        with self._naming("sync"):
            for lead in leads:
                self._sink.sync(self._at(place, lead))

    @property
    def written(self) -> int:
        """Leads of this process that are there so far, over all initial times and members."""
        return int(self._written.sum())

    def close(self, written: int | None = None) -> None:
        """Mark the forecast complete; ValueError, and it is not, where a lead was not written.

        written: by all processes together; none: only this one writes. A process that joined
        leaves the mark to the first, after all have written.
        """
        if self._closed:
            return
        absent = np.argwhere(~self._written & self._own[:, None])
        if absent.size:
            self.abandon()
            place, lead = (int(i) for i in absent[0])
            raise ValueError(
                f"{self.path} stays incomplete: {len(absent)} of {self._written.size} leads were"
                f" not written, the first is {self._where(place, lead)}"
            )
        together = self.written if written is None else written
        if not self._joins and together != self._written.size:
            self.abandon()
            raise ValueError(
                f"{self.path} stays incomplete: all processes together wrote {together} of"
                f" {self._written.size} leads"
            )
        try:
            with self._naming("complete"):
                if not self._joins:
                    self._sink.complete()
                self._sink.release()
            self._closed = True
        finally:
            if not self._closed:
                self.abandon()

    def abandon(self) -> None:
        """Let go of the file; `complete` stays 0."""
        self._closed = True
        try:
            self._sink.release()
        except (OSError, RuntimeError) as error:
            log.warning("%s: could not be closed after an error: %s", self.path, error)

    def __enter__(self) -> "ForecastWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    @contextlib.contextmanager
    def _naming(self, action: str) -> Iterator[None]:
        """Errors of the file system as one line that names the path."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            # netCDF does not say that the disk is full.
            there = self.path.parent
            if isinstance(error, PermissionError):
                raise ValueError(
                    f"{self.path}: cannot {action}: {error}; name a folder that you may write to"
                ) from error
            free = shutil.disk_usage(there).free / 2**20 if there.is_dir() else 0.0
            raise ValueError(
                f"{self.path}: cannot {action}: {error} ({free:.0f} MiB free there). What is there"
                " is incomplete: make room or name another path, delete it, and forecast again"
            ) from error


def _checked_times(
    init_times: list[cftime.datetime], valid_times: np.ndarray, step: float, regular: bool
) -> int:
    """The number of leads; ValueError where the times contradict each other."""
    if not init_times:
        raise ValueError("a forecast needs at least one initial time")
    if valid_times.ndim != 2 or valid_times.shape[0] != len(init_times) or not valid_times.size:
        raise ValueError(
            f"valid_times have shape {valid_times.shape}, wanted ({len(init_times)} inits, leads)"
        )
    if step <= 0 or step != int(step):
        raise ValueError(f"nominal_step_seconds={step} must be a positive whole number")
    calendars = {date.calendar for date in [*init_times, *valid_times.flat]}
    if len(calendars) > 1:
        raise ValueError(f"the times of a forecast share one calendar, not {sorted(calendars)}")
    inits = [seconds_of(date) for date in init_times]
    for before, after, date in zip(inits, inits[1:], init_times[1:], strict=False):
        if after <= before:
            raise ValueError(f"initial times must increase; {date} does not")
    for init, start, row in zip(init_times, inits, valid_times, strict=True):
        seconds = [start, *(seconds_of(date) for date in row)]
        for lead in range(1, len(seconds)):
            late = seconds[lead] - start - lead * int(step)
            if seconds[lead] <= seconds[lead - 1] or (regular and late):
                raise ValueError(
                    f"init_time {init}, lead {lead}: valid time {row[lead - 1]} is not"
                    f" {lead} steps of {int(step)} s later"
                )
    return int(valid_times.shape[1])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse_path(path: Path, inputs: Sequence[str | Path]) -> None:
    for other in inputs:
        resolved = Path(other).resolve()
        if path.resolve() == resolved or resolved in path.resolve().parents:
            raise ValueError(
                f"{path} lies in {other}, which the forecast is made from; write it elsewhere"
            )
    if path.exists() or path.is_symlink():
        raise ValueError(
            f"{path} exists already and is not overwritten; name another path, or, where a forecast"
            " that did not finish left it behind, go on with it (--resume) or delete it"
        )
