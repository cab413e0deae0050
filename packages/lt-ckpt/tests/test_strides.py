import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_ckpt import CheckpointError
from lt_ckpt.copy_plan import StoredSlice, plan_copies, run_copies
from lt_ckpt.torchfile.strides import locate_view

BEGIN = 1000


def read(held, storage):
    """Reads a view as the planner does, from a file that ends with the storage; None: not in there."""
    shape = held.spec.shape
    zeros = (0,) * len(shape)
    stored = StoredSlice(
        file="f",
        byte_offset=held.byte_offset,
        offset=zeros,
        shape=shape,
        array_shape=held.array_shape,
        array_offset=held.array_offset,
        transposed=held.transposed,
    )
    buffer = np.zeros(held.spec.n_bytes, np.uint8)
    raw = storage.tobytes()

    def fill(file, position, into):
        assert file == "f"
        assert 0 <= position - BEGIN <= position - BEGIN + len(into) <= len(raw), "reads outside of the storage"
        into[:] = raw[position - BEGIN : position - BEGIN + len(into)]

    run_copies(plan_copies([((zeros, shape), [stored], 4, "x")]), [buffer], fill)
    return buffer.view("<u4").reshape(shape)


@settings(max_examples=500, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(0, 20),
    st.lists(st.integers(0, 6), max_size=3),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_a_view_is_refused_or_read_exactly(n_items, offset, shape, steps):
    storage = np.arange(n_items, dtype="<u4")
    strides = steps[: len(shape)]
    try:
        held = locate_view("F32", BEGIN, n_items, offset, tuple(shape), tuple(strides))
    except CheckpointError:
        return
    wanted = np.lib.stride_tricks.as_strided(
        np.concatenate([storage, np.zeros(100, "<u4")])[offset:], shape, [4 * s for s in strides]
    )
    assert (read(held, storage) == wanted).all()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 5), st.integers(0, 8), st.booleans(), st.data())
def test_every_slice_of_a_matrix_can_be_read(n_rows, n_columns, first, column, transposed, data):
    """What `whole[a:b, c:d]` and its transpose are: no such view is ever refused."""
    first, column = min(first, n_rows - 1), min(column, n_columns - 1)
    rows, columns = data.draw(st.integers(1, n_rows - first)), data.draw(st.integers(1, n_columns - column))
    storage = np.arange(n_rows * n_columns, dtype="<u4")
    wanted = storage.reshape(n_rows, n_columns)[first : first + rows, column : column + columns]
    turn = -1 if transposed else 1
    shape, strides = wanted.shape[::turn], (n_columns, 1)[::turn]
    held = locate_view("F32", BEGIN, storage.size, first * n_columns + column, shape, strides)
    assert (read(held, storage) == (wanted.T if transposed else wanted)).all()


def test_a_storage_that_ends_with_the_view_can_be_read():
    storage = np.arange(13, dtype="<u4")
    assert read(locate_view("F32", BEGIN, 13, 7, (2, 2), (4, 1)), storage).tolist() == [[7, 8], [11, 12]]
    assert read(locate_view("F32", BEGIN, 13, 7, (2, 2), (1, 4)), storage).tolist() == [[7, 11], [8, 12]]
    with pytest.raises(CheckpointError, match="cannot be read"):  # whole rows of 5 would reach out of it at both ends
        locate_view("F32", BEGIN, 13, 1, (3, 2), (5, 1))


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "message"),
    [
        (0, (13,), (1,), "element 12 lies outside of its storage of 12"),
        (7, (2, 3), (3, 1), "element 12 lies outside"),
        (12, (), (), "element 12 lies outside"),
        (0, (2**62, 2**62), (2**62, 1), "lies outside"),
        (-1, (2,), (1,), "are not those of a tensor"),
        (0, (-2,), (1,), "are not those of a tensor"),
        (0, (2,), (-1,), "are not those of a tensor"),
        (0, (2,), (1, 1), "are not those of a tensor"),
        (0, (1,) * 65, (1,) * 65, "are not those of a tensor"),
        (0, (3,), (2,), r"strides \[2\].*contiguous"),
        (0, (3, 3), (0, 1), r"strides \[0, 1\]"),
        (0, (3,), (0,), r"strides \[0\]"),
        (0, (3, 3), (1, 1), r"strides \[1, 1\]"),
        (0, (2, 2), (4, 2), r"strides \[4, 2\]"),
        (0, (2, 2, 2), (2, 4, 1), r"strides \[2, 4, 1\]"),
    ],
)
def test_what_is_no_box_is_refused(offset, shape, strides, message):
    with pytest.raises(CheckpointError, match=message):
        locate_view("F32", BEGIN, 12, offset, shape, strides)


def test_a_view_without_elements_lies_anywhere():
    assert locate_view("F32", BEGIN, 0, 10**9, (0, 4), (4, 1)).spec.n_bytes == 0
