"""The skill bench on a tiny planet: equal compute, resumed where it was stopped, rows of RMSE."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.bench import Setting, run, skill
from graticule.data.demo import write_demo_store
from graticule.data.planet import Planet
from graticule.recipes import recipe

TINY = Planet(num_lat=24, num_lon=48, num_runs=3, samples_per_run=14, dt_seconds=720)


def shortened(name: str) -> Any:
    """The demo's recipes, small enough for a test; 24 x 48 points fit patch 8 and windows 3 x 3."""
    config = recipe(name)
    model = replace(
        config.model, width=8, depth=1, heads=2, norm_groups=2, window=(3, 3), mlp_ratio=1
    )
    train = replace(config.train, steps=2, batch=1, warmup_steps=1)
    return replace(
        config, data=replace(config.data, grid=None), model=model, train=train,
        forecast=replace(config.forecast, leads=2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skill")
    write_demo_store(folder / "planet.zarr", TINY, workers=1)
    return folder


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skill, "recipe", shortened)
    monkeypatch.setattr(skill, "PRETRAINING", 2)
    monkeypatch.setattr(skill, "APPLICATIONS", 16)


def test_fine_tunings_have_equal_applications_or_equal_steps() -> None:
    runs = skill.configs(Path("store"), Path("out"), seed=3)
    compute = [runs[f"compute-{leads}"].train for leads in (1, 2, 4, 8)]
    assert [train.leads for train in compute] == [1, 2, 4, 8]
    assert {train.steps * train.leads for train in compute} == {16}
    steps = [runs[f"steps-{leads}"].train for leads in (1, 2, 8)]
    assert {train.steps for train in steps} == {compute[2].steps}
    assert {train.start_from for train in compute + steps} == {"out/p4"}
    assert {config.train.seed for config in runs.values()} == {3}
    assert {runs[name].train.steps for name in ("p8", "p4", "p2")} == {2}


def test_the_models_compared_for_sampling_have_equal_tokens() -> None:
    def tokens(name: str) -> tuple[int, int]:
        model = skill.configs(Path("store"), Path("out"), 0)[name].model
        fine = model.patch * model.sampling
        return 48 // fine, 96 // fine

    assert tokens("p8") == tokens("p4")
    assert tokens("p2") == (12, 24)


def test_rows_compare_rmse_and_a_second_run_computes_nothing_again(out: Path) -> None:
    said: list[str] = []
    setting = Setting(say=said.append, out=out, seeds=(0, 1))  # two: the means and their seeds
    result = json.loads(json.dumps(run("skill", setting)))
    names = [row["what"] for row in result["rows"]]
    assert names == [
        "sampling", "patch", "2 leads, compute", "4 leads, compute", "8 leads, compute",
        "2 leads, steps", "4 leads, steps", "8 leads, steps", "same compute", "pretrained",
    ]  # fmt: skip
    written = json.loads((out / "skill.json").read_text())
    for row in result["rows"]:
        assert row["at_most"]
        assert row["holds"] == (row["ours"] <= row["goal"] * row["against"])
        assert np.isfinite(row["ratio"])
        assert "seed 0" in row["note"]
        assert "seed 1" in row["note"]
    patch = result["rows"][1]
    ours = [np.mean(written[seed]["p2"]["rmse"]) for seed in ("0", "1")]
    assert patch["ours"] == pytest.approx(np.mean(ours))
    assert ours[0] != ours[1], "seeds differ"
    assert sum("steps of" in text for text in said) == 20
    again: list[str] = []
    repeated = run("skill", Setting(say=again.append, out=out, seeds=(0, 1)))
    assert not again
    assert [row["ours"] for row in repeated["rows"]] == [row["ours"] for row in result["rows"]]


@pytest.mark.slow
def test_a_stopped_bench_goes_on_within_a_run(out: Path, tmp_path: Path) -> None:
    (tmp_path / "planet.zarr").symlink_to(out / "planet.zarr")

    class Stop(Exception):
        pass

    def stop(text: str) -> None:
        if "compute-8" in text:
            raise Stop

    with pytest.raises(Stop):
        run("skill", Setting(say=stop, out=tmp_path))
    # As if killed between the forecast and its scores.
    (tmp_path / "seed-0" / "compute-1.json").unlink()
    said: list[str] = []
    run("skill", Setting(say=said.append, out=tmp_path))
    assert [text.split(",")[1].split(":")[0].strip() for text in said if "steps of" in text] == [
        "compute-1", "compute-8", "steps-1", "steps-2", "steps-8",
    ]  # fmt: skip


def test_results_of_another_configuration_are_not_taken_for_this_one(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planet.zarr").symlink_to(out / "planet.zarr")
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "p8.json").write_text(json.dumps({"fingerprint": "0" * 16}))
    with pytest.raises(ValueError, match="another configuration than p8 has now"):
        run("skill", Setting(out=tmp_path))
