r"""Markdown of the cards: text from whoever it comes, shown as it is.

File names, task names and licenses are others' text. `plain` escapes what Markdown, GitHub's tables and formulas, or
HTML would read as markup, and control characters as `\x1b`; so a name is one line and changes nothing around it. Pure.
"""

import re
from collections.abc import Sequence

from lt_data.display.terminal import escape_controls

MARKUP = re.compile(r"[]\\`*_[<>~$&|#+=:.)-]")
"""Characters that begin markup, anywhere or at the beginning of a line."""


def plain(text: object) -> str:
    """Return a text as Markdown that shows it, in one line."""
    return MARKUP.sub(r"\\\g<0>", " ".join(escape_controls(str(text), keep="").split()))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of cells that are Markdown already."""
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (head, ["---"] * len(head), *rows))
