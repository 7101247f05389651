"""The configuration: what is refused, with which words, and what `--set` understands."""

import dataclasses
import json
import math
import re
from typing import Any

import pytest

from graticule.config import (
    BayesConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    ForecastConfig,
    MemoryConfig,
    MeshConfig,
    SwinConfig,
    TrainConfig,
    fingerprint,
    from_dict,
    override,
)

SECTIONS = {"data": DataConfig, "model": SwinConfig, "mesh": MeshConfig, "train": TrainConfig,
            "memory": MemoryConfig, "forecast": ForecastConfig,
            "evaluate": EvaluateConfig, "bayes": BayesConfig}  # fmt: skip


def after(*settings: str) -> Config:
    return override(Config(), list(settings))


def value_of(config: Config, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


# Unknown keys


def test_an_unknown_key_is_refused_with_the_nearest_name_and_all_the_others() -> None:
    message = (r"unknown key train\.detach_evry; did you mean train\.detach_every\?"
               r" \(keys here: steps, epochs, batch, .*, tensorboard\)")  # fmt: skip
    with pytest.raises(ValueError, match=message):
        from_dict({"train": {"detach_evry": 4}})
    with pytest.raises(ValueError, match=message):
        after("train.detach_evry=4")


@pytest.mark.parametrize(
    ("setting", "suggestion"),
    [
        ("leads=4", "train.leads or forecast.leads"),
        ("model.leads=4", "train.leads or forecast.leads"),
        ("window=4", "model.window or mesh.window"),
        ("train.window=4", "model.window or mesh.window"),
        ("model.seed=4", "train.seed"),
        ("forecast.region=1,2,3,4", "evaluate.region"),
        ("detach_evry=4", "train.detach_every"),
        ("learningrate=1", "train.learning_rate"),
        ("model.learningrate=1", "train.learning_rate"),
        ("trian.leads=4", "train"),
        ("Train.leads=4", "train"),
        ("train.Leads=4", "train.leads"),
        ("train.steps.x=3", "train.steps"),
    ],
)
def test_a_key_in_the_wrong_section_is_refused_with_the_section_that_has_it(
    setting: str, suggestion: str
) -> None:
    with pytest.raises(ValueError, match=r"unknown key .*; did you mean") as error:
        after(setting)
    assert f"; did you mean {suggestion}? (keys here:" in str(error.value)
    path, value = setting.split("=")
    if path.count(".") < 2:
        section, _, key = path.rpartition(".")
        with pytest.raises(ValueError, match="did you mean") as error:
            from_dict({section: {key: value}} if section else {path: value})
        assert f"; did you mean {suggestion}? (keys here:" in str(error.value)


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ValueError, match=r"unknown key model\.zzz \(keys here: family, patch, "):
        after("model.zzz=1")
    with pytest.raises(ValueError, match=r"unknown key 7 \(keys here: name, data, model, "):
        from_dict({7: {}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"unknown key  \(keys here: name, "):
        after("=7")


@pytest.mark.parametrize("values", [[], "train", None, 3])
def test_a_configuration_that_is_no_table_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="a configuration is a table of sections, not"):
        from_dict(values)


@pytest.mark.parametrize("value", [5, None, []])
def test_a_section_that_is_no_table_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"data=.*dictionary.*\(it holds DataConfig\)"):
        from_dict({"data": value})


# --set


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("train.steps=7", 7),
        ("train.steps=1e3", 1000),
        ("train.warmup_steps=0", 0),
        ("train.seed=-3", -3),
        ("train.learning_rate=1e-3", 1e-3),
        ("train.learning_rate=1E-3", 1e-3),
        ("train.learning_rate=.5", 0.5),
        ("train.learning_rate=5.", 5.0),
        ("train.learning_rate=1", 1.0),
        ("train.tensorboard=true", True),
        ("train.tensorboard=True", True),
        ("model.bias_table=False", False),
        ("train.betas=0.8,0.9", (0.8, 0.9)),
        ("train.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("train.precision=bf16", "bf16"),
        ("train.start_from=2003", "2003"),
        ("train.start_from=runs/a=b", "runs/a=b"),
        ("train.start_from=", ""),
        ("model.window=6", 6),
        ("model.window=6,12", (6, 12)),
        ("model.window=[6,12]", (6, 12)),
        ("model.padded_shape=none", None),
        ("model.padded_shape=None", None),
        ("model.padded_shape=null", None),
        ("model.padded_shape=192,384", (192, 384)),
        ("data.grid=181, 360", (181, 360)),
        ("data.input_offsets=-1,0", (-1, 0)),
        ("data.input_offsets=0", (0,)),
        ("data.output_offsets=1", (1,)),
        ("data.output_offsets=1,", (1,)),
        ("data.forcing_offsets=", ()),
        ("data.forcing_offsets=[]", ()),
        ("data.forcing_offsets=-1,0,1", (-1, 0, 1)),
        ("evaluate.region=-10,10.5,-5,5", (-10.0, 10.5, -5.0, 5.0)),
        ("evaluate.region=170,-170,-90,90", (170.0, -170.0, -90.0, 90.0)),
        ("data.store=123", "123"),
        ("data.store=a,b", "a,b"),
        ("data.prognostic=so", ("so",)),
        ("data.prognostic=so,", ("so",)),
        ("data.prognostic=thetao@0.494025, so", ("thetao@0.494025", "so")),
        ('data.prognostic=["so"]', ("so",)),
        ("data.prognostic=", ()),
        ("data.train=2003-02", ("2003-02",)),
        ("data.train=2003-02-01/2003-03", ("2003-02-01/2003-03",)),
        ("data.train=2003", ("2003",)),
        ("data.train=0003", ("0003",)),
        ("data.train=-0003", ("-0003",)),
        ("data.train=-3", ("-3",)),
        ("data.train=2003,2005", ("2003", "2005")),
        ("data.train=[2003,2005]", ("2003", "2005")),
        ('data.train=["2003","2004-02/2005"]', ("2003", "2004-02/2005")),
        ("data.train=2003,2004-02/2005", ("2003", "2004-02/2005")),
        ("data.test=2003-01-01T06:00/2003-01-02T18:00", ("2003-01-01T06:00/2003-01-02T18:00",)),
        ("data.prognostic=1e5,true", ("1e5", "true")),
        ("data.prognostic=true", ("true",)),
    ],
)
def test_set_reads_what_people_write(setting: str, expected: Any) -> None:
    value = value_of(after(setting), setting.partition("=")[0])
    assert value == expected
    assert type(value) is type(expected)


def test_settings_are_applied_in_order_and_change_nothing_else() -> None:
    config = after("train.steps=3", "train.leads=2", "train.steps=5", "name=demo-1.5")
    assert config == Config(name="demo-1.5", train=TrainConfig(steps=5, leads=2))
    assert after() == Config()


def test_a_setting_that_depends_on_another_is_checked_after_both() -> None:
    assert after("model.width=48", "model.heads=6", "model.norm_groups=8").model.heads == 6


@pytest.mark.parametrize("setting", ["train.steps", "train=5", "train", "name.x=3", "data"])
def test_a_setting_of_another_shape_is_told_the_right_one(setting: str) -> None:
    with pytest.raises(ValueError, match=f"--set {setting}: write section.key=value"):
        after(setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=many", r"train\.steps='many': .*integer.*\(it holds int\)"),
        ("train.steps=2.5", r"train\.steps=2\.5: .*integer.*\(it holds int\)"),
        ("train.steps=", r"train\.steps='': .*integer"),
        ("train.steps=none", r"train\.steps=None: .*integer"),
        ("train.steps=[3]", r"train\.steps=\[3\]: .*integer"),
        ("train.precision=fp8", r"train\.precision='fp8': .* be 'fp32', 'bf16', 'fp16' or 'paper'"),
        ("train.betas=0.9", r"train\.betas=\[0\.9\]: .*\(it holds tuple\[float, float\]\)"),
        ("train.betas=1,2,3", r"train\.betas=\[1, 2, 3\]: .*at most 2"),
        ("train.betas=(0.9,0.9)", r"train\.betas='\(0\.9': .*number"),
        ("model.window=1,2,3", r"window=\[1, 2, 3\]: .*at most 2 .*int \| tuple\[int, int\]"),
        ("model.window=big", r"model\.window='big': .*integer"),
        ("data.grid=5", r"data\.grid=\[5\]: .*\(it holds tuple\[int, int\] \| None\)"),
        ("data.grid=a,b", r"data\.grid='a': .*integer"),
        ("evaluate.region=1,2,3", r"evaluate\.region=\[1, 2, 3\]: "),
        ("data.holes=ignore", r"data\.holes='ignore': Input should be 'error' or 'drop-window'"),
        ("train.learning_rate=NaN", r"train\.learning_rate=nan: .*finite"),
        ("train.learning_rate=Infinity", r"train\.learning_rate=inf: .*finite"),
        ("train.betas=0.9,NaN", r"train\.betas=nan: .*finite"),
        ("evaluate.region=0,Infinity,0,1", r"evaluate\.region=inf: .*finite"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_the_kind(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after(setting)


# Rules


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.stride=0", "data.stride=0 must be at least 1"),
        ("data.input_offsets=-1", r"data.input_offsets=\(-1,\): the last input is the initial"),
        ("data.input_offsets=0,1", r"data.input_offsets=\(0, 1\): the last input is the initial"),
        ("data.input_offsets=", r"data.input_offsets=\(\): the last input is the initial time"),
        ("data.input_offsets=-2,0", r"\(-2, 0\) must be ..., -1, 0 without a gap; a longer step is"
                                    " data.stride"),
        ("data.input_offsets=0,-1", r"\(0, -1\) must be ..., -1, 0 without a gap"),
        ("data.output_offsets=0", r"data.output_offsets=\(0,\) must be 1, 2, ... without a gap"),
        ("data.output_offsets=2", r"\(2,\) must be 1, 2, ... without a gap; a longer step is"
                                  " data.stride"),
        ("data.output_offsets=2,1", r"data.output_offsets=\(2, 1\) must be 1, 2"),
        ("data.output_offsets=", r"data.output_offsets=\(\) must be 1, 2, ... without a gap"),
        ("data.read_threads=0", "data.read_threads=0 must be at least 1"),
        ("data.read_waves=0", "data.read_waves=0 must be at least 1"),
        ("model.patch=0", "model.patch=0 must be at least 1"),
        ("model.depth=-1", "model.depth=-1 must be at least 1"),
        ("model.window=4,0", r"model.window=\(4, 0\) must be at least 1 each way"),
        ("model.heads=3", "model.width=256 is not a multiple of model.heads=3"),
        ("model.norm_groups=48", "model.width=256 is not a multiple of model.norm_groups=48"),
        ("train.steps=0", "train.steps=0 must be at least 1"),
        ("train.leads=0", "train.leads=0 must be at least 1"),
        ("train.keep_checkpoints=0", "train.keep_checkpoints=0 must be at least 1"),
        ("train.learning_rate=-1e-4", "train.learning_rate=-0.0001 must not be negative"),
        ("train.clip_norm=-1", "train.clip_norm=-1.0 must not be negative"),
        ("train.ema_decay=1", "train.ema_decay=1.0 must be at least 0 and less than 1"),
        ("train.betas=0.9,1", r"train.betas=\(0.9, 1.0\) must each be at least 0 and less than 1"),
        ("forecast.leads=0", "forecast.leads=0 must be at least 1"),
        ("forecast.every=0", "forecast.every=0 must be at least 1"),
        ("evaluate.region=0,10,5,-5", r"evaluate.region=\(0.0, 10.0, 5.0, -5.0\): south and north"),
        ("evaluate.region=0,10,-95,5", r"-95.0, 5.0\): south and north, .* within -90 to 90"),
    ],
)  # fmt: skip
def test_a_rule_is_told_with_its_numbers(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after(setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mesh.data=-1", "mesh.data=-1 must be at least 0"),
        ("mesh.sequence=-1", "mesh.sequence=-1 must be at least 0"),
        ("mesh.window=0", "mesh.window=0 must be at least 1"),
        ("mesh.tensor=0", "mesh.tensor=0 must be at least 1"),
        ("mesh.member=0", "mesh.member=0 must be at least 1"),
        ("mesh.member=2", r"bayes\.members=1 cannot be shared evenly by mesh\.member=2 ranks"),
        ("mesh.fixed_windows=2,2", r"fixed_windows=\(2, 2\) must be two .* is mesh.window=1"),
        ("mesh.fixed_windows=-1,-1", r"fixed_windows=\(-1, -1\) must be two numbers whose"),
        ("mesh.stripe_dim=level", r"mesh\.stripe_dim='level': Input should be 'lat' or 'lon'"),
        ("mesh.weights=shared", r"mesh\.weights='shared': .* 'replicated' or 'sharded'"),
        ("mesh.windows=4", r"unknown key mesh.windows; did you mean mesh.window\?"),
    ],
)
def test_a_mesh_that_cannot_be_is_told_with_its_numbers(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after(setting)


def test_a_mesh_of_many_processes_is_a_configuration_like_any_other() -> None:
    mesh = after("mesh.window=4", "mesh.sequence=2", "mesh.tensor=2", "mesh.data=3").mesh
    assert mesh == MeshConfig(data=3, window=4, sequence=2, tensor=2)
    assert after("mesh.window=6", "mesh.fixed_windows=2,3").mesh.fixed_windows == (2, 3)


def test_a_split_to_be_found_is_one_among_ragged_windows() -> None:
    assert after("mesh.window=8", "mesh.sequence=0").mesh.sequence == 0
    with pytest.raises(ValueError, match=r"mesh\.sequence=0 looks among ragged windows; set"):
        after("mesh.window=4", "mesh.fixed_windows=2,2", "mesh.sequence=0")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 * 2**30), ("1.5 GiB", 3 * 2**29), ("800MiB", 800 * 2**20),
        ("85GB", 85 * 10**9), ("512KiB", 2**19), ("4096B", 4096), ("", None),
    ],
)  # fmt: skip
def test_a_memory_budget_is_a_size_with_its_unit(text: str, size: int | None) -> None:
    assert after(f"memory.budget={text}").memory.budget_bytes == size


@pytest.mark.parametrize("text", ["40 gigs", "-1GiB", "0B", "GiB", "4e9", "40"])
def test_a_budget_that_is_no_size_is_refused(text: str) -> None:
    message = (
        f"memory.budget={text}: write a size above 0 with its unit, such as 40GiB, 800MiB or 85GB"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        after(f"memory.budget={text}")


def test_norm_groups_do_not_matter_without_sampling_modules() -> None:
    assert after("model.sampling=1", "model.norm_groups=48").model.norm_groups == 48


def test_the_window_is_one_number_or_two() -> None:
    assert SwinConfig(window=6).window_shape == (6, 6)
    assert SwinConfig(window=(6, 12)).window_shape == (6, 12)


def test_sections_are_frozen_and_keyword_only() -> None:
    for section in SECTIONS.values():
        with pytest.raises(TypeError):
            section(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 3  # type: ignore[misc]


# Plain values and the fingerprint


def changed(value: Any, path: str) -> list[Any]:
    """Other legal values of a field."""
    special: dict[str, list[Any]] = {
        "data.input_offsets": [[-1, 0]], "data.output_offsets": [[1, 2]], "data.grid": [[8, 16]],
        "data.forcing_offsets": [[0, 1], []], "data.holes": ["drop-window"],
        "model.boundary": ["paper"], "model.padded_shape": [[8, 16]], "model.window": [9, [8, 9]],
        "model.width": [512], "model.heads": [4], "model.norm_groups": [16],
        "mesh.stripe_dim": ["lon"], "mesh.fixed_windows": [[1, 1]], "mesh.weights": ["sharded"],
        "mesh.shard_unit": ["model"], "mesh.gather": ["fp32"], "mesh.exchange": ["p2p"],
        "train.loss": ["mse"], "train.denominator": ["channel", "cells"],
        "train.leads_from": [[[1, 1]]], "train.dynamic_scale": ["inverse"],
        "train.schedule": ["constant"], "train.precision": ["bf16"], "train.betas": [[0.9, 0.9]],
        "train.ema_decay": [0.5], "forecast.split": ["train"], "forecast.weights": ["last"],
        "evaluate.climatology": ["all", "month"], "evaluate.region": [[0, 1, 2, 3]],
        "evaluate.thresholds": [["x>1"], ["x>1", "y@5<-2.5e-3"]], "evaluate.point": [[45, -30.5]],
        "memory.budget": ["40GiB"], "memory.mode": ["paper", "full", "none"],
        "bayes.prior": ["scaled", "start", "mixture"], "bayes.mixture_share": [0.25],
        "bayes.sigma_map": ["exp"], "bayes.alpha": [0.5],
        "bayes.likelihood": ["gaussian"],
    }  # fmt: skip
    if path in special:
        return special[path]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1]
    return [["x"], ["x", "y"]] if isinstance(value, list) else ["x"]


ONE_VALUE_ONLY = {"model.family", "mesh.member"}


# What a field cannot be set without.
NEEDS: dict[str, dict[str, Any]] = {
    "train.epochs": {"steps": 0}, "train.dynamic_scale_limit": {"dynamic_scale": "inverse"},
    "bayes.weights": {"likelihood": "gaussian"}, "bayes.members": {"likelihood": "crps"},
}  # fmt: skip


def test_the_fingerprint_changes_with_any_value_of_any_section() -> None:
    plain = Config().to_dict()
    seen = {Config().fingerprint: "the defaults", Config(name="x").fingerprint: "name"}
    assert len(seen) == 2
    for section in SECTIONS:
        for key, value in plain[section].items():
            path = f"{section}.{key}"
            for other in () if path in ONE_VALUE_ONLY else changed(value, path):
                values = {**NEEDS.get(path, {}), key: other}
                digest = from_dict({section: values}).fingerprint
                assert digest not in seen, f"{path}={other} looks like {seen.get(digest)}"
                assert len(digest) == 16
                assert int(digest, 16) >= 0
                seen[digest] = f"{path}={other}"


def test_plain_values_round_trip_and_are_json() -> None:
    config = after("model.window=6,12", "data.train=2003", "evaluate.region=1,2,3,4", "name=x")
    plain = config.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert from_dict(plain) == config
    assert from_dict(plain).fingerprint == config.fingerprint
    assert from_dict({}) == Config()


def test_one_and_one_point_zero_are_one_configuration() -> None:
    ints = Config(train=TrainConfig(clip_norm=2, weight_decay=0))
    floats = Config(train=TrainConfig(clip_norm=2.0, weight_decay=0.0))
    assert ints.fingerprint == floats.fingerprint == from_dict(ints.to_dict()).fingerprint


def test_the_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"b": [1, 2]}) != fingerprint({"b": [2, 1]})
    assert fingerprint({"a": 0.1}) != fingerprint({"a": math.nextafter(0.1, 1)})


def test_every_section_and_every_key_of_it_has_a_default() -> None:
    assert {name: section() for name, section in SECTIONS.items()} == {
        name: getattr(Config(), name) for name in SECTIONS
    }


def test_a_choice_whose_word_is_none_can_be_set() -> None:
    assert override(Config(), ["memory.mode=none"]).memory.mode == "none"
