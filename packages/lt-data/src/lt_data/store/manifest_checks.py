"""Checks of values in the manifests of stores: hashes and counts."""

import re
from collections.abc import Iterable

from lt_data.errors import DataError

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_hashes(what: str, hashes: Iterable[str]) -> None:
    """Raise DataError if one is not a SHA-256 in hexadecimal."""
    if wrong := [value for value in hashes if not _SHA256.fullmatch(value)]:
        raise DataError(f"{what} = {wrong[0][:80]!r} is not a SHA-256 in hexadecimal")


def check_counts(**counts: int) -> None:
    """Raise DataError if one is not a count."""
    if wrong := [name for name, value in counts.items() if not 0 <= value < 2**63]:
        raise DataError(f"{wrong[0]} = {counts[wrong[0]]}: not a count")
