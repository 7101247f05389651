"""How an ingest stores numbers: the sources' own int16, new int16 over the range, or float32."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from graticule.data.shares import Everyone
from graticule.data.steps import Steps, own_packing
from graticule.data.store import Packing

logger = logging.getLogger(__name__)

PackingChoice = Literal["source", "float32", "int16"]


def chosen_packing(
    choice: PackingChoice, everyone: Everyone, begun: Mapping[str, Any]
) -> tuple[Packing, frozenset[str]]:
    """The store's packing, and the variables whose own numbers it keeps."""
    steps = everyone.steps
    own = {variable.name: own_packing(variable) for variable in steps.dynamic}
    reasons = [why for packing, why in own.values() if packing is None]
    if choice == "source" and reasons:
        some = [name for name, (packing, _) in own.items() if packing is not None]
        if some:
            logger.warning(
                "stored as float32, which moves a value by up to 6e-8 of itself: %s. --packing"
                " int16 keeps the numbers of %s and rounds the others",
                "; ".join(reasons), ", ".join(some),
            )  # fmt: skip
        else:
            logger.info("stored as float32: %s", "; ".join(reasons))
    if choice == "float32" or (choice == "source" and reasons):
        return Packing(), frozenset()
    there = begun.get("packing")
    if choice == "source":
        scale, offset, clashes = np.empty(0), np.empty(0), set()
    elif there is not None:
        scale, offset = np.array(there["scale"]), np.array(there["offset"])
        clashes = {
            name
            for name, (packing, _) in own.items()
            if packing is not None and not _is_kept(steps, name, packing, scale, offset)
        }
    else:
        ranged, clashes = _over_range(everyone)
        assert ranged.scale is not None
        assert ranged.offset is not None
        scale, offset = ranged.scale, ranged.offset
    kept = {name: packing for name, (packing, _) in own.items()
            if packing is not None and name not in clashes}  # fmt: skip
    scales, offsets = [], []
    for i, channel in enumerate(steps.channels):
        own_scale, own_offset = kept.get(channel.variable) or (scale[i], offset[i])
        scales.append(own_scale)
        offsets.append(own_offset)
        if channel.variable not in kept:
            logger.info("%s: rounded to int16, by up to %.2g %s", channel.name, own_scale / 2,
                        channel.units)  # fmt: skip
    if kept:
        logger.info("numbers, scale and offset of the source are kept: %s", ", ".join(kept))
    return Packing(np.array(scales), np.array(offsets)), frozenset(kept)


def _is_kept(
    steps: Steps, name: str, own: tuple[float, float], scale: np.ndarray, offset: np.ndarray
) -> bool:
    rows = [i for i, channel in enumerate(steps.channels) if channel.variable == name]
    return all((scale[i], offset[i]) == own for i in rows)


def _over_range(everyone: Everyone) -> tuple[Packing, set[str]]:
    """int16 over each channel's range, after one pass over all times, and the variables whose own
    numbers meet the store's codes."""
    low, high, clashes = everyone.extremes()
    names = everyone.steps.channels.names
    bad = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))
    if bad.size:
        what = "no value at any time" if low[bad[0]] > high[bad[0]] else "infinite values"
        raise ValueError(f"{names[int(bad[0])]} holds {what}")
    for name in sorted(clashes):
        logger.warning("%s: a value of it is stored as one of the store's codes", name)
    return Packing.over_range(low, high), clashes
