"""Sections of recipes and profiles: frozen pydantic models, checked when they are made.

A field is `name: type = option(default, help)`; limits such as `ge=1` are pydantic's, and so is the conversion of text.
`needs` lists fields without effect unless another one is set: they are refused, because their author expected an
effect. Other checks are in `check`, which raises `self.wrong("fields", problem, remedy)`. Whatever is refused, by
pydantic or by us, becomes one `RecipeError` that names field, value and source (`recipe_error`).

A value has a dotted name (`optimizer.lr`): `flatten` and `unflatten` convert nested tables.

Cost: pydantic takes about 0.1 s to import, and under 1 ms to check a recipe.
"""

import difflib
import functools
import tomllib
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from lt_trainer.errors import RecipeError

S = TypeVar("S", bound="Section")

_WORDS = {
    "Value error, ": "",
    "Input should be a valid string, unable to parse raw data as a unicode string": (
        "not valid Unicode; use text that can be encoded as UTF-8"
    ),
    "Input should be": "must be",
    "String should match pattern": "must match",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid tuple": "a list",
}
"""Pydantic's words and ours."""


class Text(str):
    """Text form of a value, which may also stand for a list."""


def option(default: Any, help: str, *, unit: str = "", hyperparameter: str = "", **limits: Any) -> Any:
    """Return a field with description, unit, hyperparameter name and pydantic's limits.

    A default that follows from fields above it is a function of their values by name.
    """
    extra: dict[str, Any] = {"unit": unit, "hyperparameter": hyperparameter}
    values = {"default_factory" if callable(default) else "default": default}
    return Field(**values, description=help, json_schema_extra=extra, **limits)


class _Checked(type(BaseModel)):
    """Metaclass of sections: construction in Python raises RecipeError, too."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as exc:
            raise recipe_error(exc, typing.cast("type[Section]", cls)) from None


class Section(BaseModel, metaclass=_Checked):
    """Base of all sections."""

    def __init_subclass__(cls, *, table: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.table = table

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    table: ClassVar[str] = ""
    """Dotted name of the section, an argument of its class; "" where it has none of its own."""
    needs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Fields, separated by spaces; another one without which they have no effect; its values, or none for any value
    but its default."""

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        hint = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, Text) and typing.get_origin(hint) is tuple:  # --set metrics.sinks=wandb,tensorboard
            return [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
        if isinstance(value, str) and typing.get_origin(hint) is Literal and True in typing.get_args(hint):
            return {"true": True, "false": False}.get(value.lower(), str(value))
        return str(value) if isinstance(value, Text) else value

    @model_validator(mode="after")
    def _check_all(self) -> typing.Self:
        for names, other, *values in self.needs:
            given = getattr(self, other)
            if given in values if values else given != default_of(type(self), other):
                continue
            for name in names.split():
                if getattr(self, name) != default_of(type(self), name):
                    choice = f" to {values[0]}" if values else ""
                    problem = f"has no effect with {other} = {given!r}"
                    raise self.wrong(name, problem, f"set {other}{choice}, or remove {name}")
        self.check()
        return self

    def check(self) -> None:
        """Check what depends on several fields.

        Raises:
            RecipeError: they contradict each other; made by `wrong`.
        """

    def wrong(self, names: str, problem: str, remedy: str = "") -> RecipeError:
        """Return an error about fields of this section, `names` separated by spaces."""
        values = {name: self.value(name) for name in names.split()}
        shown = {name: list(value) if isinstance(value, dict) else value for name, value in values.items()}
        return RecipeError(problem, values=shown, remedy=remedy)

    def value(self, name: str) -> Any:
        """Return the value of a dotted name, such as `optimizer.lr` of a recipe."""
        return functools.reduce(getattr, name.split("."), self)


def default_of(cls: type[Section], name: str) -> Any:
    """Return the default of a field, beside the defaults of the others."""
    return default_value(cls.model_fields[name])


def default_value(field: FieldInfo) -> Any:
    """Return the default of a field, beside the defaults of the others."""
    return field.get_default(call_default_factory=True, validated_data={})


def leaves(cls: type[BaseModel], prefix: str = "", *, entry: str = "") -> dict[str, FieldInfo]:
    """Return the fields of a section and those inside it by dotted name, in order of declaration.

    Args:
        cls: Section.
        prefix: Prefix of the names.
        entry: Name to use for the entries of tables with user-chosen names, which are left out without one.
    """
    found: dict[str, FieldInfo] = {}
    for name, field in cls.model_fields.items():
        hint, entries = field.annotation, typing.get_args(field.annotation)
        if _is_section(hint):
            found |= leaves(typing.cast("type[BaseModel]", hint), f"{prefix}{name}.", entry=entry)
        elif typing.get_origin(hint) is not dict:
            found[prefix + name] = field
        elif entry and _is_section(entries[-1]):
            found |= leaves(entries[-1], f"{prefix}{name}.{entry}.")
    return found


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def extra_of(field: FieldInfo, name: str) -> str:
    """Return "unit" or "hyperparameter" of a field; "" if it has none."""
    extra = field.json_schema_extra
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one map of dotted names; an empty table stays `{}`, so it can be checked."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted name to nested tables, the inverse of `flatten`.

    Raises:
        RecipeError: a name has both a value and a table.
    """
    table: dict[str, Any] = {}
    for dotted, value in values.items():
        *parents, name = dotted.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise RecipeError(f"{parent} takes a value, not a table", values={dotted: value})
        inner[name] = inner.get(name, {}) if value == {} else value
    return table


class Given(NamedTuple):
    """Value as given by a source."""

    value: Any
    source: str


def inside(given: Mapping[str, Given], table: str) -> dict[str, Given]:
    """Return the values of a table by their names within it."""
    return {name.partition(".")[2]: value for name, value in given.items() if name.startswith(f"{table}.")}


def build(cls: type[S], given: Mapping[str, Given], table: str = "") -> S:
    """Make a section from values by dotted name within it; missing ones take their defaults.

    Raises:
        RecipeError: unknown name, wrong type, value out of range or contradiction; names `table`, field and source.
    """
    origins = {f"{table}.{name}" if table else name: source for name, (_, source) in given.items()}
    try:
        return cls.model_validate(unflatten({name: value for name, (value, _) in given.items()}))
    except ValidationError as exc:
        raise recipe_error(exc, cls, table).with_origins(origins) from None
    except RecipeError as exc:
        raise exc.with_origins(origins) from None


def parse_text(text: str) -> Any:
    """Return the value of a text: TOML where it is quoted or in brackets, else text for the field to convert."""
    text = text.strip()
    value = toml_value(text) if text.startswith(('"', "'", "[", "{")) else text
    return Text(value) if isinstance(value, str) else value


def toml_value(text: str) -> Any:
    """Return the value that a text is in TOML, with any case of true and false; else the text."""
    try:
        return tomllib.loads(f"value = {text.lower() if text.lower() in ('true', 'false') else text}")["value"]
    except ValueError:
        return str(text)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the known name closest to `name`, ignoring case; "" if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else ""


def recipe_error(exc: ValidationError, cls: type[Section], table: str = "") -> RecipeError:
    """Translate the first of pydantic's errors about a section of the name `table`, by default its own."""
    table = table or cls.table
    error = min(exc.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    loc = [str(part) for part in error["loc"] if not isinstance(part, int) and part != "[key]"]
    name, kind, value, message = ".".join(filter(None, [table, *loc])), error["type"], error["input"], error["msg"]
    own = error.get("ctx", {}).get("error")
    if isinstance(own, RecipeError):
        values = {f"{name}.{field}" if name else field: shown for field, shown in own.values.items()}
        return RecipeError(own.problem, values=values, remedy=own.remedy, origins=own.origins)
    fields = leaves(cls, f"{table}." if table else "", entry=loc[-2] if len(loc) > 2 else "")
    if kind == "extra_forbidden":
        return RecipeError("unknown field", values={name: value}, remedy=_known_fields(name, list(fields)))
    if kind == "missing":
        return RecipeError(f"{name} is missing")
    if kind.startswith(("model_", "dict_")):
        return RecipeError("not a value but a section", values={name: value}, remedy="set its fields")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    values = {} if kind == "value_error" and isinstance(value, dict | BaseModel) else {name: value}
    remedy = fields[name].description or "" if "pattern" in kind and name in fields else ""
    return RecipeError(message.partition(", unable to parse string")[0], values=values, remedy=remedy)


def _known_fields(name: str, known: list[str]) -> str:
    """Return which known field an unknown one may be meant to be."""
    parent, _, last = name.rpartition(".")
    same = [field for field in known if field.rpartition(".")[2] == last]
    similar = same[0] if same else suggest(name, known)
    inside = [field for field in known if field.rpartition(".")[0] == parent]
    sections = {field.split(".")[0] for field in known}
    return f"did you mean {similar}?" if similar else f"there are {', '.join(inside or sorted(sections))}"
