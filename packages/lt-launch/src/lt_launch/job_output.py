r"""Lines that a job wrote, on their way to a terminal or a file.

A job prints what it likes: colors, bars that return to the start of their line, or an escape that renames the window.
A terminal gets plain text: colors taken away, of a bar the last state, everything else escaped as `\x1b`. A file or a
pipe gets the lines as they are.
"""

from __future__ import annotations

import re
from typing import TextIO

from lt_ckpt.terminal_text import escape_controls

COLOR = re.compile(r"\x1b\[[0-9;:]*m")


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
