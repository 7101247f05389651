"""Zonal spectra: variance by wavenumber, circles and segments, sums that add up, the file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from graticule.evaluate import Spectra, Stretches
from graticule.grid import EARTH_RADIUS_M, Grid
from graticule.variables import Channel, Channels

GLOBE = Grid(np.linspace(87, -87, 30), np.arange(0, 360, 3.75))
BASIN = Grid(np.linspace(40, 20, 11), np.arange(350, 390, 0.5))


def channels_of(names: str) -> Channels:
    return Channels([Channel(variable=name, units="m s-1", role="prognostic") for name in names])


def everywhere(grid: Grid, num_channels: int = 1) -> np.ndarray:
    return np.ones((num_channels, *grid.shape), bool)


def chosen(grid: Grid, counted: np.ndarray) -> Stretches:
    return Stretches.choose("abcdefgh"[: len(counted)], counted, grid, grid.cell_area)


def spectra_of(
    stretches: Stretches, pairs: list[tuple[int, np.ndarray, np.ndarray]], num_leads: int = 2
) -> Spectra:
    """pairs: (position of the lead, model, truth)."""
    lead_seconds = 3600 * np.arange(1, num_leads + 1)
    spectra = Spectra.zero(channels_of("".join(stretches.names)), lead_seconds, stretches)
    for lead, model, truth in pairs:
        of_truth = stretches.power(truth)
        spectra = spectra.with_pair(lead, stretches.power(model, of_truth.used), of_truth)
    return spectra


def mean_power(stretches: Stretches, fields: np.ndarray) -> np.ndarray:
    """(channel, n)."""
    power = stretches.power(fields)
    return power.sums / power.area[:, None]


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def smoothed(fields: np.ndarray) -> np.ndarray:
    """Running mean over three columns, round the globe."""
    return (np.roll(fields, 1, -1) + fields + np.roll(fields, -1, -1)) / 3


@pytest.mark.parametrize("num_lon", [2, 3, 8, 17, 96, 97])
def test_power_over_all_wavenumbers_is_the_variance_along_the_row(num_lon: int) -> None:
    grid = Grid(np.linspace(80, -80, 9), np.arange(num_lon) * 360 / num_lon)
    stretches = chosen(grid, everywhere(grid, 2))
    assert stretches.kind == ("circles", "circles")
    np.testing.assert_array_equal(stretches.wavenumber, np.arange(1, num_lon // 2 + 1))
    fields = 7 + noise((2, *grid.shape))
    power = mean_power(stretches, fields)
    rows = fields.astype(np.float64).var(2)
    weight = grid.cell_area[:, 0] / grid.cell_area[:, 0].sum()
    np.testing.assert_allclose(power.sum(1), rows @ weight, rtol=1e-12)


@pytest.mark.parametrize("wave", [1, 5, 47, 48])
def test_a_cosine_of_amplitude_a_has_half_a_squared_at_its_wavenumber(wave: int) -> None:
    stretches = chosen(GLOBE, everywhere(GLOBE))
    field = 3 * np.cos(wave * np.deg2rad(GLOBE.lon)) + np.zeros((1, *GLOBE.shape))
    power = mean_power(stretches, field)[0]
    # The shortest wave has two points: they stand on its crests, and its mean square is a^2.
    assert power[wave - 1] == pytest.approx(9 if wave == 48 else 4.5, rel=1e-12)
    assert np.delete(power, wave - 1).max() < 1e-25


def test_rows_count_by_their_area() -> None:
    stretches = chosen(GLOBE, everywhere(GLOBE))
    field = np.zeros((1, *GLOBE.shape))
    field[0, 3] = 2 * np.cos(4 * np.deg2rad(GLOBE.lon))
    share = GLOBE.cell_area[3].sum() / GLOBE.cell_area.sum()
    assert mean_power(stretches, field)[0, 3] == pytest.approx(2 * share, rel=1e-12)


def test_a_wave_along_a_segment_has_its_power_around_its_wavenumber() -> None:
    counted = everywhere(GLOBE)
    counted[:, :, :30] = False
    stretches = chosen(GLOBE, counted)
    assert stretches.kind == ("segments of 64 columns",)
    np.testing.assert_allclose(stretches.wavenumber, 1.5 * np.arange(1, 33))
    field = 3 * np.cos(15 * np.deg2rad(GLOBE.lon)) + np.zeros((1, *GLOBE.shape))
    power = mean_power(stretches, np.where(counted, field, np.nan))[0]
    # Units squared per unit wavenumber, and the wavenumbers stand 1.5 apart.
    assert power.sum() * 1.5 == pytest.approx(4.5, rel=0.01)
    assert power[[8, 9, 10]].sum() > 0.99 * power.sum()


def test_a_slope_along_a_segment_is_not_power() -> None:
    counted = everywhere(GLOBE)
    counted[:, :, :30] = False
    slope = 5 + 0.1 * GLOBE.lon + np.zeros((1, *GLOBE.shape))
    assert mean_power(chosen(GLOBE, counted), slope).max() < 1e-25


def test_a_row_with_land_is_in_no_circle() -> None:
    counted = everywhere(GLOBE, 2)
    counted[1, 4, 10] = False
    counted[1, 20] = False
    stretches = chosen(GLOBE, counted)
    assert stretches.kind == ("circles", "circles")
    assert [cut.row.size for cut in stretches.pieces] == [30, 28]
    assert not {4, 20} & set(stretches.pieces[1].row)
    area = GLOBE.cell_area[:, 0]
    sea = counted[1].sum(1) @ area
    whole = (area.sum() - area[4] - area[20]) * GLOBE.lon.size
    np.testing.assert_allclose(stretches.share, [1, whole / sea], rtol=1e-12)
    fields = noise(counted.shape)
    fields[~counted] = np.nan
    wild = fields.copy()
    wild[1, 4] = 1e6
    assert np.isfinite(mean_power(stretches, fields)).all()
    np.testing.assert_array_equal(mean_power(stretches, wild), mean_power(stretches, fields))


def coast() -> np.ndarray:
    """(1, lat, lon): three continents of different widths; one lies on the origin."""
    counted = everywhere(GLOBE)
    counted[:, 3:27, :6] = counted[:, 3:20, 93:] = False
    counted[:, 2:25, 40:49] = counted[:, 8:29, 66:69] = False
    return counted


def test_segments_of_white_noise_are_as_flat_and_high_as_circles() -> None:
    counted = coast()
    stretches = chosen(GLOBE, counted)
    (kind,), columns = stretches.kind, stretches.columns
    assert kind == f"segments of {columns} columns"
    assert stretches.share[0] >= 0.75
    circles = chosen(GLOBE, everywhere(GLOBE))
    cut = whole = 0.0
    for seed in range(40):
        fields = noise((1, *GLOBE.shape), seed)
        whole = whole + mean_power(circles, fields)[0] / 40
        cut = cut + mean_power(stretches, np.where(counted, fields, np.nan))[0] / 40
    # White noise of variance 1 over 48 wavenumbers, of which the last counts half.
    np.testing.assert_allclose(whole[:-1], 1 / 48, rtol=0.15)
    np.testing.assert_allclose(cut[2:-1], 1 / 48, rtol=0.15)
    assert cut[2:-1].mean() == pytest.approx(1 / 48, rel=0.03)
    assert cut[-1] == pytest.approx(1 / 96, rel=0.15)
    # The mean and the trend are taken off, which the taper spreads over the longest two waves.
    along = np.arange(columns) - (columns - 1) / 2
    lines = np.stack([np.ones(columns), along])
    off = np.eye(columns) - lines.T @ np.linalg.solve(lines @ lines.T, lines)
    taper = np.sin(np.pi * (np.arange(columns) + 0.5) / columns) ** 2
    kept = np.linalg.norm(np.fft.fft(taper[:, None] * off, axis=0), axis=1) ** 2
    left = kept[1:3] / (columns * (taper**2).mean())
    assert left[0] < 0.8  # so that the next line has something to tell
    np.testing.assert_allclose(cut[:2], left / 48, rtol=0.1)


def test_all_pieces_are_sea_and_a_run_counts_by_its_area() -> None:
    counted = coast()
    stretches = chosen(GLOBE, counted)
    cut, columns = stretches.pieces[0], stretches.columns
    area, covered = GLOBE.cell_area[:, 0], np.zeros(GLOBE.shape, bool)
    for row, start in zip(cut.row, cut.start, strict=True):
        column = (start + np.arange(columns)) % 96
        assert counted[0, row, column].all()
        covered[row, column] = True
    assert cut.weight.sum() == pytest.approx(covered.sum(1) @ area, rel=1e-12)
    assert stretches.share[0] == pytest.approx(
        (covered.sum(1) @ area) / (counted[0].sum(1) @ area), rel=1e-12
    )
    # Row 1 is sea all round: some piece lies on both sides of the origin.
    assert any(row == 1 and start + columns > 96
               for row, start in zip(cut.row, cut.start, strict=True))  # fmt: skip


def test_a_smoothed_forecast_lacks_power_at_short_waves_only() -> None:
    for counted in (everywhere(GLOBE), coast()):
        stretches = chosen(GLOBE, counted)
        truth = np.where(counted, noise((1, *GLOBE.shape)), np.nan)
        truth += np.float32(4) * np.cos(2 * np.deg2rad(GLOBE.lon))
        smooth = np.where(counted, smoothed(np.nan_to_num(truth)), np.nan)
        spectra = spectra_of(stretches, [(0, smooth, truth), (1, truth, truth)])
        # A running mean over three columns leaves ((1 + 2 cos x) / 3)^2, x = 2 pi k / 96.
        filtered = ((1 + 2 * np.cos(2 * np.pi * spectra.wavenumber / 96)) / 3) ** 2
        if stretches.circles:
            np.testing.assert_allclose(spectra.ratio[0, 0], filtered, atol=1e-6)
            assert spectra.ratio[0, 0, 1] == pytest.approx(0.99, abs=0.01)
        assert spectra.short_ratio()[0, 0] < 0.25
        np.testing.assert_array_equal(spectra.ratio[1], 1)
        assert spectra.short_ratio()[1, 0] == 1


def test_short_waves_are_a_quarter_of_those_that_the_truth_has() -> None:
    stretches = chosen(GLOBE, everywhere(GLOBE, 2))
    lon = np.deg2rad(GLOBE.lon)
    # 20 waves, then nothing but float32 rounding; the second channel has all 48.
    coarse = sum(np.cos(k * lon + k) for k in range(1, 21)) + 1000
    truth = np.stack([np.broadcast_to(coarse, GLOBE.shape), noise(GLOBE.shape)]).astype(np.float32)
    model = truth.copy()
    model[0] += 0.1 * np.cos(40 * lon)
    spectra = spectra_of(stretches, [(0, model, truth)])
    found = [spectra.wavenumber[short] for short in spectra.short]
    assert found[0].tolist() == [16, 17, 18, 19, 20]
    assert found[1].tolist() == list(range(37, 49))
    np.testing.assert_allclose(spectra.short_ratio()[0], 1, rtol=1e-3)
    assert spectra.ratio[0, 0, 39] > 1e6


def test_halves_add_up_to_the_whole() -> None:
    stretches = chosen(GLOBE, coast())
    pairs = [
        (i % 2, *np.where(coast(), noise((2, 1, *GLOBE.shape), i), np.nan)) for i in range(5)
    ]  # fmt: skip
    whole = spectra_of(stretches, pairs)
    merged = spectra_of(stretches, pairs[3:]) + spectra_of(stretches, pairs[:3])
    merged = merged + spectra_of(stretches, [])
    np.testing.assert_array_equal(merged.rows, whole.rows)
    assert merged.rows[:, 0].tolist() == [n * stretches.pieces[0].row.size for n in (3, 2)]
    for name in ("area", "sums", "model", "truth"):
        np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), rtol=1e-13)
    with pytest.raises(ValueError, match=r"a at 2 leads and .* \(segments.*\) and of a at 3 leads"):
        _ = whole + spectra_of(stretches, [], num_leads=3)
    with pytest.raises(ValueError, match=r"\(circles\) do not add up"):
        _ = whole + spectra_of(chosen(GLOBE, everywhere(GLOBE)), [])


def test_a_region_round_the_globe_has_circles_and_a_narrower_one_segments() -> None:
    band = chosen(GLOBE, GLOBE.region(-180, 180, 0, 30)[None])
    assert band.kind == ("circles",)
    assert set(GLOBE.lat[band.pieces[0].row]) == {3.0, 9.0, 15.0, 21.0, 27.0}
    # 20 columns from 330 to 41.25, across the origin; 16 of them are a segment, in their middle.
    box = chosen(GLOBE, GLOBE.region(-30, 41.25, 0, 30)[None])
    assert box.kind == ("segments of 16 columns",)
    assert set(box.pieces[0].start) == {88 + 2}
    assert box.share[0] == pytest.approx(16 / 20)
    turned = chosen(GLOBE, GLOBE.region(150, 221.25, 0, 30)[None])
    fields = noise((1, *GLOBE.shape))
    np.testing.assert_allclose(
        mean_power(box, fields), mean_power(turned, np.roll(fields, 48, -1)), rtol=1e-12
    )


def test_a_regional_grid_has_segments_and_wavenumbers_of_the_globe() -> None:
    stretches = chosen(BASIN, everywhere(BASIN))
    assert stretches.kind == ("segments of 64 columns",)
    # 64 columns of half a degree: one wave is 32 degrees, 11.25 round the globe.
    np.testing.assert_allclose(stretches.wavenumber, 11.25 * np.arange(1, 33))
    (start,) = set(stretches.pieces[0].start)
    assert start == 8
    km = spectra_of(stretches, []).wavelength_km(30)
    at_30 = 2 * np.pi * EARTH_RADIUS_M / 1000 * np.cos(np.pi / 6)
    np.testing.assert_allclose(km[0], at_30 * 32 / 360)
    np.testing.assert_allclose(km[-1], at_30 / 360)


def test_one_row_has_a_spectrum_of_its_own() -> None:
    grid = Grid(np.array([10.0]), GLOBE.lon)
    area = np.full(grid.shape, 2.5)  # its width, and so its area, is not known
    stretches = Stretches.choose("a", everywhere(grid), grid, area)
    fields = noise((1, *grid.shape))
    power = mean_power(stretches, fields)
    assert power.sum() == pytest.approx(fields.astype(np.float64).var(), rel=1e-12)


def test_a_channel_without_long_runs_has_no_spectrum_and_says_why() -> None:
    counted = everywhere(GLOBE, 3)
    counted[1] = np.arange(96) % 8 > 0  # runs of seven
    counted[2] = False
    stretches = chosen(GLOBE, counted)
    assert stretches.kind[0] == "circles"
    assert stretches.kind[1] == (
        "none: segments of 8 columns cover 0% of its area, 75% are needed (its longest run has 7"
        " columns)"
    )
    assert "its longest run has 0" in stretches.kind[2]
    assert stretches.share.tolist() == [1, 0, 0]
    fields = np.where(counted, noise(counted.shape), np.nan)
    spectra = spectra_of(stretches, [(0, fields, fields)], num_leads=1)
    assert spectra.rows.tolist() == [[30, 0, 0]]
    assert np.isfinite(spectra.model[0, 0]).all()
    assert np.isnan(spectra.model[0, 1:]).all()
    assert np.isnan(spectra.short_ratio()[0, 1:]).all()
    assert not spectra.short[1:].any()


def test_a_channel_of_short_runs_does_not_shorten_all_segments() -> None:
    counted = np.concatenate([coast(), coast(), coast()])
    alone = chosen(GLOBE, counted[:1])
    counted[2] = np.arange(96) % 12 > 2  # runs of nine
    stretches = chosen(GLOBE, counted[1:])
    assert stretches.columns == 8
    many = chosen(GLOBE, np.concatenate([*[counted[:1]] * 7, counted[2:]]))
    assert many.columns <= alone.columns
    assert many.columns > 9
    assert many.kind[-1] == (
        f"none: its longest run has 9 columns, segments of {many.columns} are used"
    )


def test_columns_that_are_not_evenly_spaced_have_no_wavenumbers() -> None:
    lon = np.arange(0, 360, 3.75)
    lon[7] += 0.5
    uneven = Grid(GLOBE.lat, lon)
    stretches = chosen(uneven, everywhere(uneven))
    assert stretches.kind == ("none: the columns are not evenly spaced",)
    assert stretches.wavenumber.size == 0
    rounded = Grid(GLOBE.lat, (GLOBE.lon + 1 / 3).astype(np.float32).astype(np.float64))
    assert chosen(rounded, everywhere(rounded)).kind == ("circles",)


def test_a_row_that_lacks_a_true_value_is_left_out_of_both() -> None:
    stretches = chosen(GLOBE, everywhere(GLOBE))
    truth, model = noise((2, 1, *GLOBE.shape))
    truth[0, 3, 5] = np.nan
    model[0, 3, 5] = np.nan
    wild = model.copy()
    wild[0, 3] = 1e6
    first, second = (spectra_of(stretches, [(0, m, truth)]) for m in (model, wild))
    assert first.rows[0, 0] == 29
    np.testing.assert_array_equal(first.model, second.model)
    assert np.isfinite(first.model[0]).all()
    kept = np.delete(np.arange(30), 3)
    weight = GLOBE.cell_area[kept, 0] / GLOBE.cell_area[kept, 0].sum()
    expected = truth[0, kept].astype(np.float64).var(1) @ weight
    assert first.truth[0, 0].sum() == pytest.approx(expected, rel=1e-12)
    model[0, 9, 9] = np.nan
    with pytest.raises(ValueError, match="a is not finite in row 9, where the truth is"):
        spectra_of(stretches, [(0, model, truth)])


def test_blocks_do_not_change_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    stretches, fields = chosen(GLOBE, everywhere(GLOBE)), noise((1, *GLOBE.shape))
    at_once = mean_power(stretches, fields)
    monkeypatch.setattr("graticule.evaluate.stretches.BLOCK_VALUES", 96 * 7)
    np.testing.assert_allclose(mean_power(stretches, fields), at_once, rtol=1e-13)


@pytest.fixture
def spectra() -> Spectra:
    """A variable on two levels, out of order, one without, and one that has no spectrum."""
    channels = Channels([
        Channel(variable="so", units="1e-3", role="prognostic", level=50.0, level_units="m"),
        Channel(variable="zos", units="m", role="prognostic", long_name="sea level"),
        Channel(variable="so", units="1e-3", role="prognostic", level=5.0, level_units="m"),
        Channel(variable="ice", units="1", role="prognostic"),
    ])  # fmt: skip
    counted = everywhere(GLOBE, 4)
    counted[3] = np.arange(96) % 8 > 0
    stretches = Stretches.choose(channels.names, counted, GLOBE, GLOBE.cell_area)
    total = Spectra.zero(channels, np.array([21600, 43200]), stretches)
    truth, model = np.where(counted, noise((2, *counted.shape)), np.nan)
    of_truth = stretches.power(truth)
    total = total.with_pair(0, stretches.power(model, of_truth.used), of_truth)
    told = {"run_fingerprint": "r1", "region": [0, 1, 2, 3]}
    return replace(total, attributes=told)


def test_the_file_holds_all_and_is_read_back(spectra: Spectra, tmp_path: Path) -> None:
    path = tmp_path / "new" / "f.spectra.nc"
    spectra.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["f.spectra.nc"]
    found = Spectra.load(path)
    assert found.channels == spectra.channels
    assert found.names == ("so@50", "zos", "so@5", "ice")
    assert found.units == ("1e-3", "m", "1e-3", "1")
    assert found.kind == spectra.kind
    assert found.attributes["run_fingerprint"] == "r1"
    for name in ("lead_seconds", "wavenumber", "share", "rows", "area"):
        np.testing.assert_array_equal(getattr(found, name), getattr(spectra, name))
    for name in ("model", "truth", "ratio"):
        np.testing.assert_allclose(getattr(found, name), getattr(spectra, name), rtol=1e-14)
    twice = found + spectra
    np.testing.assert_allclose(twice.model, spectra.model, rtol=1e-14)
    assert twice.rows.tolist() == (2 * spectra.rows).tolist()


def test_the_file_is_plain_to_xarray(spectra: Spectra, tmp_path: Path) -> None:
    spectra.save(tmp_path / "s.nc")
    with xr.open_dataset(tmp_path / "s.nc") as data:
        assert data.attrs["Conventions"] == "CF-1.11"
        assert json.loads(data.attrs["region"]) == [0, 1, 2, 3]
        power = data["power_so"]
        assert power.dims == ("source", "lead", "depth", "wavenumber")
        assert power.attrs["units"] == "(1e-3)2"
        assert data["power_ice"].attrs["units"] == "1"
        assert (
            data["power_zos"].attrs["long_name"] == "zonal power of sea level per unit wavenumber"
        )
        assert data["depth"].values.tolist() == [5, 50]
        np.testing.assert_array_equal(
            power.sel(source="truth", lead=1, depth=5), spectra.truth[0, 2]
        )
        assert data["lead_time"].values.astype("timedelta64[h]").astype(int).tolist() == [6, 12]
        rows = data["rows"].sel(channel="ice")
        assert rows.values.tolist() == [0, 0]
        assert str(rows["kind"].values).startswith(
            "none: segments of 8 columns cover 0% of its area"
        )


def test_an_existing_file_is_refused_and_only_spectra_are_replaced(
    spectra: Spectra, tmp_path: Path
) -> None:
    path = tmp_path / "s.nc"
    spectra.save(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        spectra.save(path)
    assert path.read_bytes() == before
    spectra.save(path, force=True)
    for other in (b"thesis", b""):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="is no file of spectra, so it is not replaced"):
            spectra.save(path, force=True)
        assert path.read_bytes() == other
        with pytest.raises(ValueError, match="is no file of spectra"):
            Spectra.load(path)
    xr.Dataset(attrs={"format": "else"}).to_netcdf(tmp_path / "other.nc")
    with pytest.raises(ValueError, match="is no file of spectra"):
        spectra.save(tmp_path / "other.nc", force=True)
    with pytest.raises(ValueError, match="is no file of spectra"):
        spectra.save(tmp_path, force=True)
    with pytest.raises(ValueError, match="no spectra there"):
        Spectra.load(tmp_path / "none.nc")


def test_a_file_that_cannot_be_written_leaves_nothing(
    spectra: Spectra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("disk full")

    path = tmp_path / "s.nc"
    monkeypatch.setattr("graticule.evaluate.files.os.replace", fails)
    with pytest.raises(ValueError, match=r"s\.nc cannot be written: disk full"):
        spectra.save(path)
    assert list(tmp_path.iterdir()) == []


def test_without_any_spectrum_the_file_says_why(tmp_path: Path) -> None:
    counted = everywhere(GLOBE)
    counted[0] = np.arange(96) % 8 > 0
    spectra = spectra_of(chosen(GLOBE, counted), [])
    spectra.save(tmp_path / "s.nc")
    found = Spectra.load(tmp_path / "s.nc")
    assert found.kind[0].startswith("none: ")
    assert found.model.shape == (2, 1, 0)
    assert np.isnan(found.short_ratio()).all()
