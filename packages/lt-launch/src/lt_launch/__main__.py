"""`lt` and `python -m lt_launch`: run a command and map its outcome to an exit code.

0 success, 64 user error (including an unknown option), 70 internal error (with its traceback),
75 a training run that stopped and saved (start it again), 130 interrupted.
"""

import sys
import traceback
from collections.abc import Sequence
from errno import EACCES, ENAMETOOLONG, EPERM

EXIT_USER, EXIT_INTERNAL, EXIT_INTERRUPTED = 64, 70, 130
TYPER_USAGE_ERROR = 2
PATH_ERRORS = (EACCES, EPERM, ENAMETOOLONG)
TRAINING = (["train", "run"], ["train", "torchrun"])
"""Commands that stop signals must not end; they are recorded before anything slow is imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after `lt`; default: those of this process, which ends with it: stop signals after
            a training run are ignored then. Otherwise their handlers are restored.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:2] not in TRAINING:
        return _run(given)
    from lt_trainer.resilience.stop_signals import ignore_stop_signals, process_stop_signals, release_stop_signals

    process_stop_signals()
    try:
        return _run(given)
    finally:
        (ignore_stop_signals if arguments is None else release_stop_signals)()


def _run(given: list[str]) -> int:
    from lt_launch.command import extra_for, run_command

    try:
        run_command(given)
    except SystemExit as exc:
        if isinstance(exc.code, str):
            _echo_error(exc.code)
        code = exc.code if isinstance(exc.code, int) else EXIT_USER if exc.code else 0
        return EXIT_USER if code == TYPER_USAGE_ERROR else code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - the outermost frame: everything is shown, nothing goes on
        code, text = getattr(exc, "exit_code", None), ""
        if isinstance(exc, ValueError) and isinstance(code, int):
            text = f"error: {exc}"
        elif isinstance(exc, ModuleNotFoundError) and (extra := extra_for(given[0], exc.name or "")):
            missing = str(exc.name).partition(".")[0]
            code, text = EXIT_USER, f"lt {given[0]}: the command needs {missing}: pip install '{extra}'"
        elif isinstance(exc, OSError) and exc.filename and exc.errno in PATH_ERRORS and given[:2] not in TRAINING:
            # of a run, its place tells more
            code, text = EXIT_USER, f"error: {exc.filename}: {exc.strerror}; check the path and who may use it"
        _echo_error(text or traceback.format_exc().rstrip("\n"))
        return int(code) if text and code is not None else EXIT_INTERNAL
    return 0


def _echo_error(text: str) -> None:
    from lt_ckpt.terminal_text import echo_error

    echo_error(text)


if __name__ == "__main__":
    sys.exit(main())
