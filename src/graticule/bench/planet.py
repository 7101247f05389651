"""The planet that benches train on."""

from pathlib import Path

from graticule.bench.rows import Setting
from graticule.data.demo import write_demo_store
from graticule.data.planet import Planet


def planet_in(
    out: Path, setting: Setting, planet: Planet | None = None, name: str = "planet"
) -> Path:
    """A planet's store in a bench's folder, simulated unless it is there; by default the demo's."""
    store = out / f"{name}.zarr"
    if not store.exists():
        setting.say(f"simulating the {name}")
        with setting.bar("simulating", "samples") as progress:
            write_demo_store(store, planet, progress=progress)
    return store
