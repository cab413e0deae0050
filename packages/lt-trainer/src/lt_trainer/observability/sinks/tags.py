"""Tags of record fields in sinks: "group/field"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TAG_GROUPS = {
    "train": ("loss", "learning_rate", "grad_norm", "valid_tokens"),
    "speed": ("batches_per_sec", "samples_per_sec", "tokens_per_sec", "flops_per_sec", "mfu", "hfu", "mfu_documents"),
    "memory": ("memory_gib",),
    "time": (
        "elapsed_s",
        "data_s",
        "forward_backward_s",
        "optimizer_s",
        "checkpoint_s",
        "validation_s",
        "rest_s",
    ),
    "energy": ("joules_per_token", "energy_kwh"),
}
TAG_BY_FIELD = {field: f"{group}/{field}" for group, names in TAG_GROUPS.items() for field in names}


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers by tag: "train/loss", "validation/NAME/loss", "evaluation/TASK/acc"."""
    if "eval_task" in record:
        group = f"evaluation/{record['eval_task']}"
        return {
            f"{group}/{name.removeprefix('eval_')}": float(value)
            for name, value in record.items()
            if name.startswith("eval_") and name != "eval_task"
        }
    if "val_loss" not in record:
        return {TAG_BY_FIELD[name]: float(value) for name, value in record.items() if name in TAG_BY_FIELD}
    group = f"validation/{record['val_set']}" if "val_set" in record else "validation"
    return {
        f"{group}/{name.removeprefix('val_')}": float(value)
        for name, value in record.items()
        if name.startswith("val_") and name != "val_set"
    }
