"""Results of a bench's stages, kept so that a stopped bench goes on where it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graticule.data.store import write_json


def kept(
    out: Path, name: str, fingerprint: str, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `make` returns of stage `name`, read from `out` where it was made before.

    fingerprint: of the configuration; ValueError where what is there is of another one.
    """
    path = out / f"{name}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if found["fingerprint"] != fingerprint:
            raise ValueError(
                f"{path} is of another configuration than {name} has now; remove {out}, or"
                " name another folder with --out"
            )
        return found
    made = {"fingerprint": fingerprint, **make()}
    write_json(path, made)
    return made
