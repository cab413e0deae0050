"""What the sections check their fields with; each raises a RecipeError that names section, field and remedy."""

from typing import Any

from lt_trainer.errors import RecipeError


def at_least(made: Any, section: str, low: float, *names: str) -> None:
    """Refuse the named fields of `made` when they are below `low`."""
    for name in names:
        if getattr(made, name) < low:
            raise wrong(made, section, name, f"must be at least {low}", f"use {low} or more")


def above_zero(made: Any, section: str, *names: str) -> None:
    """Refuse the named fields of `made` when they are not greater than zero."""
    for name in names:
        if getattr(made, name) <= 0:
            default = getattr(type(made), name)
            raise wrong(made, section, name, "must be greater than 0", f"the default is {default!r}")


def wrong(made: Any, section: str, names: str, problem: str, remedy: str) -> RecipeError:
    """An error about fields of one section, `names` separated by spaces."""
    return RecipeError(
        problem, values={f"{section}.{name}": getattr(made, name) for name in names.split()}, remedy=remedy
    )
