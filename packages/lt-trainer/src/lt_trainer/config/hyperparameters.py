"""Upper-case hyperparameters of SageMaker training jobs.

SageMaker passes a training container a flat JSON map of strings, with reserved keys that start with `sagemaker_`, which
are dropped. Every other key must be in `hyperparameter_fields()`, or known to an installed engine (`hyperparameter` of
its spec): names of the training scripts that it replaces.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lt_trainer.config.section import extra_of, leaves, suggest
from lt_trainer.config.sections import Recipe
from lt_trainer.errors import RecipeError
from lt_trainer.toml import Text


def hyperparameter_fields() -> dict[str, str]:
    """Return the dotted name of the recipe field of each hyperparameter, in the order of the recipe."""
    names = {extra_of(field, "hyperparameter"): dotted for dotted, field in leaves(Recipe).items()}
    return {name: dotted for name, dotted in names.items() if name}


def hyperparameter_values(hyperparameters: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return value and source by dotted name of the fields that hyperparameters set.

    Raises:
        RecipeError: unknown hyperparameter, or two that set the same field.
    """
    known, found, set_by = hyperparameter_fields(), dict[str, tuple[Any, str]](), dict[str, str]()
    for name, value in hyperparameters.items():
        if name.startswith("sagemaker_"):
            continue
        fields = {known[name]: value} if name in known else _engine_hyperparameter(name, value)
        if fields is None:
            similar = suggest(name, known)
            remedy = f"did you mean {similar}?" if similar else f"the hyperparameters are {', '.join(known)}"
            shown = Text(value) if isinstance(value, str) else value
            raise RecipeError("unknown hyperparameter", values={name: shown}, remedy=remedy)
        for dotted, text in fields.items():
            if dotted in set_by:
                values = {set_by[dotted]: hyperparameters[set_by[dotted]], name: value}
                raise RecipeError(f"both set {dotted}", values=values, remedy="remove one of them")
            set_by[dotted] = name
            found[dotted] = (text, f"hyperparameter {name}")
    return found


def _engine_hyperparameter(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the fields that an installed engine sets for a name; None if no engine knows it."""
    from lt_trainer.engine import engine_names, engine_spec

    for engine in engine_names():
        to_fields = getattr(engine_spec(engine), "hyperparameter", None)
        if to_fields is not None and (fields := to_fields(name, value)) is not None:
            return fields
    return None


def read_hyperparameters(path: str | Path) -> dict[str, Any]:
    """Read a hyperparameters.json as written by SageMaker: one JSON object of strings.

    Raises:
        RecipeError: the file cannot be read or has other content.
    """
    try:
        return TypeAdapter(dict[str, str | int | float]).validate_json(Path(path).read_bytes())
    except OSError as exc:
        raise RecipeError(f"cannot read the hyperparameters {path}: {exc.strerror}") from exc
    except ValueError as exc:
        remedy = """write {"LEARNING_RATE": "1e-3"}"""
        raise RecipeError(f"the hyperparameters {path} are not one JSON object of strings", remedy=remedy) from exc
