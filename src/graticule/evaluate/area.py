"""The area of cells that scores are weighted by."""

import numpy as np

from graticule.data.store import Store

_SQUARE_METRES = {"m2": 1.0, "m^2": 1.0, "m**2": 1.0, "km2": 1e6, "km^2": 1e6}


def cell_area_of(store: Store) -> tuple[np.ndarray, str]:
    """(lat, lon) m2, and in words where it comes from.

    A static `areacello` (or one whose standard name is cell_area) is the areas of the model that
    made the data, from the true edges of its cells. Without one: `Grid.cell_area`, exact on the
    sphere for cells that meet half way between their centres. Not cos(lat), which is nothing at a
    pole. ValueError where a wet cell has no positive area, and for units that are none of areas.
    """
    for channel in store.statics:
        if channel.standard_name != "cell_area" and channel.variable != "areacello":
            continue
        factor = _SQUARE_METRES.get(channel.units)
        if factor is None:
            raise ValueError(
                f"{store.path}: {channel.name} is in {channel.units!r}, cell areas are in"
                f" {', '.join(_SQUARE_METRES)}; ingest it in m2, or leave it out"
            )
        area = store.read_statics([channel.name])[0].astype(np.float64) * factor
        wet = store.wet_part(range(len(store.channels))).any(0)
        bad = wet & ~(np.isfinite(area) & (area > 0))
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"{store.path}: {channel.name} is {area[row, column]:g} at row {row}, column"
                f" {column}, which is sea, as in {int(bad.sum())} cells; a cell with a value has"
                " an area"
            )
        return np.where(np.isfinite(area) & (area > 0), area, 0.0), f"{channel.name} of the store"
    return store.grid.cell_area, "exact areas on the sphere, edges half way between centres"
