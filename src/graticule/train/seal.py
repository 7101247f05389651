"""What says that a checkpoint is whole: `complete.json`, size and SHA-256 of all other files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from graticule.data.durable import sha256_of, sync
from graticule.parallel.talk import Talk

COMPLETE = "complete.json"


class Sealed(TypedDict):
    """A file as it was written."""

    bytes: int
    sha256: str


def of_file(path: Path) -> Sealed:
    """Sync a file to disk and read what it holds."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def write(folder: Path, files: Mapping[str, Sealed]) -> None:
    """Seal `folder`, whose files, by their paths within it, are written and synced.

    OSError where they are not there as they were written.
    """
    for name, entry in files.items():
        found = (folder / name).stat().st_size
        if found != entry["bytes"]:
            # Written by another process: on a disk that is not this one's, or behind a cache.
            raise OSError(f"{folder / name} has {found} bytes, {entry['bytes']} were written")
    ordered = {name: files[name] for name in sorted(files)}
    (folder / COMPLETE).write_text(json.dumps({"files": ordered}, indent=1) + "\n")
    sync(folder / COMPLETE)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)


def verify(checkpoint: Path, part: str, talk: Talk) -> None:
    """ValueError, the same on all ranks, unless `part` (a file or folder) holds what was sealed.

    All ranks together: rank 0 looks what is there, each reads its share of the files.
    """
    wanted, wrong = talk.first(lambda: _compared(checkpoint, part))
    ours = []
    for name in sorted(wanted)[talk.rank :: talk.size]:
        try:
            if sha256_of(checkpoint / name) != wanted[name]:
                ours.append(f"{name} has another SHA-256 than when it was written")
        except OSError as error:
            ours.append(f"{name} cannot be read ({error})")
    wrong += sorted(line for lines in talk.gather(ours) for line in lines)
    if wrong:
        raise damaged(checkpoint, "; ".join(wrong))


def damaged(checkpoint: Path, what: str) -> ValueError:
    return ValueError(
        f"checkpoint {checkpoint} is damaged: {what}."
        " Restore it, or move this folder away to go on from the checkpoint before it"
    )


def _compared(checkpoint: Path, part: str) -> tuple[dict[str, str], list[str]]:
    """Digests of the files that are there in their size, and what is wrong with the others."""
    try:
        sealed = json.loads((checkpoint / COMPLETE).read_text())["files"]
        wanted = {
            name: (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in sealed.items()
            if name.split("/")[0] == part
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(checkpoint, f"{COMPLETE} is not what was written ({error!r})") from error
    if not wanted:
        raise damaged(checkpoint, f"it has no {part}")
    names = set(_files(checkpoint, part))
    wrong = [f"{name} is missing" for name in sorted({*wanted} - names)]
    wrong += [f"{name} was not there when it was written" for name in sorted(names - {*wanted})]
    digests = {}
    for name in sorted(names & {*wanted}):
        size, digest = wanted[name]
        found = (checkpoint / name).stat().st_size
        if found == size:
            digests[name] = digest
        else:
            wrong.append(f"{name} has {found} bytes, not {size}")
    return digests, wrong


def _files(checkpoint: Path, part: str) -> Iterable[str]:
    root: Any = checkpoint / part
    there = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    return (str(path.relative_to(checkpoint)) for path in there)
