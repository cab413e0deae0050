"""The records that a run reports, with a fixed order of fields, as `key=value` lines and as plain values.

A line is made for people and for log scrapers: `step=10 loss=3.21 learning_rate=0.0016 ...`, six significant digits.
`METRIC_DEFINITIONS` holds the regular expressions with which SageMaker finds the six metrics of the Litespark algorithm
in such lines. A field that is None is not known here (there is no energy counter, say) and is left out; one that is nan
was asked for and has no value. What every field means and how it is made: docs/guides/observability.md.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lt_trainer.timing import PARTS

__all__ = ["METRIC_DEFINITIONS", "MetricsRecord", "ValidationRecord", "as_dict", "begins_start", "line", "newest_way"]


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """The numbers of one logging step, in the order in which they are shown."""

    step: int
    """Updates done."""
    loss: float
    """Nats per token with a label, over the global batch."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    batches_per_sec: float
    samples_per_sec: float
    tokens_per_sec: float
    flops_per_sec: float
    mfu: float
    """flops_per_sec over the peak of one device; nan where no peak is known."""
    memory_gib: float
    """Peak memory of one device since the last record, in GiB."""
    valid_tokens: int
    """Positions with a label in the global batch."""
    elapsed_s: float
    """Seconds since this process began to train."""
    hfu: float | None = None
    """As mfu, with what activation checkpointing computes again; nan where that is not known."""
    data_s: float | None = None
    """Seconds since the last record in which training waited for its batches; so on for the other parts of `timing`."""
    forward_backward_s: float | None = None
    optimizer_s: float | None = None
    checkpoint_s: float | None = None
    validation_s: float | None = None
    rest_s: float | None = None
    joules_per_token: float | None = None
    """Energy of all GPUs of the run since the last record, per token of the run (padding included)."""
    energy_kwh: float | None = None
    """Energy of all GPUs of the run since its first start."""


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """The loss over a whole validation set after `step` updates."""

    step: int
    val_loss: float
    """Nats per token with a label."""
    val_tokens: int
    """Positions with a label."""
    elapsed_s: float
    val_perplexity: float | None = None
    """exp(val_loss)."""
    val_bits_per_byte: float | None = None
    """The loss of the whole set in bits, over its bytes of text; None where these are not known."""
    val_set: str | None = None
    """The set's name in the recipe; None for the only one."""


NUMBER = r"([-+]?(?:[0-9][0-9.]*(?:[eE][-+]?[0-9]+)?|nan|inf))"

METRIC_DEFINITIONS: tuple[dict[str, str], ...] = tuple(
    {"Name": name, "Regex": rf"(?:^|\s){name}={NUMBER}"}
    for name in ("batches_per_sec", "flops_per_sec", "loss", "samples_per_sec", "mfu", "tokens_per_sec")
)
"""Names and regular expressions as SageMaker's CreateTrainingJob and CreateAlgorithm take them."""


def as_dict(record: Any) -> dict[str, Any]:
    """A record (dataclass or mapping) as plain values, in order, without the fields of a dataclass that are None."""
    if isinstance(record, Mapping):
        return dict(record)
    return {name: value for name, value in dataclasses.asdict(record).items() if value is not None}


def line(record: Any) -> str:
    """A record as one `key=value` line.

    Example:
        >>> line(ValidationRecord(step=20, val_loss=3.25, val_tokens=4096, elapsed_s=12.3456789))
        'step=20 val_loss=3.25 val_tokens=4096 elapsed_s=12.3457'
    """
    return " ".join(f"{name}={_short(value)}" for name, value in as_dict(record).items())


def _short(value: Any) -> str:
    return format(value, ".6g") if isinstance(value, float) else str(value)


def newest_way(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of metrics.jsonl without those that a later start or a way back has made anew.

    A run that was killed after step 27 and goes on behind a checkpoint of step 20 reports steps 21 to 27 a second time;
    after a way back they may differ from the first. A training record of step s therefore takes the place of all that
    the file says before it about step s and later ones.

    Args:
        records: in the order in which they were written.
    """
    kept: list[Mapping[str, Any]] = []
    last = -math.inf
    for record in records:
        if "loss" in record:
            if record["step"] <= last:
                kept = [one for one in kept if one["step"] < record["step"]]
            last = record["step"]
        kept.append(record)
    return kept


def begins_start(before: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether a start of the run begins with this training record, `before` being the training record above it.

    Each start counts `elapsed_s` from 0, so less than before is a new start. More may be one too, where the start
    before was a short one. Then the parts of the time tell: they add up to what has passed since the record before,
    which for the first record of a start is all of its `elapsed_s`.
    """
    elapsed, then = record["elapsed_s"], before["elapsed_s"]
    if elapsed < then:
        return True
    parts = [record[f"{part}_s"] for part in PARTS if f"{part}_s" in record]
    return bool(parts) and math.fsum(parts) > elapsed - then / 2
