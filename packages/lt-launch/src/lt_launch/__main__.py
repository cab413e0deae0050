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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after `lt`; default: those of this process, which ends with it: stop signals after
            a training run are ignored then. Otherwise their handlers are restored.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if _is_training(given):
        return _with_stop_signals(given, ends_process=arguments is None)
    return _run(given)


def _is_training(given: list[str]) -> bool:
    return given[:2] in (["train", "run"], ["train", "torchrun"])


def _with_stop_signals(given: list[str], *, ends_process: bool) -> int:
    """Run a command that stop signals must not end; they are recorded before anything slow is imported."""
    try:
        from lt_trainer.resilience.stop_signals import ignore_stop_signals, process_stop_signals, release_stop_signals
    except ModuleNotFoundError:
        return _run(given)  # names the package to install
    process_stop_signals()
    try:
        return _run(given)
    finally:
        (ignore_stop_signals if ends_process else release_stop_signals)()


def _run(given: list[str]) -> int:
    try:
        from lt_launch.command import run_command

        run_command(given)
    except SystemExit as exc:
        return _exit_code(exc)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as exc:
        return _missing_module(exc, given)
    except Exception as exc:  # noqa: BLE001 - the outermost frame: everything is shown, nothing goes on
        code = getattr(exc, "exit_code", None)
        if isinstance(exc, ValueError) and isinstance(code, int):
            return _print_error(f"error: {exc}", code)
        if isinstance(exc, OSError) and exc.filename and exc.errno in PATH_ERRORS and not _is_training(given):
            # of a run, its place tells more
            return _print_error(f"error: {exc.filename}: {exc.strerror}; check the path and who may use it", EXIT_USER)
        return _print_error(traceback.format_exc().rstrip("\n"), EXIT_INTERNAL)
    return 0


def _print_error(text: str, code: int) -> int:
    from lt_ckpt.terminal_text import echo_error

    echo_error(text)
    return code


def _exit_code(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if not isinstance(exc.code, int):
        return _print_error(str(exc.code), EXIT_USER)
    return EXIT_USER if exc.code == TYPER_USAGE_ERROR else exc.code


def _missing_module(exc: ModuleNotFoundError, given: list[str]) -> int:
    """Print the extra that provides a missing module; a module of no extra is an internal error."""
    from lt_launch.catalog import extra_for, installed_commands, package_name

    missing = (exc.name or "").partition(".")[0]
    name = given[0] if given else ""
    entry = installed_commands().get(name)
    extra = extra_for(package_name(entry), missing) if entry is not None else ""
    if not extra:
        return _print_error("".join(traceback.format_exception(exc)).rstrip("\n"), EXIT_INTERNAL)
    return _print_error(f"lt {name}: the command needs {missing}: pip install '{extra}'", EXIT_USER)


if __name__ == "__main__":
    sys.exit(main())
