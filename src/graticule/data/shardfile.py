"""One time step of a store on disk: a Zarr v3 shard, written chunk by chunk and put in place whole.

A shard is its inner chunks one after the other and an index of (offset, bytes) pairs at the end.
Written here and not by Zarr, because a step at 1/12 degree is 1.6 GB: only one group of channels
is held at a time, and a process that is killed leaves no half of a shard under its name.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec
from zarr.storage import MemoryStore

LAND = -32768
"""int16 code of land and missing values; NaN is the same for float32."""
NEVER_WRITTEN = -32767
"""int16 fill value of chunks that were not written; infinity is the same for float32."""


@dataclass(frozen=True)
class ShardLayout:
    """shape: (channel, lat, lon). chunk: (channels, rows, columns) stored together, at most
    `shape`."""

    shape: tuple[int, int, int]
    chunk: tuple[int, int, int]
    dtype: np.dtype

    @classmethod
    def of(
        cls, shape: tuple[int, int, int], inner_chunk: Sequence[int] | None, dtype: np.dtype
    ) -> "ShardLayout":
        """inner_chunk: (channels, rows) of all columns, or (channels, rows, columns); None: all
        channels x 32 rows. ValueError where it is neither."""
        given = (shape[0], 32) if inner_chunk is None else tuple(inner_chunk)
        if len(given) not in (2, 3) or min(given) < 1:
            raise ValueError(
                f"inner_chunk={inner_chunk} must be at least 1 channel and 1 row, and where"
                " longitudes are cut too 1 column"
            )
        channels, rows, columns = (
            min(size, points) for size, points in zip((*given, shape[2])[:3], shape, strict=True)
        )
        return cls(shape, (channels, rows, columns), dtype)

    @property
    def groups(self) -> list[slice]:
        """The channels of each row of chunks, which are written together."""
        return [slice(first, min(first + self.chunk[0], self.shape[0]))
                for first in range(0, self.shape[0], self.chunk[0])]  # fmt: skip

    @property
    def counts(self) -> tuple[int, int, int]:
        """Inner chunks along each dim; the last ones may reach beyond the shape."""
        channels, rows, columns = (
            -(-points // size) for points, size in zip(self.shape, self.chunk, strict=True)
        )
        return channels, rows, columns

    @property
    def padded(self) -> tuple[int, int, int]:
        channels, rows, columns = (
            count * size for count, size in zip(self.counts, self.chunk, strict=True)
        )
        return channels, rows, columns

    @property
    def fill(self) -> float:
        return np.inf if self.dtype == np.float32 else NEVER_WRITTEN

    def present(self, stored: np.ndarray) -> np.ndarray:
        """Where stored numbers stand for a value."""
        return np.isfinite(stored) if self.dtype == np.float32 else stored != LAND


@dataclass(frozen=True)
class Written:
    """A shard in its place. sha256: of the file. content: of the stored numbers, whatever the
    chunks. valid: values per channel. masks: per channel, what `keep_mask` returned."""

    bytes: int
    sha256: str
    content: str
    valid: tuple[int, ...]
    masks: tuple[str, ...]


class ShardWriter:
    """Writes shards of one layout; Zarr itself encodes each chunk, in memory."""

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self._chunk = _Encoder(
            layout.chunk, layout.dtype, [BloscCodec(cname="lz4", shuffle="shuffle"), Crc32cCodec()]
        )
        self._index = _Encoder((*layout.counts, 2), np.dtype(np.uint64), [Crc32cCodec()])

    def write(
        self,
        path: Path,
        groups: Iterable[np.ndarray],
        keep_mask: Callable[[np.ndarray], str],
        scratch: Path,
    ) -> Written:
        """Write one shard to `path`, replacing what is there only when all of it is verified.

        groups: (channel, lat, lon) stored numbers, as `layout.groups` cuts the channels.
        keep_mask: given the packed bits (uint8) of a channel's cells with a value.
        scratch: folder on the same file system for what is not verified yet.
        ValueError: read back changed. OSError: cannot be written.
        """
        layout = self.layout
        path.parent.mkdir(parents=True, exist_ok=True)
        part = scratch / f"{uuid.uuid4().hex}.part"
        index = np.zeros((*layout.counts, 2), np.uint64)
        of_file, of_content = hashlib.sha256(), hashlib.sha256()
        valid: list[int] = []
        masks: list[str] = []
        position = 0
        try:
            with open(part, "xb") as file:
                for number, block in enumerate(groups):
                    for plane in block:
                        present = layout.present(plane)
                        valid.append(int(np.count_nonzero(present)))
                        masks.append(keep_mask(np.packbits(present)))
                        of_content.update(_plane_digest(plane))
                    for place in np.ndindex(layout.counts[1:]):
                        encoded = self._chunk.encoded(self._cut(block, *place))
                        index[number, *place] = position, len(encoded)
                        file.write(encoded)
                        of_file.update(encoded)
                        position += len(encoded)
                assert len(valid) == layout.shape[0], "a group of channels is missing"
                ending = self._index.encoded(index)
                file.write(ending)
                of_file.update(ending)
                position += len(ending)
            if file_digest(part) != of_file.hexdigest():
                raise ValueError("reads back changed")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return Written(
            position, of_file.hexdigest(), of_content.hexdigest(), tuple(valid), tuple(masks)
        )

    def _cut(self, block: np.ndarray, band: int, strip: int) -> np.ndarray:
        """One inner chunk, filled up to its full size where it reaches beyond the shape."""
        _, height, width = chunk = self.layout.chunk
        part = block[:, band * height : (band + 1) * height, strip * width : (strip + 1) * width]
        if part.shape == chunk:
            return part
        whole = np.full(chunk, self.layout.fill, self.layout.dtype)
        whole[tuple(slice(size) for size in part.shape)] = part
        return whole


class _Encoder:
    """Bytes of an array as Zarr's codecs write them; ValueError where they decode to others."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, compressors: list[Any]) -> None:
        self._bytes: dict[str, Any] = {}
        self._array: Any = zarr.create_array(
            MemoryStore(self._bytes), shape=shape, chunks=shape, dtype=dtype, fill_value=0,
            serializer=BytesCodec(), compressors=compressors,
            config={"write_empty_chunks": True},
        )  # fmt: skip
        self._key = self._array.metadata.encode_chunk_key((0,) * len(shape))

    def encoded(self, values: np.ndarray) -> bytes:
        self._array[...] = values
        # Bytes, not values: NaN equals NaN here.
        back = np.asarray(self._array[...])
        if not np.array_equal(back.view(np.uint8), np.ascontiguousarray(values).view(np.uint8)):
            raise ValueError("reads back changed")
        return self._bytes[self._key].to_bytes()


def content_digest(stored: np.ndarray) -> str:
    """`Written.content` of one step, (channel, lat, lon) stored numbers."""
    return hashlib.sha256(b"".join(map(_plane_digest, stored))).hexdigest()


def _plane_digest(plane: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(plane).data).digest()


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
