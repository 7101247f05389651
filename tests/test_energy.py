"""Energy by a vendor's library, which stands in for itself where there is no GPU."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graticule.cluster.energy import EnergyMeter


class Library:
    """NVML's calls. counts: millijoules, one a call."""

    class NVMLError(Exception):
        pass

    def __init__(self, *counts: float | Exception) -> None:
        self.counts = list(counts)
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> float:
        count = self.counts.pop(0)
        if isinstance(count, Exception):
            raise count
        return count


def meter(monkeypatch: pytest.MonkeyPatch, library: Any) -> EnergyMeter:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    properties = SimpleNamespace(uuid="1f2e")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return EnergyMeter(torch.device("cuda", 1))


def test_joules_are_those_since_the_meter_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(6000, 7500, 10000)
    made = meter(monkeypatch, library)
    assert (made.joules(), made.joules()) == (1.5, 4.0)
    assert library.asked == ["GPU-1f2e"]


def test_nothing_is_known_without_the_library_the_right_or_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = Library(Library.NVMLError("not supported"), 7000)
    assert meter(monkeypatch, unknown).joules() is None
    lost = meter(monkeypatch, Library(5000, Library.NVMLError("gpu is lost")))
    assert lost.joules() is None, "a forecast that is whole does not fail for it"
    assert meter(monkeypatch, None).joules() is None  # as if it could not be imported
    assert EnergyMeter(torch.device("cpu")).joules() is None


@pytest.mark.gpu
def test_a_gpu_that_computes_takes_energy() -> None:
    pytest.importorskip("pynvml")
    made = EnergyMeter(torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        x = torch.nn.functional.normalize(x @ x)
    torch.cuda.synchronize()
    joules = made.joules()
    assert joules is None or joules > 0
