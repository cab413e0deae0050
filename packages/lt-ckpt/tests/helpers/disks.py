"""What a power cut leaves: entries of folders that were fsynced, bytes of files that were fsynced, and nothing else."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """A model of it, by inode, whoever wrote; descriptors stay open so that no inode is used again."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    @staticmethod
    def state(path: Path) -> Any:
        if not path.is_dir():
            return path.read_bytes()
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}

    def watch(self, monkeypatch: pytest.MonkeyPatch, after: Callable[[], None] = lambda: None) -> None:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            self.kept[os.fstat(descriptor).st_ino] = self.state(Path(f"/proc/self/fd/{os.dup(descriptor)}"))
            after()

        monkeypatch.setattr(os, "fsync", fsync)

    def leave(self, root: Path, folder: Path) -> None:
        """Build, in another folder, the least that a file system may keep of `root`."""
        self._leave(folder, root.stat().st_ino, is_folder=True)

    def _leave(self, path: Path, number: int, *, is_folder: bool) -> None:
        found = self.kept.get(number, {} if is_folder else b"")
        if isinstance(found, bytes):
            path.write_bytes(found)
            return
        path.mkdir()
        for name, (inner, is_dir) in found.items():
            self._leave(path / name, inner, is_folder=is_dir)

    def is_durable(self, path: Path) -> bool:
        is_kept = self.kept.get(path.stat().st_ino) == self.state(path)
        return is_kept and all(self.is_durable(child) for child in (path.iterdir() if path.is_dir() else ()))
