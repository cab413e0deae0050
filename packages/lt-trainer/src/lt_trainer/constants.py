"""Exit codes of training processes and units of memory."""

EXIT_DONE = 0
EXIT_USER = 64
"""An error that the user can fix (EX_USAGE of sysexits.h)."""
EXIT_INTERNAL = 70
"""An internal error (EX_SOFTWARE)."""
EXIT_REQUEUE = 75
"""Stopped and saved, or a temporary failure: rerun the same command to resume (EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130

MIB = 2**20
GIB = 2**30
