"""Upper-case hyperparameters of SageMaker training jobs.

SageMaker passes a training container a flat JSON map of strings, with reserved keys that start with `sagemaker_`, which
are dropped. Every other key must be in `hyperparameter_leaves()`, or known to an installed engine (`hyperparameter` of
its spec): names of the training scripts that it replaces.
"""

from pathlib import Path
from typing import Any

from lt_trainer.config.fields import Leaf, leaves
from lt_trainer.config.sections.recipe import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.files import read_json

EXAMPLE = """write one object of strings, {"LEARNING_RATE": "1e-3"}"""


def hyperparameter_leaves() -> dict[str, Leaf]:
    """Return the recipe leaf of each hyperparameter name, in the order of the recipe."""
    return {leaf.hyperparameter: leaf for leaf in leaves(Recipe).values() if leaf.hyperparameter}


def read_hyperparameters(path: str | Path) -> dict[str, Any]:
    """Read a hyperparameters.json as written by SageMaker: one JSON object of strings.

    Raises:
        RecipeError: the file cannot be read or has other content.
    """
    try:
        content = read_json(path)
    except OSError as exc:
        problem = f"cannot read the hyperparameters {path}: {exc.strerror}"
        raise RecipeError(problem, remedy="pass the path of a readable JSON file") from exc
    except ValueError as exc:
        raise RecipeError(f"the hyperparameters {path} are not valid JSON: {exc}", remedy=EXAMPLE) from exc
    if not isinstance(content, dict):
        raise RecipeError(f"the hyperparameters {path} are not a JSON object", remedy=EXAMPLE)
    for name, value in content.items():
        if not isinstance(value, str | int | float | bool):
            raise RecipeError("expected a string", values={name: value}, origins={name: str(path)}, remedy=EXAMPLE)
    return content
