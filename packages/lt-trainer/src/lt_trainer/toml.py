"""TOML as a recipe needs it: writing flat values of sections, and finding the line on which a key stands.

The standard library reads TOML (`tomllib`) but neither writes it nor says where a key was. `dump` writes dotted names
as sections; what it writes, `tomllib` reads back to equal values (tested with random recipes). `line_numbers` is a scan
over lines that knows headers and `key =`; a key inside an inline table is found at the line of the key that holds it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["dump", "format_value", "line_numbers"]

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
ASSIGNMENT = re.compile(r"""^\s*((?:[A-Za-z0-9_.\- ]|"[^"]*"|'[^']*')+?)\s*=""")


def format_value(value: Any) -> str:
    """One TOML value.

    Example:
        >>> format_value(("a", 1e-05, True))
        '["a", 1e-05, true]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(str(name))} = {format_value(item)}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise AssertionError(f"a recipe cannot hold {value!r}")


def _key(part: str) -> str:
    return part if BARE_KEY.fullmatch(part) else format_value(part)


def dump(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Values by dotted name as a TOML document with one table per section; None values are left out.

    Args:
        values: Values by dotted name, `section.field`; every name has at least one dot.
        comments: What to write behind a value, by dotted name.
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
            lines.append(f"{_key(name)} = {format_value(value)}" + (f"  # {comment}" if comment else ""))
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def line_numbers(text: str) -> dict[str, int]:
    """The line (from 1) of every `[header]` and of every `key =`, by dotted name; the first one counts."""
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := HEADER.match(line):
            section = _dotted(header[1])
            found.setdefault(section, number)
        elif assignment := ASSIGNMENT.match(line):
            key = _dotted(assignment[1])
            found.setdefault(f"{section}.{key}" if section else key, number)
    return found


def _dotted(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
