"""Zonal power spectra of forecast and truth: what a forecast has smoothed away."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from graticule import __version__
from graticule.evaluate.files import format_of, save_netcdf
from graticule.evaluate.stretches import Power, Stretches
from graticule.forecast.writer import layouts
from graticule.grid import EARTH_RADIUS_M
from graticule.variables import Channels

FORMAT = "graticule spectra 1"
SPECTRA_OF = ("model", "truth")
"""Always of the same cells and times."""
NO_POWER = 1e-6
"""Share of the truth's variance below which the waves from some wavenumber on are not there: a
thousandth of its standard deviation. Beyond lies the rounding of packed or float32 values, of a
truth that was computed in fewer waves than the grid has for instance."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spectra:
    """Zonal power by lead, channel and wavenumber, as sums that add up over times and processes.

    Power is per unit wavenumber (one cycle per circle of latitude), in the channel's units
    squared, and the mean over rows weighted by area: its sum over wavenumbers, times the first of
    them, is the zonal variance. The zonal mean is not in it. One wavenumber is a shorter wave near
    the poles; see `wavelength_km`. Position 0 of `lead` is one model step.

    lead_seconds: (lead,). wavenumber: (n,) cycles per circle of latitude, whole for circles.
    kind: per channel "circles", "segments of N columns", or "none: " and why; see
    `stretches.Stretches`. share: (channel,) of the sea's area, what circles or segments cover.
    rows: (lead, channel) circles or segments that entered, over all fields. area: (lead, channel)
    m2. sums: (source, lead, channel, n) in m2 x units squared; sources are `SPECTRA_OF`.
    attributes: provenance.
    """

    channels: Channels
    lead_seconds: np.ndarray
    wavenumber: np.ndarray
    kind: tuple[str, ...]
    share: np.ndarray
    rows: np.ndarray
    area: np.ndarray
    sums: np.ndarray
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def zero(
        cls, channels: Channels, lead_seconds: Sequence[float] | np.ndarray, stretches: Stretches
    ) -> "Spectra":
        """The sums over nothing: a process that owns no pair starts and ends with them."""
        if channels.names != stretches.names:
            raise ValueError(f"{channels} are not the channels of the stretches: {stretches.names}")
        shape = (len(lead_seconds), len(channels))
        return cls(
            channels=channels,
            lead_seconds=np.asarray(lead_seconds).astype(np.int64),
            wavenumber=stretches.wavenumber,
            kind=stretches.kind,
            share=stretches.share,
            rows=np.zeros(shape, np.int64),
            area=np.zeros(shape),
            sums=np.zeros((len(SPECTRA_OF), *shape, stretches.wavenumber.size)),
        )

    def with_pair(self, lead: int, model: Power, truth: Power) -> "Spectra":
        """These sums and one more initial time at one lead (position from 0)."""
        rows, area, sums = self.rows.copy(), self.area.copy(), self.sums.copy()
        assert np.array_equal(model.count, truth.count), "model and truth of other pieces"
        rows[lead] += truth.count
        area[lead] += truth.area
        sums[0, lead] += model.sums
        sums[1, lead] += truth.sums
        return replace(self, rows=rows, area=area, sums=sums)

    def __add__(self, other: "Spectra") -> "Spectra":
        same = (
            self.channels.names == other.channels.names
            and self.kind == other.kind
            and np.array_equal(self.lead_seconds, other.lead_seconds)
            and np.array_equal(self.wavenumber, other.wavenumber)
        )
        if not same:
            raise ValueError(
                f"spectra of {self._described()} and of {other._described()} do not add up"
            )
        return replace(
            self,
            rows=self.rows + other.rows,
            area=self.area + other.area,
            sums=self.sums + other.sums,
        )

    def _described(self) -> str:
        kinds = " and ".join(sorted({kind.partition(":")[0] for kind in self.kind}))
        return (
            f"{', '.join(self.names)} at {len(self.lead_seconds)} leads and {self.wavenumber.size}"
            f" wavenumbers ({kinds})"
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self.channels.names

    @property
    def units(self) -> tuple[str, ...]:
        """Of the channels; power is in their squares."""
        return tuple(channel.units for channel in self.channels)

    @property
    def model(self) -> np.ndarray:
        """(lead, channel, n) mean power of the forecast; NaN where `rows` is 0."""
        return self._mean("model")

    @property
    def truth(self) -> np.ndarray:
        """(lead, channel, n) mean power of the truth; NaN where `rows` is 0."""
        return self._mean("truth")

    def _mean(self, source: str) -> np.ndarray:
        sums, area = self.sums[SPECTRA_OF.index(source)], self.area[..., None]
        return np.divide(sums, area, out=np.full_like(sums, np.nan), where=area > 0)

    @property
    def ratio(self) -> np.ndarray:
        """(lead, channel, n) model / truth, 1 where as much; NaN where the truth has no power."""
        model, truth = self.sums
        return np.divide(model, truth, out=np.full_like(model, np.nan), where=truth > 0)

    @property
    def short(self) -> np.ndarray:
        """(channel, n) bool, the shortest quarter of the waves that the truth has, one at least.

        Up to the wavenumber from which on it holds no more than `NO_POWER` of its variance, over
        all leads. None where there is no spectrum.
        """
        truth = self.sums[SPECTRA_OF.index("truth")].sum(0)  # (channel, n)
        beyond = truth[:, ::-1].cumsum(1)[:, ::-1]
        number = (beyond > NO_POWER * truth.sum(1, keepdims=True)).sum(1, keepdims=True)
        place = np.arange(self.wavenumber.size)
        return (place >= number * 3 // 4) & (place < number)

    def short_ratio(self) -> np.ndarray:
        """(lead, channel) power of the model / of the truth over the wavenumbers in `short`.

        NaN where there is no spectrum, and where the truth has no variance along its rows.
        """
        model, truth = (self.sums * self.short).sum(-1)
        return np.divide(model, truth, out=np.full_like(model, np.nan), where=truth > 0)

    def kinetic_energy(self, pairs: Sequence[tuple[int, int]]) -> "Spectra":
        """The spectra of (u2 + v2) / 2 for pairs of currents, channels `ke` by level.

        pairs: positions of the eastward and the northward current. Their means over area are
        added: both are made along the same stretches of sea (`evaluate` sees to it).
        """
        east, north = ([pair[i] for pair in pairs] for i in (0, 1))
        channels = Channels(
            [replace(self.channels[i], variable="ke", standard_name="",
                     long_name="kinetic energy per unit mass") for i in east]
        )  # fmt: skip
        both = (self.area[:, east] > 0) & (self.area[:, north] > 0)
        area = np.where(both, self.area[:, east], 0.0)
        mean = np.stack([self.model, self.truth])
        half = (mean[:, :, east] + mean[:, :, north]) / 2
        return replace(
            self,
            channels=channels,
            kind=tuple(self.kind[i] for i in east),
            share=self.share[east],
            rows=np.where(both, self.rows[:, east], 0),
            area=area,
            sums=np.where(both[..., None], half * area[..., None], 0.0),
        )

    def wavelength_km(self, latitude: float) -> np.ndarray:
        """(n,) length of one wave along the circle at `latitude` degrees."""
        circle = 2 * np.pi * EARTH_RADIUS_M * np.cos(np.deg2rad(latitude))
        return circle / 1000 / self.wavenumber

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write netCDF-4 by CF-1.11, whole or not at all.

        Variables `power_NAME` (source, lead, [level], wavenumber). An existing file is refused;
        with `force` it is replaced if it is a file of spectra.
        """
        save_netcdf(path, self._encoded, format=FORMAT, what="spectra", force=force)

    def _encoded(self) -> tuple[xr.Dataset, dict[str, Any]]:
        data = self._dataset()
        plain = {str(name): {"_FillValue": None} for name in data.variables
                 if not str(name).startswith("power_")}  # fmt: skip
        return data, plain

    def _dataset(self) -> xr.Dataset:
        sources = np.array(SPECTRA_OF, object)
        data: dict[str, Any] = {
            "source": ("source", sources, {"long_name": "what the power is of"}),
            "lead": ("lead", np.arange(1, len(self.lead_seconds) + 1),
                     {"long_name": "lead in model steps", "units": "1"}),
            "lead_time": ("lead", self.lead_seconds,
                          {"standard_name": "forecast_period", "long_name": "lead time",
                           "units": "seconds", "dtype": "timedelta64[s]"}),
            "wavenumber": ("wavenumber", self.wavenumber,
                           {"long_name": "cycles per circle of latitude", "units": "1"}),
            "channel": ("channel", np.array(self.names, object),
                        {"long_name": "channel: variable, or variable@level"}),
            "kind": ("channel", np.array(self.kind, object),
                     {"long_name": "the parts of rows that are transformed"}),
            "share": ("channel", self.share,
                      {"long_name": "share of the channel's area that these cover", "units": "1"}),
            "rows": (("lead", "channel"), self.rows,
                     {"long_name": "number of circles or segments, over all fields", "units": "1",
                      "comment": "0: no power of this channel at this lead; see kind"}),
            "area": (("lead", "channel"), self.area,
                     {"long_name": "their area, over all fields", "units": "m2"}),
        }  # fmt: skip
        power = np.stack([self.model, self.truth])  # (source, lead, channel, n)
        for layout in layouts(self.channels):
            first = self.channels[layout.positions[0]]
            dims, values = ("source", "lead", "wavenumber"), power[:, :, layout.positions[0]]
            if layout.dim:
                dims = ("source", "lead", layout.dim, "wavenumber")  # type: ignore[assignment]
                values = power[:, :, list(layout.positions)]
                down = {"positive": "down"} if layout.level_units == "m" else {}
                data[layout.dim] = (
                    layout.dim, np.array(layout.levels), {"units": layout.level_units, **down},
                )  # fmt: skip
            data[f"power_{layout.variable}"] = (dims, values, {
                "long_name": f"zonal power of {first.long_name or first.variable} per unit"
                " wavenumber",
                "units": "1" if first.units == "1" else f"({first.units})2",
                "cell_methods": "area: mean",
            })  # fmt: skip
        plain = {key: value if isinstance(value, str | int | float) and not isinstance(value, bool)
                 else json.dumps(value) for key, value in self.attributes.items()}  # fmt: skip
        return xr.Dataset(data, attrs={
            "Conventions": "CF-1.11", "title": "zonal power spectra", **plain,
            "source": f"graticule {__version__}", "format": FORMAT,
            "channels": json.dumps(self.channels.to_list()),
        }).set_coords(["lead_time", "kind", "share"])  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> "Spectra":
        """The spectra at `path`; ValueError where it is no file of spectra."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path}: no spectra there; `graticule evaluate` writes them")
        if format_of(path) != FORMAT:
            raise ValueError(f"{path} is no file of spectra (format {FORMAT!r})")
        with xr.open_dataset(path, engine="netcdf4", decode_times=False) as data:
            attributes = dict(data.attrs)
            channels = Channels.from_list(json.loads(attributes.pop("channels")))
            area, wavenumber = data["area"].values, data["wavenumber"].values
            power = np.empty((len(SPECTRA_OF), *area.shape, wavenumber.size))
            for layout in layouts(channels):
                values = data[f"power_{layout.variable}"].values
                if layout.dim:
                    power[:, :, list(layout.positions)] = values
                else:
                    power[:, :, layout.positions[0]] = values
            for key in ("Conventions", "source", "format"):
                del attributes[key]
            return cls(
                channels=channels,
                lead_seconds=data["lead_time"].values,
                wavenumber=wavenumber,
                kind=tuple(str(kind) for kind in data["kind"].values),
                share=data["share"].values,
                rows=data["rows"].values,
                area=area,
                sums=np.where(area[..., None] > 0, power * area[..., None], 0.0),
                attributes=attributes,
            )
