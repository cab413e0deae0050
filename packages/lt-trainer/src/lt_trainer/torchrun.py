"""All ranks of one machine under torchrun, with its signals, its patience and its exit code put right.

Left alone, torchrun dies of SIGUSR1 and SIGUSR2 (the warnings that Slurm sends before a time limit) and leaves its
ranks behind, kills ranks 30 s after a SIGTERM however long a save takes, and turns every exit code of a rank into 1, so
that a scheduler cannot tell "start me again" from a mistake. Here it is told to forward all stop signals and to wait
`guard.grace_s`, and every rank notes its exit code in a folder that is read when torchrun has ended.

The settings are environment variables that torchrun reads itself; a torch that does not know one of them ignores it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lt_trainer.recipe import Recipe
from lt_trainer.stop import STOP_SIGNALS, give_back, take

EXIT_CODES = "LT_EXIT_CODES"
"""Environment variable that names the folder where a rank notes its exit code (see `note_exit`)."""
WANTS_A_PERSON = (64, 70)


def command(ranks: int, options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The command line of torchrun.

    Args:
        ranks: processes on this machine.
        options: more options of torchrun, such as --nnodes and --rdzv-endpoint; without any, this machine is all.
        arguments: of `python -m lt_trainer`.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launch, *(options or ["--standalone"]), "-m", "lt_trainer", *arguments]


def environment(recipe: Recipe) -> dict[str, str]:
    """What torchrun has to know from the recipe."""
    names = ",".join(number.name for number in (*STOP_SIGNALS, signal.SIGQUIT))
    grace_s = str(math.ceil(recipe.guard.grace_s))
    return {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace_s,
        "PET_SHUTDOWN_TIMEOUT": grace_s,
        "PET_SIGNALS_TO_HANDLE": names,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": names,
    }


def note_exit(code: int, environ: Mapping[str, str]) -> None:
    """Leave a rank's exit code where `start` looks for it, when it was `start` that started the rank."""
    if EXIT_CODES in environ and "RANK" in environ:
        with suppress(OSError):  # the folder can be gone with its owner; the code itself is still returned
            (Path(environ[EXIT_CODES]) / environ["RANK"]).write_text(str(code), encoding="ascii")


def exit_code(of_torchrun: int, of_ranks: Iterable[int]) -> int:
    """One code for all ranks: what a person has to mend comes before what starting again would mend.

    Example:
        >>> exit_code(0, [0, 0]), exit_code(1, [75, 75]), exit_code(1, [75, 64]), exit_code(1, [])
        (0, 75, 64, 1)
    """
    codes = set(of_ranks)
    if of_torchrun == 0:
        return 0
    return next((code for code in (*WANTS_A_PERSON, 75) if code in codes), of_torchrun)


def start(recipe: Recipe, ranks: int, options: Sequence[str], arguments: Sequence[str]) -> int:
    """Run the ranks to their end and return their exit code.

    The first stop signal is handed on, the others are not: torchrun would end its wait for the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="lt-exit-codes-") as folder:
        environ = os.environ | environment(recipe) | {EXIT_CODES: folder}
        environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets, with a warning, when it is missing
        handed_on: list[int] = []
        process: subprocess.Popen[bytes] | None = None

        def hand_on(number: int, frame: object) -> None:
            if not handed_on:
                handed_on.append(number)
                if process is not None:
                    process.send_signal(number)

        before = take(hand_on)
        try:
            # A session of its own: Ctrl-C would else reach torchrun twice, from the terminal and from here.
            process = subprocess.Popen(command(ranks, options, arguments), env=environ, start_new_session=True)
            if handed_on:
                process.send_signal(handed_on[0])
            code = process.wait()
        finally:
            give_back(before)
        noted = [int(path.read_text(encoding="ascii")) for path in sorted(Path(folder).iterdir())]
    return exit_code(code if code >= 0 else 128 - code, noted)
