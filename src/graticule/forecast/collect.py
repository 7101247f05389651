"""The field of all ranks of a sample on the first of them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from graticule.mesh import Planes, Stripes
from graticule.parallel.exchange import Link


class Collector:
    """Puts fields together from what the ranks of a sample hold: stripes, of some channels.

    link: of these ranks; those that share the channels of a stripe follow one another. stripes,
    planes: how they share points and channels; none: of one rank, of one that has all channels.
    device: of the exchange.
    """

    def __init__(
        self, stripes: Stripes | None, planes: Planes | None, link: Link, device: str
    ) -> None:
        sharing = 1 if planes is None else planes.ranks
        assert link.size == sharing * (1 if stripes is None else stripes.ranks), (stripes, planes)
        self._stripes, self._planes, self._link, self._device = stripes, planes, link, device
        self._sharing = sharing

    def predicted(self, values: Tensor) -> np.ndarray | None:
        """(predicted channel, lat, lon) of what is here -> of the whole grid and all channels on
        the first rank, None on others. A collective."""
        return self._whole(values[None], lambda planes, rank: planes.predicted(rank), len(values))

    def states(self, values: Tensor) -> np.ndarray | None:
        """The same of (input offset, prognostic channel, lat, lon)."""
        whole = self._whole(values, lambda planes, rank: planes.known(rank), values.shape[1])
        return None if whole is None else whole.reshape(len(values), -1, *whole.shape[1:])

    def _whole(
        self, values: Tensor, held: Callable[[Planes, int], np.ndarray], channels: int
    ) -> np.ndarray | None:
        """values: (time, channel, lat, lon). Returns (time x channel, lat, lon)."""
        link, stripes, planes = self._link, self._stripes, self._planes
        if link.size == 1:
            return values.flatten(0, 1).cpu().numpy()
        assert stripes is not None, "ranks that share a field say how"
        ours = [np.arange(channels)]
        if planes is not None and planes.ranks > 1:
            ours = [held(planes, rank) for rank in range(planes.ranks)]
        dim = 2 if stripes.dim == "lat" else 3
        shapes = []
        for rank in range(link.size):
            shape = [len(values), len(ours[rank % self._sharing]), *values.shape[2:]]
            shape[dim] = stripes.grid.length(rank // self._sharing)
            shapes.append(shape)
        sizes = [int(np.prod(shape)) for shape in shapes]
        nothing = [0] * link.size
        if link.rank > 0:
            send = [sizes[link.rank], *nothing[1:]]
            link.exchange(values.to(self._device).flatten(), send, nothing, "forecast")
            return None
        receive = [0, *sizes[1:]]
        empty = values.new_empty(0, device=self._device)
        received = link.exchange(empty, nothing, receive, "forecast")
        whole = torch.empty(len(values), sum(map(len, ours)), *shapes[0][2:])
        whole = whole.new_empty(*whole.shape[:dim], stripes.grid.size, *whole.shape[dim + 1 :])
        for rank, part in enumerate(received.split(receive)):
            number = rank // self._sharing
            place = whole.narrow(dim, stripes.grid.bounds[number], stripes.grid.length(number))
            of_rank = part.view(shapes[rank]) if rank else values
            place[:, torch.from_numpy(ours[rank % self._sharing])] = of_rank.to("cpu", whole.dtype)
        return whole.flatten(0, 1).numpy()
