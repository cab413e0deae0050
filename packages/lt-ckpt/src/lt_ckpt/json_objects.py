"""JSON objects in files: UTF-8 text that holds one object.

Cost: that of the standard library's parser.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from lt_ckpt.errors import CheckpointError


@contextmanager
def translate_format_errors(source: str) -> Iterator[None]:
    """Turn what a file of another form than ours causes in the block into a `CheckpointError` that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"{source}: is damaged or not of this version of lt-ckpt: {exc!r}") from exc


def _fields(value: object) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"a {type(value).__name__} has no form in JSON")
    return {name: item for name, item in vars(value).items() if item is not None}


def dumps(value: object, what: str, *, indent: int | None = None) -> bytes:
    """Return JSON with a line feed, compact unless indented; `what` names it in errors.

    Dataclasses are objects of their fields that are not None.
    """
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(value, indent=indent, separators=separators, default=_fields).encode() + b"\n"
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"{what} cannot be written as JSON: {exc}") from exc


def loads(raw: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: Not UTF-8, not JSON, or not an object; names `source`, the file.
    """
    with translate_format_errors(source):
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise TypeError(f"a JSON object is needed, not {type(value).__name__}")
        return value
