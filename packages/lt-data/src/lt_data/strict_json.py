"""Reading of JSON files that others may have changed.

`parse` makes a dataclass of an object by the dataclass's own annotations: no unknown field, none missing without a
default, each of exactly its type (`true` is no integer). Every message names the file and the field. Cost: one walk
over the values; not for documents, which are only read once.
"""

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lt_data.errors import DataError

T = TypeVar("T")


def loads(content: bytes | str, source: str, remedy: str) -> Any:
    """Parse a JSON value.

    Args:
        content: UTF-8 text.
        source: the file, for messages.
        remedy: end of the message, such as "save it again".

    Raises:
        DataError: not UTF-8, not JSON, or nested too deep.
    """
    try:
        return json.loads(content if isinstance(content, str) else content.decode())
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{source}: not JSON ({exc}); {remedy}") from exc


def load_object(content: bytes | str, source: str, remedy: str) -> dict[str, Any]:
    """Parse a JSON object; arguments and errors as for `loads`."""
    value = loads(content, source, remedy)
    if not isinstance(value, dict):
        raise DataError(f"{source}: holds {_json_name(value)}, not an object; {remedy}")
    return cast(dict[str, Any], value)


def parse(kind: type[T], values: Any, source: str, remedy: str) -> T:
    """Make a dataclass of JSON values, by its annotations.

    Args:
        kind: a dataclass whose fields are JSON values, other such dataclasses, tuples of these, or mappings to these.
        values: a value of `loads`.
        source: the file, for messages.
        remedy: end of the message.

    Raises:
        DataError: a field is unknown, missing, of another type, or refused by the dataclass; the message names it.
    """
    try:
        return _convert(kind, values, "")
    except ValueError as exc:  # of `_convert`, or a DataError of the dataclass
        raise DataError(f"{source}: {exc}; {remedy}") from exc


def _convert(kind: Any, value: Any, field: str) -> Any:
    """Return the value as an annotation asks for it; `field` names it in errors."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in members:
            return None
        (kind,) = (member for member in members if member is not types.NoneType)
        return _convert(kind, value, field)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _convert_object(kind, value, field)
    if origin is Literal:
        if value in members and type(value) is type(members[0]):
            return value
    elif origin in (tuple, Sequence) and isinstance(value, list):
        if origin is Sequence or members[-1] is Ellipsis:
            return tuple(_convert(members[0], item, f"{field}[{i}]") for i, item in enumerate(value))
        if len(members) == len(value):
            pairs = enumerate(zip(members, value, strict=True))
            return tuple(_convert(member, item, f"{field}[{i}]") for i, (member, item) in pairs)
        raise ValueError(f"{field} is a list, not a list of {len(members)}")
    elif origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _convert(members[1], item, f"{field}[{key!r}]") for key, item in value.items()}
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    wanted = _NAMES.get(origin or kind) or f"one of {', '.join(map(repr, members))}"
    raise ValueError(f"{field or 'the value'} is {_json_name(value)}, not {wanted}")


def _convert_object(kind: Any, value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field or 'the value'} is {_json_name(value)}, not an object")
    hints, required = _fields_of(kind)
    prefix = f"{field}." if field else ""
    if unknown := [name for name in value if name not in hints]:
        raise ValueError(f"unknown field {prefix}{unknown[0]}")
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"no field {prefix}{missing[0]}")
    return kind(**{name: _convert(hints[name], item, f"{prefix}{name}") for name, item in value.items()})


@cache
def _fields_of(kind: type) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the annotation of each field of a dataclass, and the fields without a default."""
    hints, none = get_type_hints(kind), dataclasses.MISSING
    fields = dataclasses.fields(kind)
    required = tuple(field.name for field in fields if field.default is none and field.default_factory is none)
    return {field.name: hints[field.name] for field in fields}, required


_NAMES = {
    dict: "an object",
    Mapping: "an object",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def _json_name(value: Any) -> str:
    return _NAMES[type(value)]
