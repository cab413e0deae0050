"""Form of what other machines say: answers of hosts, descriptions of machines, events of a launch.

A host may be broken, of another version or hostile; what it says is used as numbers, names and paths. Each check is
pure and reads a table of fields and kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

__all__ = ["as_texts", "is_int", "is_number", "is_record", "machine_problem"]

MAX_NUMBER = 1 << 62
"""Largest size of a number: larger integers cannot be divided, formatted or converted."""


def is_int(value: object) -> TypeGuard[int]:
    """Return True for an integer of usual size; a truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a finite number of usual size."""
    return is_int(value) or (isinstance(value, float) and abs(value) <= MAX_NUMBER)  # false for nan


def as_texts(value: object) -> tuple[str, ...]:
    """Return a list of texts; empty for anything else."""
    return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else ()


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_versions(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_count(value: object) -> bool:
    return value is None or is_int(value)


Fields = Mapping[str, Callable[[object], bool]]
PROGRESS: Fields = {"step_before": is_int, "step": is_int, "completed": _is_truth}
MESSAGES: Mapping[str, Fields] = {
    "refused": {"refused": _is_text},
    "hello": {"port": is_int},
    "ended": {"ended": is_int, "code": is_int, "tail": _is_texts},
    "lines": {"lines": _is_text, "rank": is_int},
    "progress": {"progress": lambda value: isinstance(value, dict) and _fits(value, PROGRESS)},
    "left": {},
    "beat": {},
}
"""Fields of what a host says, by the one that names the message."""
MACHINE: Fields = {
    "time": is_number,
    "python": _is_text,
    "executable": _is_text,
    "cpus": _is_count,
    "memory_gib": is_number,
    "devices": _is_texts,
    "driver": _is_text,
    "efa": _is_truth,
    "folder": _is_text,
    "writable": _is_truth,
    "free_gib": is_number,
    "sees_token": _is_truth,
    "shm_gib": is_number,
    "memlock": _is_text,
    "packages": _is_versions,
}
"""Fields of a machine's description (`look`)."""


def _fits(values: Mapping[str, Any], fields: Fields) -> bool:
    return all(name in values and check(values[name]) for name, check in fields.items())


def is_record(values: object) -> TypeGuard[dict[str, Any]]:
    """Return True for a message of `ssh_node`, or of what starts it."""
    if not isinstance(values, dict):
        return False
    return any(name in values and _fits(values, fields) for name, fields in MESSAGES.items())


def machine_problem(values: object) -> str:
    """Return the first missing or mistyped field of a machine's description; "" for a good one."""
    if not isinstance(values, dict):
        return f"a {type(values).__name__} in place of a description"
    for name, check in MACHINE.items():
        if name not in values:
            return f"no {name} in its description"
        if not check(values[name]):
            return f"{name} = {repr(values[name])[:80]} in its description"
    return ""
