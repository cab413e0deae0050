"""Room on the disk, asked for before the first byte is written."""

import shutil
from pathlib import Path

from lt_data.errors import DataError
from lt_data.showing.bars import scaled
from lt_data.storage import os_errors


def check_room(out: Path, at_least: int) -> None:
    """Make sure that `at_least` bytes fit where `out` is to stand.

    Raises:
        DataError: they do not.
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    with os_errors("ask for the free space of", there):
        free = shutil.disk_usage(there).free
    if free < at_least:
        raise DataError(
            f"out={out}: {scaled(at_least)}B are needed and {scaled(free)}B are free at {there}: free some space or "
            "choose another disk"
        )
