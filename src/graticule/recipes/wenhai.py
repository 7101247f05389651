"""The models of TERRA's Table V: global ocean at 1/12 degree, 93 channels, 2041 x 4320 points."""

from dataclasses import replace

from graticule.config import Config, DataConfig, SwinConfig, TrainConfig
from graticule.data.known import WENHAI_DEPTHS_M

# The 23 of GLORYS12's 50 depths, down to 644 m, that the Wenhai family predicts (m).
DEPTHS_M = WENHAI_DEPTHS_M
CHANNELS = (
    *(f"{name}@{depth:g}" for name in ("thetao", "so", "uo", "vo") for depth in DEPTHS_M),
    "zos",
)


def _wenhai(name: str, *, width: int, heads: int, window: int) -> Config:
    return Config(
        name=name,
        data=DataConfig(
            grid=(2041, 4320),
            prognostic=CHANNELS,
            train=("1993/2018",),
            validation=("2019",),
            test=("2020",),
        ),
        model=SwinConfig(
            patch=4,
            sampling=2,
            width=width,
            depth=10,
            heads=heads,
            window=window,
            boundary="paper",
        ),
        train=TrainConfig(batch=1, accumulation=16, precision="fp16", area_weighted=False),
    )


def wenhai_small() -> Config:
    """TERRA's Wenhai at 1/12 degree, 2041 x 4320 points: 0.18 B parameters, as published."""
    return _wenhai("wenhai-small", width=1024, heads=8, window=8)


def wenhai_medium() -> Config:
    """The same with 2.85 B parameters, as published."""
    return _wenhai("wenhai-medium", width=4096, heads=32, window=8)


def wenhai_large() -> Config:
    """The same with 11.4 B parameters, as published, and windows of 32 x 32 tokens."""
    return _wenhai("wenhai-large", width=8192, heads=64, window=32)


def wenhai_small_p2() -> Config:
    """The small model with patches of 2 x 2 points."""
    small = wenhai_small()
    return replace(small, name="wenhai-small-p2", model=replace(small.swin, patch=2))


def wenhai_small_p8() -> Config:
    """The small model without sampling modules; patches of 8 x 8 points give as many tokens."""
    small = wenhai_small()
    model = replace(small.swin, patch=8, sampling=1)
    return replace(small, name="wenhai-small-p8", model=model)


def wenhai_small_globe() -> Config:
    """The small model on a globe: longitude is periodic, so the circle's 540 token columns are
    cut into windows 9 wide."""
    small = wenhai_small()
    model = replace(small.swin, boundary="globe", window=(8, 9))
    return replace(small, name="wenhai-small-globe", model=model)
