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
        self._before = self._count() if self._count else 0.0

    def joules(self) -> float | None:
        """None: not known."""
        return self._count() - self._before if self._count else None


def _counter(device: torch.device) -> Callable[[], float] | None:
    """Joules so far, since the driver was loaded."""
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
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:  # an older one, a part of one, or no right to ask
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # mJ
