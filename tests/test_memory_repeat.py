"""Blocks that are alike: a model of few, traced, against one of as many as it stands for."""

from dataclasses import replace

import pytest

from graticule.memory.costs import ProfileCosts
from graticule.memory.plan import peak_of
from graticule.memory.profile import Profile
from graticule.memory.repeat import traced_depth
from graticule.train import foresee as foreseeing
from test_memory_profile import SHAPES, config_of, plans_of, whole


@pytest.mark.parametrize(
    ("layout", "ranks", "depth", "leads"),
    [
        ("", 1, 6, 1),
        pytest.param("", 1, 7, 3, marks=pytest.mark.slow),
        pytest.param("window=2,weights=sharded", 2, 6, 2, marks=pytest.mark.slow),
        ("window=2,weights=sharded,shard_unit=model", 2, 6, 1),
    ],
)
def test_few_blocks_stand_for_many(
    monkeypatch: pytest.MonkeyPatch, layout: str, ranks: int, depth: int, leads: int
) -> None:
    config = config_of(leads, layout)
    config = replace(config, model=replace(config.swin, depth=depth))

    def foreseen() -> Profile:
        return foreseeing.foresee(config, SHAPES, ranks=ranks, on="cuda", tiles=leads)

    assert traced_depth(depth) < depth
    few = foreseen()
    monkeypatch.setattr(foreseeing, "traced_depth", lambda depth: depth)
    many = foreseen()
    assert few.units == many.units
    assert (few.flops, few.tail_flops, few.spans) == (many.flops, many.tail_flops, many.spans)
    num = len(many.units)
    plans = [whole("keep", leads, num_units=num), whole("recompute", leads, num_units=num)]
    plans += plans_of(leads, 3, 4, ("keep", "recompute", "offload"), num_units=num)
    for plan in plans:
        assert few.timeline(plan).peak_bytes == many.timeline(plan).peak_bytes, plan
        ours, theirs = (peak_of(ProfileCosts(each), plan).bytes for each in (few, many))
        assert ours == theirs, plan
