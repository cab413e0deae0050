"""A page's blocks, run in order in one folder by one process, as a reader would with one shell and one Python.

Runs in a fork of a process that has torch loaded (`lt_test_helpers.RankPool`), so that a command costs what it does
and not the seconds of its imports. Commands of ours are forks of that, Python blocks share one namespace, `cd` is kept.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from importlib import import_module

MODULES = {"lt-data": "lt_data", "lt-model": "lt_model", "lt-ckpt": "lt_ckpt", "lt-train": "lt_trainer"}
PRELOAD = ("lt_launch.command", "lt_data.cli", "lt_ckpt.cli", "lt_model.cli", "lt_trainer_gpu.engine")
"""What the server imports besides torch."""

Step = tuple[str, list[str], int]
"""("python", [source], 0) or ("command", words, the exit code that it has to have)."""


def run_page(folder: str, steps: list[Step]) -> tuple[int, str]:
    """Run the steps until one fails.

    Returns:
        How many went well, and what the last one printed.
    """
    os.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # a reader is no rank
    multiprocessing.current_process()._config["daemon"] = False  # a reader's Python may start processes
    names: dict[str, object] = {"__name__": "__main__"}
    output = ""
    for done, (kind, given, wanted) in enumerate(steps):
        if kind == "python":
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    exec(compile(given[0], "<page>", "exec"), names)
            except Exception:  # noqa: BLE001 - shown to whoever reads the test's result
                return done, traceback.format_exc()
            continue
        code, output = _run_command(given)
        if code != wanted:
            return done, f"exit code {code}\n{output}"
    return len(steps), output


def _run_command(words: list[str]) -> tuple[int, str]:
    """Run a command of ours in a fork; its exit code and what it printed."""
    path = "../command-output.txt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: a Python block may have left threads that rest
        child = os.fork()
    if not child:
        _exec_command(words, path)
    _, status = os.waitpid(child, 0)
    with open(path, encoding="utf-8", errors="replace") as file:
        return os.waitstatus_to_exitcode(status), file.read()


def _exec_command(words: list[str], path: str) -> None:
    """The command, in the fork; does not return."""
    code = 70
    try:
        with open(path, "wb") as file, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        for name, number in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - to the end
        sys.argv = words
        module = "lt_launch" if words[0] == "lt" else MODULES[words[0]]
        told = import_module(f"{module}.__main__").main()
        code = told if isinstance(told, int) else 1 if told else 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process's edge
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
