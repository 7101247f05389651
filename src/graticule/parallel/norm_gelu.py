"""Norms with a GELU over what several ranks hold: the sets are merged, all else is the same.

Instance and group norms: the stripes of a sample. Batch norm: the samples of all ranks too, so
that its running statistics are the same bits on every rank.
"""

from torch import Tensor, nn

from graticule.model.norm_gelu import BatchNormGelu, GroupNormGelu, InstanceNormGelu, NormGelu
from graticule.parallel.exchange import Link


class _Linked(NormGelu):
    """link: all that hold a part of the sets."""

    link: Link

    def gather(self, moments: Tensor) -> Tensor:
        return self.link.gather(moments, "norm")

    def sum(self, values: Tensor) -> Tensor:
        return self.link.sum(values, "norm")


class StripedInstanceNormGelu(_Linked, InstanceNormGelu):
    """The same numbers from stripes."""


class StripedGroupNormGelu(_Linked, GroupNormGelu):
    """The same numbers from stripes."""


class SharedBatchNormGelu(_Linked, BatchNormGelu):
    """The same numbers from the samples and stripes of all ranks."""


def share_batches(model: nn.Module, link: Link) -> None:
    """Let batch norms see the samples of all ranks, `link`, one process's included. They call each
    other in every training pass: all ranks have as many micro-batches."""
    for module in model.modules():
        if isinstance(module, BatchNormGelu) and link.size > 1:
            module.__class__ = SharedBatchNormGelu
            module.link = link  # type: ignore[assignment]
