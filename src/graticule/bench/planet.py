"""The planet that benches train on."""

from pathlib import Path

from graticule.bench.rows import Setting
from graticule.data.demo import write_demo_store


def planet_in(out: Path, setting: Setting) -> Path:
    """The demo planet's store in a bench's folder, simulated unless it is there."""
    store = out / "planet.zarr"
    if not store.exists():
        setting.say("simulating the planet")
        with setting.bar("simulating", "samples") as progress:
            write_demo_store(store, progress=progress)
    return store
