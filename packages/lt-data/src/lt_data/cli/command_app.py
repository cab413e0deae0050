"""Typer app of a command with subcommands: paths may begin with `~`, and help shows whole summaries."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lt_data.errors import DataError


class CommandApp(typer.Typer):
    """Typer app without completion; exceptions reach the caller.

    Arguments and options of type Path are expanded (`expand_home`). One of type str that takes a path, perhaps
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


def expand_home(path: str) -> str:
    """Return a path with a leading `~` or `~USER` replaced by the home folder.

    Raises:
        DataError: there is no such user, or the home folder is unknown.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise DataError(f"{path}: there is no home folder {user}; write ./{path} for a name that begins with ~")
    return expanded


def _expand(value: object) -> object:
    if isinstance(value, Path):
        return Path(expand_home(str(value)))
    return [_expand(item) for item in value] if isinstance(value, list | tuple) else value


def path_text(text: str) -> str:
    """Parse text that is a path, or something else that does not begin with `~`."""
    try:
        return expand_home(text)
    except DataError as exc:
        raise typer.BadParameter(str(exc)) from None


SourcesArgument = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE...", help="Files, folders, fsspec URLs or datasets.", parser=path_text),
]
StoreArgument = Annotated[
    str,
    typer.Argument(metavar="STORE", help="Folder of a token store, or its s3:// address.", parser=path_text),
]
