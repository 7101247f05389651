"""The latitude-longitude grid: coordinates, cell areas, periodicity, regions."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

EARTH_RADIUS_M = 6.371e6


@dataclass(frozen=True, eq=False)
class Grid:
    """Cell centres of a regular latitude-longitude grid.

    lat: (lat,) degrees, north to south. lon: (lon,) degrees, ascending, starting in [0, 360).
    Neither needs even spacing; both must be strictly monotone.
    """

    lat: np.ndarray
    lon: np.ndarray

    def __post_init__(self) -> None:
        for name in ("lat", "lon"):
            values = np.array(getattr(self, name), dtype=np.float64)
            values.flags.writeable = False
            object.__setattr__(self, name, values)
            if values.ndim != 1 or values.size < 1 or not np.isfinite(values).all():
                raise ValueError(f"{name} must be a vector of finite degrees, got {values!r}")
        if np.abs(self.lat).max() > 90:
            raise ValueError(f"lat reaches {self.lat[np.abs(self.lat).argmax()]}, beyond a pole")
        if (np.diff(self.lat) >= 0).any():
            raise ValueError("lat must run from north to south without repeats")
        if (np.diff(self.lon) <= 0).any() or not 0 <= self.lon[0] < 360:
            raise ValueError("lon must ascend from a first value in [0, 360) without repeats")
        if self.lon[-1] - self.lon[0] >= 360:
            raise ValueError(
                f"lon runs from {self.lon[0]} to {self.lon[-1]}: more than once round the globe;"
                " drop the repeated columns"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(lat, lon) points."""
        return self.lat.size, self.lon.size

    @cached_property
    def periodic(self) -> bool:
        """Whether the columns close round the globe, to a tenth of a column."""
        if self.lon.size < 2:
            return False
        step = (self.lon[-1] - self.lon[0]) / (self.lon.size - 1)
        return bool(abs(self.lon[-1] + step - self.lon[0] - 360) < 0.1 * step)

    @cached_property
    def cell_area(self) -> np.ndarray:
        """(lat, lon) in m2, exact on the sphere: R^2 dlon (sin(north edge) - sin(south edge)).

        Edges lie half way between centres and at most at a pole, so that a pole row has the
        area of its cap and not cos(90) = 0. A row less than one row from a pole reaches to it:
        no further row fits there (the outermost of a Gaussian grid).
        """
        edges = np.clip(_edges(self.lat), -90, 90)
        north, south = self.lat[0] - self.lat[1], self.lat[-2] - self.lat[-1]
        # A thousandth of a row: coordinates kept in float32 decide nothing.
        if self.lat[0] + north > 90 + 1e-3 * north:
            edges[0] = 90
        if self.lat[-1] - south < -90 - 1e-3 * south:
            edges[-1] = -90
        band = np.sin(np.deg2rad(edges[:-1])) - np.sin(np.deg2rad(edges[1:]))
        if self.periodic:
            west = np.concatenate([[self.lon[-1] - 360], self.lon])
            between = np.diff(west)
            widths = (between + np.roll(between, -1)) / 2
        else:
            widths = np.diff(_edges(self.lon))
        return EARTH_RADIUS_M**2 * band[:, None] * np.deg2rad(widths)[None, :]

    def region(self, west: float, east: float, south: float, north: float) -> np.ndarray:
        """(lat, lon) bool, True where the cell centre lies in the box, its edges included.

        Longitudes count modulo 360 whatever their origin, and a box may cross the dateline:
        170 to -170 and 170 to 190 are the same 20 degrees. ValueError if no centre is inside.
        """
        if south > north:
            raise ValueError(f"region: south={south} is north of north={north}")
        # 1e-9 degrees is 0.1 mm: it forgives rounding, never a grid point.
        width = east - west
        span = 360.0 if width >= 360 - 1e-9 else (width + 1e-9) % 360 - 1e-9
        inside_lon = (self.lon - west + 1e-9) % 360 <= span + 2e-9
        inside_lat = (self.lat >= south - 1e-9) & (self.lat <= north + 1e-9)
        box = inside_lat[:, None] & inside_lon[None, :]
        if not box.any():
            raise ValueError(
                f"region west={west} east={east} south={south} north={north} holds no grid point"
                f" (lat {self.lat[-1]} to {self.lat[0]}, lon {self.lon[0]} to {self.lon[-1]})"
            )
        return box

    def same_as(self, other: "Grid", tolerance_degrees: float = 1e-4) -> bool:
        """Whether both have the same points, to rounding of float32 coordinates."""
        return self.shape == other.shape and bool(
            np.abs(self.lat - other.lat).max() <= tolerance_degrees
            and np.abs(self.lon - other.lon).max() <= tolerance_degrees
        )


def _edges(centres: np.ndarray) -> np.ndarray:
    if centres.size == 1:
        raise ValueError("one row or column alone has no cell area: its width is not known")
    middle = (centres[1:] + centres[:-1]) / 2
    first = centres[0] - (centres[1] - centres[0]) / 2
    last = centres[-1] + (centres[-1] - centres[-2]) / 2
    return np.concatenate([[first], middle, [last]])
