"""The store: fields on disk as the model wants them, one Zarr v3 group.

`fields` is (time, channel, lat, lon), one shard (file) per time step, cut inside into chunks of
channels x rows x columns, by default of all channels and columns: a stripe of latitudes reads its
own bytes only, and with chunks that are cut in longitude or by channels so does a stripe of
longitudes, or a rank that has some of the channels.
Compression is blosc-lz4 with byte shuffle. Values are float32, or int16 with a scale and an
offset per channel. Land and missing values have a code of their own, and so has "never written":
a lost chunk is an error, never land.

`wet` (channel, lat, lon) is the declared mask: cells that ever hold a value. `missing` (time,
channel) counts wet cells without a value at that time. `static` (static, lat, lon) is float32.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from graticule.data.shardfile import LAND
from graticule.data.shards import Job, Shards, Target, one_by_one
from graticule.data.times import TimeAxis
from graticule.grid import Grid
from graticule.variables import Channels

FORMAT = "graticule store 1"
LARGEST = 32766
DIGESTS = "digests.json"
"""Beside the arrays: SHA-256 of each step's stored numbers, as `shardfile.content_digest`."""


@dataclass(frozen=True, eq=False)
class Packing:
    """How values become the numbers on disk.

    None for both: float32 as they are. Else int16: value = stored * scale + offset, with scale
    and offset (channel,) float64 in each channel's units.
    """

    scale: np.ndarray | None = None
    offset: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.scale is None and self.offset is None:
            return
        if self.scale is None or self.offset is None or self.scale.shape != self.offset.shape:
            raise ValueError("packing needs a scale and an offset for each channel, or neither")
        # A scale that is NaN would turn every value into the code of land.
        wrong = ~(np.isfinite(self.scale) & np.isfinite(self.offset) & (self.scale > 0))
        if wrong.any():
            channel = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"packing of channel {channel} has scale {self.scale[channel]:g} and offset"
                f" {self.offset[channel]:g}: both must be finite and the scale positive; give the"
                " range of the values or store float32"
            )

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32 if self.scale is None else np.int16)

    @classmethod
    def over_range(cls, low: np.ndarray, high: np.ndarray) -> "Packing":
        """int16 that reaches from low to high, (channel,) each; a constant gets a tiny scale."""
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        unusable = np.flatnonzero(~(low <= high))  # True for NaN
        if unusable.size:
            channel = int(unusable[0])
            raise ValueError(
                f"packing range of channel {channel} is {low[channel]:g} to {high[channel]:g};"
                " low must not be above high"
            )
        offset = (low + high) / 2
        # 1e-12 of the value keeps scale > 0 for constants; the constant itself is the offset.
        scale = np.maximum((high - low) / (2 * LARGEST), 1e-12 * np.maximum(np.abs(offset), 1))
        return cls(scale, offset)

    def take(self, channels: Sequence[int]) -> "Packing":
        if self.scale is None or self.offset is None:
            return self
        return Packing(self.scale[list(channels)], self.offset[list(channels)])

    def pack(self, fields: np.ndarray, channels: Channels) -> np.ndarray:
        """(channel, lat, lon) values, NaN where there is none, to stored numbers.

        ValueError names channel and value where a value is infinite or out of int16's range.
        """
        if np.isinf(fields).any():
            channel = int(np.argwhere(np.isinf(fields))[0][0])
            raise ValueError(f"{channels.names[channel]} holds an infinite value")
        if self.scale is None or self.offset is None:
            with np.errstate(over="ignore"):
                packed = fields.astype(np.float32)
            if np.isinf(packed).any():
                channel = int(np.argwhere(np.isinf(packed))[0][0])
                raise ValueError(f"{channels.names[channel]} holds a value beyond float32")
            return packed
        numbers = np.rint(
            (fields.astype(np.float64) - self.offset[:, None, None]) / self.scale[:, None, None]
        )
        beyond = np.abs(numbers) > LARGEST  # False for NaN
        if beyond.any():
            channel, row, column = (int(i) for i in np.argwhere(beyond)[0])
            reach = LARGEST * self.scale[channel]
            raise ValueError(
                f"{channels.names[channel]} = {fields[channel, row, column]:g} at row {row},"
                f" column {column} does not fit int16 packing, which reaches from"
                f" {self.offset[channel] - reach:g} to {self.offset[channel] + reach:g}"
                f" {channels[channel].units}; widen the packing range or store float32"
            )
        return np.where(np.isnan(fields), LAND, numbers).astype(np.int16)

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        """(channel, lat, lon) stored numbers to float32 values, NaN where there is none."""
        if self.scale is None or self.offset is None:
            return stored.astype(np.float32)
        values = stored * self.scale[:, None, None] + self.offset[:, None, None]
        return np.where(stored == LAND, np.nan, values).astype(np.float32)


class Store:
    """A store opened for reading."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "zarr.json").is_file():
            raise ValueError(
                f"{self.path} is no store (no zarr.json there); make one with"
                " `graticule data ingest` or `graticule data demo`"
            )
        try:
            self._group = zarr.open_group(str(self.path), mode="r")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path / 'zarr.json'} cannot be read ({error}); write the store again"
            ) from error
        attributes: dict[str, Any] = dict(self._group.attrs)
        if attributes.get("format") != FORMAT:
            raise ValueError(f"{self.path} has format {attributes.get('format')!r}, not {FORMAT!r}")
        if not attributes.get("complete", False):
            raise ValueError(
                f"{self.path} is incomplete: the command that wrote it did not finish; delete it"
                " and run that command again (`graticule data ingest`, run again as it was, goes"
                " on with what is there)"
            )
        if "digests" not in attributes:
            raise ValueError(
                f"{self.path} has no digests of its coordinates and masks: it was written before"
                " stores kept them; write it again"
            )
        self.attributes = attributes
        self._wet_is_whole = False  # found out once
        self.channels = Channels.from_list(attributes["channels"])
        self.statics = Channels.from_list(attributes["statics"])
        self.grid = Grid(self._small("lat"), self._small("lon"))
        self.times = TimeAxis(
            self._small("time"), attributes["calendar"], attributes["step_seconds"]
        )
        packing = attributes["packing"]
        self.packing = (
            Packing()
            if packing is None
            else Packing(np.array(packing["scale"]), np.array(packing["offset"]))
        )
        try:
            fields: Any = self._group["fields"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path}: the array fields is lost or damaged ({error}); write the store again"
            ) from error
        self.shards = Shards(fields, self.path, self.channels.names, self.times.date)

    def _small(self, name: str) -> np.ndarray:
        """An array beside `fields`, whole. A lost chunk would read as zeros: no sea, no holes."""
        try:
            values = np.asarray(self._group[name])
        except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"{self.path}: the array {name} is lost or damaged ({error}); write the store again"
            ) from error
        if digest_of(values) != self.attributes["digests"].get(name):
            raise ValueError(
                f"{self.path}: the array {name} is not what was written, a file of it is lost or"
                " damaged; write the store again"
            )
        return values

    @property
    def fingerprint(self) -> str:
        """Changes with the store's description and with any stored number."""
        return self.attributes["fingerprint"]

    @property
    def splits(self) -> dict[str, list[str]]:
        """`train`, `validation`, `test`: lists of `first/last` ranges."""
        return self.attributes["splits"]

    @cached_property
    def wet(self) -> np.ndarray:
        """(channel, lat, lon) bool."""
        return self._small("wet").astype(bool, copy=False)

    def wet_part(
        self, channels: Sequence[int], rows: slice = slice(None), columns: slice = slice(None)
    ) -> np.ndarray:
        """As `wet[channels, rows, columns]`, without keeping the rest: all of it is 0.8 GB at 1/12
        degree, and a process that reads a stripe needs its rows."""
        if "wet" in self.__dict__:
            return self.wet[list(channels), rows, columns]
        here, across = self.extent(rows, columns)
        part = np.empty((len(channels), len(here), len(across)), bool)
        try:
            stored: Any = self._group["wet"]
            for position, channel in enumerate(channels):
                part[position] = stored[channel][rows, columns]
            if not self._wet_is_whole:
                digest = hashlib.sha256()
                for channel in range(len(self.channels)):
                    digest.update(np.ascontiguousarray(stored[channel]).data)
                self._wet_is_whole = digest.hexdigest() == self.attributes["digests"].get("wet")
        except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"{self.path}: the array wet is lost or damaged ({error}); write the store again"
            ) from error
        if not self._wet_is_whole:
            raise ValueError(
                f"{self.path}: the array wet is not what was written, a file of it is lost or"
                " damaged; write the store again"
            )
        return part

    @cached_property
    def missing(self) -> np.ndarray:
        """(time, channel) int64: wet cells without a value."""
        return self._small("missing")

    def read_stored(
        self,
        time: int,
        channels: Sequence[int] | None = None,
        rows: slice = slice(None),
        out: np.ndarray | None = None,
        *,
        columns: slice = slice(None),
    ) -> np.ndarray:
        """(channel, lat, lon) numbers as they are on disk; ValueError for a lost or torn chunk."""
        picked = range(len(self.channels)) if channels is None else channels
        here, across = self.extent(rows, columns)
        shape = (len(picked), len(here), len(across))
        if out is None:
            out = np.empty(shape, self.packing.dtype)
        assert out.shape == shape, f"out is {out.shape}, what is read {shape}"
        target = Target(tuple(int(channel) for channel in picked), out)
        self.read_into([(time, [target])], here, across)
        return out

    def extent(self, rows: slice, columns: slice) -> tuple[range, range]:
        """The rows and columns of the grid that two slices name."""
        height, width = self.grid.shape
        here, across = range(height)[rows], range(width)[columns]
        if here.step != 1 or across.step != 1:
            raise ValueError(f"rows {rows} and columns {columns} must be contiguous: step 1")
        return here, across

    def read_into(
        self,
        wanted: Sequence[tuple[int, Sequence[Target]]],
        rows: range,
        columns: range,
        run: Callable[[Sequence[Job]], None] = one_by_one,
    ) -> None:
        """Fill targets, (time, what is wanted of it) each; see `Shards.read`."""
        for time, _ in wanted:
            if not 0 <= time < len(self.times):
                raise IndexError(
                    f"no time {time} in {self.path}: it has 0 to {len(self.times) - 1}"
                )
        self.shards.read(wanted, rows, columns, run)

    def read(
        self, time: int, channels: Sequence[int] | None = None, rows: slice = slice(None)
    ) -> np.ndarray:
        """(channel, lat, lon) float32 in each channel's units, NaN where there is no value."""
        stored = self.read_stored(time, channels, rows)
        picked = range(len(self.channels)) if channels is None else channels
        return self.packing.take(list(picked)).unpack(stored)

    def read_statics(self, names: Sequence[str]) -> np.ndarray:
        """(static, lat, lon) float32 in the statics' units, NaN where there is no value."""
        picked = self.statics.pick(names)
        return self._small("static")[picked]

    def shard_path(self, time: int) -> Path:
        """The file that holds one time step."""
        return self.shards.path(time)


def read_attributes(path: Path) -> dict[str, Any]:
    """Of a store, complete or not; {} where there is none."""
    try:
        values = json.loads((path / "zarr.json").read_text()).get("attributes", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return values if values.get("format") == FORMAT else {}


def digest_of(values: np.ndarray) -> str:
    """SHA-256 of an array's bytes, C order."""
    # Not tobytes: the mask of a store at 1/12 degree is 0.8 GB, and a copy as much again.
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never half of it.

    ValueError names the file where the disk refuses.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(part, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}; make room or access") from error
    finally:
        part.unlink(missing_ok=True)
