"""Pictures and sections of an ensemble: what is drawn and said, and what comes out by itself."""

import json
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from ensemble_case import with_members
from graticule.cli import main
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.evaluate import EnsembleScores, load_ensemble
from graticule.evaluate.ensemble_file import save_ensemble
from graticule.report.ensemble import (
    plume_curves,
    rank_histogram,
    ratio_curves,
    reliability_curves,
    spread_curves,
)
from graticule.report.ensemble_sections import ensemble_sections, member_maps
from graticule.report.findings import summary
from graticule.report.folder import RunFolder
from graticule.report.page import Html
from graticule.report.subject import Opened, Subject
from graticule.tasks import ensemble_of, report_run, scores_of
from small_store import write_store
from test_curves import line, words_in
from test_report import SMALL, run, words_of

SECTIONS = ["spread", "ranks", "events", "plumes", "members"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a forecast of five members, many.nc: the model's and noise."""
    folder = tmp_path_factory.mktemp("ensemble")
    store = write_store(
        folder / "store", land=True, units={"salinity": "1e-3"}, days=range(26),
        splits={"train": ["2003-02-21/2003-03-08"], "validation": ["2003-03-09/2003-03-12"],
                "test": ["2003-03-13/2003-03-18"]},
    )  # fmt: skip
    compute(store, np.arange(16)).save(store)
    common = (*SMALL, f"data.store={store.path}", "forecast.leads=3", "forecast.every=1")
    run("train", "demo", "--out", str(folder / "run"), settings=(*common, "train.steps=2"))
    run("forecast", str(folder / "run"), "--out", str(folder / "run" / "one.nc"))
    made = []
    for member in range(5):
        with xr.open_dataset(folder / "run" / "one.nc", decode_times=False,
                             mask_and_scale=False) as data:  # fmt: skip
            changed = data.load()
        rng = np.random.default_rng(member)
        for name in ("temperature", "salinity"):
            noise = rng.normal(0, 4, size=changed[name].shape)
            changed[name].values[...] += noise.astype(np.float32)
        made.append(folder / f"{member}.nc")
        changed.to_netcdf(made[-1])
    with_members(folder / "run" / "many.nc", made)
    events = "evaluate.thresholds=temperature>12,salinity<3"
    run("evaluate", str(folder / "run" / "many.nc"), settings=(events, "evaluate.point=-30,200"))
    return folder / "run"


@pytest.fixture
def fresh(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def ensemble(trained: Path) -> EnsembleScores:
    return load_ensemble(trained / "many.ensemble.nc")


# Pictures


def test_spread_is_drawn_against_the_error_of_the_mean(
    ensemble: EnsembleScores, drawn: list[Figure]
) -> None:
    picture = spread_curves(ensemble, "salinity")
    for label, values in (("spread", ensemble.spread()), ("error of the mean", ensemble.rmse()),
                          ("fair CRPS", ensemble.crps("fair"))):  # fmt: skip
        x, y = line(drawn[0], label)
        assert x.tolist() == [1, 2, 3]
        np.testing.assert_array_equal(y, values[:, 1])
    rmse, spread = ensemble.rmse()[:, 1], ensemble.spread()[:, 1]
    assert f"spread {spread[0]:.3g} 1e-3 at 1 d and {spread[2]:.3g} at 3 d" in picture.alt
    assert f"error of the mean {rmse[0]:.3g} 1e-3 at 1 d" in picture.alt
    assert [row["lead_hours"] for row in picture.table] == [24, 48, 72]
    assert picture.table[1]["spread / error"] == ensemble.spread_skill()[1, 1]
    assert "5 members" in picture.caption


def test_the_ratio_is_drawn_by_channel_around_one(
    ensemble: EnsembleScores, drawn: list[Figure]
) -> None:
    picture = ratio_curves(ensemble, ["temperature", "salinity"])
    ratio = ensemble.spread_skill()
    for i, name in enumerate(("temperature", "salinity")):
        np.testing.assert_array_equal(line(drawn[0], name)[1], ratio[:, i])
        assert f"{name} {ratio[0, i]:.3g} at 1 d and {ratio[2, i]:.3g} at 3 d" in picture.alt
    assert set(line(drawn[0], "members like the truth")[1]) == {1}


def test_a_rank_histogram_shows_its_shares_and_tells_the_ends(ensemble: EnsembleScores) -> None:
    picture = rank_histogram(ensemble, "temperature", [1, 3])
    shares = ensemble.ranks()[:, 0]
    assert [row["lead 1"] for row in picture.table] == shares[0].tolist()
    assert [row["lead 3"] for row in picture.table] == shares[2].tolist()
    assert {row["expected"] for row in picture.table} == {1 / 6}
    assert f"below all members in {shares[0, 0]:.1%}, above all in {shares[0, -1]:.1%}" in (
        picture.alt
    )
    assert f"{shares[2, [0, -1]].sum():.1%}, where 33.3% is usual" in picture.alt
    assert "members below the truth, of 5" in words_in(picture)


def test_reliability_is_drawn_and_its_parts_are_told(
    ensemble: EnsembleScores, drawn: list[Figure]
) -> None:
    picture = reliability_curves(ensemble, 0, [1, 3])
    found = ensemble.reliability(0)
    assert "temperature>12" in picture.title
    x, y = line(drawn[0], "lead 3 d")
    np.testing.assert_array_equal(x, found.probability)
    np.testing.assert_array_equal(y, found.observed[2])
    assert f"the Brier score is {ensemble.brier(0)[2]:.3g}" in picture.alt
    assert len(picture.table) == 2 * 6
    assert picture.table[7]["weight"] == found.weight[2, 1]


def test_a_plume_shows_every_member_the_mean_and_the_truth(
    ensemble: EnsembleScores, drawn: list[Figure], trained: Path
) -> None:
    picture = plume_curves(ensemble, "salinity", 1)
    row, column = ensemble.sums.point
    with xr.open_dataset(trained / "many.nc") as data:
        values = data["salinity"][1, :, :, row, column].values
    scored = ensemble.scored[1]
    np.testing.assert_array_equal(ensemble.sums.plumes[1, scored, 1, :-1], values[scored])
    np.testing.assert_allclose(line(drawn[0], "their mean")[1],
                               values[scored].mean(1, dtype=np.float64))  # fmt: skip
    at = picture.table[0]
    assert [at[f"member {k}"] for k in range(5)] == values[0].tolist()
    assert f"truth {at['truth']:.3g}" in picture.alt
    assert "from 2003-" in picture.caption
    lat, lon = ensemble.point
    assert f"{abs(lat):g}°S, {lon:g}°E" in picture.caption
    land = replace(ensemble, sums=replace(ensemble.sums, plumes=ensemble.sums.plumes * np.nan))
    with pytest.raises(ValueError, match=r"no value of salinity at .* in the forecast"):
        plume_curves(land, "salinity")


def test_maps_of_members_tell_their_error_and_spread(trained: Path) -> None:
    store = Store(RunFolder.read(trained).config.data.store)
    picture = member_maps(trained / "many.nc", store, channel="temperature", lead=2)
    assert picture.png
    by = {row["map"]: row for row in picture.table}
    assert list(by) == ["truth", "mean of 5", "mean - truth", "spread",
                        *(f"member {k}" for k in range(4))]  # fmt: skip
    with xr.open_dataset(trained / "many.nc") as data:
        fields = data["temperature"][0, 1].values.astype(np.float64)
        time = data["valid_time"][0, 1].values
    index = next(i for i in range(len(store.times)) if str(store.times.date(i))[:10]
                 == str(time)[:10])  # fmt: skip
    truth = store.read(index, [store.channels.index("temperature")])[0]
    sea = np.isfinite(truth)
    weight = store.grid.cell_area[sea] / store.grid.cell_area[sea].sum()
    error = fields.mean(0)[sea] - truth[sea]
    spread = np.sqrt(6 / 5 * weight @ fields[:, sea].var(0, ddof=1))
    assert by["truth"]["cells"] == sea.sum() < sea.size
    assert by["mean - truth"]["rms"] == pytest.approx(np.sqrt(weight @ error**2), rel=1e-6)
    assert by["spread"]["rms"] == pytest.approx(spread, rel=1e-6)
    assert f"spread {spread:.3g}" in picture.alt
    assert "members 0 to 3 in pairs" in picture.caption
    with pytest.raises(ValueError, match="has no members"):
        member_maps(trained / "one.nc", store, channel="temperature", lead=2)


# The whole way


def test_evaluate_writes_the_members_scores_and_prints_them(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fresh / "many.nc"
    assert main(["evaluate", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["evaluate", str(path), "--force", "--set", "evaluate.thresholds=salinity>9"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    scores = load_ensemble(fresh / "many.ensemble.nc")
    assert "Ensemble of 5 members; the errors above are of its mean. Fair CRPS at 3 d:" in text
    assert f"Brier score of salinity>9 at 3 d: {scores.brier(0)[2]:.3g}" in text
    told = json.loads((fresh / "many.scores.json").read_text())["ensemble"]
    assert told == json.loads(json.dumps(scores.told()))
    assert main(["evaluate", str(path), "--force", "--set", "evaluate.thresholds=salinity"]) == 2
    assert "write a channel, > or <, and a number" in capsys.readouterr().err


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures without ink: what each one draws is tested above."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 1, 1)

    def blank(self: Figure, out: Any, *, format: str, **_: Any) -> None:
        out.write('<svg viewBox="0 0 1 1"/>' if format == "svg" else header)

    monkeypatch.setattr(Figure, "savefig", blank)


def test_a_report_on_an_ensemble_has_its_sections_and_pictures(fresh: Path, undrawn: None) -> None:
    path = fresh / "many.nc"
    result = report_run(fresh, forecast_path=path)
    assert [name for name in result["sections"] if name in SECTIONS] == SECTIONS
    assert {
        "spread-error", "spread-temperature", "spread-salinity", "ranks-salinity",
        "reliability-temperature-above-12", "reliability-salinity-below-3", "plume-salinity",
        "members-temperature", "maps-salinity",
    } <= set(result["pictures"])  # fmt: skip
    text = words_of(fresh / "report.html")
    assert "The forecast is the mean of 5 members." in text
    assert re.search(r"an ensemble of 5 members, and its errors .* they spread [0-9.]+ to", text)
    assert not re.search(r"\b(?:nan|NaN|None|inf)\b", text)
    # What was made is kept; what is missing of it is made again.
    (fresh / "many.ensemble.nc").unlink()
    scores, _ = scores_of(path)
    assert ensemble_of(path, scores) is not None


def test_scores_of_other_weights_are_refused_and_the_page_says_what_to_do(fresh: Path) -> None:
    path = fresh / "many.nc"
    scores, _ = scores_of(path)
    made = load_ensemble(fresh / "many.ensemble.nc")
    other = replace(made, attributes={**made.attributes, "run_fingerprint": "other"})
    save_ensemble(other, fresh / "many.ensemble.nc", force=True)
    with pytest.raises(ValueError, match="run_fingerprint other there and"):
        ensemble_of(path, scores)
    subject = Subject(run=RunFolder.read(fresh), forecast=Opened.read(path), scores=scores)
    (anchor, _, make), (last, _, _) = ensemble_sections(subject, lambda *_: Html(""))
    assert (anchor, last) == ("spread", "members")
    assert f"score the forecast again: graticule evaluate {path} --force" in make()[0]


def test_a_forecast_without_members_has_none_of_its_sections(fresh: Path) -> None:
    subject = Subject(run=RunFolder.read(fresh), forecast=Opened.read(fresh / "one.nc"))
    assert ensemble_sections(subject, lambda *_: Html("")) == []
    scores, _ = scores_of(fresh / "one.nc")
    assert "ensemble" not in scores
    assert not (fresh / "one.ensemble.nc").exists()
    told = summary(replace(subject, scores=scores))
    assert not any("ensemble" in sentence for sentence in told)


def test_an_ensemble_of_one_member_is_shown_without_what_it_cannot_have(
    fresh: Path, undrawn: None
) -> None:
    with_members(fresh / "single.nc", [fresh / "one.nc"])
    result = report_run(fresh, forecast_path=fresh / "single.nc")
    assert "spread-temperature" in result["pictures"]
    assert "spread-error" not in result["pictures"]
    text = words_of(fresh / "report.html")
    assert "Not shown: one member has no spread" in text
    assert "an ensemble of one member, which has no spread" in text
    assert not re.search(r"\b(?:nan|NaN|None|inf)\b", text)
