"""Records of a run: a step, and which records of metrics.jsonl count.

Records are rows of plain values, written as JSON (metrics.jsonl) and as `key=value` lines (`jsonl.format_record`).
`METRIC_DEFINITIONS` has the regular expressions with which SageMaker finds the six metrics of the Litespark algorithm
in such lines. What is not available (no energy counter, say) is omitted; nan is a value that could not be computed,
null what a step without labels does not have. All fields are described in docs/reference/metrics.md.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lt_trainer.engine import ExpertLoad


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One completed step, counted from 1; values are equal on all ranks.

    Attributes:
        loss: None of a step without labels.
        grad_norm: the same.
        rows: Rows of the whole run.
        document_length: Length of a position's document, averaged over the positions of rank 0.
        experts: Load of the experts, of a model that has some.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    valid_tokens: int
    rows: int
    document_length: float
    experts: ExpertLoad | None = None

    @property
    def was_skipped(self) -> bool:
        """True if the engine skipped the step, whose loss or gradient norm is not finite."""
        values = (self.loss, self.grad_norm)
        return any(value is not None and not math.isfinite(value) for value in values)


NUMBER_REGEX = r"([-+]?(?:[0-9][0-9.]*(?:[eE][-+]?[0-9]+)?|nan|inf))"

METRIC_DEFINITIONS: tuple[dict[str, str], ...] = tuple(
    {"Name": name, "Regex": rf"(?:^|\s){name}={NUMBER_REGEX}"}
    for name in ("batches_per_sec", "flops_per_sec", "loss", "samples_per_sec", "mfu", "tokens_per_sec")
)
"""Names and regular expressions for SageMaker's CreateTrainingJob and CreateAlgorithm."""


def drop_superseded_records(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of metrics.jsonl without those that a later start or a rollback repeated.

    A run that was killed after step 27 and resumes from a checkpoint of step 20 reports steps 21 to 27 again; after a
    rollback they may differ. So a training record of step s replaces all earlier records of step s and later steps.

    Args:
        records: in writing order.
    """
    kept: list[Mapping[str, Any]] = []
    last = -math.inf
    for record in records:
        if "loss" in record:
            if record["step"] <= last:
                kept = [earlier for earlier in kept if earlier["step"] < record["step"]]
            last = record["step"]
        kept.append(record)
    return kept
