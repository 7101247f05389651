"""Draws by logical key: the same wherever, whenever and in whatever order they are asked for."""

import itertools

import numpy as np
import pytest

from graticule.keyed import keyed, keyed_seed


def test_the_scheme_gives_these_numbers_for_this_key() -> None:
    # A change here changes every run that is repeated or resumed: say so in the changelog.
    assert keyed(7, "order", 3).permutation(8).tolist() == [0, 4, 1, 6, 2, 7, 3, 5]
    assert keyed(7, "roll", 3, 1).integers(0, 1440, 4).tolist() == [921, 1272, 433, 122]
    noise = keyed(7, "noise", 3, 1).random(2).tolist()
    assert noise == [0.14658921017715676, 0.003099953725678839]
    assert keyed_seed(7, "weights", 3) == 8970342202228858963


def test_draws_do_not_depend_on_the_order_they_are_asked_in() -> None:
    keys = [(seed, purpose, step, item) for seed in (0, 1) for purpose in ("order", "roll")
            for step in (0, 1, 2) for item in (0, 1)]  # fmt: skip
    forward = {key: keyed(*key).random(3).tolist() for key in keys}
    backward = {key: keyed(*key).random(3).tolist() for key in reversed(keys)}
    assert forward == backward


def test_one_generator_is_not_moved_by_another() -> None:
    alone = keyed(5, "roll", 2).random(4)
    first, other = keyed(5, "roll", 2), keyed(5, "roll", 2)
    other.random(100)
    mixed = np.array([first.random() for _ in range(4)])
    np.testing.assert_array_equal(mixed, alone)


def test_every_part_of_the_key_changes_the_draw() -> None:
    keys = [(0, "order"), (1, "order"), (-1, "order"), (0, "roll"), (0, "order", 0),
            (0, "order", 1), (0, "order", -1), (0, "order", 0, 0), (0, "order", 0, 1),
            (0, "order", 1, 0), (0, "order", 11), (0, "order", 1, 1), (0, "order1"),
            (10, "order"), (0, "")]  # fmt: skip
    draws = [tuple(keyed(*key).integers(2**63, size=2)) for key in keys]
    assert len(set(draws)) == len(keys)
    seeds = [keyed_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)


def test_a_colon_in_a_purpose_is_refused_because_two_keys_would_be_one() -> None:
    with pytest.raises(ValueError, match=r"purpose 'order:1' holds a colon"):
        keyed(0, "order:1")


def test_a_fraction_is_refused_because_it_would_share_the_draws_of_a_whole_number() -> None:
    with pytest.raises(TypeError):
        keyed(0, "roll", 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        keyed(0.5, "roll")  # type: ignore[arg-type]


def test_numbers_of_any_integer_type_and_size_make_the_same_key() -> None:
    expected = keyed(3, "roll", 4).random()
    assert keyed(np.int32(3), "roll", np.int64(4)).random() == expected  # type: ignore[arg-type]
    assert keyed(2**200, "roll", 2**300).random() != keyed(2**200, "roll", 2**300 + 1).random()


def test_seeds_fit_in_63_bits() -> None:
    seeds = [keyed_seed(seed, "weights", item) for seed, item in
             itertools.product(range(20), range(20))]  # fmt: skip
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Their mean is that of a uniform draw, to five standard errors.
    assert abs(np.mean(seeds) / 2**63 - 0.5) < 5 / np.sqrt(12 * len(seeds))


def test_neighbouring_keys_are_not_correlated() -> None:
    draws = np.stack([keyed(0, "noise", item).standard_normal(4000) for item in range(8)])
    off_diagonal = np.corrcoef(draws)[~np.eye(8, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(4000)
