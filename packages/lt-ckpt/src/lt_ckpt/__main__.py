"""Entry point of `python -m lt_ckpt` and the console script `lt-ckpt`.

Exit codes: 0 success, 64 user error (one line on stderr; also a wrong command line), 70 internal error (traceback), 130
interrupted.
"""

import errno
import os
import sys
import traceback

from lt_ckpt.errors import describe_unusable_path
from lt_ckpt.terminal_text import echo_error

TYPER_USAGE_ERROR = 2


def _is_lack_of_memory(exc: Exception) -> bool:
    """Return True for a lack of memory, also if the system's loader says so of a library."""
    texts = (os.strerror(errno.ENOMEM), "failed to map segment from shared object")
    return isinstance(exc, MemoryError) or (isinstance(exc, ImportError) and any(text in str(exc) for text in texts))


def main() -> int:
    """Run the command and return its exit code."""
    try:
        from lt_ckpt.cli import app
    except ModuleNotFoundError as exc:
        if exc.name != "typer":
            raise
        sys.stderr.write("lt-ckpt: the command needs typer: pip install 'lt-ckpt[cli]'\n")
        return 64
    try:
        app(prog_name="lt-ckpt")
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 64 if exc.code else 0
        return 64 if code == TYPER_USAGE_ERROR else code
    except KeyboardInterrupt:
        return 130
    except Exception as exc:  # noqa: BLE001 - outermost handler: anything but a user error is a bug
        if _is_lack_of_memory(exc):
            sys.stderr.write("error: there is too little memory: free some, or raise the limit (ulimit -v)\n")
            return 64
        if unusable := describe_unusable_path(exc):
            echo_error(f"error: {unusable}")
            return 64
        code = getattr(exc, "exit_code", None) if isinstance(exc, ValueError) else None
        if code is None:
            echo_error(traceback.format_exc())
            return 70
        echo_error(f"error: {exc}")
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
