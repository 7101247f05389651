"""How far runs of the same thing drift apart, and the picture of it."""

import math
from pathlib import Path

import pytest

from graticule.bench import consistency
from graticule.parallel.launch import ranks_of
from graticule.report.drift import drift_curves


def lines(*losses: float) -> list[dict]:
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]


def test_the_distance_is_the_root_mean_square_of_log_ratios():
    one, other = lines(1.0, 2.0), lines(math.e, 2.0)
    assert consistency.distance(one, other) == pytest.approx(math.sqrt(0.5))
    assert consistency.distance(one, one) == 0.0


def test_every_run_sees_the_same_samples_in_the_same_step():
    configs = consistency.configs(Path("planet.zarr"))
    assert {c.train.batch * c.train.accumulation for c in configs.values()} == {8}
    assert {c.train.seed for c in configs.values()} == {0}
    assert [ranks_of(c) for c in configs.values()] == [1, 1, 1, 1, 4, 4, 4, 8]


def test_the_picture_tells_where_the_runs_end_and_how_far_apart_they_came():
    runs = [
        ("serial", lines(1.0, 0.5, 0.25)),
        ("serial, 2 parts", lines(1.0, 0.5, 0.26)),
        ("WP", lines(1.0, 0.51, 0.25)),
    ]
    picture = drift_curves(runs, serial=2)
    assert "0.2500 (serial), 0.2600 (serial, 2 parts), 0.2500 (WP)" in picture.alt
    assert f"{math.log(0.26 / 0.25):.1e} (serial, 2 parts)" in picture.alt
    assert picture.table[1] == {"step": 2, "serial": 0.5, "serial, 2 parts": 0.5, "WP": 0.51}
    assert picture.svg.startswith("<svg")
