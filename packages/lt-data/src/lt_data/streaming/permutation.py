"""Row order: each epoch is shuffled by its own keyed permutation, which is computed, not stored.

Position p of the endless sequence is row perm(key, p // n)(p % n) of n rows. Positions are independent of each other,
so starting at the millionth step costs as much as starting at the first.

A balanced Feistel network permutes the smallest domain of 2k-bit numbers that contains 0..n-1; an image outside 0..n-1
is permuted again until it is inside (cycle walking), which is still a permutation and takes fewer than four passes on
average, because the domain is smaller than 4 n. The round function is the finalizer of splitmix64 on (half + round
key). Cost: O(1) memory, about 0.2 microseconds per element in numpy. Not cryptographically secure.
"""

import hashlib
import itertools

import numpy as np

_ROUNDS = 8


def permute(elements: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """Return the images of elements under the permutation of 0..n-1 that a key determines.

    Args:
        elements: integers in 0..n-1 (int64 [m]).
        n: size, 1 to 2^62.
        key: any bytes.

    Returns:
        int64 [m].
    """
    assert 1 <= n <= 2**62, n
    assert not elements.size or (elements.min() >= 0 and elements.max() < n), n
    digest = hashlib.shake_256(b"lt-data permutation 1\0" + key).digest(8 * _ROUNDS)
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    half_bits = ((n - 1).bit_length() + 1) // 2  # the domain is 4 ** half_bits
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    result = elements.astype(np.uint64)
    outside = np.arange(elements.size)
    while outside.size:
        left, right = result[outside] >> shift, result[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        result[outside] = (left << shift) | right
        outside = outside[result[outside] >= n]
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014): uint64 to uint64, wrapping."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffle_positions(positions: np.ndarray, n_rows: int, key: str | None) -> np.ndarray:
    """Return the rows at the given positions.

    Args:
        positions: at least 0, in ascending order (int64 [n]).
        n_rows: rows of one epoch.
        key: key of the shuffle; None: the order of the rows, in every epoch.

    Returns:
        int64 [n].
    """
    epochs, rest = np.divmod(positions, n_rows)
    if key is not None:
        starts = np.flatnonzero(np.diff(epochs, prepend=-1)).tolist()
        for start, end in itertools.pairwise([*starts, epochs.size]):
            rest[start:end] = permute(rest[start:end], n_rows, f"{key}/{epochs[start]}".encode())
    return rest
