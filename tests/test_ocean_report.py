"""Pictures and sections of an ocean: what is drawn, what is said, and what comes out by itself."""

import json
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from graticule.cli import main
from graticule.data.statistics import compute
from graticule.evaluate import Column, OceanScores, OceanSums, Spectra, Stretches, load_ocean
from graticule.evaluate.ocean_file import save_ocean
from graticule.grid import Grid
from graticule.report.findings import warnings
from graticule.report.folder import RunFolder
from graticule.report.ocean import depth_curves, profile_curves
from graticule.report.ocean_leads import content_curves, mean_curves, range_curves
from graticule.report.ocean_sections import energy_curves, ocean_sections, season_maps
from graticule.report.page import Html
from graticule.report.subject import Opened, Subject
from graticule.tasks import ocean_of, report_run, scores_of
from graticule.variables import Channel, Channels
from ocean_case import CHANNELS, REGULAR, noise, pentads, planes, sea, write_truth
from ocean_case import scores_of as by_hand
from small_store import small_grid
from test_curves import line, words_in
from test_report import SMALL, run, words_of

OCEAN = ["depth", "heat", "energy", "profiles", "means", "season", "range"]


@pytest.fixture
def ocean() -> OceanScores:
    """Two initial times of three leads."""
    scores = by_hand(
        {(init, lead): noise(10 * init + lead) for init in range(2) for lead in range(3)},
        sea(), REGULAR,
    )  # fmt: skip
    scores.sums.see(np.full(7, 10.0), np.full(7, 30.0))
    return scores


def test_errors_are_drawn_from_the_surface_down_with_their_references(
    ocean: OceanScores, drawn: list[Figure]
) -> None:
    picture = depth_curves(ocean, "thetao")
    rmse = ocean.rmse(overall=True)
    for source in ("persistence", "climatology", "model"):
        x, y = line(drawn[0], source)
        assert y.tolist() == [15, 50, 110]
        np.testing.assert_array_equal(x, ocean.rmse(source, overall=True)[:3]
                                      if source != "model" else rmse[:3])  # fmt: skip
    low, high = drawn[0].axes[0].get_ylim()
    assert low > high == 0, "the surface is on top"
    assert f"at 15 m RMSE {rmse[0]:.3g} degC" in picture.alt
    assert f"R2 {ocean.r2(overall=True)[2]:.3g}" in picture.alt
    assert [row["depth_m"] for row in picture.table] == [15, 50, 110]
    assert picture.table[1]["rmse_model"] == rmse[1]
    assert {"depth (m)", "RMSE (degC)", "R2"} <= set(words_in(picture))
    with pytest.raises(ValueError, match="zos has no levels in metres; there are thetao, so, uo"):
        depth_curves(ocean, "zos")


def test_an_undefined_r2_and_a_level_of_land_are_said_and_not_drawn() -> None:
    constant = planes(20.0)
    pairs = {(0, 0): (constant + 1, constant, constant, constant)}
    picture = depth_curves(by_hand(pairs, sea(deep=2), REGULAR), "thetao")
    assert "R2 is not defined on 3 levels, where the truth does not vary." in picture.caption
    assert "R2 undefined and against climatology undefined" in picture.alt
    assert "at 110 m RMSE undefined degC" in picture.alt
    assert picture.table[2]["rmse_model"] is None
    assert "nan" not in picture.svg
    nothing = by_hand(pairs, sea(deep=0), REGULAR)
    with pytest.raises(ValueError, match="no cell of thetao was scored on any level"):
        depth_curves(nothing, "thetao")
    with pytest.raises(ValueError, match="no range of depths has any temperature"):
        content_curves(nothing, "temperature")
    with pytest.raises(ValueError, match="no cell of thetao@15 was scored"):
        mean_curves(nothing, "thetao@15")
    with pytest.raises(ValueError, match="no cell of thetao@15 was scored: there is no map"):
        season_maps(nothing, "thetao@15")


def test_many_levels_that_crowd_at_the_surface_are_drawn_on_a_root_scale(
    drawn: list[Figure],
) -> None:
    depths = (2.5, 10, 22.5, 40, 105, 250, 775, 1850, 6000)
    channels = Channels([replace(CHANNELS[0], level=level) for level in depths])
    column = Column.of(channels, channels)
    assert column is not None
    sums = OceanSums.zero(channels.names, (1, 1), REGULAR.shape, origin=np.zeros(9), mapped=())
    rng = np.random.default_rng(0)
    fields = rng.normal(size=(4, 9, *REGULAR.shape))
    sums.add_pair(0, 0, *fields, counted=np.ones((9, *REGULAR.shape), bool),
                  cell_area=REGULAR.cell_area)  # fmt: skip
    scores = OceanScores(
        column=column, sums=sums, grid=REGULAR, init_seconds=np.zeros(1),
        valid_seconds=np.full((1, 1), 432000), calendar="julian", climatology="all", area="exact",
    )  # fmt: skip
    picture = depth_curves(scores, "thetao")
    axis = drawn[0].axes[0]
    assert axis.get_yscale() == "function"
    at = axis.transData.transform([(0, 0), (0, 1500), (0, 6000)])[:, 1]
    assert at[0] - at[1] == pytest.approx((at[0] - at[2]) / 2), "half way down, a quarter as deep"
    assert {"2.5", "6000"} <= set(words_in(picture))
    assert "at 105 m RMSE" in picture.alt


def test_a_profile_shows_both_means_and_their_difference(
    ocean: OceanScores, drawn: list[Figure]
) -> None:
    picture = profile_curves(ocean, "thetao")
    model, truth = (ocean.profile(source)[:3] for source in ("model", "truth"))
    np.testing.assert_array_equal(line(drawn[0], "model")[0], model)
    np.testing.assert_array_equal(line(drawn[0], "truth")[0], truth)
    np.testing.assert_array_equal(line(drawn[0], "model - truth")[0], model - truth)
    assert f"at 50 m {model[1]:.3g} degC in the forecast and {truth[1]:.3g}" in picture.alt


def test_heat_is_drawn_in_zettajoules_over_real_days(
    ocean: OceanScores, drawn: list[Figure]
) -> None:
    later = ocean.valid_seconds.copy()
    later[:, 1:] += 86400  # 29 February lies between the first and the second lead
    ocean = replace(ocean, valid_seconds=later)
    picture = content_curves(ocean, "temperature")
    (heat,) = ocean.content("temperature")
    x, y = line(drawn[0], "model, 0-150 m")
    np.testing.assert_allclose(x * (1 if x[-1] == 16 else 24), [5, 11, 16])
    change = (heat.model.mean(0) - heat.truth.mean(0)[0]) / 1e21
    np.testing.assert_allclose(y, change, rtol=1e-9, atol=1e-12)
    error = heat.error.mean(0) / 1e21
    assert f"to {error[-1]:.3g} ZJ at 16 d" in picture.alt
    np.testing.assert_allclose([row["0-150 m error"] for row in picture.table], error, rtol=1e-6)
    assert [row["days"] for row in picture.table] == [5, 11, 16]
    assert "Density 1035 kg m-3, heat capacity 3992 J kg-1 K-1" in picture.caption
    salt = content_curves(ocean, "salinity")
    assert salt.name == "content-salinity"
    assert "10¹⁵ kg" in salt.alt


def test_means_are_told_with_and_without_their_season(
    ocean: OceanScores, drawn: list[Figure]
) -> None:
    picture = mean_curves(ocean, "zos")
    model, usual = (ocean.mean_by_lead(source)[:, 6] for source in ("model", "climatology"))
    np.testing.assert_array_equal(line(drawn[0], "model")[1], model)
    assert [row["model_deseasonalised"] for row in picture.table] == (model - usual).tolist()
    assert f"{model[0]:.3g} m at 5 d in the forecast" in picture.alt


def test_the_range_of_values_is_drawn_in_that_of_training(
    ocean: OceanScores, drawn: list[Figure]
) -> None:
    picture = range_curves(ocean)
    low, high = ocean.extremes("model")
    row = picture.table[2]
    assert row["thetao least"] == pytest.approx((low[2, :3].min() - 10) / 20)
    assert row["zos largest"] == pytest.approx((high[2, 6] - 10) / 20)
    inside = [name for name, place in (("thetao", [0, 1, 2]), ("so", [3]), ("uo", [4]),
                                       ("vo", [5]), ("zos", [6]))
              if not ocean.beyond()[:, place].any()]  # fmt: skip
    assert f"range of their training values: {', '.join(inside) or 'none'};" in picture.alt
    ocean.sums.see(np.full(7, -99.0), np.full(7, 99.0))
    assert "values: thetao, so, uo, vo, zos; outside of it: none." in range_curves(ocean).alt


def test_a_spectrum_of_kinetic_energy_names_its_currents(drawn: list[Figure]) -> None:
    grid = Grid(np.linspace(80, -80, 9), np.arange(0, 360, 5.0))
    wave = 3 * np.deg2rad(grid.lon) * np.ones((7, 9, 1))
    truth = np.cos(wave) + np.sin(2 * wave)
    wet = np.ones((7, 9, 72), bool)
    scores = by_hand({(0, 0): (truth / 2, truth, truth, truth)}, wet, grid)
    stretches = Stretches.choose(CHANNELS.names, wet, grid, grid.cell_area)
    power = stretches.power(truth)
    spectra = Spectra.zero(CHANNELS, [86400], stretches).with_pair(
        0, stretches.power(truth / 2, power.used), power
    )
    picture = energy_curves(spectra, scores, 0, [1])
    assert picture.name == "spectra-ke-15"
    assert picture.title == "Spectrum of the kinetic energy at 15 m"
    assert picture.caption.startswith("Kinetic energy of uo@15 and vo@15: half the sum")
    row = picture.table[2]
    assert (row["wavenumber"], row["model"]) == (3, pytest.approx(0.125))
    assert (row["truth"], row["ratio"]) == (pytest.approx(0.5), pytest.approx(0.25))
    assert "power ((m s-1)²)" in words_in(picture)


def test_a_map_without_the_season_tells_its_numbers(ocean: OceanScores) -> None:
    picture = season_maps(ocean, "thetao@15")
    made = ocean.maps(0)
    assert picture.png
    truth, model, error = picture.table
    assert truth["cells"] == sea()[0].sum()
    area = REGULAR.cell_area[sea()[0]]
    for row, name in ((truth, "truth"), (model, "model"), (error, "error")):
        values = made[name][sea()[0]]
        assert row["mean"] == pytest.approx(area @ values / area.sum())
        assert (row["least"], row["largest"]) == (values.min(), values.max())
    assert f"reaches from {error['least']:.3g} to {error['largest']:.3g} degC" in picture.alt
    with pytest.raises(ValueError, match="no map of thetao@50"):
        season_maps(ocean, "thetao@50")


# The whole way, without a flag


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a small ocean, with its forecast."""
    folder = tmp_path_factory.mktemp("ocean")
    grid: Grid = small_grid()
    wet = np.ones((len(CHANNELS), *grid.shape), bool)
    wet[:, :, :2] = False
    wet[2, :2] = False
    times = pentads(2002, 3)
    rng = np.random.default_rng(0)
    fields = rng.normal(10, 1, size=(len(times), len(CHANNELS), *grid.shape))
    store = write_truth(
        folder / "store", times, lambda i: fields[i], wet=wet, grid=grid,
        splits={"train": ["2002/2002"], "validation": ["2003"], "test": ["2004"]},
    )  # fmt: skip
    compute(store, np.arange(73)).save(store)
    common = (*SMALL, f"data.store={store.path}", "forecast.leads=3", "forecast.every=30")
    run("train", "demo", "--out", str(folder / "run"), settings=(*common, "train.steps=2"))
    run("forecast", str(folder / "run"))
    return folder / "run"


@pytest.fixture
def fresh(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_evaluate_writes_the_scores_by_depth_and_prints_them(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fresh / "forecast.zarr"
    assert main(["evaluate", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    scores = load_ocean(fresh / "forecast.ocean.nc")
    assert f"15 m RMSE {scores.rmse(overall=True)[0]:.3g} degC, R2" in text
    assert "Heat content 0-150 m: forecast - truth at the last lead" in text
    told = json.loads((fresh / "forecast.scores.json").read_text())["ocean"]
    assert told == json.loads(json.dumps(scores.told()))
    assert main(["evaluate", str(path)]) == 2
    assert main(["evaluate", str(path), "--force"]) == 0


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures without ink: what each one draws is tested above, and two dozen take their time."""
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 1, 1)

    def blank(self: Figure, out: Any, *, format: str, **_: Any) -> None:
        out.write('<svg viewBox="0 0 1 1"/>' if format == "svg" else header)

    monkeypatch.setattr(Figure, "savefig", blank)


def test_a_report_on_an_ocean_has_its_sections_and_pictures(fresh: Path, undrawn: None) -> None:
    result = report_run(fresh, channels=("thetao@15",))
    assert [name for name in result["sections"] if name in OCEAN] == OCEAN
    assert {
        "depth-thetao", "content-temperature", "content-salinity", "spectra-ke-15",
        "profile-thetao", "mean-thetao-15", "season-thetao-15", "season-zos", "range",
    } <= set(result["pictures"])  # fmt: skip
    text = words_of(fresh / "report.html")
    assert "Not shown" not in text
    assert "Weighted by cell area: exact areas on the sphere" in text
    assert "Spectrum of the kinetic energy at 15 m" in text
    assert re.search(r"its ocean holds [0-9.]+ ZJ (more|less) heat in 0-150 m than the truth", text)
    assert not re.search(r"\b(?:nan|NaN|None|inf)\b", text)
    # What was made is kept; what is missing of it is made again.
    scores, _ = scores_of(fresh / "forecast.zarr")
    assert ocean_of(fresh / "forecast.zarr", scores) is not None
    (fresh / "forecast.ocean.nc").unlink()
    scores, _ = scores_of(fresh / "forecast.zarr")
    assert (fresh / "forecast.ocean.nc").is_file()


def test_scores_by_depth_of_other_weights_are_refused_and_the_page_says_what_to_do(
    fresh: Path,
) -> None:
    path = fresh / "forecast.zarr"
    scores, _ = scores_of(path)
    made = load_ocean(fresh / "forecast.ocean.nc")
    other = replace(made, attributes={**made.attributes, "run_fingerprint": "other"})
    save_ocean(other, fresh / "forecast.ocean.nc", force=True)
    with pytest.raises(ValueError, match="run_fingerprint other there and"):
        ocean_of(path, scores)
    subject = Subject(run=RunFolder.read(fresh), forecast=Opened.read(path), scores=scores)
    ((anchor, _, make),) = ocean_sections(subject, lambda *_: Html(""))
    assert anchor == "depth"
    assert f"score it again: graticule evaluate {path} --force" in make()[0]


def test_a_forecast_of_no_ocean_has_none_of_its_sections(fresh: Path) -> None:
    opened = Opened.read(fresh / "forecast.zarr")
    winds = Channels([Channel(variable="u", units="m s-1", role="prognostic", level=850.0,
                              level_units="hPa")])  # fmt: skip
    subject = Subject(run=RunFolder.read(fresh), forecast=replace(opened, channels=winds))
    assert ocean_sections(subject, lambda *_: Html("")) == []
    assert ocean_sections(Subject(run=RunFolder.read(fresh)), lambda *_: Html("")) == []


def test_a_forecast_that_leaves_the_training_range_is_warned_of(fresh: Path) -> None:
    scores, _ = scores_of(fresh / "forecast.zarr")
    scores["ocean"]["channels"]["zos"] |= {
        "beyond_trained_range": 0.5, "truth_beyond_trained_range": 0.2,
    }  # fmt: skip
    found = warnings(Subject(run=RunFolder.read(fresh), scores=scores))
    (told,) = [text for text in found if "range of the training values" in text]
    assert told == (
        "The forecast leaves the range of the training values by more than 10% of it in 1 of 7"
        " channels, most in zos (by 50%)."
    )
    scores["ocean"]["channels"]["zos"]["truth_beyond_trained_range"] = 0.6
    found = warnings(Subject(run=RunFolder.read(fresh), scores=scores))
    assert not any("range of the training values" in text for text in found)
