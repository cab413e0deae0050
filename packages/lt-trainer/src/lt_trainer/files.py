"""Small files, written whole and durably or not at all."""

import os
import secrets
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file: a new one of a random name beside it, fsync, rename, fsync of the folder."""
    from lt_ckpt.files import fsync_folder  # with numpy, which specs of engines do without

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)
