"""Units: one spelling for each, linear conversions, and physical bounds of known quantities."""

import re

# Canonical spelling: the ways files write it, in lower case, with `**`, `^` and `.` taken out.
_SPELLINGS = {
    "degC": "degc deg_c degreec degreesc degree_c degrees_c celsius degcelsius deg_celsius"
    " degree_celsius degrees_celsius degreecelsius c °c",
    "K": "k kelvin degk deg_k degree_k degrees_k degrees_kelvin degree_kelvin",
    "degF": "degf deg_f degree_f degrees_f fahrenheit degree_fahrenheit degrees_fahrenheit",
    # Practical salinity has no dimension; 1e-3 is how CF writes it.
    "1e-3": "1e-3 1e-03 0.001 psu ppt pss pss-78 pss78 psu-78 practical_salinity_unit"
    " practical_salinity_units parts_per_thousand permil per_mil ‰",
    "m s-1": "m/s m_s-1 ms-1 meter/sec meters/sec meter/second meters/second metre/second"
    " meters_per_second metres_per_second m/sec meter_second-1 m_sec-1",
    "cm s-1": "cm/s cm_s-1 cm/sec centimeter/sec",
    "km h-1": "km/h km_h-1 km/hr",
    "kt": "kt kts knot knots",
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "Pa": "pa pascal pascals",
    "hPa": "hpa mb mbar millibar millibars hectopascal hectopascals",
    "dbar": "dbar decibar decibars",
    "kg kg-1": "kg/kg kg_kg-1",
    "g kg-1": "g/kg g_kg-1 gram/kg",
    "m2 s-2": "m2/s2 m2_s-2",
    "1": "1 1.0 none - dimensionless unitless fraction (0_-_1) 0-1",
    "%": "% percent per_cent",
    "Pa s-1": "pa/s pa_s-1",
    "s-1": "1/s s-1 /s",
    "W m-2": "w/m2 w_m-2 watt/m2 watts/m2",
    "J m-2": "j/m2 j_m-2",
    "N m-2": "n/m2 n_m-2 newton/m2",
    "N m-2 s": "n_m-2_s n/m2_s",
    "kg m-2": "kg/m2 kg_m-2",
    "kg m-3": "kg/m3 kg_m-3",
    "kg m-2 s-1": "kg/m2/s kg/(m2s) kg_m-2_s-1 kg/m2s",
    "mm day-1": "mm/day mm/d mm_day-1 mm_d-1",
    "s": "s sec second seconds",
    "day": "day days d",
    "degree": "degree degrees deg",
    "degrees_north": "degrees_north degree_north degree_n degrees_n degreen degreesn",
    "degrees_east": "degrees_east degree_east degree_e degrees_e degreee degreese",
}
_CANONICAL = {spelling: unit for unit, text in _SPELLINGS.items() for spelling in text.split()}

# Canonical unit: dimension, factor and offset to the dimension's base unit.
_LINEAR = {
    "K": ("temperature", 1.0, 0.0),
    "degC": ("temperature", 1.0, 273.15),
    "degF": ("temperature", 5 / 9, 273.15 - 32 * 5 / 9),
    "Pa": ("pressure", 1.0, 0.0),
    "hPa": ("pressure", 100.0, 0.0),
    "dbar": ("pressure", 10000.0, 0.0),
    "m": ("length", 1.0, 0.0),
    "cm": ("length", 0.01, 0.0),
    "mm": ("length", 0.001, 0.0),
    "km": ("length", 1000.0, 0.0),
    "m s-1": ("speed", 1.0, 0.0),
    "cm s-1": ("speed", 0.01, 0.0),
    "km h-1": ("speed", 1 / 3.6, 0.0),
    "kt": ("speed", 1852 / 3600, 0.0),
    "kg kg-1": ("mass fraction", 1.0, 0.0),
    "g kg-1": ("mass fraction", 0.001, 0.0),
    "1": ("fraction", 1.0, 0.0),
    "%": ("fraction", 0.01, 0.0),
}


def canonical(text: str) -> str:
    """The one spelling of a unit that is known; any other text as it is, without outer spaces."""
    plain = re.sub(r"\*\*|\^|(?<=[a-z])\.(?=[a-z])", "", text.strip().lower())
    return _CANONICAL.get(re.sub(r"\s+", "_", plain), text.strip())


def is_known(unit: str) -> bool:
    """Whether `unit` is a canonical spelling."""
    return unit in _SPELLINGS


def is_pressure(unit: str) -> bool:
    return _LINEAR.get(unit, ("",))[0] == "pressure"


def conversion(source: str, target: str) -> tuple[float, float] | None:
    """(factor, offset) with value_in_target = factor * value + offset, for canonical units.

    None where one unit is unknown or both measure different things.
    """
    if source == target:
        return 1.0, 0.0
    if source not in _LINEAR or target not in _LINEAR:
        return None
    dimension, factor, offset = _LINEAR[source]
    other, target_factor, target_offset = _LINEAR[target]
    if dimension != other:
        return None
    # (factor v + offset - target_offset) / target_factor, in an order that keeps 273.15 exact.
    return factor / target_factor, (offset - target_offset) / target_factor


_DIFFERENCES = re.compile(
    r"anomal|tendenc|differen|increment|uncertain|error|deviation|spread|change|std\b|bias"
)
_OCEAN = re.compile(r"sea.?water|thetao|\bsst\b|\btos\b|votemper|sea.surface.(foundation.)?temp")


def bounds(
    unit: str, name: str, standard_name: str = "", long_name: str = ""
) -> tuple[float | None, float | None]:
    """(low, high) in `unit` that no value of this quantity on Earth leaves; None: unbounded.

    Wide on purpose: they catch wrong units, lost fills and overflow, not rare weather.
    Differences (anomalies, tendencies, errors) and unknown quantities are unbounded.
    """
    text = " ".join((name, standard_name, long_name)).lower().replace("_", " ")
    if _DIFFERENCES.search(text):
        return None, None
    if unit in ("degC", "K", "degF"):
        if not _OCEAN.search(text):
            return {"K": (150.0, 350.0), "degC": (-100.0, 100.0), "degF": (-148.0, 212.0)}[unit]
        factor, offset = conversion("K", unit) or (1.0, 0.0)
        return round(factor * 268.15 + offset, 6), round(factor * 323.15 + offset, 6)
    if "salin" in text or (unit == "1e-3" and re.search(r"\bsal|\bso\b|\bsos\b", text)):
        return (0.0, 50.0) if unit in ("1e-3", "g kg-1", "1") else (None, None)
    if "speed" in text or "velocity" in text or "wind" in text or unit in ("m s-1", "cm s-1"):
        factor, _ = conversion("m s-1", unit) or (0.0, 0.0)
        return (-150 * factor, 150 * factor) if factor else (None, None)
    if is_pressure(unit) and ("pressure" in text or re.search(r"\bm?slp?\b|\bsp\b|\bps", text)):
        factor, _ = conversion("Pa", unit) or (0.0, 0.0)
        return 0.0, 120000 * factor
    if "specific humidity" in text and unit in ("kg kg-1", "g kg-1"):
        # Spectral models leave small negative humidities behind.
        factor, _ = conversion("kg kg-1", unit) or (1.0, 0.0)
        return -0.01 * factor, 0.1 * factor
    if "sea surface height" in text or re.search(r"\bzos\b|\bssh\b", text):
        factor, _ = conversion("m", unit) or (0.0, 0.0)
        return (-20 * factor, 20 * factor) if factor else (None, None)
    return None, None
