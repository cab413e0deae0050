"""Strict JSON.

Reading refuses what the standard reader accepts: duplicate keys, NaN and Infinity, nesting of any depth, a field of
another type (`true` is not an integer here). Every message names the file and the field.
"""

import json
from typing import Any, TypeVar

from lt_ckpt.errors import CheckpointError

MAX_DEPTH = 64
"""Lists and objects inside each other; deeper ones would overflow the stack of whatever walks over them."""

T = TypeVar("T")


def dumps(value: object, what: str, *, indent: int | None = None) -> bytes:
    """Return UTF-8 JSON with a line feed, compact unless indented; `what` names the value in errors."""
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
        # A lone surrogate represents a byte of a path that is not UTF-8. It can only be inside a string, where its
        # backslash escape is valid JSON and reads back as the same path.
        return text.encode("utf-8", "backslashreplace") + b"\n"
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"{what} cannot be written as JSON: {exc}") from exc


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {duplicate!r}")
    return result


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _check_depth(value: Any) -> None:
    """Raise a RecursionError if lists and objects are nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def loads(raw: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        raw: UTF-8 text.
        source: The file, for messages.

    Raises:
        CheckpointError: Not UTF-8, not JSON, not an object, nested more than `MAX_DEPTH` deep, or a duplicate key.
    """
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
        _check_depth(value)
    except (ValueError, RecursionError) as exc:
        reason = f"nested more than {MAX_DEPTH} deep" if isinstance(exc, RecursionError) else str(exc)
        raise CheckpointError(f"{source}: not readable as JSON ({reason}); the file is damaged or not ours") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: must hold a JSON object, not {type(value).__name__}")
    return value


def get_field(obj: dict[str, Any], key: str, kind: type[T], source: str) -> T:
    """Return a field of exactly this type."""
    value = obj.get(key)
    if type(value) is not kind:
        found = "missing" if key not in obj else f"{type(value).__name__}"
        raise CheckpointError(f"{source}: field {key!r} must be {kind.__name__}, is {found}; the file is damaged")
    return value


def get_count(obj: dict[str, Any], key: str, source: str) -> int:
    """Return a field that must be a non-negative integer."""
    value = get_field(obj, key, int, source)
    if value < 0:
        raise CheckpointError(f"{source}: field {key!r} must not be negative, is {value}; the file is damaged")
    return value


def get_counts(obj: dict[str, Any], key: str, source: str) -> tuple[int, ...]:
    """Return a field that must be a list of non-negative integers, at most 64 of them."""
    value = get_field(obj, key, list, source)
    if len(value) > 64 or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        raise CheckpointError(f"{source}: field {key!r} must be a list of non-negative integers; the file is damaged")
    return tuple(value)


def check_format_version(obj: dict[str, Any], name: str, version: int, source: str) -> None:
    """Check the fields `format` and `version` at the start of every file of ours."""
    if obj.get("format") != name:
        raise CheckpointError(f"{source}: format is {obj.get('format')!r}, not {name!r}; the file is not ours")
    found = get_field(obj, "version", int, source)
    if found != version:
        raise CheckpointError(
            f"{source}: {name} version {found}, this lt-ckpt knows version {version}; install a newer lt-ckpt"
        )
