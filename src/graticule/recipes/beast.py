"""BEAST, and small models of its kind: two states in, two out, 12 and 24 hours ahead.

Of hourly data the offsets count twelve store steps each.
"""

from dataclasses import replace

from graticule.config import BayesConfig, BeastConfig, Config, DataConfig, TrainConfig
from graticule.data.known import ERA5_LEVELS_HPA
from graticule.recipes.demo import demo

CHANNELS = (
    "10m_u_component_of_wind", "10m_v_component_of_wind", "mean_sea_level_pressure",
    "2m_temperature", "sea_surface_temperature", "total_precipitation",
    *(f"{name}@{level:g}"
      for name in ("geopotential", "specific_humidity", "temperature", "u_component_of_wind",
                   "v_component_of_wind", "vertical_velocity")
      for level in ERA5_LEVELS_HPA),
)  # fmt: skip
"""84: six at the surface, six at 13 levels."""
STATIC = ("soil_type", "geopotential_at_surface", "land_sea_mask")


def _beast(name: str, *, members: int, model: BeastConfig) -> Config:
    return Config(
        name=name,
        data=DataConfig(
            grid=(720, 1440),
            prognostic=CHANNELS,
            static=STATIC,
            input_offsets=(-1, 0),
            output_offsets=(1, 2),
            stride=12,
            train=("1979/2019",),
            validation=("2020",),
            test=("2021/2025",),
        ),
        model=model,
        train=TrainConfig(
            steps=983_350,
            batch=4,
            loss="mse",
            learning_rate=1e-4,
            final_learning_rate=1e-5,
            warmup_steps=10_000,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            precision="bf16",
        ),
        bayes=BayesConfig(weights=True, members=members, likelihood="moments"),
    )


def beast_2_4b() -> Config:
    """BEAST at 1/4 degree: 2.37 B parameters, outer windows of 64,800 tokens that span all
    latitudes."""
    model = BeastConfig(
        width=3072, depth=2, inner_depth=2, heads=24, inner_heads=48, window=(360, 180),
        inner_window=(180, 30),
    )  # fmt: skip
    return _beast("beast-2.4b", members=2, model=model)


def beast_1_1b() -> Config:
    """BEAST with 1.06 B parameters, the same windows."""
    wide = beast_2_4b()
    assert isinstance(wide.model, BeastConfig)
    model = replace(wide.model, width=2048, heads=16, inner_heads=32)
    return replace(wide, name="beast-1.1b", model=model)


def beast_0_7b() -> Config:
    """BEAST with 0.64 B parameters, deeper, windows of 1,800 and 600 tokens: the one trained to the
    end, by 96 members."""
    return _beast("beast-0.7b", members=96, model=BeastConfig())


def beast_mini() -> Config:
    """A BEAST that two cores compute in a moment, with all that its layouts must get right: rows
    that neither patches, the inner stage nor windows divide, outer windows that are shifted both
    ways, inner ones that span all latitudes."""
    base = beast_0_7b()
    data = replace(
        base.data,
        grid=(21, 48),
        prognostic=("2m_temperature", "geopotential@500", "u_component_of_wind@850"),
        static=("land_sea_mask",),
        stride=1,
    )
    model = BeastConfig(
        width=16, depth=2, inner_depth=2, heads=4, inner_heads=4, window=(4, 6),
        inner_window=(6, 4), norm_groups=4, nice_noise=8,
    )  # fmt: skip
    train = TrainConfig(batch=2, leads=2, loss="mse", weight_decay=0.0)
    return replace(
        base, name="beast-mini", data=data, model=model, train=train,
        bayes=replace(base.bayes, members=4),
    )  # fmt: skip


def beast_demo() -> Config:
    """A small BEAST of the demo planet, which has a state each six hours: 12 and 24 hours ahead
    from now and 12 hours ago, 4 members. A step is of a second or so of one core; `bench
    ensembles` trains its like on a coarser planet, one member first and then several."""
    base = demo()
    return replace(
        base,
        name="beast-demo",
        data=replace(base.data, input_offsets=(-1, 0), output_offsets=(1, 2), stride=2),
        model=BeastConfig(
            width=32, depth=1, inner_depth=2, heads=2, inner_heads=4, window=(8, 8),
            inner_window=(6, 8), norm_groups=4,
        ),
        train=replace(
            base.train, loss="mse", batch=4, learning_rate=1e-3, final_learning_rate=1e-5,
            weight_decay=0.0,
        ),
        bayes=BayesConfig(weights=True, members=4, likelihood="crps"),
    )  # fmt: skip
