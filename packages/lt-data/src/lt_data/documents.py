"""Sources of text to documents, in an order that depends on names alone.

A source is a text file (one document), a `.jsonl` file (one document per line), a folder (its files, recursively,
sorted by the bytes of the relative path) or an fsspec URL of either. All sources are listed and checked when the reader
is made, before anything is read. Each file is read once and hashed on the way; cost: one line in memory for JSON lines,
one file otherwise.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.manifest import LISTED_SOURCES, SourceFile, Sources
from lt_data.names import portable
from lt_data.storage import os_errors

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text and where it came from.

    Attributes:
        text: the document.
        source: path of the file, with `:line` for a line of a `.jsonl` file.
    """

    text: str
    source: str


def read_documents(
    sources: Sequence[str | Path], *, suffixes: Sequence[str] | None = None, text_field: str = "text"
) -> Iterator[Document]:
    """Yield the documents of some sources in order, empty ones too.

    Args:
        sources: files, folders and fsspec URLs, read in the order given.
        suffixes: which files of a folder are taken (default `SUFFIXES`); a file that is named itself is always taken.
        text_field: the field of a JSON line that holds the text.

    Returns:
        An iterator; the sources have been listed and checked when this function returns.

    Raises:
        DataError: see `DocumentReader`.
    """
    return iter(DocumentReader(sources, suffixes=suffixes, text_field=text_field))


class DocumentReader:
    """The documents of some sources as an iterable that keeps count of what it read.

    Attributes:
        total_bytes: size of all files when they were listed.
        read_bytes: bytes read so far.

    Raises:
        DataError: a source does not exist or cannot be read, its bytes are not UTF-8, a JSON line is broken or has no
            text field; the file (and the line) is named.
    """

    def __init__(
        self, sources: Sequence[str | Path], *, suffixes: Sequence[str] | None = None, text_field: str = "text"
    ) -> None:
        if isinstance(sources, str | Path):
            raise DataError(f"sources={str(sources)!r} is one path: pass a list of paths")
        self._suffixes = _checked_suffixes(SUFFIXES if suffixes is None else suffixes)
        self._text_field = text_field
        self._skipped_links = 0
        self._files = [listed for source in sources for listed in self._list(os.fspath(source))]
        self._read: list[SourceFile] = []
        self._files_read = 0
        self._digest = hashlib.sha256()
        self.total_bytes = sum(listed.size for listed in self._files)
        self.read_bytes = 0

    @property
    def n_files(self) -> int:
        """Files that were listed."""
        return len(self._files)

    @property
    def description(self) -> str:
        """What was looked for and found, for the message about an empty corpus."""
        links = f", {self._skipped_links} symbolic links not followed" if self._skipped_links else ""
        return f"{len(self._files)} files (folders are searched for {' '.join(self._suffixes)}){links}"

    def sources(self) -> Sources:
        """What has been read so far, for the manifest."""
        return Sources(
            files=self._files_read,
            bytes=self.read_bytes,
            sha256=self._digest.hexdigest(),
            skipped_links=self._skipped_links,
            listed=tuple(self._read) if self._files_read <= LISTED_SOURCES else (),
        )

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents in order; the counts begin again with each walk."""
        self._read, self._files_read, self.read_bytes, self._digest = [], 0, 0, hashlib.sha256()
        for listed in self._files:
            digest = hashlib.sha256()
            before = self.read_bytes
            with os_errors("read", listed.name), listed.open() as file:
                if PurePosixPath(listed.path).suffix == ".jsonl":
                    for number, line in enumerate(file, start=1):
                        digest.update(line)
                        self.read_bytes += len(line)
                        if line.strip():
                            yield self._parse(line, f"{listed.name}:{number}")
                else:
                    content = file.read()
                    digest.update(content)
                    self.read_bytes += len(content)
                    yield Document(text=_decode(content, listed.name), source=listed.name)
            path = portable(listed.name) if listed.filesystem is None else listed.name
            self._record(SourceFile(path=path, bytes=self.read_bytes - before, sha256=digest.hexdigest()))

    def _record(self, file: SourceFile) -> None:
        self._files_read += 1
        self._digest.update(f"{file.sha256} {file.bytes} {file.path}\n".encode("utf-8", "surrogateescape"))
        if self._files_read <= LISTED_SOURCES:
            self._read.append(file)

    def _parse(self, line: bytes, source: str) -> Document:
        text = _decode(line, source)
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as exc:
            raise DataError(f"{source}: not a JSON value: {exc}; correct or remove the line") from exc
        if not isinstance(record, dict) or self._text_field not in record:
            found = f"fields {', '.join(map(repr, record))}" if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{source}: no field {self._text_field!r} (found {found}); name the field with text_field")
        value = record[self._text_field]
        if not isinstance(value, str):
            raise DataError(f"{source}: field {self._text_field!r} holds {type(value).__name__}, not a string")
        return Document(text=value, source=source)

    def _list(self, source: str) -> Iterator["_Listed"]:
        if "://" in source:
            yield from _list_url(source, self._suffixes)
            return
        with os_errors("read", source):
            kind = os.stat(source)
        if stat.S_ISDIR(kind.st_mode):
            yield from self._list_folder(source)
        elif stat.S_ISREG(kind.st_mode):
            yield _Listed(name=source, size=kind.st_size, path=source)
        else:
            raise DataError(f"cannot read {source}: neither a file nor a folder; write it to a file first")

    def _list_folder(self, root: str) -> Iterator["_Listed"]:
        real_root = os.path.realpath(root)
        found: list[tuple[str, _Listed]] = []

        def refuse(exc: OSError) -> None:
            raise exc

        with os_errors("read", root):
            for folder, subfolders, names in os.walk(root, onerror=refuse):
                self._skipped_links += sum(os.path.islink(os.path.join(folder, name)) for name in subfolders)
                for name in names:
                    path = os.path.join(folder, name)
                    if not name.endswith(self._suffixes):
                        continue
                    if os.path.islink(path) and not _is_inside(os.path.realpath(path), real_root):
                        self._skipped_links += 1
                        continue
                    kind = os.stat(path)
                    if stat.S_ISREG(kind.st_mode):
                        relative = Path(path).relative_to(root).as_posix()
                        found.append((relative, _Listed(name=path, size=kind.st_size, path=path)))
        yield from (listed for _, listed in sorted(found, key=lambda pair: os.fsencode(pair[0])))


@dataclass(frozen=True)
class _Listed:
    name: str  # as it is shown
    size: int
    path: str  # as its file system knows it
    filesystem: Any = None  # of fsspec; None for a local file

    def open(self) -> BinaryIO:
        return open(self.path, "rb") if self.filesystem is None else self.filesystem.open(self.path, "rb")


def _list_url(url: str, suffixes: tuple[str, ...]) -> Iterator[_Listed]:
    from fsspec.core import url_to_fs  # here, because it is slow to import and most corpora are local

    protocol = url.partition("://")[0]
    try:
        filesystem, root = url_to_fs(url)
    except (ImportError, ValueError) as exc:
        raise DataError(f"cannot read {url}: {exc}; install the fsspec package for {protocol}://") from exc
    with os_errors("read", url):
        info = filesystem.info(root)
        if info["type"] != "directory":
            yield _Listed(name=url, size=info.get("size") or 0, path=root, filesystem=filesystem)
            return
        found: dict[str, Any] = filesystem.find(root, detail=True)
    for path in sorted(found):
        if path.endswith(suffixes):
            name = filesystem.unstrip_protocol(path)
            yield _Listed(name=name, size=found[path].get("size") or 0, path=path, filesystem=filesystem)


def _checked_suffixes(suffixes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(suffixes, str) or not suffixes or not all(suffix.startswith(".") for suffix in suffixes):
        raise DataError(f"suffixes={suffixes!r}: give a list such as ['.txt', '.jsonl']")
    return tuple(suffixes)


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise DataError(
            f"{source}: not UTF-8 at byte {exc.start} ({exc.reason}); convert the file, for example with iconv, "
            "or leave it out"
        ) from exc


def _is_inside(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root
