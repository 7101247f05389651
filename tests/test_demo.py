"""The demo: the planet's store, however many processes make it, and the whole path on it."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graticule import demo as whole_path
from graticule.config import from_dict, override
from graticule.data import demo as demo_module
from graticule.data import planet as planets
from graticule.data.check import check
from graticule.data.demo import run_times, simulated, splits_by_run, write_demo_store
from graticule.data.planet import Planet
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.demo import run_demo
from graticule.forecast.reader import open_forecast
from graticule.recipes import recipe
from graticule.tasks import evaluate_forecast, forecast_from_run, scores_of, trained_run
from graticule.train.task import Task
from graticule.train.trainer import train

TINY = Planet(num_lat=24, num_lon=48, num_runs=3, samples_per_run=14, dt_seconds=720)
SMALL_MODEL = ["model.width=16", "model.depth=1", "model.heads=2", "model.norm_groups=4"]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_demo_store(tmp_path_factory.mktemp("data") / "planet.zarr", TINY, workers=1)


# The store


def test_runs_follow_each_other_with_gaps_and_each_has_one_split(store: Store) -> None:
    seconds = run_times(TINY)
    assert seconds.shape == (3, 14)
    assert (np.diff(seconds, axis=1) == 6 * 3600).all()
    assert (seconds[1:, 0] - seconds[:-1, -1] > 10 * 86400).all()
    assert (seconds[:, 0] % 86400 == 0).all()
    np.testing.assert_array_equal(store.times.segments, np.repeat([0, 1, 2], 14))
    source = SampleSource(store, replace(recipe("demo").data, grid=None))
    for number, split in enumerate(("train", "validation", "test")):
        assert source.times(split).tolist() == list(range(14 * number, 14 * number + 14))
    four = replace(TINY, num_runs=5)
    assert [len(splits_by_run(four)[s]) for s in ("train", "validation", "test")] == [1, 1, 1]
    with pytest.raises(ValueError, match="2 runs cannot be split: train, validation and test"):
        splits_by_run(replace(TINY, num_runs=2))


def test_the_store_holds_what_the_planet_did_and_passes_the_check(store: Store) -> None:
    assert store.channels.names == ("u", "v", "h")
    for run in range(3):
        states = planets.simulate(TINY, run)
        for sample in (0, 13):
            np.testing.assert_array_equal(store.read(14 * run + sample), states[sample])
    Statistics.load(store).check_times(store, np.arange(14))
    assert check(store).ok
    assert store.attributes["provenance"]["planet"]["num_lat"] == 24


def test_any_number_of_processes_writes_the_same_store_bit_for_bit(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_module, "num_cpus", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    calls: list[tuple[int, int]] = []
    other = write_demo_store(tmp_path / "other", TINY, progress=lambda d, n: calls.append((d, n)))
    assert calls == [(14, 42), (28, 42), (42, 42)]
    assert other.fingerprint == store.fingerprint
    ours, theirs = contents(other.path), contents(store.path)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours)
    # What the children were given is theirs alone, and they are gone.
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    assert not multiprocessing.active_children()


def test_one_process_hears_of_every_sample() -> None:
    calls: list[int] = []
    for _ in simulated(replace(TINY, samples_per_run=3), 1, lambda done, total: calls.append(done)):
        assert calls[-1] % 3 == 0
    assert calls == list(range(1, 10))


@pytest.mark.parametrize("existed", [False, True])
def test_an_error_in_a_child_is_the_planets_own_and_leaves_nothing(
    tmp_path: Path, existed: bool
) -> None:
    if existed:
        (tmp_path / "store").mkdir()
    with pytest.raises(ValueError, match=r"dt_seconds=1800 is too long .* Take") as error:
        write_demo_store(tmp_path / "store", replace(TINY, dt_seconds=1800), workers=2)
    assert len(str(error.value).splitlines()) == 1
    assert (tmp_path / "store").exists() == existed
    assert not existed or not any((tmp_path / "store").iterdir())
    assert not multiprocessing.active_children()


def test_an_existing_store_is_neither_overwritten_nor_removed(store: Store) -> None:
    before = contents(store.path)
    with pytest.raises(ValueError, match="exists already and is not overwritten"):
        write_demo_store(store.path, TINY)
    assert contents(store.path) == before
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        write_demo_store(store.path, TINY, workers=0)


def children_of(process: int) -> list[int]:
    """The processes that a process started, of those that it still waits for."""
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in path.read_text().split()]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_simulation_ends_its_children(tmp_path: Path, ending: int) -> None:
    command = [
        sys.executable, "-m", "graticule", "data", "demo", "--lat", "24", "--lon", "48",
        "--workers", "2", "--samples", "4000", "--out", str(tmp_path / "planet.zarr"),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    children: list[int] = []
    while len(children) < 3:  # two, and Python's resource tracker
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
        children = children_of(process.pid)
    if ending == signal.SIGINT:
        os.killpg(process.pid, ending)  # a terminal sends Ctrl-C to all
    else:
        os.kill(process.pid, ending)
    _, said = process.communicate(timeout=60)
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a child outlives its parent"
        time.sleep(0.05)
    if ending == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        return
    assert process.returncode == 130
    assert "Traceback" not in said
    assert not (tmp_path / "planet.zarr").exists()


# The coast


@pytest.fixture(scope="module")
def coast(tmp_path_factory: pytest.TempPathFactory) -> Store:
    out = tmp_path_factory.mktemp("data") / "coast.zarr"
    return write_demo_store(out, TINY, coast=True, workers=1)


def test_the_coast_store_is_the_planet_with_land_taken_out(coast: Store, store: Store) -> None:
    sea = planets.coast_mask(coast.grid.lat, coast.grid.lon, *planets.load_topography())
    assert 0.5 < sea.mean() < 0.8
    assert (coast.wet == sea).all()
    np.testing.assert_array_equal(coast.read_statics(["sea"])[0], sea)
    np.testing.assert_array_equal(coast.read(5), np.where(sea, store.read(5), np.nan))
    assert not coast.missing.any()
    assert check(coast).ok


def coast_config(coast: Store) -> Any:
    return override(
        recipe("demo-coast"),
        [f"data.store={coast.path}", "data.grid=none", *SMALL_MODEL,
         "train.steps=3", "train.batch=2",
         "train.leads=2", "train.warmup_steps=1", "forecast.leads=3"],
    )  # fmt: skip


def test_a_coast_trains_forecasts_and_scores(coast: Store, tmp_path: Path) -> None:
    losses: list[float] = []
    train(coast_config(coast), tmp_path / "run", progress=lambda *a: losses.append(a[2]["loss"]))
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    forecast_from_run(tmp_path / "run", device="cpu")
    with open_forecast(tmp_path / "run" / "forecast.zarr") as written:
        for lead in range(3):
            np.testing.assert_array_equal(np.isfinite(written.read(0, lead)), coast.wet)
    scores = evaluate_forecast(tmp_path / "run" / "forecast.zarr")
    assert np.isfinite(scores.rmse()).all()
    assert scores.sums.cells[0].tolist() == [
        int(coast.wet[0].sum()) * int(scores.sums.samples[0])
    ] * 3  # fmt: skip


def test_loss_and_gradients_do_not_depend_on_what_lies_on_land(coast: Store) -> None:
    task = Task.of(coast_config(coast), torch.device("cpu"))
    sea = torch.from_numpy(coast.wet)
    noise = torch.from_numpy(np.random.default_rng(0).normal(0, 1e4, coast.wet.shape)).float()
    results = []
    for land in (torch.tensor(torch.nan), noise, torch.tensor(torch.inf)):

        class Other:
            """Sample 3 with other numbers on land."""

            keys, init_times, leads = (3,), ("now",), iter((1, 2))
            sample = task.source.sample(3)

            def lead(self, land: Tensor = land) -> tuple[Tensor, Tensor]:
                lead = next(self.leads)
                given = torch.from_numpy(self.sample.forcing(lead))[None]
                return given, over(self.sample.labels(lead), land)

            @property
            def inputs(self, land: Tensor = land) -> Tensor:
                return over(self.sample.inputs(), land)

        def over(stored: np.ndarray, land: Tensor) -> Tensor:
            return torch.where(sea, torch.from_numpy(stored)[None], land)

        task.model.zero_grad()
        batch: Any = Other()
        leads = task.objective.forecast(task.model, task.objective.inputs(batch.inputs), batch)
        errors = torch.stack([sums for *_, sums in leads])
        errors.sum().backward()
        results.append([errors.detach(), *(p.grad.clone() for p in task.model.parameters())])
    assert all(torch.isfinite(value).all() for value in results[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# The whole path


@contextmanager
def quiet(title: str, unit: str) -> Iterator[Callable[..., None]]:
    yield lambda *_: None


def settings_of(**more: Any) -> list[str]:
    return [*SMALL_MODEL, "train.steps=4", "train.batch=2", "train.warmup_steps=1",
            *(f"{key.replace('__', '.')}={value}" for key, value in more.items())]  # fmt: skip


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Fine-tuning, which takes no settings, over few steps."""

    def shortened(name: str) -> Any:
        config = recipe(name)
        few = replace(config.train, steps=3, batch=2, warmup_steps=1)
        return replace(config, train=few) if name == "demo-finetune" else config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_path, "recipe", shortened)
        yield


@pytest.fixture(scope="module")
def demo(
    tmp_path_factory: pytest.TempPathFactory, short: None
) -> tuple[Path, list[str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    said: list[str] = []
    summary = run_demo(
        folder / "out", folder / "planet.zarr", settings=settings_of(), planet=TINY,
        bar=quiet, say=said.append,
    )  # fmt: skip
    return folder, said, summary


STAGES = [
    "planet", "pretrain", "finetune", "same-compute", "stripes", "forecast", "scores", "report",
]  # fmt: skip
REFERENCES = ("pretrained", "same_compute", "persistence", "climatology")


def test_the_demo_goes_the_whole_path_and_tells_what_came_of_it(
    demo: tuple[Path, list[str], dict[str, Any]],
) -> None:
    folder, said, summary = demo
    assert said[0].startswith("0 of 6 costly stages are there; the rest takes about ")
    assert [text.partition(":")[0] for text in said[1:]] == STAGES
    assert not any("used again" in text for text in said)
    out = folder / "out"
    written = json.loads((out / "summary.json").read_text())
    assert written == {key: value for key, value in summary.items() if key != "text"}
    assert written["leads"] == list(range(1, 11))
    assert written["lead_hours"] == [6.0 * lead for lead in range(1, 11)]
    for name in ("model", *REFERENCES):
        assert len(written[f"rmse_{name}"]) == 10
        assert np.isfinite(written[f"rmse_{name}"]).all()
    assert list(written["seconds"]) == STAGES
    assert all(seconds > 0 for seconds in written["seconds"].values())
    assert written["simulated_years_per_day"] > 0
    stripes = written["stripes"]
    assert stripes["layout"] == "window=2"
    assert 0 <= stripes["agreement"] <= stripes["tolerance"] == 1e-5
    assert f"first {stripes['steps']} steps on two stripes" in summary["text"]
    assert Path(written["picture"]).read_bytes()[:4] == b"\x89PNG"
    assert "<h1" in Path(written["report"]).read_text()
    assert Path(written["checkpoint"]) == out / "finetune" / "checkpoints" / "step-00000003"
    assert "RMSE over persistence's" in summary["text"]
    # The other two runs begin with the pretrained weights, on the same data and model.
    for name in ("finetune", "same-compute"):
        config = json.loads((out / name / "config.json").read_text())
        assert config["train"]["start_from"] == str(out / "pretrain")
        assert config["model"]["width"] == 16
        assert config["data"]["store"] == str(folder / "planet.zarr")


def test_the_figures_are_those_of_the_runs_forecasts(
    demo: tuple[Path, list[str], dict[str, Any]],
) -> None:
    folder, _, summary = demo
    names = {"model": "finetune", "pretrained": "pretrain", "same_compute": "same-compute"}
    for figure, run in names.items():
        scores = evaluate_forecast(folder / "out" / run / "forecast.zarr")
        assert summary[f"rmse_{figure}"] == scores.normalised().tolist()
        written = json.loads((folder / "out" / run / "forecast.scores.json").read_text())
        assert written == json.loads(json.dumps(scores.to_dict()))
    different = {tuple(summary[f"rmse_{figure}"]) for figure in names}
    assert len(different) == 3


def test_the_run_beside_has_the_same_number_of_model_applications() -> None:
    tuning = recipe("demo-finetune").train
    twin = whole_path.same_compute(tuning)
    assert (twin.leads, twin.steps) == (1, tuning.steps * tuning.leads)
    assert replace(twin, leads=tuning.leads, steps=tuning.steps,
                   warmup_steps=tuning.warmup_steps) == tuning  # fmt: skip


def test_a_second_demo_uses_what_is_there_and_keeps_its_figures(
    demo: tuple[Path, list[str], dict[str, Any]],
) -> None:
    folder, _, first = demo
    said: list[str] = []
    again = run_demo(
        folder / "out", folder / "planet.zarr", settings=settings_of(), bar=quiet, say=said.append
    )
    assert said[0].startswith("6 of 6 costly stages are there")
    assert said[1:7] == [f"{stage}: found, used again" for stage in STAGES[:6]]
    assert again["stripes"] == first["stripes"]
    assert json.loads((folder / "out" / "report.json").read_text())["seconds"] == again["seconds"]
    for name in ("leads", *(f"rmse_{name}" for name in ("model", *REFERENCES)), "checkpoint",
                 "simulated_years_per_day"):  # fmt: skip
        assert again[name] == first[name]
    for stage in STAGES[:6]:
        assert again["seconds"][stage] == first["seconds"][stage]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (settings_of(model__width=32), "started with another configuration"),
        (settings_of(forecast__leads=3), "started with another configuration"),
        ([*settings_of(), "data.store=x"], "--out and --data move them"),
        ([*settings_of(), "train.stepz=x"], "did you mean train.steps"),
    ],
)
def test_a_demo_with_other_settings_does_not_pass_for_the_first_one(
    demo: tuple[Path, list[str], dict[str, Any]], settings: list[str], message: str
) -> None:
    folder = demo[0]
    with pytest.raises(ValueError, match=message):
        run_demo(
            folder / "out", folder / "planet.zarr", settings=settings, bar=quiet,
            say=logging.getLogger(__name__).debug,
        )  # fmt: skip


def test_a_demo_refuses_a_strange_forecast_and_takes_up_an_interrupted_one(
    demo: tuple[Path, list[str], dict[str, Any]], tmp_path: Path
) -> None:
    folder, out = demo[0], tmp_path / "out"
    shutil.copytree(folder / "out", out)
    for run in ("finetune", "same-compute"):
        config = json.loads((out / run / "config.json").read_text())
        config["train"]["start_from"] = str(out / "pretrain")
        (out / run / "config.json").write_text(json.dumps(config))

    @contextmanager
    def interrupts(title: str, unit: str) -> Iterator[Callable[..., None]]:
        def advance(done: int, total: int, *_: Any) -> None:
            if title == "forecasting with finetune" and done > total // 2:
                raise KeyboardInterrupt

        yield advance

    def demo_with(bar: Any) -> dict[str, Any]:
        return run_demo(
            out, folder / "planet.zarr", settings=settings_of(), bar=bar,
            say=logging.getLogger(__name__).debug,
        )  # fmt: skip

    shutil.rmtree(out / "finetune" / "forecast.zarr")
    (out / "finetune" / "forecast.zarr").symlink_to(out / "pretrain" / "forecast.zarr")
    with pytest.raises(ValueError, match="was made by other weights"):
        demo_with(quiet)
    (out / "finetune" / "forecast.zarr").unlink()
    with pytest.raises(KeyboardInterrupt):
        demo_with(interrupts)
    assert not (out / "finetune" / "forecast.zarr").exists()
    assert demo_with(quiet)["rmse_model"] == demo[2]["rmse_model"]


def test_runs_that_began_with_other_pretrained_weights_are_refused(
    demo: tuple[Path, list[str], dict[str, Any]], tmp_path: Path
) -> None:
    run = demo[0] / "out" / "finetune"
    config = from_dict(json.loads((run / "config.json").read_text()))
    assert trained_run(config, run) < 60
    moved = tmp_path / "finetune"
    shutil.copytree(run, moved)
    described = json.loads((moved / "run.json").read_text())
    assert described["started_from"].endswith("/step 4")
    described["started_from"] = described["started_from"].replace("step 4", "step 2")
    (moved / "run.json").write_text(json.dumps(described))
    with pytest.raises(
        ValueError, match=r"began with the weights .*/step 2 of .*now holds .*step 4"
    ):
        trained_run(config, moved)


def test_scores_and_spectra_of_different_forecasts_are_not_shown_together(
    demo: tuple[Path, list[str], dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(demo[0] / "out", tmp_path / "out")
    run, other = tmp_path / "out" / "finetune", tmp_path / "out" / "pretrain"
    scores, spectra = scores_of(run / "forecast.zarr")
    shutil.copy(other / "forecast.spectra.nc", run / "forecast.spectra.nc")
    with pytest.raises(ValueError, match=r"spectra.nc: run_fingerprint .*step 4 there .*step 3"):
        scores_of(run / "forecast.zarr")
    # Without the scores all is made anew, the other's spectra too.
    (run / "forecast.scores.json").unlink()
    again, made = scores_of(run / "forecast.zarr")
    assert again == scores
    np.testing.assert_array_equal(made.model, spectra.model)
    stored, _ = scores_of(run / "forecast.zarr")
    assert stored == scores


def test_a_store_with_statistics_of_other_dates_scores_nothing(
    demo: tuple[Path, list[str], dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(demo[0] / "planet.zarr", tmp_path / "planet.zarr")
    store = Store(tmp_path / "planet.zarr")
    compute(store, np.arange(5)).save(store)
    with pytest.raises(ValueError, match="data stats"):
        evaluate_forecast(demo[0] / "out" / "finetune" / "forecast.zarr", store=str(store.path))


def test_training_in_the_demo_takes_one_thread_and_gives_it_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with whole_path._one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
