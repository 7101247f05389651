"""Scores of several processes: those of one, whatever their shares of the pairs, or one error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.data.store import Store
from graticule.evaluate import Scores
from graticule.parallel.local import LocalRanks
from graticule.parallel.talk import alone, everyone
from test_evaluate import GRID, make_forecast, make_store, score


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    fields = np.random.default_rng(5).normal(20, 3, size=(40, *GRID.shape))
    return make_store(tmp_path_factory.mktemp("data") / "store", lambda day: fields[day], days=40)


def guess(day: int, lead: int) -> np.ndarray:
    return np.random.default_rng([day, lead]).normal(20, 3, size=(2, *GRID.shape))


def on_ranks(path: Path, store: Path, given: dict[str, Any]) -> Any:
    """The scores and the progress of a rank, or what it raised."""
    calls: list[tuple[int, int]] = []
    try:
        scores = score(path, Store(store), progress=lambda *done: calls.append(done), **given)
    except ValueError as error:
        return str(error)
    return scores, calls


def assert_same(ours: Scores, theirs: Scores) -> None:
    assert ours.spectra is not None
    assert theirs.spectra is not None
    for name in ("samples", "cells", "weight", "values", "activity"):
        a, b = getattr(ours.sums, name), getattr(theirs.sums, name)
        # A sum of errors of either sign may be near zero: measured by its terms.
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max())
        assert a.dtype == b.dtype
    for name in ("rows", "area", "sums"):
        a, b = getattr(ours.spectra, name), getattr(theirs.spectra, name)
        np.testing.assert_allclose(a, b, rtol=1e-12)
    for name in ("rmse", "mae", "acc", "activity", "short_power_ratio"):
        np.testing.assert_allclose(getattr(ours, name)(), getattr(theirs, name)(), rtol=1e-12)
    assert ours.spectra.attributes == theirs.spectra.attributes
    assert replace(ours, sums=theirs.sums, spectra=theirs.spectra).to_dict() == theirs.to_dict()


@pytest.mark.parametrize(
    ("given", "inits", "leads", "shares"),
    [
        ({}, (2, 5), 3, ([3, 3], [2, 2, 2])),
        ({"climatology": "month", "train_ranges": ["2003"]}, (2, 28), 5, ([5, 5], [3, 3, 4])),
        ({"region": (-60, 100, -90, 90)}, (2,), 5, ([2, 3], [1, 2, 2])),
        # Of the second start, days 40 and later lie beyond the store.
        ({}, (3, 38), 1, ([1, 1], [0, 1, 1])),
        ({}, (38,), 4, ([0, 1], [0, 0, 1])),
    ],
    ids=["even", "groups", "region", "empty", "skipped"],
)
def test_scores_of_several_processes_are_those_of_one(
    store: Store, tmp_path: Path, two: LocalRanks, three: LocalRanks,
    given: dict[str, Any], inits: tuple[int, ...], leads: int, shares: tuple[list[int], ...],
) -> None:  # fmt: skip
    path = make_forecast(tmp_path / "f.zarr", guess, inits=inits, leads=leads)
    expected = score(path, store, **given)
    assert expected.spectra is not None
    assert expected.spectra.sums.any() == ("region" not in given)  # its rows are too short
    for ranks, lengths in zip((two, three), shares, strict=True):
        answers = ranks.run(on_ranks, path, store.path, given)
        for (scores, calls), length in zip(answers, lengths, strict=True):
            assert_same(scores, expected)
            assert (scores.skipped, scores.first_skipped) == (
                expected.skipped, expected.first_skipped
            )  # fmt: skip
            np.testing.assert_array_equal(scores.sums.values, answers[0][0].sums.values)
            assert calls == [(done, length) for done in range(1, length + 1)]


def test_a_hole_that_one_process_meets_is_the_same_error_on_all(
    store: Store, tmp_path: Path, three: LocalRanks
) -> None:
    def field(day: int, lead: int) -> np.ndarray:
        values = guess(day, lead)
        if (day, lead) == (5, 3):
            values[1, 3, 4:6] = np.nan
        return values

    path = make_forecast(tmp_path / "f.zarr", field)
    answers = three.run(on_ranks, path, store.path, {})
    assert len(set(answers)) == 1
    assert answers[0].startswith("the forecast of zos at init_time 2003-01-06 00:00:00, lead 3 has")


def test_nothing_to_score_is_the_same_error_on_all(
    store: Store, tmp_path: Path, two: LocalRanks
) -> None:
    path = make_forecast(tmp_path / "f.zarr", guess, inits=(50,))
    first, second = two.run(on_ranks, path, store.path, {})
    assert first == second
    assert first.startswith("nothing to score: the store has no 2003-02-20")


def _by_the_first(path: Path, store: Path) -> Any:
    def scored() -> Scores:
        return score(path, Store(store))

    with alone():
        everywhere = score(path, Store(store))
    return everyone().first(scored), everywhere


def test_one_process_scores_while_the_others_wait(
    store: Store, tmp_path: Path, two: LocalRanks
) -> None:
    path = make_forecast(tmp_path / "f.zarr", guess)
    expected = score(path, store)
    for answer in two.run(_by_the_first, path, store.path):
        for scores in answer:
            np.testing.assert_array_equal(scores.sums.values, expected.sums.values)
