"""Values of recipes as TOML writes them: one table per section, comments behind values; `tomllib` reads them back."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Text(str):
    """Text form of a value, as `--set` and hyperparameters have it: a number, a list or a text."""


def toml_value(text: str) -> Any:
    """Return the value that a text is in TOML, with any case of true and false; else the text."""
    try:
        return tomllib.loads(f"value = {text.lower() if text.lower() in ('true', 'false') else text}")["value"]
    except ValueError:
        return str(text)


def format_value(value: Any) -> str:
    """Format one TOML value; None, which TOML has no form for, is null.

    Example:
        >>> format_value(("a", 1e-05, True))
        '["a", 1e-05, true]'
    """
    if value is None:
        return "null"
    if isinstance(value, Text):
        value = toml_value(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | PurePath):
        value = str(value)
        return _escape(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(name)} = {format_value(item)}' for name, item in value.items())}}}"
    return str(value)


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
