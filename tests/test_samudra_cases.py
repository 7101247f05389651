"""Faults that public reports tell of, in the training and forecasts of an ocean U-Net with two
states in and two out: times, calendars and forcing. `test_samudra_values` is about the numbers.

Where the network says 0 whatever it is given (`silent`), losses and scores are numbers worked out
by hand.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from graticule.data.normalise import Normaliser
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.tasks import evaluate_forecast, forecast_from_run, validate_run
from graticule.train import task, train
from graticule.train.progress import read_metrics
from graticule.variables import Role
from pools import Pools
from unet_case import INPUT_WINDOW, LABEL_WINDOW, config_of, days, silent, trained, written

NAMES: dict[str, Role] = {"t": "prognostic", "tau": "forcing"}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float]]]:
    """What training decodes, in order: (first channel, its stored number of each time in a corner).
    Of batches of one sample."""
    seen: list[tuple[str, list[float]]] = []

    class Heard(Normaliser):
        def __init__(self, store: Store, channels: Sequence[int], *args: Any, **more: Any) -> None:
            super().__init__(store, channels, *args, **more)
            self.name = store.channels.names[channels[0]] if len(channels) else ""

        def forward(self, stored: Tensor, channels: slice = slice(None)) -> Tensor:
            if self.name:
                seen.append((self.name, stored[..., 0, 0, 0].flatten().tolist()))
            return super().forward(stored, channels)

    monkeypatch.setattr(task, "Normaliser", Heard)
    return seen


@pytest.mark.parametrize(
    ("leads", "missing_day", "years_apart"), [(1, 5 + 8, 14), (2, 3 + 6, 10), (3, 1 + 4, 6)]
)
def test_no_window_of_a_curriculum_crosses_a_missing_day_or_leads_into_another_year(
    leads: int, missing_day: int, years_apart: int, tmp_path: Path, decoded: Any
) -> None:
    whole = days(2003, 2, 20, number=20)
    later = days(2007, 2, 20, number=20)
    stretches = {
        "missing day": [whole[:8], whole[9:]], "years apart": [whole[:10], later[10:]]
    }  # fmt: skip
    for name, expected in (("missing day", missing_day), ("years apart", years_apart)):
        seconds = [second for stretch in stretches[name] for second in stretch]
        day = [round((second - whole[0]) / 86400) for second in seconds]
        store = written(
            tmp_path / name, seconds, lambda n, day=day: (day[n], 10000 + day[n]),
            names=NAMES, splits={"train": ["2003/2007"]},
        )  # fmt: skip
        decoded.clear()
        rising = ((1, 1), (3, leads)) if leads > 1 else ()
        config = config_of(store, steps=0, epochs=1, leads=leads, leads_from=rising)
        run = tmp_path / f"run, {name}"
        train(config, run)
        assert len(read_metrics(run)) == expected
        steps = _windows(decoded)
        starts = []
        for step, (states, forcing) in enumerate(steps, start=1):
            length = 2 + 2 * (leads if step > 2 else 1)
            assert states == list(range(int(states[0]), int(states[0]) + length))
            assert forcing == [10000 + t for t in states[: length - 2]]
            starts.append(states[0])
        # All that fit into a stretch with the most leads, each once.
        fit = [t for t in day if all(t + k in day for k in range(2 + 2 * leads))]
        assert sorted(starts) == fit
        assert len(fit) == expected


def _windows(decoded: list[tuple[str, list[float]]]) -> list[tuple[list[float], list[float]]]:
    """(states, forcing) of each step, in the order in which they were read."""
    steps: list[tuple[list[float], list[float]]] = []
    before = ""
    for name, times in decoded:
        if name == "t" and before in ("", "t"):
            steps.append(([], []))
        steps[-1][name == "tau"].extend(times)
        before = name
    return steps


# Of ten days 0 to 9 that start i = 1, ..., 7 is scored by its labels i + 1 and i + 2, whose mean
# squares are 6.5, 12.5, 20.5, 30.5, 42.5, 56.5 and 72.5: without the last one the mean is 28.17.
SEVEN, FIVE_OF_TWO = 241.5 / 7, 335.0 / 5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_validation_window_is_scored_once_whatever_the_threads_batch_and_ranks(
    ranks: int, pools: Pools, tmp_path: Path
) -> None:
    store = written(
        tmp_path / "store", days(2003, 2, 20, number=18),
        lambda n: (n - 8 if n >= 8 else (-1) ** n, 7), names=NAMES,
        splits={"train": ["2003-02-20/2003-02-27"], "validation": ["2003-02-28/2003-03-09"]},
    )  # fmt: skip
    says_0 = silent(config_of(store), tmp_path / "silent")
    found = []
    for leads, threads, batch in ((1, 1, ranks), (1, 4, 2 * ranks), (2, 1, 4 * ranks)):
        run = tmp_path / f"{leads} {threads} {batch}"
        config = config_of(
            store, data={"read_threads": threads}, batch=batch, leads=leads, start_from=str(says_0)
        )
        pools[ranks].run(trained, config, run)
        found.append(read_metrics(run)[-1]["validation_loss"])
    np.testing.assert_allclose(found, [SEVEN, SEVEN, FIVE_OF_TWO], rtol=1e-6)
    # Rolled out apart from training, from the five windows that have room for both.
    for lines in pools[ranks].run(_validated, says_0):
        assert [line["starts"] for line in lines] == [5, 5]
        losses = [line["loss"] for line in lines]
        np.testing.assert_allclose(losses, [112.5 / 5, 335.0 / 5 / 2], rtol=1e-6)
        # Of the last output time: 3 to 7, and 5 to 9.
        rmse = [line["rmse"]["t"] for line in lines]
        np.testing.assert_allclose(rmse, [np.sqrt(135 / 5), np.sqrt(255 / 5)], rtol=1e-6)


def _validated(run: Path) -> list[dict[str, Any]]:
    return validate_run(run, leads=(1, 2), device="cpu")["added"]


def test_noleap_windows_and_rollouts_step_from_28_february_to_1_march(
    tmp_path: Path, decoded: Any
) -> None:
    store = written(
        tmp_path / "store", days(2004, 2, 25, number=9, calendar="noleap"), lambda n: (n, n),
        names=NAMES, splits={"train": ["2004-02-25/2004-03-05"]},
        calendar="noleap",
    )  # fmt: skip
    assert [f"{date:%m-%d}" for date in store.times.dates[[3, 4, 8]]] == ["02-28", "03-01", "03-05"]
    config = config_of(store, steps=0, epochs=1, leads=2)
    run = tmp_path / "run"
    train(config, run)
    # Nine days without a gap hold four windows of six.
    assert sorted(states for states, _ in _windows(decoded)) == [
        list(range(first, first + 6)) for first in range(4)
    ]
    forecast_from_run(run, starts=["2004-02-27"], settings=["forecast.leads=3"], device="cpu")
    with open_forecast(run / "forecast.zarr") as opened:
        assert opened.calendar == "noleap"
        assert [f"{date:%m-%d}" for date in opened.valid_times[0]] == [
            "02-28", "03-01", "03-02", "03-03", "03-04", "03-05"
        ]  # fmt: skip
    scores = evaluate_forecast(run / "forecast.zarr", settings=["evaluate.climatology=all"])
    np.testing.assert_allclose(scores.rmse("persistence")[:, 0], np.arange(1, 7), rtol=1e-6)
    for call in (
        lambda: forecast_from_run(run, run / "f.zarr", starts=["2004-02-29"], device="cpu"),
        lambda: train(
            config_of(store, data={"train": ("2004-02-25/2004-02-29",)}), tmp_path / "other"
        ),
    ):
        with pytest.raises(ValueError, match="2004-02-29 is not in the noleap calendar"):
            call()


def test_a_rollout_over_29_february_is_scored_by_the_climatology_of_its_dates(
    tmp_path: Path,
) -> None:
    seconds = [s for year in (2003, 2004) for s in days(year, 2, 20, number=20)]
    dates = [str(np.datetime64(s, "s"))[5:10] for s in seconds]
    value = [100 * int(date[:2]) + int(date[3:]) for date in dates]
    store = written(
        tmp_path / "store", seconds, lambda n: (value[n], n),
        names=NAMES, splits={"train": ["2003/2004"]},
    )  # fmt: skip
    run = silent(config_of(store), tmp_path / "run")
    settings = ["forecast.leads=2"]
    forecast_from_run(run, starts=["2003-02-27", "2004-02-27"], settings=settings, device="cpu")
    scores = evaluate_forecast(run / "forecast.zarr")
    assert scores.climatology == "month-day"
    # 28 February, 1 to 3 March of one year; 28 and 29 February, 1 and 2 March of the other.
    valid = np.array([[228, 301, 302, 303], [228, 229, 301, 302]], float)
    assert (scores.rmse("climatology") == 0.0).all()
    for source, said in (("persistence", 227.0), ("model", np.mean(value))):
        expected = np.sqrt(((said - valid) ** 2).mean(0))
        np.testing.assert_allclose(scores.rmse(source)[:, 0], expected, rtol=1e-6)
    # 29 February is of 2004 alone: without that year it has no climatology.
    with pytest.raises(ValueError, match="no training time on 29 February"):
        evaluate_forecast(run / "forecast.zarr", store=str(_without_2004(store, tmp_path / "2003")))


def _without_2004(store: Store, path: Path) -> Path:
    other = written(
        path, store.times.seconds.tolist(), lambda n: store.read(n),
        names=NAMES, splits={"train": ["2003"]},
    )  # fmt: skip
    return other.path


@pytest.mark.parametrize(
    ("forcing", "possible"), [(INPUT_WINDOW, 2), (LABEL_WINDOW, 1)], ids=["inputs", "labels"]
)
@pytest.mark.parametrize("how", ["ends", "is missing"])
def test_a_forecast_of_more_days_than_its_forcing_is_refused_with_the_first_date_it_lacks(
    forcing: tuple[int, ...], possible: int, how: str, tmp_path: Path
) -> None:
    splits = {"train": ["2003-02-20/2003-03-01"]}
    seconds = days(2003, 2, 20, number=20)

    def fields(n: int, *, states_to: int = 99, forcing_to: int = 99) -> tuple[float, float]:
        """Of days 0, 1, ...: NaN after those named."""
        return (
            np.sin(n) if n <= states_to else np.nan, np.cos(n) if n <= forcing_to else np.nan
        )  # fmt: skip

    whole = written(tmp_path / "whole", seconds, fields, names=NAMES, splits=splits)
    run = tmp_path / "run"
    train(config_of(whole, data={"forcing_offsets": forcing}, leads=2), run)
    # The start is day 10, 2 March; forcing is there for three more days.
    short = written(
        tmp_path / "short", seconds[:14] if how == "ends" else seconds,
        lambda n: fields(n, states_to=10, forcing_to=13), names=NAMES, splits=splits,
    )  # fmt: skip
    given: Any = {"starts": ["2003-03-02"], "device": "cpu"}

    def rolled_out(store: Store, leads: int) -> np.ndarray:
        out = tmp_path / f"{store.path.name} {leads}.zarr"
        settings = [f"data.store={store.path}", f"forecast.leads={leads}"]
        forecast_from_run(run, out, settings=settings, **given)
        with open_forecast(out) as opened:
            return np.stack([opened.read(0, lead) for lead in range(2 * leads)])

    with pytest.raises(ValueError, match="needs the forcing of 2003-03-06 00:00:00, w"):
        rolled_out(short, 3)
    assert not (tmp_path / "short 3.zarr").exists()
    # With the forcing that it needs and no state after its start it runs, as if they were there.
    np.testing.assert_array_equal(rolled_out(short, possible), rolled_out(whole, possible))
    ahead = written(
        tmp_path / "ahead", seconds, lambda n: fields(n, states_to=10), names=NAMES, splits=splits
    )
    np.testing.assert_array_equal(rolled_out(ahead, 3), rolled_out(whole, 3))
    with pytest.raises(ValueError, match=r"no cell of t at lead 1 has a truth .* is no score"):
        evaluate_forecast(
            tmp_path / "ahead 3.zarr", store=str(ahead.path),
            settings=["evaluate.climatology=all"],
        )  # fmt: skip
