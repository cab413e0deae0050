"""Color on a terminal: when to use it, and the ANSI escapes of this package.

By option, or else: yes on a terminal, no in a pipe or file, no if NO_COLOR is set (https://no-color.org) or on a `dumb`
terminal, yes if FORCE_COLOR is set.
"""

import os
import sys
from dataclasses import dataclass

_SPAN_COLORS = ("36", "35", "33", "32", "34")  # cyan, magenta, yellow, green, blue: readable on dark and light


def should_use_color(choice: bool | None = None) -> bool:
    """Return whether to color standard output; `choice` is the user's option, None if not given."""
    if choice is not None:
        return choice
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True)
class AnsiStyle:
    """ANSI styling of text, or none."""

    enabled: bool = False

    def bold(self, text: str) -> str:
        """Return the text in bold."""
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        """Return the text dimmed."""
        return self._wrap("2", text)

    def color_span(self, number: int, text: str) -> str:
        """Return the text in the color of a row's n-th document."""
        return self._wrap(_SPAN_COLORS[number % len(_SPAN_COLORS)], text)

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled and text else text


NO_STYLE = AnsiStyle()
