"""Functions of tests in several ranks: what each returned, or the error that says the most about why it did not.

Each call forks new ranks. A rank that has answered stays until all have, for rank 0 holds the store that others may
still need; one that fails leaves at once, so that the others lose their peer instead of waiting for it. Death explains
more than an error, and the earliest error more than those that follow from it; so that is their order.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerProcess
from typing import Any, NoReturn

from lt_trainer.testing.forks import (
    GRACE_S,
    Claim,
    RankError,
    abort,
    become_rank,
    end,
    environment,
    forkserver_context,
    load,
)


class RankPool:
    """Calls functions in ranks; the server that forks them starts with the first call.

    Args:
        ranks: The most that one call may ask for.
        preload: Modules for the server to import besides torch, such as the engine's.
    """

    def __init__(self, ranks: int = 4, *, preload: Sequence[str] = ()) -> None:
        self._most, self._preload = ranks, tuple(preload)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `function(*args)` in `ranks` new processes.

        Args:
            function: Of the top level of a file; it is loaded from there in each rank.
            args: Sent to every rank.
            ranks: How many.
            timeout_s: When a rank has not returned by then, all are ended.
            env: Environment variables to set or to replace.

        Returns:
            What each rank's call returned, by rank.

        Raises:
            RankError: A rank died or took too long; the message names it.
            Exception: What a rank raised, the earliest of all ranks', with the rank's traceback as a note.
        """
        assert 1 <= ranks <= self._most, f"{ranks} ranks of a pool of {self._most}"
        source, parcel = _source(function), pickle.dumps(args)
        context = forkserver_context(self._preload)
        pipes: list[Connection] = []
        processes: list[ForkServerProcess] = []
        with closing(Claim()) as claim:
            try:
                for rank in range(ranks):
                    here, there = Pipe()
                    # Where nothing forks (Windows) these are of another class.
                    pipes.append(here)  # pyright: ignore[reportArgumentType]
                    with there:
                        variables = {**environment(rank, ranks, claim.port), **(env or {})}
                        processes.append(
                            context.Process(target=_serve, args=(there, variables, source, parcel), daemon=True)
                        )
                        processes[-1].start()
                results = _gather(function.__qualname__, pipes, processes, timeout_s)
                for pipe in pipes:
                    pipe.close()  # all have answered and may go
                for process in processes:
                    process.join(GRACE_S)
                return results
            finally:
                for pipe in pipes:
                    pipe.close()
                end(processes)


def _serve(pipe: Connection, environ: Mapping[str, str], source: tuple[str, str, str], parcel: bytes) -> None:
    """One rank of a pool: answers with (True, result, "", 0) or (False, error, traceback, time of the error)."""
    become_rank(environ)
    try:
        function = load(*source)
        result = function(*pickle.loads(parcel))  # noqa: S301 - from the test itself
        pipe.send((True, result, "", 0.0))
    except BaseException as exc:  # noqa: BLE001 - the process's edge: every error belongs to the test that called
        pipe.send((False, _sendable(exc), traceback.format_exc(), time.monotonic()))
        return  # at once, so that the others lose their peer instead of waiting for it
    with suppress(EOFError, ConnectionError):
        pipe.recv_bytes()  # rank 0 holds the store that others may still need


def _sendable(error: BaseException) -> Exception:
    if not isinstance(error, Exception):
        return RankError(f"{type(error).__name__}: {error}")  # SystemExit and the like would end the test run
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001 - an error's own code decides what goes wrong here; the traceback tells the rest
        return RankError(f"{type(error).__name__}: {error}")
    return error


def _gather(
    name: str, pipes: Sequence[Connection], processes: Sequence[ForkServerProcess], timeout_s: float
) -> list[Any]:
    """The results by rank, or the error that says the most about why there are none."""
    answers: dict[int, Any] = {}
    failures: list[tuple[float, int, Exception, str]] = []
    died: list[int] = []
    waiting = dict(enumerate(pipes))
    deadline, hurried = time.monotonic() + timeout_s, False
    while waiting and (ready := connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))):
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            del waiting[rank]
            try:
                good, value, text, at = pipe.recv()
            except (EOFError, ConnectionError):
                died.append(rank)
                continue
            if good:
                answers[rank] = value
            else:
                failures.append((at, rank, value, text))
        if (died or failures) and not hurried:
            deadline, hurried = min(deadline, time.monotonic() + GRACE_S), True
    failures.sort(key=lambda failure: failure[0])
    notes = [f"rank {rank} of {name}:\n{text}" for _, rank, _, text in failures]
    if died:
        for rank in died:
            processes[rank].join()
        _raise(RankError(", ".join(f"rank {rank} of {name} {_ended(processes[rank])}" for rank in died)), notes)
    if failures:
        _raise(failures[0][2], notes)
    if waiting:
        abort([processes[rank] for rank in waiting])
        late = ", ".join(map(str, waiting))
        raise RankError(f"rank {late} of {name} did not return within {timeout_s:g} s and was ended; stacks on stderr")
    return [answers[rank] for rank in range(len(pipes))]


def _raise(error: Exception, notes: Sequence[str]) -> NoReturn:
    for note in notes:
        error.add_note(note)
    raise error


def _source(function: Callable[..., Any]) -> tuple[str, str, str]:
    """What `load` needs to find the function in another process."""
    name, path = function.__qualname__, inspect.getsourcefile(function)
    assert path is not None, f"{name}: no source file"
    assert "." not in name, f"{name}: ranks find only functions at the top level of a file"
    return os.path.abspath(path), function.__module__, name


def _ended(process: ForkServerProcess) -> str:
    code = process.exitcode
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
