"""`lt train env`."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def env(
    recipe: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The recipe.")],
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one field.")] = None,
    sdk: Annotated[str, typer.Option(help="Release of the Neuron SDK that will read them; empty: the installed.")] = "",
    export: Annotated[bool, typer.Option("--export", help="Print lines for a shell.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the Neuron variables of a recipe, each with its reason; values of your own win, and are marked.

    Ranks set them by themselves: nothing has to be exported for a run.
    """
    from lt_trainer.recipe import load
    from lt_trainer_neuron.environment import check_environment, variables
    from lt_trainer_neuron.sdk import NEWEST, installed

    made = load(recipe, sets=sets or []).recipe
    here = installed().sdk
    found = variables(made, environ=os.environ, sdk=sdk or (here.release if here else NEWEST))
    check_environment(made, os.environ)
    if as_json:
        typer.echo(json.dumps([vars(item) for item in found], indent=1))
        return
    for item in found:
        if export:
            typer.echo(f"export {item.name}={shlex.quote(item.value)}")
            continue
        yours = f"  (yours; the recipe says {item.ours!r})" if item.overridden else ""
        typer.echo(f"{item.name}={item.value}{yours}\n    {item.reason}")
