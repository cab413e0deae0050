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

import numpy as np

from lt_data.packing.best_fit import best_fit
from lt_data.streaming.rows import IGNORE_INDEX, Rows
from lt_trainer.data.training_data import to_micro_batches, validation_rows
from lt_trainer.engine import StepBatch
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError, Scorer

ScoreRequest = tuple[Sequence[int], Sequence[int]]
"""Context and continuation as token ids, at least one each."""


def score_requests(
    scorer: Scorer,
    requests: Sequence[ScoreRequest],
    shape: BatchShape,
    *,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[float, bool]]:
    """Return log-probability in nats, and whether greedy decoding gives it, of each continuation; collective.

    Args:
        scorer: the model.
        requests: the same on all ranks.
        shape: rows of a batch.
        on_batch: told of this rank's batches, done and in all.

    Raises:
        EvaluationError: a continuation has no token, or does not fit a row.
    """
    for number, (context, continuation) in enumerate(requests):
        if not 0 < len(continuation) <= shape.seq_len or not context:
            raise EvaluationError(
                f"text {number} of a task has {len(context)} tokens to condition on and {len(continuation)} to "
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
            log_probs = scores.log_probs[0, row, begin:end][scores.is_reported[0, row, begin:end]]
            n_greedy = int(scores.is_greedy[0, row, begin:end].sum())
            found.append((request, math.fsum(log_probs), n_greedy, log_probs.size))
        on_batch(done, n_batches)
    sums = np.zeros((len(requests), 3))
    for request, *numbers in (one for rank in scorer.control.all_gather(found) for one in rank):
        sums[request] += numbers
    n_labels = np.array([len(continuation) for _, continuation in requests])
    assert (sums[:, 2] == n_labels).all(), "a label that no rank or more than one has reported"
    return list(zip(sums[:, 0].tolist(), (sums[:, 1] == n_labels).tolist(), strict=True))


def _pack(requests: Sequence[ScoreRequest], shape: BatchShape) -> list[list[int]]:
    """Return the requests of each row, long ones first."""
    if not requests:
        return []
    lengths = [min(len(context) + len(continuation) - 1, shape.seq_len) for context, continuation in requests]
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
    values = np.array([0, IGNORE_INDEX, 0, -1], np.int32)[:, None, None]
    ids, labels, positions, doc_ids = np.tile(values, (1, shape.micro_batch_size, shape.seq_len))
    starts: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    for row in range(shape.micro_batch_size):
        begin = 0
        for number, request in enumerate(rows[row] if row < len(rows) else ()):
            context, continuation = requests[request]
            tokens = np.array([*context, *continuation][-(shape.seq_len + 1) :], np.int32)
            n_labels, end = len(continuation), begin + tokens.size - 1
            ids[row, begin:end], positions[row, begin:end] = tokens[:-1], np.arange(tokens.size - 1)
            doc_ids[row, begin:end] = number
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
