"""Where leads end: a channel at a time comes to the numbers of whole fields, in less memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graticule.assemble import Shapes, assemble
from graticule.config import Config, SwinConfig, TrainConfig, UNetConfig
from graticule.memory.apply import Memory
from graticule.memory.plan import Plan, Segment
from graticule.memory.trace import trace_memory
from graticule.mesh import Mesh
from graticule.train import loss
from graticule.train.ending import States, Wanted, ending
from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.step import training_step

SHAPES = Shapes(
    grid=(16, 16), num_prognostic=3, num_predicted=4, num_forcing=1, num_static=1, num_inputs=1,
    num_outputs=1, num_forcings=1,
)  # fmt: skip
SWIN = SwinConfig(patch=2, width=16, depth=2, heads=2, window=2, norm_groups=4)
UNET = UNetConfig(widths=(6, 8), factor=2, dilations=(1, 2, 1, 2, 1))
LEADS = 3


class Batch:
    init_times = ("drawn", "drawn")

    def __init__(self, shapes: Shapes, wet: Tensor) -> None:
        self.keys, draw = [0, 1], torch.Generator().manual_seed(5)

        def field(offsets: int, channels: int) -> Tensor:
            return torch.randn(2, offsets, channels, *shapes.grid, generator=draw)

        self.inputs = field(shapes.num_inputs, shapes.num_prognostic)
        self.inputs *= wet[: shapes.num_prognostic]
        self._leads = [
            (field(1, shapes.num_forcing), field(shapes.num_outputs, shapes.num_predicted))
            for _ in range(LEADS)
        ]

    def lead(self) -> tuple[Tensor, Tensor]:
        return self._leads.pop(0)


def gradients(
    shapes: Shapes, model: Any, kind: Any, *, lead_wise: bool, every: int, area: bool
) -> dict[str, Tensor]:
    network = assemble(Config(model=model, train=TrainConfig(batch=2)), shapes, Mesh()).model
    wet = torch.rand(shapes.num_predicted, *shapes.grid, generator=torch.manual_seed(3)) > 0.2
    cells = np.linspace(0.5, 2, shapes.grid[0])[:, None] * np.ones(shapes.grid[1])
    objective = Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.ones(shapes.num_static, *shapes.grid),
        weights=LossWeights.of(wet.numpy(), cells if area else None), kind=kind, leads=LEADS,
        num_prognostic=shapes.num_prognostic, num_outputs=shapes.num_outputs, detach_every=every,
    )  # fmt: skip
    plan = None
    if lead_wise:
        lead = tuple(Segment(at, at + 1, "recompute") for at in range(len(network.units())))  # type: ignore[operator]
        plan = Plan((lead,) * LEADS, lead_wise=True)
    batch = Batch(shapes, wet)
    if not lead_wise:
        batch.inputs.requires_grad_()
    result = training_step(
        network, objective, [batch], optimizer=torch.optim.SGD(network.parameters(), lr=0.0),
        step=1, samples=2, learning_rate=0.0, memory=Memory(plan),
    )  # fmt: skip
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    if batch.inputs.grad is not None:
        found["inputs"] = batch.inputs.grad
    assert len(found) == len(list(network.parameters())) + (not lead_wise)
    return {**found, "losses": torch.tensor(result.lead_losses)}


@pytest.mark.parametrize("lead_wise", [False, True])
@pytest.mark.parametrize(
    ("shapes", "model", "every", "area"),
    [
        ({}, SWIN, 0, False),
        ({"num_predicted": 3, "num_forcing": 0, "num_static": 0}, SWIN, 0, True),
        ({"num_inputs": 2}, SWIN, 0, True),
        ({"num_inputs": 3, "num_outputs": 2}, SWIN, 2, False),
        ({"num_outputs": 2}, SWIN, 1, False),
        ({"num_inputs": 2, "num_outputs": 2}, UNET, 0, True),
        ({"num_inputs": 2}, UNET, 2, False),
    ],
)
def test_a_channel_at_a_time_has_the_gradient_of_whole_fields(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, int], model: Any, every: int, area: bool,
    lead_wise: bool,
) -> None:  # fmt: skip
    if not lead_wise and model is SWIN:
        monkeypatch.setattr(loss, "_PART", 1)
    there = replace(SHAPES, **shapes)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"lead_wise": lead_wise, "every": every, "area": area}
    ours = gradients(there, model, "mae", **settings)
    # What is published leaves all of it to autograd.
    whole = gradients(there, model, "published mae", **settings)
    for name, value in whole.items():
        if name == "losses":
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=0)
        else:
            assert torch.equal(ours[name], value), name


def _peak(states: States, call: Callable[[], Any]) -> tuple[Any, int]:
    found, trace = trace_memory(call, lambda: {"states": [states.first, *states.said]})
    return found, trace.peak_bytes - int(trace.alive[0].sum())


def test_where_a_lead_ends_nothing_wide_is_whole_but_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels, rows, columns = 64, 16, 16
    values = channels * rows * columns
    monkeypatch.setattr(loss, "_PART", rows * columns)
    one = (1, 1, channels, rows, columns)
    objective = Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.empty(0, rows, columns),
        weights=LossWeights.of(np.ones(one[2:], bool)), kind="mae", leads=4,
        num_prognostic=channels,
    )  # fmt: skip
    said = [torch.randn(1, *one[2:]).half() for _ in range(3)]
    states = States(objective, True, torch.randn(one), stored=True, said=said[:2])
    labels, network = torch.randn(one), said[2].requires_grad_() * 1
    few = 12 * 4 * rows * columns  # some channels, float32
    x, peak = _peak(states, lambda: states.input(torch.empty(1, 1, 0, rows, columns), torch.half))
    assert x.dtype is torch.half
    assert 2 * values <= peak <= (2 + 1) * values + few  # the mask is met
    wanted = Wanted(after=False, fed=True, learns=True)
    done, peak = _peak(states, lambda: ending(None, states, lambda: network, labels, wanted))
    # The sign of the error; labels, what the network says and the mask are met there.
    assert values <= peak <= (1 + 4 + 2 + 1) * values + few
    factors, gradient = torch.ones(channels, dtype=torch.float64), torch.randn(one)
    said[2].grad = None
    roots, peak = _peak(states, lambda: done.roots(factors, gradient))
    torch.autograd.backward(*roots)
    out = said[2].grad
    assert out is not None
    assert out.dtype is torch.half
    assert 2 * values <= peak <= (2 + 4 + 1 + 1) * values + few  # gradient, sign and mask are met
    before = gradient.data_ptr()
    handed_on, peak = _peak(states, lambda: done.handed_on(out))
    assert handed_on.data_ptr() == before
    assert peak <= (4 + 2) * values + few
