"""`lt train env`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from lt_model.command_app import CommandApp
from lt_trainer.toml import format_value

app = CommandApp(no_args_is_help=False)


@app.command()
def env(
    recipe: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The recipe.")],
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one field.")] = None,
    export: Annotated[bool, typer.Option("--export", help="Print lines for a shell.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the Neuron variables of a recipe, each with its reason.

    Values that you have set yourself take precedence and are marked. Ranks set the variables themselves: nothing has to
    be exported for a run.
    """
    from lt_data.display.terminal import echo, quote_for_shell
    from lt_trainer.config.recipe import load
    from lt_trainer_neuron.environment import check_environment, list_variables

    loaded = load(recipe, overrides=sets or []).recipe
    variables = list_variables(loaded, environ=os.environ)
    check_environment(loaded, os.environ)
    if as_json:
        typer.echo(json.dumps([vars(item) for item in variables], indent=1))
        return
    for item in variables:
        if export:
            echo(f"export {item.name}={quote_for_shell(item.value)}")
            continue
        note = f"  (yours; the recipe says {format_value(item.recipe_value)})" if item.is_overridden else ""
        echo(f"{item.name}={item.value}{note}\n    {item.reason}")
