"""Hash list of a folder: a SHA-256 per file, in the text format of coreutils' sha256sum.

`sha256sum -c SHA256SUMS` in the folder verifies it too. A line is 64 hexadecimal digits, a space, a space or an
asterisk, and a path relative to the folder. A list is refused as a whole if one of its lines is malformed, names a path
outside of the folder, or names a file twice.

Cost: parsing the list, of at most `MAX_LIST_BYTES`; of `check_file`, a read of the file.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.confined_files import read_confined, resolve_confined
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.file_names import check_name

HASH_LIST = "SHA256SUMS"

MAX_LIST_BYTES = 2**26
"""Largest list that is read: half a million files."""

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_FILES_OF_HUBS = (".git", ".gitattributes", ".gitignore", ".cache")
"""Entries that git and the hub's client make in a folder."""


@dataclass(frozen=True, kw_only=True)
class HashList:
    """Hash list of a folder.

    Attributes:
        folder: The folder.
        hashes: Path of a file, relative to the folder → its SHA-256, as hexadecimal text.
    """

    folder: Path
    hashes: Mapping[str, str]

    def check_file(self, file: str, count_bytes: Callable[[int], None] = lambda n: None) -> None:
        """Read a listed file and compare it with its hash.

        Raises:
            CheckpointError: It differs, is missing, is a link out of the folder, or cannot be read.
        """
        path, digest = self.folder / file, hashlib.sha256()
        with translate_os_errors("reading", path):
            if not resolve_confined(self.folder, file).is_file():
                raise CheckpointError(f"{path}: is missing, {HASH_LIST} lists it; {_remedy(file)}")
            files.hash_range(digest, path, 0, path.stat().st_size, count_bytes)
        if digest.hexdigest() != self.hashes[file]:
            raise CheckpointError(
                f"{path}: its bytes differ from their checksum; the file is damaged, or was changed after {HASH_LIST} "
                f"was written; {_remedy(file)}"
            )

    def find_unlisted(self) -> Iterator[str]:
        """Yield the files of the folder that are not listed, but for those of git and of the hub's client."""
        for parent, folders, names in os.walk(self.folder):
            relative = Path(parent).relative_to(self.folder)
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for path in sorted((relative / name).as_posix() for name in (*names, *links)):
                is_ours = path == HASH_LIST or path.split("/")[0] in _FILES_OF_HUBS
                if path not in self.hashes and not is_ours:
                    yield path


def _remedy(file: str) -> str:
    return f"take another copy, or, if the change is yours, replace its line by the output of `sha256sum {file}` there"


def format_hash_list(hashes: Mapping[str, str]) -> bytes:
    """Return the text of a list, sorted by path."""
    return "".join(f"{digest}  {file}\n" for file, digest in sorted(hashes.items())).encode()


def read_hash_list(folder: Path) -> HashList | None:
    """Read the list in a folder; None if there is none.

    Raises:
        CheckpointError: It is malformed, too large, a link out of the folder, or cannot be read.
    """
    raw = read_confined(folder, HASH_LIST, MAX_LIST_BYTES)
    return None if raw is None else HashList(folder=folder, hashes=parse_hash_list(raw, str(folder / HASH_LIST)))


def parse_hash_list(raw: bytes, where: str) -> dict[str, str]:
    """Return path → SHA-256 of a list.

    Raises:
        CheckpointError: A line is malformed or cut, leads out of the folder, or names a file twice.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(raw.decode("utf-8", "replace").removesuffix("\n").split("\n"), start=1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in found:
            raise CheckpointError(
                f"{where}: line {number} is not a SHA-256, two spaces and a path that no other line has: "
                f"{line[:80]!r}; write the list again with sha256sum"
            )
        found[check_name(match[2], f"{where}: line {number}")] = match[1].lower()
    if not raw.endswith(b"\n"):
        raise CheckpointError(f"{where}: its last line is cut; write it again with sha256sum")
    return found
