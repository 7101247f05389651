"""The BEAST bench: closed forms with published numbers, counts on ranks, and torch-blue's place."""

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from graticule.assemble import build_model, describe, shapes_of_config
from graticule.bench import Setting, beast_comm, blue, blue_failures
from graticule.bench.beast_comm import published
from graticule.bench.beast_forms import Scale, of_units, weights_of
from graticule.config import BeastConfig
from graticule.recipes import recipe
from pools import Pools


@pytest.mark.parametrize("name", ["beast-2.4b", "beast-1.1b", "beast-mini"])
def test_the_numbers_that_gradients_are_of_are_the_models(name: str) -> None:
    config = recipe(name)
    shapes = shapes_of_config(config)
    assert isinstance(config.model, BeastConfig)
    counts = weights_of(config.model, shapes.in_channels, shapes.out_channels)
    assert sum(counts) == describe(config, shapes)["parameters"]
    split = sum(
        parameter.numel()
        for path, parameter in build_model(config, shapes, device="meta").named_parameters()
        if any(part in path for part in ("attention.", "mlp.")) and
        not path.endswith(("proj.bias", "fc2.bias", "proj.bias_rho", "fc2.bias_rho"))
    )  # fmt: skip
    assert counts[0] == split


def test_the_published_size_sends_what_the_paper_would() -> None:
    rows = {row.what.partition(": ")[2]: row for row in published("beast-2.4b")}
    # Half a window of 180 columns, 360 rows, of 3072 / 2 features in 16 bits: 99.5 MB.
    shift = rows["first, a shift"]
    assert shift.ours == pytest.approx(360 * 90 * 1536 * 2 / 2**20)
    assert shift.holds
    assert rows["first, into windows"].holds
    assert rows["inner, a shift"].holds
    # A gather of what a linear layer takes: (c - 1) / c of 64,800 tokens: 199 MB.
    block = rows["first, a block's gathers and sums"]
    assert block.ours is None
    assert block.against == pytest.approx(4 * 64_800 * 3072 * 2 / 2 / 2**20)
    assert "not run" in block.note


def test_closed_forms_by_hand() -> None:
    stages = {"one": Scale(rows=6, columns=8, width=10, blocks=2, shift=2)}
    found = of_units(stages, s=2, c=1, itemsize=4)
    assert (found["one.0"].bytes, found["one.0"].calls) == (0, 0)
    # Two ranks, each two columns of six rows there, and back.
    assert (found["one.1"].bytes, found["one.1"].calls) == (2 * 2 * 6 * 2 * 10 * 4, 2)
    found = of_units(stages, s=1, c=4, itemsize=2)
    whole = 6 * 8 * 10 * 2
    assert (found["one.0"].bytes, found["one.0"].calls) == (4 * 3 * whole + whole * 3 / 4, 5)
    assert found["one.1"] == found["one.0"]
    assert found["down"].calls == 0


def test_what_ranks_send_is_what_closed_forms_say(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Four:
        def __init__(self, ranks: int, timeout_seconds: float) -> None:
            assert ranks == 4

        def __enter__(self) -> Any:
            return pools[4]

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(beast_comm, "LocalRanks", Four)
    monkeypatch.setattr(beast_comm, "published", lambda name: [])
    monkeypatch.setattr(blue, "rows", lambda setting: [])
    for name in ("crps, u=4", "gaussian, data 2, u=2"):
        monkeypatch.delitem(beast_comm.STEPS, name)
    rows = beast_comm.rows(Setting())
    assert len(rows) > 40
    assert [row.what for row in rows if not row.holds] == []
    named = {row.what: row for row in rows}
    assert named["[s=2, c=2]: first.1, backward: exchanges"].ours == 4 + 2 + 1
    assert named["moments, u=2, [s=2, c=1]: members: exchanges"].ours == 1
    assert named["[s=4, c=1]: passes without a word"].against == 14


# Beside torch-blue


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blue, "GRID", (8, 16))
    monkeypatch.setattr(blue, "WIDTH", 16)


def test_without_torch_blue_its_rows_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    for found in (absent, lambda name: "0.9.2"):
        monkeypatch.setattr(blue, "version", found)
        rows = blue.rows(Setting())
        assert [row.what for row in rows] == [
            "torch-blue-m2", "torch-blue-m8", "torch-blue-failures"
        ]  # fmt: skip
        for row in rows:
            assert (row.ours, row.against, row.holds) == (None, None, None)
            assert "pip install --no-deps torch-blue==1.1.0" in row.note


def test_none_of_its_failures_is_ours() -> None:
    ours = {
        "rows": blue_failures._our_rows(), "zero": blue_failures._our_zero(),
        "one": blue_failures._our_one(),
        "others": blue_failures._our_others(), "again": blue_failures._our_again(),
        "in place": blue_failures._our_in_place(),
    }  # fmt: skip
    assert ours == dict.fromkeys(ours, 0.0)
    assert blue_failures._our_kl() < 1e-6


@pytest.mark.usefixtures("small")
def test_members_of_our_step_are_alive_one_at_a_time() -> None:
    peaks = {}
    for members in (2, 8):
        model, step = blue.our_step(members)
        assert step() == pytest.approx(step(), rel=0.5)
        _, trace = blue.trace_memory(step, lambda: {"parameters": model.parameters()})  # noqa: B023
        peaks[members] = trace.peak_bytes
    fields = 4 * blue.BATCH * blue.CHANNELS * 8 * 16
    assert peaks[8] < peaks[2] + 6 * 16 * fields  # not six graphs and weights more
    weights = sum(p.numel() for p in model.parameters()) * 2
    assert peaks[8] - peaks[2] < 6 * weights


def test_both_networks_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blue, "GRID", (8, 16))
    ours = blue.Mixer(blue.Linear, lambda i, o, k: blue.Conv(i, o, kernel=k, stride=k))
    for layer in ours.modules():
        if isinstance(layer, blue.Linear | blue.Conv):
            layer.reset(torch.Generator().manual_seed(1))
    plain = blue.Mixer(torch.nn.Linear, lambda i, o, k: torch.nn.Conv2d(i, o, k, stride=k))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, blue.CHANNELS, 8, 16, generator=torch.Generator().manual_seed(0))
    assert (ours(x) - plain(x)).abs().max() < 1e-5
