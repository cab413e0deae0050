"""Standard output in any encoding."""

import sys


def echo(text: str) -> None:
    r"""Print to standard output; escape what its encoding cannot represent, such as `\u6771`."""
    # `typer.echo` would raise an error, or write UTF-8 where ASCII is requested.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()
