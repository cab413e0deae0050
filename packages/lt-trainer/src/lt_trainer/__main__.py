"""`lt-train` and `python -m lt_trainer`: entry point of a rank.

Exit codes for schedulers: 0 done, 75 stopped and saved (rerun to resume), 64 user error, 70 internal error.

Handlers of stop signals are installed before anything else is imported: loading torch takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lt_trainer.constants import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USER
from lt_trainer.resilience.stop_signals import ignore_stop_signals, process_stop_signals, release_stop_signals

TRAINING_COMMANDS = ("run", "torchrun")
"""Commands that stop signals must not end before they can save or stop their ranks."""
TYPER_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code, and write it where torchrun's launcher reads it.

    Args:
        arguments: those after `lt-train`; default: those of this process, which ends with it: stop signals that come
            after a training run are ignored then. Otherwise their handlers are restored.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_training = given[:1] != [] and given[0] in TRAINING_COMMANDS
    if is_training:
        process_stop_signals()
    try:
        return _main(given, is_training)
    finally:
        if is_training:
            (ignore_stop_signals if arguments is None else release_stop_signals)()


def _main(given: list[str], is_training: bool) -> int:
    import io
    import os

    from lt_trainer.cli.torchrun import redirect_output, write_exit_code
    from lt_trainer.resilience.launcher_watch import LAUNCHED_VARIABLE, stop_when_launcher_dies

    is_rank = given[:1] != ["torchrun"]
    if is_rank:
        redirect_output(os.environ)
    if LAUNCHED_VARIABLE in os.environ:
        stop_when_launcher_dies()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path that the terminal cannot encode must not end a run
            stream.reconfigure(errors="backslashreplace")
    code = _run(given, is_training)
    if is_rank:
        write_exit_code(code, os.environ)
    return code


def _run(given: list[str], is_training: bool) -> int:
    try:
        from lt_trainer.cli.commands import app
    except ModuleNotFoundError as exc:
        if exc.name != "typer":
            raise
        print("lt-train: the command needs typer: pip install 'lt-trainer[cli]'", file=sys.stderr)  # noqa: T201
        return EXIT_USER
    try:
        app(args=given, prog_name="lt-train")
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else EXIT_USER if exc.code else 0
        return EXIT_USER if code == TYPER_USAGE_ERROR else code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - user errors become a message, internal ones a traceback
        from lt_data.display.terminal import echo_error
        from lt_data.errors import describe_unusable_path

        # Of a run that has begun, its place tells more.
        if not is_training and (unusable := describe_unusable_path(exc)):
            echo_error(f"error: {unusable}")
            return EXIT_USER
        code = getattr(exc, "exit_code", None) if isinstance(exc, ValueError) else None
        if code is None:
            import traceback

            echo_error(traceback.format_exc().rstrip("\n"))
            return EXIT_INTERNAL
        echo_error(f"error: {exc}")
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
