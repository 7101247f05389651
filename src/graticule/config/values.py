"""What all sections share: unknown keys are refused, values are checked, sizes are read."""

import re

from pydantic import ConfigDict

FORBID = ConfigDict(extra="forbid", allow_inf_nan=False)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def bytes_of(text: str, name: str) -> int:
    """`40GiB`, `800 MiB`, `85.9GB` or `512B`. name: whose value it is."""
    units = {"B": 1} | {
        f"{letter}{kind}": base**power
        for power, letter in enumerate("KMGT", 1)
        for kind, base in (("iB", 1024), ("B", 1000))
    }
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not found or found[2] not in units or float(found[1]) <= 0:
        raise ValueError(
            f"{name}={text}: write a size above 0 with its unit, such as 40GiB, 800MiB or 85GB"
        )
    return int(float(found[1]) * units[found[2]])
