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
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from lt_model.home_folder import expand_home
from lt_trainer.config.usual_names import DERIVED_NAMES
from lt_trainer.errors import RecipeError
from lt_trainer.toml import Text, format_value, toml_value

S = TypeVar("S", bound="Section")

_WORDS = {
    "Value error, ": "",
    "Input should be a valid string, unable to parse raw data as a unicode string": (
        "not valid Unicode; use text that can be encoded as UTF-8"
    ),
    "Input should be": "must be",
    "String should": "must",
    "Tuple should": "must",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid tuple": "a list",
    "Unable to parse input string as an integer, exceeded maximum size": "must be a smaller integer",
    "a valid boolean, unable to interpret input": "true or false",
}
"""Pydantic's words and ours."""
_PYTHON_LITERALS = {"True": "true", "False": "false", "'": '"'}
_NAME_FORM = "a name of letters, digits, - and _"
_FORM_ERRORS = ("string_pattern_mismatch", "int_parsing", "int_from_float", "int_type")


PathText = Annotated[str, AfterValidator(expand_home)]
"""Path, or an address or name in its place; `~` is the home folder."""


def option(default: Any, help: str, *, unit: str = "", hyperparameter: str = "", form: str = "", **limits: Any) -> Any:
    """Return a field with description, unit, hyperparameter name and pydantic's limits.

    A default that follows from fields above it is a function of their values by name. `form` is what an error says of a
    value that cannot be read.
    """
    extra: dict[str, Any] = {"unit": unit, "hyperparameter": hyperparameter, "form": form}
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
    usual_names: ClassVar[Mapping[str, str]] = {}
    """Field that a name stands for, by dotted name or its last part, for names of other programs."""

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        hint = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, Text) and typing.get_origin(hint) is tuple:  # --set metrics.sinks=wandb,tensorboard
            return [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
        if isinstance(value, str) and typing.get_origin(hint) is Literal and True in typing.get_args(hint):
            return {"true": True, "false": False}.get(value.lower(), str(value))
        if isinstance(value, Text) and hint in (int, float):  # --set schedule.max_steps=1e4
            number = toml_value(value)
            return number if type(number) in (int, float) else value
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
                    problem = f"has no effect with {other} = {format_value(given)}"
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
    """Return "unit", "hyperparameter" or "form" of a field; "" if it has none."""
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


def suggest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name closest to `name`, ignoring case; "" if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else ""


def recipe_error(exc: ValidationError, cls: type[Section], table: str = "") -> RecipeError:
    """Translate the first of pydantic's errors about a section of the name `table`, by default its own."""
    table = table or cls.table
    error = min(exc.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    loc = [str(part) for part in error["loc"] if not isinstance(part, int) and part != "[key]"]
    name, kind, value = ".".join(filter(None, [table, *loc])), error["type"], error["input"]
    own = error.get("ctx", {}).get("error")
    if isinstance(own, RecipeError):
        values = {f"{name}.{field}" if name else field: shown for field, shown in own.values.items()}
        return RecipeError(own.problem, values=values, remedy=own.remedy, origins=own.origins)
    fields = leaves(cls, f"{table}." if table else "", entry=loc[-2] if len(loc) > 2 else "")
    if kind == "extra_forbidden":
        name, value = next(iter(flatten({name: value}).items()))
        return unknown_field(name, value, cls, fields)
    if kind == "missing":
        return RecipeError(f"{name} is missing")
    if kind.startswith(("model_", "dict_")):
        return RecipeError("not a value but a section", values={name: value}, remedy="set its fields")
    values = {} if kind == "value_error" and isinstance(value, dict | BaseModel) else {name: value}
    form = extra_of(fields[name], "form") if name in fields else ""
    if "[key]" in error["loc"]:
        form = _NAME_FORM
    if form and kind in _FORM_ERRORS:
        return RecipeError(f"must be {form}", values=values)
    return RecipeError(_reword(error["msg"], kind), values=values)


def _reword(message: str, kind: str) -> str:
    """Return a message of pydantic in our words, without those of Python."""
    for theirs, ours in {**_WORDS, **(_PYTHON_LITERALS if kind == "literal_error" else {})}.items():
        message = message.replace(theirs, ours)
    return message.partition(", unable to parse string")[0]


def unknown_field(name: str, value: Any, cls: type[Section], known: Iterable[str]) -> RecipeError:
    """Return the error about an unknown field of a section, with the known one that it may be meant to be.

    Names of other programs come first, then the last part of the name, in its own section and in all.
    """
    parent, _, last = name.rpartition(".")
    by_last: dict[str, list[str]] = {}
    siblings = {field: field for field in cls.model_fields} if not parent else dict[str, str]()
    for field in known:
        section, _, own = field.rpartition(".")
        by_last.setdefault(own, []).append(field)
        if section == parent:
            siblings[own] = field
    same = by_last.get(last, [])
    similar = (
        cls.usual_names.get(name)
        or cls.usual_names.get(last)
        or (same[0] if len(same) == 1 else "")
        or siblings.get(suggest(last, siblings))
        or next(iter(same or by_last.get(suggest(last, by_last, cutoff=0.75), [])), "")
    )
    if similar:
        remedy = f"did you mean {similar}?"
    else:
        remedy = f"there are {', '.join(siblings.values() if parent and siblings else sorted(cls.model_fields))}"
    return RecipeError("unknown field", values={name: value}, remedy=DERIVED_NAMES.get(last, remedy))
