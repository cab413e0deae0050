"""Error of a release: all that is missing or wrong, in one list."""

from collections.abc import Sequence

from lt_trainer.errors import TrainerError

__all__ = ["ReleaseError"]


class ReleaseError(TrainerError):
    """Release that cannot be made, verified or reproduced; commands exit with 64.

    Args:
        subject: What was asked for, as the beginning of the message.
        problems: Each missing or wrong thing: field, value, source and remedy.
    """

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{subject}:\n" + "\n".join(f"  - {problem}" for problem in problems))
