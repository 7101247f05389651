"""Small models that train on a laptop."""

from dataclasses import replace

from graticule.config import (
    Config,
    DataConfig,
    EvaluateConfig,
    ForecastConfig,
    SwinConfig,
    TrainConfig,
)


def demo() -> Config:
    """One-step pretraining on the demo planet; the planet has no seasons, hence the climatology
    of all times. Patch 4 costs 0.4 as much a step and gets the same RMSE in the same time, but its
    forecasts show the patches by lead 5."""
    return Config(
        name="demo",
        data=DataConfig(store="data/planet.zarr", grid=(48, 96), prognostic=("u", "v", "h")),
        model=SwinConfig(
            patch=2, sampling=2, width=64, depth=4, heads=4, window=(6, 6), norm_groups=8
        ),
        train=TrainConfig(
            steps=500,
            batch=8,
            learning_rate=2e-3,
            final_learning_rate=1e-5,
            warmup_steps=30,
            roll_longitude=True,
            ema_decay=0.99,
        ),
        forecast=ForecastConfig(leads=10, every=4),
        evaluate=EvaluateConfig(climatology="all"),
    )


def demo_finetune() -> Config:
    """Fine-tuning over four leads, from the demo's pretrained weights."""
    pretrain = demo()
    train = replace(
        pretrain.train,
        steps=60,
        leads=4,
        learning_rate=7e-4,
        warmup_steps=3,
        ema_decay=0.95,
        start_from="runs/demo/pretrain",
    )
    return replace(pretrain, name="demo-finetune", train=train)


def demo_coast() -> Config:
    """The demo planet observed at sea only: land is masked, so samples are not turned."""
    base = demo()
    return replace(
        base,
        name="demo-coast",
        data=replace(base.data, store="data/planet-coast.zarr", static=("sea",)),
        train=replace(base.train, roll_longitude=False),
    )


def small() -> Config:
    """A small model for whatever store: `--set data.store=PATH`. Grid, channels, roles and
    splits are the store's own; window widths that do not divide the circle are refused with
    those that do."""
    base = demo()
    return replace(
        base,
        name="small",
        data=DataConfig(),
        train=replace(base.train, roll_longitude=False),
        evaluate=EvaluateConfig(),
    )


def winds() -> Config:
    """132 months of global monthly mean surface winds at 2.5 degrees (FNMOC; see
    `graticule data ingest --help`): from one month to the next."""
    return Config(
        name="winds",
        data=DataConfig(
            store="data/winds.zarr",
            grid=(73, 144),
            prognostic=("UWND", "VWND"),
            train=("1982/1989",),
            validation=("1990",),
            test=("1991/1992",),
        ),
        model=SwinConfig(
            patch=3, sampling=2, width=64, depth=2, heads=4, window=(5, 6), norm_groups=8
        ),
        train=TrainConfig(
            steps=200, batch=8, learning_rate=5e-4, warmup_steps=20, ema_decay=0.97,
            final_learning_rate=1e-5,
        ),
        forecast=ForecastConfig(leads=3),
        evaluate=EvaluateConfig(climatology="month"),
    )  # fmt: skip
