"""The order of rows: epoch after epoch, each by its own keyed permutation, at any positions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lt_data import KeyedPermutation
from lt_data.streaming.shuffle import shuffle_positions


@given(st.integers(1, 20), st.integers(0, 10**12), st.integers(0, 70), st.booleans())
def test_positions_are_epochs_of_the_keyed_permutation(n_rows: int, first: int, count: int, shuffle: bool) -> None:
    positions = np.arange(first, first + count)
    found = shuffle_positions(positions, n_rows, "7/web" if shuffle else None)
    assert found.dtype == np.int64
    for position, row in zip(positions.tolist(), found.tolist(), strict=True):
        epoch, place = divmod(position, n_rows)
        permutation = KeyedPermutation(n_rows, f"7/web/{epoch}".encode())
        assert row == (int(permutation(np.array([place]))[0]) if shuffle else place)


def test_positions_may_have_gaps() -> None:
    whole = shuffle_positions(np.arange(100), 9, "k")
    some = np.array([0, 8, 9, 30, 31, 63, 99])
    assert shuffle_positions(some, 9, "k").tolist() == whole[some].tolist()


def test_each_epoch_has_every_row_once_and_its_own_order() -> None:
    epochs = shuffle_positions(np.arange(60), 20, "k").reshape(3, 20)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(20), (3, 1)))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
