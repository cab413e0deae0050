"""What one rank does for all, or every rank for itself, so that an error of one is raised on all of them.

Cost: one broadcast; where it may take long, also one small exchange every few seconds, so that no collective runs into
its limit while the others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lt_ckpt import CheckpointError
from lt_trainer.errors import TrainerError

if TYPE_CHECKING:
    from lt_trainer.control import Control

__all__ = ["all_patiently", "patiently", "together"]


def together(control: Control, mine: bool, action: Callable[[], str]) -> str:
    """Run `action` on one rank, and give its result to all; an error that a person can mend is raised on every rank."""
    answer: dict[str, str | int] = {}
    failure: CheckpointError | TrainerError | None = None
    if mine:
        try:
            answer = {"value": action()}
        except (CheckpointError, TrainerError) as exc:
            failure, answer = exc, {"error": str(exc), "exit_code": exc.exit_code}
    answer = control.broadcast(answer)
    if failure is not None:
        raise failure
    if "error" in answer:
        error = CheckpointError(str(answer["error"]))
        error.exit_code = int(answer["exit_code"])
        raise error
    return str(answer["value"])


def patiently(
    control: Control, mine: bool, action: Callable[[], str], meanwhile: Callable[[], None], pause_s: float
) -> str:
    """As `together`, for what may take longer than a collective may: all ranks meet every `pause_s` until it is done.

    Args:
        control: How ranks meet.
        mine: Whether this rank acts.
        action: What it does, in a thread of its own.
        meanwhile: Called on all ranks after each time that they meet, in the same order.
        pause_s: Seconds between two meetings.
    """
    outcome = _outcome(control, mine, action, meanwhile, pause_s)

    def result() -> str:
        (found,) = outcome
        if isinstance(found, BaseException):
            raise found
        return found

    return together(control, mine, result)


def all_patiently(
    control: Control, action: Callable[[], object], meanwhile: Callable[[], None], pause_s: float
) -> None:
    """As `patiently`, for what every rank does for itself; where one fails, all raise.

    Raises:
        TrainerError: and CheckpointError: what the action has raised here; or that another rank has failed.
    """

    def act() -> str:
        action()
        return ""

    (found,) = _outcome(control, True, act, meanwhile, pause_s)
    failed = control.all_max(int(isinstance(found, BaseException)))
    if isinstance(found, BaseException):
        raise found
    if failed:
        raise CheckpointError("another rank could not do what this one has done; its message names the cause")


def _outcome(
    control: Control, mine: bool, action: Callable[[], str], meanwhile: Callable[[], None], pause_s: float
) -> list[str | BaseException]:
    """What `action` gave or raised on the ranks that act (nothing on others), when it is done on all of them."""
    outcome: list[str | BaseException] = []

    def act() -> None:
        try:
            outcome.append(action())
        except BaseException as exc:  # noqa: BLE001 - the callers raise it, where the others hear of it
            outcome.append(exc)

    thread = threading.Thread(target=act, name="lt-trainer-patience", daemon=True)
    if mine:
        thread.start()
        thread.join(pause_s)
    while control.all_max(int(thread.is_alive())):
        meanwhile()
        if mine:
            thread.join(pause_s)
    return outcome
