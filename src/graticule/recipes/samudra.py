"""Samudra and Samudra 2: the global ocean of OM4 from five days to the next, and small ones.

Two states in, two states out, in steps of two: a lead is ten days. Forcing is that of the two
input times, as in the original; `data.forcing_offsets=1,2` gives that of the two output times.
"""

from dataclasses import replace

from graticule.config import Config, DataConfig, TrainConfig, UNetConfig
from graticule.recipes.ocean import ocean

DEPTHS_M = (2.5, 10, 22.5, 40, 65, 105, 165, 250, 375, 550, 775, 1050, 1400, 1850, 2400, 3100,
            4000, 5000, 6000)  # fmt: skip
"""Of OM4's 19 levels."""
CHANNELS = (
    *(f"{name}@{depth:g}" for name in ("uo", "vo", "thetao", "so") for depth in DEPTHS_M), "zos",
)  # fmt: skip
FORCING = ("tauuo", "tauvo", "hfds", "hfds_anomalies")
STEPS_PER_EPOCH = 88
"""Of 32 samples each, in the training years of OM4 as published."""


def samudra() -> Config:
    """Samudra 2 at 1 degree: 84,066,474 parameters, trained as the authors' code and presets say.

    From these (not from the text of their article, which gives eight A100s with four samples each
    and four steps of rollout, no more): 70 epochs of Adam at 6e-4, without decay, by a cosine to 0;
    32 samples a step; one lead for 20 epochs, then four, the gradient through all of them; clipping
    at 1; an average of 0.999; squared errors over all cells, unweighted; dynamic loss scales,
    limited to 20 times the least. Theirs steps the cosine by epochs, ours by steps. Their training
    years end with 5 October 2013, which also validates: ours end one step earlier.
    """
    return Config(
        name="samudra",
        data=DataConfig(
            grid=(180, 360),
            prognostic=CHANNELS,
            forcing=FORCING,
            input_offsets=(-1, 0),
            output_offsets=(1, 2),
            forcing_offsets=(-1, 0),
            train=("1975-01-03/2013-09-30",),
            validation=("2013-10-05/2014-10-05",),
            test=("2014-10-10/2022-12-24",),
        ),
        model=UNetConfig(),
        train=TrainConfig(
            steps=70 * STEPS_PER_EPOCH,
            batch=32,
            leads=4,
            leads_from=((1, 1), (20 * STEPS_PER_EPOCH + 1, 4)),
            loss="mse",
            denominator="cells",
            dynamic_scale="inverse",
            dynamic_scale_limit=20.0,
            area_weighted=False,
            learning_rate=6e-4,
            final_learning_rate=0.0,
            warmup_steps=0,
            betas=(0.9, 0.999),
            weight_decay=0.0,
            ema_decay=0.999,
        ),
    )


def samudra_1() -> Config:
    """Samudra at 1 degree: 135,376,762 parameters with the same channels; its up-sampling has a
    seam at the first longitude.

    Widths, factor and up-sampling are those of the authors' code. It is trained as `samudra` but
    without dynamic loss scales, which came with the second; how the first was trained is published
    as a duration alone, four days on eight A100s.
    """
    second = samudra()
    model = UNetConfig(widths=(200, 250, 300, 400), factor=4, upsampling="plain")
    train = replace(second.train, dynamic_scale="none", dynamic_scale_limit=0.0)
    return replace(second, name="samudra-1", model=model, train=train)


def samudra_quarter_degree() -> Config:
    """Samudra 2 at 1/4 degree: 720 x 1440 points, one sample at a time, four leads, bf16 but for
    the last convolution.

    The authors' preset for high resolution: instance norm without weights, one sample a GPU, four
    micro-batches a step, which on their eight GPUs makes the 32 samples of `samudra`; here they
    follow one another, on however many devices share a sample. No curriculum is known of: all
    steps have four leads, and memory is planned for these anyway. Rates and epochs are those of
    `samudra`.
    """
    base = samudra()
    return replace(
        base,
        name="samudra-quarter-degree",
        data=replace(base.data, grid=(720, 1440)),
        model=UNetConfig(norm="instance"),
        train=replace(base.train, batch=1, accumulation=32, leads_from=(), precision="bf16"),
    )


def samudra_mini() -> Config:
    """A Samudra that two cores compute in a moment, with all that its layouts must get right: 43
    rows that no pooling divides, batch norms, learned positions. For `graticule verify`."""
    return Config(
        name="samudra-mini",
        data=DataConfig(
            grid=(43, 48),
            prognostic=("thetao@2.5", "thetao@40", "uo@2.5", "zos"),
            forcing=("hfds", "tauuo"),
            input_offsets=(-1, 0),
            output_offsets=(1, 2),
            forcing_offsets=(-1, 0),
        ),
        model=UNetConfig(
            widths=(10, 14, 18), dilations=(1, 2, 4, 4, 4, 2, 2), position_features=2
        ),
        train=TrainConfig(batch=2, leads=2, loss="mse"),
    )  # fmt: skip


def samudra_ocean() -> Config:
    """A small Samudra of the generated ocean, given the heat and fresh water of both steps that it
    takes, trained as the large one is: one lead, then four. Grid, channels, statics, masks and
    splits are the store's. `graticule bench ocean-skill` says how good its forecasts are."""
    base = ocean()
    return replace(
        base,
        name="samudra-ocean",
        data=replace(
            base.data, input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=(0, 1)
        ),
        model=UNetConfig(widths=(32, 48, 64), dilations=(1, 2, 4, 4, 4, 2, 2)),
        train=replace(
            base.train,
            loss="mse",
            steps=1200,
            batch=8,
            leads=4,
            leads_from=((1, 1), (801, 4)),
            # Weighted by area a polar cell hardly counts, and forecasts leave their range there.
            area_weighted=False,
            learning_rate=6e-4,
            final_learning_rate=1e-5,
            weight_decay=0.0,
            ema_decay=0.99,
        ),
    )
