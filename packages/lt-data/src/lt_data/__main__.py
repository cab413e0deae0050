"""Entry point of the `lt-data` command: runs `lt_data.cli`, maps errors to messages and exit codes.

0: success, 64: an error that the user can fix, 70: an internal error (with its traceback), 130: interrupted.
"""

import sys
import traceback

from lt_data.display.terminal import echo_error
from lt_data.errors import describe_unusable_path

USER_ERROR = 64
INTERNAL_ERROR = 70
INTERRUPTED = 130
_USAGE = 2  # exit code of the command-line parser


def main() -> int | str | None:
    """Run the command and return the exit status."""
    try:
        from lt_data.cli import app
    except ModuleNotFoundError as exc:
        if exc.name != "typer":
            raise
        sys.stderr.write("lt-data: the command needs typer: pip install 'lt-data[cli]'\n")
        return USER_ERROR
    try:
        app(prog_name="lt-data")
    except SystemExit as exc:
        return USER_ERROR if exc.code == _USAGE else exc.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as exc:  # noqa: BLE001  last handler: every other error is reported as internal
        if unusable := describe_unusable_path(exc):
            echo_error(f"error: {unusable}")
            return USER_ERROR
        code = getattr(exc, "exit_code", None) if isinstance(exc, ValueError) else None
        if code is None:
            echo_error(traceback.format_exc().rstrip("\n"))
            return INTERNAL_ERROR
        echo_error(f"error: {exc}")
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
