"""Sums of ensembles: values by hand, an independent library, parts that add up, ties and land."""

import operator
from itertools import product

import numpy as np
import pytest
import xarray as xr
from scores.probability import brier_score_for_ensemble, crps_for_ensemble
from scores.probability import rank_histogram as independent_ranks

from graticule.evaluate import EnsembleScores, EnsembleSums, crps, spread_skill
from graticule.evaluate.ensemble_sums import FieldSums, Threshold
from graticule.grid import Grid
from graticule.variables import Channel, Channels

REGULAR = Grid(np.linspace(90, -90, 7), np.arange(0, 360, 30.0))
GAUSSIAN = Grid(-np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(8)[0])),
                np.arange(0, 360, 22.5))  # fmt: skip
GRIDS = pytest.mark.parametrize("grid", [REGULAR, GAUSSIAN], ids=["regular", "gaussian"])


def sums_of(
    members: np.ndarray,
    truth: np.ndarray,
    area: np.ndarray,
    present: np.ndarray | None = None,
    *,
    thresholds: list[str] | None = None,
    std: float | None = None,
    key: tuple[int, int] = (0, 0),
) -> EnsembleSums:
    """Of one pair of one channel `x`; members: (member, lat, lon)."""
    present = np.ones(truth.shape, bool) if present is None else present
    events = [Threshold.read(text, ["x"]) for text in thresholds or []]
    field = FieldSums.zero(1, len(members), events)
    field.add(0, members, truth, present, area, key=key)
    sums = EnsembleSums.zero(["x"], len(members), (1, 1), thresholds=events)
    sums.add_pair(0, 0, field, None if std is None else np.array([std]))
    return sums


def scores_of(sums: EnsembleSums, *, normalised: bool = False) -> EnsembleScores:
    inits, leads = sums.values.shape[1:3]
    seconds = np.arange(1, leads + 1) * 86400
    return EnsembleScores(
        sums=sums,
        channels=Channels([Channel(variable=n, units="K", role="prognostic") for n in sums.names]),
        grid=REGULAR, lead_seconds=seconds, init_seconds=np.arange(inits) * 86400,
        valid_seconds=np.arange(inits)[:, None] * 86400 + seconds, calendar="standard",
        normalised=normalised,
    )  # fmt: skip


def of_one_cell(members: list[float], observation: float) -> EnsembleScores:
    values = np.array(members, np.float32).reshape(-1, 1, 1)
    truth, area = np.full((1, 1), observation, np.float32), np.full((1, 1), 3.0)
    return scores_of(sums_of(values, truth, area))


# By hand


@pytest.mark.parametrize(
    ("members", "observation", "standard", "fair", "almost"),
    [
        ([1, 3], 2, 0.5, 0.0, 0.025),
        ([0, 1, 2, 5], 1.5, 0.5, 1 / 6, 0.18333333333333333),
        ([5, 2, 0, 1], 1.5, 0.5, 1 / 6, 0.18333333333333333),
        ([7, 7, 7], 5, 2.0, 2.0, 2.0),
    ],
)
def test_crps_of_few_members_is_as_by_hand(
    members: list[float], observation: float, standard: float, fair: float, almost: float
) -> None:
    scores = of_one_cell(members, observation)
    for kind, expected in (("standard", standard), ("fair", fair), ("almost_fair", almost)):
        assert scores.crps(kind)[0, 0] == pytest.approx(expected, abs=1e-14)  # type: ignore[arg-type]
        # In one cell the distance of two fields is that of two numbers.
        assert scores.energy(kind)[0, 0] == pytest.approx(expected, abs=1e-14)  # type: ignore[arg-type]


def test_one_member_has_the_absolute_error_and_nothing_fair() -> None:
    scores = of_one_cell([4], 2)
    assert scores.crps("standard")[0, 0] == 2.0
    assert scores.energy("standard")[0, 0] == 2.0
    assert scores.rmse()[0, 0] == scores.rmse_of_members()[0, 0] == 2.0
    message = "at least two members, there is 1"
    for wrong in (
        lambda: scores.crps("fair"), lambda: scores.crps("almost_fair"),
        lambda: scores.energy("fair"), scores.spread, scores.spread_skill,
        scores.spread_skill_unbiased,
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            wrong()
    told = scores.told()
    assert "one member has no spread" in told["left_out"]
    assert {"fair_crps", "spread", "spread_skill", "fair_energy"}.isdisjoint(told["rows"][0])
    assert told["rows"][0]["crps"] == 2.0
    assert any("one member has no spread" in line for line in scores.lines(1000))


def test_spread_and_error_of_two_members_are_as_by_hand() -> None:
    scores = of_one_cell([1, 3], 4)  # variance 2, mean 2
    assert scores.rmse()[0, 0] == pytest.approx(2.0)
    assert scores.spread()[0, 0] == pytest.approx(np.sqrt(1.5 * 2))
    assert scores.spread_skill()[0, 0] == pytest.approx(np.sqrt(3) / 2)
    assert scores.spread_skill_unbiased()[0, 0] == pytest.approx(np.sqrt(2 / (4 - 2 / 2)))
    assert scores.rmse_of_members()[0, 0] == pytest.approx(np.sqrt((9 + 1) / 2))


@pytest.mark.parametrize("num", [2, 3, 5])
def test_members_that_all_equal_the_target_score_zero_and_have_no_ratio(num: int) -> None:
    truth = np.random.default_rng(0).normal(280, 5, size=REGULAR.shape).astype(np.float32)
    members = np.repeat(truth[None], num, axis=0)
    scores = scores_of(sums_of(members, truth, REGULAR.cell_area, std=5.0), normalised=True)
    for kind in ("standard", "fair", "almost_fair"):
        np.testing.assert_array_equal(scores.crps(kind), 0.0)  # type: ignore[arg-type]
        np.testing.assert_array_equal(scores.energy(kind), 0.0)  # type: ignore[arg-type]
    assert scores.rmse()[0, 0] == scores.spread()[0, 0] == 0
    assert np.isnan(scores.spread_skill()).all()
    assert scores.told()["rows"][0]["spread_skill"] is None
    assert "not defined" in " ".join(scores.lines(1000))


def test_prescribed_cells_leave_the_ratio_as_it_is() -> None:
    rng = np.random.default_rng(3)
    truth = rng.normal(size=REGULAR.shape).astype(np.float32)
    members = rng.normal(size=(4, *REGULAR.shape)).astype(np.float32)
    free = np.ones(REGULAR.shape, bool)
    free[:, :5] = False
    alone = scores_of(sums_of(members, truth, REGULAR.cell_area, free))
    members[:, :, :5] = truth[:, :5]
    both = scores_of(sums_of(members, truth, REGULAR.cell_area))
    assert both.spread_skill() == pytest.approx(alone.spread_skill(), rel=1e-14)
    assert both.spread_skill_unbiased() == pytest.approx(alone.spread_skill_unbiased(), rel=1e-14)
    assert both.rmse()[0, 0] < alone.rmse()[0, 0]


def test_constant_fields_are_an_error_without_spread() -> None:
    truth = np.full(REGULAR.shape, 54000.0, np.float32)
    members = np.full((3, *REGULAR.shape), 54030.0, np.float32)
    scores = scores_of(sums_of(members, truth, REGULAR.cell_area))
    assert scores.crps("fair")[0, 0] == pytest.approx(30.0, rel=1e-14)
    assert scores.energy("fair")[0, 0] == pytest.approx(30.0, rel=1e-14)
    assert (scores.spread()[0, 0], scores.spread_skill()[0, 0]) == (0, 0)
    np.testing.assert_array_equal(scores.ranks()[0, 0], [1, 0, 0, 0])


@pytest.mark.parametrize(("mean", "spread"), [(5.0, 1e-3), (54000.0, 30.0)])
def test_small_spread_around_a_large_mean_keeps_its_digits(mean: float, spread: float) -> None:
    rng = np.random.default_rng(4)
    members = rng.normal(mean, spread, size=(96, *REGULAR.shape)).astype(np.float32)
    truth = rng.normal(mean, spread, size=REGULAR.shape).astype(np.float32)
    exact = members.astype(np.longdouble)
    variance = ((exact - exact.mean(0)) ** 2).sum(0) / 95
    area = REGULAR.cell_area
    expected = float((area * variance).sum() / area.sum())
    sums = sums_of(members, truth, area)
    found = float(sums.of("variance")[0, 0, 0] / area.sum())
    assert found == pytest.approx(expected, rel=1e-10)


# Against an independent library and by brute force


@GRIDS
@pytest.mark.parametrize("num", [2, 3, 11])
def test_an_independent_library_gives_the_same_crps_brier_scores_and_ranks(
    grid: Grid, num: int
) -> None:
    rng = np.random.default_rng(num)
    members = rng.normal(281, 2, size=(num, *grid.shape)).astype(np.float32)
    truth = rng.normal(280, 2, size=grid.shape).astype(np.float32)
    present = rng.random(grid.shape) < 0.7
    truth[~present] = np.nan
    members[:, ~present] = np.nan
    area = grid.cell_area
    scores = scores_of(sums_of(members, truth, area, present, thresholds=["x>281.5", "x<279"]))
    weight = area[present] / area[present].sum()
    ours = xr.DataArray(members[:, present].astype(np.float64), dims=("member", "cell"))
    theirs = xr.DataArray(truth[present].astype(np.float64), dims="cell")

    for kind, method in (("standard", "ecdf"), ("fair", "fair")):
        expected = crps_for_ensemble(ours, theirs, "member", method=method, preserve_dims="all")  # type: ignore[arg-type]
        assert scores.crps(kind)[0, 0] == pytest.approx(weight @ expected.values, rel=1e-12)  # type: ignore[arg-type]
    for i, (value, event) in enumerate([(281.5, operator.gt), (279, operator.lt)]):
        for fair in (False, True):
            expected = brier_score_for_ensemble(
                ours, theirs, "member", value, preserve_dims="all", fair_correction=fair,
                event_threshold_operator=event,
            )  # fmt: skip
            assert scores.brier(i, fair=fair)[0] == pytest.approx(
                weight @ expected.values.ravel(), rel=1e-12
            )
    each = independent_ranks(ours, theirs, "member", preserve_dims=["cell"])
    expected_ranks = weight @ each.transpose("cell", ...).values
    np.testing.assert_allclose(scores.ranks()[0, 0], expected_ranks, rtol=1e-12, atol=1e-15)


@GRIDS
@pytest.mark.parametrize("num", [2, 3, 11])
def test_brute_force_gives_the_same_spread_error_and_energy(grid: Grid, num: int) -> None:
    rng = np.random.default_rng(num)
    members = rng.normal(281, 2, size=(num, *grid.shape)).astype(np.float32)
    truth = rng.normal(280, 2, size=grid.shape).astype(np.float32)
    area = grid.cell_area
    scores = scores_of(sums_of(members, truth, area, std=2.5), normalised=True)
    x, y = members.astype(np.float64), truth.astype(np.float64)

    def rms(field: np.ndarray) -> float:
        return float(np.sqrt((area * field**2).sum() / area.sum()))

    pairs = sum(rms(x[i] - x[j]) for i, j in product(range(num), repeat=2))
    error = np.mean([rms(each - y) for each in x])
    for kind, share in (("standard", 1 / num**2), ("fair", 1 / (num * (num - 1)))):
        expected = error - pairs * share / 2
        assert scores.energy(kind)[0] == pytest.approx([expected, expected / 2.5], rel=1e-12)  # type: ignore[arg-type]
    # The functions of whole arrays, that are tested on their own.
    together = spread_skill(x[:, None], y[None], area)
    assert scores.spread()[0, 0] == pytest.approx(together.spread, rel=1e-13)
    assert scores.rmse()[0, 0] == pytest.approx(together.rmse, rel=1e-13)
    assert scores.spread_skill()[0, 0] == pytest.approx(together.ratio, rel=1e-13)
    for kind in ("standard", "fair", "almost_fair"):
        expected = (area * crps(x, y, kind=kind)).sum() / area.sum()  # type: ignore[arg-type]
        assert scores.crps(kind)[0, 0] == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("num", [5, 7, 9, 11])
def test_equal_members_are_no_distance_apart(num: int) -> None:
    rng = np.random.default_rng(num)
    members = rng.normal(281, 2, size=(num, *REGULAR.shape)).astype(np.float32)
    # The last row of a product of matrices is rounded in another way than the first.
    members[-1] = members[0]
    field = FieldSums.zero(1, num)
    field.add(0, members, members[2], np.ones(REGULAR.shape, bool), REGULAR.cell_area, key=(0, 0))
    zero = np.eye(num, dtype=bool)
    zero[0, -1] = zero[-1, 0] = True
    np.testing.assert_array_equal(field.distances[0] == 0, zero)
    assert field.errors[0, 2] == 0


@pytest.mark.parametrize(("num", "raw"), [(2, 0.817), (4, 0.896), (8, 0.943), (50, 0.992)])
def test_members_like_the_truth_have_a_ratio_of_one_whatever_their_number(
    num: int, raw: float
) -> None:
    # 40,000 cells alike: the ratio's standard error is below sqrt((1 + 1 / (m - 1)) / 80,000), so
    # 0.005 at m = 2 and 0.0036 else; the table's own figures are a sample of that kind too.
    rng = np.random.default_rng(17)
    shape = (200, 200)
    members = rng.normal(size=(num, *shape)).astype(np.float32)
    truth = rng.normal(size=shape).astype(np.float32)
    scores = scores_of(sums_of(members, truth, np.ones(shape)))
    ratio = scores.spread_skill()[0, 0]
    assert ratio == pytest.approx(1.0, abs=0.012)
    assert scores.spread_skill_unbiased()[0, 0] == pytest.approx(1.0, abs=0.015)
    assert ratio / np.sqrt((num + 1) / num) == pytest.approx(raw, abs=0.012)
    # Flat in the number of members, as no other of the kinds is.
    assert scores.crps("fair")[0, 0] == pytest.approx(1 / np.sqrt(np.pi), abs=0.01)
    assert scores.ranks()[0, 0] == pytest.approx(np.full(num + 1, 1 / (num + 1)), abs=0.01)


# Ranks of equal values, land, thresholds


def test_the_rank_among_equal_values_is_drawn_by_key_and_level() -> None:
    shape = (120, 200)
    same = np.zeros((3, *shape), np.float32)
    truth, area = np.zeros(shape, np.float32), np.ones(shape)
    first = sums_of(same, truth, area).ranks
    np.testing.assert_array_equal(sums_of(same, truth, area).ranks, first)
    assert (sums_of(same, truth, area, key=(86400, 0)).ranks != first).any()
    # Each of 4 ranks has 6000 of 24000 cells; 4 standard deviations are 268.
    assert first[0, 0] == pytest.approx(np.full(4, 6000), abs=268)
    same[0] = -1  # below all others: the rest is shared by the upper three
    shares = sums_of(same, truth, area).ranks[0, 0]
    assert shares[0] == 0
    assert shares[1:] == pytest.approx(np.full(3, 8000), abs=292)


def test_land_is_in_no_sum_whatever_stands_there() -> None:
    rng = np.random.default_rng(6)
    members = rng.normal(size=(3, *REGULAR.shape)).astype(np.float32)
    truth = rng.normal(size=REGULAR.shape).astype(np.float32)
    sea = np.ones(REGULAR.shape, bool)
    sea[2:4, 3:] = False
    area, given = REGULAR.cell_area, {"thresholds": ["x>0"], "std": 1.0}
    found = []
    for filler in (np.nan, 1e30, 0.0):
        members[:, ~sea] = truth[~sea] = filler
        found.append(sums_of(members, truth, area, sea, **given))  # type: ignore[arg-type]
    for name in ("values", "energy", "ranks", "events"):
        for other in found[1:]:
            np.testing.assert_array_equal(getattr(other, name), getattr(found[0], name))
    assert found[0].values[0, 0, 0, 0] == pytest.approx(area[sea].sum())
    assert found[0].ranks.sum() == pytest.approx(area[sea].sum())
    assert np.isfinite(found[0].energy).all()


def test_the_brier_score_is_reliability_less_resolution_plus_uncertainty() -> None:
    rng = np.random.default_rng(8)
    truth = rng.normal(size=REGULAR.shape)
    members = (0.8 * truth + rng.normal(size=(5, *REGULAR.shape))).astype(np.float32)
    scores = scores_of(sums_of(members, truth.astype(np.float32), REGULAR.cell_area,
                               thresholds=["x>0.5"]))  # fmt: skip
    parts = scores.brier_parts(0)
    assert parts["resolution"][0] > 0.01
    assert scores.brier(0)[0] == pytest.approx(
        (parts["reliability"] - parts["resolution"] + parts["uncertainty"])[0], rel=1e-12
    )
    found = scores.reliability(0)
    np.testing.assert_allclose(found.probability, np.arange(6) / 5)
    assert found.weight.sum() == pytest.approx(1)
    assert (found.weight * np.nan_to_num(found.observed)).sum() == pytest.approx(
        parts["frequency"][0]
    )


def test_a_threshold_of_no_channel_is_refused_with_the_channels_there_are() -> None:
    with pytest.raises(ValueError, match=r"'y>3' is of no channel .* has x, z"):
        Threshold.read("y>3", ["x", "z"])
    assert str(Threshold.read(" z < -0.25 ", ["x", "z"])) == "z<-0.25"


# Adding up


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_uneven_stripes_add_up_to_the_whole_field(cut: str) -> None:
    rng = np.random.default_rng(9)
    # Whole numbers: many equal values, whose ranks are drawn.
    members = rng.integers(0, 3, size=(4, *REGULAR.shape)).astype(np.float32)
    truth = rng.integers(0, 3, size=REGULAR.shape).astype(np.float32)
    present, area = rng.random(REGULAR.shape) < 0.8, REGULAR.cell_area
    events = (Threshold.read("x>0.5", ["x"]),)
    whole = FieldSums.zero(1, 4, events)
    given = {"key": (7, 2), "width": REGULAR.lon.size, "point": (5, 9)}
    whole.add(0, members, truth, present, area, **given)  # type: ignore[arg-type]
    total = FieldSums.zero(1, 4, events)
    length = REGULAR.shape[cut == "columns"]
    for start, stop in ((0, 1), (1, 5), (5, 5), (5, length)):
        part = slice(start, stop)
        here = (part, slice(None)) if cut == "rows" else (slice(None), part)
        stripe = FieldSums.zero(1, 4, events)
        stripe.add(0, members[:, *here], truth[here], present[here], area[here],
                   **{cut: part}, **given)  # type: ignore[arg-type]  # fmt: skip
        total = total + stripe
    for name in ("values", "errors", "distances", "ranks", "events", "plume"):
        ours, theirs = getattr(total, name), getattr(whole, name)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12 * np.abs(theirs).max())
    np.testing.assert_array_equal(total.plume[0], [*members[:, 5, 9], truth[5, 9]])


def test_pairs_add_up_and_other_sums_do_not() -> None:
    rng = np.random.default_rng(10)
    parts, whole = [], EnsembleSums.zero(["x"], 3, (2, 2))
    for init, lead in product(range(2), repeat=2):
        field = FieldSums.zero(1, 3)
        field.add(0, rng.normal(size=(3, *REGULAR.shape)), rng.normal(size=REGULAR.shape),
                  np.ones(REGULAR.shape, bool), REGULAR.cell_area, key=(init, lead))  # fmt: skip
        whole.add_pair(init, lead, field)
        part = EnsembleSums.zero(["x"], 3, (2, 2))
        part.add_pair(init, lead, field)
        parts.append(part)
    total = parts[3] + parts[1] + parts[0] + parts[2]
    for name in ("values", "energy", "ranks", "events", "plumes"):
        np.testing.assert_allclose(getattr(total, name), getattr(whole, name), rtol=1e-14)
    scores = scores_of(whole)
    of_starts = scores.crps("fair", by_start=True)
    assert of_starts.shape == (2, 2, 1)
    assert of_starts.mean(0) == pytest.approx(scores.crps("fair"))  # of equal weight here
    with pytest.raises(ValueError, match=r"3 members of 1 channels .* and of 4 members"):
        whole + EnsembleSums.zero(["x"], 4, (2, 2))
    with pytest.raises(ValueError, match="sums of 3 members of 1 channels and of 4 of 1"):
        FieldSums.zero(1, 3) + FieldSums.zero(1, 4)


def test_unknown_kinds_are_refused() -> None:
    scores = of_one_cell([1, 3], 2)
    with pytest.raises(ValueError, match="none of standard, fair, almost_fair"):
        scores.crps("fare")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha=2"):
        scores.energy("almost_fair", alpha=2)
