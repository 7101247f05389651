"""A few Swin blocks whose tokens are laid out over ranks by hand: what each rank holds is a slice.

Samples are cut over `data`, the tokens of each window over `tensor`; of the `window` axis the
first rank has all windows and the others have none.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graticule.config import MeshConfig, TrainConfig
from graticule.mesh import Cut, Mesh
from graticule.model.layers import Linear
from graticule.model.swin import SwinBlock
from graticule.model.windows import WindowGrid, WindowMask
from graticule.parallel.data import SharedWeights, shard_weights
from graticule.parallel.exchange import Link
from graticule.parallel.materialise import materialise
from graticule.parallel.sequence import SharedAttend
from graticule.parallel.space import specialise
from graticule.parallel.tensor import split_tensors
from graticule.train.optimizer import make_optimizer

# torch._dynamo is imported for its price alone: an optimizer's first step asks for it, which takes
# each rank seconds unless it was forked with it.
GRID = WindowGrid(tokens=(4, 4), padded=(4, 4), window=(2, 4), boundary="globe")
FEATURES = 3
"""Not a multiple of 2 or 4: shards differ in length, and one of four is empty."""


class Stack(nn.Module):
    """(windows, token, FEATURES) -> the same, float32 or float64, through Swin blocks.

    recompute: nothing, each `block`, all blocks as one `segment`.
    """

    def __init__(self, *, width: int, heads: int, compute: torch.dtype, recompute: str) -> None:
        super().__init__()
        self.compute, self.recompute = compute, recompute
        self.embed = Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            SwinBlock(width, heads, 2, GRID, bias_table=True, shifted=False) for _ in range(2)
        )
        self.mask = WindowMask(GRID, shifted=False)
        self.recover = Linear(width, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.to(self.compute))
        if self.recompute == "segment":
            y = checkpoint(self._middle, y, use_reentrant=False)
        else:
            y = self._middle(y)
        return x + self.recover(y).to(x.dtype)

    def _middle(self, y: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute == "block":
                y = checkpoint(block, y, self.mask, use_reentrant=False)
            else:
                y = block(y, self.mask)
        return y


@dataclass(frozen=True, kw_only=True)
class Layout:
    """sizes: of the mesh. weights: settings of the mesh section. leads: uses of the model before
    a backward pass. parts: backward passes of a step, each with its share of the samples.
    steps: of each optimizer."""

    sizes: dict[str, int] = field(default_factory=dict)
    weights: dict[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    compute: torch.dtype = torch.float64
    heads: int = 4
    samples: int = 3
    recompute: str = ""
    leads: int = 1
    parts: int = 1
    steps: int = 2

    @property
    def serial(self) -> "Layout":
        return replace(self, sizes={}, weights={}, recompute="")


def build(layout: Layout, mesh: Mesh, seed: int = 7) -> Stack:
    """The stack as `assemble` would make it, with its initial weights."""
    with torch.device("meta"):
        model = Stack(
            width=8, heads=layout.heads, compute=layout.compute, recompute=layout.recompute
        ).to(layout.dtype)
    if mesh.index("window"):
        model.mask = WindowMask(GRID, False, np.empty((0, GRID.window_tokens), dtype=np.int64))
    for block in model.blocks:
        specialise(block.attention.attend, SharedAttend, link=Link())
    split_tensors(model, mesh)
    shard_weights(model, mesh, MeshConfig(**layout.weights), layout.compute)
    materialise(model, seed, "cpu")
    return model


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient, gathered where it is sharded. A collective."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def fields(layout: Layout, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of this rank, (samples, windows, token, FEATURES)."""
    generator = torch.Generator().manual_seed(11)
    shape = (2, layout.samples, GRID.num_windows, GRID.window_tokens, FEATURES)
    both = torch.randn(shape, generator=generator, dtype=torch.float64).to(layout.dtype)
    samples = Cut.even(layout.samples, mesh.sizes["data"]).of(mesh.index("data"))
    tokens = Cut.even(GRID.window_tokens, mesh.sizes["tensor"]).of(mesh.index("tensor"))
    x, target = both[:, samples, :, tokens]
    return (x[:, :0], target[:, :0]) if mesh.index("window") else (x, target)


def backward(model: Stack, layout: Layout, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(predictions (lead, sample, ...), this rank's part of the loss), after backward passes."""
    numbers = layout.samples * GRID.num_windows * GRID.window_tokens * FEATURES
    loss = torch.zeros((), dtype=torch.float64)
    outputs = x.new_empty(layout.leads, *x.shape)
    for part in range(layout.parts):
        here = slice(part, None, layout.parts)
        # A rank without windows knows how many samples there are.
        state = x[here].flatten(0, 1) if x.shape[1] else x[here].flatten(1, 2)
        wanted = target[here].flatten(0, 1) if x.shape[1] else target[here].flatten(1, 2)
        error = torch.zeros(())
        for lead in range(layout.leads):
            state = model(state)
            error = error + 0.5 * (state - wanted).square().sum() / numbers
            outputs[lead, here] = state.detach().view(x[here].shape)
        error.backward()
        loss += error.detach()
    return outputs, loss


@dataclass
class Outcome:
    """What one rank has after a backward pass, and after steps from there."""

    place: tuple[int, int]
    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    loss: float
    norm: float
    sgd: dict[str, Tensor]
    adam: dict[str, Tensor]
    units: int


def outcome(layout: Layout) -> Outcome:
    """On each rank: a backward pass, then steps of SGD and of AdamW from the same start."""
    from torch.distributed.fsdp import FSDPModule

    mesh = Mesh(layout.sizes)
    model = build(layout, mesh)
    shared = SharedWeights(model, mesh)
    x, target = fields(layout, mesh)
    x.requires_grad_()
    output, loss = backward(model, layout, x, target)
    shared.reduce()
    sums, norm = shared.total(loss.reshape(1))
    result = Outcome(
        place=(mesh.index("data"), mesh.index("tensor")) if not mesh.index("window") else (-1, -1),
        output=output,
        input_gradient=x.grad,
        gradients=gradients(model),
        loss=float(sums),
        norm=float(norm),
        sgd={},
        adam={},
        units=sum(isinstance(module, FSDPModule) for module in model.modules()),
    )
    if not layout.steps:
        return result
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    take_steps(model, shared, sgd, layout, mesh, layout.steps)
    result.sgd = weights(model)
    model = build(layout, mesh)
    adam = make_optimizer(model, TrainConfig(learning_rate=1e-3))
    take_steps(model, SharedWeights(model, mesh), adam, layout, mesh, layout.steps)
    result.adam = weights(model)
    return result


def take_steps(
    model: Stack,
    shared: SharedWeights,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    mesh: Mesh,
    steps: int,
) -> None:
    x, target = fields(layout, mesh)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, layout, x, target)
        shared.reduce()
        optimizer.step()


def joined(parts: list[Outcome], name: str, layout: Layout) -> Tensor:
    """`output` or `input_gradient` of all ranks as one process has it."""
    samples = 1 if name == "output" else 0
    rows = []
    for data in range(layout.sizes.get("data", 1)):
        here = sorted((p for p in parts if p.place[0] == data), key=lambda part: part.place[1])
        rows.append(torch.cat([getattr(part, name) for part in here], dim=samples + 2))
    return torch.cat(rows, dim=samples)


def difference(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """max|a - b| / max(max|b|, scale)."""
    return float((a - b).abs().max() / max(float(b.abs().max()), scale))


def assert_same_as_one_process(parts: list[Outcome], layout: Layout, bound: float) -> None:
    """Outputs, losses, norm, all gradients, and the weights after steps, on every rank."""
    serial = outcome(layout.serial)
    for name in ("output", "input_gradient"):
        assert difference(joined(parts, name, layout), getattr(serial, name)) < bound, name
    largest = max(float(g.abs().max()) for g in serial.gradients.values())
    for rank, part in enumerate(parts):
        assert abs(part.loss / serial.loss - 1) < bound
        assert abs(part.norm / serial.norm - 1) < bound
        for what in ("gradients", "sgd", "adam"):
            ours, theirs = getattr(part, what), getattr(serial, what)
            assert list(ours) == list(theirs)
            # AdamW divides rounding by rounding where a true gradient is zero (a key's bias).
            scale = 1.0 if what == "adam" else 1e-3 * largest
            for name, value in theirs.items():
                assert difference(ours[name], value, scale) < bound, (rank, what, name)
