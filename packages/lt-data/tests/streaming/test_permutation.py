import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lt_data.streaming.permutation import permute, shuffle_positions


@given(st.integers(1, 3000), st.binary(max_size=20))
def test_is_a_permutation(n, key):
    images = permute(np.arange(n), n, key)
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(n))
    some = np.arange(n)[:: max(1, n // 7)]
    assert np.array_equal(permute(some, n, key), images[some]), "any part alone is that of the whole"


@given(st.integers(1, 2**62), st.binary(max_size=20), st.data())
def test_large_n(n, key, data):
    elements = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20, unique=True)), np.int64)
    images = permute(elements, n, key)
    assert images.size == 0 or (images.min() >= 0 and images.max() < n)
    assert len(set(images.tolist())) == elements.size


def test_fixed_values():
    """The order of rows of every run depends on these: they must never change."""
    assert permute(np.arange(10), 10, b"0/0").tolist() == [6, 5, 2, 8, 1, 4, 7, 9, 3, 0]
    images = permute(np.array([0, 1, 10**12 - 1]), 10**12, b"5").tolist()
    assert images == [14571545228, 657642751785, 433155429325]


@given(st.integers(1, 9), st.integers(0, 10**9), st.integers(0, 40), st.none() | st.text(max_size=3))
def test_positions_of_several_epochs(n, first, count, key):
    rows = shuffle_positions(np.arange(first, first + count), n, key).tolist()
    for position, row in zip(range(first, first + count), rows, strict=True):
        epoch, place = divmod(position, n)
        keyed = f"{key}/{epoch}".encode()
        assert row == (place if key is None else permute(np.array([place]), n, keyed)[0])
