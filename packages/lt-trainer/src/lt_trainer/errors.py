"""Errors that the user can fix: each names field, value, source and remedy.

A recipe section checks its values without knowing their sources; `load` adds them with `RecipeError.with_origins`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lt_trainer.constants import EXIT_REQUEUE, EXIT_USER
from lt_trainer.toml import format_value


class TrainerError(ValueError):
    """Error that the user can fix; the message says how. Commands exit with `exit_code`."""

    exit_code: int = EXIT_USER


class RunDirError(TrainerError):
    """Run directory that cannot be opened, read or written."""


class LoaderError(TrainerError):
    """Custom data loader that fails, yields invalid rows, or cannot resume."""


class PeerError(TrainerError):
    """Another rank exited or does not respond. Saved checkpoints are intact: rerunning resumes."""

    exit_code = EXIT_REQUEUE


class RestoreError(TrainerError):
    """Part of a checkpoint that a rank cannot read, or reads damaged; raised by all ranks."""


class MirrorError(TrainerError):
    """Mirror in S3 that cannot be used as the recipe says.

    Args:
        text: Message.
        retryable: A rerun may succeed: exit code 75 instead of 64.
    """

    def __init__(self, text: str, *, retryable: bool = False) -> None:
        super().__init__(text)
        self.exit_code = EXIT_REQUEUE if retryable else EXIT_USER


class RecipeError(TrainerError):
    """Invalid recipe.

    Args:
        problem: Problem, as half a sentence ("must be in [0, 1)").
        values: Values of the fields involved, by dotted name.
        remedy: Remedy ("set optimizer.beta1 to 0.9").
        origins: Source of each field's value; fields without one are shown without a source.
    """

    def __init__(
        self,
        problem: str,
        *,
        values: Mapping[str, object] | None = None,
        remedy: str = "",
        origins: Mapping[str, str] | None = None,
    ):
        self.problem = problem
        self.values = dict(values or {})
        self.remedy = remedy
        self.origins = dict(origins or {})
        super().__init__(self._message())

    def _message(self) -> str:
        sources = {name: f" ({source})" for name, source in self.origins.items() if source}
        shown = [f"{name} = {format_value(value)}{sources.get(name, '')}" for name, value in self.values.items()]
        message = f"{', '.join(shown)}: {self.problem}" if shown else self.problem
        return f"{message}; {self.remedy}" if self.remedy else message

    def with_origins(self, origins: Mapping[str, str]) -> "RecipeError":
        """Return the same error with the sources of its fields, where known."""
        known = {n: source for given, source in origins.items() for n in self.values if f"{given}.".startswith(f"{n}.")}
        return RecipeError(self.problem, values=self.values, remedy=self.remedy, origins=known | self.origins)


@contextmanager
def as_recipe_error(address: str, field: str = "model.init_from") -> Iterator[None]:
    """Translate errors of lt-ckpt, lt-data and lt-model into RecipeErrors of the field with that address."""
    from lt_ckpt import CheckpointError
    from lt_data import DataError
    from lt_model import ModelError

    try:
        yield
    except (CheckpointError, DataError, ModelError) as exc:
        raise RecipeError(str(exc), values={field: address}) from exc
