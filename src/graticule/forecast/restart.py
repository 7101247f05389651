"""What a forecast that was stopped goes on with: the states that were fed back, as they were.

The file of a forecast holds units, rounded to float32; back through normalisation they would be
other bits. So every so many leads the states that the next lead is given are kept beside its
chunks, on the whole grid and normalised, whatever layout computed them:

    f.zarr/.restart/starts-00004-00007.lead-00030/
      00004.safetensors ...   states: (input offset, prognostic channel, lat, lon) float32
      complete.json           leads on disk, the initial times and SHA-256 of each file

A record is of the initial times that run side by side, in an ensemble of one member: then the
numbers are those of `schedule.Places`. It is written under a hidden name when all
its leads are on disk, synced, then renamed; then the one before it goes. That of the last lead
needs no states. When the forecast is complete, all of them go.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from graticule.data.durable import sha256_of, sync

FOLDER, COMPLETE, FORMAT = ".restart", "complete.json", "graticule restart 1"


@dataclass(frozen=True)
class Kept:
    """The states of one place after `lead` leads (model steps). sha256: of the file; no
    file: all leads are there."""

    lead: int
    path: Path | None = None
    sha256: str = ""

    def states(self, rows: range, columns: range) -> Tensor:
        """(input offset, prognostic channel, lat, lon) of a part of the grid; ValueError where
        the file is not as it was written."""
        assert self.path is not None, "a finished forecast has no next lead"
        try:
            if sha256_of(self.path) != self.sha256:
                raise OSError("it has another SHA-256 than when it was written")
            with safe_open(self.path, framework="pt") as file:
                part = (slice(place.start, place.stop) for place in (rows, columns))
                return file.get_slice("states")[:, :, *part]
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{self.path}: a forecast cannot go on from it: {error}; delete"
                f" {self.path.parents[2]} and forecast again"
            ) from error


def kept(forecast: Path) -> dict[int, Kept]:
    """The furthest record of each place of a Zarr forecast."""
    found: dict[int, Kept] = {}
    folder = forecast / FOLDER
    for record in sorted(folder.iterdir()) if folder.is_dir() else []:
        if record.name.startswith("."):  # was being written
            continue
        try:
            sealed = json.loads((record / COMPLETE).read_text())
            if sealed["format"] != FORMAT:
                raise ValueError(f"format {sealed['format']!r}, not {FORMAT!r}")
            lead = int(sealed["lead"])
            for name, sha256 in sealed["starts"].items():
                path = _file(record, int(name)) if sha256 else None
                if int(name) not in found or found[int(name)].lead < lead:
                    found[int(name)] = Kept(lead, path, sha256)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{record} is not what was written ({error}); delete {forecast} and forecast again"
            ) from error
    return found


def _file(record: Path, place: int) -> Path:
    return record / f"{place:05d}.safetensors"


class Record:
    """The record of some initial times after a lead, being written; `seal` puts it in place."""

    def __init__(self, forecast: Path, places: Sequence[int], lead: int) -> None:
        """places: of the initial times, ascending."""
        self._folder, self._lead = forecast / FOLDER, lead
        self._starts = dict.fromkeys(places, "")
        self._name = f"starts-{places[0]:05d}-{places[-1]:05d}.lead-{lead:05d}"
        self._part = self._folder / f".{self._name}"
        shutil.rmtree(self._part, ignore_errors=True)  # a killed process left it
        self._part.mkdir(parents=True)

    def put(self, place: int, states: np.ndarray) -> None:
        """states: (input offset, prognostic channel, lat, lon) float32 of the whole grid."""
        assert states.dtype == np.float32, states.dtype
        path = _file(self._part, place)
        save_file({"states": np.ascontiguousarray(states)}, path)
        sync(path)
        self._starts[place] = sha256_of(path)

    def seal(self) -> None:
        text = json.dumps({"format": FORMAT, "lead": self._lead, "starts": self._starts}, indent=1)
        (self._part / COMPLETE).write_text(text + "\n")
        for path in (self._part / COMPLETE, self._part):
            sync(path)
        final = self._folder / self._name
        if final.exists():  # the same leads, made again from an earlier record
            shutil.rmtree(final)
        self._part.rename(final)
        sync(self._folder)
        # By their names alone: other processes may be replacing theirs. Between the places of a
        # record there are but such as have all their leads.
        for other in self._folder.glob("starts-*.lead-*"):
            first, last, lead = map(int, re.findall(r"\d+", other.name))
            if min(self._starts) <= first and last <= max(self._starts) and lead < self._lead:
                shutil.rmtree(other)


def remove(forecast: Path) -> None:
    """All records of a forecast that is complete."""
    shutil.rmtree(forecast / FOLDER, ignore_errors=True)
