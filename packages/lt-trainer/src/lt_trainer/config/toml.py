"""TOML writer for recipe values, and line numbers of keys.

The standard library reads TOML (`tomllib`) but neither writes it nor reports lines. `dump` writes dotted names as
sections; `tomllib` reads the result back to equal values. `line_numbers` scans for headers and `key =`; a key inside an
inline table is reported at the line of the key that has the table.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
ASSIGNMENT = re.compile(r"""^\s*((?:[A-Za-z0-9_.\- ]|"[^"]*"|'[^']*')+?)\s*=""")


def format_value(value: Any) -> str:
    """Format one TOML value.

    Example:
        >>> format_value(("a", 1e-05, True))
        '["a", 1e-05, true]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _escape(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(str(name))} = {format_value(item)}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise AssertionError(f"a recipe cannot hold {value!r}")


def _escape(text: str) -> str:
    """Return the text with what is not printable as TOML's escapes."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else f"\\u{ord(character):04x}"
        if ord(character) < 2**16
        else f"\\U{ord(character):08x}"
        for character in text
    )


def _key(part: str) -> str:
    return part if BARE_KEY.fullmatch(part) else format_value(part)


def dump(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Format values by dotted name as a TOML document with one table per section, without None values.

    Args:
        values: Values by dotted name, `section.field`; every name has at least one dot.
        comments: Comments behind values, by dotted name.
    """
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        section, _, name = dotted.rpartition(".")
        assert section, dotted
        if value is not None:
            sections.setdefault(section, {})[name] = value
    blocks = []
    for section, fields in sections.items():
        lines = [f"[{'.'.join(_key(part) for part in section.split('.'))}]"]
        for name, value in fields.items():
            comment = (comments or {}).get(f"{section}.{name}")
            lines.append(f"{_key(name)} = {format_value(value)}" + (f"  # {_escape(comment)}" if comment else ""))
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def line_numbers(text: str) -> dict[str, int]:
    """Return the line (from 1) of the first occurrence of every `[header]` and `key =`, by dotted name."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := HEADER.match(line):
            section = _dotted(header[1])
            lines.setdefault(section, number)
        elif assignment := ASSIGNMENT.match(line):
            key = _dotted(assignment[1])
            lines.setdefault(f"{section}.{key}" if section else key, number)
    return lines


def _dotted(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
