"""Entry point of `lt-model` and `python -m lt_model`: the commands of `cli.py`, with an exit code.

0 success, 64 user error, 70 internal error (with its traceback), 130 interrupted.
"""

import sys
import traceback

EXIT_USER = 64
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
_TYPER_USAGE_ERROR = 2


def escape_controls(text: str) -> str:
    r"""Return the text with what is not printable escaped, as `\x1b`; paths and values are others' text."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def main() -> int:
    """Run the command line of this process and return the exit code."""
    try:
        from lt_model.cli import app
    except ModuleNotFoundError as exc:
        if exc.name != "typer":
            raise
        sys.stderr.write("lt-model: the command needs typer: pip install 'lt-model[cli]'\n")
        return EXIT_USER
    try:
        app(prog_name="lt-model")
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else EXIT_USER if exc.code else 0
        return EXIT_USER if code == _TYPER_USAGE_ERROR else code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - top of the process: a user error becomes a line, a bug a traceback
        code = getattr(exc, "exit_code", None)
        if isinstance(exc, ValueError) and isinstance(code, int):
            sys.stderr.write(f"error: {escape_controls(str(exc))}\n")
            return code
        sys.stderr.write(escape_controls(traceback.format_exc()))
        return EXIT_INTERNAL
    return 0


if __name__ == "__main__":
    sys.exit(main())
