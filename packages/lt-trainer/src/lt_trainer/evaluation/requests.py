"""Scores of continuations, packed into rows of one shape and equally many batches on each rank.

A request is a context and a continuation; its score is the sum of the log-probabilities of the continuation's tokens
and whether each of them is the greedy choice. A sequence that does not fit a row loses the beginning of its context.
Sequences share rows as documents do in training (best-fit decreasing, by length), so every batch has the one shape
[1, B, T] and padding is small; without a document mask each has a row of its own. All ranks pack the same rows. Row r
belongs to data-parallel rank r % dp_size, and batches are padded with rows without labels, so that all ranks make
equally many calls. Ranks that share rows report different positions: their sums are added at the end.

Cost: forward passes over the packed rows; one exchange of four numbers per request at the end.

Shapes: B rows of a micro-batch, T positions of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lt_data import IGNORE_INDEX, Rows
from lt_data.packing.best_fit import best_fit
from lt_trainer.data.training_data import to_micro_batches, validation_rows
from lt_trainer.engine import StepBatch
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, Scorer


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Context and continuation as token ids, at least one each."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """Score of a continuation: log-probability in nats, and whether greedy decoding gives it."""

    log_prob: float
    is_greedy: bool


def score_requests(
    scorer: Scorer,
    requests: Sequence[ScoreRequest],
    shape: BatchShape,
    *,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> list[Score]:
    """Return the score of each request, equal on all ranks; collective.

    Args:
        scorer: the model.
        requests: the same on all ranks.
        shape: rows of a batch.
        on_batch: told of this rank's batches, done and in all.

    Raises:
        EvaluationError: a continuation has no token, or does not fit a row.
    """
    for number, one in enumerate(requests):
        if not 0 < len(one.continuation) <= shape.seq_len or not one.context:
            raise EvaluationError(
                f"text {number} of a task has {len(one.context)} tokens to condition on and {len(one.continuation)} to "
                f"score; rows have {shape.seq_len} tokens: shorten it, or raise the row length"
            )
    rows = _pack(requests, shape)
    n_segments = 1 << max(len(row) for row in rows).bit_length() if rows and shape.document_mask else 1
    topology, found = scorer.topology, []
    n_batches = -(-len(rows) // (shape.micro_batch_size * topology.dp_size))
    for done, numbers in enumerate(validation_rows(len(rows), topology, shape.micro_batch_size), start=1):
        batch, spans = _batch(requests, [rows[number] for number in numbers], shape, n_segments)
        scores = scorer.score(batch)
        for row, begin, end, request in spans:
            reported = scores.is_reported[0, row, begin:end]
            if reported.any():
                log_prob = math.fsum(scores.log_probs[0, row, begin:end][reported])
                n_greedy = int(scores.is_greedy[0, row, begin:end].sum())
                found.append([request, log_prob, n_greedy, int(reported.sum())])
        on_batch(done, n_batches)
    parts: list[list[list[float]]] = [[] for _ in requests]
    for request, *numbers in (one for rank in scorer.control.all_gather(found) for one in rank):
        parts[request].append(numbers)
    return [_join(given, len(request.continuation)) for given, request in zip(parts, requests, strict=True)]


def _join(parts: list[list[float]], n_labels: int) -> Score:
    """Return the score that the parts of several ranks make up."""
    assert sum(n for _, _, n in parts) == n_labels, "a label that no rank or more than one has reported"
    return Score(math.fsum(log_prob for log_prob, _, _ in parts), sum(n for _, n, _ in parts) == n_labels)


def _pack(requests: Sequence[ScoreRequest], shape: BatchShape) -> list[list[int]]:
    """Return the requests of each row, long ones first."""
    if not requests:
        return []
    lengths = [min(len(one.context) + len(one.continuation) - 1, shape.seq_len) for one in requests]
    order, bins = best_fit(np.array(lengths), shape.seq_len)
    if not shape.document_mask:
        return [[int(request)] for request in order]
    rows: list[list[int]] = [[] for _ in range(int(bins.max()) + 1)]
    for request, number in zip(order.tolist(), bins.tolist(), strict=True):
        rows[number].append(request)
    return rows


def _batch(
    requests: Sequence[ScoreRequest], rows: Sequence[Sequence[int]], shape: BatchShape, n_segments: int
) -> tuple[StepBatch, list[tuple[int, int, int, int]]]:
    """Return rows of requests as a batch, and row, begin, end and request of each run of labels."""
    size = (shape.micro_batch_size, shape.seq_len)
    ids, labels = np.zeros(size, np.int32), np.full(size, IGNORE_INDEX, np.int32)
    positions, doc_ids = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    starts: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    for row in range(shape.micro_batch_size):
        begin = 0
        for number, request in enumerate(rows[row] if row < len(rows) else ()):
            one = requests[request]
            tokens = np.array((one.context + one.continuation)[-(shape.seq_len + 1) :], np.int32)
            end, n_labels = begin + tokens.size - 1, len(one.continuation)
            ids[row, begin:end], positions[row, begin:end], doc_ids[row, begin:end] = (
                tokens[:-1],
                np.arange(tokens.size - 1),
                number,
            )
            labels[row, end - n_labels : end] = tokens[-n_labels:]
            starts.append(row * shape.seq_len + begin)
            spans.append((row, end - n_labels, end, request))
            begin = end
        if begin < shape.seq_len:
            starts.append(row * shape.seq_len + begin)
    if not shape.document_mask:
        doc_ids[:] = 0
        positions[:] = np.arange(shape.seq_len)
        starts = [row * shape.seq_len for row in range(shape.micro_batch_size)]
    batch = to_micro_batches(
        Rows(ids, labels, positions, doc_ids),
        np.array(starts),
        n_segments,
        micro_batch_size=shape.micro_batch_size,
        valid_tokens=int((labels != IGNORE_INDEX).sum()),
    )
    return batch, spans
