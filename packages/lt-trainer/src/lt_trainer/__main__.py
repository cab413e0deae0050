"""`lt-train` and `python -m lt_trainer`: entry point of a rank.

Exit codes for schedulers: 0 done, 75 stopped and saved (rerun to resume), 64 user error, 70 internal error.
"""

from __future__ import annotations

import io
import os
import sys
import traceback

from lt_trainer.cli.torchrun import write_exit_code
from lt_trainer.constants import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USER

TYPER_USAGE_ERROR = 2


def main() -> int:
    """Run the command line; return the exit code, and write it where torchrun's launcher reads it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path that the terminal cannot encode must not end a run
            stream.reconfigure(errors="backslashreplace")
    code = _main()
    write_exit_code(code, os.environ)
    return code


def _main() -> int:
    try:
        from lt_trainer.cli.commands import app
    except ModuleNotFoundError as exc:
        if exc.name != "typer":
            raise
        print("lt-train: the command needs typer: pip install 'lt-trainer[cli]'", file=sys.stderr)  # noqa: T201
        return EXIT_USER
    try:
        app(prog_name="lt-train")
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else EXIT_USER if exc.code else 0
        return EXIT_USER if code == TYPER_USAGE_ERROR else code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - user errors become a message, internal ones a traceback
        code = getattr(exc, "exit_code", None) if isinstance(exc, ValueError) else None
        if code is None:
            traceback.print_exc()
            return EXIT_INTERNAL
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
