"""The grid: cell areas that cover the sphere, periodicity, and regions across any origin."""

import numpy as np
import pytest

from graticule.grid import EARTH_RADIUS_M, Grid

SPHERE = 4 * np.pi * EARTH_RADIUS_M**2


def columns(num: int) -> np.ndarray:
    return np.arange(num) * 360 / num


def gaussian(rows: int) -> np.ndarray:
    return np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(rows)[0]))[::-1]


def cell_centres(rows: int) -> np.ndarray:
    half = 90 / rows
    return np.linspace(90 - half, half - 90, rows)


GLOBAL_ROWS = {
    "pole rows": np.linspace(90, -90, 19),
    "two pole rows alone": np.array([90.0, -90.0]),
    "cell centres": cell_centres(18),
    "gaussian 8": gaussian(8),
    "gaussian 64": gaussian(64),
    "gaussian 320": gaussian(320),
    "north pole row, no south pole row but cell centres there": np.array([90, 60, 30, 0, -30, -75]),
}


@pytest.mark.parametrize("lat", GLOBAL_ROWS.values(), ids=GLOBAL_ROWS.keys())
@pytest.mark.parametrize("lon", [columns(24), columns(2), np.array([0, 40, 130, 190, 250, 301.0])])
def test_areas_of_a_global_grid_add_up_to_the_sphere(lat: np.ndarray, lon: np.ndarray) -> None:
    grid = Grid(lat, lon)
    assert grid.periodic
    assert grid.cell_area.shape == grid.shape
    assert (grid.cell_area > 0).all()
    assert grid.cell_area.sum() == pytest.approx(SPHERE, rel=1e-12)


def test_a_pole_row_has_the_area_of_its_cap() -> None:
    grid = Grid(np.linspace(90, -90, 181), columns(360))
    cap = 2 * np.pi * EARTH_RADIUS_M**2 * (1 - np.cos(np.deg2rad(0.5)))
    assert grid.cell_area[0].sum() == pytest.approx(cap, rel=1e-9)
    assert grid.cell_area[-1].sum() == pytest.approx(cap, rel=1e-9)


def test_gaussian_areas_are_close_to_the_gaussian_weights() -> None:
    lat = gaussian(64)
    weights = np.polynomial.legendre.leggauss(64)[1][::-1] / 2
    share = Grid(lat, columns(128)).cell_area.sum(1) / SPHERE
    # Half-way edges are not the Gaussian edges. With the zeros j of J0 the polar row is
    # ((j1 + j2) / 2)^2 J1(j1)^2 / 4 = 1.058 of its weight.
    assert share[0] / weights[0] == pytest.approx(1.058, abs=1e-3)
    assert share[-1] / weights[-1] == pytest.approx(1.058, abs=1e-3)
    np.testing.assert_allclose(share[1:-1], weights[1:-1], rtol=2e-3)
    np.testing.assert_allclose(share[8:-8], weights[8:-8], rtol=1e-3)


def test_area_is_exact_for_one_cell_of_known_edges() -> None:
    grid = Grid(np.array([15.0, 5.0]), np.array([10.0, 20.0]))
    north = EARTH_RADIUS_M**2 * np.deg2rad(10) * (np.sin(np.deg2rad(20)) - np.sin(np.deg2rad(10)))
    assert grid.cell_area[0] == pytest.approx([north, north], rel=1e-14)


def test_a_regional_grid_near_a_pole_ends_half_a_row_outside_its_last_centre() -> None:
    # A row at 90 would still fit, so the cap is not this row's.
    grid = Grid(np.array([80.0, 70.0, 60.0]), columns(36))
    share = (np.sin(np.deg2rad(85)) - np.sin(np.deg2rad(55))) / 2
    assert grid.cell_area.sum() == pytest.approx(SPHERE * share, rel=1e-12)
    # Coordinates rounded to float32 decide nothing.
    lat = (90 - np.arange(1, 40) / 12).astype(np.float32)
    share = (np.sin(np.deg2rad(90 - 1 / 24)) - np.sin(np.deg2rad(90 - 39.5 / 12))) / 2
    assert Grid(lat, columns(36)).cell_area.sum() == pytest.approx(SPHERE * share, rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1)])
def test_one_row_or_column_has_no_area_and_says_so(shape: tuple[int, int]) -> None:
    grid = Grid(cell_centres(8)[: shape[0]], columns(8)[: shape[1]])
    assert grid.shape == shape
    with pytest.raises(ValueError, match="one row or column alone has no cell area"):
        _ = grid.cell_area


def test_periodic_means_that_the_columns_close() -> None:
    rows = cell_centres(4)
    assert Grid(rows, columns(24)).periodic
    assert Grid(rows, columns(24).astype(np.float32) + np.float32(0.1)).periodic
    assert Grid(rows, 180 + columns(360)).periodic
    assert not Grid(rows, columns(24)[:-1]).periodic
    assert not Grid(rows, np.array([0.0, 10.0, 20.0])).periodic
    assert not Grid(rows, np.array([0.0])).periodic


@pytest.mark.parametrize(
    ("lat", "lon", "message"),
    [
        ([0.0, 10.0], [0.0, 1.0], "lat must run from north to south without repeats"),
        ([10.0, 10.0], [0.0, 1.0], "lat must run from north to south without repeats"),
        ([90.5, 0.0], [0.0, 1.0], r"lat reaches 90\.5, beyond a pole"),
        ([0.0, -91.0], [0.0, 1.0], r"lat reaches -91\.0, beyond a pole"),
        ([1.0, 0.0], [1.0, 0.0], r"lon must ascend from a first value in \[0, 360\)"),
        ([1.0, 0.0], [-180.0, 0.0], r"lon must ascend from a first value in \[0, 360\)"),
        ([1.0, 0.0], [360.0, 361.0], r"lon must ascend from a first value in \[0, 360\)"),
        ([1.0, 0.0], [0.0, 180.0, 360.0],
         r"lon runs from 0\.0 to 360\.0: more than once round .*; drop the repeated columns"),
        ([np.nan, 0.0], [0.0, 1.0], "lat must be a vector of finite degrees"),
        ([1.0, 0.0], [0.0, np.inf], "lon must be a vector of finite degrees"),
        ([[1.0], [0.0]], [0.0], "lat must be a vector of finite degrees"),
        ([], [0.0], "lat must be a vector of finite degrees"),
    ],
)  # fmt: skip
def test_a_grid_that_is_none_is_refused(lat: list, lon: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(np.array(lat), np.array(lon))


def test_a_grid_cannot_be_changed_and_does_not_follow_its_source() -> None:
    lat = np.array([10.0, 0.0])
    grid = Grid(lat, columns(4))
    lat[0] = 50
    assert grid.lat[0] == 10
    with pytest.raises(ValueError, match="read-only"):
        grid.lat[0] = 50


def test_a_box_is_the_same_whatever_the_origin_of_longitude() -> None:
    # lon -300..45, step 15, and the same meridians counted from 0 and from 60.
    rows = cell_centres(17)
    kept = []
    for lon in (np.sort((np.arange(-300, 60, 15) + 360.0) % 360), np.arange(60, 420, 15.0)):
        inside = Grid(rows, lon).region(100, 140, -90, 90)
        assert inside.any(0).sum() == 3
        kept.append((lon[inside.any(0)] % 360).tolist())
    assert kept == [[105, 120, 135]] * 2


@pytest.mark.parametrize(("west", "east"), [(170, -170), (170, 190), (-190, -170), (530, 190)])
@pytest.mark.parametrize("first", [0, 180])
def test_a_box_over_the_dateline_has_21_columns(west: float, east: float, first: float) -> None:
    grid = Grid(cell_centres(6), first + np.arange(360.0))
    inside = grid.region(west, east, -90, 90)
    assert inside.any(0).sum() == 21
    assert sorted(grid.lon[inside.any(0)] % 360) == list(range(170, 191))


def test_a_box_over_the_origin_of_longitude() -> None:
    grid = Grid(cell_centres(6), np.arange(0, 360, 10.0))
    for west, east in [(350, 10), (-10, 10), (350, 370)]:
        inside = grid.region(west, east, -90, 90)
        assert grid.lon[inside.any(0)].tolist() == [0, 10, 350]


@pytest.mark.parametrize(("west", "east"), [(0, 360), (-180, 180), (20, 380), (0, 720), (5, 365)])
def test_the_whole_globe_is_every_column(west: float, east: float) -> None:
    assert Grid(cell_centres(6), columns(24)).region(west, east, -90, 90).all()


@pytest.mark.parametrize("meridian", [0, 30, 180, 359, -180, 0.1 + 0.2])
def test_a_box_without_width_is_one_meridian_at_most(meridian: float) -> None:
    grid = Grid(cell_centres(6), np.sort([0, 30, 180, 359, 0.3, 90.0]))
    for east in (meridian, np.nextafter(meridian, -1000), np.nextafter(meridian, 1000)):
        assert grid.region(meridian, east, -90, 90).any(0).sum() == 1


def test_edges_of_the_box_are_inside_even_after_rounding() -> None:
    grid = Grid(np.arange(0.3, -0.35, -0.1), np.arange(0.0, 1.05, 0.1))
    inside = grid.region(0.1, 0.3, -0.1, 0.2)
    assert inside.any(0).sum() == 3
    assert inside.any(1).sum() == 4


def test_a_box_without_a_grid_point_is_an_error_with_its_numbers() -> None:
    grid = Grid(np.array([10.0, 0.0, -10.0]), np.array([100.0, 110.0, 120.0]))
    message = (r"region west=101 east=109 south=-5 north=5 holds no grid point"
               r" \(lat -10\.0 to 10\.0, lon 100\.0 to 120\.0\)")  # fmt: skip
    with pytest.raises(ValueError, match=message):
        grid.region(101, 109, -5, 5)
    with pytest.raises(ValueError, match="holds no grid point"):
        grid.region(100, 110, 20, 30)
    with pytest.raises(ValueError, match="holds no grid point"):
        grid.region(float("nan"), 110, -5, 5)
    with pytest.raises(ValueError, match="south=5 is north of north=-5"):
        grid.region(100, 110, 5, -5)


def test_the_same_points_in_float32_are_the_same_grid_and_a_shift_is_not() -> None:
    grid = Grid(-80 + np.arange(12)[::-1] / 12, columns(24))
    rounded = Grid(grid.lat.astype(np.float32), grid.lon.astype(np.float32))
    assert grid.same_as(rounded)
    assert not grid.same_as(Grid(grid.lat + 0.01, grid.lon))
    assert not grid.same_as(Grid(grid.lat, grid.lon + 0.01))
    assert not grid.same_as(Grid(grid.lat[1:], grid.lon))
