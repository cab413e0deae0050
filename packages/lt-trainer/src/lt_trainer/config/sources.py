"""Sources of recipe values, and their validation against a schema.

A source yields a map of dotted names to `Assignment`: a value, its source, and whether it is text to be parsed. The
caller merges sources; `coerce_assignments` then converts the values to the declared types, and `engine_tables` does the
same for the sections of engines, whose schema is known only where the engine's package is installed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_trainer.config.fields import Leaf, build, coerce, flatten, leaves, named_section_tables, section_names, suggest
from lt_trainer.config.toml import line_numbers
from lt_trainer.errors import RecipeError
from lt_trainer.files import parse_toml, read_bytes

DEFAULT = "default"

SAGEMAKER_PREFIX = "sagemaker_"
"""Prefix of the reserved keys that SageMaker adds to the hyperparameters."""

ENGINE_PACKAGES = {"gpu": "lt-trainer-gpu", "neuron": "lt-trainer-neuron"}
"""Engines that a recipe may name even if their package is not installed here, with that package."""


@dataclass(frozen=True)
class Assignment:
    """Value as given by a source; `is_text`: a string is the text form of the value."""

    value: Any
    source: str
    is_text: bool = False


def read_toml(path: Path) -> dict[str, Assignment]:
    """Read a run TOML; sources are "path:line".

    Raises:
        RecipeError: the file cannot be read, or is not TOML.
    """
    try:
        text = read_bytes(path).decode()
        table = parse_toml(text)
    except OSError as exc:
        problem = f"cannot read the recipe {path}: {exc.strerror}"
        raise RecipeError(problem, remedy="give the path of a readable TOML file") from exc
    except UnicodeDecodeError as exc:
        problem = f"the recipe {path} is not UTF-8 ({exc.reason} at byte {exc.start})"
        raise RecipeError(problem, remedy="save it as UTF-8") from exc
    except ValueError as exc:
        problem = f"the recipe {path} is not valid TOML: {exc}"
        raise RecipeError(problem, remedy="strings need quotes, and a section starts with [name]") from exc
    lines = line_numbers(text)

    def source(dotted: str) -> str:
        while dotted and dotted not in lines:
            dotted = dotted.rpartition(".")[0]
        return f"{path}:{lines[dotted]}" if dotted else str(path)

    return {dotted: Assignment(value, source(dotted)) for dotted, value in flatten(table).items()}


def parse_set_option(text: str) -> tuple[str, Assignment]:
    """Parse name and value of a `--set section.field=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        remedy = "write section.field=value, for example --set optimizer.lr=1e-3"
        raise RecipeError(f"--set {text}: missing {'=' if name.strip() else 'name'}", remedy=remedy)
    return name.strip(), Assignment(value, "--set", is_text=True)


def hyperparameter_assignments(hyperparameters: Mapping[str, Any], schema: Mapping[str, Leaf]) -> dict[str, Assignment]:
    """Convert hyperparameters by their upper-case names to assignments by dotted field name.

    Raises:
        RecipeError: unknown hyperparameter, or two that set the same field.
    """
    known = {leaf.hyperparameter: leaf for leaf in schema.values() if leaf.hyperparameter}
    assignments: dict[str, Assignment] = {}
    set_by: dict[str, str] = {}
    for name, value in hyperparameters.items():
        if name.startswith(SAGEMAKER_PREFIX):
            continue
        fields = {known[name].name: value} if name in known else _engine_hyperparameter(name, value)
        if fields is None:
            similar = suggest(name, known)
            raise RecipeError(
                "unknown hyperparameter",
                values={name: value},
                origins={name: "hyperparameters"},
                remedy=f"did you mean {similar}?" if similar else f"the hyperparameters are {', '.join(known)}",
            )
        for dotted, text in fields.items():
            if dotted in set_by:
                raise RecipeError(
                    f"both set {dotted}",
                    values={set_by[dotted]: hyperparameters[set_by[dotted]], name: value},
                    remedy="remove one of them",
                )
            set_by[dotted] = name
            assignments[dotted] = Assignment(text, f"hyperparameter {name}", is_text=True)
    return assignments


def _engine_hyperparameter(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the fields that an installed engine sets for a name; None if no engine knows it."""
    from lt_trainer.engine import engine_names, engine_spec

    for engine in engine_names():
        to_fields = getattr(engine_spec(engine), "hyperparameter", None)
        fields = to_fields(name, value) if to_fields is not None else None
        if fields is not None:
            return fields
    return None


def coerce_assignments(assignments: Mapping[str, Assignment], schema: Mapping[str, Leaf]) -> dict[str, Any]:
    """Convert assignments to values of the types declared in the schema.

    Raises:
        RecipeError: unknown name, or a value of another type.
    """
    sections = section_names(schema)
    values: dict[str, Any] = {}
    for name, given in assignments.items():
        if name in schema:
            values[name] = coerce(given.value, schema[name].hint, name=name, source=given.source, text=given.is_text)
        elif name not in sections or given.value != {}:  # an empty section is valid
            problem, remedy = _unknown(name, schema, sections)
            raise RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)
    return values


def drop_empty_tables(assignments: Mapping[str, Assignment], cls: type) -> dict[str, Assignment]:
    """Return the assignments without empty tables of named sections.

    Raises:
        RecipeError: a named section is empty.
    """
    tables = named_section_tables(cls)
    for name, given in assignments.items():
        if given.value == {} and name.rpartition(".")[0] in tables:
            problem, remedy = "empty section", "add its fields, or remove it"
            raise RecipeError(problem, values={name: given.value}, origins={name: given.source}, remedy=remedy)
    return {name: given for name, given in assignments.items() if not (given.value == {} and name in tables)}


def _unknown(name: str, schema: Mapping[str, Leaf], sections: Iterable[str]) -> tuple[str, str]:
    """Return problem and remedy for an unknown name."""

    def inside(section: str) -> list[str]:
        return [leaf for leaf in schema if leaf.rpartition(".")[0] == section]

    parent, _, last = name.rpartition(".")
    renamed = {leaf.former_name: leaf.name for leaf in schema.values()}
    if name in renamed:
        return "this field was renamed", f"write {renamed[name]}"
    if name in sections:
        return "not a value but a section", f"set one of its fields: {', '.join(inside(name))}"
    if parent in schema:
        return f"{parent} takes a value, not a table", f"write {parent} = ..."
    siblings = {leaf.rpartition(".")[2]: leaf for leaf in inside(parent)}
    anywhere = {leaf.rpartition(".")[2]: leaf for leaf in reversed(list(schema))}
    similar = anywhere.get(last) or siblings.get(suggest(last, siblings)) or anywhere.get(suggest(last, anywhere))
    if similar:
        return "unknown field", f"did you mean {similar}?"
    if inside(parent):
        return "unknown field", f"the fields of [{parent}] are {', '.join(inside(parent))}"
    return "unknown field", f"the sections are {', '.join(sorted({*sections, 'engine'}))}"


@dataclass(frozen=True)
class EngineTables:
    """Options by engine name (raw tables if not installed), origins, and unchecked sections."""

    options: dict[str, Any]
    origins: dict[str, str]
    unchecked: tuple[str, ...]


def engine_tables(assignments: Mapping[str, Assignment], selected: str, selected_source: str) -> EngineTables:
    """Resolve `engine.<name>.<option>` assignments for the selected and all mentioned engines.

    Raises:
        RecipeError: an engine that is neither installed nor part of lt, or an invalid option of an installed one.
    """
    from lt_trainer.engine import engine_names, engine_spec

    installed = engine_names()
    allowed = sorted({*installed, *ENGINE_PACKAGES})
    if selected not in allowed:
        raise RecipeError(
            "unknown engine",
            values={"run.engine": selected},
            origins={"run.engine": selected_source},
            remedy=f"installed here: {', '.join(installed) or 'none'}; lt has {', '.join(ENGINE_PACKAGES)}",
        )
    tables: dict[str, dict[str, Assignment]] = {selected: {}}
    for dotted, given in assignments.items():
        parts = dotted.split(".", 2)
        if given.value == {} and (len(parts) == 1 or (len(parts) == 2 and parts[1] in allowed)):
            continue
        if len(parts) < 3 or parts[1] not in allowed:
            raise RecipeError(
                "not an engine option",
                values={dotted: given.value},
                origins={dotted: given.source},
                remedy=f"write engine.<name>.<option>; the names are {', '.join(allowed)}",
            )
        tables.setdefault(parts[1], {})[dotted] = given
    options_by_name: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, table in tables.items():
        prefix = f"engine.{name}."
        if name in installed:
            options = engine_spec(name).options
            schema = leaves(options, prefix)
            origins |= {dotted: table[dotted].source if dotted in table else DEFAULT for dotted in schema}
            try:
                options_by_name[name] = build(options, coerce_assignments(table, schema), prefix)
            except RecipeError as exc:
                raise exc.with_origins(origins) from None
        else:
            options_by_name[name] = unflatten(
                {dotted.removeprefix(prefix): _parse_raw(given) for dotted, given in table.items()}
            )
            origins |= {dotted: given.source for dotted, given in table.items()}
    return EngineTables(options_by_name, origins, tuple(f"engine.{name}" for name in tables if name not in installed))


def _parse_raw(given: Assignment) -> Any:
    """Parse a value of unknown type as TOML; if it is not TOML, it stays text."""
    if not (given.is_text and isinstance(given.value, str)):
        return given.value
    try:
        return parse_toml(f"value = {given.value}")["value"]
    except ValueError:
        return given.value


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted name to nested tables, the inverse of `flatten`."""
    table: dict[str, Any] = {}
    for dotted, value in values.items():
        *parents, name = dotted.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return table
