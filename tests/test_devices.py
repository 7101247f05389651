"""What is known of devices, and what is measured here."""

from dataclasses import replace

import pytest

from graticule.cluster import Device, device, device_names, measured_cpu

ACCELERATORS = [name for name in device_names() if name != "cpu"]


def test_the_devices_of_the_plans_are_there() -> None:
    assert set(device_names()) == {"h200", "h100-80", "a100-80", "gh200", "mi250x", "cpu"}


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_devices_figures_agree_with_each_other(name: str) -> None:
    known = device(name)
    assert known.name == name
    assert known.sources
    # Units, by what no accelerator of these years is below or above.
    assert 60 * 2**30 < known.memory < 145 * 2**30
    assert 1e14 < known.half < 1.1e15
    assert 4 < known.half / known.single < 20
    assert 1e12 < known.memory_rate < 5e12
    assert known.to_host < known.memory_rate
    assert known.flops_per_second == known.achieved * known.half


def test_a_plan_may_fill_87_percent_of_the_memory() -> None:
    assert device("h100-80").usable == int(0.87 * 85_520_809_984)


def test_single_precision_has_its_own_rate() -> None:
    single = replace(device("a100-80"), precision="single")
    assert single.flops_per_second == pytest.approx(0.42 * 19.5e12)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("h100", "h100-80"), ("H200", "h200"), ("mi250", "mi250x"), ("a10", "a100")],
)
def test_an_unknown_device_is_refused_with_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"no device is named '{wrong}'; did you mean {meant}"):
        device(wrong)


def test_what_is_near_to_nothing_is_refused_with_all_that_is_known() -> None:
    with pytest.raises(ValueError, match=r"'toaster'; Known are h200, h100-80, .*, cpu\.$"):
        device("toaster")


def test_this_cpu_is_measured_once() -> None:
    first = device("cpu")
    assert device("cpu") is first
    assert first.memory > 2**28
    assert first.flops_per_second > 1e7
    assert first.to_host > 1e7
    assert "measured" in first.sources


def test_measuring_takes_a_second_or_so() -> None:
    measured_cpu.cache_clear()
    import time

    began = time.process_time()
    measured_cpu()
    assert time.process_time() - began < 5


@pytest.mark.parametrize("change", [{"memory": 0}, {"half": -1.0}, {"achieved": 1.5}])
def test_impossible_figures_are_refused(change: dict[str, float]) -> None:
    known = device("h200")
    with pytest.raises(ValueError, match=f"{next(iter(change))}="):
        replace(known, **change)
    assert isinstance(known, Device)
