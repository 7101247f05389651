"""`graticule demo`: the whole path on the demo planet, each stage once, reused where it is there.

data -> pretraining -> fine-tuning over leads -> forecasts -> scores -> report, and a summary.
Beside the fine-tuned model stands one that had the same compute without leads.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graticule.config import Config, TrainConfig, override
from graticule.data.demo import write_demo_store
from graticule.data.planet import Planet
from graticule.data.processes import child_processes, result_of
from graticule.data.store import Store, write_json
from graticule.evaluate import Scores
from graticule.recipes import recipe
from graticule.report.maps import forecast_maps
from graticule.tasks import (
    Bar,
    evaluate_forecast,
    forecast_of,
    is_trained,
    report_run,
    save_scores,
    trained_run,
)
from graticule.train import checkpoint
from graticule.train.progress import read_metrics
from graticule.verify import replay

MAIN, PRETRAINED, SAME_COMPUTE = "finetune", "pretrain", "same-compute"
STRIPES = "window=2"
"""The layout on which pretraining's first steps are taken again."""
RUNS = {
    PRETRAINED: "training one step ahead",
    MAIN: "training on over several leads, from the pretrained weights",
    SAME_COMPUTE: "training on one step ahead, for the same compute (begun beside the other)",
}
EXPECTED_SECONDS = {
    "planet": 50, PRETRAINED: 200, MAIN: 100, SAME_COMPUTE: 10, "stripes": 15, "forecast": 15,
    "scores": 10, "report": 10,
}  # fmt: skip
"""Of each stage on two cores of 2026, for the line that says how long it will take. The twin is
trained beside the main run."""


def run_demo(
    out: Path,
    data: Path,
    *,
    settings: Sequence[str] = (),
    planet: Planet | None = None,
    bar: Bar,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run what is not there yet and return the summary that `out`/summary.json holds.

    settings: overrides of the pretraining; the other runs take model and data from there.
    bar: (title, unit) -> progress bar. say: told of each stage.
    """
    with _one_thread():
        return _run(out, data, _configs(out, data, settings), planet, bar, say)


def _run(
    out: Path,
    data: Path,
    configs: dict[str, Config],
    planet: Planet | None,
    bar: Bar,
    say: Callable[[str], None],
) -> dict[str, Any]:
    plan = {"run": MAIN, "compare": {name: name for name in RUNS if name != MAIN}}
    out.mkdir(parents=True, exist_ok=True)
    earlier = _earlier(out)
    # What stages cost when they ran: one that is used again keeps its figure.
    seconds: dict[str, float] = {stage: earlier["seconds"].get(stage, 0.0)
                                 for stage in EXPECTED_SECONDS}  # fmt: skip
    there = {
        "planet": data.exists(),
        **{name: is_trained(out / name, config) for name, config in configs.items()},
        "forecast": all((out / name / "forecast.zarr").exists() for name in configs),
    }
    # Of steps that were taken again nothing is kept but how well they agreed.
    there["stripes"] = there[PRETRAINED] and "stripes" in earlier
    left = sum(cost for stage, cost in EXPECTED_SECONDS.items() if not there.get(stage))
    say(f"{sum(there.values())} of {len(there)} costly stages are there; the rest takes about"
        f" {max(1, round(left / 60))} min on two cores")  # fmt: skip

    def stage(name: str, what: str, work: Callable[[], Any]) -> Any:
        say(f"{name}: {'found, used again' if there.get(name) else what}")
        began = time.perf_counter()
        result = work()
        if name in RUNS:  # with the time of sessions that were interrupted
            seconds[name] = round(sum(line["seconds"] for line in read_metrics(out / name)), 2)
        elif not there.get(name):
            seconds[name] = round(time.perf_counter() - began, 2)
        write_json(out / "report.json", {**plan, "seconds": seconds})
        return result

    def made_store() -> Store:
        if data.exists():
            return Store(data)
        with bar("simulating the planet", "samples") as advance:
            return write_demo_store(data, planet, progress=advance)

    def made_run(name: str) -> None:
        with bar(name, "steps") as advance:
            trained_run(configs[name], out / name, progress=advance)

    def made_forecasts() -> dict[str, Any]:
        told = {}
        for name in configs:
            with bar(f"forecasting with {name}", "leads") as advance:
                _, told[name] = forecast_of(out / name, progress=advance)
        return told[MAIN]

    def made_scores() -> dict[str, Scores]:
        scores = {}
        for name in configs:
            with bar(f"scoring {name}", "fields") as advance:
                path = out / name / "forecast.zarr"
                scores[name] = evaluate_forecast(path, progress=advance)
                save_scores(scores[name], path, force=True)
        return scores

    store = stage("planet", "a shallow-water planet is simulated", made_store)
    stage(PRETRAINED, RUNS[PRETRAINED], lambda: made_run(PRETRAINED))
    # The two that start from it need not wait for each other: one core for each.
    with _twin(configs[SAME_COMPUTE], out / SAME_COMPUTE, there[SAME_COMPUTE]) as twin:
        stage(MAIN, RUNS[MAIN], lambda: made_run(MAIN))
        stage(SAME_COMPUTE, RUNS[SAME_COMPUTE], twin)

    def replayed() -> dict[str, Any]:
        if there["stripes"]:
            return earlier["stripes"]
        return asdict(replay(configs[PRETRAINED], read_metrics(out / PRETRAINED), STRIPES))

    stripes = stage("stripes", "the first steps again on two processes, half the field each",
                    replayed)  # fmt: skip
    speed = stage("forecast", "ten leads of six hours from the test run", made_forecasts)
    scores = stage("scores", "against truth, persistence and climatology", made_scores)
    main = scores[MAIN]

    def made_report() -> tuple[Path, Path]:
        picture = forecast_maps(
            out / MAIN / "forecast.zarr", store, channel=store.channels.names[0],
            leads=_three(main.leads),
        )  # fmt: skip
        page = report_run(out, bar=bar)
        return replace(picture, name="forecast").save(out), Path(page["report"])

    picture, report = stage("report", "pictures and one page of HTML", made_report)
    summary = {
        "leads": main.leads,
        "lead_hours": [float(main.lead_seconds[lead - 1] / 3600) for lead in main.leads],
        "rmse_model": main.normalised().tolist(),
        "rmse_pretrained": scores[PRETRAINED].normalised().tolist(),
        "rmse_same_compute": scores[SAME_COMPUTE].normalised().tolist(),
        "rmse_persistence": main.normalised("persistence").tolist(),
        "rmse_climatology": main.normalised("climatology").tolist(),
        "stripes": stripes,
        "seconds": seconds,
        "simulated_years_per_day": (speed or earlier)["simulated_years_per_day"],
        "store": str(data),
        "checkpoint": str(checkpoint.find(out / MAIN)),
        "picture": str(picture),
        "report": str(report),
    }
    write_json(out / "summary.json", summary)
    return {**summary, "text": _text(summary, main)}


def _configs(out: Path, data: Path, settings: Sequence[str]) -> dict[str, Config]:
    for setting in settings:
        key = setting.partition("=")[0]
        if key in ("name", "data.store"):
            raise ValueError(f"--set {setting}: the demo names its own; --out and --data move them")
    # The store says how large the planet is.
    pretrain = override(recipe("demo"), [f"data.store={data}", "data.grid=none", *settings])
    tuning = recipe("demo-finetune").train
    tuning = replace(
        tuning, start_from=str(out / PRETRAINED), precision=pretrain.train.precision,
        seed=pretrain.train.seed,
    )  # fmt: skip
    return {
        PRETRAINED: replace(pretrain, name=PRETRAINED),
        MAIN: replace(pretrain, name=MAIN, train=tuning),
        SAME_COMPUTE: replace(pretrain, name=SAME_COMPUTE, train=same_compute(tuning)),
    }


@contextmanager
def _twin(config: Config, run: Path, there: bool) -> Iterator[Callable[[], Any]]:
    """Train in a process of its own; what is yielded waits for it."""
    if there:  # nothing is trained, only what it began with is compared
        yield lambda: trained_run(config, run)
        return
    with child_processes(1) as submit:
        future = submit(trained_run, config, run)
        yield lambda: result_of(future)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The demo's operations are small: a second thread makes a step a quarter shorter (0.33 s, not
    0.44) on a free machine and several times longer on a busy one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_compute(tuning: TrainConfig) -> TrainConfig:
    """One lead a step, in as many more steps as make the same number of model applications."""
    return replace(
        tuning, leads=1, steps=tuning.steps * tuning.leads,
        warmup_steps=tuning.warmup_steps * tuning.leads,
    )  # fmt: skip


def _three(leads: list[int]) -> tuple[int, ...]:
    """The first, a middle and the last lead."""
    return tuple(sorted({leads[0], leads[(len(leads) - 1) // 2], leads[-1]}))


def _earlier(out: Path) -> dict[str, Any]:
    """What an earlier demo noted here, also one that was interrupted."""
    found: dict[str, Any] = {"seconds": {}, "simulated_years_per_day": None}
    for name in ("summary.json", "report.json"):
        with suppress(OSError, ValueError):
            found |= json.loads((out / name).read_text())
    return found


def _beside(ratio: float) -> str:
    return f"{100 * abs(1 - ratio):.0f} % {'below' if ratio < 1 else 'above'}"


def _text(summary: dict[str, Any], scores: Scores) -> str:
    model = np.array(summary["rmse_model"])

    def against(name: str) -> np.ndarray:
        return model / np.array(summary[f"rmse_{name}"])

    hours = summary["lead_hours"][-1]
    lines = [scores.table(), ""]
    for name in ("persistence", "climatology"):
        ratio = against(name)
        verdict = "beats" if ratio.max() < 1 else "does not beat"
        lines.append(f"RMSE over {name}'s: {ratio.min():.2f} to {ratio.max():.2f} over {len(ratio)}"
                     f" leads ({verdict} it at every lead)")  # fmt: skip
    than = (
        ("pretrained", "the pretrained model"),
        ("same_compute", "its twin of the same compute"),
    )
    lines.append(
        f"RMSE at {hours:g} h: "
        + ", ".join(f"{_beside(against(name)[-1])} {words}" for name, words in than)
    )
    stripes = summary["stripes"]
    lines.append(
        f"the first {stripes['steps']} steps on two stripes of the field: losses agree with one"
        f" process's to {stripes['agreement']:.1e}"
        + (
            ""
            if stripes["agreement"] <= stripes["tolerance"]
            else ", MORE THAN ROUNDING (graticule verify tells more)"
        )
    )
    spent = "  ".join(f"{name} {value:.0f} s" for name, value in summary["seconds"].items())
    lines.append(f"report {summary['report']}, summary beside it; {spent}")
    return "\n".join(lines)
