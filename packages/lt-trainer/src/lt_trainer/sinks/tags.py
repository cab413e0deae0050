"""Under which names sinks show the numbers of a record: a group, a slash, the name of the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUPS = {
    "train": ("loss", "learning_rate", "grad_norm", "valid_tokens"),
    "speed": ("batches_per_sec", "samples_per_sec", "tokens_per_sec", "flops_per_sec", "mfu", "hfu"),
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
OF_FIELD = {field: f"{group}/{field}" for group, names in GROUPS.items() for field in names}


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """A record's numbers by tag: "train/loss", "time/data_s", "validation/loss" or "validation/NAME/loss"."""
    if "val_loss" not in record:
        return {OF_FIELD[name]: float(value) for name, value in record.items() if name in OF_FIELD}
    group = f"validation/{record['val_set']}" if "val_set" in record else "validation"
    return {
        f"{group}/{name.removeprefix('val_')}": float(value)
        for name, value in record.items()
        if name.startswith("val_") and name != "val_set"
    }
