"""An output folder, or file, that is there complete or not at all."""

import os
import shutil
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.folders import new_token


class NewFolder:
    """A folder in the making, under a hidden name of its own beside the final one.

    A context: at its end everything in the folder is on the disk and the folder gets its name; after an error it is
    removed. Nobody else knows the hidden name, so all that lies under it was made here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hidden = folder.with_name(f".{folder.name}.tmp-{new_token()}")
        self._publish = ""

    def path(self, relative: str) -> Path:
        """Returns where a file of the folder is to be made, and makes the folders above it."""
        assert not relative.startswith("/"), relative
        assert ".." not in Path(relative).parts, relative
        path = self.hidden / relative
        files.make_folders(path.parent)
        return path

    def write(self, relative: str, data: bytes) -> None:
        """Writes a small file whole."""
        files.write_file(self.path(relative), data)

    def publish_file(self, relative: str) -> None:
        """Lets the output be this one file in place of the folder."""
        self._publish = relative

    def __enter__(self) -> "NewFolder":
        try:
            files.make_folder(self.hidden)
        except OSError:  # perhaps after it was made
            shutil.rmtree(self.hidden, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for folder, _, _ in os.walk(self.hidden, topdown=False):
                    files.fsync_folder(Path(folder))
                files.rename(self.hidden / self._publish, self._folder)
                files.fsync_folder(self._folder.parent)
        finally:
            shutil.rmtree(self.hidden, ignore_errors=True)
