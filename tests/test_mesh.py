"""Cuts and stripes: every point has one owner, at every scale the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graticule.mesh import Cut, Stripes

BOUNDS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(
    lambda lengths: Cut((0, *np.cumsum(lengths).tolist()))
)


def test_lengths_of_an_even_cut_differ_by_one_at_most():
    assert Cut.even(2041, 8).bounds == (0, 255, 510, 765, 1020, 1275, 1530, 1785, 2041)
    assert Cut.even(3, 5).bounds == (0, 0, 1, 1, 2, 3)


@given(BOUNDS)
def test_every_point_has_the_owner_whose_range_it_is_in(cut):
    owners = cut.owner(np.arange(cut.size))
    for point, owner in enumerate(owners.tolist()):
        held = cut.of(owner)
        assert held.start <= point < held.stop
    assert [int((owners == rank).sum()) for rank in range(cut.ranks)] == [
        cut.length(rank) for rank in range(cut.ranks)
    ]


@given(BOUNDS, st.integers(1, 4))
def test_an_output_of_a_strided_convolution_belongs_to_the_owner_of_its_centre(cut, stride):
    strided = cut.strided(stride)
    centres = np.arange(0, cut.size, stride)
    assert strided.size == centres.size
    assert (strided.owner(np.arange(centres.size)) == cut.owner(centres)).all()


@given(BOUNDS, st.integers(1, 4), st.data())
def test_finer_points_belong_to_the_owner_of_the_coarse_one(cut, factor, data):
    size = data.draw(st.integers(max(cut.size * factor - factor + 1, 0), cut.size * factor))
    finer = cut.finer(factor, size)
    points = np.arange(size)
    assert (finer.owner(points) == cut.owner(points // factor)).all()


@settings(max_examples=200)
@given(
    grid=st.integers(1, 60), patch=st.integers(1, 4), sampling=st.integers(1, 3),
    ranks=st.integers(1, 9), extra=st.integers(0, 20), dim=st.sampled_from(["lat", "lon"]),
)  # fmt: skip
def test_stripes_of_all_scales_fit_together(grid, patch, sampling, ranks, extra, dim):
    start = extra // 2
    field = -(-(grid + extra) // patch) * patch
    patches = field // patch
    tokens = -(-patches // sampling)
    scales = {1: field, patch: patches, patch * sampling: tokens}
    made = [
        Stripes.of(
            {span: (points, points) for span, points in scales.items()},
            grid=(grid, grid), start=(start, start), dim=dim, ranks=ranks, index=index,
        )
        for index in range(ranks)
    ]  # fmt: skip
    held = [stripes.rows if dim == "lat" else stripes.columns for stripes in made]
    assert np.concatenate([np.arange(grid)[part] for part in held]).tolist() == list(range(grid))
    one = made[0]
    for fine, coarse in ((field, patches), (patches, tokens)):
        factor = patch if fine == field and coarse == patches else sampling
        cut = one.at((fine, fine)).strided(factor)
        assert cut == one.at((coarse, coarse))
    lengths = [one.at((tokens, tokens)).length(rank) for rank in range(ranks)]
    assert max(lengths) - min(lengths) <= 1
    everything = made[0].columns if dim == "lat" else made[0].rows
    assert everything == slice(None)


def test_2041_rows_on_8_ranks_need_no_padding_to_2304():
    stripes = [
        Stripes.of(
            {1: (2044, 4320), 4: (511, 1080), 8: (256, 540)},
            grid=(2041, 4320), start=(0, 0), dim="lat", ranks=8, index=index,
        )
        for index in range(8)
    ]  # fmt: skip
    assert [s.rows.stop - s.rows.start for s in stripes] == [256] * 7 + [249]
    with pytest.raises(KeyError):
        stripes[0].at((17, 4320))
