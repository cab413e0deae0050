"""Unigram and bigram baselines with add-k smoothing, as reference losses for a model.

    unigram  p(y)     = (c(y) + k) / (N + k V)
    bigram   p(y | x) = (c(x, y) + k) / (c(x) + k V)

over the (input, label) pairs of training rows, V the vocabulary size. Counts are sparse, with sorted keys x V + y, so
any vocabulary works; memory and time depend on the number of distinct pairs. (Add-k: Chen and Goodman 1998,
section 2.)
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from lt_data.streaming.rows import IGNORE_INDEX, Rows

Order = Literal[1, 2]
SMOOTHING_GRID = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
_MERGE_AT = 1 << 22  # pending pairs before they are merged into the counts


class NgramCounts:
    """Unigram and bigram counts, and their losses.

    Args:
        vocab_size: vocabulary size V.
    """

    def __init__(self, vocab_size: int) -> None:
        assert 1 <= vocab_size <= 2**31  # a key fits into 62 bits
        self.vocab_size = vocab_size
        self._unigrams = np.zeros(vocab_size, np.int64)  # of labels
        self._contexts = np.zeros(vocab_size, np.int64)  # of inputs with a label
        self._keys = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._pending: list[np.ndarray] = []
        self._n_pending = 0

    @property
    def n_pairs(self) -> int:
        """Number of counted pairs."""
        return int(self._unigrams.sum())

    def add(self, rows: Rows) -> None:
        """Count the (input, label) pairs of rows; positions without a label are ignored."""
        inputs, labels = _pairs(rows)
        self._unigrams += np.bincount(labels, minlength=self.vocab_size)
        self._contexts += np.bincount(inputs, minlength=self.vocab_size)
        self._pending.append(inputs * self.vocab_size + labels)
        self._n_pending += labels.size
        if self._n_pending >= _MERGE_AT:
            self._merge()

    def nats_per_token(self, rows: Iterable[Rows], order: Order, k: float) -> float:
        """Return the mean of -log p over the labels of rows, in nats.

        Args:
            rows: rows to predict.
            order: 1: unigram, 2: bigram.
            k: smoothing constant; with 0 an unseen pair has infinite loss.

        Raises:
            ValueError: the rows have no label.
        """
        return self._loss(self._count_targets(rows, order), k)

    def find_best_k(
        self, rows: Sequence[Rows], order: Order, grid: Sequence[float] = SMOOTHING_GRID
    ) -> tuple[float, float]:
        """Return the k of a grid with the smallest loss on some rows, and that loss in nats per token."""
        targets = self._count_targets(rows, order)
        nats, k = min((self._loss(targets, k), k) for k in grid)
        return k, nats

    def _merge(self) -> None:
        if not self._pending:
            return
        new_keys, new_counts = np.unique(np.concatenate(self._pending), return_counts=True)
        keys, index = np.unique(np.concatenate([self._keys, new_keys]), return_inverse=True)
        counts = np.zeros(keys.size, np.int64)
        counts[index[: self._keys.size]] = self._counts
        counts[index[self._keys.size :]] += new_counts
        self._keys, self._counts = keys, counts
        self._pending, self._n_pending = [], 0

    def _count_targets(self, rows: Iterable[Rows], order: Order) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each distinct target its multiplicity, its count, and the count of its context."""
        pairs = [inputs * self.vocab_size + labels for inputs, labels in map(_pairs, rows)]
        keys, times = np.unique(np.concatenate([np.zeros(0, np.int64), *pairs]), return_counts=True)
        if not keys.size:
            raise ValueError("the rows have no label to predict")
        if order == 1:
            return times, self._unigrams[keys % self.vocab_size], np.full(keys.size, self.n_pairs)
        self._merge()
        counts = np.zeros(keys.size, np.int64)
        if self._keys.size:
            index = np.minimum(np.searchsorted(self._keys, keys), self._keys.size - 1)
            counts = np.where(self._keys[index] == keys, self._counts[index], 0)
        return times, counts, self._contexts[keys // self.vocab_size]

    def _loss(self, targets: tuple[np.ndarray, np.ndarray, np.ndarray], k: float) -> float:
        times, counts, context = targets
        with np.errstate(divide="ignore", invalid="ignore"):
            nats = np.log(context + k * self.vocab_size) - np.log(counts + k)
        nats[(counts == 0) & (k == 0)] = np.inf
        return float((nats * times).sum() / times.sum())


def _pairs(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    has_label = rows.labels != IGNORE_INDEX
    return rows.input_ids[has_label].astype(np.int64), rows.labels[has_label].astype(np.int64)
