"""Pool that calls test functions in several ranks and returns their results or the root-cause error.

Each call forks new ranks. A rank that has returned stays until all have, since rank 0 has the store that others may
still need; one that fails exits at once, so that the others lose their peer instead of waiting for it. Deaths take
precedence over errors, and the earliest error over later ones, which are its consequences.
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

from lt_test_helpers.forkserver import (
    JOIN_TIMEOUT_S,
    PortClaim,
    RankError,
    abort_processes,
    become_rank,
    forkserver_context,
    kill_processes,
    load_function,
    rank_environment,
)


class RankPool:
    """Pool of ranks that run a function; the fork server starts with the first call.

    Args:
        ranks: Maximum number of ranks per call.
        preload: Further modules for the server to import, such as the engine's.
    """

    def __init__(self, ranks: int = 4, *, preload: Sequence[str] = ()) -> None:
        self._max_ranks, self._preload = ranks, tuple(preload)

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
            function: Top-level function of a file, which each rank loads.
            args: Arguments for every rank.
            ranks: Number of ranks.
            timeout_s: Time limit; then all ranks are aborted.
            env: Environment variables to set.

        Returns:
            The results by rank.

        Raises:
            RankError: A rank died or timed out; the message names it.
            Exception: The earliest error of all ranks, with the rank's traceback as a note.
        """
        assert 1 <= ranks <= self._max_ranks, f"{ranks} ranks in a pool of {self._max_ranks}"
        source, pickled_args = _function_source(function), pickle.dumps(args)
        context = forkserver_context(self._preload)
        pipes: list[Connection] = []
        processes: list[ForkServerProcess] = []
        with closing(PortClaim()) as claim:
            try:
                for rank in range(ranks):
                    local, remote = Pipe()
                    # Another class on Windows, which cannot fork.
                    pipes.append(local)  # pyright: ignore[reportArgumentType]
                    with remote:
                        variables = {**rank_environment(rank, ranks, claim.port), **(env or {})}
                        processes.append(
                            context.Process(target=_serve, args=(remote, variables, source, pickled_args), daemon=True)
                        )
                        processes[-1].start()
                results = _gather(function.__qualname__, pipes, processes, timeout_s)
                for pipe in pipes:
                    pipe.close()  # lets the ranks exit
                for process in processes:
                    process.join(JOIN_TIMEOUT_S)
                return results
            finally:
                for pipe in pipes:
                    pipe.close()
                kill_processes(processes)


def _serve(pipe: Connection, environ: Mapping[str, str], source: tuple[str, str, str], pickled_args: bytes) -> None:
    """Run one rank; sends (True, result, "", 0) or (False, error, traceback, time of the error)."""
    become_rank(environ)
    try:
        function = load_function(*source)
        result = function(*pickle.loads(pickled_args))
        pipe.send((True, result, "", 0.0))
    except BaseException as exc:  # noqa: BLE001 - process boundary: every error is raised in the test
        pipe.send((False, _picklable_error(exc), traceback.format_exc(), time.monotonic()))
        return  # exit at once, so that the others lose their peer instead of waiting for it
    with suppress(EOFError, ConnectionError):
        pipe.recv_bytes()  # rank 0 has the store that others may still need


def _picklable_error(error: BaseException) -> Exception:
    if not isinstance(error, Exception):
        return RankError(f"{type(error).__name__}: {error}")  # SystemExit etc. would end the test session
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - unpickling an error can raise anything; the traceback is sent anyway
        return RankError(f"{type(error).__name__}: {error}")
    return error


def _gather(
    name: str, pipes: Sequence[Connection], processes: Sequence[ForkServerProcess], timeout_s: float
) -> list[Any]:
    """Return the results by rank, or raise the root-cause error."""
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, Exception, str]] = []
    died: list[int] = []
    waiting = dict(enumerate(pipes))
    deadline, is_shortened = time.monotonic() + timeout_s, False
    while waiting and (ready := connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))):
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            del waiting[rank]
            try:
                succeeded, value, text, error_time = pipe.recv()
            except (EOFError, ConnectionError):
                died.append(rank)
                continue
            if succeeded:
                results[rank] = value
            else:
                failures.append((error_time, rank, value, text))
        if (died or failures) and not is_shortened:
            deadline, is_shortened = min(deadline, time.monotonic() + JOIN_TIMEOUT_S), True
    failures.sort(key=lambda failure: failure[0])
    notes = [f"rank {rank} of {name}:\n{text}" for _, rank, _, text in failures]
    if died:
        for rank in died:
            processes[rank].join()
        _raise(RankError(", ".join(f"rank {rank} of {name} {_describe_exit(processes[rank])}" for rank in died)), notes)
    if failures:
        _raise(failures[0][2], notes)
    if waiting:
        abort_processes([processes[rank] for rank in waiting])
        late = ", ".join(map(str, waiting))
        raise RankError(f"rank {late} of {name} did not return within {timeout_s:g} s; stacks on stderr")
    return [results[rank] for rank in range(len(pipes))]


def _raise(error: Exception, notes: Sequence[str]) -> NoReturn:
    for note in notes:
        error.add_note(note)
    raise error


def _function_source(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the arguments of `load_function` for a function."""
    name, path = function.__qualname__, inspect.getsourcefile(function)
    assert path is not None, f"{name}: no source file"
    assert "." not in name, f"{name}: must be a top-level function"
    return os.path.abspath(path), function.__module__, name


def _describe_exit(process: ForkServerProcess) -> str:
    code = process.exitcode
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
