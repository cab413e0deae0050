r"""Markdown of the cards: text from whoever it comes, shown as it is.

File names, task names and licenses are others' text. `plain` escapes what Markdown, GitHub's tables and formulas, or
HTML would read as markup, and control characters as `\x1b`; so a name is one line and changes nothing around it.
`table` expects cells that are Markdown already. Pure.
"""

import re
from collections.abc import Sequence

from lt_data.display.terminal import escape_controls

MARKUP = re.compile(r"[\\`*\[\]<>~$&]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that begin markup anywhere; an underscore within a word does not."""
BLOCK = re.compile(r"[#+=:-]|\d+(?=[.)](?:\s|$))")
"""Beginning of a line that makes it a heading or a list."""


def plain(text: object) -> str:
    """Return a text as Markdown that shows it, in one line."""
    line = " ".join(escape_controls(str(text), keep="").split())
    escaped = MARKUP.sub(lambda match: "\\" + match[0], line)
    if (begin := BLOCK.match(line)) is None:
        return escaped
    number = begin[0] if begin[0].isdecimal() else ""
    return f"{number}\\{escaped[len(number) :]}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of cells that are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
