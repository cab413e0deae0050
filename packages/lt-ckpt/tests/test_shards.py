import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lt_ckpt import CheckpointError, Shard
from lt_ckpt.shards import find_overlap, find_tiling_error, intersect, is_inside, split_rows

boxes = st.integers(1, 3).flatmap(
    lambda rank: st.lists(
        st.tuples(st.tuples(*[st.integers(0, 4)] * rank), st.tuples(*[st.integers(0, 3)] * rank)), max_size=6
    ).map(lambda found: (rank, found))
)


def mask(box, rank):
    grid = np.zeros((8,) * rank, int)
    grid[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] = 1
    return grid


@given(boxes)
def test_algebra_agrees_with_counting_elements(case):
    rank, found = case
    grids = [mask(box, rank) for box in found]
    for a, grid_a in zip(found, grids, strict=True):
        for b, grid_b in zip(found, grids, strict=True):
            common = intersect(a, b)
            expected = grid_a * grid_b
            got = mask(common, rank) if common else np.zeros_like(expected)
            assert (got == expected).all()
    total = sum(grids, np.zeros((8,) * rank, int))
    clash = find_overlap(found)
    assert (clash is not None) == bool((total > 1).any())
    if clash is not None:
        assert (grids[clash[0]] * grids[clash[1]]).any()


@given(boxes)
@example((2, [((0, 2), (4, 2)), ((0, 0), (1, 2)), ((1, 0), (3, 2)), ((1, 2), (0, 2))]))  # once each, of several boxes
def test_covers_means_each_element_exactly_once(case):
    rank, found = case
    shape = (4,) * rank
    within = [box for box in found if is_inside(box, shape)]
    total = sum((mask(box, rank) for box in within), np.zeros((8,) * rank, int))
    exactly_once = (total[(slice(0, 4),) * rank] == 1).all()
    assert (find_tiling_error(shape, within) == "") == bool(exactly_once)


def test_covers_says_what_is_wrong():
    assert find_tiling_error((4,), [((0,), (2,)), ((2,), (2,))]) == ""
    assert "3 of 4" in find_tiling_error((4,), [((0,), (2,)), ((3,), (1,))])
    assert "overlap" in find_tiling_error((4,), [((0,), (3,)), ((2,), (1,))])
    assert find_tiling_error((4,), []) == "no slice at all"
    assert find_tiling_error((), [((), ())]) == ""
    assert "overlap" in find_tiling_error((), [((), ()), ((), ())])
    assert find_tiling_error((0, 3), [((0, 0), (0, 3))]) == ""


@given(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(1, 50))
def test_row_blocks_tile_in_order(shape, limit):
    found = split_rows(shape, limit)
    order = np.arange(math.prod(shape)).reshape(shape)
    parts = [order[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in found]
    assert (np.concatenate(parts) == order.reshape(-1)).all()
    rows = math.prod(shape[1:])
    assert all(math.prod(box[1]) <= max(limit, rows) for box in found)


def shard(**changes):
    fields = {
        "group": "weights",
        "name": "a",
        "dtype": "F32",
        "global_shape": (4, 2),
        "offset": (1, 0),
        "shape": (2, 2),
        "data": np.zeros(16, np.uint8),
    }
    return Shard(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": (3, 0)}, "does not lie"),
        ({"offset": (-1, 0)}, "does not lie"),
        ({"offset": (0,)}, "does not lie"),
        ({"dtype": "float32"}, "dtype 'float32' is not known"),
        ({"group": "Weights"}, "group must match"),
        ({"group": "../x"}, "group must match"),
        ({"name": "__metadata__"}, "name must be"),
        ({"name": "a#1"}, "name must be"),
        ({"name": ""}, "name must be"),
        ({"data": np.zeros(15, np.uint8)}, "must be 16 contiguous bytes"),
        ({"data": np.zeros((4, 4), np.uint8)}, "must be 16 contiguous bytes"),
        ({"data": np.zeros(4, np.float32)}, "must be 16 contiguous bytes"),
        ({"data": np.zeros(32, np.uint8)[::2]}, "must be 16 contiguous bytes"),
    ],
)
def test_a_wrong_shard_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        shard(**changes)
