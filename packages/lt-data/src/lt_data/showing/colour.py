"""Colour on a terminal: who gets it, and the few escapes that this package writes.

Asked for by name, or else: yes on a terminal, no in a pipe or file, no where NO_COLOR is set (https://no-color.org) or
the terminal is a `dumb` one, yes where FORCE_COLOR is set.
"""

import os
import sys
from dataclasses import dataclass

_PIECES = ("36", "35", "33", "32", "34")  # cyan, magenta, yellow, green, blue: readable on dark and on light


def wanted(choice: bool | None = None) -> bool:
    """Whether standard output is to be coloured; `choice` is what the user said, None for nothing."""
    if choice is not None:
        return choice
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True)
class Paint:
    """Puts escapes around words, or does not."""

    on: bool = False

    def bold(self, text: str) -> str:
        """Emphasis."""
        return self._in("1", text)

    def dim(self, text: str) -> str:
        """What matters less."""
        return self._in("2", text)

    def piece(self, number: int, text: str) -> str:
        """The colour of a row's n-th document; the next one's is another."""
        return self._in(_PIECES[number % len(_PIECES)], text)

    def _in(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on and text else text


PLAIN = Paint()
