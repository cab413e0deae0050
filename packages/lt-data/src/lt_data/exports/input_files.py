"""Check of an import's files, which others made: regular files, and none outside the folder.

Cost: one look at each entry of the folder.
"""

import os
from pathlib import Path

from lt_data.errors import DataError
from lt_data.storage import check_inside, translate_os_errors

MAX_DESCRIPTION_BYTES = 2**28


def check_input(path: Path) -> None:
    """Raise DataError if a path, or an entry at any depth of the folder there, is not a regular file."""
    with translate_os_errors("read", path):
        if path.is_dir():
            _check_folder(path, path)
        elif path.exists() and not path.is_file():
            raise DataError(f"{path}: neither a file nor a folder; write it to a file first")


def _check_folder(folder: Path, root: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                check_inside(Path(entry.path), root)
            if entry.is_dir(follow_symlinks=False):
                _check_folder(Path(entry.path), root)
            elif not entry.is_file() and not entry.is_dir():
                raise DataError(f"{entry.path}: not a regular file; move it out of the folder")
