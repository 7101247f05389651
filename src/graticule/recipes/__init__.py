"""Named configurations. Each is a function that returns a whole `Config`."""

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path

from graticule.config import Config, from_dict
from graticule.recipes.beast import beast_0_7b, beast_1_1b, beast_2_4b, beast_demo, beast_mini
from graticule.recipes.demo import demo, demo_coast, demo_finetune, small, winds
from graticule.recipes.ocean import ocean
from graticule.recipes.samudra import (
    samudra,
    samudra_1,
    samudra_mini,
    samudra_ocean,
    samudra_quarter_degree,
)
from graticule.recipes.wenhai import (
    wenhai_large,
    wenhai_medium,
    wenhai_small,
    wenhai_small_globe,
    wenhai_small_p2,
    wenhai_small_p8,
)


def named(recipe: Callable[[], Config]) -> str:
    """`beast_2_4b` -> beast-2.4b."""
    return re.sub(r"(\d)-(\d)", r"\1.\2", recipe.__name__.replace("_", "-"))


RECIPES: dict[str, Callable[[], Config]] = {
    named(recipe): recipe
    for recipe in (
        demo,
        demo_finetune,
        demo_coast,
        small,
        winds,
        ocean,
        wenhai_small,
        wenhai_medium,
        wenhai_large,
        wenhai_small_p2,
        wenhai_small_p8,
        wenhai_small_globe,
        samudra,
        samudra_1,
        samudra_quarter_degree,
        samudra_mini,
        samudra_ocean,
        beast_2_4b,
        beast_1_1b,
        beast_0_7b,
        beast_mini,
        beast_demo,
    )
}


def descriptions() -> dict[str, str]:
    """What each recipe is, in a sentence or two."""
    first = {name: (recipe.__doc__ or "").partition("\n\n")[0] for name, recipe in RECIPES.items()}
    return {name: " ".join(text.split()) for name, text in first.items()}


def recipe(name: str) -> Config:
    """The configuration called `name`, or that of a JSON file (a run's `config.json`)."""
    if name in RECIPES:
        return RECIPES[name]()
    path = Path(name)
    if path.suffix == ".json":
        try:
            return from_dict(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no configuration: {error}") from None
    near = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"no recipe {name!r}{hint} (there are {', '.join(RECIPES)}, or a .json file)")
