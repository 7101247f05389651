"""The energy that a GPU takes, where its vendor's library counts it."""

from collections.abc import Callable

import torch


class EnergyMeter:
    """Joules of a device since it was made; of the whole device, whoever uses it.

    NVIDIA's library counts them from Volta on, if it can be imported (`pynvml`, the extra
    `energy`). Elsewhere nothing is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = _counter(device)
        self._before = self._count() if self._count else None

    def joules(self) -> float | None:
        """None: not known."""
        now = self._count() if self._count else None
        return None if now is None or self._before is None else now - self._before


def _counter(device: torch.device) -> Callable[[], float | None] | None:
    """Joules so far, since the driver was loaded. What fails is not known: no forecast ends for
    it."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By name: what is visible to this process has numbers of its own.
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None

    def joules() -> float | None:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # mJ
        except pynvml.NVMLError:  # an older one, a part of one, or no right to ask
            return None

    return joules
