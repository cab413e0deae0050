"""Scores of a batch's labels, position by position, as an engine's rank reports them.

Shapes: M micro-batches, B rows per micro-batch, T positions per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionScores:
    """Scores of a batch's labels that one rank reports; arrays of the batch's shape [M, B, T].

    Over all ranks each position with a label is reported exactly once, so sums over the ranks count nothing twice.
    """

    log_probs: np.ndarray
    """Log-probability of the label in nats, float64; 0 where the rank reports none."""
    is_greedy: np.ndarray
    """True where the label is the most likely token (of equally likely ones the smallest id); False where the rank
    reports none."""
    is_reported: np.ndarray
    """True where this rank reports a position."""

    @staticmethod
    def unreported(labels: np.ndarray) -> PositionScores:
        """Return the scores of a rank that reports no position."""
        no = np.zeros(labels.shape, bool)
        return PositionScores(log_probs=np.zeros(labels.shape), is_greedy=no, is_reported=no.copy())

    @staticmethod
    def at_positions(
        labels: np.ndarray, indices: np.ndarray, log_probs: np.ndarray, is_greedy: np.ndarray
    ) -> PositionScores:
        """Return the scores of a rank that computes some positions; those without a label are not reported.

        Args:
            labels: labels of the batch [M, B, T].
            indices: positions in the flattened batch, integers of any shape.
            log_probs: log-probability at each of them.
            is_greedy: greedy flag at each of them.
        """
        scores, indices = PositionScores.unreported(labels), indices.ravel()
        has_label = labels.ravel()[indices] >= 0
        indices = indices[has_label]
        scores.log_probs.reshape(-1)[indices] = log_probs.ravel()[has_label]
        scores.is_greedy.reshape(-1)[indices] = is_greedy.ravel()[has_label]
        scores.is_reported.reshape(-1)[indices] = True
        return scores
