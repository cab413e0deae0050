"""The `lt-data` command: runs the program of `lt_data.cli` and turns errors into messages and exit codes.

0 done, 64 an error that the user can put right, 70 a defect of ours (with its traceback), 130 interrupted.
"""

import sys
import traceback

USER_ERROR = 64
OUR_ERROR = 70
INTERRUPTED = 130
_USAGE = 2  # what the command line parser exits with


def main() -> int | str | None:
    """Run the command; the result is the exit status."""
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
    except Exception as exc:  # noqa: BLE001  the end of the program: every other error is shown as a defect
        code = getattr(exc, "exit_code", None) if isinstance(exc, ValueError) else None
        if code is None:
            traceback.print_exc()
            return OUR_ERROR
        sys.stderr.write(f"error: {exc}\n")
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
