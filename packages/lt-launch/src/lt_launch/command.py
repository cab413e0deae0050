"""Dispatch of the `lt` command line to commands found by entry point.

The first word names a command, which is imported and receives the remaining arguments. This level is a few lines of its
own instead of a `typer` group: since 0.29 typer imports pydantic (0.1 CPU-seconds) as soon as one of its commands
parses an option, even its own `--help`, so a group around the commands would nearly double the cost of `--help`.
Help is plain text for the same reason: rich costs another 0.1 CPU-seconds.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint
from typing import Any

from lt_launch.catalog import COMMANDS, command_summary, installed_commands, installed_packages

ABOUT = "Pre-train Llama-family language models: text in, Hugging Face safetensors out."


class UsageError(ValueError):
    """Invalid command line: unknown option, unknown or missing command."""

    exit_code: int = 64


def run_command(arguments: Sequence[str]) -> None:
    """Run one command line of `lt`; exceptions of the command, including SystemExit, propagate.

    Raises:
        UsageError: no command of that name is installed, or an unknown option precedes it.
    """
    match list(arguments):
        case []:
            raise UsageError(f"lt needs a command\n\n{help_text()}")
        case ["--help" | "-h", *_]:
            sys.stdout.write(help_text())
        case ["--version", *_]:
            sys.stdout.writelines(f"{name} {version}\n" for name, version in installed_packages().items())
        case [option, *_] if option.startswith("-"):
            raise UsageError(f"lt {option}: no such option; see lt --help")
        case [name, *rest]:
            command = _load_command(find_command(name))
            command.main(args=rest, prog_name=f"lt {name}")


def find_command(name: str) -> EntryPoint:
    """Return the entry point of a command without importing it.

    Raises:
        UsageError: no such command; the message names the package to install or similar commands.
    """
    installed = installed_commands()
    if name in installed:
        return installed[name]
    if name in COMMANDS:
        raise UsageError(f"lt {name} is not installed here: pip install '{COMMANDS[name].install}'")
    near = get_close_matches(name, {*installed, *COMMANDS}, n=1)
    hint = f"did you mean lt {near[0]}?" if near else "lt --help lists the commands"
    raise UsageError(f"lt {name}: no such command; {hint}")


def help_text() -> str:
    """Return the text of `lt --help`, built from metadata alone."""
    rows = {name: command_summary(entry) for name, entry in installed_commands().items()}
    return f"""Usage: lt COMMAND [ARGS]...

  {ABOUT}

Options:
{_format_columns({"--version": "show the installed packages of lt", "--help": "show this message"})}
Commands:
{_format_columns(rows) if rows else "  none is installed: pip install 'lt-trainer[quickstart]' lt-trainer-gpu"}
lt COMMAND --help says more about one of them.
"""


def _format_columns(rows: dict[str, str]) -> str:
    width = max(len(name) for name in rows)
    return "".join(f"  {name:<{width}}  {text}\n" for name, text in rows.items())


def _load_command(entry: EntryPoint) -> Any:
    """Import a command and build it with plain-text help."""
    from typer.main import get_command

    command = get_command(entry.load())
    _disable_rich_and_completion(command)
    return command


def _disable_rich_and_completion(command: Any) -> None:
    """Disable rich help and the completion options, which do not work below `lt`."""
    command.rich_markup_mode = None
    command.params = [param for param in command.params if param.name not in ("install_completion", "show_completion")]
    for subcommand in getattr(command, "commands", {}).values():
        _disable_rich_and_completion(subcommand)
