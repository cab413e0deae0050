"""Small files: written whole and durably or not at all, read as JSON or TOML.

Errors are plain `OSError` and `ValueError`; callers name the file.
"""

from __future__ import annotations

import json
import os
import secrets
import tomllib
from io import BufferedReader
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a small file: a new file of a random name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
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


def parse_json(content: bytes | str) -> Any:
    """Parse JSON; a ValueError if it is none, or too deep."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; a ValueError if it is none, or too deep."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Parse a JSON file."""
    return parse_json(Path(path).read_bytes())


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file."""
    return Path(path).read_bytes()


def read_text(path: str | os.PathLike[str], *, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8."""
    return Path(path).read_text("utf-8", errors)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading."""
    return open(path, "rb")


def open_for_appending(path: str | os.PathLike[str]) -> int:
    """Open a file for appending, new if it is missing; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def open_lock_file(path: str | os.PathLike[str]) -> int:
    """Open a file for reading and writing as it is, new if it is missing; return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
