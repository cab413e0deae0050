"""Types of what a run's files say: records, events, the recipe's table, the environment.

A run directory may come from anywhere. Readers use its numbers, names and paths, so each file is checked once, where it
is read: a known field has its type, and an integer or a number the size that arithmetic and formatting bear. Unknown
fields, of a later version or an engine, are left as they are. Cost: a few checks per field.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lt_trainer.errors import RunDirError
from lt_trainer.run_directory.jsonl import read_jsonl
from lt_trainer.run_directory.records import EvaluationRecord, MetricsRecord, ValidationRecord

MAX_INT = 2**53
MAX_NUMBER = 1e150
"""Its square is a number, too."""

Kind = Callable[[object], bool]


def is_int(value: object) -> bool:
    """Return True for an integer of usual size; a truth value is none."""
    return type(value) is int and abs(value) <= MAX_INT


def is_number(value: object) -> bool:
    """Return True for a number of usual size, nan or an infinity."""
    return is_int(value) or (isinstance(value, float) and not MAX_NUMBER < abs(value) < math.inf)


def is_seconds(value: object) -> bool:
    """Return True for a number of seconds."""
    return is_number(value) and 0 <= value < MAX_INT  # pyright: ignore[reportOperatorIssue]


def is_text(value: object) -> bool:
    """Return True for a text."""
    return isinstance(value, str)


def is_table(value: object) -> bool:
    """Return True for an object."""
    return isinstance(value, dict)


def _is_table_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_ranges(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(is_int, pair)) for pair in value
    )


def _is_optional_number(value: object) -> bool:
    return value is None or is_number(value)


def _is_device_sample(value: object) -> bool:
    return isinstance(value, dict) and all(is_number(value[name]) for name in DEVICE_FIELDS if name in value)


def _is_stores(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("store"), str) for entry in value.values()
    )


NAMES: Mapping[Kind, str] = {
    is_int: "an integer of usual size",
    is_number: "a number of usual size",
    is_seconds: "a number of seconds",
    is_text: "a text",
    is_table: "an object",
    _is_optional_number: "a number of usual size",
    _is_table_of_texts: "an object of texts",
    _is_ranges: "a list of pairs of integers",
    _is_stores: "an object of stores",
}
EVENT_FIELDS: Mapping[str, Mapping[str, Kind]] = {
    "start": {"world": is_int, "device": is_text, "peak_flops": is_number, "peak_source": is_text},
    "data": {
        "global_batch_size": is_int,
        "dp_size": is_int,
        "row": is_int,
        "step": is_int,
        "skipped": _is_ranges,
    },
}
"""Fields of an event that readers calculate with or print as what they are."""
SAMPLE_FIELDS: Mapping[str, Kind] = dict.fromkeys(
    ("cpu_percent", "memory_available_gib", "disk_write_mib_s", "disk_free_gib", "energy_j"), _is_optional_number
)
"""Fields of a node's samples (`observability.monitor.node`) that readers calculate with."""
DEVICE_FIELDS = ("rss_gib", "utilization_percent", "power_w", "temperature_c")
"""Likewise, of the samples of its ranks and GPUs."""
RECIPE_FIELDS: Mapping[str, Kind] = {
    "recipe": is_table,
    "recipe.schedule": is_table,
    "recipe.schedule.max_steps": is_int,
    "recipe.data": is_table,
    "recipe.data.seq_len": is_int,
    "recipe.data.store": is_text,
    "recipe.data.packs": is_text,
    "recipe.data.packing": is_text,
    "recipe.data.validation": is_text,
    "recipe.data.mixture": _is_stores,
    "recipe.data.validation_sets": _is_stores,
    "recipe.engine": is_table,
    "recipe.engine.gpu": is_table,
}
"""Fields of recipe.json that are used also where this version cannot load the recipe as a whole."""
ENVIRONMENT_FIELDS: Mapping[str, Kind] = {"packages": _is_table_of_texts}


@cache
def _record_fields() -> Mapping[str, Kind]:
    kinds: dict[str, Kind] = {}
    for record in (MetricsRecord, ValidationRecord, EvaluationRecord):
        for name, hint in typing.get_type_hints(record).items():
            if isinstance(hint, types.UnionType):
                (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
            kinds[name] = is_seconds if name.endswith("_s") else {int: is_int, float: is_number, str: is_text}[hint]
    return kinds


def record_problem(record: Mapping[str, Any]) -> str:
    """Return what is wrong with a record of metrics.jsonl; "" if nothing is."""
    required = ["step"] + ["elapsed_s"] * ("loss" in record) + ["eval_items"] * ("eval_task" in record)
    if missing := [name for name in required if name not in record]:
        return f"no {missing[0]}"
    return _problem(record, _record_fields()) or ("" if record["step"] >= 0 else "step is negative")


def event_problem(event: Mapping[str, Any]) -> str:
    """Return what is wrong with an event; "" if nothing is."""
    kind = event.get("event")
    return _problem(event, EVENT_FIELDS.get(kind, {})) if isinstance(kind, str) else "no event"


def sample_problem(sample: Mapping[str, Any]) -> str:
    """Return what is wrong with a sample of a node; "" if nothing is."""
    ranks, gpus = sample.get("ranks", {}), sample.get("gpus", [])
    if not isinstance(ranks, dict) or not all(map(_is_device_sample, ranks.values())):
        return "ranks are not numbers by rank"
    if not isinstance(gpus, list) or not all(map(_is_device_sample, gpus)):
        return "gpus are not a list of numbers by name"
    return _problem(sample, SAMPLE_FIELDS)


def table_problem(table: Mapping[str, Any], fields: Mapping[str, Kind]) -> str:
    """Return what is wrong with nested tables whose known fields are given by dotted names."""
    for dotted, kind in fields.items():
        value: Any = table
        *parents, name = dotted.split(".")
        for parent in parents:
            value = value.get(parent, {})
        if name in value and not kind(value[name]):
            return f"{dotted} is not {NAMES[kind]}"
    return ""


def _problem(values: Mapping[str, Any], fields: Mapping[str, Kind]) -> str:
    for name, value in values.items():
        kind = fields.get(name)
        if kind is not None and not kind(value):
            return f"{name} is not {NAMES[kind]}"
    return ""


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl.

    Raises:
        RunDirError: the file cannot be read, or a line is no record; names the line.
    """
    return _checked(path, record_problem)


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Read the events of an events.jsonl; likewise."""
    return _checked(path, event_problem)


def _checked(path: str | Path, problem: Callable[[Mapping[str, Any]], str]) -> list[dict[str, Any]]:
    values = read_jsonl(path)
    for number, record in enumerate(values, start=1):
        if text := problem(record):
            raise RunDirError(f"{path}:{number}: {text}; the line is damaged: remove it")
    return values
