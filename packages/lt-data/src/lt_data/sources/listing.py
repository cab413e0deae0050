"""Which files there are, in an order that depends on names alone: sorted by the bytes of the path below the source.

Symbolic links inside a folder are followed only to files inside that folder; the others are counted, as are the files
whose ending is not asked for. A folder that `datasets` saved is read in the order of its own list.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from lt_data.errors import DataError
from lt_data.sources.hub import SCHEME, list_hub
from lt_data.sources.options import ReadOptions
from lt_data.sources.saved import arrow_files
from lt_data.sources.transfer import transfer_errors
from lt_data.sources.unit import ListedFile, Unit
from lt_data.storage import os_errors


@dataclass
class Listing:
    """What was found.

    Attributes:
        units: files and runs of rows, in order.
        skipped_links: symbolic links that were not followed.
        other_files: files of the folders whose ending was not asked for, by their suffix.
    """

    units: list[Unit] = field(default_factory=list)
    skipped_links: int = 0
    other_files: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, options: ReadOptions) -> None:
        """List one source.

        Raises:
            DataError: it does not exist, cannot be listed, or is neither a file nor a folder.
        """
        if source.startswith(SCHEME) and not source.startswith(f"{SCHEME}datasets/"):
            self.units.extend(list_hub(source, options))
        elif "://" in source:
            self.units.extend(self._url(source, options))
        else:
            self.units.extend(self._local(source, options))

    def _local(self, source: str, options: ReadOptions) -> Iterator[Unit]:
        with os_errors("read", source):
            kind = os.stat(source)
        if stat.S_ISREG(kind.st_mode):
            yield ListedFile(name=source, size=kind.st_size, path=source)
        elif not stat.S_ISDIR(kind.st_mode):
            raise DataError(f"cannot read {source}: neither a file nor a folder; write it to a file first")
        elif (saved := _saved_here(source, options)) is not None:
            yield from saved
        else:
            yield from self._folder(source, options)

    def _folder(self, root: str, options: ReadOptions) -> Iterator[Unit]:
        real_root = os.path.realpath(root)
        found: list[tuple[str, ListedFile]] = []

        def refuse(exc: OSError) -> None:
            raise exc

        with os_errors("read", root):
            for folder, subfolders, names in os.walk(root, onerror=refuse):
                self.skipped_links += sum(os.path.islink(os.path.join(folder, name)) for name in subfolders)
                for name in names:
                    path = os.path.join(folder, name)
                    if not self._wanted(name, options):
                        continue
                    if os.path.islink(path) and not _is_inside(os.path.realpath(path), real_root):
                        self.skipped_links += 1
                        continue
                    kind = os.stat(path)
                    if stat.S_ISREG(kind.st_mode):
                        relative = Path(path).relative_to(root).as_posix()
                        found.append((relative, ListedFile(name=path, size=kind.st_size, path=path)))
        yield from (listed for _, listed in sorted(found, key=lambda pair: os.fsencode(pair[0])))

    def _url(self, url: str, options: ReadOptions) -> Iterator[Unit]:
        from fsspec.core import url_to_fs  # here, because it is slow to import and most corpora are local

        shown = without_secrets(url)
        protocol = url.partition("://")[0]
        try:
            filesystem, root = url_to_fs(url)
        except (ImportError, ValueError) as exc:
            raise DataError(f"cannot read {shown}: {exc}; install the fsspec package for {protocol}://") from exc
        with transfer_errors(shown, url):
            info = filesystem.info(root)
            if info["type"] != "directory":
                yield ListedFile(name=shown, size=info.get("size"), path=root, filesystem=filesystem)
                return
            found: dict[str, Any] = filesystem.find(root, detail=True)
            saved = _saved_there(shown, root, filesystem, found, options)
        for path in sorted(found) if saved is None else saved:
            if saved is not None or self._wanted(path, options):
                name = without_secrets(filesystem.unstrip_protocol(path))
                yield ListedFile(name=name, size=found[path].get("size"), path=path, filesystem=filesystem)

    def _wanted(self, name: str, options: ReadOptions) -> bool:
        wanted = name.lower().endswith(tuple(options.suffixes))
        if not wanted:
            self.other_files[PurePosixPath(name).suffix.lower() or PurePosixPath(name).name] += 1
        return wanted


def _saved_here(root: str, options: ReadOptions) -> list[Unit] | None:
    """The files of a local folder that `datasets` saved."""

    def read(name: str) -> bytes | None:
        path = os.path.join(root, name)
        return Path(path).read_bytes() if os.path.isfile(path) else None

    with os_errors("read", root):
        names = arrow_files(root, read, options.split)
    units: list[Unit] = []
    for path in (os.path.join(root, name) for name in names or ()):
        with os_errors("read", path):
            units.append(ListedFile(name=path, size=os.stat(path).st_size, path=path))
    return None if names is None else units


def _saved_there(
    shown: str, root: str, filesystem: Any, found: dict[str, Any], options: ReadOptions
) -> list[str] | None:
    """The paths of the files of a remote folder that `datasets` saved."""

    def read(name: str) -> bytes | None:
        path = f"{root}/{name}"
        return filesystem.cat_file(path) if path in found else None

    names = arrow_files(shown, read, options.split)
    if names is not None and (lost := [name for name in names if f"{root}/{name}" not in found]):
        raise DataError(f"{shown}/{lost[0]}: is missing, though the dataset was saved with it; save it again")
    return None if names is None else [f"{root}/{name}" for name in names]


def without_secrets(url: str) -> str:
    """A URL without user, password, query and fragment: signed links carry their secret there."""
    if not url.startswith(("http://", "https://", "ftp://", "sftp://")):
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _is_inside(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root
