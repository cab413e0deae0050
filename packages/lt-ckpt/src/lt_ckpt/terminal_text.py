r"""Escaping of text for a terminal: names of files and tensors, configurations, messages with them.

An ANSI escape or another control character in them would change the terminal, and a right-to-left override what is
read. Every text passes `escape_controls` on its way to standard output or standard error. This file imports nothing of
the command line, so that `__main__` can say what is missing.
"""

import sys


def escape_controls(text: str, *, keep: str = "\n\t") -> str:
    r"""Return the text with non-printable characters, but for those in `keep`, escaped as `\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1] for character in text
    )


def echo(text: str) -> None:
    r"""Print to standard output; what its encoding cannot represent is escaped too, for example `\u6771`."""
    # `typer.echo` would fail there, or write UTF-8 where ASCII was requested.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(escape_controls(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def echo_error(text: str) -> None:
    """Print to standard error, which represents every character in some way."""
    sys.stderr.write(escape_controls(text) + "\n")
