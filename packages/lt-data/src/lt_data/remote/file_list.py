"""Lists of the files of a folder with their sizes and digests: what an upload sends and a download must find.

A caller that knows the digests already (the manifest of a checkpoint) makes a `FileList` of its own. Any other folder
is hashed, and its list is uploaded too, after all files, as an object beside them:

    lt-files.json    {"format": "lt-files", "version": 1, "files": {NAME: {"bytes": n, "sha256": hex}}}
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lt_data import strict_json
from lt_data.errors import DataError
from lt_data.file_names import check_name
from lt_data.storage import translate_os_errors
from lt_data.store.manifest import FORMAT as STORE_FORMAT
from lt_data.store.manifest import MANIFEST_FILE as MANIFEST
from lt_data.store.manifest import StoreManifest

LIST = "lt-files.json"
MAX_LIST_BYTES = 2**31
_FORMAT, _VERSION = "lt-files", 1


class DamagedError(DataError):
    """The bytes of a file are not those of its list."""


@dataclass(frozen=True)
class ListedFile:
    """Size and digest of a file.

    Attributes:
        n_bytes: its size.
        digest: of its content, in the words of the list's `digest`.
    """

    n_bytes: int
    digest: str


def sha256_of(path: Path, name: str = "") -> str:
    """Return the SHA-256 (hex) of a file."""
    with translate_os_errors("read", path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, kw_only=True)
class FileList:
    """The files of a folder.

    Attributes:
        source: where the list is from, for messages.
        files: name → size and digest; the names are relative, with "/".
        last: of these the ones that are sent after all others, in this order: where the last one is, all are.
        digest: returns the digest (ASCII) of the file at a path, which the list has under a name.

    Raises:
        DataError: a name leads out of the folder.
    """

    source: str
    files: Mapping[str, ListedFile]
    last: tuple[str, ...] = ()
    digest: Callable[[Path, str], str] = field(default=sha256_of)

    def __post_init__(self) -> None:
        for name in self.files:
            check_name(name, self.source)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.n_bytes for file in self.files.values())

    def is_at(self, path: Path, name: str) -> bool:
        """Return True if the file at a path has the size and the digest that the list gives a name; it is read."""
        file = self.files[name]
        with translate_os_errors("read", path):
            same_size = path.is_file() and path.stat().st_size == file.n_bytes
        return same_size and self.digest(path, name) == file.digest

    def encode(self) -> bytes:
        """Return the list as it is uploaded: the same bytes for the same files."""
        files = {name: {"bytes": file.n_bytes, "sha256": file.digest} for name, file in sorted(self.files.items())}
        return (json.dumps({"format": _FORMAT, "version": _VERSION, "files": files}, indent=0) + "\n").encode()


def decode_list(content: bytes, source: str) -> FileList:
    """Return the list that an upload left.

    Raises:
        DataError: it is damaged, or names a file elsewhere.
    """
    try:
        values = json.loads(content)
        if (values["format"], values["version"]) != (_FORMAT, _VERSION):
            raise ValueError("another format")
        files = {n: ListedFile(int(entry["bytes"]), str(entry["sha256"])) for n, entry in values["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise DataError(f"{source}: not a list of files of this version ({exc}); upload the folder again") from exc
    return FileList(source=source, files=files, last=last_files(files))


def last_files(files: Mapping[str, ListedFile]) -> tuple[str, ...]:
    """Return the files of a folder that are sent last: a store's manifest, without which it is none."""
    return (MANIFEST,) if MANIFEST in files else ()


def store_hashes(content: bytes, source: str) -> dict[str, str]:
    """Return the SHA-256 (hex) of each file that a store's manifest names; of another file of that name none.

    Raises:
        DataError: it is a store's manifest and broken.
    """
    try:
        kind = json.loads(content)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if kind != STORE_FORMAT:
        return {}
    return StoreManifest.from_dict(
        strict_json.load_object(content, source, "prepare the store again"), source
    ).file_hashes()


def list_folder(folder: Path) -> FileList:
    """Return the list of a folder on this machine; every file is read.

    Raises:
        DamagedError: a file of a token store is not the one of its manifest.
        DataError: it is no folder or has no files, or something in it is no plain file.
    """
    hashes: dict[str, str] = {}
    if (folder / MANIFEST).is_file():
        with translate_os_errors("read", folder / MANIFEST):
            hashes = store_hashes((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    names = sorted({*_names_below(folder, hashes), *hashes})
    if not names:
        raise DataError(f"{folder}: there is nothing to upload: no such folder, or no file in it")
    files: dict[str, ListedFile] = {}
    for name in names:
        with translate_os_errors("read", folder / name):
            files[name] = ListedFile((folder / name).stat().st_size, sha256_of(folder / name))
    if wrong := [name for name, digest in hashes.items() if files[name].digest != digest]:
        raise DamagedError(f"{folder / wrong[0]}: is not the file of the store's manifest; copy or prepare it again")
    return FileList(source=str(folder), files=files, last=last_files(files))


def _names_below(folder: Path, hashes: Mapping[str, str]) -> list[str]:
    """Return the names of all files of a folder, which are plain ones; links to stores with files in `hashes` pass."""
    linked = {name[:end] for name in hashes for end in range(len(name)) if name[end] == "/"}
    found: list[str] = []
    with translate_os_errors("look at", folder):
        for at, folders, names in os.walk(folder):
            for path in (Path(at, name) for name in (*folders, *names)):
                is_link = path.is_symlink() and path.relative_to(folder).as_posix() not in linked
                if is_link or not (path.is_dir() or path.is_file()):
                    raise DataError(f"{path}: not a plain file or folder: put what it stands for in its place")
            found += [Path(at, name).relative_to(folder).as_posix() for name in names]
    if odd := [name for name in found if not name.isprintable()]:
        raise DataError(f"{folder / odd[0]}: a file name that is no printable UTF-8 is no object's name: rename it")
    return [name for name in found if name != LIST]  # of an earlier download by another program: written again
