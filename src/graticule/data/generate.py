"""What generated worlds share: a store written whole or not."""

import shutil
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from graticule.data.store import Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter

Blocks = Generator[np.ndarray, None, None]
"""Blocks of successive states, (time, channel, lat, lon) each."""


def write_blocks(
    out: str | Path,
    blocks: Blocks,
    wet: np.ndarray,
    *,
    times: TimeAxis,
    splits: dict[str, list[str]],
    **description: Any,
) -> Store:
    """Write blocks as they come, one time step a shard, and gather statistics over the train split.

    wet: what broadcasts to (channel, lat, lon), bool; other cells become land, without values.
    times, splits, description: as `StoreWriter` has them. Whatever goes wrong, `out` is then as it
    was before.
    """
    out = Path(out)
    existed = out.exists()
    training = np.flatnonzero(times.within(splits["train"]))
    writer = StoreWriter(out, times=times, splits=splits, training=training, **description)
    try:
        with closing(blocks):
            for index, fields in enumerate(state for block in blocks for state in block):
                writer.write(index, np.where(wet, fields, np.nan))
        return writer.finish()
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # it was empty: what is in it is ours, and half
        if existed:
            out.mkdir(exist_ok=True)
        raise
