"""Sources that are recognised by how their files look, and what is taken from each by default."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graticule.variables import Role

# The 50 depths of GLORYS12 (m), as its files hold them in float32, to six digits.
GLORYS12_DEPTHS_M = (
    0.494025, 1.541375, 2.645669, 3.819495, 5.078224, 6.440614, 7.92956, 9.572997, 11.405,
    13.46714, 15.81007, 18.49556, 21.59882, 25.21141, 29.44473, 34.43415, 40.34405, 47.37369,
    55.76429, 65.80727, 77.85385, 92.32607, 109.7293, 130.666, 155.8507, 186.1256, 222.4752,
    266.0403, 318.1274, 380.213, 453.9377, 541.0889, 643.5668, 763.3331, 902.3393, 1062.44,
    1245.291, 1452.251, 1684.284, 1941.893, 2225.078, 2533.336, 2865.703, 3220.82, 3597.032,
    3992.484, 4405.224, 4833.291, 5274.784, 5727.917,
)  # fmt: skip
# Every second one to 77.9 m, then each to 643.6 m: the 23 that the Wenhai family predicts.
WENHAI_DEPTHS_M = (*GLORYS12_DEPTHS_M[0:21:2], *GLORYS12_DEPTHS_M[21:33])
# WeatherBench 2's 13 levels (hPa).
ERA5_LEVELS_HPA = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
# OM4's 19 levels (m), where a file numbers them and gives no `lev`.
OM4_LEVELS_M = (
    2.5, 10, 22.5, 40, 65, 105, 165, 250, 375, 550, 775, 1050, 1400, 1850, 2400, 3100, 4000, 5000,
    6000,
)  # fmt: skip
_NUMBERED = re.compile(r"^(thetao|so|uo|vo|mask)_(\d+)$")


@dataclass(frozen=True)
class Source:
    """A kind of source.

    variables: taken by default, in this order; a tuple of names means the first that is there;
    none at all: every variable on the grid. levels: taken by default where the source holds more
    of them, in `level_units`. units: of variables whose files give none. numbered: one array a
    level (`thetao_0`), with land in `mask_0` or `mask`.
    """

    name: str
    variables: tuple[str | tuple[str, ...], ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    levels: tuple[float, ...] = ()
    level_units: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    numbered: bool = False


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="glorys12",
            variables=("thetao", "so", "uo", "vo", "zos"),
            levels=WENHAI_DEPTHS_M,
            level_units="m",
        ),
        Source(
            name="era5",
            variables=(
                "10m_u_component_of_wind", "10m_v_component_of_wind", "mean_sea_level_pressure",
                "2m_temperature", "sea_surface_temperature",
                ("total_precipitation", "total_precipitation_6hr", "total_precipitation_12hr",
                 "total_precipitation_24hr"),
                "geopotential", "specific_humidity", "temperature", "u_component_of_wind",
                "v_component_of_wind", "vertical_velocity",
                "soil_type", ("geopotential_at_surface", "orography"), "land_sea_mask",
            ),
            roles=dict.fromkeys(
                ("soil_type", "geopotential_at_surface", "orography", "land_sea_mask"), "static"
            ),
            levels=tuple(map(float, ERA5_LEVELS_HPA)),
            level_units="hPa",
        ),
        Source(
            name="om4",
            variables=("uo", "vo", "thetao", "so", "zos", "tauuo", "tauvo", "hfds",
                       "hfds_anomalies"),
            roles=dict.fromkeys(("tauuo", "tauvo", "hfds", "hfds_anomalies"), "forcing"),
            level_units="m",
            units={"uo": "m s-1", "vo": "m s-1", "thetao": "degC", "so": "1e-3", "zos": "m",
                   "tauuo": "N m-2", "tauvo": "N m-2", "hfds": "W m-2",
                   "hfds_anomalies": "W m-2"},
            numbered=True,
        ),
        Source(name="cf"),
    )
}  # fmt: skip


def numbered(name: str) -> tuple[str, int] | None:
    """(variable, level number) of an array such as `thetao_3`; None for any other name."""
    match = _NUMBERED.match(name)
    return None if match is None else (match[1], int(match[2]))


def recognise(
    variables: Mapping[str, tuple[str, ...]], packed: Sequence[str], about: str
) -> tuple[str, str]:
    """(kind of source, why), from what all files hold.

    variables: names and dims. packed: variables that are kept as integers with a scale.
    about: the files' global attributes, as one text.
    """
    levelled = [name for name in variables if (found := numbered(name)) and found[0] != "mask"]
    if levelled:
        return "om4", f"one array a level ({levelled[0]} and {len(levelled) - 1} others)"
    compact = [name for name in ("thetao", "so", "uo", "vo")
               if {"lev", "y", "x"} <= set(variables.get(name, ()))]  # fmt: skip
    if compact and "mask" in variables:
        return "om4", f"{compact[0]} over lev, y and x, with a mask"
    long_names = [
        name
        for entry in SOURCES["era5"].variables
        for name in ([entry] if isinstance(entry, str) else entry)
        if name in variables
    ]
    if len(long_names) > 1 or any(name[0].isdigit() for name in long_names):
        return "era5", f"WeatherBench 2's names ({', '.join(long_names[:3])}, ...)"
    ocean = [name for name in ("thetao", "so", "uo", "vo", "zos")
             if {"latitude", "longitude"} <= set(variables.get(name, ()))]  # fmt: skip
    if ocean:
        if re.search("glorys|mercator|copernicus marine|cmems", about, re.IGNORECASE):
            return "glorys12", f"{', '.join(ocean)} of a Copernicus Marine or Mercator product"
        if any(name in packed for name in ocean):
            return "glorys12", f"{', '.join(ocean)} packed over latitude and longitude"
    return "cf", "axes by their attributes, else by their names"


def default_variables(source: Source, there: Sequence[str]) -> list[str] | None:
    """The variables that are taken where none are named; None: all. ValueError: none is there."""
    if not source.variables:
        return None
    chosen = []
    for entry in source.variables:
        names = [entry] if isinstance(entry, str) else entry
        chosen += [name for name in names if name in there][:1]
    if not chosen:
        raise ValueError(
            f"none of the variables of {source.name} is in the sources, which hold"
            f" {', '.join(there)}; take them as any CF files with --source cf"
        )
    return chosen
