r"""Text for a terminal, from whoever it comes: `escape_controls` shows what would change the terminal as `\x1b`.

Hosts, job names, logs and files are others' text. Every text passes it on its way to standard output or error.
"""

import sys

__all__ = ["echo", "echo_error", "escape_controls"]


def escape_controls(text: str, *, keep: str = "\n\t") -> str:
    r"""Return the text with non-printable characters, but for those in `keep`, escaped as `\x1b`."""
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
