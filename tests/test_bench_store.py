"""The store bench on a tiny size: its generator, its errors and its rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from graticule.bench import Setting, run, store
from graticule.data.store import LAND, Packing, Store


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "GRID", (64, 128))
    monkeypatch.setattr(store, "LEVELS", 2)
    monkeypatch.setattr(store, "STEPS", 2)


@pytest.mark.usefixtures("tiny")
def test_the_store_bench_gives_size_and_errors_as_rows_of_the_one_form(tmp_path: Path) -> None:
    said: list[str] = []
    result = json.loads(json.dumps(run("store", Setting(say=said.append, out=tmp_path))))
    size, *errors = result["rows"]
    written = Store(tmp_path / "red-noise.zarr")
    assert written.packing.dtype == np.int16
    assert len(written.channels) == 9
    assert size["what"] == "size"
    assert size["goal"] == 4.2
    on_disk = sum(written.shard_path(step).stat().st_size for step in range(2))
    assert size["ours"] == pytest.approx(2 * 9 * 64 * 128 * 4 / on_disk)
    # 16 bits for 32, and a third of them land: 3 without any help of smoothness, had so few bytes
    # no overhead (chunk index, digests).
    assert 2.5 < size["ratio"] < 4.5
    assert "CPU-seconds a step: encode" in size["note"]
    assert "9 x 64 x 128, 2 steps, 33." in size["note"]
    assert [row["what"] for row in errors] == [f"error {v}" for v in store.SOURCE]
    for row, (scale, _, units) in zip(errors, store.SOURCE.values(), strict=True):
        assert row["against"] == scale
        assert row["unit"] == units
        # Thousands of values: the largest error is close to half a step, and never above it.
        assert 0.49 < row["ratio"] <= 0.5
        assert row["holds"]
    assert said[0].startswith("step 1 of 2: generating")


@pytest.mark.usefixtures("tiny")
def test_a_coarser_packing_than_the_sources_misses_the_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarse(scale: np.ndarray, offset: np.ndarray) -> Packing:
        return Packing(1.5 * scale, offset)

    monkeypatch.setattr(store, "Packing", coarse)
    errors = store.rows(Setting(out=tmp_path))[1:]
    assert all(0.73 < row.ratio <= 0.75 and not row.holds for row in errors)


def test_the_packing_error_is_the_largest_difference_and_land_must_be_land() -> None:
    packing = Packing(np.array([0.5]), np.array([1.0]))
    field = np.array([[1.0, 2.2], [np.nan, 3.5]], np.float32)
    stored = np.array([[0, 2], [LAND, 4]], np.int16)  # 1, 2, land, 3
    assert store.packing_error(field, stored, packing) == pytest.approx(0.5)
    for value in (field[0, 0], np.nan):
        wrong = np.array([[value, 2.0], [3.0, 3.5]], np.float32)
        with pytest.raises(ValueError, match="land is not where the fields have none"):
            store.packing_error(wrong, stored, packing)


@pytest.mark.usefixtures("tiny")
def test_the_noise_is_red_of_the_spread_that_is_said_and_the_same_whenever_asked() -> None:
    channels, everywhere = store.bench_channels(), np.ones((64, 128), dtype=bool)
    fields = np.stack(list(store.red_noise(channels, 0, everywhere)))
    again = np.stack(list(store.red_noise(channels, 0, everywhere)))
    np.testing.assert_array_equal(fields, again)
    assert (np.stack(list(store.red_noise(channels, 1, everywhere))) != fields).any()
    position = channels.index("uo@0")
    spreads = [
        field[position].std()
        for step in range(40)
        for field in [np.stack(list(store.red_noise(channels, step, everywhere)))]
    ]
    assert np.sqrt(np.mean(np.square(spreads))) == pytest.approx(store.NOISE["uo"], rel=0.1)
    power = np.abs(np.fft.rfft(fields[position], axis=1)).mean(0) ** 2
    assert power[1:4].mean() > 5 * power[12:16].mean() > 50 * power[40:].mean()
    below = fields[channels.index("uo@1")]
    assert below.std() < fields[position].std()
    sea = store.bench_sea()
    assert 0.6 < sea.mean() < 0.7
    masked = next(store.red_noise(channels, 0, sea))
    np.testing.assert_array_equal(np.isnan(masked), ~sea)
