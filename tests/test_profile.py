"""Profiling: the split of hand-made traces, the rules of advice, and whole profiled runs."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graticule.cli import main
from graticule.config import Config, DataConfig, SwinConfig, TrainConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.train import checkpoint, train
from graticule.train.advice import Measured, advice
from graticule.train.profile import WARM_UP, describe, read_profile, require_steps
from graticule.train.progress import read_metrics
from graticule.train.split import PARTS, STEP, Operation, operations, split
from small_store import write_store

Event = dict[str, Any]


def event(cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> Event:
    """Times in microseconds."""
    return {
        "ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid,
        "args": args,
    }  # fmt: skip


def ranged(name: str, start: float, end: float) -> Event:
    return event("user_annotation", name, start, end)


def op(name: str, start: float, end: float, tid: int = 1, **args: Any) -> Event:
    return event("cpu_op", f"aten::{name}", start, end, tid, **args)


def micro(seconds: dict[str, float]) -> dict[str, int]:
    """Whole microseconds, zeros left out."""
    return {part: round(value * 1e6) for part, value in seconds.items() if value}


HOST = [
    ranged(f"{STEP}6", 0, 1000),
    ranged("data wait", 10, 110),
    ranged("forward lead 1", 120, 420),
    ranged("copy", 130, 150),
    op("_to_copy", 132, 148),
    ranged("data wait", 150, 200),
    op("linear", 210, 400),
    op("addmm", 230, 390),
    ranged("backward", 430, 730),
    op("autograd::engine::evaluate_function: AddmmBackward0", 440, 720),
    op("mm", 450, 550),
    op("mm", 560, 700),
    ranged("optimizer", 740, 900),
    ranged("Optimizer.step#AdamW.step", 750, 890),
    op("_fused_adamw_", 760, 880),
    op("zeros", 950, 960),
    # Elsewhere: another thread, and what comes between steps.
    op("stack", 0, 1000, tid=2),
    ranged("forward lead 1", 1100, 1900),
    op("linear", 1100, 1900),
]


def test_a_step_on_a_cpu_is_split_by_what_its_own_thread_does() -> None:
    assert micro(split(HOST)) == {
        "step": 1000, "data_wait": 150, "copy": 16, "forward": 190, "backward": 280,
        "optimizer": 120, "other": 10, "idle": 234,
    }  # fmt: skip


def test_several_steps_are_averaged() -> None:
    later = [{**e, "ts": e["ts"] + 2000} for e in HOST if e["ts"] < 1000]
    later[0] = ranged(f"{STEP}7", 2000, 3500)
    found = micro(split([*HOST, *later]))
    assert found["step"] == 1250
    assert found["forward"] == 190
    assert found["idle"] == 234 + 250


def test_operations_on_a_cpu_have_their_own_time_only() -> None:
    found = {o.name: (round(o.seconds * 1e6), o.share, o.calls) for o in operations(HOST)}
    assert found["mm"] == (240, 0.24, 2)
    assert found["addmm"] == (160, 0.16, 1)
    assert found["linear"] == (30, 0.03, 1)
    assert "stack" not in found
    assert operations(HOST)[0].name == "mm"


def launch(kernel: str, at: float, start: float, end: float, cat: str = "kernel", tid: int = 1,
           stream: int = 7, **more: Any) -> list[Event]:  # fmt: skip
    """A kernel on a stream and its launch on a thread of the host."""
    number = round(at * 10)
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, at + 2, tid, correlation=number),
        event(cat, kernel, start, end, stream, correlation=number, stream=stream, **more),
    ]


DEVICE = [
    ranged(f"{STEP}6", 0, 1000),
    ranged("data wait", 0, 60),
    ranged("copy", 60, 70),
    *launch("Memcpy HtoD (Pinned -> Device)", 62, 70, 110, cat="gpu_memcpy", stream=20),
    ranged("forward lead 1", 70, 200),
    ranged("data wait", 75, 95),
    op("mm", 98, 104, **{"External id": 5}),
    # Launched in the forward range, it runs long after it: it is the forward's all the same.
    *launch("gemm", 100, 100, 400, **{"External id": 5}),
    ranged("backward", 200, 300),
    # By autograd's own thread.
    *launch("gemm", 210, 400, 700, tid=9, **{"External id": 6}),
    op("mm", 208, 212, tid=9, **{"External id": 6}),
    *launch("ncclDevKernel_ReduceScatter", 220, 600, 800, stream=30),
    *launch("Memset (Device)", 310, 850, 860, cat="gpu_memset"),
    ranged("optimizer", 320, 990),
    *launch("adam", 900, 905, 965),
    event("user_annotation", f"{STEP}6", 70, 965, 7) | {"cat": "gpu_user_annotation"},
]


def test_a_step_on_a_gpu_is_split_by_what_its_streams_do() -> None:
    found = micro(split(DEVICE))
    assert found == {
        "step": 1000,
        "data_wait": 60,  # 0 to 60; at 75 the copy runs
        "copy": 30,  # 70 to 100, then a kernel hides it
        "forward": 300,
        "backward": 300,
        "communication": 100,  # 700 to 800, the rest behind the backward pass
        "other": 10,
        "optimizer": 60,
        "idle": 10 + 50 + 45 + 35,  # 60 to 70, 800 to 850, 860 to 905, 965 to 1000
    }


def test_operations_on_a_gpu_have_the_time_of_their_kernels() -> None:
    found = {o.name: round(o.seconds * 1e6) for o in operations(DEVICE)}
    assert found["mm"] == 600
    assert found["ncclDevKernel_ReduceScatter"] == 200
    assert found["adam"] == 60


@pytest.mark.parametrize("trace", [HOST, DEVICE])
def test_the_parts_add_up_to_the_step(trace: list[Event]) -> None:
    seconds = split(trace)
    assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"], rel=1e-12)
    assert seconds.keys() == {"step", *PARTS}


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no range whose name starts with ProfilerStep#"):
        split([op("mm", 0, 1)])


# Advice

PLAIN = Measured(
    device="cpu",
    seconds={"step": 1.0, "data_wait": 0.02, "copy": 0.0, "forward": 0.3, "backward": 0.6,
             "communication": 0.0, "optimizer": 0.03, "other": 0.01, "idle": 0.04},
    cpu_seconds=1.9, operations=[Operation(name="mm", seconds=0.5, share=0.5, calls=100)],
    threads=2, cores=2, load=1.0, peak_bytes=2**30, fixed_bytes=2**29, memory_bytes=2**34,
    kernels_bf16=False, precision="fp32", batch=8, accumulation=1,
)  # fmt: skip


def spent(**parts: float) -> dict[str, float]:
    """Parts of a second, taken from the forward pass."""
    return PLAIN.seconds | parts | {"forward": 0.3 - sum(parts.values())}


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({}, "nothing stands out: forward and backward are 90% of the step, and the most costly"
             " operation is mm (50%)"),
        ({"seconds": spent(data_wait=0.15)}, "data wait is 15% of the step (150.0 ms)"),
        ({"device": "cuda", "seconds": spent(copy=0.2), "kernels_bf16": True, "precision": "bf16"},
         "copies to the device that no computation hides are 20% of the step (200.0 ms)"),
        ({"seconds": spent(idle=0.25)},
         "no operation runs in 25% of the step: its 100 operations take 5,000 us on average, and"
         " Python does not call them faster. Larger ones would hide that: try train.batch=16"
         " (memory would allow about 209)"),
        ({"kernels_bf16": True}, "forward and backward are 90% of the step in float32, and this"
                                 " device multiplies bfloat16 faster: try train.precision=bf16"),
        ({"precision": "bf16"}, "forward and backward are 90% of the step in bf16, for which this"
                                " processor has no matrix kernels"),
        ({"seconds": spent(optimizer=0.2)}, "the optimizer is 20% of the step (200.0 ms) whatever"
                                            " the number of samples: with train.accumulation=2"),
        ({"threads": 1}, "1 of 2 cores compute, 94% of the step, and the load is 1.0: try"
                         " OMP_NUM_THREADS=2"),
        ({"threads": 1, "load": 7.0}, "nothing stands out"),
        ({"load": 7.0}, "2 threads wait for each other while others use these 2 cores (the load is"
                        " 7.0), and burn the processor while they wait: try OMP_NUM_THREADS=1"),
        ({"threads": 4}, "4 threads share 2 cores and wait for each other"),
        ({"cpu_seconds": 0.5, "load": 6.5}, "the process had a processor for 500.0 ms of the 980.0"
                                            " ms a step in which it wanted one (load 6.5 on 2"),
        ({"peak_bytes": 15 * 2**30}, "memory is 94% full at the peak (15.00 GiB of 16.00 GiB):"
                                     " train.batch=4 with train.accumulation=2"),
        ({"accumulation": 2}, "the peak is 6.2% of the memory (1.00 GiB of 16.00 GiB) while a step"
                              " is cut into 2 micro-batches: try train.batch=16"),
        ({"device": "cuda", "kernels_bf16": True, "precision": "bf16"},
         "the peak is 6.2% of the memory (1.00 GiB of 16.00 GiB): try train.batch=16"),
    ],
)  # fmt: skip
def test_each_advice_names_the_number_that_made_it(change: dict[str, Any], first: str) -> None:
    assert advice(replace(PLAIN, **change))[0].startswith(first)


def test_a_step_of_compute_with_what_there_is_needs_no_advice() -> None:
    assert len(advice(PLAIN)) == 1


def test_the_largest_share_comes_first_and_a_busy_machine_before_all() -> None:
    many = replace(PLAIN, seconds=spent(data_wait=0.13, optimizer=0.16), kernels_bf16=True,
                   cpu_seconds=0.1)  # fmt: skip
    found = [text.split()[0:2] for text in advice(many)]
    assert found == [["the", "process"], ["forward", "and"], ["the", "optimizer"], ["data", "wait"]]


def test_a_larger_batch_is_not_advised_where_memory_ends() -> None:
    small = replace(PLAIN, seconds=spent(idle=0.2), memory_bytes=int(1.2 * 2**30))
    assert "memory does not allow more than train.batch=8" in advice(small)[0]


# Whole runs


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = write_store(tmp_path_factory.mktemp("data") / "store", packed=True)
    compute(made, SampleSource(made, DataConfig()).times("train")).save(made)
    return made


def config_of(store: Store, **settings: Any) -> Config:
    given = {"steps": WARM_UP + 2, "batch": 1, "learning_rate": 3e-3, "warmup_steps": 2, **settings}
    return Config(
        name="small",
        data=DataConfig(store=str(store.path)),
        model=SwinConfig(patch=2, window=(2, 4), width=16, depth=1, heads=2, norm_groups=4),
        train=TrainConfig(**given),
    )


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    for group in checkpoint.groups(path):
        into = {
            name: torch.zeros(shape, dtype=dtype)
            for name, (shape, dtype) in checkpoint.saved_names(path, group).items()
        }
        checkpoint.load_tensors(path, group, into)
        found |= {f"{group}/{name}": value for name, value in into.items()}
    return found


def numbers(run: Path) -> list[Any]:
    keys = ("step", "loss", "lead_losses", "gradient_norm", "learning_rate")
    return [[line.get(key) for key in keys] for line in read_metrics(run)]


HARD = {
    "accumulation": 2, "leads": 2, "roll_longitude": True, "ema_decay": 0.99, "clip_norm": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [HARD, HARD | {"detach_every": 1, "accumulation": 1}, {"precision": "bf16"}],
    ids=["full", "detached", "bf16"],
)
def test_profiling_changes_no_number(
    store: Store, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = config_of(store, **settings)
    plain = train(config, tmp_path / "plain")
    profiled = train(config, tmp_path / "profiled", profile=1)
    assert numbers(tmp_path / "profiled") == numbers(tmp_path / "plain")
    expected, found = tensors(plain), tensors(profiled)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.fixture(scope="module")
def profiled(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "profiled"
    train(config_of(store, **HARD, steps=WARM_UP + 3), out, profile=3)
    return out


def test_the_profile_of_a_run_adds_up(profiled: Path) -> None:
    found = read_profile(profiled)
    assert (found["steps"], found["first_step"], found["device"]) == (3, WARM_UP + 1, "cpu")
    seconds = found["seconds"]
    assert seconds.keys() == {"step", *PARTS}
    assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"], rel=1e-9)
    assert all(seconds[part] > 0 for part in ("forward", "backward", "optimizer", "data_wait"))
    assert seconds["communication"] == 0
    # The range of a step lies within what the run itself measures.
    own = [line["seconds"] for line in read_metrics(profiled)]
    assert seconds["step"] <= sum(own[WARM_UP:]) / 3
    assert found["overhead"]["plain_seconds"] == sorted(own[1:4])[1]
    assert found["overhead"]["profiled_seconds"] == sorted(own[WARM_UP:])[1]
    assert 1 <= len(found["operations"]) <= 10
    shares = [operation["share"] for operation in found["operations"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) < 1
    assert found["advice"]


def test_the_memory_of_a_step_has_every_owner(store: Store, profiled: Path) -> None:
    memory = read_profile(profiled)["memory"]
    owners, timeline = memory["owners"], memory["timeline"]
    assert memory["step"] == WARM_UP
    assert sum(owners.values()) == memory["peak_bytes"]
    assert len(timeline) <= 400
    assert max(sum(held.values()) for _, held in timeline) == memory["peak_bytes"]
    assert memory["allocator_peak_bytes"] is None
    run = json.loads((profiled / "run.json").read_text())
    assert owners["parameters"] == 4 * run["parameters"]
    assert owners["average"] >= owners["parameters"]
    names = [p for p in tensors(checkpoint.find(profiled)) if p.startswith("optimizer/step.")]
    assert owners["optimizer"] == 8 * run["parameters"] + 4 * len(names)
    # Planes of int16, one sample: two inputs, and a forcing and two labels of one lead at a time.
    plane = 8 * 16 * 2
    assert max(held["inputs"] for _, held in timeline) == (2 + 1 + 2) * plane
    assert max(held["gradients"] for _, held in timeline) == 4 * run["parameters"]


def test_the_trace_holds_the_steps_and_their_named_ranges(profiled: Path) -> None:
    events = json.loads((profiled / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [n for n in names if n.startswith(STEP)] == [f"{STEP}{WARM_UP + n}" for n in (1, 2, 3)]
    steps, micro_batches, leads = 3, 2, 2
    for lead in (1, 2):
        assert names.count(f"forward lead {lead}") == steps * micro_batches
    assert names.count("backward") == steps * micro_batches * leads
    assert names.count("optimizer") == steps
    assert names.count("copy") == steps * micro_batches * (1 + 2 * leads)
    # One for each micro-batch and lead, and one that hears that there is no more.
    assert names.count("data wait") == steps * (micro_batches * (1 + leads) + 1)


def test_the_words_say_what_the_numbers_say(profiled: Path) -> None:
    found = read_profile(profiled)
    text = describe(found)
    assert (profiled / "profile" / "profile.txt").read_text() == text + "\n"
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("steps 6 to 8 on cpu, 1 thread; means of a step\n")
    for part in PARTS:
        assert f"  {part.replace('_', ' ')} " in text
    assert f"in step 5: {found['memory']['peak_bytes'] / 2**20:9,.1f} MiB at the peak" in text
    assert found["operations"][0]["name"] in text
    chart = [line.partition("|")[2] for line in text.splitlines() if "|" in line]
    assert len(chart) == 10
    assert {letter for line in chart for letter in line} >= {"P", "O", "A"}
    assert "try first\n  1. " in text


def test_a_resumed_run_is_profiled_from_its_own_first_step(store: Store, tmp_path: Path) -> None:
    config = config_of(store, steps=2)
    train(config, tmp_path / "run")
    longer = replace(config, train=replace(config.train, steps=2 + WARM_UP + 1))
    train(longer, tmp_path / "run", resume=True, profile=1)
    found = read_profile(tmp_path / "run")
    assert found["first_step"] == 2 + WARM_UP + 1
    assert found["memory"]["step"] == 2 + WARM_UP
    assert describe(found).startswith("step 8 on cpu")


@pytest.mark.parametrize(
    ("count", "taken", "steps", "text"),
    [
        (5, 0, 9, "--profile 5 needs 10 steps, 5 to warm up and 5 to profile, and 9 are left of"
                  " train.steps=9: set train.steps to at least 10, or profile 4 at most"),
        (1, 10, 15, "needs 6 steps, 5 to warm up and 1 to profile, and 5 are left of"
                    " train.steps=15: set train.steps to at least 16$"),
        (0, 0, 100, "--profile 0: profile at least 1 step"),
        (-3, 0, 100, "--profile -3: profile at least 1 step"),
    ],
)  # fmt: skip
def test_a_run_too_short_to_profile_is_refused(
    tmp_path: Path, count: int, taken: int, steps: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        require_steps(count, tmp_path, taken, steps)


def test_too_short_a_run_is_refused_before_anything_is_written(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="--profile 3 needs 8 steps"):
        train(config_of(store), tmp_path / "run", profile=3)
    assert not (tmp_path / "run").exists()


def test_a_profile_is_not_overwritten(store: Store, profiled: Path) -> None:
    config = config_of(store, **HARD, steps=100)
    before = (profiled / "profile" / "profile.json").read_bytes()
    with pytest.raises(ValueError, match="profile exists already and is not overwritten"):
        train(config, profiled, resume=True, profile=2)
    assert (profiled / "profile" / "profile.json").read_bytes() == before


def test_a_run_that_ends_before_its_profile_says_so_and_lets_go_of_the_profiler(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Enough(Exception):
        pass

    def stop(step: int, steps: int, metrics: dict[str, Any]) -> None:
        if step == WARM_UP + 1:
            raise Enough

    with caplog.at_level(logging.WARNING), pytest.raises(Enough):
        train(config_of(store), tmp_path / "run", profile=2, progress=stop)
    assert "the run ended before its profile: 6 of 7 steps were taken" in caplog.text
    assert not (tmp_path / "run" / "profile").exists()
    # PyTorch refuses to start a second profiler beside one that runs.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as another:
        torch.ones(1).add(1)
    assert [event.name for event in another.events() or []].count("aten::add") == 1


def test_the_command_prints_the_profile_and_refuses_in_one_line(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of(store, steps=WARM_UP + 1).to_dict()))
    out = tmp_path / "run"
    assert main(["train", str(config), "--out", str(out), "--profile", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(describe(read_profile(out)))
    assert "checkpoints/step-00000006: loss " in printed
    assert main(["train", str(config), "--out", str(tmp_path / "new"), "--profile", "2"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("graticule: error")]
    assert "--profile 2 needs 7 steps" in line


@pytest.mark.gpu
def test_a_profile_on_a_gpu_adds_up(store: Store, tmp_path: Path) -> None:
    config = config_of(store, **HARD)
    train(config, tmp_path / "plain", device="cuda")
    train(config, tmp_path / "run", device="cuda", profile=2)
    found = read_profile(tmp_path / "run")
    seconds = found["seconds"]
    assert found["device"] == "cuda"
    assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"], rel=1e-9)
    assert all(seconds[part] > 0 for part in ("copy", "forward", "backward", "optimizer", "idle"))
    memory = found["memory"]
    assert memory["allocator_peak_bytes"] >= memory["peak_bytes"]
    assert memory["owners"]["inputs"] > 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")
