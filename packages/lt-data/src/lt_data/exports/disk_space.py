"""Disk space check before the first byte is written."""

import shutil
from pathlib import Path

from lt_data.display.progress_bars import format_si
from lt_data.errors import DataError
from lt_data.storage import translate_os_errors


def check_disk_space(out: Path, min_bytes: int) -> None:
    """Raise DataError unless `min_bytes` are free at `out`."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    with translate_os_errors("get the free space of", existing):
        free = shutil.disk_usage(existing).free
    if free < min_bytes:
        raise DataError(
            f"out = {out}: needs {format_si(min_bytes)}B, but {format_si(free)}B are free at {existing}; free some "
            "space or choose another disk"
        )
