"""The generated ocean against answers known by hand: transport, forcing, and what is lost without
it; and its store."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graticule.config import DataConfig
from graticule.data import basin, ocean
from graticule.data.basin import DAY, LEVELS, STEPS_A_YEAR, THICKNESS, Ocean
from graticule.data.check import check
from graticule.data.demo import circulated, ocean_channels, write_ocean_store
from graticule.data.ocean import MEMORY, TRACERS, rmse_without_forcing, simulate_year, tracer
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.data.transport import Exchange, Sparse, face_flows, face_speeds, flow, mixing
from graticule.grid import EARTH_RADIUS_M, Grid

TINY = Ocean(num_lat=24, num_lon=48, num_years=3, spin_up_years=1, dt_seconds=86400)


# The matrix of entries


def test_a_matrix_of_entries_multiplies_and_adds_as_a_full_one_does() -> None:
    draw = np.random.default_rng(0)
    full = [np.where(draw.random((7, 7)) < 0.3, draw.normal(size=(7, 7)), 0.0) for _ in range(2)]
    full[0][3] = 0  # a row and a column without any entry
    full[1][:, 2] = 0
    a, b = (Sparse.of((7, 7), *np.nonzero(m), m[np.nonzero(m)]) for m in full)
    vector = draw.normal(size=7)
    np.testing.assert_allclose(a @ vector, full[0] @ vector, atol=1e-15)
    np.testing.assert_allclose((a @ b).dense(), full[0] @ full[1], atol=1e-15)
    np.testing.assert_allclose((a + b).dense(), full[0] + full[1], atol=1e-15)
    np.testing.assert_array_equal((Sparse.identity(7) @ a).dense(), full[0])
    twice = Sparse.of((2, 2), np.array([1, 0, 1]), np.array([0, 1, 0]), np.array([2.0, 5.0, 3.0]))
    np.testing.assert_array_equal(twice.dense(), [[0, 5], [5, 0]])
    assert twice.value.size == 2


# Transport, on a globe without land


def globe(num_lat: int = 18, num_lon: int = 72) -> Grid:
    return basin.grid_of(Ocean(num_lat=num_lat, num_lon=num_lon))


def rotation(grid: Grid, speed: float) -> np.ndarray:
    """The streamfunction of a solid body's rotation, `speed` m s-1 at the equator."""
    edges = np.linspace(90, -90, grid.shape[0] + 1)
    stream = -EARTH_RADIUS_M * speed * np.sin(np.deg2rad(edges))
    return np.repeat(stream[:, None], grid.shape[1], axis=1)


def all_cells(grid: Grid) -> np.ndarray:
    return np.arange(grid.shape[0] * grid.shape[1]).reshape(grid.shape)


def test_a_streamfunction_makes_the_speeds_it_is_the_potential_of() -> None:
    grid = globe(90, 180)
    eastward, northward = face_speeds(grid, rotation(grid, 2.0))
    # Rows are 2 degrees high: the mean of cos(lat) over one is 5e-5 from its middle's.
    wanted = 2.0 * np.cos(np.deg2rad(grid.lat))[:, None] * np.ones(180)
    np.testing.assert_allclose(eastward, wanted, rtol=1e-4)
    assert not northward.any()
    # v = d(stream)/dx: psi = a sin(lon) cos(lat)^2 flows north with a cos(lon) cos(lat) / R.
    lat, lon = np.deg2rad(np.linspace(90, -90, 91))[:, None], np.deg2rad(grid.lon - 1)
    eastward, northward = face_speeds(grid, 1e7 * np.sin(lon) * np.cos(lat) ** 2)
    wanted = 1e7 / EARTH_RADIUS_M * np.cos(np.deg2rad(grid.lon)) * np.cos(lat)
    np.testing.assert_allclose(northward, wanted, atol=1e-3 * np.abs(wanted).max())
    middle = np.deg2rad(grid.lat)[:, None]
    wanted = 1e7 / EARTH_RADIUS_M * np.sin(2 * middle) * np.sin(np.deg2rad(grid.lon + 1))
    np.testing.assert_allclose(eastward, wanted, atol=1e-3 * np.abs(wanted).max())


def test_a_turning_globe_carries_a_blob_at_its_speed() -> None:
    """Each row turns by c columns a step, c = 0.25 here. Upwind multiplies the zonal wave m by
    1 - c (1 - exp(-i m d)), d the width of a column: its phase lags by c (1 - c)(1 - 2c) (m d)^3/6
    to third order, so the blob's place is right to that, and its first moment exactly."""
    grid = globe()
    angle = 2 * np.pi / 72
    seconds = 0.25 * angle * EARTH_RADIUS_M / 1.0
    blob = np.exp(-(((grid.lon - 100) / 20) ** 2)) * np.cos(np.deg2rad(grid.lat))[:, None] ** 4
    volume = 10.0 * grid.cell_area.ravel()
    step = flow(rotation(grid, 1.0), all_cells(grid), 10.0).step(
        volume, np.zeros(volume.size), seconds
    )
    state = blob.ravel()
    num_steps = 60
    for _ in range(num_steps):
        state = step @ state
    moved = state.reshape(grid.shape)

    def centre(field: np.ndarray) -> np.ndarray:
        return (field * grid.lon).sum(1) / field.sum(1)  # far from the seam

    # A row's flow and its area both go with the sine across it: c is the same in all, exactly.
    np.testing.assert_allclose(centre(moved) - centre(blob), num_steps * 0.25 * 5.0, atol=1e-4)
    for wave in (1, 2, 3):
        factor = np.fft.fft(moved, axis=1)[:, wave] / np.fft.fft(blob, axis=1)[:, wave]
        known = (1 - 0.25 * (1 - np.exp(-1j * wave * angle))) ** num_steps
        np.testing.assert_allclose(factor, known, rtol=1e-9)


def test_a_flow_back_and_forth_is_the_mirror_of_itself() -> None:
    grid = globe()
    stream = rotation(grid, 1.0) + 1e5 * np.cos(np.deg2rad(grid.lon)) * np.sin(
        np.linspace(0, np.pi, 19)
    )[:, None].round(12)
    there, back = (flow(sign * stream, all_cells(grid), 1.0) for sign in (1, -1))
    for a, b in ((there.source, back.target), (there.target, back.source), (there.rate, back.rate)):
        np.testing.assert_array_equal(a, b)


def test_a_flow_through_a_coast_or_a_pole_is_refused() -> None:
    grid = globe()
    cells = all_cells(grid)
    cells[5, 7] = -1
    with pytest.raises(ValueError, match="not constant along a coast: water would cross it"):
        flow(rotation(grid, 1.0), cells, 1.0)
    stream = np.repeat(np.cos(np.deg2rad(grid.lon))[None], 19, axis=0)
    with pytest.raises(ValueError, match="varies along a pole"):
        flow(stream, all_cells(grid), 1.0)


def test_mixing_is_two_boxes_that_tend_to_their_mean() -> None:
    """d(a - b)/dt = -(k/V + k/W)(a - b), forward steps: (1 - dt (k/V + k/W))^n; total constant."""
    box = np.array([[0]]), np.array([[1]])
    volume = np.array([2.0, 3.0])
    step = mixing(*box, np.array([[0.01]])).step(volume, np.zeros(2), 1.0)
    state = np.array([1.0, 0.0])
    for _ in range(50):
        state = step @ state
    assert state @ volume == pytest.approx(2.0, rel=1e-13)
    assert state[0] - state[1] == pytest.approx((1 - 0.01 / 2 - 0.01 / 3) ** 50, rel=1e-12)
    alone = mixing(np.array([[0]]), np.array([[-1]]), np.array([[0.01]]))
    assert alone.rate.size == 0


def test_damping_alone_decays_as_the_exponential_to_first_order() -> None:
    nothing = Exchange(np.zeros(0, int), np.zeros(0, int), np.zeros(0))
    errors = []
    for num_steps in (50, 100, 200):
        step = nothing.step(np.ones(1), np.array([1 / 20.0]), 20.0 / num_steps)
        state = np.ones(1)
        for _ in range(num_steps):
            state = step @ state
        assert state[0] == pytest.approx((1 - 1 / num_steps) ** num_steps, rel=1e-12)
        errors.append(np.exp(-1) - state[0])
    assert errors[2] < 0.001
    np.testing.assert_allclose(np.array(errors[:2]) / errors[1:], 2, rtol=0.02)


def test_too_long_a_step_is_refused_with_the_largest_one() -> None:
    exchange = mixing(np.array([[0]]), np.array([[1]]), np.array([[0.5]]))
    volume, damping = np.array([2.0, 4.0]), np.array([0.25, 0.0])
    assert exchange.longest_step(volume, damping) == pytest.approx(2.0)
    assert exchange.step(volume, damping, 2.0).dense()[0, 0] == pytest.approx(0, abs=1e-15)
    message = r"a step of 2.5 s is too long: .* \(CFL number 1.25, .*the largest stable step is 2 s"
    with pytest.raises(ValueError, match=message):
        exchange.step(volume, damping, 2.5)
    assert ocean.longest_step(TINY) > TINY.dt_seconds
    fast = replace(TINY, max_speed=12.0)
    limit = ocean.longest_step(fast)
    assert limit < fast.dt_seconds
    message = rf"CFL number .* largest stable step is {int(limit)} s\. Take dt_seconds=\d+ or less"
    with pytest.raises(ValueError, match=message) as error:
        tracer(fast, "so")
    taken = float(str(error.value).split("Take dt_seconds=")[1].split()[0])
    assert tracer(replace(fast, dt_seconds=taken), "so").step.value.min() >= 0


# The ocean's coasts and flow


def test_the_sea_shrinks_with_depth_and_no_water_enters_the_land() -> None:
    wet = basin.wet_levels(TINY)
    shares = wet.mean((1, 2))
    assert 0.6 < shares[0] < 0.75
    assert (np.diff(shares) < 0).all()
    assert not (wet[1:] & ~wet[:-1]).any()
    streams = basin.streams(TINY)
    for level, stream in enumerate(streams):
        eastward, northward = face_flows(stream)
        dry = ~wet[level]
        assert not eastward[dry | np.roll(dry, -1, axis=1)].any()
        assert not northward[1:][dry].any()
        assert not northward[:-1][dry].any()
        # As much flows in as out: not one unit more in any cell.
        gain = np.roll(eastward, 1, axis=1) - eastward + northward[1:] - northward[:-1]
        assert np.abs(eastward).max() > 1e4
        assert not gain.any()
    fastest = max(np.abs(s).max() for s in face_speeds(basin.grid_of(TINY), streams[0]))
    assert fastest == pytest.approx(1.0, rel=1e-4)
    assert not basin.streams(replace(TINY, max_speed=0.0)).any()


def still(name: str, settings: Ocean = TINY) -> ocean.Tracer:
    """The tracer's system without damping: transport and mixing alone."""
    exchange, volume, damping = ocean._exchange(settings, name)
    step = exchange.step(volume, np.zeros_like(damping), settings.dt_seconds)
    return replace(tracer(settings, name), step=step, constant=np.zeros(volume.size))


@pytest.mark.parametrize("name", ["thetao", "zos"])
def test_a_constant_stays_constant_the_total_is_kept_and_no_extremum_grows(name: str) -> None:
    system = still(name)
    dry = np.zeros(np.count_nonzero(system.wet[0]))
    np.testing.assert_allclose(
        system.advance(np.full(system.volume.size, 7.0), dry, 200), 7.0, rtol=1e-12
    )
    noise = np.random.default_rng(1).normal(size=system.volume.size)
    after = system.advance(noise, dry, 200)
    assert after @ system.volume == pytest.approx(noise @ system.volume, rel=1e-10)
    assert noise.min() < after.min() < after.max() < noise.max()
    assert system.step.value.min() >= 0
    assert after.std() < 0.5 * noise.std()


@pytest.mark.parametrize(
    ("name", "unit", "content"),
    [
        ("thetao", "hfds", 1025.0 * 3990.0),  # J m-3 K-1: what has entered is stored
        ("so", "wfo", -1025.0 / 35.0),  # kg of fresh water for each g kg-1 and m3
        ("zos", "wfo", 1025.0 / 30.0),  # a metre over 1 m2; its layer of 30 m is numerical
    ],
)
def test_the_flux_through_the_surface_is_what_the_sea_gains(
    name: str, unit: str, content: float
) -> None:
    system = still(name)
    assert system.felt == unit
    area = basin.grid_of(TINY).cell_area[system.wet[0]]
    flux = np.random.default_rng(2).normal(1.0, 0.5, area.size)
    start = system.profile
    after = system.advance(start, flux, 30)
    entered = 30 * TINY.dt_seconds * (flux @ area)
    assert content * ((after - start) @ system.volume) == pytest.approx(entered, rel=1e-9)


def test_a_still_sea_relaxes_to_its_profile_and_forcing_is_felt_below_by_mixing_only() -> None:
    quiet = replace(TINY, max_speed=0.0)
    system = tracer(quiet, "thetao")
    nothing = np.zeros(np.count_nonzero(system.wet[0]))
    top = system.level == 0
    one_step = system.advance(system.profile, nothing + 100.0, 1) - system.profile
    without = system.advance(system.profile, nothing, 1) - system.profile
    gain = 100.0 * quiet.dt_seconds / (1025 * 3990 * THICKNESS[0])
    np.testing.assert_allclose((one_step - without)[top], gain, rtol=1e-9)
    np.testing.assert_allclose((one_step - without)[~top], 0, atol=1e-14)
    later = system.advance(system.profile, nothing + 100.0, 2)
    below = system.level == 1
    assert (later - system.advance(system.profile, nothing, 2))[below].min() > 0
    # Where the sea has one level only there is nothing to mix with: damping alone.
    alone = (system.wet.sum(0) == 1)[system.wet[0]]
    assert alone.any()
    cells = np.flatnonzero(top)[alone]
    state = system.advance(system.profile + 1.0, nothing, 60) - system.profile
    np.testing.assert_allclose(state[cells], (1 - 1 / 60) ** 60, rtol=1e-9)


# Time and forcing


def test_the_next_state_is_a_linear_function_of_state_and_forcing() -> None:
    """A, B and c against the steps, and the stored states against both."""
    system = tracer(TINY, "thetao")
    a, b, c = system.propagator(5)
    states, _ = simulate_year(TINY, "thetao", 0)
    forcing = ocean.forcing_of_year(TINY, 0)[:, 0][:, system.wet[0]]
    for time_index in (0, 40, 71):
        now, then = (states[t][system.wet].astype(np.float64) for t in (time_index, time_index + 1))
        predicted = a @ now + b @ forcing[time_index] + c
        assert np.abs(predicted - then).max() < 5e-6  # float32 of 20 degrees
        assert np.abs(predicted - now).max() > 0.1
    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(2, system.volume.size))
    f = draw.normal(size=b.shape[1])
    np.testing.assert_allclose(system.advance(x, f, 5), a @ x + b @ f + c, atol=1e-12)
    one = system.advance(x + y, f, 5) - system.advance(y, 0 * f, 5)
    np.testing.assert_allclose(one, a @ x + b @ f, atol=1e-11)


def test_a_julian_year_has_73_dates_at_noon_and_a_six_day_step_in_leap_years() -> None:
    julian = replace(TINY, calendar="julian", first_year=1959)
    axis = basin.time_axis(julian)
    assert len(axis) == 3 * 73
    assert str(axis.date(0)) == "1959-01-03 12:00:00"
    assert {(d.month, d.day) for d in axis.dates[:73]} == {
        (d.month, d.day) for d in axis.dates[73:146]
    }
    days = np.diff(axis.seconds) / DAY
    assert set(days) == {5.0, 6.0}
    assert [str(axis.date(int(t)))[:10] for t in np.flatnonzero(days == 6)] == ["1960-02-27"]
    assert basin.steps_of_year(julian, 0).tolist() == [5] * 73
    assert basin.steps_of_year(julian, 1).sum() == 366
    plain = basin.time_axis(TINY)
    for dates in (axis, plain):
        assert len(set(dates.segments)) == 1, "29 February lengthens a step and breaks nothing"
    # The six-day step is six days of physics.
    system = tracer(julian, "zos")
    leap = int(np.flatnonzero(basin.steps_of_year(julian, 1) == 6)[0])
    states, _ = simulate_year(julian, "zos", 1)
    forcing = ocean.forcing_of_year(julian, 1)[leap, 1][system.wet[0]]
    six = system.advance(states[leap][system.wet].astype(np.float64), forcing, 6)
    np.testing.assert_allclose(six, states[leap + 1][system.wet], atol=1e-6)


def test_the_noise_has_the_spread_and_memory_that_are_said() -> None:
    long = replace(TINY, num_years=200)
    for name in ocean.FORCINGS:
        amplitudes = ocean._amplitudes(long, name)
        # 14,600 dates of 24 independent series.
        assert amplitudes.std() == pytest.approx(1, rel=0.01)
        lagged = (amplitudes[1:] * amplitudes[:-1]).mean()
        assert lagged == pytest.approx(MEMORY, abs=0.01)
        spread = np.sqrt((ocean.noise_patterns(long, name) ** 2).sum(0))
        weights = basin.grid_of(long).cell_area
        mean = np.sqrt((spread**2 * weights).sum() / weights.sum())
        assert mean == pytest.approx(ocean.NOISE[name], rel=0.1)
    assert pytest.approx(np.exp(-5 / 14)) == MEMORY


def test_more_years_change_nothing_in_the_first_ones_and_another_seed_all() -> None:
    longer = replace(TINY, num_years=5)
    one, other = (ocean.forcing_of_year(settings, 1) for settings in (TINY, longer))
    np.testing.assert_array_equal(one, other)
    assert np.abs(ocean.forcing_of_year(replace(TINY, seed=1), 1) - one)[:, 1].min() > 0
    assert (basin.streams(replace(TINY, seed=1)) != basin.streams(TINY)).any()


def test_the_season_comes_back_every_year_and_hemispheres_are_opposed() -> None:
    season = ocean.season_of(TINY, "hfds")
    assert season.shape == (73, 24, 48)
    np.testing.assert_allclose(season[:, 0], -season[:, -1])
    assert abs(season[:, 0].mean()) < 0.02 * season[:, 0].max()
    month = basin.time_axis(TINY).date(int(season[:, 0, 0].argmax())).month
    assert month == 6
    assert not ocean.season_of(TINY, "wfo").any()


def test_the_last_years_test_as_many_as_are_wanted_and_the_fields_do_not_change() -> None:
    settings = replace(TINY, num_years=8, test_years=3)
    assert basin.splits(settings) == {
        "train": ["2001/2004"], "validation": ["2005"], "test": ["2006/2008"],
    }  # fmt: skip
    assert basin.splits(replace(settings, test_years=1))["test"] == ["2008"]
    first, _ = simulate_year(settings, "zos", 0)
    np.testing.assert_array_equal(first, simulate_year(TINY, "zos", 0)[0])


# What is lost without the forcing


def test_no_forecast_without_forcing_gets_below_the_floor_and_the_best_one_reaches_it() -> None:
    """Forecasts of two years by hand: given the forcing, exact; given the season and what the last
    step's noise foretells, at the floor; given the season alone, above it."""
    settings = replace(TINY, num_years=4)
    floor = rmse_without_forcing(settings, 3)
    assert floor.shape == (3, 9)
    assert (np.diff(floor, axis=0) > 0).all()
    for name, channel in (("thetao", 0), ("zos", 8)):
        system = tracer(settings, name)
        season = ocean.season_of(settings, system.felt)[:, system.wet[0]]
        state, years = None, []
        noises = []
        for year in range(4):
            states, state = simulate_year(settings, name, year, state)
            years.append(states)
            noise = ocean.noise_of_year(settings, system.felt, year)
            noises.append(noise[:, system.wet[0]])
        truth, noise = np.concatenate(years), np.concatenate(noises)
        area = basin.grid_of(settings).cell_area[system.wet[0]]
        squares = {kind: np.zeros(3) for kind in ("forced", "best", "season")}
        starts = range(1, len(truth) - 3, 2)
        for start in starts:
            fields = {kind: truth[start][system.wet].astype(np.float64) for kind in squares}
            for lead in range(3):
                now = start + lead
                usual = season[now % STEPS_A_YEAR]
                foretold = MEMORY ** (lead + 1) * noise[start - 1]
                given = {"forced": usual + noise[now], "best": usual + foretold, "season": usual}
                for kind in squares:
                    fields[kind] = system.advance(fields[kind], given[kind], 5)
                    error = (fields[kind] - truth[now + 1][system.wet])[: area.size]
                    squares[kind][lead] += error**2 @ area / area.sum()
        rmse = {kind: np.sqrt(total / len(starts)) for kind, total in squares.items()}
        assert rmse["forced"].max() < 1e-4 * floor[0, channel]
        np.testing.assert_allclose(rmse["best"], floor[:, channel], rtol=0.06)
        assert (rmse["season"] > 1.1 * floor[:, channel]).all()


# The store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_ocean_store(tmp_path_factory.mktemp("data") / "ocean.zarr", TINY, workers=1)


def test_the_store_holds_the_simulation_with_land_by_level_and_passes_the_check(
    store: Store,
) -> None:
    names = [f"{v}@{level:g}" for v in ("thetao", "so") for level in LEVELS]
    assert store.channels.names == (*names, "zos", "hfds", "wfo")
    wet = basin.wet_levels(TINY)
    np.testing.assert_array_equal(store.wet, [*wet, *wet, wet[0], wet[0], wet[0]])
    state: np.ndarray | None = None
    for year in (-1, 0, 1):
        states, state = simulate_year(TINY, "thetao", year, state)
    np.testing.assert_array_equal(store.read(73 + 20)[:4], states[20])
    forcing = np.where(wet[0], ocean.forcing_of_year(TINY, 1)[20], np.nan).astype(np.float32)
    np.testing.assert_array_equal(store.read(73 + 20)[9:], forcing)
    assert not store.missing.any()
    assert check(store).ok
    Statistics.load(store).check_times(store, np.arange(73))
    depth, eastward, _ = store.read_statics(["deptho", "uo", "vo"])
    np.testing.assert_array_equal(depth > 0, wet[0])
    assert depth.max() == sum(THICKNESS)
    assert not eastward[~wet[0]].any()
    assert 0.5 < np.abs(eastward).max() <= 1.0


def test_its_splits_are_years_and_its_roles_are_its_own(store: Store) -> None:
    assert store.splits == {"train": ["2001/2001"], "validation": ["2002"], "test": ["2003"]}
    source = SampleSource(store, DataConfig())
    for number, split in enumerate(("train", "validation", "test")):
        assert source.times(split).tolist() == list(range(73 * number, 73 * number + 73))
    assert source.channel_names["prognostic"] == [*ocean_channels().names[:9]]
    assert source.channel_names["forcing"] == ["hfds", "wfo"]
    assert source.channel_names["static"] == ["deptho", "uo", "vo"]


def test_what_a_configuration_does_without_is_not_there(store: Store) -> None:
    source = SampleSource(store, DataConfig(without=("hfds", "wfo", "uo")))
    assert source.forcing == []
    assert source.channel_names["static"] == ["deptho", "vo"]
    assert source.used == list(range(9))
    assert source.sample(3).forcing(1).shape == (1, 0, 24, 48)
    # A window needs no forcing beyond its end: one more start than times with a successor.
    levels = SampleSource(store, DataConfig(prognostic=("thetao", "zos"), without=("thetao@250",)))
    assert levels.channel_names["prognostic"] == ["thetao@15", "thetao@50", "thetao@110", "zos"]
    with pytest.raises(ValueError, match="no channel hfdz; there are thetao@15"):
        SampleSource(store, DataConfig(without=("hfdz",)))
    with pytest.raises(ValueError, match=r"data\.without and data\.forcing both name hfds"):
        DataConfig(without=("hfds",), forcing=("hfds", "wfo"))


def test_any_number_of_processes_writes_the_same_store(store: Store, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    other = write_ocean_store(
        tmp_path / "other", TINY, workers=2, progress=lambda *call: calls.append(call)
    )
    assert calls == [(73, 292), (146, 292), (219, 292), (292, 292)]
    assert other.fingerprint == store.fingerprint
    alone: list[tuple[int, int]] = []
    blocks = circulated(TINY, 1, lambda *call: alone.append(call))
    first = next(blocks)
    blocks.close()
    assert first.shape == (73, 11, 24, 48)
    assert alone == calls[:2]


def test_what_cannot_be_made_leaves_nothing_behind(tmp_path: Path, store: Store) -> None:
    out = tmp_path / "ocean.zarr"
    with pytest.raises(ValueError, match="dt_seconds=86400 is too long"):
        write_ocean_store(out, replace(TINY, max_speed=20.0))
    assert not out.exists()

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= 146:
            raise Stop

    with pytest.raises(Stop):
        write_ocean_store(out, TINY, workers=1, progress=stop)
    assert not out.exists()
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        write_ocean_store(store.path, TINY)
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        write_ocean_store(out, TINY, workers=0)


def test_a_killed_process_leaves_nothing_that_passes_for_a_store(tmp_path: Path) -> None:
    out = tmp_path / "ocean.zarr"
    source = (
        "from graticule.data.basin import Ocean; from graticule.data.demo import write_ocean_store;"
        f"write_ocean_store({str(out)!r}, Ocean(num_lat=24, num_lon=48, num_years=400), workers=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", source])
    deadline = time.monotonic() + 60
    while not (out / "fields" / "c" / "80").exists():  # in the second year
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait(timeout=30)
    with pytest.raises(
        ValueError, match=r"is incomplete: the command that wrote it did not finish"
    ):
        Store(out)
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        write_ocean_store(out, TINY, workers=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_lat": 8}, "needs at least 12 latitudes and 24 longitudes"),
        ({"num_years": 2}, r"num_years=2 \(--years\) cannot be split"),
        ({"num_years": 7, "test_years": 6}, "and test_years=6; take num_years=8 or more"),
        ({"test_years": 0}, "and test_years=0; take num_years=3"),
        ({"dt_seconds": 50000.0}, r"does not divide a day \(86400 s\); take 43200"),
        ({"dt_seconds": 0.0}, r"dt_seconds=0 does not divide a day"),
        ({"max_speed": -1.0}, "max_speed=-1.0 must not be negative"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"first_year": 3}, "first_year=3 with 3 years of spin-up begins before year 1"),
        ({"calendar": "standard"}, "calendar='standard' is neither noleap nor julian"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ocean(**settings)


def test_tracers_are_those_of_the_channels() -> None:
    assert tuple(dict.fromkeys(c.variable for c in ocean_channels()))[:3] == TRACERS
