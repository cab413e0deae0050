"""Comparison of a layout with one device: losses, norms and every parameter, in float64.

All ranks' slices are joined, each element from exactly one rank; the weights before training must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gpus_layouts import Tolerance
from gpus_worker import AFTER_FIRST, AFTER_LAST, BEFORE, read_slices

from lt_test_helpers.layouts import NamedTensors, assemble


def read_state(folder: Path, moment: int, ranks: int) -> NamedTensors:
    """Return the whole tensors of a moment."""
    return assemble(read_slices(folder, moment, rank) for rank in range(ranks))


def compare_layout(
    found: dict[str, Any], folder: Path, ranks: int, one: dict[str, Any], one_folder: Path, tolerance: Tolerance
) -> dict[str, Any]:
    """Return the largest differences from one device, and whether each is within its tolerance."""
    before, wanted_before = read_state(folder, BEFORE, ranks), read_state(one_folder, BEFORE, 1)
    differing = ["/".join(key) for key in wanted_before if before[key].tobytes() != wanted_before[key].tobytes()]
    first, wanted_first = read_state(folder, AFTER_FIRST, ranks), read_state(one_folder, AFTER_FIRST, 1)
    last, wanted_last = read_state(folder, AFTER_LAST, ranks), read_state(one_folder, AFTER_LAST, 1)
    moments = {key for key in wanted_first if key[0] in ("exp_avg", "momentum")}
    weights = {key for key in wanted_last if key[0] == "weights"}
    gradient, gradient_of = largest(first, wanted_first, moments, max_error)
    weight, weight_of = largest(last, wanted_last, weights, norm_error)
    errors = {
        "loss": max(
            relative_error(found["losses"], one["losses"]),
            relative_error([found["validation_loss"]], [one["validation_loss"]]),
        ),
        "grad_norm": relative_error(found["grad_norms"], one["grad_norms"]),
        "gradient": gradient,
        "weights": weight,
    }
    limits = asdict(tolerance)
    return {
        "errors": errors,
        "tolerance": limits,
        "worst": {"gradient": gradient_of, "weights": weight_of},
        "different_at_start": differing,
        "equal": not differing
        and found["validation_tokens"] == one["validation_tokens"]
        and all(errors[name] <= limits[name] for name in limits),
    }


def relative_error(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference; nan differs infinitely."""
    with np.errstate(invalid="ignore"):
        error = float(np.max(np.abs(np.asarray(found) - np.asarray(wanted)) / np.abs(np.asarray(wanted))))
    return error if error == error else float("inf")


def max_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return max|a - b| / max|b|."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def norm_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return ||a - b|| / ||b||."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def largest(
    found: NamedTensors,
    wanted: NamedTensors,
    keys: set[tuple[str, str]],
    error: Callable[[np.ndarray, np.ndarray], float],
) -> tuple[float, str]:
    """Return the largest error of these tensors, and the tensor that has it; nan counts as infinite."""
    errors = {
        "/".join(key): error(found[key].astype(np.float64), wanted[key].astype(np.float64)) for key in sorted(keys)
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return (errors[worst] if errors[worst] == errors[worst] else float("inf")), worst
