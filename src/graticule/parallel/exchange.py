"""The one way in which numbers go from rank to rank: each rank says what it sends to whom.

Halos, routes and sequence shards all come down to `Link.exchange`. What is sent to whom is known
on both sides beforehand, so no sizes travel. The adjoint of an exchange is the exchange with
`send` and `receive` swapped.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from graticule.model.layers import kind_of

Method = Literal["all_to_all", "p2p"]
FEW_BYTES = 2**14
"""Up to here messages cost by their number: gloo's sum of 64 numbers over four ranks takes 8.7 ms
of CPU of all together, and 3.9 ms where each sends its numbers to the others."""


class Link:
    """Ranks that exchange, this one among them.

    group: of torch; None: this rank alone, which exchanges with itself. method: `all_to_all`, or
    `p2p`: a message for each pair that has something to say (NCCL and gloo).
    sent: bytes that left this rank so far, by what they were for; calls: in how many exchanges.
    """

    def __init__(self, group: Any = None, method: Method = "all_to_all") -> None:
        self.group, self.method = group, method
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def exchange(
        self, packed: Tensor, send: Sequence[int], receive: Sequence[int], what: str
    ) -> Tensor:
        """Parts of `packed` for ranks 0, 1, ... -> the parts that they have for us, in that order.

        packed: (n, ...), the parts one behind the other along the first dim. send, receive: their
        lengths by rank; nothing is sent to oneself. Not differentiable: it is called from both
        passes of what is. A rank that has nothing to send or receive takes part all the same.
        """
        assert len(send) == len(receive) == self.size, (send, receive, self.size)
        assert send[self.rank] == receive[self.rank] == 0, (send, receive, self.rank)
        assert sum(send) == packed.shape[0], (send, packed.shape)
        out = packed.new_empty(sum(receive), *packed.shape[1:])
        if self.size == 1:
            return out
        self._count(what, packed.numel() * packed.element_size())
        # Collectives of strided views have returned wrong numbers.
        packed = packed.contiguous()
        if self.method == "all_to_all":
            dist.all_to_all_single(out, packed, list(receive), list(send), group=self.group)
        else:
            self._pairwise(packed, out, send, receive)
        return out

    def _pairwise(
        self, packed: Tensor, out: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> None:
        operations = []
        for peer, (ours, theirs) in enumerate(
            zip(packed.split(list(send)), out.split(list(receive)), strict=True)
        ):
            if ours.numel():
                operations.append(dist.P2POp(dist.isend, ours, group=self.group, group_peer=peer))
            if theirs.numel():
                operations.append(dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def gather(self, x: Tensor, what: str) -> Tensor:
        """(ranks, ...) of all ranks' `x`, all of one shape. Not differentiable."""
        if self.size == 1:
            return x.unsqueeze(0)
        self._count(what, (self.size - 1) * x.numel() * x.element_size())
        out = x.new_empty(self.size, *x.shape)
        if self._is_few(x):
            copies = x.expand(out.shape).contiguous()
            dist.all_to_all_single(out, copies, group=self.group)
        elif x.numel():
            _all_gather(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=self.group)
        return out

    def scatter_sum(self, x: Tensor, what: str) -> Tensor:
        """(ranks, ...) -> our (...) of the sum over the ranks. Not differentiable."""
        if self.size == 1:
            return x[0]
        self._count(what, (self.size - 1) * x[0].numel() * x.element_size())
        packed, out = x.contiguous(), x.new_empty(x.shape[1:])
        if not out.numel():
            return out
        if kind_of(x) == "cpu":
            # gloo would send and sum up all parts on all ranks, in a copy that nobody sees.
            parts = torch.empty_like(packed)
            dist.all_to_all_single(parts, packed, group=self.group)
            return torch.sum(parts, 0, out=out)
        _reduce_scatter(out, packed.flatten(0, 1), group=self.group)
        return out

    def sum(self, x: Tensor, what: str) -> Tensor:
        """The sum over the ranks, the same bits on each. In place. Not differentiable."""
        self.sum_later(x, what)()
        return x

    def sum_later(self, x: Tensor, what: str) -> Callable[[], object]:
        """The same, under way; what is returned waits for it."""
        if self.size > 1 and self._is_few(x):
            x.copy_(self.gather(x, what).sum(0))
        elif self.size > 1 and x.numel():
            self._count(what, 2 * (self.size - 1) * x.numel() * x.element_size() // self.size)
            return dist.all_reduce(x, group=self.group, async_op=True).wait
        return _nothing

    def _count(self, what: str, size: int) -> None:
        self.sent[what] += size
        self.calls[what] += 1

    def _is_few(self, x: Tensor) -> bool:
        """Whether each rank had better send these to each other: of gloo an all-to-all takes the
        fewest messages."""
        return 0 < x.nbytes <= FEW_BYTES and kind_of(x) == "cpu"


def _nothing() -> None:
    """Waits for what is there."""


# torch 2.13 renames both and warns of the former names; 2.11 and 2.12 know no others.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
