"""The store: fields on disk as the model wants them, one Zarr v3 group.

`fields` is (time, channel, lat, lon), one shard (file) per time step, cut inside into chunks of
channels x rows x full longitude, so that a stripe of latitudes reads its own bytes only.
Compression is blosc-lz4 with byte shuffle. Values are float32, or int16 with a scale and an
offset per channel. Land and missing values have a code of their own, and so has "never written":
a lost chunk is an error, never land.

`wet` (channel, lat, lon) is the declared mask: cells that ever hold a value. `missing` (time,
channel) counts wet cells without a value at that time. `static` (static, lat, lon) is float32.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

from graticule.config import fingerprint
from graticule.data.times import UNITS, TimeAxis
from graticule.grid import Grid
from graticule.variables import Channels

FORMAT = "graticule store 1"
LAND = -32768
"""int16 code of land and missing values; NaN is the same for float32."""
NEVER_WRITTEN = -32767
"""int16 fill value of chunks that were not written; infinity is the same for float32."""
LARGEST = 32766


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
                " and run that command again"
            )
        if "digests" not in attributes:
            raise ValueError(
                f"{self.path} has no digests of its coordinates and masks: it was written before"
                " stores kept them; write it again"
            )
        self.attributes = attributes
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
            self._fields: Any = self._group["fields"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path}: the array fields is lost or damaged ({error}); write the store again"
            ) from error

    def _small(self, name: str) -> np.ndarray:
        """An array beside `fields`, whole. A lost chunk would read as zeros: no sea, no holes."""
        try:
            values = np.asarray(self._group[name])
        except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"{self.path}: the array {name} is lost or damaged ({error}); write the store again"
            ) from error
        if _digest(values) != self.attributes["digests"].get(name):
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
        return self._small("wet").astype(bool)

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
    ) -> np.ndarray:
        """(channel, lat, lon) numbers as they are on disk; ValueError for a lost or torn chunk."""
        picked = list(range(len(self.channels))) if channels is None else list(channels)
        if not 0 <= time < len(self.times):
            raise IndexError(f"no time {time} in {self.path}: it has 0 to {len(self.times) - 1}")
        here = range(*rows.indices(self.grid.shape[0]))
        if not picked:
            return np.empty((0, len(here), self.grid.shape[1]), self.packing.dtype)
        first, last = min(picked), max(picked) + 1
        try:
            block = np.asarray(self._fields[time, first:last, rows, :])
        except (OSError, ValueError, RuntimeError) as error:
            name = self.channels.names[self._unreadable(time, range(first, last), rows)]
            raise ValueError(
                f"{self.path}: {name} at {self.times.date(time)} cannot be read, its file is"
                f" damaged (shard {self.shard_path(time)}): {error}; write the store again"
            ) from error
        lost = block[:, :, 0] == (np.inf if self.packing.scale is None else NEVER_WRITTEN)
        if lost.any():
            channel, row = (int(i) for i in np.argwhere(lost)[0])
            raise ValueError(
                f"{self.path}: {self.channels.names[first + channel]} at {self.times.date(time)}"
                f" was never written or is lost (shard {self.shard_path(time)}, from row"
                f" {here[row]}); write the store again"
            )
        if picked != list(range(first, last)):
            block = block[[position - first for position in picked]]
        if out is not None:
            out[...] = block
            return out
        return block

    def _unreadable(self, time: int, channels: range, rows: slice) -> int:
        """The first of `channels` that cannot be read alone."""
        for channel in channels:
            try:
                np.asarray(self._fields[time, channel, rows, :])
            except (OSError, ValueError, RuntimeError):
                return channel
        return channels[0]

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
        return self.path / "fields" / "c" / str(time) / "0" / "0" / "0"


class StoreWriter:
    """A store being written, one time step at a time.

    The store counts as complete only after `finish()`; until then `Store` refuses it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        channels: Channels,
        grid: Grid,
        times: TimeAxis,
        packing: Packing | None = None,
        statics: Channels | None = None,
        static_fields: np.ndarray | None = None,
        splits: dict[str, list[str]] | None = None,
        provenance: dict[str, Any] | None = None,
        inner_chunk: tuple[int, int] | None = None,
    ) -> None:
        """inner_chunk: (channels, rows) read together; default all channels x 32 rows."""
        self.path = Path(path)
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise ValueError(f"{self.path} exists already and is not overwritten; name another")
        self.channels, self.grid, self.times = channels, grid, times
        self.packing = packing or Packing()
        statics = statics or Channels([])
        height, width = grid.shape
        if not len(channels) or not len(times):
            raise ValueError(
                f"a store needs at least one channel and one time, not {len(channels)} and"
                f" {len(times)}"
            )
        if self.packing.scale is not None and self.packing.scale.shape != (len(channels),):
            raise ValueError(
                f"packing has {self.packing.scale.size} scales for {len(channels)} channels"
            )
        if static_fields is not None or len(statics):
            shape = None if static_fields is None else static_fields.shape
            if static_fields is None or shape != (len(statics), height, width):
                raise ValueError(
                    f"statics ({', '.join(statics.names) or 'none'}) need fields of shape"
                    f" {(len(statics), height, width)}, got {shape}"
                )
            static_fields = Packing().pack(static_fields, statics)
        times.check_splits(splits or {})
        chunk_channels, chunk_rows = inner_chunk or (len(channels), 32)
        if min(chunk_channels, chunk_rows) < 1:
            raise ValueError(f"inner_chunk={inner_chunk} must be at least 1 channel and 1 row")
        chunk_rows, chunk_channels = min(chunk_rows, height), min(chunk_channels, len(channels))
        packed = self.packing.scale is not None
        group = zarr.open_group(str(self.path), mode="w", zarr_format=3)
        self._group = group
        compressor = BloscCodec(cname="lz4", shuffle="shuffle")
        inner = (1, chunk_channels, chunk_rows, width)
        shard = tuple(-(-n // c) * c for n, c in zip(
            (1, len(channels), height, width), inner, strict=True))  # fmt: skip
        self._fields = group.create_array(
            "fields",
            shape=(len(times), len(channels), height, width),
            dtype=self.packing.dtype,
            chunks=shard,
            fill_value=NEVER_WRITTEN if packed else np.inf,
            serializer=ShardingCodec(
                chunk_shape=inner,
                codecs=[BytesCodec(), compressor, Crc32cCodec()],
                index_codecs=[BytesCodec(), Crc32cCodec()],
            ),
            compressors=None,
            dimension_names=("time", "channel", "lat", "lon"),
        )
        self._small_digests: dict[str, str] = {}
        self._put("time", times.seconds, ("time",), {"units": UNITS, "calendar": times.calendar})
        self._put("lat", grid.lat, ("lat",), {"units": "degrees_north"})
        self._put("lon", grid.lon, ("lon",), {"units": "degrees_east"})
        if len(statics) and static_fields is not None:
            self._put("static", static_fields, ("static", "lat", "lon"), {})
        self._description = {
            "format": FORMAT,
            "channels": channels.to_list(),
            "statics": statics.to_list(),
            "calendar": times.calendar,
            "step_seconds": times.step_seconds,
            "packing": (
                None
                if self.packing.scale is None or self.packing.offset is None
                else {
                    "scale": [float(s) for s in self.packing.scale],
                    "offset": [float(o) for o in self.packing.offset],
                }
            ),
            "splits": splits or {},
            "provenance": provenance or {},
        }
        group.attrs.update({**self._description, "complete": False})
        self._seen = np.zeros((len(channels), height, width), dtype=bool)
        self._valid = np.full((len(times), len(channels)), -1, dtype=np.int64)
        self._digests: dict[int, str] = {}

    def _put(self, name: str, values: np.ndarray, dims: tuple[str, ...], attrs: dict) -> None:
        array = self._group.create_array(name, data=values, dimension_names=dims)
        array.attrs.update(attrs)
        self._small_digests[name] = _digest(values)

    def write(self, time: int, fields: np.ndarray) -> None:
        """Pack, write and read back one step: (channel, lat, lon), NaN where there is no value."""
        if not 0 <= time < len(self.times):
            raise ValueError(f"time {time}: the store has times 0 to {len(self.times) - 1}")
        if time in self._digests:
            raise ValueError(f"{self.path}: {self.times.date(time)} is written already")
        expected = (len(self.channels), *self.grid.shape)
        if fields.shape != expected:
            raise ValueError(f"fields have shape {fields.shape}, the store wants {expected}")
        if isinstance(fields, np.ma.MaskedArray):
            raise ValueError("fields are a masked array; give fields.filled(numpy.nan)")
        stored = self.packing.pack(fields, self.channels)
        try:
            self._fields[time] = stored
            back = np.asarray(self._fields[time])
        except OSError as error:
            date = self.times.date(time)
            raise ValueError(f"{self.path}: cannot write {date}: {error}") from error
        # Bytes, not values: NaN equals NaN here.
        if back.tobytes() != stored.tobytes():
            raise ValueError(f"{self.path}: {self.times.date(time)} reads back changed")
        present = np.isfinite(fields)
        self._seen |= present
        self._valid[time] = present.sum((1, 2))
        self._digests[time] = hashlib.sha256(stored.tobytes()).hexdigest()

    def finish(self) -> Store:
        """Record the mask, what is missing and the fingerprint; the store is then complete."""
        unwritten = np.flatnonzero(self._valid[:, 0] < 0)
        if unwritten.size:
            raise ValueError(
                f"{self.path}: {unwritten.size} of {len(self.times)} times were not written,"
                f" the first is {self.times.date(int(unwritten[0]))}"
            )
        empty = np.flatnonzero(~self._seen.any((1, 2)))
        if empty.size:
            raise ValueError(f"{self.channels.names[int(empty[0])]} holds no value at any time")
        self._put("wet", self._seen, ("channel", "lat", "lon"), {})
        self._put("missing", self._seen.sum((1, 2))[None] - self._valid, ("time", "channel"), {})
        digest = fingerprint(
            {**self._description, "data": [self._digests[t] for t in range(len(self.times))],
             **self._small_digests}
        )  # fmt: skip
        self._group.attrs.update(
            {"fingerprint": digest, "digests": self._small_digests, "complete": True}
        )
        return Store(self.path)


def _digest(values: np.ndarray) -> str:
    """SHA-256 of an array's bytes, C order."""
    return hashlib.sha256(values.tobytes()).hexdigest()


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
