"""Registry of sinks: required modules, installation check, opening."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lt_trainer.errors import RecipeError, TrainerError
from lt_trainer.observability.sinks.group import SinkGroup
from lt_trainer.observability.sinks.sink import RunInfo, Sink

if TYPE_CHECKING:
    from lt_trainer.observability.sinks.tensorboard import TensorBoardSink
    from lt_trainer.observability.sinks.trackio import TrackioSink
    from lt_trainer.observability.sinks.wandb import WandbSink

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Required module by recipe name, which is also the name of the extra."""


def check_sinks_installed(names: Sequence[str]) -> None:
    """Check that the libraries of the sinks are installed.

    Raises:
        RecipeError: a library is not installed; the message names the extra.
    """
    for name in names:
        if not _is_installed(SINKS[name]):
            raise RecipeError(
                f"the library of {name} is not installed",
                values={"metrics.sinks": tuple(names)},
                remedy=f"pip install 'lt-trainer[{name}]', or remove {name} from metrics.sinks",
            )


def _is_installed(module: str) -> bool:
    """Return True if a module can be imported; a namespace folder (W&B creates `wandb/`) does not count."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def open_sinks(names: Sequence[str], info: RunInfo) -> tuple[SinkGroup, dict[str, str]]:
    """Open the sinks of a recipe.

    Returns:
        The open sinks, and the errors of the others (such as an unreachable service) by name.

    Raises:
        SinkConfigError: a sink needs user action, such as a missing key.
        RunDirError: the run directory cannot be written.
    """
    opened: dict[str, Sink] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            opened[name] = _sink_factory(name)(info)
        except TrainerError:
            SinkGroup(opened).close()
            raise
        except Exception as exc:  # noqa: BLE001 - an unreachable service must not stop the run
            errors[name] = f"{type(exc).__name__}: {exc}"
    return SinkGroup(opened), errors


def check_sinks(names: Sequence[str], run: Path) -> None:
    """Check what the sinks need to open, writing nothing; for `lt train check`.

    Args:
        names: sinks of a recipe.
        run: run directory; may not exist yet.

    Raises:
        SinkConfigError: a sink needs user action, such as a missing key.
        RunDirError: the run directory cannot be read or written.
    """
    for name in names:
        _sink_class(name).check(run)


def _sink_factory(name: str) -> Callable[[RunInfo], Sink]:
    return _sink_class(name).open


def _sink_class(name: str) -> type[TensorBoardSink | TrackioSink | WandbSink]:
    if name == "tensorboard":
        from lt_trainer.observability.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink
    if name == "trackio":
        from lt_trainer.observability.sinks.trackio import TrackioSink

        return TrackioSink
    assert name == "wandb", name
    from lt_trainer.observability.sinks.wandb import WandbSink

    return WandbSink
