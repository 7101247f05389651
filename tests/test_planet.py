"""The demo planet: its equations against exact solutions, its runs, its coast."""

from importlib import resources

import numpy as np
import pytest

from graticule.data import planet as planet_module
from graticule.data.planet import (
    VARIABLES,
    Planet,
    coast_mask,
    grid,
    largest_stable_dt,
    load_topography,
    simulate,
)
from graticule.data.sphere import GRAVITY, MEAN_HEIGHT, RADIUS, ROTATION, Sphere

SMALL = {"num_lat": 24, "num_lon": 48, "num_runs": 3, "samples_per_run": 12, "dt_seconds": 720.0}


@pytest.fixture(scope="module")
def small() -> Planet:
    return Planet(**SMALL)


@pytest.fixture(scope="module")
def runs(small: Planet) -> np.ndarray:
    """(run, time, channel, lat, lon)"""
    return np.stack([simulate(small, run) for run in range(small.num_runs)])


@pytest.fixture
def sphere() -> Sphere:
    return Sphere(24, 48, 16)


def area_of(planet: Planet) -> np.ndarray:
    """Fraction of the sphere in each cell of a row, (lat, 1), without the planet's own code."""
    _, weight = np.polynomial.legendre.leggauss(planet.num_lat)
    return weight[:, None] / (2 * planet.num_lon)


def rms(field: np.ndarray, planet: Planet) -> np.ndarray:
    """Area-weighted root mean square of (..., channel, lat, lon) over all but the channels."""
    square = (field.astype(float) ** 2 * area_of(planet)).sum(axis=(-2, -1))
    return np.sqrt(square.reshape(-1, len(VARIABLES)).mean(axis=0))


def spread_of(runs: np.ndarray, planet: Planet) -> np.ndarray:
    """Area-weighted standard deviation of each channel over runs and times."""
    mean = (runs.astype(float) * area_of(planet)).sum(axis=(-2, -1)).mean(axis=(0, 1))
    return rms(runs - mean[:, None, None], planet)


def difference(ours: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(ours - exact).max() / np.abs(exact).max())


def zeros(sphere: Sphere) -> np.ndarray:
    return np.zeros((3, sphere.num_degrees, sphere.num_degrees), np.complex64)


# The grid and the channels


def test_the_grid_runs_north_to_south_and_eastwards_from_zero_without_pole_rows():
    lat, lon = grid(Planet())
    assert lat.shape == (48,)
    assert lon.shape == (96,)
    assert lat.dtype == lon.dtype == np.float64
    assert (np.diff(lat) < 0).all()
    assert 85 < lat[0] < 90
    np.testing.assert_allclose(lat, -lat[::-1], atol=1e-12)
    np.testing.assert_allclose(lon, np.arange(96) * 3.75)


def test_a_run_is_float32_with_one_channel_for_each_variable(runs, small):
    assert [name for name, _, _ in VARIABLES] == ["u", "v", "h"]
    assert runs.dtype == np.float32
    assert runs.shape[1:] == (small.samples_per_run, 3, small.num_lat, small.num_lon)


# The equations, against exact solutions


def test_synthesis_undoes_analysis_up_to_the_truncation(sphere):
    identity = sphere.analysis @ sphere.synthesis  # (order, degree, degree)
    expected = np.zeros_like(identity)
    for order in range(sphere.num_degrees):
        for degree in range(order, sphere.num_degrees):
            expected[order, degree, degree] = 1
    np.testing.assert_allclose(identity, expected, atol=1e-6)


def test_solid_rotation_has_the_exact_vorticity_and_balanced_height(sphere, small):
    lat = np.radians(grid(small)[0])
    speed = 40.0
    state = sphere.balanced(sphere.vorticity_of_zonal_wind(speed * np.cos(lat)))
    geopotential, vorticity, u, v = sphere.to_grid(state)
    assert difference(u[:, 0], speed * np.cos(lat)) < 1e-5
    assert np.abs(v).max() < 1e-4
    assert difference(vorticity[:, 0], 2 * speed / RADIUS * np.sin(lat)) < 1e-5
    height = -(RADIUS * ROTATION * speed + speed**2 / 2) * (np.sin(lat) ** 2 - 1 / 3)
    assert difference(geopotential[:, 0], height) < 1e-5


def test_a_balanced_zonal_jet_does_not_move(sphere, small):
    lat = grid(small)[0]
    jet = 50 * np.exp(-(((lat - 45) / 12) ** 2))
    zonal = sphere.balanced(sphere.vorticity_of_zonal_wind(jet))
    d_geopotential, d_vorticity, d_divergence = np.abs(sphere.tendency(zonal)).max(axis=(1, 2))
    # A day of these tendencies would change 1e-5 of the state.
    assert d_geopotential * 86400 < 1e-5 * np.abs(zonal[0]).max()
    assert d_vorticity * 86400 < 1e-5 * np.abs(zonal[1]).max()
    # Divergence balances terms that each would make the vorticity of the jet in hours.
    assert d_divergence * 3600 < 1e-4 * np.abs(zonal[1]).max()


def test_a_rossby_wave_drifts_westwards_at_its_exact_speed(sphere):
    order, degree = 4, 7
    state = zeros(sphere)
    state[1, order, degree] = 2e-5 + 1e-5j
    tendency = sphere.tendency(state)[1]
    # One harmonic does not advect itself, so d vorticity/dt = -2 rotation / a^2 d stream/d lon.
    stream = -state[1] * RADIUS**2 / (degree * (degree + 1))
    exact = -2 * ROTATION / RADIUS**2 * 1j * order * stream
    assert difference(tendency, exact) < 1e-5


def test_gravity_waves_exchange_height_and_divergence_at_the_exact_rates(sphere):
    order, degree = 3, 9
    height = zeros(sphere)
    height[0, order, degree] = 100 - 50j
    exact = height[0] * degree * (degree + 1) / RADIUS**2
    assert difference(sphere.tendency(height)[2], exact) < 1e-5
    diverging = zeros(sphere)
    diverging[2, order, degree] = 1e-6 + 2e-6j
    exact = -GRAVITY * MEAN_HEIGHT * diverging[2]
    assert difference(sphere.tendency(diverging)[0], exact) < 1e-5


def test_divergence_and_height_are_coupled_by_the_transport_of_mass(sphere):
    """d h/dt = -div(h wind), with the divergence taken by finite differences in longitude."""
    state = zeros(sphere)
    state[0, 2, 5] = 3000 + 1000j
    state[1, 0, 3] = 2e-5  # zonal wind, no divergence
    geopotential, _, u, _ = sphere.to_grid(state)
    tendency = zeros(sphere)
    tendency[0] = sphere.tendency(state)[0]
    ours = sphere.to_grid(tendency)[0]
    lat = np.arcsin(np.polynomial.legendre.leggauss(24)[0][::-1])[:, None]
    # Order 2 only: a centred difference is short by the exact factor sin(2 d) / (2 d).
    step = 2 * np.pi / 48
    slope = (np.roll(geopotential, -1, 1) - np.roll(geopotential, 1, 1)) / (2 * step)
    slope *= 2 * step / np.sin(2 * step)
    assert difference(ours, -u * slope / (RADIUS * np.cos(lat))) < 1e-4


# Runs


def test_a_run_does_not_depend_on_the_other_runs_or_on_how_long_it_is(runs):
    alone = simulate(Planet(**SMALL | {"num_runs": 2, "samples_per_run": 5}), 1)
    np.testing.assert_array_equal(alone, runs[1, :5])


def test_runs_and_seeds_differ(runs, small):
    other_seed = simulate(Planet(**SMALL | {"seed": 1, "samples_per_run": 1}), 0)
    pairs = [(runs[0, 0], runs[1, 0]), (runs[0, 0], runs[2, 0]), (runs[1, 0], runs[2, 0])]
    for one, two in [*pairs, (runs[0, 0], other_seed[0])]:
        assert (rms(one - two, small) > 0.5 * spread_of(runs, small)).all()


def test_half_the_step_halves_the_error_at_least(small):
    """Against a step of 90 s after two days; second-order steps would be off by 1 to 2 %."""
    two_days = SMALL | {"spin_up_days": 2, "samples_per_run": 1}
    coarse, half, fine = (
        simulate(Planet(**two_days | {"dt_seconds": seconds}), 0) for seconds in (720, 360, 90)
    )
    spread = spread_of(fine[None], small)
    coarse_error, half_error = rms(coarse - fine, small) / spread, rms(half - fine, small) / spread
    assert (coarse_error < 0.005).all()
    assert (half_error < coarse_error / 2).all()


def test_mass_is_conserved_and_energy_only_dissipates(runs, small):
    u, v, h = np.moveaxis(runs.astype(float), 2, 0)
    area = area_of(small)
    mass = (h * area).sum(axis=(-2, -1))
    np.testing.assert_allclose(mass, MEAN_HEIGHT, rtol=1e-7)
    energy = (area * (h * (u**2 + v**2) + GRAVITY * (h - MEAN_HEIGHT) ** 2) / 2).sum(axis=(-2, -1))
    assert (energy[:, -1] < energy[:, 0]).all()
    assert (energy[:, -1] > 0.9 * energy[:, 0]).all()


def test_winds_and_heights_are_physical(runs):
    assert np.hypot(runs[:, :, 0], runs[:, :, 1]).max() < 120
    assert runs[:, :, 2].min() > MEAN_HEIGHT / 2


def test_the_flow_is_far_from_zonal_from_the_first_state_to_the_last(runs, small):
    spread = spread_of(runs, small)
    eddies = runs - runs.mean(axis=-1, keepdims=True)
    for states in eddies.reshape(-1, 3, small.num_lat, small.num_lon):
        share = (rms(states, small) / spread) ** 2
        assert share[0] > 0.2
        assert share[2] > 0.05


def test_persistence_worsens_with_lead_from_a_good_to_a_useless_forecast(runs, small):
    spread = spread_of(runs, small)
    errors = np.stack(
        [rms(runs[:, lead:] - runs[:, :-lead], small) / spread for lead in (1, 2, 4, 10)]
    )
    assert (np.diff(errors, axis=0) > 0).all()
    assert (errors[0] > 0.1).all()
    assert (errors[0] < 0.5).all()
    assert (errors[-1] > 0.7).all()


def test_fields_are_smooth_at_the_scale_of_the_grid(runs):
    power = (np.abs(np.fft.rfft(runs, axis=-1)) ** 2).mean(axis=(0, 1, 3))  # (channel, order)
    assert (power[:, 12:].sum(axis=1) < 0.02 * power[:, 1:].sum(axis=1)).all()


def test_the_mean_tendency_over_a_step_is_exact_for_a_parabola():
    past = [np.array(1 + 2 * t + 3 * t**2) for t in (0.0, -1.0, -2.0)]
    assert planet_module._extrapolate(past) == pytest.approx(3)  # integral from 0 to 1
    line = [np.array(1 + 2 * t) for t in (0.0, -1.0)]
    assert planet_module._extrapolate(line) == pytest.approx(2)


def test_progress_hears_of_every_state_kept():
    heard: list[int] = []
    simulate(Planet(**SMALL | {"samples_per_run": 4, "spin_up_days": 0.5}), 0, heard.append)
    assert heard == [1, 1, 1, 1]


# What is refused


def test_too_long_a_step_is_refused_at_the_start():
    planet = Planet(dt_seconds=450)
    assert largest_stable_dt(planet) == pytest.approx(376.4, abs=0.1)
    with pytest.raises(ValueError, match=r"Run 2 cannot start \(hour 0\): dt_seconds=450 is") as e:
        simulate(planet, 2)
    assert "num_lat=48, num_lon=96; the largest stable dt is 376 s" in str(e.value)
    assert "Take dt_seconds=372.414 or less" in str(e.value)


def test_the_step_proposed_is_accepted_and_stable():
    seconds = 21600 / np.ceil(21600 / largest_stable_dt(Planet(**SMALL)))
    planet = Planet(**SMALL | {"dt_seconds": seconds, "samples_per_run": 2})
    assert seconds > 720
    assert np.abs(simulate(planet, 0)[:, :2]).max() < 120


def test_a_run_that_blows_up_is_refused_with_its_hour(monkeypatch):
    """The stability rule knows the planet's usual winds; the states are checked all the same."""
    planet = Planet(**SMALL | {"dt_seconds": 1200})
    limit = largest_stable_dt(planet)
    monkeypatch.setattr(planet_module, "_refuse_unstable", lambda planet, run: None)
    with pytest.raises(ValueError, match=r"Run 1 is not finite at hour \d+ with") as e:
        simulate(planet, 1)
    assert f"dt_seconds=1200; the largest stable dt is {int(limit)} s" in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_runs": 0}, "num_runs=0 must be at least 1"),
        ({"samples_per_run": 0}, "samples_per_run=0 must be at least 1"),
        ({"num_lat": 8}, "num_lat=8, num_lon=96: the demo planet's jets need at least 16"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"dt_seconds": 0}, "dt_seconds=0 must be positive"),
        ({"dt_seconds": 370}, r"dt_seconds=370 does not divide step_hours=6 \(21600 s\). Take"),
        ({"spin_up_days": 5.1}, "spin_up_days=5.1 must be .* the nearest is 5"),
        ({"spin_up_days": -1}, "spin_up_days=-1 must be zero or .* the nearest is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Planet(**change)


@pytest.mark.parametrize("run", [-1, 3])
def test_a_run_that_the_planet_does_not_have_is_refused(small, run):
    with pytest.raises(ValueError, match=rf"run={run} is not one of this planet's 3 runs"):
        simulate(small, run)


# The coast


def test_the_topography_is_the_earths():
    lat, lon, height = load_topography()
    np.testing.assert_array_equal(lat, np.arange(89.5, -90, -1))
    np.testing.assert_array_equal(lon, np.arange(0.5, 360))
    assert height.dtype == np.int16

    def at(north: float, east: float) -> int:
        return int(height[np.abs(lat - north).argmin(), np.abs(lon - east).argmin()])

    assert at(32.5, 88.5) > 4000  # Tibet
    assert at(23.5, 10.5) > 0  # Sahara
    assert at(-80.5, 120.5) > 1500  # Antarctica
    assert at(0.5, 200.5) < -3000  # Pacific
    assert at(30.5, 320.5) < -2000  # Atlantic
    weight = np.cos(np.radians(lat))[:, None] / np.cos(np.radians(lat)).sum() / len(lon)
    assert (weight * (height < 0)).sum() == pytest.approx(0.708, abs=0.01)


def test_the_topography_is_small_and_names_its_source():
    path = resources.files("graticule.data").joinpath("topography.npz")
    with path.open("rb") as file:
        assert len(file.read()) < 150_000
    with path.open("rb") as file, np.load(file) as stored:
        assert "Ferret datasets 7.6.0, Ferret licence" in str(stored["source"])


def test_the_demo_grid_has_earths_coast():
    lat, lon = grid(Planet())
    sea = coast_mask(lat, lon, *load_topography())
    assert sea.shape == (48, 96)
    assert sea.dtype == bool
    assert (sea * area_of(Planet())).sum() == pytest.approx(0.71, abs=0.015)
    assert not sea[-1].any()  # Antarctica
    assert sea[0].all()  # Arctic Ocean


def test_the_larger_area_of_a_cell_decides():
    lat, lon = np.array([45.0, -45.0]), np.array([0.0, 180.0])
    fine_lat, fine_lon = np.arange(85.0, -90, -10), np.arange(0.0, 360, 10)
    height = np.full((18, 36), 100.0)
    # North: land on 5 of 9 rows, but nearer the pole, so that sea has the larger area.
    height[5:9] = -100.0
    # South: sea over 8 of the 18 columns around 180 degrees.
    height[9:, 14:22] = -100.0
    sea = coast_mask(lat, lon, fine_lat, fine_lon, height)
    np.testing.assert_array_equal(sea, [[True, True], [False, False]])
    height[9:, 12:24] = -100.0
    sea = coast_mask(lat, lon, fine_lat, fine_lon, height)
    np.testing.assert_array_equal(sea, [[True, True], [False, True]])


def test_the_mask_does_not_depend_on_where_longitudes_start_or_latitudes_point():
    lat, lon = grid(Planet())
    fine_lat, fine_lon, height = load_topography()
    sea = coast_mask(lat, lon, fine_lat, fine_lon, height)
    half_a_turn = coast_mask(lat, lon, fine_lat, fine_lon + 180, height)
    np.testing.assert_array_equal(half_a_turn, np.roll(sea, 48, axis=1))
    assert (half_a_turn != sea).any()
    west = np.where(fine_lon > 180, fine_lon - 360, fine_lon)
    turn = np.argsort(west)
    np.testing.assert_array_equal(coast_mask(lat, lon, fine_lat, west[turn], height[:, turn]), sea)
    np.testing.assert_array_equal(
        coast_mask(lat, (lon + 180) % 360 - 180, fine_lat, fine_lon, height), sea
    )
    np.testing.assert_array_equal(
        coast_mask(lat[::-1], lon, fine_lat[::-1], fine_lon, height[::-1]), sea[::-1]
    )


def test_a_grid_finer_than_the_topography_takes_the_nearest_point():
    fine_lat, fine_lon = np.array([30.0, -30.0]), np.array([0.0, 120.0, 240.0])
    height = np.array([[-1.0, 1.0, np.nan], [1.0, -1.0, 1.0]])
    lat, lon = np.linspace(59, -59, 12), np.arange(1.0, 360, 9)
    sea = coast_mask(lat, lon, fine_lat, fine_lon, height)
    column = np.rint(lon / 120).astype(int) % 3
    row = np.where(lat > 0, 0, 1)
    np.testing.assert_array_equal(sea, (height < 0)[np.ix_(row, column)])


def test_a_topography_that_does_not_reach_the_grid_is_refused():
    lat, lon = grid(Planet())
    fine_lat, fine_lon, height = load_topography()
    with pytest.raises(ValueError, match=r"ends 27\..* degrees from lat=-87\..*spacing of 1"):
        coast_mask(lat, lon, fine_lat[:150], fine_lon, height[:150])
    with pytest.raises(ValueError, match=r"degrees from lon=.*load_topography\(\)"):
        coast_mask(lat, lon, fine_lat, fine_lon[:180], height[:, :180])


def test_a_transposed_topography_is_refused():
    lat, lon = grid(Planet())
    fine_lat, fine_lon, height = load_topography()
    with pytest.raises(ValueError, match=r"shape \(360, 180\).*180 latitudes and 360 longitudes"):
        coast_mask(lat, lon, fine_lat, fine_lon, height.T)
