"""The loss: weighted sums over a global weight, safe against what lies on land."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from graticule.grid import Grid
from graticule.train.loss import Kind, LossWeights, weighted_errors

KINDS: tuple[Kind, ...] = ("mae", "mse")


def weights_of(wet: list, area: np.ndarray | None = None) -> LossWeights:
    return LossWeights.of(np.array(wet, dtype=bool), area)


def weighted_error(predicted: Tensor, target: Tensor, weights: LossWeights, kind: Kind) -> Tensor:
    """Of all channels together."""
    return weighted_errors(predicted, target, weights, kind).sum()


def row(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """One sample, one time, one channel, one latitude."""
    return torch.tensor(values, dtype=dtype).reshape(1, 1, 1, 1, -1)


def random_pair(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    predicted, target = torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return predicted.requires_grad_(), target


def test_a_missing_label_on_land_reaches_neither_loss_nor_gradient() -> None:
    predicted = row([0.0, 0.0]).requires_grad_()
    weights = weights_of([[[True, False]]])
    loss = weighted_error(predicted, row([1.0, math.nan]), weights, "mse") / weights.total
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert loss.item() == 1.0
    assert gradient.flatten().tolist() == [-2.0, 0.0]
    loss = weighted_error(predicted, row([1.0, math.nan]), weights, "mae") / weights.total
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert loss.item() == 1.0
    assert gradient.flatten().tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_label_at_sea_is_not_hidden(kind: Kind) -> None:
    loss = weighted_error(row([0.0, 0.0]), row([1.0, math.nan]), weights_of([[[1, 1]]]), kind)
    assert math.isnan(loss.item())


@pytest.mark.parametrize("kind", KINDS)
def test_two_halves_over_the_global_weight_are_the_whole(kind: Kind) -> None:
    # One wet cell with error 3 in one half, seven with error 1 in the other: not (3 + 1) / 2.
    wet = [[True] + [False] * 7, [False] + [True] * 7]
    errors = [[3.0] + [9.0] * 7, [9.0] + [1.0] * 7]
    halves = [weights_of([[half]]) for half in wet]
    total = halves[0].total + halves[1].total
    assert total == 8
    parts, gradients = [], []
    for weights, error in zip(halves, errors, strict=True):
        predicted = row(error).requires_grad_()
        part = weighted_error(predicted, row([0.0] * 8), weights, kind) / total
        gradients += torch.autograd.grad(part, predicted)
        parts.append(part.item())
    assert sum(parts) == {"mae": (3 + 7) / 8, "mse": 2.0}[kind]
    whole = weights_of([wet])
    predicted = torch.tensor(errors).reshape(1, 1, 1, 2, 8).requires_grad_()
    target = torch.zeros_like(predicted)
    loss = weighted_error(predicted, target, whole, kind) / whole.total
    assert loss.item() == sum(parts)
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert torch.equal(gradient, torch.cat(gradients, dim=3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [True, False])
def test_the_fused_loss_is_the_formula(kind: Kind, weighted: bool) -> None:
    generator = np.random.default_rng(1)
    wet = generator.random((3, 6, 8)) < 0.7
    grid = Grid(np.linspace(75, -75, 6), np.arange(8) * 45.0)
    weights = weights_of(wet.tolist(), grid.cell_area if weighted else None)
    predicted, target = random_pair((2, 2, 3, 6, 8), torch.float64)
    loss = weighted_error(predicted, target, weights, kind)
    (gradient,) = torch.autograd.grad(loss, predicted)
    difference = predicted - target
    error = difference.abs() if kind == "mae" else difference**2
    plain = (error * weights.cell.double()).sum()
    (expected,) = torch.autograd.grad(plain, predicted)
    torch.testing.assert_close(loss, plain, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(kind: Kind) -> None:
    weights = weights_of([[[1, 0, 1], [1, 1, 0]]], np.array([[1.0, 2, 3], [4, 5, 6]]))
    predicted, target = random_pair((2, 1, 1, 2, 3), torch.float64)
    assert torch.autograd.gradcheck(lambda p: weighted_error(p, target, weights, kind), predicted)


def test_mean_absolute_error_keeps_one_byte_a_value_for_the_backward_pass() -> None:
    weights = weights_of(np.ones((4, 16, 32)).tolist())
    predicted, target = random_pair((3, 2, 4, 16, 32), torch.float32)
    loss = weighted_errors(predicted, target, weights, "mae")
    kept = [t for t in loss.grad_fn.saved_tensors if t is not weights.cell]  # type: ignore[union-attr]
    own = [t for t in kept if t.data_ptr() != weights.cell.data_ptr()]
    assert sum(t.untyped_storage().nbytes() for t in own) == predicted.numel()
    assert {t.dtype for t in own} == {torch.int8}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_gradient_is_the_same_number(kind: Kind) -> None:
    weights = weights_of([[[1, 0, 1], [1, 1, 0]]])
    predicted, target = random_pair((2, 1, 1, 2, 3), torch.float32)
    with torch.no_grad():
        without = weighted_error(predicted, target, weights, kind)
    assert without.item() == weighted_error(predicted, target, weights, kind).item()
    assert not without.requires_grad


def test_large_grids_do_not_lose_digits() -> None:
    # Added up one after the other in float32, two million tenths make 202,100, not 209,715.2.
    height, width = 1024, 2048
    weights = weights_of(np.ones((1, height, width)).tolist())
    predicted = torch.full((1, 1, 1, height, width), 0.1)
    total = weighted_error(predicted, torch.zeros_like(predicted), weights, "mae")
    exact = float(np.float32(0.1)) * height * width
    assert total.item() == pytest.approx(exact, rel=1e-9)
    assert total.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_difference_of_half_precision_fields_is_formed_in_float32(dtype: torch.dtype) -> None:
    predicted = row([1.0], dtype).requires_grad_()
    target = row([1.0 + 2.0**-12])
    loss = weighted_error(predicted, target, weights_of([[[1]]]), "mae")
    assert loss.item() == 2.0**-12
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert gradient.dtype == dtype
    assert gradient.item() == -1


def test_an_error_of_two_everywhere_is_a_loss_of_two_poles_included() -> None:
    for lat in (np.linspace(90, -90, 19), np.linspace(85, -85, 18)):
        grid = Grid(lat, np.arange(36) * 10.0)
        weights = LossWeights.of(np.ones((2, *grid.shape), dtype=bool), grid.cell_area)
        assert (weights.cell > 0).all()
        target = torch.zeros(1, 1, 2, *grid.shape)
        for kind, loss in (("mae", 2.0), ("mse", 4.0)):
            error = weighted_error(target + 2, target, weights, kind)  # type: ignore[arg-type]
            assert (error / weights.total).item() == pytest.approx(loss, rel=1e-7)


def test_the_total_is_the_sum_of_the_weights_in_use() -> None:
    grid = Grid(np.linspace(75, -75, 6), np.arange(8) * 45.0)
    wet = np.ones((2, 6, 8), dtype=bool)
    wet[1, :3] = False
    weights = LossWeights.of(wet, grid.cell_area)
    assert weights.total == pytest.approx(math.fsum(weights.cell.flatten().tolist()), rel=1e-15)
    assert weights.total == pytest.approx(48 * 1.5, rel=1e-6)
    assert torch.equal(weights.wet, torch.from_numpy(wet))


def test_nothing_wet_is_refused() -> None:
    with pytest.raises(ValueError, match="no predicted channel has a wet cell"):
        weights_of([[[0, 0]]])


def test_areas_that_are_not_positive_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive, the least is -1"):
        weights_of([[[1, 1]]], np.array([[-1.0, 3.0]]))


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"predicted \(1, 1, 1, 1, 2\), target \(1, 1, 1, 1, 3\)"):
        weighted_error(row([0, 0]), row([0, 0, 0]), weights_of([[[1, 1]]]), "mae")
