"""Maps of truth, forecast and difference for one initial time and lead."""

from pathlib import Path

import numpy as np

from graticule.data.store import Store
from graticule.data.times import seconds_of
from graticule.forecast.reader import open_forecast
from graticule.grid import Grid

LAND = "0.75"


def forecast_maps(
    forecast_path: str | Path,
    store: Store,
    out: str | Path,
    *,
    channel: str,
    leads: tuple[int, ...],
    init: int = 0,
) -> Path:
    """Draw truth, forecast and their difference of `channel`, one row a lead (1, 2, ...).

    Truth and forecast share one scale; that of the differences is centred on zero and shared by
    all leads. Land is grey. Needs matplotlib (`pip install 'graticule[demo]'`).
    ValueError where the store has not the forecast's grid, its channel or its valid times.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'graticule[demo]'") from None

    position = store.channels.index(channel)
    units = store.channels[position].units
    with open_forecast(forecast_path) as forecast:
        place = forecast.channels.index(channel)
        if not forecast.grid.same_as(store.grid):
            raise ValueError(f"{forecast_path} and {store.path} are on different grids")
        if not 0 <= init < len(forecast.init_times):
            last = len(forecast.init_times) - 1
            raise ValueError(f"init={init}: {forecast_path} has initial times 0 to {last}")
        if not leads or not all(1 <= lead <= forecast.num_leads for lead in leads):
            raise ValueError(f"leads {leads}: {forecast_path} has leads 1 to {forecast.num_leads}")
        rows = []
        for lead in leads:
            valid = forecast.valid_times[init, lead - 1]
            index = int(np.searchsorted(store.times.seconds, seconds_of(valid)))
            if index == len(store.times) or store.times.seconds[index] != seconds_of(valid):
                raise ValueError(f"{store.path} has no truth for {valid}")
            truth = store.read(index, [position])[0]
            rows.append((lead, valid, truth, forecast.read(init, lead - 1)[place]))
        started = forecast.init_times[init]
        hours = forecast.lead_seconds / 3600
        weights = forecast.attributes.get("run_fingerprint", "")
    low = min(np.nanmin([truth, field]) for _, _, truth, field in rows)
    high = max(np.nanmax([truth, field]) for _, _, truth, field in rows)
    most = max(np.nanmax(np.abs(field - truth)) for _, _, truth, field in rows)
    x, y = _corners(store.grid)
    # Without pyplot: no window, and no figure that outlives this function.
    figure = Figure(figsize=(13, 2.6 * len(rows) + 0.9), layout="constrained")
    axes = figure.subplots(len(rows), 3, squeeze=False, sharex=True, sharey=True)
    for line, (lead, valid, truth, field) in zip(axes, rows, strict=True):
        panels = (
            (f"truth, {valid:%Y-%m-%d %H:%M}", truth, dict(vmin=low, vmax=high, cmap="viridis")),
            (f"forecast, lead {hours[lead - 1]:g} h", field, dict(vmin=low, vmax=high,
                                                                    cmap="viridis")),
            ("forecast - truth", field - truth, dict(vmin=-most, vmax=most, cmap="RdBu_r")),
        )  # fmt: skip
        drawn = []
        for axis, (title, values, scale) in zip(line, panels, strict=True):
            axis.set_facecolor(LAND)
            drawn.append(axis.pcolormesh(x, y, np.ma.masked_invalid(values), **scale))
            axis.set_title(title, fontsize=9)
            axis.set_aspect("equal")
            axis.set_ylim(max(-90, y.min()), min(90, y.max()))
        figure.colorbar(drawn[1], ax=list(line[:2]), label=f"{channel} ({units})", shrink=0.9)
        figure.colorbar(drawn[2], ax=[line[2]], label=f"difference ({units})", shrink=0.9)
        line[0].set_ylabel("latitude")
    for axis in axes[-1]:
        axis.set_xlabel("longitude")
    height, width = store.grid.shape
    figure.suptitle(
        f"{channel} from {started:%Y-%m-%d %H:%M}   grid {height} x {width}   weights {weights}",
        fontsize=9, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(out, dpi=110)
    return Path(out)


def _corners(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Cell corners, so that the first and last column meet without a blank line."""
    lon = np.concatenate([grid.lon, [grid.lon[0] + 360]]) if grid.periodic else grid.lon
    x = (lon[1:] + lon[:-1]) / 2
    if grid.periodic:
        x = np.concatenate([[x[-1] - 360], x])
    else:
        x = np.concatenate([[2 * lon[0] - x[0]], x, [2 * lon[-1] - x[-1]]])
    y = (grid.lat[1:] + grid.lat[:-1]) / 2
    y = np.concatenate([[2 * grid.lat[0] - y[0]], y, [2 * grid.lat[-1] - y[-1]]])
    return x, np.clip(y, -90, 90)
