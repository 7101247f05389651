"""The ocean-skill bench, tiny: rows against references, ranges over a long forecast, resumed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.bench import Setting, ocean_skill, run
from graticule.data.basin import Ocean
from graticule.data.demo import write_ocean_store
from graticule.data.ocean import rmse_without_forcing
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.recipes import recipe

TINY = Ocean(num_lat=24, num_lon=48, num_years=3, spin_up_years=0, dt_seconds=86400)
ROWS = [
    "2 steps: ours / persistence", "2 steps: ours / climatology",
    "2 steps: with / without the forcing", "2 steps: with / the best possible without",
    "3 steps: range of thetao", "3 steps: range of so", "3 steps: range of zos",
]  # fmt: skip


def shortened(name: str) -> Any:
    config = recipe(name)
    return replace(
        config,
        data=replace(config.data, validation=("2002-01/2002-02",)),
        model=replace(config.model, widths=(4, 6), dilations=(1, 2, 2, 2, 2)),
        train=replace(config.train, steps=2, batch=1, leads=1, leads_from=(), warmup_steps=1),
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ocean-skill")
    write_ocean_store(folder / "ocean.zarr", TINY, workers=1)
    return folder


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        _shorten(patch)
        return json.loads(json.dumps(run("ocean-skill", Setting(out=out))))


def _shorten(patch: pytest.MonkeyPatch) -> None:
    tiny = {"recipe": shortened, "OCEAN": TINY, "LEADS": 2, "LONG": 3, "EVERY": 40}
    for name, value in tiny.items():
        patch.setattr(ocean_skill, name, value)


def test_runs_differ_in_the_forcing_alone() -> None:
    runs = ocean_skill.configs(Path("store"), seed=3)
    given, without = runs["given"], runs["without"]
    assert without.data.without == ("hfds", "wfo")
    assert replace(without, name="given", data=given.data) == given
    assert given.train.seed == 3
    assert given.train.leads_at(1) == 1, "a curriculum"
    assert given.train.leads_at(given.train.steps) == 4


def test_rows_are_ratios_of_normalised_rmse(result: dict[str, Any], out: Path) -> None:
    assert [row["what"] for row in result["rows"]] == ROWS
    kept = json.loads((out / "ocean-skill.json").read_text())["0"]
    persistence, climatology, without, floor = result["rows"][:4]
    given = kept["given"]
    assert len(given["rmse"]) == 4, "two states a step"
    for row in (persistence, climatology, without, floor):
        assert row["ours"] == pytest.approx(np.mean(given["rmse"]))
        assert row["at_most"]
        assert row["goal"] == 1
    assert persistence["against"] == pytest.approx(np.mean(given["persistence"]))
    assert climatology["against"] == pytest.approx(np.mean(given["climatology"]))
    assert without["against"] == pytest.approx(np.mean(kept["without"]["rmse"]))
    store = Store(out / "ocean.zarr")
    std = Statistics.load(store).std[:9]
    assert floor["against"] == pytest.approx((rmse_without_forcing(TINY, 4) / std).mean())


def test_ranges_are_those_of_every_state_of_the_long_forecast(
    result: dict[str, Any], out: Path
) -> None:
    store = Store(out / "ocean.zarr")
    training = np.flatnonzero(store.times.within(store.splits["train"]))
    truth = np.stack([store.read(int(time)) for time in training])
    with open_forecast(out / "seed-0" / "given" / "long.zarr") as opened:
        assert opened.num_leads == 6, "two states a step"
        assert store.times.within(store.splits["test"])[store.times.find(
            str(opened.init_times[0]))]  # fmt: skip
        made = np.stack([opened.read(0, lead) for lead in range(6)])
    for row, own in zip(result["rows"][4:], (slice(0, 4), slice(4, 8), slice(8, 9)), strict=True):
        low, high = np.nanmin(truth[:, own]), np.nanmax(truth[:, own])
        assert row["against"] == pytest.approx(high - low)
        least, greatest = np.nanmin(made[:, own]), np.nanmax(made[:, own])
        assert row["ours"] == pytest.approx(max(high, greatest) - min(low, least))
        assert row["holds"] == (least >= low and greatest <= high)


def test_a_second_run_computes_nothing_again(
    result: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _shorten(monkeypatch)
    said: list[str] = []
    assert run("ocean-skill", Setting(say=said.append, out=out))["rows"] == result["rows"]
    assert not said


def test_one_stopped_in_its_long_forecast_goes_on_there(
    result: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _shorten(monkeypatch)
    (out / "seed-0" / "given.json").unlink()
    said: list[str] = []
    again = run("ocean-skill", Setting(say=said.append, out=out))["rows"]
    assert again == result["rows"]
    assert len(said) == 1
    assert "given" in said[0]
