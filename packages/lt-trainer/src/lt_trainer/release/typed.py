"""Dataclasses from JSON that a stranger may have written: the same fields, each of its type. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lt_data.file_names import is_plain_name

T = TypeVar("T")


def from_json(cls: type[T], values: object, where: str) -> T:
    """Return the dataclass of a JSON object.

    Raises:
        ValueError: It has other fields, or a value is of another type; names the field.
    """
    types = get_type_hints(cls)
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    if not isinstance(values, dict) or values.keys() != set(names):
        raise ValueError(f"{where}: its fields are not {', '.join(names)}")
    for name in names:
        if not _fits(values[name], types[name]):
            raise ValueError(f"{where}: {name} = {str(values[name])[:80]!r} is not of its type")
    return cls(**values)


def _fits(value: object, wanted: Any) -> bool:
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is Sequence:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    return wanted is Any or type(value) is wanted


def is_inside(path: str) -> bool:
    """Return True if a path is one of a file or folder below the folder that it is relative to."""
    return all(is_plain_name(part) for part in path.split("/"))
