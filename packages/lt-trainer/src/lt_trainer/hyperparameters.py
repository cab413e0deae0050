"""The upper-case hyperparameters: one table that comes from the recipe's fields.

SageMaker hands a training container one flat JSON map in which every value is a string, and adds reserved keys of its
own that start with `sagemaker_`; those are dropped. Every other key must be one of the names in `table()`, or one that
an installed engine knows (its spec's `hyperparameter`): the names of the scripts that it replaces.
"""

import json
from pathlib import Path
from typing import Any

from lt_trainer.errors import RecipeError
from lt_trainer.fields import Leaf, leaves
from lt_trainer.recipe import Recipe

__all__ = ["markdown", "read", "table"]

EXAMPLE = """write one object of strings, {"LEARNING_RATE": "1e-3"}"""


def table() -> dict[str, Leaf]:
    """Hyperparameter name to the recipe field that it sets, in the order of the recipe."""
    return {leaf.hp: leaf for leaf in leaves(Recipe).values() if leaf.hp}


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
