"""An ingest that is stopped, killed or shared out comes to the same store as one that is not."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.cli import main
from graticule.data.ingest import ingest
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from tiny import tiny_dataset, write_netcdf

NAMES = ["thetao", "u10", "mask"]
TRAIN = {"train": ["2003-02-22/2003-02-27"]}
"""So that statistics, too, are compared byte for byte."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_netcdf(tiny_dataset(days=10), tmp_path_factory.mktemp("file") / "a.nc")


@pytest.fixture(scope="module")
def whole(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = ingest(
        [file], tmp_path_factory.mktemp("whole") / "store", variables=NAMES, splits=TRAIN
    )
    assert store is not None
    return store


def assert_same(store: Store | None, other: Store) -> None:
    """Every file, byte for byte."""
    assert store is not None
    assert store.fingerprint == other.fingerprint
    assert (store.path / "statistics.json").is_file() == bool(store.splits)
    files = [{str(p.relative_to(s.path)): p.read_bytes() for p in s.path.rglob("*") if p.is_file()}
             for s in (store, other)]  # fmt: skip
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []


def stop_after(number: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done == number:
            raise KeyboardInterrupt

    return progress


def modified(out: Path) -> dict[str, int]:
    return {p.parents[2].name: p.stat().st_mtime_ns for p in out.glob("fields/c/*/0/0/0")}


def test_a_stopped_ingest_goes_on_where_it_was(
    file: Path, whole: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        ingest([file], out, variables=NAMES, splits=TRAIN, progress=stop_after(4))
    assert "4 of 10 steps are finished; mend what is wrong and run the same command" in caplog.text
    with pytest.raises(ValueError, match="incomplete"):
        Store(out)
    before = modified(out)
    assert len(before) == 4
    with caplog.at_level(logging.INFO, "graticule"):
        store = ingest([file], out, variables=NAMES, splits=TRAIN)
    assert "4 finished steps were there and are verified" in caplog.text
    assert {key: modified(out)[key] for key in before} == before
    assert_same(store, whole)
    with caplog.at_level(logging.INFO, "graticule"):
        assert_same(ingest([file], out, variables=NAMES, splits=TRAIN), whole)
    assert "is complete already" in caplog.text


def test_an_ingest_begun_before_longitudes_could_be_cut_goes_on(
    file: Path, whole: Store, tmp_path: Path
) -> None:
    """Its chunk is noted as two sizes, channels and rows of all columns."""
    out = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        ingest([file], out, variables=NAMES, splits=TRAIN, progress=stop_after(4))
    about = json.loads((out / "zarr.json").read_text())
    begun = about["attributes"]["begun"]
    channels, rows, columns = begun["inner_chunk"]
    assert columns == whole.grid.shape[1]
    begun["inner_chunk"] = [channels, rows]
    (out / "zarr.json").write_text(json.dumps(about))
    assert_same(ingest([file], out, variables=NAMES, splits=TRAIN), whole)


@pytest.mark.parametrize("harm", ["torn", "other", "lost", "mask"])
def test_a_finished_step_that_is_not_what_was_recorded_is_written_again(
    harm: str, file: Path, whole: Store, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        ingest([file], out, variables=NAMES, splits=TRAIN, progress=stop_after(5))
    shard = out / "fields" / "c" / "2" / "0" / "0" / "0"
    if harm == "torn":
        shard.write_bytes(shard.read_bytes()[:-9])
    elif harm == "other":
        shutil.copy(out / "fields" / "c" / "3" / "0" / "0" / "0", shard)
    elif harm == "lost":
        shard.unlink()
    else:
        for mask in (out / "records" / "masks").iterdir():
            mask.unlink()
    assert_same(ingest([file], out, variables=NAMES, splits=TRAIN), whole)


def test_steps_of_a_file_that_was_mended_are_written_again(tmp_path: Path, whole: Store) -> None:
    dataset = tiny_dataset(days=10)
    first = write_netcdf(dataset.isel(time=slice(0, 4)), tmp_path / "first.nc")
    broken = dataset.isel(time=slice(4, 10)).copy(deep=True)
    broken["u10"][3, 2, 2] = np.inf
    second = write_netcdf(broken, tmp_path / "second.nc")
    out = tmp_path / "store"
    with pytest.raises(ValueError, match=r"2003-02-27.*infinite"):
        ingest([first, second], out, variables=NAMES, splits=TRAIN)
    before = modified(out)
    assert len(before) == 7
    write_netcdf(dataset.isel(time=slice(4, 10)), second)
    store = ingest([first, second], out, variables=NAMES, splits=TRAIN)
    assert store is not None
    after = modified(out)
    assert {key for key in before if after[key] == before[key]} == {"0", "1", "2", "3"}
    for index in range(10):
        np.testing.assert_array_equal(store.read(index), whole.read(index))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"variables": ["thetao", "u10"]}, "variables"),
        ({"roles": {"u10": "forcing"}}, "roles"),
        ({"packing": "int16"}, r"packing \(source then, int16 now\)"),
        ({"inner_chunk": (1, 8)}, "inner_chunk"),
        ({"units": {"thetao": "K"}}, "units"),
        ({"splits": {"train": ["2003-02"]}}, "splits"),
        ({"levels": [0.5]}, "levels"),
    ],
)
def test_another_command_on_the_same_store_is_refused(
    change: dict[str, Any], what: str, file: Path, whole: Store, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        ingest([file], out, variables=NAMES, splits=TRAIN, progress=stop_after(2))
    with pytest.raises(ValueError, match=rf"was begun with other {what}.* is not overwritten"):
        ingest([file], out, **{"variables": NAMES, "splits": TRAIN, **change})
    assert len(modified(out)) == 2
    with pytest.raises(ValueError, match=rf"exists already with other {what}"):
        ingest([file], whole.path, **{"variables": NAMES, "splits": TRAIN, **change})


def test_a_complete_store_of_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = write_netcdf(tiny_dataset(days=3), tmp_path / "a.nc")
    ingest([path], tmp_path / "store")
    write_netcdf(tiny_dataset(days=3).isel(lat=slice(None, None, -1)), path)
    with pytest.raises(ValueError, match="exists already with other sources, which have changed"):
        ingest([path], tmp_path / "store")


def command(file: Path, out: Path, *more: str) -> list[str]:
    code = "import sys; from graticule.cli import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, "data", "ingest", str(file), "--out", str(out),
            "--variables", ",".join(NAMES), "--train", *TRAIN["train"], *more]  # fmt: skip


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def test_an_ingest_killed_outright_goes_on_and_leaves_no_process(
    file: Path, whole: Store, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    slow = f"""
        import sys, time
        from graticule.cli import main
        from graticule.data import writer
        write = writer.StoreWriter.write_stored
        def slowly(self, *arguments):
            write(self, *arguments)
            time.sleep(0.3)
        writer.StoreWriter.write_stored = slowly
        if __name__ == "__main__":
            sys.exit(main({command(file, out, "--workers", "2")[3:]!r}))
    """
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(slow))
    process = subprocess.Popen([sys.executable, str(script)], env=ENVIRONMENT)
    deadline = time.monotonic() + 120
    while len(modified(out)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.5)  # orphans, if there were any, would write on
    left = len(modified(out))
    assert left < 10
    time.sleep(1.0)
    assert len(modified(out)) == left
    assert_same(ingest([file], out, variables=NAMES, splits=TRAIN), whole)
    assert [p.name for p in out.iterdir() if p.name.startswith(".")] == []


def test_workers_write_the_same_store_and_end_at_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = tiny_dataset(days=6)
    dataset.thetao.attrs["units"] = "K"
    path = write_netcdf(dataset, tmp_path / "a.nc")
    whole = ingest([path], tmp_path / "whole", variables=NAMES, splits=TRAIN)
    assert whole is not None
    caplog.clear()
    calls: list[tuple[int, int]] = []
    store = ingest([path], tmp_path / "store", variables=NAMES, splits=TRAIN, workers=2,
                   progress=lambda *done: calls.append(done))  # fmt: skip
    assert calls[:6] == [(i, 6) for i in range(1, 7)]
    # Changes between steps that both workers missed come on top, if there are any.
    assert all(6 < done <= total for done, total in calls[6:])
    assert_same(store, whole)
    assert caplog.text.count("thetao@0.5 holds") == 1, "what both workers warn of is told once"
    dataset["u10"][5, 2, 2] = np.inf
    write_netcdf(dataset, path)
    with pytest.raises(ValueError, match=r"2003-02-25.*u10 holds an infinite value"):
        ingest([path], tmp_path / "other", variables=NAMES, splits=TRAIN, workers=2)
    assert multiprocessing.active_children() == []
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        ingest([path], tmp_path / "none", variables=NAMES, splits=TRAIN, workers=0)


@pytest.mark.parametrize("packing", ["source", "int16"])
def test_parts_in_any_order_make_the_whole(packing: Any, file: Path, tmp_path: Path) -> None:
    options: Any = {"variables": NAMES, "splits": TRAIN, "packing": packing, "inner_chunk": (2, 4)}
    whole = ingest([file], tmp_path / "whole", **options)
    assert whole is not None
    out = tmp_path / "store"
    for part in ((3, 4), (1, 4), (4, 4)):
        assert ingest([file], out, part=part, **options) is None
        with pytest.raises(ValueError, match="incomplete"):
            Store(out)
    assert len(modified(out)) == 7  # parts of 3, 3, 2 and 2
    assert_same(ingest([file], out, part=(2, 4), **options), whole)
    assert_same(ingest([file], out, part=(1, 4), **options), whole)
    for part in ((0, 4), (5, 4), (1, 0)):
        with pytest.raises(ValueError, match=r"part \d/\d: parts of \d are 1 to"):
            ingest([file], tmp_path / "none", part=part, **options)


def test_the_command_without_a_part_finishes_what_parts_left(
    file: Path, whole: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    rest = command(file, out)[3:]
    assert main([*rest, "--part", "2/3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is False
    assert main([*rest, "--part", "2"]) == 2
    assert main(rest) == 0
    assert_same(Store(out), whole)


BOTH = {"train": ["2003-02-20/2003-02-21"]}


def test_two_parts_at_once_are_the_whole_twenty_times(tmp_path: Path) -> None:
    # Chunks of 4 rows do not divide 17; what one part writes the other must not lose.
    file = write_netcdf(tiny_dataset(days=2)[["zos"]], tmp_path / "a.nc")
    whole = ingest([file], tmp_path / "whole", splits=BOTH)
    assert whole is not None
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        for repeat in range(20):
            out = tmp_path / str(repeat)
            ended = pool.starmap(run_part, [(file, out, 1), (file, out, 2)], chunksize=1)
            assert any(ended)
            store = Store(out)
            for index in range(2):
                np.testing.assert_array_equal(store.read(index), whole.read(index))
            np.testing.assert_array_equal(store.wet, whole.wet)
            found = Statistics.load(store)
            for key in ("mean", "std", "tendency_std"):
                # In bands of other rows.
                np.testing.assert_allclose(
                    getattr(found, key), getattr(Statistics.load(whole), key), rtol=1e-12
                )
            assert found.tendency_std[0] > 0
            assert sorted(p.name for p in out.iterdir()) == sorted(
                p.name for p in whole.path.iterdir()
            )


def run_part(file: Path, out: Path, part: int) -> bool:
    """Whether this part ended last."""
    return ingest([file], out, part=(part, 2), inner_chunk=(1, 4), splits=BOTH) is not None
