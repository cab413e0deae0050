"""Actions of one or all ranks whose errors are raised on all ranks.

Cost: one broadcast; for long actions also one small exchange every few seconds, so that no collective times out while
other ranks wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from lt_ckpt import CheckpointError
from lt_trainer.errors import RestoreError, TrainerError

if TYPE_CHECKING:
    from lt_trainer.control import Control


T = TypeVar("T")


def run_on_rank0(control: Control, is_rank0: bool, action: Callable[[], str]) -> str:
    """Run `action` on rank 0 and return its result on all ranks.

    Raises:
        TrainerError: on all ranks, with the message of the error on rank 0; or CheckpointError.
    """
    value, failure = "", None
    if is_rank0:
        try:
            value = action()
        except (CheckpointError, TrainerError) as exc:
            failure = exc
    value, error, exit_code = control.broadcast([value, str(failure or ""), failure.exit_code if failure else 0])
    if failure is not None:
        raise failure
    if exit_code:
        raised = CheckpointError(error)
        raised.exit_code = exit_code
        raise raised
    return value


def run_with_keepalive(
    control: Control, is_rank0: bool, action: Callable[[], str], on_poll: Callable[[], None], poll_interval_s: float
) -> str:
    """Run a long `action` on rank 0 like `run_on_rank0`, while all ranks synchronize regularly.

    Args:
        control: Control collectives.
        is_rank0: This rank runs the action.
        action: Runs in a separate thread.
        on_poll: Called on all ranks after each synchronization, in the same order.
        poll_interval_s: Seconds between synchronizations.
    """
    return run_on_rank0(control, is_rank0, _run_in_thread(control, is_rank0, action, on_poll, poll_interval_s).result)


def run_on_all_ranks(
    control: Control, action: Callable[[], object], on_poll: Callable[[], None], poll_interval_s: float
) -> None:
    """Run `action` on every rank, while all ranks synchronize regularly; if one fails, all raise.

    Raises:
        TrainerError: raised by the action here; or CheckpointError, also if the action failed on another rank.
    """
    attempt_on_all_ranks(control, _run_in_thread(control, True, action, on_poll, poll_interval_s).result)


def attempt_on_all_ranks(control: Control, action: Callable[[], object]) -> None:
    """Run `action` on every rank; if one fails, all raise.

    Raises:
        TrainerError: raised by the action here; or CheckpointError, also with the message of another rank.
    """
    failure: CheckpointError | TrainerError | None = None
    try:
        action()
    except (CheckpointError, TrainerError) as exc:
        failure = exc
    if control.all_reduce_max(int(failure is not None)):
        problems = control.all_gather("" if failure is None else str(failure))
        raise failure or CheckpointError(f"on another rank: {next(filter(None, problems), '')}")


def read_on_all_ranks(control: Control, read: Callable[[], None]) -> None:
    """Read this rank's part of a checkpoint; if one rank cannot, none keeps what it has read.

    Raises:
        RestoreError: on all ranks, a rank's part is damaged or cannot be read.
    """
    try:
        attempt_on_all_ranks(control, read)
    except CheckpointError as exc:
        raise RestoreError(str(exc)) from exc


def _run_in_thread(
    control: Control, is_active: bool, action: Callable[[], T], on_poll: Callable[[], None], poll_interval_s: float
) -> Future[T]:
    """Run `action` in a thread, if `is_active`; return when it is done on all ranks."""
    future: Future[T] = Future()

    def act() -> None:
        try:
            future.set_result(action())
        except BaseException as exc:  # noqa: BLE001 - raised by the callers on all ranks
            future.set_exception(exc)

    if is_active:
        threading.Thread(target=act, name="lt-trainer-action", daemon=True).start()
        wait([future], poll_interval_s)
    while control.all_reduce_max(int(is_active and not future.done())):
        on_poll()
        if is_active:
            wait([future], poll_interval_s)
    return future
