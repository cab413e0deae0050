"""Files as others may have left them: read without waiting, and written without following a link.

A pipe in the place of a file would be waited for without end, and a link planted under a name that we write would lead
our bytes into somebody's file. So every file of a run or of a user is opened here: for reading only a regular file
(links to one are followed), for appending and locking only one that is no link, and whole files are written under a
random new name and renamed. JSON is parsed with a limit of depth, since whatever walks over it recurses.

All raise plain `OSError` and `ValueError`, whose text ends with the remedy where the system's would not help; callers
name the file. Cost: one `fstat` per file.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import tomllib
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_JSON_DEPTH = 64
"""Lists and objects inside each other."""
MAX_JSON_BYTES = 2**28
"""Size of a whole JSON or TOML file: far above ours, below what memory has."""


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; anything else is an OSError, and nothing is waited for."""
    return os.fdopen(_checked(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path), "rb")


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file; a larger one is an OSError."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes, which no such file has", os.fspath(path))
        return file.read(max_bytes)


def read_text(path: str | os.PathLike[str], *, errors: str = "strict") -> str:
    """Return the text of a regular file in UTF-8."""
    with open_regular(path) as file:
        return file.read().decode("utf-8", errors)


def parse_json(content: bytes | str) -> Any:
    """Parse JSON; deeper than `MAX_JSON_DEPTH` is a ValueError, as all that is no JSON."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML, with the same limit of depth."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep") from None
    _check_depth(table)
    return table


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parse a JSON file; an OSError or a ValueError if it cannot be."""
    return parse_json(read_bytes(path))


def open_for_appending(path: str | os.PathLike[str]) -> int:
    """Open a file for appending, new if it is missing; a link or a pipe is an OSError.

    A device is not: only root can have made it, such as /dev/full, with which tests fill a disk.
    """
    return _open_for_writing(path, os.O_WRONLY | os.O_APPEND)


def open_lock_file(path: str | os.PathLike[str]) -> int:
    """Open a file for reading and writing as it is, new if it is missing; likewise."""
    return _open_for_writing(path, os.O_RDWR)


def _open_for_writing(path: str | os.PathLike[str], flags: int) -> int:
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return _checked(os.open(path, flags, 0o666), path, devices=True)
    except OSError as exc:
        if exc.errno == errno.ELOOP and os.path.islink(path):
            text = "is a symbolic link, which is not followed to what is written; remove it"
        elif exc.errno == errno.ENXIO:
            text = "is no regular file; remove it"
        else:
            raise
        raise OSError(exc.errno, text, os.fspath(path)) from exc


def _checked(descriptor: int, path: str | os.PathLike[str], *, devices: bool = False) -> int:
    """Return the descriptor of a regular file; close that of anything else, and raise an OSError."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (devices and stat.S_ISCHR(mode)):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "is no regular file; put a file with its content there", os.fspath(path))


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file atomically and durably.

    A new file of a random name, fsync, rename, fsync of the folder.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:  # x: a link of this name, planted by another, is not followed
            file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
