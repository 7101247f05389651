"""The file of an ensemble's scores: netCDF with what they say, and the sums they come from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from graticule import __version__
from graticule.data.times import UNITS
from graticule.evaluate.ensemble_scores import ALPHA, EnsembleScores
from graticule.evaluate.ensemble_sums import DISTANCES, QUANTITIES, EnsembleSums, Threshold
from graticule.evaluate.files import format_of, save_netcdf
from graticule.grid import Grid
from graticule.variables import Channels

FORMAT = "graticule ensemble scores 1"


def save_ensemble(scores: EnsembleScores, path: str | Path, *, force: bool = False) -> None:
    """Write netCDF-4 by CF-1.11, whole or not at all.

    An existing file is refused; with `force` it is replaced if it is a file of ensemble scores.
    """
    save_netcdf(path, lambda: _encoded(scores), format=FORMAT, what="ensemble scores", force=force)


def load_ensemble(path: str | Path) -> EnsembleScores:
    """The scores at `path`; ValueError where it is no file of ensemble scores."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no ensemble scores there; `graticule evaluate` writes them")
    if format_of(path) != FORMAT:
        raise ValueError(f"{path} is no file of ensemble scores (format {FORMAT!r})")
    with xr.open_dataset(path, engine="netcdf4", decode_times=False) as data:
        attributes = dict(data.attrs)
        channels = Channels.from_list(json.loads(attributes.pop("channels")))
        thresholds = json.loads(attributes.pop("thresholds"))
        normalised = bool(attributes.pop("normalised"))
        for key in ("Conventions", "title", "source", "format"):
            del attributes[key]
        read = {str(name): data[name].values for name in data.variables}
        return EnsembleScores(
            sums=EnsembleSums(
                names=channels.names,
                thresholds=tuple(Threshold.read(text, channels.names) for text in thresholds),
                point=(int(read["point"][0]), int(read["point"][1])),
                values=read["sums"],
                energy=read["energy_distances"],
                ranks=read["rank_sums"],
                events=read["event_sums"]
                if thresholds
                else np.zeros((0, *read["rank_sums"].shape[::2], 2)),
                plumes=read["plumes"],
            ),
            channels=channels,
            grid=Grid(read["lat"], read["lon"]),
            lead_seconds=read["lead_time"],
            init_seconds=read["init_time"],
            valid_seconds=read["valid_time"],
            calendar=str(data["init_time"].attrs["calendar"]),
            normalised=normalised,
            attributes=attributes,
        )


def _encoded(scores: EnsembleScores) -> tuple[xr.Dataset, dict[str, Any]]:
    sums = scores.sums
    clock = {"units": UNITS, "calendar": scores.calendar}
    coordinates: dict[str, Any] = {
        "init_time": ("init_time", scores.init_seconds,
                      {"standard_name": "forecast_reference_time", **clock}),
        "valid_time": (("init_time", "lead"), scores.valid_seconds,
                       {"standard_name": "time", **clock}),
        "lead": ("lead", np.arange(1, len(scores.lead_seconds) + 1),
                 {"long_name": "lead in model steps", "units": "1"}),
        "lead_time": ("lead", scores.lead_seconds.astype(np.int64),
                      {"standard_name": "forecast_period", "units": "seconds"}),
        "channel": ("channel", np.array(scores.names, object), {}),
        "lat": ("lat", scores.grid.lat, {"units": "degrees_north"}),
        "lon": ("lon", scores.grid.lon, {"units": "degrees_east"}),
        "quantity": ("quantity", np.array(QUANTITIES, object), {"long_name": "what is summed"}),
        "distance": ("distance", np.array(DISTANCES, object), {"long_name": "between which"}),
    }  # fmt: skip
    found = {**_told(scores), **_sums(sums)}
    if sums.thresholds:
        told = [str(threshold) for threshold in sums.thresholds]
        coordinates["threshold"] = ("threshold", np.array(told, object), {"long_name": "event"})
    data = xr.Dataset(
        found,
        coords=coordinates,
        attrs={
            "Conventions": "CF-1.11", "title": "scores of an ensemble",
            **{key: value if isinstance(value, str | int | float) and not isinstance(value, bool)
               else json.dumps(value) for key, value in scores.attributes.items()},
            "source": f"graticule {__version__}", "format": FORMAT,
            "channels": json.dumps(scores.channels.to_list()),
            # As they were read, not as they are shown: every digit counts.
            "thresholds": json.dumps([f"{t.name}{'>' if t.above else '<'}{t.value!r}"
                                      for t in sums.thresholds]),
            "normalised": int(scores.normalised),
        },
    )  # fmt: skip
    return data, {str(name): {"_FillValue": None} for name in data.variables}


def _told(scores: EnsembleScores) -> dict[str, Any]:
    """What is read off the sums, for those who open the file."""
    by_lead, units = ("lead", "channel"), "units of the channel"
    found: dict[str, Any] = {
        "rmse": (by_lead, scores.rmse(), {"long_name": f"RMSE of the ensemble mean ({units})"}),
        "crps": (by_lead, scores.crps("standard"), {"long_name": f"CRPS ({units})"}),
        "energy": (by_lead, scores.energy("standard")[:, :-1],
                   {"long_name": f"energy score of whole fields ({units})"}),
        "rank_histogram": ((*by_lead, "rank"), scores.ranks(),
                           {"long_name": "share by number of members below the truth",
                            "units": "1"}),
    }  # fmt: skip
    if scores.num_members > 1:
        found |= {
            "spread": (by_lead, scores.spread(),
                       {"long_name": f"root of (m + 1) / m x mean variance ({units})"}),
            "spread_skill": (by_lead, scores.spread_skill(),
                             {"long_name": "spread / RMSE of the ensemble mean", "units": "1"}),
            "spread_skill_unbiased": (by_lead, scores.spread_skill_unbiased(),
                                      {"long_name": "root of variance / (squared error of the"
                                       " mean - variance / m)", "units": "1"}),
            "fair_crps": (by_lead, scores.crps("fair"), {"long_name": f"fair CRPS ({units})"}),
            "almost_fair_crps": (by_lead, scores.crps("almost_fair"),
                                 {"long_name": f"almost fair CRPS ({units})", "alpha": ALPHA}),
            "fair_energy": (by_lead, scores.energy("fair")[:, :-1],
                            {"long_name": f"fair energy score of whole fields ({units})"}),
        }  # fmt: skip
    number = range(len(scores.sums.thresholds))
    if scores.sums.thresholds:
        found["brier"] = (
            ("threshold", "lead"), np.stack([scores.brier(i) for i in number]),
            {"long_name": "Brier score", "units": "1"},
        )  # fmt: skip
        found["observed_frequency"] = (
            ("threshold", "lead", "rank"),
            np.stack([scores.reliability(i).observed for i in number]),
            {"long_name": "how often the event is where so many members have it", "units": "1"},
        )
    return found


def _sums(sums: EnsembleSums) -> dict[str, Any]:
    pair = ("init_time", "lead")
    found: dict[str, Any] = {
        "sums": (("quantity", *pair, "channel"), sums.values,
                 {"long_name": "sums by area", "units": "m2"}),
        "energy_distances": (("distance", *pair, "channel_or_all"), sums.energy,
                             {"long_name": "root mean square distances of whole fields"}),
        "rank_sums": (("lead", "channel", "rank"), sums.ranks,
                      {"long_name": "area by number of members below the truth", "units": "m2"}),
        "plumes": ((*pair, "channel", "member_or_truth"), sums.plumes,
                   {"long_name": "values at the point, each member's and last the truth's"}),
        "point": ("row_or_column", np.array(sums.point), {"long_name": "cell of the plumes"}),
    }  # fmt: skip
    if sums.thresholds:
        found["event_sums"] = (
            ("threshold", "lead", "rank", "all_or_event"), sums.events,
            {"long_name": "area by number of members with the event, and with it in the truth",
             "units": "m2"},
        )  # fmt: skip
    return found
