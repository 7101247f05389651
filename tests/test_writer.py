"""The forecast file: what a plain reader sees, and what is refused."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cftime
import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr

from graticule.data.times import MEAN_MONTH_SECONDS
from graticule.forecast.levels import layouts
from graticule.forecast.reader import open_forecast
from graticule.forecast.writer import ForecastWriter
from graticule.grid import Grid
from graticule.variables import Channel, Channels

SUFFIXES = ("zarr", "nc")
DAY = 86400
GRID = Grid(np.array([60.0, 0.0, -60.0]), np.array([0.0, 90.0, 180.0, 270.0]))


def channel(variable: str, level: float | None = None, **more: Any) -> Channel:
    given = {"units": "degC", "level_units": "" if level is None else "m", **more}
    return Channel(variable=variable, role="prognostic", level=level, **given)


# Neither by variable nor by level: the file sorts, the reader must give this order back.
CHANNELS = Channels([
    channel("thetao", 100.0, standard_name="sea_water_potential_temperature"),
    channel("so", 5.0, units="1e-3"),
    channel("zos", units="m", long_name="sea surface height"),
    channel("thetao", 5.0, standard_name="sea_water_potential_temperature"),
    channel("so", 100.0, units="1e-3"),
    channel("uo", 5.0, units="m s-1"),
    channel("t", 850.0, units="K", level_units="hPa"),
])  # fmt: skip


def date(day: int, calendar: str = "standard") -> cftime.datetime:
    return cftime.num2date(day, "days since 2004-02-27", calendar, has_year_zero=True)


def settings(calendar: str = "standard", leads: int = 3, **more: Any) -> dict[str, Any]:
    inits = [date(0, calendar), date(2, calendar)]
    valid = [[date(start + k + 1, calendar) for k in range(leads)] for start in (0, 2)]
    return {
        "channels": CHANNELS, "grid": GRID, "init_times": inits, "valid_times": np.array(valid),
        "nominal_step_seconds": float(DAY), "regular": True,
        "attributes": {"run_fingerprint": "abc", "steps": 7, "config": {"a": [1]}}, **more,
    }  # fmt: skip


def fields(init: int, lead: int) -> np.ndarray:
    """Each number says where it belongs; the first column is land."""
    values = np.arange(len(CHANNELS) * 12, dtype=np.float32).reshape(len(CHANNELS), 3, 4)
    values = values + np.float32(1000 * (init + 1) + 100 * (lead + 1))
    values[:, :, 0] = np.nan
    return values


def write_all(path: Path, **more: Any) -> None:
    with ForecastWriter(path, **settings(**more)) as writer:
        for init in range(2):
            for lead in range(3):
                writer.write(init, lead, fields(init, lead))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_reader_returns_channels_in_the_writers_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f.{suffix}"
    write_all(path)
    with open_forecast(path) as forecast:
        assert forecast.channels == CHANNELS
        assert forecast.num_leads == 3
        assert forecast.init_times == settings()["init_times"]
        assert (forecast.valid_times == settings()["valid_times"]).all()
        assert forecast.lead_seconds.tolist() == [DAY, 2 * DAY, 3 * DAY]
        assert forecast.grid.same_as(GRID, 0.0)
        assert forecast.attributes["run_fingerprint"] == "abc"
        assert forecast.attributes["steps"] == 7
        for init in range(2):
            for lead in range(3):
                back = forecast.read(init, lead)
                assert back.dtype == np.float32
                np.testing.assert_array_equal(back, fields(init, lead))
        with pytest.raises(ValueError, match="init 0, lead 3 lies outside 2 x 3"):
            forecast.read(0, 3)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day", "proleptic_gregorian"])
def test_plain_xarray_decodes_leads_as_durations(
    tmp_path: Path, suffix: str, calendar: str
) -> None:
    path = tmp_path / f"f.{suffix}"
    write_all(path, calendar=calendar)
    data = xr.open_zarr(path) if suffix == "zarr" else xr.open_dataset(path)
    with data, xr.open_dataset(path) as again:
        xr.testing.assert_identical(data, again)
        assert data["lead_time"].dtype.kind == "m"
        assert (data["lead_time"].values == np.arange(1, 4) * np.timedelta64(1, "D")).all()
        valid, init = data["valid_time"].values, data["init_time"].values
        if calendar in ("standard", "proleptic_gregorian"):
            assert (valid == init[:, None] + data["lead_time"].values).all()
            assert valid[0, 1] == np.datetime64("2004-02-29")
        else:
            assert (valid == settings(calendar)["valid_times"]).all()
            text = "2004-02-29" if calendar == "360_day" else "2004-03-01"
            assert valid[0, 1].isoformat()[:10] == text


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_is_cf_with_one_dim_per_set_of_levels(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f.{suffix}"
    write_all(path)
    with xr.open_dataset(path) as data:
        assert data.attrs["Conventions"] == "CF-1.11"
        assert data.attrs["complete"] == 1
        assert data.attrs["config"] == '{"a": [1]}'
        assert data["thetao"].dims == ("init_time", "lead_time", "depth", "lat", "lon")
        assert data["so"].dims == data["thetao"].dims
        assert data["uo"].dims == ("init_time", "lead_time", "depth_2", "lat", "lon")
        assert data["t"].dims == ("init_time", "lead_time", "level", "lat", "lon")
        assert data["zos"].dims == ("init_time", "lead_time", "lat", "lon")
        assert data["depth"].values.tolist() == [5.0, 100.0]
        assert data["depth"].attrs["positive"] == "down"
        assert data["level"].attrs["units"] == "hPa"
        assert data["thetao"].attrs["standard_name"] == "sea_water_potential_temperature"
        assert data["zos"].attrs == {"units": "m", "long_name": "sea surface height"}
        assert data["zos"].encoding["_FillValue"] != data["zos"].encoding["_FillValue"]
        assert data["lat"].attrs["units"] == "degrees_north"
        assert data["init_time"].attrs["standard_name"] == "forecast_reference_time"
        assert set(data["thetao"].coords) >= {"valid_time", "init_time", "lead_time"}
        chosen = data["thetao"].sel(depth=100.0).isel(init_time=1, lead_time=2).values
        np.testing.assert_array_equal(chosen, fields(1, 2)[0])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_monthly_leads_are_nominal_and_valid_times_exact(tmp_path: Path, suffix: str) -> None:
    months = [cftime.datetime(2003, month, 16, calendar="noleap") for month in (1, 2, 3)]
    path = tmp_path / f"f.{suffix}"
    with ForecastWriter(
        path, channels=CHANNELS, grid=GRID, init_times=months[:1],
        valid_times=np.array([months[1:]]), nominal_step_seconds=MEAN_MONTH_SECONDS,
        regular=False, attributes={},
    ) as writer:  # fmt: skip
        for lead in (0, 1):
            writer.write(0, lead, fields(0, lead))
    with xr.open_dataset(path) as data:
        step = np.timedelta64(round(MEAN_MONTH_SECONDS), "s")
        assert (data["lead_time"].values == [step, 2 * step]).all()
        assert "30.4369 days" in data["lead_time"].attrs["comment"]
        assert data["valid_time"].values.tolist() == [months[1:]]
    with open_forecast(path) as forecast:
        assert not forecast.regular


def test_a_thousand_years_of_months_do_not_overflow_the_lead(tmp_path: Path) -> None:
    years = [cftime.datetime(y, 1, 1, calendar="noleap") for y in (1, 1001)]
    with ForecastWriter(
        tmp_path / "f.zarr", channels=CHANNELS, grid=GRID, init_times=years[:1],
        valid_times=np.array([years[1:]]), nominal_step_seconds=365000.0 * DAY, regular=True,
        attributes={},
    ) as writer:  # fmt: skip
        writer.write(0, 0, fields(0, 0))
    with xr.open_dataset(tmp_path / "f.zarr") as data:
        assert data["lead_time"].values[0] == np.timedelta64(365000, "D")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_existing_path_is_refused_and_untouched(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f.{suffix}"
    path.write_bytes(b"precious")
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        ForecastWriter(path, **settings())
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_path_inside_an_input_is_refused(tmp_path: Path, suffix: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for path in (store, store / "deep" / f"f.{suffix}", tmp_path / "x" / ".." / "store" / "f.nc"):
        with pytest.raises(ValueError, match=r"lies in .*store, which the forecast is made from"):
            ForecastWriter(path, **settings(inputs=[store], format="zarr"))
    assert list(store.iterdir()) == []


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"end the name with \.zarr or \.nc"):
        ForecastWriter(tmp_path / "f.grib", **settings())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_closing_before_the_last_lead_leaves_it_incomplete(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f.{suffix}"
    writer = ForecastWriter(path, **settings())
    writer.write(0, 0, fields(0, 0))
    with pytest.raises(ValueError, match="5 of 6 leads were not written, the first is init_time"
                                         " 2004-02-27 00:00:00, lead 2"):  # fmt: skip
        writer.close()
    with pytest.raises(ValueError, match=r"is incomplete.*Only forecasts with all leads are read"):
        open_forecast(path)
    with xr.open_dataset(path) as data:
        assert data.attrs["complete"] == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_error_in_the_block_leaves_it_incomplete(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f.{suffix}"

    def failing() -> None:
        with ForecastWriter(path, **settings(leads=1)) as writer:
            for init in (0, 1):
                writer.write(init, 0, fields(init, 0))
            raise KeyError("the model failed after its last lead")

    with pytest.raises(KeyError, match="the model failed"):
        failing()
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(path)


def test_a_killed_forecast_is_recognised(tmp_path: Path) -> None:
    program = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_writer import ForecastWriter, Path, fields, settings
        writers = [ForecastWriter(Path({str(tmp_path)!r}) / f"f.{{s}}", **settings())
                   for s in ("zarr", "nc")]
        for writer in writers:
            writer.write(0, 0, fields(0, 0))
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    for suffix in SUFFIXES:
        path = tmp_path / f"f.{suffix}"
        assert path.exists()
        with pytest.raises(ValueError, match="incomplete"):
            open_forecast(path)


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writes past `size` bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_names_the_path_and_leaves_it_incomplete(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f.{suffix}"
    grid = Grid(np.linspace(80, -80, 200), np.arange(0, 360, 1.0))
    one = Channels([channel("zos", units="m")])
    noise = np.random.default_rng(0).normal(size=(1, 200, 360)).astype(np.float32)

    def fill() -> None:
        with ForecastWriter(path, **settings(grid=grid, channels=one)) as writer:
            for init in (0, 1):
                for lead in range(3):
                    writer.write(init, lead, noise)

    with no_file_beyond(150_000), pytest.raises(ValueError, match=rf"f\.{suffix}: cannot write"):
        fill()
    with pytest.raises(ValueError, match="incomplete"):
        open_forecast(path)


def test_a_lost_chunk_is_an_error_and_not_land(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    write_all(path)
    os.remove(path / "thetao" / "c" / "1" / "2" / "0" / "0" / "0")
    with open_forecast(path) as forecast:
        forecast.read(1, 1)
        with pytest.raises(ValueError, match=r"thetao at init_time 2004-02-29.*lead 3 is lost"):
            forecast.read(1, 2)


def test_a_lost_time_axis_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    write_all(path)
    os.remove(path / "init_time" / "c" / "0")
    with pytest.raises(ValueError, match="init_time is lost"):
        open_forecast(path)


def test_what_is_no_forecast_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no forecast there"):
        open_forecast(tmp_path / "none.zarr")
    netCDF4.Dataset(tmp_path / "other.nc", "w").close()
    with pytest.raises(ValueError, match="has format None"):
        open_forecast(tmp_path / "other.nc")
    (tmp_path / "text.nc").write_text("no")
    with pytest.raises(ValueError, match="is no forecast, or incomplete"):
        open_forecast(tmp_path / "text.nc")


def test_wrong_fields_are_refused(tmp_path: Path) -> None:
    writer = ForecastWriter(tmp_path / "f.zarr", **settings())
    with pytest.raises(ValueError, match=r"float64 .* wants float32"):
        writer.write(0, 0, fields(0, 0).astype(np.float64))
    with pytest.raises(ValueError, match="lies outside 2 inits x 3 leads"):
        writer.write(0, 3, fields(0, 0))
    blown = fields(0, 0)
    blown[2, 1, 1] = np.inf
    with pytest.raises(ValueError, match=r"zos is infinite at init_time 2004-02-27.*lead 1"):
        writer.write(0, 0, blown)
    writer.write(0, 0, fields(0, 0))
    with pytest.raises(ValueError, match="lead 1 is written already"):
        writer.write(0, 0, fields(0, 0))


def test_times_that_contradict_the_step_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    late = settings()
    late["valid_times"] = late["valid_times"][:, 1:]
    with pytest.raises(ValueError, match="is not 1 steps of 86400 s later"):
        ForecastWriter(path, **late)
    mixed = settings()
    mixed["valid_times"] = settings("noleap")["valid_times"]
    with pytest.raises(ValueError, match="share one calendar"):
        ForecastWriter(path, **mixed)
    assert not path.exists()


def test_levels_that_contradict_are_refused(tmp_path: Path) -> None:
    for pair, text in (
        ([channel("so", 5.0), channel("so")], "levels"),
        ([channel("so", 5.0), channel("so", 6.0, units="g/kg")], "one unit"),
        ([channel("lat")], "cannot be called lat"),
    ):
        with pytest.raises(ValueError, match=text):
            ForecastWriter(tmp_path / "f.zarr", **settings(channels=Channels(pair)))


@pytest.mark.parametrize("name", ["a/b", "\\frac", "$x_", "<b>x", " x", ""])
def test_a_name_that_no_file_can_hold_is_refused_before_anything_is_written(name: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be called .* rename it in the store"):
        layouts(Channels([channel(name, units="m")]))


# Several writers of one file


def test_a_file_that_another_joins_is_complete_when_the_first_hears_that_all_is_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f.zarr"
    first = ForecastWriter(path, **settings(own=[1]))
    other = ForecastWriter(path, **settings(own=[0], joins=True))
    with pytest.raises(ValueError, match=r"2004-02-27.*lead 1 is another process's to write"):
        first.write(0, 0, fields(0, 0))
    for lead in range(3):
        other.write(0, lead, fields(0, lead))
        first.write(1, lead, fields(1, lead))
    other.close()
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(path)
    first.close(first.written + other.written)
    with open_forecast(path) as forecast:
        for init in range(2):
            for lead in range(3):
                np.testing.assert_array_equal(forecast.read(init, lead), fields(init, lead))


def test_a_file_whose_other_writer_is_not_done_stays_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "f.zarr"
    first = ForecastWriter(path, **settings(own=[0]))
    other = ForecastWriter(path, **settings(own=[1], joins=True))
    for lead in range(3):
        first.write(0, lead, fields(0, lead))
    other.write(1, 0, fields(1, 0))
    with pytest.raises(ValueError, match="2 of 6 leads were not written, the first is init_time"
                                         " 2004-02-29 00:00:00, lead 2"):  # fmt: skip
        other.close()
    with pytest.raises(ValueError, match="all processes together wrote 4 of 6 leads"):
        first.close(first.written + other.written)
    with pytest.raises(ValueError, match="is incomplete"):
        open_forecast(path)


def test_no_two_initial_times_or_leads_share_a_chunk(tmp_path: Path) -> None:
    write_all(tmp_path / "f.zarr")
    for _, array in zarr.open_group(tmp_path / "f.zarr", mode="r").arrays():
        if array.dtype == np.float32:
            assert array.chunks[:2] == (1, 1)
            assert array.shards is None


def test_joining_what_is_not_there_or_is_netcdf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name a folder that all processes share"):
        ForecastWriter(tmp_path / "f.zarr", **settings(own=[1], joins=True))
    for more in ({"own": [0]}, {"own": [1], "joins": True}):
        with pytest.raises(ValueError, match=r"only one process can write a netCDF .*\.zarr, or"):
            ForecastWriter(tmp_path / "f.nc", **settings(**more))
    assert list(tmp_path.iterdir()) == []
