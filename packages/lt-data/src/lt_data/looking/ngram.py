"""Unigram and bigram baselines with add-k smoothing: what a model has to beat to have learnt anything.

    unigram  p(y)     = (c(y) + k) / (N + k V)
    bigram   p(y | x) = (c(x, y) + k) / (c(x) + k V)

over the (input, label) pairs of training rows, V the vocabulary. Counts are kept sparse, as sorted keys x V + y, so any
vocabulary works; memory and time follow the number of distinct pairs. (Chen and Goodman 1998, section 2, for add-k.)
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from lt_data.streaming.rows import IGNORE, Rows

Order = Literal[1, 2]
GRID = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
_MERGE_AT = 1 << 22  # pairs waiting to be sorted into the counts


class NgramCounts:
    """Counts of tokens and of pairs of tokens, and the losses that they give.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        assert 1 <= vocab_size <= 2**31  # a key fits into 62 bits
        self.vocab_size = vocab_size
        self._unigrams = np.zeros(vocab_size, np.int64)  # of labels
        self._contexts = np.zeros(vocab_size, np.int64)  # of inputs that have a label
        self._keys = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._waiting: list[np.ndarray] = []
        self._n_waiting = 0

    @property
    def n_pairs(self) -> int:
        """Pairs counted so far."""
        return int(self._unigrams.sum())

    def add(self, rows: Rows) -> None:
        """Count the (input, label) pairs of some rows; positions without a label are left out."""
        inputs, labels = _pairs(rows)
        self._unigrams += np.bincount(labels, minlength=self.vocab_size)
        self._contexts += np.bincount(inputs, minlength=self.vocab_size)
        self._waiting.append(inputs * self.vocab_size + labels)
        self._n_waiting += labels.size
        if self._n_waiting >= _MERGE_AT:
            self._merge()

    def nats_per_token(self, rows: Iterable[Rows], order: Order, k: float) -> float:
        """Mean of -log p over the labels of some rows.

        Args:
            rows: what to predict.
            order: 1 unigram, 2 bigram.
            k: added to every count; with 0 a pair never seen costs infinity.

        Raises:
            ValueError: the rows have no label.
        """
        return self._loss(self._evaluation(rows, order), k)

    def best(self, evaluation: Sequence[Rows], order: Order, grid: Sequence[float] = GRID) -> tuple[float, float]:
        """The k of a grid with the smallest loss on some rows, and that loss in nats per token."""
        counted = self._evaluation(evaluation, order)
        nats, k = min((self._loss(counted, k), k) for k in grid)
        return k, nats

    def _merge(self) -> None:
        if not self._waiting:
            return
        new_keys, new_counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        keys, where = np.unique(np.concatenate([self._keys, new_keys]), return_inverse=True)
        counts = np.zeros(keys.size, np.int64)
        counts[where[: self._keys.size]] = self._counts
        counts[where[self._keys.size :]] += new_counts
        self._keys, self._counts = keys, counts
        self._waiting, self._n_waiting = [], 0

    def _evaluation(self, rows: Iterable[Rows], order: Order) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each distinct thing to predict: how often, its count in training, and that of its context."""
        pairs = [inputs * self.vocab_size + labels for inputs, labels in map(_pairs, rows)]
        keys, times = np.unique(np.concatenate([np.zeros(0, np.int64), *pairs]), return_counts=True)
        if not keys.size:
            raise ValueError("the rows have no label to predict")
        if order == 1:
            return times, self._unigrams[keys % self.vocab_size], np.full(keys.size, self.n_pairs)
        self._merge()
        counts = np.zeros(keys.size, np.int64)
        if self._keys.size:
            place = np.minimum(np.searchsorted(self._keys, keys), self._keys.size - 1)
            counts = np.where(self._keys[place] == keys, self._counts[place], 0)
        return times, counts, self._contexts[keys // self.vocab_size]

    def _loss(self, counted: tuple[np.ndarray, np.ndarray, np.ndarray], k: float) -> float:
        times, counts, context = counted
        with np.errstate(divide="ignore", invalid="ignore"):
            nats = np.log(context + k * self.vocab_size) - np.log(counts + k)
        nats[(counts == 0) & (k == 0)] = np.inf
        return float((nats * times).sum() / times.sum())


def _pairs(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    has_label = rows.labels != IGNORE
    return rows.input_ids[has_label].astype(np.int64), rows.labels[has_label].astype(np.int64)
