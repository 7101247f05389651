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
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

from graticule.config import fingerprint
from graticule.data.shardfile import LAND, ShardLayout, ShardWriter, file_digest
from graticule.data.shardfile import NEVER_WRITTEN as NEVER_WRITTEN
from graticule.data.shards import Job, Shards, Target, one_by_one
from graticule.data.times import UNITS, TimeAxis
from graticule.grid import Grid
from graticule.variables import Channels

FORMAT = "graticule store 1"
LARGEST = 32766
DIGESTS = "digests.json"
"""Beside the arrays: SHA-256 of each step's stored numbers, as `shardfile.content_digest`."""
_RECORDS = "records"
"""While a store is being written: what is known of each finished step, masks, and whatever is not
in its place yet. Gone when the store is complete, and with it what a killed process left."""


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
        return self._small("wet").astype(bool, copy=False)

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


class StoreWriter:
    """A store being written, one time step at a time, by any number of processes.

    Steps are files of their own, so processes never share a chunk. Each finished step is recorded
    with the digest of its file: whoever opens the same unfinished store with `resume` goes on from
    there. The store counts as complete only after `finish()`; until then `Store` refuses it.
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
        resume: bool = False,
    ) -> None:
        """inner_chunk: (channels, rows) read together; default all channels x 32 rows.
        resume: go on with an unfinished store at `path`, which must be this very one."""
        self.path = Path(path)
        occupied = self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))
        if occupied and not resume:
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
        self.layout = ShardLayout(
            (len(channels), height, width),
            (min(chunk_channels, len(channels)), min(chunk_rows, height)),
            self.packing.dtype,
        )
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
        small: dict[str, tuple[np.ndarray, tuple[str, ...], dict[str, str]]] = {
            "time": (times.seconds, ("time",), {"units": UNITS, "calendar": times.calendar}),
            "lat": (grid.lat, ("lat",), {"units": "degrees_north"}),
            "lon": (grid.lon, ("lon",), {"units": "degrees_east"}),
        }
        if len(statics) and static_fields is not None:
            small["static"] = (static_fields, ("static", "lat", "lon"), {})
        self._small_digests = {name: _digest(values) for name, (values, _, _) in small.items()}
        self._complete = False
        if occupied or not self._create(small):
            self._go_on()

    def _create(self, small: dict[str, tuple[np.ndarray, tuple[str, ...], dict]]) -> bool:
        """Make the empty store under a name of its own and rename it into place: of several
        processes that begin at once one succeeds. False: another was first."""
        path = self.path.parent.resolve() / f".{self.path.name}.{uuid.uuid4().hex}.part"
        layout, inner = self.layout, (1, *self.layout.inner)
        try:
            group = zarr.open_group(str(path), mode="w", zarr_format=3)
            group.create_array(
                "fields",
                shape=(len(self.times), *layout.shape),
                dtype=layout.dtype,
                chunks=(1, *layout.padded),
                fill_value=layout.fill,
                serializer=ShardingCodec(
                    chunk_shape=inner,
                    codecs=[
                        BytesCodec(),
                        BloscCodec(cname="lz4", shuffle="shuffle"),
                        Crc32cCodec(),
                    ],
                    index_codecs=[BytesCodec(), Crc32cCodec()],
                ),
                compressors=None,
                dimension_names=("time", "channel", "lat", "lon"),
            )
            for name, (values, dims, attributes) in small.items():
                array = group.create_array(name, data=values, dimension_names=dims)
                array.attrs.update(attributes)
            begun: Any = {"digests": self._small_digests, "inner_chunk": list(layout.chunk)}
            group.attrs.update({**self._description, "complete": False, "begun": begun})
            (path / _RECORDS / "masks").mkdir(parents=True)
            return _renamed(path, self.path)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _go_on(self) -> None:
        """ValueError unless the unfinished store that is there is the one described."""
        attributes = read_attributes(self.path)
        begun = attributes.get("begun")
        if begun is None:
            raise ValueError(f"{self.path} exists already and is not overwritten; name another")
        ours = {**self._description, **self._small_digests, "inner_chunk": list(self.layout.chunk)}
        theirs = {**attributes, **begun["digests"], "inner_chunk": begun["inner_chunk"]}
        ours = json.loads(json.dumps(ours))
        different = [key for key in ours if key != "provenance" and ours[key] != theirs.get(key)]
        if different:
            raise ValueError(
                f"{self.path} was begun with other {', '.join(different)}; delete it to begin anew,"
                " or name another"
            )

    def write(self, time: int, fields: np.ndarray) -> None:
        """Pack, write and read back one step: (channel, lat, lon), NaN where there is no value."""
        if not 0 <= time < len(self.times):
            raise ValueError(f"time {time}: the store has times 0 to {len(self.times) - 1}")
        if self._complete or self._record(time).exists():
            raise ValueError(f"{self.path}: {self.times.date(time)} is written already")
        expected = (len(self.channels), *self.grid.shape)
        if fields.shape != expected:
            raise ValueError(f"fields have shape {fields.shape}, the store wants {expected}")
        if isinstance(fields, np.ma.MaskedArray):
            raise ValueError("fields are a masked array; give fields.filled(numpy.nan)")
        stored = self.packing.pack(fields, self.channels)
        self.write_stored(time, (stored[group] for group in self.layout.groups))

    def write_stored(self, time: int, groups: Iterable[np.ndarray], made_from: str = "") -> None:
        """Write, read back and record one step that is packed already.

        groups: (channel, lat, lon) stored numbers, as `layout.groups` cuts the channels; only one
        is held at a time. made_from: kept with the record, see `finished`.
        """
        date = self.times.date(time)
        try:
            written = self._shards.write(
                self.path / "fields" / "c" / str(time) / "0" / "0" / "0", groups, self._keep_mask,
                self.path / _RECORDS,
            )  # fmt: skip
            write_json(self._record(time), {**asdict(written), "made_from": made_from})
        except OSError as error:
            raise ValueError(f"{self.path}: cannot write {date}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{self.path}: {date} {error}") from error

    @cached_property
    def _shards(self) -> ShardWriter:
        return ShardWriter(self.layout)

    def __getstate__(self) -> dict[str, Any]:
        """For other processes; each makes encoders of its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_shards"}

    def _record(self, time: int) -> Path:
        return self.path / _RECORDS / f"{time}.json"

    def _keep_mask(self, bits: np.ndarray) -> str:
        """Keep a mask once, however many channels and steps have it; the name to find it by."""
        name = hashlib.sha256(bits.tobytes()).hexdigest()[:32]
        path = self.path / _RECORDS / "masks" / name
        if not path.exists():
            part = self.path / _RECORDS / f"{uuid.uuid4().hex}.part"
            try:
                part.write_bytes(zlib.compress(bits.tobytes(), 1))
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        return name

    def finished(self, time: int) -> str | None:
        """What a step was made from, if it is recorded and its file is, byte for byte, the
        recorded one; else None."""
        try:
            record = json.loads(self._record(time).read_text())
        except FileNotFoundError:
            return None
        shard = self.path / "fields" / "c" / str(time) / "0" / "0" / "0"
        masks = (self.path / _RECORDS / "masks" / name for name in set(record["masks"]))
        whole = (
            shard.is_file()
            and shard.stat().st_size == record["bytes"]
            and all(mask.is_file() for mask in masks)
            and file_digest(shard) == record["sha256"]
        )
        return record["made_from"] if whole else None

    def unfinished(self) -> list[int]:
        """Steps without a record; none of a complete store, whose records are gone."""
        folder = self.path / _RECORDS
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        left = [time for time in range(len(self.times)) if f"{time}.json" not in names]
        return [] if left and read_attributes(self.path).get("complete") else left

    def finish(self) -> Store:
        """Record the mask, what is missing and the fingerprint; the store is then complete.

        Several processes may finish at once: what they write is the same, and put in place whole.
        """
        if read_attributes(self.path).get("complete"):
            return Store(self.path)
        try:
            self._finish()
        except FileNotFoundError:
            if not read_attributes(self.path).get("complete"):
                raise
            # Another process finished, and removed the records, meanwhile.
        shutil.rmtree(self.path / _RECORDS, ignore_errors=True)
        self._complete = True
        return Store(self.path)

    def _finish(self) -> None:
        left = self.unfinished()
        if left:
            raise ValueError(
                f"{self.path}: {len(left)} of {len(self.times)} times were not written,"
                f" the first is {self.times.date(left[0])}"
            )
        valid = np.zeros((len(self.times), len(self.channels)), np.int64)
        contents: list[str] = []
        masks: list[set[str]] = [set() for _ in self.channels]
        for time in range(len(self.times)):
            record = json.loads(self._record(time).read_text())
            valid[time] = record["valid"]
            contents.append(record["content"])
            for seen, name in zip(masks, record["masks"], strict=True):
                seen.add(name)
        path = self.path / _RECORDS / f"{uuid.uuid4().hex}.part"
        digests = dict(self._small_digests)
        try:
            digests["wet"] = self._write_wet(path, masks, valid)
            digests["missing"] = _digest(valid)
            for name in ("wet", "missing"):
                _renamed(path / name, self.path / name)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        write_json(self.path / DIGESTS, contents)
        digest = fingerprint({**self._description, "data": contents, **digests})
        _set_attributes(self.path, {
            **self._description, "fingerprint": digest, "digests": digests, "complete": True,
        })  # fmt: skip

    def _write_wet(self, path: Path, masks: Sequence[set[str]], valid: np.ndarray) -> str:
        """Write `wet` and `missing` into a group at `path`, a channel at a time: all of them are
        0.8 GB at 1/12 degree. Turns `valid` into `missing`; returns the digest of `wet`."""
        height, width = self.grid.shape
        group = zarr.open_group(str(path), mode="w", zarr_format=3)
        array: Any = group.create_array(
            "wet", shape=self.layout.shape, chunks=(1, height, width), dtype=bool,
            dimension_names=("channel", "lat", "lon"), config={"write_empty_chunks": True},
        )  # fmt: skip
        digest = hashlib.sha256()
        for channel, names in enumerate(masks):
            seen = np.zeros(-(-height * width // 8), np.uint8)
            for name in names:
                packed = (self.path / _RECORDS / "masks" / name).read_bytes()
                seen |= np.frombuffer(zlib.decompress(packed), np.uint8)
            plane = np.unpackbits(seen, count=height * width).astype(bool).reshape(height, width)
            if not plane.any():
                raise ValueError(f"{self.channels.names[channel]} holds no value at any time")
            array[channel] = plane
            digest.update(plane.tobytes())
            valid[:, channel] = plane.sum() - valid[:, channel]
        group.create_array("missing", data=valid, dimension_names=("time", "channel"))
        return digest.hexdigest()


def read_attributes(path: Path) -> dict[str, Any]:
    """Of a store, complete or not; {} where there is none."""
    try:
        values = json.loads((path / "zarr.json").read_text()).get("attributes", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return values if values.get("format") == FORMAT else {}


def _set_attributes(path: Path, attributes: dict[str, Any]) -> None:
    file = path / "zarr.json"
    write_json(file, {**json.loads(file.read_text()), "attributes": attributes})


def _renamed(source: Path, target: Path) -> bool:
    """Rename a folder to a name that is free or an empty folder's; False: it is neither."""
    try:
        os.rename(source, target)
    except OSError:
        if target.is_dir() and any(target.iterdir()):
            return False
        raise
    return True


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
