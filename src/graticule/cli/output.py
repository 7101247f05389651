"""What the user sees: results on standard output, bars and words on standard error."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Bar:
    """A progress bar on standard error, fed with (done, total[, metrics])."""

    def __init__(self, title: str, unit: str) -> None:
        self._title, self._unit = title, unit
        self._bar: Any = None

    def __enter__(self) -> "Bar":
        return self

    def __call__(self, done: int, total: int, metrics: dict[str, Any] | None = None) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=total, initial=done - 1 if metrics else 0, desc=self._title,
                unit=" " + self._unit, file=sys.stderr, mininterval=0.5, dynamic_ncols=True,
            )  # fmt: skip
        if metrics:
            self._bar.set_postfix(loss=f"{metrics['loss']:.4f}", refresh=False)
        self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_result(options: argparse.Namespace, values: Any, text: Callable[[], str]) -> None:
    print(json.dumps(values, indent=1) if options.json else text(), flush=True)


def print_store(options: argparse.Namespace, store: Any) -> None:
    values = {
        "store": str(store.path), "fingerprint": store.fingerprint, "times": len(store.times),
        "first": str(store.times.date(0)), "last": str(store.times.date(len(store.times) - 1)),
        "grid": list(store.grid.shape), "channels": list(store.channels.names),
        "statics": list(store.statics.names), "splits": store.splits,
    }  # fmt: skip
    print_result(
        options, values,
        lambda: f"{store.path}: {values['times']} times from {values['first']} to"
        f" {values['last']}, {by(values['grid'])} points, {', '.join(store.channels.names)}",
    )  # fmt: skip


def by(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


def names_of(text: str | None) -> list[str]:
    """What an option lists, separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()] if text else []
