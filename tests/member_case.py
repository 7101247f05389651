"""Forecasts of an ensemble: a chaotic model that is right on any stripe, and a small BEAST."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor, nn

from graticule.assemble import build_model, shapes_of
from graticule.config import BayesConfig, Config, DataConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics
from graticule.data.store import Store
from graticule.forecast.reader import open_forecast
from graticule.forecast.run import forecast
from graticule.mesh import Cut, Mesh, Stripes
from graticule.model.bayes import make_bayesian
from graticule.model.draws import Draw, drawing, noise
from graticule.model.layers import Linear
from graticule.recipes import recipe

CONFIG = DataConfig(input_offsets=(-1, 0), without=("flux", "depth"))
STARTS, LEADS, EVERY = (1, 2, 3), 3, 2


class Points(nn.Module):
    """Chaotic at each grid point alone, with weights that are drawn and noise by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = Linear(2, 2, std=1.0)
        self.weights.reset(torch.Generator().manual_seed(3))
        make_bayesian(self, key=lambda name: 5 + len(name), initial_sigma=0.5)
        self.heard: list[Draw] = []

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        """Channels: two states of two and a forcing -> two."""
        assert draw is not None
        self.heard.append(draw)
        before, state, given = x[:, :2], x[:, 2:4], x[:, 4:5]
        with drawing(draw):
            w, b = self.weights.weights(x.dtype)
        e = noise(9, draw, 2, x.device)[:, :, None, None]
        out = 1.7 * torch.sin(2.3 * state + 0.1 * given + 0.1 * e) - 0.2 * before
        return out + 0.1 * (w @ b)[:, None, None]


class Killed(Points):
    """The process dies in its `call`-th call (on the last rank, if there are several)."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, draw: Draw | None = None) -> Tensor:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if len(self.heard) == self.call - 1 and last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, draw)


def beast(source: SampleSource, *, weights: bool = True, num_noise: int = 8) -> nn.Module:
    """A BEAST for 8 x 16 points, with weights of some size in all places."""
    mini = recipe("beast-mini")
    config = Config(
        data=source.config,
        model=replace(mini.model, window=(4, 4), inner_window=(2, 4), nice_noise=num_noise),
        bayes=replace(mini.bayes, initial_sigma=0.5) if weights else BayesConfig(),
    )
    model = build_model(config, shapes_of(source))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.endswith("_rho"):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def run(
    store: str, out: Path, model: nn.Module | None = None, mesh: Mesh | None = None,
    stripes: Stripes | None = None, config: DataConfig = CONFIG, **given: Any,
) -> Any:  # fmt: skip
    opened = Store(store)
    part = {"rows": stripes.rows, "columns": stripes.columns} if stripes else {}
    return forecast(
        model or Points(), SampleSource(opened, config, **part), Statistics.load(opened), out,
        mesh=mesh, stripes=stripes,
        **{"starts": STARTS, "leads": LEADS, "members": 3, "attributes": {"run": "abc"},
           "batch": 2, **given},
    )  # fmt: skip


def on_ranks(
    sizes: dict[str, int], bounds: tuple[int, ...], store: str, out: Path,
    model: nn.Module | None = None, given: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """What a rank raised. bounds: of stripes of rows."""
    mesh = Mesh(sizes)
    stripes = None
    if bounds:
        stripes = Stripes(dim="lat", index=mesh.sample_index, cuts={}, grid=Cut(bounds))
    try:
        run(store, out, model, mesh, stripes, **given or {})
    except ValueError as error:
        return str(error)
    return ""


def fields(path: Path) -> np.ndarray:
    """(initial time, member, lead, channel, lat, lon) of a complete forecast."""
    with open_forecast(path) as opened:
        names = opened.channels.names
    with xr.open_dataset(path, engine="zarr" if path.is_dir() else "netcdf4") as data:
        return np.stack([data[name].values for name in names], axis=3)
