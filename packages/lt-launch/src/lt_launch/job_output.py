r"""Lines that a job writes: read while they are written, and on their way to a terminal or a file.

A job prints what it likes: colors, bars that return to the start of their line, or an escape that renames the window.
A terminal gets plain text: colors taken away, of a bar the last state, everything else escaped as `\x1b`. A file or a
pipe gets the lines as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TextIO

from lt_ckpt.terminal_text import escape_controls
from lt_launch.errors import LaunchError

COLOR = re.compile(r"\x1b\[[0-9;:]*m")
READ_BYTES = 1 << 20


class LogTail:
    """Reader of a log that grows; at most READ_BYTES at a time, and a line that is longer in several."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0

    def read(self, *, is_last: bool) -> list[str]:
        """Return the lines that have been written since the last call; a last one without an end if `is_last`.

        Raises:
            LaunchError: the log is a link, which leads out of the launch, or cannot be read.
        """
        try:
            with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise LaunchError(f"{self.path} cannot be read: {exc.strerror}") from exc
        end = data.rfind(b"\n") + 1
        if (is_last and len(data) < READ_BYTES) or (not end and len(data) == READ_BYTES):
            end = len(data)
        self._offset += end
        return data[:end].decode("utf-8", "replace").removesuffix("\n").split("\n") if end else []


def format_lines(text: str, stream: TextIO, prefix: str = "") -> str:
    """Return lines as they are written to a stream.

    Args:
        text: one or more lines, with or without a line break at the end.
        stream: decides by `isatty` and its encoding.
        prefix: text in front of each line.
    """
    lines = text.removesuffix("\n").split("\n")
    if stream.isatty():
        lines = [_plain(line) for line in lines]
    written = "".join(f"{prefix}{line}\n" for line in lines)
    encoding = stream.encoding or "utf-8"
    return written.encode(encoding, "backslashreplace").decode(encoding)


def _plain(line: str) -> str:
    return escape_controls(COLOR.sub("", line).rstrip("\r").rpartition("\r")[2], keep="\t")
