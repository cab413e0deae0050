"""Records of a run, with a fixed order of fields.

They are written as JSON (metrics.jsonl) and as `key=value` lines (`jsonl.format_record`). `METRIC_DEFINITIONS` has the
regular expressions with which SageMaker finds the six metrics of the Litespark algorithm in such lines. A field that is
None is not available (no energy counter, say) and is omitted; nan is a value that could not be computed. All fields are
described in docs/reference/metrics.md.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lt_trainer.engine import STEP_PARTS


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One completed step, counted from 1; values are equal on all ranks.

    Attributes:
        rows: Rows of the whole run; shorter ones count as the number of data.seq_len rows with as many positions.
        row_length: Positions per row.
        document_length: Length of a position's document, averaged over the positions of rank 0.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    valid_tokens: int
    rows: int
    row_length: int
    document_length: float


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """Metrics of one logging step, in display order.

    Attributes:
        step: Completed steps.
        loss: Nats per token with a label, over the global batch.
        grad_norm: Before clipping.
        mfu: flops_per_sec over the peak of one device; nan if the peak is unknown.
        memory_gib: Peak memory of one device since the last record.
        valid_tokens: Positions with a label in the global batch.
        elapsed_s: Seconds since this process started training.
        hfu: mfu plus FLOPs recomputed by activation checkpointing; nan if unknown.
        mfu_documents: mfu with attention counted within documents only; None if their lengths are unknown.
        data_s: Seconds waiting for batches since the last record; likewise for the other `engine.STEP_PARTS`.
        joules_per_token: Energy of all GPUs since the last record, per token of the run (padding included).
        energy_kwh: Energy of all GPUs of the run since its first start.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    batches_per_sec: float
    samples_per_sec: float
    tokens_per_sec: float
    flops_per_sec: float
    mfu: float
    memory_gib: float
    valid_tokens: int
    elapsed_s: float
    hfu: float | None = None
    mfu_documents: float | None = None
    data_s: float | None = None
    forward_backward_s: float | None = None
    optimizer_s: float | None = None
    checkpoint_s: float | None = None
    validation_s: float | None = None
    rest_s: float | None = None
    joules_per_token: float | None = None
    energy_kwh: float | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """Loss over a validation set after `step` steps.

    Attributes:
        val_loss: Nats per token with a label.
        val_tokens: Positions with a label.
        val_perplexity: exp(val_loss).
        val_bits_per_byte: Loss of the whole set in bits, over its bytes of text; None if these are unknown.
        val_set: Name of the set in the recipe; None for the only one.
    """

    step: int
    val_loss: float
    val_tokens: int
    elapsed_s: float
    val_perplexity: float | None = None
    val_bits_per_byte: float | None = None
    val_set: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """Metrics of a task, or of a validation set by its groups, after `step` steps; written as eval_NAME."""

    step: int
    eval_task: str
    eval_items: int
    elapsed_s: float
    metrics: Mapping[str, float]


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


def is_first_of_start(before: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return True if a start of the run begins with `record`; `before` is the previous training record.

    Each start counts `elapsed_s` from 0, so a decrease means a new start. An increase may be one too, if the previous
    start was short. Then the step parts decide: they sum to the time since the previous record, which for the first
    record of a start is all of its `elapsed_s`.
    """
    elapsed, previous = record["elapsed_s"], before["elapsed_s"]
    if elapsed < previous:
        return True
    parts = [record[f"{part}_s"] for part in STEP_PARTS if f"{part}_s" in record]
    return bool(parts) and math.fsum(parts) > elapsed - previous / 2
