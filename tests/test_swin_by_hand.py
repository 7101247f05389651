"""The whole model against its formulas, token by token, and its gradient against differences."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graticule.train.loss import LossWeights
from graticule.train.objective import Objective, as_stored
from graticule.train.step import training_step
from test_swin import field, small


def layer_norm(token: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    deviation = token - token.sum() / token.numel()
    variance = (deviation**2).sum() / token.numel()
    return deviation / torch.sqrt(variance + 1e-5) * weight + bias


class ByHand:
    """The formulas of the model in loops over tokens. Fields of tokens are (lat, lon, feature)."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.values = {name: value.detach() for name, value in model.named_parameters()}
        self.globe = settings["boundary"] == "globe"
        self.patch, self.stride = settings["patch"], settings["sampling"]
        self.window, self.padded = settings["window"], settings["padded"]
        self.states, self.num_outputs = settings["states"], settings["num_outputs"]
        self.depth, self.heads, self.groups = 2, 2, 2

    def get(self, name: str) -> tuple[Tensor, Tensor]:
        return self.values[f"{name}.weight"], self.values[f"{name}.bias"]

    def linear(self, name: str, token: Tensor) -> Tensor:
        weight, bias = self.get(name)
        return weight @ token + bias

    def conv(self, name: str, tokens: Tensor, stride: int = 1) -> Tensor:
        """3 x 3, centred on every stride-th token: a circle of columns, walls at the poles."""
        weight, bias = self.get(name)
        rows, columns, _ = tokens.shape
        out = torch.zeros(-(-rows // stride), -(-columns // stride), len(bias)).double()
        for i, j in np.ndindex(*out.shape[:2]):
            out[i, j] = bias
            for down, right in np.ndindex(3, 3):
                row, column = stride * i + down - 1, stride * j + right - 1
                column = column % columns if self.globe else column
                if 0 <= row < rows and 0 <= column < columns:
                    out[i, j] += weight[:, :, down, right] @ tokens[row, column]
        return out

    def body(self, name: str, tokens: Tensor) -> Tensor:
        """y + silu(norm(conv(silu(norm(conv(y))))))."""
        y = tokens
        for number in range(2):
            y = self.conv(f"{name}.body.{number}.conv", y)
            weight, bias = self.get(f"{name}.body.{number}.norm")
            for features in torch.arange(y.shape[-1]).chunk(self.groups):
                group = y[..., features]
                deviation = group - group.sum() / group.numel()
                variance = (deviation**2).sum() / group.numel()
                y[..., features] = (
                    deviation / torch.sqrt(variance + 1e-5) * weight[features] + bias[features]
                )
            y = y / (1 + torch.exp(-y))
        return tokens + y

    def block(self, number: int, tokens: Tensor) -> Tensor:
        name = f"blocks.{number}"
        rows, columns = (size // (self.patch * self.stride) for size in self.padded)
        high, wide = self.window
        down, right = (high // 2, wide // 2) if number % 2 else (0, 0)
        everywhere = list(np.ndindex(*tokens.shape[:2]))
        windows: dict[Any, list[Any]] = {}
        place, side = {}, {}
        for i, j in everywhere:
            row, column = (i - down) % rows, (j - right) % columns
            place[i, j] = (row % high, column % wide)
            # Before the first whole shifted window: these came round the end of the array.
            side[i, j] = (i < down, not self.globe and j < right)
            windows.setdefault((row // high, column // wide), []).append((i, j))
        normed = {at: layer_norm(tokens[at], *self.get(f"{name}.norm1")) for at in everywhere}
        q, k, v = (
            {at: self.linear(f"{name}.attention.{letter}", x).view(self.heads, -1)
             for at, x in normed.items()}
            for letter in "qkv"
        )  # fmt: skip
        table = self.values.get(f"{name}.attention.bias.bias_table")
        out = tokens.clone()
        for mates in windows.values():
            for at in mates:
                scores = []
                for other in mates:
                    score = (q[at] * k[other]).sum(1) / math.sqrt(q[at].shape[1])
                    if table is not None:
                        row = place[at][0] - place[other][0] + high - 1
                        column = place[at][1] - place[other][1] + wide - 1
                        score = score + table[row * (2 * wide - 1) + column]
                    if side[at] != side[other]:
                        score = score - (math.inf if self.globe else 100.0)
                    scores.append(torch.exp(score))
                total = sum(scores)
                mixed = sum(s[:, None] * v[other] for s, other in zip(scores, mates, strict=True))
                out[at] += self.linear(f"{name}.attention.proj", (mixed / total[:, None]).ravel())
        for at in everywhere:
            x = self.linear(f"{name}.mlp.fc1", layer_norm(out[at], *self.get(f"{name}.norm2")))
            out[at] += self.linear(f"{name}.mlp.fc2", x * (1 + torch.erf(x / math.sqrt(2))) / 2)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """One sample, (channel, lat, lon)."""
        channels, height, width = x.shape
        p = self.patch
        # globe: whole patches in the south; paper: the padded shape, the smaller half first.
        size = (-(-height // p) * p, width) if self.globe else self.padded
        north, west = (0, 0) if self.globe else ((size[0] - height) // 2, (size[1] - width) // 2)
        whole = torch.zeros(channels, *size).double()
        whole[:, north : north + height, west : west + width] = x
        rows, columns = size[0] // p, size[1] // p
        tokens = torch.zeros(rows, columns, len(self.values["embed.linear.bias"])).double()
        for i, j in np.ndindex(rows, columns):
            values = [whole[c, i * p + a, j * p + b] for a, b, c in np.ndindex(p, p, channels)]
            tokens[i, j] = self.linear("embed.linear", torch.stack(values))
        if self.stride > 1:
            tokens = self.body("down", self.conv("down.conv", tokens, self.stride))
        for number in range(self.depth):
            tokens = self.block(number, tokens)
        if self.stride > 1:
            weight, bias = self.get("up.conv")
            fine = torch.zeros(rows, columns, len(bias)).double()
            for i, j in np.ndindex(rows, columns):
                kernel = weight[:, :, i % self.stride, j % self.stride]
                fine[i, j] = tokens[i // self.stride, j // self.stride] @ kernel + bias
            tokens = self.body("up", fine)
        num_out = len(self.values["recover.linear.bias"]) // p**2
        out = torch.zeros(num_out, *size).double()
        for i, j in np.ndindex(rows, columns):
            values = self.linear("recover.linear", tokens[i, j]).view(p, p, num_out)
            out[:, i * p : (i + 1) * p, j * p : (j + 1) * p] = values.permute(2, 0, 1)
        out = out[:, north : north + height, west : west + width]
        first, last = self.states
        each = num_out // self.num_outputs
        for output in range(self.num_outputs):
            out[output * each : output * each + last - first] += x[first:last]
        return out


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ((17, 12), {"boundary": "globe"}),
        ((7, 12), {"boundary": "globe", "patch": 2}),
        ((9, 12), {"boundary": "globe", "sampling": 3, "window": (2, 2), "states": (1, 3)}),
        ((5, 12), {"boundary": "globe", "sampling": 1, "window": (4, 6), "bias_table": False}),
        ((5, 6), {"boundary": "globe", "sampling": 1, "window": (8, 6)}),
        ((17, 14), {"boundary": "paper"}),
        ((13, 18), {"boundary": "paper", "patch": 2, "window": (2, 3), "out_channels": 6,
                    "num_outputs": 2}),
        ((5, 7), {"boundary": "paper", "sampling": 1, "window": (2, 5), "padded_shape": (8, 15)}),
    ],
)  # fmt: skip
def test_the_model_is_its_formulas_token_by_token(grid, settings):
    model, x = small(grid=grid, **settings), field(grid)
    by_hand = ByHand(
        model,
        {"patch": 1, "sampling": 2, "window": (4, 3), "states": (0, 2), "num_outputs": 1,
         "padded": model.padded_shape, **settings},
    )  # fmt: skip
    with torch.no_grad():
        want, got = torch.stack([by_hand(sample) for sample in x]), model(x)
    assert (got - want).abs().max() <= 1e-12 * want.abs().max()


@pytest.mark.parametrize("grid", [(17, 24), (16, 24), (3, 24)])
def test_more_padded_rows_than_needed_change_nothing_on_a_globe(grid):
    x = field(grid)
    want = small(grid=grid)(x)
    more = small(grid=grid, padded_shape=(48, 24))(x)
    assert (more - want).abs().max() <= 1e-13 * want.abs().max()


class Batch:
    """Two samples of two channels with forcing, for three leads."""

    def __init__(self, grid: tuple[int, int]) -> None:
        self.inputs = field(grid, 2, seed=1)[:, None]
        self.keys, self.init_times = [0, 1], ["first", "second"]
        self.leads = [
            (field(grid, 1, seed=10 + k)[:, None], field(grid, 2, seed=20 + k)[:, None])
            for k in range(3)
        ]

    def lead(self) -> tuple[Tensor, Tensor]:
        return self.leads.pop(0)


@pytest.mark.parametrize(
    ("boundary", "grid"), [("globe", (9, 12)), ("globe", (8, 24)), ("paper", (9, 14))]
)
def test_the_gradient_through_three_leads_is_that_of_finite_differences(boundary, grid):
    model = small(boundary, grid=grid, in_channels=4)
    wet = np.ones((2, *grid), bool)
    wet[0, :3, :4] = wet[1, -2:] = False
    area = np.linspace(1, 2, grid[0])[:, None] * np.ones(grid)
    objective = Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=field(grid, 1, seed=5)[0], weights=LossWeights.of(wet, area), kind="mse", leads=3,
        num_prognostic=2,
    )  # fmt: skip
    training_step(
        model, objective, [Batch(grid)], optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        step=1, samples=2, learning_rate=0.0,
    )  # fmt: skip

    @torch.no_grad()
    def loss() -> float:
        batch = Batch(grid)
        errors = [sums for *_, sums in objective.forecast(model, batch.inputs, batch)]
        return sum(error.sum().item() for error in errors) / objective.weight(2)

    total = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        way = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        way *= 1e-5 / way.norm()
        values = []
        with torch.no_grad():
            for turn in (1, -1):
                parameter.add_(way, alpha=turn)
                values.append(loss())
                parameter.sub_(way, alpha=turn)
        slope = float((parameter.grad * way).sum())
        assert abs((values[0] - values[1]) / 2 - slope) <= 1e-7 * 1e-5 * total, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_finite_and_close(dtype):
    gradients = []
    for compute in (torch.float32, dtype):
        model = small(compute_dtype=compute).float()
        model(field().float()).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert all(g.dtype == torch.float32 for g in gradients[-1])
    want, got = (torch.cat([g.ravel() for g in each]) for each in gradients)
    assert torch.isfinite(got).all()
    assert 0 < (got - want).norm() <= 0.1 * want.norm()
