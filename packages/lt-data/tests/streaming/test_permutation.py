import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import KeyedPermutation


@given(st.integers(1, 3000), st.integers())
def test_is_a_permutation_and_inverts(n: int, key: int) -> None:
    permutation = KeyedPermutation(n, key)
    images = permutation(np.arange(n))
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(n))
    assert np.array_equal(permutation.inverse(images), np.arange(n))


@given(st.integers(1, 2**62), st.binary(max_size=20), st.data())
def test_large_n(n: int, key: bytes, data: st.DataObject) -> None:
    elements = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    permutation = KeyedPermutation(n, key)
    images = permutation(elements)
    assert images.size == 0 or (images.min() >= 0 and images.max() < n)
    assert np.array_equal(permutation.inverse(images), elements)


def test_any_part_alone_equals_the_whole() -> None:
    permutation = KeyedPermutation(1000, b"key")
    whole = permutation(np.arange(1000))
    assert np.array_equal(permutation(np.array([[999, 3], [500, 3]])), whole[[[999, 3], [500, 3]]])


def test_fixed_values() -> None:
    """The order of rows of every run depends on these: they must never change."""
    assert KeyedPermutation(10, b"0/0")(np.arange(10)).tolist() == [6, 5, 2, 8, 1, 4, 7, 9, 3, 0]
    assert KeyedPermutation(10**12, 5)(np.array([0, 1, 10**12 - 1])).tolist() == [
        14571545228,
        657642751785,
        433155429325,
    ]


def test_keys_give_unlike_orders() -> None:
    n = 4096
    orders = [KeyedPermutation(n, key)(np.arange(n)) for key in range(20)]
    same = [int((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]]
    assert max(same) <= 10  # two random orders agree in one place on average


def test_looks_random() -> None:
    n = 100_000
    images = KeyedPermutation(n, 1)(np.arange(n))
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 0.02
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.02
    counts = np.bincount(images[:1000] // (n // 10), minlength=10)
    assert counts.min() > 60
    assert counts.max() < 140


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_bad_size(n: int) -> None:
    with pytest.raises(ValueError, match=f"n = {n}"):
        KeyedPermutation(n, 0)


@pytest.mark.parametrize("element", [-1, 5])
def test_element_outside(element: int) -> None:
    with pytest.raises(IndexError, match=r"outside 0\.\.4"):
        KeyedPermutation(5, 0)(np.array([element]))
