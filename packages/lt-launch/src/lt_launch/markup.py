"""Text of others between rich's markup: file names, nodes, reasons of a scheduler."""

from __future__ import annotations


def escape(text: str) -> str:
    """Return the text as rich must be given it: no markup, no ANSI escapes, one line."""
    from rich.markup import escape as escape_markup

    from lt_ckpt.terminal_text import escape_controls

    return escape_markup(escape_controls(text, keep=""))
