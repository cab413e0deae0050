"""Listing of source files, sorted by the bytes of the path below the source.

Symbolic links in a folder are followed only to files in that folder; other links are counted, as are the files without
a requested suffix and the hidden ones: files and folders whose names begin with a dot, such as `.git`. A link to
nothing, or a pipe, is bad input. A folder that `datasets` saved is read in the order of its file list.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from lt_data.errors import DataError
from lt_data.file_names import redact_url
from lt_data.sources.hub import HUB_SCHEME, list_hub_dataset
from lt_data.sources.options import SKIP_REMEDY, SourceOptions
from lt_data.sources.saved_dataset import list_arrow_files
from lt_data.sources.source_unit import ListedFile, SourceUnit
from lt_data.sources.transfer_errors import translate_answer_errors, translate_transfer_errors
from lt_data.storage import open_regular, read_file, translate_os_errors

_MAX_DESCRIPTION_BYTES = 2**26  # of a saved dataset
_HIDDEN = "hidden"
_LIKE_TEXT = re.compile(r"(?!\S*://).*[\s\0]|.{4096}", re.DOTALL)  # no URL, or one that is too long


@dataclass
class SourceListing:
    """Listing of sources.

    Attributes:
        units: files and ranges of rows, in order.
        skipped_links: symbolic links that were not followed or, if bad input is skipped, lead to nothing.
        ignored_files: files of the folders without a requested suffix, by suffix; and hidden files and folders.
        unreadable_files: if bad input is skipped, a message for each file of the folders that is none.
    """

    units: list[SourceUnit] = field(default_factory=list)
    skipped_links: int = 0
    ignored_files: Counter[str] = field(default_factory=Counter)
    unreadable_files: list[str] = field(default_factory=list)
    _begins: list[tuple[int, str]] = field(default_factory=list)

    def add(self, source: str, options: SourceOptions) -> None:
        """Add a source.

        Raises:
            DataError: it does not exist, cannot be listed, or is neither a file nor a folder.
        """
        if _LIKE_TEXT.match(source) and not os.path.lexists(source):
            raise DataError(f"cannot read {source[:80]!r}: no such file or folder (a text in memory: {{'text': text}})")
        self._begins.append((len(self.units), source))
        self._list(source, options)

    def check_distinct(self) -> None:
        """Raise a DataError if a file is in two of the sources, under one name or several; a `stat` per file."""
        if len(self._begins) < 2:
            return
        found: dict[object, str] = {}
        ends = [first for first, _ in self._begins[1:]] + [len(self.units)]
        for (first, source), end in zip(self._begins, ends, strict=True):
            own: dict[object, str] = {}
            for unit in self.units[first:end]:
                key = _identify(unit)
                if key in found:
                    raise DataError(
                        f"{unit.name}: in two sources, {redact_url(found[key])} and {redact_url(source)}; give each "
                        "file once (the weights of a mixture repeat documents)"
                    )
                own[key] = source
            found |= own

    def _list(self, source: str, options: SourceOptions) -> None:
        if source.startswith(HUB_SCHEME) and not source.startswith(f"{HUB_SCHEME}datasets/"):
            self.units.extend(list_hub_dataset(source, options))
        elif "://" in source:
            self.units.extend(self._list_url(source, options))
        else:
            self.units.extend(self._list_local(source, options))

    def _list_local(self, source: str, options: SourceOptions) -> Iterator[SourceUnit]:
        with translate_os_errors("read", source):
            kind = os.stat(source)
        if stat.S_ISREG(kind.st_mode):
            yield ListedFile(name=source, size=kind.st_size, path=source)
        elif not stat.S_ISDIR(kind.st_mode):
            raise DataError(f"cannot read {source}: neither a file nor a folder; write it to a file first")
        elif (saved := _list_local_saved_dataset(source, options)) is not None:
            yield from saved
        else:
            yield from self._list_folder(source, options)

    def _list_folder(self, root: str, options: SourceOptions) -> Iterator[SourceUnit]:
        real_root = os.path.realpath(root)
        files: list[tuple[str, ListedFile]] = []

        def reraise(exc: OSError) -> None:
            raise exc

        with translate_os_errors("read", root):
            for folder, subfolders, names in os.walk(root, onerror=reraise):
                self.ignored_files[_HIDDEN] += sum(name.startswith(".") for name in (*subfolders, *names))
                subfolders[:] = [name for name in subfolders if not name.startswith(".")]
                self.skipped_links += sum(os.path.islink(os.path.join(folder, name)) for name in subfolders)
                for name in names:
                    path = os.path.join(folder, name)
                    if name.startswith(".") or not self._has_suffix(name, options):
                        continue
                    if os.path.islink(path) and not _is_inside(os.path.realpath(path), real_root):
                        self.skipped_links += 1
                    elif not os.path.exists(path):
                        self._handle_bad(f"{path}: a symbolic link to nothing; remove or correct it", options)
                        self.skipped_links += 1
                    elif not os.path.isfile(path):
                        self._handle_bad(f"{path}: not a regular file; move it away, or write it to a file", options)
                    else:
                        relative = Path(path).relative_to(root).as_posix()
                        files.append((relative, ListedFile(name=path, size=os.stat(path).st_size, path=path)))
        self.ignored_files += Counter()  # without zeros
        yield from (listed for _, listed in sorted(files, key=lambda pair: os.fsencode(pair[0])))

    def _list_url(self, url: str, options: SourceOptions) -> Iterator[SourceUnit]:
        from fsspec.core import url_to_fs  # imported here: slow, and most corpora are local

        shown = redact_url(url)
        protocol = url.partition("://")[0]
        try:
            filesystem, root = url_to_fs(url, **_make_options(url))
        except (ImportError, ValueError) as exc:
            reason = str(exc).replace(url, shown)
            raise DataError(f"cannot read {shown}: {reason}; install the fsspec package for {protocol}://") from exc
        with translate_transfer_errors(shown, url):
            with translate_answer_errors(shown):
                info = filesystem.info(root)
                files: dict[str, Any] = filesystem.find(root, detail=True) if info["type"] == "directory" else {}
            if info["type"] not in ("file", "directory"):
                raise DataError(f"cannot read {shown}: neither a file nor a folder; write it to a file first")
            if info["type"] != "directory":
                yield ListedFile(name=shown, size=info.get("size"), path=root, filesystem=filesystem)
                return
            saved = _list_remote_saved_dataset(shown, root, filesystem, files, options)
        for path in sorted(files) if saved is None else saved:
            inner = path.removeprefix(root).strip("/").split("/")
            if saved is None and any(part.startswith(".") for part in inner):
                self.ignored_files[_HIDDEN] += 1
            elif saved is not None or self._has_suffix(path, options):
                is_link = files[path].get("islink", False)  # of a file:// address
                if is_link and not _is_inside(os.path.realpath(path), os.path.realpath(root)):
                    self.skipped_links += 1
                    continue
                if not os.path.isfile(path) if is_link else files[path]["type"] != "file":
                    self._handle_bad(f"{path}: not a regular file; move it away, or write it to a file", options)
                    continue
                name = redact_url(filesystem.unstrip_protocol(path))
                yield ListedFile(name=name, size=files[path].get("size"), path=path, filesystem=filesystem)

    def _handle_bad(self, message: str, options: SourceOptions) -> None:
        if options.on_bad == "error":
            raise DataError(message + SKIP_REMEDY)
        self.unreadable_files.append(message)

    def _has_suffix(self, name: str, options: SourceOptions) -> bool:
        matches = name.lower().endswith(tuple(options.suffixes))
        if not matches:
            self.ignored_files[PurePosixPath(name).suffix.lower() or PurePosixPath(name).name] += 1
        return matches


def _make_options(url: str) -> dict[str, Any]:
    """Return the options of fsspec for a URL: the token of a hub only where it may be sent."""
    if HUB_SCHEME not in url:
        return {}
    from lt_data.hub_client import choose_library_token  # imported here: slow

    return {"hf": {"token": choose_library_token()}}


def _list_local_saved_dataset(root: str, options: SourceOptions) -> list[SourceUnit] | None:
    """Return the files of a local folder that `datasets` saved, or None if it is not one."""

    def read(name: str) -> bytes | None:
        path = Path(root, name)
        return read_file(path, max_bytes=_MAX_DESCRIPTION_BYTES, inside=Path(root)) if os.path.lexists(path) else None

    with translate_os_errors("read", root):
        names = list_arrow_files(root, read, options.split)
    units: list[SourceUnit] = []
    for path in (os.path.join(root, name) for name in names or ()):
        with translate_os_errors("read", path), open_regular(Path(path), inside=Path(root)) as file:
            units.append(ListedFile(name=path, size=os.fstat(file.fileno()).st_size, path=path))
    return None if names is None else units


def _list_remote_saved_dataset(
    shown: str, root: str, filesystem: Any, files: dict[str, Any], options: SourceOptions
) -> list[str] | None:
    """Return the file paths of a remote folder that `datasets` saved, or None if it is not one."""

    def read(name: str) -> bytes | None:
        path = f"{root}/{name}"
        return filesystem.cat_file(path) if path in files else None

    names = list_arrow_files(shown, read, options.split)
    if names is not None and (missing := [name for name in names if f"{root}/{name}" not in files]):
        raise DataError(f"{shown}/{missing[0]}: a file of the saved dataset is missing; save it again")
    return None if names is None else [f"{root}/{name}" for name in names]


def _identify(unit: SourceUnit) -> object:
    """Return what is equal for the same file under several names."""
    if not isinstance(unit, ListedFile):
        return unit.name
    if unit.filesystem is not None:
        return type(unit.filesystem), unit.path
    with translate_os_errors("read", unit.name):
        status = os.stat(unit.path)
    return status.st_dev, status.st_ino


def _is_inside(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root
