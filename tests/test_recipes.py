"""Every recipe is a whole, valid configuration whose model can be built."""

import json
from pathlib import Path

import pytest

from graticule.assemble import describe, shapes_of_config
from graticule.config import DataConfig, from_dict, override
from graticule.recipes import RECIPES, recipe

SMALL = ("demo", "demo-finetune", "demo-coast", "small", "winds", "ocean", "samudra-ocean",
         "beast-demo")  # fmt: skip
OF_BEAST = ("beast-2.4b", "beast-1.1b", "beast-0.7b", "beast-mini")
OF_SAMUDRA = ("samudra", "samudra-1", "samudra-quarter-degree", "samudra-mini")
# Parameters of TERRA's Table V, billions.
PUBLISHED = {"wenhai-small": 0.18, "wenhai-medium": 2.85, "wenhai-large": 11.4}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_being_written_and_read(name: str) -> None:
    config = recipe(name)
    assert config.name == name
    again = from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.fingerprint == config.fingerprint
    assert config.train.warmup_steps < config.train.steps


def test_no_two_recipes_are_the_same() -> None:
    prints = {recipe(name).fingerprint for name in RECIPES}
    assert len(prints) == len(RECIPES)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_describes_itself_once_its_data_are_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no store lies
    config = recipe(name)
    grid, names = ("73,144", "UWND,VWND") if name == "winds" else ("48,96", "u,v,h")
    known = override(config, [f"data.grid={grid}", f"data.prognostic={names}"])
    info = describe(known, shapes_of_config(known))
    assert info["parameters"] < 2e6, "small enough for a laptop"
    if info["family"] == "swin":
        assert info["padded_shape"][0] * info["padded_shape"][1] < 1.4 * 73 * 144
    elif info["family"] == "unet":
        assert info["seam"] == ""
    assert info["leads"] == config.train.leads


@pytest.mark.parametrize("name", [n for n in RECIPES if n not in (*SMALL, *OF_SAMUDRA, *OF_BEAST)])
def test_a_published_recipe_describes_itself_without_data(name: str) -> None:
    config = recipe(name)
    assert len(config.data.prognostic) == 93
    info = describe(config, shapes_of_config(config))
    assert info["grid"] == [2041, 4320]
    assert info["in_channels"] == info["out_channels"] == 93
    assert (
        info["windows"] * config.model.window_shape[0] * config.model.window_shape[1]
        == (info["tokens"])
    )
    if name in PUBLISHED:
        assert info["parameters"] / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def test_samudra_takes_two_states_and_gives_two() -> None:
    for name in (*OF_SAMUDRA, "samudra-ocean"):
        config = recipe(name)
        assert config.data.input_offsets == (-1, 0)
        assert config.data.output_offsets == (1, 2)
        assert len(config.data.forcing_offsets) == 2
    full = recipe("samudra").data
    assert len(full.prognostic) == 77
    assert full.prognostic[:2] == ("uo@2.5", "uo@10")
    assert full.prognostic[-2:] == ("so@6000", "zos")


def test_samudra_is_trained_as_its_authors_presets_say() -> None:
    published = {"learning_rate": 6e-4, "final_learning_rate": 0.0, "weight_decay": 0.0,
                 "clip_norm": 1.0, "ema_decay": 0.999, "warmup_steps": 0, "loss": "mse",
                 "denominator": "cells", "area_weighted": False, "leads": 4, "detach_every": 0,
                 "steps": 6160, "schedule": "cosine"}  # fmt: skip
    for name in OF_SAMUDRA[:3]:
        train = recipe(name).train
        assert {key: getattr(train, key) for key in published} == published, name
        # 2,820 windows of the training years are 88 steps of 32 samples.
        assert train.batch * train.accumulation == 32
    assert recipe("samudra").train.leads_from == ((1, 1), (20 * 88 + 1, 4))
    assert recipe("samudra").train.dynamic_scale_limit == 20
    assert recipe("samudra-1").train.dynamic_scale == "none"
    assert recipe("samudra-quarter-degree").train.precision == "bf16"


def test_fine_tuning_continues_the_demo() -> None:
    first, second = recipe("demo"), recipe("demo-finetune")
    assert second.model == first.model
    assert second.data == first.data
    assert second.train.leads > first.train.leads
    assert second.train.learning_rate < first.train.learning_rate
    assert Path(second.train.start_from).parts[-1] == "pretrain"


def test_where_there_is_land_samples_are_not_turned() -> None:
    assert recipe("demo").train.roll_longitude
    assert not recipe("demo-coast").train.roll_longitude


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="no recipe 'wenhai-smal'; did you mean wenhai-small"):
        recipe("wenhai-smal")
    with pytest.raises(ValueError, match=r"there are demo, .*winds, .*or a \.json file"):
        recipe("zzz")


def test_a_runs_own_configuration_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(recipe("winds").to_dict()))
    assert recipe(str(path)) == recipe("winds")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "x", ', "is no configuration: Expecting"),
        ("[1, 2]", "is no configuration: a configuration is a table"),
        (
            '{"train": {"detach_evry": 4}}',
            r"unknown key train\.detach_evry; did you mean .*detach_every",
        ),
        ('{"train": {"steps": "many"}}', r"is no configuration: train\.steps='many'"),
        ("\udcff\udcfe", "is no configuration: 'utf-8' codec"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        recipe(str(path))
    assert str(error.value).startswith(str(path))
    assert len(str(error.value).splitlines()) == 1


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json is no configuration: .*No such file"):
        recipe(str(tmp_path / "none.json"))


def test_recipes_leave_splits_to_the_store_or_keep_them_apart() -> None:
    splits = [recipe(name).data for name in RECIPES]
    for data in splits:
        assert isinstance(data, DataConfig)
        given = [bool(data.train), bool(data.validation), bool(data.test)]
        assert all(given) or not any(given)
