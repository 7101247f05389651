"""The BEAST bench: closed forms with published numbers, counts on ranks, and torch-blue's place."""

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch

from graticule.assemble import build_model, describe, shapes_of_config
from graticule.bench import Setting, beast_comm, blue, blue_failures
from graticule.bench.beast_comm import published
from graticule.bench.beast_forms import Layout, Scale, of_gradients, of_units, weights_of
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
    whole = sum(
        parameter.numel()
        for path, parameter in build_model(config, shapes, device="meta").named_parameters()
        if any(part in path for part in ("nice.first.", "recover.linear.bias"))
    )
    assert counts[1] == whole
    assert whole < 0.005 * sum(counts) or name == "beast-mini"


def test_the_published_size_sends_what_the_paper_would() -> None:
    rows = {row.what.partition(": ")[2]: row for row in published("beast-2.4b")}
    # Half a window of 180 columns, 360 rows, of 3072 / 2 features in 16 bits: 99.5 MB.
    shift = rows["first, a shift"]
    assert shift.ours == pytest.approx(360 * 90 * 1536 * 2 / 2**20)
    assert shift.holds
    assert rows["first, stripes that are whole windows"].holds
    assert rows["inner, stripes that are whole windows"].holds
    assert rows["inner, a shift"].holds
    # A gather of what a linear layer takes: (c - 1) / c of 64,800 tokens: 199 MB.
    gather = 64_800 * 3072 * 2 / 2 / 2**20
    for direction, gathers in (("forward", 4), ("backward", 5)):
        block = rows[f"first, gathers and sums of a block, {direction}"]
        assert block.ours is None
        assert block.against == pytest.approx(gathers * gather)
        assert "not run" in block.note
    # 171 channels of 2 x 2 points over two ranks, 86 on the one that has most.
    assert rows["embed, forward"].against == pytest.approx(64_800 * 4 * 86 * 2 / 2**20)


def test_closed_forms_by_hand() -> None:
    outer = Scale(rows=6, columns=8, width=10, blocks=2, shift=2)
    inner = Scale(rows=3, columns=4, width=20, blocks=1, shift=0)
    stages = {"first": outer, "inner": inner, "second": outer}
    told: dict[str, Any] = {"mlp_ratio": 1, "square": 4, "given": 3, "said": 2}
    found = of_units(stages, Layout(s=2, c=1, itemsize=4, **told))
    # Two ranks, each two columns of six rows there, and back.
    for direction in ("forward", "backward"):
        shifted = found.pop(("first.1", direction))
        assert shifted == found.pop(("second.1", direction))
        assert (shifted.bytes, shifted.calls) == (2 * 2 * 6 * 2 * 10 * 4, 2)
    assert all((sent.bytes, sent.calls) == (0, 0) for sent in found.values())
    found = of_units(stages, Layout(s=1, c=4, itemsize=2, **told))
    once = 3 * 6 * 8 * 10 * 2
    assert found["first.1", "forward"] == found["second.0", "forward"]
    sizes = {
        # 12 channels of 4 points, gathered; then gathered again, and their gradient is summed.
        "embed": (3 * 48 * 48 * 2, 1, 3 * 48 * 48 * 2 * 2, 2),
        "first.0": (4 * once, 4, 5 * once, 5),
        "down": (once / 2, 1, once / 2, 1),
        "inner.0": (2 * once, 4, 2.5 * once, 5),
        "up": (1.5 * once, 2, 2 * once, 3),
        "recover": (3 * 48 * 32 * 2, 1, 3 * 48 * 32 * 2, 1),
    }
    for unit, (ahead, calls, back, calls_back) in sizes.items():
        for direction, size, number in (("forward", ahead, calls), ("backward", back, calls_back)):
            sent = found[unit, direction]
            assert (sent.bytes, sent.calls) == (size, number), (unit, direction)
    # A wider MLP begins with a column, whose input is gathered twice and its gradient summed.
    found = of_units(stages, Layout(s=1, c=4, itemsize=2, **{**told, "mlp_ratio": 3}))
    assert (found["first.0", "forward"].bytes, found["first.0", "forward"].calls) == (4 * once, 4)
    assert (found["first.0", "backward"].bytes, found["first.0", "backward"].calls) == (6 * once, 6)


def test_gradients_of_few_numbers_are_sent_to_all() -> None:
    ranks = {"window": 2, "tensor": 2}
    assert of_gradients(40_000, 100, ranks).bytes == 4 * 3 * 100 * 4 + 2 * 2 * 20_000 * 4
    assert of_gradients(40_000, 5_000, ranks).bytes == 2 * 3 * 5_000 * 4 + 2 * 2 * 20_000 * 4
    assert of_gradients(40_000, 5_000, {"window": 4, "tensor": 1}).bytes == 2 * 3 * 45_000 * 4


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
    assert named["[s=2, c=2]: first.1, forward: exchanges"].ours == 4 + 2
    assert named["[s=2, c=2]: first.1, backward: exchanges"].ours == 5 + 2
    assert named["[s=2, c=2]: embed, backward: exchanges"].ours == 2
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
