"""Maps: every cell where it belongs, no seam, grey land, scales that mean something."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from graticule.data.store import Store
from graticule.forecast.writer import ForecastWriter
from graticule.grid import Grid
from graticule.report.maps import LAND, forecast_maps
from small_store import DAY, small_grid, write_store


def write_forecast(
    path: Path, store: Store, *, error: float = 0.5, grid: Grid | None = None
) -> Path:
    """From day 4 over 3 days: the truth plus `error` times the lead."""
    positions = [0, 1]
    dates = [store.times.date(4 + lead) for lead in range(4)]
    with ForecastWriter(
        path, channels=store.channels.subset(positions), grid=store.grid,
        init_times=dates[:1], valid_times=np.array([dates[1:]], dtype=object),
        nominal_step_seconds=DAY, regular=True, attributes={"run_fingerprint": "abc/step 7"},
    ) as writer:  # fmt: skip
        for lead in range(3):
            writer.write(0, lead, store.read(5 + lead, positions) + np.float32(error * (lead + 1)))
    return path


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


def pixels(figure: Figure, axis: Any) -> np.ndarray:
    """(row, column, rgb) of the inside of an axis, top row first."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    box = axis.get_window_extent()
    top = image.shape[0] - box.y1
    inside = slice(round(top) + 2, round(top + box.height) - 2)
    return image[inside, round(box.x0) + 2 : round(box.x1) - 2]


def test_a_global_map_has_no_seam_and_covers_all_longitudes(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    store = write_store(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    out = forecast_maps(path, store, tmp_path / "f.png", channel="temperature", leads=(3,))
    assert out.read_bytes()[:4] == b"\x89PNG"
    (figure,) = drawn
    axes = [axis for axis in figure.axes if axis.get_title()]
    assert len(axes) == 3
    for axis in axes:
        corners = axis.collections[0].get_coordinates()  # type: ignore[attr-defined]
        assert np.ptp(corners[0, :, 0]) == pytest.approx(360)
        assert corners[[0, -1], 0, 1].tolist() == [90, -90]
        grey = (pixels(figure, axis) == round(255 * float(LAND))).all(-1)
        assert not grey.all(0).any(), "a blank column"
        assert not grey.all(1).any(), "a blank row"


def test_every_value_lies_round_its_own_place(tmp_path: Path, drawn: list[Figure]) -> None:
    store = write_store(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    forecast_maps(path, store, tmp_path / "f.png", channel="salinity", leads=(2,))
    truth, forecast, difference = (a for a in drawn[0].axes if a.get_title())
    expected = store.read(6, [1])[0]
    for axis, values in (
        (truth, expected),
        (forecast, expected + 1),
        (difference, 1 + 0 * expected),
    ):
        mesh = axis.collections[0]
        np.testing.assert_allclose(mesh.get_array().reshape(8, 16), values, atol=1e-5)
        corners = mesh.get_coordinates()  # type: ignore[attr-defined]
        centres = (corners[1:, 1:] + corners[:-1, :-1]) / 2
        np.testing.assert_allclose(centres[0, :, 0], store.grid.lon)
        np.testing.assert_allclose(centres[:, 0, 1], store.grid.lat)
    assert truth.get_title() == "truth, 2003-02-27 00:00"
    assert forecast.get_title() == "forecast, lead 48 h"
    assert "abc/step 7" in drawn[0].get_suptitle()
    assert "salinity from 2003-02-25 00:00   grid 8 x 16" in drawn[0].get_suptitle()


def test_truth_and_forecast_share_a_scale_and_differences_are_centred(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    store = write_store(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store, error=-2.0)
    forecast_maps(path, store, tmp_path / "f.png", channel="temperature", leads=(1, 3))
    limits = [axis.collections[0].get_clim() for axis in drawn[0].axes if axis.get_title()]
    assert limits[0] == limits[1] == limits[3] == limits[4]
    fields = [store.read(day, [0]) for day in (5, 7)]
    low, high = min(fields[0].min() - 2, fields[1].min() - 6), max(f.max() for f in fields)
    assert limits[0] == pytest.approx((low, high))
    assert limits[2] == limits[5] == pytest.approx((-6, 6), abs=1e-5)
    labels = [axis.get_ylabel() for axis in drawn[0].axes]
    assert "temperature (1)" in labels
    assert "difference (1)" in labels


def test_land_is_grey_and_not_the_colour_of_a_value(tmp_path: Path, drawn: list[Figure]) -> None:
    store = write_store(tmp_path / "store", land=True)
    path = write_forecast(tmp_path / "f.zarr", store)
    forecast_maps(path, store, tmp_path / "f.png", channel="temperature", leads=(1,))
    for axis in drawn[0].axes[:3]:
        shown = pixels(drawn[0], axis)
        grey = (shown == round(255 * float(LAND))).all(-1)
        # Land is rows 0 and 1 of 8 and columns 0 to 3 of 16.
        height, width = grey.shape
        assert grey[: height // 4 - 3, 4 : width // 4 - 4].all()
        assert not grey[height // 4 + 3 :].any()
        assert not grey[:, width // 4 + 4 : -4].any()


def test_a_region_is_drawn_to_its_own_edges_and_equal_fields_have_a_scale(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    grid = Grid(np.array([40.0, 38.0, 36.0, 34.0]), np.array([10.0, 12.0, 14.0, 16.0, 18.0]))
    store = write_store(tmp_path / "store", grid=grid)
    path = write_forecast(tmp_path / "f.zarr", store, error=0.0)
    forecast_maps(path, store, tmp_path / "f.png", channel="temperature", leads=(1,))
    corners = drawn[0].axes[0].collections[0].get_coordinates()  # type: ignore[attr-defined]
    assert corners[0, :, 0].tolist() == [9, 11, 13, 15, 17, 19]
    assert corners[:, 0, 1].tolist() == [41, 39, 37, 35, 33]


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
    store = write_store(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    with pytest.raises(ValueError, match=message):
        forecast_maps(
            path, store, tmp_path / "f.png", **{"channel": "temperature", "leads": (1,), **given}
        )
    assert not (tmp_path / "f.png").exists()


def test_truth_of_another_time_or_grid_is_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    path = write_forecast(tmp_path / "f.zarr", store)
    splits = {"train": ["2003-02-21/2003-02-25"]}
    short = write_store(tmp_path / "short", days=range(6), splits=splits)
    with pytest.raises(ValueError, match="has no truth for 2003-02-27"):
        forecast_maps(path, short, tmp_path / "f.png", channel="temperature", leads=(1, 2))
    other = write_store(tmp_path / "other", grid=small_grid(8, 32))
    with pytest.raises(ValueError, match="different grids"):
        forecast_maps(path, other, tmp_path / "f.png", channel="temperature", leads=(1,))
