"""How far a stage is, and how long it took."""

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from graticule.report.folder import STAGES

Progress = Callable[[int, int], None]
Bar = Callable[[str, str], AbstractContextManager[Callable[..., None]]]
"""(title, unit) -> a progress bar."""
_log = logging.getLogger(__name__)


def no_bar(title: str, unit: str) -> AbstractContextManager[Callable[..., None]]:
    """A `Bar` that shows nothing."""
    return nullcontext(lambda *_: None)


def record_stage(folder: Path, stage: str, seconds: float) -> None:
    """Append a stage's wall time to stages.jsonl, if `folder` is a run's; a report shows it."""
    if not (folder / "config.json").is_file():
        return
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"stage": stage, "seconds": round(seconds, 3), "ended": ended})
    try:
        with (folder / STAGES).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:  # the stage itself is done, and its result is worth more
        _log.warning("the time of %s is not recorded: %s", stage, error)
