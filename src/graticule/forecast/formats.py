"""The two file formats of a forecast, written in pieces: Zarr v3 and netCDF-4.

Both hold the same dims, variables and attributes. Completeness is written last.
"""

import base64
import math
import os
import struct
import warnings
from pathlib import Path
from typing import Any, Protocol

import netCDF4
import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.errors import ZarrUserWarning

NEVER_WRITTEN = np.iinfo(np.int64).min
"""Fill value of Zarr's integer coordinates; infinity is the same for fields, NaN for degrees."""


At = tuple[int, ...]
"""Where a lead stands in a field: (init, lead), of an ensemble (init, member, lead)."""


class Sink(Protocol):
    """A file format: coordinates at once, fields in pieces, completeness last."""

    def put(
        self, name: str, values: np.ndarray, dims: tuple[str, ...], attributes: dict
    ) -> None: ...

    def create(
        self, name: str, shape: tuple[int, ...], dims: tuple[str, ...],
        chunk: tuple[int, ...], attributes: dict,
    ) -> None: ...  # fmt: skip

    def begin(self, attributes: dict) -> None: ...

    def assign(self, name: str, at: At, values: np.ndarray) -> None: ...

    def complete(self) -> None: ...

    def release(self) -> None: ...


class ZarrSink:
    """Zarr v3, lz4 with a checksum per chunk, metadata consolidated for plain xarray."""

    def __init__(self, path: Path, *, joins: bool = False) -> None:
        """joins: the file is there, described by another process, or by one that was stopped; this
        one assigns only.

        Of a file that several write at once, no two may assign the same lead: leads share no
        chunk.
        """
        self._path = path
        if not joins:
            self._group = zarr.open_group(str(path), mode="w-", zarr_format=3)
            return
        if not (path / "zarr.json").is_file():
            raise ValueError(
                f"{path}: another process has created it and this one does not see it; name a"
                " folder that all processes share"
            )
        self._group = zarr.open_group(str(path), mode="r+", zarr_format=3)
        self._arrays: dict[str, Any] = dict(self._group.arrays())

    def put(self, name: str, values: np.ndarray, dims: tuple[str, ...], attributes: dict) -> None:
        fill = np.nan if values.dtype.kind == "f" else NEVER_WRITTEN
        array = self._group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=values.shape, fill_value=fill,
            dimension_names=dims, attributes=attributes,
        )  # fmt: skip
        array[...] = values

    def create(
        self, name: str, shape: tuple[int, ...], dims: tuple[str, ...],
        chunk: tuple[int, ...], attributes: dict,
    ) -> None:  # fmt: skip
        # xarray spells the CF fill value of Zarr v3 as a base64 double.
        nan = base64.standard_b64encode(struct.pack("<d", np.nan)).decode()
        self._group.create_array(
            name,
            shape=shape,
            dtype=np.float32,
            chunks=chunk,
            fill_value=np.inf,
            compressors=[BloscCodec(cname="lz4", shuffle="shuffle"), Crc32cCodec()],
            dimension_names=dims,
            attributes={**attributes, "_FillValue": nan},
        )

    def begin(self, attributes: dict) -> None:
        self._group.attrs.update(attributes)
        with warnings.catch_warnings():
            # Zarr v3 does not specify consolidated metadata, but xarray warns where it is absent.
            warnings.simplefilter("ignore", ZarrUserWarning)
            self._group = zarr.consolidate_metadata(self._group.store)
        self._arrays = dict(self._group.arrays())

    def assign(self, name: str, at: At, values: np.ndarray) -> None:
        self._arrays[name][at] = values

    def lost(self, at: At) -> list[str]:
        """Variables of which a chunk of this lead is not on disk."""
        return [
            name
            for name, array in self._fields()
            if len(self._chunks(name, at)) < math.prod(array.cdata_shape[len(at) :])
        ]

    def sync(self, at: At) -> None:
        """Have a lead on disk, not only with the system."""
        for name, _ in self._fields():
            for chunk in self._chunks(name, at):
                with chunk.open("rb") as file:
                    os.fsync(file.fileno())

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self._group.attrs)

    def read(self, name: str) -> np.ndarray:
        """A coordinate; nothing where there is no such."""
        return np.asarray(self._arrays[name][...] if name in self._arrays else [])

    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, array) for name, array in self._arrays.items() if array.ndim > 2]

    def _chunks(self, name: str, at: At) -> list[Path]:
        there = (self._path / name / "c").joinpath(*map(str, at)).rglob("*")
        return [path for path in there if path.is_file() and path.suffix != ".partial"]

    def complete(self) -> None:
        self._group.attrs["complete"] = 1

    def release(self) -> None:
        pass


class NetcdfSink:
    """netCDF-4 without compression: deflate writes 30 MB/s and would hold up the model."""

    def __init__(self, path: Path) -> None:
        self._data = netCDF4.Dataset(str(path), mode="w", clobber=False, format="NETCDF4")

    def _dims(self, dims: tuple[str, ...], shape: tuple[int, ...]) -> None:
        for name, size in zip(dims, shape, strict=True):
            if name not in self._data.dimensions:
                self._data.createDimension(name, size)

    def put(self, name: str, values: np.ndarray, dims: tuple[str, ...], attributes: dict) -> None:
        self._dims(dims, values.shape)
        # Zarr's arrays spell out their byte order, which netCDF4 takes for a foreign one.
        kind = values.dtype.newbyteorder("=")
        variable = self._data.createVariable(name, kind, dims, fill_value=False)
        variable.setncatts(attributes)
        variable[...] = values

    def create(
        self, name: str, shape: tuple[int, ...], dims: tuple[str, ...],
        chunk: tuple[int, ...], attributes: dict,
    ) -> None:  # fmt: skip
        self._dims(dims, shape)
        variable = self._data.createVariable(
            name, np.float32, dims, chunksizes=chunk, fill_value=np.float32(np.nan)
        )
        variable.setncatts(attributes)
        variable.set_auto_maskandscale(False)

    def begin(self, attributes: dict) -> None:
        self._data.setncatts(attributes)
        self._data.sync()

    def assign(self, name: str, at: At, values: np.ndarray) -> None:
        self._data[name][at] = values
        self._data.sync()  # what is written survives a kill, and a full disk shows here

    def complete(self) -> None:
        self._data.setncattr("complete", np.int32(1))
        self._data.sync()

    def release(self) -> None:
        if self._data.isopen():
            self._data.close()
