"""What is wrong with a store must be found before training, by channel and date."""

import json
import shutil

import numpy as np
import pytest
import zarr

from graticule.cli import main
from graticule.data.check import check
from graticule.data.ingest import ingest
from graticule.data.statistics import FILE_NAME, compute
from graticule.data.store import Store, write_json
from tiny import tiny_dataset, write_netcdf


def tiny_store(tmp_path, dataset=None, name="store", statistics=True, **how) -> Store:
    dataset = tiny_dataset(days=12) if dataset is None else dataset
    store = ingest([write_netcdf(dataset, tmp_path / f"{name}.nc")], tmp_path / name, **how)
    (store.path / FILE_NAME).unlink(missing_ok=True)  # with a train split, ingest saves some
    if statistics:
        compute(store, np.arange(len(store.times))).save(store)
    return store


def found(report, kind):
    return [finding for finding in report.findings if finding.kind == kind]


def test_sound_store_has_a_table_and_no_warnings_but_its_constant_mask(tmp_path):
    calls = []
    store = tiny_store(tmp_path)
    report = check(store, progress=lambda *done: calls.append(done))
    assert calls == [(i, 12) for i in range(1, 13)]
    assert report.ok
    assert [(f.kind, f.channel) for f in report.findings] == [("constant", "mask")]
    row = report.rows[0]
    values = np.stack([store.read(t, [0]) for t in range(12)])
    assert (row.name, row.units) == ("thetao@0.5", "degC")
    assert (row.low, row.high) == (np.nanmin(values), np.nanmax(values))
    assert row.mean == pytest.approx(np.nanmean(values.astype(float)))
    assert row.wet_fraction == pytest.approx(store.wet[0].mean())
    assert report.rows[-1].wet_fraction == pytest.approx(store.wet[0].mean())
    lines = report.lines()
    assert "12 times, 2003-02-20 to 2003-03-03" in lines[0]
    assert lines[-1] == "0 errors, 1 warnings, 0 notes"
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_hole_is_listed_by_channel_and_date(tmp_path):
    dataset = tiny_dataset(days=12)
    dataset["so"][8] = np.nan
    dataset["zos"][3, 2, 1] = np.nan
    report = check(tiny_store(tmp_path, dataset))
    holes = {(f.channel, f.dates) for f in found(report, "hole")}
    assert holes == {
        ("so@0.5", ("2003-02-28",)), ("so@9.5", ("2003-02-28",)), ("zos", ("2003-02-23",))
    }  # fmt: skip
    assert report.ok
    assert {f.severity for f in found(report, "hole")} == {"warning"}
    text = next(f.text for f in found(report, "hole") if f.channel == "zos")
    assert "at up to 1 of " in text
    assert report.rows[2].dates_with_holes == 1


def test_hole_outside_the_times_asked_for_is_not_listed(tmp_path):
    dataset = tiny_dataset(days=12)
    dataset["so"][8] = np.nan
    store = tiny_store(tmp_path, dataset)
    assert found(check(store, times=np.arange(8)), "hole") == []
    assert len(found(check(store, times=np.arange(4, 12)), "hole")) == 2


def test_celsius_called_kelvin_is_out_of_bounds_and_extreme(tmp_path):
    store = tiny_store(tmp_path)
    dataset = tiny_dataset(days=12)
    dataset.thetao.attrs["units"] = "K"
    wrong = tiny_store(tmp_path, dataset, "wrong")
    ranges = found(check(wrong), "range")
    assert {f.channel for f in ranges} == {"thetao@0.5", "thetao@9.5"}
    assert "outside 268.15 to 323.15 K" in ranges[0].text
    assert len(ranges[0].dates) == 12
    assert not check(wrong).ok
    # Statistics in degC of values in K: 293 degC is far from a mean of 13.
    values = json.loads((store.path / "statistics.json").read_text())
    values["store_fingerprint"] = wrong.fingerprint
    kelvin = [mean + 273.15 if name.startswith("thetao") else mean
              for name, mean in zip(values["names"], values["mean"], strict=True)]  # fmt: skip
    write_json(wrong.path / "statistics.json", {**values, "mean": kelvin})
    extreme = found(check(wrong), "extreme")
    assert {f.channel for f in extreme} == {"thetao@0.5", "thetao@9.5"}
    assert "standard deviations from the mean" in extreme[0].text


def test_single_value_out_of_bounds_is_found_with_place_and_date(tmp_path):
    dataset = tiny_dataset(days=4)
    dataset["u10"][2, 4, 5] = 400.0  # lat -30, lon 75
    report = check(tiny_store(tmp_path, dataset))
    finding = found(report, "range")[0]
    assert (finding.channel, finding.dates, finding.severity) == ("u10", ("2003-02-22",), "error")
    assert "1 values outside -150 to 150 m s-1" in finding.text
    assert "400 m s-1 at lat -30, lon 75" in finding.text
    assert not report.ok


def test_lost_shard_is_an_error_with_file_and_date(tmp_path):
    store = tiny_store(tmp_path)
    store.shard_path(5).unlink()
    report = check(Store(store.path))
    lost = found(report, "lost")
    assert [(f.channel, f.dates) for f in lost] == [("", ("2003-02-25",))]
    assert "fields/c/5" in lost[0].text
    assert not report.ok
    assert report.rows[0].low > -5


def test_torn_shard_is_an_error_with_file_and_date(tmp_path):
    store = tiny_store(tmp_path)
    shard = store.shard_path(5)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    lost = found(check(Store(store.path)), "lost")
    assert [(f.dates, f.severity) for f in lost] == [(("2003-02-25",), "error")]
    assert "fields/c/5" in lost[0].text


def test_flipped_byte_in_one_chunk_names_the_channel(tmp_path):
    store = tiny_store(tmp_path, inner_chunk=(1, 17))
    shard = store.shard_path(5)
    data = bytearray(shard.read_bytes())
    data[30] ^= 0xFF
    shard.write_bytes(data)
    lost = found(check(Store(store.path)), "lost")
    assert len(lost) == 1
    assert lost[0].channel in store.channels.names
    assert lost[0].dates == ("2003-02-25",)
    assert lost[0].channel in lost[0].text or "fields/c/5" in lost[0].text


def test_values_that_changed_after_writing_are_an_error(tmp_path):
    store = tiny_store(tmp_path)
    writable = zarr.open_group(str(store.path), mode="r+")["fields"]
    day = np.asarray(writable[4])
    day[0] = 10.0
    writable[4] = day
    finding = found(check(Store(store.path)), "mask")[0]
    assert (finding.channel, finding.dates) == ("thetao@0.5", ("2003-02-24",))
    assert finding.severity == "error"


def test_gaps_are_for_information(tmp_path):
    dataset = tiny_dataset().isel(time=[0, 1, 2, 5, 6, 7])
    report = check(tiny_store(tmp_path, dataset))
    gap = found(report, "gap")[0]
    assert (gap.severity, gap.dates) == ("info", ("2003-02-25",))
    assert "from 2003-02-22 to 2003-02-25" in gap.text
    assert report.ok


def test_no_leap_year_has_no_gap(tmp_path):
    dataset = tiny_dataset(days=9, start=(2004, 2, 25), calendar="noleap")
    assert found(check(tiny_store(tmp_path, dataset)), "gap") == []


def test_constant_channel_is_named(tmp_path):
    dataset = tiny_dataset(days=4)
    dataset["zos"] = dataset.zos.where(np.isnan(dataset.zos), 5.0)
    report = check(tiny_store(tmp_path, dataset))
    assert [f.channel for f in found(report, "constant")] == ["zos", "mask"]
    assert "zos is 5 m everywhere" in found(report, "constant")[0].text


def test_a_channel_that_is_constant_in_training_alone_is_named_with_its_range(tmp_path):
    dataset = tiny_dataset(days=4)
    sea = np.isfinite(dataset.zos.values)
    dataset["zos"].values[:3] = np.where(sea[:3], 5.0, np.nan)
    dataset["zos"].values[3] = np.where(sea[3], 35.0, np.nan)
    store = tiny_store(tmp_path, dataset, statistics=False)
    compute(store, np.arange(3)).save(store)
    mask, zos = found(check(store), "constant")
    assert (mask.channel, zos.channel) == ("mask", "zos")
    assert zos.text.startswith("zos is 5 in training and 5 to 35 here: it will be normalised to 0")
    # A constant has no standard deviations to be away from its mean by.
    assert found(check(store), "extreme") == []
    last = found(check(store, times=[3]), "constant")[-1]
    assert "zos is 5 in training and 35 to 35 here" in last.text
    within = found(check(store, times=range(3)), "constant")
    assert [finding.channel for finding in within] == ["zos", "mask"]


def test_statistics_that_are_missing_of_other_times_or_of_another_store_are_told(tmp_path):
    splits = {"train": ["2003-02-20/2003-02-27"], "test": ["2003-02-28/2003-03-03"]}
    store = tiny_store(tmp_path, statistics=False, splits=splits)
    missing = found(check(store), "statistics")
    assert [(f.severity, "no statistics yet" in f.text) for f in missing] == [("warning", True)]
    compute(store, np.arange(12)).save(store)
    other = found(check(store), "statistics")
    assert [f.severity for f in other] == ["warning"]
    assert "come from 12 times" in other[0].text
    compute(store, np.arange(8)).save(store)
    assert found(check(store), "statistics") == []
    values = json.loads((store.path / "statistics.json").read_text())
    write_json(store.path / "statistics.json", {**values, "store_fingerprint": "0" * 16})
    report = check(store)
    assert [f.severity for f in found(report, "statistics")] == ["error"]
    assert not report.ok


def test_numbers_that_are_not_those_written_are_an_error_though_mask_and_bounds_hold(tmp_path):
    store = tiny_store(tmp_path)
    writable = zarr.open_group(str(store.path), mode="r+")["fields"]
    day = np.asarray(writable[4])
    day[0] += np.float32(0.125)
    writable[4] = day
    report = check(Store(store.path))
    assert [(f.kind, f.dates) for f in report.findings if f.severity == "error"] == [
        ("changed", ("2003-02-24",))
    ]
    # A shard of another day is whole, and wrong.
    shutil.copy(store.shard_path(7), store.shard_path(4))
    assert [f.dates for f in found(check(Store(store.path)), "changed")] == [("2003-02-24",)]


def test_policies_are_printed_and_make_gaps_and_holes_errors(tmp_path, capsys):
    dataset = tiny_dataset().isel(time=[0, 1, 2, 5, 6, 7])
    dataset["so"][2] = np.nan
    store = tiny_store(tmp_path, dataset)
    plain = check(store)
    assert plain.ok
    assert "policy: gap drop-window, hole drop-window, lost error" in plain.lines()[-2]
    for policy in ({"gap": "error"}, {"hole": "error"}, {"gap": "error", "hole": "error"}):
        report = check(store, policies=policy)
        assert {f.kind for f in report.findings if f.severity == "error"} == set(policy)
        assert report.to_json()["policies"]["lost"] == "error"
    command = ["data", "check", str(store.path)]
    assert main(command) == 0
    assert main([*command, "--policy", "hole=error,gap=drop-window"]) == 1
    assert "hole error" in capsys.readouterr().out
    for wrong in ("hole", "hole=drop", "holes=error", "lost=drop-window"):
        assert main([*command, "--policy", wrong]) == 2
