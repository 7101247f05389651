"""`graticule bench samudra`: the acts by which Samudra's authors made it fast, each as a ratio.

"4 days to 4 hours" (Merose 2026) came of a loader without Dask, normalisation on the device, less
logging in rollouts, validation apart from training, and activation checkpointing. Each act is
measured on the generated, forced ocean, in one run, beside the figure that was published; the
memory of checkpointing on the published model itself, at 32 x 128. `before` and `after` are the
two states of their loader in words of our own (`om4.py`), fed to the very training step that ours
feeds, read ahead by one worker process as ours is by one thread. What a CPU cannot show is named
in rows without a figure.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from graticule.bench.checkpointing import memory_rows
from graticule.bench.rows import Row, Setting
from graticule.bench.samudra.laid import Laid
from graticule.bench.samudra.reading import chunk_rows, loader_rows, normalisation_row
from graticule.bench.samudra.rollouts import rollout_rows
from graticule.bench.samudra.size import Size
from graticule.bench.samudra.training import training_rows
from graticule.config import Config
from graticule.data.demo import write_ocean_store
from graticule.data.store import Store
from graticule.recipes import recipe

TITLE = (
    "the acts of `4 days to 4 hours`, each against what it took the place of and beside the"
    " published figure: loader, waiting for data, normalisation, logging, validation, checkpointing"
)
SIZE = Size()


def rows(setting: Setting) -> list[Row]:
    """The acts in the order they were published in. What is generated is deleted."""
    try:
        import dask  # noqa: F401
    except ImportError:
        raise ValueError(
            "bench samudra compares with xarray on Dask, which is not installed;"
            " pip install 'graticule[bench]'"
        ) from None
    if setting.out:
        setting.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=setting.out) as folder:
        setting.say("simulating the ocean")
        size, say = SIZE, setting.say
        store = write_ocean_store(Path(folder) / "ocean.zarr", size.basin)
        laid = Laid.out(Path(folder), store, size.times_a_chunk)
        config = _config(store, size)
        found = [*loader_rows(laid, config, size, say), *training_rows(laid, config, size, say)]
        found += [*chunk_rows(laid, size, say), normalisation_row(laid, config, size)]
        found += rollout_rows(Path(folder), config, size, found, say)
    return [*found, *memory_rows(setting.say), *not_here()]


def not_here() -> list[Row]:
    """What needs a GPU, or eight, and is not measured."""
    return [
        Row(what, None, None, None, "", note)
        for what, note in {
            "pinned memory": "published: 10 to 20 % in a benchmark, 2x in training; there is no"
            " copy to a device on a CPU",
            "copies beside kernels": "published: none; a CPU has no stream to copy on",
            "4 days to 4 hours": "published: 24x; a product of the acts above on eight GPUs, which"
            " is not measured as a whole",
            "4,800 years a day": "published, at 180 x 360 on one GPU; here only the ratio between"
            " logging and not",
        }.items()
    ]


def _config(store: Store, size: Size) -> Config:
    base = recipe("samudra-ocean")
    return replace(
        base,
        data=replace(base.data, store=str(store.path), forcing_offsets=(-1, 0)),
        train=replace(base.train, batch=size.batch, leads=size.steps, leads_from=()),
    )
