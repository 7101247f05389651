"""The gradient loss: which neighbours there are, and that stripes do not change it."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graticule.mesh import Cut, Stripes
from graticule.parallel.exchange import Link
from graticule.parallel.local import LocalRanks
from graticule.train.differences import Differences
from graticule.train.loss import LossWeights
from pools import Pools

GRID = 7, 10


def weights_of(wet: np.ndarray, area: np.ndarray | None = None) -> LossWeights:
    return LossWeights.of(wet, area)


def sums(
    error: Tensor, weights: LossWeights, periodic: bool = True, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(channel,) of a field of errors, and its gradient."""
    grid = tuple(error.shape[-2:])
    differences = Differences.of(weights, share, grid=grid, periodic=periodic)  # type: ignore[arg-type]
    predicted = error.clone().requires_grad_()
    total = differences.errors(predicted, torch.zeros_like(error), weights.wet)
    (gradient,) = torch.autograd.grad(total.sum(), predicted)
    return total.detach(), gradient


def plane(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, None, None]


def test_a_step_at_the_date_line_and_one_between_rows_are_seen() -> None:
    error = plane([[1.0, 0.0, 0.0, 5.0], [1.0, 0.0, 0.0, 5.0]])
    wet = weights_of(np.ones((1, 2, 4), bool))
    total, gradient = sums(error, wet)
    # Each row: |1 - 0| + |0 - 0| + |0 - 5| + |5 - 1| across the date line. Rows are alike.
    assert total.tolist() == [2 * (1 + 0 + 5 + 4)]
    assert gradient.flatten().tolist() == [0.0, -1.0, -1.0, 2.0] * 2
    walled, _ = sums(error, wet, periodic=False)
    assert walled.tolist() == [2 * (1 + 0 + 5)]
    rows, gradient = sums(plane([[3.0, 3.0], [1.0, 1.0], [1.0, 1.0]]), weights_of(
        np.ones((1, 3, 2), bool)), periodic=False)  # fmt: skip
    assert rows.tolist() == [4.0]
    assert gradient.flatten().tolist() == [1.0, 1.0, -1.0, -1.0, 0.0, 0.0]


def test_there_is_no_neighbour_across_a_coast() -> None:
    # A constant error at sea has no differences, although land is 0 everywhere.
    wet = np.random.default_rng(0).random((3, *GRID)) > 0.4
    error = torch.full((2, 2, 3, *GRID), 7.0, dtype=torch.float64)
    total, gradient = sums(error, weights_of(wet))
    assert total.tolist() == [0.0] * 3
    assert not gradient.any()
    # NaN where a channel is dry reaches neither sums nor gradients.
    error = torch.where(torch.from_numpy(wet), error, torch.nan)
    total, gradient = sums(error, weights_of(wet))
    assert total.tolist() == [0.0] * 3
    assert not gradient.any()


def test_a_channel_that_is_all_land_gives_nothing() -> None:
    wet = np.ones((2, *GRID), bool)
    wet[1] = False
    error = torch.randn(1, 1, 2, *GRID, dtype=torch.float64)
    total, gradient = sums(error, weights_of(wet))
    assert total[0] > 0
    assert total[1] == 0
    assert not gradient[:, :, 1].any()


def plain(error: Tensor, weights: LossWeights) -> Tensor:
    """Each pair once, by autograd."""
    cell = weights.cell.float()
    total = torch.zeros(cell.shape[0], dtype=torch.float64)
    for dim in (-2, -1):
        # From each cell to the next one; the last row has none, the last column the first one.
        other, weight = error.roll(-1, dim), cell.roll(-1, dim)
        pair = torch.where((cell > 0) & (weight > 0), (cell + weight) / 2, 0.0).double()
        if dim == -2:
            pair = pair.clone()
            pair[:, -1] = 0
        total = total + ((error - other).abs() * pair).sum((0, 1, 3, 4))
    return total


@pytest.mark.parametrize("area", [False, True])
def test_sums_and_gradients_are_those_of_the_plain_formula(area: bool) -> None:
    draw = np.random.default_rng(3)
    wet = draw.random((3, *GRID)) > 0.3
    weights = weights_of(wet, draw.random(GRID) + 0.5 if area else None)
    error = torch.from_numpy(draw.standard_normal((2, 2, 3, *GRID)))
    total, gradient = sums(error, weights, share=0.1)
    asked = error.clone().requires_grad_()
    expected = 0.1 * plain(torch.where(weights.wet, asked, 0.0), weights)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), asked)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


def test_the_difference_of_half_precision_fields_is_formed_in_float32() -> None:
    weights = weights_of(np.ones((1, 1, 2), bool))
    differences = Differences.of(weights, 1.0, grid=(1, 2), periodic=False)
    predicted = torch.tensor([1.0, 1.0], dtype=torch.bfloat16).reshape(1, 1, 1, 1, 2)
    target = torch.tensor([1.0, 1.0 + 2.0**-12]).reshape(1, 1, 1, 1, 2)
    predicted.requires_grad_()
    total = differences.errors(predicted, target, weights.wet)
    assert total.item() == 2.0**-12
    (gradient,) = torch.autograd.grad(total.sum(), predicted)
    assert gradient.flatten().tolist() == [1.0, -1.0]
    assert gradient.dtype == torch.bfloat16


def _in_stripes(dim: str, bounds: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The whole's sums as all ranks find them, this rank's gradient, and where it belongs."""
    link = Link(torch.distributed.group.WORLD)
    draw = np.random.default_rng(5)
    wet = draw.random((2, *GRID)) > 0.3
    area = draw.random(GRID) + 0.5
    error = torch.from_numpy(draw.standard_normal((2, 1, 2, *GRID)))
    whole = weights_of(wet, area)
    stripes = Stripes(dim=dim, index=link.rank, cuts={}, grid=Cut(bounds))  # type: ignore[arg-type]
    here = (..., stripes.rows, stripes.columns)
    weights = LossWeights(whole.cell[here], whole.wet[here], whole.total)
    differences = Differences.of(weights, 1.0, grid=GRID, periodic=True, stripes=stripes, link=link)
    predicted = error[here].clone().requires_grad_()
    total = differences.errors(predicted, torch.zeros_like(predicted), weights.wet)
    (gradient,) = torch.autograd.grad(total.sum(), predicted)
    expected, expected_gradient = sums(error, whole)
    assert torch.equal(gradient, expected_gradient[here])
    return link.sum(total.detach(), "t").tolist(), expected.tolist(), link.sent["halo"]


@pytest.mark.parametrize(
    ("dim", "bounds"),
    [
        ("lat", (0, 3, 7)), ("lon", (0, 5, 10)),
        ("lat", (0, 1, 2, 7)), ("lon", (0, 1, 9, 10)),
        ("lat", (0, 3, 3, 7)), ("lon", (0, 0, 6, 10)),  # a rank in between, or at an end, has none
        ("lat", (0, 2, 4, 6, 7)), ("lon", (0, 3, 3, 3, 10)), ("lon", (0, 10, 10, 10, 10)),
    ],
)  # fmt: skip
def test_stripes_have_the_sums_and_the_gradients_of_the_whole(
    pools: Pools, dim: str, bounds: tuple[int, ...]
) -> None:
    pool: LocalRanks = pools[len(bounds) - 1]
    # Where one rank has all of it, none is asked for anything.
    alone = max(b - a for a, b in itertools.pairwise(bounds)) == bounds[-1]
    answers = pool.run(_in_stripes, dim, bounds)
    for found, expected, _ in answers:
        assert found == pytest.approx(expected, rel=1e-13)
    assert (sum(sent for *_, sent in answers) == 0) == alone
