"""Channels: found by name, in store order, one per variable and level."""

import pytest

from graticule.variables import Channel, Channels


def channel(variable: str, level: float | None = None, role: str = "prognostic") -> Channel:
    return Channel(variable=variable, units="1", role=role, level=level)  # type: ignore[arg-type]


OCEAN = Channels([
    channel("thetao", 0.494025), channel("thetao", 5727.9169921875), channel("so", 0.494025),
    channel("zos"), channel("u10", role="forcing"), channel("flux", role="diagnostic"),
])  # fmt: skip


def test_a_name_is_the_variable_and_its_level_in_six_digits() -> None:
    assert OCEAN.names == ("thetao@0.494025", "thetao@5727.92", "so@0.494025", "zos", "u10", "flux")
    assert channel("t", 500.0).name == "t@500"
    assert channel("t", 0.0).name == "t@0"


def test_index_finds_by_name_and_lists_what_there_is() -> None:
    assert [OCEAN.index(name) for name in OCEAN.names] == list(range(6))
    with pytest.raises(ValueError, match=r"no channel sst; there are thetao@0\.494025, .*, flux"):
        OCEAN.index("sst")
    with pytest.raises(ValueError, match=r"no channel sst; there are none"):
        Channels([]).index("sst")


def test_pick_keeps_the_order_asked_for_and_a_variable_stands_for_all_its_levels() -> None:
    assert OCEAN.pick(["zos", "thetao", "so@0.494025"]) == [3, 0, 1, 2]
    assert OCEAN.pick(["so"]) == [2]
    assert OCEAN.pick([]) == []


@pytest.mark.parametrize("names", [["zos", "zos"], ["thetao", "thetao@5727.92"]])
def test_pick_refuses_a_channel_named_twice(names: list[str]) -> None:
    with pytest.raises(ValueError, match=", ".join(names) + " names a channel twice"):
        OCEAN.pick(names)


def test_pick_refuses_an_unknown_level() -> None:
    with pytest.raises(ValueError, match=r"no channel thetao@100; there are thetao@0\.494025"):
        OCEAN.pick(["thetao@100"])


def test_two_channels_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="channel t@500 occurs twice"):
        Channels([channel("t", 500), channel("q"), channel("t", 500.0)])
    # Levels that differ only in the seventh digit would have the same name.
    with pytest.raises(ValueError, match="channel z@1000 occurs twice"):
        Channels([channel("z", 1000.0), channel("z", 1000.0001)])


def test_channels_are_found_by_role_in_store_order() -> None:
    assert OCEAN.with_role("prognostic") == [0, 1, 2, 3]
    assert OCEAN.with_role("forcing") == [4]
    assert OCEAN.with_role("diagnostic") == [5]
    assert OCEAN.with_role("static") == []


def test_in_asks_for_a_name() -> None:
    assert "zos" in OCEAN
    assert "thetao@5727.92" in OCEAN
    assert "thetao" not in OCEAN
    assert OCEAN[3] in OCEAN
    assert channel("other") not in OCEAN


def test_plain_values_round_trip_with_every_attribute() -> None:
    full = Channel(
        variable="thetao", units="degC", role="prognostic", level=5.0, level_units="m",
        long_name="Temperature", standard_name="sea_water_potential_temperature", low=-3, high=45,
    )  # fmt: skip
    channels = Channels([full, channel("zos")])
    assert Channels.from_list(channels.to_list()) == channels
    assert hash(Channels.from_list(channels.to_list())) == hash(channels)


def test_order_and_units_are_part_of_equality() -> None:
    a, b = channel("a"), channel("b")
    assert Channels([a, b]) != Channels([b, a])
    assert Channels([a]) != Channels([Channel(variable="a", units="K", role="prognostic")])
    assert Channels([a]) != [a]


def test_slices_and_subsets_are_channels() -> None:
    assert OCEAN[1:3].names == ("thetao@5727.92", "so@0.494025")
    assert OCEAN.subset([5, 0]).names == ("flux", "thetao@0.494025")
    assert isinstance(OCEAN[:0], Channels)
    assert repr(OCEAN[3:5]) == "Channels(zos, u10)"
    assert [c.name for c in OCEAN] == list(OCEAN.names)
    assert len(OCEAN) == 6
