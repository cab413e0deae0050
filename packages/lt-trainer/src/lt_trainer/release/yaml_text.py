"""YAML of plain values: block mappings and lists, with quoted strings.

A double-quoted JSON string is a YAML string with the same value, so no rule of plain scalars is needed.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML 1.1 does not read as text."""


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return a mapping of strings to plain values as YAML, in its order."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entry(f"{_key(name)}:", item)
    else:
        for item in value:
            first, *rest = _lines(item) if _is_block(item) else [_scalar(item)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(head: str, item: Any) -> Iterator[str]:
    if _is_block(item):
        yield head
        yield from (f"  {line}" for line in _lines(item))
    else:
        yield f"{head} {_scalar(item)}"


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _key(name: str) -> str:
    is_plain = PLAIN_KEY.fullmatch(name) is not None and name.lower() not in YAML_WORDS
    return name if is_plain else _quoted(name)


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    if isinstance(value, float):  # YAML 1.1 reads 1e-05 as text, 1.0e-05 as a number
        mantissa, separator, exponent = repr(value).partition("e")
        if not math.isfinite(value):
            return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[mantissa]
        return f"{mantissa}{'.0' if separator and '.' not in mantissa else ''}{separator}{exponent}"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """Return a quoted string; line breaks of YAML and what it does not allow are escaped as in JSON."""
    quoted = json.dumps(text, ensure_ascii=False)
    if quoted.isprintable():
        return quoted
    return "".join(
        c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) < 2**16 else f"\\U{ord(c):08x}" for c in quoted
    )
