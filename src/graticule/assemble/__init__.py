"""From a configuration to a model that runs on a mesh, and what it costs."""

from graticule.assemble.build import (
    PRECISIONS,
    Precision,
    Shapes,
    build_model,
    shapes_of,
    shapes_of_config,
)
from graticule.assemble.describe import describe
from graticule.assemble.layout import Running, assemble, stripe_axes, topology_of, window_grids

__all__ = [
    "PRECISIONS", "Precision", "Running", "Shapes", "assemble", "build_model", "describe",
    "shapes_of", "shapes_of_config", "stripe_axes", "topology_of", "window_grids",
]  # fmt: skip
