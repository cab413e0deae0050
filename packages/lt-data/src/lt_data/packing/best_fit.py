"""Best-fit decreasing bin packing on a histogram, for millions of items in seconds.

The plain algorithm takes the items longest first and puts each into the bin with the smallest sufficient space, or into
a new bin if there is none. Items of equal size are interchangeable, as are bins of equal space, and a bin that took an
item of size s remains the best fit for that size until its space is below s. So whole groups are placed at once: every
bin of the smallest sufficient space g takes `g // s` items, the last one perhaps fewer. The resulting spaces are those
of the plain algorithm. Cost: two stable sorts and O(items) copying, plus one small step per (size, space) pair that
occurs, in practice a few per distinct size.
"""

from bisect import bisect_left, insort
from collections import deque

import numpy as np


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items into bins of equal capacity by best-fit decreasing.

    Args:
        sizes: size of each item, integers from 1 to `capacity`.
        capacity: size of each bin.

    Returns:
        `order`, the item indices (int64), longest first, equal sizes in the given order, and `bins`, the bin (int64) of
        each item in that order. Bins are numbered in the order of opening, from 0.
    """
    assert sizes.size == 0 or (sizes.min() >= 1 and sizes.max() <= capacity)
    # 16-bit keys are radix sorted, in linear time
    key_type = np.uint16 if capacity < 2**16 else np.uint32
    order = np.argsort((capacity - sizes).astype(key_type), kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    bins = np.empty(sizes.size, np.int64)
    groups = _BinGroups()
    n_bins = 0
    n_placed = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[size])
        while remaining:
            space = groups.smallest_at_least(size)
            if space is None:
                space = capacity
                n_new = -(-remaining // (space // size))
                taken = np.arange(n_bins, n_bins + n_new)
                n_bins += n_new
            else:
                taken = groups.pop(space, -(-remaining // (space // size)))
            per_bin = space // size
            placed = min(remaining, taken.size * per_bin)
            bins[n_placed : n_placed + placed] = np.repeat(taken, per_bin)[:placed]
            full, rest = divmod(placed, per_bin)
            groups.push(space - per_bin * size, taken[:full])
            groups.push(space - rest * size, taken[full : full + 1])
            n_placed += placed
            remaining -= placed
    return order, bins


class _BinGroups:
    """Open bins grouped by remaining space; full bins are discarded."""

    def __init__(self) -> None:
        self._spaces: list[int] = []  # sorted
        self._bins: dict[int, deque[np.ndarray]] = {}

    def smallest_at_least(self, size: int) -> int | None:
        """Return the smallest space of at least `size`, or None."""
        index = bisect_left(self._spaces, size)
        return self._spaces[index] if index < len(self._spaces) else None

    def push(self, space: int, bins: np.ndarray) -> None:
        if space == 0 or bins.size == 0:
            return
        if space not in self._bins:
            insort(self._spaces, space)
            self._bins[space] = deque()
        self._bins[space].append(bins)

    def pop(self, space: int, max_bins: int) -> np.ndarray:
        """Remove and return up to `max_bins` bins of a space, first in, first out."""
        queue = self._bins[space]
        parts: list[np.ndarray] = []
        while queue and max_bins:
            part = queue.popleft()
            if part.size > max_bins:
                queue.appendleft(part[max_bins:])
                part = part[:max_bins]
            parts.append(part)
            max_bins -= part.size
        if not queue:
            del self._bins[space]
            del self._spaces[bisect_left(self._spaces, space)]
        return np.concatenate(parts)
