"""TOML writer for recipe values: one table per section, comments behind values; `tomllib` reads them back."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def format_value(value: Any) -> str:
    """Format one TOML value.

    Example:
        >>> format_value(("a", 1e-05, True))
        '["a", 1e-05, true]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {format_value(item)}' for name, item in value.items())}}}"
    return repr(value)


def _escape(text: str) -> str:
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else format_value(name)


def dump(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Format values by dotted name, `section.field`, as a TOML document.

    Args:
        values: Values by dotted name; of None only the comment is written.
        comments: Comments behind values, by dotted name.
    """
    sections: dict[str, list[str]] = {}
    for dotted, value in values.items():
        section, _, name = dotted.rpartition(".")
        comment = f"  # {_escape(comments[dotted])}" if comments and dotted in comments else ""
        line = f"{_key(name)} = {format_value(value)}{comment}" if value is not None else f"# {name}{comment}"
        sections.setdefault(section, []).append(line)
    heads = {section: ".".join(map(_key, section.split("."))) for section in sections}
    return "\n".join("\n".join([f"[{heads[section]}]", *lines, ""]) for section, lines in sections.items())
