"""`lt-train` in several ranks without torchrun: processes that tests kill, stop and restart."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from lt_test_helpers.forkserver import (
    PortClaim,
    RankError,
    abort_processes,
    become_rank,
    forkserver_context,
    kill_processes,
    load_function,
    rank_environment,
)
from lt_test_helpers.run_files import read_losses

GPU_ENGINE = ("lt_trainer_gpu.engine", "lt_trainer_gpu.parallelize")
TIMEOUT_S = 240.0
"""Seconds after which a wait is a failure."""


class RankProcesses:
    """Processes of a started command by rank; a context manager that kills the remaining ones."""

    def __init__(self, claim: PortClaim) -> None:
        self._claim = claim
        self._processes: list[ForkServerProcess] = []
        self._logs: list[Path] = []
        self.pids: list[int] = []

    def add(self, process: ForkServerProcess, log: Path) -> None:
        """Add the next rank, already started, and its output file."""
        assert process.pid is not None
        self._processes.append(process)
        self._logs.append(log)
        self.pids.append(process.pid)

    @property
    def alive_ranks(self) -> list[int]:
        """Ranks that are still running."""
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def send_signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one running rank, or to all."""
        for alive_rank in self.alive_ranks:
            if rank in (None, alive_rank):
                os.kill(self.pids[alive_rank], number)

    def kill(self, rank: int | None = None) -> None:
        """Send SIGKILL to one running rank, or to all."""
        self.send_signal(signal.SIGKILL, rank)

    def wait(self, timeout_s: float = 120) -> list[int]:
        """Wait until all ranks have exited.

        Returns:
            Exit codes by rank; -n if killed by signal n.

        Raises:
            RankError: Timeout. The remaining ranks are aborted, which prints their stacks to their output.
        """
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = self.alive_ranks
        if late:
            abort_processes([self._processes[rank] for rank in late])
            outputs = "".join(f"\n--- rank {rank}:\n{self.output(rank)[-4000:]}" for rank in late)
            raise RankError(f"rank {', '.join(map(str, late))} did not exit within {timeout_s:g} s{outputs}")
        return [process.exitcode or 0 for process in self._processes]

    def end(self, codes: list[int], timeout_s: float = TIMEOUT_S) -> list[str]:
        """Wait until all ranks have exited, with these codes; return what each has printed."""
        found = self.wait(timeout_s)
        said = [self.output(rank) for rank in range(len(found))]
        assert found == codes, "\n".join(said)
        return said

    def wait_for_step(self, run: Path, step: int) -> None:
        """Wait until a run directory has the loss of a step, while all ranks run."""
        deadline = time.monotonic() + TIMEOUT_S
        while max(read_losses(run), default=0) < step:
            assert len(self.alive_ranks) == len(self.pids), self.output()
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def output(self, rank: int = 0) -> str:
        """Return the standard output and standard error of a rank so far."""
        return self._logs[rank].read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Kill running ranks and release the port; idempotent."""
        kill_processes(self._processes)
        self._processes = []
        self._claim.close()

    def __enter__(self) -> RankProcesses:
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
) -> RankProcesses:
    """Start `lt-train ARGV` in `ranks` processes, like torchrun on one node but without its agent.

    Kills, signals and exit codes work as in independent processes; on normal exit they end like children of
    `multiprocessing`, without `atexit` functions.

    Args:
        argv: Arguments of `lt-train`.
        ranks: Number of processes.
        cwd: Working folder; output goes to a new folder `output-N` in it.
        prepare: "path/to/file.py:function", called with the rank before the command, to inject a fault.
        env: Environment variables to set.
        preload: Further modules for the server to import, such as the engine's.
    """
    context, folder = forkserver_context(preload), _new_folder(Path(cwd))
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    run = RankProcesses(claim := PortClaim())
    try:
        for rank, log in enumerate(logs):
            log.touch()
            variables = {**rank_environment(rank, ranks, claim.port), **(env or {})}
            arguments = ([str(a) for a in argv], rank, variables, str(cwd), str(log), prepare)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            run.add(process, log)
    except BaseException:
        run.close()
        raise
    return run


def start_training(
    recipe: Path, cwd: Path, *sets: str, ranks: int = 2, preload: Sequence[str] = GPU_ENGINE, **options: Any
) -> RankProcesses:
    """Start `lt-train run` of a recipe with overrides; `options` are those of `start_run`."""
    arguments = [word for value in sets for word in ("--set", value)]
    return start_run(["run", recipe, *arguments], ranks=ranks, cwd=cwd, preload=preload, **options)


def _new_folder(parent: Path) -> Path:
    number = 0
    while True:
        number += 1
        with suppress(FileExistsError):
            folder = parent / f"output-{number}"
            folder.mkdir()
            return folder.absolute()


def _rank_main(argv: list[str], rank: int, environ: Mapping[str, str], cwd: str, log: str, prepare: str) -> NoReturn:
    """Run the command in one rank."""
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
        load_function(path, f"lt_prepare_{Path(path).stem}", name)(rank)
    from lt_trainer.__main__ import main

    sys.exit(main())
