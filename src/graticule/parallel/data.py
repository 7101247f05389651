"""Weights that several ranks keep together: sharded or replicated, their gradients, one norm.

Gradients are sums over all ranks, never means: each rank's loss is its part of a sum over a
global weight. A part that tensor parallelism cut is summed over the other axes alone.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graticule.config import MeshConfig
from graticule.mesh import WEIGHTS, Mesh
from graticule.model.beast import Stage
from graticule.model.resample import Down, Up
from graticule.parallel.exchange import Link

BUCKET_BYTES = 64 * 2**20
"""Of gradients that travel together: few collectives, and a bounded copy."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor (differentiable); any other tensor itself."""
    # Asked by name: the class takes a second to import, which a serial run need not spend.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_weights(
    model: nn.Module, mesh: Mesh, config: MeshConfig, compute_dtype: torch.dtype
) -> None:
    """Shard parameters, gradients and optimizer state over the ranks (FSDP2), if so configured.

    A unit's weights are gathered when it runs: a unit is each child of the model, those of lists
    and of sampling modules one by one, or the whole model. Units that `split_tensors` cut are
    shared by the ranks that hold the same part, all others by everyone. Call it with parameters on
    `meta` or in place, after everything else that changes modules.
    compute_dtype: of activations; with `config.gather` = compute the weights travel in it (but
    those of units that say `whole_weights`), and their gradients are summed in float32.
    """
    if config.weights == "replicated" or mesh.size == 1:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    everyone, both = mesh.device_meshes
    narrow = config.gather == "compute" and compute_dtype != next(model.parameters()).dtype
    # A deviation's parameter would move in steps, and a weight is drawn before it is rounded.
    narrow = narrow and not any(name.endswith("_rho") for name, _ in model.named_parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if narrow else None,
        reduce_dtype=torch.float32 if narrow else None,
        # Layers cast what they are given themselves: a field in float32 stays one.
        cast_forward_inputs=False,
    )
    whole = MixedPrecisionPolicy(cast_forward_inputs=False)
    kept: set[nn.Parameter] = set()
    for unit in [model] if config.shard_unit == "model" else [*_units(model), model]:
        mine = [p for p in unit.parameters() if p not in kept]
        over = everyone
        if any(_axes(parameter) == ("tensor",) for parameter in mine):
            over = both["weights"]
            if over.size() == 1:  # nobody else holds this part: there is nothing to share
                kept.update(mine)
        if unit is model or not kept.issuperset(mine):
            fully_shard(
                unit,
                mesh=over,
                reshard_after_forward=config.reshard,
                mp_policy=whole if getattr(unit, "whole_weights", False) else policy,
                ignored_params=kept,
            )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if not config.reshard:
        # Else a validation's weights would stay, and stand in the place of the parameters.
        model.register_forward_hook(_reshard_without_gradient)
    # torch warns that writing into such an output would skip its hook; nobody here does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


_CONTAINERS = (nn.ModuleList, nn.Sequential, Down, Up, Stage)
"""Modules that a model does not always call as a whole: memory plans part them."""


def _units(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, _CONTAINERS):
            yield from _units(child)
        elif any(True for _ in child.parameters()):
            yield child


def _reshard_without_gradient(model: nn.Module, inputs: Any, output: Any) -> None:
    from torch.distributed.fsdp import FSDPModule

    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _axes(parameter: Tensor) -> tuple[str, ...]:
    """The names of the axes of torch's mesh over which a parameter is cut."""
    return parameter.device_mesh.mesh_dim_names if hasattr(parameter, "device_mesh") else ()


class SharedWeights:
    """What the ranks do together with weights and gradients after a backward pass.

    Make it when the parameters have their memory: `shard_weights` replaces them. All ranks call
    the same methods in the same order. links: by the axes they join; `sent` counts their bytes.
    sample_size: ranks that are given the same sample, its stripes or other members of it.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.sample_size = mesh.sample_size * mesh.sizes["member"]
        self.links = {axes: Link(mesh.group(*axes)) for axes in ((), WEIGHTS, ("tensor",))}
        alone = Link()
        # Who else holds the same numbers, by the axes over which a parameter is cut.
        copies = {
            (): self.links[()],
            ("tensor",): self.links[WEIGHTS],
            ("weights",): self.links[("tensor",)],
            ("world",): alone,
            ("weights", "tensor"): alone,
        }
        self._parameters: dict[Link, list[nn.Parameter]] = {}
        # In the model's order, which is the same everywhere; a shared parameter comes once.
        for parameter in model.parameters():
            if parameter.requires_grad:
                link = copies[_axes(parameter)]
                self._parameters.setdefault(link, []).append(parameter)

    @torch.no_grad()
    def reduce(self, then: Callable[[nn.Parameter, int], None] | None = None) -> None:
        """Sum the gradients, in place, over the ranks that hold the same parameter; what is
        sharded has been summed already. Once in a step, after its last backward pass.

        A parameter without a gradient gets zeros, in every layout: ranks need not agree on who
        has one, and the optimizer treats it everywhere alike.
        then: called with each parameter whose gradient is summed up, and how many ranks hold the
        same one, while others are on their way.
        """
        for link, parameters in self._parameters.items():
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            before: list[nn.Parameter] = []
            arrive: Callable[[], object] = _there
            for bucket in _buckets(parameters):
                coming = _sum_later(self._gradients(bucket), link)
                arrive()
                if then:
                    for parameter in before:
                        then(parameter, link.size)
                before, arrive = bucket, coming
            arrive()
            if then:
                for parameter in before:
                    then(parameter, link.size)

    @torch.no_grad()
    def total(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(sums over all ranks, the global norm of the gradients), with one collective.

        sums: (n,) float64, this rank's part. The norm is a float64 scalar in which each parameter
        counts once; where any rank has NaN or infinity it is not finite on any.
        """
        square = torch.zeros((), dtype=torch.float64, device=sums.device)
        for link, parameters in self._parameters.items():
            norms = torch.stack(torch._foreach_norm(self._gradients(parameters)))
            square += norms.to(square).square().sum() / link.size
        packed = torch.cat([sums, square.reshape(1)])
        self.links[()].sum(packed, "norm")
        return packed[:-1], packed[-1].sqrt()

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply all gradients."""
        for parameters in self._parameters.values():
            torch._foreach_mul_(self._gradients(parameters), factor)

    @staticmethod
    def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [local(p.grad) for p in parameters if p.grad is not None]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """In order, those that follow one another together up to `BUCKET_BYTES` of gradients."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = local(parameter).nbytes
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    if bucket:
        yield bucket


def _there() -> None:
    """Of gradients that nobody waits for."""


def _sum_later(bucket: list[Tensor], link: Link) -> Callable[[], object]:
    """Start to sum them up; what is returned waits until they are."""
    if link.size == 1:
        return _there
    if len(bucket) == 1 and bucket[0].is_contiguous():
        wait = link.sum_later(bucket[0], "gradients")
        return wait
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    wait = link.sum_later(flat, "gradients")

    def arrive() -> None:
        wait()
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    return arrive
