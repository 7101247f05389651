"""A small model of the generated ocean."""

from dataclasses import replace

from graticule.config import Config, DataConfig
from graticule.recipes.demo import demo


def ocean() -> Config:
    """One five-day step of the generated ocean, given the heat and fresh water of those days.

    Grid, channels, roles, statics, masks and splits are the store's. The store's forcing is
    withheld by `--set data.without=hfds,wfo`; what no forecast can then get below is
    `graticule.data.ocean.rmse_without_forcing`.
    """
    base = demo()
    return replace(
        base,
        name="ocean",
        data=DataConfig(store="data/ocean.zarr"),
        model=replace(base.swin, depth=2),
        train=replace(base.train, steps=400, batch=4, roll_longitude=False),
        evaluate=replace(base.evaluate, climatology="month-day"),
    )
