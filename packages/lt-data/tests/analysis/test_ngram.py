import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_data import IGNORE_INDEX, NgramCounts, Rows

VOCAB = 5


def rows_of(pairs: list[tuple[int, int]]) -> Rows:
    """One row with the given (input, label) pairs and a position without a label at its end."""
    inputs = np.array([[x for x, _ in pairs] + [0]], np.int32)
    labels = np.array([[y for _, y in pairs] + [IGNORE_INDEX]], np.int32)
    return Rows(inputs, labels, np.zeros_like(inputs), np.zeros_like(inputs))


PAIRS = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1)), min_size=1, max_size=40)


@given(st.lists(PAIRS, max_size=4), PAIRS, st.sampled_from([0.001, 0.5, 3.0]))
def test_against_the_formulas(
    training: list[list[tuple[int, int]]], evaluation: list[tuple[int, int]], k: float
) -> None:
    counts = NgramCounts(VOCAB)
    for pairs in training:
        counts.add(rows_of(pairs))
    seen = [pair for pairs in training for pair in pairs]
    pair_count, label_count = Counter(seen), Counter(y for _, y in seen)
    context_count = Counter(x for x, _ in seen)
    unigram = [(label_count[y] + k) / (len(seen) + k * VOCAB) for _, y in evaluation]
    bigram = [(pair_count[x, y] + k) / (context_count[x] + k * VOCAB) for x, y in evaluation]
    assert counts.n_pairs == len(seen)
    half = len(evaluation) // 2
    parts = [rows_of(evaluation[:half]), rows_of(evaluation[half:])]
    for order, probabilities in ((1, unigram), (2, bigram)):
        expected = -sum(map(math.log, probabilities)) / len(evaluation)
        assert counts.nats_per_token(parts, order, k) == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one() -> None:
    counts = NgramCounts(VOCAB)
    counts.add(rows_of([(0, 1), (1, 2), (0, 1), (3, 0)]))
    for order in (1, 2):
        for context in range(VOCAB):
            losses = [counts.nats_per_token([rows_of([(context, y)])], order, 0.3) for y in range(VOCAB)]
            assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1, rel=1e-12)


def test_counting_in_parts_and_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = [rows_of(rng.integers(0, VOCAB, (30, 2)).tolist()) for _ in range(10)]
    whole, parts = NgramCounts(VOCAB), NgramCounts(VOCAB)
    for row in rows:
        whole.add(row)
    monkeypatch.setattr("lt_data.analysis.ngram._MERGE_AT", 50)
    for row in rows:
        parts.add(row)
    assert whole.nats_per_token(rows, 2, 0.1) == parts.nats_per_token(rows, 2, 0.1)


def test_best_k() -> None:
    counts = NgramCounts(VOCAB)
    counts.add(rows_of([(0, 1)] * 99 + [(0, 2)]))
    evaluation = [rows_of([(0, 1)] * 9 + [(0, 3)])]
    grid = (10.0, 1.0, 0.1)
    losses = {k: counts.nats_per_token(evaluation, 2, k) for k in grid}
    k, nats = counts.find_best_k(evaluation, 2, grid)
    assert nats == min(losses.values()) == losses[k]


def test_without_smoothing_the_unseen_costs_infinity() -> None:
    counts = NgramCounts(VOCAB)
    counts.add(rows_of([(0, 1), (0, 1)]))
    assert counts.nats_per_token([rows_of([(0, 1)])], 2, 0) == 0
    for pair in ((0, 2), (4, 1)):
        assert counts.nats_per_token([rows_of([pair])], 2, 0) == math.inf


def test_large_vocabulary_stays_sparse() -> None:
    counts = NgramCounts(200_000)
    counts.add(rows_of([(199_999, 199_998), (199_999, 5)]))
    assert counts.nats_per_token([rows_of([(199_999, 5)])], 2, 1e-9) == pytest.approx(math.log(2), rel=1e-3)


def test_no_labels() -> None:
    with pytest.raises(ValueError, match="no label"):
        NgramCounts(VOCAB).nats_per_token([rows_of([])], 1, 1.0)
