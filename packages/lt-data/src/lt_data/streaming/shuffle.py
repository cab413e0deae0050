"""Row order: each epoch is shuffled by its own keyed permutation, which is computed, not stored.

Position p of the endless sequence is row perm(key, p // n)(p % n) of n rows. Positions are independent of each other,
so starting at the millionth step costs as much as starting at the first. Cost: O(1) memory, 0.2 microseconds per
position.
"""

import numpy as np

from lt_data.streaming.permutation import KeyedPermutation


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
    if key is None or not positions.size:
        return rest
    boundaries = np.flatnonzero(np.diff(epochs)) + 1
    parts = np.split(rest, boundaries)
    part_epochs = epochs[np.concatenate([[0], boundaries])].tolist()
    return np.concatenate(
        [
            KeyedPermutation(n_rows, f"{key}/{epoch}".encode())(part)
            for epoch, part in zip(part_epochs, parts, strict=True)
        ]
    )
