"""What `graticule verify` compares, whatever the layout asks for."""

from graticule.config import Config, DataConfig, SwinConfig
from graticule.verify import verify


def test_each_of_many_data_ranks_has_a_sample() -> None:
    config = Config(
        data=DataConfig(grid=(8, 16), prognostic=("temperature",)),
        model=SwinConfig(
            patch=2, sampling=1, width=8, depth=1, heads=2, window=(2, 4), norm_groups=1
        ),
    )
    told, (verdict,) = verify(config, ["data=3,weights=sharded"])
    assert verdict.passed, verdict
    assert told.endswith("batch 3")
