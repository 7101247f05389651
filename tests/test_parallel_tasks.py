"""A run's folder and several processes: which mesh they form, and that the file does not tell."""

import json
import logging
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.cli import main
from graticule.config import Config, DataConfig, ForecastConfig, SwinConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.forecast.reader import open_forecast
from graticule.parallel.local import LocalRanks
from graticule.tasks import evaluate_forecast, forecast_from_run, forecast_of
from graticule.train import checkpoint
from graticule.train.trainer import train
from small_store import small_grid, write_store

MODEL = SwinConfig(patch=2, window=(2, 4), width=16, depth=2, heads=2, norm_groups=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("runs")
    store = write_store(folder / "store", land=True, grid=small_grid(16), static=("depth",))
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    config = Config(
        name="small",
        data=DataConfig(store=str(store.path)),
        model=MODEL,
        train=TrainConfig(steps=2, batch=2, learning_rate=1e-2, warmup_steps=0),
        forecast=ForecastConfig(leads=2),
    )
    train(config, folder / "small")
    return folder / "small"


@pytest.fixture(scope="module")
def alone(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "f.zarr"
    forecast_from_run(trained, out, starts=STARTS, device="cpu")
    return out


STARTS = ("2003-02-23", "2003-03-01", "2003-03-13")


def on_ranks(run: Path, out: Path, settings: list[str]) -> Any:
    """What is returned and logged, but for which weights these are, or raised."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("graticule.tasks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        made = forecast_from_run(run, out, starts=STARTS, settings=settings, device="cpu")
    except ValueError as error:
        return str(error)
    finally:
        logger.removeHandler(handler)
    return made, [line for line in told if not line.startswith("forecasting with the ")]


def assert_same_file(path: Path, expected: Path) -> None:
    with open_forecast(path) as ours, open_forecast(expected) as theirs:
        assert ours.attributes == theirs.attributes
        assert ours.init_times == theirs.init_times
        for init in range(len(STARTS)):
            for lead in range(2):
                a, b = ours.read(init, lead), theirs.read(init, lead)
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
                assert np.nanstd(a) > 1


@pytest.mark.parametrize(
    "settings",
    [[], ["mesh.window=2"], ["mesh.sequence=2"], ["mesh.tensor=2"],
     ["mesh.window=2", "mesh.stripe_dim=lon"], ["mesh.weights=sharded"],
     ["mesh.window=2", "mesh.weights=sharded"]],
    ids=" ".join,
)  # fmt: skip
def test_a_run_of_one_process_is_forecast_by_two_in_any_mesh(
    trained: Path, alone: Path, tmp_path: Path, two: LocalRanks, settings: list[str]
) -> None:
    answers = two.run(on_ranks, trained, tmp_path / "f.zarr", settings)
    for made, told in answers:
        assert (made["num_starts"], made["leads"], told) == (3, 2, [])
    assert_same_file(tmp_path / "f.zarr", alone)


def _as_if_trained_on(mesh: dict[str, Any], run: Path, out: Path, settings: list[str]) -> Any:
    """`on_ranks` with a run whose configuration names this mesh."""
    real = checkpoint.read_state

    def read_state(checkpoint: Path) -> dict[str, Any]:
        state = real(checkpoint)
        state["config"]["mesh"] |= mesh
        return state

    checkpoint.read_state = read_state
    try:
        return on_ranks(run, out, settings)
    finally:
        checkpoint.read_state = real


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"data": 2}, []),
        ({"window": 2}, []),
        ({"data": 4, "tensor": 2}, ["the run's mesh does not fit 2 processes: mesh.tensor=2"]),
        ({"window": 2, "sequence": 0}, ["the run's mesh does not fit 2 processes: mesh.window=2"]),
        ({"window": 4}, ["the run's mesh does not fit 2 processes: mesh.data=2"]),
        (
            {"window": 6, "fixed_windows": [2, 3]},
            ["the run's mesh does not fit 2 processes: mesh.data=2"],
        ),
    ],
    ids=str,
)
def test_a_run_of_any_mesh_is_forecast_by_two_processes_which_say_what_they_form(
    trained: Path, alone: Path, tmp_path: Path, two: LocalRanks,
    mesh: dict[str, Any], told: list[str],
) -> None:  # fmt: skip
    out = tmp_path / "f.zarr"
    for _, said in two.run(_as_if_trained_on, mesh, trained, out, []):
        assert said == told
    with open_forecast(out) as ours, open_forecast(alone) as theirs:
        # Provenance names the run's mesh, whoever computes.
        kept = json.loads(ours.attributes["config"])["mesh"]
        assert {name: kept[name] for name in mesh} == mesh
        for init in range(len(STARTS)):
            a, b = ours.read(init, 1), theirs.read(init, 1)
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_run_of_four_window_ranks_is_forecast_by_one_process(
    trained: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "f.zarr"
    _, told = _as_if_trained_on({"window": 4, "weights": "sharded"}, trained, out, [])
    assert told == ["the run's mesh does not fit one process, which forecasts alone"]
    with open_forecast(out) as ours, open_forecast(alone) as theirs:
        np.testing.assert_array_equal(ours.read(2, 1), theirs.read(2, 1))


def test_a_mesh_that_was_asked_for_has_to_fit(
    trained: Path, tmp_path: Path, two: LocalRanks
) -> None:
    out = tmp_path / "f.zarr"
    text = "mesh.window=3 is 3 processes, and 2 were started"
    for answer in two.run(on_ranks, trained, out, ["mesh.window=3"]):
        assert answer.startswith(text)
    with pytest.raises(ValueError, match=r"mesh\.window=2 is 2 processes, and 1 was started"):
        forecast_from_run(trained, out, settings=["mesh.window=2"], device="cpu")
    assert not out.exists()


def _forecast_and_score(run: Path) -> Any:
    path, made = forecast_of(run)
    again, nothing = forecast_of(run)
    assert (again, nothing) == (path, {})
    scores = evaluate_forecast(path, settings=["evaluate.climatology=all"])
    return str(path), made["forecast"], scores.to_dict()


def test_two_processes_make_a_runs_forecast_and_score_it(trained: Path, two: LocalRanks) -> None:
    first, second = two.run(_forecast_and_score, trained)
    assert first == second
    path, made, told = first
    assert path == made == str(trained / "forecast.zarr")
    expected = evaluate_forecast(Path(path), settings=["evaluate.climatology=all"]).to_dict()
    assert told["pairs"] == expected["pairs"] == 4
    for ours, theirs in zip(told["rows"], expected["rows"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            close = isinstance(value, float)
            assert ours[name] == (pytest.approx(value, rel=1e-12) if close else value)


def _commands(run: Path, out: Path) -> list[tuple[int, str]]:
    """Exit code and standard output of each command on this rank."""
    answers = []
    for arguments in (
        ["forecast", str(run), "--out", str(out), "--device", "cpu", "--start", STARTS[0]],
        ["evaluate", str(out), "--set", "evaluate.climatology=all"],
        ["evaluate", str(out), "--set", "evaluate.climatology=all"],
    ):
        with redirect_stdout(StringIO()) as told, redirect_stderr(StringIO()):
            answers.append((main(arguments), told.getvalue()))
    return answers


def test_commands_of_two_processes_speak_and_write_once(
    trained: Path, tmp_path: Path, two: LocalRanks
) -> None:
    first, second = two.run(_commands, trained, tmp_path / "f.zarr")
    assert [code for code, _ in first] == [code for code, _ in second] == [0, 0, 2]
    assert "1 start x 2 model steps" in first[0][1]
    assert "2 forecast fields" in first[1][1]
    assert [text for _, text in second] == ["", "", ""]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "f.log.jsonl", "f.scores.csv", "f.scores.json", "f.spectra.nc", "f.timing.jsonl", "f.zarr"
    ]  # fmt: skip
