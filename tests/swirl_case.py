"""A forecast whose last bit counts: a chaotic model that is right on any stripe, killed at will."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graticule.config import DataConfig
from graticule.data.samples import SampleSource
from graticule.data.statistics import Statistics, compute
from graticule.data.store import Store
from graticule.forecast.run import forecast
from graticule.mesh import Cut, Mesh, Stripes
from small_store import write_store

CONFIG = DataConfig(input_offsets=(-1, 0), output_offsets=(1, 2), forcing_offsets=(-1, 0))
STARTS, LEADS, EVERY = (1, 2, 3, 4, 5), 4, 3


class Swirl(nn.Module):
    """Chaotic at each grid point alone: right on any stripe, and a last bit grows."""

    def forward(self, x: Tensor) -> Tensor:
        """Channels: two states of two, two forcings, a static -> two outputs of two and a
        diagnostic."""
        before, state, given, fixed = x[:, :2], x[:, 2:4], x[:, 4:6], x[:, 6:7]
        first = 1.7 * torch.sin(2.3 * state + 0.1 * given[:, :1]) - 0.2 * before
        second = 1.7 * torch.sin(2.3 * first + 0.1 * given[:, 1:]) + 0.1 * fixed
        return torch.cat([first, first[:, :1], second, second[:, 1:]], dim=1)


class Killed(Swirl):
    """The process dies in its `call`-th call (on the last rank, if there are several)."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if self.calls == self.call and last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def swirl_store(path: Path) -> Store:
    """24 days of two prognostic channels, one with land, a forcing, a static and a diagnostic."""
    store = write_store(path, land=True, packed=True, static=("depth",), diagnostic=("flux",))
    compute(store, SampleSource(store, CONFIG).times("train")).save(store)
    return store


def run(
    store: str, out: Path, model: nn.Module | None = None, mesh: Mesh | None = None,
    stripes: Stripes | None = None, **given: Any,
) -> Any:  # fmt: skip
    opened = Store(store)
    part = {"rows": stripes.rows, "columns": stripes.columns} if stripes else {}
    return forecast(
        model or Swirl(), SampleSource(opened, CONFIG, **part), Statistics.load(opened), out,
        mesh=mesh, stripes=stripes,
        **{"starts": STARTS, "leads": LEADS, "attributes": {"run": "abc"}, "batch": 2,
           "restart_every": EVERY, **given},
    )  # fmt: skip


def on_ranks(
    sizes: dict[str, int], bounds: tuple[int, ...], dim: Any, store: str, out: Path,
    model: nn.Module | None = None, given: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """What a rank raised."""
    mesh = Mesh(sizes)
    stripes = None
    if bounds:
        stripes = Stripes(dim=dim, index=mesh.sample_index, cuts={}, grid=Cut(bounds))
    try:
        run(store, out, model, mesh, stripes, **given or {})
    except ValueError as error:
        return str(error)
    return ""
