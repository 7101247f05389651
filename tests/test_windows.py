"""Pads and windows: where every token goes, and back."""

import numpy as np
import pytest
import torch

from graticule.model.pad import ConvPad, FieldPad, reach
from graticule.model.windows import (
    Attend,
    Enter,
    Leave,
    Shift,
    Unshift,
    WindowGrid,
    WindowMask,
)  # fmt: skip

GRIDS = [
    WindowGrid((8, 12), (8, 12), (4, 4), "globe"),
    WindowGrid((7, 12), (8, 12), (4, 3), "globe"),
    WindowGrid((5, 15), (15, 15), (5, 3), "globe"),
    WindowGrid((6, 10), (6, 10), (3, 5), "paper"),
    WindowGrid((4, 4), (4, 4), (4, 4), "globe"),
    WindowGrid((1, 3), (1, 3), (1, 1), "globe"),
]


@pytest.mark.parametrize("grid", GRIDS)
def test_leave_undoes_enter_and_unshift_undoes_shift(grid):
    x = torch.randn(2, 3, *grid.tokens, dtype=torch.float64)
    windows = Enter(grid)(x)
    assert windows.shape == (2 * grid.num_windows, grid.window_tokens, 3)
    assert torch.equal(Leave(grid)(windows), x)
    assert torch.equal(Unshift(grid)(Shift(grid)(windows)), windows)


@pytest.mark.parametrize("grid", GRIDS)
def test_shifted_windows_hold_the_rolled_field(grid):
    field = torch.randn(2, *grid.padded, 3, dtype=torch.float64)
    full = WindowGrid(grid.padded, grid.padded, grid.window, grid.boundary)
    down, right = grid.offset
    rolled = torch.roll(field, (-down, -right), dims=(1, 2))
    want = Enter(full)(rolled.permute(0, 3, 1, 2))
    assert torch.equal(Shift(grid)(Enter(full)(field.permute(0, 3, 1, 2))), want)


@pytest.mark.parametrize("make", [Shift, Unshift])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_gradient_of_a_shift_is_its_adjoint(make, grid):
    shift = make(grid)
    shape = (2 * grid.num_windows, grid.window_tokens, 3)
    x, y = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    moved = shift(x)
    moved.backward(y)
    torch.testing.assert_close((moved * y).sum(), (x * x.grad).sum(), rtol=1e-13, atol=0)


def test_a_gradient_of_the_gradient_of_a_shift_exists():
    grid = GRIDS[1]
    x = torch.randn(grid.num_windows, grid.window_tokens, 1, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(Shift(grid), x.requires_grad_())


def test_attention_equals_attention_over_the_whole_field_with_the_regions_as_mask():
    grid = GRIDS[1]
    q, k, v = (torch.randn(2 * 8, 12, 2, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 12, 12, dtype=torch.float64)
    for shifted in (False, True):
        got = Attend()(q, k, v, bias, WindowMask(grid, shifted))
        regions = torch.from_numpy(grid.regions(shifted)).repeat(2, 1)
        scores = torch.einsum("wqhd,wkhd->whqk", q, k) / 2 + bias
        scores = scores.masked_fill((regions[:, :, None] != regions[:, None])[:, None], -torch.inf)
        want = torch.einsum("whqk,wkhd->wqhd", scores.softmax(-1), v).flatten(2)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_windows_that_are_alike_share_one_mask_in_any_order():
    grid = GRIDS[3]
    q, k, v = (torch.randn(3 * 4, 15, 2, 4, dtype=torch.float64) for _ in range(3))
    mask = WindowMask(grid, shifted=True)
    assert len(mask.windows) == 4
    whole = Attend()(q, k, v, None, mask)
    regions = torch.from_numpy(grid.regions(True)).repeat(3, 1)
    scores = torch.einsum("wqhd,wkhd->whqk", q, k) / 2
    scores = scores - 100.0 * (regions[:, :, None] != regions[:, None])[:, None]
    want = torch.einsum("whqk,wkhd->wqhd", scores.softmax(-1), v).flatten(2)
    torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-13)


def test_longitude_is_one_region_and_the_meeting_poles_are_two():
    regions = GRIDS[0].regions(shifted=True)
    # Six windows, the last three hold the seam: two rows from the south, two from the north.
    assert (regions[:3] == 0).all()
    assert [sorted(set(window)) for window in regions[3:].tolist()] == [[0, 1]] * 3


def test_the_relative_position_index_counts_displacements():
    index = WindowGrid((4, 6), (4, 6), (2, 3), "globe").bias_index
    assert index.shape == (6, 6)
    assert len(np.unique(index)) == 3 * 5
    assert (np.diag(index) == (2 - 1) * 5 + 2).all()
    assert index[0, 1] == index[1, 2] == index[3, 4]
    assert index[1, 0] != index[0, 1]


@pytest.mark.parametrize("size", [4, 5, 8, 9])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (5, 1, 2)])
def test_only_rows_that_are_read_are_padded(size, kernel, stride, dilation):
    before, after = reach(size, kernel, stride, dilation)
    outputs = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
    assert outputs == -(-size // stride)
    read = {stride * i + dilation * j for i in range(outputs) for j in range(kernel)}
    if after:
        assert size + before + after - 1 in read
    assert min(read) == 0


def test_a_stride_two_convolution_reads_one_row_from_above_and_none_from_below():
    assert reach(8, 3, 2, 1) == (1, 0)


def test_a_globe_is_padded_by_its_own_columns_and_by_zero_rows():
    x = torch.arange(1.0, 9).view(1, 1, 2, 4)
    padded = ConvPad("globe", (2, 4), kernel=3)(x)[0, 0]
    assert padded.tolist() == [
        [0] * 6, [4, 1, 2, 3, 4, 1], [8, 5, 6, 7, 8, 5], [0] * 6,
    ]  # fmt: skip


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (5, 1, 2)])
@pytest.mark.parametrize("height", [4, 5])
def test_the_gradient_of_a_pad_is_its_adjoint(height, kernel, stride, dilation):
    pad = ConvPad("globe", (height, 6), kernel=kernel, stride=stride, dilation=dilation)
    x = torch.randn(2, 3, height, 6, dtype=torch.float64, requires_grad=True)
    padded = pad(x)
    y = torch.randn_like(padded)
    padded.backward(y)
    torch.testing.assert_close((padded * y).sum(), (x * x.grad).sum(), rtol=1e-13, atol=0)


def test_a_kernel_wider_than_the_circle_is_refused():
    with pytest.raises(ValueError, match="circle of 4 columns"):
        ConvPad("globe", (4, 4), kernel=11)


def test_the_published_field_is_padded_on_all_sides_with_the_smaller_half_first():
    pad = FieldPad("paper", (5, 7), (8, 8))
    x = torch.ones(1, 1, 5, 7)
    padded = pad(x)
    assert padded.shape == (1, 1, 8, 8)
    assert padded[0, 0].nonzero().amin(0).tolist() == [1, 0]
    assert torch.equal(pad.crop(padded), x)
