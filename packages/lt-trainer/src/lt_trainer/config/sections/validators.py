"""Validators of section fields; they raise a RecipeError with section, field and remedy."""

from typing import Any

from lt_trainer.errors import RecipeError


def require_at_least(options: Any, section: str, low: float, *names: str) -> None:
    """Raise RecipeError if a named field is less than `low`."""
    for name in names:
        if getattr(options, name) < low:
            raise field_error(options, section, name, f"must be at least {low}", f"use {low} or more")


def require_positive(options: Any, section: str, *names: str) -> None:
    """Raise RecipeError if a named field is not greater than zero."""
    for name in names:
        if getattr(options, name) <= 0:
            default = getattr(type(options), name)
            raise field_error(options, section, name, "must be greater than 0", f"the default is {default!r}")


def field_error(options: Any, section: str, names: str, problem: str, remedy: str) -> RecipeError:
    """Return an error about fields of one section, `names` separated by spaces."""
    return RecipeError(
        problem, values={f"{section}.{name}": getattr(options, name) for name in names.split()}, remedy=remedy
    )
