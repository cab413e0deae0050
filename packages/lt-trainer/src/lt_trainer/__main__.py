"""`lt-train` and `python -m lt_trainer`: what a rank runs, with the exit codes that a scheduler acts on.

0 done, 75 stopped and saved (start me again), 64 a mistake the person can mend, 70 a mistake of ours.
"""

from __future__ import annotations

import io
import os
import sys
import traceback

from lt_trainer.torchrun import note_exit

EXIT_USER = 64
EXIT_OURS = 70
EXIT_INTERRUPTED = 130
TYPER_USAGE_ERROR = 2


def main() -> int:
    """Run the command line; returns the exit code, which torchrun would lose."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path that the terminal cannot show must not end a run
            stream.reconfigure(errors="backslashreplace")
    code = _main()
    note_exit(code, os.environ)
    return code


def _main() -> int:
    try:
        from lt_trainer.cli import app
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
    except Exception as exc:  # noqa: BLE001 - the process's edge: a person's mistake becomes a message, ours a traceback
        code = getattr(exc, "exit_code", None) if isinstance(exc, ValueError) else None
        if code is None:
            traceback.print_exc()
            return EXIT_OURS
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
