"""Output folders and files that appear complete or not at all."""

import os
import shutil
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.folders import random_id


class AtomicFolder:
    """Context manager that builds a folder under a hidden sibling name and renames it at the end.

    On success everything in it is fsynced before the rename; after an error it is removed. No other process knows the
    hidden name, so all that lies under it was made here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.temp_path = folder.with_name(f".{folder.name}.tmp-{random_id()}")
        self._publish = ""

    def file_path(self, relative: str) -> Path:
        """Return the path at which to create a file of the folder, and make its parent folders."""
        assert not relative.startswith("/"), relative
        assert ".." not in Path(relative).parts, relative
        path = self.temp_path / relative
        files.make_folders(path.parent)
        return path

    def write_file(self, relative: str, data: bytes) -> None:
        """Write a small file."""
        files.write_file(self.file_path(relative), data)

    def publish_file(self, relative: str) -> None:
        """Publish this one file as the output instead of the folder."""
        self._publish = relative

    def __enter__(self) -> "AtomicFolder":
        try:
            files.make_folder(self.temp_path)
        except OSError:  # perhaps after it was made
            shutil.rmtree(self.temp_path, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for folder, _, _ in os.walk(self.temp_path, topdown=False):
                    files.fsync_folder(Path(folder))
                files.rename(self.temp_path / self._publish, self._folder)
                files.fsync_folder(self._folder.parent)
        finally:
            shutil.rmtree(self.temp_path, ignore_errors=True)
