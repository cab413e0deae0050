"""The errors that a person can mend: what was given, where it came from, what is wrong with it, what to do.

Every error names field, value, source and remedy. A section of the recipe checks itself without knowing where its
values came from; the loader, which knows, adds the sources with `RecipeError.located`.
"""

from collections.abc import Mapping

__all__ = ["LoaderError", "MirrorError", "PeerError", "RecipeError", "RunDirError", "TrainerError"]


class TrainerError(ValueError):
    """A mistake in what the person gave us; its message says how to mend it. Commands end with `exit_code`."""

    exit_code: int = 64


class RunDirError(TrainerError):
    """A run directory that cannot be used, written or read."""


class LoaderError(TrainerError):
    """A data loader of the user's own that fails, gives rows that cannot be trained on, or cannot go on."""


class PeerError(TrainerError):
    """Another rank is gone or does not answer. Nothing saved is lost, so the run can be started again as it is."""

    exit_code = 75


class MirrorError(TrainerError):
    """The mirror in a bucket cannot be used as the recipe says.

    Args:
        text: What is wrong.
        again: Starting the run again may be all that it needs: exit code 75.
    """

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.exit_code = 75 if again else 64


class RecipeError(TrainerError):
    """A recipe that cannot be run.

    Args:
        problem: What is wrong, as half a sentence ("must lie in [0, 1)").
        values: The fields involved, by dotted name, with the values they have.
        remedy: What to do about it ("set optimizer.beta1 to 0.9").
        origins: Where each field's value came from; names that are missing here are shown without a source.
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
        shown = []
        for name, value in self.values.items():
            source = self.origins.get(name)
            shown.append(f"{name} = {value!r}" + (f" ({source})" if source else ""))
        message = f"{', '.join(shown)}: {self.problem}" if shown else self.problem
        return f"{message}; {self.remedy}" if self.remedy else message

    def located(self, origins: Mapping[str, str]) -> "RecipeError":
        """The same error with the source of each of its fields, as far as `origins` knows them."""
        known = {name: origins[name] for name in self.values if name in origins}
        return RecipeError(self.problem, values=self.values, remedy=self.remedy, origins=known | self.origins)
