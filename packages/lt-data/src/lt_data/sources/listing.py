"""Listing of source files, sorted by the bytes of the path below the source.

Hidden files and folders (with a dot, such as `.git`), links to folders and files without a requested suffix are
counted, not read. A folder that `datasets` saved is read in the order of its file list.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from lt_data.errors import DataError
from lt_data.file_names import redact_url
from lt_data.sources.hub import HUB_SCHEME, HubPiece, list_hub_dataset
from lt_data.sources.options import SKIP_REMEDY, SourceOptions
from lt_data.sources.pieces import FilePiece
from lt_data.sources.saved_dataset import list_arrow_files
from lt_data.sources.transfer_errors import open_filesystem, translate_transfer_errors

_LIKE_TEXT = re.compile(r"(?!\S*://).*[\s\0]|.{4096}", re.DOTALL)  # no URL, or one that is too long

SourcePiece = FilePiece | HubPiece


@dataclass(kw_only=True)
class SourceListing:
    """Files and ranges of rows in order, and the number of files that are not read, by suffix or kind."""

    pieces: list[SourcePiece] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def list_sources(sources: Sequence[str], options: SourceOptions) -> SourceListing:
    """List sources in the given order.

    Raises:
        DataError: one does not exist, cannot be listed, or is neither a file nor a folder; or a file is in two of them.
    """
    listing = SourceListing()
    found: dict[str, int] = {}
    for number, source in enumerate(sources):
        if _LIKE_TEXT.match(source) and not os.path.lexists(source):
            raise DataError(f"cannot read {source[:80]!r}: no such file or folder (a text in memory: {{'text': text}})")
        is_hub = source.startswith(HUB_SCHEME) and not source.startswith(f"{HUB_SCHEME}datasets/")
        pieces: Sequence[SourcePiece] = (
            list_hub_dataset(source, options) if is_hub else list(_list_files(source, options, listing.ignored))
        )
        for piece in pieces:
            key = piece.name
            if isinstance(piece, FilePiece) and piece.filesystem is None:
                key = os.path.realpath(piece.path)
            if found.setdefault(key, number) != number:
                both = f"{redact_url(sources[found[key]])} and {redact_url(source)}"
                raise DataError(
                    f"{piece.name}: in two sources, {both}; give each file once (the weights of a mixture repeat "
                    "documents)"
                )
        listing.pieces += pieces
    return listing


@dataclass(frozen=True)
class _Entry:
    path: str
    size: int | None
    is_file: bool


def _list_files(source: str, options: SourceOptions, ignored: Counter[str]) -> Iterator[FilePiece]:
    """Yield the files of a path or URL."""
    shown, filesystem, root = source, None, source.rstrip("/") or source
    if "://" in source:
        shown = redact_url(source)
        filesystem, root = open_filesystem(source, shown)
    with translate_transfer_errors(shown, source):
        kind = _kind(root) if filesystem is None else filesystem.info(root)["type"]
        if kind not in ("file", "directory"):
            raise DataError(f"cannot read {shown}: neither a file nor a folder; write it to a file first")
        if kind == "file":
            size = os.stat(root).st_size if filesystem is None else filesystem.info(root).get("size")
            yield FilePiece(name=shown, size=size, path=root, filesystem=filesystem)
            return
        entries = list(_walk(root, ignored) if filesystem is None else _find(filesystem, root))
        saved = _list_saved(shown, root, filesystem, {entry.path for entry in entries}, options)
    by_path = {entry.path: entry for entry in entries}
    for path in saved or sorted(by_path, key=lambda path: path.encode("utf-8", "surrogateescape")):
        if (entry := by_path.get(path)) is None:
            raise DataError(f"{path}: a file of the saved dataset is missing; save it again")
        relative = path.removeprefix(root).lstrip("/")
        if not saved and any(part.startswith(".") for part in relative.split("/")):
            ignored["hidden"] += 1
        elif not saved and not relative.lower().endswith(tuple(options.suffixes)):
            ignored[PurePosixPath(relative).suffix.lower() or PurePosixPath(relative).name] += 1
        elif not entry.is_file and options.on_bad == "error":
            raise DataError(f"{path}: not a file, or a link to nothing; correct or remove it{SKIP_REMEDY}")
        elif not entry.is_file:
            ignored["no file"] += 1
        else:
            name = path if filesystem is None else redact_url(filesystem.unstrip_protocol(path))
            yield FilePiece(name=name, size=entry.size, path=path, filesystem=filesystem)


def _kind(path: str) -> str:
    os.stat(path)
    return "directory" if os.path.isdir(path) else "file" if os.path.isfile(path) else "other"


def _walk(root: str, ignored: Counter[str]) -> Iterator[_Entry]:
    """Yield the files below a local folder; unlike fsspec, a folder that cannot be read is an error."""

    def fail(exc: OSError) -> None:
        raise exc

    for folder, subfolders, names in os.walk(root, onerror=fail):
        ignored["hidden"] += sum(name.startswith(".") for name in subfolders)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        if links := sum(os.path.islink(os.path.join(folder, name)) for name in subfolders):
            ignored["link to a folder"] += links
        for path in (os.path.join(folder, name) for name in names):
            is_file = os.path.isfile(path)
            yield _Entry(path, os.stat(path).st_size if is_file else None, is_file)
    ignored += Counter()  # without zeros


def _find(filesystem: Any, root: str) -> Iterator[_Entry]:
    for path, info in filesystem.find(root, detail=True).items():
        is_file = info["type"] == "file" or (info.get("islink", False) and filesystem.isfile(path))
        yield _Entry(path, info.get("size"), is_file)


def _list_saved(shown: str, root: str, filesystem: Any, paths: set[str], options: SourceOptions) -> list[str] | None:
    """Return the files of a folder that `datasets` saved, or None if it is not one."""

    def read(name: str) -> bytes | None:
        path = f"{root}/{name}"
        if path not in paths:
            return None
        with open(path, "rb") if filesystem is None else filesystem.open(path, "rb") as file:
            return file.read()

    names = list_arrow_files(shown, read, options.split)
    return None if names is None else [f"{root}/{name}" for name in names]
