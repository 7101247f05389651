"""The generated worlds that benches train on, each in the folder of its bench."""

from pathlib import Path

from graticule.bench.rows import Setting
from graticule.data.basin import Ocean
from graticule.data.demo import write_demo_store, write_ocean_store
from graticule.data.planet import Planet


def planet_in(
    out: Path, setting: Setting, planet: Planet | None = None, name: str = "planet"
) -> Path:
    """A planet's store, simulated unless it is there; by default the demo's."""
    store = out / f"{name}.zarr"
    if not store.exists():
        setting.say(f"simulating the {name}")
        with setting.bar("simulating", "samples") as progress:
            write_demo_store(store, planet, progress=progress)
    return store


def ocean_in(out: Path, ocean: Ocean, setting: Setting) -> Path:
    """The generated ocean's store, simulated unless it is there."""
    store = out / "ocean.zarr"
    if not store.exists():
        setting.say("simulating the ocean")
        with setting.bar("simulating", "dates") as progress:
            write_ocean_store(store, ocean, progress=progress)
    return store
