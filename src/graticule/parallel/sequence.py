"""Windows whose tokens several ranks share: each attends for all tokens of a part of the heads.

Ulysses (Jacobs et al., arXiv 2309.14509): tokens are exchanged for heads before attention, and
back behind it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graticule.model.windows import Attend, WindowMask
from graticule.parallel.exchange import Link


class _Swap(torch.autograd.Function):
    """Cut each tensor along dim `cut`, a part for each rank; join what comes along dim `join`.

    The gradient is the same with the two dims swapped.
    """

    @staticmethod
    def forward(ctx: Any, link: Link, cut: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.cut, ctx.join = link, cut, join
        size, rank, count = link.size, link.rank, len(tensors)
        parts = [x.chunk(size, cut) for x in tensors]
        peers = [peer for peer in range(size) if peer != rank]
        counts = [0 if peer == rank else count for peer in range(size)]
        # One exchange of all tensors, packed by the one copy that strided parts need anyway.
        packed = torch.stack([part[peer] for peer in peers for part in parts])
        received = link.exchange(packed, counts, counts, "sequence")
        place = {peer: number * count for number, peer in enumerate(peers)}
        return tuple(
            torch.cat(
                [
                    part[rank] if peer == rank else received[place[peer] + number]
                    for peer in range(size)
                ],
                dim=join,
            )
            for number, part in enumerate(parts)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Swap.apply(ctx.link, ctx.join, ctx.cut, *grads)


def swap(link: Link, cut: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one shape, cut along dim `cut` -> what all ranks have of our part, joined along
    dim `join` in order of rank. Differentiable; all ranks of `link` call it together."""
    assert tensors[0].shape[cut] % link.size == 0, (tensors[0].shape, cut, link.size)
    return tensors if link.size == 1 else _Swap.apply(link, cut, join, *tensors)


class SharedAttend(Attend):
    """Attention in windows that the ranks of `link` share, each of which has some of the tokens.

    Where tokens do not divide evenly, slots at the end of a window hold none: they are left out
    of attention and zero after it.
    """

    link: Link

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: WindowMask
    ) -> Tensor:
        """q, k, v: (batch * window, our slots, head, dim). bias: (head, token, token) or none.
        Returns (batch * window, our slots, head * dim)."""
        q, k, v = swap(self.link, 2, 1, q, k, v)  # (batch * window, slot, our head, dim)
        if bias is not None:
            bias = bias.chunk(self.link.size, 0)[self.link.rank]
        if mask.windows:
            slots, tokens = q.shape[1], mask.grid.window_tokens
            out = super().forward(q[:, :tokens], k[:, :tokens], v[:, :tokens], bias, mask)
            out = F.pad(out, (0, 0, 0, slots - tokens)) if slots > tokens else out
        else:
            # No window is here: no kernel, but all that gets a gradient gets one, of zero.
            out = (q + k + v).flatten(2)
            out = out if bias is None else out + bias.sum()
        return swap(self.link, 1, 2, out)[0]
