"""From what people write to typed values: the sources of a recipe, and checking what they give against a schema.

A source becomes a map of dotted names to `Given`: a value, where it came from, and whether it is text to be parsed.
Sources are merged by the caller; `typed` then turns the winners into values of the declared types, and `engine_tables`
does the same for the sections of engines, whose schema is known only where the engine's package is installed.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError
from lt_trainer.fields import Leaf, build, coerce, entry_tables, flatten, leaves, section_names, suggest
from lt_trainer.toml import line_numbers

__all__ = [
    "DEFAULT",
    "ENGINE_PACKAGES",
    "EngineTables",
    "Given",
    "engine_tables",
    "from_hyperparameters",
    "from_set",
    "from_toml",
    "nested",
    "typed",
    "without_empty_tables",
]

DEFAULT = "default"

RESERVED = "sagemaker_"
"""What SageMaker puts beside the hyperparameters begins with it."""

ENGINE_PACKAGES = {"gpu": "lt-trainer-gpu", "neuron": "lt-trainer-neuron"}
"""Engines that a recipe may name although their package is not installed here, with that package."""


@dataclass(frozen=True)
class Given:
    """One value as some source gave it; `text` says that a string is the written form of the value."""

    value: Any
    source: str
    text: bool = False


def from_toml(path: Path) -> dict[str, Given]:
    """Read a run TOML; sources are "path:line".

    Raises:
        RecipeError: the file cannot be read, or is not TOML.
    """
    try:
        text = path.read_bytes().decode()
        table = tomllib.loads(text)
    except OSError as exc:
        problem = f"cannot read the recipe {path}: {exc.strerror}"
        raise RecipeError(problem, remedy="give the path of a readable TOML file") from exc
    except UnicodeDecodeError as exc:
        problem = f"the recipe {path} is not UTF-8 text ({exc.reason} at byte {exc.start})"
        raise RecipeError(problem, remedy="save it as UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        problem = f"the recipe {path} is not valid TOML: {exc}"
        raise RecipeError(problem, remedy="text needs quotes, and a section starts with [name]") from exc
    lines = line_numbers(text)

    def source(dotted: str) -> str:
        while dotted and dotted not in lines:
            dotted = dotted.rpartition(".")[0]
        return f"{path}:{lines[dotted]}" if dotted else str(path)

    return {dotted: Given(value, source(dotted)) for dotted, value in flatten(table).items()}


def from_set(text: str) -> tuple[str, Given]:
    """Name and value of one `--set section.field=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        remedy = "write section.field=value, for example --set optimizer.lr=1e-3"
        raise RecipeError(f"--set {text}: there is no {'=' if name.strip() else 'name'}", remedy=remedy)
    return name.strip(), Given(value, "--set", text=True)


def from_hyperparameters(hyperparameters: Mapping[str, Any], schema: Mapping[str, Leaf]) -> dict[str, Given]:
    """Values by the dotted name of the field, for hyperparameters by their upper-case names.

    Raises:
        RecipeError: a name that is no hyperparameter, or two that set the same field.
    """
    known = {leaf.hp: leaf for leaf in schema.values() if leaf.hp}
    found: dict[str, Given] = {}
    set_by: dict[str, str] = {}
    for name, value in hyperparameters.items():
        if name.startswith(RESERVED):
            continue
        fields = {known[name].name: value} if name in known else _of_engines(name, value)
        if fields is None:
            near = suggest(name, known)
            raise RecipeError(
                "unknown hyperparameter",
                values={name: value},
                origins={name: "hyperparameters"},
                remedy=f"did you mean {near}?" if near else f"the hyperparameters are {', '.join(known)}",
            )
        for dotted, text in fields.items():
            if dotted in set_by:
                raise RecipeError(
                    f"both set {dotted}",
                    values={set_by[dotted]: hyperparameters[set_by[dotted]], name: value},
                    remedy="leave one of them out",
                )
            set_by[dotted] = name
            found[dotted] = Given(text, f"hyperparameter {name}", text=True)
    return found


def _of_engines(name: str, value: Any) -> Mapping[str, Any] | None:
    """What an installed engine takes a name for; None where none knows it."""
    from lt_trainer.engine import engine_names, engine_spec

    for engine in engine_names():
        of_engine = getattr(engine_spec(engine), "hyperparameter", None)
        fields = of_engine(name, value) if of_engine is not None else None
        if fields is not None:
            return fields
    return None


def typed(assignments: Mapping[str, Given], schema: Mapping[str, Leaf]) -> dict[str, Any]:
    """The assignments as values of the types that the schema declares.

    Raises:
        RecipeError: a name that the schema does not have, or a value of another type.
    """
    sections = section_names(schema)
    values: dict[str, Any] = {}
    for name, given in assignments.items():
        if name in schema:
            values[name] = coerce(given.value, schema[name].hint, name=name, source=given.source, text=given.text)
        elif name not in sections or given.value != {}:  # an empty section says nothing, and that is fine
            problem, remedy = _unknown(name, schema, sections)
            raise RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)
    return values


def without_empty_tables(assignments: Mapping[str, Given], cls: type) -> dict[str, Given]:
    """The assignments without tables of named sections that hold none, which say nothing.

    Raises:
        RecipeError: a named section is empty.
    """
    tables = entry_tables(cls)
    for name, given in assignments.items():
        if given.value == {} and name.rpartition(".")[0] in tables:
            problem, remedy = "an empty section", "write its fields below it, or leave it out"
            raise RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)
    return {name: given for name, given in assignments.items() if not (given.value == {} and name in tables)}


def _unknown(name: str, schema: Mapping[str, Leaf], sections: Iterable[str]) -> tuple[str, str]:
    """Problem and remedy for a name that is no field."""

    def inside(section: str) -> list[str]:
        return [leaf for leaf in schema if leaf.rpartition(".")[0] == section]

    parent, _, last = name.rpartition(".")
    if name in sections:
        return "this is a section, not a value", f"set one of its fields: {', '.join(inside(name))}"
    if parent in schema:
        return f"{parent} takes a value, not a table", f"write {parent} = ..."
    beside = {leaf.rpartition(".")[2]: leaf for leaf in inside(parent)}
    anywhere = {leaf.rpartition(".")[2]: leaf for leaf in reversed(list(schema))}
    near = anywhere.get(last) or beside.get(suggest(last, beside)) or anywhere.get(suggest(last, anywhere))
    if near:
        return "unknown field", f"did you mean {near}?"
    if inside(parent):
        return "unknown field", f"the fields of [{parent}] are {', '.join(inside(parent))}"
    return "unknown field", f"the sections are {', '.join(sorted({*sections, 'engine'}))}"


@dataclass(frozen=True)
class EngineTables:
    """Options by engine name (made where the engine is installed, raw elsewhere), origins, and what is unchecked."""

    made: dict[str, Any]
    origins: dict[str, str]
    unchecked: tuple[str, ...]


def engine_tables(assignments: Mapping[str, Given], selected: str, selected_source: str) -> EngineTables:
    """Resolve `engine.<name>.<option>` assignments, for the selected engine and every other that is mentioned.

    Raises:
        RecipeError: an engine that neither is installed nor belongs to lt, or a wrong option of an installed one.
    """
    from lt_trainer.engine import engine_names, engine_spec

    installed = engine_names()
    allowed = sorted({*installed, *ENGINE_PACKAGES})
    if selected not in allowed:
        raise RecipeError(
            "no such engine",
            values={"run.engine": selected},
            origins={"run.engine": selected_source},
            remedy=f"installed here: {', '.join(installed) or 'none'}; lt has {', '.join(ENGINE_PACKAGES)}",
        )
    tables: dict[str, dict[str, Given]] = {selected: {}}
    for dotted, given in assignments.items():
        parts = dotted.split(".", 2)
        if given.value == {} and (len(parts) == 1 or (len(parts) == 2 and parts[1] in allowed)):
            continue
        if len(parts) < 3 or parts[1] not in allowed:
            raise RecipeError(
                "not an option of an engine",
                values={dotted: given.value},
                origins={dotted: given.source},
                remedy=f"write engine.<name>.<option>; the names are {', '.join(allowed)}",
            )
        tables.setdefault(parts[1], {})[dotted] = given
    made: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, table in tables.items():
        prefix = f"engine.{name}."
        if name in installed:
            options = engine_spec(name).options
            schema = leaves(options, prefix)
            origins |= {dotted: table[dotted].source if dotted in table else DEFAULT for dotted in schema}
            try:
                made[name] = build(options, typed(table, schema), prefix)
            except RecipeError as exc:
                raise exc.located(origins) from None
        else:
            made[name] = nested({dotted.removeprefix(prefix): _raw(given) for dotted, given in table.items()})
            origins |= {dotted: given.source for dotted, given in table.items()}
    return EngineTables(made, origins, tuple(f"engine.{name}" for name in tables if name not in installed))


def _raw(given: Given) -> Any:
    """A value of unknown type: text is read as a TOML value where it is one, and stays text where it is not."""
    if not (given.text and isinstance(given.value, str)):
        return given.value
    try:
        return tomllib.loads(f"value = {given.value}")["value"]
    except tomllib.TOMLDecodeError:
        return given.value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name as nested tables: the reverse of `flatten`."""
    table: dict[str, Any] = {}
    for dotted, value in values.items():
        *parents, name = dotted.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return table
