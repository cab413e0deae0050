"""Which files there are, in an order that depends on names alone: sorted by the bytes of the path below the source.

Symbolic links inside a folder are followed only to files inside that folder; the others are counted, as are the files
whose ending is not asked for.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit, urlunsplit

from lt_data.errors import DataError
from lt_data.names import portable
from lt_data.sources.options import ReadOptions
from lt_data.storage import os_errors


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """One file.

    Attributes:
        name: as it is shown, without the parts of a URL that may be secret.
        size: bytes when it was listed; None where the server does not tell.
        path: as its file system knows it.
        filesystem: of fsspec; None for a local file.
    """

    name: str
    size: int | None
    path: str
    filesystem: Any = None

    @property
    def recorded(self) -> str:
        """The name for the manifest: the same under every locale."""
        return portable(self.name) if self.filesystem is None else self.name

    @property
    def ending(self) -> str:
        """The path in small letters, for the table of endings."""
        path = urlsplit(self.path).path if "://" in self.path else self.path
        return path.lower()

    def open(self) -> BinaryIO:
        """The file at its beginning."""
        return open(self.path, "rb") if self.filesystem is None else self.filesystem.open(self.path, "rb")


@dataclass
class Listing:
    """What was found.

    Attributes:
        files: in order.
        skipped_links: symbolic links that were not followed.
        other_files: files of the folders whose ending was not asked for, by their suffix.
    """

    files: list[ListedFile] = field(default_factory=list)
    skipped_links: int = 0
    other_files: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, options: ReadOptions) -> None:
        """List one source.

        Raises:
            DataError: it does not exist, cannot be listed, or is neither a file nor a folder.
        """
        if "://" in source:
            self.files.extend(self._url(source, options))
            return
        with os_errors("read", source):
            kind = os.stat(source)
        if stat.S_ISDIR(kind.st_mode):
            self.files.extend(self._folder(source, options))
        elif stat.S_ISREG(kind.st_mode):
            self.files.append(ListedFile(name=source, size=kind.st_size, path=source))
        else:
            raise DataError(f"cannot read {source}: neither a file nor a folder; write it to a file first")

    def _wanted(self, name: str, options: ReadOptions) -> bool:
        wanted = name.lower().endswith(tuple(options.suffixes))
        if not wanted:
            self.other_files[PurePosixPath(name).suffix.lower() or name] += 1
        return wanted

    def _folder(self, root: str, options: ReadOptions) -> Iterator[ListedFile]:
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

    def _url(self, url: str, options: ReadOptions) -> Iterator[ListedFile]:
        from fsspec.core import url_to_fs  # here, because it is slow to import and most corpora are local

        shown = without_secrets(url)
        protocol = url.partition("://")[0]
        try:
            filesystem, root = url_to_fs(url)
        except (ImportError, ValueError) as exc:
            raise DataError(f"cannot read {shown}: {exc}; install the fsspec package for {protocol}://") from exc
        with os_errors("read", shown):
            info = filesystem.info(root)
            if info["type"] != "directory":
                yield ListedFile(name=shown, size=info.get("size"), path=root, filesystem=filesystem)
                return
            found: dict[str, Any] = filesystem.find(root, detail=True)
        for path in sorted(found):
            if self._wanted(path, options):
                name = without_secrets(filesystem.unstrip_protocol(path))
                yield ListedFile(name=name, size=found[path].get("size"), path=path, filesystem=filesystem)


def without_secrets(url: str) -> str:
    """A URL without user, password, query and fragment: signed links carry their secret there."""
    if not url.startswith(("http://", "https://", "ftp://", "sftp://")):
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _is_inside(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root
