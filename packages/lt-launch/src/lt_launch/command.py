"""The `lt` command line: the first word names a command, which is found by entry point, imported and given the rest.

This level is a few lines of its own rather than a `typer` group. Since 0.29 typer imports pydantic (0.1 CPU-seconds) as
soon as one of its commands parses an option, even its own `--help`, so a group around the commands would cost
a `--help` nearly as much as everything else together. For the same reason help is plain text: rich costs 0.1, too.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint
from typing import Any

from lt_launch.catalog import COMMANDS, installed_commands, installed_packages, summary

__all__ = ["UsageError", "find", "help_text", "run"]

ABOUT = "Pre-train Llama-family language models: text in, Hugging Face safetensors out."


class UsageError(ValueError):
    """A command line that cannot be run: unknown option, unknown or missing command."""

    exit_code: int = 64


def run(arguments: Sequence[str]) -> None:
    """Run one command line of `lt`; what the command raises, also SystemExit, passes through.

    Raises:
        UsageError: no command of that name is installed, or an unknown option stands before it.
    """
    match list(arguments):
        case []:
            raise UsageError(f"lt needs a command\n\n{help_text()}")
        case ["--help" | "-h", *_]:
            sys.stdout.write(help_text())
        case ["--version", *_]:
            sys.stdout.writelines(f"{name} {version}\n" for name, version in installed_packages().items())
        case [option, *_] if option.startswith("-"):
            raise UsageError(f"lt {option}: there is no such option; lt --help lists what there is")
        case [name, *rest]:
            command = _load(find(name))
            command.main(args=rest, prog_name=f"lt {name}")


def find(name: str) -> EntryPoint:
    """The entry point of a command, not yet imported.

    Raises:
        UsageError: none of that name is installed; the message says what to install or which name is near.
    """
    installed = installed_commands()
    if name in installed:
        return installed[name]
    if name in COMMANDS:
        raise UsageError(f"lt {name} is not installed here: pip install '{COMMANDS[name].install}'")
    near = get_close_matches(name, {*installed, *COMMANDS}, n=1)
    hint = f"did you mean lt {near[0]}?" if near else "lt --help lists the commands"
    raise UsageError(f"lt {name}: there is no such command; {hint}")


def help_text() -> str:
    """What `lt --help` prints, from metadata alone."""
    rows = {name: summary(entry) for name, entry in installed_commands().items()}
    return f"""Usage: lt COMMAND [ARGS]...

  {ABOUT}

Options:
{_columns({"--version": "show the installed packages of lt", "--help": "show this message"})}
Commands:
{_columns(rows) if rows else "  none is installed: pip install 'lt-trainer[quickstart]' lt-trainer-gpu"}
lt COMMAND --help says more about one of them.
"""


def _columns(rows: dict[str, str]) -> str:
    width = max(len(name) for name in rows)
    return "".join(f"  {name:<{width}}  {text}\n" for name, text in rows.items())


def _load(entry: EntryPoint) -> Any:
    """Import a command and build it, with plain help throughout."""
    from typer.main import get_command

    command = get_command(entry.load())
    _make_plain(command)
    return command


def _make_plain(command: Any) -> None:
    """Keep rich out of a command's help, and the options that install completion, which does not work below `lt`."""
    command.rich_markup_mode = None
    command.params = [param for param in command.params if param.name not in ("install_completion", "show_completion")]
    for below in getattr(command, "commands", {}).values():
        _make_plain(below)
