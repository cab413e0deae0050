"""The codec between frozen dataclasses and what people write: TOML tables, hyperparameter strings, `--set a.b=c`.

A *leaf* is a field that holds a value; a *section* is a field that holds another dataclass, and a field of type
`Mapping[str, X]` holds sections whose names the person chooses. Leaves are addressed by dotted names (`optimizer.lr`).
`leaves` reads the schema off the dataclasses, `flatten` turns nested tables into dotted
names, `coerce` turns a value into the declared type, and `build` makes the dataclasses from values by dotted name.

Coercion goes by the declared type and never guesses. Values that already have a type (from TOML or from Python) are
checked: a bool is not an int, 1.5 is not an int, an int widens to a float. Text (hyperparameters, `--set`) is parsed by
the declared type: "1e-3", ".5" and "1_000" are numbers, "true" and "True" are bools. Numbers must be finite.

Cost: one walk over some sixty fields; nothing is cached, nothing heavy is imported.
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

__all__ = [
    "Leaf",
    "build",
    "check_types",
    "coerce",
    "entry_leaves",
    "entry_tables",
    "flatten",
    "leaves",
    "option",
    "section_names",
    "suggest",
    "values_of",
]

T = TypeVar("T")

TRUE_WORDS = ("true", "True", "TRUE", "1")
FALSE_WORDS = ("false", "False", "FALSE", "0")


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One value of a recipe as the schema describes it."""

    name: str
    hint: Any
    default: Any
    help: str = ""
    unit: str = ""
    hp: str = ""


def option(default: T, help: str, *, unit: str = "", hp: str = "") -> T:
    """A dataclass field with its description, its unit and, where it has one, its upper-case hyperparameter name."""
    return field(default=default, metadata={"help": help, "unit": unit, "hp": hp})


def _schema(cls: type) -> Iterable[tuple[str, Any, "dataclasses.Field[Any]"]]:
    """Field name, resolved type and field of every field that takes part in `__init__`."""
    hints = typing.get_type_hints(cls)
    return [(item.name, hints[item.name], item) for item in dataclasses.fields(cls) if item.init]


def _is_open(hint: Any) -> bool:
    return typing.get_origin(hint) in (dict, Mapping) or hint in (dict, Mapping)


def _entry(hint: Any) -> type | None:
    """The dataclass X of a field of type `Mapping[str, X]`: a table of sections whose names the person chooses."""
    entry = typing.get_args(hint)[1] if _is_open(hint) and typing.get_args(hint) else None
    return entry if isinstance(entry, type) and dataclasses.is_dataclass(entry) else None


def entry_tables(cls: type, prefix: str = "") -> dict[str, type]:
    """The dataclass of the entries of every table of named sections, by the table's dotted name."""
    found: dict[str, type] = {}
    for name, hint, _ in _schema(cls):
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            found |= entry_tables(hint, f"{prefix}{name}.")
        elif (entry := _entry(hint)) is not None:
            found[f"{prefix}{name}"] = entry
    return found


def entry_leaves(cls: type, names: Iterable[str]) -> dict[str, Leaf]:
    """The leaves of the named sections that these dotted names stand in, in the order in which they come."""
    names, found = list(names), dict[str, Leaf]()
    for table, entry in entry_tables(cls).items():
        for key in _keys(names, table):
            found |= leaves(entry, f"{table}.{key}.")
    return found


def _keys(names: Iterable[str], table: str) -> list[str]:
    """The names of a table's sections, from the dotted names of what stands in them."""
    inside = (name.removeprefix(f"{table}.") for name in names if name.startswith(f"{table}."))
    return list(dict.fromkeys(name.partition(".")[0] for name in inside))


def leaves(cls: type, prefix: str = "") -> dict[str, Leaf]:
    """Every leaf of a dataclass by dotted name, in the order of declaration.

    Open tables (`Mapping`) are left out, since their names are not known here.
    """
    found: dict[str, Leaf] = {}
    for name, hint, item in _schema(cls):
        dotted = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            found |= leaves(hint, f"{dotted}.")
        elif not _is_open(hint):
            found[dotted] = Leaf(
                name=dotted,
                hint=hint,
                default=item.default,
                help=item.metadata.get("help", ""),
                unit=item.metadata.get("unit", ""),
                hp=item.metadata.get("hp", ""),
            )
    return found


def section_names(names: Iterable[str]) -> set[str]:
    """Every proper prefix of the dotted names: the sections that hold them."""
    return {name[:at] for name in names for at, char in enumerate(name) if char == "."}


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one map of dotted names; an empty table stays as `{}` so that its name can still be checked."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{dotted}.")
        else:
            found[dotted] = value
    return found


def values_of(made: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a dataclass by dotted name, in the order of declaration; open tables are left out."""
    found: dict[str, Any] = {}
    for name, hint, _ in _schema(type(made)):
        value = getattr(made, name)
        if dataclasses.is_dataclass(hint):
            found |= values_of(value, f"{prefix}{name}.")
        elif _entry(hint) is not None:
            for key, entry in value.items():
                found |= values_of(entry, f"{prefix}{name}.{key}.")
        elif not _is_open(hint):
            found[f"{prefix}{name}"] = value
    return found


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "", **given: Any) -> T:
    """Make a dataclass and its sections from values by dotted name; what is missing takes its default.

    Args:
        cls: The dataclass to make.
        values: Typed values by dotted name; names outside `prefix` are not looked at.
        prefix: Where the fields of `cls` stand in `values` ("" or "model.").
        given: Fields passed on as they are.
    """
    arguments: dict[str, Any] = dict(given)
    for name, hint, _ in _schema(cls):
        dotted = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            arguments.setdefault(name, build(hint, values, f"{dotted}."))
        elif (entry := _entry(hint)) is not None:
            sections = {key: build(entry, values, f"{dotted}.{key}.") for key in _keys(values, dotted)}
            arguments.setdefault(name, sections)
        elif dotted in values:
            arguments[name] = values[dotted]
    return cls(**arguments)


def suggest(name: str, known: Iterable[str]) -> str:
    """The known name nearest to `name`, or "" when none is near; case does not count."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[near[0]] if near else ""


def check_types(made: Any, section: str) -> None:
    """Check and widen the fields of a frozen dataclass from its `__post_init__`; errors name `section.field`."""
    for name, hint, _ in _schema(type(made)):
        value = getattr(made, name)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, typing.cast("type", hint)):
                raise RecipeError(f"expected {typing.cast('type', hint).__name__}", values={f"{section}.{name}": value})
        elif not _is_open(hint):
            object.__setattr__(made, name, coerce(value, hint, name=f"{section}.{name}"))


def coerce(value: Any, hint: Any, *, name: str, source: str = "", text: bool = False) -> Any:
    """`value` as the declared type `hint`.

    Args:
        value: What was given.
        hint: int, float, bool, str, a Literal, an Enum, `tuple[X, ...]`, or one of these with `| None`.
        name: Dotted name, for the error.
        source: Where the value came from, for the error.
        text: Whether a string is the written form of the value (hyperparameters, `--set`), to be parsed by type.

    Raises:
        RecipeError: When the value is not of that type.
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
    """Undo the JSON quotes that the SageMaker SDK puts around string hyperparameters."""
    value = value.strip()
    if len(value) >= 2 and value[0] == value[-1] == '"':
        try:
            inner = json.loads(value)
        except json.JSONDecodeError:
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
        if text and str(choice) == value:
            return choice
    listed = ", ".join(repr(choice) for choice in choices)
    near = suggest(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
    hint = f" (did you mean {near!r}?)" if near else ""
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
            return int(value)
        except ValueError:
            raise _MismatchError("expected a whole number", "write it in digits, without a decimal point") from None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _MismatchError("expected a whole number", "write it in digits, without quotes or a decimal point")


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
        raise _MismatchError("expected text", "put it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _MismatchError("not valid Unicode text", "use a name that can be written in UTF-8") from None
    return value
