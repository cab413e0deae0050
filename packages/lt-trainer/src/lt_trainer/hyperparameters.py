"""The upper-case hyperparameters: one table that comes from the recipe's fields, read in both directions.

SageMaker hands a training container one flat JSON map in which every value is a string, and adds reserved keys of its
own that start with `sagemaker_`; those are dropped. Every other key must be one of the names in `table()`, or one that
an installed engine knows (its spec's `hyperparameter`): the names of the scripts that it replaces.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError
from lt_trainer.fields import Leaf, leaves, suggest

__all__ = ["markdown", "named", "read", "table"]

RESERVED = "sagemaker_"
EXAMPLE = """write one object of strings, {"LEARNING_RATE": "1e-3"}"""


def table() -> dict[str, Leaf]:
    """Hyperparameter name to the recipe field that it sets, in the order of the recipe."""
    from lt_trainer.recipe import Recipe

    return {leaf.hp: leaf for leaf in leaves(Recipe).values() if leaf.hp}


def named(hyperparameters: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Value and source by the dotted name of the field, for hyperparameters by their upper-case names.

    Raises:
        RecipeError: a name that is no hyperparameter, or two that set the same field.
    """
    known = table()
    found: dict[str, tuple[Any, str]] = {}
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
            found[dotted] = (text, f"hyperparameter {name}")
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


def read(path: str | Path) -> dict[str, Any]:
    """Read a hyperparameters.json as SageMaker writes it: one JSON object of strings.

    Raises:
        RecipeError: the file cannot be read or holds something else.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as exc:
        problem = f"cannot read the hyperparameters {path}: {exc.strerror}"
        raise RecipeError(problem, remedy="give the path of a readable JSON file") from exc
    except ValueError as exc:
        raise RecipeError(f"the hyperparameters {path} are not valid JSON: {exc}", remedy=EXAMPLE) from exc
    if not isinstance(content, dict):
        raise RecipeError(f"the hyperparameters {path} are not a JSON object", remedy=EXAMPLE)
    for name, value in content.items():
        if not isinstance(value, str | int | float | bool):
            raise RecipeError("expected a string", values={name: value}, origins={name: str(path)}, remedy=EXAMPLE)
    return content


def markdown() -> str:
    """The table for people, as Markdown."""
    lines = ["| hyperparameter | recipe field | default | meaning |", "|---|---|---|---|"]
    for name, leaf in table().items():
        default = "from the data" if name == "VOCAB_SIZE" else f"`{leaf.default}`"
        unit = f" ({leaf.unit})" if leaf.unit else ""
        lines.append(f"| `{name}` | `{leaf.name}` | {default} | {leaf.help}{unit} |")
    return "\n".join(lines) + "\n"
