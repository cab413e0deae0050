"""Words for standard output, whatever it can show."""

import sys


def say(text: str) -> None:
    r"""Print on standard output; what its encoding cannot express is written as an escape, such as `\u6771`."""
    # `typer.echo` would stop with an error there, or write UTF-8 where ASCII was asked for.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()
