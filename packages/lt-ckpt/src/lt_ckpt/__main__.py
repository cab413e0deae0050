"""Entry point of `python -m lt_ckpt` and the console script `lt-ckpt`.

Exit codes: 0 success, 64 user error (one line on stderr; also a wrong command line), 70 internal error (traceback), 130
interrupted.
"""

import sys
import traceback

from lt_ckpt.terminal_text import echo_error

TYPER_USAGE_ERROR = 2


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
        code = 64 if isinstance(exc, OSError) and exc.filename is not None else getattr(exc, "exit_code", None)
        echo_error(traceback.format_exc() if code is None else f"error: {exc}")
        return code or 70
    return 0


if __name__ == "__main__":
    sys.exit(main())
