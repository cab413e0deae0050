"""torchrun with stop signals, a grace period and exit codes for all ranks of one machine.

By itself, torchrun exits on SIGUSR1 and SIGUSR2 (Slurm's warnings before a time limit) and leaves its ranks running,
kills ranks 30 s after a SIGTERM even during a save, and reports every exit code of a rank as 1, so that a scheduler
cannot tell "rerun" from an error. Here it forwards all stop signals, waits `fault_tolerance.grace_period_s`, and every
rank writes its exit code into a folder that is read when torchrun has exited; a killed rank's code is torchrun's own
record of it (`torchrun_process`). A launcher may name that folder (LT_EXIT_CODES), and one for the output of each rank
(LT_RANK_LOGS).

The settings are environment variables of torchrun; a torch that does not know one ignores it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lt_trainer.config.sections import Recipe
from lt_trainer.constants import EXIT_INTERNAL, EXIT_REQUEUE, EXIT_USER
from lt_trainer.resilience.stop_signals import STOP_SIGNALS, install_handlers, process_stop_signals, restore_handlers

EXIT_CODES_VARIABLE = "LT_EXIT_CODES"
"""Environment variable with the folder for exit codes of ranks (see `write_exit_code`)."""
RANK_LOGS_VARIABLE = "LT_RANK_LOGS"
"""Environment variable with the folder into which each rank writes its output (see `redirect_output`)."""
TORCHRUN_MODULE = "lt_trainer.cli.torchrun_process"


def torchrun_command(ranks: int, options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the command line of torchrun; no Python in it takes modules from the working directory (-P).

    Args:
        ranks: processes on this machine.
        options: options of torchrun, such as --nnodes and --rdzv-endpoint; default --standalone.
        arguments: arguments of `python -m lt_trainer`.
    """
    launch = [sys.executable, "-P", "-m", TORCHRUN_MODULE, "--nproc-per-node", str(ranks)]
    rank = ["--no-python", sys.executable, "-P", "-u", "-m", "lt_trainer"]
    return [*launch, *(options or ["--standalone"]), *rank, *arguments]


def torchrun_environment(recipe: Recipe) -> dict[str, str]:
    """Return the environment variables of torchrun for a recipe."""
    names = ",".join(number.name for number in (*STOP_SIGNALS, signal.SIGQUIT))
    grace_s = str(math.ceil(recipe.fault_tolerance.grace_period_s))
    return {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace_s,
        "PET_SHUTDOWN_TIMEOUT": grace_s,
        "PET_SIGNALS_TO_HANDLE": names,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": names,
    }


def write_exit_code(code: int, environ: Mapping[str, str]) -> None:
    """Write a rank's exit code and host for `run_torchrun`, if the rank was started by it."""
    if EXIT_CODES_VARIABLE in environ and "RANK" in environ:
        with suppress(OSError):  # the folder may be deleted already; the code itself is still returned
            path = Path(environ[EXIT_CODES_VARIABLE]) / environ["RANK"]
            path.write_text(f"{code} {socket.gethostname()}\n", encoding="utf-8")


def read_exit_codes(folder: Path) -> dict[int, int]:
    """Read the exit codes that ranks have written, by rank; one that is being written is left out."""
    texts = {int(path.name): path.read_text(encoding="utf-8") for path in folder.iterdir() if path.name.isdigit()}
    return {rank: int(text.split()[0]) for rank, text in texts.items() if text.endswith("\n")}


def redirect_output(environ: Mapping[str, str]) -> None:
    """Append a rank's output to its own file, if the launcher wants that; before anything is written."""
    if RANK_LOGS_VARIABLE in environ and "RANK" in environ:
        path = Path(environ[RANK_LOGS_VARIABLE]) / f"rank-{int(environ['RANK']):05}.log"
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)


def combine_exit_codes(torchrun_code: int, rank_codes: Iterable[int], *, was_stopped: bool = False) -> int:
    """Return one exit code for all ranks: user errors take precedence over what a rerun would fix.

    Args:
        torchrun_code: exit code of torchrun; that of the first failure, 128 + n for a rank killed by signal n.
        rank_codes: exit codes that ranks have written.
        was_stopped: a stop signal was forwarded. torchrun dies of one that comes before its handlers are set, and so
            does a rank.

    Example:
        >>> [combine_exit_codes(max(codes), codes) for codes in ([0, 0], [75, 75], [75, 64], [137])]
        [0, 75, 64, 137]
    """
    codes = set(rank_codes)
    if torchrun_code == 0:
        return 0
    was_stopped = was_stopped or torchrun_code - 128 in STOP_SIGNALS
    default = EXIT_REQUEUE if was_stopped and not codes else torchrun_code
    return next((code for code in (EXIT_USER, EXIT_INTERNAL, EXIT_REQUEUE) if code in codes), default)


def run_torchrun(recipe: Recipe, ranks: int, options: Sequence[str], arguments: Sequence[str]) -> int:
    """Run all ranks to their end; return their exit code.

    Only the first stop signal is forwarded: at a second, torchrun would stop waiting for the ranks.
    """
    forwarded: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: object) -> None:
        if not forwarded:
            forwarded.append(number)
            if process is not None:
                process.send_signal(number)

    with tempfile.TemporaryDirectory(prefix="lt-exit-codes-") as temporary:
        folder = os.environ.get(EXIT_CODES_VARIABLE) or temporary
        environ = os.environ | torchrun_environment(recipe) | {EXIT_CODES_VARIABLE: folder}
        environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun sets it with a warning
        early = process_stop_signals()
        previous_handlers = install_handlers(forward)
        try:
            if early.received:
                return EXIT_REQUEUE
            # In a new session, since Ctrl-C would otherwise reach torchrun twice, from the terminal and from here.
            process = subprocess.Popen(torchrun_command(ranks, options, arguments), env=environ, start_new_session=True)
            if forwarded:
                process.send_signal(forwarded[0])
            code = process.wait()
        finally:
            restore_handlers(previous_handlers)
        rank_codes = read_exit_codes(Path(folder)).values()
    return combine_exit_codes(code if code >= 0 else 128 - code, rank_codes, was_stopped=bool(forwarded))
