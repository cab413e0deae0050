"""The bound on what glibc's malloc keeps for each thread, for a process that runs already.

glibc reads MALLOC_ARENA_MAX once, when a process begins. A rank that puts it into its own environment hands it to its
children alone, so the rank asks glibc itself. A libc without that call (musl, macOS) keeps nothing for each thread.
"""

from __future__ import annotations

import ctypes

__all__ = ["limit_arenas"]

M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def limit_arenas(count: str) -> bool:
    """Let malloc make no more than so many arenas; those that are there already stay.

    Args:
        count: as in MALLOC_ARENA_MAX; what is no number changes nothing, as in glibc.

    Returns:
        Whether the libc took it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(count.isdecimal() and mallopt is not None and mallopt(M_ARENA_MAX, int(count)))
