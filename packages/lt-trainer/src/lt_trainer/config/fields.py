"""Codec between frozen dataclasses and text: TOML tables, hyperparameter strings, `--set a.b=c`.

A *leaf* is a field with a value; a *section* is a field with another dataclass; a field of type `Mapping[str, X]` has
sections with user-chosen names. Leaves have dotted names (`optimizer.lr`). `leaves` reads the schema from the
dataclasses, `flatten` converts nested tables to dotted names, `coerce` converts a value to the declared type, and
`build` constructs the dataclasses from values by dotted name.

Coercion follows the declared type and never guesses. Typed values (TOML, Python) are checked: a bool is not an int, 1.5
is not an int, an int is widened to a float. Text (hyperparameters, `--set`) is parsed: "1e-3", ".5" and "1_000" are
numbers, "true" and "True" are bools. Numbers must be finite.

Cost: one walk over about sixty fields; nothing is cached, nothing heavy is imported.
"""

import dataclasses
import difflib
import enum
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lt_trainer.errors import RecipeError

T = TypeVar("T")

MAX_INT = 2**63 - 1
"""Largest integer of a recipe, as of TOML and of every array."""
TRUE_WORDS = ("true", "True", "TRUE", "1")
FALSE_WORDS = ("false", "False", "FALSE", "0")


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """Schema of one recipe value."""

    name: str
    hint: Any
    default: Any
    help: str = ""
    unit: str = ""
    hyperparameter: str = ""
    former_name: str = ""
    """Dotted name before a renaming; not read, only named in the error that rejects it."""


def option(default: T, help: str, *, unit: str = "", hyperparameter: str = "", former_name: str = "") -> T:
    """Return a dataclass field with description, unit and optional hyperparameter name."""
    return field(
        default=default,
        metadata={"help": help, "unit": unit, "hyperparameter": hyperparameter, "former_name": former_name},
    )


def _schema(cls: type) -> Iterable[tuple[str, Any, "dataclasses.Field[Any]"]]:
    """Return name, resolved type and field of every init field."""
    hints = typing.get_type_hints(cls)
    return [(item.name, hints[item.name], item) for item in dataclasses.fields(cls) if item.init]


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) in (dict, Mapping) or hint in (dict, Mapping)


def _named_section_type(hint: Any) -> type | None:
    """Return the dataclass X of a field of type `Mapping[str, X]`; None for other types."""
    entry = typing.get_args(hint)[1] if _is_mapping(hint) and typing.get_args(hint) else None
    return entry if isinstance(entry, type) and dataclasses.is_dataclass(entry) else None


def named_section_tables(cls: type, prefix: str = "") -> dict[str, type]:
    """Return the entry dataclass of every table of named sections, by the table's dotted name."""
    tables: dict[str, type] = {}
    for name, hint, _ in _schema(cls):
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            tables |= named_section_tables(hint, f"{prefix}{name}.")
        elif (entry := _named_section_type(hint)) is not None:
            tables[f"{prefix}{name}"] = entry
    return tables


def named_section_leaves(cls: type, names: Iterable[str]) -> dict[str, Leaf]:
    """Return the leaves of the named sections that occur in dotted names, in order of occurrence."""
    names, selected = list(names), dict[str, Leaf]()
    for table, entry in named_section_tables(cls).items():
        for key in _section_keys(names, table):
            selected |= leaves(entry, f"{table}.{key}.")
    return selected


def _section_keys(names: Iterable[str], table: str) -> list[str]:
    """Return the names of a table's sections that occur in dotted names."""
    inside = (name.removeprefix(f"{table}.") for name in names if name.startswith(f"{table}."))
    return list(dict.fromkeys(name.partition(".")[0] for name in inside))


def leaves(cls: type, prefix: str = "") -> dict[str, Leaf]:
    """Return all leaves of a dataclass by dotted name, in order of declaration.

    Open tables (`Mapping`) are left out, since their names are not known here.
    """
    schema: dict[str, Leaf] = {}
    for name, hint, item in _schema(cls):
        dotted = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            schema |= leaves(hint, f"{dotted}.")
        elif not _is_mapping(hint):
            former = item.metadata.get("former_name", "")
            schema[dotted] = Leaf(
                name=dotted,
                hint=hint,
                default=item.default,
                help=item.metadata.get("help", ""),
                unit=item.metadata.get("unit", ""),
                hyperparameter=item.metadata.get("hyperparameter", ""),
                former_name=former if "." in former or not former else f"{prefix}{former}",
            )
    return schema


def section_names(names: Iterable[str]) -> set[str]:
    """Return every proper prefix of the dotted names."""
    return {name[:at] for name in names for at, char in enumerate(name) if char == "."}


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one map of dotted names; an empty table stays `{}`, so it can be checked."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{dotted}.")
        else:
            flat[dotted] = value
    return flat


def leaf_values(options: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a dataclass by dotted name, in order of declaration, without open tables."""
    values: dict[str, Any] = {}
    for name, hint, _ in _schema(type(options)):
        value = getattr(options, name)
        if dataclasses.is_dataclass(hint):
            values |= leaf_values(value, f"{prefix}{name}.")
        elif _named_section_type(hint) is not None:
            for key, entry in value.items():
                values |= leaf_values(entry, f"{prefix}{name}.{key}.")
        elif not _is_mapping(hint):
            values[f"{prefix}{name}"] = value
    return values


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "", **given: Any) -> T:
    """Construct a dataclass and its sections from values by dotted name; missing ones take their defaults.

    Args:
        cls: Dataclass to construct.
        values: Typed values by dotted name; names outside `prefix` are ignored.
        prefix: Prefix of the fields of `cls` in `values` ("" or "model.").
        given: Fields passed through.
    """
    arguments: dict[str, Any] = dict(given)
    for name, hint, _ in _schema(cls):
        dotted = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            arguments.setdefault(name, build(hint, values, f"{dotted}."))
        elif (entry := _named_section_type(hint)) is not None:
            sections = {key: build(entry, values, f"{dotted}.{key}.") for key in _section_keys(values, dotted)}
            arguments.setdefault(name, sections)
        elif dotted in values:
            arguments[name] = values[dotted]
    return cls(**arguments)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the known name closest to `name`, ignoring case; "" if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else ""


def check_types(options: Any, section: str) -> None:
    """Check and widen the fields of a frozen dataclass in its `__post_init__`; errors name the field."""
    for name, hint, _ in _schema(type(options)):
        value = getattr(options, name)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, typing.cast("type", hint)):
                raise RecipeError(f"expected {typing.cast('type', hint).__name__}", values={f"{section}.{name}": value})
        elif not _is_mapping(hint):
            object.__setattr__(options, name, coerce(value, hint, name=f"{section}.{name}"))


def coerce(value: Any, hint: Any, *, name: str, source: str = "", text: bool = False) -> Any:
    """Convert `value` to the declared type `hint`.

    Args:
        value: Given value.
        hint: int, float, bool, str, a Literal, an Enum, `tuple[X, ...]`, or one of these with `| None`.
        name: Dotted name, for the error.
        source: Source of the value, for the error.
        text: A string is the text form of the value (hyperparameters, `--set`), to be parsed.

    Raises:
        RecipeError: the value does not have that type.
    """
    try:
        return _coerce(value, hint, text=text and isinstance(value, str))
    except _MismatchError as exc:
        origins = {name: source} if source else None
        raise RecipeError(exc.problem, values={name: value}, remedy=exc.remedy, origins=origins) from None


class _MismatchError(Exception):
    def __init__(self, problem: str, remedy: str):
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


def _coerce(value: Any, hint: Any, *, text: bool) -> Any:
    if text:
        value = _unquote(value)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional(value, hint, text=text)
    if origin is Literal:
        return _choice(value, list(typing.get_args(hint)), text=text)
    if origin is tuple:
        return _tuple(value, typing.get_args(hint)[0], text=text)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if isinstance(value, hint):
            return value
        return hint(_choice(value, [member.value for member in hint], text=text))
    checker = {bool: _bool, int: _int, float: _float, str: _str}.get(hint)
    assert checker is not None, f"a recipe field cannot have the type {hint!r}"
    return checker(value, text)


def _unquote(value: str) -> str:
    """Remove the JSON quotes that the SageMaker SDK adds to string hyperparameters."""
    value = value.strip()
    if len(value) >= 2 and value[0] == value[-1] == '"':
        try:
            inner = json.loads(value)
        except ValueError:
            return value
        assert isinstance(inner, str)
        return inner
    return value


def _optional(value: Any, hint: Any, *, text: bool) -> Any:
    inner = [part for part in typing.get_args(hint) if part is not type(None)]
    assert len(inner) == 1, f"a recipe field may be optional, not a union: {hint!r}"
    if value is None or (text and value.lower() == "none"):
        return None
    return _coerce(value, inner[0], text=text)


def _choice(value: Any, choices: list[Any], *, text: bool) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
        if text and value in (TRUE_WORDS if choice is True else FALSE_WORDS if choice is False else (str(choice),)):
            return choice
    listed = ", ".join(str(choice).lower() if isinstance(choice, bool) else repr(choice) for choice in choices)
    similar = suggest(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
    hint = f" (did you mean {similar!r}?)" if similar else ""
    raise _MismatchError("not one of the choices", f"use one of {listed}{hint}")


def _tuple(value: Any, hint: Any, *, text: bool) -> tuple[Any, ...]:
    if text:
        parts = [part for part in value.strip("[]()").split(",") if part.strip()]
        return tuple(_coerce(part, hint, text=True) for part in parts)
    if not isinstance(value, list | tuple):
        raise _MismatchError("expected a list", "write it in brackets: [a, b]")
    return tuple(_coerce(part, hint, text=False) for part in value)


def _bool(value: Any, text: bool) -> bool:
    if isinstance(value, bool):
        return value
    if text and value in TRUE_WORDS:
        return True
    if text and value in FALSE_WORDS:
        return False
    raise _MismatchError("expected true or false", "write true or false")


def _int(value: Any, text: bool) -> int:
    if text:
        try:
            value = int(value)
        except ValueError:
            raise _MismatchError("expected an integer", "write it in digits, without a decimal point") from None
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > MAX_INT:
            raise _MismatchError(f"larger than {MAX_INT}", "write a number of usual size")
        return value
    raise _MismatchError("expected an integer", "write it in digits, without quotes or a decimal point")


def _float(value: Any, text: bool) -> float:
    if text:
        try:
            value = float(value)
        except ValueError:
            raise _MismatchError("expected a number", "write it like 0.001 or 1e-3") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _MismatchError("expected a number", "write it like 0.001 or 1e-3, without quotes")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _MismatchError("expected a finite number", "write it like 0.001 or 1e-3")
    return number


def _str(value: Any, text: bool) -> str:
    if not isinstance(value, str):
        raise _MismatchError("expected a string", "put it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _MismatchError("not valid Unicode", "use text that can be encoded as UTF-8") from None
    if "\0" in value:
        raise _MismatchError("has a NUL character", "remove it: no path and no name can have one")
    return value
