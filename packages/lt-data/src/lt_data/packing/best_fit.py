"""Best-fit decreasing on a histogram: which bin each item goes into, for millions of items in seconds.

The plain algorithm takes the items longest first and puts each into the bin with the smallest space that suffices,
opening a new bin when there is none. Items of one size are alike, and so are bins with one space g, and a bin that took
an item of size s is the best fit for the next one of that size until its space is below s. So whole groups move: every
bin of the smallest sufficient space g takes `g // s` items, the last one perhaps fewer. This gives the same spaces as
the plain algorithm. Cost: two stable sorts and O(items) copying, plus one small step for each (size, space) pair that
meets, in practice a few per distinct size.
"""

from bisect import bisect_left, insort
from collections import deque

import numpy as np


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items into bins of equal capacity by best-fit decreasing.

    Args:
        sizes: size of each item, integers from 1 to `capacity`.
        capacity: of each bin.

    Returns:
        `order`, the items (int64 numbers) longest first, equal ones in their given order, and `bins`, the bin (int64)
        of each item in that order. Bins are numbered as they are opened, from 0.
    """
    assert sizes.size == 0 or (sizes.min() >= 1 and sizes.max() <= capacity)
    # Sixteen-bit keys are sorted by radix, in linear time.
    key_type = np.uint16 if capacity < 2**16 else np.uint32
    order = np.argsort((capacity - sizes).astype(key_type), kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    bins = np.empty(sizes.size, np.int64)
    groups = _Groups()
    n_bins = 0
    done = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[size])
        while remaining:
            space = groups.smallest(size)
            if space is None:
                space = capacity
                wanted = -(-remaining // (space // size))
                taken = np.arange(n_bins, n_bins + wanted)
                n_bins += wanted
            else:
                taken = groups.take(space, -(-remaining // (space // size)))
            each = space // size
            placed = min(remaining, taken.size * each)
            bins[done : done + placed] = np.repeat(taken, each)[:placed]
            full, rest = divmod(placed, each)
            groups.put(space - each * size, taken[:full])
            groups.put(space - rest * size, taken[full : full + 1])
            done += placed
            remaining -= placed
    return order, bins


class _Groups:
    """Bins by the space they have left; those without space are forgotten."""

    def __init__(self) -> None:
        self._spaces: list[int] = []  # sorted
        self._bins: dict[int, deque[np.ndarray]] = {}

    def smallest(self, least: int) -> int | None:
        """The smallest space that is at least `least`."""
        index = bisect_left(self._spaces, least)
        return self._spaces[index] if index < len(self._spaces) else None

    def put(self, space: int, bins: np.ndarray) -> None:
        if space == 0 or bins.size == 0:
            return
        if space not in self._bins:
            insort(self._spaces, space)
            self._bins[space] = deque()
        self._bins[space].append(bins)

    def take(self, space: int, at_most: int) -> np.ndarray:
        """Remove up to that many bins of a space, those that came first."""
        waiting = self._bins[space]
        parts: list[np.ndarray] = []
        while waiting and at_most:
            part = waiting.popleft()
            if part.size > at_most:
                waiting.appendleft(part[at_most:])
                part = part[:at_most]
            parts.append(part)
            at_most -= part.size
        if not waiting:
            del self._bins[space]
            del self._spaces[bisect_left(self._spaces, space)]
        return np.concatenate(parts)
