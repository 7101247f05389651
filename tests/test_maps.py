"""Maps: every cell where it belongs, no seam, grey land, scales that mean something."""

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import imread

from graticule.data.store import Store
from graticule.data.times import TimeAxis
from graticule.data.writer import StoreWriter
from graticule.forecast.writer import ForecastWriter
from graticule.grid import Grid
from graticule.report import maps
from graticule.report.maps import LAND, forecast_maps
from graticule.report.mesh import Mesh
from small_store import DAY, small_grid, write_store
from small_store import field as wave

GREY = round(255 * float(LAND))
SPLITS = {"train": ["2003-02-21/2003-02-28"]}


def write_forecast(path: Path, store: Store, *, error: float = 0.5) -> Path:
    """From day 4 over 3 days: the truth plus `error` times the lead."""
    positions = [0, 1]
    dates = [store.times.date(4 + lead) for lead in range(4)]
    with ForecastWriter(
        path, channels=store.channels.subset(positions), grid=store.grid,
        init_times=dates[:1], valid_times=np.array([dates[1:]], dtype=object),
        nominal_step_seconds=DAY, regular=True,
        attributes={"run_fingerprint": "0123456789abcdef/step 7"},
    ) as writer:  # fmt: skip
        for lead in range(3):
            writer.write(0, lead, store.read(5 + lead, positions) + np.float32(error * (lead + 1)))
    return path


def small(path: Path, **given: Any) -> Store:
    return write_store(path, days=range(8), splits=SPLITS, **given)


def write_fields(path: Path, fields: np.ndarray, calendar: str = "standard") -> Store:
    """A store of two channels, `fields` (time, lat, lon) in the first, 8 days."""
    grid = small_grid(*fields.shape[1:])
    times = TimeAxis(12104 * DAY + DAY * np.arange(8), calendar, DAY)
    channels = small(path.with_name("channels")).channels.subset([0, 1])
    writer = StoreWriter(path, channels=channels, grid=grid, times=times, splits={})
    for step in range(8):
        plain = wave(1, step, grid)
        writer.write(step, np.stack([fields[step], plain]))
    return writer.finish()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def spy(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return figures


def panels(figure: Figure) -> list[Any]:
    return [axis for axis in figure.axes if axis.get_title(loc="left")]


def pixels(figure: Figure, axis: Any, png: bytes) -> np.ndarray:
    """(row, column, rgb) of the inside of an axis, top row first."""
    image = np.rint(imread(io.BytesIO(png))[..., :3] * 255).astype(int)
    scale = image.shape[1] / figure.bbox.width
    box = axis.get_window_extent()
    left, right, bottom, top = (scale * edge for edge in (box.x0, box.x1, box.y0, box.y1))
    height = image.shape[0]
    inside = slice(round(height - top) + 2, round(height - bottom) - 2)
    return image[inside, round(left) + 2 : round(right) - 2]


def is_colour(image: np.ndarray, level: int) -> np.ndarray:
    return (image == level).all(-1)


HALF = np.linspace(78.75, -78.75, 8)
GRIDS = {
    "from the meridian": Grid(HALF, np.arange(0, 360, 15.0)),
    "half a cell off": Grid(HALF, np.arange(7.5, 360, 15.0)),
    "from 20.5 to 379.5": Grid(HALF, np.arange(20.5, 380, 1.0)),
    "from 350 on": Grid(HALF, 350 + np.arange(0, 360, 15.0)),
    "odd width": Grid(HALF, 5 + np.arange(17) * 360 / 17),
    "rows at the poles": Grid(np.linspace(90, -90, 9), np.arange(0, 360, 24.0)),
    "a Gaussian grid": Grid(
        np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(8)[0][::-1])), np.arange(0, 360, 30.0)
    ),
    "a region": Grid(np.array([40.0, 38, 36]), np.array([10.0, 12, 14, 16, 18])),
    "a region across the meridian": Grid(np.array([40.0, 38]), np.array([355.0, 358, 361, 364])),
    "one row": Grid(np.array([10.0]), np.arange(0, 360, 30.0)),
    "one column": Grid(HALF, np.array([33.0])),
    "one cell": Grid(np.array([10.0]), np.array([33.0])),
}


@pytest.mark.parametrize("name", GRIDS)
def test_no_column_or_row_is_blank_on(name: str) -> None:
    mesh = Mesh.of(GRIDS[name], 400)
    values = np.arange(GRIDS[name].lat.size * GRIDS[name].lon.size).reshape(GRIDS[name].shape)
    figure = Figure(figsize=(3, 2), dpi=100)
    axis = figure.add_axes((0, 0, 1, 1))
    cmap = colormaps["viridis"].with_extremes(bad=LAND)
    maps._panel(axis, mesh, values.astype(float), cmap, Normalize(0, values.size))
    axis.set_axis_off()
    figure.set_facecolor("white")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = np.asarray(canvas.buffer_rgba())[..., :3]
    assert not is_colour(shown, 255).any(), "what lies behind the cells shows through"
    assert not is_colour(shown, GREY).any(), "sea looks like land"


def test_a_global_map_from_any_meridian_has_no_seam(tmp_path: Path, drawn: list[Figure]) -> None:
    store = small(tmp_path / "store", grid=GRIDS["from 20.5 to 379.5"])
    path = write_forecast(tmp_path / "f.zarr", store)
    picture = forecast_maps(path, store, channel="temperature", leads=(3,))
    assert len(panels(drawn[0])) == 3
    for axis in panels(drawn[0]):
        assert axis.get_xlim() == pytest.approx((20, 380))
        shown = pixels(drawn[0], axis, picture.png)
        assert shown.shape[0] > 150
        assert not (is_colour(shown, 255) | is_colour(shown, GREY)).any(), "a blank cell"
    drawn[0].canvas.draw()
    ticks = [label.get_text() for label in panels(drawn[0])[0].get_xticklabels()]
    assert {"90°E", "180°", "90°W", "0°"} <= set(ticks)


def test_cells_of_the_globe_meet_and_end_at_the_poles() -> None:
    for name, grid in GRIDS.items():
        mesh = Mesh.of(grid, 400)
        west, east, south, north = mesh.extent
        assert len(mesh.columns) == len(mesh.rows) == 1, name
        if grid.periodic:
            assert east - west == pytest.approx(360), name
        if grid.lat.size == 8 or "poles" in name:
            assert (north, south) == (90, -90), name
        for centres, edges in ((grid.lon, mesh.columns[0].edges), (-grid.lat, -mesh.rows[0].edges)):
            assert (np.diff(edges) > 0).all()
            assert (edges[:-1] < centres).all() or abs(centres[0]) == 90
            assert (edges[1:] > centres).all() or abs(centres[-1]) == 90
    assert Mesh.of(GRIDS["a region"], 400).extent == (9, 19, 35, 41)
    assert Mesh.of(GRIDS["one row"], 400).extent == (-15, 345, -5, 25)


def test_what_a_grid_leaves_out_stays_open_and_no_cell_is_stretched(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    grid = Grid(HALF, np.array([0.0, 15, 30, 45, 180, 195, 210, 225, 240]))
    mesh = Mesh.of(grid, 400)
    assert [(s.edges[0], s.edges[-1]) for s in mesh.columns] == [(-7.5, 52.5), (172.5, 247.5)]
    store = small(tmp_path / "store", grid=grid)
    path = write_forecast(tmp_path / "f.zarr", store)
    picture = forecast_maps(path, store, channel="temperature", leads=(1,))
    shown = pixels(drawn[0], panels(drawn[0])[0], picture.png)
    open_ = is_colour(shown, 255).all(0)
    width = shown.shape[1]
    gap = slice(round(width * 65 / 255), round(width * 175 / 255))
    assert open_[gap].all()
    assert not open_[: round(width * 55 / 255)].any()
    assert not open_[round(width * 185 / 255) :].any()


def test_one_missing_column_is_a_gap_even_on_a_circle() -> None:
    lon = np.delete(np.arange(0, 360, 15.0), 12)
    assert Grid(HALF, lon).periodic
    mesh = Mesh.of(Grid(HALF, lon), 400)
    assert [(s.edges[0], s.edges[-1]) for s in mesh.columns] == [(-7.5, 172.5), (187.5, 352.5)]


def test_every_value_lies_round_its_own_place(tmp_path: Path, drawn: list[Figure]) -> None:
    store = small(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    picture = forecast_maps(path, store, channel="salinity", leads=(2,))
    truth, forecast, difference = panels(drawn[0])
    expected = store.read(6, [1])[0]
    for axis, values in (
        (truth, expected),
        (forecast, expected + 1),
        (difference, 1 + 0 * expected),
    ):
        mesh = axis.collections[0]
        np.testing.assert_allclose(mesh.get_array().reshape(8, 16), values, atol=1e-5)
        corners = mesh.get_coordinates()
        centres = (corners[1:, 1:] + corners[:-1, :-1]) / 2
        np.testing.assert_allclose(centres[0, :, 0], store.grid.lon)
        np.testing.assert_allclose(centres[:, 0, 1], store.grid.lat)
    titles = [axis.get_title(loc="left") for axis in (truth, forecast, difference)]
    assert titles == [
        f"{kind}\n2003-02-27 00:00" for kind in ("truth", "forecast, lead 2 d", "forecast - truth")
    ]
    corner = "salinity from 2003-02-25 00:00, grid 8 x 16, weights 01234567, step 7"
    assert corner in [text.get_text() for text in drawn[0].texts]
    assert picture.name == "maps-salinity"
    for part in ("salinity (1)", "lead 2 d", "valid 2003-02-27 00:00", "8 x 16", "step 7"):
        assert part in picture.caption
    assert "land" not in picture.caption.lower()
    (row,) = picture.table
    assert row["valid_time"] == "2003-02-27 00:00"
    assert (row["lead"], row["lead_hours"], row["cells"]) == (2, 48.0, 128)
    assert row["RMSE of this start, area-weighted"] == pytest.approx(1, abs=1e-5)
    assert row["bias of this start, area-weighted"] == pytest.approx(1, abs=1e-5)
    assert row["truth_max"] == pytest.approx(float(expected.max()))
    assert "they differ by 1 (RMSE of this start, area-weighted), at most by 1." in picture.alt
    assert f"{expected.max():.3g} 1 and the forecast from" in picture.alt


def test_truth_and_forecast_share_a_scale_and_differences_are_centred(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    store = small(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store, error=-2.0)
    forecast_maps(path, store, channel="temperature", leads=(1, 3))
    limits = [axis.collections[0].get_clim() for axis in panels(drawn[0])]
    assert limits[0] == limits[1] == limits[3] == limits[4]
    truth = np.concatenate([store.read(day, [0]).ravel() for day in (5, 7)])
    assert limits[0] == pytest.approx(np.percentile(truth, [0.1, 99.9]), rel=1e-5)
    assert limits[2] == limits[5] == pytest.approx((-6, 6), abs=1e-5)
    bars = [axis for axis in drawn[0].axes if axis not in panels(drawn[0])]
    assert [bar.get_xlabel() for bar in bars] == ["temperature (1)", "difference (1)"]
    # The forecast lies below the truth's range; the differences within their own.
    assert [bar._colorbar.extend for bar in bars] == ["both", "neither"]  # type: ignore[attr-defined]


def test_winds_have_a_scale_centred_on_zero_and_temperatures_have_not(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    whole = np.stack([wave(0, day, small_grid()) for day in range(8)])
    # Winds; temperatures in kelvin; temperatures of the sea, a little below 0 somewhere.
    for i, (fields, colours) in enumerate(
        ((whole - 10, "BrBG"), (whole + 280, "viridis"), (whole - whole.min() - 2, "viridis"))
    ):
        store = write_fields(tmp_path / f"store{i}" / "s", fields)
        path = write_forecast(tmp_path / f"f{i}.zarr", store)
        forecast_maps(path, store, channel="temperature", leads=(1,))
        mesh = panels(drawn[-1])[0].collections[0]
        assert mesh.get_cmap().name == colours
        low, high = mesh.get_clim()
        assert (low == -high) == (colours == "BrBG")


def test_land_is_grey_and_no_value_has_its_colour(tmp_path: Path, drawn: list[Figure]) -> None:
    store = small(tmp_path / "store", land=True)
    path = write_forecast(tmp_path / "f.zarr", store)
    picture = forecast_maps(path, store, channel="temperature", leads=(1,))
    assert "Land is grey." in picture.caption
    for axis in panels(drawn[0]):
        grey = is_colour(pixels(drawn[0], axis, picture.png), GREY)
        # Land is rows 0 and 1 of 8 and columns 0 to 3 of 16.
        height, width = grey.shape
        assert grey[: height // 4 - 3, : width // 4 - 4].all()
        assert not grey[height // 4 + 3 :].any()
        assert not grey[:, width // 4 + 4 :].any()
    for name in (maps._UNSIGNED, maps._SIGNED, maps._DIFFERENCE):
        colours = colormaps[name](np.linspace(0, 1, 256))[:, :3]
        assert np.abs(colours - float(LAND)).max(1).min() > 0.1, name


def test_constant_fields_and_perfect_forecasts_have_a_scale(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    for i, value in enumerate((0.0, 3.5)):
        store = write_fields(tmp_path / f"{i}" / "s", np.full((8, 8, 16), value))
        path = write_forecast(tmp_path / f"{i}.zarr", store, error=0.0)
        picture = forecast_maps(path, store, channel="temperature", leads=(2,))
        field, _, difference = (axis.collections[0] for axis in panels(drawn[-1])[:3])
        low, high = field.get_clim()
        assert low < value < high
        assert difference.get_clim() == (-1, 1)
        assert picture.table[0]["RMSE of this start, area-weighted"] == 0


def test_a_time_without_any_truth_is_drawn_as_land_and_said(tmp_path: Path) -> None:
    fields = np.stack([wave(0, day, small_grid()) for day in range(8)])
    fields[6] = np.nan
    store = write_fields(tmp_path / "a" / "s", fields)
    path = write_forecast(tmp_path / "f.zarr", store)
    picture = forecast_maps(path, store, channel="temperature", leads=(2,))
    assert "At 2 d no cell has both." in picture.alt
    assert picture.table[0]["cells"] == 0
    assert picture.table[0]["RMSE of this start, area-weighted"] is None
    assert forecast_maps(path, store, channel="temperature", leads=(1,)).table[0]["cells"] == 128


def test_dates_of_a_360_day_calendar_are_shown(tmp_path: Path, drawn: list[Figure]) -> None:
    fields = np.stack([wave(0, day, small_grid()) for day in range(8)])
    store = write_fields(tmp_path / "a" / "s", fields, calendar="360_day")
    path = write_forecast(tmp_path / "f.zarr", store)
    picture = forecast_maps(path, store, channel="temperature", leads=(1,))
    date = f"{store.times.date(5):%Y-%m-%d %H:%M}"
    assert date in panels(drawn[0])[0].get_title(loc="left")
    assert "360_day calendar" in picture.caption


def test_a_block_is_the_mean_of_its_sea_and_land_where_it_is_mostly_land() -> None:
    grid = Grid(np.linspace(80, -80, 5), np.arange(6) * 10.0)
    mesh = Mesh.of(grid, 3)
    assert mesh.blocks == (2, 2)
    field = np.arange(30.0).reshape(5, 6)
    field[0, 0] = field[1, 1] = np.nan  # half of a block
    field[0, 2] = field[1, 2] = field[1, 3] = np.nan  # most of one
    field[4, 4] = np.nan  # half of an incomplete one
    mean = mesh.mean(field)
    nan = np.nan
    np.testing.assert_array_equal(
        mean, [[(1 + 6) / 2, nan, 7.5], [15.5, 17.5, 19.5], [24.5, 26.5, 29]]
    )
    ((x, y, part),) = mesh.parts(mean)
    assert x.tolist() == [-5, 15, 35, 55]
    assert y.tolist() == [90, 20, -60, -90]
    assert part.shape == (3, 3)


def test_blocks_do_not_reach_over_a_gap() -> None:
    lon = np.array([0.0, 1, 2, 10, 11, 12, 13])
    mesh = Mesh.of(Grid(np.array([1.0, 0]), lon), 4)
    field = np.tile(np.arange(7.0), (2, 1))
    parts = list(mesh.parts(mesh.mean(field)))
    assert [part[0].tolist() for _, _, part in parts] == [[0.5, 2], [3.5, 5.5]]
    assert [x.tolist() for x, _, _ in parts] == [[-0.5, 1.5, 2.5], [9.5, 11.5, 13.5]]


def test_a_twelfth_of_a_degree_is_drawn_in_seconds(tmp_path: Path, drawn: list[Figure]) -> None:
    """A ninth of GLORYS12's cells here: its own grid takes nine times as long, some seconds."""
    grid = Grid(90 - np.arange(681) / 4, 1 / 8 + np.arange(1440) / 4)
    mesh = Mesh.of(grid, maps.PIXELS)
    field = np.sin(np.deg2rad(grid.lat))[:, None] * np.cos(np.deg2rad(grid.lon))[None, :]
    field[:, 700:720] = np.nan
    began = time.perf_counter()
    small_field = mesh.mean(field)
    assert time.perf_counter() - began < 3
    assert small_field.shape == (341, 360)
    assert max(small_field.shape) <= maps.PIXELS
    assert np.isnan(small_field[:, 175:180]).all()
    assert np.isfinite(small_field[:, :175]).all()
    # Where nothing is missing the mean of the blocks is the mean of the cells.
    assert small_field[:340, :175].mean() == pytest.approx(field[:680, :700].mean())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"channel": "salt"}, "no channel salt; there are temperature"),
        ({"channel": "wind"}, "no channel wind; there are temperature, salinity"),
        ({"leads": (4,)}, "has leads 1 to 3"),
        ({"leads": ()}, "has leads 1 to 3"),
        ({"init": 1}, "has initial times 0 to 0"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    store = small(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    with pytest.raises(ValueError, match=message):
        forecast_maps(path, store, **{"channel": "temperature", "leads": (1,), **given})


def test_truth_of_another_time_or_grid_is_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    splits = {"train": ["2003-02-21/2003-02-25"]}
    short = write_store(tmp_path / "short", days=range(6), splits=splits)
    with pytest.raises(ValueError, match="has no truth for 2003-02-27"):
        forecast_maps(path, short, channel="temperature", leads=(1, 2))
    other = small(tmp_path / "other", grid=small_grid(8, 32))
    with pytest.raises(ValueError, match="different grids"):
        forecast_maps(path, other, channel="temperature", leads=(1,))


def test_a_map_is_saved_with_its_data_beside_it(tmp_path: Path) -> None:
    store = small(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    picture = forecast_maps(path, store, channel="temperature", leads=(1, 2))
    saved = picture.save(tmp_path / "pictures")
    assert saved == tmp_path / "pictures" / "maps-temperature.png"
    assert saved.read_bytes() == picture.png
    lines = saved.with_suffix(".csv").read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("lead,lead_hours,valid_time,cells,truth_min")
    assert lines[2].startswith("2,48.0,2003-02-27 00:00,128,")
    image = imread(io.BytesIO(picture.png))
    assert 1000 < image.shape[1] < 1600
    again = forecast_maps(path, store, channel="temperature", leads=(1, 2))
    assert again.png == picture.png, "the same bytes each time"
