r"""Hash list of a folder: a SHA-256 per file, in the text format of coreutils' sha256sum.

`sha256sum -c SHA256SUMS` in the folder verifies it too. A line is 64 hexadecimal digits, a space, a space or an
asterisk, and a path relative to the folder; a line that begins with a backslash has `\\`, `\n` and `\r` in its
path for backslash, line feed and carriage return. A list is refused as a whole if one of its lines is malformed, names
a path outside of the folder, or names a file twice.

Cost: parsing the list, of at most `MAX_LIST_BYTES`; of `check_file`, a read of the file.
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lt_ckpt import files
from lt_ckpt.confined_files import read_confined, resolve_confined
from lt_ckpt.errors import CheckpointError, translate_os_errors

HASH_LIST = "SHA256SUMS"

MAX_LIST_BYTES = 2**26
"""Largest list that is read: half a million files."""

_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPED = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPED = {escaped: plain for plain, escaped in _ESCAPED.items()}
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

    def file_size(self, file: str) -> int:
        """Return the size of a listed file.

        Raises:
            CheckpointError: The file is missing, is not a regular one, or is a link out of the folder.
        """
        path = self.folder / file
        with translate_os_errors("reading", path):
            if not os.path.lexists(path):
                raise CheckpointError(f"{path}: is missing, {HASH_LIST} lists it; {_remedy(file)}")
            status = os.stat(resolve_confined(self.folder, file))
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file, {HASH_LIST} lists it")
        return status.st_size

    def check_file(self, file: str, count_bytes: Callable[[int], None] = lambda n: None) -> None:
        """Read a listed file and compare it with its hash.

        Raises:
            CheckpointError: It differs, is missing, or cannot be read.
        """
        self.file_size(file)
        digest, block = hashlib.sha256(), memoryview(bytearray(files.BLOCK_BYTES))
        with translate_os_errors("reading", self.folder / file), open(self.folder / file, "rb", 0) as opened:
            while n := opened.readinto(block):
                digest.update(block[:n])
                count_bytes(n)
        if digest.hexdigest() != self.hashes[file]:
            raise CheckpointError(
                f"{self.folder / file}: its bytes differ from its hash in {HASH_LIST}: it is damaged, or was changed "
                f"after the list was written; {_remedy(file)}"
            )

    def find_unlisted(self) -> Iterator[str]:
        """Yield the files of the folder that are not listed, but for those of git and of the hub's client."""
        for parent, folders, names in os.walk(self.folder):
            relative = Path(parent).relative_to(self.folder)
            if relative == Path():
                folders[:] = [name for name in folders if name not in _FILES_OF_HUBS]
                names = [name for name in names if name not in (*_FILES_OF_HUBS, HASH_LIST)]
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            yield from sorted(
                path for name in (*names, *links) if (path := (relative / name).as_posix()) not in self.hashes
            )


def _remedy(file: str) -> str:
    return f"take another copy, or, if the change is yours, replace its line by the output of `sha256sum {file}` there"


def format_hash_list(hashes: Mapping[str, str]) -> bytes:
    """Return the text of a list, sorted by path."""
    lines: list[str] = []
    for file, digest in sorted(hashes.items()):
        escaped = re.sub(r"[\\\n\r]", lambda match: _ESCAPED[match[0]], file)
        lines.append(f"{chr(92) if escaped != file else ''}{digest}  {escaped}\n")
    return "".join(lines).encode()


def read_hash_list(folder: Path) -> HashList | None:
    """Read the list in a folder; None if there is none.

    Raises:
        CheckpointError: It is malformed, too large, a link out of the folder, or cannot be read.
    """
    raw = read_confined(folder, HASH_LIST, MAX_LIST_BYTES)
    if raw is None:
        if os.path.lexists(folder / HASH_LIST):
            raise CheckpointError(f"{folder / HASH_LIST}: is not a file; remove it")
        return None
    return HashList(folder=folder, hashes=parse_hash_list(raw, str(folder / HASH_LIST)))


def parse_hash_list(raw: bytes, where: str) -> dict[str, str]:
    """Return path → SHA-256 of a list.

    Raises:
        CheckpointError: A line is malformed or cut, leads out of the folder, or names a file twice.
    """
    try:
        *lines, rest = raw.decode().split("\n")
    except UnicodeDecodeError:
        raise CheckpointError(f"{where}: is not UTF-8 text; write it again with sha256sum") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        name = None if match is None else _parse_name(match[3], is_escaped=bool(match[1]))
        if match is None or name is None:
            raise CheckpointError(
                f"{where}: line {number} is not a SHA-256, two spaces and a path in this folder: {line[:80]!r}; write "
                "the list again with sha256sum"
            )
        if name in found:
            raise CheckpointError(f"{where}: line {number}: {name!r} is listed twice; keep one of the lines")
        found[name] = match[2].lower()
    if rest or not found:
        raise CheckpointError(f"{where}: its last line is cut, or it has none; write it again with sha256sum")
    return found


def _parse_name(text: str, *, is_escaped: bool) -> str | None:
    """Return the path of a line, or None if it is not one inside of the folder."""
    name = re.sub(r"\\.?", lambda match: _UNESCAPED.get(match[0], "\0"), text) if is_escaped else text
    name = name.removeprefix("./")
    is_inside = not {"", ".", ".."} & set(name.split("/"))
    return name if is_inside and "\0" not in name and name != HASH_LIST else None
