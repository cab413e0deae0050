"""The `lt` command line: a group whose members are found by entry point and imported only when they are called.

`lt --help` lists names and one-line descriptions from metadata; `lt data --help` imports `lt_data.cli` and nothing
of the other packages. Help is plain text: drawing it with rich costs more than everything else together (measured:
0.3 CPU-seconds beside 0.15 for importing typer).

Context and formatter are `Any` because their classes moved between typer versions.
"""

from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from lt_launch.catalog import COMMANDS, installed_commands, installed_packages, summary

__all__ = ["NoCommandError", "app"]


class NoCommandError(ValueError):
    """A command that is not installed here, or does not exist."""

    exit_code: int = 64


class LtGroup(TyperGroup):
    """The commands that installed packages offer, each imported at its first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the installed commands."""
        return list(installed_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command.

        Raises:
            NoCommandError: there is none of that name; the message says what to install or which name is near.
        """
        installed = installed_commands()
        if cmd_name not in installed:
            if ctx.resilient_parsing:  # a shell that completes a half-typed name
                return None
            raise NoCommandError(_no_such_command(cmd_name, list(installed)))
        command = typer.main.get_command(installed[cmd_name].load())
        command.name = cmd_name
        _make_plain(command)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write names and descriptions without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(entry)) for name, entry in installed_commands().items()])


def _no_such_command(name: str, installed: list[str]) -> str:
    if name in COMMANDS:
        return f"lt {name} is not installed here: pip install '{COMMANDS[name].install}'"
    near = get_close_matches(name, {*installed, *COMMANDS}, n=1)
    hint = f"did you mean lt {near[0]}?" if near else "lt --help lists the commands"
    return f"lt {name}: there is no such command; {hint}"


def _make_plain(command: Any) -> None:
    """Keep rich out of the help of a command and of those below it."""
    command.rich_markup_mode = None
    for below in getattr(command, "commands", {}).values():
        _make_plain(below)


app = typer.Typer(
    name="lt",
    cls=LtGroup,
    help="Pre-train Llama-family language models: text in, Hugging Face safetensors out.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        for name, version in installed_packages().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


@app.callback()
def lt(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_versions, help="Show the installed packages of lt and exit."
    ),
) -> None:
    """Pre-train Llama-family language models: text in, Hugging Face safetensors out."""
