"""Typer app of a command with subcommands: paths may begin with `~`, and help shows whole summaries."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from lt_model.errors import ModelError
from lt_model.home_folder import expand_home


class CommandApp(typer.Typer):
    """Typer app without completion; exceptions reach the caller.

    Arguments and options of type Path are expanded (`lt_model.home_folder`). One of type str that takes a path, perhaps
    among other things, says so with `parser=path_text`.
    """

    def __init__(self, **options: Any) -> None:
        defaults = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
        super().__init__(**{**defaults, "short_help": options.get("help"), **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        """Return a decorator that adds a command; its summary is the first line of the docstring."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            summary = (inspect.getdoc(function) or "").partition("\n")[0]
            register = super(CommandApp, self).command(name, cls=_Command, short_help=summary, **options)
            return register(function)

        return add


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        """Run the command with expanded paths."""
        ctx.params = {name: _expand(value) for name, value in ctx.params.items()}
        return super().invoke(ctx)


def _expand(value: object) -> object:
    if isinstance(value, Path):
        return Path(expand_home(str(value)))
    return [_expand(item) for item in value] if isinstance(value, list | tuple) else value


def path_text(text: str) -> str:
    """Parse text that is a path, or something else that does not begin with `~`."""
    try:
        return expand_home(text)
    except ModelError as exc:
        raise typer.BadParameter(str(exc)) from None
