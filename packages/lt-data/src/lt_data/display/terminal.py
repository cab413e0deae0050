r"""Text for a terminal, from whoever it comes.

File names, special tokens, manifests and documents are others' text: an ANSI escape or a control character in them
would change the terminal, and a right-to-left override what is read. Every text passes `escape_controls` on its way to
standard output or standard error.
"""

import shlex
import sys


def escape_controls(text: str, *, keep: str = "\n\t") -> str:
    r"""Return the text with non-printable characters, but for those in `keep`, escaped as `\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def quote_for_shell(text: str) -> str:
    r"""Return a word of bash, zsh or ksh for a text; one that is not printable is written as `$'\x1b'`."""
    if text.isprintable():
        return shlex.quote(text)
    encoded = text.encode("utf-8", "surrogateescape")
    characters = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in encoded)
    return f"$'{''.join(characters)}'"


def echo(text: str) -> None:
    r"""Print to standard output; escape what its encoding cannot represent, such as `\u6771`."""
    # `typer.echo` would raise an error, or write UTF-8 where ASCII is requested.
    encoding = sys.stdout.encoding or "utf-8"
    shown = escape_controls(text)
    sys.stdout.write(shown.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def echo_error(text: str) -> None:
    """Print a message or traceback to standard error, which represents every character in some way."""
    sys.stderr.write(escape_controls(text) + "\n")
