"""Errors of a release: all that is missing or wrong, in one list; and what a damaged file raises."""

from collections.abc import Sequence

from lt_trainer.errors import TrainerError

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors of code that is given a file of another structure than it writes itself."""


class ReleaseError(TrainerError):
    """Release that cannot be made, verified or reproduced; commands exit with 64.

    Args:
        subject: What was asked for, as the beginning of the message.
        problems: Each missing or wrong thing: field, value, source and remedy.
    """

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{subject}:\n" + "\n".join(f"  - {indent_lines(problem, 4)}" for problem in problems))


def indent_lines(text: str, width: int) -> str:
    """Return a text whose further lines are indented, so that none looks like one of ours."""
    return ("\n" + " " * width).join(text.splitlines())


def describe_damage(exc: Exception) -> str:
    """Return the text of an error; of one that was meant for a programmer, its kind too."""
    return (
        str(exc)
        if isinstance(exc, OSError | TrainerError) or type(exc) is ValueError
        else f"{type(exc).__name__}: {exc}"
    )
