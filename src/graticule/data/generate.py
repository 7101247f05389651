"""What generated worlds share: a store written whole or not."""

import shutil
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.data.writer import StoreWriter

Blocks = Generator[np.ndarray, None, None]
"""Blocks of successive states, (time, channel, lat, lon) each."""


def write_blocks(out: str | Path, blocks: Blocks, wet: np.ndarray, **description: Any) -> Store:
    """Write blocks as they come, one time step a shard, with statistics over the train split.

    wet: what broadcasts to (channel, lat, lon), bool; other cells become land, without values.
    description: as `StoreWriter` has it. Whatever goes wrong, `out` is then as it was before.
    """
    out = Path(out)
    existed = out.exists()
    writer = StoreWriter(out, **description)
    try:
        with closing(blocks):
            for index, fields in enumerate(state for block in blocks for state in block):
                writer.write(index, np.where(wet, fields, np.nan))
        store = writer.finish()
        training = np.flatnonzero(store.times.within(store.splits["train"]))
        compute(store, training).save(store)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # it was empty: what is in it is ours, and half
        if existed:
            out.mkdir(exist_ok=True)
        raise
    return store
