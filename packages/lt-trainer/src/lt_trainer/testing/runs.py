"""The `lt-train` command in several ranks, without torchrun: processes to be killed, stopped and started again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

from lt_trainer.testing.forks import (
    Claim,
    RankError,
    abort,
    become_rank,
    end,
    environment,
    forkserver_context,
    load,
)


class Run:
    """The ranks of one started command; leaving the context kills those that still run."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._processes: list[ForkServerProcess] = []
        self._logs: list[Path] = []
        self.pids: list[int] = []

    def add(self, process: ForkServerProcess, log: Path) -> None:
        """Take over the next rank, which has been started, and the file that it writes to."""
        assert process.pid is not None
        self._processes.append(process)
        self._logs.append(log)
        self.pids.append(process.pid)

    @property
    def alive(self) -> list[int]:
        """The ranks that still run."""
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all; those that have ended are left out."""
        for one in self.alive:
            if rank in (None, one):
                os.kill(self.pids[one], number)

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL one rank, or all."""
        self.signal(signal.SIGKILL, rank)

    def wait(self, timeout_s: float = 120) -> list[int]:
        """Wait until all ranks have ended.

        Returns:
            Their exit codes by rank; -n for one that signal n has killed.

        Raises:
            RankError: Some had not ended by then. They are aborted, which puts their stacks into their output.
        """
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = self.alive
        if late:
            abort([self._processes[rank] for rank in late])
            outputs = "".join(f"\n--- rank {rank}:\n{self.output(rank)[-4000:]}" for rank in late)
            raise RankError(f"rank {', '.join(map(str, late))} had not ended after {timeout_s:g} s{outputs}")
        return [process.exitcode or 0 for process in self._processes]

    def output(self, rank: int = 0) -> str:
        """What a rank has written to standard output and standard error so far."""
        return self._logs[rank].read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Kill what still runs and free the port; closing twice is fine."""
        end(self._processes)
        self._processes = []
        self._claim.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def start_run(
    argv: Sequence[str | Path],
    *,
    ranks: int,
    cwd: str | Path,
    prepare: str = "",
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> Run:
    """Start `lt-train ARGV` in `ranks` processes, as torchrun would on one node, without its start-up and its agent.

    They behave as processes of their own in all that kills, signals and exit codes concern; at the end of Python they
    leave as children of `multiprocessing` do, without functions registered with `atexit`.

    Args:
        argv: The arguments after the command's name.
        ranks: How many processes.
        cwd: Their working folder; what they print goes to a new folder `output-N` in it.
        prepare: "path/to/file.py:function", called with the rank before the command: to plant a fault.
        env: Environment variables to set or to replace.
        preload: Modules for the server to import besides torch, such as the engine's.
    """
    context, folder = forkserver_context(preload), _new_folder(Path(cwd))
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    run = Run(claim := Claim())
    try:
        for rank, log in enumerate(logs):
            log.touch()
            variables = {**environment(rank, ranks, claim.port), **(env or {})}
            arguments = ([str(a) for a in argv], rank, variables, str(cwd), str(log), prepare)
            process = context.Process(target=_command, args=arguments, daemon=True)
            process.start()
            run.add(process, log)
    except BaseException:
        run.close()
        raise
    return run


def _new_folder(parent: Path) -> Path:
    number = 0
    while True:
        number += 1
        with suppress(FileExistsError):
            folder = parent / f"output-{number}"
            folder.mkdir()
            return folder.absolute()


def _command(argv: list[str], rank: int, environ: Mapping[str, str], cwd: str, log: str, prepare: str) -> NoReturn:
    """One rank of a run."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the process's life
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    become_rank(environ)
    os.chdir(cwd)
    sys.argv = ["lt-train", *argv]
    if prepare:
        path, _, name = prepare.rpartition(":")
        load(path, f"lt_prepare_{Path(path).stem}", name)(rank)
    from lt_trainer.__main__ import main

    sys.exit(main())
