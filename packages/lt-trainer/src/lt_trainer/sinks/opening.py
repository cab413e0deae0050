"""Which sinks there are, what each needs, and how those of a recipe are opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.sinks.fan import Sinks
from lt_trainer.sinks.sink import About, Sink

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Names in a recipe, which are also the names of the extras, and the module that each needs."""


def require_sinks(names: Sequence[str]) -> None:
    """Refuse sinks whose library is not installed.

    Raises:
        RecipeError: naming the extra.
    """
    for name in names:
        if not _installed(SINKS[name]):
            raise RecipeError(
                f"the sink {name} needs a library that is not installed",
                values={"metrics.sinks": tuple(names)},
                remedy=f"pip install 'lt-trainer[{name}]', or take {name} out of metrics.sinks",
            )


def _installed(module: str) -> bool:
    """Whether a module can be imported; a folder of that name (W&B leaves one where it was started) is none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def open_sinks(names: Sequence[str], about: About) -> tuple[Sinks, dict[str, str]]:
    """Open the sinks of a recipe.

    Returns:
        Those that work, and what went wrong with the others (a service that does not answer), by name.

    Raises:
        SinkRefused: one that a person has to mend, such as a key that is missing.
        RunDirError: the run directory cannot be written.
    """
    opened: dict[str, Sink] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            opened[name] = _open(name)(about)
        except TrainerError:
            Sinks(opened).close()
            raise
        except Exception as exc:  # noqa: BLE001 - a service that does not answer must not keep a run from going on
            failed[name] = f"{type(exc).__name__}: {exc}"
    return Sinks(opened), failed


def _open(name: str) -> Callable[[About], Sink]:
    if name == "tensorboard":
        from lt_trainer.sinks.tensorboard import TensorBoard

        return TensorBoard.open
    if name == "trackio":
        from lt_trainer.sinks.trackio import Trackio

        return Trackio.open
    assert name == "wandb", name
    from lt_trainer.sinks.wandb import Wandb

    return Wandb.open
