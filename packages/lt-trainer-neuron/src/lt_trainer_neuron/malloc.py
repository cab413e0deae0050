"""Limit on glibc malloc arenas for a running process.

glibc reads MALLOC_ARENA_MAX once, at process start. If a rank sets it in its own environment, only child processes see
it, so the rank calls glibc's mallopt. A libc without mallopt (musl, macOS) has no per-thread arenas.
"""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8
"""Constant from glibc's malloc.h."""


def limit_malloc_arenas(count: str) -> bool:
    """Limit the number of malloc arenas; existing arenas are kept.

    Args:
        count: as in MALLOC_ARENA_MAX; a non-numeric value has no effect, as in glibc.

    Returns:
        True if the libc accepted the limit.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(count.isdecimal() and mallopt is not None and mallopt(M_ARENA_MAX, int(count)))
