"""Writing a store: a time step at a time, by as many processes as like, taken up after a kill."""

import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

from graticule.config import fingerprint
from graticule.data.gather import RECORDS, Gatherer
from graticule.data.shardfile import ShardLayout, ShardWriter, file_digest
from graticule.data.statistics import (
    FILE_NAME,
    Statistics,
    moments_of,
    names_without_values,
    require_values,
)
from graticule.data.store import (
    DIGESTS,
    FORMAT,
    Packing,
    Store,
    digest_of,
    read_attributes,
    write_json,
)
from graticule.data.times import UNITS, TimeAxis
from graticule.grid import Grid
from graticule.variables import Channels

_READABLE = 200
"""Characters of two values that an error shows."""


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
        inner_chunk: tuple[int, ...] | None = None,
        training: np.ndarray | None = None,
        resume: bool = False,
    ) -> None:
        """inner_chunk: (channels, rows) or (channels, rows, columns) that are read together;
        default all channels x 32 rows of all columns.
        training: indices of the times whose statistics are gathered as they are written, and
        saved by `finish`; none: no statistics.
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
        shape = len(channels), height, width
        self.layout = ShardLayout.of(shape, inner_chunk, self.packing.dtype)
        self._gatherer = Gatherer(
            self.path, self.layout, self.packing, times, channels, statics,
            moments_of(static_fields), [] if training is None else training,
        )  # fmt: skip
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
        self._small_digests = {name: digest_of(values) for name, (values, _, _) in small.items()}
        self._complete = False
        if occupied or not self._create(small):
            self._go_on()

    def _create(self, small: dict[str, tuple[np.ndarray, tuple[str, ...], dict]]) -> bool:
        """Make the empty store under a name of its own and rename it into place: of several
        processes that begin at once one succeeds. False: another was first."""
        path = self.path.parent.resolve() / f".{self.path.name}.{uuid.uuid4().hex}.part"
        layout, inner = self.layout, (1, *self.layout.chunk)
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
            (path / RECORDS / "masks").mkdir(parents=True)
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
        # Of two sizes where it was begun before chunks could be cut in longitude: of all columns.
        chunk = [*begun["inner_chunk"], self.grid.shape[1]][:3]
        theirs = {**attributes, **begun["digests"], "inner_chunk": chunk}
        ours = json.loads(json.dumps(ours))
        different = [key for key in ours if key != "provenance" and ours[key] != theirs.get(key)]
        if different:
            key = different[0]
            both = f" ({json.dumps(theirs.get(key))} then, {json.dumps(ours[key])} now)"
            shown = "" if key in self._small_digests or len(both) > _READABLE else both
            raise ValueError(
                f"{self.path} was begun with other {', '.join(different)}{shown}; delete it to"
                " begin anew, or name another"
            )

    def write(self, time: int, fields: np.ndarray) -> None:
        """Pack, write and read back one step: (channel, lat, lon), NaN where there is no value."""
        if not 0 <= time < len(self.times):
            raise ValueError(f"time {time}: the store has times 0 to {len(self.times) - 1}")
        if self._complete or self._gatherer.record(time).exists():
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

        Of a training time the sums are gathered as the groups pass by, see `Gatherer`.
        """
        date, gatherer = self.times.date(time), self._gatherer
        neighbours: dict[int, str] = {}
        for neighbour in (-1, 1):
            record = self._whole(time + neighbour) if gatherer.joined(time, neighbour) else None
            if record is not None:
                neighbours[neighbour] = record["content"]
        try:
            sums = gatherer.sums(neighbours)
            written = self._shards.write(
                self.path / "fields" / "c" / str(time) / "0" / "0" / "0",
                gatherer.passing(time, groups, sums) if gatherer.wants(time) else groups,
                self._keep_mask, self.path / RECORDS,
            )  # fmt: skip
            record = {**asdict(written), "made_from": made_from}
            if gatherer.wants(time):
                record["sums"] = sums.values.to_dict()
            write_json(gatherer.record(time), record)
        except OSError as error:
            raise ValueError(f"{self.path}: cannot write {date}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{self.path}: {date} {error}") from error
        gatherer.keep_changes(time, written.content, neighbours, sums)

    def changes_left(self) -> list[int]:
        """As `Gatherer.changes_left`; all steps must be recorded."""
        return self._gatherer.changes_left()

    def write_change(self, time: int) -> None:
        """As `Gatherer.write_change`."""
        self._gatherer.write_change(time)

    @cached_property
    def _shards(self) -> ShardWriter:
        return ShardWriter(self.layout)

    def __getstate__(self) -> dict[str, Any]:
        """For other processes; each makes encoders of its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_shards"}

    def _keep_mask(self, bits: np.ndarray) -> str:
        """Keep a mask once, however many channels and steps have it; the name to find it by."""
        name = hashlib.sha256(bits.tobytes()).hexdigest()[:32]
        path = self.path / RECORDS / "masks" / name
        if not path.exists():
            part = self.path / RECORDS / f"{uuid.uuid4().hex}.part"
            try:
                part.write_bytes(zlib.compress(bits.tobytes(), 1))
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        return name

    def finished(self, time: int) -> str | None:
        """What a step was made from, if it is recorded and its file is, byte for byte, the
        recorded one; else None."""
        record = self._whole(time)
        return None if record is None else record["made_from"]

    def _whole(self, time: int) -> dict[str, Any] | None:
        try:
            record = self._gatherer.read_record(time)
        except FileNotFoundError:
            return None
        shard = self.path / "fields" / "c" / str(time) / "0" / "0" / "0"
        masks = (self.path / RECORDS / "masks" / name for name in set(record["masks"]))
        whole = (
            ("sums" in record or not self._gatherer.wants(time))
            and shard.is_file()
            and shard.stat().st_size == record["bytes"]
            and all(mask.is_file() for mask in masks)
            and file_digest(shard) == record["sha256"]
        )
        return record if whole else None

    def unfinished(self) -> list[int]:
        """Steps without a record; none of a complete store, whose records are gone."""
        folder = self.path / RECORDS
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        left = [time for time in range(len(self.times)) if f"{time}.json" not in names]
        return [] if left and read_attributes(self.path).get("complete") else left

    def finish(self) -> Store:
        """Record the mask, what is missing, the statistics and the fingerprint; the store is then
        complete. ValueError, of a store that is complete, where a channel has no value in the
        training times: there are no statistics then.

        Several processes may finish at once: what they write is the same, and put in place whole.
        """
        if read_attributes(self.path).get("complete"):
            return Store(self.path)
        statistics: Statistics | None = None
        try:
            statistics = self._finish()
        except (FileNotFoundError, ValueError):
            if not read_attributes(self.path).get("complete"):
                raise
            # Another process finished, and removed the records, meanwhile.
        shutil.rmtree(self.path / RECORDS, ignore_errors=True)
        self._complete = True
        if statistics is not None:
            require_values(statistics)
        return Store(self.path)

    def _finish(self) -> Statistics | None:
        left = self.unfinished()
        if left:
            raise ValueError(
                f"{self.path}: {len(left)} of {len(self.times)} times were not written,"
                f" the first is {self.times.date(left[0])}"
            )
        for time in self._gatherer.changes_left():
            self._gatherer.write_change(time)
        valid = np.zeros((len(self.times), len(self.channels)), np.int64)
        contents: list[str] = []
        masks: list[set[str]] = [set() for _ in self.channels]
        for time in range(len(self.times)):
            record = self._gatherer.read_record(time)
            valid[time] = record["valid"]
            contents.append(record["content"])
            for seen, name in zip(masks, record["masks"], strict=True):
                seen.add(name)
        path = self.path / RECORDS / f"{uuid.uuid4().hex}.part"
        digests = dict(self._small_digests)
        try:
            digests["wet"] = self._write_wet(path, masks, valid)
            digests["missing"] = digest_of(valid)
            for name in ("wet", "missing"):
                _renamed(path / name, self.path / name)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        write_json(self.path / DIGESTS, contents)
        digest = fingerprint({**self._description, "data": contents, **digests})
        statistics = self._gatherer.statistics(digest)
        if statistics is not None and not names_without_values(statistics):
            write_json(self.path / FILE_NAME, statistics.to_dict())
        _set_attributes(self.path, {
            **self._description, "fingerprint": digest, "digests": digests, "complete": True,
        })  # fmt: skip
        return statistics

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
                packed = (self.path / RECORDS / "masks" / name).read_bytes()
                seen |= np.frombuffer(zlib.decompress(packed), np.uint8)
            plane = np.unpackbits(seen, count=height * width).astype(bool).reshape(height, width)
            if not plane.any():
                raise ValueError(f"{self.channels.names[channel]} holds no value at any time")
            array[channel] = plane
            digest.update(plane.tobytes())
            valid[:, channel] = plane.sum() - valid[:, channel]
        group.create_array("missing", data=valid, dimension_names=("time", "channel"))
        return digest.hexdigest()


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
