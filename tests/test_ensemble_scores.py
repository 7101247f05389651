"""CRPS and spread-skill: published identities and edge cases by hand."""

from itertools import product

import numpy as np
import pytest

from graticule.evaluate import crps, spread_skill


@pytest.mark.parametrize(
    ("members", "observation", "kind", "expected"),
    [
        ([1, 3], 2, "standard", 0.5),
        ([1, 3], 2, "fair", 0.0),
        ([0, 1, 2, 5], 1.5, "standard", 0.5),
        ([0, 1, 2, 5], 1.5, "fair", 1 / 6),
        ([0, 1, 2, 5], 1.5, "almost_fair", 0.95 / 6 + 0.05 * 0.5),
        ([5, 0, 2, 1], 1.5, "almost_fair", 0.18333333333333333),
        ([7, 7, 7], 5, "standard", 2.0),
        ([7, 7, 7], 5, "fair", 2.0),
        ([4], 2, "standard", 2.0),
    ],
)  # fmt: skip
def test_crps_of_few_members_is_as_by_hand(members, observation, kind, expected) -> None:
    value = crps(np.array(members), np.array(observation), kind=kind)
    assert value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["fair", "almost_fair"])
def test_fair_crps_of_one_member_is_an_error(kind) -> None:
    with pytest.raises(ValueError, match=f"the {kind} CRPS needs at least two members, there is 1"):
        crps(np.array([4.0]), np.array(2.0), kind=kind)


def test_standard_crps_of_one_member_is_the_absolute_error() -> None:
    rng = np.random.default_rng(0)
    field, truth = rng.normal(size=(2, 5, 6))
    np.testing.assert_allclose(crps(field[None], truth), np.abs(field - truth), rtol=1e-15)


@pytest.mark.parametrize("kind", ["standard", "fair", "almost_fair"])
@pytest.mark.parametrize("num", [2, 3, 8])
def test_sorted_members_give_the_double_sum_over_pairs(kind, num) -> None:
    rng = np.random.default_rng(num)
    # Pressure in Pa: a formula that does not take the observation off first loses digits here.
    members, truth = 101325 + rng.normal(size=(num, 4, 3)), 101325 + rng.normal(size=(4, 3))
    before = members.copy()
    pairs = sum(np.abs(members[i] - members[j]) for i, j in product(range(num), repeat=2))
    standard = np.abs(members - truth).mean(0) - pairs / (2 * num**2)
    fair = np.abs(members - truth).mean(0) - pairs / (2 * num * (num - 1))
    expected = {"standard": standard, "fair": fair, "almost_fair": 0.7 * fair + 0.3 * standard}
    value = crps(members, truth, kind=kind, alpha=0.7)
    np.testing.assert_allclose(value, expected[kind], atol=1e-11)
    np.testing.assert_array_equal(members, before)


def test_fair_crps_does_not_depend_on_the_number_of_members() -> None:
    # Of independent standard normals E|X - y| - E|X - X'| / 2 = 2 / sqrt(pi) - 1 / sqrt(pi), and
    # the mean over many points lies within 4 standard errors of it.
    rng = np.random.default_rng(1)
    for num in (2, 5):
        values = crps(rng.normal(size=(num, 40000)), rng.normal(size=40000), kind="fair")
        expected = 1 / np.sqrt(np.pi)
        assert abs(values.mean() - expected) < 4 * values.std() / 200
        standard = expected * (1 + 1 / num)
        values = crps(rng.normal(size=(num, 40000)), rng.normal(size=40000))
        assert abs(values.mean() - standard) < 4 * values.std() / 200


def test_land_stays_nan_and_does_not_spread() -> None:
    members, truth = np.ones((3, 2)), np.array([np.nan, 2.0])
    np.testing.assert_array_equal(crps(members, truth, kind="fair"), [np.nan, 1.0])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="none of standard, fair, almost_fair"):
        crps(np.ones((2, 1)), np.ones(1), kind="fare")
    with pytest.raises(ValueError, match="alpha=2"):
        crps(np.ones((2, 1)), np.ones(1), alpha=2)
    with pytest.raises(ValueError, match=r"members \(2, 3\) must be"):
        crps(np.ones((2, 3)), np.ones(2))


def test_spread_of_members_like_the_truth_equals_their_error() -> None:
    rng = np.random.default_rng(2)
    members, truth = rng.normal(size=(3, 400, 50)), rng.normal(size=(400, 50))
    result = spread_skill(members, truth)
    assert result.ratio == pytest.approx(1.0, abs=0.02)
    # Without (m + 1) / m it would be sqrt(3 / 4).
    assert result.rmse == pytest.approx(np.sqrt(4 / 3), abs=0.02)
    assert result.excluded == 0


@pytest.mark.parametrize(
    ("num", "raw", "of_deviations"),
    [(2, 0.817, 0.798), (4, 0.896, 0.923), (8, 0.943, 0.965), (50, 0.992, 0.997)],
)
def test_the_ratio_corrects_for_the_number_of_members_and_averages_variances(
    num: int, raw: float, of_deviations: float
) -> None:
    """Of members like the truth, 1 whatever their number; what it would be without the factor
    sqrt((m + 1) / m), and with deviations averaged in the place of variances."""
    rng = np.random.default_rng(num)
    members, truth = rng.normal(size=(num, 500, 120)), rng.normal(size=(500, 120))
    result = spread_skill(members, truth)
    assert result.ratio == pytest.approx(1.0, abs=0.01)
    factor = np.sqrt((num + 1) / num)
    assert result.ratio / factor == pytest.approx(raw, abs=0.01)
    biased = factor * members.std(0, ddof=1).mean() / result.rmse
    assert biased == pytest.approx(of_deviations, abs=0.01)


def test_areas_weigh_spread_and_error_alike() -> None:
    rng = np.random.default_rng(7)
    sigma, area = np.array([3.0, 1.0] * 30), np.array([0.1, 1.0] * 30)
    members = sigma * rng.normal(size=(6, 2000, 60))
    truth = sigma * rng.normal(size=(2000, 60))
    result = spread_skill(members, truth, area)
    assert result.ratio == pytest.approx(1.0, abs=0.01)
    of_mean = (0.1 * 9 + 1) / 1.1
    assert result.spread**2 == pytest.approx(7 / 6 * of_mean, rel=0.02)
    assert result.rmse**2 == pytest.approx(7 / 6 * of_mean, rel=0.02)


def test_spread_skill_is_as_by_hand() -> None:
    members = np.array([[[1.0]], [[3.0]]])  # variance 2, mean 2
    result = spread_skill(members, np.array([[4.0]]))
    assert result.spread == pytest.approx(np.sqrt(1.5 * 2))
    assert result.rmse == pytest.approx(2.0)
    assert result.ratio == pytest.approx(np.sqrt(3) / 2)


def test_prescribed_cells_are_excluded_and_change_nothing() -> None:
    rng = np.random.default_rng(3)
    members, truth = rng.normal(size=(4, 10, 5)), rng.normal(size=(10, 5))
    alone = spread_skill(members, truth)
    prescribed = rng.normal(size=(10, 2))
    both = spread_skill(
        np.concatenate([members, np.broadcast_to(prescribed, (4, 10, 2))], axis=2),
        np.concatenate([truth, prescribed], axis=1),
    )
    assert both.excluded == 2
    assert np.isnan(both.ratio_map[5:]).all()
    np.testing.assert_array_equal(both.ratio_map[:5], alone.ratio_map)
    assert (both.spread, both.rmse, both.ratio) == (alone.spread, alone.rmse, alone.ratio)


def test_land_has_no_weight_and_holes_at_sea_are_an_error() -> None:
    rng = np.random.default_rng(4)
    members, truth = rng.normal(size=(3, 6, 4)), rng.normal(size=(6, 4))
    members[:, :, 0] = truth[:, 0] = np.nan
    result = spread_skill(members, truth, np.array([0.0, 1.0, 2.0, 1.0]))
    assert np.isfinite([result.spread, result.rmse, result.ratio]).all()
    assert result.excluded == 1
    with pytest.raises(ValueError, match="1 of 4 cells with weight hold NaN"):
        spread_skill(members, truth)


def test_ratio_without_spread_or_error_anywhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least two members"):
        spread_skill(np.ones((1, 2, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match="0/0"):
        spread_skill(np.ones((2, 2, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match="the ensemble mean has no error"):
        spread_skill(np.array([[[0.0]], [[2.0]]]), np.array([[1.0]]))
